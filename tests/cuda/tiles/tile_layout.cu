// SPDX-License-Identifier: Apache-2.0
// The place of every number in a tile.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "lowrankkv/core/device_tiles.hpp"
#include "lowrankkv/cuda/presets.cuh"

namespace tile_layout_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE("codes of a unit fill its bits, none shared, none left over") {
  for (const int bits : {1, 2, 4, 8}) {
    for (const Part part : {Part::key, Part::value}) {
      std::set<int> used;
      for (int row = 0; row < gpu::kCodeRows; ++row) {
        for (int channel = 0; channel < gpu::kCodeUnit; ++channel) {
          const gpu::CodePlace place = part == Part::key ? gpu::key_place(bits, row, channel)
                                                         : gpu::value_place(bits, row, channel);
          const gpu::CodeIndex back =
              part == Part::key
                  ? gpu::key_code(bits, place.word / 4, place.shift % 8 / bits, place.shift / 8)
                  : gpu::value_code(bits, place.word / 4, place.shift % 8 / bits, place.shift / 8);
          CHECK(back.row == row);
          CHECK(back.channel == channel);
          CHECK(place.word % 4 == 0);
          for (int bit = 0; bit < bits; ++bit)
            CHECK(used.insert(8 * place.word + place.shift + bit).second);
        }
      }
      CHECK(static_cast<int>(used.size()) == 8 * gpu::code_unit_bytes(bits));
      CHECK(*used.rbegin() == 8 * gpu::code_unit_bytes(bits) - 1);
    }
  }
}

TEST_CASE("elements of a plain unit fill it") {
  for (const Part part : {Part::key, Part::value}) {
    std::set<int> used;
    for (int row = 0; row < gpu::kPlainRows; ++row) {
      for (int channel = 0; channel < gpu::kPlainUnit; ++channel)
        CHECK(used.insert(gpu::plain_place(part, row, channel)).second);
    }
    CHECK(used.size() == 256);
    CHECK(*used.rbegin() == 510);
  }
}

TEST_CASE("budgets count with the tiles' sizes") {
  for (int dim = 16; dim <= 256; dim += 16) {
    for (const bool pre_rope : {false, true}) {
      for (const bool few : {false, true}) {
        const gpu::HeadTiles full = gpu::plain_tiles(dim, dim, gpu::plain_units(dim), pre_rope),
                             plain = pre_rope && few ? gpu::small_tiles(full) : full,
                             scaled = gpu::scaled_tiles(plain);
        CHECK(full_row_tile(dim, 0, pre_rope, few).bytes == plain.bytes);
        CHECK(full_row_tile(dim, 0, pre_rope, few).rows == plain.rows);
        CHECK(full_row_tile(dim, 8, pre_rope, few).bytes == scaled.bytes);
        CHECK(full_row_tile(dim, 8, pre_rope, few).rows == scaled.rows);
        CHECK(plain.value_offset * 2 == plain.bytes);
      }
    }
  }
  std::mt19937 random(5);
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<std::uint8_t> bits[2];
    gpu::PartTiles parts[2];
    for (int part = 0; part < 2; ++part) {
      bits[part].resize(1 + random() % 128);
      for (std::uint8_t& own : bits[part]) own = static_cast<std::uint8_t>(1 + random() % 8);
      std::sort(bits[part].begin(), bits[part].end(), std::greater<>());
      const int rank = static_cast<int>(bits[part].size());
      parts[part] = gpu::code_planes({rank, bits[part], {{0, rank}}, ScaleKind::norm_log8});
    }
    const gpu::HeadTiles tiles = gpu::code_tiles(parts[0], parts[1], 1);
    CHECK(code_tile(bits[0], bits[1]).bytes == tiles.bytes);
    CHECK(code_tile(bits[0], bits[1]).rows == tiles.rows);
    CHECK(code_tile(bits[0], bits[1]).rows_per_page(static_cast<std::size_t>(tiles.bytes) - 1) ==
          0);
    CHECK(code_tile(bits[0], bits[1]).rows_per_page(static_cast<std::size_t>(tiles.bytes) * 3) ==
          3 * tiles.rows);
  }
}

}  // namespace tile_layout_tests
