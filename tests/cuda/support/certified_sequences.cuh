// SPDX-License-Identifier: Apache-2.0
// Sequences with certificates on the device, against float64 of what came and of what is decoded.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "lowrankkv/diagnostics/certificate.hpp"
#include "cuda/support/random_layer.hpp"

namespace support {

using namespace lowrankkv;

struct Certified {
  Answer answer;
  std::vector<Certificate> certificates;
  std::uint32_t exceeding = 0;
};

template <class Cache>
Certified certified(DeviceCache<Cache>& device, std::span<const SequenceId> seqs,
                    const std::vector<float>& query,
                    const Certificate& limit = kUnboundedCertificate) {
  Certified result;
  const std::int64_t tokens = device.query_tokens(query);
  const int heads = device.shape.num_qo_heads;
  const gpu::DeviceArray<float> q(query);
  const auto out = poisoned(query.size()), lse = poisoned(static_cast<std::size_t>(tokens * heads)),
             found = poisoned(3 * lse.size());
  const gpu::DeviceArray<std::uint32_t> exceeding(std::vector<std::uint32_t>{7});
  const LseView sums{lse.data(), tokens, heads};
  device.cache.attend(seqs, device.queries(q, tokens),
                      {out.data(), tokens, heads, device.shape.head_dim}, sums);
  device.cache.certify(seqs, device.queries(q, tokens), sums,
                       {reinterpret_cast<Certificate*>(found.data()), tokens, heads}, limit,
                       exceeding.data());
  result.answer = {host(out), host(lse)};
  const std::vector<float> numbers = host(found);
  for (std::size_t i = 0; i < numbers.size(); i += 3)
    result.certificates.push_back({numbers[i], numbers[i + 1], numbers[i + 2]});
  result.exceeding = host(exceeding)[0] - 7;
  return result;
}

inline bool same(const std::vector<Certificate>& a, const std::vector<Certificate>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Certificate& x, const Certificate& y) {
                      return x.logit == y.logit && x.softmax == y.softmax && x.output == y.output;
                    });
}

/// What a sequence was given, rounded to full_type: a row a token.
struct Given {
  std::vector<std::vector<float>> keys, values;
  double largest = 0.0;  ///< norm of a value of a head, removed ones included

  void add(const CacheConfig& config, const std::vector<float>& key,
           const std::vector<float>& value) {
    const std::size_t width = static_cast<std::size_t>(config.shape.num_kv_heads *
                                                       config.shape.head_dim),
                      dim = static_cast<std::size_t>(config.shape.head_dim);
    const auto rounded = [&](const std::vector<float>& rows, std::size_t at) {
      std::vector<float> row(rows.begin() + static_cast<std::ptrdiff_t>(at),
                             rows.begin() + static_cast<std::ptrdiff_t>(at + width));
      for (float& x : row)
        x = config.full_type == DType::f16 ? to_float(to_half(x)) : to_float(to_bfloat16(x));
      return row;
    };
    for (std::size_t at = 0; at < key.size(); at += width) {
      keys.push_back(rounded(key, at));
      values.push_back(rounded(value, at));
      for (std::size_t head = 0; head < width; head += dim) {
        double energy = 0.0;
        for (std::size_t i = head; i < head + dim; ++i)
          energy += std::pow(static_cast<double>(values.back()[i]), 2);
        largest = std::max(largest, std::sqrt(energy));
      }
    }
  }
};

