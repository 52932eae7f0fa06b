// SPDX-License-Identifier: Apache-2.0
/// @file cpu/quantizer/unpack_codes.hpp  Unpacks codes to f32, a register at a time: the inner loop
/// of reading quantised rows.
///
/// Eight codes of b bits fill b bytes. One 64-bit load and one shift move them to bit 0, wherever
/// in a byte they begin. Each half holds four codes, 4 b <= 32 bits, and is broadcast so that every
/// f32 lane has the 32 bits that contain its code. A mask leaves the code in place. The conversion
/// to f32 is exact (8 significant bits), and so is the factor 2^-(bit position). Only (code + 1/2 -
/// 2^(b-1)) scale rounds, once: the result equals the plain formula of code_layout.hpp bit for bit.
#pragma once

#include <Eigen/Core>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "lowrankkv/cpu/product.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

static_assert(std::endian::native == std::endian::little,
              "lowrankkv: codes are read as little-endian words");

/// Rows that are unpacked together. Their scales are loaded, and their codes in a line fit 64
/// bytes.
inline constexpr int kUnpackRows = 64;
/// @brief Eigen's widest f32 register for the target of the including program.
using Packet = Eigen::internal::packet_traits<float>::type;
/// @brief f32 values in a Packet.
inline constexpr int kLanes = Eigen::internal::packet_traits<float>::size;
static_assert(kPadding % kLanes == 0);

namespace detail {

/// Constants of 16 lanes for their 32 bits. The pattern repeats every four lanes.
template <int bits>
struct CodeLanes {
  std::array<std::int32_t, 16> mask{}, flip{};
  std::array<float, 16> factor{}, offset{};
  constexpr CodeLanes() {
    for (std::size_t lane = 0; lane < 16; ++lane) {
      const int place = static_cast<int>(lane % 4) * bits;
      mask[lane] = static_cast<std::int32_t>(((std::uint32_t{1} << bits) - 1U) << place);
      factor[lane] = 1.0F / static_cast<float>(std::uint32_t{1} << place);
      offset[lane] = 0.5F - static_cast<float>(1U << (bits - 1));
      // The last of four 8-bit codes holds the sign bit. With its top bit flipped, it reads as
      // code - 128.
      if (place + bits < 32) continue;
      flip[lane] = static_cast<std::int32_t>(std::uint32_t{1} << 31);
      offset[lane] = 0.5F;
    }
  }
};

/// target[i] = (code i + 1/2 - 2^(b-1)) scales[i] for i < count. Each element of `halves` holds
/// four codes as bits; its type is float only because ploadquad spreads floats. Halves and scales
/// are read in whole packets.
template <int bits>
inline void unpack_halves(const float* halves, int count, const float* scales, float* target) {
  using namespace Eigen::internal;  // NOLINT: packet functions
  if constexpr (kLanes % 4 == 0) {
    static constexpr CodeLanes<bits> lanes;
    const auto unpacked = [&](auto spread, int i) {
      using Integers = typename unpacket_traits<decltype(spread)>::integer_packet;
      Integers code = preinterpret<Integers>(spread);
      if constexpr (bits == 8) code = pxor(code, ploadu<Integers>(lanes.flip.data()));
      const Packet value = pcast<Integers, Packet>(pand(code, ploadu<Integers>(lanes.mask.data())));
      return pmul(
          pmadd(value, ploadu<Packet>(lanes.factor.data()), ploadu<Packet>(lanes.offset.data())),
          ploadu<Packet>(scales + i));
    };
    int i = 0;
    for (; i + kLanes <= count; i += kLanes)
      pstoreu(target + i, unpacked(ploadquad<Packet>(halves + i / 4), i));
    if (i == count) return;
    float rest[kLanes];
    pstoreu(rest, unpacked(ploadquad<Packet>(halves + i / 4), i));
    // Copies of fixed sizes: a call to memcpy for every line would cost as much as its codes.
    const float* from = rest;
    for (const int size : {8, 4, 2, 1}) {
      if (size >= kLanes || ((count - i) & size) == 0) continue;
      for (int lane = 0; lane < size; ++lane) target[i + lane] = from[lane];
      from += size;
      i += size;
    }
  } else {
    constexpr float offset = 0.5F - static_cast<float>(1U << (bits - 1));
    for (int i = 0; i < count; ++i) {
      const std::uint32_t code =
          std::bit_cast<std::uint32_t>(halves[i / 4]) >> (i % 4 * bits) & ((1U << bits) - 1U);
      target[i] = (static_cast<float>(code) + offset) * scales[i];
    }
  }
}

}  // namespace detail

