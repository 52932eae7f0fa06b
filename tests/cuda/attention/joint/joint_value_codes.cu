// SPDX-License-Identifier: Apache-2.0
// Joint values in codes whose channels have their own bits, against the CPU backend and against
// float64 attention over what is stored.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/support/joint_sequences.cuh"

namespace joint_value_codes_tests {

using namespace lowrankkv;
using namespace star;
using support::Answer;
using support::Random;
using support::StarSettings;

TEST_CASE(
    "random sequences of joint values in codes of their own bits: rows as on the CPU, answers as "
    "in float64, the same in any batch") {
  const int trials = effort() == 0 ? 2 : 4 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    CAPTURE(std::string(name_of(type)));
    const double worst =
        random_joint<JointCodes>(true, type, type == DType::f16 ? 201 : 202, trials);
    MESSAGE(std::string(name_of(type)) << ": outputs " << worst);
  }
}

TEST_CASE("joint values of whatever bits, blocks of one channel, and none") {
  Random random(203);
  const std::vector<std::vector<std::pair<int, int>>> allocations{
      {{0, 40}},         {{8, 40}},
      {{1, 40}},         {{8, 1}, {7, 1}, {6, 1}, {5, 1}, {4, 1}, {3, 1}, {2, 1}, {1, 1}, {0, 32}},
      {{7, 33}, {5, 7}}, {{6, 32}, {3, 8}},
      {{2, 5}, {0, 35}}};
  for (const auto& allocation : allocations) {
    for (const bool pre_rope : {false, true}) {
      StarSettings settings;
      settings.joint = settings.allocated = true;
      settings.basis.centred = allocation.size() % 2 == 1;
      settings.tokens = {3, 20};
      CacheConfig config;
      config.shape = {4, 2, 64};
      config.max_tokens = 400;
      config.full_type = DType::f16;
      config.epoch_type = DType::f32;
      if (pre_rope) config.rope.keys = Rope::pre;
      support::RandomLayer layer = joint_layer(random, config.shape, settings, 30, 40);
      for (HeadBasis& head : layer.basis.heads) {
        head.value_bits.clear();
        for (const auto& [bits, channels] : allocation)
          head.value_bits.insert(head.value_bits.end(), static_cast<std::size_t>(channels),
                                 static_cast<std::uint8_t>(bits));
      }
      CAPTURE(allocation.front().first);
      CAPTURE(allocation.size());
      CAPTURE(pre_rope);
      Side<JointCodes> side(config, layer.basis, settings);
      const auto cpu = support::make_star_side(settings, config, layer.basis);
      side.cache.create(1);
      const auto key = joint_rows(random, layer, 150, true),
                 value = joint_rows(random, layer, 150, false);
      side.ingest(1, key, value);
      cpu->ingest(key, value, {});
      const std::vector<SequenceId> one{1};
      const auto query = layer.queries(random, 1);
      double worst = 0.0;
      compare(side, 1, *cpu, query, side.attend(one, query), worst, pre_rope ? 4e-3 : 1e-3);
      const std::vector<std::byte> saved = side.save(1);
      Side<JointCodes> other(config, layer.basis, settings);
      other.cache.load(1, saved);
      CHECK(other.save(1) == saved);
      CHECK(other.attend(one, query) == side.attend(one, query));
    }
  }
}

TEST_CASE(
    "joint values in codes of their own bits: a captured step replayed between calls that compress "
    "is what the same calls make") {
  StarSettings settings;
  settings.joint = settings.allocated = true;
  check_captured_joint_steps<JointCodes>(204, settings, 100);
}

}  // namespace joint_value_codes_tests
