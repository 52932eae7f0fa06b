// SPDX-License-Identifier: Apache-2.0
// What every cache with heavy hitters must do, however it stores the rows that it keeps.
#pragma once

#include <memory>
#include <vector>

#include "cuda/support/heavy_hitters.cuh"

namespace heavy {

/// Accumulated attention scores of steps against float64 over what is stored. Returns the largest
/// error.
/// @param type  of full rows, and of coefficients
/// @param pre_rope  whether keys are stored before RoPE
template <class Cache>
double check_scores(Random& random, DType type, int trials, bool pre_rope = false) {
  double worst = 0.0;
  for (int trial = 0; trial < trials; ++trial) {
    const int dims[] = {64, 80, 128, 256}, groups[] = {1, 4, 7},
              heads = joins<Cache> ? 2 + 2 * (trial % 2) : 1 + trial % 2, group = groups[trial % 3],
              dim = joins<Cache> ? dims[trial % 3] : dims[trial % 4];
    CacheConfig config = config_of({heads * group, heads, dim}, 4000, 3, 16);
    config.full_type = type;
    config.full_row_bits = (trial + trial / 4) % 2 == 1 ? 8 : 0;
    config.publish_interval = 40;
    if (pre_rope) config.rope = support::random_rope(random, dim);
    HeavySettings settings{{0.5F, 0, 10 + static_cast<int>(random() % 30)},
                           {static_cast<int>(random() % 8), 0}};
    settings.heads_per_group = trial % 2 == 0 ? 0 : 2;
    settings.coefficients = type;
    const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
    Side<Cache> side(config, layer, settings);
    const std::vector<SequenceId> seqs{4, 5, 6};
    const int lengths[] = {0, 1 + static_cast<int>(random() % 80),
                           400 + static_cast<int>(random() % 1200)};
    for (std::size_t i = 0; i < 3; ++i) {
      side.cache.create(seqs[i]);
      if (lengths[i] == 0) continue;
      const auto query = random_rows(random, lengths[i], heads * group, dim, DType::f32);
      side.ingest(seqs[i], random_rows(random, lengths[i], heads, dim, type),
                  random_rows(random, lengths[i], heads, dim, type), query);
    }
    for (int step = 0; step < 5; ++step) {  // new rows take the places of evicted ones
      side.append(seqs, random_rows(random, 3 * 16, heads, dim, type),
                  random_rows(random, 3 * 16, heads, dim, type));
      const std::int64_t positions = side.cache.num_tokens(6);
      std::vector<float> accumulated(static_cast<std::size_t>(3 * heads * positions));
      for (float& x : accumulated) x = static_cast<float>(random() % 300);
      side.accumulate(seqs, accumulated, positions);
      side.cache.maintain(seqs);
    }
    const int m = 1 + trial % 5;
    if (pre_rope) side.cache.shift_positions(5, side.cache.num_tokens(5) / 3, 1000);
    side.append(seqs, random_rows(random, 3 * m, heads, dim, type),
                random_rows(random, 3 * m, heads, dim, type));
    const DType query_type = trial % 2 == 0 ? DType::f32 : type;
    const auto query = random_rows(random, 3 * m, heads * group, dim, query_type, 1.5F);
    const ScoredList answer = side.accumulate(seqs, query, query_type);
    CHECK(answer == side.accumulate(seqs, query, query_type));
    CHECK(answer.accumulated == side.accumulate(seqs, query, query_type, false).accumulated);
    CAPTURE(trial);
    CAPTURE(dim);
    CAPTURE(group);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto own_query = part_of(query, i, 3), own_score = part_of(answer.accumulated, i, 3);
      const ScoredList alone = side.accumulate(std::span(&seqs[i], 1), own_query, query_type);
      CHECK(alone.out == part_of(answer.out, i, 3));
      CHECK(alone.lse == part_of(answer.lse, i, 3));
      std::vector<float> key, value, found;
      side.reconstruct(seqs[i], key, value);
      const std::vector<bool> there = kept_rows_of(config.shape, key);
      const std::vector<double> expected = scores_f64(
          config.shape, config.scale(),
          support::rotated(config, key,
                           [&](std::int64_t token) { return side.cache.position(seqs[i], token); }),
          there, own_query);
      const std::int64_t tokens = side.cache.num_tokens(seqs[i]);
      bool zeros = true, same = true;
      for (int head = 0; head < heads; ++head) {
        for (std::int64_t position = 0; position < answer.positions; ++position) {
          const float accumulated =
              own_score[static_cast<std::size_t>(head * answer.positions + position)];
          if (position < tokens) found.push_back(accumulated);
          if (position >= tokens || !there[static_cast<std::size_t>(position * heads + head)])
            zeros = zeros && accumulated == 0.0F;
          if (position < tokens)
            same = same &&
                   alone.accumulated[static_cast<std::size_t>(head * alone.positions + position)] ==
                       accumulated;
        }
      }
      CHECK(zeros);
      CHECK(same);
      // Queries, here or where the log-sum-exp was made, are two numbers of the rows' type: 22 bits
      // in f16, 16 in bf16. Where rows are codes, integers of 16 bits. Pre-RoPE keys are rotated in
      // f16 when they are read.
      const double error = distance(found, expected), limit = pre_rope             ? 4e-3
                                                              : coded<Cache>       ? 1e-3
                                                              : type == DType::f16 ? 2e-5
                                                                                   : 2e-4;
      worst = std::max(worst, error);
      CHECK(error < limit);
    }
    CHECK(side.cache.faults() == 0);
  }
  return worst;
}

