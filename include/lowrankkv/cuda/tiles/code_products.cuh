// SPDX-License-Identifier: Apache-2.0
/// @file cuda/tiles/code_products.cuh  Tensor-core products of a tile's packed codes: with queries
/// for keys, with softmax weights for values.
///
/// One AND turns four codes into one operand register. A code at bit p of its byte is scaled by 2^p
/// (tile_layout.cuh). The AND keeps the lower bits of the byte, which hold other codes; codes at
/// the bottom of a byte need no correction. The sums of those lower codes are subtracted. The
/// differences equal the products of single codes exactly, as long as the sums are integers.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/tiles/tile_layout.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// A compile-time integer that converts to int.
template <int number>
struct Constant {
  static constexpr int value = number;
  __host__ __device__ constexpr operator int() const { return number; }
};

/// Counts of a head's key units, or value units, by width: 8, 4, 2 and 1 bits, in the order in
/// which the units lie in a tile.
template <int n8, int n4, int n2, int n1>
struct Pattern {
  static constexpr int units = n8 + n4 + n2 + n1;
  __host__ __device__ static constexpr int width(int unit) {
    return unit < n8 ? 8 : unit < n8 + n4 ? 4 : unit < n8 + n4 + n2 ? 2 : 1;
  }
  __host__ __device__ static constexpr int count(int bits) {
    return bits == 8 ? n8 : bits == 4 ? n4 : bits == 2 ? n2 : n1;
  }
};

/// Calls f with the Pattern that `packed` encodes (code_pattern()), if it is one of the patterns
/// compiled on their own. Those take a third fewer instructions per tile than loops over arbitrary
/// units.
/// @return whether f was called
template <class Function>
__device__ __forceinline__ bool with_pattern(int packed, Function&& function) {
  switch (packed) {
    case code_pattern(0, 1, 3, 0):
      function(Pattern<0, 1, 3, 0>{});
      return true;
    case code_pattern(0, 0, 4, 0):
      function(Pattern<0, 0, 4, 0>{});
      return true;
    case code_pattern(0, 2, 2, 0):
      function(Pattern<0, 2, 2, 0>{});
      return true;
    case code_pattern(0, 0, 3, 0):
      function(Pattern<0, 0, 3, 0>{});
      return true;
    case code_pattern(0, 1, 2, 0):
      function(Pattern<0, 1, 2, 0>{});
      return true;
    case code_pattern(0, 0, 2, 0):
      function(Pattern<0, 0, 2, 0>{});
      return true;
    case code_pattern(0, 1, 1, 0):
      function(Pattern<0, 1, 1, 0>{});
      return true;
    case code_pattern(0, 4, 0, 0):
      function(Pattern<0, 4, 0, 0>{});
      return true;
    default:
      return false;
  }
}

/// Adds the products of `units` key units of one width to logits[b][m][r]: row 16 m + 8 r + lane /
/// 4, column lane % 4 of column block b. Advances `unit` and `query` past these units.
template <int bits, int column_blocks, class Count>
__device__ __forceinline__ void key_products(const std::uint8_t*& unit, Count units,
                                             const uint2*& query,
                                             const float (&scale)[column_blocks],
                                             float (&logits)[column_blocks][4][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (units == 0) return;
  int c[column_blocks][4][4];
  const auto add = [&](auto first) {
    uint2 b[column_blocks];
#pragma unroll
    for (int block = 0; block < column_blocks; ++block) b[block] = query[block * 32];
    uint4 words[bits == 8 ? 4 : bits == 4 ? 2 : 1];
    if constexpr (bits == 1) {
      words[0] = {reinterpret_cast<const uint2*>(unit)[lane].x,
                  reinterpret_cast<const uint2*>(unit)[lane].y, 0, 0};
    } else {
#pragma unroll
      for (int j = 0; j < bits / 2; ++j)
        words[j] = reinterpret_cast<const uint4*>(unit)[32 * j + lane];
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      uint4 a;
      if constexpr (bits == 8) {
        a = words[m];
      } else if constexpr (bits == 4) {
        const std::uint32_t mask = m % 2 == 0 ? 0x0f0f0f0fU : ~0U;
        a = {words[m / 2].x & mask, words[m / 2].y & mask, words[m / 2].z & mask,
             words[m / 2].w & mask};
      } else if constexpr (bits == 2) {
        const std::uint32_t mask = 0x01010101U * ((4U << (2 * m)) - 1);
        a = {words[0].x & mask, words[0].y & mask, words[0].z & mask, words[0].w & mask};
      } else {
        const std::uint32_t low = 0x01010101U * ((2U << (2 * m)) - 1),
                            high = 0x01010101U * ((4U << (2 * m)) - 1);
        a = {words[0].x & low, words[0].x & high, words[0].y & low, words[0].y & high};
      }
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        if constexpr (decltype(first)::value == 1)
          mma_codes_new(c[block][m], a.x, a.y, a.z, a.w, b[block].x, b[block].y);
        else
          mma_codes(c[block][m], a.x, a.y, a.z, a.w, b[block].x, b[block].y);
      }
    }
    unit += code_unit_bytes(bits);
    query += 32 * column_blocks;
  };
  add(Constant<1>{});
#pragma unroll
  for (int i = 1; i < units; ++i) add(Constant<0>{});
#pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    // Of masked bytes. They may wrap beyond 2^31; their differences are right all the same.
    std::uint32_t sums[4][2];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        sums[m][r] = static_cast<std::uint32_t>(c[block][m][2 * r]) * 256U +
                     static_cast<std::uint32_t>(c[block][m][2 * r + 1]);
      const int shift = bits == 8 ? 0 : bits == 4 ? 4 * (m % 2) : 2 * m;
      const float factor = 1.0F / static_cast<float>(1 << shift);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t below =
            bits == 8 || (bits == 4 && m % 2 == 0) || (m == 0 && (bits == 2 || r == 0)) ? 0U
            : bits != 1 ? sums[m - 1][r]
            : r == 1    ? sums[m][0]
                        : sums[m - 1][1];
        logits[block][m][r] =
            fmaf(static_cast<float>(static_cast<int>(sums[m][r] - below)),
                 (bits == 1 && r == 1 ? 0.5F : 1.0F) * factor * scale[block], logits[block][m][r]);
      }
    }
  }
}

