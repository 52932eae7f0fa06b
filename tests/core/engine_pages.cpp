// SPDX-License-Identifier: Apache-2.0
// Rows in an engine's own pages: whatever the layout, a cache that reads them where they are is the
// one that was given the same rows side by side.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "support/paged_engine.hpp"
#include "support/random_layer.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;

namespace {

using Cache = CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, Int8>;

struct Answers {
  std::vector<float> out, key, value;
};
Answers answers(Cache& cache, SequenceId seq, const std::vector<float>& query) {
  const CacheShape& shape = cache.config().shape;
  const std::int64_t tokens = cache.num_tokens(seq);
  Answers all{
      std::vector<float>(query.size()),
      std::vector<float>(static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim)),
      {}};
  all.value = all.key;
  cache.attend(seq, {query.data(), 1, shape.num_qo_heads, shape.head_dim},
               {all.out.data(), 1, shape.num_qo_heads, shape.head_dim});
  cache.reconstruct(seq, 0,
                    MutableKeyView{all.key.data(), tokens, shape.num_kv_heads, shape.head_dim},
                    MutableValueView{all.value.data(), tokens, shape.num_kv_heads, shape.head_dim});
  return all;
}

}  // namespace

TEST_CASE("an engine's pages are read and written where they are") {
  support::Random random(7);
  for (int trial = 0; trial < 12; ++trial) {
    CacheShape shape{4, 2, 40};
    if (trial % 3 == 1) shape = {6, 1, 64};
    if (trial % 3 == 2) shape = {3, 3, 80};
    const DType dtype = trial % 3 == 0 ? DType::f16 : trial % 3 == 1 ? DType::bf16 : DType::f32;
    CacheConfig config{.shape = shape, .max_sequences = 3, .max_tokens = 600};
    config.prefill_chunk = trial % 2 == 0 ? 0 : 50;
    config.flush_interval = 8;
    const LayerBasis basis = support::random_basis(random, shape, {.centred = false}, 16, 24);
    Cache paged(config, basis), plain(config, basis);
    support::PagedEngine engine(random, shape, dtype, 3, 600);
    const EnginePages pages = engine.views(engine.memory.data());
    const auto rows = [&](std::int64_t n) {
      return support::random_rows(random, n, shape.num_kv_heads, shape.head_dim);
    };
    const auto table_of = [&](std::size_t i) { return engine.indices.data() + engine.indptr[i]; };
    const std::vector<SequenceId> seqs{5, 6, 7};
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      paged.create(seqs[i]);
      plain.create(seqs[i]);
      const std::int64_t n = 1 + static_cast<std::int64_t>(random() % 200),
                         begin = static_cast<std::int64_t>(random() % static_cast<unsigned>(n));
      engine.add(i, rows(n), rows(n));
      const std::vector<float> key = engine.rows(false, i), value = engine.rows(true, i),
                               query = support::random_rows(random, n, shape.num_qo_heads,
                                                            shape.head_dim);
      const QueryView all(query.data(), n, shape.num_qo_heads, shape.head_dim);
      plain.ingest(seqs[i], {key.data(), n, shape.num_kv_heads, shape.head_dim},
                   {value.data(), n, shape.num_kv_heads, shape.head_dim}, all);
      if (begin > 0)
        paged.ingest(seqs[i], pages.keys(table_of(i), 0, begin),
                     pages.values(table_of(i), 0, begin), all.tokens(0, begin), Prompt::continues);
      paged.ingest(seqs[i], pages.keys(table_of(i), begin, n - begin),
                   pages.values(table_of(i), begin, n - begin), all.tokens(begin, n - begin));
    }
    for (int step = 0; step < 30; ++step) {
      const int m = 1 + static_cast<int>(random() % 3);
      std::vector<float> key, value;
      for (std::size_t i = 0; i < seqs.size(); ++i) {
        engine.add(i, rows(m), rows(m));
        const std::vector<float> all_keys = engine.rows(false, i),
                                 all_values = engine.rows(true, i);
        const std::ptrdiff_t last =
            static_cast<std::ptrdiff_t>(m * shape.num_kv_heads * shape.head_dim);
        key.insert(key.end(), all_keys.end() - last, all_keys.end());
        value.insert(value.end(), all_values.end() - last, all_values.end());
      }
      const PageTables tables = step % 2 == 0
                                    ? PageTables::csr(engine.indices.data(), engine.indptr.data(),
                                                      engine.last_page_len.data())
                                    : PageTables::dense(engine.dense.data(), engine.table_stride(),
                                                        engine.lengths.data());
      const KeyView keys(key.data(), 3 * m, shape.num_kv_heads, shape.head_dim);
      const ValueView values(value.data(), 3 * m, shape.num_kv_heads, shape.head_dim);
      if (step % 5 == 4) {
        plain.append_maintained(seqs, keys, values);
        paged.append_maintained(seqs, pages.last_keys(tables, 3, m),
                                pages.last_values(tables, 3, m));
      } else {
        plain.append(seqs, keys, values);
        paged.append(seqs, pages.last_keys(tables, 3, m), pages.last_values(tables, 3, m));
        plain.maintain(seqs);
        paged.maintain(seqs);
      }
    }
    for (std::size_t i = 0; i < seqs.size(); ++i) {
      const std::vector<float> query =
          support::random_rows(random, 1, shape.num_qo_heads, shape.head_dim);
      const Answers expected = answers(plain, seqs[i], query),
                    found = answers(paged, seqs[i], query);
      CHECK(found.out == expected.out);
      CHECK(found.key == expected.key);
      CHECK(found.value == expected.value);
      // Back into the engine's pages, some of the middle: rounded to its type, and nothing else is
      // touched.
      const std::int64_t n = plain.num_tokens(seqs[i]), first = n / 3, count = n / 2;
      const std::size_t row = static_cast<std::size_t>(shape.num_kv_heads * shape.head_dim);
      std::vector<float> key = engine.rows(false, i), value = engine.rows(true, i);
      const auto rounded = [&](float x) {
        return dtype == DType::f32   ? x
               : dtype == DType::f16 ? to_float(to_half(x))
                                     : to_float(to_bfloat16(x));
      };
      for (std::size_t at = static_cast<std::size_t>(first) * row;
           at < static_cast<std::size_t>(first + count) * row; ++at) {
        key[at] = rounded(expected.key[at]);
        value[at] = rounded(expected.value[at]);
      }
      paged.reconstruct(seqs[i], first, pages.key_target(table_of(i), first, count),
                        pages.value_target(table_of(i), first, count));
      CHECK(engine.rows(false, i) == key);
      CHECK(engine.rows(true, i) == value);
    }
  }
}

