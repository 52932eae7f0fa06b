// SPDX-License-Identifier: Apache-2.0
// A captured step whose sequences are read from device memory: they come and go, and some places
// have none.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
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

/// One graph of `kPlaces` places serves sequences that begin, end and change places, against plain
/// calls, bit for bit. Pages that come back are full of NaN.
/// @param rows  function of a number of tokens and whether they are keys
template <class Cache, class Rows>
void serve_slots(const RandomLayer& layer, lowrankkv::CacheConfig config,
                 const typename Cache::PolicySet& policies, Random& random, Rows&& rows) {
  const int heads = layer.shape.num_qo_heads, kv = layer.shape.num_kv_heads,
            dim = layer.shape.head_dim;
  config.shape = layer.shape;
  config.max_tokens = 1200;
  config.max_sequences = kPlaces + 1;
  config.max_query_tokens = kTokens;
  const lowrankkv::PoolSize size =
      Cache::pool_size(std::span(&config, 1), std::span(&layer.basis, 1), policies);
  const auto pool = std::make_shared<gpu::PagePool>(size.page_bytes, size.num_pages);
  poison_free_pages(*pool);
  Cache cache(config, layer.basis, policies, pool), plain(config, layer.basis, policies);
  const auto all = static_cast<std::size_t>(kPlaces * kTokens);
  const auto row = static_cast<std::size_t>(kv * dim), wide = static_cast<std::size_t>(heads * dim);
  gpu::DeviceArray<float> key(all * row), value(all * row), query(all * wide), out(all * wide),
      lse(all * static_cast<std::size_t>(heads));
  gpu::DeviceArray<std::int32_t> slots(kPlaces);
  const lowrankkv::SlotView view{slots.data(), kPlaces};
  const int tokens = kPlaces * kTokens;
  const CapturedStep step([&](cudaStream_t stream) {
    cache.append(view, {key.data(), tokens, kv, dim}, {value.data(), tokens, kv, dim}, stream);
    cache.attend(view, {query.data(), tokens, heads, dim}, {out.data(), tokens, heads, dim},
                 {lse.data(), tokens, heads}, stream);
  });

  std::vector<SequenceId> places(kPlaces, kNone);
  SequenceId next = 100;
  const int steps = effort() == 0 ? 20 : 150;
  for (int i = 0; i < steps; ++i) {
    for (SequenceId& place : places) {  // requests end, and others begin
      if (random() % 8 != 0 && i > 0) continue;
      if (place != kNone) {
        for (Cache* each : {&cache, &plain}) each->erase(place);
        place = kNone;
        gpu::check(cudaDeviceSynchronize(), "erase");
        poison_free_pages(*pool);
      }
      if (random() % 4 == 0) continue;  // nobody waits
      place = next++;
      const int length = 1 + static_cast<int>(random() % 400);
      const auto k = rows(length, true), v = rows(length, false), q = layer.queries(random, length);
      const gpu::DeviceArray<float> pk(k), pv(v), pq(q);
      for (Cache* each : {&cache, &plain}) {
        each->create(place);
        each->ingest(place, {pk.data(), length, kv, dim}, {pv.data(), length, kv, dim},
                     {pq.data(), length, heads, dim});
      }
      gpu::check(cudaDeviceSynchronize(), "ingest");
    }
    if (i % 3 == 0) std::swap(places[0], places[1 + random() % 3]);

    // Rows of places without a sequence are NaN.
    auto k = rows(tokens, true), v = rows(tokens, false), q = layer.queries(random, tokens);
    std::vector<std::int32_t> now(kPlaces, kNone);
    std::vector<SequenceId> served;
    for (std::size_t place = 0; place < kPlaces; ++place) {
      if (places[place] != kNone) {
        now[place] = cache.slot(places[place]);
        served.push_back(places[place]);
        continue;
      }
      const auto spoil = [&](std::vector<float>& all_rows, std::size_t width) {
        for (std::size_t at = place * kTokens * width; at < (place + 1) * kTokens * width; ++at)
          all_rows[at] = std::numeric_limits<float>::quiet_NaN();
      };
      spoil(k, row), spoil(v, row), spoil(q, wide);
    }
    upload(k, key), upload(v, value), upload(q, query);
    gpu::check(cudaMemcpy(slots.data(), now.data(), slots.bytes(), cudaMemcpyHostToDevice),
               "slots");
    cache.advance(served, kTokens);
    gpu::check(cudaMemset(out.data(), 0xff, out.bytes()), "cudaMemset");
    gpu::check(cudaMemset(lse.data(), 0xff, lse.bytes()), "cudaMemset");
    gpu::check(cudaDeviceSynchronize(), "inputs");
    gpu::check(cudaGraphLaunch(step.replay(), step.stream), "cudaGraphLaunch");
    cache.maintain(served, step.stream);
    gpu::check(cudaStreamSynchronize(step.stream), "step");

    const std::vector<float> outputs = host(out), sums = host(lse);
    for (std::size_t place = 0; place < kPlaces; ++place) {
      const std::size_t first = place * kTokens;
      std::vector<float> expected(kTokens * wide, 0.0F),
          expected_lse(kTokens * static_cast<std::size_t>(heads),
                       -std::numeric_limits<float>::infinity());
      if (places[place] != kNone) {
        gpu::DeviceArray<float> o(expected.size()), l(expected_lse.size());
        const SequenceId seq = places[place];
        plain.append(seq, {key.data() + first * row, kTokens, kv, dim},
                     {value.data() + first * row, kTokens, kv, dim});
        plain.attend(seq, {query.data() + first * wide, kTokens, heads, dim},
                     {o.data(), kTokens, heads, dim}, {l.data(), kTokens, heads});
        plain.maintain(seq);
        gpu::check(cudaDeviceSynchronize(), "plain");
        expected = host(o), expected_lse = host(l);
      }
      const auto part = [&](const std::vector<float>& all_rows, std::size_t width) {
        const auto begin = all_rows.begin() + static_cast<std::ptrdiff_t>(first * width);
        return std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(kTokens * width));
      };
      CHECK(part(outputs, wide) == expected);
      CHECK(part(sums, static_cast<std::size_t>(heads)) == expected_lse);
    }
  }
  CHECK(cache.faults() == 0);
  for (const SequenceId place : places) {
    if (place != kNone) cache.erase(place);
  }
  CHECK(pool->allocator().num_free() == pool->allocator().num_pages());
}
template <class Cache>
void serve_slots(const RandomLayer& layer, const lowrankkv::CacheConfig& config,
                 const typename Cache::PolicySet& policies, Random& random) {
  serve_slots<Cache>(layer, config, policies, random,
                     [&](std::int64_t n, bool key) { return layer.rows(random, n, key); });
}

}  // namespace support
