// SPDX-License-Identifier: Apache-2.0
// Every parameter of every policy acts: changing it alone changes what the cache stores of one and
// the same stream.
#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

using namespace lowrankkv;

namespace {

const CacheShape kShape{4, 2, 32};

/// Rows whose energy decays over channels and whose subspace rotates as the stream goes on, so that
/// bases have something to follow.
std::vector<float> stream(std::uint64_t seed, int tokens, int heads) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> all(static_cast<std::size_t>(tokens * heads * kShape.head_dim));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int channel = static_cast<int>(i) % kShape.head_dim;
    const int token = static_cast<int>(i) / (heads * kShape.head_dim);
    const int rotated = (channel + token / 100) % kShape.head_dim;
    all[i] = normal(random) * std::exp(-0.15F * static_cast<float>(rotated));
  }
  return all;
}

/// What a cache stores of the stream: states of rows, decoded rows, bytes.
template <class Cache>
std::uint64_t digest(const typename Cache::PolicySet& policies, const LayerBasis& basis) {
  CacheConfig config{.shape = kShape, .max_tokens = 700};
  config.flush_interval = 16;
  config.publish_interval = 40;
  Cache cache(config, basis, policies);
  cache.create(0);
  const int prompt = 300, decoded = 250, n = prompt + decoded;
  const auto q = stream(1, n, 4), k = stream(2, n, 2), v = stream(3, n, 2);
  const QueryView query(q.data(), n, 4, 32);
  const KeyView key(k.data(), n, 2, 32);
  const ValueView value(v.data(), n, 2, 32);
  cache.ingest(0, key.tokens(0, prompt), value.tokens(0, prompt), query.tokens(0, prompt));
  std::vector<float> out(4 * 32);
  for (int token = prompt; token < n; ++token) {
    cache.append(0, key.tokens(token, 1), value.tokens(token, 1));
    if constexpr (requires(const ScoreView& accumulated) { cache.accumulate(0, accumulated); }) {
      std::vector<float> accumulated(static_cast<std::size_t>(2 * n));
      const ScoreView received(accumulated.data(), 1, 2, n);
      cache.attend(0, query.tokens(token, 1), {out.data(), 1, 4, 32}, {}, received);
      cache.accumulate(0, received);
    }
    cache.maintain(0);
  }
  std::vector<float> kept_k(k.size()), kept_v(v.size());
  cache.reconstruct(0, 0, {kept_k.data(), n, 2, 32}, {kept_v.data(), n, 2, 32});
  std::uint64_t sum = checksum(std::as_bytes(std::span(kept_k)));
  sum = checksum(std::as_bytes(std::span(kept_v)), sum);
  for (int head = 0; head < 2; ++head) {
    std::vector<RowState> states(static_cast<std::size_t>(n));
    cache.row_states(0, head, 0, states);
    sum = checksum(std::as_bytes(std::span(states)), sum);
  }
  const std::uint64_t length = static_cast<std::uint64_t>(cache.tail_length(0)),
                      bytes = cache.memory(0).total();
  sum = checksum(std::as_bytes(std::span(&length, 1)), sum);
  return checksum(std::as_bytes(std::span(&bytes, 1)), sum);
}

LayerBasis basis_for(bool bits = false) {
  support::Random random(9);
  LayerBasis basis = support::random_basis(random, kShape, {.centred = false}, 12, 12);
  for (HeadBasis& head : basis.heads) {
    head.key_threshold = head.value_threshold = 2.5F;
    for (int channel = 0; bits && channel < head.key_rank; ++channel)
      head.key_bits.push_back(static_cast<std::uint8_t>(channel < 4 ? 6 : 3));
    for (int channel = 0; bits && channel < head.value_rank; ++channel)
      head.value_bits.push_back(static_cast<std::uint8_t>(channel < 4 ? 6 : 3));
    if (bits) head.key_rms.assign(static_cast<std::size_t>(head.key_rank), 0.5F);
    if (bits) head.value_rms.assign(static_cast<std::size_t>(head.value_rank), 0.5F);
  }
  return basis;
}

