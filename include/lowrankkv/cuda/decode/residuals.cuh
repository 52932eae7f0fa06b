// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/residuals.cuh  Residuals of rows: what compression lost of rows that have just
/// been stored. They are decoded and compared with what they were. The counterpart of
/// cpu/residuals.hpp.
///
/// Stored of a row: ||k - k^|| and ||v - v^||, rounded up to f16. Stored of a head: at least the
/// largest ||v||. Norms cover the rounding of f32 arithmetic: 1.001 (||k - k^|| + 1e-6 ||k||).
/// Cost: a reconstruction of the rows (of the whole list, where rows take the places of evicted
/// rows), and 16 head_dim bytes a row and KV head written and read once more.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/decode/reconstruct.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Flushed rows of a sequence, which are still in their source.
struct FlushedRows {
  RowSource source;
  std::int32_t slot = 0, count = 0;
  /// Row of the source at which they begin. In a tail's ring the flushed rows stand behind the last
  /// row.
  std::int32_t first = 0;
  std::int32_t position = 0;  ///< of the first flushed row
};

namespace detail {

/// The sum over a warp.
__device__ __forceinline__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0U, x, distance);
  return x;
}

/// A norm rounded up to f16. Infinity, if it is beyond the largest f16 or not a number: anything
/// may have been lost.
__device__ __forceinline__ std::uint32_t residual_bits(float norm) {
  return norm <= 65504.0F ? __half_as_ushort(__float2half_ru(norm)) : std::uint16_t{0x7c00};
}

/// At least the norm of a row's value. A warp calls it.
__device__ inline float value_norm(const SourceRows& rows, int row, int head_dim) {
  float energy = 0.0F;
  for (int channel = static_cast<int>(threadIdx.x) % 32; channel < head_dim; channel += 32) {
    const float x = rows.element(Part::value, row, channel);
    energy = fmaf(x, x, energy);
  }
  return 1.001F * sqrtf(warp_sum(energy));
}

/// The target for rows that are decoded to f32, [rows, heads, head_dim].
inline DeviceTarget decoded_target(const LayerView& tables, float* rows) {
  return {rows, DType::f32, std::int64_t{tables.num_heads} * tables.head_dim, tables.head_dim, {}};
}

/// A grid of pieces of eight rows x KV heads; a warp takes a row.
inline dim3 warp_per_row(const LayerView& tables, std::int64_t rows) {
  return dim3(static_cast<unsigned>((rows + kStoreThreads / 32 - 1) / (kStoreThreads / 32)),
              static_cast<unsigned>(tables.num_heads));
}

}  // namespace detail

/// @brief Raises each head's largest norm of a value to that of the flushed rows. Grid: pieces of
/// eight rows x KV heads, a warp a row.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    largest_values_kernel(LayerEdit tables, FlushedRows flushed) {
  const int head = static_cast<int>(blockIdx.y),
            row = static_cast<int>(blockIdx.x) * (kStoreThreads / 32) +
                  static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  if (row >= flushed.count) return;
  const SourceRows rows(tables, flushed.source, flushed.slot, head);
  const float norm = detail::value_norm(rows, flushed.first + row, tables.head_dim);
  if (lane == 0)
    atomicMax(reinterpret_cast<int*>(tables.largest_values + tables.index(flushed.slot, head)),
              __float_as_int(norm));
}

