#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the example engine's logits and greedy ids with those of the package `transformers`, in f32.

usage: against_transformers.py MODEL_LOGITS [--tolerance 2e-3] [--folder MODEL --text FILE]...

For every family that the engine reads, tiny models with random weights are made: heads whose head_dim is not
hidden_size / num_attention_heads, groups of query heads, tied and separate heads, biases, layers without a rotary
embedding, scaled frequencies, f16 and bf16 weights, and files that leave out what has a default. With --folder the
tiny models are left out, and a model's own folder is compared on the beginning of each text. Exits with 77, which ctest
counts as skipped, where torch or transformers cannot be imported.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

try:
    import numpy as np
    import torch
    import transformers
except ImportError as error:
    print(f"{error}: logits are not compared with those of transformers.")
    sys.exit(77)

SMALL = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OWN_DIM = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12}  # hidden_size / num_attention_heads
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
# name, model_type, members of the configuration, those that the file then leaves out, type of the weights
FORMS = [
    ("llama", "llama", {"tie_word_embeddings": True}, (), "float32"),
    ("llama, biases, Llama-3 frequencies, a separate head", "llama",
     {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "rope_parameters": LLAMA3}, (), "float32"),
    ("llama, linear frequencies, bf16", "llama",
     {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}, (), "bfloat16"),
    ("mistral", "mistral", {"sliding_window": None, "tie_word_embeddings": False}, (), "float32"),
    ("qwen2, f16", "qwen2", {"tie_word_embeddings": True}, (), "float16"),
    ("qwen2, a separate head", "qwen2", OWN_DIM | {"tie_word_embeddings": False}, ("head_dim",), "float32"),
    ("qwen3", "qwen3", {"tie_word_embeddings": True}, (), "float32"),
    ("qwen3, biases, a separate head", "qwen3", {"attention_bias": True, "tie_word_embeddings": False}, (), "float32"),
    ("qwen3, head_dim left out", "qwen3", {"head_dim": 128}, ("head_dim", "tie_word_embeddings"), "float32"),
    ("smollm3", "smollm3", {}, ("tie_word_embeddings", "no_rope_layers", "layer_types", "rope_parameters"), "float32"),
    ("smollm3, every second layer, a separate head", "smollm3",
     {"no_rope_layer_interval": 2, "tie_word_embeddings": False}, ("no_rope_layers",), "float32"),
    ("smollm3, layers named, biases", "smollm3",
     OWN_DIM | {"no_rope_layers": [0, 1, 0, 0, 1], "attention_bias": True, "mlp_bias": True}, ("head_dim",), "float32"),
]


def make_folder(model_type: str, members: dict, left_out: tuple, kind: str, folder: pathlib.Path) -> None:
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | members))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():  # norms and biases begin as ones and zeros
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.3)
    model.to(getattr(torch, kind)).save_pretrained(folder)
    path = folder / "config.json"
    file = json.loads(path.read_text())
    for member in left_out:
        file.pop(member, None)
    path.write_text(json.dumps(file))


def compare(name: str, program: str, folder: pathlib.Path, prompts: list, steps: int, tolerance: float,
            scratch: pathlib.Path) -> bool:
    (scratch / "prompts.json").write_text(json.dumps(prompts))
    run = subprocess.run([program, folder, scratch / "prompts.json", str(steps), scratch / "logits.f32"],
                         capture_output=True, text=True)
    if run.returncode != 0:
        print(f"{name}: {run.stderr.strip()}")
        return False
    greedy = json.loads(run.stdout)
    # eager: the attention that is written out in transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    vocabulary = model.config.vocab_size
    own = np.fromfile(scratch / "logits.f32", dtype=np.float32).reshape(-1, vocabulary)
    largest = size = 0.0
    equal = first = 0
    with torch.no_grad():
        for prompt, answer in zip(prompts, greedy, strict=True):
            # What the engine wrote is given, so that every step is of the same text.
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0].numpy()
            largest = max(largest, float(np.abs(own[first:first + len(prompt)] - logits[:len(prompt)]).max()))
            size = max(size, float(np.abs(logits).max()))
            equal += int((logits[len(prompt) - 1:].argmax(axis=1) == np.array(answer)).sum())
            first += len(prompt)
    assert first == len(own)
    count = steps * len(prompts)
    print(f"{name}: logits of {first} tokens up to {size:.1f}, largest difference {largest:.1e}; "
          f"{equal} of {count} greedy ids equal", flush=True)
    return largest < tolerance and equal == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--tolerance", type=float, default=2e-3, help="of logits, absolute")
    parser.add_argument("--folder", action="append", default=[], type=pathlib.Path)
    parser.add_argument("--text", action="append", default=[], type=pathlib.Path, help="texts for --folder")
    parser.add_argument("--tokens", type=int, default=192, help="of each text")
    parser.add_argument("--steps", type=int, default=32, help="greedy ids behind each prompt")
    args = parser.parse_args()
    if bool(args.folder) != bool(args.text):
        parser.error("--folder and --text need each other")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    good = True
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        rng = random.Random(3)
        prompts = [[1] + [rng.randrange(3, SMALL["vocab_size"]) for _ in range(length)] for length in (1, 40, 150)]
        for number, (name, model_type, members, left_out, kind) in enumerate([] if args.folder else FORMS):
            tiny = scratch / str(number)
            make_folder(model_type, members, left_out, kind, tiny)
            good = compare(name, args.program, tiny, prompts, args.steps, args.tolerance, scratch) and good
        for model in args.folder:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            own = [tokenizer(text.read_text()[:8 * args.tokens], add_special_tokens=False)["input_ids"][:args.tokens]
                   for text in args.text]
            good = compare(str(model), args.program, model, own, args.steps, args.tolerance, scratch) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
