// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/code_layout.hpp  How quantised keys (or values) of one KV head lie in a block.
/// No Eigen, no CUDA.
///
/// A block of R rows holds, in this order: for each scale group a line of R scales; for each
/// channel of b > 0 bits a line of R codes of b bits, padded to a whole byte. Code q of b bits
/// stands for (q - 2^(b-1) + 1/2) scale: uniform mid-rise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/quantizer/bit_packing.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief How a row's scales are chosen and stored.
enum class ScaleKind : std::uint8_t {
  /// One f16 scale per group: the step at which the largest magnitude just fits, rounded up, so
  /// that nothing is clipped.
  largest_f16,
  /// One scale per row, in 8 bits, 16 steps per octave, 2^-8 to 2^8: of kTriedGains around its norm
  /// over the calibrated norm, the one that leaves the least squared error. Values outside are
  /// clipped.
  norm_log8
};

/// @brief How many gains of a row are tried (ScaleKind::norm_log8). On sample rows of SmolLM2-135M,
/// with equal steps, they leave 9 % (a ratio of 0.10) and 13 % (0.15) less squared error than the
/// norm alone.
inline constexpr int kTriedGains = 9;
/// @brief The i-th of them, relative to the norm, in sixteenths of an octave: 0, -2, 2, ... 8.
LOWRANKKV_HOST_DEVICE constexpr int gain_offset(int i) { return i % 2 == 0 ? i : -i - 1; }

/// @brief Channels [first, first + count) share one scale per row.
struct ScaleGroup {
  int first = 0;
  int count = 0;
};

/// @brief The layout of one head's keys or values.
struct CodeLayout {
  int rank = 0;
  std::vector<std::uint8_t> bits;  ///< per channel, 0 to 8
  std::vector<ScaleGroup> groups;  ///< cover the channels that have bits
  ScaleKind scale = ScaleKind::largest_f16;
  /// norm_log8: the calibrated norm of a row's weighted coefficients, in steps.
  float reference_norm = 1.0F;
  /// norm_log8: what a coefficient in steps is multiplied by in that norm, by its bits.
  std::array<float, 9> norm_weights{1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};

  int scale_bits() const { return scale == ScaleKind::largest_f16 ? 16 : 8; }
  std::int64_t row_bits() const {
    std::int64_t sum = static_cast<std::int64_t>(groups.size()) * scale_bits();
    for (const std::uint8_t width : bits) sum += width;
    return sum;
  }
  /// @brief Byte at which the scales of a group begin in a block of `rows` rows.
  std::size_t scale_line(std::size_t group, int rows) const {
    return group * static_cast<std::size_t>(rows) * static_cast<std::size_t>(scale_bits()) / 8;
  }
  /// @brief Byte at which the first channel's codes begin. The line of a channel has
  /// packed_bytes(rows, bits) bytes.
  std::size_t first_code_line(int rows) const { return scale_line(groups.size(), rows); }
  /// @brief Bytes of a block of `rows` rows.
  std::size_t block_bytes(int rows) const {
    std::size_t bytes = first_code_line(rows);
    for (const std::uint8_t width : bits) bytes += packed_bytes(rows, width);
    return bytes;
  }
};

LOWRANKKV_NAMESPACE_END
