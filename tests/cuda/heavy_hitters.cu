// SPDX-License-Identifier: Apache-2.0
// H2O on the GPU: masses against float64, which rows they keep against the CPU backend and a plain selection, and what becomes of masses in forks, saved states, graphs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu_side.hpp"
#include "device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::distance;
using support::effort;
using support::host;
using support::message_of;
using support::poisoned;

namespace {

using Random = std::mt19937_64;
using Sinks = CompressedKVCache<Cuda, PerHead, Static, Compose<KeepFull, SinkRecent, HeavyHitters>, NoQuantizer>;

/// Random rows [tokens, heads, dim] as they will be stored; some are much larger than others, so that masses differ.
std::vector<float> random_rows(Random& random, std::int64_t tokens, int heads, int dim, DType type, float size = 1.0F) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<std::size_t>(tokens * heads * dim));
  float gain = 1.0F;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i % static_cast<std::size_t>(dim) == 0) gain = size * std::exp(0.4F * normal(random));
    rows[i] = round_to(type, gain * normal(random));
  }
  return rows;
}

struct Answer {
  std::vector<float> out, lse, mass;  ///< mass [seqs, heads, positions]
  std::int64_t positions = 0;

  friend bool operator==(const Answer&, const Answer&) = default;
};

template <class Cache>
typename Cache::PolicySet policies_of(const HeavyHitters& heavy, const SinkRecent& sinks = {0, 0}) {
  typename Cache::PolicySet policies;
  policies.token_policy.template get<KeepFull>().recent = 0;
  policies.token_policy.template get<HeavyHitters>() = heavy;
  if constexpr (std::is_same_v<Cache, Sinks>) policies.token_policy.template get<SinkRecent>() = sinks;
  return policies;
}

/// A cache on the device, rows of host memory in and out.
template <class Cache>
class Side {
 public:
  Side(const CacheConfig& config, const typename Cache::PolicySet& policies, std::shared_ptr<gpu::PagePool> pool = nullptr) : cache(config, {}, policies, std::move(pool)), shape(config.shape) {}

  void prefill(SequenceId seq, const std::vector<float>& query, const std::vector<float>& key, const std::vector<float>& value) {
    const gpu::DeviceArray<float> q(query), k(key), v(value);
    const auto out = poisoned(query.size());
    const std::int64_t n = tokens_of(key);
    cache.prefill(seq, queries(q, n), keys(k, n), values(v, n), {out.data(), n, shape.num_qo_heads, shape.head_dim});
    gpu::check(cudaDeviceSynchronize(), "prefill");
  }
  void ingest(SequenceId seq, const std::vector<float>& query, const std::vector<float>& key, const std::vector<float>& value) {
    const gpu::DeviceArray<float> q(query), k(key), v(value);
    const std::int64_t n = tokens_of(key);
    cache.ingest(seq, keys(k, n), values(v, n), queries(q, n));
    gpu::check(cudaDeviceSynchronize(), "ingest");
  }
  void append(std::span<const SequenceId> seqs, const std::vector<float>& key, const std::vector<float>& value) {
    const gpu::DeviceArray<float> k(key), v(value);
    cache.append(seqs, keys(k, tokens_of(key)), values(v, tokens_of(key)));
    gpu::check(cudaDeviceSynchronize(), "append");
  }
  /// @param type  of the queries' tensor  @param with_lse  whether the caller has memory for it
  Answer attend(std::span<const SequenceId> seqs, const std::vector<float>& query, DType type = DType::f32, bool with_lse = true) {
    const std::int64_t m = static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * shape.head_dim);
    Answer answer;
    for (const SequenceId seq : seqs) answer.positions = std::max(answer.positions, cache.num_tokens(seq) + 7);
    std::vector<std::uint16_t> halves;
    for (const float x : query) {
      if (type == DType::f16) halves.push_back(__half_as_ushort(__float2half(x)));
      else if (type == DType::bf16) halves.push_back(__bfloat16_as_ushort(__float2bfloat16(x)));
    }
    const gpu::DeviceArray<float> q32(query);
    const gpu::DeviceArray<std::uint16_t> q16(halves);
    const std::int64_t row = std::int64_t{shape.num_qo_heads} * shape.head_dim;
    const QueryView view = type == DType::f32 ? queries(q32, m) : QueryView(q16.data(), type, m, shape.num_qo_heads, shape.head_dim, row, shape.head_dim);
    const auto out = poisoned(query.size()), lse = poisoned(static_cast<std::size_t>(m * shape.num_qo_heads));
    const auto mass = poisoned(seqs.size() * static_cast<std::size_t>(shape.num_kv_heads * answer.positions));
    cache.attend(seqs, view, {out.data(), m, shape.num_qo_heads, shape.head_dim}, with_lse ? LseView{lse.data(), m, shape.num_qo_heads} : LseView{},
                 MassView{mass.data(), static_cast<std::int64_t>(seqs.size()), shape.num_kv_heads, answer.positions});
    answer.out = host(out);
    answer.mass = host(mass);
    if (with_lse) answer.lse = host(lse);
    return answer;
  }
  void accumulate(std::span<const SequenceId> seqs, const std::vector<float>& mass, std::int64_t positions) {
    const gpu::DeviceArray<float> received(mass);
    cache.accumulate(seqs, {received.data(), static_cast<std::int64_t>(seqs.size()), shape.num_kv_heads, positions});
    gpu::check(cudaDeviceSynchronize(), "accumulate");
  }
  void reconstruct(SequenceId seq, std::vector<float>& key, std::vector<float>& value) const {
    const std::int64_t tokens = cache.num_tokens(seq);
    const auto k = poisoned(static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim)), v = poisoned(k.size());
    cache.reconstruct(seq, 0, {k.data(), tokens, shape.num_kv_heads, shape.head_dim}, {v.data(), tokens, shape.num_kv_heads, shape.head_dim});
    key = host(k);
    value = host(v);
  }
  std::vector<std::byte> save(SequenceId seq) const {
    std::vector<std::byte> bytes(cache.save_bytes(seq));
    CHECK(cache.save(seq, bytes) == bytes.size());
    return bytes;
  }
  std::int64_t tokens_of(const std::vector<float>& rows) const { return static_cast<std::int64_t>(rows.size()) / (shape.num_kv_heads * shape.head_dim); }
  QueryView queries(const gpu::DeviceArray<float>& rows, std::int64_t n) const { return {rows.data(), n, shape.num_qo_heads, shape.head_dim}; }
  KeyView keys(const gpu::DeviceArray<float>& rows, std::int64_t n) const { return {rows.data(), n, shape.num_kv_heads, shape.head_dim}; }
  ValueView values(const gpu::DeviceArray<float>& rows, std::int64_t n) const { return {rows.data(), n, shape.num_kv_heads, shape.head_dim}; }

  Cache cache;
  CacheShape shape;
};

