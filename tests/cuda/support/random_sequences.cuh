// SPDX-License-Identifier: Apache-2.0
// Random sequences of calls to a cache on the device and to the CPU's: rows as there, answers as
// float64 attention over what is stored, the same in any batch.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda/support/device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"
#include "cuda/support/random_layer.hpp"

namespace support {

using namespace lowrankkv;

/// One composition on the device, the sequences it is asked about.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;
  virtual void create(SequenceId seq) = 0;
  virtual void erase(SequenceId seq) = 0;
  virtual void ingest(SequenceId seq, const std::vector<float>& key,
                      const std::vector<float>& value, const std::vector<float>& window = {}) = 0;
  virtual std::int64_t publications() const = 0;
  virtual std::int64_t merges() const = 0;
  virtual void prefill(SequenceId seq, const std::vector<float>& query,
                       const std::vector<float>& key, const std::vector<float>& value,
                       std::vector<float>& out, std::vector<float>& lse) = 0;
  virtual void append_maintained(std::span<const SequenceId> seqs, const std::vector<float>& key,
                                 const std::vector<float>& value) = 0;
  virtual void truncate(SequenceId seq, std::int64_t length) = 0;
  virtual void remove(SequenceId seq, std::int64_t first, std::int64_t count) = 0;
  virtual int tail_length(SequenceId seq) const = 0;
  virtual std::int64_t num_tokens(SequenceId seq) const = 0;
  virtual void reconstruct(SequenceId seq, std::vector<float>& key,
                           std::vector<float>& value) const = 0;
  virtual void attend(std::span<const SequenceId> seqs, const std::vector<float>& query,
                      std::vector<float>& out, std::vector<float>& lse) = 0;
  virtual void reconstruct_half(SequenceId seq, std::int64_t first, std::int64_t count,
                                std::vector<float>& key, std::vector<float>& value) const = 0;
  virtual void fork(SequenceId from, SequenceId to) = 0;
  virtual std::vector<std::byte> save(SequenceId seq) const = 0;
  virtual void load(SequenceId seq, const std::vector<std::byte>& bytes) = 0;
  virtual std::int64_t free_pages() const = 0;
  virtual std::uint32_t faults() const = 0;
  virtual MemoryUsage memory() const = 0;
};