/// Prompts and steps keep the rows whose accumulated scores are the largest in float64, of new and
/// of stored rows.
template <class Cache>
void check_kept(Random& random, int trials, bool pre_rope = false) {
  std::int64_t exempt = 0;  // rows that are full for their errors
  for (int trial = 0; trial < trials; ++trial) {
    const int dims[] = {64, 128, 80, 256}, groups[] = {4, 1, 7}, heads = joins<Cache> ? 4 : 2,
              group = groups[trial % 3], dim = joins<Cache> ? dims[trial % 3] : dims[trial % 4],
              sinks = trial % 2 * 3, recent = 5 + static_cast<int>(random() % 40);
    const DType type = trial % 4 < 2 ? DType::f16 : DType::bf16;
    CacheConfig config = config_of({heads * group, heads, dim}, 2000, 1, 24);
    config.full_type = type;
    config.publish_interval = 40;
    if (pre_rope) config.rope = support::random_rope(random, dim);
    HeavySettings settings{
        {0.15F + 0.1F * static_cast<float>(trial % 5), trial % 3 == 2 ? 90 : 0, recent},
        {sinks, 2}};
    settings.heads_per_group = trial % 2 == 0 ? 2 : 0;
    settings.coefficients = type;
    settings.share = 0.1F;
    const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
    Side<Cache> side(config, layer, settings);
    const SequenceId seq = 1;
    side.cache.create(seq);
    Ledger ledger{config.shape, fate_heads<Cache>(settings, config.shape), {}};
    const double band = pre_rope ? 2e-2 : coded<Cache> ? 5e-3 : type == DType::f16 ? 1e-4 : 1e-3;
    std::vector<float> key, value;
    const auto check = [&](const std::vector<bool>& before) {
      const std::int64_t left = side.cache.rollback_limit(seq);
      side.reconstruct(seq, key, value);
      const std::int64_t pinned = std::min<std::int64_t>(sinks, left),
                         wanted = std::min(left, heavy_rows(settings.heavy, left) + pinned);
      std::int64_t full = (compresses<Cache> ? pinned : wanted) * heads, found = 0;
      for (int head = 0; head < heads; ++head) {
        const std::vector<RowState> states = side.states(seq, head);
        found += std::count(states.begin(), states.begin() + static_cast<std::ptrdiff_t>(left),
                            RowState::full);
      }
      if (exempts<Cache>) {
        CHECK(found >= full);
        exempt += found - full;
        full = found;
      }
      CHECK(found == full);
      ledger.check(before, kept_rows_of(config.shape, key), left, wanted, sinks, band);
      CHECK(side.cache.memory(seq).full_row_bytes == static_cast<std::size_t>(full * dim * 4));
      const std::int64_t scored = compresses<Cache> && !exempts<Cache> ? wanted - pinned : wanted;
      if (!moves<Cache>)
        CHECK(side.cache.memory(seq).updater_bytes ==
              static_cast<std::size_t>((scored + side.cache.tail_length(seq)) * heads * 4));
      CHECK(side.cache.memory(seq).position_bytes == static_cast<std::size_t>(wanted * heads * 4));
    };
    CAPTURE(trial);
    for (int part = 0; part < 3; ++part) {
      const int lengths[] = {3, 70, 128, 200, 260}, n = effort() == 0 ? 70 : lengths[random() % 5];
      const auto query = random_rows(random, n, heads * group, dim, DType::f32, 1.5F),
                 prompt_key = random_rows(random, n, heads, dim, type),
                 prompt_value = random_rows(random, n, heads, dim, type);
      if (part > 0) side.reconstruct(seq, key, value);
      key.insert(key.end(), prompt_key.begin(), prompt_key.end());
      const std::vector<bool> before = kept_rows_of(config.shape, key);
      const std::int64_t tokens = static_cast<std::int64_t>(before.size()) / heads;
      ledger.extend(tokens);
      const std::vector<double> received =
          scores_f64(config.shape, config.scale(), support::rotated(config, key), before, query);
      for (int head = 0; head < heads; ++head) {
        for (std::int64_t t = 0; t < tokens; ++t)
          ledger.accumulated[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)] +=
              received[static_cast<std::size_t>(head * tokens + t)];
      }
      if (trial % 2 == 0)
        side.prefill(seq, query, prompt_key, prompt_value);
      else
        side.ingest(seq, prompt_key, prompt_value, query);
      check(before);
      for (int step = 0; step < 3; ++step) {  // each flushes once at most
        const int count = 24;
        side.append(std::span(&seq, 1), random_rows(random, count, heads, dim, type),
                    random_rows(random, count, heads, dim, type));
        ScoredList answer = side.accumulate(
            std::span(&seq, 1), random_rows(random, 5, heads * group, dim, DType::f32, 1.5F));
        for (float& x : answer.accumulated)
          x *= 40.0F;  // as many such steps: so that rows of the tail can drive out stored ones
        side.accumulate(std::span(&seq, 1), answer.accumulated, answer.positions);
        side.reconstruct(seq, key, value);
        const std::vector<bool> stored = kept_rows_of(config.shape, key);
        ledger.extend(side.cache.num_tokens(seq));
        for (int head = 0; head < heads; ++head) {
          for (std::int64_t t = 0; t < side.cache.num_tokens(seq); ++t) {
            ledger.accumulated[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)] +=
                static_cast<double>(
                    answer.accumulated[static_cast<std::size_t>(head * answer.positions + t)]);
          }
        }
        const std::int64_t limit = side.cache.rollback_limit(seq);
        side.cache.maintain(seq);
        if (side.cache.rollback_limit(seq) > limit) check(stored);
      }
    }
    CHECK(ledger.in_band < 20 + ledger.decided / 20);  // or nothing was decided
    CHECK(side.cache.faults() == 0);
  }
  CHECK((exempt > 0) == exempts<Cache>);
}