/// Adds weights x one value unit to out[b][half][r]: channel 16 half + 8 r + lane / 4. A channel at
/// bit p of its byte is scaled by 2^p. For 2 and 4 bits the sums still contain the channels below
/// in the byte (channel_below()): the reader of the sums subtracts them.
template <int column_blocks>
__device__ __forceinline__ void value_products(const std::uint8_t* unit, int bits,
                                               const std::uint32_t (&weights)[column_blocks][4],
                                               const float (&scale)[column_blocks],
                                               float (&out)[column_blocks][2][2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint4* words = reinterpret_cast<const uint4*>(unit) + lane;
  const auto add = [&](int block, int half, const int(&c)[4], float factor) {
    out[block][half][0] =
        fmaf(static_cast<float>(c[0] * 256 + c[1]), factor * scale[block], out[block][half][0]);
    out[block][half][1] =
        fmaf(static_cast<float>(c[2] * 256 + c[3]), factor * scale[block], out[block][half][1]);
  };
  if (bits == 2) {
    const uint4 w = words[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t low = 0x01010101U * ((4U << (4 * half)) - 1),
                          high = 0x01010101U * ((16U << (4 * half)) - 1);
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x & low, w.x & high, w.y & low, w.y & high, weights[block][0],
                      weights[block][1]);
        mma_codes(c, w.z & low, w.z & high, w.w & low, w.w & high, weights[block][2],
                  weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else if (bits == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = words[32 * half];
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x & 0x0f0f0f0fU, w.x, w.y & 0x0f0f0f0fU, w.y, weights[block][0],
                      weights[block][1]);
        mma_codes(c, w.z & 0x0f0f0f0fU, w.z, w.w & 0x0f0f0f0fU, w.w, weights[block][2],
                  weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else if (bits == 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = words[64 * half], x = words[64 * half + 32];
#pragma unroll
      for (int block = 0; block < column_blocks; ++block) {
        int c[4];
        mma_codes_new(c, w.x, w.y, w.z, w.w, weights[block][0], weights[block][1]);
        mma_codes(c, x.x, x.y, x.z, x.w, weights[block][2], weights[block][3]);
        add(block, half, c, 1.0F);
      }
    }
  } else {
    const uint2 w = reinterpret_cast<const uint2*>(unit)[lane];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const std::uint32_t low = 0x01010101U << (4 * step + 2 * half),
                            high = 0x02020202U << (4 * step + 2 * half);
#pragma unroll
        for (int block = 0; block < column_blocks; ++block) {
          int c[4];
          mma_codes_new(c, w.x & low, w.x & high, w.y & low, w.y & high, weights[block][2 * step],
                        weights[block][2 * step + 1]);
          add(block, half, c, step == 0 ? 1.0F : 0.0625F);
        }
      }
    }
  }
}

/// Calls f(0), ..., f(count - 1), each index a Constant.
template <int count, class Function>
__device__ __forceinline__ void for_each_unit(Function&& function) {
  if constexpr (count > 0) {
    for_each_unit<count - 1>(function);
    function(Constant<count - 1>{});
  }
}

/// Rounds two softmax weights to 16-bit integers and returns them as B operands of mma_codes: high
/// bytes in even columns, low bytes in odd columns.
/// @param to_integer  32512 over the largest weight of the tile
__device__ __forceinline__ std::uint32_t weight_bytes(float first, float second, float to_integer) {
  // Adding 1.5 x 2^23 leaves the rounded integer in the low mantissa bits. Adding 128 more makes
  // the low byte signed around the high byte.
  const std::uint32_t y0 = __float_as_uint(fmaf(first, to_integer, 12582912.0F + 128.0F)),
                      y1 = __float_as_uint(fmaf(second, to_integer, 12582912.0F + 128.0F));
  return transposed(__byte_perm(y0, y1, 0x4051) ^ 0x80800000U);
}

}  // namespace detail

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
