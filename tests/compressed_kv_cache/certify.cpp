// SPDX-License-Identifier: Apache-2.0
// Certificates of a cache for its own steps.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/random_layer.hpp"

using namespace lowrankkv;
using support::Random;

TEST_CASE(
    "a cache certifies its own steps: nothing is lost at full rank, norms are counted, limits "
    "count") {
  Random random(38);
  const CacheShape shape{4, 2, 16};
  constexpr int n = 200;
  const auto q = support::random_rows(random, n, 4, 16), k = support::random_rows(random, n, 2, 16),
             v = support::random_rows(random, n, 2, 16);
  const auto fill = [&](auto& cache, std::vector<Certificate>& found, const Certificate& limit) {
    cache.create(0);
    cache.ingest(0, {k.data(), n, 2, 16}, {v.data(), n, 2, 16});
    std::vector<float> out(2 * 4 * 16), lse(2 * 4);
    found.resize(2 * 4);
    const QueryView query(q.data(), 2, 4, 16);
    cache.attend(0, query, {out.data(), 2, 4, 16}, {lse.data(), 2, 4});
    std::uint32_t exceeding = 0;
    cache.certify(0, query, {lse.data(), 2, 4}, {found.data(), 2, 4}, limit, &exceeding);
    return exceeding;
  };
  CacheConfig config{.shape = shape, .keep_residuals = true};
  std::vector<Certificate> found;
  FullKV<> full(config);
  CHECK(fill(full, found, {0.0F, 0.0F, 0.0F}) == 0);
  const LayerBasis basis = support::random_basis(random, shape, {.centred = false}, 8, 8);
  StaticPCAHybrid<> certified(config, basis), plain({.shape = shape}, basis);
  const Certificate none{1e30F, 1e30F, 1e30F};
  CHECK(fill(certified, found, none) == 0);
  float largest = 0.0F;
  for (const Certificate& bound : found) largest = std::max(largest, bound.logit);
  CHECK(largest > 0.0F);
  CHECK(fill(*std::make_unique<StaticPCAHybrid<>>(config, basis), found, {0.0F, 1e30F, 1e30F}) ==
        8);
  CHECK(fill(*std::make_unique<StaticPCAHybrid<>>(config, basis), found,
             {std::nextafter(largest, 0.0F), 1e30F, 1e30F}) >= 1);
  CHECK(fill(*std::make_unique<StaticPCAHybrid<>>(config, basis), found, {largest, 1e30F, 1e30F}) ==
        0);
  plain.create(0);
  plain.ingest(0, {k.data(), n, 2, 16}, {v.data(), n, 2, 16});
  // Two f16 a compressed row, one f32 a head.
  const std::size_t compressed = n - 64;
  CHECK(certified.memory(0).residual_bytes == 2 * (4 * compressed + 4));
  CHECK(certified.memory(0).total() ==
        plain.memory(0).total() + certified.memory(0).residual_bytes);
  std::vector<float> lse(8);
  CHECK_THROWS_AS(plain.certify(0, {q.data(), 2, 4, 16}, {lse.data(), 2, 4}, {found.data(), 2, 4}),
                  StateError);
  CHECK_THROWS_AS(certified.certify(0, {q.data(), 2, 4, 16}, {}, {found.data(), 2, 4}), ShapeError);
  CHECK_THROWS_AS(
      certified.certify(0, {q.data(), 2, 4, 16}, {lse.data(), 2, 4}, {found.data(), 1, 4}),
      ShapeError);
  CHECK_THROWS_AS(
      certified.certify(0, {q.data(), 2, 4, 16}, {lse.data(), 2, 4}, {found.data(), 2, 2}),
      ShapeError);
}

