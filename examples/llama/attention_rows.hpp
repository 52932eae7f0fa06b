// SPDX-License-Identifier: Apache-2.0
// What passes between a model and the memory of its attention.
#pragma once

#include <cstdint>
#include <functional>

namespace llama {

/// What some new tokens bring to the attention of a layer, dense: queries [n, num_qo_heads,
/// head_dim], keys and values [n, num_kv_heads, head_dim]; queries and keys rotated to their
/// positions, keys as they were before, too. Both forms of keys are the same in layers that do not
/// rotate. In f32, in the memory of the processor that the model is computed on.
struct Projected {
  const float* query = nullptr;
  const float* key = nullptr;
  const float* value = nullptr;
  const float* pre_rope_key = nullptr;
};
/// The attention of one layer over some new tokens; writes out [n, num_qo_heads, head_dim], in the
/// same memory.
using Attention = std::function<void(int layer, const Projected& rows, float* out)>;

}  // namespace llama