template <class Cache>
class Device : public DeviceSide {
 public:
  Device(const CacheConfig& config, const LayerBasis& basis,
         const typename Cache::PolicySet& policies)
      : cache_(config, basis, policies) {}
  void create(SequenceId seq) override { cache_.create(seq); }
  void erase(SequenceId seq) override { cache_.erase(seq); }
  void ingest(SequenceId seq, const std::vector<float>& key, const std::vector<float>& value,
              const std::vector<float>& window) override {
    const gpu::DeviceArray<float> k(key), v(value), q(window);
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t w =
        static_cast<std::int64_t>(window.size()) / (shape.num_qo_heads * shape.head_dim);
    cache_.ingest(
        seq, keys(k, key), values(v, value),
        w == 0 ? QueryView{} : QueryView{q.data(), w, shape.num_qo_heads, shape.head_dim});
    gpu::check(cudaDeviceSynchronize(), "ingest");
  }
  void prefill(SequenceId seq, const std::vector<float>& query, const std::vector<float>& key,
               const std::vector<float>& value, std::vector<float>& out,
               std::vector<float>& lse) override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t tokens = tokens_of(key);
    const gpu::DeviceArray<float> q(query), k(key), v(value);
    const auto o = poisoned(query.size()),
               l = poisoned(static_cast<std::size_t>(tokens * shape.num_qo_heads));
    cache_.prefill(seq, {q.data(), tokens, shape.num_qo_heads, shape.head_dim}, keys(k, key),
                   values(v, value), {o.data(), tokens, shape.num_qo_heads, shape.head_dim},
                   {l.data(), tokens, shape.num_qo_heads});
    out = host(o);
    lse = host(l);
  }
  void append_maintained(std::span<const SequenceId> seqs, const std::vector<float>& key,
                         const std::vector<float>& value) override {
    const gpu::DeviceArray<float> k(key), v(value);
    cache_.append(seqs, keys(k, key), values(v, value));
    cache_.maintain(seqs);
    gpu::check(cudaDeviceSynchronize(), "append");
  }
  void truncate(SequenceId seq, std::int64_t length) override { cache_.truncate(seq, length); }
  void remove(SequenceId seq, std::int64_t first, std::int64_t count) override {
    cache_.remove(seq, first, count);
    if (cache_.config().rope.keys == Rope::pre) cache_.shift_positions(seq, first, -count);
  }
  int tail_length(SequenceId seq) const override { return cache_.tail_length(seq); }
  std::int64_t num_tokens(SequenceId seq) const override { return cache_.num_tokens(seq); }
  void reconstruct(SequenceId seq, std::vector<float>& key,
                   std::vector<float>& value) const override {
    const std::int64_t tokens = cache_.num_tokens(seq);
    const CacheShape& shape = cache_.config().shape;
    const auto k = poisoned(static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim)),
               v = poisoned(k.size());
    cache_.reconstruct(seq, 0, {k.data(), tokens, shape.num_kv_heads, shape.head_dim},
                       {v.data(), tokens, shape.num_kv_heads, shape.head_dim});
    key = host(k);
    value = host(v);
  }
  void attend(std::span<const SequenceId> seqs, const std::vector<float>& query,
              std::vector<float>& out, std::vector<float>& lse) override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t tokens =
        static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * shape.head_dim);
    const gpu::DeviceArray<float> q(query);
    const auto o = poisoned(query.size()),
               l = poisoned(static_cast<std::size_t>(tokens * shape.num_qo_heads));
    cache_.attend(seqs, {q.data(), tokens, shape.num_qo_heads, shape.head_dim},
                  {o.data(), tokens, shape.num_qo_heads, shape.head_dim},
                  {l.data(), tokens, shape.num_qo_heads});
    out = host(o);
    lse = host(l);
  }
  /// A range, into f16 tensors with the heads outside.
  void reconstruct_half(SequenceId seq, std::int64_t first, std::int64_t count,
                        std::vector<float>& key, std::vector<float>& value) const override {
    const CacheShape& shape = cache_.config().shape;
    const std::int64_t heads = shape.num_kv_heads, dim = shape.head_dim;
    const gpu::DeviceArray<__half> k(static_cast<std::size_t>(count * heads * dim)), v(k.size());
    if (k.size() > 0) gpu::check(cudaMemset(k.data(), 0xff, k.bytes()), "cudaMemset");
    cache_.reconstruct(seq, first,
                       KeyTargetView(k.data(), DType::f16, count, shape.num_kv_heads,
                                     shape.head_dim, dim, count * dim),
                       ValueTargetView(v.data(), DType::f16, count, shape.num_kv_heads,
                                       shape.head_dim, dim, count * dim));
    for (const auto& [from, to] : {std::pair{&k, &key}, std::pair{&v, &value}}) {
      const std::vector<__half> all = host(*from);
      to->resize(all.size());
      for (std::int64_t token = 0; token < count; ++token) {
        for (std::int64_t i = 0; i < heads * dim; ++i)
          (*to)[static_cast<std::size_t>(token * heads * dim + i)] = __half2float(
              all[static_cast<std::size_t>((i / dim * count + token) * dim + i % dim)]);
      }
    }
  }
  void fork(SequenceId from, SequenceId to) override { cache_.fork(from, to); }
  std::vector<std::byte> save(SequenceId seq) const override {
    std::vector<std::byte> bytes(cache_.save_bytes(seq));
    CHECK(cache_.save(seq, bytes) == bytes.size());
    return bytes;
  }
  void load(SequenceId seq, const std::vector<std::byte>& bytes) override {
    cache_.load(seq, bytes);
  }
  std::int64_t free_pages() const override { return cache_.pool().allocator().num_free(); }
  std::uint32_t faults() const override { return cache_.faults(); }
  std::int64_t publications() const override { return cache_.statistics().publications; }
  std::int64_t merges() const override { return cache_.statistics().merges; }
  MemoryUsage memory() const override { return cache_.memory(); }
  Cache& cache() { return cache_; }

 private:
  std::int64_t tokens_of(const std::vector<float>& rows) const {
    return static_cast<std::int64_t>(rows.size()) /
           (cache_.config().shape.num_kv_heads * cache_.config().shape.head_dim);
  }
  KeyView keys(const gpu::DeviceArray<float>& rows, const std::vector<float>& from) const {
    return {rows.data(), tokens_of(from), cache_.config().shape.num_kv_heads,
            cache_.config().shape.head_dim};
  }
  ValueView values(const gpu::DeviceArray<float>& rows, const std::vector<float>& from) const {
    return {rows.data(), tokens_of(from), cache_.config().shape.num_kv_heads,
            cache_.config().shape.head_dim};
  }
  Cache cache_;
};