inline double norm_of_difference(const double* a, const double* b, int dim) {
  double sum = 0.0;
  for (int i = 0; i < dim; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

/// How close bounds are to errors.
struct Tightness {
  double logit = 0.0, softmax = 0.0, output = 0.0;
};

/// Checks the certificates of the last m tokens of a sequence against float64, of what came and of
/// what is decoded. @param inexact  relative error of the device's own attention, which weights
/// cover
template <class Cache>
void check_certificates(const CacheConfig& config, const DeviceCache<Cache>& device, SequenceId seq,
                        const Given& given, const std::vector<float>& query, const Certified& found,
                        std::size_t first, double inexact, Tightness& tight) {
  const int dim = config.shape.head_dim, heads = config.shape.num_kv_heads,
            group = config.shape.group_size(), queries = config.shape.num_qo_heads;
  const std::int64_t tokens = device.cache.num_tokens(seq), m = device.query_tokens(query);
  REQUIRE(static_cast<std::int64_t>(given.keys.size()) == tokens);
  const bool merged = device.cache.statistics().merges > 0;
  std::vector<float> key, value, exact_key;
  device.reconstruct(seq, key, value);
  for (const auto& row : given.keys) exact_key.insert(exact_key.end(), row.begin(), row.end());
  const auto position = [&](std::int64_t token) { return device.cache.position(seq, token); };
  key = rotated(config, std::move(key), position);
  exact_key = rotated(config, std::move(exact_key), position);
  std::vector<RowState> states(static_cast<std::size_t>(tokens));
  for (int head = 0; head < heads; ++head) {
    device.cache.row_states(seq, head, 0, states);
    for (std::int64_t row = 0; row < m * group; ++row) {
      const std::int64_t token = row / group, seen = tokens - m + token + 1;
      const int query_head = head * group + static_cast<int>(row % group);
      const float* q = query.data() + (token * queries + query_head) * dim;
      std::vector<double> logits[2], lost[2], values[2];
      double query_norm = 0.0, largest = 0.0;
      for (int i = 0; i < dim; ++i) query_norm += std::pow(static_cast<double>(q[i]), 2);
      query_norm = std::sqrt(query_norm) * config.scale();
      for (std::int64_t at = 0; at < seen; ++at) {
        const RowState state = states[static_cast<std::size_t>(at)];
        if (state == RowState::dropped) continue;
        const std::size_t place = static_cast<std::size_t>((at * heads + head) * dim);
        const float* exact_value = given.values[static_cast<std::size_t>(at)].data() + head * dim;
        double dots[2] = {}, differences[2] = {}, energies[2] = {};
        for (int i = 0; i < dim; ++i) {
          const double k[2] = {static_cast<double>(exact_key[place + static_cast<std::size_t>(i)]),
                               static_cast<double>(key[place + static_cast<std::size_t>(i)])};
          const double v[2] = {static_cast<double>(exact_value[i]),
                               static_cast<double>(value[place + static_cast<std::size_t>(i)])};
          for (int which = 0; which < 2; ++which) {
            dots[which] += static_cast<double>(q[i]) * k[which];
            values[which].push_back(v[which]);
          }
          differences[0] += (k[0] - k[1]) * (k[0] - k[1]);
          differences[1] += (v[0] - v[1]) * (v[0] - v[1]);
          energies[0] += k[0] * k[0];
          energies[1] += v[0] * v[0];
        }
        const bool kept =
            state == RowState::compressed ||
            (config.full_row_bits == 8 && at < tokens - device.cache.tail_length(seq));
        for (int which = 0; which < 2; ++which) {
          logits[which].push_back(dots[which] * config.scale());
          lost[which].push_back(
              kept ? std::sqrt(differences[which]) + 1e-6 * std::sqrt(energies[which]) : 0.0);
        }
        largest = std::max(largest, std::sqrt(energies[1]));
      }
      std::vector<double> weights[2], outputs[2];
      for (int which = 0; which < 2; ++which) {
        const double top = *std::max_element(logits[which].begin(), logits[which].end());
        double sum = 0.0;
        for (const double logit : logits[which]) sum += std::exp(logit - top);
        outputs[which].assign(static_cast<std::size_t>(dim), 0.0);
        for (std::size_t i = 0; i < logits[which].size(); ++i) {
          weights[which].push_back(std::exp(logits[which][i] - top) / sum);
          for (std::size_t c = 0; c < static_cast<std::size_t>(dim); ++c)
            outputs[which][c] +=
                weights[which][i] * values[which][i * static_cast<std::size_t>(dim) + c];
        }
      }
      double logit = 0.0, moved = 0.0;
      for (std::size_t i = 0; i < logits[0].size(); ++i) {
        logit = std::max(logit, std::abs(logits[0][i] - logits[1][i]));
        moved += std::abs(weights[0][i] - weights[1][i]);
      }
      const double off = norm_of_difference(outputs[0].data(), outputs[1].data(), dim);
      const Certificate& bound =
          found.certificates[first + static_cast<std::size_t>(token * queries + query_head)];
      CAPTURE(head);
      CAPTURE(query_head);
      CHECK(logit <= static_cast<double>(bound.logit) + 1e-5);
      CHECK(moved <= static_cast<double>(bound.softmax) + 1e-5);
      CHECK(off <= static_cast<double>(bound.output) + 1e-5);
      std::vector<double> own;
      for (int i = 0; i < dim; ++i)
        own.push_back(static_cast<double>(
            found.answer.out[(first + static_cast<std::size_t>(token * queries + query_head)) *
                                 static_cast<std::size_t>(dim) +
                             static_cast<std::size_t>(i)]));
      const std::vector<double> zeros(static_cast<std::size_t>(dim));
      CHECK(norm_of_difference(outputs[0].data(), own.data(), dim) <=
            static_cast<double>(bound.output) +
                inexact * norm_of_difference(own.data(), zeros.data(), dim));
      // What the formulas give, and what they give of residuals in f16 and of weights that are
      // taken a little larger.
      const auto formula = [&](double more_lost, double more_weight, double largest_value) {
        double most = 0.0, growth = 0.0, decay = 0.0, part = 0.0;
        for (std::size_t i = 0; i < lost[0].size(); ++i) {
          const double delta = more_lost * query_norm * lost[0][i],
                       weight = more_weight * weights[1][i];
          most = std::max(most, delta);
          growth += weight * std::expm1(delta);
          decay += weight * -std::expm1(-delta);
          part += weight * more_lost * lost[1][i];
        }
        const double softmax = std::min(diagnostics::weighted_softmax_error_bound(growth, decay),
                                        diagnostics::softmax_error_bound(most));
        return std::array<double, 3>{most, softmax,
                                     diagnostics::output_error_bound(softmax, largest_value, part)};
      };
      const double lse = std::max(
          1.0,
          std::abs(static_cast<double>(
              found.answer.lse[first + static_cast<std::size_t>(token * queries + query_head)])));
      const auto least = formula(1.0, 1.0, largest),
                 most = formula(1.003, std::exp(2.0 * inexact * lse), 1.003 * given.largest);
      const double got[3] = {static_cast<double>(bound.logit), static_cast<double>(bound.softmax),
                             static_cast<double>(bound.output)};
      for (std::size_t i = 0; i < 3; ++i) {
        CAPTURE(i);
        CHECK(got[i] >= least[i] * (1.0 - 1e-6));
        // Residuals below the smallest normal f16. What rows lost when they were re-projected to
        // other epochs adds up in the bound, and may cancel in the row.
        if (!merged) CHECK(got[i] <= most[i] * (1.0 + 1e-5) + 2e-4);
      }
      if (logit > 1e-4) tight.logit = std::max(tight.logit, logit / got[0]);
      if (moved > 1e-4) tight.softmax = std::max(tight.softmax, moved / got[1]);
      if (off > 1e-4) tight.output = std::max(tight.output, off / got[2]);
    }
  }
}

/// Random sequences of a composition: prompts, steps, copies, saved states, tokens that go. Returns
/// how often segments merged.
template <class Cache>
std::int64_t certificates(DType type, std::uint64_t seed, bool pre_rope = false,
                          int full_row_bits = 0) {
  Random random(seed);
  Tightness tight;
  std::int64_t merges = 0;
  const double inexact = pre_rope ? 4e-3 : 1e-3;
  using PolicySet = typename Cache::PolicySet;
  using Tokens = decltype(PolicySet{}.token_policy);
  constexpr bool heavy = has_member<Tokens, HeavyHitters>,
                 moves = std::is_same_v<decltype(PolicySet{}.updater), Oja>,
                 scored = has_member<Tokens, SnapKV> || heavy || moves,
                 joint = std::is_same_v<decltype(PolicySet{}.basis), JointValues>;
  for (int trial = 0; trial < (effort() == 0 ? 1 : 5 * effort()); ++trial) {
    CacheConfig config;
    config.shape = random_shape(
        random, 3, {1, 2, 4, 5, 8},
        effort() == 0 ? std::vector<int>{64, 80} : std::vector<int>{64, 80, 96, 128, 256});
    config.max_sequences = 3;
    config.max_tokens = 3000;
    config.max_query_tokens = 4;
    config.full_type = type;
    config.full_row_bits = full_row_bits;
    config.flush_interval = 1 + static_cast<int>(random() % 40);
    config.prefill_chunk = random() % 2 == 0 ? 0 : 100 + static_cast<std::int64_t>(random() % 200);
    config.keep_residuals = true;
    if (moves) config.publish_interval = 1 + static_cast<std::int64_t>(random() % 60);
    if (pre_rope) config.rope = random_rope(random, config.shape.head_dim);
    Settings settings;
    settings.sinks = static_cast<int>(random() % 9);
    settings.recent = 4 + static_cast<int>(random() % 30);
    settings.outliers = {
        OutlierError::relative, 0.05F,
        trial % 2 == 0 && !std::is_same_v<decltype(PolicySet{}.updater), FrequentDirections>
            ? 0.25F
            : 0.0F};
    settings.coefficients = type;
    settings.basis.centred = random() % 2 == 0;
    const int rank =
        8 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim - 8));
    RandomLayer layer =
        joint ? joint_layer(random, config.shape, settings.basis, 0, rank, config.shape.head_dim)
              : random_layer(random, config.shape, settings, rank);
    layer.scale = trial % 2 == 0 ? 0.3F : 2.0F;
    auto policies = configured(PolicySet{}, settings);
    if constexpr (joint) policies.basis = {0, settings.basis};
    if constexpr (std::is_same_v<decltype(policies.updater), FrequentDirections>)
      policies.updater.chunk_length = 8 + static_cast<int>(random() % 24);
    if constexpr (heavy)
      policies.token_policy.template get<HeavyHitters>() = {
          0.25F, 60 + static_cast<int>(random() % 200), settings.recent};
    const auto rows = [&](std::int64_t n, bool key) {
      return joint ? joint_rows(random, layer, n, key) : layer.rows(random, n, key);
    };
    DeviceCache<Cache> device(config, layer.basis, policies), other(config, layer.basis, policies);
    CAPTURE(trial);
    Given given;
    const SequenceId one = 1, two = 2, three = 3;
    const auto ingest = [&](std::int64_t n) {
      const auto key = rows(n, true), value = rows(n, false);
      device.ingest(1, key, value, scored ? layer.queries(random, n) : std::vector<float>{});
      given.add(config, key, value);
    };
    const auto append = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        const auto key = rows(1, true), value = rows(1, false);
        device.cache.maintain(1);
        device.append(std::span(&one, 1), key, value);
        given.add(config, key, value);
        if constexpr (heavy) {  // recent rows receive much attention, and evict others
          const std::int64_t tokens = device.cache.num_tokens(1), heads = config.shape.num_kv_heads;
          std::vector<float> accumulated(static_cast<std::size_t>(heads * tokens));
          for (std::int64_t i = 0; i < heads * tokens; ++i)
            accumulated[static_cast<std::size_t>(i)] =
                i % tokens >= device.cache.rollback_limit(1) && random() % 2 == 0 ? 5.0F : 0.0F;
          const gpu::DeviceArray<float> received(accumulated);
          device.cache.accumulate(1, {received.data(), 1, config.shape.num_kv_heads, tokens});
        }
      }
    };
    const auto check = [&] {
      const int m = 1 + static_cast<int>(random() % static_cast<unsigned>(
                                                        std::min(3, device.cache.tail_length(1))));
      const auto query = layer.queries(random, m);
      const Certified found = certified(device, std::span(&one, 1), query);
      check_certificates(config, device, 1, given, query, found, 0, inexact, tight);
    };
    device.cache.create(1);
    device.ingest(1, {}, {});
    append(1);
    check();  // nothing is compressed
    ingest(1 + static_cast<std::int64_t>(random() % 700));
    append(1 + static_cast<int>(random() % 90));
    check();
    if (effort() > 0 && trial == 0) {
      ingest(2100);  // more rows than are decoded at a time
      append(1);
      check();
    }
    if (pre_rope) {
      device.cache.shift_positions(1, device.cache.num_tokens(1) / 3, 700);
      check();
    }
    // A copy, and what was saved of it, give the same numbers, alone and beside others.
    device.cache.fork(1, 2);
    other.cache.load(3, device.save(2));
    CHECK(other.save(3) == device.save(2));
    CHECK(device.cache.memory(2).residual_bytes == device.cache.memory(1).residual_bytes);
    const auto query = layer.queries(random, 2), both = [&] {
      auto twice = query;
      twice.insert(twice.end(), query.begin(), query.end());
      return twice;
    }();
    if (device.cache.tail_length(1) >= 2) {
      const SequenceId seqs[] = {2, 1};
      const Certified alone = certified(device, std::span(&one, 1), query),
                      beside = certified(device, seqs, both),
                      loaded = certified(other, std::span(&three, 1), query);
      CHECK(same(alone.certificates, loaded.certificates));
      CHECK(same(alone.certificates, {beside.certificates.begin(),
                                      beside.certificates.begin() +
                                          static_cast<std::ptrdiff_t>(alone.certificates.size())}));
      CHECK(same(alone.certificates, {beside.certificates.begin() +
                                          static_cast<std::ptrdiff_t>(alone.certificates.size()),
                                      beside.certificates.end()}));
      // Those that exceed a limit are counted.
      const Certificate limit = alone.certificates[alone.certificates.size() / 2];
      const auto exceeds = [&](const Certificate& found) {
        return !(found.logit <= limit.logit && found.softmax <= limit.softmax &&
                 found.output <= limit.output);
      };
      CHECK(certified(device, std::span(&one, 1), query, limit).exceeding ==
            static_cast<std::uint32_t>(
                std::count_if(alone.certificates.begin(), alone.certificates.end(), exceeds)));
      CHECK(alone.exceeding == 0);
    }
    // Tokens are removed from the middle, then truncated; others are appended.
    const std::int64_t tokens = device.cache.num_tokens(1), first = tokens / 3 + 20,
                       count = std::min<std::int64_t>(tokens / 4, 40);
    if (first + count < tokens) {
      device.cache.remove(1, first, count);
      const auto erase = [&](auto& all) {
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(first),
                  all.begin() + static_cast<std::ptrdiff_t>(first + count));
      };
      erase(given.keys);
      erase(given.values);
      append(1);
      check();
    }
    const std::int64_t length = 2 * device.cache.num_tokens(1) / 3;
    device.cache.truncate(1, length);
    given.keys.resize(static_cast<std::size_t>(length));
    given.values.resize(static_cast<std::size_t>(length));
    append(1 + static_cast<int>(random() % 60));
    check();
    if (device.cache.tail_length(2) >= 2)
      CHECK(same(certified(device, std::span(&two, 1), query).certificates,
                 certified(other, std::span(&three, 1), query).certificates));  // the copy stayed
    // A new sequence has nothing of the one before.
    device.cache.erase(1);
    device.cache.create(1);
    given = {};
    ingest(90);
    append(1);
    check();
    merges += device.cache.statistics().merges;
  }
  MESSAGE("largest error / bound: logits " << tight.logit << ", weights " << tight.softmax
                                           << ", outputs " << tight.output);
  if (effort() > 0) CHECK(tight.logit > 0.1);
  return merges;
}

}  // namespace support
