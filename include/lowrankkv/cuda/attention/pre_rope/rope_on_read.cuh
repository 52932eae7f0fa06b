// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/rope_on_read.cuh  Logits of pre-RoPE keys: a tile is up-projected
/// to head_dim, rotated in registers and multiplied with the queries, once for a block of columns.
///
/// A column is one query row: a query token and a query head of the KV head's group. A block of
/// columns is four of them (kBlockColumns).
///
/// With base position b of a tile, q R(p) k = (R(-b) q) R(p - b) k. So a warp rotates its queries
/// back once per tile, and rotates rows by small offsets, whose cosines and sines lie in shared
/// memory. An up-projected key is the accumulator of one product and an operand of the next without
/// leaving its lane: the first channels of eight pairs are eight of the sixteen numbers that the
/// product sums over, their second channels are the other eight.
///
/// Once unpacked, keys are 16-bit numbers, as in a cache of post-RoPE keys in f16, two channels per
/// instruction. They are rounded to f16 after the up-projection and after the rotation. Rows in
/// bf16 are multiplied by 2^-4, so that they fit up to 2^20. Queries are two 16-bit numbers
/// relative to their largest; sums over channels are f32. A logit's error is that of three to four
/// roundings of the key's channels to 11 bits. Cost: head_dim x rank products per row, KV head and
/// block of columns. Floor: the tiles' bytes, once for a block of columns.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Pairs of channels of a block: what one product over 16 channels takes.
inline constexpr int kRopePairs = 8;
/// @brief Words of a warp's rotated queries for two blocks of pairs. 16 words are padding, so that
/// neighbours lie in other banks.
inline constexpr int kPreRopeBlocks = 32 * 4 + 16;
inline constexpr int kNoPlace = INT32_MIN;  ///< position where there is no row
/// @brief If rows may stand in any order and a tile's rows are at least this far apart, the
/// rotation angles are computed row by row. By instruction count this costs as much as five passes;
/// it was not timed separately.
inline constexpr int kScatteredRows = 6 * kRopeRows;

/// @brief Shared memory in bytes that a block needs to rotate keys: offsets, queries, means, and
/// `units` units of an up-projection map. A multiple of 16.
__host__ __device__ constexpr int rope_block_bytes(int head_dim, int units) {
  return 4 * rope_words(head_dim) + 4 * kBlockColumns * (head_dim + 4) + 2 * head_dim +
         units * (head_dim / (2 * kRopePairs)) * 512;
}
/// @brief Shared memory in bytes that each warp needs besides: its rotated queries.
__host__ __device__ constexpr int rope_warp_bytes(int head_dim) {
  return 4 * rope_couples(head_dim) * kPreRopeBlocks;
}
/// @brief Stages of a warp's ring: one for the keys of a tile, one for its values.
inline constexpr int kPreRopeStages = 2;
/// @brief Most warps of a block of a pre-RoPE kernel.
///
/// Splits are multiples of 16 tiles. If a tile has more than two units, shared memory has room for
/// fewer warps, and each gets more registers.
__host__ __device__ constexpr int pre_rope_warps(int max_units) { return max_units <= 2 ? 16 : 8; }

/// @brief Positions of the rows of a tile, as each lane sees its own rows 16 i + 8 r + lane / 4.
template <int steps>
struct TilePlaces {
  /// Row i stands at position base + i, or there is no row i and its logit is ignored. Uniform over
  /// the lanes.
  bool contiguous = false;
  int base = 0;
  /// Otherwise: positions, or kNoPlace where there is no row that a query sees.
  int places[steps][2];
};

/// @brief What the warps of a block share, in shared memory: offsets, queries, the up-projection
/// map.
struct RopeShared {
  const std::uint32_t* offsets = nullptr;  ///< as Rotary::offsets
  /// [head_dim, kBlockColumns]: queries relative to the largest of their column, channels in rotary
  /// order (Rotary::channel()).
  float* raw = nullptr;
  float* largest = nullptr;      ///< [kBlockColumns]
  const uint2* means = nullptr;  ///< as KeyUpMap::means
  uint4* operands = nullptr;     ///< copy of the up-projection map's operands