/// @brief Consecutive lines of codes of one width in a block.
struct CodeLines {
  const std::byte* data = nullptr;  ///< the first line
  std::size_t bytes = 0;            ///< bytes of a line
  int count = 0;                    ///< number of lines, 1 to kPadding
  const std::byte* end = nullptr;   ///< end of the block: nothing from there on is read
};

namespace detail {

template <int bits>
inline void unpack_width(const CodeLines& lines, int first, int count, const float* scales,
                         float* target, std::ptrdiff_t stride, int written) {
  const std::int64_t bit = std::int64_t{first} * bits;
  const int shift = static_cast<int>(bit % 8);
  const int groups = (count + 15) / 16 * 2;  // groups of eight codes, rounded up to whole packets
  // Store all lines' words before loading any packets: a packet load of words that two recent
  // stores wrote stalls until they complete.
  float halves[kPadding][kUnpackRows / 4];
  for (int line = 0; line < lines.count; ++line) {
    const std::byte* at = lines.data + static_cast<std::size_t>(line) * lines.bytes + bit / 8;
    std::byte copy[kUnpackRows];
    if (lines.end - at < (groups - 1) * bits + 8) {
      std::memset(copy, 0, sizeof copy);
      std::memcpy(copy, at, (static_cast<std::size_t>(shift + count * bits) + 7) / 8);
      at = copy;
    }
    for (int group = 0; group < groups; ++group) {
      std::uint64_t word;
      std::memcpy(&word, at + group * bits, sizeof word);
      word >>= shift;
      word = (word & 0xffffffffU) | word >> (4 * bits) << 32;
      std::memcpy(&halves[line][2 * group], &word, sizeof word);
    }
  }
  for (int line = 0; line < lines.count; ++line)
    unpack_halves<bits>(halves[line], written, scales, target + line * stride);
}

}  // namespace detail

/// @brief Unpacks codes [first, first + count) of lines of `bits` bits: row i of line j goes to
/// target[j stride + i] as (code + 1/2 - 2^(bits-1)) scales[i].
/// @param bits    1 to 8
/// @param count   1 to kUnpackRows
/// @param scales  [count rounded up to kPadding]
/// @param whole   true: elements up to the next multiple of kPadding are written too, with
/// unspecified values; false: nothing else is written
inline void unpack_lines(int bits, const CodeLines& lines, int first, int count,
                         const float* scales, float* target, std::ptrdiff_t stride, bool whole) {
  const int written = whole ? padded(count) : count;
  switch (bits) {
    case 1:
      return detail::unpack_width<1>(lines, first, count, scales, target, stride, written);
    case 2:
      return detail::unpack_width<2>(lines, first, count, scales, target, stride, written);
    case 3:
      return detail::unpack_width<3>(lines, first, count, scales, target, stride, written);
    case 4:
      return detail::unpack_width<4>(lines, first, count, scales, target, stride, written);
    case 5:
      return detail::unpack_width<5>(lines, first, count, scales, target, stride, written);
    case 6:
      return detail::unpack_width<6>(lines, first, count, scales, target, stride, written);
    case 7:
      return detail::unpack_width<7>(lines, first, count, scales, target, stride, written);
    default:
      return detail::unpack_width<8>(lines, first, count, scales, target, stride, written);
  }
}

namespace detail {

/// Transposes the first kLanes rows of kLanes lines, and stores the first `rows` rows of the
/// result.
template <class P>
inline void transpose_square(P, const float* lines, float* target, std::ptrdiff_t stride,
                             int rows) {
  using namespace Eigen::internal;  // NOLINT: packet functions
  PacketBlock<P, kLanes> square;
  for (int i = 0; i < kLanes; ++i) square.packet[i] = ploadu<P>(lines + i * kUnpackRows);
  ptranspose(square);
  if (rows >= kLanes) {
    for (int i = 0; i < kLanes; ++i) pstoreu(target + i * stride, square.packet[i]);
  } else {
    for (int i = 0; i < rows; ++i) pstoreu(target + i * stride, square.packet[i]);
  }
}

}  // namespace detail

/// @brief target [count, width] <- the transpose of lines [width, kUnpackRows]. Rows are read in
/// whole packets.
inline void transpose_lines(const float* lines, int width, int count, float* target,
                            std::ptrdiff_t stride) {
  int column = 0;
  for (; column + kLanes <= width; column += kLanes) {
    for (int row = 0; row < count; row += kLanes) {
      detail::transpose_square(Eigen::internal::pset1<Packet>(0.0F),
                               lines + column * kUnpackRows + row, target + row * stride + column,
                               stride, count - row);
    }
  }
  for (int row = 0; row < count; ++row) {
    for (int rest = column; rest < width; ++rest)
      target[row * stride + rest] = lines[rest * kUnpackRows + row];
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