/// Each change of the policies alone must change the digest, and give one of its own.
template <class Cache>
void check_changes(
    const std::function<void(typename Cache::PolicySet&)>& start,
    const std::vector<std::pair<std::string, std::function<void(typename Cache::PolicySet&)>>>&
        changes,
    const LayerBasis& basis = basis_for()) {
  typename Cache::PolicySet policies;
  start(policies);
  const std::uint64_t unchanged = digest<Cache>(policies, basis);
  CHECK(digest<Cache>(policies, basis) == unchanged);
  for (const auto& entry : changes) {
    CAPTURE(entry.first);
    auto changed = policies;
    entry.second(changed);
    CHECK(digest<Cache>(changed, basis) != unchanged);
  }
}

}  // namespace

TEST_CASE("SnapKV, sinks and windows") {
  using Cache = CompressedKVCache<Cpu, PerHead, Static, Compose<SinkRecent, SnapKV>, NoQuantizer>;
  check_changes<Cache>(
      [](auto&) {},
      {
          {"sinks", [](auto& p) { p.token_policy.template get<SinkRecent>().sinks = 20; }},
          {"recent", [](auto& p) { p.token_policy.template get<SinkRecent>().recent = 50; }},
          {"keep", [](auto& p) { p.token_policy.template get<SnapKV>().keep = 0.3F; }},
          {"budget", [](auto& p) { p.token_policy.template get<SnapKV>().budget = 70; }},
          {"window", [](auto& p) { p.token_policy.template get<SnapKV>().window = 16; }},
          {"kernel", [](auto& p) { p.token_policy.template get<SnapKV>().kernel = 3; }},
          {"pooling",
           [](auto& p) { p.token_policy.template get<SnapKV>().pooling = Pooling::maximum; }},
          {"storage type", [](auto& p) { p.quantizer.type = DType::bf16; }},
      });
  check_changes<StreamingLLM<>>([](auto& p) { p.token_policy.recent = 100; },
                                {
                                    {"sinks", [](auto& p) { p.token_policy.sinks = 9; }},
                                    {"recent", [](auto& p) { p.token_policy.recent = 60; }},
                                });
  check_changes<FullKV<>>([](auto&) {}, {{"recent", [](auto& p) { p.token_policy.recent = 7; }}});
}

TEST_CASE("heavy hitters and outliers") {
  using Cache =
      CompressedKVCache<Cpu, PerHead, Static, Compose<HeavyHitters, ResidualOutliers>, NoQuantizer>;
  check_changes<Cache>(
      [](auto& p) { p.token_policy.template get<ResidualOutliers>().share = 0.1F; },
      {
          {"keep", [](auto& p) { p.token_policy.template get<HeavyHitters>().keep = 0.4F; }},
          {"budget", [](auto& p) { p.token_policy.template get<HeavyHitters>().budget = 40; }},
          {"recent", [](auto& p) { p.token_policy.template get<HeavyHitters>().recent = 10; }},
          {"share", [](auto& p) { p.token_policy.template get<ResidualOutliers>().share = 0.05F; }},
          {"threshold",
           [](auto& p) { p.token_policy.template get<ResidualOutliers>().threshold = 1.3F; }},
          {"first_tokens",
           [](auto& p) { p.token_policy.template get<ResidualOutliers>().first_tokens = 40; }},
          {"error",
           [](auto& p) {
             p.token_policy.template get<ResidualOutliers>().error = OutlierError::absolute;
           }},
      });
}

TEST_CASE("Oja") {
  check_changes<OjaKV<>>(
      [](auto& p) { p.updater.importance_kernel = 5; },
      {
          {"prefill_rate", [](auto& p) { p.updater.prefill_rate = 0.5F; }},
          {"decode_rate", [](auto& p) { p.updater.decode_rate = 0.5F; }},
          {"prefill_share", [](auto& p) { p.updater.prefill_share = 0.5F; }},
          {"importance_window", [](auto& p) { p.updater.importance_window = 8; }},
          {"importance_kernel", [](auto& p) { p.updater.importance_kernel = 1; }},
          {"importance_pooling", [](auto& p) { p.updater.importance_pooling = Pooling::maximum; }},
          {"form", [](auto& p) { p.updater.form = OjaForm::printed_normalised; }},
          {"decode_decay", [](auto& p) { p.updater.decode_decay = 1.0F; }},
      });
}

