// SPDX-License-Identifier: Apache-2.0
// lowrankkv_c.h over LayerStack: add a preset to open_stack() for another method.
#include "lowrankkv_c.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/lowrankkv.hpp"
#include "lowrankkv_c_support.hpp"

namespace {

using namespace lowrankkv_c;

}  // namespace

/// The layers of a model, whatever their method.
struct lowrankkv_cache : lowrankkv_c::CacheViews {
  using CacheViews::CacheViews;
  virtual ~lowrankkv_cache() = default;
  virtual void create(SequenceId seq) = 0;
  virtual void erase(SequenceId seq) = 0;
  virtual void fork(SequenceId source, SequenceId target) = 0;
  virtual TruncateResult truncate(SequenceId seq, std::int64_t length) = 0;
  virtual void remove(SequenceId seq, std::int64_t first, std::int64_t count) = 0;
  virtual void shift(SequenceId seq, std::int64_t first, std::int64_t delta) = 0;
  virtual void divide(SequenceId seq, std::int64_t first, std::int64_t count,
                      std::int64_t divisor) = 0;
  virtual std::int64_t position(SequenceId seq, std::int64_t token) const = 0;
  virtual std::int64_t num_tokens(SequenceId seq) const = 0;
  virtual void ingest(int layer, SequenceId seq, const KeyView& key, const ValueView& value,
                      const QueryView& queries) = 0;
  virtual void prefill(int layer, SequenceId seq, const QueryView& query, const KeyView& key,
                       const ValueView& value, const OutputView& out, const LseView& lse) = 0;
  virtual void append(int layer, Sequences seqs, const KeyView& key, const ValueView& value) = 0;
  virtual void attend(int layer, Sequences seqs, const QueryView& query, const OutputView& out,
                      const LseView& lse) = 0;
  virtual void maintain(Sequences seqs) = 0;
  virtual void reconstruct(int layer, SequenceId seq, std::int64_t first, const KeyTargetView& key,
                           const ValueTargetView& value) const = 0;
  virtual std::size_t save_bytes(SequenceId seq) const = 0;
  virtual std::size_t save(SequenceId seq, std::span<std::byte> buffer) const = 0;
  virtual void load(SequenceId seq, std::span<const std::byte> saved) = 0;
  virtual MemoryUsage memory(const SequenceId* seq) const = 0;
};

namespace {

template <class Cache>
class StackOf final : public lowrankkv_cache {
 public:
  StackOf(const std::vector<CacheConfig>& configs, std::vector<LayerBasis> bases,
          const typename Cache::PolicySet& policies)
      : lowrankkv_cache(configs.front().shape), stack_(configs, std::move(bases), policies) {}
  void create(SequenceId seq) override { stack_.create(seq); }
  void erase(SequenceId seq) override { stack_.erase(seq); }
  void fork(SequenceId source, SequenceId target) override { stack_.fork(source, target); }
  TruncateResult truncate(SequenceId seq, std::int64_t length) override {
    return stack_.truncate(seq, length);
  }
  void remove(SequenceId seq, std::int64_t first, std::int64_t count) override {
    stack_.remove(seq, first, count);
  }
  void shift(SequenceId seq, std::int64_t first, std::int64_t delta) override {
    stack_.shift_positions(seq, first, delta);
  }
  void divide(SequenceId seq, std::int64_t first, std::int64_t count,
              std::int64_t divisor) override {
    stack_.divide_positions(seq, first, count, divisor);
  }
  std::int64_t position(SequenceId seq, std::int64_t token) const override {
    return stack_.position(seq, token);
  }
  std::int64_t num_tokens(SequenceId seq) const override { return stack_.num_tokens(seq); }
  void ingest(int layer, SequenceId seq, const KeyView& key, const ValueView& value,
              const QueryView& queries) override {
    at(layer).ingest(seq, key, value, queries);
  }
  void prefill(int layer, SequenceId seq, const QueryView& query, const KeyView& key,
               const ValueView& value, const OutputView& out, const LseView& lse) override {
    at(layer).prefill(seq, query, key, value, out, lse);
  }
  void append(int layer, Sequences seqs, const KeyView& key, const ValueView& value) override {
    at(layer).append(seqs, key, value);
  }
  void attend(int layer, Sequences seqs, const QueryView& query, const OutputView& out,
              const LseView& lse) override {
    at(layer).attend(seqs, query, out, lse);
  }
  void maintain(Sequences seqs) override { stack_.maintain(seqs); }
  void reconstruct(int layer, SequenceId seq, std::int64_t first, const KeyTargetView& key,
                   const ValueTargetView& value) const override {
    check_layer(stack_, layer);
    stack_.layer(layer).reconstruct(seq, first, key, value);
  }
  std::size_t save_bytes(SequenceId seq) const override { return stack_.save_bytes(seq); }
  std::size_t save(SequenceId seq, std::span<std::byte> buffer) const override {
    return stack_.save(seq, buffer);
  }
  void load(SequenceId seq, std::span<const std::byte> saved) override { stack_.load(seq, saved); }
  MemoryUsage memory(const SequenceId* seq) const override {
    return seq == nullptr ? stack_.memory() : stack_.memory(*seq);
  }

