// SPDX-License-Identifier: Apache-2.0
/// @file cuda/maps/key_up_projection.cuh  Up-projection of pre-RoPE keys: maps from coefficients to
/// head_dim channels, as tensor-core operands.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Factor of coefficients when bf16 is converted to f16: they fit up to 2^20.
inline constexpr float kRotatedBFloat = 0.0625F;

/// @brief The key up-projection of one head in f16, as B operands of m16n8k16: [units of 16,
/// head_dim / 16, 32 lanes]. Two words of a lane belong to the first channels of eight pairs in
/// RoPE order (cuda/maps/rope.cuh), two words to their second channels. k is a coefficient, or a
/// plane of its code less its centre; n is a channel of the row.
///
/// The map is scaled by a power of two, so that up-projected numbers are about as large as their
/// coefficients. Coefficients in bf16 enter times kRotatedBFloat. In tiles of codes, a unit of 32
/// codes is two units of 16, each of the codes that a lane has in the words of one half. Codes of
/// 4, 2 and 1 bits enter twice as large, which takes fewer instructions
/// (cuda/attention/pre_rope/attend_pre_rope_codes.cuh).
struct KeyUpMap {
  const uint4* operands = nullptr;
  /// The mean key, scaled as up-projected keys are: [head_dim / 16, lane % 4], of first channels 2t
  /// and 2t + 1, then of second channels.
  const uint2* means = nullptr;
  /// The power of two that scales the map, and the factor that removes it, and that of bf16, from
  /// results. Where bases move, both are the same for every basis, except for codes of principal
  /// axes.
  const float2* scales = nullptr;
  std::int32_t units = 0;  ///< of operands
};

/// @brief Units of 16 of the up-projection of so many units of keys. Kernels take them in groups of
/// two, or of four units of codes; the last group is filled with zeros. Keys whose codes have no
/// bits have one group too.
__host__ __device__ constexpr int key_up_units(bool codes, int key_units) {
  return codes ? (key_units > 0 ? (key_units + 3) / 4 : 1) * 8 : (key_units + 1) / 2 * 2;
}

/// @brief The coefficient, or place of a code, that is the i-th (0 to 3) of a lane in a unit of 16.
/// @param t  lane % 4
__host__ __device__ constexpr int key_up_place(bool codes, int unit, int t, int i) {
  return kPlainUnit * unit + (codes ? 4 * t + i : 2 * t + i % 2 + 8 * (i / 2));
}

/// @brief A key up-projection in host memory.
struct HostKeyUp {
  std::vector<uint4> operands;
  std::vector<uint2> means;
  float scale = 1.0F, factor = 1.0F;  ///< as KeyUpMap::scales
};

namespace detail {

/// Packs two numbers into a word of f16.
inline std::uint32_t half_word_of(float low, float high) {
  return static_cast<std::uint32_t>(to_half(low).bits) |
         static_cast<std::uint32_t>(to_half(high).bits) << 16;
}

/// Builds a key up-projection times `scale`, for coefficients that enter times `range`. Both are
/// powers of two.
/// @param places  number of coefficients that have values; the others are zeros
template <class Element>
HostKeyUp key_up_of(bool codes, int units, int places, int head_dim, const std::vector<float>& mean,
                    float scale, float range, Element&& value) {
  HostKeyUp map;
  map.scale = scale;
  map.factor = 1.0F / (scale * range);
  for (int unit = 0; unit < units; ++unit) {
    for (int block = 0; block < head_dim / 16; ++block) {
      for (int lane = 0; lane < 32; ++lane) {
        const auto element = [&](int at, int channel) {
          return at < places ? scale * value(at, channel) : 0.0F;
        };
        const auto word = [&](int i, int channel) {
          return half_word_of(element(key_up_place(codes, unit, lane % 4, i), channel),
                              element(key_up_place(codes, unit, lane % 4, i + 1), channel));
        };
        const int first = 8 * block + lane / 4, second = first + head_dim / 2;
        map.operands.push_back({word(0, first), word(2, first), word(0, second), word(2, second)});
      }
    }
  }
  for (int channel = 0; channel < head_dim / 2; channel += 2) {
    const auto word = [&](int at) {
      return mean.empty() ? 0U
                          : half_word_of(scale * range * mean[static_cast<std::size_t>(at)],
                                         scale * range * mean[static_cast<std::size_t>(at) + 1]);
    };
    map.means.push_back({word(channel), word(channel + head_dim / 2)});
  }
  return map;
}

}  // namespace detail

/// @brief The up-projection of a head whose keys are plain coefficients. It is scaled so that its
/// largest number is between 1/2 and 1, or less where bases move. Channels are in RoPE order.
/// @param type  of the coefficients
/// @param most  bound of the numbers in maps of later bases, which shall have the same scale; 0:
/// bases do not move
/// @param value  element (coefficient, channel) of the map as it is stored; zero beyond the rank
/// @param mean  [head_dim] or empty
template <class Element>
HostKeyUp up_project_plain(DType type, int units, int head_dim, const std::vector<float>& mean,
                           float most, Element&& value) {
  float largest = (std::max)(1e-30F, most);
  for (int coefficient = 0; coefficient < units * kPlainUnit; ++coefficient) {
    for (int channel = 0; channel < head_dim; ++channel)
      largest = (std::max)(largest, std::abs(value(coefficient, channel)));
  }
  return detail::key_up_of(false, key_up_units(false, units), units * kPlainUnit, head_dim, mean,
                           std::exp2(-std::ceil(std::log2(largest))),
                           type == DType::f16 ? 1.0F : kRotatedBFloat, value);
}

/// @brief The up-projection of a head whose keys are codes. It is scaled so that the largest sum
/// over a row's codes, without gains, is at most 16. Channels are in RoPE order.
/// @param widths  bits of the units
/// @param most  bound of such sums in later bases, which shall have the same scale; 0: bases do not
/// move
/// @param value  element (place in the tile, channel): the value of one level of the place's code;
/// zero where there is no code
template <class Element>
HostKeyUp up_project_codes(const std::vector<std::uint8_t>& widths, int head_dim,
                           const std::vector<float>& mean, float most, Element&& value) {
  const int units = static_cast<int>(widths.size());
  // Codes of w bits enter less (2^w - 1) / 2; below 8 bits, twice that enters, so the map is
  // halved.
  const auto entered = [&](int place, int channel) {
    return value(place, channel) *
           (widths[static_cast<std::size_t>(place / kCodeUnit)] == 8 ? 1.0F : 0.5F);
  };
  float largest = (std::max)(1e-30F, most);
  for (int channel = 0; channel < head_dim; ++channel) {
    float sum = 0.0F;
    for (int place = 0; place < units * kCodeUnit; ++place)
      sum += std::abs(value(place, channel)) * 0.5F *
             static_cast<float>((1 << widths[static_cast<std::size_t>(place / kCodeUnit)]) - 1);
    largest = (std::max)(largest, sum);
  }
  for (const float x : mean)
    // The mean fits f16 too, however small the codes are, or if there are none.
    largest = (std::max)(largest, std::abs(x) / 1024.0F);
  return detail::key_up_of(true, key_up_units(true, units), units * kCodeUnit, head_dim, mean,
                           std::exp2(4.0F - std::ceil(std::log2(largest))), 1.0F, entered);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
