// SPDX-License-Identifier: Apache-2.0
// Rows in an engine's own pages on the device: a cache that reads them where they are is the one
// that was given the same rows side by side, in graphs too.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "support/paged_engine.hpp"
#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"

namespace engine_pages_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::DeviceCache;
using support::message_of;
using support::Random;

namespace {

/// An engine's pages and tables on the device.
struct DevicePages {
  explicit DevicePages(const support::PagedEngine& engine)
      : memory(engine.memory),
        indices(std::vector<std::int32_t>(engine.dense.size())),
        indptr(engine.indptr),
        last(engine.last_page_len),
        dense(engine.dense),
        lengths(engine.lengths),
        stride(engine.table_stride()) {}
  /// What the engine has now, where it was.
  void update(const support::PagedEngine& engine) {
    const auto copy = [](const auto& from, auto& to) {
      gpu::check(
          cudaMemcpy(to.data(), from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
          "cudaMemcpy");
    };
    copy(engine.memory, memory);
    copy(engine.indices, indices);
    copy(engine.indptr, indptr);
    copy(engine.last_page_len, last);
    copy(engine.dense, dense);
    copy(engine.lengths, lengths);
  }
  PageTables tables(bool csr) const {
    return csr ? PageTables::csr(indices.data(), indptr.data(), last.data())
               : PageTables::dense(dense.data(), stride, lengths.data());
  }
  const std::int32_t* table(std::size_t sequence) const {
    return dense.data() + static_cast<std::int64_t>(sequence) * stride;
  }

  gpu::DeviceArray<std::uint8_t> memory;
  gpu::DeviceArray<std::int32_t> indices, indptr, last, dense, lengths;
  std::int64_t stride;
};

/// @tparam joint  values are
template <class Cache, bool joint>
void check_pages(unsigned seed) {
  Random random(seed);
  support::Settings settings;
  for (int trial = 0; trial < (support::effort() == 0 ? 2 : 6); ++trial) {
    CacheConfig config;
    config.shape = support::random_shape(random, 3, {1, 2, 4}, {64, 80, 128});
    config.max_sequences = 3;
    config.max_tokens = 600;
    config.full_type = trial % 2 == 0 ? DType::f16 : DType::bf16;
    config.prefill_chunk = trial % 3 == 0 ? 0 : 70;
    settings.sinks = 2;
    settings.recent = 18;
    const auto policies = support::configured(typename Cache::PolicySet{}, settings);
    const support::RandomLayer layer =
        joint ? support::joint_layer(random, config.shape, settings.basis,
                                     config.shape.num_kv_heads, 32, 40)
              : support::random_layer(random, config.shape, settings, 32);
    const DType dtype = trial % 3 == 2 ? DType::f32 : trial % 3 == 1 ? DType::bf16 : DType::f16;
    support::PagedEngine engine(random, config.shape, dtype, 3, 600);
    DeviceCache<Cache> plain(config, layer.basis, policies), paged(config, layer.basis, policies),
        replayed(config, layer.basis, policies);
    const std::vector<SequenceId> seqs{5, 6, 7};
    const auto rows = [&](std::int64_t n, bool key) {
      return joint ? support::joint_rows(random, layer, n, key) : layer.rows(random, n, key);
    };
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t n = 1 + static_cast<std::int64_t>(random() % 200);
      engine.add(i, rows(n, true), rows(n, false));
    }
    DevicePages device(engine);
    device.update(engine);
    const EnginePages pages = engine.views(device.memory.data());
    for (std::size_t i = 0; i < 3; ++i) {
      for (auto* cache : {&plain, &paged, &replayed}) cache->cache.create(seqs[i]);
      const std::int64_t n = engine.lengths[i],
                         begin =
                             static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
      const std::vector<float> query = layer.queries(random, n);
      plain.ingest(seqs[i], engine.rows(false, i), engine.rows(true, i), query);
      const gpu::DeviceArray<float> q(query);
      const QueryView all = plain.queries(q, n);
      for (auto* cache : {&paged, &replayed}) {
        if (begin > 0)
          cache->cache.ingest(seqs[i], pages.keys(device.table(i), 0, begin),
                              pages.values(device.table(i), 0, begin), all.tokens(0, begin),
                              Prompt::continues);
        cache->cache.ingest(seqs[i], pages.keys(device.table(i), begin, n - begin),
                            pages.values(device.table(i), begin, n - begin),
                            all.tokens(begin, n - begin));
      }
      gpu::check(cudaDeviceSynchronize(), "ingest");
    }
    // The step is captured once; what tables say changes between replays.
    const bool csr = trial % 2 == 0;
    const support::CapturedStep step([&](cudaStream_t stream) {
      replayed.cache.append(seqs, pages.last_keys(device.tables(csr), 3, 1),
                            pages.last_values(device.tables(csr), 3, 1), stream);
    });
    for (int token = 0; token < (support::effort() == 0 ? 12 : 40); ++token) {
      std::vector<float> key, value;
      for (std::size_t i = 0; i < 3; ++i) {
        engine.add(i, rows(1, true), rows(1, false));
        const std::vector<float> all_keys = engine.rows(false, i),
                                 all_values = engine.rows(true, i);
        const std::ptrdiff_t last =
            std::ptrdiff_t{config.shape.num_kv_heads} * config.shape.head_dim;
        key.insert(key.end(), all_keys.end() - last, all_keys.end());
        value.insert(value.end(), all_values.end() - last, all_values.end());
      }
      device.update(engine);
      plain.append(seqs, key, value);
      plain.cache.maintain(seqs);
      if (token % 4 == 3)
        paged.cache.append_maintained(seqs, pages.last_keys(device.tables(!csr), 3, 1),
                                      pages.last_values(device.tables(!csr), 3, 1));
      else
        paged.cache.append(seqs, pages.last_keys(device.tables(!csr), 3, 1),
                           pages.last_values(device.tables(!csr), 3, 1));
      paged.cache.maintain(seqs);
      step.replay(replayed.cache, seqs);
    }
    const std::vector<float> query = layer.queries(random, 3);
    const support::Answer expected = plain.attend(seqs, query);
    CHECK(paged.attend(seqs, query) == expected);
    CHECK(replayed.attend(seqs, query) == expected);
    // Back into the engine's pages, some of the middle: rounded to its type, and nothing else is
    // touched.
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t n = plain.cache.num_tokens(seqs[i]), first = n / 3, count = n / 2;
      std::vector<float> all_keys, all_values, key = engine.rows(false, i),
                                               value = engine.rows(true, i);
      plain.reconstruct(seqs[i], all_keys, all_values);
      const auto rounded = [&](float x) {
        return dtype == DType::f32   ? x
               : dtype == DType::f16 ? to_float(to_half(x))
                                     : to_float(to_bfloat16(x));
      };
      const std::size_t row =
          static_cast<std::size_t>(config.shape.num_kv_heads * config.shape.head_dim);
      for (std::size_t at = static_cast<std::size_t>(first) * row;
           at < static_cast<std::size_t>(first + count) * row; ++at) {
        key[at] = rounded(all_keys[at]);
        value[at] = rounded(all_values[at]);
      }
      paged.cache.reconstruct(seqs[i], first, pages.key_target(device.table(i), first, count),
                              pages.value_target(device.table(i), first, count));
      engine.memory = support::host(device.memory);
      CHECK(engine.rows(false, i) == key);
      CHECK(engine.rows(true, i) == value);
    }
    CHECK(plain.cache.faults() == 0);
    CHECK(paged.cache.faults() == 0);
  }
}

}  // namespace

