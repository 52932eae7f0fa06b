// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/jacobi.cuh  One-sided Jacobi orthogonalisation of rows in shared memory, eight
/// rows against eight rows at a time.
///
/// Rows are in blocks of eight. In a sweep, every block meets every other block once. For two
/// blocks, a round computes the 16 x 16 products of their rows (tensor cores, three tf32 products
/// for one f32 product). One warp finds, in registers, the rotations that make the products
/// diagonal in one pass over the pairs. The rotations are then applied to the rows, again on tensor
/// cores. All sums are f32. Rows become orthogonal to 1e-5 of their lengths, short rows as well as
/// long ones. Products lose precision only in what a rotation changes, not in the rows: D = (Q -
/// 1)' X is added to X.
///
/// Cost for n rows of d numbers: seven to ten sweeps of n / 8 - 1 rounds. Lower bound of a round:
/// eight rotations, each of which waits for the one before (170 cycles of latency: three lane
/// exchanges, two roots), and three passes of the rows through shared memory (12 n d / 128 cycles).
/// docs/log/2026-11-24-gpu-sketches.md has measured times.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Threads of a thread block that orthogonalises rows.
inline constexpr int kSketchThreads = 384;
inline constexpr int kMaxSweeps = 20;  ///< of rotations; half as many are enough for most
/// Rows of a smaller squared length, relative to that of the longest row, are what rounding leaves
/// of linearly dependent rows, and have no direction.
inline constexpr float kNothing = 1e-11F;
/// Rows whose cosine is at most this need no rotation. f32 leaves about 1e-6, a basis in f16 has
/// 5e-4.
inline constexpr float kOrthogonal = 1e-5F;
/// A sweep that met no larger cosine is the last: the cosines that it leaves are products of these.
inline constexpr float kConverged = 1e-3F;

namespace detail {

inline constexpr int kRowBlock = 8;       ///< rows of a block
inline constexpr int kChannelSlices = 2;  ///< warps that share the channels of a pair of blocks
/// Pairs of blocks of a round that are processed at a time.
inline constexpr int kBlockPairs = kSketchThreads / 32 / kChannelSlices;

/// Row stride in elements: 8 or 24 more than a multiple of 32. Then neither reading four channels
/// of several rows nor one channel of many rows has bank conflicts.
__host__ __device__ constexpr int sketch_stride(int head_dim) { return head_dim + 8; }
/// Rows of a buffer for so many rows: rounded up to pairs of blocks.
__host__ __device__ constexpr int buffered_rows(int rows) {
  return (rows + 2 * kRowBlock - 1) / (2 * kRowBlock) * (2 * kRowBlock);
}

/// Shared memory of the warps of a thread block while rows become orthogonal.
struct RowProducts {
  /// By pair of blocks and slice of channels: M, where M + M' are the products of the pair's rows
  /// over the channels of the slice. Then, in slice 0, the rotations Q of the pair.
  float sums[kBlockPairs][kChannelSlices][16][16];
  std::int32_t rotates[kBlockPairs];  ///< whether the pair's rows need rotations
  std::int32_t longest;               ///< float bits of the largest squared length that a sweep met
};

/// Computes the squared lengths of rows. All threads call it; the caller synchronises.
__device__ inline void measure_rows(const float* rows, int count, int dim, int stride,
                                    float* lengths) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < count; row += kSketchThreads / 32) {
    float sum = 0.0F;
    for (int channel = lane; channel < dim; channel += 32)
      sum = fmaf(rows[row * stride + channel], rows[row * stride + channel], sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    if (lane == 0) lengths[row] = sum;
  }
}

/// A number as two operands of tf32 products: `low` is what tensor cores ignore of `high`.
struct SplitNumber {
  float high, low;
};
__device__ __forceinline__ SplitNumber split_number(float x) { return {x, beyond_tf32(x)}; }

