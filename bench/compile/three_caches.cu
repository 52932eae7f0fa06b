// SPDX-License-Identifier: Apache-2.0
// What a program costs nvcc that uses FullKV, OjaKV and Budgeted for prompts and decode steps
// (bench/compile_time.py).
#include "backend.cuh"

template <class Cache>
void step(Cache& cache, const KeyView& key, const ValueView& value, const QueryView& query,
          const OutputView& out, cudaStream_t stream) {
  cache.prefill(0, query, key, value, out, {}, stream);
  cache.append(0, key, value, stream);
  cache.attend(0, query, out, {}, stream);
  cache.maintain(0, stream);
}

template void step(FullKV<Gpu>&, const KeyView&, const ValueView&, const QueryView&,
                   const OutputView&, cudaStream_t);
template void step(OjaKV<Gpu>&, const KeyView&, const ValueView&, const QueryView&,
                   const OutputView&, cudaStream_t);
template void step(Budgeted<Gpu>&, const KeyView&, const ValueView&, const QueryView&,
                   const OutputView&, cudaStream_t);
