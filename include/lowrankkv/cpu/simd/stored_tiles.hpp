// SPDX-License-Identifier: Apache-2.0
/// @file cpu/simd/stored_tiles.hpp  Where the keys and values of a block of rows are, for kernels
/// that read them in place: pieces of key lines, and rows of values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu::simd {

/// @brief Number types that the kernels read.
enum class Stored : unsigned char { f32, f16, bf16 };
/// @brief How many there are.
inline constexpr int kStoredTypes = 3;

/// @brief The kernels' name of an element type.
constexpr Stored stored_as(DType type) {
  return type == DType::f32 ? Stored::f32 : type == DType::f16 ? Stored::f16 : Stored::bf16;
}
/// @brief Size of a number in bytes.
constexpr std::size_t bytes_of(Stored type) { return type == Stored::f32 ? 4 : 2; }

/// Keys are read in pieces of at most so many rows.
inline constexpr int kPieceRows = 16;
/// The most rows whose weights are computed together: a block.
inline constexpr int kBlockRows = 256;
/// Bytes of keys, and of values, that are fetched ahead of those being read, into the second cache:
/// in the first, pieces and what follows them would be in each other's way
/// (bench/results/attend_cpu_kernels.txt).
inline constexpr std::ptrdiff_t kBytesAhead = 8192;
/// Pieces of keys that some kernels read together: what is fetched for one of them is none of
/// these.
inline constexpr int kPiecesTogether = 4;
/// @brief The rows of `row_bytes` bytes that kBytesAhead holds, in whole groups of pieces.
constexpr std::int32_t rows_ahead(std::ptrdiff_t row_bytes) {
  constexpr int group = kPiecesTogether * kPieceRows;
  const auto rows = static_cast<std::int32_t>((kBytesAhead + row_bytes - 1) / row_bytes);
  return (rows + group - 1) / group * group;
}

/// @brief At most kPieceRows consecutive rows of keys, channel-major.
struct KeyPiece {
  const std::byte* first = nullptr;  ///< channel 0 of the first row
  const std::byte* next = nullptr;   ///< where that of a row further on is, to be fetched ahead
  int count = 0;                     ///< rows
  int column = 0;                    ///< of the first row's logit
  /// Channels of which kPieceRows numbers lie in the block that holds the rows: these are read
  /// whole, the others number by number.
  int whole_channels = 0;
};

/// @brief Keys of at most kBlockRows rows. Pieces are in the order of their rows.
struct KeyBlock {
  Stored type = Stored::f32;
  int channels = 0;
  std::ptrdiff_t channel_bytes = 0;  ///< from a channel to the next
  const KeyPiece* pieces = nullptr;
  int num_pieces = 0;
};

/// @brief Consecutive rows of values.
struct ValueRun {
  const std::byte* first = nullptr;
  const std::byte* next = nullptr;  ///< where a row further on is, to be fetched ahead
  int count = 0;                    ///< rows
};

/// @brief Values of rows: of attention at most kBlockRows. Of each row `width` numbers can be read,
/// a multiple of kPieceRows.
struct ValueBlock {
  Stored type = Stored::f32;
  int width = 0;
  std::ptrdiff_t row_bytes = 0;  ///< from a row of a run to the next
  const ValueRun* runs = nullptr;
  int num_runs = 0;
  int count = 0;  ///< rows of all runs
};

/// @brief Pairs of rows of numbers that are rotated together: column i of pair p by the sum of two
/// angles, one of the pair and one of the pair and the column.
struct RotatedPairs {
  float* first = nullptr;        ///< of pair 0, column 0
  std::ptrdiff_t to_second = 0;  ///< from a number to the one that it is rotated with
  std::ptrdiff_t stride = 0;     ///< from a pair to the next
  int pairs = 0;
  int count = 0;                                     ///< columns
  const float *cosines = nullptr, *sines = nullptr;  ///< [pairs]
  /// [pairs, line_stride], of `count` columns rounded up to kPieceRows
  const float *line_cosines = nullptr, *line_sines = nullptr;
  std::ptrdiff_t line_stride = 0;
};

}  // namespace cpu::simd
LOWRANKKV_NAMESPACE_END
