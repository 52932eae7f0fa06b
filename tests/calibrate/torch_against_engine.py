#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/python/calibrate_torch.py against the engine's `calibrate --metric combined`, on nano, the same text and
about as many tokens: moments and metrics of both forms of keys, and what the model loses with either.

usage: torch_against_engine.py LOWRANKKV_LLAMA SOURCE_FOLDER

Their windows, labels and spans differ, so sums of random rows are compared: shapes by the cosine between matrices,
sizes by traces. Skipped (77) without the packages torch and transformers."""
import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch  # noqa: F401
    import tqdm  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

engine, source = sys.argv[1], pathlib.Path(sys.argv[2])
sys.path.insert(0, str(source / "examples/python"))
from bundle import Bundle  # noqa: E402

import numpy as np  # noqa: E402

TOKENS = 60_000
faults = 0


def check(what: str, value: float, low: float, high: float) -> None:
    global faults
    if not low <= value <= high:
        faults += 1
        print(f"{what}: {value:.4f}, expected {low} to {high}")


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    model, text = source / "examples/data/nano", source / "examples/data/text/calibration_prose.txt"
    common = ["--model", model, "--text", text, "--tokens", str(TOKENS), "--window", "1024"]
    subprocess.run([engine, "calibrate", *common, "--metric", "combined", "--gradient-tokens", str(TOKENS), "--out",
                    folder / "engine_post", "--pre-rope-out", folder / "engine_pre"], check=True)
    subprocess.run([sys.executable, source / "examples/python/calibrate_torch.py", *common, "--device", "cpu", "--out",
                    folder / "torch_post", "--pre-rope-out", folder / "torch_pre"], check=True)
    # The engine takes both bundles, and loses as little with them as with its own.
    rises = []
    for name in ("engine", "torch"):
        table = folder / f"{name}.json"
        subprocess.run([engine, "bpb", "--model", model, "--text", source / "examples/data/text/prose.txt",
                        "--windows", "4", "--method", "FullKV,Budgeted,Budgeted+PreRoPE", "--ratio", "0.15", "--bases",
                        f"{folder / name}_post,{folder / name}_pre", "--json", table], check=True)
        bits = [next(iter(row["bits_per_byte"].values())) for row in json.loads(table.read_text())]
        rises.append([own / bits[0] - 1 for own in bits[1:]])
        print(name, "rise of the bits per byte:", rises[-1])
    for own, theirs in zip(*rises):
        check("rise of the bits per byte, engine's calibration less torch's", own - theirs, -0.01, 0.01)
    refused = subprocess.run([sys.executable, source / "examples/python/calibrate_torch.py", *common], text=True,
                             capture_output=True)
    if refused.returncode == 0 or "at least 1 bundle" not in refused.stderr:
        faults += 1
        print("without --out and --pre-rope-out:", refused.stderr)
    for form in ("post", "pre"):
        theirs, ours = (Bundle.read(folder / f"{name}_{form}") for name in ("engine", "torch"))
        for key in ("keys", "coded_metric", "num_layers", "num_kv_heads", "num_qo_heads", "head_dim"):
            if theirs.metadata[key] != ours.metadata[key]:
                faults += 1
                print(f"{form}: {key}: engine {theirs.metadata[key]}, torch {ours.metadata[key]}")
        if form == "pre":
            theirs_over_ours = theirs.tensors["rope.frequencies"] / ours.tensors["rope.frequencies"]
            check("frequencies", np.abs(theirs_over_ours - 1).max(), 0, 1e-12)
        lowest = {}
        for layer in range(ours.num_layers):
            for head in range(ours.num_kv_heads):
                pairs = {part: [one.moments(layer, part, head)[1] for one in (theirs, ours)]
                         for part in ("query", "key", "value", "coded_key", "coded_value")}
                pairs |= {"metric of " + part: [one.error_metric(layer, part, head) for one in (theirs, ours)]
                          for part in ("coded_key", "coded_value")}
                for name, (a, b) in pairs.items():
                    what = f"{form}, layer {layer}, head {head}, {name}"
                    cosine = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
                    metric = name.startswith("metric")
                    # A rotated query's second moment depends on where it is: windows put queries at other positions.
                    rotated = metric and form == "post" and name.endswith("key")
                    check(what + ", cosine", cosine, 0.6 if rotated else 0.93 if metric else 0.97, 1.0001)
                    check(what + ", trace", np.trace(b) / np.trace(a), *((0.6, 1.7) if metric else (0.9, 1.1)))
                    lowest[name] = min(lowest.get(name, 1.0), cosine)
        print(form, {name: round(float(value), 4) for name, value in lowest.items()})
sys.exit(1 if faults else 0)
