// SPDX-License-Identifier: Apache-2.0
// Bases that move in a batch.
#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace adapt_tests {

using namespace lowrankkv;
using support::Device;
using support::DeviceSide;
using support::Random;

TEST_CASE(
    "bases move in a batch as they do alone, even where all flushed rows of a sequence stay full") {
  Random random(43);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.max_sequences = 4;
  config.flush_interval =
      1;  // every other row is an outlier, here of one sequence, there of the other
  config.publish_interval = 8;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  OjaKVv2<Cuda>::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {0, 4};
  policies.token_policy.get<ResidualOutliers>().share = 0.5F;
  Device<OjaKVv2<Cuda>> together(config, layer.basis, policies),
      apart(config, layer.basis, policies);
  const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
  const std::vector<SequenceId> seqs{1, 2};
  for (DeviceSide* side : {static_cast<DeviceSide*>(&together), static_cast<DeviceSide*>(&apart)}) {
    for (const SequenceId seq : seqs) side->create(seq);
    side->append_maintained(std::span(seqs).first(1), key, value);
  }
  for (int step = 0; step < 40; ++step) {
    const auto keys = layer.rows(random, 2, true), values = layer.rows(random, 2, false);
    together.append_maintained(seqs, keys, values);
    for (std::size_t i = 0; i < 2; ++i) {
      const std::ptrdiff_t from = static_cast<std::ptrdiff_t>(i * keys.size() / 2),
                           to = from + static_cast<std::ptrdiff_t>(keys.size() / 2);
      apart.append_maintained(std::span(seqs).subspan(i, 1),
                              {keys.begin() + from, keys.begin() + to},
                              {values.begin() + from, values.begin() + to});
    }
  }
  CHECK(together.publications() > 2);
  CHECK(together.publications() == apart.publications());
  for (const SequenceId seq : seqs) CHECK(together.save(seq) == apart.save(seq));
}

}  // namespace adapt_tests
