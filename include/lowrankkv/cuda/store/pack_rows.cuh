// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/pack_rows.cuh  Packs a prompt's rows as plain tiles, behind the rows that are
/// still in the tail. The last of them become the new tail.
///
/// Floor: the prompt's keys and values read and written once.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/store/plain_tiles.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Shared memory of pack_rows_kernel in bytes.
inline std::size_t pack_rows_bytes(int head_dim) {
  return sizeof(std::uint16_t) * static_cast<std::size_t>(2 * kStoreRows * plain_stride(head_dim));
}

namespace detail {

/// Whether a view has this type, and eight of its elements can be loaded at once.
template <class Rows>
__device__ bool loads_wide(const Rows& view, DType type) {
  if constexpr (std::is_same_v<Rows, PagedInput>) {
    if (view.pages.page_stride % 8 != 0) return false;
  }
  return view.dtype == type && view.element_stride == 1 &&
         reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.token_stride % 8 == 0 &&
         view.head_stride % 8 == 0;
}

/// Whether the magnitudes of eight 16-bit numbers are all at most `limit`; NaN is not. Magnitudes
/// are in the order of their bits.
__device__ __forceinline__ bool all_within(const uint4& words, DType type, float limit) {
  const std::uint32_t magnitudes = __vmaxu2(__vmaxu2(words.x & 0x7fff7fffU, words.y & 0x7fff7fffU),
                                            __vmaxu2(words.z & 0x7fff7fffU, words.w & 0x7fff7fffU));
  return from_bits(type, static_cast<std::uint16_t>(max(magnitudes & 0xffffU, magnitudes >> 16))) <=
         limit;
}

/// Loads rows [first, first + kStoreRows) of a prompt of `count` rows into stage [part, kStoreRows,
/// stride]; rows past the last are zeros.
/// @param refused  [kStoreRows]: set to 1 for rows with a refused number: not finite, or beyond
/// `limit`
/// @return whether this thread saw such a number
template <class Rows>
__device__ bool stage_wide(const Rows& key, const Rows& value, std::int64_t first,
                           std::int64_t count, int head, int dim, DType type, float limit,
                           std::uint16_t* stage, int* refused) {
  constexpr bool paged = std::is_same_v<Rows, PagedInput>;
  constexpr int kLanes = 16, kSteps = kStoreRows * kLanes / kStoreThreads;  // kLanes: of a row
  const int stride = plain_stride(dim), lane = static_cast<int>(threadIdx.x) % kLanes,
            own = static_cast<int>(threadIdx.x) / kLanes;
  bool bad = false;
  for (int channel = 8 * lane; channel < dim; channel += 8 * kLanes) {
    uint4 words[2][kSteps];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const Rows& view = part == 0 ? key : value;
      const std::uint16_t* from = static_cast<const std::uint16_t*>(view.data) +
                                  (paged ? 0 : first + own) * view.token_stride +
                                  head * view.head_stride + channel;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int row = own + i * (kStoreThreads / kLanes);
        words[part][i] =
            first + row < count
                ? __ldg(reinterpret_cast<const uint4*>(
                      from + (paged ? view.place(first + row)
                                    : i * (kStoreThreads / kLanes) * view.token_stride)))
                : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int row = own + i * (kStoreThreads / kLanes);
        if (!all_within(words[part][i], type, limit)) {
          bad = true;
          atomicExch(&refused[row], 1);
        }
        *reinterpret_cast<uint4*>(stage + (part * kStoreRows + row) * stride + channel) =
            words[part][i];
      }
    }
  }
  return bad;
}

}  // namespace detail

