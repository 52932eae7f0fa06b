// SPDX-License-Identifier: Apache-2.0
// lowrankkv_c_cuda.h over LayerStack: add a preset to open_stack(), and to the kernels that
// CMakeLists.txt has compiled, for another method.
#include "lowrankkv_c_cuda.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda_caches.hpp"
#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv_c_support.hpp"

namespace {

using namespace lowrankkv_c;

lowrankkv_status device_error(const std::exception& error) noexcept {
  return dynamic_cast<const DeviceError*>(&error) != nullptr ? LOWRANKKV_DEVICE_ERROR
                                                             : LOWRANKKV_OTHER_ERROR;
}

template <class Call>
lowrankkv_status run(Call&& call) noexcept {
  return guarded(call, device_error);
}

/// Prompt::continues, or complete.
Prompt prompt_of(std::int32_t more) {
  if (more != 0 && more != 1)
    throw ValueError("more: " + std::to_string(more) + ", 0 or 1 expected");
  return more == 1 ? Prompt::continues : Prompt::complete;
}

}  // namespace

/// The layers of a model, whatever their method.
struct lowrankkv_cuda_cache : lowrankkv_c::CacheViews {
  using CacheViews::CacheViews;
  virtual ~lowrankkv_cuda_cache() = default;
  virtual void create(SequenceId seq, cudaStream_t stream) = 0;
  virtual void erase(SequenceId seq, cudaStream_t stream) = 0;
  virtual void fork(SequenceId source, SequenceId target, cudaStream_t stream) = 0;
  virtual TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream) = 0;
  virtual void remove(SequenceId seq, std::int64_t first, std::int64_t count,
                      cudaStream_t stream) = 0;
  virtual std::int64_t num_tokens(SequenceId seq) const = 0;
  virtual void ingest(int layer, SequenceId seq, const KeyView& key, const ValueView& value,
                      Prompt prompt, cudaStream_t stream) = 0;
  virtual void prefill(int layer, SequenceId seq, const QueryView& query, const KeyView& key,
                       const ValueView& value, const OutputView& out, const LseView& lse,
                       Prompt prompt, cudaStream_t stream) = 0;
  virtual void append(int layer, Sequences seqs, const KeyView& key, const ValueView& value,
                      cudaStream_t stream) = 0;
  virtual void append_maintained(int layer, Sequences seqs, const KeyView& key,
                                 const ValueView& value, cudaStream_t stream) = 0;
  virtual void attend(int layer, Sequences seqs, const QueryView& query, const OutputView& out,
                      const LseView& lse, cudaStream_t stream) = 0;
  virtual void advance(Sequences seqs, int m) = 0;
  virtual void maintain(Sequences seqs, cudaStream_t stream) = 0;
  virtual std::size_t save_bytes(SequenceId seq) const = 0;
  virtual std::size_t save(SequenceId seq, std::span<std::byte> buffer,
                           cudaStream_t stream) const = 0;
  virtual void load(SequenceId seq, std::span<const std::byte> saved, cudaStream_t stream) = 0;
  virtual MemoryUsage memory(const SequenceId* seq) const = 0;
  virtual std::uint32_t faults() const = 0;
};

namespace {

template <class Cache>
class StackOf final : public lowrankkv_cuda_cache {
 public:
  StackOf(const std::vector<CacheConfig>& configs, std::vector<LayerBasis> bases,
          const typename Cache::PolicySet& policies)
      : lowrankkv_cuda_cache(configs.front().shape), stack_(configs, std::move(bases), policies) {}
  void create(SequenceId seq, cudaStream_t stream) override { stack_.create(seq, stream); }
  void erase(SequenceId seq, cudaStream_t stream) override { stack_.erase(seq, stream); }
  void fork(SequenceId source, SequenceId target, cudaStream_t stream) override {
    stack_.fork(source, target, stream);
  }
  TruncateResult truncate(SequenceId seq, std::int64_t length, cudaStream_t stream) override {
    return stack_.truncate(seq, length, stream);
  }
  void remove(SequenceId seq, std::int64_t first, std::int64_t count,
              cudaStream_t stream) override {
    stack_.remove(seq, first, count, stream);
  }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }
  void ingest(int layer, SequenceId seq, const KeyView& key, const ValueView& value, Prompt prompt,
              cudaStream_t stream) override {
    at(layer).ingest(seq, key, value, {}, prompt, stream);
  }
  void prefill(int layer, SequenceId seq, const QueryView& query, const KeyView& key,
               const ValueView& value, const OutputView& out, const LseView& lse, Prompt prompt,
               cudaStream_t stream) override {
    at(layer).prefill(seq, query, key, value, out, lse, prompt, stream);
  }
  void append(int layer, Sequences seqs, const KeyView& key, const ValueView& value,
              cudaStream_t stream) override {
    at(layer).append(seqs, key, value, stream);
  }
  void append_maintained(int layer, Sequences seqs, const KeyView& key, const ValueView& value,
                         cudaStream_t stream) override {
    at(layer).append_maintained(seqs, key, value, stream);
  }
  void attend(int layer, Sequences seqs, const QueryView& query, const OutputView& out,
              const LseView& lse, cudaStream_t stream) override {
    at(layer).attend(seqs, query, out, lse, stream);
  }
  void advance(Sequences seqs, int m) override { stack_.advance(seqs, m); }
  void maintain(Sequences seqs, cudaStream_t stream) override { stack_.maintain(seqs, stream); }
  std::size_t save_bytes(SequenceId seq) const override { return stack_.save_bytes(seq); }
  std::size_t save(SequenceId seq, std::span<std::byte> buffer,
                   cudaStream_t stream) const override {
    return stack_.save(seq, buffer, stream);
  }
  void load(SequenceId seq, std::span<const std::byte> saved, cudaStream_t stream) override {
    stack_.load(seq, saved, stream);
  }
  MemoryUsage memory(const SequenceId* seq) const override {
    return seq == nullptr ? stack_.memory() : stack_.memory(*seq);
  }
  std::uint32_t faults() const override {
    std::uint32_t rows = 0;
    for (int layer = 0; layer < stack_.num_layers(); ++layer) rows += stack_.layer(layer).faults();
    return rows;
  }

