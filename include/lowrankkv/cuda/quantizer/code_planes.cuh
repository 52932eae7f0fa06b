// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/code_planes.cuh  Codes as planes of 8, 4, 2 and 1 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Codes as planes of 8, 4, 2 and 1 bits, most significant first; channels of one width and
/// scale group fill units of 32. Codes of 8 bits are one plane, or two of 4 bits.
inline PartTiles code_planes(const CodeLayout& layout, bool whole_bytes) {
  PartTiles result;
  result.gains = layout.scale;
  std::vector<int> left(layout.bits.begin(),
                        layout.bits.end());  // bits of every code that are not in a plane yet
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
/// @brief The same, in whichever way leaves less padding.
inline PartTiles code_planes(const CodeLayout& layout) {
  PartTiles whole = code_planes(layout, true), split = code_planes(layout, false);
  return whole.padding_bits <= split.padding_bits ? whole : split;
}

/// @brief Codes that bases read which move: a channel is a whole code, so that the basis is all
/// that an epoch has to keep.
inline PartTiles moving_code_planes(const CodeLayout& layout) {
  PartTiles result = code_planes(layout, true);
  result.by_basis = true;
  return result;
}

/// @brief Codes of joint values: blocks of 32 channels of equal bits, the last of each filled up,
/// as attention sums them; a block is a unit in every plane that its bits have. Bits do not rise
/// within a scale group.
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

/// @brief Scale groups of a row of keys, and of values.
template <class Codec>
constexpr int scale_groups_of() {
  if constexpr (requires { Codec::scale_groups; })
    return Codec::scale_groups;
  else
    return 1;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
