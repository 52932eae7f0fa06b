// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/stored_rows.cuh  StoredCalls: reconstruct() and row_states().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/cache/reconstruct_waiting.cuh"
#include "lowrankkv/cuda/decode/reconstruct.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/layer/row_states.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

template <class Layer>
void StoredCalls<Layer>::reconstruct(const Layer& layer, SequenceId seq, std::int64_t first,
                                     const KeyTargetView& key, const ValueTargetView& value,
                                     cudaStream_t stream) {
  const DeviceScope on("reconstruct", layer.state.device(), stream);
  refuse_capture("reconstruct", stream);
  const CacheShape& shape = layer.config.shape;
  const int slot = layer.sequences.find(seq);
  ::lowrankkv::detail::check_rows("key", key, key.num_tokens, shape.num_kv_heads, shape.head_dim);
  ::lowrankkv::detail::check_rows("value", value, key.num_tokens, shape.num_kv_heads,
                                  shape.head_dim);
  const std::int64_t tokens = layer.tokens_of(slot), count = key.num_tokens;
  if (first < 0 || first > tokens || count > tokens - first) {
    ::lowrankkv::detail::fail<ShapeError>("reconstruct: ", count, " tokens from position ", first,
                                          ", sequence has ", tokens, " tokens");
  }
  const std::int64_t in_lists = layer.state.sequence(slot).num_tokens;
  const std::int64_t stored = (std::clamp)(in_lists - first, std::int64_t{0}, count);
  const DeviceTarget keys = device_target(key), values = device_target(value);
  if (stored > 0) {
    const TokenRange range = token_range(layer.state, slot, first, stored);
    reconstruct_rows<Layer::coded_groups, Layer::joins>(layer.state, slot, range,
                                                        Layer::Rows::drops, keys, values, stream);
  }
  if (count > stored) {
    const OpenPrompt& waiting = layer.prompts.of(slot);
    reconstruct_waiting(layer.config, waiting, first + stored - in_lists, stored, count - stored,
                        keys, values, stream);
  }
}
template <class Layer>
void StoredCalls<Layer>::row_states(const Layer& layer, SequenceId seq, int kv_head,
                                    std::int64_t first, std::span<RowState> states,
                                    cudaStream_t stream) {
  const DeviceScope on("row_states", layer.state.device(), stream);
  refuse_capture("row_states", stream);
  const int slot = layer.sequences.find(seq);
  read_row_states(layer.state, slot, layer.tokens_of(slot), kv_head, first, states, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