  RopeShared() = default;
  /// @brief Lays out the memory. All threads copy what depends on neither queries nor epochs. The
  /// caller synchronises.
  /// @param key_up  null: rows at full rank
  __device__ RopeShared(std::uint8_t* memory, const Rotary& rotary, int head_dim,
                        const KeyUpMap* key_up) {
    uint4* table = reinterpret_cast<uint4*>(memory);
    const int size = rope_words(head_dim) / 4, thread = static_cast<int>(threadIdx.x),
              threads = static_cast<int>(blockDim.x);
#pragma unroll 8
    for (int i = thread; i < size; i += threads)
      table[i] = __ldg(reinterpret_cast<const uint4*>(rotary.offsets) + i);
    offsets = reinterpret_cast<const std::uint32_t*>(memory);
    raw = reinterpret_cast<float*>(table + size);
    largest = raw + head_dim * kBlockColumns;
    uint4* own_means = reinterpret_cast<uint4*>(largest + 4 * kBlockColumns);
    means = reinterpret_cast<const uint2*>(own_means);
    operands = own_means + head_dim / 8;
    if (key_up == nullptr) return;
    copy_means(key_up->means, head_dim);
  }
  /// @brief Copies the means. The caller synchronises.
  __device__ void copy_means(const uint2* from, int head_dim) {
    uint4* own = reinterpret_cast<uint4*>(const_cast<uint2*>(means));
    for (int i = static_cast<int>(threadIdx.x); i < head_dim / 8; i += static_cast<int>(blockDim.x))
      own[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  }
  /// @brief Copies the first `units` units of an up-projection map. All threads call it. The caller
  /// synchronises afterwards, and before if the previous map is still read.
  __device__ void copy_map(const uint4* map, int head_dim, int units) const {
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < units * (head_dim / (2 * kRopePairs)) * 32;
         i += static_cast<int>(blockDim.x))
      operands[i] = __ldg(map + i);
  }

  /// @brief Copies a block of columns of the queries. All threads call it; they are synchronised at
  /// the end.
  __device__ void load_queries(const StepQueries& queries, const Rotary& rotary,
                               const AttentionStep& step, int sequence, int kv_head, int block,
                               int head_dim) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int* const bits = reinterpret_cast<int*>(largest);
    if (thread < kBlockColumns) bits[thread] = 0;
    __syncthreads();
    for (int item = thread; item < kBlockColumns * head_dim; item += threads) {
      const int own = item / head_dim, column = block * kBlockColumns + own,
                place = item % head_dim;
      const float value = column < step.columns() ? queries.at(step, sequence, kv_head, column,
                                                               rotary.channel(place, head_dim))
                                                  : 0.0F;
      raw[place * kBlockColumns + own] = value;
      atomicMax(bits + own, __float_as_int(fabsf(value)));
    }
    __syncthreads();
    for (int item = thread; item < kBlockColumns * head_dim; item += threads)
      raw[item] *= largest[item % kBlockColumns] > 0.0F
                       ? __fdividef(1.0F, largest[item % kBlockColumns])
                       : 0.0F;
    __syncthreads();
  }

  /// @brief Rotates the queries back by `base` positions and writes them as operands,
  /// [rope_couples, kPreRopeBlocks]: a lane's two words of either block. All lanes call it; they
  /// are synchronised at the end.
  __device__ void rotate_back(const Rotary& rotary, int head_dim, int base,
                              std::uint32_t* rotated) const {
    __syncwarp();
    // Pairs 2 two and 2 two + 1.
    for (int two = static_cast<int>(threadIdx.x) % 32; two < head_dim / 4; two += 32) {
      const float4 phase = rotary.phases(base, two, head_dim);
      const float4* x = reinterpret_cast<const float4*>(raw) + 2 * two;
      const float4* y = x + head_dim / 2;
      const float4 x0 = x[0], x1 = x[1], y0 = y[0], y1 = y[1];
      std::uint32_t* const own =
          rotated + two / kRopePairs * kPreRopeBlocks + two % 4 * 4 + two / 4 % 2 * 2;
      const auto rope = [&](int column, float p0, float p1, float q0, float q1) {
        const float first0 = p0 * phase.x + q0 * phase.y, first1 = p1 * phase.z + q1 * phase.w,
                    second0 = q0 * phase.x - p0 * phase.y, second1 = q1 * phase.z - p1 * phase.w;
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          *reinterpret_cast<uint2*>(own + (2 * column + low) * 16) = {
              detail::pair_of<DType::f16>(first0, first1, low == 1),
              detail::pair_of<DType::f16>(second0, second1, low == 1)};
        }
      };
      rope(0, x0.x, x1.x, y0.x, y1.x);
      rope(1, x0.y, x1.y, y0.y, y1.y);
      rope(2, x0.z, x1.z, y0.z, y1.z);
      rope(3, x0.w, x1.w, y0.w, y1.w);
    }
    __syncwarp();
  }
};

