// SPDX-License-Identifier: Apache-2.0
// Prompts in chunks, and chunks in several calls: against float64, the CPU, and the same prompt in
// one call. What is refused meanwhile.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace prompts_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::Answer;
using support::DeviceCache;
using support::distance;
using support::effort;
using support::message_of;
using support::Method;
using support::Random;
using support::Settings;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;
using HeavyCodes =
    CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>, TransformCode>;

/// Rows [first, first + count) of so many numbers each.
std::vector<float> some_rows(const std::vector<float>& all, std::int64_t first, std::int64_t count,
                             int width) {
  return {all.begin() + first * width, all.begin() + (first + count) * width};
}
void append_rows(std::vector<float>& all, const std::vector<float>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

/// A layer, a prompt of it, and where its calls end.
struct Case {
  Case(Random& random, Settings& settings, DType type) {
    config.shape = support::random_shape(random, 2, {1, 2, 4, 8}, {64, 80, 96, 128});
    config.max_sequences = 3;
    config.max_tokens = 3000;
    config.full_type = type;
    config.epoch_type = DType::f32;
    config.publish_interval = 40;
    config.prefill_chunk = 20 + static_cast<int>(random() % 300);
    if (settings.pre_rope) config.rope = support::random_rope(random, config.shape.head_dim);
    settings.sinks = static_cast<int>(random() % 30);
    settings.recent = 1 + static_cast<int>(random() % 60);
    settings.snapkv = {0.25F + 0.25F * static_cast<float>(random() % 3), 0,
                       8 + static_cast<int>(random() % 25), 5, Pooling::maximum};
    settings.share = 0.3F;
    settings.scope = random() % 2 == 0 ? ScoreScope::kv_head : ScoreScope::layer;
    layer = support::random_layer(
        random, config.shape, settings,
        16 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim - 16)));
    for (HeadBasis& head : layer.basis.heads) {
      if (!head.key_bits.empty()) head.key_bits[0] = head.value_bits[0] = 8;
    }
    tokens = 1 + static_cast<std::int64_t>(random() % (effort() == 0 ? 200 : 900));
    key = rounded(layer.rows(random, tokens, true), type);
    value = rounded(layer.rows(random, tokens, false), type);
    query = rounded(layer.queries(random, tokens), type);
    for (std::int64_t left = tokens; left > 0;) {
      cuts.push_back((std::min)(left, 1 + static_cast<std::int64_t>(random() % 250)));
      left -= cuts.back();
    }
  }
  static std::vector<float> rounded(std::vector<float> rows, DType type) {
    for (float& x : rows) x = round_to(type, x);
    return rows;
  }
  int row_width() const { return config.shape.num_kv_heads * config.shape.head_dim; }
  int query_width() const { return config.shape.num_qo_heads * config.shape.head_dim; }
  std::vector<float> keys(std::int64_t first, std::int64_t count) const {
    return some_rows(key, first, count, row_width());
  }
  std::vector<float> values(std::int64_t first, std::int64_t count) const {
    return some_rows(value, first, count, row_width());
  }
  std::vector<float> queries(std::int64_t first, std::int64_t count) const {
    return some_rows(query, first, count, query_width());
  }

  CacheConfig config;
  support::RandomLayer layer;
  std::int64_t tokens = 0;
  std::vector<float> key, value, query;
  std::vector<std::int64_t> cuts;  ///< tokens of the calls
};

