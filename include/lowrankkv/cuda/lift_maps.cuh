// SPDX-License-Identifier: Apache-2.0
/// @file cuda/lift_maps.cuh  Maps that lift tiles of key coefficients to head_dim, for keys that are turned when they are read: operands of tensor-core products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/device.cuh"
#include "lowrankkv/cuda/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The lifting map of one head's keys, B operands [units, head_dim / 8, 32 lanes, parts]: of m16n8k16 for plain tiles, of m16n8k32 for tiles of codes. k = a coefficient,
/// or a plane of its code; n = a channel of the row, in turning order (cuda/rotary.cuh).
///
/// Plain tiles: numbers of the tiles' type, times 2^k so that the largest is about 2^8; where they round, a second part holds what was lost. Codes: integers of 16
/// bits, relative to the largest of their channel, as two signed bytes.
struct LiftMap {
  const uint2* operands = nullptr;
  const float* numbers = nullptr;    ///< [3, head_dim]. Codes: what a channel's integers stand for, what their centres come to, means. Plain tiles: means times 2^k,
                                     ///< as lanes want them for accumulators: [head_dim / 8, lane % 4, 4 (two channels, twice)]
  float factor = 1.0F;               ///< plain tiles: 2^-k
  std::int32_t parts = 0;
};

/// @brief A lifting map in host memory.
struct HostLift {
  std::vector<uint2> operands;
  std::vector<float> numbers;
  float factor = 1.0F;
  int parts = 1;
};

namespace detail {

/// Two 16-bit numbers of a type as one word.
inline std::uint32_t word_of(DType type, float low, float high) {
  const auto bits = [&](float value) { return static_cast<std::uint32_t>(type == DType::f16 ? to_half(value).bits : to_bfloat16(value).bits); };
  return bits(low) | bits(high) << 16;
}

}  // namespace detail

/// @brief The map of a head whose keys are plain coefficients. Channels are in turning order.
/// @param value  element (coefficient, channel), of the map as it is stored; zero beyond the rank  @param mean  [head_dim] or empty
template <class Element>
HostLift lift_plain(DType type, int units, int head_dim, const std::vector<float>& mean, Element&& value) {
  HostLift map;
  float largest = 1e-30F;
  for (int coefficient = 0; coefficient < units * kPlainUnit; ++coefficient) {
    for (int channel = 0; channel < head_dim; ++channel) largest = (std::max)(largest, std::abs(value(coefficient, channel)));
  }
  const float scale = std::exp2(8.0F - std::ceil(std::log2(largest)));
  const auto part = [&](int coefficient, int channel, int which) {
    const float whole = scale * value(coefficient, channel), high = round_to(type, whole);
    return which == 0 ? high : round_to(type, whole - high);
  };
  for (int coefficient = 0; coefficient < units * kPlainUnit; ++coefficient) {
    for (int channel = 0; channel < head_dim; ++channel) map.parts = part(coefficient, channel, 1) != 0.0F ? 2 : map.parts;
  }
  for (int unit = 0; unit < units; ++unit) {
    for (int block = 0; block < head_dim / 8; ++block) {
      for (int lane = 0; lane < 32; ++lane) {
        const int channel = 8 * block + lane / 4, first = kPlainUnit * unit + 2 * (lane % 4);
        for (int which = 0; which < map.parts; ++which) {
          map.operands.push_back({detail::word_of(type, part(first, channel, which), part(first + 1, channel, which)), detail::word_of(type, part(first + 8, channel, which), part(first + 9, channel, which))});
        }
      }
    }
  }
  map.numbers.resize(static_cast<std::size_t>(3 * head_dim));
  for (int i = 0; i < 2 * head_dim && !mean.empty(); ++i) map.numbers[static_cast<std::size_t>(i)] = scale * mean[static_cast<std::size_t>(i / 4 * 2 + i % 2)];
  map.factor = 1.0F / scale;
  return map;
}

/// @brief The map of a head whose keys are codes. Channels are in turning order.
/// @param value  element (place in the tile, channel): what one of the place's code stands for; zero where there is none
/// @param widths  bits of the units
template <class Element>
HostLift lift_codes(const std::vector<std::uint8_t>& widths, int head_dim, const std::vector<float>& mean, Element&& value) {
  HostLift map;
  map.parts = 2;
  const int units = static_cast<int>(widths.size()), places = units * kCodeUnit;
  std::vector<int> integers(static_cast<std::size_t>(places * head_dim));
  map.numbers.resize(static_cast<std::size_t>(3 * head_dim));
  for (int channel = 0; channel < head_dim; ++channel) {
    double largest = 1e-30, centre = 0.0;
    for (int place = 0; place < places; ++place) largest = (std::max)(largest, std::abs(static_cast<double>(value(place, channel))));
    const double scale = static_cast<double>(static_cast<float>(largest / 32512.0));
    for (int place = 0; place < places; ++place) {
      const int integer = static_cast<int>(std::lround(static_cast<double>(value(place, channel)) / scale));
      integers[static_cast<std::size_t>(place * head_dim + channel)] = integer;
      // Codes are mid-rise: a plane of w bits is centred at (2^w - 1) / 2.
      centre += 0.5 * static_cast<double>(integer) * ((1 << widths[static_cast<std::size_t>(place / kCodeUnit)]) - 1);
    }
    float* numbers = map.numbers.data() + channel;
    numbers[0] = static_cast<float>(scale);
    numbers[head_dim] = static_cast<float>(-centre * scale);
    numbers[2 * head_dim] = mean.empty() ? 0.0F : mean[static_cast<std::size_t>(channel)];
  }
  const auto word = [&](int place, int channel, bool low) {
    std::uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) {
      const int integer = integers[static_cast<std::size_t>((place + i) * head_dim + channel)];
      // The high byte is that of the integer + 128, the low one what it lacks: signed about it.
      bytes |= (static_cast<std::uint32_t>(low ? integer : (integer + 128) >> 8) & 0xffU) << (8 * i);
    }
    return bytes;
  };
  for (int unit = 0; unit < units; ++unit) {
    for (int block = 0; block < head_dim / 8; ++block) {
      for (int lane = 0; lane < 32; ++lane) {
        const int channel = 8 * block + lane / 4, first = kCodeUnit * unit + 4 * (lane % 4);
        for (const bool low : {false, true}) map.operands.push_back({word(first, channel, low), word(first + 16, channel, low)});
      }
    }
  }
  return map;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