namespace detail {

/// Rotates two neighbouring pairs of channels: their first channels in x, the second in y.
/// @param cosines, sines  of the two pairs
__device__ __forceinline__ void rotate_pairs(std::uint32_t cosines, std::uint32_t sines,
                                             std::uint32_t& x, std::uint32_t& y) {
  const auto half = [](std::uint32_t& word) -> __half2& {
    return *reinterpret_cast<__half2*>(&word);
  };
  const __half2 c = half(cosines), s = half(sines), first = half(x), second = half(y);
  half(x) = __hfma2(first, c, __hneg2(__hmul2(second, s)));
  half(y) = __hfma2(second, c, __hmul2(first, s));
}

/// One pass over a tile's pairs of channels: s += products of rotated rows with rotated queries.
/// @param prepare  as in pre_rope_logits()
/// @param row_rotations  (couple, step, half) -> cosines and sines of the row, for the lane's
///   pairs, laid out as in Rotary::offsets
template <int steps, int at_once, class Prepare, class Rotations>
__device__ __forceinline__ void add_logits(int head_dim, const std::uint32_t* rotated,
                                           Prepare&& prepare, Rotations&& row_rotations,
                                           float (&s)[steps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = head_dim / (2 * kRopePairs);
#pragma unroll
  for (int group = 0; group < steps / at_once; ++group) {
    prepare(group * at_once, [&](auto&& key_up) {
#pragma unroll 1
      for (int couple = 0; 2 * couple < blocks; ++couple) {
        const uint4 b =
            *reinterpret_cast<const uint4*>(rotated + couple * kPreRopeBlocks + 4 * lane);
        uint4 rotations[at_once][2];
#pragma unroll
        for (int i = 0; i < 2 * at_once; ++i)
          rotations[i / 2][i % 2] = row_rotations(couple, group * at_once + i / 2, i % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (half == 1 && 2 * couple + 1 == blocks) break;
          std::uint32_t x[at_once][2], y[at_once][2];
          key_up(2 * couple + half, x, y);
#pragma unroll
          for (int i = 0; i < at_once; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
              rotate_pairs(half == 0 ? rotations[i][r].x : rotations[i][r].z,
                           half == 0 ? rotations[i][r].y : rotations[i][r].w, x[i][r], y[i][r]);
            mma_plain<DType::f16>(s[group * at_once + i], {x[i][0], x[i][1], y[i][0], y[i][1]},
                                  half == 0 ? b.x : b.z, half == 0 ? b.y : b.w);
          }
        }
      }
    });
  }
}

}  // namespace detail

/// @brief Two numbers, rounded to f16.
__device__ __forceinline__ std::uint32_t half_word(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// @brief Logits s of a tile of 16 x steps rows, as the accumulators of products with high and low
/// parts of queries in neighbouring columns. A warp calls it.
/// @param prepare  (first step, use): gets ready for at_once steps, then calls use(key_up), once or
///   several times. key_up(block, x, y) fills x, y [at_once][2 (row g, g + 8)] with the first and
///   the second channels of pairs 8 block + 2t and 2t + 1, in RoPE order. Keys are the sums over
///   the calls.
/// @tparam at_once  times 16 rows that are prepared together
/// @tparam scattered  rows may stand in any order
template <int steps, int at_once, bool scattered, class Prepare>
__device__ __forceinline__ void pre_rope_logits(const Rotary& rotary, const RopeShared& shared,
                                                int head_dim, std::uint32_t* rotated,
                                                const TilePlaces<steps>& tile, Prepare&& prepare,
                                                float (&s)[steps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  const auto table = [&](int couple, int offset) {
    return *reinterpret_cast<const uint4*>(shared.offsets + (couple * kRopeRows + offset) * 16 +
                                           lane % 4 * 4);
  };
#pragma unroll
  for (int i = 0; i < 4 * steps; ++i) s[i / 4][i % 4] = 0.0F;
  if (tile.contiguous) {
    shared.rotate_back(rotary, head_dim, tile.base, rotated);
    detail::add_logits<steps, at_once>(
        head_dim, rotated, prepare,
        [&](int couple, int i, int r) { return table(couple, 16 * i + 8 * r + g); }, s);
    return;
  }
  std::uint32_t pending = 0;  // bits of rows without a logit
#pragma unroll
  for (int i = 0; i < 2 * steps; ++i)
    pending |= tile.places[i / 2][i % 2] != kNoPlace ? 1U << i : 0U;
  if constexpr (scattered) {
    int first = INT32_MAX, last = kNoPlace;
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      const int place = tile.places[i / 2][i % 2];
      first = min(first, place == kNoPlace ? INT32_MAX : place);
      last = max(last, place);
    }
    const int base = __reduce_min_sync(~0U, first), end = __reduce_max_sync(~0U, last);
    if (base <= end && end - base >= kScatteredRows) {
      shared.rotate_back(rotary, head_dim, base, rotated);
      const auto rotations_of = [&](int couple, int i, int r) {
        const int place = tile.places[i][r], offset = place == kNoPlace ? 0 : place - base;
        const auto rotations = [&](int half) {
          return 16 * (2 * couple + half) < head_dim
                     ? rotary.phases(offset, 4 * (2 * couple + half) + lane % 4, head_dim)
                     : float4{};
        };
        const float4 low = rotations(0), high = rotations(1);
        return uint4{half_word(low.x, low.z), half_word(low.y, low.w), half_word(high.x, high.z),
                     half_word(high.y, high.w)};
      };
      detail::add_logits<steps, at_once>(head_dim, rotated, prepare, rotations_of, s);
      return;
    }
  }
  while (__any_sync(~0U, pending != 0)) {  // one pass, unless rows stand far apart
    int first = INT32_MAX;
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i)
      first = min(first, pending >> i & 1U ? tile.places[i / 2][i % 2] : INT32_MAX);
    const int base = __reduce_min_sync(~0U, first);
    shared.rotate_back(rotary, head_dim, base, rotated);
    std::uint32_t near = 0;
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i)
      near |=
          (pending >> i & 1U) != 0 && tile.places[i / 2][i % 2] - base < kRopeRows ? 1U << i : 0U;
    float part[steps][4] = {};
    detail::add_logits<steps, at_once>(
        head_dim, rotated, prepare,
        [&](int couple, int i, int r) {
          return table(couple, (near >> (2 * i + r) & 1U) != 0 ? tile.places[i][r] - base : 0);
        },
        part);
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      if ((near >> i & 1U) == 0) continue;
      s[i / 2][i % 2 * 2] = part[i / 2][i % 2 * 2];
      s[i / 2][i % 2 * 2 + 1] = part[i / 2][i % 2 * 2 + 1];
    }
    pending &= ~near;
  }
}