/// The same accumulated scores keep the same rows as on the CPU, ties included; tails are
/// truncated, prompts come in between.
template <class Cache>
void check_parity(Random& random, int trials) {
  [[maybe_unused]] double worst = 0.0;
  std::int64_t all_publications = 0, all_merges = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const int heads = joins<Cache> ? 2 + 2 * (trial % 2) : 1 + trial % 3,
              dim = trial % 2 == 0 ? 64 : 96, intervals[] = {1, 8, 16, 40};
    CacheConfig config = config_of({2 * heads, heads, dim}, 1500, 3, intervals[trial % 4]);
    config.tail_capacity = 128;
    config.full_row_bits = (trial + trial / 2) % 2 == 1 ? 8 : 0;
    const bool ties =
        trial % 3 == 0;  // many scores are equal; then all are sums of given ones, which are exact
    const int levels = ties ? 3 : 5000;
    HeavySettings settings{
        {0.125F * static_cast<float>(random() % 9),
         trial % 4 == 3 ? 1 + static_cast<int>(random() % 60) : 0, static_cast<int>(random() % 40)},
        {trial % 2 == 0 ? 0 : static_cast<int>(random() % 12), static_cast<int>(random() % 20)}};
    settings.form = form_of<Cache>();
    settings.heads_per_group = trial % 2 == 0 ? 0 : 2;
    settings.exempts = exempts<Cache>;
    settings.outliers.share = trial % 4 == 2 ? 1.0F : trial % 4 == 3 ? 0.0F : 0.3F;
    if (trial % 3 == 1) settings.outliers.threshold = 0.8F;
    if (moves<Cache>) {                // several epochs, of many rows and few
      config.epoch_type = DType::f32;  // or both round at every step
      config.publish_interval = 10 + static_cast<int>(random() % 20);
      settings.chunk_length = 32 + static_cast<int>(random() % 20);
      settings.heavy = {0.25F + 0.25F * static_cast<float>(random() % 3), trial % 4 == 3 ? 40 : 0,
                        static_cast<int>(random() % 10)};
      settings.sinks.recent = 0;
    }
    const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
    const auto rows_of_layer = [&](std::int64_t n, bool keys) {
      if constexpr (!moves<Cache>) return random_rows(random, n, heads, dim, DType::f16);
      std::vector<float> rows = layer.rows(random, n, keys);  // a sketch has directions then
      for (float& x : rows) x = round_to(DType::f16, x);
      return rows;
    };
    Side<Cache> side(config, layer, settings);
    const std::vector<SequenceId> seqs{1, 2, 3};
    std::vector<std::unique_ptr<support::HeavySide>> cpu;
    for (const SequenceId seq : seqs) {
      side.cache.create(seq);
      cpu.push_back(support::make_heavy_side(settings, config, layer.basis));
    }
    CAPTURE(trial);
    for (int step = 0; step < (effort() == 0 ? 40 : 120); ++step) {
      const int m = 1 + static_cast<int>(random() % 4);
      const auto key = rows_of_layer(3 * m, true), value = rows_of_layer(3 * m, false);
      side.append(seqs, key, value);
      std::int64_t positions = 0;
      for (const SequenceId seq : seqs) positions = std::max(positions, side.cache.num_tokens(seq));
      positions += static_cast<std::int64_t>(random() % 3);
      std::vector<float> accumulated(static_cast<std::size_t>(3 * heads * positions));
      for (float& x : accumulated)
        x = static_cast<float>(random() % static_cast<unsigned>(levels)) / 64.0F;
      if (random() % 3 != 0) {  // others have received nothing
        side.accumulate(seqs, accumulated, positions);
      } else {
        accumulated.clear();
      }
      side.cache.maintain(seqs);
      for (std::size_t i = 0; i < 3; ++i) {
        cpu[i]->append(part_of(key, i, 3), part_of(value, i, 3));
        if (!accumulated.empty()) {
          std::vector<float> own;
          for (int head = 0; head < heads; ++head) {
            const auto begin = accumulated.begin() +
                               static_cast<std::ptrdiff_t>((i * static_cast<std::size_t>(heads) +
                                                            static_cast<std::size_t>(head)) *
                                                           static_cast<std::size_t>(positions));
            own.insert(own.end(), begin, begin + side.cache.num_tokens(seqs[i]));
          }
          cpu[i]->accumulate(own);
        }
        cpu[i]->maintain();
      }
      const std::size_t one = random() % 3;
      if (step % 9 == 4 && side.cache.tail_length(seqs[one]) > 0) {
        const std::int64_t length =
            side.cache.num_tokens(seqs[one]) -
            static_cast<std::int64_t>(random() %
                                      static_cast<unsigned>(side.cache.tail_length(seqs[one])));
        CHECK(side.cache.truncate(seqs[one], length) == TruncateResult::exact);
        cpu[one]->truncate(length);
      }
      if (step % 11 == 7 ||
          step % 17 == 12) {  // before the tail: heads have kept different numbers of the rows that
                              // are left, perhaps more than are kept of so few tokens
        const std::int64_t tokens = side.cache.num_tokens(seqs[one]),
                           length = 1 + static_cast<std::int64_t>(
                                            random() % static_cast<std::uint64_t>(tokens));
        CAPTURE(length);
        side.cache.truncate(seqs[one], length);
        cpu[one]->truncate(length);
      }
      if (step % 13 == 9) {
        const std::int64_t tokens = side.cache.num_tokens(seqs[one]),
                           first = std::min<std::int64_t>(
                               tokens, (exempts<Cache> ? 0 : settings.sinks.sinks + 1) +
                                           static_cast<std::int64_t>(random() % 40)),
                           count = std::min<std::int64_t>(
                               tokens - first, 1 + static_cast<std::int64_t>(random() % 70));
        CAPTURE(first);
        CAPTURE(count);
        if (count > 0) {
          side.cache.remove(seqs[one], first, count);
          cpu[one]->remove(first, count);
        }
      }
      if (!ties &&
          step % 25 ==
              12) {  // queries of zeros: all rows receive the same of each, later ones from fewer
        const int n = 1 + static_cast<int>(random() % 120);
        const auto prompt_key = rows_of_layer(n, true), prompt_value = rows_of_layer(n, false);
        const std::vector<float> query(static_cast<std::size_t>(n * 2 * heads * dim), 0.0F);
        side.ingest(seqs[one], prompt_key, prompt_value, query);
        cpu[one]->ingest(query, prompt_key, prompt_value);
      }
      if (step % 4 != 0) continue;
      for (std::size_t i = 0; i < 3; ++i) {
        std::vector<float> own_key, own_value, cpu_key, cpu_value;
        side.reconstruct(seqs[i], own_key, own_value);
        cpu[i]->reconstruct(cpu_key, cpu_value);
        CAPTURE(step);
        CHECK(side.cache.tail_length(seqs[i]) == cpu[i]->tail_length());
        // The CPU accumulates scores of sinks too, which no policy reads.
        const std::int64_t sinks =
            compresses<Cache> && !exempts<Cache>
                ? std::min<std::int64_t>(settings.sinks.sinks, side.cache.rollback_limit(seqs[i]))
                : 0;
        if (!moves<Cache>)
          CHECK(side.cache.memory(seqs[i]).updater_bytes +
                    static_cast<std::size_t>(4 * sinks * heads) ==
                cpu[i]->updater_bytes());
        if constexpr (compresses<Cache>) {
          CHECK(kept_rows_of(config.shape, own_key) == kept_rows_of(config.shape, cpu_key));
          const int shared_by =
              fate_heads<Cache>(settings, config.shape);  // heads that keep the same rows
          std::size_t other_states =
              0;  // rows whose errors are almost equal: either may be full, here and on the CPU
          for (int head = 0; head < heads; ++head) {
            const std::vector<RowState> own = side.states(seqs[i], head),
                                        others = cpu[i]->states(head);
            CHECK(own == side.states(seqs[i], head / shared_by * shared_by));
            for (std::size_t t = 0; t < own.size(); ++t) {
              if (own[t] == others[t]) continue;
              ++other_states;
              for (auto* rows : {&own_key, &own_value, &cpu_key, &cpu_value})
                std::fill_n(rows->begin() +
                                static_cast<std::ptrdiff_t>((t * static_cast<std::size_t>(heads) +
                                                             static_cast<std::size_t>(head)) *
                                                            static_cast<std::size_t>(dim)),
                            dim, 0.0F);
            }
          }
          CHECK(other_states <=
                (exempts<Cache> ? 2 + own_key.size() / static_cast<std::size_t>(dim) / 40 : 0));
          if constexpr (moves<Cache>) {
            const double away = std::max(support::distance(own_key, cpu_key),
                                         support::distance(own_value, cpu_value));
            worst = std::max(worst, away);
            CHECK(away < (coded<Cache> ? 0.05 : 4e-3));  // codes on a boundary
            continue;
          }
          const std::size_t allowed =
              2 +
              own_key.size() / static_cast<std::size_t>(dim) /
                  (joins<Cache> ? 40 : 100);  // codes on a boundary; a latent is in all heads' rows
          CHECK(support::different_rows(own_key, cpu_key, dim) <= allowed);
          CHECK(support::different_rows(own_value, cpu_value, dim) <= allowed);
        } else {
          CHECK(own_key == cpu_key);
          CHECK(own_value == cpu_value);
        }
      }
    }
    std::int64_t publications = 0, merges = 0;
    for (const auto& one : cpu) {
      publications += one->publications();
      merges += one->merges();
    }
    CHECK(side.cache.statistics().publications == publications);
    CHECK(side.cache.statistics().merges == merges);
    all_publications += publications;
    all_merges += merges;
    for (const SequenceId seq : seqs) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
    side.cache.create(9);  // nothing is left in a slot that was used before
    CHECK(side.cache.num_tokens(9) == 0);
  }
  if (moves<Cache>) {
    CHECK(all_publications > 0);
    MESSAGE("bases of heavy hitters: rows " << worst << " from the CPU's, " << all_publications
                                            << " publications, " << all_merges << " merges");
  }
}