/// The prompt in one call; chunk by chunk, each against float64; and in calls that end anywhere,
/// attended to or not.
template <class Cache>
void in_chunks(Settings settings, DType type, std::uint64_t seed, int trials, double limit,
               bool against_cpu) {
  Random random(seed);
  double worst = 0.0;
  for (int trial = 0; trial < trials; ++trial) {
    const Case prompt(random, settings, type);
    CAPTURE(trial);
    CAPTURE(prompt.tokens);
    CAPTURE(prompt.config.prefill_chunk);
    const auto policies = support::configured(typename Cache::PolicySet{}, settings);
    constexpr bool has_scores = requires(DeviceCache<Cache> & device) {
      device.cache.accumulate(1, ScoreView{});
    };
    DeviceCache<Cache> whole(prompt.config, prompt.layer.basis, policies),
        cut(prompt.config, prompt.layer.basis, policies);
    CacheConfig by_calls = prompt.config;
    by_calls.prefill_chunk = 0;
    DeviceCache<Cache> chunked(by_calls, prompt.layer.basis, policies);
    for (auto* device : {&whole, &cut, &chunked}) device->cache.create(1);
    const Answer answer = whole.prefill(1, prompt.query, prompt.key, prompt.value);
    Answer chunks;
    const std::int64_t chunk = prompt.config.prefill_chunk;
    for (std::int64_t first = 0; first < prompt.tokens; first += chunk) {
      const std::int64_t count = std::min(chunk, prompt.tokens - first);
      std::vector<float> key, value;
      if (first > 0) chunked.reconstruct(1, key, value);
      append_rows(key, prompt.keys(first, count));
      append_rows(value, prompt.values(first, count));
      const Answer own = chunked.prefill(1, prompt.queries(first, count), prompt.keys(first, count),
                                         prompt.values(first, count));
      std::vector<double> expected, expected_lse;
      support::attend_f64(prompt.config.shape, prompt.config.scale(),
                          support::rotated(prompt.config, key), value, prompt.queries(first, count),
                          expected, expected_lse, support::drops(settings.method) || has_scores);
      worst = std::max(worst, distance(own.out, expected));
      CHECK(distance(own.out, expected) < limit);
      append_rows(chunks.out, own.out);
      append_rows(chunks.lse, own.lse);
    }
    CHECK(answer == chunks);  // a chunk is a call, wherever it is cut
    CHECK(whole.save(1) == chunked.save(1));

    Answer parts;
    cut.cache.create(2);
    std::int64_t first = 0;
    const int window = settings.snapkv.window > 32 ? settings.snapkv.window : 32;
    const bool finishes = random() % 2 == 0;
    for (const std::int64_t count : prompt.cuts) {
      const Prompt goes_on =
          first + count == prompt.tokens && !finishes ? Prompt::complete : Prompt::continues;
      const Answer own = cut.prefill(1, prompt.queries(first, count), prompt.keys(first, count),
                                     prompt.values(first, count), goes_on);
      append_rows(parts.out, own.out);
      append_rows(parts.lse, own.lse);
      const std::int64_t queries = has_scores || count >= chunk || (first % chunk) + count > chunk
                                       ? count
                                       : std::min(count, std::int64_t{window});
      cut.ingest(2, prompt.keys(first, count), prompt.values(first, count),
                 prompt.queries(first + count - queries, queries), goes_on);
      first += count;
      CHECK(cut.cache.num_tokens(1) == first);
    }
    if (finishes) {
      for (const SequenceId seq : {1, 2}) cut.cache.finish_prompt(seq);
    }
    // The same rows, attended to in other pieces: sums in another order.
    CHECK(distance(parts.out, answer.out) < limit);
    CHECK(distance(parts.lse, answer.lse) < limit);
    std::vector<float> key, value, own_key, own_value;
    whole.reconstruct(1, key, value);
    for (const SequenceId seq : {1, 2}) {
      CAPTURE(seq);
      if constexpr (has_scores) {  // accumulated scores are such sums too, and choose otherwise
                                   // among equals
        cut.reconstruct(seq, own_key, own_value);
        CHECK(support::different_rows(own_key, key, prompt.config.shape.head_dim) <=
              2 + own_key.size() / static_cast<std::size_t>(prompt.config.shape.head_dim) / 100);
      } else {
        CHECK(cut.save(seq) == whole.save(1));
      }
    }
    CHECK(cut.cache.faults() == 0);
    if (!against_cpu) continue;
    const auto cpu = support::make_cpu_side(settings, prompt.config, prompt.layer.basis);
    first = 0;
    for (const std::int64_t count : prompt.cuts) {
      cpu->ingest(prompt.keys(first, count), prompt.values(first, count),
                  prompt.queries(first, count),
                  first + count == prompt.tokens ? Prompt::complete : Prompt::continues);
      first += count;
    }
    std::vector<float> cpu_key, cpu_value;
    cpu->reconstruct(cpu_key, cpu_value);
    CHECK(cut.cache.tail_length(1) == cpu->tail_length());
    if (support::adapts(settings.method)) {  // of rows whose scores are almost equal one may be
                                             // observed here and the other there
      CHECK(std::max(distance(key, cpu_key), distance(value, cpu_value)) < 0.2);
    } else {
      CHECK(support::different_rows(key, cpu_key, prompt.config.shape.head_dim) <=
            2 + key.size() / static_cast<std::size_t>(prompt.config.shape.head_dim) / 200);
    }
  }
  MESSAGE("chunks: outputs " << worst);
}

}  // namespace

