#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A decode step of Llama-3.1-8B's shape in PyTorch: random weights in f16, a static cache that is full, one CUDA graph.

    peer_decode.py [--batch B] [--context N] [--steps S]

The peer of `lowrankkv-llama serve-bench --shape llama-3.1-8b`: the same products, scaled_dot_product_attention over all N
tokens with every backend that takes them, greedy choice of the next token. Prints milliseconds a step and tokens/s; the
fastest backend is the peer. Needs PyTorch 2.5 or later and a GPU.
"""
import argparse

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, WORDS = 4096, 14336, 32, 32, 8, 128, 128256


def rotate(x, cosines, sines):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Model:
    def __init__(self, batch, context):
        def weight(out, features):
            return torch.randn(out, features, device="cuda", dtype=torch.float16) / features**0.5

        self.embedding = weight(WORDS, HIDDEN)
        self.head = weight(WORDS, HIDDEN)
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.float16)
        self.layers = [(weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), weight(HIDDEN, HEADS * DIM), weight(2 * INNER, HIDDEN),
                        weight(HIDDEN, INNER)) for _ in range(LAYERS)]
        self.caches = [torch.randn(2, batch, KV_HEADS, context, DIM, device="cuda", dtype=torch.float16) for _ in range(LAYERS)]
        frequencies = 500000.0 ** (-torch.arange(0, DIM, 2, device="cuda") / DIM)
        self.cosines = torch.cos(frequencies * (context - 1)).half()
        self.sines = torch.sin(frequencies * (context - 1)).half()
        self.batch, self.place = batch, context - 1

    def step(self, ids):
        linear = torch.nn.functional.linear
        x = self.embedding[ids]
        for (projections, output, gate_up, down), cache in zip(self.layers, self.caches):
            rows = linear(torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5), projections)
            q, k, v = rows.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=-1)
            q = rotate(q.view(self.batch, HEADS, DIM), self.cosines, self.sines)
            cache[0, :, :, self.place] = rotate(k.view(self.batch, KV_HEADS, DIM), self.cosines, self.sines)
            cache[1, :, :, self.place] = v.view(self.batch, KV_HEADS, DIM)
            out = torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), cache[0], cache[1], enable_gqa=True)
            x = x + linear(out.reshape(self.batch, HEADS * DIM), output)
            gate, up = linear(torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5), gate_up).chunk(2, dim=-1)
            x = x + linear(torch.nn.functional.silu(gate) * up, down)
        logits = linear(torch.nn.functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5), self.head)
        return logits.argmax(dim=-1)


def measure(model, backend, steps):
    ids = torch.zeros(model.batch, device="cuda", dtype=torch.int64)
    with sdpa_kernel(backend), torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model.step(ids)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            following = model.step(ids)
    times = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        ids.copy_(following)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    print(torch.cuda.get_device_name(0), "PyTorch", torch.__version__)
    model = Model(options.batch, options.context)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
        try:
            ms = measure(model, backend, options.steps)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"{backend.name:20} batch {options.batch} context {options.context}: {str(error).splitlines()[0]}")
            continue
        print(f"{backend.name:20} batch {options.batch} context {options.context}: {ms:.3f} ms a step, {1e3 * options.batch / ms:.1f} tokens/s")


if __name__ == "__main__":
    main()