struct Worst {
  double out = 0.0, lse = 0.0, rows = 0.0;
  std::int64_t publications = 0, merges = 0, removed = 0;
  bool other_rows = false;  ///< scores that are almost equal chose another row here than there
};

/// Relative distance of rows of `dim` numbers, but for the `left_out` that are furthest from each
/// other.
inline double distance_of_most(const std::vector<float>& own, const std::vector<float>& other,
                               int dim, std::size_t left_out) {
  std::vector<double> errors;
  double energy = 0.0, error = 0.0;
  for (std::size_t row = 0; row < own.size(); row += static_cast<std::size_t>(dim)) {
    double square = 0.0;
    for (std::size_t i = row; i < row + static_cast<std::size_t>(dim); ++i) {
      square += (static_cast<double>(own[i]) - other[i]) * (static_cast<double>(own[i]) - other[i]);
      energy += static_cast<double>(other[i]) * other[i];
    }
    errors.push_back(square);
  }
  std::sort(errors.begin(), errors.end());
  for (std::size_t i = 0; i + left_out < errors.size(); ++i) error += errors[i];
  return std::sqrt(error / energy);
}

/// One sequence's answer against float64 attention over its own stored rows, and its stored rows
/// against the CPU's.
inline void compare(const Settings& settings, const CacheConfig& config, DeviceSide& device,
                    SequenceId seq, CpuSide& cpu, const std::vector<float>& query,
                    const std::vector<float>& out, const std::vector<float>& lse, Worst& worst) {
  std::vector<float> key, value, cpu_key, cpu_value;
  device.reconstruct(seq, key, value);
  cpu.reconstruct(cpu_key, cpu_value);
  const std::int64_t tokens = device.num_tokens(seq), first = tokens / 3, count = tokens / 2;
  const std::size_t row_size = key.size() / static_cast<std::size_t>(tokens);
  std::vector<float> part_key, part_value, expected_part[2];
  device.reconstruct_half(seq, first, count, part_key, part_value);
  for (const auto& [all, part] :
       {std::pair{&key, &expected_part[0]}, std::pair{&value, &expected_part[1]}}) {
    for (std::size_t i = static_cast<std::size_t>(first) * row_size;
         i < static_cast<std::size_t>(first + count) * row_size; ++i)
      part->push_back(round_to(DType::f16, (*all)[i]));
  }
  CHECK(part_key == expected_part[0]);
  CHECK(part_value == expected_part[1]);
  CHECK(device.tail_length(seq) == cpu.tail_length());
  // The same rows, summed in another order: coefficients may round to a neighbour, and a code, or a
  // gain, that lies on a boundary to the next: 22 bits of a map's numbers enter the sums, and a row
  // may span hundreds of steps. Such rows are few, and as good as the CPU's.
  const double tolerance =
      settings.coefficients == DType::f16 ? 1e-3 : 8e-3;  // two units of the last place
  const int dim = config.shape.head_dim;
  std::size_t different = 0;
  for (const auto& [own, other] : {std::pair{&key, &cpu_key}, std::pair{&value, &cpu_value}}) {
    double energy = 0.0;
    for (const float x : *other) energy += static_cast<double>(x) * x;
    const double typical = energy * dim / static_cast<double>(other->size());
    for (std::size_t row = 0; row < own->size(); row += static_cast<std::size_t>(dim)) {
      double error = 0.0, norm = 0.0;
      for (std::size_t i = row; i < row + static_cast<std::size_t>(dim); ++i) {
        const double d = static_cast<double>((*own)[i]) - (*other)[i];
        error += d * d;
        norm += static_cast<double>((*other)[i]) * (*other)[i];
      }
      if (!(error < tolerance * tolerance * std::max(norm, 0.1 * typical))) ++different;
    }
  }
  worst.rows = std::max(worst.rows, std::max(distance(key, cpu_key), distance(value, cpu_value)));
  // Bases that moved were rounded to their stored type at every step, and coefficients under them:
  // the same up to that. Of rows whose scores are almost equal one may be observed here and the
  // other there. Under bases that are rotated a little codes of 8 bits are other codes. Of rows
  // whose errors, or scores, are almost equal one may stay here and the other there.
  const std::size_t few = 2 + key.size() / static_cast<std::size_t>(dim) / 200;
  const bool chosen = by_errors(settings.method) || by_scores(settings.method);
  if (adapts(settings.method)) {
    // Of a prompt's rows: the kernel rounds queries times the scale of the softmax to 16 bits.
    const std::size_t left_out = by_scores(settings.method) ? few : 0;
    const auto apart = [&](std::size_t without) {
      return std::max(distance_of_most(key, cpu_key, dim, without),
                      distance_of_most(value, cpu_value, dim, without));
    };
    const double most = settings.share < 1.0F ? 0.2 : coded(settings.method) ? 0.03 : 4 * tolerance;
    CHECK(apart(left_out) < most);
    worst.other_rows = worst.other_rows || !(apart(0) < most);
  } else {
    CHECK(different <= (coded(settings.method) || chosen ? few : 0));
  }
  if (settings.method == Method::full) CHECK(key == cpu_key);
  std::vector<double> expected, expected_lse;
  attend_f64(config.shape, config.scale(), rotated(config, key), value, query, expected,
             expected_lse, drops(settings.method));
  // Codes: queries and weights are 16-bit integers, gains powers of 2^(1/16) by an approximate
  // instruction. Plain rows: f32 sums; queries and weights are two numbers of the rows' type, 22
  // bits together in f16, 16 in bf16. Pre-RoPE keys are read in f16: the map that up-projects them,
  // what it gives, products with sines, sums. Of rows at full rank the last two, half as much.
  const double limit = settings.pre_rope                ? 5e-3
                       : coded(settings.method)         ? 1e-3
                       : config.full_type == DType::f16 ? 2e-5
                                                        : 2e-4;
  const double error = distance(out, expected), shift = furthest(lse, expected_lse);
  worst.out = std::max(worst.out, error);
  worst.lse = std::max(worst.lse, shift);
  CHECK(error < limit);
  CHECK(shift <
        limit * std::max(1.0, furthest(expected_lse,
                                       std::vector<double>(
                                           expected_lse.size()))));  // relative to the logits
}