 private:
  Cache& at(int layer) {
    check_layer(stack_, layer);
    return stack_.layer(layer);
  }
  LayerStack<Cache> stack_;
};

std::unique_ptr<lowrankkv_cache> open_stack(const lowrankkv_config& wanted) {
  need(wanted.method != nullptr, "method");
  if (wanted.num_layers < 1)
    throw ShapeError("num_layers: " + std::to_string(wanted.num_layers) + ", at least 1 needed");
  CacheConfig config{.shape = {wanted.num_qo_heads, wanted.num_kv_heads, wanted.head_dim},
                     .max_sequences = wanted.max_sequences,
                     .max_tokens = wanted.max_tokens};
  config.num_threads = wanted.threads;
  if (wanted.keys < 0 || wanted.keys > 2)
    throw ValueError("keys: " + std::to_string(wanted.keys) + ", 0 to 2 expected");
  if (wanted.keys != LOWRANKKV_ROTATED) {
    config.rope.keys = Rope::pre;
    config.rope.pairing = wanted.keys == LOWRANKKV_UNROTATED_PAIRS ? RopePairing::interleaved
                                                                   : RopePairing::half_split;
    config.rope.theta = wanted.rope_theta;
  }
  const std::string method = wanted.method;
  if (method == "FullKV")
    return std::make_unique<StackOf<FullKV<>>>(
        std::vector{config}, std::vector<LayerBasis>(static_cast<std::size_t>(wanted.num_layers)),
        FullKV<>::PolicySet{});
  if (method != "OjaKV" && method != "Budgeted")
    throw ValueError("method: " + method + ", one of FullKV, OjaKV, Budgeted expected");
  need(wanted.bases != nullptr, "bases");
  const std::vector<calibrate::LayerMoments> layers =
      calibrate::load_moments(wanted.bases, config.shape, wanted.num_layers);
  const RopeConfig& rope = layers.front().rope();
  if (rope.keys != config.rope.keys ||
      (rope.keys == Rope::pre && rope.pairing != config.rope.pairing))
    throw ValueError("keys: " + std::to_string(wanted.keys) + ", the bundle is of others");
  config.rope = rope;
  if (method == "Budgeted") {
    calibrate::BudgetOptions options;
    options.ratio = wanted.ratio;
    options.context = wanted.max_tokens;
    const calibrate::BudgetedModel model = calibrate::budgeted(layers, options);
    return std::make_unique<StackOf<Budgeted<>>>(model.configs(config), model.bases,
                                                 model.policies);
  }
  std::vector<LayerBasis> bases;
  for (const calibrate::LayerMoments& layer : layers)
    bases.push_back(layer.basis({.key_ratio = wanted.ratio, .value_ratio = wanted.ratio}));
  return std::make_unique<StackOf<OjaKV<>>>(std::vector{config}, std::move(bases),
                                            OjaKV<>::PolicySet{});
}

}  // namespace

