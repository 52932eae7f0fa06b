// SPDX-License-Identifier: Apache-2.0
/// @file core/online_softmax.hpp  Merging attention over disjoint sets of tokens, one query row at
/// a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Merges two normalised attention results over disjoint tokens: (out, lse) <- (out, lse) +
/// (other, other_lse).
///
/// out = (exp(lse) out + exp(other_lse) other) / (exp(lse) + exp(other_lse)); lse natural
/// logarithm. Associative and commutative up to rounding. An lse of -inf means no tokens; merging
/// two such results gives no tokens.
/// @param[in,out] out   [width] f32
/// @param[in,out] lse   one value
/// @param[in]     other [width] f32
/// Cost: 2 exponentials and 2 x width products.
inline void merge_attention(float* out, float& lse, const float* other, float other_lse,
                            int width) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  if (other_lse == none) return;  // do not read `other`: an empty part may hold 0 / 0
  if (lse == none) {
    std::copy(other, other + width, out);
    lse = other_lse;
    return;
  }
  const float top = lse > other_lse ? lse : other_lse;
  const float weight = std::exp(lse - top);
  const float other_weight = std::exp(other_lse - top);
  const float sum = weight + other_weight;
  for (int channel = 0; channel < width; ++channel) {
    out[channel] = (out[channel] * weight + other[channel] * other_weight) / sum;
  }
  lse = top + std::log(sum);
}

LOWRANKKV_NAMESPACE_END
