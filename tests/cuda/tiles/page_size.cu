// SPDX-License-Identifier: Apache-2.0
// Sizes of pages.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

namespace page_size_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE("pages hold the largest tile, and waste the least of those considered") {
  std::mt19937 random(2);
  for (int trial = 0; trial < 50; ++trial) {
    StaticPCAHybrid<Cuda>::PolicySet policies;
    CacheConfig config;
    config.shape = {4, 2, 16 * (1 + static_cast<int>(random() % 16))};
    config.max_tokens = 1 + static_cast<std::int64_t>(random() % 20000);
    LayerBasis basis;
    for (int head = 0; head < 2; ++head) {  // coordinates themselves
      HeadBasis maps;
      maps.key_rank = maps.value_rank =
          1 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim));
      maps.key_down.assign(static_cast<std::size_t>(config.shape.head_dim * maps.key_rank), 0.0F);
      for (int i = 0; i < maps.key_rank; ++i)
        maps.key_down[static_cast<std::size_t>(i * maps.key_rank + i)] = 1.0F;
      maps.value_down = maps.key_down;
      basis.heads.push_back(maps);
    }
    const std::size_t page = StaticPCAHybrid<Cuda>::page_bytes(config, basis, policies);
    const auto bytes = [&](std::size_t page_bytes) {
      config.page_bytes = page_bytes;
      return static_cast<std::size_t>(StaticPCAHybrid<Cuda>::num_pages(config, basis, policies)) *
             page_bytes;
    };
    CHECK(page % 128 == 0);
    const std::size_t least = bytes(page),
                      tile = static_cast<std::size_t>(
                          gpu::plain_tiles(config.shape.head_dim, config.shape.head_dim,
                                           gpu::plain_units(config.shape.head_dim), false)
                              .bytes);
    int most = 0, largest = static_cast<int>(tile);
    for (const HeadBasis& maps : basis.heads)
      most = (std::max)(most, gpu::plain_units(maps.key_rank));
    for (const HeadBasis& maps : basis.heads)
      largest =
          (std::max)(largest, gpu::plain_tiles(maps.key_rank, maps.value_rank, most, false).bytes);
    CHECK(page >= static_cast<std::size_t>(largest));
    for (std::size_t count = 1; count <= 4; ++count) {
      if (count * tile >= static_cast<std::size_t>(largest)) CHECK(least <= bytes(count * tile));
    }
  }
}

}  // namespace page_size_tests