extern "C" {

uint32_t lowrankkv_abi_version(void) { return LOWRANKKV_ABI_VERSION; }
const char* lowrankkv_last_error(void) { return last_error.c_str(); }

lowrankkv_status lowrankkv_open(const lowrankkv_config* config, lowrankkv_cache** cache) {
  return guarded([&] {
    need(config != nullptr, "config");
    need(cache != nullptr, "cache");
    check_size("config", config->size, sizeof(lowrankkv_config), sizeof(lowrankkv_config));
    *cache = open_stack(*config).release();
  });
}
void lowrankkv_close(lowrankkv_cache* cache) { delete cache; }

lowrankkv_status lowrankkv_create(lowrankkv_cache* cache, int64_t seq) {
  return guarded([&] { live(cache).create(seq); });
}
lowrankkv_status lowrankkv_erase(lowrankkv_cache* cache, int64_t seq) {
  return guarded([&] { live(cache).erase(seq); });
}
lowrankkv_status lowrankkv_fork(lowrankkv_cache* cache, int64_t source, int64_t target) {
  return guarded([&] { live(cache).fork(source, target); });
}
lowrankkv_status lowrankkv_truncate(lowrankkv_cache* cache, int64_t seq, int64_t length,
                                    int32_t* exact) {
  return guarded([&] {
    const TruncateResult result = live(cache).truncate(seq, length);
    if (exact != nullptr) *exact = result == TruncateResult::exact ? 1 : 0;
  });
}
lowrankkv_status lowrankkv_remove(lowrankkv_cache* cache, int64_t seq, int64_t first,
                                  int64_t count) {
  return guarded([&] { live(cache).remove(seq, first, count); });
}
lowrankkv_status lowrankkv_shift(lowrankkv_cache* cache, int64_t seq, int64_t first,
                                 int64_t delta) {
  return guarded([&] { live(cache).shift(seq, first, delta); });
}
lowrankkv_status lowrankkv_divide(lowrankkv_cache* cache, int64_t seq, int64_t first, int64_t count,
                                  int64_t divisor) {
  return guarded([&] { live(cache).divide(seq, first, count, divisor); });
}
lowrankkv_status lowrankkv_position(const lowrankkv_cache* cache, int64_t seq, int64_t token,
                                    int64_t* position) {
  return guarded([&] {
    need(position != nullptr, "position");
    *position = live(cache).position(seq, token);
  });
}
lowrankkv_status lowrankkv_num_tokens(const lowrankkv_cache* cache, int64_t seq, int64_t* tokens) {
  return guarded([&] {
    need(tokens != nullptr, "tokens");
    *tokens = live(cache).num_tokens(seq);
  });
}
lowrankkv_status lowrankkv_ingest(lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                  const lowrankkv_rows* keys, const lowrankkv_rows* values,
                                  const lowrankkv_rows* queries) {
  return guarded([&] {
    live(cache).ingest(layer, seq, live(cache).keys(keys), live(cache).values(values),
                       queries == nullptr ? QueryView{} : live(cache).queries(queries));
  });
}
lowrankkv_status lowrankkv_prefill(lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                   const lowrankkv_rows* queries, const lowrankkv_rows* keys,
                                   const lowrankkv_rows* values, float* out, float* lse) {
  return guarded([&] {
    const KeyView key = live(cache).keys(keys);
    live(cache).prefill(layer, seq, live(cache).queries(queries), key, live(cache).values(values),
                        live(cache).outputs(out, key.num_tokens),
                        live(cache).sums(lse, key.num_tokens));
  });
}
lowrankkv_status lowrankkv_append(lowrankkv_cache* cache, int32_t layer, const int64_t* seqs,
                                  size_t count, const lowrankkv_rows* keys,
                                  const lowrankkv_rows* values) {
  return guarded([&] {
    live(cache).append(layer, sequences(seqs, count), live(cache).keys(keys),
                       live(cache).values(values));
  });
}
lowrankkv_status lowrankkv_attend(lowrankkv_cache* cache, int32_t layer, const int64_t* seqs,
                                  size_t count, const lowrankkv_rows* queries, float* out,
                                  float* lse) {
  return guarded([&] {
    const QueryView query = live(cache).queries(queries);
    live(cache).attend(layer, sequences(seqs, count), query,
                       live(cache).outputs(out, query.num_tokens),
                       live(cache).sums(lse, query.num_tokens));
  });
}
lowrankkv_status lowrankkv_maintain(lowrankkv_cache* cache, const int64_t* seqs, size_t count) {
  return guarded([&] { live(cache).maintain(sequences(seqs, count)); });
}
lowrankkv_status lowrankkv_reconstruct(const lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                       int64_t first, int64_t count, float* keys, float* values) {
  return guarded([&] {
    live(cache).reconstruct(
        layer, seq, first,
        {keys, count, live(cache).shape.num_kv_heads, live(cache).shape.head_dim},
        {values, count, live(cache).shape.num_kv_heads, live(cache).shape.head_dim});
  });
}
lowrankkv_status lowrankkv_save(const lowrankkv_cache* cache, int64_t seq, void* buffer,
                                size_t* bytes) {
  return guarded([&] {
    need(bytes != nullptr, "bytes");
    *bytes = buffer == nullptr ? live(cache).save_bytes(seq)
                               : live(cache).save(seq, {static_cast<std::byte*>(buffer), *bytes});
  });
}
lowrankkv_status lowrankkv_load(lowrankkv_cache* cache, int64_t seq, const void* buffer,
                                size_t bytes) {
  return guarded([&] {
    need(buffer != nullptr, "buffer");
    live(cache).load(seq, {static_cast<const std::byte*>(buffer), bytes});
  });
}
lowrankkv_status lowrankkv_memory_of(const lowrankkv_cache* cache, const int64_t* seq,
                                     lowrankkv_memory* memory) {
  return guarded([&] {
    need(memory != nullptr, "memory");
    check_size("memory", memory->size, sizeof memory->size, sizeof(lowrankkv_memory));
    give(memory_of(live(cache).memory(seq)), memory);
  });
}

}  // extern "C"
