// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/merge_states.cuh  Merges the partial attention states of shards, caches
/// that each hold a part of a sequence, into one output.
///
/// The state of a query on one shard is (M, L, A), over the shard's own tokens: M = max logit, L =
/// sum exp(logit - M), A = sum exp(logit - M) value. Shards merge as
///   M = max_i M_i, w_i = exp(M_i - M),
///   out = sum_i w_i A_i / sum_i w_i L_i, lse = M + log sum_i w_i L_i.
/// Over several GPUs that is one all-reduce of the maxima, then one of the sums of (w_i L_i, w_i
/// A_i). A shard that saw no token has M = -inf, L = 0, A = 0.
#pragma once

#include <cstdint>
#include <span>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/partial_attention.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

using ::lowrankkv::QueryTokens;  ///< cuda::QueryTokens names the same type
using ::lowrankkv::StateView;    ///< cuda::StateView names the same type

inline constexpr int kMaxShards = 64;  ///< states that one merge_states() call takes

namespace detail {

struct Shards {
  std::int32_t count = 0;
  StateView items[kMaxShards];
};

/// One block per (token, head).
template <class = void>
__global__ void merge_states_kernel(Shards shards, OutputView out, LseView lse) {
  const std::int64_t token = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y), heads = static_cast<int>(gridDim.y),
            dim = shards.items[0].head_dim;
  const std::int64_t row = token * heads + head;
  float top = -INFINITY, sum = 0.0F;
  for (int i = 0; i < shards.count; ++i) top = fmaxf(top, shards.items[i].maximum[row]);
  const auto weight = [&](int i) {
    return shards.items[i].maximum[row] > -INFINITY ? expf(shards.items[i].maximum[row] - top)
                                                    : 0.0F;
  };
  for (int i = 0; i < shards.count; ++i) sum = fmaf(weight(i), shards.items[i].sum[row], sum);
  for (int channel = static_cast<int>(threadIdx.x); channel < dim;
       channel += static_cast<int>(blockDim.x)) {
    float total = 0.0F;
    for (int i = 0; i < shards.count; ++i)
      total = fmaf(weight(i), shards.items[i].values[row * dim + channel], total);
    out.data[token * out.token_stride + head * out.head_stride + channel] =
        sum > 0.0F ? total / sum : 0.0F;
  }
  if (threadIdx.x == 0 && lse.data != nullptr)
    lse.data[token * lse.token_stride + head] = sum > 0.0F ? top + logf(sum) : -INFINITY;
}

}  // namespace detail

/// @brief Merges the states of shards, in their order, into outputs.
///
/// A query that saw no token on any shard gets a zero output and lse = -inf. Capturable; allocates
/// nothing.
/// @param out  [tokens, heads, head_dim]
/// @param lse  [tokens, heads], natural log, optional
/// @throws ShapeError unless all states and outputs have one shape, and if a state has null memory
/// @throws CapacityError for no state, or more than kMaxShards
inline void merge_states(std::span<const StateView> shards, const OutputView& out,
                         const LseView& lse = {}, cudaStream_t stream = nullptr) {
  using ::lowrankkv::detail::fail;
  if (shards.empty() || shards.size() > static_cast<std::size_t>(kMaxShards))
    fail<CapacityError>("merge_states: ", shards.size(), " states, 1 to ", kMaxShards, " expected");
  detail::Shards all;
  for (const StateView& shard : shards) {
    ::lowrankkv::detail::check_rows("out", out, shard.num_tokens, shard.num_heads, shard.head_dim);
    if (shard.values == nullptr || shard.maximum == nullptr || shard.sum == nullptr)
      fail<ShapeError>("merge_states: state ", all.count, " of ", shards.size(),
                       " has null memory");
    all.items[all.count++] = shard;
  }
  if (lse.data != nullptr) {
    ::lowrankkv::detail::check_equal("num_heads", "states", shards[0].num_heads, "lse",
                                     lse.num_heads);
    ::lowrankkv::detail::check_equal("num_tokens", "states", shards[0].num_tokens, "lse",
                                     lse.num_tokens);
  }
  if (out.num_tokens == 0) return;
  detail::merge_states_kernel<>
      <<<dim3(static_cast<unsigned>(out.num_tokens), static_cast<unsigned>(shards[0].num_heads)),
         128, 0, stream>>>(all, out, lse);
  check(cudaGetLastError(), "merge_states_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
