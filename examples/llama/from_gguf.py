#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a Hugging Face folder, as lowrankkv-llama reads it, of a GGUF file.

usage: from_gguf.py MODEL.gguf FOLDER

Writes config.json, generation_config.json, model.safetensors (f16) and tokenizer.json. Known are the architectures
llama, qwen2 and qwen3, with a byte-level BPE tokenizer whose cut into words is one of those below; anything else is
refused by name. Packages: gguf, numpy, safetensors, tokenizers.
"""
import argparse
import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# architecture of the file -> (model_type, architectures)
ARCHITECTURES = {"llama": ("llama", "LlamaForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM"),
                 "qwen3": ("qwen3", "Qwen3ForCausalLM")}
OF_LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OF_MODEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight"}
QWEN2_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")
LLAMA3_WORDS = QWEN2_WORDS.replace(r"\p{N}| ", r"\p{N}{1,3}| ")


class Refused(Exception):
    """The file has something that the folder could not say."""


def words_of(name: str):
    """Normalizer, pre-tokenizer and ignore_merges of tokenizer.ggml.pre."""
    def cut(pattern: str):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    known = {"gpt-2": (None, gpt2, False),
             "smollm": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), False),
             "qwen2": (normalizers.NFC(), cut(QWEN2_WORDS), False),
             "llama-bpe": (None, cut(LLAMA3_WORDS), True)}
    if name not in known:
        raise Refused(f"tokenizer.ggml.pre '{name}' is none of {', '.join(known)}")
    return known[name]


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Files of architecture llama interleave the two halves that a rotation turns; a folder keeps them apart."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def name_of(name: str) -> str:
    if name in OF_MODEL:
        return OF_MODEL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in OF_LAYER:
        return f"model.layers.{parts[1]}.{OF_LAYER[parts[2]]}.{parts[3]}"
    raise Refused(f"tensor '{name}' has no place in a folder")


def write_weights(reader: GGUFReader, meta: dict, out: pathlib.Path) -> set:
    architecture = meta["general.architecture"]
    tensors = {}
    for number, tensor in enumerate(reader.tensors):
        rows = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if architecture == "llama" and ".attn_q." in tensor.name:
            rows = halves_apart(rows, meta["llama.attention.head_count"])
        if architecture == "llama" and ".attn_k." in tensor.name:
            rows = halves_apart(rows, meta["llama.attention.head_count_kv"])
        if np.abs(rows).max() > np.finfo(np.float16).max:
            raise Refused(f"tensor '{tensor.name}': {np.abs(rows).max()} is beyond f16's {np.finfo(np.float16).max}")
        tensors[name_of(tensor.name)] = np.ascontiguousarray(rows.astype(np.float16))
        if number % 50 == 49:
            print(f"{number + 1} of {len(reader.tensors)} tensors", file=sys.stderr)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return set(tensors)


def write_config(meta: dict, names: set, out: pathlib.Path) -> None:
    architecture = meta["general.architecture"]
    model_type, class_name = ARCHITECTURES[architecture]

    def get(key: str):
        return meta[f"{architecture}.{key}"]

    scaling = [key for key in meta if key.startswith(f"{architecture}.rope.scaling.")]
    if scaling and meta.get(f"{architecture}.rope.scaling.type") != "none":
        raise Refused(f"{scaling[0]}: scaled rotary embeddings are not converted")
    heads, width = get("attention.head_count"), get("embedding_length")
    head_dim = meta.get(f"{architecture}.attention.key_length", meta.get(f"{architecture}.rope.dimension_count"))
    ids = {f"{name}_token_id": int(meta[f"tokenizer.ggml.{key}_token_id"])
           for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
           if f"tokenizer.ggml.{key}_token_id" in meta}
    config = {"architectures": [class_name], "model_type": model_type, "hidden_act": "silu", "hidden_size": width,
              "intermediate_size": get("feed_forward_length"), "num_hidden_layers": get("block_count"),
              "num_attention_heads": heads, "num_key_value_heads": get("attention.head_count_kv"),
              "head_dim": head_dim or width // heads, "max_position_embeddings": get("context_length"),
              "vocab_size": len(meta["tokenizer.ggml.tokens"]),
              "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
              "rope_theta": float(get("rope.freq_base")), "rope_scaling": None,
              "tie_word_embeddings": "lm_head.weight" not in names, "torch_dtype": "float16", **ids}
    if architecture != "qwen2":
        config.update(attention_bias=any(name.endswith("q_proj.bias") for name in names))
    config.update({"mlp_bias": False} if architecture == "llama" else {"use_sliding_window": False})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def write_tokenizer(meta: dict, out: pathlib.Path) -> None:
    if meta["tokenizer.ggml.model"] != "gpt2":
        raise Refused(f"tokenizer.ggml.model '{meta['tokenizer.ggml.model']}' is not byte-level BPE (gpt2)")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    normalizer, pre_tokenizer, ignore_merges = words_of(meta["tokenizer.ggml.pre"])
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
                                     ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    control, user_defined = 3, 4
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)
                          for token, kind in zip(tokens, kinds) if kind == user_defined])
    tokenizer.save(str(out / "tokenizer.json"))
    named = {f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
             for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
             if f"tokenizer.ggml.{key}_token_id" in meta}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
              "clean_up_tokenization_spaces": False, "chat_template": meta.get("tokenizer.chat_template"), **named}
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    reader = GGUFReader(args.gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    try:
        if meta["general.architecture"] not in ARCHITECTURES:
            raise Refused(f"general.architecture '{meta['general.architecture']}' is none of "
                          f"{', '.join(ARCHITECTURES)}")
        words_of(meta.get("tokenizer.ggml.pre", ""))
        args.folder.mkdir(parents=True, exist_ok=True)
        write_tokenizer(meta, args.folder)
        write_config(meta, write_weights(reader, meta, args.folder), args.folder)
    except Refused as refused:
        sys.exit(f"{args.gguf}: {refused}")


if __name__ == "__main__":
    main()
