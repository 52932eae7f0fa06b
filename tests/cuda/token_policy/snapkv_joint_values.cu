// SPDX-License-Identifier: Apache-2.0
// Joint values of the rows that SnapKV keeps: heads of a group keep the same.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/star_kv.cuh"

namespace snapkv_joint_values_tests {

using namespace lowrankkv;
using support::Answer;
using support::different_rows;
using support::distance;
using support::effort;
using support::furthest;
using support::joint_rows;
using support::message_of;
using support::Random;
using support::StarSettings;
using namespace star;

TEST_CASE(
    "joint values of the rows that scores keep: heads of a group keep the same, as on the CPU; "
    "copies go on as the original") {
  Random random(31);
  for (int trial = 0; trial < (effort() == 0 ? 2 : 6 * effort()); ++trial) {
    StarSettings settings = random_settings(random);
    settings.scored = settings.joint = true;
    settings.scores = {0.3F, random() % 2 == 0 ? 90 : 0, 16, 1 + 2 * static_cast<int>(random() % 3),
                       Pooling::average};
    CacheConfig config = random_config(random, trial % 2 == 0 ? DType::f16 : DType::bf16);
    config.shape = {8, 4, trial % 3 == 0 ? 128 : 64};
    settings.heads_per_group = trial % 2 == 0 ? 2 : 0;
    config.epoch_type = DType::f32;
    CAPTURE(trial);
    const support::RandomLayer layer = joint_layer(random, config.shape, settings, 30, 90);
    Side<Scored> side(config, layer.basis, settings), other(config, layer.basis, settings);
    const auto cpu = support::make_star_side(settings, config, layer.basis);
    const SequenceId one = 1, two = 2;
    side.cache.create(1);
    const std::int64_t n = 300 + static_cast<std::int64_t>(random() % 300);
    const auto key = layer.rows(random, n, true), value = joint_rows(random, layer, n, false);
    auto window = layer.queries(random, 16);
    for (float& x : window) x = round_to(config.full_type, x);
    side.ingest(1, key, value, window);
    cpu->ingest(key, value, window);
    std::vector<RowState> states(static_cast<std::size_t>(n)), of_leader(states);
    int dropped = 0, apart = 0;
    for (int head = 0; head < config.shape.num_kv_heads; ++head) {
      side.cache.row_states(1, head, 0, states);
      if (settings.heads_per_group == 0 ? head == 0 : head % settings.heads_per_group == 0) {
        apart += head > 0 && states != of_leader ? 1 : 0;
        of_leader = states;
      }
      CHECK(states == of_leader);
      dropped += static_cast<int>(std::count(states.begin(), states.end(), RowState::dropped));
    }
    CHECK(dropped > 0);
    if (settings.heads_per_group != 0) CHECK(apart > 0);
    const auto check = [&](SequenceId seq, const Answer& answer, const std::vector<float>& query,
                           bool against_cpu) {
      std::vector<float> stored_key, stored_value, cpu_key, cpu_value;
      side.reconstruct(seq, stored_key, stored_value);
      cpu->reconstruct(cpu_key, cpu_value);
      if (against_cpu) {  // of rows whose scores are almost equal one may stay here and the other
                          // there
        CHECK(different_rows(stored_key, cpu_key, config.shape.head_dim) <=
              2 + stored_key.size() / static_cast<std::size_t>(config.shape.head_dim) / 100);
        CHECK(different_rows(stored_value, cpu_value, config.shape.head_dim) <=
              2 + stored_key.size() / static_cast<std::size_t>(config.shape.head_dim) / 50);
      }
      std::vector<double> expected, lse;
      support::attend_f64(config.shape, config.scale(), stored_key, stored_value, query, expected,
                          lse, true);
      CHECK(distance(answer.out, expected) < 1e-3);
      CHECK(furthest(answer.lse, lse) <
            1e-3 * std::max(1.0, furthest(lse, std::vector<double>(lse.size()))));
    };
    for (int step = 0; step < 70; ++step) {
      const auto own_key = layer.rows(random, 1, true),
                 own_value = joint_rows(random, layer, 1, false);
      side.append(std::span(&one, 1), own_key, own_value);
      cpu->append_maintained(own_key, own_value);
    }
    const auto query = layer.queries(random, 1);
    const Answer answer = side.attend(std::span(&one, 1), query);
    check(1, answer, query, true);
    side.cache.fork(1, 2);
    other.cache.create(1);
    other.cache.load(2, side.save(1));
    CHECK(side.attend(std::span(&two, 1), query) == answer);
    CHECK(other.attend(std::span(&two, 1), query) == answer);
    // Heads of a group share latents: a state in which one of them has another token in a row's
    // place is refused.
    const int last_head = config.shape.num_kv_heads - 1;
    std::vector<RowState> all(static_cast<std::size_t>(n + 70));
    side.cache.row_states(2, last_head, 0, all);
    std::vector<std::int32_t> kept;
    for (std::int32_t token = 0; token < static_cast<std::int32_t>(all.size()); ++token) {
      if (all[static_cast<std::size_t>(token)] == RowState::compressed) kept.push_back(token);
    }
    std::vector<std::byte> hostile = side.save(2);
    const auto pattern = std::as_bytes(std::span(kept));
    const auto found =
        std::find_end(hostile.begin(), hostile.end(), pattern.begin(), pattern.end());
    REQUIRE(found != hostile.end());
    std::size_t behind_gap = 1;
    while (kept.at(behind_gap) == kept[behind_gap - 1] + 1) ++behind_gap;
    const std::int32_t moved = kept[behind_gap] - 1;
    std::memcpy(hostile.data() + (found - hostile.begin()) +
                    static_cast<std::ptrdiff_t>(behind_gap * sizeof moved),
                &moved, sizeof moved);
    const std::string unequal =
        message_of([&] { other.cache.load(3, support::with_checksum(hostile)); });
    CHECK(unequal.find("has position " + std::to_string(moved) + " where head ") !=
          std::string::npos);
    CHECK(unequal.find(", whose values are joint with its own, has " + std::to_string(moved + 1)) !=
          std::string::npos);
    CHECK(!other.cache.contains(3));
    // Truncates behind the prompt, then within it, where groups kept different numbers of rows;
    // then removes some of its middle.
    const auto goes_on = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        const auto own_key = layer.rows(random, 1, true),
                   own_value = joint_rows(random, layer, 1, false);
        side.append(std::span(&one, 1), own_key, own_value);
        cpu->append_maintained(own_key, own_value);
      }
      for (int head = 0; head < config.shape.num_kv_heads; ++head) {
        const int leader = settings.heads_per_group == 0
                               ? 0
                               : head / settings.heads_per_group * settings.heads_per_group;
        std::vector<RowState> own(static_cast<std::size_t>(side.cache.num_tokens(1))),
            first(own.size());
        side.cache.row_states(1, head, 0, own);
        side.cache.row_states(1, leader, 0, first);
        CHECK(own == first);
      }
      check(1, side.attend(std::span(&one, 1), query), query, true);
    };
    side.cache.truncate(1, n + 10);
    cpu->truncate(n + 10);
    goes_on(1);
    side.cache.truncate(1, n / 2);
    cpu->truncate(n / 2);
    goes_on(1);
    goes_on(70);
    side.cache.remove(1, n / 4, n / 8);
    cpu->remove(n / 4, n / 8);
    goes_on(30);
    other.cache.load(4, side.save(1));
    CHECK(other.save(4) == side.save(1));
    const std::vector<SequenceId> four{4};
    CHECK(other.attend(four, query) == side.attend(std::span(&one, 1), query));
    CHECK(side.attend(std::span(&two, 1), query) == answer);
  }
}

}  // namespace snapkv_joint_values_tests
