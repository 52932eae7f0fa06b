// SPDX-License-Identifier: Apache-2.0
// The place of every number in a tile.
#include <doctest/doctest.h>

#include <set>
#include <vector>

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

}  // namespace tile_layout_tests