/// @brief Two numbers of a tile's word as f16; bf16 numbers are multiplied by kRotatedBFloat.
template <DType type>
__device__ __forceinline__ std::uint32_t half_word(std::uint32_t word) {
  if constexpr (type == DType::f16) return word;
  return half_word(kRotatedBFloat * __uint_as_float(word << 16),
                   kRotatedBFloat * __uint_as_float(word & 0xffff0000U));
}
/// @brief A unit of 16 rows and channels of plain keys as an f16 operand.
template <DType type>
__device__ __forceinline__ uint4 half_words(const uint4& words) {
  return {half_word<type>(words.x), half_word<type>(words.y), half_word<type>(words.z),
          half_word<type>(words.w)};
}

/// @brief Reads eight pairs of channels, in RoPE order, of full-rank rows from the keys of a
/// plain tile. Keys in 8 bits come out in units of their row's step.
/// @param stored  multiples of 16 rows that the tile has; rows beyond them are zeros
template <DType type, int steps, bool in_bytes>
__device__ __forceinline__ void read_pairs(const Rotary& rotary, const std::uint8_t* keys,
                                           int key_units, int block, std::uint32_t (&x)[steps][2],
                                           std::uint32_t (&y)[steps][2], int stored = steps) {
  const bool rope = kRopePairs * block < rotary.pairs, split = rope && !rotary.interleaved;
  // The two blocks of eight channels that hold the pairs.
  const int a = split ? block : 2 * block,
            b = split ? block + rotary.pairs / kRopePairs : 2 * block + 1;
  const auto read = [&](int i, int from) {
    // In words of 16-bit numbers.
    const int place =
        4 * ((i * key_units + from / 2) * 32 + static_cast<int>(threadIdx.x) % 32) + from % 2 * 2;
    if constexpr (in_bytes) {
      const std::uint32_t codes = *reinterpret_cast<const std::uint32_t*>(keys + 2 * place);
      return uint2{detail::scaled_pair<DType::f16>(codes, 0),
                   detail::scaled_pair<DType::f16>(codes, 2)};
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(keys + 4 * place);
      return uint2{half_word<type>(words.x), half_word<type>(words.y)};
    }
  };
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    const uint2 first = i < stored ? read(i, a) : uint2{},
                second = i < stored ? read(i, b) : uint2{};
    x[i][0] = first.x;
    x[i][1] = first.y;
    y[i][0] = second.x;
    y[i][1] = second.y;
    if (!rope || !rotary.interleaved) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A lane has pair t of the first block and pair t of the second.
      const std::uint32_t both = x[i][r];
      x[i][r] = __byte_perm(both, y[i][r], 0x5410);
      y[i][r] = __byte_perm(both, y[i][r], 0x7632);
    }
  }
}

