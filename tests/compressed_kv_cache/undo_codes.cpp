// SPDX-License-Identifier: Apache-2.0
// After any error the cache is as it was: presets by what they do with rows; and policies that
// throw.
#include "compressed_kv_cache/undo_cpu.hpp"

using namespace lowrankkv;

namespace undo {

struct Thrower {};  ///< stays at full rank as SinkRecent does, until it throws
struct ThrowingCodes {};
struct Liar {};  ///< keeps every other row, and promises to compress all
struct ThrowingOja {
  Oja oja;
};
inline void tick() {
  if (fails(Event::policy)) throw std::logic_error("policy of the engine");
}

}  // namespace undo

LOWRANKKV_NAMESPACE_BEGIN
template <>
struct Impl<undo::Thrower, Cpu> {
  using Like = Impl<SinkRecent, Cpu>;
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const undo::Thrower&) { return Like::recent({}); }
  static RowBounds bounds(const undo::Thrower&, const RowBatch& batch) {
    return Like::bounds({}, batch);
  }
  static void classify(const undo::Thrower&, const RowBatch& batch, std::span<RowFate> fates) {
    undo::tick();
    Like::classify({}, batch, fates);
  }
};
template <>
struct Impl<undo::Liar, Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;
  static int recent(const undo::Liar&) { return 0; }
  static RowBounds bounds(const undo::Liar&, const RowBatch& batch) { return {0, batch.num_rows}; }
  static void classify(const undo::Liar&, const RowBatch& batch, std::span<RowFate> fates) {
    // The prompt of the test as promised, so that a later flush is the first to break the promise.
    const bool honest = batch.phase == Phase::prefill;
    for (std::size_t row = 0; row < fates.size(); ++row)
      fates[row] = row % 2 == 0 && !honest ? RowFate::full : RowFate::compressed;
  }
};
template <>
struct Impl<undo::ThrowingCodes, Cpu> : Impl<Int8, Cpu> {
  static Layout layout(const undo::ThrowingCodes&, int rank, std::span<const std::uint8_t> bits) {
    return Impl<Int8, Cpu>::layout({}, rank, bits);
  }
  static void encode(const Layout& layout, Part part, int rows_per_page, std::byte* block, int row,
                     int count, const float* rows, int stride) {
    undo::tick();
    Impl<Int8, Cpu>::encode(layout, part, rows_per_page, block, row, count, rows, stride);
  }
};
template <>
struct Impl<undo::ThrowingOja, Cpu> : Impl<Oja, Cpu> {
  using Like = Impl<Oja, Cpu>;
  static PromptSelection prompt_selection(const undo::ThrowingOja& updater) {
    return Like::prompt_selection(updater.oja);
  }
  static void observe(const undo::ThrowingOja& updater, State& state, MatrixView rows,
                      MatrixView basis, Phase phase) {
    Like::observe(updater.oja, state, rows, basis, phase);
    undo::tick();
  }
  static bool maybe_update(const undo::ThrowingOja& updater, State& state, MatrixView basis,
                           MutableMatrixView updated, Phase phase) {
    undo::tick();
    return Like::maybe_update(updater.oja, state, basis, updated, phase);
  }
};
LOWRANKKV_NAMESPACE_END

TEST_CASE("moved bases, merged segments") {
  CacheConfig config = undo::config();
  undo::check_cache<SubSpaceA<>>(config, undo::basis());
  config.keep_residuals = true;
  using Merging = CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
  undo::check_cache<Merging>(config, undo::basis());
  config.merge_rows = 10;  // merges take several flushes
  undo::check_cache<Merging>(config, undo::basis());
  config.num_threads = 2;
  undo::check_cache<OjaKVv2<>>(config, undo::basis());
}
TEST_CASE("a call that failed holds no epoch: erasing sequences frees no less than without it") {
  using Moving = CompressedKVCache<Cpu, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
  using Setup = undo::Setup<Moving, false>;
  Setup failing(undo::config(), undo::basis()), smooth(undo::config(), undo::basis());
  int failures = 0;
  for (bool failed = true; failed; failures += failed ? 1 : 0) {
    undo::arm(undo::Event::allocation, failures);
    try {
      failing.cache().maintain(1);
    } catch (const std::bad_alloc&) {
    }
    failed = undo::disarm();
  }
  CHECK(failures > 20);
  smooth.cache().maintain(1);
  const auto freed_by_erasing = [](Setup& setup) {
    const long before = undo::num_freed;
    setup.erase({1, 2, 3});
    return undo::num_freed - before;
  };
  CHECK(freed_by_erasing(failing) >= freed_by_erasing(smooth));
}
TEST_CASE("joint values with heavy hitters") {
  undo::check_cache<StarKVH2O<>>(undo::config(), undo::basis(2));
}
TEST_CASE("codes under one budget") {
  undo::check_cache<Budgeted<>>(undo::config(), undo::basis_with_bits());
}
TEST_CASE("policies that throw") {
  using Throwing =
      CompressedKVCache<Cpu, PerHead, undo::ThrowingOja, undo::Thrower, undo::ThrowingCodes>;
  undo::check_cache<Throwing>(undo::config(), undo::basis(), {undo::Event::policy});
}
TEST_CASE("a token policy that keeps more rows than its bounds() promise") {
  const undo::Rows<cpu::PagePool> rows(undo::config().shape);
  CompressedKVCache<Cpu, PerHead, Static, undo::Liar, NoQuantizer> cache(undo::config(),
                                                                         undo::basis());
  cache.create(1);
  cache.ingest(1, rows.key(0, 150), rows.value(0, 150), rows.query(0, 150));
  cache.append(1, rows.key(150, 9), rows.value(150, 9));
  std::string message;
  try {
    cache.maintain(1);
  } catch (const StateError& error) {
    message = error.what();
  }
  CHECK(message ==
        "token policy: classify() makes 4 of 8 rows of KV head 0 full, bounds() allows 0");
  CHECK(cache.num_tokens(1) == 159);
  CHECK(cache.tail_length(1) == 9);
}
