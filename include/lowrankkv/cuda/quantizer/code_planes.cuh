// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/code_planes.cuh  Splits codes into planes of 8, 4, 2 and 1 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Splits codes into planes of 8, 4, 2 and 1 bits, most significant first. Channels of one
/// plane width and scale group fill units of 32 channels.
/// @param whole_bytes  a code of 8 bits is one plane; else two planes of 4 bits
inline PartTiles code_planes(const CodeLayout& layout, bool whole_bytes) {
  PartTiles result;
  result.gains = layout.scale;
  result.norm_weights = layout.norm_weights;
  // Bits of every code that are not in a plane yet.
  std::vector<int> left(layout.bits.begin(), layout.bits.end());
  for (std::size_t group = 0; group < layout.groups.size(); ++group) {
    const std::size_t first = static_cast<std::size_t>(layout.groups[group].first),
                      end = first + static_cast<std::size_t>(layout.groups[group].count);
    if (group == 1) {
      result.first_coded = result.coded;
      result.first_units = static_cast<int>(result.widths.size());
    }
    result.coded += layout.groups[group].count;
    result.reference[group] = layout.scale == ScaleKind::norm_log8
                                  ? layout.reference_norm
                                  : static_cast<float>(1 << (layout.bits[first] - 1));
    for (const int width : {8, 4, 2, 1}) {
      if (width == 8 && !whole_bytes) continue;
      // A code wider than two planes of a width (8 as 4 + 4) takes a second round.
      std::vector<TileChannel> channels;
      for (int round = 0; round < 2; ++round) {
        for (std::size_t channel = first; channel < end; ++channel) {
          if (left[channel] < width) continue;
          left[channel] -= width;
          channels.push_back({static_cast<std::int16_t>(channel), layout.bits[channel],
                              static_cast<std::uint8_t>(left[channel]),
                              static_cast<std::uint8_t>(width)});
        }
      }
      while (channels.size() % kCodeUnit != 0) {
        channels.push_back({});
        result.padding_bits += width;
      }
      result.widths.insert(result.widths.end(), channels.size() / kCodeUnit,
                           static_cast<std::uint8_t>(width));
      result.channels.insert(result.channels.end(), channels.begin(), channels.end());
    }
  }
  if (layout.groups.size() < 2) {
    result.first_coded = result.coded;
    result.first_units = static_cast<int>(result.widths.size());
  }
  return result;
}
/// @brief Splits codes into planes, with 8-bit codes as one plane or two, whichever pads less.
inline PartTiles code_planes(const CodeLayout& layout) {
  PartTiles whole = code_planes(layout, true), split = code_planes(layout, false);
  return whole.padding_bits <= split.padding_bits ? whole : split;
}

/// @brief Planes of codes under bases that move. A channel is a whole code, so that the basis
/// itself reads the tiles and an epoch stores nothing else.
inline PartTiles moving_code_planes(const CodeLayout& layout) {
  PartTiles result = code_planes(layout, true);
  result.by_basis = true;
  return result;
}

/// @brief Planes of codes of joint values. Attention sums them in blocks of 32 channels of equal
/// bits; the last block of each bit count is padded. A block is one unit in every plane that its
/// bits have. Within a scale group, bits must not increase from channel to channel.
inline PartTiles joint_code_planes(const CodeLayout& layout) {
  PartTiles result = code_planes(layout, true);
  result.channels.clear();
  result.widths.clear();
  result.padding_bits = 0;
  for (std::size_t group = 0; group < layout.groups.size(); ++group) {
    if (group == 1) result.first_units = static_cast<int>(result.widths.size());
    const std::size_t begin = result.readers.size();
    const int first = layout.groups[group].first, end = first + layout.groups[group].count;
    for (int channel = first; channel < end; ++channel) {
      const std::uint8_t bits = layout.bits[static_cast<std::size_t>(channel)];
      result.readers.push_back({static_cast<std::int16_t>(channel), bits, 0, 0});
      const bool last =
          channel + 1 == end || layout.bits[static_cast<std::size_t>(channel) + 1] != bits;
      while (last && result.readers.size() % kCodeUnit != 0) {
        result.readers.push_back({-1, bits, 0, 0});
        result.padding_bits += bits;
      }
    }
    for (const int width : {8, 4, 2, 1}) {
      const std::size_t before = result.channels.size();
      for (std::size_t at = begin; at < result.readers.size(); ++at) {
        const TileChannel& reader = result.readers[at];
        if ((reader.bits & width) != 0)
          result.channels.push_back({reader.source, reader.bits,
                                     static_cast<std::uint8_t>(reader.bits & (width - 1)),
                                     static_cast<std::uint8_t>(width)});
      }
      result.widths.insert(result.widths.end(), (result.channels.size() - before) / kCodeUnit,
                           static_cast<std::uint8_t>(width));
    }
  }
  if (layout.groups.size() < 2) result.first_units = static_cast<int>(result.widths.size());
  return result;
}

/// @brief Scale groups of a row of one part: Codec::scale_groups, by default 1.
template <class Codec>
constexpr int scale_groups_of() {
  if constexpr (requires { Codec::scale_groups; })
    return Codec::scale_groups;
  else
    return 1;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