/// Which rows [tokens, heads] are there: dropped ones come back as zeros, and none of these tests' own is.
std::vector<bool> kept_rows_of(const CacheShape& shape, const std::vector<float>& key) {
  std::vector<bool> kept;
  const std::ptrdiff_t dim = shape.head_dim;
  for (auto row = key.begin(); row != key.end(); row += dim) kept.push_back(std::any_of(row, row + dim, [](float x) { return x != 0.0F; }));
  return kept;
}

/// Attention that the rows [tokens, heads] which are there receive from the last m tokens' queries, in float64: [heads, tokens].
std::vector<double> masses_f64(const CacheShape& shape, double scale, const std::vector<float>& key, const std::vector<bool>& there, const std::vector<float>& query) {
  const int dim = shape.head_dim, heads = shape.num_kv_heads, group = shape.group_size();
  const std::int64_t tokens = static_cast<std::int64_t>(there.size()) / heads, m = static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * dim);
  std::vector<double> masses(there.size(), 0.0), weights(static_cast<std::size_t>(tokens));
  for (int column = 0; column < shape.num_qo_heads * static_cast<int>(m); ++column) {
    const int h = column % shape.num_qo_heads, head = h / group;
    const std::int64_t seen = tokens - m + column / shape.num_qo_heads + 1;
    double top = -1e300, sum = 0.0;
    for (std::int64_t t = 0; t < seen; ++t) {
      if (!there[static_cast<std::size_t>(t * heads + head)]) continue;
      double dot = 0.0;
      for (int i = 0; i < dim; ++i) dot += static_cast<double>(query[static_cast<std::size_t>(column * dim + i)]) * key[static_cast<std::size_t>((t * heads + head) * dim + i)];
      weights[static_cast<std::size_t>(t)] = scale * dot;
      top = std::max(top, scale * dot);
    }
    for (const bool adds : {false, true}) {
      for (std::int64_t t = 0; t < seen; ++t) {
        if (!there[static_cast<std::size_t>(t * heads + head)]) continue;
        const double weight = std::exp(weights[static_cast<std::size_t>(t)] - top);
        if (adds) masses[static_cast<std::size_t>(head * tokens + t)] += weight / sum;
        else sum += weight;
      }
    }
  }
  return masses;
}

CacheConfig config_of(const CacheShape& shape, std::int64_t max_tokens, int max_sequences, int flush_interval) {
  CacheConfig config;
  config.shape = shape;
  config.max_tokens = max_tokens;
  config.max_sequences = max_sequences;
  config.flush_interval = flush_interval;
  config.max_query_tokens = 5;
  return config;
}

}  // namespace