TEST_CASE("a prompt in chunks, of which calls may take any part") {
  const int trials = effort() == 0 ? 1 : 8 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    Settings settings;
    settings.method = Method::oja_snapkv;
    in_chunks<OjaKVSnapKV<Cuda>>(settings, type, 901, trials, type == DType::f16 ? 2e-5 : 2e-4,
                                 true);
    settings.method = Method::codes;
    in_chunks<Codes>(settings, type, 902, trials, 1e-3, true);
    settings.pre_rope = true;
    in_chunks<Codes>(settings, type, 903, trials, 4e-3, true);
    settings.method = Method::snapkv_only;
    in_chunks<SnapKVOnly<Cuda>>(settings, type, 906, trials, 4e-3, true);
  }
}

TEST_CASE("the same where rows are kept by the attention that they receive") {
  in_chunks<HeavyCodes>({}, DType::f16, 904, effort() == 0 ? 1 : 8 * effort(), 1e-3, false);
}

TEST_CASE("what a prompt that goes on refuses, and what stays as it was") {
  Random random(905);
  Settings settings;
  settings.method = Method::snapkv;
  const CacheShape shape{4, 2, 64};
  using Cache = OjaKVSnapKV<Cuda>;
  const support::RandomLayer layer = support::random_layer(random, shape, settings, 24);
  const auto policies = support::configured(Cache::PolicySet{}, settings);
  CacheConfig config{.shape = shape, .max_sequences = 3, .max_tokens = 300, .prefill_chunk = 100};
  DeviceCache<Cache> device(config, layer.basis, policies);
  device.cache.create(1);
  const auto rows = [&](std::int64_t n) { return layer.rows(random, n, true); };
  const int wanted =
      std::max(policies.token_policy.get<SnapKV>().window, policies.updater.importance_window);
  device.ingest(1, rows(60), rows(60), layer.queries(random, wanted), Prompt::continues);
  CHECK(device.cache.num_tokens(1) == 60);
  CHECK(device.cache.tail_length(1) == 0);
  const std::string open =
      "sequence 1: its prompt of 60 tokens so far continues, a complete one is expected; call "
      "finish_prompt";
  const SequenceId one = 1;
  CHECK(message_of([&] { device.append(std::span(&one, 1), rows(1), rows(1)); }) == open);
  CHECK(message_of([&] { device.attend(std::span(&one, 1), layer.queries(random, 1)); }) == open);
  CHECK(message_of([&] { device.cache.maintain(1); }) == open);
  CHECK(message_of([&] { device.cache.truncate(1, 0); }) == open);
  CHECK(message_of([&] { device.cache.fork(1, 2); }) == open);
  CHECK(!device.cache.contains(2));
  CHECK(message_of([&] { static_cast<void>(device.save(1)); }) == open);
  CHECK(message_of([&] { static_cast<void>(device.cache.rollback_limit(1)); }) == open);
  // A chunk ends inside this call: all of its queries may be needed.
  CHECK(message_of([&] {
          device.ingest(1, rows(70), rows(70), layer.queries(random, wanted), Prompt::continues);
        }) == "q_window: prompt rows are chosen by the attention of 70 queries, given " +
                  std::to_string(wanted));
  CHECK(message_of([&] { device.ingest(1, rows(241), rows(241), layer.queries(random, 241)); }) ==
        "max_tokens: 300, sequence has 60, given 241");
  CHECK(device.cache.num_tokens(1) == 60);
  device.ingest(1, rows(70), rows(70), layer.queries(random, 70));
  CHECK(device.cache.num_tokens(1) == 130);
  device.append(std::span(&one, 1), rows(1), rows(1));
  device.cache.finish_prompt(1);  // nothing is open
  CHECK(device.cache.num_tokens(1) == 131);
  // A prompt may be given up, and its number used again.
  device.cache.create(2);
  device.ingest(2, rows(50), rows(50), layer.queries(random, 50), Prompt::continues);
  const std::size_t reserved = device.cache.memory().reserved_bytes;
  device.cache.erase(2);
  device.cache.create(2);
  CHECK(device.cache.num_tokens(2) == 0);
  device.ingest(2, rows(40), rows(40), layer.queries(random, 40), Prompt::continues);
  CHECK(device.cache.memory().reserved_bytes == reserved);  // the memory of the first
  device.cache.finish_prompt(2);
  CHECK(device.cache.num_tokens(2) == 40);
  // Nothing came: the prompt is open, and complete.
  device.cache.create(3);
  device.ingest(3, {}, {}, {}, Prompt::continues);
  CHECK(message_of([&] { device.cache.maintain(3); }).find("its prompt of 0 tokens so far") !=
        std::string::npos);
  device.ingest(3, {}, {}, {});
  device.cache.maintain(3);
}

