// SPDX-License-Identifier: Apache-2.0
// Attention that rows receive, on request, in caches whose token policy does not use it.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "cuda/support/heavy_hitter_cases.cuh"

namespace attention_scores_tests {

using namespace lowrankkv;
using namespace heavy;

namespace {

/// Scores on request, against float64 attention over what is stored.
template <class Cache>
double scores_on_request(Random& random, const RandomLayer& layer,
                         const typename Cache::PolicySet& policies, double limit,
                         bool pre_rope = false) {
  CacheConfig config = config_of(layer.shape, 3000, 2, 16);
  config.publish_interval = 40;
  if (pre_rope) config.rope = support::random_rope(random, layer.shape.head_dim);
  support::DeviceCache<Cache> side(config, layer.basis, policies);
  const int heads = layer.shape.num_kv_heads, dim = layer.shape.head_dim,
            queries = layer.shape.num_qo_heads;
  const std::vector<SequenceId> seqs{1, 2};
  for (const SequenceId seq : seqs) {
    side.cache.create(seq);
    const int n = seq == 2 ? 77 : effort() == 0 ? 300 : 900;
    side.ingest(seq, random_rows(random, n, heads, dim, DType::f16),
                random_rows(random, n, heads, dim, DType::f16),
                random_rows(random, std::min(n, 64), queries, dim, DType::f16));
  }
  for (int step = 0; step < 30; ++step) {
    side.append(seqs, random_rows(random, 2 * 4, heads, dim, DType::f16),
                random_rows(random, 2 * 4, heads, dim, DType::f16));
    side.cache.maintain(seqs);
  }
  const auto query = random_rows(random, 2 * 3, queries, dim, DType::f32, 1.5F);
  const gpu::DeviceArray<float> q(query);
  const std::int64_t positions = side.cache.num_tokens(1) + 5;
  const auto out = poisoned(query.size()),
             accumulated = poisoned(static_cast<std::size_t>(2 * heads * positions));
  side.cache.attend(seqs, side.queries(q, 6), {out.data(), 6, queries, dim}, {},
                    ScoreView{accumulated.data(), 2, heads, positions});
  CHECK(host(out) == side.attend(seqs, query).out);
  double worst = 0.0;
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<float> key, value, found;
    side.reconstruct(seqs[i], key, value);
    const std::vector<bool> there = kept_rows_of(layer.shape, key);
    const std::vector<float> own = part_of(host(accumulated), i, 2);
    bool zeros = true;
    for (int head = 0; head < heads; ++head) {
      for (std::int64_t position = 0; position < positions; ++position) {
        const float received = own[static_cast<std::size_t>(head * positions + position)];
        if (position < side.cache.num_tokens(seqs[i]))
          found.push_back(received);
        else
          zeros = zeros && received == 0.0F;
      }
    }
    CHECK(zeros);
    worst = std::max(worst, distance(found, scores_f64(layer.shape, config.scale(),
                                                       support::rotated(config, key), there,
                                                       part_of(query, i, 2))));
  }
  CHECK(worst < limit);
  return worst;
}

}  // namespace

TEST_CASE(
    "any cache says how much attention its rows received: rows of several epochs, listed or not, "
    "full, compressed, in the tail") {
  Random random(151);
  const CacheShape shape{8, 2, 64};
  const RandomLayer layer = support::random_layer(random, shape, {}, 24),
                    joint = support::joint_layer(random, shape, {}, 0, 24, 60);
  const double full = scores_on_request<FullKV<Cuda>>(random, {{}, shape}, {}, 2e-5);
  const double hybrid =
      scores_on_request<StaticPCAHybrid<Cuda>>(random, layer, {{}, {}, {4, 20}, {}}, 2e-5);
  OjaKVv2<Cuda>::PolicySet outliers;
  outliers.token_policy.get<SinkRecent>() = {4, 20};
  const double oja = scores_on_request<OjaKVv2<Cuda>>(random, layer, outliers, 2e-5);
  SubSpaceA<Cuda>::PolicySet chunks;
  chunks.token_policy = {4, 20};
  chunks.updater.chunk_length = 50;
  const double directions = scores_on_request<SubSpaceA<Cuda>>(random, layer, chunks, 1e-3);
  SnapKVOnly<Cuda>::PolicySet chosen;
  chosen.token_policy.get<KeepFull>().recent = 0;
  const double snapkv = scores_on_request<SnapKVOnly<Cuda>>(random, {{}, shape}, chosen, 2e-5);
  const double star =
      scores_on_request<StarKV<Cuda>>(random, joint, {{0, {}}, {}, {4, 20}, {}}, 1e-3);
  MESSAGE("accumulated scores on request: FullKV " << full << ", hybrid " << hybrid << ", OjaKVv2 "
                                                   << oja << ", SubSpaceA " << directions
                                                   << ", SnapKV " << snapkv << ", StarKV " << star);
  const double moving = scores_on_request<OjaKVv2<Cuda>>(random, layer, outliers, 4e-3, true),
               publishing = scores_on_request<SubSpaceA<Cuda>>(random, layer, chunks, 4e-3, true);
  // Keys of few channels and values of many: both decide how many rows a tile has.
  RandomLayer longer = support::random_layer(random, {4, 1, 256}, {}, 160);
  HeadBasis& head = longer.basis.heads.front();
  std::vector<float> fewer;
  for (int i = 0; i < 256; ++i)
    fewer.insert(fewer.end(), head.key_down.begin() + i * head.key_rank,
                 head.key_down.begin() + i * head.key_rank + 96);
  head.key_down = fewer;
  head.key_rank = 96;
  head.key_rms.resize(96);
  head.key_bits.resize(96);
  const double values =
      scores_on_request<StaticPCAHybrid<Cuda>>(random, longer, {{}, {}, {4, 20}, {}}, 4e-3, true);
  MESSAGE("of keys that are stored before RoPE: OjaKVv2 " << moving << ", SubSpaceA " << publishing
                                                          << ", values of more channels than keys "
                                                          << values);
  if (effort() == 0) return;
  const double whole = scores_on_request<FullKV<Cuda>>(random, {{}, shape}, {}, 4e-3, true),
               still = scores_on_request<StaticPCAHybrid<Cuda>>(random, layer,
                                                                {{}, {}, {4, 20}, {}}, 4e-3, true),
               latent = scores_on_request<StarKV<Cuda>>(random, joint, {{0, {}}, {}, {4, 20}, {}},
                                                        4e-3, true);
  MESSAGE("and of FullKV " << whole << ", hybrid " << still << ", StarKV " << latent);
}

}  // namespace attention_scores_tests
