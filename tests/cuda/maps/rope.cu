// SPDX-License-Identifier: Apache-2.0
// The order in which channels of pre-RoPE keys are rotated.
#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

namespace rope_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE(
    "channels in rotary_dim order: all of them once, both of a pair in the same place of its "
    "halves, others behind") {
  for (const int dim : {16, 64, 80, 128, 256}) {
    for (int rotary_dim = 16; rotary_dim <= dim; rotary_dim += 16) {
      for (const bool interleaved : {false, true}) {
        gpu::Rotary rotary;
        rotary.pairs = rotary_dim / 2;
        rotary.interleaved = interleaved;
        std::vector<bool> met(static_cast<std::size_t>(dim), false),
            pairs(static_cast<std::size_t>(rotary_dim / 2), false);
        for (int place = 0; place < dim; ++place) {
          const int channel = rotary.channel(place, dim);
          REQUIRE((channel >= 0 && channel < dim));
          CHECK_FALSE(met[static_cast<std::size_t>(channel)]);
          met[static_cast<std::size_t>(channel)] = true;
        }
        for (int place = 0; place < rotary_dim / 2; ++place) {
          const int pair = rotary.pair(place), first = rotary.channel(place, dim),
                    second = rotary.channel(place + dim / 2, dim);
          REQUIRE((pair >= 0 && pair < rotary_dim / 2));
          CHECK_FALSE(pairs[static_cast<std::size_t>(pair)]);
          pairs[static_cast<std::size_t>(pair)] = true;
          CHECK(first == (interleaved ? 2 * pair : pair));
          CHECK(second == (interleaved ? 2 * pair + 1 : pair + rotary_dim / 2));
        }
        for (int place = rotary_dim / 2; place < dim / 2; ++place) {
          CHECK(rotary.channel(place, dim) >= rotary_dim);
          CHECK(rotary.channel(place + dim / 2, dim) >= rotary_dim);
        }
      }
    }
  }
}

}  // namespace rope_tests