TEST_CASE("the rates and the selection of Oja act") {
  const CacheShape shape{8, 2, 64};
  support::Random of_basis(1);
  const LayerBasis basis = support::random_basis(of_basis, shape, {.centred = false}, 24, 32);
  support::Random random(6);
  const int n = 600;
  const auto q = support::random_rows(random, n, 8, 64), k = support::random_rows(random, n, 2, 64),
             v = support::random_rows(random, n, 2, 64);
  const auto stored = [&](const Oja& updater, bool decode) {
    OjaKV<>::PolicySet policies;
    policies.updater = updater;
    OjaKV<> cache({.shape = shape, .publish_interval = 64}, basis, policies);
    cache.create(0);
    const int prompt = decode ? 300 : n;
    cache.ingest(0, {k.data(), prompt, 2, 64}, {v.data(), prompt, 2, 64},
                 {q.data(), prompt, 8, 64});
    if (decode)
      cache.append_maintained(0, KeyView(k.data(), n, 2, 64).tokens(300, 300),
                              ValueView(v.data(), n, 2, 64).tokens(300, 300));
    std::vector<float> rows(static_cast<std::size_t>(2 * n * 128));
    cache.reconstruct(0, 0, {rows.data(), n, 2, 64}, {rows.data() + n * 128, n, 2, 64});
    return rows;
  };
  const auto base = stored({}, false);
  CHECK(base == stored({}, false));
  CHECK(base != stored({.prefill_rate = 0.3F}, false));
  CHECK(base != stored({.prefill_share = 0.5F}, false));
  CHECK(base != stored({.importance_window = 8}, false));
  CHECK(base != stored({.importance_scope = ScoreScope::layer}, false));
  CHECK(base != stored({.form = OjaForm::printed_normalised}, false));
  CHECK(base == stored({.decode_rate = 0.5F}, false));  // nothing was decoded
  CHECK(stored({}, true) != stored({.decode_rate = 0.5F}, true));
}

TEST_CASE("Frequent Directions, and thresholds of the basis") {
  check_changes<SubSpaceA<>>(
      [](auto&) {}, {
                        {"sketch_share", [](auto& p) { p.updater.sketch_share = 2.6F; }},
                        {"chunk_length", [](auto& p) { p.updater.chunk_length = 60; }},
                        {"threshold_scale", [](auto& p) { p.updater.threshold_scale = 0.5F; }},
                        {"ends_both", [](auto& p) { p.updater.ends_both = true; }},
                    });
  SubSpaceA<>::PolicySet policies;
  LayerBasis basis = basis_for();
  const std::uint64_t unchanged = digest<SubSpaceA<>>(policies, basis);
  for (HeadBasis& head : basis.heads) head.value_threshold = 1.0F;
  CHECK(digest<SubSpaceA<>>(policies, basis) != unchanged);
}

TEST_CASE("quantizers") {
  using Rotated = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, BlockHadamard>;
  check_changes<Rotated>([](auto&) {},
                         {
                             {"outlier_share", [](auto& p) { p.quantizer.outlier_share = 0.5F; }},
                             {"high_bits", [](auto& p) { p.quantizer.high_bits = 6; }},
                             {"low_bits", [](auto& p) { p.quantizer.low_bits = 2; }},
                             {"rotate", [](auto& p) { p.quantizer.rotate = false; }},
                         });
  using Coded = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode>;
  check_changes<Coded>([](auto&) {},
                       {{"step_scale", [](auto& p) { p.quantizer.step_scale = 1.4F; }}},
                       basis_for(true));
  // Bits and rms of the basis act, too.
  LayerBasis basis = basis_for(true);
  const std::uint64_t unchanged = digest<Coded>({}, basis);
  basis.heads[0].key_bits[0] = 8;
  CHECK(digest<Coded>({}, basis) != unchanged);
  basis = basis_for(true);
  basis.heads[1].value_rms[3] = 0.7F;
  CHECK(digest<Coded>({}, basis) != unchanged);
}