/// Sums of products of 16 x 8 by 8 x 8 numbers, each computed as three tf32 products. There are
/// three accumulators, so that no product waits for another.
struct SplitSums {
  float high[4] = {}, first[4] = {}, second[4] = {};
  __device__ __forceinline__ void add(const SplitNumber (&a)[4], const SplitNumber& b0,
                                      const SplitNumber& b1) {
    const float4 high_a{a[0].high, a[1].high, a[2].high, a[3].high};
    mma_tf32(first, {a[0].low, a[1].low, a[2].low, a[3].low}, b0.high, b1.high);
    mma_tf32(second, high_a, b0.low, b1.low);
    mma_tf32(high, high_a, b0.high, b1.high);
  }
  __device__ __forceinline__ float operator[](int i) const {
    return high[i] + (first[i] + second[i]);
  }
};

/// A warp's channels of the 16 rows of a pair of blocks, held in registers while the rotations are
/// found. Of the blocks of eight channels, a warp has every kChannelSlices-th. Lane 4 g + t has
/// channels 2t and 2t + 1 of row g of both blocks.
template <int most>
struct PairShare {
  float2 first[most], second[most];

  __device__ __forceinline__ void load(const float* a, const float* b, int dim, int stride,
                                       int slice, int lane) {
#pragma unroll
    for (int i = 0; i < most; ++i) {
      const int channel = 8 * (kChannelSlices * i + slice) + 2 * (lane % 4);
      first[i] = second[i] = {0.0F, 0.0F};
      if (channel >= dim) continue;
      first[i] = *reinterpret_cast<const float2*>(a + lane / 4 * stride + channel);
      second[i] = *reinterpret_cast<const float2*>(b + lane / 4 * stride + channel);
    }
  }

  /// Computes the products of the rows as M, where M + M' are the products: half of the products of
  /// the high parts, plus those of the low parts with the high parts. Channels may be summed in any
  /// order: channels that are adjacent here are four apart in an operand.
  __device__ __forceinline__ void multiply(int dim, int slice, int lane,
                                           float (&sums)[16][16]) const {
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (int i = 0; i < most; ++i) {
      if (8 * (kChannelSlices * i + slice) >= dim) continue;
      const SplitNumber x[4] = {split_number(first[i].x), split_number(second[i].x),
                                split_number(first[i].y), split_number(second[i].y)};
      const float4 highs{x[0].high, x[1].high, x[2].high, x[3].high},
          lows{x[0].low, x[1].low, x[2].low, x[3].low};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mma_tf32(high[half], highs, x[half].high, x[half + 2].high);
        mma_tf32(low[half], lows, x[half].high, x[half + 2].high);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[lane / 4 + 8 * (i / 2)][8 * half + 2 * (lane % 4) + i % 2] =
            fmaf(0.5F, high[half][i], low[half][i]);
    }
  }

  /// Adds (Q - 1)' X to the rows X in shared memory.
  __device__ __forceinline__ void rotate(float* a, float* b, int dim, int stride, int slice,
                                         int lane, const float (&q)[16][16]) const {
    const int g = lane / 4, t = lane % 4;
    const auto at = [&](int row, int k) {
      return split_number(q[k][row] - (row == k ? 1.0F : 0.0F));
    };
    const SplitNumber weights[2][4] = {
        {at(g, t), at(g + 8, t), at(g, t + 4), at(g + 8, t + 4)},
        {at(g, t + 8), at(g + 8, t + 8), at(g, t + 12), at(g + 8, t + 12)}};
    // Blocks of channels at a time: products of one do not wait for those of the other.
    constexpr int together = 2;
#pragma unroll
    for (int begin = 0; begin < most; begin += together) {
      if (8 * (kChannelSlices * begin + slice) >= dim) continue;
      SplitSums sums[together];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#pragma unroll
        for (int i = 0; i < together; ++i) {
          const int channel = 8 * (kChannelSlices * (begin + i) + slice) + g;
          if (channel - g >= dim) continue;
          const float* rows = (step == 0 ? a : b) + channel;
          sums[i].add(weights[step], split_number(rows[t * stride]),
                      split_number(rows[(t + 4) * stride]));
        }
      }
      __syncwarp();  // all lanes have read the rows that are now written
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const int channel = 8 * (kChannelSlices * (begin + i) + slice) + 2 * t;
        if (channel >= dim) continue;
        *reinterpret_cast<float2*>(a + g * stride + channel) = {first[begin + i].x + sums[i][0],
                                                                first[begin + i].y + sums[i][1]};
        *reinterpret_cast<float2*>(b + g * stride + channel) = {second[begin + i].x + sums[i][2],
                                                                second[begin + i].y + sums[i][3]};
      }
    }
  }
};

