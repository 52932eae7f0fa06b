// SPDX-License-Identifier: Apache-2.0
// Long sequences of operations on joint values, as several tests make them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/support/star_kv.cuh"

namespace star {

using support::effort;
using support::joint_rows;

/// Long sequences of operations on a few sequences with joint values, against the CPU, float64 and
/// themselves.
template <class Cache>
double random_joint(bool coded, DType type, std::uint64_t seed, int trials) {
  Random random(seed);
  double worst = 0.0;
  for (int trial = 0; trial < trials; ++trial) {
    StarSettings settings = random_settings(random);
    settings.joint = true;
    settings.coded = coded;
    settings.allocated =
        std::is_same_v<decltype(std::declval<typename Cache::PolicySet>().quantizer),
                       TransformCode>;
    settings.outliers = keeps_outliers<Cache>;
    CacheConfig config = random_config(random, type);
    const int counts[] = {1, 2, 3, 4, 6, 8, 10}, most = trial == 1 ? 6 : 4;
    config.shape.num_kv_heads = counts[random() % static_cast<unsigned>(most)];
    const int queries[] = {1, 2, 3, 4, 5, 8};
    if (trial == 2) config.shape.num_kv_heads = 10;  // latents of more channels than a block has
    config.shape.num_qo_heads = config.shape.num_kv_heads * queries[random() % 6];
    settings.heads_per_group = trial != 2 && random() % 2 == 0 ? 0
                               : config.shape.num_kv_heads % 2 == 0 && trial != 2
                                   ? config.shape.num_kv_heads / 2
                                   : config.shape.num_kv_heads;
    if (trial == 2) config.shape.head_dim = 128;
    const int width =
        (settings.heads_per_group > 0 ? settings.heads_per_group : config.shape.num_kv_heads) *
        config.shape.head_dim;
    const int rank = 1 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim)),
              joint_rank = trial == 2   ? 1180
                           : trial == 0 ? 1
                           : trial == 3
                               ? width
                               : 1 + static_cast<int>(random() %
                                                      static_cast<unsigned>(std::min(width, 600)));
    const support::RandomLayer layer =
        joint_layer(random, config.shape, settings, rank, joint_rank);
    Side<Cache> side(config, layer.basis, settings);
    const std::vector<SequenceId> seqs{1, 2, 3};
    std::vector<std::unique_ptr<support::CpuSide>> cpu;
    CAPTURE(trial);
    CAPTURE(config.shape.num_kv_heads);
    CAPTURE(config.shape.head_dim);
    CAPTURE(config.shape.group_size());
    CAPTURE(settings.heads_per_group);
    CAPTURE(rank);
    CAPTURE(joint_rank);
    CAPTURE(settings.quantizer.high_bits);
    CAPTURE(settings.quantizer.low_bits);
    CAPTURE(settings.quantizer.outlier_share);
    for (const SequenceId seq : seqs) {
      side.cache.create(seq);
      cpu.push_back(support::make_star_side(settings, config, layer.basis));
      const int lengths[] = {1, 17, 63, 64, 65, 200, 300};
      for (int part = 0; part < 1 + static_cast<int>(random() % 2); ++part) {
        const int n = trial == 2                                ? 150
                      : seq == 3 && part == 0 && trial % 3 == 0 ? 1100
                                                                : lengths[random() % 7];
        const auto key = joint_rows(random, layer, n, true),
                   value = joint_rows(random, layer, n, false);
        side.ingest(seq, key, value);
        cpu.back()->ingest(key, value, {});
      }
    }
    for (int step = 0; step < 3; ++step) {
      const int m = 1 + static_cast<int>(random() % static_cast<unsigned>(config.max_query_tokens));
      for (int repeat = 0; repeat < (step == 1 ? 30 : 1); ++repeat) {  // enough to flush
        const auto key = joint_rows(random, layer, 3 * m, true),
                   value = joint_rows(random, layer, 3 * m, false);
        side.append(seqs, key, value);
        for (std::size_t i = 0; i < 3; ++i)
          cpu[i]->append_maintained(third(key, i), third(value, i));
      }
      const int least = std::min(
          {m, side.cache.tail_length(1), side.cache.tail_length(2), side.cache.tail_length(3)});
      if (least > 0) {
        const auto query = layer.queries(random, 3 * least);
        const Answer answer = side.attend(seqs, query);
        CHECK(answer == side.attend(seqs, query));  // bit for bit
        for (std::size_t i = 0; i < 3; ++i) {
          const Answer own{third(answer.out, i), third(answer.lse, i)};
          compare(side, seqs[i], *cpu[i], third(query, i), own, worst,
                  coded                ? 1e-3
                  : type == DType::f16 ? 3e-5
                                       : 2e-4);
          CHECK(side.attend(std::span(&seqs[i], 1), third(query, i)) ==
                own);  // the same in any batch
        }
      }
      if (step == 0) truncate_one(random, side, seqs, cpu, settings.outliers && trial % 2 == 0);
      if (step == 1)
        remove_middles(side, seqs, cpu, settings.tokens.sinks, settings.outliers && trial % 2 == 0);
    }
    CHECK(side.cache.faults() == 0);
    for (const SequenceId seq : seqs) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
  }
  return worst;
}

/// A captured step of joint values, replayed between calls that compress, is what the same calls
/// make.
template <class Cache>
void check_captured_joint_steps(std::uint64_t seed, StarSettings settings, int joint_rank) {
  Random random(seed);
  settings.tokens = {2, 20};
  CacheConfig config;
  config.shape = {6, 3, 64};
  config.max_sequences = 2;
  config.max_tokens = 1500;
  config.flush_interval = 16;
  const support::RandomLayer layer = joint_layer(random, config.shape, settings, 30, joint_rank);
  Side<Cache> side(config, layer.basis, settings), plain(config, layer.basis, settings);
  const std::vector<SequenceId> seqs{1, 2};
  for (const SequenceId seq : seqs) {
    const auto key = joint_rows(random, layer, 90 * seq, true),
               value = joint_rows(random, layer, 90 * seq, false);
    for (auto* each : {&side, &plain}) {
      each->cache.create(seq);
      each->ingest(seq, key, value);
    }
  }
  check_captured_steps(random, layer, side, plain, seqs, effort() == 0 ? 20 : 100);
}

}  // namespace star
