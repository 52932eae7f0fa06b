// SPDX-License-Identifier: Apache-2.0
// Decoding the packed keys or values of 4096 rows of one KV head (64 channels) to f32, tile by tile
// across pages as attention does. bits 0 is a mixed layout, 8 to 0 bits.
//
// Floor of a row of b-bit codes: its 8 b packed bytes at the streaming rate (BM_stream of
// bench_attend; pages stay in the caches here, so that decoding is what is timed), and its 256
// bytes of f32 stored to L1, 64 bytes every other cycle where registers have 64: at 3.5 GHz that is
// 28 G codes/s, whatever the width. Counter: codes/s.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "lowrankkv/cpu/prompt_chunk.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"

namespace {

using namespace lowrankkv;

constexpr int kRank = 64;
constexpr int kRows = 4096;
constexpr std::size_t kBlockBytes = 4096;  // half of the default page at head_dim 128

/// All channels of `bits` bits under an f16 scale; 0: 8 to 0 bits, in this order, under a gain, as
/// TransformCode has them.
CodeLayout layout_of(int bits) {
  if (bits > 0)
    return {kRank,
            std::vector<std::uint8_t>(kRank, static_cast<std::uint8_t>(bits)),
            {{0, kRank}},
            ScaleKind::largest_f16,
            1.0F};
  CodeLayout layout{kRank, {}, {{0, 0}}, ScaleKind::norm_log8, 1.0F};
  for (const auto& [width, channels] :
       {std::pair{8, 1}, {7, 1}, {6, 3}, {5, 5}, {4, 9}, {3, 13}, {2, 13}, {1, 9}, {0, 10}}) {
    layout.bits.insert(layout.bits.end(), static_cast<std::size_t>(channels),
                       static_cast<std::uint8_t>(width));
    if (width > 0) layout.groups[0].count += channels;
  }
  return layout;
}

void decode(benchmark::State& state, Part part) {
  const CodeLayout layout = layout_of(static_cast<int>(state.range(0)));
  int per_page = 1;
  while (layout.block_bytes(per_page + 1) <= kBlockBytes) ++per_page;
  std::mt19937_64 random(1);
  std::vector<std::byte> pages(static_cast<std::size_t>(kRows / per_page + 1) * kBlockBytes);
  for (std::byte& byte : pages)
    byte = static_cast<std::byte>(random() % 120);  // scales that are numbers
  std::vector<float> tile(static_cast<std::size_t>(cpu::kTile * kRank));
  const int stride = part == Part::key ? cpu::kTile : kRank;
  for (auto _ : state) {
    for (int first = 0; first < kRows; first += cpu::kTile) {
      for (int done = 0, count = 0; done < cpu::kTile; done += count) {
        const int row = (first + done) % per_page;
        count = (std::min)(per_page - row, cpu::kTile - done);
        const std::byte* block =
            pages.data() + static_cast<std::size_t>((first + done) / per_page) * kBlockBytes;
        cpu::decode_codes(layout, part, per_page, block, row, count,
                          tile.data() + done * (part == Part::key ? 1 : stride), stride);
      }
      benchmark::DoNotOptimize(tile.data());
      benchmark::ClobberMemory();
    }
  }
  state.counters["codes/s"] = benchmark::Counter(static_cast<double>(kRows) * kRank,
                                                 benchmark::Counter::kIsIterationInvariantRate);
}
void BM_keys(benchmark::State& state) { decode(state, Part::key); }
void BM_values(benchmark::State& state) { decode(state, Part::value); }
BENCHMARK(BM_keys)->ArgName("bits")->Arg(2)->Arg(3)->Arg(4)->Arg(8)->Arg(0)->Unit(
    benchmark::kMicrosecond);
BENCHMARK(BM_values)->ArgName("bits")->Arg(2)->Arg(3)->Arg(4)->Arg(8)->Arg(0)->Unit(
    benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
