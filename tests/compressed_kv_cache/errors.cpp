// SPDX-License-Identifier: Apache-2.0
// Bad input: a typed error that names both values, and a cache that is as it was.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support/random_layer.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;

namespace {

constexpr CacheShape kShape{4, 2, 16};
constexpr SequenceId kOne = 1;

LayerBasis basis() {
  support::Random random(1);
  return support::random_basis(random, kShape, {.centred = false}, 8, 6);
}

/// Text of the error, or "nothing".
template <class E>
std::string raised(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const Error& error) {
    return std::string("another type: ") + error.what();
  }
  return "nothing";
}

struct Fixture {
  Fixture()
      : cache({.shape = kShape, .max_sequences = 2, .max_tokens = 200, .flush_interval = 8},
              basis()) {
    support::Random random(2);
    q = support::random_rows(random, 300, 4, 16);
    k = support::random_rows(random, 300, 2, 16);
    v = support::random_rows(random, 300, 2, 16);
    cache.create(1);
    cache.ingest(1, key(100), value(100), query(32));
    before = snapshot();
  }
  QueryView query(std::int64_t n) const { return {q.data(), n, 4, 16}; }
  KeyView key(std::int64_t n) const { return {k.data(), n, 2, 16}; }
  ValueView value(std::int64_t n) const { return {v.data(), n, 2, 16}; }
  std::vector<float> snapshot() const {
    const std::int64_t n = cache.num_tokens(1);
    std::vector<float> rows(static_cast<std::size_t>(n * 64 + 2));
    cache.reconstruct(1, 0, {rows.data(), n, 2, 16}, {rows.data() + n * 32, n, 2, 16});
    rows[rows.size() - 2] = static_cast<float>(cache.memory(1).total());
    rows[rows.size() - 1] = static_cast<float>(cache.pool().allocator().num_free());
    return rows;
  }
  ~Fixture() { CHECK(snapshot() == before); }  // whatever was tried, nothing changed
  OjaKV<> cache;
  std::vector<float> q, k, v, before;
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "views that do not fit") {
  CHECK(raised<ShapeError>([&] {
          cache.append(1, {k.data(), 1, 2, 8}, value(1));
        }) == "head_dim: cache 16, key 8");
  CHECK(raised<ShapeError>([&] {
          cache.append(1, {k.data(), 1, 1, 16}, value(1));
        }) == "num_heads: cache 2, key 1");
  CHECK(raised<ShapeError>([&] { cache.append(1, key(1), value(2)); }) ==
        "num_tokens: expected 1, value 2");
  CHECK(raised<ShapeError>([&] {
          cache.append(1, {static_cast<const float*>(nullptr), 1, 2, 16}, value(1));
        }) == "key: null pointer with num_tokens 1");
  const SequenceId both[] = {1, 2};
  CHECK(raised<ShapeError>([&] { cache.append(both, key(3), value(3)); }) ==
        "append: 3 tokens for 2 sequences");
  std::vector<float> out(16 * 4 * 40), lse(160);
  CHECK(raised<ShapeError>([&] {
          cache.attend(1, query(1), {out.data(), 1, 4, 8});
        }) == "head_dim: cache 16, out 8");
  CHECK(raised<ShapeError>([&] {
          cache.attend(1, query(1), {out.data(), 1, 4, 16}, {lse.data(), 1, 3});
        }) == "num_heads: cache 4, lse 3");
  CHECK(raised<ShapeError>([&] {
          cache.attend(1, query(33), {out.data(), 33, 4, 16});
        }) == "attend: 33 query tokens, sequence 1 has 32 tokens in its tail");
  CHECK(raised<ShapeError>([&] {
          cache.prefill(1, query(5), key(6), value(6), {out.data(), 6, 4, 16});
        }) == "num_tokens: expected 6, query 5");
  CHECK(raised<ShapeError>([&] { cache.truncate(1, 101); }) ==
        "truncate: length 101, sequence has 100 tokens");
  CHECK(raised<ShapeError>([&] { cache.truncate(1, -1); }) ==
        "truncate: length -1, sequence has 100 tokens");
  CHECK(raised<ShapeError>([&] {
          cache.reconstruct(1, 90, {out.data(), 11, 2, 16}, {out.data(), 11, 2, 16});
        }) == "reconstruct: 11 tokens from position 90, sequence has 100 tokens");
  CHECK(raised<ShapeError>([&] { cache.ingest(1, key(40), value(40), query(31)); }) ==
        "q_window: prompt rows are chosen by the attention of 32 queries, given 31");
}

