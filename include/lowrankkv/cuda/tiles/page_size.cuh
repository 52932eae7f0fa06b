// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/page_size.cuh  The page size: chosen for the least waste at the ends of lists,
/// and the number of pages that sequences need.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/layer_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Pages that max_sequences sequences need at most. @param most  rows of their lists
inline std::int64_t pages_needed(const CacheConfig& config, const LayerTiles& tiles,
                                 const MostRows& most) {
  std::int64_t pages = config.shape.num_kv_heads * tiles.listed.pages_for(most.full);
  for (const HeadTiles& layout : tiles.compressed) pages += layout.pages_for(most.compressed);
  return pages * config.max_sequences;
}

namespace detail {

/// Sets the number of tiles per page. @throws CapacityError if a tile is larger than a page
inline void fit_pages(LayerTiles& tiles) {
  const auto fit = [&](HeadTiles& layout) {
    if (static_cast<std::size_t>(layout.bytes) > tiles.page_bytes)
      ::lowrankkv::detail::fail<CapacityError>("page_bytes: a tile needs ", layout.bytes,
                                               ", a page has ", tiles.page_bytes);
    layout.tiles_per_page =
        static_cast<std::int32_t>(tiles.page_bytes / static_cast<std::size_t>(layout.bytes));
  };
  fit(tiles.listed);
  for (HeadTiles& layout : tiles.compressed) fit(layout);
}

/// Sets the page size of layers. @return pages that all layers together need at most
/// @throws CapacityError if a tile is larger than a page
inline std::int64_t use_page_bytes(const CacheConfig& config, std::vector<LayerTiles>& layers,
                                   const MostRows& most, std::size_t page_bytes) {
  std::int64_t pages = 0;
  for (LayerTiles& tiles : layers) {
    tiles.page_bytes = page_bytes;
    fit_pages(tiles);
    pages += pages_needed(config, tiles, most);
  }
  return pages;
}

/// The page size at which all layers together need the fewest bytes for their largest numbers of
/// rows; of equal sizes, the largest. Candidates are 1 to 16 tiles of each list, up to four times
/// the largest tile.
inline std::size_t least_waste(const CacheConfig& config, std::vector<LayerTiles> layers,
                               const MostRows& most) {
  std::size_t largest = 0, best = 0, least = 0;
  std::vector<int> sizes;  // of tiles
  for (const LayerTiles& tiles : layers) {
    largest = (std::max)(
        largest, static_cast<std::size_t>((std::max)(tiles.listed.bytes, tiles.max_tile_bytes())));
    sizes.push_back(tiles.listed.bytes);
    for (const HeadTiles& layout : tiles.compressed) sizes.push_back(layout.bytes);
  }
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (const int tile_bytes : sizes) {
    for (std::size_t count = 1; count <= 16; ++count) {
      // Rounded up: tiles of keys alone, or of latents, may be 64 bytes off a multiple of 128.
      const std::size_t page_bytes =
          (count * static_cast<std::size_t>(tile_bytes) + kPageAlignment - 1) / kPageAlignment *
          kPageAlignment;
      if (page_bytes < largest || page_bytes > 4 * largest) continue;
      const std::size_t bytes =
          static_cast<std::size_t>(use_page_bytes(config, layers, most, page_bytes)) * page_bytes;
      if (best == 0 || bytes < least || (bytes == least && page_bytes > best)) {
        best = page_bytes;
        least = bytes;
      }
    }
  }
  return best;
}

}  // namespace detail

/// @brief Size of the pool that layers share. Pages have the configured size, or, if that is 0, the
/// size that wastes least over all layers. All layers must have the same shape and numbers of rows.
/// @throws CapacityError if a tile is larger than a page
inline PoolSize pool_of(const CacheConfig& config, std::vector<LayerTiles> layers,
                        const MostRows& most) {
  const std::size_t page_bytes =
      config.page_bytes != 0 ? config.page_bytes : detail::least_waste(config, layers, most);
  return {page_bytes, detail::use_page_bytes(config, layers, most, page_bytes)};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