/// A lane's share of the 16 x 16 products G, or of the rotations Q. A lane has half of the columns
/// of row lane % 16. Column numbers are the row's number with some bits flipped: own[p] flips p' =
/// 4 (lane / 16) + p, and other[p], in the other block of rows, flips 8 + (p' ^ r). r changes from
/// round to round.
struct RotationShare {
  float own[4], other[4];

  /// Rotates columns own[p] and other[p] by (c, s).
  __device__ __forceinline__ void rotate(int p, float c, float s) {
    const float u = own[p], v = other[p];
    own[p] = fmaf(c, u, s * v);
    other[p] = fmaf(c, v, -s * u);
  }
  /// Changes r to r ^ d, d = 1 or 2.
  template <int d>
  __device__ __forceinline__ void relabel() {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (p > (p ^ d)) continue;
      const float x = other[p];
      other[p] = other[p ^ d];
      other[p ^ d] = x;
    }
  }
};

/// Cosine and sine that make rows i and i ^ k orthogonal: row i becomes c (row i) + s (row i ^ k).
/// The lanes of both rows find the same c and opposite s, since they compute with the same numbers
/// in another order.
struct Rotation {
  float c, s;
};
/// Finds the rotation of rows i and i ^ k.
/// @param square, product  products of row i with itself and with row i ^ k
/// @param leads  if both rows are equally long: whether row i is the first
__device__ __forceinline__ Rotation find_rotation(float square, float product, int k, bool leads) {
  const float other_square = __shfl_xor_sync(~0U, square, k),
              twice = product + __shfl_xor_sync(~0U, product, k),
              difference = square - other_square;
  const float squares = fmaf(difference, difference, twice * twice), root = rsqrt_fast(squares),
              half = fmaf(0.5F * fabsf(difference), root, 0.5F), inverse = rsqrt_fast(half);
  const bool rotates = fminf(square, other_square) > kNothing && squares > 1e-36F;
  const float positive = difference == 0.0F ? (leads ? -1.0F : 1.0F) : difference;
  const float cosine = half * inverse, sine = 0.5F * twice * root * copysignf(inverse, positive);
  // A Newton step normalises (c, s), so that rows keep their lengths.
  const float length = fmaf(-0.5F, fmaf(cosine, cosine, sine * sine), 1.5F);
  return {rotates ? cosine * length : 1.0F, rotates ? sine * length : 0.0F};
}

/// Rotates rows of one block against rows of the other block: row i with row i ^ (8 + r).
__device__ __forceinline__ void rotate_across(RotationShare& g, RotationShare& q, int r, int lane) {
  const int k = 8 + r, row = lane % 16, half = lane / 16;
  // Lanes from 16 on have no diagonal elements, and their result is not used.
  const Rotation mine = find_rotation(g.own[0], g.other[0], k, row < 8);
  const float cosine = __shfl_sync(~0U, mine.c, row), sine = __shfl_sync(~0U, mine.s, row);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int column = row ^ (4 * half + p);
    const float c = __shfl_sync(~0U, mine.c, column), s = __shfl_sync(~0U, mine.s, column);
    g.rotate(p, c, s);
    q.rotate(p, c, s);
  }
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float u = __shfl_xor_sync(~0U, g.other[p], k), v = __shfl_xor_sync(~0U, g.own[p], k);
    g.own[p] = fmaf(cosine, g.own[p], sine * u);
    g.other[p] = fmaf(cosine, g.other[p], sine * v);
  }
}