 private:
  Cache& at(int layer) {
    check_layer(stack_, layer);
    return stack_.layer(layer);
  }
  LayerStack<Cache> stack_;
};

std::unique_ptr<lowrankkv_cuda_cache> open_stack(const lowrankkv_cuda_config& wanted) {
  need(wanted.method != nullptr, "method");
  if (wanted.num_layers < 1)
    throw ShapeError("num_layers: " + std::to_string(wanted.num_layers) + ", at least 1 needed");
  CacheConfig config{.shape = {wanted.num_qo_heads, wanted.num_kv_heads, wanted.head_dim},
                     .max_sequences = wanted.max_sequences,
                     .max_tokens = wanted.max_tokens};
  config.prefill_chunk = wanted.prefill_chunk;
  config.num_pages = wanted.num_pages;
  if (wanted.max_query_tokens != 0) config.max_query_tokens = wanted.max_query_tokens;
  const std::string method = wanted.method;
  if (method == "FullKV")
    return std::make_unique<StackOf<FullOnGpu>>(
        std::vector{config}, std::vector<LayerBasis>(static_cast<std::size_t>(wanted.num_layers)),
        FullOnGpu::PolicySet{});
  if (method != "Budgeted")
    throw ValueError("method: " + method + ", one of FullKV, Budgeted expected");
  need(wanted.bundle != nullptr, "bundle");
  const std::vector<calibrate::LayerMoments> layers =
      calibrate::load_moments(wanted.bundle, config.shape, wanted.num_layers);
  config.rope = layers.front().rope();  // pre-RoPE keys are refused: the kernels are without them
  calibrate::BudgetOptions options;
  options.ratio = wanted.ratio;
  options.context = wanted.max_tokens;
  options.for_cuda();
  const calibrate::BudgetedModel model = calibrate::budgeted(layers, options);
  return std::make_unique<StackOf<BudgetedOnGpu>>(model.configs(config), model.bases,
                                                  model.policies);
}

