// SPDX-License-Identifier: Apache-2.0
// What a source costs the host's compiler that calls a cache whose kernels are compiled elsewhere
// (lowrankkv_add_cuda_caches(); bench/compile_time.py).
#include "lowrankkv/cuda.hpp"

using namespace lowrankkv;

void step(LayerStack<Budgeted<Cuda>>& stack, const KeyView& key, const ValueView& value,
          const QueryView& query, const OutputView& out, cudaStream_t stream) {
  const SequenceId seq = 0;
  stack.layer(0).append(seq, key, value, stream);
  stack.layer(0).attend(seq, query, out, {}, stream);
  stack.maintain(seq, stream);
}
