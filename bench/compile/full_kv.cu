// SPDX-License-Identifier: Apache-2.0
// What a program costs nvcc that appends to a FullKV cache and attends to it
// (bench/compile_time.py).
#include "backend.cuh"

void step(FullKV<Gpu>& cache, const KeyView& key, const ValueView& value, const QueryView& query,
          const OutputView& out, cudaStream_t stream) {
  cache.append(0, key, value, stream);
  cache.attend(0, query, out, {}, stream);
}
