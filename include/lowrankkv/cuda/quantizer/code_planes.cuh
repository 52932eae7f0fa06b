// SPDX-License-Identifier: Apache-2.0
/// @file cuda/quantizer/code_planes.cuh  Splits codes into planes of 8, 4, 2 and 1 bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/device_tiles.hpp"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Cuts the codes of one scale group into planes for the given units, and appends both.
/// @param left  bits of every code that are in no plane yet
inline void append_planes(const CodeLayout& layout, const ScaleGroup& group, const CodeUnits& units,
                          std::vector<int>& left, PartTiles& result) {
  for (const auto& [width, count] : {std::pair{8, units.eights}, std::pair{4, units.fours},
                                     std::pair{2, units.twos}, std::pair{1, units.ones}}) {
    const std::size_t end =
        result.channels.size() + static_cast<std::size_t>(count) * std::size_t{kCodeUnit};
    // A code may be in several planes of one width: first its upper bits.
    for (int round = 0; round < 8 / width; ++round) {
      for (int channel = group.first; channel < group.first + group.count; ++channel) {
        const std::size_t at = static_cast<std::size_t>(channel);
        if (left[at] < width || result.channels.size() == end) continue;
        left[at] -= width;
        result.channels.push_back({static_cast<std::int16_t>(channel), layout.bits[at],
                                   static_cast<std::uint8_t>(left[at]),
                                   static_cast<std::uint8_t>(width)});
      }
    }
    result.padding_bits += static_cast<int>(end - result.channels.size()) * width;
    result.channels.resize(end);
    result.widths.insert(result.widths.end(), static_cast<std::size_t>(count),
                         static_cast<std::uint8_t>(width));
  }
}

/// Splits codes into planes.
/// @param units_of  the units for the bits of one scale group
template <class UnitsOf>
PartTiles split_codes(const CodeLayout& layout, UnitsOf&& units_of) {
  PartTiles result;
  result.gains = layout.scale;
  result.norm_weights = layout.norm_weights;
  std::vector<int> left(layout.bits.begin(), layout.bits.end());
  for (std::size_t index = 0; index < layout.groups.size(); ++index) {
    const ScaleGroup& group = layout.groups[index];
    const std::size_t first = static_cast<std::size_t>(group.first);
    if (index == 1) {
      result.first_coded = result.coded;
      result.first_units = static_cast<int>(result.widths.size());
    }
    result.coded += group.count;
    result.reference[index] = layout.scale == ScaleKind::norm_log8
                                  ? layout.reference_norm
                                  : static_cast<float>(1 << (layout.bits[first] - 1));
    append_planes(
        layout, group,
        units_of(std::span(layout.bits).subspan(first, static_cast<std::size_t>(group.count))),
        left, result);
  }
  if (layout.groups.size() < 2) {
    result.first_coded = result.coded;
    result.first_units = static_cast<int>(result.widths.size());
  }
  return result;
}

/// Units in which every plane of a width stands once in a code, as its binary digits say.
inline CodeUnits units_by_digits(std::span<const std::uint8_t> bits) {
  int counts[9] = {};
  for (const int own : bits) {
    for (const int width : {8, 4, 2, 1}) counts[width] += (own & width) != 0 ? 1 : 0;
  }
  const auto units = [&](int width) { return (counts[width] + kCodeUnit - 1) / kCodeUnit; };
  return {units(8), units(4), units(2), units(1)};
}

}  // namespace detail

/// @brief Splits codes into planes of 8, 4, 2 and 1 bits, most significant first, in the units that
/// code_units() gives for each scale group.
inline PartTiles code_planes(const CodeLayout& layout) {
  return detail::split_codes(layout, code_units);
}

/// @brief Planes of codes under bases that move. A channel is a whole code, so that the basis
/// itself reads the tiles and an epoch stores nothing else.
inline PartTiles moving_code_planes(const CodeLayout& layout) {
  PartTiles result = detail::split_codes(layout, detail::units_by_digits);
  result.by_basis = true;
  return result;
}

/// @brief Planes of codes of joint values. Attention sums them in blocks of 32 channels of equal
/// bits; the last block of each bit count is padded. A block is one unit in every plane that its
/// bits have. Within a scale group, bits must not increase from channel to channel.
inline PartTiles joint_code_planes(const CodeLayout& layout) {
  PartTiles result = detail::split_codes(layout, detail::units_by_digits);
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
