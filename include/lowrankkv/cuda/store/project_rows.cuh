// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/project_rows.cuh  Rows become coefficients: products with the encoders on
/// tensor cores.
///
/// Rows of 16-bit numbers, and maps of the same type, are operands as they are; sums are f32. f32
/// maps are split into two tf32 numbers; 16-bit rows are exact in tf32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/store/plain_tiles.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief How a block gets the rows that it projects. words: operands straight from the tiles of
/// the source. staged: through shared memory, in 16 bits; for rows that an order chooses. wide:
/// through shared memory as f32; for maps of another type than the rows. words and staged give the
/// same bits, so the choice between them may depend on the batch.
enum class RowPath : std::uint8_t { words, staged, wide };

namespace detail {

/// Calls f with a path as a compile-time constant.
template <class Function>
void with_path(RowPath path, Function&& function) {
  if (path == RowPath::words) {
    function(std::integral_constant<RowPath, RowPath::words>{});
  } else if (path == RowPath::staged) {
    function(std::integral_constant<RowPath, RowPath::staged>{});
  } else {
    function(std::integral_constant<RowPath, RowPath::wide>{});
  }
}

/// Elements from a row of f32 to the next in shared memory: no two lanes of a fragment hit one
/// bank.
__host__ __device__ constexpr int row_stride(int head_dim) { return head_dim + 4; }

/// Shared memory for the rows of a block, in bytes.
__host__ __device__ constexpr int path_bytes(RowPath path, int head_dim) {
  return path == RowPath::words ? 0
                                : kStoreRows * (path == RowPath::staged ? 2 * plain_stride(head_dim)
                                                                        : 4 * row_stride(head_dim));
}

/// Projects rows of f32 in shared memory:
///   coefficients = rows encoder - offset, in steps (PartMaps::to_steps()),
/// with coefficients [16 row_blocks, rank], rows [16 row_blocks, head_dim], encoder [head_dim,
/// rank]. A warp computes 16 coefficients of all rows at a time.
/// @tparam exact_rows  rows are 16-bit numbers, which are exact in tf32; other rows are split into
/// two tf32 numbers
/// @param put  put(row, channel, first, second) takes two neighbouring coefficients; channels go up
/// to the next multiple of 16, and are zeros beyond the rank
template <int row_blocks, bool exact_rows, class Put>
__device__ void project_rows(const float* rows, int head_dim, const PartMaps& maps, Put&& put) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const int stride = row_stride(head_dim), steps = head_dim / 8;
  // 16-bit maps are exact in tf32; others are split into two numbers.
  const bool exact = maps.encoder.type != DType::f32;
  for (int block = warp; block < (maps.rank + 15) / 16; block += kStoreThreads / 32) {
    float sums[row_blocks][2][4] = {};
#pragma unroll 2
    for (int k = 0; k < steps; ++k) {
      const float4 map = maps.encoder.quad((block * steps + k) * 32 + lane);
      const float4 rest = {beyond_tf32(map.x), beyond_tf32(map.y), beyond_tf32(map.z),
                           beyond_tf32(map.w)};
#pragma unroll
      for (int m = 0; m < row_blocks; ++m) {
        const float* own = rows + (16 * m + g) * stride + 8 * k + 2 * t;
        const float4 a = {own[0], own[8 * stride], own[1], own[8 * stride + 1]};
        if constexpr (!exact_rows) {
          const float4 a_rest = {beyond_tf32(a.x), beyond_tf32(a.y), beyond_tf32(a.z),
                                 beyond_tf32(a.w)};
          mma_tf32(sums[m][0], a_rest, map.x, map.y);
          mma_tf32(sums[m][1], a_rest, map.z, map.w);
        }
        if (!exact) {
          mma_tf32(sums[m][0], a, rest.x, rest.y);
          mma_tf32(sums[m][1], a, rest.z, rest.w);
        }
        mma_tf32(sums[m][0], a, map.x, map.y);
        mma_tf32(sums[m][1], a, map.z, map.w);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int channel = 16 * block + 8 * n + 2 * t;
      const float2 one = maps.to_steps(channel), two = maps.to_steps(channel + 1);
#pragma unroll
      for (int m = 0; m < row_blocks; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          put(16 * m + g + 8 * half, channel, fmaf(sums[m][n][2 * half], one.x, one.y),
              fmaf(sums[m][n][2 * half + 1], two.x, two.y));
      }
    }
  }
}

/// A lane's words of 16 values, as a tile holds them (channels x rows), transposed to an operand
/// that is rows x channels.
__device__ __forceinline__ uint4 values_as_rows(const uint4& a) {
  return {transposed(a.x), transposed(a.z), transposed(a.y), transposed(a.w)};
}

/// project_rows() for rows of 16-bit numbers and maps of their type: `steps` steps of 16 rows, of
/// `num_parts` parts. Products are exact. A warp has 16 rows, and computes a share of their
/// coefficients.
/// @tparam from_tiles  words of values are as tiles hold them
/// @param words  words(part, step)(unit): a lane's operand
/// @param put    put(part, row, channel, first, second)
template <DType type, bool from_tiles, class Words, class Put>
__device__ __forceinline__ void project_steps(const HeadMaps& both, int first_part, int num_parts,
                                              int steps, int head_dim, Words&& words, Put&& put) {
  constexpr int kUnits = 8;
  const int shares = steps % 4 == 0 ? 2 : 3;  // so that the last round leaves few warps idle
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4, units = head_dim / kPlainUnit;
  for (int item = warp; item < num_parts * steps * shares; item += kStoreThreads / 32) {
    const int index = item / shares, share = item - index * shares;
    const bool second = index >= steps;
    const Part part = static_cast<Part>(first_part + (second ? 1 : 0));
    const int step = second ? index - steps : index;
    const PartMaps& maps = both.of(part);
    if (16 * share >= maps.rank) continue;
    uint4 a[kUnits];
    const auto own_words = words(part, step);
    const auto load = [&](int first_unit) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
        a[i] = own_words(min(first_unit + i, units - 1));  // all loads are in flight before a use
      if constexpr (from_tiles) {
        if (part == Part::key) return;
#pragma unroll
        for (int i = 0; i < kUnits; ++i) a[i] = values_as_rows(a[i]);
      }
    };
    if (units <= kUnits) load(0);
    for (int block = share; block < (maps.rank + 15) / 16; block += shares) {
      // Even units and odd ones apart: chains of dependent products are shorter.
      float sums[2][2][4] = {};
      for (int first_unit = 0; first_unit < units; first_unit += kUnits) {
        if (units > kUnits) load(first_unit);
        const uint2* map = static_cast<const uint2*>(maps.encoder.data) +
                           (block * 2 * units + 2 * first_unit) * 32 + lane;
        const int there = units - first_unit;
        const auto multiply = [&](auto is_whole) {
          constexpr bool whole = decltype(is_whole)::value;
          uint2 own[kUnits][2];
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
              own[i][j] = whole || i < there ? __ldg(map + 64 * i + 32 * j) : uint2{0, 0};
          }
#pragma unroll
          for (int i = 0; i < kUnits; ++i) {
            if (!whole && i >= there) break;
            mma_plain<type>(sums[i % 2][0], a[i], own[i][0].x, own[i][1].x);
            mma_plain<type>(sums[i % 2][1], a[i], own[i][0].y, own[i][1].y);
          }
        };
        if (there >= kUnits)
          multiply(std::true_type{});
        else
          multiply(std::false_type{});
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int channel = 16 * block + 8 * n + 2 * t;
        const float2 one = maps.to_steps(channel), two = maps.to_steps(channel + 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          put(part, 16 * step + g + 8 * half, channel,
              fmaf(sums[0][n][2 * half] + sums[1][n][2 * half], one.x, one.y),
              fmaf(sums[0][n][2 * half + 1] + sums[1][n][2 * half + 1], two.x, two.y));
        }
      }
    }
  }
}