/// @param make_device  (settings, config, basis) -> DeviceSide
template <class MakeDevice>
Worst random_sequences(const MakeDevice& make_device, Settings settings, DType type,
                       std::uint64_t seed, int trials) {
  Random random(seed), forms(seed + 1000), removals(seed + 2000), metric_forms(seed + 3000),
      thresholds(seed + 4000), merging(seed + 5000);
  Worst worst;
  for (int trial = 0; trial < trials; ++trial) {
    worst.other_rows = false;
    CacheConfig config;
    config.shape = random_shape(random, 3, {1, 2, 3, 4, 5, 8, 16}, {64, 80, 96, 128, 192, 256});
    config.max_sequences = 3;
    config.max_tokens = 9500;
    config.max_query_tokens = 1 + static_cast<int>(random() % 4);
    config.full_type = type;
    config.epoch_type = DType::f32;
    config.flush_interval = 16 + static_cast<int>(random() % 3) * 24;
    config.publish_interval = 40;  // of updaters: several in a test
    config.full_row_bits = settings.full_row_bits != 0 || trial % 2 == 1 ? 8 : 0;
    settings.sinks = static_cast<int>(random() % 2) * static_cast<int>(random() % 40);
    settings.recent = 4 + static_cast<int>(random() % 60);
    settings.outliers = {random() % 2 == 0 ? OutlierError::relative : OutlierError::absolute,
                         0.02F * static_cast<float>(random() % 6), 0.0F};
    if (thresholds() % 3 == 0)
      settings.outliers.first_tokens = static_cast<int>(1 + thresholds() % 400);
    // From what nearly all errors exceed to what few do.
    if (thresholds() % 2 == 0)
      settings.outliers.threshold = std::exp2(-static_cast<float>(thresholds() % 8)) *
                                    (settings.outliers.error == OutlierError::relative
                                         ? 1.0F
                                         : static_cast<float>(config.shape.head_dim));
    const bool metrics = adapts(settings.method) ? metric_forms() % 2 == 0
                                                 : by_errors(settings.method) && random() % 2 == 0;
    settings.basis.key_metric = metrics ? KeyMetric::query_aware : KeyMetric::plain;
    settings.basis.value_metric = metrics ? ValueMetric::output_aware : ValueMetric::plain;
    settings.snapkv = {0.25F * static_cast<float>(random() % 5), random() % 3 == 0 ? 100 : 0,
                       8 + static_cast<int>(random() % 25), 1 + 2 * static_cast<int>(random() % 4),
                       random() % 2 == 0 ? Pooling::average : Pooling::maximum};
    const bool device_epochs = support::device_epochs(settings.method);
    settings.share = adapts(settings.method) && !device_epochs && random() % 2 == 0 ? 0.3F : 1.0F;
    settings.form = static_cast<OjaForm>(forms() % 3);
    if (adapts(settings.method) && !device_epochs && forms() % 3 == 0)
      config.epoch_type = DType::f16;
    if (adapts(settings.method) && merging() % 4 != 0)
      config.merge_rows = 1 + static_cast<std::int64_t>(merging() % 200);  // several flushes
    settings.basis.centred = random() % 2 == 0;
    if (settings.method == Method::static_pca || settings.method == Method::projector)
      settings.recent = 0;
    int rank = 1 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim));
    if (device_epochs && random() % 2 == 0) rank = 1 + rank % 14;
    if (settings.pre_rope) config.rope = random_rope(random, config.shape.head_dim);
    RandomLayer layer = random_layer(random, config.shape, settings, rank);
    // A chunk that ends has as many rows as its basis has columns: others would be completed here
    // and there in different ways.
    settings.directions = {2.0F + static_cast<float>(random() % 2),
                           rank + 16 * static_cast<int>(random() % 8), 1.0F, random() % 2 == 0};
    for (HeadBasis& head : layer.basis.heads) {
      if (!device_epochs || rank > 14) break;
      head.key_threshold = 0.05F * std::sqrt(static_cast<float>(config.shape.head_dim)) * 1.2F;
      head.value_threshold = 1.05F * head.key_threshold;
    }
    const auto device = make_device(settings, config, layer.basis);
    std::vector<SequenceId> seqs{1, 2, 3};
    std::vector<std::unique_ptr<CpuSide>> cpu;
    CAPTURE(trial);
    CAPTURE(config.shape.head_dim);
    CAPTURE(config.shape.group_size());
    CAPTURE(rank);
    CAPTURE(static_cast<int>(settings.form));
    CAPTURE(metrics);
    for (const SequenceId seq : seqs) {
      device->create(seq);
      cpu.push_back(make_cpu_side(settings, config, layer.basis));
      const int lengths[] = {1, 3, 17, 63, 64, 65, 300, 1000, 2100, 4500};
      for (int part = 0; part < 1 + static_cast<int>(random() % 2); ++part) {
        const int n = lengths[random() % (device_epochs ? 8 : 10)];
        const auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
        auto window = layer.queries(
            random, settings.share < 1.0F || by_scores(settings.method) ? std::min(n, 32) : 0);
        for (float& x : window) x = round_to(type, x);
        device->ingest(seq, key, value, window);
        cpu.back()->ingest(key, value, window);
      }
    }
    for (int step = 0; step < 4; ++step) {
      const int m = 1 + static_cast<int>(random() % static_cast<unsigned>(config.max_query_tokens));
      const int repeats = step == 1 ? 30 : 1;  // enough to flush
      for (int repeat = 0; repeat < repeats; ++repeat) {
        const auto key = layer.rows(random, 3 * m, true), value = layer.rows(random, 3 * m, false);
        device->append_maintained(seqs, key, value);
        for (std::size_t i = 0; i < 3; ++i) {
          const std::size_t size = key.size() / 3;
          const auto part = [&](const std::vector<float>& all) {
            return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(i * size),
                                      all.begin() + static_cast<std::ptrdiff_t>((i + 1) * size));
          };
          cpu[i]->append_maintained(part(key), part(value));
        }
      }
      const int least =
          std::min({m, device->tail_length(1), device->tail_length(2), device->tail_length(3)});
      if (least == 0) continue;
      const auto query = layer.queries(random, 3 * least);
      std::vector<float> out, lse, again, again_lse;
      device->attend(seqs, query, out, lse);
      device->attend(seqs, query, again, again_lse);
      CHECK(out == again);  // bit for bit
      CHECK(lse == again_lse);
      for (std::size_t i = 0; i < 3; ++i) {
        const auto part = [&](const std::vector<float>& all) {
          const std::size_t size = all.size() / 3;
          return std::vector<float>(all.begin() + static_cast<std::ptrdiff_t>(i * size),
                                    all.begin() + static_cast<std::ptrdiff_t>((i + 1) * size));
        };
        compare(settings, config, *device, seqs[i], *cpu[i], part(query), part(out), part(lse),
                worst);
        std::vector<float> alone, alone_lse;
        device->attend(std::span(&seqs[i], 1), part(query), alone, alone_lse);
        CHECK(alone == part(out));  // the same in any batch
        CHECK(alone_lse == part(lse));
      }
      if (step < 2) {  // tokens are removed from the middle
        const std::size_t victim = removals() % 3;
        const std::int64_t tokens = device->num_tokens(seqs[victim]),
                           kept = tokens - device->tail_length(seqs[victim]);
        const bool chosen = by_errors(settings.method) || by_scores(settings.method);
        const auto below = [&](std::int64_t end) {
          return end > 0 ? static_cast<std::int64_t>(removals() % static_cast<std::uint64_t>(end))
                         : 0;
        };
        // As many stored tokens are left as the policy keeps at full rank, or they are all at full
        // rank.
        const bool sinks_too = !chosen && kept > settings.sinks + 2 && removals() % 3 == 0;
        const std::int64_t begin =
            sinks_too || chosen ? 0 : std::min(std::int64_t{settings.sinks} + 1, kept);
        const std::int64_t first = begin + below(sinks_too ? settings.sinks + 1 : tokens - begin),
                           most = sinks_too ? kept - settings.sinks - 1 : tokens - first;
        const std::int64_t count = removals() % 2 == 0
                                       ? below(most)
                                       : std::min(below(40), std::max(std::int64_t{0}, most - 1));
        device->remove(seqs[victim], first, count);
        cpu[victim]->remove(first, count);
        CHECK(device->num_tokens(seqs[victim]) == tokens - count);
        worst.removed += count;
      }
      if (step == 2) {
        const std::size_t victim = random() % 3;
        const std::int64_t length = static_cast<std::int64_t>(
            random() % static_cast<std::uint64_t>(device->num_tokens(seqs[victim])));
        device->truncate(seqs[victim], length);
        cpu[victim]->truncate(length);
      }
    }
    CHECK(device->faults() == 0);
    std::int64_t publications = 0, merges = 0;
    for (const auto& each : cpu) {
      publications += each->publications();
      merges += each->merges();
    }
    if (!worst.other_rows) {  // a row that only one side observes may end a chunk there
      CHECK(device->publications() == publications);
      CHECK(device->merges() == merges);
    }
    worst.publications += publications;
    worst.merges += merges;
    for (const SequenceId seq : seqs) device->erase(seq);
    CHECK(device->memory().total() == 0);
  }
  return worst;
}

}  // namespace support
