#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a Llama-architecture model (config.json, model.safetensors, tokenizer.json) as a GGUF of float32 weights.

The engine's own converter knows the tokenizers of published models; this one is for models whose tokenizer is byte-level
BPE with one digit a piece. Needs the package gguf (in the engine's sources: gguf-py).
"""
import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np


def tensors(path):
    """Name and float32 array of every tensor of a safetensors file of bf16 or f32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "BF16":
            numbers = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            numbers = np.frombuffer(raw, np.float32)
        else:
            raise SystemExit(f"{name}: {entry['dtype']}, expected BF16 or F32")
        yield name, numbers.reshape(entry["shape"])


def in_pairs(weight, heads):
    """The rows of a projection whose rotary pairs are channels i and i + d/2, reordered so that they are 2 i and 2 i + 1."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(folder, out):
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = [f"[unused {i}]" for i in range(config["vocab_size"])]
    kinds = [gguf.TokenType.UNUSED] * len(pieces)
    for piece, index in tokenizer["model"]["vocab"].items():
        pieces[index], kinds[index] = piece, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        pieces[added["id"]], kinds[added["id"]] = added["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # the published tokenizer that splits text alike
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)

    for name, weight in tensors(folder / "model.safetensors"):
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", weight)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", weight)
        elif name == "lm_head.weight":
            writer.add_tensor("output.weight", weight)
        else:
            _, _, layer, rest = name.split(".", 3)
            kind = NAMES[rest.removesuffix(".weight")]
            if kind in ("attn_q", "attn_k"):
                weight = in_pairs(weight, heads if kind == "attn_q" else kv_heads)
            writer.add_tensor(f"blk.{layer}.{kind}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("to_gguf.py FOLDER OUT.gguf")
    main(*sys.argv[1:])