/// @brief Up-projects eight pairs of channels of rows of coefficients. The result is times 2^k, the
/// scale of `operands`.
///
/// Sums over 32 coefficients are rounded to f16 once in their middle. Longer sums are f32 up to
/// their end.
/// @param units  of the map, at least one
/// @param words  (step, unit) -> the keys as operands; zeros where there is no unit
/// @param onto  initial words of x and of y
/// @tparam all  the map has max_units units, with zeros behind the last; no branches
template <int steps, int max_units, bool all, class Words>
__device__ __forceinline__ void up_project_pairs(const uint4* operands, int head_dim, Words&& words,
                                                 int units, int block, const uint2& onto,
                                                 std::uint32_t (&x)[steps][2],
                                                 std::uint32_t (&y)[steps][2]) {
  const uint4* own = operands + block * 32 + static_cast<int>(threadIdx.x) % 32;
  const int stride = head_dim / (2 * kRopePairs) * 32;
  if constexpr (max_units <= 2) {
#pragma unroll
    for (int unit = 0; unit < max_units; ++unit) {
      if (unit > 0 && !all && unit >= units) break;
      const uint4 map = own[unit * stride];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const uint4 keys = words(i, unit);
        if (unit == 0) {
          mma_half_onto(x[i], keys, map.x, map.y, onto.x);
          mma_half_onto(y[i], keys, map.z, map.w, onto.y);
        } else {
          mma_half(x[i], keys, map.x, map.y);
          mma_half(y[i], keys, map.z, map.w);
        }
      }
    }
  } else {
    const auto wide = [](const std::uint32_t& word) {
      return __half22float2(*reinterpret_cast<const __half2*>(&word));
    };
    const float2 first = wide(onto.x), second = wide(onto.y);
    float sums[steps][2][4];
#pragma unroll
    for (int i = 0; i < 4 * steps; ++i) {
      sums[i / 4][0][i % 4] = i % 2 == 0 ? first.x : first.y;
      sums[i / 4][1][i % 4] = i % 2 == 0 ? second.x : second.y;
    }
#pragma unroll
    for (int unit = 0; unit < max_units; ++unit) {
      if (unit > 0 && !all && unit >= units) break;
      const uint4 map = own[unit * stride];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const uint4 keys = words(i, unit);
        mma_plain<DType::f16>(sums[i][0], keys, map.x, map.y);
        mma_plain<DType::f16>(sums[i][1], keys, map.z, map.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      x[i / 2][i % 2] = half_word(sums[i / 2][0][2 * (i % 2)], sums[i / 2][0][2 * (i % 2) + 1]);
      y[i / 2][i % 2] = half_word(sums[i / 2][1][2 * (i % 2)], sums[i / 2][1][2 * (i % 2) + 1]);
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