cudaStream_t on(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

extern "C" {

uint32_t lowrankkv_cuda_abi_version(void) { return LOWRANKKV_CUDA_ABI_VERSION; }
const char* lowrankkv_cuda_last_error(void) { return last_error.c_str(); }

lowrankkv_status lowrankkv_cuda_open(const lowrankkv_cuda_config* config,
                                     lowrankkv_cuda_cache** cache) {
  return run([&] {
    need(config != nullptr, "config");
    need(cache != nullptr, "cache");
    check_size("config", config->size, sizeof(lowrankkv_cuda_config),
               sizeof(lowrankkv_cuda_config));
    if (config->abi_version != LOWRANKKV_CUDA_ABI_VERSION)
      throw ValueError("abi_version: caller " + std::to_string(config->abi_version) + ", library " +
                       std::to_string(LOWRANKKV_CUDA_ABI_VERSION));
    *cache = open_stack(*config).release();
  });
}
void lowrankkv_cuda_close(lowrankkv_cuda_cache* cache) { delete cache; }

lowrankkv_status lowrankkv_cuda_create(lowrankkv_cuda_cache* cache, int64_t seq, void* stream) {
  return run([&] { live(cache).create(seq, on(stream)); });
}
lowrankkv_status lowrankkv_cuda_erase(lowrankkv_cuda_cache* cache, int64_t seq, void* stream) {
  return run([&] { live(cache).erase(seq, on(stream)); });
}
lowrankkv_status lowrankkv_cuda_fork(lowrankkv_cuda_cache* cache, int64_t source, int64_t target,
                                     void* stream) {
  return run([&] { live(cache).fork(source, target, on(stream)); });
}
lowrankkv_status lowrankkv_cuda_truncate(lowrankkv_cuda_cache* cache, int64_t seq, int64_t length,
                                         int32_t* exact, void* stream) {
  return run([&] {
    const TruncateResult result = live(cache).truncate(seq, length, on(stream));
    if (exact != nullptr) *exact = result == TruncateResult::exact ? 1 : 0;
  });
}
lowrankkv_status lowrankkv_cuda_remove(lowrankkv_cuda_cache* cache, int64_t seq, int64_t first,
                                       int64_t count, void* stream) {
  return run([&] { live(cache).remove(seq, first, count, on(stream)); });
}
lowrankkv_status lowrankkv_cuda_num_tokens(const lowrankkv_cuda_cache* cache, int64_t seq,
                                           int64_t* tokens) {
  return run([&] {
    need(tokens != nullptr, "tokens");
    *tokens = live(cache).num_tokens(seq);
  });
}
lowrankkv_status lowrankkv_cuda_ingest(lowrankkv_cuda_cache* cache, int32_t layer, int64_t seq,
                                       const lowrankkv_rows* keys, const lowrankkv_rows* values,
                                       int32_t more, void* stream) {
  return run([&] {
    live(cache).ingest(layer, seq, live(cache).keys(keys), live(cache).values(values),
                       prompt_of(more), on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_prefill(lowrankkv_cuda_cache* cache, int32_t layer, int64_t seq,
                                        const lowrankkv_rows* queries, const lowrankkv_rows* keys,
                                        const lowrankkv_rows* values, float* out, float* lse,
                                        int32_t more, void* stream) {
  return run([&] {
    const KeyView key = live(cache).keys(keys);
    live(cache).prefill(layer, seq, live(cache).queries(queries), key, live(cache).values(values),
                        live(cache).outputs(out, key.num_tokens),
                        live(cache).sums(lse, key.num_tokens), prompt_of(more), on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_append(lowrankkv_cuda_cache* cache, int32_t layer,
                                       const int64_t* seqs, size_t count,
                                       const lowrankkv_rows* keys, const lowrankkv_rows* values,
                                       void* stream) {
  return run([&] {
    live(cache).append(layer, sequences(seqs, count), live(cache).keys(keys),
                       live(cache).values(values), on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_append_maintained(lowrankkv_cuda_cache* cache, int32_t layer,
                                                  const int64_t* seqs, size_t count,
                                                  const lowrankkv_rows* keys,
                                                  const lowrankkv_rows* values, void* stream) {
  return run([&] {
    live(cache).append_maintained(layer, sequences(seqs, count), live(cache).keys(keys),
                                  live(cache).values(values), on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_attend(lowrankkv_cuda_cache* cache, int32_t layer,
                                       const int64_t* seqs, size_t count,
                                       const lowrankkv_rows* queries, float* out, float* lse,
                                       void* stream) {
  return run([&] {
    const QueryView query = live(cache).queries(queries);
    live(cache).attend(layer, sequences(seqs, count), query,
                       live(cache).outputs(out, query.num_tokens),
                       live(cache).sums(lse, query.num_tokens), on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_advance(lowrankkv_cuda_cache* cache, const int64_t* seqs,
                                        size_t count, int32_t m) {
  return run([&] { live(cache).advance(sequences(seqs, count), m); });
}
lowrankkv_status lowrankkv_cuda_maintain(lowrankkv_cuda_cache* cache, const int64_t* seqs,
                                         size_t count, void* stream) {
  return run([&] { live(cache).maintain(sequences(seqs, count), on(stream)); });
}
lowrankkv_status lowrankkv_cuda_save(const lowrankkv_cuda_cache* cache, int64_t seq, void* buffer,
                                     size_t* bytes, void* stream) {
  return run([&] {
    need(bytes != nullptr, "bytes");
    *bytes = buffer == nullptr
                 ? live(cache).save_bytes(seq)
                 : live(cache).save(seq, {static_cast<std::byte*>(buffer), *bytes}, on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_load(lowrankkv_cuda_cache* cache, int64_t seq, const void* buffer,
                                     size_t bytes, void* stream) {
  return run([&] {
    need(buffer != nullptr, "buffer");
    live(cache).load(seq, {static_cast<const std::byte*>(buffer), bytes}, on(stream));
  });
}
lowrankkv_status lowrankkv_cuda_memory_of(const lowrankkv_cuda_cache* cache, const int64_t* seq,
                                          lowrankkv_memory* memory) {
  return run([&] {
    need(memory != nullptr, "memory");
    check_size("memory", memory->size, sizeof memory->size, sizeof(lowrankkv_memory));
    give(memory_of(live(cache).memory(seq)), memory);
  });
}
lowrankkv_status lowrankkv_cuda_faults(const lowrankkv_cuda_cache* cache, uint32_t* rows) {
  return run([&] {
    need(rows != nullptr, "rows");
    *rows = live(cache).faults();
  });
}

}  // extern "C"