/// A fork and a loaded copy go on as the original, bit for bit, and leave it alone.
template <class Cache>
void check_copies(Random& random, int full_row_bits = 0) {
  for (const int budget : {0, 150}) {
    CacheConfig config = config_of({8, 2, 64}, 2000, 4, 16);
    config.full_row_bits = full_row_bits;
    config.publish_interval = 40;
    const HeavySettings settings{{0.3F, budget, 40}, {4, 10}};
    const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
    Side<Cache> side(config, layer, settings);
    side.cache.create(1);
    const int prompt = effort() == 0 ? 260 : 700;
    side.prefill(1, random_rows(random, prompt, 8, 64, DType::f32),
                 random_rows(random, prompt, 2, 64, DType::f16),
                 random_rows(random, prompt, 2, 64, DType::f16));
    const auto query = random_rows(random, 1, 8, 64, DType::f32);
    const auto answer = [&](SequenceId seq) {
      std::vector<float> key, value;
      side.reconstruct(seq, key, value);
      ScoredList all = side.accumulate(std::span(&seq, 1), query);
      all.out.insert(all.out.end(), key.begin(), key.end());
      all.lse.insert(all.lse.end(), value.begin(), value.end());
      return all;
    };
    const int steps = effort() == 0 ? 12 : 50;
    Growth(random, config.shape, steps).grow(side, 1);
    const ScoredList before = answer(1);
    const std::int64_t free = side.cache.pool().allocator().num_free();
    side.cache.fork(1, 2);
    CHECK(side.cache.pool().allocator().num_free() == free);  // nothing is copied yet
    const std::vector<std::byte> saved = side.save(1);
    side.cache.load(3, saved);
    CHECK(side.save(3) == saved);
    CHECK(side.save(2) == saved);
    CHECK(answer(2) == before);
    CHECK(answer(3) == before);
    const Growth more(random, config.shape, steps);
    more.grow(side, 2);  // writes to pages that 1 reads
    CHECK(answer(1) == before);
    CHECK(side.save(1) == saved);
    side.cache.fork(2, 4);
    more.grow(side, 1);
    more.grow(side, 3);
    const ScoredList after = answer(1);
    CHECK(!(after == before));
    for (const SequenceId seq : {2, 3, 4}) CHECK(answer(seq) == after);
    Growth(random, config.shape, steps).grow(side, 4);
    side.cache.truncate(2, side.cache.num_tokens(2) - 3);
    side.cache.erase(4);
    CHECK(answer(1) == after);
    Growth(random, config.shape, steps).grow(side, 2);
    CHECK(answer(3) == after);
    CHECK(side.cache.truncate(3, 0) == TruncateResult::inexact);
    // Before the tail: what a fork reads stays, copies go on as the original.
    side.cache.fork(1, 4);
    CHECK(side.cache.truncate(1, prompt / 2 + 50) == TruncateResult::inexact);
    CHECK(answer(4) == after);
    side.cache.remove(1, 100, 37);
    CHECK(answer(4) == after);
    const std::vector<std::byte> cut = side.save(1);
    side.cache.erase(3);
    side.cache.load(3, cut);
    CHECK(side.save(3) == cut);
    side.cache.erase(2);
    side.cache.fork(1, 2);
    const Growth last(random, config.shape, steps);
    for (const SequenceId seq : {1, 2, 3}) last.grow(side, seq);
    const ScoredList in_the_end = answer(1);
    CHECK(answer(2) == in_the_end);
    CHECK(answer(3) == in_the_end);
    CHECK(answer(4) == after);
    for (const SequenceId seq : {1, 2, 3, 4}) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
    CHECK(side.cache.pool().allocator().num_free() == side.cache.pool().allocator().num_pages());
  }
}

