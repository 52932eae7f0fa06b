#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A basis that is made elsewhere, here by numpy, for lowrankkv: principal axes of rows, layer by layer, head by head.

usage: pca_bundle.py ROWS.safetensors OUT.safetensors --num-qo-heads N [--centred]

ROWS has layers.i.key and layers.i.value, [n, num_kv_heads, head_dim], of every layer i from 0 on: rows as the cache
gets them. The keys' form is post-RoPE. Packages: numpy, safetensors.
"""
import argparse
import pathlib

import numpy as np
from safetensors.numpy import load_file

import bundle


def principal_axes(rows: np.ndarray, centred: bool) -> tuple:
    """Rows [n, D] -> axes [D, D] with the most energetic first, energies [D], mean [D]."""
    rows = rows.astype(np.float64)
    mean = rows.mean(0) if centred else np.zeros(rows.shape[1])
    _, lengths, axes = np.linalg.svd(rows - mean, full_matrices=True)
    energies = np.zeros(rows.shape[1])
    energies[:len(lengths)] = lengths**2 / len(rows)
    return axes.T, energies, mean


def pca_bundle(rows: dict, num_qo_heads: int, centred: bool = False) -> bundle.Bundle:
    """The bundle of the principal axes of rows, by their tensors' names."""
    layers = sum(name.endswith(".key") for name in rows)
    parts = {}
    for part in ("key", "value"):
        found = [[principal_axes(rows[f"layers.{i}.{part}"][:, head], centred)
                  for head in range(rows[f"layers.{i}.{part}"].shape[1])] for i in range(layers)]
        parts[part] = [np.array([[head[index] for head in layer] for layer in found]) for index in range(3)]
    return bundle.of_axes(parts["key"][0], parts["value"][0], num_qo_heads, parts["key"][1], parts["value"][1],
                          parts["key"][2], parts["value"][2], source="pca")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--num-qo-heads", type=int, required=True)
    parser.add_argument("--centred", action="store_true", help="take the rows' means off")
    args = parser.parse_args()
    made = pca_bundle(load_file(args.rows), args.num_qo_heads, args.centred)
    made.write(args.out)
    print(f"wrote {args.out}: {made.num_layers} layers, {made.num_kv_heads} KV heads of {made.head_dim} channels")


if __name__ == "__main__":
    main()