TEST_CASE("page tables that cannot be are refused, and nothing has changed") {
  support::Random random(8);
  const CacheShape shape{2, 1, 16};
  FullKV<> cache({.shape = shape, .max_sequences = 2, .max_tokens = 64});
  cache.create(0);
  cache.create(1);
  std::vector<float> memory(4 * 4 * 16, 1.0F);
  const std::int32_t table[]{2, -1, 0}, indptr[]{0, 1, 3}, last[]{3, 1}, lengths[]{3, 5};
  const std::vector<SequenceId> both{0, 1};
  const EnginePages pages = EnginePages::nhd(memory.data(), memory.data(), DType::f32, 4, 1, 16);
  const PageTables tables = PageTables::csr(table, indptr, last);
  const auto refuses = [&](const char* message, auto&& call) {
    CHECK_THROWS_WITH_AS(call(), message, ShapeError);
    CHECK(cache.num_tokens(0) == 0);
  };
  refuses("key: token 4 is in page -1, by its page table",
          [&] { cache.ingest(0, pages.keys(table, 0, 5), pages.values(table, 0, 5)); });
  refuses("key: null page table with num_tokens 3",
          [&] { cache.ingest(0, pages.keys(nullptr, 0, 3), pages.values(table, 0, 3)); });
  refuses("value: pages from token -1 on, 0 a sequence; at least 0 expected",
          [&] { cache.ingest(0, pages.keys(table, 0, 3), pages.values(table, -1, 3)); });
  refuses("key: 2 tokens for each of 2 sequences, pages say 4", [&] {
    cache.append(both, pages.last_keys(tables, 1, 4), pages.last_values(tables, 1, 4));
  });
  refuses("key: 2 tokens for each of 2 sequences, pages say 0",
          [&] { cache.append(both, pages.keys(table, 0, 4), pages.values(table, 0, 4)); });
  refuses("value: 4 tokens for each of 1 sequences, pages say 2",
          [&] { cache.ingest(0, pages.keys(table, 0, 4), pages.last_values(tables, 2, 2)); });
  refuses("key: the last 4 tokens of a sequence of 3, by its page table", [&] {
    cache.append(both, pages.last_keys(tables, 2, 4), pages.last_values(tables, 2, 4));
  });
  refuses("key: page tables of a batch without lengths, and without indptr and last_page_len", [&] {
    cache.append(both, pages.last_keys(PageTables::dense(table, 1, nullptr), 2, 1),
                 pages.last_values(PageTables::dense(table, 1, lengths), 2, 1));
  });
  refuses("key: pages of -1 tokens, at least 1 expected", [&] {
    const EnginePages none = EnginePages::nhd(memory.data(), memory.data(), DType::f32, 0, 1, 16);
    cache.ingest(0, none.keys(table, 0, 1), none.values(table, 0, 1));
  });
  cache.append(both, pages.last_keys(PageTables::dense(indptr, 1, last), 2, 1),
               pages.last_values(PageTables::dense(indptr, 1, last), 2, 1));
  CHECK(cache.num_tokens(1) == 1);
  refuses("value: token 0 is in page -1, by its page table", [&] {
    cache.erase(0), cache.create(0),
        cache.reconstruct(1, 0, pages.key_target(table, 0, 1), pages.value_target(table + 1, 0, 1));
  });
}

