// SPDX-License-Identifier: Apache-2.0
// Codes of any bits, split into planes.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

namespace code_planes_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE("planes put every code back together, whatever its bits, and count their padding") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::uint8_t> bits(1 + random() % 256);
    for (std::uint8_t& width : bits) width = static_cast<std::uint8_t>(random() % 9);
    std::sort(bits.rbegin(), bits.rend());
    const gpu::PartTiles tiles =
        Impl<TransformCode, Cuda>::tiles({}, static_cast<int>(bits.size()), bits);
    std::vector<unsigned> covered(bits.size(), 0);
    int stored = 0, wanted = 0;
    for (const std::uint8_t width : bits) wanted += width;
    CHECK(tiles.channels.size() == tiles.widths.size() * gpu::kCodeUnit);
    for (std::size_t i = 0; i < tiles.channels.size(); ++i) {
      const gpu::TileChannel& channel = tiles.channels[i];
      stored += tiles.widths[i / gpu::kCodeUnit];
      if (channel.source < 0) continue;
      CHECK(channel.width == tiles.widths[i / gpu::kCodeUnit]);
      CHECK(channel.bits == bits[static_cast<std::size_t>(channel.source)]);
      const unsigned mask = ((1U << channel.width) - 1U) << channel.shift;
      CHECK((covered[static_cast<std::size_t>(channel.source)] & mask) == 0);
      covered[static_cast<std::size_t>(channel.source)] |= mask;
    }
    for (std::size_t c = 0; c < bits.size(); ++c) CHECK(covered[c] == (1U << bits[c]) - 1U);
    CHECK(stored == wanted + tiles.padding_bits);
  }
}

}  // namespace code_planes_tests