TEST_CASE_FIXTURE(Fixture, "no tokens and no sequences are nothing to do") {
  const std::span<const SequenceId> nobody;
  std::vector<float> out(64, 7.0F), scores(std::size_t{2} * 100, 7.0F);
  cache.append(1, key(0), value(0));
  cache.append(nobody, key(0), value(0));
  cache.append_maintained(nobody, key(0), value(0));
  cache.attend(1, query(0), {out.data(), 0, 4, 16});
  cache.attend(1, {static_cast<const float*>(nullptr), 0, 4, 16},
               {static_cast<float*>(nullptr), 0, 4, 16});
  cache.attend(nobody, query(0), {out.data(), 0, 4, 16});
  CHECK(out == std::vector<float>(64, 7.0F));
  cache.attend(std::span(&kOne, 1), query(0), {out.data(), 0, 4, 16}, {},
               {scores.data(), 1, 2, 100});
  CHECK(scores == std::vector<float>(scores.size()));  // no query has given any attention
  CHECK(raised<ShapeError>([&] {
          cache.attend(nobody, query(1), {out.data(), 1, 4, 16});
        }) == "attend: 1 query tokens for 0 sequences");
  CHECK(raised<ShapeError>([&] { cache.append(nobody, key(1), value(1)); }) ==
        "append: 1 tokens for 0 sequences");
  CHECK(raised<SequenceError>([&] {
          cache.attend(9, query(0), {out.data(), 0, 4, 16});
        }) == "unknown sequence 9; 1 sequences exist");
}

TEST_CASE_FIXTURE(Fixture, "sequences and capacities") {
  CHECK(raised<SequenceError>([&] { cache.append(9, key(1), value(1)); }) ==
        "unknown sequence 9; 1 sequences exist");
  CHECK(raised<SequenceError>([&] { cache.erase(9); }) == "unknown sequence 9; 1 sequences exist");
  CHECK(raised<SequenceError>([&] { cache.create(1); }) == "sequence 1 exists already");
  CHECK(raised<SequenceError>([&] { cache.fork(1, 1); }) == "sequence 1 exists already");
  cache.create(2);
  CHECK(raised<CapacityError>([&] { cache.fork(1, 3); }) ==
        "max_sequences: 2 in use, no room for sequence 3");
  cache.erase(2);
  CHECK(raised<ShapeError>([&] { cache.append(1, key(-3), value(-3)); }) ==
        "num_tokens: at least 0, key -3");
  CHECK(raised<CapacityError>([&] {
          cache.append(1, key(std::numeric_limits<std::int64_t>::max()),
                       value(std::numeric_limits<std::int64_t>::max()));
        }).find("tail_capacity: 48") == 0);
  CHECK(raised<ShapeError>([&] {
          cache.reconstruct(1, std::numeric_limits<std::int64_t>::max(), {k.data(), 4, 2, 16},
                            {v.data(), 4, 2, 16});
        }).find("reconstruct: 4 tokens from") == 0);
  const SequenceId twice[] = {1, 1};
  CHECK(raised<SequenceError>([&] { cache.append(twice, key(2), value(2)); }) ==
        "append: sequence 1 stands at places 0 and 1");
  CHECK(raised<CapacityError>([&] { cache.append(1, key(17), value(17)); }) ==
        "tail_capacity: 48, sequence 1 has 32 rows in its tail, given 17; call maintain");
  CHECK(raised<CapacityError>([&] { cache.append_maintained(1, key(101), value(101)); }) ==
        "max_tokens: 200, sequence 1 has 100, given 101");
  CHECK(raised<CapacityError>([&] { cache.ingest(1, key(101), value(101), query(101)); }) ==
        "max_tokens: 200, sequence has 100, given 101");
}