/// append, attend with scores and accumulate in a CUDA graph, maintain between its replays.
template <class Cache>
void check_replays(Random& random, bool pre_rope = false) {
  CacheConfig config = config_of({8, 2, 128}, 1000, 2, 16);
  if (pre_rope) config.rope = support::random_rope(random, 128);
  const HeavySettings settings{{0.3F, 0, 32}, {2, 0}};
  const RandomLayer layer = layer_of<Cache>(random, config.shape, settings);
  Side<Cache> side(config, layer, settings), plain(config, layer, settings);
  const std::vector<SequenceId> seqs{5, 6};
  for (const SequenceId seq : seqs) {
    const auto q = random_rows(random, 60, 8, 128, DType::f32),
               k = random_rows(random, 60, 2, 128, DType::f16),
               v = random_rows(random, 60, 2, 128, DType::f16);
    for (auto* each : {&side, &plain}) {
      each->cache.create(seq);
      each->prefill(seq, q, k, v);
    }
  }
  gpu::DeviceArray<float> key(2 * 2 * 128), value(2 * 2 * 128), query(2 * 8 * 128),
      out(2 * 8 * 128);
  const gpu::DeviceArray<float> accumulated(2 * 2 * 1000);
  const ScoreView accumulated_scores(accumulated.data(), 2, 2, 1000);
  const support::CapturedStep step([&](cudaStream_t stream) {
    CHECK(support::message_of([&] {
            side.cache.accumulate(seqs, {accumulated.data(), 2, 2, 999}, stream);
          }) == "attention scores: 999 positions in a captured graph, max_tokens 1000");
    side.cache.append(seqs, side.keys(key, 2), side.values(value, 2), stream);
    side.cache.attend(seqs, side.queries(query, 2), {out.data(), 2, 8, 128}, {}, accumulated_scores,
                      stream);
    side.cache.accumulate(seqs, accumulated_scores, stream);
  });
  for (int round = 0; round < (effort() == 0 ? 40 : 150); ++round) {
    const auto k = random_rows(random, 2, 2, 128, DType::f16),
               v = random_rows(random, 2, 2, 128, DType::f16),
               q = random_rows(random, 2, 8, 128, DType::f32);
    support::upload(k, key);
    support::upload(v, value);
    support::upload(q, query);
    step.replay(side.cache, seqs);
    plain.append(seqs, k, v);
    const ScoredList expected = plain.accumulate(seqs, q);
    plain.accumulate(seqs, expected.accumulated, expected.positions);
    plain.cache.maintain(seqs);
    CHECK(host(out) == expected.out);
    if (round % 10 != 9) continue;
    const auto found = host(accumulated);
    for (std::size_t list = 0; list < 4; ++list) {
      const float *own = found.data() + list * 1000,
                  *other = expected.accumulated.data() +
                           list * static_cast<std::size_t>(expected.positions);
      CHECK(std::equal(own, own + expected.positions, other));
      CHECK(std::all_of(own + expected.positions, own + 1000, [](float x) { return x == 0.0F; }));
    }
    for (const SequenceId seq : seqs) CHECK(side.save(seq) == plain.save(seq));
  }
}

/// Saved states with one bit flipped, in the counts or from `positions` on, and a valid checksum.
/// One that loads grows, is saved and loads again. Returns how many loaded.
template <class Cache>
int load_hostile(Random& random, Side<Cache>& side, const std::vector<std::byte>& saved,
                 std::size_t positions, int trials) {
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return support::message_of([&] { side.cache.load(2, bytes); });
  };
  int loaded = 0;
  for (int trial = 0; trial < trials; ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place = trial % 2 == 0
                                  ? 24 + random() % 400
                                  : saved.size() - 1 - random() % (saved.size() - positions);
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    if (load(support::with_checksum(hostile)) != "nothing was raised") continue;
    ++loaded;
    try {
      Growth(random, side.shape, 12).grow(side, 2);
    } catch (const CapacityError&) {  // its tail may be full
    }
    const std::vector<std::byte> again = side.save(2);
    side.cache.erase(2);
    CHECK(load(again) == "nothing was raised");
    side.cache.erase(2);
  }
  return loaded;
}

}  // namespace heavy