/// Projects rows [begin, end) of a block. Row r is row from + r of the source, or chosen[from + r].
/// All threads of the block call it; the caller synchronises.
/// @param first_part, num_parts  part first_part and, if num_parts is 2, the next
/// @param memory  path_bytes() bytes of shared memory
/// @param put     put(part, row, channel, first, second)
template <RowPath path, class Put>
__device__ __forceinline__ void project_block(const SourceRows& source, DType type,
                                              const std::int32_t* chosen, int from, int begin,
                                              int end, int head_dim, const HeadMaps& maps,
                                              int first_part, int num_parts, std::uint8_t* memory,
                                              Put&& put) {
  const auto within = [&](Part part, int row, int channel, float first, float second) {
    if (row >= begin && row < end) put(part, row, channel, first, second);
  };
  if constexpr (path == RowPath::words) {
    const int first_step = source.step_of(from + begin),
              steps = source.step_of(from + end - 1) - first_step + 1,
              shift = first_step * kPlainRows - source.offset() - from;
    const auto words = [&](Part part, int step) {
      return [own = source.words(part, first_step + step)](int unit) { return own[32 * unit]; };
    };
    const auto shifted = [&](Part part, int row, int channel, float first, float second) {
      within(part, row + shift, channel, first, second);
    };
    if (type == DType::f16)
      project_steps<DType::f16, true>(maps, first_part, num_parts, steps, head_dim, words, shifted);
    else
      project_steps<DType::bf16, true>(maps, first_part, num_parts, steps, head_dim, words,
                                       shifted);
  } else {
    for (int index = first_part; index < first_part + num_parts; ++index) {
      const Part part = static_cast<Part>(index);
      if (index > first_part) __syncthreads();
      if constexpr (path == RowPath::staged) {
        std::uint16_t* rows = reinterpret_cast<std::uint16_t*>(memory);
        const int stride = plain_stride(head_dim);
        source.load(part, chosen, from, begin, end, head_dim, rows, stride);
        __syncthreads();
        const auto words = [&](Part, int step) {
          return [own = rows + kPlainRows * step * stride, stride](int unit) {
            return plain_words(Part::key, own, stride, unit);
          };
        };
        if (type == DType::f16)
          project_steps<DType::f16, false>(maps, index, 1, kStoreRows / kPlainRows, head_dim, words,
                                           within);
        else
          project_steps<DType::bf16, false>(maps, index, 1, kStoreRows / kPlainRows, head_dim,
                                            words, within);
      } else {
        float* rows = reinterpret_cast<float*>(memory);
        source.load(part, chosen, from, begin, end, head_dim, rows, row_stride(head_dim));
        __syncthreads();
        project_rows<kStoreRows / 16, true>(rows, head_dim, maps.of(part),
                                            [&](int row, int channel, float first, float second) {
                                              within(part, row, channel, first, second);
                                            });
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
