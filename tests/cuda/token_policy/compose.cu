// SPDX-License-Identifier: Apache-2.0
// How many rows of a prompt and of flushes stay full, from counts.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "lowrankkv/cuda/presets.cuh"

namespace compose_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

namespace {

/// Counts of a prompt and the flushes behind it never exceed what a cache has room for.
template <class Policy>
void counts_fit(const Policy& policy, std::mt19937& random) {
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t tokens = 1 + random() % 3000, flush = 1 + random() % 64;
    const auto most = [&](std::int64_t rows) {
      return std::max(gpu::row_counts(policy, 0, rows, Phase::prefill).full,
                      gpu::row_counts(policy, 0, rows, Phase::decode).full);
    };
    std::int64_t left = 0, full = 0, compressed = 0;
    Phase phase = Phase::prefill;
    for (std::int64_t rows = random() % static_cast<unsigned>(tokens + 1); left + rows <= tokens;
         rows = flush) {
      const gpu::RowCounts counts = gpu::row_counts(policy, left, rows, phase);
      CHECK(0 <= counts.pinned);
      CHECK(counts.pinned <= counts.full);
      CHECK(0 <= counts.compressed);
      CHECK(counts.full + counts.compressed <= rows);
      left += rows;
      full += counts.full;
      compressed += counts.compressed;
      CHECK(full <= most(left));
      CHECK(most(left) <= most(tokens));
      phase = Phase::decode;
    }
    CHECK(full + compressed <= tokens);
  }
}

}  // namespace

TEST_CASE("full rows of any prompt and flushes stay within the room that counts leave them") {
  std::mt19937 random(2);
  counts_fit(KeepFull{}, random);
  counts_fit(CompressAll{}, random);
  counts_fit(SinkRecent{37, 20}, random);
  counts_fit(SlidingWindow{5, 100}, random);
  counts_fit(SnapKV{}, random);
  counts_fit(Compose(KeepFull{}, SnapKV{.keep = 0.3F}), random);
  counts_fit(Compose(SinkRecent{9, 32}, SnapKV{.budget = 70}), random);
  counts_fit(Compose(SinkRecent{33, 32}, ResidualOutliers{.share = 0.13F}), random);
  counts_fit(Compose(SlidingWindow{4, 32}, ResidualOutliers{}), random);
}

}  // namespace compose_tests