TEST_CASE("masses of a step are those of float64: stored rows in any order, tails, several query tokens; the same bits in any batch") {
  Random random(3);
  double worst[2] = {};
  for (const DType type : {DType::f16, DType::bf16}) {
    for (int trial = 0; trial < (effort() == 0 ? 2 : 12 * effort()); ++trial) {
      const int dims[] = {64, 80, 128, 256}, groups[] = {1, 4, 7}, heads = 1 + trial % 2, group = groups[trial % 3], dim = dims[trial % 4];
      CacheConfig config = config_of({heads * group, heads, dim}, 4000, 3, 16);
      config.full_type = type;
      Side<H2O<Cuda>> side(config, policies_of<H2O<Cuda>>({0.5F, 0, 10 + static_cast<int>(random() % 30)}));
      const std::vector<SequenceId> seqs{4, 5, 6};
      const int lengths[] = {0, 1 + static_cast<int>(random() % 80), 400 + static_cast<int>(random() % 1200)};
      for (std::size_t i = 0; i < 3; ++i) {
        side.cache.create(seqs[i]);
        if (lengths[i] == 0) continue;
        side.ingest(seqs[i], random_rows(random, lengths[i], heads * group, dim, DType::f32), random_rows(random, lengths[i], heads, dim, type), random_rows(random, lengths[i], heads, dim, type));
      }
      for (int step = 0; step < 5; ++step) {  // rows take others' places
        side.append(seqs, random_rows(random, 3 * 16, heads, dim, type), random_rows(random, 3 * 16, heads, dim, type));
        const std::int64_t positions = side.cache.num_tokens(6);
        std::vector<float> mass(static_cast<std::size_t>(3 * heads * positions));
        for (float& x : mass) x = static_cast<float>(random() % 300);
        side.accumulate(seqs, mass, positions);
        side.cache.maintain(seqs);
      }
      const int m = 1 + trial % 5;
      side.append(seqs, random_rows(random, 3 * m, heads, dim, type), random_rows(random, 3 * m, heads, dim, type));
      const DType query_type = trial % 2 == 0 ? DType::f32 : type;
      const auto query = random_rows(random, 3 * m, heads * group, dim, query_type, 1.5F);
      const Answer answer = side.attend(seqs, query, query_type);
      CHECK(answer == side.attend(seqs, query, query_type));
      CHECK(answer.mass == side.attend(seqs, query, query_type, false).mass);
      CAPTURE(trial);
      CAPTURE(dim);
      CAPTURE(group);
      for (std::size_t i = 0; i < 3; ++i) {
        const auto part = [&](const std::vector<float>& all) { return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(i * all.size() / 3), all.begin() + static_cast<std::ptrdiff_t>((i + 1) * all.size() / 3)); };
        const auto own_query = part(query), own_mass = part(answer.mass);
        const Answer alone = side.attend(std::span(&seqs[i], 1), own_query, query_type);
        CHECK(alone.out == part(answer.out));
        CHECK(alone.lse == part(answer.lse));
        std::vector<float> key, value, found;
        side.reconstruct(seqs[i], key, value);
        const std::vector<bool> there = kept_rows_of(config.shape, key);
        const std::vector<double> expected = masses_f64(config.shape, config.scale(), key, there, own_query);
        const std::int64_t tokens = side.cache.num_tokens(seqs[i]);
        bool zeros = true, same = true;
        for (int head = 0; head < heads; ++head) {
          for (std::int64_t position = 0; position < answer.positions; ++position) {
            const float mass = own_mass[static_cast<std::size_t>(head * answer.positions + position)];
            if (position < tokens) found.push_back(mass);
            if (position >= tokens || !there[static_cast<std::size_t>(position * heads + head)]) zeros = zeros && mass == 0.0F;
            if (position < tokens) same = same && alone.mass[static_cast<std::size_t>(head * alone.positions + position)] == mass;
          }
        }
        CHECK(zeros);
        CHECK(same);
        // Queries, here or where the log-sum-exp was made, are two numbers of the rows' type: 22 bits in f16, 16 in bf16.
        const double error = distance(found, expected), limit = type == DType::f16 ? 2e-5 : 2e-4;
        worst[type == DType::bf16] = std::max(worst[type == DType::bf16], error);
        CHECK(error < limit);
      }
      CHECK(side.cache.faults() == 0);
    }
  }
  MESSAGE("masses of a step: f16 " << worst[0] << ", bf16 " << worst[1]);
}

namespace {

/// What one sequence's rows have received in float64, and a check of what a cache keeps by it.
struct Ledger {
  CacheShape shape;
  std::vector<std::vector<double>> mass;  // [heads][positions]
  std::int64_t in_band = 0, decided = 0;

  void extend(std::int64_t tokens) {
    mass.resize(static_cast<std::size_t>(shape.num_kv_heads));
    for (auto& head : mass) head.resize(static_cast<std::size_t>(tokens), 0.0);
  }
  /// @param before, after  rows that were stored, or in the tail, and those that are  @param left  tokens that have left the tail  @param wanted  rows that are to stay of them
  void check(const std::vector<bool>& before, const std::vector<bool>& after, std::int64_t left, std::int64_t wanted, int sinks, double band) {
    const int heads = shape.num_kv_heads;
    for (int head = 0; head < heads; ++head) {
      std::vector<double> candidates;
      std::int64_t kept = 0, pinned = 0;
      bool right = true;
      for (std::int64_t t = 0; t < left; ++t) {
        const std::size_t row = static_cast<std::size_t>(t * heads + head);
        kept += after[row] ? 1 : 0;
        right = right && (!after[row] || before[row]);  // nothing comes back
        if (t < sinks) {
          ++pinned;
          right = right && after[row];
        } else if (before[row]) {
          candidates.push_back(mass[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)]);
        }
      }
      CHECK(kept == wanted);
      std::sort(candidates.rbegin(), candidates.rend());
      const std::size_t stay = static_cast<std::size_t>(wanted - pinned);
      const double least = stay > 0 ? candidates[stay - 1] : 1e300;
      for (std::int64_t t = sinks; t < left; ++t) {
        const std::size_t row = static_cast<std::size_t>(t * heads + head);
        if (!before[row]) continue;
        const double own = mass[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)];
        ++decided;
        if (std::abs(own - least) <= band * least) ++in_band;
        else right = right && after[row] == (own > least);
      }
      CHECK(right);
      for (std::size_t row = static_cast<std::size_t>(left * heads); row < after.size(); ++row) right = right && after[row];  // the tail
      CHECK(right);
    }
  }
};

}  // namespace

