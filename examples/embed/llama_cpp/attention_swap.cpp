// SPDX-License-Identifier: Apache-2.0
#include "attention_swap.hpp"

#include <cstdio>
#include <stdexcept>
#include <string>

#include "ggml-backend.h"

namespace {

/// What the engine calls a tensor that matters here.
struct Name {
  enum class Kind { none, query, key, value, result, stream } kind = Kind::none;
  int layer = 0;

  explicit Name(const ggml_tensor* tensor) {
    char text[16] = {};
    int read = 0;
    const char* all = ggml_get_name(tensor);
    if (std::sscanf(all, "%15[A-Za-z_]-%d%n", text, &layer, &read) != 2 || all[read] != '\0')
      return;  // views of a tensor have its name and more
    const std::string name = text;
    // Queries and keys have their name before their rotary embedding too.
    if (name == "Qcur" && tensor->op == GGML_OP_ROPE) kind = Kind::query;
    if (name == "Kcur" && tensor->op == GGML_OP_ROPE) kind = Kind::key;
    if (name == "Vcur") kind = Kind::value;
    if (name == "kqv_out") kind = Kind::result;
    if (name == "ffn_inp") kind = Kind::stream;
  }
};

}  // namespace

bool AttentionSwap::eval(ggml_tensor* tensor, bool ask, void* self) {
  AttentionSwap& swap = *static_cast<AttentionSwap*>(self);
  const Name name(tensor);
  if (ask)
    return name.kind != Name::Kind::none && (name.kind != Name::Kind::stream || swap.on_stream_);
  try {
    switch (name.kind) {
      case Name::Kind::query:
        swap.take(tensor, swap.model_.num_qo_heads, swap.query_);
        break;
      case Name::Kind::key:
        swap.take(tensor, swap.model_.num_kv_heads, swap.key_);
        break;
      case Name::Kind::value:
        swap.take(tensor, swap.model_.num_kv_heads, swap.value_);
        break;
      case Name::Kind::result:
        swap.attend(tensor, name.layer);
        break;
      case Name::Kind::stream:
        swap.observe(tensor, name.layer);
        break;
      case Name::Kind::none:
        break;
    }
    return true;
  } catch (...) {
    swap.error_ = std::current_exception();
    return false;  // the engine ends the step
  }
}

void AttentionSwap::rethrow() {
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

/// Rows [n, heads, head_dim] of [head_dim, heads, n] or [heads * head_dim, n], whatever its strides
/// and its device.
void AttentionSwap::take(ggml_tensor* tensor, int heads, std::vector<float>& rows) const {
  const std::int64_t width = model_.head_dim;
  const bool by_head = tensor->ne[0] == width && tensor->ne[1] == heads;
  if (tensor->type != GGML_TYPE_F32 || tensor->nb[0] != sizeof(float) ||
      (!by_head && tensor->ne[0] != width * heads)) {
    throw std::runtime_error(std::string(ggml_get_name(tensor)) + ": " +
                             ggml_type_name(tensor->type) + " [" + std::to_string(tensor->ne[0]) +
                             ", " + std::to_string(tensor->ne[1]) + "], expected f32 [" +
                             std::to_string(width) + ", " + std::to_string(heads) + ", n]");
  }
  const std::int64_t n = by_head ? tensor->ne[2] : tensor->ne[1];
  const std::size_t token_stride = by_head ? tensor->nb[2] : tensor->nb[1],
                    head_stride =
                        by_head ? tensor->nb[1] : static_cast<std::size_t>(width) * sizeof(float);
  rows.resize(static_cast<std::size_t>(n * heads * width));
  float* to = rows.data();
  for (std::int64_t token = 0; token < n; ++token) {
    for (int head = 0; head < heads; ++head, to += width) {
      ggml_backend_tensor_get(tensor, to,
                              static_cast<std::size_t>(token) * token_stride +
                                  static_cast<std::size_t>(head) * head_stride,
                              static_cast<std::size_t>(width) * sizeof(float));
    }
  }
}

void AttentionSwap::attend(ggml_tensor* result, int layer) {
  const std::int64_t row = static_cast<std::int64_t>(model_.num_qo_heads) * model_.head_dim;
  const std::int64_t n = static_cast<std::int64_t>(query_.size()) / row;
  if (result->type != GGML_TYPE_F32 || !ggml_is_contiguous(result) ||
      ggml_nelements(result) != n * row) {
    throw std::runtime_error(std::string(ggml_get_name(result)) + ": " +
                             std::to_string(ggml_nelements(result)) + " numbers, expected f32 of " +
                             std::to_string(n * row));
  }
  out_.resize(query_.size());
  if (!on_layer_(layer, n, {query_.data(), key_.data(), value_.data(), nullptr}, out_.data()))
    return;
  ggml_backend_tensor_set(result, out_.data(), 0, out_.size() * sizeof(float));
  ++replaced_;
}

/// Of the last layer only the rows whose logits were asked for: one of every window.
void AttentionSwap::observe(ggml_tensor* stream, int layer) {
  if (stream->type != GGML_TYPE_F32 || !ggml_is_contiguous(stream) ||
      stream->ne[0] != model_.hidden_size) {
    throw std::runtime_error(std::string(ggml_get_name(stream)) + ": rows of " +
                             std::to_string(stream->ne[0]) + " numbers, expected f32 of " +
                             std::to_string(model_.hidden_size));
  }
  std::vector<float> rows(static_cast<std::size_t>(ggml_nelements(stream)));
  ggml_backend_tensor_get(stream, rows.data(), 0, rows.size() * sizeof(float));
  on_stream_(layer, static_cast<std::int64_t>(rows.size()) / model_.hidden_size, rows.data());
}