TEST_CASE("pages of an engine on the device: read and written where they are") {
  check_pages<StaticPCAHybrid<Cuda>, false>(51);
}
TEST_CASE("pages of an engine on the device: read and written where they are, joint values") {
  check_pages<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>, true>(52);
}

TEST_CASE("pages of an engine on the device: what can be told on the host is refused") {
  const CacheShape shape{2, 1, 64};
  Random random(53);
  StaticPCAHybrid<Cuda> cache(
      {.shape = shape, .max_sequences = 2, .max_tokens = 64, .full_type = DType::f16},
      support::random_layer(random, shape, {}, 16).basis);
  cache.create(0);
  cache.create(1);
  const gpu::DeviceArray<float> memory(4 * 4 * 64);
  const gpu::DeviceArray<std::int32_t> table(std::vector<std::int32_t>{0, 1, 2});
  const std::vector<SequenceId> both{0, 1};
  const EnginePages pages = EnginePages::nhd(memory.data(), memory.data(), DType::f32, 4, 1, 64);
  const PageTables tables = PageTables::dense(table.data(), 1, table.data());
  CHECK(message_of([&] {
          cache.ingest(0, pages.keys(nullptr, 0, 3), pages.values(table.data(), 0, 3));
        }) == "key: null page table with num_tokens 3");
  CHECK(message_of([&] {
          cache.append(both, pages.last_keys(tables, 1, 4), pages.last_values(tables, 1, 4));
        }) == "key: 2 tokens for each of 2 sequences, pages say 4");
  CHECK(message_of([&] {
          cache.ingest(0, pages.keys(table.data(), 0, 4), pages.last_values(tables, 2, 2));
        }) == "value: 4 tokens for each of 1 sequences, pages say 2");
  QueryView query(memory.data(), 4, 2, 64);
  query.pages.page_tokens = 4;
  query.pages.tables = tables;
  CHECK(message_of([&] {
          cache.ingest(0, pages.keys(table.data(), 0, 4), pages.values(table.data(), 0, 4), query);
        }) == "query: in pages of 4 tokens, 0 expected on this backend");
  CHECK(cache.num_tokens(0) == 0);
}

}  // namespace engine_pages_tests