TEST_CASE("what prompts and steps keep is what float64 masses choose, also on top of stored rows") {
  Random random(11);
  for (int trial = 0; trial < (effort() == 0 ? 2 : 10 * effort()); ++trial) {
    const int dims[] = {64, 128, 80, 256}, groups[] = {4, 1, 7}, heads = 2, group = groups[trial % 3], dim = dims[trial % 4], sinks = trial % 2 * 3, recent = 5 + static_cast<int>(random() % 40);
    const DType type = trial % 4 < 2 ? DType::f16 : DType::bf16;
    CacheConfig config = config_of({heads * group, heads, dim}, 2000, 1, 24);
    config.full_type = type;
    const HeavyHitters heavy{0.15F + 0.1F * static_cast<float>(trial % 5), trial % 3 == 2 ? 90 : 0, recent};
    Side<Sinks> side(config, policies_of<Sinks>(heavy, {sinks, 2}));
    const SequenceId seq = 1;
    side.cache.create(seq);
    Ledger ledger{config.shape, {}};
    const double band = type == DType::f16 ? 1e-4 : 1e-3;
    std::vector<float> key, value;
    const auto check = [&](const std::vector<bool>& before) {
      const std::int64_t left = side.cache.rollback_limit(seq);
      side.reconstruct(seq, key, value);
      const std::int64_t wanted = std::min(left, heavy_rows(heavy, left) + std::min<std::int64_t>(sinks, left));
      ledger.check(before, kept_rows_of(config.shape, key), left, wanted, sinks, band);
      CHECK(side.cache.memory(seq).full_row_bytes == static_cast<std::size_t>(wanted * heads * dim * 4));
      CHECK(side.cache.memory(seq).updater_bytes == static_cast<std::size_t>((wanted + side.cache.tail_length(seq)) * heads * 4));
    };
    CAPTURE(trial);
    for (int part = 0; part < 3; ++part) {
      const int lengths[] = {3, 70, 128, 200, 260}, n = effort() == 0 ? 70 : lengths[random() % 5];
      const auto query = random_rows(random, n, heads * group, dim, DType::f32, 1.5F), prompt_key = random_rows(random, n, heads, dim, type), prompt_value = random_rows(random, n, heads, dim, type);
      if (part > 0) side.reconstruct(seq, key, value);
      key.insert(key.end(), prompt_key.begin(), prompt_key.end());
      const std::vector<bool> before = kept_rows_of(config.shape, key);
      const std::int64_t tokens = static_cast<std::int64_t>(before.size()) / heads;
      ledger.extend(tokens);
      const std::vector<double> received = masses_f64(config.shape, config.scale(), key, before, query);
      for (int head = 0; head < heads; ++head) {
        for (std::int64_t t = 0; t < tokens; ++t) ledger.mass[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)] += received[static_cast<std::size_t>(head * tokens + t)];
      }
      trial % 2 == 0 ? side.prefill(seq, query, prompt_key, prompt_value) : side.ingest(seq, query, prompt_key, prompt_value);
      check(before);
      for (int step = 0; step < 3; ++step) {  // each flushes once at most
        const int count = 24;
        side.append(std::span(&seq, 1), random_rows(random, count, heads, dim, type), random_rows(random, count, heads, dim, type));
        Answer answer = side.attend(std::span(&seq, 1), random_rows(random, 5, heads * group, dim, DType::f32, 1.5F));
        for (float& x : answer.mass) x *= 40.0F;  // as many such steps: so that rows of the tail can drive out stored ones
        side.accumulate(std::span(&seq, 1), answer.mass, answer.positions);
        side.reconstruct(seq, key, value);
        const std::vector<bool> stored = kept_rows_of(config.shape, key);
        ledger.extend(side.cache.num_tokens(seq));
        for (int head = 0; head < heads; ++head) {
          for (std::int64_t t = 0; t < side.cache.num_tokens(seq); ++t) {
            ledger.mass[static_cast<std::size_t>(head)][static_cast<std::size_t>(t)] += static_cast<double>(answer.mass[static_cast<std::size_t>(head * answer.positions + t)]);
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
}

TEST_CASE("the same masses keep the same rows as on the CPU, ties included; tails are cut, prompts come in between") {
  Random random(17);
  for (int trial = 0; trial < (effort() == 0 ? 2 : 14 * effort()); ++trial) {
    const int heads = 1 + trial % 3, dim = trial % 2 == 0 ? 64 : 96, intervals[] = {1, 8, 16, 40};
    CacheConfig config = config_of({2 * heads, heads, dim}, 1500, 3, intervals[trial % 4]);
    config.tail_capacity = 128;
    const bool ties = trial % 3 == 0;  // many masses are equal; then all are sums of given ones, which are exact
    const int levels = ties ? 3 : 5000;
    const HeavyHitters heavy{0.125F * static_cast<float>(random() % 9), trial % 4 == 3 ? 1 + static_cast<int>(random() % 60) : 0, static_cast<int>(random() % 40)};
    const SinkRecent sinks{trial % 2 == 0 ? 0 : static_cast<int>(random() % 12), static_cast<int>(random() % 20)};
    Side<Sinks> side(config, policies_of<Sinks>(heavy, sinks));
    const std::vector<SequenceId> seqs{1, 2, 3};
    std::vector<std::unique_ptr<support::HeavySide>> cpu;
    for (const SequenceId seq : seqs) {
      side.cache.create(seq);
      cpu.push_back(support::make_heavy_side(heavy, sinks, config));
    }
    CAPTURE(trial);
    for (int step = 0; step < (effort() == 0 ? 40 : 120); ++step) {
      const int m = 1 + static_cast<int>(random() % 4);
      const auto key = random_rows(random, 3 * m, heads, dim, DType::f16), value = random_rows(random, 3 * m, heads, dim, DType::f16);
      side.append(seqs, key, value);
      std::int64_t positions = 0;
      for (const SequenceId seq : seqs) positions = std::max(positions, side.cache.num_tokens(seq));
      positions += static_cast<std::int64_t>(random() % 3);
      std::vector<float> mass(static_cast<std::size_t>(3 * heads * positions));
      for (float& x : mass) x = static_cast<float>(random() % static_cast<unsigned>(levels)) / 64.0F;
      if (random() % 3 != 0) {  // others have received nothing
        side.accumulate(seqs, mass, positions);
      } else {
        mass.clear();
      }
      side.cache.maintain(seqs);
      for (std::size_t i = 0; i < 3; ++i) {
        const auto part = [&](const std::vector<float>& all) { return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(i * all.size() / 3), all.begin() + static_cast<std::ptrdiff_t>((i + 1) * all.size() / 3)); };
        cpu[i]->append(part(key), part(value));
        if (!mass.empty()) {
          std::vector<float> own;
          for (int head = 0; head < heads; ++head) {
            const auto begin = mass.begin() + static_cast<std::ptrdiff_t>((i * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head)) * static_cast<std::size_t>(positions));
            own.insert(own.end(), begin, begin + side.cache.num_tokens(seqs[i]));
          }
          cpu[i]->accumulate(own);
        }
        cpu[i]->maintain();
      }
      const std::size_t one = random() % 3;
      if (step % 9 == 4 && side.cache.tail_length(seqs[one]) > 0) {
        const std::int64_t length = side.cache.num_tokens(seqs[one]) - static_cast<std::int64_t>(random() % static_cast<unsigned>(side.cache.tail_length(seqs[one])));
        CHECK(side.cache.truncate(seqs[one], length) == TruncateResult::exact);
        cpu[one]->truncate(length);
      }
      if (!ties && step % 25 == 12) {  // queries of zeros: all rows receive the same of each, later ones from fewer
        const int n = 1 + static_cast<int>(random() % 120);
        const auto prompt_key = random_rows(random, n, heads, dim, DType::f16), prompt_value = random_rows(random, n, heads, dim, DType::f16);
        const std::vector<float> query(static_cast<std::size_t>(n * 2 * heads * dim), 0.0F);
        side.ingest(seqs[one], query, prompt_key, prompt_value);
        cpu[one]->ingest(query, prompt_key, prompt_value);
      }
      if (step % 4 != 0) continue;
      for (std::size_t i = 0; i < 3; ++i) {
        std::vector<float> own_key, own_value, cpu_key, cpu_value;
        side.reconstruct(seqs[i], own_key, own_value);
        cpu[i]->reconstruct(cpu_key, cpu_value);
        CAPTURE(step);
        CHECK(side.cache.tail_length(seqs[i]) == cpu[i]->tail_length());
        CHECK(own_key == cpu_key);
        CHECK(own_value == cpu_value);
        CHECK(side.cache.memory(seqs[i]).updater_bytes == cpu[i]->updater_bytes());
      }
    }
    for (const SequenceId seq : seqs) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
    side.cache.create(9);  // a slot that was used before remembers nothing
    CHECK(side.cache.num_tokens(9) == 0);
  }
}

namespace {

/// A sequence grows as an engine's does: append, attend, accumulate, maintain.
struct Growth {
  std::vector<std::vector<float>> keys, values, queries;

  Growth(Random& random, const CacheShape& shape, int steps) {
    for (int i = 0; i < steps; ++i) {
      keys.push_back(random_rows(random, 2, shape.num_kv_heads, shape.head_dim, DType::f16));
      values.push_back(random_rows(random, 2, shape.num_kv_heads, shape.head_dim, DType::f16));
      queries.push_back(random_rows(random, 2, shape.num_qo_heads, shape.head_dim, DType::f32));
    }
  }
  template <class Cache>
  void grow(Side<Cache>& side, SequenceId seq) const {
    for (std::size_t i = 0; i < keys.size(); ++i) {
      side.append(std::span(&seq, 1), keys[i], values[i]);
      Answer answer = side.attend(std::span(&seq, 1), queries[i]);
      for (float& x : answer.mass) x *= 30.0F;  // so that rows of the tail can drive out stored ones
      side.accumulate(std::span(&seq, 1), answer.mass, answer.positions);
      side.cache.maintain(seq);
    }
  }
};

}  // namespace

TEST_CASE("a fork and a loaded copy of an H2O sequence go on as the original, bit for bit, and leave it alone") {
  Random random(23);
  for (const int budget : {0, 150}) {
    const CacheConfig config = config_of({8, 2, 64}, 2000, 4, 16);
    Side<Sinks> side(config, policies_of<Sinks>({0.3F, budget, 40}, {4, 10}));
    side.cache.create(1);
    side.prefill(1, random_rows(random, 700, 8, 64, DType::f32), random_rows(random, 700, 2, 64, DType::f16), random_rows(random, 700, 2, 64, DType::f16));
    const auto query = random_rows(random, 1, 8, 64, DType::f32);
    const auto answer = [&](SequenceId seq) {
      std::vector<float> key, value;
      side.reconstruct(seq, key, value);
      Answer all = side.attend(std::span(&seq, 1), query);
      all.out.insert(all.out.end(), key.begin(), key.end());
      all.lse.insert(all.lse.end(), value.begin(), value.end());
      return all;
    };
    const int steps = effort() == 0 ? 12 : 50;
    Growth(random, config.shape, steps).grow(side, 1);
    const Answer before = answer(1);
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
    const Answer after = answer(1);
    CHECK(!(after == before));
    for (const SequenceId seq : {2, 3, 4}) CHECK(answer(seq) == after);
    Growth(random, config.shape, steps).grow(side, 4);
    side.cache.truncate(2, side.cache.num_tokens(2) - 3);
    side.cache.erase(4);
    CHECK(answer(1) == after);
    Growth(random, config.shape, steps).grow(side, 2);
    CHECK(answer(3) == after);
    CHECK(side.cache.truncate(3, 0) == TruncateResult::inexact);
    CHECK(message_of([&] { side.cache.truncate(1, 100); }).find("are stored as their values decided") != std::string::npos);
    for (const SequenceId seq : {1, 2, 3}) side.cache.erase(seq);
    CHECK(side.cache.memory().total() == 0);
    CHECK(side.cache.pool().allocator().num_free() == side.cache.pool().allocator().num_pages());
  }
}

TEST_CASE("forks of H2O sequences that are maintained together demand the pages that they take: with one less nothing changes") {
  Random random(29);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 3, 16);
  const auto policies = policies_of<H2O<Cuda>>({0.25F, 200, 20});
  const std::int64_t pages = H2O<Cuda>::num_pages(config, {}, policies) / 3;  // of one sequence
  REQUIRE(pages > 3);
  const std::vector<SequenceId> seqs{1, 2, 3};
  for (const std::int64_t missing : {1, 0}) {
    const auto pool = std::make_shared<gpu::PagePool>(H2O<Cuda>::page_bytes(config, {}, policies), 3 * pages - missing);
    Side<H2O<Cuda>> side(config, policies, pool);
    side.cache.create(1);
    side.ingest(1, random_rows(random, 500, 2, 64, DType::f32), random_rows(random, 500, 2, 64, DType::f16), random_rows(random, 500, 2, 64, DType::f16));
    CHECK(pool->allocator().num_free() == 2 * pages - missing);
    side.cache.fork(1, 2);
    side.cache.fork(1, 3);
    const auto key = random_rows(random, 3 * 20, 2, 64, DType::f16), value = random_rows(random, 3 * 20, 2, 64, DType::f16);
    side.append(seqs, key, value);
    std::vector<float> before[2], after[2];
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 40);
    side.reconstruct(1, before[0], before[1]);
    if (missing > 0) {  // two copies of every page are needed: the last one that writes keeps the original
      CHECK(message_of([&] { side.cache.maintain(seqs); }) == "page pool: " + std::to_string(2 * pages) + " pages needed, " + std::to_string(2 * pages - 1) + " free");
      for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 40);
      side.reconstruct(1, after[0], after[1]);
      CHECK(after[0] == before[0]);
      CHECK(message_of([&] { side.ingest(2, random_rows(random, 30, 2, 64, DType::f32), random_rows(random, 30, 2, 64, DType::f16), random_rows(random, 30, 2, 64, DType::f16)); }) == "nothing was raised");
      CHECK(pool->allocator().num_free() == pages - 1);
      continue;
    }
    side.cache.maintain(seqs);
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 24);
    CHECK(pool->allocator().num_free() == 0);
  }
}