/// @brief Notes the residuals of flushed rows that are among rows [first, first + count) of a list.
/// These rows are decoded in keys and values [count, heads, head_dim]. Grid: pieces of eight rows x
/// KV heads, a warp a row.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    note_residuals_kernel(LayerEdit tables, FlushedRows flushed, RowList list, int first, int count,
                          const float* keys, const float* values) {
  const int head = static_cast<int>(blockIdx.y),
            index = static_cast<int>(blockIdx.x) * (kStoreThreads / 32) +
                    static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, listed = first + index;
  const HeadRows lists = tables.rows[tables.index(flushed.slot, head)];
  if (index >= count || listed >= rows_in(lists, list)) return;
  const int row =
      detail::position_of(tables, list, flushed.slot, head, lists, listed) - flushed.position;
  if (row < 0 || row >= flushed.count) return;  // the row was stored before
  const SourceRows rows(tables, flushed.source, flushed.slot, head);
  const std::size_t at =
      (static_cast<std::size_t>(index) * static_cast<std::size_t>(tables.num_heads) +
       static_cast<std::size_t>(head)) *
      static_cast<std::size_t>(tables.head_dim);
  std::uint32_t norms = 0;
  for (const Part part : {Part::key, Part::value}) {
    const float* decoded = (part == Part::key ? keys : values) + at;
    float lost = 0.0F, energy = 0.0F;
    for (int channel = lane; channel < tables.head_dim; channel += 32) {
      const float x = rows.element(part, flushed.first + row, channel),
                  difference = x - decoded[channel];
      lost = fmaf(difference, difference, lost);
      energy = fmaf(x, x, energy);
    }
    const float norm =
        1.001F * (sqrtf(detail::warp_sum(lost)) + 1e-6F * sqrtf(detail::warp_sum(energy)));
    norms |= detail::residual_bits(norm) << (part == Part::key ? 0 : 16);
  }
  if (lane == 0) tables.row_residuals(list, flushed.slot, head)[listed] = norms;
}

/// @brief Enqueues the residuals of rows that have just been stored: at most `full` and
/// `compressed` rows, at the ends of every head's lists. The row counts of host and device include
/// them. Allocates nothing, does not wait.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam joint     whether values are joint
/// @tparam replaces  rows may stand anywhere in their list, since they take the places of evicted
/// rows: the whole list is decoded
/// @param decoded  scratch for kDecodedRows rows: keys, then values
template <int scale_groups, bool joint, bool replaces>
void note_residuals(const LayerState& layer, const FlushedRows& flushed, std::int64_t full,
                    std::int64_t compressed, float* decoded, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const HostSequence& now = layer.sequence(flushed.slot);
  largest_values_kernel<>
      <<<detail::warp_per_row(tables, flushed.count), kStoreThreads, 0, stream>>>(tables, flushed);
  check(cudaGetLastError(), "largest_values_kernel");
  float* const values = decoded + kDecodedRows * tables.num_heads * tables.head_dim;
  const DeviceTarget key = detail::decoded_target(tables, decoded),
                     value = detail::decoded_target(tables, values);
  for (const RowList list : {RowList::full, RowList::compressed}) {
    const std::int64_t added = list == RowList::full ? full : compressed, rows = now.num_rows(list);
    if (tables.residuals[static_cast<int>(list)] == nullptr || (added == 0 && !replaces)) continue;
    std::int64_t begin = replaces ? 0 : rows;
    for (int head = 0; head < tables.num_heads; ++head)
      begin = (std::min)(begin, now.num_rows(list, head) - added);  // of the head with the fewest
    for (std::int64_t first = (std::max)(begin, std::int64_t{0}); first < rows;
         first += kDecodedRows) {
      const TokenRange range = row_range(list, first, (std::min)(kDecodedRows, rows - first));
      if (list == RowList::full)
        copy_rows(layer, flushed.slot, range, key, value, stream);
      else
        decode_rows<scale_groups>(layer, flushed.slot, range, key, value, stream);
      if constexpr (joint) {
        if (list == RowList::compressed)
          decode_rows<scale_groups, true>(layer, flushed.slot, range, key, value, stream);
      }
      note_residuals_kernel<>
          <<<detail::warp_per_row(tables, range.count), kStoreThreads, 0, stream>>>(
              tables, flushed, list, static_cast<int>(first), static_cast<int>(range.count),
              decoded, values);
      check(cudaGetLastError(), "note_residuals_kernel");
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
