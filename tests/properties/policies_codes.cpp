// SPDX-License-Identifier: Apache-2.0
// Quantizers, joint values, projectors and Frequent Directions under random operations.
#include "lowrankkv/presets.hpp"
#include "observed_sequences.hpp"

using namespace lowrankkv;

namespace {
template <class Quantizer, class Tokens = SinkRecent, class Updater = Static>
using WithCodes = CompressedKVCache<Cpu, PerHead, Updater, Tokens, Quantizer>;
int draw(observed::Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}
/// Half a step in every coefficient: sqrt(rank) max|c| / 2^bits <= sqrt(96) ||x|| / 2^bits; f16
/// maps besides.
double code_tolerance(int bits) { return 9.8 / std::exp2(bits) + 4e-3; }
template <class Setup>
void with_joint_values(Setup& setup, observed::Random& random) {
  auto& policy = setup.policies.basis;
  const int heads = setup.config.shape.num_kv_heads;
  policy.heads_per_group = draw(random, 0, 1) == 0 ? 0 : 1;
  setup.basis = observed::random_joint_basis(random, setup.config.shape, policy.group_of(heads));
}
}  // namespace

TEST_CASE("Int8 rows stay within their bound") {
  const auto met = observed::run_cases<WithCodes<Int8>>(
      21, 10, 30, false, [](auto& setup, auto&) { setup.tolerance = code_tolerance(8); });
  CHECK(met[1] > 100);
}
TEST_CASE("BlockHadamard rows stay within their bound") {
  observed::run_cases<WithCodes<BlockHadamard>>(22, 10, 30, false, [](auto& setup, auto& random) {
    setup.policies.quantizer = {0.1F * static_cast<float>(draw(random, 0, 10)), draw(random, 2, 8),
                                draw(random, 2, 8), draw(random, 0, 1) == 1};
    setup.tolerance = code_tolerance(
        std::min(setup.policies.quantizer.high_bits, setup.policies.quantizer.low_bits));
  });
}
TEST_CASE("TransformCode: any widths, evicted, exempted, truncated, forked") {
  observed::run_cases<WithCodes<TransformCode>>(23, 8, 30, true, [](auto&, auto&) {});
  observed::run_cases<
      WithCodes<TransformCode, Compose<SinkRecent, HeavyHitters, ResidualOutliers>>>(
      24, 8, 30, true, [](auto& setup, auto& random) {
        setup.policies.token_policy.template get<HeavyHitters>().keep =
            0.1F * static_cast<float>(draw(random, 0, 8));
      });
}
TEST_CASE("a basis that moves under codes: channels are ordered and scaled anew, rows are merged") {
  observed::run_cases<WithCodes<TransformCode, SinkRecent, Oja>>(
      25, 8, 30, true, [](auto& setup, auto&) {
        setup.stores_change = true;
        setup.config.publish_interval = 20;
      });
  observed::run_cases<WithCodes<BlockHadamard, SinkRecent, Oja>>(
      26, 6, 30, false, [](auto& setup, auto&) { setup.stores_change = true; });
}
TEST_CASE("joint values: StarKV, and without a quantizer exactly the joint projection") {
  observed::run_cases<CompressedKVCache<Cpu, JointValues, Static, SinkRecent, NoQuantizer>>(
      27, 10, 30, false, [](auto& setup, auto& random) {
        with_joint_values(setup, random);
        setup.tolerance = 3e-3;
      });
  observed::run_cases<StarKV<>>(
      28, 10, 30, false, [](auto& setup, auto& random) { with_joint_values(setup, random); });
}
TEST_CASE("joint values with eviction and outliers: heads share every decision") {
  using Tokens = Compose<SinkRecent, HeavyHitters, ResidualOutliers>;
  const auto met =
      observed::run_cases<CompressedKVCache<Cpu, JointValues, Static, Tokens, NoQuantizer>>(
          29, 10, 40, false, [](auto& setup, auto& random) {
            with_joint_values(setup, random);
            setup.policies.token_policy.template get<HeavyHitters>() = {
                0.1F * static_cast<float>(draw(random, 1, 7)), 0, draw(random, 0, 30)};
            setup.policies.token_policy.template get<ResidualOutliers>().share = 0.1F;
            setup.tolerance = 3e-3;
          });
  for (const std::int64_t rows : met) CHECK(rows > 50);
  observed::run_cases<CompressedKVCache<Cpu, JointValues, Static, SnapKV, BlockHadamard>>(
      30, 8, 30, false, [](auto& setup, auto& random) { with_joint_values(setup, random); });
}
TEST_CASE("Projector: four maps, as given") {
  observed::run_cases<Dlrp<>>(31, 10, 30, false, [](auto& setup, auto& random) {
    for (HeadBasis& head : setup.basis.heads) {
      const int dim = setup.config.shape.head_dim;
      head.query_down =
          observed::row_major(observed::orthonormal(random, dim, head.key_rank) * 1.5);
      head.output_up = observed::row_major(
          observed::orthonormal(random, dim, head.value_rank).transpose() * 0.7);
    }
    setup.tolerance = 1e-2;
  });
}
TEST_CASE("SubSpaceA: chunks under bases from a sketch") {
  observed::run_cases<SubSpaceA<>>(32, 8, 30, false, [](auto& setup, auto& random) {
    setup.stores_change = true;
    setup.policies.updater.chunk_length = draw(random, 10, 100);
    for (HeadBasis& head : setup.basis.heads)
      head.key_threshold = draw(random, 0, 1) == 0 ? 2.0F : 100.0F;
  });
}