TEST_CASE_FIXTURE(Fixture, "values that cannot be stored") {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> bad(k.begin(), k.begin() + 64);
  bad[37] = std::numeric_limits<float>::quiet_NaN();
  CHECK(raised<ValueError>([&] {
          cache.append(1, {bad.data(), 2, 2, 16}, value(2));
        }) == "key: token 1, head 0, channel 5 is nan, largest storable value 65504");
  bad[37] = -inf;
  CHECK(raised<ValueError>([&] {
          cache.append(1, key(2), {bad.data(), 2, 2, 16});
        }) == "value: token 1, head 0, channel 5 is -inf, largest storable value 65504");
  bad[37] = 70000.0F;
  CHECK(raised<ValueError>([&] {
          cache.ingest(1, {bad.data(), 2, 2, 16}, value(2), query(2));
        }) == "key: token 1, head 0, channel 5 is 70000, largest storable value 65504");
  std::vector<float> out(64);
  std::vector<float> query_row(64, inf);
  CHECK(raised<ValueError>([&] {
          cache.attend(1, {query_row.data(), 1, 4, 16}, {out.data(), 1, 4, 16});
        }).find("query: token 0, head 0, channel 0 is inf") == 0);
}

TEST_CASE_FIXTURE(Fixture, "an unfinished prompt allows nothing but going on with it") {
  cache.create(2);
  cache.ingest(2, key(10), value(10), query(10), Prompt::continues);
  CHECK(raised<StateError>([&] { cache.append(2, key(1), value(1)); }) ==
        "sequence 2: its prompt of 10 tokens so far continues, a complete one is expected; call "
        "finish_prompt");
  CHECK(raised<StateError>([&] {
          cache.maintain(2);
        }).find("sequence 2: its prompt of 10 tokens") == 0);
  CHECK(raised<StateError>([&] { cache.fork(2, 3); }).find("sequence 2: its prompt of 10 tokens") ==
        0);
  CHECK(raised<StateError>([&] {
          cache.truncate(2, 0);
        }).find("sequence 2: its prompt of 10 tokens") == 0);
  cache.erase(2);
}

TEST_CASE("a prompt that continues does so at the end of a chunk too") {
  support::Random random(4);
  const auto k = support::random_rows(random, 64, 2, 16);
  StaticPCAHybrid<> cache({.shape = kShape, .prefill_chunk = 64}, basis());
  cache.create(0);
  cache.ingest(0, {k.data(), 64, 2, 16}, {k.data(), 64, 2, 16}, {}, Prompt::continues);
  CHECK(raised<StateError>([&] {
          cache.append(0, {k.data(), 1, 2, 16}, {k.data(), 1, 2, 16});
        }).find("sequence 0: its prompt of 64") == 0);
  cache.finish_prompt(0);
  cache.append(0, {k.data(), 1, 2, 16}, {k.data(), 1, 2, 16});
}

TEST_CASE(
    "a prompt whose pages another sequence took in the meantime is refused whole, and can be "
    "finished later") {
  support::Random random(5);
  const auto k = support::random_rows(random, 200, 2, 16);
  StaticPCAHybrid<> cache({.shape = kShape, .max_sequences = 2, .num_pages = 14}, basis());
  cache.create(0);
  cache.create(1);
  cache.ingest(0, {k.data(), 120, 2, 16}, {k.data(), 120, 2, 16}, {}, Prompt::continues);
  cache.ingest(1, {k.data(), 120, 2, 16}, {k.data(), 120, 2, 16});
  const std::int64_t free = cache.pool().allocator().num_free();
  CHECK(raised<CapacityError>([&] { cache.finish_prompt(0); }).find("page pool: ") == 0);
  CHECK(cache.memory(0).full_row_bytes == 0);
  CHECK(cache.pool().allocator().num_free() == free);
  cache.erase(1);
  cache.finish_prompt(0);
  CHECK(cache.memory(0).full_row_bytes == 32 * 128);
  cache.erase(0);
  CHECK(cache.pool().allocator().num_free() == 14);
}