TEST_CASE("append, attend with masses and accumulate in a CUDA graph, maintain between its replays") {
  Random random(31);
  CacheConfig config = config_of({8, 2, 128}, 1000, 2, 16);
  const auto policies = policies_of<H2O<Cuda>>({0.3F, 0, 32});
  Side<H2O<Cuda>> side(config, policies), plain(config, policies);
  const std::vector<SequenceId> seqs{5, 6};
  for (const SequenceId seq : seqs) {
    const auto q = random_rows(random, 60, 8, 128, DType::f32), k = random_rows(random, 60, 2, 128, DType::f16), v = random_rows(random, 60, 2, 128, DType::f16);
    for (auto* each : {&side, &plain}) {
      each->cache.create(seq);
      each->prefill(seq, q, k, v);
    }
  }
  gpu::DeviceArray<float> key(2 * 2 * 128), value(2 * 2 * 128), query(2 * 8 * 128), out(2 * 8 * 128);
  const gpu::DeviceArray<float> mass(2 * 2 * 1000);
  const MassView masses(mass.data(), 2, 2, 1000);
  cudaStream_t stream;
  gpu::check(cudaDeviceSynchronize(), "prompt");
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  CHECK(message_of([&] { side.cache.accumulate(seqs, {mass.data(), 2, 2, 999}, stream); }) == "mass: 999 positions in a captured graph, max_tokens 1000");
  side.cache.append(seqs, side.keys(key, 2), side.values(value, 2), stream);
  side.cache.attend(seqs, side.queries(query, 2), {out.data(), 2, 8, 128}, {}, masses, stream);
  side.cache.accumulate(seqs, masses, stream);
  gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
  gpu::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int step = 0; step < (effort() == 0 ? 40 : 150); ++step) {
    const auto k = random_rows(random, 2, 2, 128, DType::f16), v = random_rows(random, 2, 2, 128, DType::f16), q = random_rows(random, 2, 8, 128, DType::f32);
    gpu::check(cudaMemcpy(key.data(), k.data(), key.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    gpu::check(cudaMemcpy(value.data(), v.data(), value.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    gpu::check(cudaMemcpy(query.data(), q.data(), query.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    side.cache.advance(seqs, 1);
    gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    side.cache.maintain(seqs, stream);
    gpu::check(cudaStreamSynchronize(stream), "step");
    plain.append(seqs, k, v);
    const Answer expected = plain.attend(seqs, q);
    plain.accumulate(seqs, expected.mass, expected.positions);
    plain.cache.maintain(seqs);
    CHECK(host(out) == expected.out);
    if (step % 10 != 9) continue;
    const auto found = host(mass);
    for (std::size_t list = 0; list < 4; ++list) {
      const float *own = found.data() + list * 1000, *other = expected.mass.data() + list * static_cast<std::size_t>(expected.positions);
      CHECK(std::equal(own, own + expected.positions, other));
      CHECK(std::all_of(own + expected.positions, own + 1000, [](float x) { return x == 0.0F; }));
    }
    for (const SequenceId seq : seqs) CHECK(side.save(seq) == plain.save(seq));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_CASE("H2O: bad input is refused with both values, and masses that are not numbers reach no row") {
  const CacheConfig config = config_of({4, 2, 64}, 300, 2, 16);
  CHECK(message_of([&] { Side<H2O<Cuda>>(config, policies_of<H2O<Cuda>>({1.5F, 0, 8})); }) == "HeavyHitters: keep is in [0, 1], given 1.5");
  CHECK(message_of([&] { Side<H2O<Cuda>>(config, policies_of<H2O<Cuda>>({0.5F, -1, 8})); }) == "HeavyHitters: budget is at least 0, given -1");
  Random random(37);
  Side<H2O<Cuda>> side(config, policies_of<H2O<Cuda>>({0.25F, 0, 8}));
  side.cache.create(1);
  side.cache.create(2);
  const auto rows = random_rows(random, 10, 2, 64, DType::f16), query = random_rows(random, 10, 4, 64, DType::f32);
  const gpu::DeviceArray<float> k(rows), q(query), out(query.size()), mass(2 * 2 * 300);
  CHECK(message_of([&] { side.cache.ingest(1, side.keys(k, 10), side.values(k, 10), side.queries(q, 3)); }) == "q_window: prompt rows are chosen by the attention of 10 queries, given 3");
  CHECK(message_of([&] { side.cache.ingest(1, side.keys(k, 10), side.values(k, 10)); }) == "q_window: prompt rows are chosen by the attention of 10 queries, given 0");
  CHECK(side.cache.num_tokens(1) == 0);
  side.append(std::span<const SequenceId>(std::vector<SequenceId>{1, 2}), rows, rows);
  const auto attend = [&](const MassView& view) { side.cache.attend(1, side.queries(q, 1), {out.data(), 1, 4, 64}, {}, view); };
  CHECK(message_of([&] { attend({mass.data(), 2, 2, 300}); }) == "num_sequences: call 1, mass 2");
  CHECK(message_of([&] { attend({mass.data(), 1, 4, 300}); }) == "num_heads: cache 2, mass 4");
  CHECK(message_of([&] { attend({mass.data(), 1, 2, 4}); }) == "mass: 4 positions, sequence 1 has 5 tokens");
  CHECK(message_of([&] { attend({}); }) == "nothing was raised");
  CHECK(message_of([&] { side.cache.accumulate(1, {mass.data(), 1, 2, 4}); }) == "mass: 4 positions, sequence 1 has 5 tokens");
  CHECK(message_of([&] { side.cache.accumulate(std::vector<SequenceId>{1, 2, 1}, {mass.data(), 3, 2, 5}); }) == "accumulate: sequence 1 stands at place 2 and before");
  CHECK(message_of([&] { side.cache.accumulate(std::vector<SequenceId>{1, 7}, {mass.data(), 2, 2, 5}); }) == "unknown sequence 7; 2 sequences exist");
  CHECK(side.cache.faults() == 0);
  const std::vector<std::byte> clean = side.save(1);
  side.accumulate(std::vector<SequenceId>{1}, {std::nanf(""), -1.0F, 2e30F, HUGE_VALF, -HUGE_VALF, 0.0F, 0.0F, 0.0F, 0.0F, -0.0F}, 5);
  CHECK(side.cache.faults() == 5);
  CHECK(side.save(1) == clean);
  // A query that is not a number: its output is none, but it gives no row a mass that is none.
  auto bad = random_rows(random, 60, 4, 64, DType::f32);
  bad[30 * 4 * 64 + 5] = std::nanf("");
  bad[40 * 4 * 64 + 70] = HUGE_VALF;
  const auto prompt = random_rows(random, 60, 2, 64, DType::f16);
  side.prefill(1, bad, prompt, prompt);
  const std::vector<std::byte> saved = side.save(1);
  side.cache.erase(2);
  side.cache.load(2, saved);  // which refuses masses that are not finite
  CHECK(side.save(2) == saved);
}

TEST_CASE("saved H2O sequences: hostile masses and positions under a right checksum are refused, or do no harm") {
  Random random(41);
  const CacheConfig config = config_of({4, 2, 64}, 600, 2, 16);
  const auto policies = policies_of<Sinks>({0.25F, 0, 20}, {3, 0});
  Side<Sinks> side(config, policies);
  side.cache.create(1);
  side.prefill(1, random_rows(random, 300, 4, 64, DType::f32), random_rows(random, 300, 2, 64, DType::f16), random_rows(random, 300, 2, 64, DType::f16));
  Growth(random, config.shape, 20).grow(side, 1);
  const std::vector<std::byte> saved = side.save(1);
  const auto with_checksum = [](std::vector<std::byte> bytes) {
    const std::uint64_t sum = checksum(std::span<const std::byte>(bytes).subspan(24));
    std::memcpy(bytes.data() + 16, &sum, sizeof sum);
    return bytes;
  };
  const auto message = [&](const std::vector<std::byte>& bytes) { return message_of([&] { side.cache.load(2, bytes); }); };
  // From the end: masses of the ring [head, place], of the full rows [head, row], positions [head, row].
  const std::size_t ring = static_cast<std::size_t>((side.cache.config().tail_capacity + 31) / 32 * 32), rows = side.cache.memory(1).full_row_bytes / 512, padded = (2 * rows * 4 + 15) / 16 * 16;
  const std::size_t tail_masses = saved.size() - 2 * ring * 4, masses = tail_masses - padded, positions = masses - padded;
  for (const std::size_t place : {tail_masses + 4, masses + 8}) {
    for (const float value : {std::nanf(""), -1.0F, HUGE_VALF}) {
      auto hostile = saved;
      std::memcpy(hostile.data() + place, &value, sizeof value);
      CHECK(message(with_checksum(hostile)).find("finite and at least 0 expected") != std::string::npos);
    }
  }
  std::vector<std::int32_t> listed(2 * rows);
  std::memcpy(listed.data(), saved.data() + positions, listed.size() * 4);
  for (std::size_t head = 0; head < 2; ++head) {
    const auto begin = listed.begin() + static_cast<std::ptrdiff_t>(head * rows), end = begin + static_cast<std::ptrdiff_t>(rows);
    CHECK(!std::is_sorted(begin, end));  // rows have taken others' places
    for (std::int32_t sink = 0; sink < 3; ++sink) CHECK(std::find(begin, end, sink) != end);
  }
  for (const std::int32_t position : {listed[0], -1, 340}) {  // there already, none, in the tail
    auto hostile = saved;
    std::memcpy(hostile.data() + positions + 4, &position, sizeof position);
    CHECK(message(with_checksum(hostile)).find("the tail begins at") != std::string::npos);
  }
  CHECK(message_of([&] {
          SnapKVOnly<Cuda>::PolicySet other;
          other.token_policy.get<KeepFull>().recent = 0;
          other.token_policy.get<SnapKV>().window = 20;
          SnapKVOnly<Cuda>(config, {}, other).load(1, saved);
        }) == "masses of rows: cache 0, saved 1");
  int loaded = 0;
  for (int trial = 0; trial < (effort() == 0 ? 60 : 600); ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place = trial % 2 == 0 ? 24 + random() % 400 : saved.size() - 1 - random() % (saved.size() - positions);
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      side.cache.load(2, with_checksum(hostile));
    } catch (const Error&) {
      continue;
    }
    ++loaded;
    try {
      Growth(random, config.shape, 12).grow(side, 2);
    } catch (const CapacityError&) {  // its tail may be full
    }
    const std::vector<std::byte> again = side.save(2);
    side.cache.erase(2);
    CHECK(message(again) == "nothing was raised");
    side.cache.erase(2);
  }
  CHECK(loaded > 0);
  CHECK(loaded < 600);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}
