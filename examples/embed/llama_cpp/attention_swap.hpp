// SPDX-License-Identifier: Apache-2.0
// llama.cpp's attention, layer by layer, from outside: its scheduler shows every tensor of a step
// to a callback once it is computed.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "ggml.h"
#include "model.hpp"

/// Catches a layer's queries, keys and values, and writes attention's result over what the engine
/// computed.
class AttentionSwap {
 public:
  /// Told the rows of one layer; writes out [n, num_qo_heads, head_dim]. False: nothing was
  /// written, the engine's own stands.
  using OnLayer =
      std::function<bool(int layer, std::int64_t n, const llama::Projected& rows, float* out)>;

  AttentionSwap(const llama::Config& model, OnLayer on_layer, llama::StreamObserver on_stream = {})
      : model_(model), on_layer_(std::move(on_layer)), on_stream_(std::move(on_stream)) {}
  /// llama_context_params::cb_eval; `self` is its cb_eval_user_data.
  static bool eval(ggml_tensor* tensor, bool ask, void* self);
  /// Raises what a layer raised: exceptions do not cross the engine.
  void rethrow();
  /// Results written so far.
  std::int64_t replaced() const { return replaced_; }

 private:
  void take(ggml_tensor* tensor, int heads, std::vector<float>& rows) const;
  void attend(ggml_tensor* result, int layer);
  void observe(ggml_tensor* stream, int layer);

  const llama::Config& model_;
  OnLayer on_layer_;
  llama::StreamObserver on_stream_;
  std::vector<float> query_, key_, value_, out_;  // of the layer that is being computed
  std::int64_t replaced_ = 0;
  std::exception_ptr error_;
};