TEST_CASE(
    "the default pool serves forks that all write, and a cache gives its pages back to a shared "
    "pool") {
  support::Random random(6);
  const auto q = support::random_rows(random, 512, 4, 16),
             k = support::random_rows(random, 512, 2, 16);
  const auto run = [&](auto& cache, int sequences) {
    cache.create(0);
    cache.ingest(0, {k.data(), 470, 2, 16}, {k.data(), 470, 2, 16}, {q.data(), 470, 4, 16});
    std::vector<SequenceId> seqs{0};
    for (int seq = 1; seq < sequences; ++seq) {
      cache.fork(0, seq);
      seqs.push_back(seq);
    }
    for (const SequenceId seq : seqs)
      cache.append(seq, {k.data(), 33, 2, 16}, {k.data(), 33, 2, 16});
    cache.maintain(seqs);
    for (const SequenceId seq : seqs) CHECK(cache.tail_length(seq) == 33);
  };
  for (const int sequences : {2, 4}) {
    StaticPCAHybrid<> plain({.shape = kShape, .max_sequences = sequences, .max_tokens = 512},
                            basis());
    run(plain, sequences);
    OjaKV<> adapting(
        {.shape = kShape, .max_sequences = sequences, .max_tokens = 512, .publish_interval = 16},
        basis());
    run(adapting, sequences);
  }
  auto pool = std::make_shared<Cpu::Pool>(1024, 200);
  {
    OjaKV<> cache({.shape = kShape, .max_sequences = 4, .max_tokens = 512}, basis(), {}, pool);
    run(cache, 4);
    CHECK(pool->allocator().num_free() < 200);
  }
  CHECK(pool->allocator().num_free() == 200);
}

TEST_CASE("policies whose parameters make no sense") {
  const auto oja = [](const Oja& updater) {
    return [updater] {
      OjaKV<>::PolicySet policies;
      policies.updater = updater;
      OjaKV<> cache({.shape = kShape}, basis(), policies);
    };
  };
  CHECK(raised<ValueError>(oja({.prefill_share = -0.5F})) ==
        "Oja: prefill_share is in [0, 1], given -0.5");
  CHECK(raised<ValueError>(oja({.decode_rate = -1.0F})) ==
        "Oja: rates are at least 0, given prefill_rate 0.1 and decode_rate -1");
  CHECK(raised<ValueError>(oja({.importance_window = 0})) ==
        "Oja: importance_window is at least 1, given 0");
  const auto tokens = [](const SinkRecent& policy) {
    return [policy] {
      StaticPCAHybrid<>::PolicySet policies;
      policies.token_policy = policy;
      StaticPCAHybrid<> cache({.shape = kShape}, basis(), policies);
    };
  };
  CHECK(raised<CapacityError>(tokens({-4, 32})) == "sinks: at least 0, given -4");
  CHECK(raised<CapacityError>(tokens({4, -1})) == "recent: 0 to 16777216, given -1");
}

TEST_CASE("an updater that reads thresholds refuses a basis without") {
  const auto directions = [](float key, float value, float scale) {
    return [=] {
      LayerBasis maps = basis();
      maps.heads[1].key_threshold = key;
      maps.heads[1].value_threshold = value;
      SubSpaceA<>::PolicySet policies;
      policies.updater.threshold_scale = scale;
      SubSpaceA<> cache({.shape = kShape}, maps, policies);
    };
  };
  const float unset = HeadBasis{}.key_threshold;
  CHECK(std::isnan(unset));
  CHECK(std::isnan(HeadBasis{}.value_threshold));
  CHECK(raised<ValueError>(directions(2.5F, unset, 1.0F)) ==
        "FrequentDirections: KV head 1 has key_threshold 2.5 and value_threshold nan, residual "
        "norms expected, or infinity for never");
  CHECK_THROWS_AS(directions(unset, 2.5F, 1.0F)(), ValueError);
  CHECK_NOTHROW(directions(unset, unset, 0.0F)());  // not read
  CHECK_NOTHROW(directions(2.5F, std::numeric_limits<float>::infinity(), 1.0F)());
  LayerBasis maps = basis();
  for (HeadBasis& head : maps.heads) head.key_threshold = head.value_threshold = unset;
  CHECK_NOTHROW(OjaKV<>({.shape = kShape}, maps));
}