TEST_CASE("full rows in 8 bits: fewer bytes, within their bound, and certified") {
  Random random(39);
  const CacheShape shape{2, 1, 32};
  constexpr int n = 300;
  const auto k = support::random_rows(random, n, 1, 32), v = support::random_rows(random, n, 1, 32),
             q = support::random_rows(random, 1, 2, 32);
  CacheConfig config{.shape = shape, .keep_residuals = true};
  FullKV<> plain(config);
  config.full_row_bits = 8;
  FullKV<> coded(config);
  for (FullKV<>* cache : {&plain, &coded}) {
    cache->create(0);
    cache->ingest(0, {k.data(), n, 1, 32}, {v.data(), n, 1, 32});
  }
  CHECK(plain.memory(0).full_row_bytes == 2 * 2 * 32 * (n - 32));
  CHECK(coded.memory(0).full_row_bytes == 2 * (32 + 2) * (n - 32));
  std::vector<float> out(64), lse(2);
  std::vector<Certificate> found(2);
  coded.attend(0, {q.data(), 1, 2, 32}, {out.data(), 1, 2, 32}, {lse.data(), 1, 2});
  std::uint32_t exceeding = 0;
  coded.certify(0, {q.data(), 1, 2, 32}, {lse.data(), 1, 2}, {found.data(), 1, 2},
                kUnboundedCertificate, &exceeding);
  CHECK(exceeding == 0);
  CHECK(found[0].logit > 0.0F);
  CHECK(found[0].softmax < 0.2F);
  CHECK_THROWS_AS(FullKV<>({.shape = shape, .full_row_bits = 4}), ValueError);
}

TEST_CASE("a token whose weight is too small for a number is certified all the same") {
  // 200 keys with logit 790, and one with logit 800 of which storing keeps nothing.
  CacheConfig config{.shape = {1, 1, 2},
                     .full_type = DType::f32,
                     .epoch_type = DType::f32,
                     .softmax_scale = 1.0F,
                     .keep_residuals = true};
  LayerBasis basis;
  HeadBasis maps;
  maps.key_rank = 1;
  maps.value_rank = 2;
  maps.key_down = {1.0F, 0.0F};
  maps.value_down = {1.0F, 0.0F, 0.0F, 1.0F};
  basis.heads.push_back(maps);
  StaticPCA<> cache(config, basis);
  std::vector<float> k, v;
  for (int token = 0; token < 201; ++token) {
    const bool needle = token == 3;
    k.insert(k.end(), {needle ? 0.0F : 790.0F, needle ? 800.0F : 0.0F});
    v.insert(v.end(), {needle ? 1.0F : 0.0F, needle ? 0.0F : 1.0F});
  }
  cache.create(0);
  cache.ingest(0, {k.data(), 201, 1, 2}, {v.data(), 201, 1, 2});
  cache.append(0, {k.data(), 1, 1, 2}, {v.data(), 1, 1, 2});
  const std::vector<float> q{1.0F, 1.0F};
  std::vector<float> out(2), lse(1);
  std::vector<Certificate> found(1);
  cache.attend(0, {q.data(), 1, 1, 2}, {out.data(), 1, 1, 2}, {lse.data(), 1, 1});
  cache.certify(0, {q.data(), 1, 1, 2}, {lse.data(), 1, 1}, {found.data(), 1, 1});
  CHECK(found[0].softmax > 1.9F);
  CHECK(found[0].output > 1.39F);
}

TEST_CASE("a cache whose rows are not finite certifies nothing, and still loads what it saved") {
  CacheConfig config;
  config.shape = {1, 1, 8};
  config.full_type = DType::f32;
  config.check_finite = false;
  config.keep_residuals = true;
  LayerBasis basis;
  HeadBasis maps;
  maps.key_rank = maps.value_rank = 2;
  maps.key_down.assign(16, 0.0F);
  maps.key_down[0] = maps.key_down[3] = 1.0F;
  maps.value_down = maps.key_down;
  basis.heads.push_back(maps);
  config.max_sequences = 2;
  StaticPCA<> cache(config, basis);
  std::vector<float> rows(100 * 8, 1.0F);
  rows[40] = NAN;
  cache.create(0);
  cache.ingest(0, {rows.data(), 100, 1, 8}, {rows.data(), 100, 1, 8});
  std::vector<std::byte> saved(cache.save_bytes(0));
  cache.save(0, saved);
  cache.load(1, saved);
  std::vector<float> q(8, 1.0F), out(8), lse(1);
  cache.append(0, {q.data(), 1, 1, 8}, {q.data(), 1, 1, 8});
  cache.attend(0, {q.data(), 1, 1, 8}, {out.data(), 1, 1, 8}, {lse.data(), 1, 1});
  std::vector<Certificate> found(1);
  std::uint32_t exceeding = 0;
  cache.certify(0, {q.data(), 1, 1, 8}, {lse.data(), 1, 1}, {found.data(), 1, 1},
                {1e30F, 3.0F, 1e30F}, &exceeding);
  CHECK(exceeding == 1);
  CHECK(std::isinf(found[0].output));
}
