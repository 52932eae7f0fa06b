// SPDX-License-Identifier: Apache-2.0
// Compositions in which one policy leaves another nothing to do.
#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"
#include "support/small_cache.hpp"

namespace compose_tests {

using namespace lowrankkv;
using namespace support::small;

TEST_CASE(
    "policies that never compress take members that ask for residuals, and updaters that have "
    "nothing to do") {
  std::mt19937_64 random(1);
  CompressedKVCache<Cpu, PerHead, Static, Compose<KeepFull, ResidualOutliers>> outliers(
      {.shape = kShape, .max_tokens = 300});
  outliers.create(0);
  ingest(outliers, random, 200);
  CHECK(outliers.num_tokens(0) == 200);
  CompressedKVCache<Cpu, PerHead, FrequentDirections, KeepFull> idle(
      {.shape = kShape, .max_sequences = 2, .max_tokens = 300});
  idle.create(0);
  ingest(idle, random, 200);
  std::vector<std::byte> bytes(idle.save_bytes(0));
  idle.save(0, bytes);
  idle.load(1, bytes);
  CHECK(idle.num_tokens(1) == 200);
}

}  // namespace compose_tests