TEST_CASE("a pool that is too small refuses before anything moves") {
  support::Random random(3);
  const auto k = support::random_rows(random, 200, 2, 16),
             v = support::random_rows(random, 200, 2, 16);
  StaticPCAHybrid<> cache({.shape = kShape, .max_tokens = 4000, .num_pages = 8}, basis());
  cache.create(0);
  CHECK(raised<CapacityError>([&] {
          cache.ingest(0, {k.data(), 200, 2, 16}, {v.data(), 200, 2, 16});
        }) == "page pool: 12 pages needed, 8 free");
  CHECK(cache.num_tokens(0) == 0);
  CHECK(cache.pool().allocator().num_free() == 8);
  cache.ingest(0, {k.data(), 120, 2, 16}, {v.data(), 120, 2, 16});
  std::int64_t tokens = 120;
  std::string error = "nothing";
  for (int i = 0; i < 100 && error == "nothing"; ++i) {
    error = raised<CapacityError>([&] {
      cache.append_maintained(0, {k.data(), 30, 2, 16}, {v.data(), 30, 2, 16});
    });
    if (error == "nothing") tokens += 30;
  }
  CHECK(error.find("page pool: ") == 0);
  CHECK(cache.num_tokens(0) == tokens);
  LayerStack<StaticPCAHybrid<>> stack({.shape = kShape, .max_tokens = 4000, .num_pages = 17},
                                      {basis(), basis()});
  stack.create(0);
  for (int layer = 0; layer < 2; ++layer)
    stack.layer(layer).ingest(0, {k.data(), 120, 2, 16}, {v.data(), 120, 2, 16});
  for (int round = 0; round < 2; ++round) {
    for (int layer = 0; layer < 2; ++layer)
      stack.layer(layer).append(0, {k.data(), 30, 2, 16}, {v.data(), 30, 2, 16});
    if (round == 0) stack.maintain(0);
  }
  const auto free = stack.pool().allocator().num_free();
  while (error.find("page pool") == 0) {
    error = raised<CapacityError>([&] { stack.maintain(0); });
    if (error != "nothing") {
      CHECK(stack.layer(0).tail_length(0) == stack.layer(1).tail_length(0));  // all layers or none
      CHECK(stack.pool().allocator().num_free() == free);
      break;
    }
  }
}

TEST_CASE("bases that cannot be used") {
  const auto with = [&](const std::function<void(HeadBasis&)>& change, PerHead policy = {}) {
    LayerBasis wrong = basis();
    change(wrong.heads[1]);
    return [wrong, policy] {
      StaticPCA<>::PolicySet policies;
      policies.basis = policy;
      StaticPCA<> cache({.shape = kShape}, wrong, policies);
    };
  };
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.key_rank = 17; })) ==
        "rank: key_rank 17, head_dim 16");
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.value_rank = 0; })) ==
        "rank: value_rank 0, head_dim 16");
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.key_down.pop_back(); })) ==
        "basis: key_down has 111 elements, expected 112");
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.query_down = h.key_down; })) ==
        "basis: query_down has 112 elements, expected 0");
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.key_mean.assign(15, 1.0F); })) ==
        "basis: key_mean has 15 elements, expected 16");
  CHECK(raised<ShapeError>(with([](HeadBasis& h) { h.value_mean.assign(17, 1.0F); })) ==
        "basis: value_mean has 17 elements, expected 16");
  CHECK(raised<ShapeError>(
            with([](HeadBasis& h) { h.key_mean.assign(16, 1.0F); }, {.centred = false})) ==
        "basis: key_mean has 16 elements, expected 0");
  CHECK(raised<ValueError>(with([](HeadBasis& h) {
          h.key_down[3] += 0.1F;
        })).find("basis: not orthonormal: max |U^T U - I| is ") == 0);
  CHECK(raised<ValueError>(with([](HeadBasis& h) {
          h.value_down[3] = std::numeric_limits<float>::quiet_NaN();
        })).find("basis: not orthonormal") == 0);
  CHECK(raised<ValueError>([&] {
          LayerBasis wrong = basis();
          for (HeadBasis& h : wrong.heads) h.key_mean = h.value_mean = std::vector<float>(16, 0.0F);
          wrong.heads[0].key_mean[2] = std::numeric_limits<float>::quiet_NaN();
          StaticPCA<>::PolicySet policies;
          policies.basis.centred = true;
          StaticPCA<> cache({.shape = kShape}, wrong, policies);
        }) == "basis: a map or mean holds nan, epoch_type f16 holds at most 65504");
  CHECK(raised<ShapeError>([] {
          StaticPCA<> cache({.shape = {4, 1, 16}}, basis());
        }) == "num_kv_heads: cache 1, basis 2");
  CHECK(raised<ShapeError>([] {
          StaticPCA<> cache({.shape = {4, 2, 24}}, basis());
        }).find("expected") != std::string::npos);
}