/// @brief Packs the `tail_rows` rows of a tail, then `count` rows of a prompt, as plain tiles
/// [head, tiles]. A row of a head that is not finite, or beyond `limit`, becomes zeros and is
/// counted in tables.faults. Rows past the end are zeros. Grid: 64-row pieces x heads.
template <class Rows>
__global__ void __launch_bounds__(kStoreThreads)
    pack_rows_kernel(LayerEdit tables, int slot, Rows key, Rows value, int tail_rows,
                     std::int64_t count, std::uint8_t* packed, int tiles, float limit) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  std::uint16_t* stage =
      reinterpret_cast<std::uint16_t*>(shared_memory);  // [part, kStoreRows, stride]
  __shared__ int refused[kStoreRows];
  const HeadTiles& layout = tables.full;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, stride = plain_stride(dim),
            first = static_cast<int>(blockIdx.x) * kStoreRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t rows = tail_rows + count;
  if (threadIdx.x < kStoreRows) refused[threadIdx.x] = 0;
  __syncthreads();
  bool bad = false;
  if (first >= tail_rows && detail::loads_wide(key, tables.full_type) &&
      detail::loads_wide(value, tables.full_type)) {
    bad = detail::stage_wide(key, value, first - tail_rows, count, head, dim, tables.full_type,
                             limit, stage, refused);
  } else {
    const SourceRows tail(tables, {}, slot, head);
    for (const Part part : {Part::key, Part::value}) {
      const Rows& view = part == Part::key ? key : value;
#pragma unroll 4
      for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * dim;
           item += kStoreThreads) {
        const int row = item / dim, channel = item % dim;
        const float x = first + row < tail_rows ? tail.element(part, first + row, channel)
                        : first + row < rows    ? view.at(first + row - tail_rows, head, channel)
                                                : 0.0F;
        if (!(fabsf(x) <= limit)) {
          bad = true;
          atomicExch(&refused[row], 1);
        }
        stage[(static_cast<int>(part) * kStoreRows + row) * stride + channel] =
            to_bits(tables.full_type, x);
      }
    }
  }
  if (__syncthreads_or(bad) != 0) {
    for (int row = warp; row < kStoreRows; row += kStoreThreads / 32) {
      if (refused[row] == 0) continue;
      for (int channel = lane; channel < dim; channel += 32)
        stage[row * stride + channel] = stage[(kStoreRows + row) * stride + channel] = 0;
      if (lane == 0) atomicAdd(tables.faults, 1U);
    }
    __syncthreads();
  }
  std::uint8_t* base = packed + static_cast<std::size_t>(head) * static_cast<std::size_t>(tiles) *
                                    static_cast<std::size_t>(layout.bytes);
  const int units = layout.key_units,  // values have as many
      steps_per_tile = layout.rows / kPlainRows;
  for (int item = warp; item < kStoreRows / kPlainRows * units; item += kStoreThreads / 32) {
    const int unit = item % units, step = item / units, global_step = first / kPlainRows + step;
    if (global_step / steps_per_tile >= tiles) continue;
    std::uint8_t* target = base +
                           static_cast<std::size_t>(global_step / steps_per_tile) *
                               static_cast<std::size_t>(layout.bytes) +
                           (global_step % steps_per_tile * units + unit) * kPlainUnitBytes +
                           16 * lane;
    for (const Part part : {Part::key, Part::value}) {
      *reinterpret_cast<uint4*>(target + layout.offset(part)) = detail::plain_words(
          part, stage + (static_cast<int>(part) * kStoreRows + step * kPlainRows) * stride, stride,
          unit);
    }
  }
}

inline constexpr int kRenewRows = 8;  ///< rows of a block of renew_tail_kernel

/// @brief Makes rows [first, first + count) of a packed source the tail. Grid: pieces of kRenewRows
/// rows (at least one) x KV heads.
template <class = void>
__global__ void renew_tail_kernel(LayerEdit tables, int slot, RowSource source, int first,
                                  int count) {
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim,
            begin = tables.lengths[slot].tail_first,
            piece = static_cast<int>(blockIdx.x) * kRenewRows;
  const SourceRows rows(tables, source, slot, head);
  for (int item = static_cast<int>(threadIdx.x); item < min(kRenewRows, count - piece) * dim;
       item += static_cast<int>(blockDim.x)) {
    const int row = piece + item / dim, channel = item % dim,
              place = (begin + row) % tables.ring_rows();
    for (const Part part : {Part::key, Part::value}) {
      *reinterpret_cast<std::uint16_t*>(
          tables.tail_tile(slot, head, place) +
          tables.full.plain_byte(part, place % tables.full.rows, channel)) =
          to_bits(tables.full_type, rows.element(part, first + row, channel));
    }
  }
  if (head == 0 && piece == 0 && threadIdx.x == 0) tables.lengths[slot].tail_length = count;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
