// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/choose_tiles.cuh  Chooses the tile layouts of a layer's lists and the page
/// size, from the basis and the quantizer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/page_allocator.hpp"
#include "lowrankkv/cuda/quantizer/code_planes.cuh"
#include "lowrankkv/cuda/tiles/layer_tiles.cuh"
#include "lowrankkv/cuda/tiles/page_size.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The tile layouts of all lists, and the page size: config.page_bytes, or, if that is 0,
/// the size that wastes least.
/// @param compresses  whether there are compressed lists
/// @param moves  whether bases move
/// @param joint_heads  heads of a group whose values are one latent; 0: no joint values
/// @param most  the most rows of a sequence's lists
/// @throws CapacityError if a tile is larger than a page, or has more units than kernels support
template <class Quantizer>
LayerTiles choose_tiles(const CacheConfig& config, const LayerBasis& basis,
                        const Quantizer& quantizer, bool compresses, bool moves, int joint_heads,
                        const MostRows& most) {
  using Codec = Impl<Quantizer, Cuda>;
  const bool pre_rope = config.rope.keys == Rope::pre;
  LayerTiles tiles;
  tiles.full = plain_tiles(config.shape.head_dim, config.shape.head_dim,
                           plain_units(config.shape.head_dim), pre_rope);
  const bool few = compresses && most.full + most.spare_full <= kFewFullRows;
  const HeadTiles paged = pre_rope && few ? small_tiles(tiles.full) : tiles.full;
  tiles.listed = config.full_row_bits == 8 ? scaled_tiles(paged) : paged;
  tiles.page_bytes = config.page_bytes;
  if (compresses) {
    tiles.form = Codec::form;
    tiles.joint_heads = joint_heads;
    const bool joins = joint_heads > 0;
    int most_units = 0;
    for (const HeadBasis& head : basis.heads)
      most_units = (std::max)(
          {most_units, plain_units(head.key_rank), joins ? 0 : plain_units(head.value_rank)});
    for (const HeadBasis& head : basis.heads) {
      if constexpr (Codec::form == CodedForm::codes) {
        const auto own_tiles = [&](int rank, const std::vector<std::uint8_t>& bits) {
          if constexpr (requires { Codec::moving_tiles(quantizer, rank); }) {
            if (moves) return Codec::moving_tiles(quantizer, rank);
          }
          return Codec::tiles(quantizer, rank, bits);
        };
        tiles.parts.push_back(own_tiles(head.key_rank, head.key_bits));
        if (!joins)
          tiles.parts.push_back(own_tiles(head.value_rank, head.value_bits));
        else
          tiles.parts.push_back(Codec::joint_tiles(quantizer, head.value_rank, head.value_bits));
        tiles.steps.push_back(Codec::steps(quantizer, head.key_bits, head.key_rms));
        tiles.steps.push_back(Codec::steps(quantizer, head.value_bits, head.value_rms));
        if constexpr (requires { Codec::orders_channels; }) {
          tiles.orders = moves;
          for (const bool key : {true, false}) {
            tiles.units.push_back(
                Codec::unit_steps(quantizer, key ? head.key_bits : head.value_bits));
            tiles.rotations.emplace_back();
            if constexpr (requires { Codec::rotation(quantizer, 1); })
              tiles.rotations.back() =
                  Codec::rotation(quantizer, key ? head.key_rank : head.value_rank);
          }
        }
        const PartTiles& keys = tiles.parts[tiles.parts.size() - 2];
        tiles.compressed.push_back(
            joins ? keys_only(code_tiles(keys, {}, scale_groups_of<Codec>()))
                  : code_tiles(keys, tiles.parts.back(), scale_groups_of<Codec>()));
      } else {
        tiles.coded_type = Codec::type(quantizer);
        tiles.parts.resize(tiles.parts.size() + 2);
        tiles.steps.resize(tiles.steps.size() + 2);
        tiles.compressed.push_back(
            joins ? keys_only(plain_tiles(head.key_rank, 0, most_units, pre_rope))
                  : plain_tiles(head.key_rank, head.value_rank, most_units, pre_rope));
      }
    }
    for (std::size_t head = 0; joins && head < basis.heads.size();
         head += static_cast<std::size_t>(joint_heads)) {
      tiles.compressed.push_back(
          tiles.form == CodedForm::codes
              ? joint_code_tiles(tiles.parts[2 * head + 1], scale_groups_of<Codec>())
              : joint_plain_tiles(basis.heads[head].value_rank));
    }
  }
  if (tiles.page_bytes == 0) tiles.page_bytes = detail::least_waste(config, {tiles}, most);
  detail::fit_pages(tiles);
  return tiles;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