TEST_CASE(
    "a page is coded by itself, as a sequence that is saved: every one in as many bytes, and what "
    "comes back does not depend on its neighbours") {
  using Codec = CompressedKVCache<Cpu, PerHead, Static, CompressAll, Int8>;
  support::Random random(11);
  const CacheShape shape{4, 2, 64};
  const LayerBasis basis = support::random_basis(random, shape, {.centred = false}, 32, 48);
  support::PagedEngine engine(random, shape, DType::f16, 1, 400);
  engine.add(0, support::random_rows(random, 400, 2, 64), support::random_rows(random, 400, 2, 64));
  const EnginePages pages = engine.views(engine.memory.data());
  const std::int64_t tokens = pages.page_tokens, whole = 400 / tokens;
  Codec codec({.shape = shape, .max_tokens = tokens}, basis),
      all({.shape = shape, .max_tokens = 400}, basis);
  // Cold: pages leave the engine one by one.
  std::vector<std::vector<std::byte>> cold;
  for (std::int64_t page = 0; page < whole; ++page) {
    codec.create(0);
    codec.ingest(0, pages.keys(engine.indices.data() + page, 0, tokens),
                 pages.values(engine.indices.data() + page, 0, tokens));
    cold.emplace_back(codec.save_bytes(0));
    codec.save(0, cold.back());
    codec.erase(0);
    CHECK(cold.back().size() == cold.front().size());
  }
  const std::size_t codes = static_cast<std::size_t>(tokens) * 2 * (32 + 2 + 48 + 2);
  MESSAGE("a page of " << tokens << " tokens: codes of " << codes << " bytes, saved in "
                       << cold.front().size());
  CHECK(cold.front().size() < codes + 600);
  // And come back into others.
  all.create(0);
  all.ingest(0, pages.keys(engine.indices.data(), 0, whole * tokens),
             pages.values(engine.indices.data(), 0, whole * tokens));
  std::vector<float> key(static_cast<std::size_t>(whole * tokens * 2 * 64)), value(key.size());
  all.reconstruct(0, 0, MutableKeyView{key.data(), whole * tokens, 2, 64},
                  MutableValueView{value.data(), whole * tokens, 2, 64});
  for (std::int64_t page = whole; page-- > 0;) {
    codec.load(0, cold[static_cast<std::size_t>(page)]);
    std::vector<float> key_page(static_cast<std::size_t>(tokens * 2 * 64)),
        value_page(key_page.size());
    codec.reconstruct(0, 0, MutableKeyView{key_page.data(), tokens, 2, 64},
                      MutableValueView{value_page.data(), tokens, 2, 64});
    codec.erase(0);
    const std::ptrdiff_t begin = static_cast<std::ptrdiff_t>(page * tokens * 2 * 64);
    CHECK(std::equal(key_page.begin(), key_page.end(), key.begin() + begin));
    CHECK(std::equal(value_page.begin(), value_page.end(), value.begin() + begin));
  }
}
