// SPDX-License-Identifier: Apache-2.0
// Heavy hitters among the rows of prompts that SnapKV keeps: SnapKV chooses first, then accumulated
// attention scores choose among those and the stored rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_after_snapkv_tests {

using namespace lowrankkv;
using namespace heavy;

namespace {

using Tokens = Compose<SinkRecent, SnapKV, HeavyHitters>;
using Full = CompressedKVCache<Cuda, PerHead, Static,
                               Compose<KeepFull, SinkRecent, SnapKV, HeavyHitters>, NoQuantizer>;
using Plain = CompressedKVCache<Cuda, PerHead, Static, Tokens, NoQuantizer>;
using Star = CompressedKVCache<Cuda, JointValues, Static, Tokens, BlockHadamard>;
using OjaCodes = CompressedKVCache<Cuda, PerHead, Oja, Tokens, TransformCode, KeepEpochs<3>>;
using Directions =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Tokens, NoQuantizer, RotateNow>;
using Outliers = Compose<SinkRecent, SnapKV, ResidualOutliers, HeavyHitters>;
using PlainOutliers = CompressedKVCache<Cuda, PerHead, Static, Outliers, NoQuantizer>;
using DirectionsOutliers =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Outliers, NoQuantizer, RotateNow>;

/// Trials [first, last): prompts and steps keep the CPU's rows, as many in every head, and the same
/// but for few whose SnapKV or accumulated scores are almost equal. Copies go on as the original.
template <class Cache>
void check_scored(Random& random, int first_trial, int last_trial, bool pre_rope = false) {
  std::int64_t scarce = 0,
               plenty = 0;  // prompts that left fewer rows than heavy hitters may be, and more
  for (int trial = first_trial; trial < last_trial; ++trial) {
    const int heads = joins<Cache> ? 4 : 2, dim = trial % 2 == 0 ? 64 : 128;
    CacheConfig config = config_of({2 * heads, heads, dim}, 1500, 2, 16);
    config.publish_interval = 60;
    config.prefill_chunk = trial % 2 == 1 ? 60 : 0;
    config.keep_residuals = trial % 2 == 0;
    if (pre_rope) config.rope = support::random_rope(random, dim);
    config.epoch_type = DType::f32;
    HeavySettings settings{{trial % 2 == 0 ? 0.2F : 0.6F, 0, 6}, {trial % 3, 0}};
    settings.form = form_of<Cache>();
    settings.heads_per_group = joins<Cache> ? 2 : 0;
    settings.scored = true;
    settings.scores = {0.35F, 0, 16, 3, Pooling::average};
    settings.share = trial % 4 < 2 ? 1.0F : 0.0F;
    settings.exempts = exempts<Cache>;
    settings.outliers.share = 0.25F;
    if (trial % 3 == 1) settings.outliers.threshold = 0.8F;
    if (trial % 4 == 2) settings.outliers.first_tokens = 150;
    settings.chunk_length = 40;
    const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
    Side<Cache> side(config, layer, settings);
    const auto cpu = support::make_heavy_side(settings, config, layer.basis);
    side.cache.create(1);
    CAPTURE(trial);
    const auto counts_of = [&](const std::vector<bool>& kept) {
      std::vector<std::int64_t> counts(static_cast<std::size_t>(heads), 0);
      for (std::size_t i = 0; i < kept.size(); ++i)
        counts[i % static_cast<std::size_t>(heads)] += kept[i] ? 1 : 0;
      return counts;
    };
    const auto compare = [&](const char* when) {
      CAPTURE(when);
      std::vector<float> key, value, cpu_key, cpu_value;
      side.reconstruct(1, key, value);
      cpu->reconstruct(cpu_key, cpu_value);
      const std::vector<bool> own = kept_rows_of(config.shape, key),
                              others = kept_rows_of(config.shape, cpu_key);
      CHECK(side.cache.tail_length(1) == cpu->tail_length());
      CHECK(counts_of(own) == counts_of(others));
      int different = 0;
      for (std::size_t i = 0; i < own.size(); ++i) different += own[i] != others[i] ? 1 : 0;
      CHECK(different <= 4 * heads);
      int other_states = 0;
      for (int head = 0; head < heads; ++head) {
        const std::vector<RowState> own_states = side.states(1, head),
                                    cpu_states = cpu->states(head);
        for (std::size_t t = 0; t < own_states.size(); ++t)
          other_states += own_states[t] != cpu_states[t] ? 1 : 0;
      }
      CHECK(other_states <= different + (exempts<Cache> ? 4 * heads : 0));
      return counts_of(own).front();
    };
    const auto prompt = [&](int tokens, const char* when) {
      const auto key = random_rows(random, tokens, heads, dim, DType::f16),
                 value = random_rows(random, tokens, heads, dim, DType::f16),
                 query = random_rows(random, tokens, 2 * heads, dim, DType::f16);
      side.ingest(1, key, value, query);
      cpu->ingest(query, key, value);
      return compare(when);
    };
    const auto steps = [&](int count) {
      for (int step = 0; step < count; ++step) {
        const auto key = random_rows(random, 1, heads, dim, DType::f16),
                   value = random_rows(random, 1, heads, dim, DType::f16);
        const std::vector<SequenceId> one{1};
        side.append(one, key, value);
        cpu->append(key, value);
        const std::int64_t tokens = side.cache.num_tokens(1);
        std::vector<float> accumulated(static_cast<std::size_t>(heads * tokens));
        for (float& x : accumulated) x = static_cast<float>(random() % 100);
        side.accumulate(one, accumulated, tokens);
        cpu->accumulate(accumulated);
        side.cache.maintain(one);
        cpu->maintain();
      }
      compare("steps");
    };
    const std::int64_t first = prompt(130, "a prompt"), left = side.cache.rollback_limit(1),
                       most = heavy_rows(settings.heavy, left) +
                              std::min<std::int64_t>(settings.sinks.sinks, left) +
                              side.cache.tail_length(1);
    (first < most ? scarce : plenty) += 1;
    steps(40);
    prompt(110, "another prompt");
    steps(20);
    side.cache.fork(1, 2);
    prompt(10, "a prompt that stays in the tail");
    prompt(40, "one of few rows");
    CHECK(side.cache.faults() == 0);
    CHECK(side.cache.statistics().publications == cpu->publications());
    side.cache.erase(1);
    const std::vector<std::byte> saved = side.save(2);
    side.cache.load(1, saved);
    const auto key = random_rows(random, 90, heads, dim, DType::f16),
               value = random_rows(random, 90, heads, dim, DType::f16),
               query = random_rows(random, 90, 2 * heads, dim, DType::f16);
    for (const SequenceId seq : {1, 2}) side.ingest(seq, key, value, query);
    CHECK(side.save(1) == side.save(2));
  }
  CHECK((scarce > 0 || last_trial - first_trial < 2));
  CHECK((plenty > 0 || last_trial - first_trial < 2));
}

/// If SnapKV keeps no row of a prompt, none is stored, whatever their accumulated scores. Of the
/// rows that were stored before, those stay that accumulated scores keep.
template <class Cache>
void check_none(Random& random) {
  const int heads = 4;
  HeavySettings settings{{0.0F, 80, 6}, {2, 0}};
  settings.heads_per_group = joins<Cache> ? 2 : 0;
  settings.scores = {0.0F, 0, 16, 1, Pooling::average};
  const CacheConfig config = config_of({heads, heads, 64}, 1000, 1, 16);
  const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
  Side<Cache> side(config, layer, settings);
  side.cache.create(1);
  const std::vector<SequenceId> one{1};
  for (int step = 0; step < 60; ++step) {
    side.append(one, random_rows(random, 1, heads, 64, DType::f16),
                random_rows(random, 1, heads, 64, DType::f16));
    side.cache.maintain(one);
  }
  const std::int64_t before =
      side.cache.rollback_limit(1);  // those behind leave the tail with the prompt's
  CHECK(before > 20);
  std::vector<float> key, value;
  side.ingest(1, random_rows(random, 200, heads, 64, DType::f16),
              random_rows(random, 200, heads, 64, DType::f16),
              random_rows(random, 200, heads, 64, DType::f16));
  side.reconstruct(1, key, value);
  const std::vector<bool> kept = kept_rows_of(config.shape, key);
  bool none = true, stored = true;
  for (std::int64_t row = 0; row < side.cache.rollback_limit(1) * heads; ++row) {
    if (row / heads < before)
      stored = stored && kept[static_cast<std::size_t>(row)];
    else
      none = none && !kept[static_cast<std::size_t>(row)];
  }
  CHECK(none);
  CHECK(stored);
}

}  // namespace

TEST_CASE(
    "heavy hitters among rows that scores keep: the CPU's rows, in prompts and steps, and copies "
    "go on") {
  Random random(251);
  const auto last = [](int least) { return effort() == 0 ? least : 6 * effort(); };
  const auto first = [](int wanted) { return effort() == 0 ? wanted : 0; };
  check_scored<Plain>(random, 0, last(2));
  check_scored<Full>(random, 0, last(1));
  check_scored<Star>(random, first(1), last(2));
  check_scored<OjaCodes>(random, 0, last(1));
  check_scored<Directions>(random, first(1), last(2));
  check_scored<Plain>(random, first(1), last(2), true);
  check_scored<PlainOutliers>(random, 0, last(2));
  check_scored<DirectionsOutliers>(random, first(1), last(2));
  if (effort() > 0) check_scored<Star>(random, 0, last(1), true);
}

TEST_CASE(
    "heavy hitters among rows that scores keep: of a prompt of which they keep none, none is "
    "stored") {
  Random random(257);
  check_none<Plain>(random);
  check_none<Full>(random);
  check_none<Star>(random);
  check_none<OjaCodes>(random);
}

}  // namespace heavy_hitters_after_snapkv_tests