TEST_CASE("what is stored and what waits of a prompt that goes on can be looked at") {
  Random random(907);
  for (const DType type : {DType::f16, DType::bf16}) {
    const CacheShape shape{4, 2, 64};
    Settings settings;
    settings.sinks = 4;
    settings.recent = 20;
    const support::RandomLayer layer = support::random_layer(random, shape, settings, 24);
    CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = 600, .prefill_chunk = 100};
    config.full_type = type;
    DeviceCache<StaticPCAHybrid<Cuda>> device(
        config, layer.basis, support::configured(StaticPCAHybrid<Cuda>::PolicySet{}, settings));
    const auto key = layer.rows(random, 270, true), value = layer.rows(random, 270, false);
    const auto part = [&](const std::vector<float>& all, std::int64_t first, std::int64_t count) {
      return std::vector<float>(all.begin() + 128 * first, all.begin() + 128 * (first + count));
    };
    device.cache.create(1);
    device.cache.create(2);
    device.ingest(1, part(key, 0, 250), part(value, 0, 250), {},
                  Prompt::continues);  // two chunks, and 50 rows that wait
    device.ingest(2, part(key, 0, 200), part(value, 0, 200));
    CHECK(device.cache.num_tokens(1) == 250);
    std::vector<float> own_key, own_value, other_key, other_value;
    device.reconstruct(1, own_key, own_value);
    device.reconstruct(2, other_key, other_value);
    CHECK(part(own_key, 0, 200) == other_key);  // as a prompt of two chunks stored them
    CHECK(part(own_value, 0, 200) == other_value);
    for (const auto& [given, own] : {std::pair{&key, &own_key}, std::pair{&value, &own_value}}) {
      for (std::size_t i = 128 * 180; i < 128 * 250; ++i)
        CHECK((*own)[i] == round_to(type, (*given)[i]));  // the tail, then what waits
    }
    std::vector<RowState> states(250);
    device.cache.row_states(1, 1, 0, states);
    for (std::size_t i = 0; i < 250; ++i)
      CHECK(states[i] == (i < 4 || i >= 180 ? RowState::full : RowState::compressed));
    CHECK(message_of([&] { device.cache.row_states(1, 1, 1, states); }) ==
          "row_states: 250 positions from 1 on, sequence has 250 tokens");
    // A part that begins among the stored ones, one of what waits alone; into another type, head by
    // head.
    for (const auto& [first, count] : {std::pair{std::int64_t{150}, std::int64_t{90}},
                                       std::pair{std::int64_t{220}, std::int64_t{30}}}) {
      for (const DType target : {DType::f16, DType::bf16}) {
        const gpu::DeviceArray<std::uint16_t> k(static_cast<std::size_t>(128 * count)), v(k.size());
        device.cache.reconstruct(1, first,
                                 KeyTargetView(k.data(), target, count, 2, 64, 64, count * 64),
                                 ValueTargetView(v.data(), target, count, 2, 64, 64, count * 64));
        for (const auto& [from, all] : {std::pair{&k, &own_key}, std::pair{&v, &own_value}}) {
          const std::vector<std::uint16_t> bits = support::host(*from);
          for (std::int64_t i = 0; i < 128 * count; ++i) {
            const std::int64_t head = i / (64 * count), token = i / 64 % count;
            const float expected = round_to(
                target,
                (*all)[static_cast<std::size_t>((first + token) * 128 + head * 64 + i % 64)]);
            const std::uint16_t own = bits[static_cast<std::size_t>(i)];
            CHECK((target == DType::f16 ? to_float(Half{own}) : to_float(BFloat16{own})) ==
                  expected);
          }
        }
      }
    }
    device.ingest(1, part(key, 250, 20), part(value, 250, 20));
    device.ingest(2, part(key, 200, 70), part(value, 200, 70));
    device.reconstruct(1, own_key, own_value);
    device.reconstruct(2, other_key, other_value);
    CHECK(own_key == other_key);  // nothing was disturbed
    CHECK(own_value == other_value);
  }
}

