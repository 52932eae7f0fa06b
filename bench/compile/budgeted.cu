// SPDX-License-Identifier: Apache-2.0
// What a program costs nvcc that uses a Budgeted cache for prompts and decode steps
// (bench/compile_time.py).
#include "backend.cuh"

void step(Budgeted<Gpu>& cache, const KeyView& key, const ValueView& value, const QueryView& query,
          const OutputView& out, cudaStream_t stream) {
  cache.prefill(0, query, key, value, out, {}, stream);
  cache.append(0, key, value, stream);
  cache.attend(0, query, out, {}, stream);
  cache.maintain(0, stream);
}
