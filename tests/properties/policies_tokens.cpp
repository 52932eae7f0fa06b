// SPDX-License-Identifier: Apache-2.0
// Token policies, alone and composed, under random operations.
#include "lowrankkv/presets.hpp"
#include "observed_sequences.hpp"

using namespace lowrankkv;

namespace {
template <class Tokens>
using WithTokens = CompressedKVCache<Cpu, PerHead, Static, Tokens, NoQuantizer>;
/// f16 coefficients and maps.
constexpr double kRounding = 3e-3;
int draw(observed::Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}
void randomise(SnapKV& policy, observed::Random& random) {
  policy.keep = 0.1F * static_cast<float>(draw(random, 0, 10));
  policy.budget = draw(random, 0, 2) == 0 ? draw(random, 1, support::length(60)) : 0;
  policy.window = draw(random, 1, support::length(40));
  policy.kernel = 1 + 2 * draw(random, 0, 4);
  policy.pooling = draw(random, 0, 1) == 0 ? Pooling::average : Pooling::maximum;
}
void randomise(HeavyHitters& policy, observed::Random& random) {
  policy.keep = 0.1F * static_cast<float>(draw(random, 0, 8));
  policy.budget = draw(random, 0, 2) == 0 ? draw(random, 1, support::length(60)) : 0;
  policy.recent = draw(random, 0, support::length(40));
}
}  // namespace

TEST_CASE("SnapKV on compressed rows") {
  const auto met =
      observed::run_cases<WithTokens<SnapKV>>(1, 10, 30, false, [](auto& setup, auto& random) {
        randomise(setup.policies.token_policy, random);
        setup.tolerance = kRounding;
      });
  CHECK(met[0] == 0);
  CHECK(met[1] > 100);
  CHECK(met[2] > 100);
}
TEST_CASE("SnapKVOnly keeps at full rank or drops") {
  const auto met =
      observed::run_cases<SnapKVOnly<>>(2, 10, 30, false, [](auto& setup, auto& random) {
        randomise(setup.policies.token_policy.template get<SnapKV>(), random);
      });
  CHECK(met[0] > 100);
  CHECK(met[1] == 0);
  CHECK(met[2] > 100);
}
TEST_CASE("StreamingLLM drops everything between sinks and window") {
  const auto met =
      observed::run_cases<StreamingLLM<>>(3, 10, 30, false, [](auto& setup, auto& random) {
        setup.policies.token_policy.sinks = draw(random, 0, 8);
        setup.policies.token_policy.recent = draw(random, 0, support::length(60));
      });
  CHECK(met[1] == 0);
  CHECK(met[2] > 100);
}
TEST_CASE("H2O drops stored rows too") {
  const auto met = observed::run_cases<H2O<>>(4, 12, 40, false, [](auto& setup, auto& random) {
    randomise(setup.policies.token_policy.template get<HeavyHitters>(), random);
  });
  CHECK(met[0] > 100);
  CHECK(met[1] == 0);
  CHECK(met[2] > 100);
}
TEST_CASE("heavy hitters among compressed rows, with sinks and outliers") {
  using Tokens = Compose<SinkRecent, HeavyHitters, ResidualOutliers>;
  const auto met =
      observed::run_cases<WithTokens<Tokens>>(5, 12, 40, false, [](auto& setup, auto& random) {
        randomise(setup.policies.token_policy.template get<HeavyHitters>(), random);
        setup.policies.token_policy.template get<SinkRecent>() = {
            draw(random, 0, support::length(20)), draw(random, 0, support::length(30))};
        setup.policies.token_policy.template get<ResidualOutliers>().share =
            0.05F * static_cast<float>(draw(random, 0, 6));
        setup.tolerance = kRounding;
      });
  for (const std::int64_t rows : met) CHECK(rows > 100);
}
TEST_CASE("residual outliers at full rank, on prompts and while decoding") {
  const auto met = observed::run_cases<WithTokens<Compose<SinkRecent, ResidualOutliers>>>(
      6, 10, 30, false, [](auto& setup, auto& random) {
        setup.policies.token_policy.template get<SinkRecent>() = {
            draw(random, 0, support::length(20)), draw(random, 0, support::length(30))};
        auto& outliers = setup.policies.token_policy.template get<ResidualOutliers>();
        outliers.share = 0.05F * static_cast<float>(draw(random, 0, 10));
        outliers.threshold = draw(random, 0, 1) == 0 ? 0.0F : 0.8F;
        outliers.first_tokens = draw(random, 0, 2) * draw(random, 0, 60);
        setup.tolerance = kRounding;
      });
  CHECK(met[0] > 100);
  CHECK(met[1] > 100);
  CHECK(met[2] == 0);
}
TEST_CASE("OjaKVv2 and OjaKVSnapKV") {
  observed::run_cases<OjaKVv2<>>(7, 8, 30, false,
                                 [](auto& setup, auto&) { setup.stores_change = true; });
  observed::run_cases<OjaKVSnapKV<>>(8, 8, 30, false, [](auto& setup, auto& random) {
    randomise(setup.policies.token_policy.template get<SnapKV>(), random);
    setup.stores_change = true;
  });
}
