// SPDX-License-Identifier: Apache-2.0
// States of caches that hold parts of a sequence.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace merge_states_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Codes;
using support::distance;
using support::furthest;
using support::host;
using support::Method;
using support::poisoned;
using support::Random;
using support::Settings;

namespace {

/// Three caches hold parts of two sequences; attention over the merged states against float64 over
/// everything.
template <class Cache>
void shards_merge(Random& random, const Settings& settings,
                  const typename Cache::PolicySet& policies, double limit) {
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 3000;
  config.max_query_tokens = 3;
  config.epoch_type = DType::f32;
  const auto layer = support::random_layer(random, config.shape, settings, 30);
  std::vector<std::unique_ptr<Cache>> shards;
  std::vector<float> keys[2], values[2];
  const int lengths[2][3] = {{2100, 5, 70}, {40, 0, 300}};  // a shard may hold nothing
  for (int shard = 0; shard < 3; ++shard) {
    shards.push_back(std::make_unique<Cache>(config, layer.basis, policies));
    for (const SequenceId seq : {0, 1}) {
      shards.back()->create(seq);
      const int n = lengths[seq][shard];
      const auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
      const gpu::DeviceArray<float> k(key), v(value);
      if (n > 0) shards.back()->ingest(seq, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});
      const auto own_key = poisoned(key.size()), own_value = poisoned(key.size());
      shards.back()->reconstruct(seq, 0, {own_key.data(), n, 2, 64}, {own_value.data(), n, 2, 64});
      for (auto [all, own] :
           {std::pair{&keys[seq], &own_key}, std::pair{&values[seq], &own_value}}) {
        const auto rows = host(*own);
        all->insert(all->end(), rows.begin(), rows.end());
      }
    }
  }
  const int m = 3, tokens = 2 * m;
  const auto query = layer.queries(random, tokens);
  const gpu::DeviceArray<float> q(query);
  const std::vector<SequenceId> seqs{0, 1};
  std::vector<gpu::DeviceArray<float>> memory;
  std::vector<gpu::StateView> states;
  for (int shard = 0; shard < 3; ++shard) {
    for (const int size : {tokens * 8 * 64, tokens * 8, tokens * 8})
      memory.push_back(poisoned(static_cast<std::size_t>(size)));
    states.push_back({memory[memory.size() - 3].data(), memory[memory.size() - 2].data(),
                      memory.back().data(), tokens, 8, 64});
    shards[static_cast<std::size_t>(shard)]->attend_partial(
        seqs, {q.data(), tokens, 8, 64}, states.back(),
        shard == 2 ? gpu::QueryTokens::own : gpu::QueryTokens::elsewhere);
  }
  const auto out = poisoned(query.size()), lse = poisoned(static_cast<std::size_t>(tokens * 8));
  gpu::merge_states(states, {out.data(), tokens, 8, 64}, {lse.data(), tokens, 8});
  const auto found = host(out), found_lse = host(lse);
  for (const SequenceId seq : {0, 1}) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(
          all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(seq) * all.size() / 2),
          all.begin() +
              static_cast<std::ptrdiff_t>((static_cast<std::size_t>(seq) + 1) * all.size() / 2));
    };
    std::vector<double> expected, expected_lse;
    support::attend_f64(config.shape, config.scale(), keys[seq], values[seq], part(query), expected,
                        expected_lse);
    CHECK(distance(part(found), expected) < limit);
    CHECK(furthest(part(found_lse), expected_lse) <
          limit * std::max(1.0, furthest(expected_lse, std::vector<double>(expected_lse.size()))));
  }
}

}  // namespace

TEST_CASE(
    "caches that hold parts of a sequence give states that merge to attention over all of it") {
  Random random(31);
  Settings settings;
  shards_merge<FullKV<Cuda>>(random, settings, {}, 2e-5);
  shards_merge<StaticPCAHybrid<Cuda>>(random, settings, {{}, {}, {4, 32}, {}}, 2e-5);
  settings.method = Method::codes;
  shards_merge<Codes>(random, settings, {{}, {}, {4, 32}, {}}, 1e-3);
}

}  // namespace merge_states_tests
