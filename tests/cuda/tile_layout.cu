// SPDX-License-Identifier: Apache-2.0
// Layouts of tiles, on the host: needs no GPU.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <random>
#include <set>
#include <vector>

#include "lowrankkv/cuda/cache_base.cuh"

using namespace lowrankkv;

TEST_CASE("codes of a unit fill its bits, none shared, none left over") {
  for (const int bits : {1, 2, 4, 8}) {
    for (const Part part : {Part::key, Part::value}) {
      std::set<int> used;
      for (int row = 0; row < cuda::kCodeRows; ++row) {
        for (int channel = 0; channel < cuda::kCodeUnit; ++channel) {
          const cuda::CodePlace place = part == Part::key ? cuda::key_place(bits, row, channel) : cuda::value_place(bits, row, channel);
          CHECK(place.word % 4 == 0);
          for (int bit = 0; bit < bits; ++bit) CHECK(used.insert(8 * place.word + place.shift + bit).second);
        }
      }
      CHECK(static_cast<int>(used.size()) == 8 * cuda::code_unit_bytes(bits));
      CHECK(*used.rbegin() == 8 * cuda::code_unit_bytes(bits) - 1);
    }
  }
}

TEST_CASE("elements of a plain unit fill it") {
  for (const Part part : {Part::key, Part::value}) {
    std::set<int> used;
    for (int row = 0; row < cuda::kPlainRows; ++row) {
      for (int channel = 0; channel < cuda::kPlainUnit; ++channel) CHECK(used.insert(cuda::plain_place(part, row, channel)).second);
    }
    CHECK(used.size() == 256);
    CHECK(*used.rbegin() == 510);
  }
}

TEST_CASE("planes put every code back together, whatever its bits, and count their padding") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::uint8_t> bits(1 + random() % 256);
    for (std::uint8_t& width : bits) width = static_cast<std::uint8_t>(random() % 9);
    std::sort(bits.rbegin(), bits.rend());
    const cuda::PartTiles tiles = Impl<TransformCode, Cuda>::tiles({}, static_cast<int>(bits.size()), bits);
    std::vector<unsigned> covered(bits.size(), 0);
    int stored = 0, wanted = 0;
    for (const std::uint8_t width : bits) wanted += width;
    CHECK(tiles.channels.size() == tiles.widths.size() * cuda::kCodeUnit);
    for (std::size_t i = 0; i < tiles.channels.size(); ++i) {
      const cuda::TileChannel& channel = tiles.channels[i];
      stored += tiles.widths[i / cuda::kCodeUnit];
      if (channel.source < 0) continue;
      CHECK(channel.width == tiles.widths[i / cuda::kCodeUnit]);
      CHECK(channel.bits == bits[static_cast<std::size_t>(channel.source)]);
      const unsigned mask = ((1U << channel.width) - 1U) << channel.shift;
      CHECK((covered[static_cast<std::size_t>(channel.source)] & mask) == 0);
      covered[static_cast<std::size_t>(channel.source)] |= mask;
    }
    for (std::size_t c = 0; c < bits.size(); ++c) CHECK(covered[c] == (1U << bits[c]) - 1U);
    CHECK(stored == wanted + tiles.padding_bits);
  }
}
