// SPDX-License-Identifier: Apache-2.0
// Codes of whole rows, without calibration, under random operations.
#include "lowrankkv/presets.hpp"
#include "observed_sequences.hpp"

namespace policies_baselines_tests {

using namespace lowrankkv;

namespace {
int draw(observed::Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}
/// No basis is given; `tolerance` bounds what a row loses, relative to its norm.
auto with(double tolerance) {
  return [tolerance](auto& setup, auto& random) {
    setup.basis = {};
    setup.tolerance = tolerance;
    if constexpr (requires { setup.policies.quantizer.row_scale; })
      setup.policies.quantizer.row_scale = draw(random, 0, 1) == 1;
  };
}
}  // namespace

TEST_CASE("rows in the formats of engines") {
  // sqrt(96) max |x| / 254 and / 8; a sixteenth of each number.
  CHECK(observed::run_cases<Q8_0<>>(33, 8, 30, false, with(0.04))[1] > 100);
  observed::run_cases<Q4_0<>>(34, 8, 30, false, with(1.3));
  observed::run_cases<Fp8<>>(35, 8, 30, false, with(0.07));
}
TEST_CASE("rows in 8 bits, evicted and exempted") {
  using Tokens = Compose<SinkRecent, HeavyHitters, ResidualOutliers>;
  observed::run_cases<CompressedKVCache<Cpu, Identity, Static, Tokens, GgmlBlocks<8>>>(
      36, 6, 30, false, with(0.04));
}
TEST_CASE("TurboQuant") {
  const auto met =
      observed::run_cases<TurboQuant<>>(37, 8, 30, false, [](auto& setup, auto& random) {
        setup.basis = {};
        setup.policies.quantizer = {draw(random, 1, 5), random()};
        setup.tolerance = 1.0;
      });
  CHECK(met[1] > 100);
}
TEST_CASE("KIVI, with groups of any length and whatever the token policy makes of them") {
  const auto adjust = [](auto& setup, auto& random) {
    setup.basis = {};
    setup.stores_change = true;  // remove() and truncate()
    setup.config.keep_residuals = false;
    auto& codes = setup.policies.quantizer;
    codes = {draw(random, 1, 5), 8 * draw(random, 1, 3), draw(random, 1, 40)};
    setup.config.flush_interval = codes.tokens * draw(random, 1, 2);
  };
  const auto met = observed::run_cases<Kivi<>>(38, 10, 40, false, [&](auto& setup, auto& random) {
    adjust(setup, random);
    setup.policies.token_policy.recent = draw(random, 0, 40);
  });
  CHECK(met[1] > 100);
  using Tokens = Compose<SinkRecent, HeavyHitters>;
  observed::run_cases<CompressedKVCache<Cpu, Identity, Static, Tokens, ChannelGroups>>(
      39, 6, 30, false, adjust);
}

}  // namespace policies_baselines_tests