/// Rotates rows within both blocks: row i with row i ^ k. Needs r = 0.
template <int k>
__device__ __forceinline__ void rotate_within(RotationShare& g, RotationShare& q, int lane) {
  // The other half of the columns belongs to lane ^ 16.
  constexpr int d = k % 4, mask = k >= 4 ? k + 16 : k;
  const int row = lane % 16, half = lane / 16;
  const float product = k >= 4 ? __shfl_xor_sync(~0U, g.own[d], 16) : g.own[d];
  const Rotation mine = find_rotation(g.own[0], product, k, row < (row ^ k));
  const float cosine = __shfl_sync(~0U, mine.c, row), sine = __shfl_sync(~0U, mine.s, row);
  const auto columns = [&](RotationShare& x) {
    const RotationShare before = x;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int column = row ^ (4 * half + p);
      const float u = k >= 4 ? __shfl_xor_sync(~0U, before.own[p ^ d], 16) : before.own[p ^ d],
                  v = k >= 4 ? __shfl_xor_sync(~0U, before.other[p ^ d], 16) : before.other[p ^ d];
      x.own[p] = fmaf(__shfl_sync(~0U, mine.c, column), before.own[p],
                      __shfl_sync(~0U, mine.s, column) * u);
      x.other[p] = fmaf(__shfl_sync(~0U, mine.c, column ^ 8), before.other[p],
                        __shfl_sync(~0U, mine.s, column ^ 8) * v);
    }
  };
  columns(g);
  columns(q);
  const RotationShare before = g;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    g.own[p] = fmaf(cosine, before.own[p], sine * __shfl_xor_sync(~0U, before.own[p ^ d], mask));
    g.other[p] =
        fmaf(cosine, before.other[p], sine * __shfl_xor_sync(~0U, before.other[p ^ d], mask));
  }
}
template <int k = 1>
__device__ __forceinline__ void rotate_all_within(RotationShare& g, RotationShare& q, int lane) {
  rotate_within<k>(g, q, lane);
  if constexpr (k + 1 < kRowBlock) rotate_all_within<k + 1>(g, q, lane);
}

/// Finds the rotations Q that make the products of 16 rows more diagonal, unless the rows are
/// orthogonal. One warp calls it.
/// @param sums  the products; slice 0 receives Q
/// @param rotates  receives 0 if the rows are orthogonal, else 1
/// @param longest  receives the longest row's squared length, if that is larger
/// @param scale  of the products, so that row lengths are at most about 1
/// @param unit  1 / scale
/// @param within  also rotate rows within the two blocks
/// @return in every lane, whether a cosine was above kConverged
__device__ inline bool find_rotations(float (&sums)[kChannelSlices][16][16], std::int32_t& rotates,
                                      std::int32_t& longest, float scale, float unit, bool within) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 16,
            first = row ^ (4 * (lane / 16));
  RotationShare g, q;
  const auto load = [&](int column) {
    float sum = 0.0F;
#pragma unroll
    for (int slice = 0; slice < kChannelSlices; ++slice)
      sum += sums[slice][row][column] + sums[slice][column][row];
    return sum * scale;
  };
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    g.own[p] = load(first ^ p);
    g.other[p] = load(first ^ p ^ 8);
    q.own[p] = first == row && p == 0 ? 1.0F : 0.0F;
    q.other[p] = 0.0F;
  }
  bool orthogonal = true, converged = true;
  const float square = __shfl_sync(~0U, g.own[0], row);
  const auto meet = [&](float product, int column) {
    const float other = __shfl_sync(~0U, g.own[0], column), cosine = product * product,
                lengths = square * other;
    if (column == row || !(fminf(square, other) > kNothing)) return;
    orthogonal = orthogonal && cosine <= kOrthogonal * kOrthogonal * lengths;
    converged = converged && cosine <= kConverged * kConverged * lengths;
  };
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    meet(g.other[p], first ^ p ^ 8);
    if (within) meet(g.own[p], first ^ p);
  }
  orthogonal = __all_sync(~0U, orthogonal) != 0;
  if (lane == 0) rotates = orthogonal ? 0 : 1;
  if (orthogonal) return false;
  if (within) rotate_all_within(g, q, lane);
  const auto relabel = [&](auto d) {
    g.relabel<decltype(d)::value>();
    q.relabel<decltype(d)::value>();
  };
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int r = 6 * half;  // r runs over 0 1 3 2, 6 7 5 4: one bit changes at a time
    rotate_across(g, q, r, lane);
    relabel(std::integral_constant<int, 1>{});
    rotate_across(g, q, r ^ 1, lane);
    relabel(std::integral_constant<int, 2>{});
    rotate_across(g, q, r ^ 3, lane);
    relabel(std::integral_constant<int, 1>{});
    rotate_across(g, q, r ^ 2, lane);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      g.other[p] = __shfl_xor_sync(~0U, g.other[p], 16);
      q.other[p] = __shfl_xor_sync(~0U, q.other[p], 16);
    }
  }
  __syncwarp();  // all lanes have read the sums that are now overwritten
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    sums[0][row][first ^ p] = q.own[p];
    sums[0][row][first ^ p ^ 8] = q.other[p];  // r is 0 again
  }
  if (lane < 16) atomicMax(&longest, __float_as_int(g.own[0] * unit));
  return __all_sync(~0U, converged) == 0;
}

