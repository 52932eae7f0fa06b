// SPDX-License-Identifier: Apache-2.0
// A captured step whose sequences are read from device memory: they come and go, and some places
// have none.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"
#include "lowrankkv/cuda/presets.cuh"

namespace support {

inline constexpr int kPlaces = 4, kTokens = 2;  // of the captured step
inline constexpr std::int32_t kNone = -1;       // no sequence

/// The bytes of every page that no sequence has become NaN.
inline void poison_free_pages(gpu::PagePool& pool) {
  std::vector<std::int32_t> taken;
  while (pool.allocator().num_free() > 0) taken.push_back(pool.allocator().take());
  for (const std::int32_t page : taken) {
    gpu::check(cudaMemset(pool.memory() + static_cast<std::size_t>(page) * pool.page_bytes(), 0xff,
                          pool.page_bytes()),
               "cudaMemset");
    pool.allocator().release(page);
  }
}

/// One graph of kPlaces places serves sequences that begin, end and change places, against plain
/// calls, bit for bit. Pages that come back are full of NaN.
template <class Cache, class Rows>
class SlotScene {
 public:
  SlotScene(const RandomLayer& layer, const lowrankkv::CacheConfig& config,
            const std::shared_ptr<gpu::PagePool>& pool, const typename Cache::PolicySet& policies,
            Random& random, Rows& rows)
      : layer_(layer),
        random_(random),
        rows_(rows),
        pool_(pool),
        cache_(config, layer.basis, policies, pool),
        plain_(config, layer.basis, policies) {}

  /// A step in which places may have got others.
  void step() {
    for (SequenceId& place : places_) {
      if (random_() % 8 == 0 || steps_ == 0) change(place);
    }
    if (steps_++ % 3 == 0) std::swap(places_[0], places_[1 + random_() % 3]);
    const std::vector<SequenceId> served = upload_step();
    cache_.advance(served, kTokens);
    gpu::check(cudaMemset(out_.data(), 0xff, out_.bytes()), "cudaMemset");
    gpu::check(cudaMemset(lse_.data(), 0xff, lse_.bytes()), "cudaMemset");
    gpu::check(cudaDeviceSynchronize(), "inputs");
    gpu::check(cudaGraphLaunch(step_.replay(), step_.stream), "cudaGraphLaunch");
    cache_.maintain(served, step_.stream);
    gpu::check(cudaStreamSynchronize(step_.stream), "step");
    const std::vector<float> outputs = host(out_), sums = host(lse_);
    for (std::size_t place = 0; place < kPlaces; ++place) {
      std::vector<float> expected(kTokens * wide_, 0.0F),
          expected_lse(kTokens * static_cast<std::size_t>(heads_),
                       -std::numeric_limits<float>::infinity());
      if (places_[place] != kNone) plain_step(place, expected, expected_lse);
      CHECK(of_place(outputs, place, wide_) == expected);
      CHECK(of_place(sums, place, static_cast<std::size_t>(heads_)) == expected_lse);
    }
  }
  /// Everything comes back.
  void end() {
    CHECK(cache_.faults() == 0);
    for (const SequenceId place : places_) {
      if (place != kNone) cache_.erase(place);
    }
    CHECK(pool_->allocator().num_free() == pool_->allocator().num_pages());
  }

 private:
  static constexpr int kRows = kPlaces * kTokens;

  /// A request ends, and perhaps another begins.
  void change(SequenceId& place) {
    if (place != kNone) {
      for (Cache* each : {&cache_, &plain_}) each->erase(place);
      place = kNone;
      gpu::check(cudaDeviceSynchronize(), "erase");
      poison_free_pages(*pool_);
    }
    if (random_() % 4 == 0) return;  // nobody waits
    place = next_++;
    const int length = 1 + static_cast<int>(random_() % 400);
    const gpu::DeviceArray<float> k(rows_(length, true)), v(rows_(length, false)),
        q(layer_.queries(random_, length));
    for (Cache* each : {&cache_, &plain_}) {
      each->create(place);
      each->ingest(place, {k.data(), length, kv_, dim_}, {v.data(), length, kv_, dim_},
                   {q.data(), length, heads_, dim_});
    }
    gpu::check(cudaDeviceSynchronize(), "ingest");
  }