TEST_CASE(
    "rows of a prompt that goes on are refused once, and pages that are not there before anything "
    "changes") {
  Random random(906);
  const CacheShape shape{2, 1, 64};
  const support::RandomLayer layer = support::random_layer(random, shape, {}, 32);
  CacheConfig config{.shape = shape, .max_sequences = 2, .max_tokens = 4096, .prefill_chunk = 1000};
  DeviceCache<Codes> device(config, layer.basis, {});
  device.cache.create(1);
  auto key = layer.rows(random, 30, true);
  key[5 * 64 + 3] = std::numeric_limits<float>::quiet_NaN();
  for (int call = 0; call < 3; ++call) {
    static_cast<void>(device.prefill(1, layer.queries(random, 30), key,
                                     layer.rows(random, 30, false),
                                     call == 2 ? Prompt::complete : Prompt::continues));
    CHECK(device.cache.faults() == static_cast<std::uint32_t>(call + 1));
  }
  std::vector<float> stored_key, stored_value;
  device.reconstruct(1, stored_key, stored_value);
  for (int call = 0; call < 3; ++call)
    CHECK(std::all_of(stored_value.begin() + (30 * call + 5) * 64,
                      stored_value.begin() + (30 * call + 6) * 64,
                      [](float x) { return std::abs(x) < 1.0F; }));

  config.num_pages = 3;
  DeviceCache<FullKV<Cuda>> poor(config, {}, {});
  poor.cache.create(1);
  const std::int64_t rows = poor.cache.tokens_per_page(0);
  const int recent = poor.cache.config().tail_capacity - 2 * poor.cache.config().flush_interval;
  const std::int64_t most = 3 * rows + recent;
  poor.ingest(1, layer.rows(random, most - 5, true), layer.rows(random, most - 5, false), {},
              Prompt::continues);
  CHECK(message_of([&] {
          poor.ingest(1, layer.rows(random, 6, true), layer.rows(random, 6, false), {},
                      Prompt::continues);
        }) == "page pool: 4 pages needed, 3 free");
  CHECK(poor.cache.num_tokens(1) == most - 5);
  poor.ingest(1, layer.rows(random, 5, true), layer.rows(random, 5, false), {}, Prompt::continues);
  poor.cache.create(2);
  poor.ingest(2, layer.rows(random, recent + 1, true), layer.rows(random, recent + 1, false));
  CHECK(message_of([&] { poor.cache.finish_prompt(1); }) == "page pool: 3 pages needed, 2 free");
  poor.cache.erase(2);
  poor.cache.finish_prompt(1);
  CHECK(poor.cache.num_tokens(1) == most);
  CHECK(poor.cache.pool().allocator().num_free() == 0);
}

}  // namespace prompts_tests