TEST_CASE("configurations that cannot work") {
  CHECK(raised<ShapeError>([] {
          FullKV<> cache({.shape = {3, 2, 16}});
        }) == "num_qo_heads 3 is not a multiple of num_kv_heads 2");
  CHECK(raised<ShapeError>([] {
          FullKV<> cache({.shape = {2, 2, 0}});
        }).find("head_dim 0; all must be at least 1") != std::string::npos);
  CHECK(raised<CapacityError>([] { FullKV<> cache({.shape = kShape, .max_sequences = 0}); }) ==
        "max_sequences: at least 1, given 0");
  CHECK(raised<CapacityError>([] { FullKV<> cache({.shape = kShape, .max_tokens = 0}); }) ==
        "max_tokens: 1 to 2147483647, given 0");
  CHECK(raised<CapacityError>([] { FullKV<> cache({.shape = kShape, .page_bytes = 16}); }) ==
        "page_bytes: a row needs 64, a page has 16");
  CHECK(raised<CapacityError>([] {
          FullKV<> cache({.shape = kShape, .flush_interval = 8, .tail_capacity = 40});
        }) == "tail_capacity: 40, must exceed recent + flush_interval = 40");
  CHECK(raised<CapacityError>([] { FullKV<> cache({.shape = kShape, .num_pages = -1}); }) ==
        "num_pages: 0 to 2147483647, given -1");
  CHECK(raised<CapacityError>([] {
          FullKV<> cache({.shape = kShape, .flush_interval = 2147483647});
        }) == "flush_interval: 1 to 16777216, given 2147483647");
  CHECK(raised<ValueError>([] { FullKV<> cache({.shape = kShape, .softmax_scale = -1.0F}); }) ==
        "softmax_scale: finite and at least 0, given -1");
  CHECK(raised<CapacityError>([] { Cpu::Pool pool(0, 5); }) ==
        "page pool: 5 pages of 0 bytes, each at most 2147483647");
  CHECK(raised<ShapeError>(
            [] { static_cast<void>(StaticPCA<>::num_pages({.shape = kShape}, {}, {})); }) ==
        "num_kv_heads: cache 2, basis 0: this policy compresses and needs a calibrated "
        "basis (calibrate::LayerMoments makes one)");
  CHECK(raised<ShapeError>([] {
          StarKV<> cache({.shape = kShape});
        }).starts_with("num_kv_heads: cache 2, basis 0: this policy compresses"));
  LayerBasis half = basis();
  half.heads.pop_back();
  CHECK(raised<ShapeError>([&] { StaticPCA<> cache({.shape = kShape}, half); }) ==
        "num_kv_heads: cache 2, basis 1");
  auto pool = std::make_shared<Cpu::Pool>(1024, 10);
  CHECK(raised<ShapeError>([&] {
          FullKV<> cache({.shape = kShape, .page_bytes = 2048}, {}, {}, pool);
        }) == "page_bytes: cache 2048, pool 1024");
}

TEST_CASE("8-bit full rows refuse what their steps cannot reach") {
  CacheConfig config{.shape = {1, 1, 8}, .full_type = DType::f32, .full_row_bits = 8};
  FullKV<> cache(config);
  cache.create(0);
  std::vector<float> rows(8, 8e6F);
  cache.append(0, {rows.data(), 1, 1, 8}, {rows.data(), 1, 1, 8});
  rows[3] = 1e8F;
  CHECK_THROWS_AS(cache.append(0, {rows.data(), 1, 1, 8}, {rows.data(), 1, 1, 8}), ValueError);
}
