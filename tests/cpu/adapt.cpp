// SPDX-License-Identifier: Apache-2.0
// What reaches a basis, and what is published: nothing that is not finite, no basis that is none.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/small_cache.hpp"

namespace adapt_tests {
namespace {
/// An updater whose basis is not finite.
struct Broken {};
}  // namespace
}  // namespace adapt_tests

template <>
struct lowrankkv::Impl<adapt_tests::Broken, lowrankkv::Cpu> {
  static constexpr bool adapts = true;
  struct State {};
  static PromptSelection prompt_selection(const adapt_tests::Broken&) { return {}; }
  static void observe(const adapt_tests::Broken&, State&, MatrixView, MatrixView, Phase) {}
  static bool maybe_update(const adapt_tests::Broken&, State&, MatrixView,
                           MutableMatrixView updated, Phase) {
    for (std::int64_t row = 0; row < updated.rows; ++row)
      std::fill_n(updated.row(row), updated.cols, row % 2 == 0 ? 1.0F : 0.0F / 0.0F);
    return true;
  }
  static std::size_t state_bytes(const State&) { return 0; }
};

namespace adapt_tests {

using namespace lowrankkv;
using namespace support::small;

TEST_CASE("rows that are not finite reach no basis, and a flush is never left half-way") {
  std::mt19937_64 random(2);
  CacheConfig config{.shape = kShape, .max_tokens = 600};
  config.check_finite = false;
  config.flush_interval = 8;
  config.publish_interval = 20;
  const auto run = [&]<class Cache>(Cache cache) {
    cache.create(0);
    const int n = 300;
    const auto q = rows(random, n, 2);
    auto k = rows(random, n, 1), v = rows(random, n, 1);
    k[100 * 32 + 3] = std::numeric_limits<float>::quiet_NaN();
    v[220 * 32] = std::numeric_limits<float>::infinity();
    cache.ingest(0, {k.data(), 200, 1, 32}, {v.data(), 200, 1, 32}, {q.data(), 200, 2, 32});
    for (int token = 200; token < n; ++token)
      cache.append_maintained(0, {k.data() + token * 32, 1, 1, 32},
                              {v.data() + token * 32, 1, 1, 32});
    CHECK(cache.statistics().rejected_updates > 0);
    CHECK(cache.statistics().flushes > 5);
    // Rows that were finite are still read as finite rows.
    std::vector<float> decoded_k(300 * 32), decoded_v(decoded_k.size());
    cache.reconstruct(0, 0, {decoded_k.data(), n, 1, 32}, {decoded_v.data(), n, 1, 32});
    for (int token = 0; token < n; ++token) {
      if (token == 100 || token == 220) continue;
      REQUIRE(std::isfinite(decoded_k[static_cast<std::size_t>(token * 32)]));
      REQUIRE(std::isfinite(decoded_v[static_cast<std::size_t>(token * 32)]));
    }
  };
  run(SubSpaceA<>(config, basis()));
  run(OjaKV<>(config, basis()));
}

TEST_CASE("a basis that is no basis is not published") {
  const CacheShape shape{8, 2, 64};
  support::Random of_basis(1);
  const LayerBasis basis = support::random_basis(of_basis, shape, {.centred = false}, 24, 32);
  support::Random random(9);
  const auto k = support::random_rows(random, 500, 2, 64),
             v = support::random_rows(random, 500, 2, 64);
  CompressedKVCache<Cpu, PerHead, Broken> cache({.shape = shape}, basis);
  StaticPCAHybrid<> plain({.shape = shape}, basis);
  cache.create(0);
  plain.create(0);
  cache.ingest(0, {k.data(), 500, 2, 64}, {v.data(), 500, 2, 64});
  plain.ingest(0, {k.data(), 500, 2, 64}, {v.data(), 500, 2, 64});
  CHECK(cache.statistics().rejected_updates == 4);
  CHECK(cache.statistics().publications == 0);
  CHECK(cache.memory(0).total() == plain.memory(0).total());
}

}  // namespace adapt_tests
