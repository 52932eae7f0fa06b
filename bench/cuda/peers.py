# SPDX-License-Identifier: Apache-2.0
"""cuDNN's and FlashAttention's decode attention over f16 K and V, through PyTorch, for the shapes of attend.cu: medians of 20 replays of a CUDA graph, as there."""
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel


def measure(batch, kv_heads, tokens, query_heads=32, head_dim=128):
    query = torch.randn(batch, query_heads, 1, head_dim, device="cuda", dtype=torch.float16)
    key = torch.randn(batch, kv_heads, tokens, head_dim, device="cuda", dtype=torch.float16)
    value = torch.randn_like(key)
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            def attend():
                functional.scaled_dot_product_attention(query, key, value, enable_gqa=query_heads != kv_heads)

            for _ in range(3):
                attend()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                attend()
            times = []
            for i in range(25):
                start, end = torch.cuda.Event(True), torch.cuda.Event(True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if i >= 5:
                    times.append(start.elapsed_time(end))
        times.sort()
        print(f"{name} f16 b={batch} kv={kv_heads} n={tokens}: {times[10]:.4f} ms")


for shape in ((8, 8, 131072), (16, 8, 32768), (16, 32, 8192), (1, 8, 131072), (1, 8, 32768), (16, 32, 32768)):
    measure(*shape)