/// Rotates rows [count, stride] until all are orthogonal. The buffer has buffered_rows(count) rows.
/// All threads call it and are synchronised at the end.
/// @tparam channels  at least dim, a multiple of 32
/// @param lengths  `count` numbers; receives the squared lengths of the rows before the rotations
/// @return number of sweeps
template <int channels>
__device__ inline int make_orthogonal(float* rows, int count, int dim, int stride, float* lengths,
                                      RowProducts& shared) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            blocks = buffered_rows(count) / kRowBlock, pair = warp % kBlockPairs,
            slice = warp /
                    kBlockPairs;  // warps of slice 0, which find rotations, are on all schedulers
  for (int item = count * stride + thread; item < blocks * kRowBlock * stride;
       item += kSketchThreads)
    rows[item] = 0.0F;
  measure_rows(rows, count, dim, stride, lengths);
  __syncthreads();
  float longest = 0.0F;
  for (int row = lane; row < count; row += 32) longest = fmaxf(longest, lengths[row]);
  for (int distance = 16; distance > 0; distance /= 2)
    longest = fmaxf(longest, __shfl_xor_sync(~0U, longest, distance));
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    const float scale = longest > 0.0F ? 1.0F / longest : 0.0F;
    // Barriers separate this from the first write and from the first read.
    if (thread == 0) shared.longest = 0;
    bool unconverged = false;
    for (int round = 0; round + 1 < blocks; ++round) {
      // Round-robin schedule: the first block stays, the others rotate.
      const auto player = [&](int place) {
        return place == 0               ? 0
               : place + round < blocks ? place + round
                                        : place + round - (blocks - 1);
      };
      for (int done = 0; done < blocks / 2; done += kBlockPairs) {
        const int pairs = min(kBlockPairs, blocks / 2 - done);
        const bool takes_part = pair < pairs;
        float *first = nullptr, *second = nullptr;
        PairShare<channels / 8 / kChannelSlices> share;
        if (takes_part) {
          first = rows + player(done + pair) * kRowBlock * stride;
          second = rows + player(blocks - 1 - done - pair) * kRowBlock * stride;
          share.load(first, second, dim, stride, slice, lane);
          share.multiply(dim, slice, lane, shared.sums[pair][slice]);
        }
        __syncthreads();
        if (takes_part && slice == 0) {
          const bool larger = find_rotations(shared.sums[pair], shared.rotates[pair],
                                             shared.longest, scale, longest, round == 0);
          unconverged = unconverged || larger;
        }
        __syncthreads();
        if (takes_part && shared.rotates[pair] != 0)
          share.rotate(first, second, dim, stride, slice, lane, shared.sums[pair][0]);
        __syncthreads();
      }
    }
    if (__syncthreads_or(unconverged ? 1 : 0) == 0) return sweep + 1;
    longest = fmaxf(longest, __int_as_float(shared.longest));
    __syncthreads();
  }
  return kMaxSweeps;
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