  /// What a step reads; rows of places without a sequence are NaN. Returns who is there.
  std::vector<SequenceId> upload_step() {
    auto k = rows_(kRows, true), v = rows_(kRows, false), q = layer_.queries(random_, kRows);
    const auto spoil = [](std::vector<float>& all, std::size_t place, std::size_t width) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(place * kTokens * width);
      std::fill_n(first, kTokens * width, std::numeric_limits<float>::quiet_NaN());
    };
    std::vector<std::int32_t> now(kPlaces, kNone);
    std::vector<SequenceId> served;
    for (std::size_t place = 0; place < kPlaces; ++place) {
      if (places_[place] != kNone) {
        now[place] = cache_.slot(places_[place]);
        served.push_back(places_[place]);
        continue;
      }
      spoil(k, place, row_);
      spoil(v, place, row_);
      spoil(q, place, wide_);
    }
    upload(k, key_);
    upload(v, value_);
    upload(q, query_);
    gpu::check(cudaMemcpy(slots_.data(), now.data(), slots_.bytes(), cudaMemcpyHostToDevice),
               "slots");
    return served;
  }

  /// The same step of the sequence at a place by plain calls.
  void plain_step(std::size_t place, std::vector<float>& out, std::vector<float>& lse) {
    const std::size_t first = place * kTokens;
    const SequenceId seq = places_[place];
    const gpu::DeviceArray<float> o(out.size()), l(lse.size());
    plain_.append(seq, {key_.data() + first * row_, kTokens, kv_, dim_},
                  {value_.data() + first * row_, kTokens, kv_, dim_});
    plain_.attend(seq, {query_.data() + first * wide_, kTokens, heads_, dim_},
                  {o.data(), kTokens, heads_, dim_}, {l.data(), kTokens, heads_});
    plain_.maintain(seq);
    gpu::check(cudaDeviceSynchronize(), "plain");
    out = host(o);
    lse = host(l);
  }
  static std::vector<float> of_place(const std::vector<float>& all, std::size_t place,
                                     std::size_t width) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(place * kTokens * width);
    return {begin, begin + static_cast<std::ptrdiff_t>(kTokens * width)};
  }

  const RandomLayer& layer_;
  Random& random_;
  Rows& rows_;
  std::shared_ptr<gpu::PagePool> pool_;
  Cache cache_, plain_;
  int heads_ = layer_.shape.num_qo_heads, kv_ = layer_.shape.num_kv_heads,
      dim_ = layer_.shape.head_dim;
  std::size_t row_ = static_cast<std::size_t>(kv_ * dim_),
              wide_ = static_cast<std::size_t>(heads_ * dim_);
  gpu::DeviceArray<float> key_{kRows * row_}, value_{kRows * row_}, query_{kRows * wide_},
      out_{kRows * wide_}, lse_{kRows * static_cast<std::size_t>(heads_)};
  gpu::DeviceArray<std::int32_t> slots_{kPlaces};
  CapturedStep step_{[&](cudaStream_t stream) {
    const lowrankkv::SlotView view{slots_.data(), kPlaces};
    cache_.append(view, {key_.data(), kRows, kv_, dim_}, {value_.data(), kRows, kv_, dim_}, stream);
    cache_.attend(view, {query_.data(), kRows, heads_, dim_}, {out_.data(), kRows, heads_, dim_},
                  {lse_.data(), kRows, heads_}, stream);
  }};
  std::vector<SequenceId> places_ = std::vector<SequenceId>(kPlaces, kNone);
  SequenceId next_ = 100;
  int steps_ = 0;
};

/// @param rows  function of a number of tokens and whether they are keys
template <class Cache, class Rows>
void serve_slots(const RandomLayer& layer, lowrankkv::CacheConfig config,
                 const typename Cache::PolicySet& policies, Random& random, Rows&& rows) {
  config.shape = layer.shape;
  config.max_tokens = 1200;
  config.max_sequences = kPlaces + 1;
  config.max_query_tokens = kTokens;
  const lowrankkv::PoolSize size =
      Cache::pool_size(std::span(&config, 1), std::span(&layer.basis, 1), policies);
  const auto pool = std::make_shared<gpu::PagePool>(size.page_bytes, size.num_pages);
  poison_free_pages(*pool);
  SlotScene<Cache, std::remove_reference_t<Rows>> scene(layer, config, pool, policies, random,
                                                        rows);
  const int steps = effort() == 0 ? 20 : 150;
  for (int i = 0; i < steps; ++i) scene.step();
  scene.end();
}
template <class Cache>
void serve_slots(const RandomLayer& layer, const lowrankkv::CacheConfig& config,
                 const typename Cache::PolicySet& policies, Random& random) {
  serve_slots<Cache>(layer, config, policies, random,
                     [&](std::int64_t n, bool key) { return layer.rows(random, n, key); });
}

}  // namespace support
