// SPDX-License-Identifier: Apache-2.0
/// @file cuda/reconstruct.cuh  Stored rows back as K and V.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Tokens of a block.
inline constexpr int kReconstructRows = 16;

/// @brief Writable rows as kernels see them.
struct DeviceTarget {
  float* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
};

/// @brief Where a token's row of a head is.
struct RowPlace {
  RowState state = RowState::full;
  bool in_tail = false;
  int row = 0;  ///< of the list, or of the tail
};

namespace detail {

/// The first of `count` ascending numbers that is not less than `wanted`.
__device__ inline int lower_bound(const std::int32_t* numbers, int count, int wanted) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

/// Where the row of a position is, the tail beginning at `first_tail`.
__device__ inline RowPlace place_of(const Tables& tables, int slot, int head, const HeadRows& lists, std::int64_t first_tail, std::int64_t position) {
  const std::int32_t *full = tables.row_positions(RowList::full, slot, head), *compressed = tables.row_positions(RowList::compressed, slot, head);
  const int at = static_cast<int>(position);
  if (position >= first_tail) return {RowState::full, true, static_cast<int>(position - first_tail)};
  if (full == nullptr) return at < lists.num_full ? RowPlace{RowState::full, false, at} : RowPlace{RowState::compressed, false, at - lists.num_full};
  const int before = lower_bound(full, lists.num_full, at);
  if (before < lists.num_full && full[before] == at) return {RowState::full, false, before};
  if (compressed == nullptr) return {at - before < lists.num_compressed ? RowState::compressed : RowState::dropped, false, at - before};
  const int row = lower_bound(compressed, lists.num_compressed, at);
  return {row < lists.num_compressed && compressed[row] == at ? RowState::compressed : RowState::dropped, false, row};
}

/// Element (row, channel) of a plain tile.
__device__ inline float plain_element(const std::uint8_t* tile, const HeadTiles& layout, Part part, DType type, int row, int channel) {
  return from_bits(type, *reinterpret_cast<const std::uint16_t*>(tile + layout.plain_byte(part, row, channel)));
}

/// Channel (row, channel) of a tile of codes as maps expect it: gain times the plane about its centre, values as often as sums count them.
__device__ inline float code_element(const std::uint8_t* tile, const HeadTiles& layout, Part part, int row, int channel) {
  int offset = layout.offset(part);
  const std::uint8_t* widths = part == Part::key ? layout.key_widths : layout.value_widths;
  for (int unit = 0; unit < channel / kCodeUnit; ++unit) offset += code_unit_bytes(widths[unit]);
  const int bits = widths[channel / kCodeUnit];
  const CodePlace place = part == Part::key ? key_place(bits, row, channel % kCodeUnit) : value_place(bits, row, channel % kCodeUnit);
  const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(tile + offset + place.word);
  const float level = static_cast<float>(word >> place.shift & ((1U << bits) - 1U)) - 0.5F * static_cast<float>((1 << bits) - 1);
  return level * stored_gain(tile, layout, part, row) * (part == Part::key ? 1.0F : static_cast<float>(value_weight(bits, channel)));
}

}  // namespace detail

/// @brief Writes K and V of tokens [first, first + count): full rows as stored, others decoded. Grid: pieces of 16 tokens x KV heads.
/// Positions are in the order full, compressed, tail, unless they are listed; rows that were dropped are zeros.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) reconstruct_kernel(Tables tables, CodedForm form, DType coded_type, int slot, std::int64_t first, std::int64_t count, std::int64_t first_tail,
                                                                           DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* coefficients = reinterpret_cast<float*>(shared_memory);  // [kReconstructRows, channels]
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kReconstructRows;
  const int rows = static_cast<int>(min(static_cast<std::int64_t>(kReconstructRows), count - begin));
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const DeviceLengths lengths = tables.lengths[slot];
  const std::int32_t* full_pages = tables.page_table(RowList::full, slot, head);
  const std::int32_t* coded_pages = tables.page_table(RowList::compressed, slot, head);
  __shared__ RowPlace places[kReconstructRows];
  if (static_cast<int>(threadIdx.x) < rows) places[threadIdx.x] = detail::place_of(tables, slot, head, lists, first_tail, first + begin + threadIdx.x);
  __syncthreads();
  for (const Part part : {Part::key, Part::value}) {
    const DeviceTarget& target = part == Part::key ? key : value;
    const HeadTiles* layout = form == CodedForm::none ? nullptr : tables.compressed + head;
    const int channels = layout == nullptr ? 0 : layout->channels(part);
    for (int item = static_cast<int>(threadIdx.x); item < rows * channels; item += kStoreThreads) {
      const RowPlace place = places[item / channels];
      if (place.state != RowState::compressed) continue;
      const int row = place.row, channel = item % channels;
      const std::uint8_t* tile = tables.tile(coded_pages, *layout, row / layout->rows);
      coefficients[item] = form == CodedForm::codes ? detail::code_element(tile, *layout, part, row % layout->rows, channel)
                                                    : detail::plain_element(tile, *layout, part, coded_type, row % layout->rows, channel);
    }
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < rows * dim; item += kStoreThreads) {
      const int local = item / dim, channel = item % dim, row = places[local].row;
      float result = 0.0F;
      if (places[local].in_tail) {
        const int place = (lengths.tail_first + row) % tables.ring_rows();
        result = detail::plain_element(tables.tail_tile(slot, head, place), tables.full, part, tables.full_type, place % tables.full.rows, channel);
      } else if (places[local].state == RowState::full) {
        result = detail::plain_element(tables.tile(full_pages, tables.full, row / tables.full.rows), tables.full, part, tables.full_type, row % tables.full.rows, channel);
      } else if (places[local].state == RowState::compressed) {
        int segment = 0;
        while (segment + 1 < tables.num_segments(slot, lists.num_compressed) && row >= tables.segment(slot, lists.num_compressed, segment, 0).end) ++segment;
        const PartMaps& maps = tables.maps[tables.segment(slot, lists.num_compressed, segment, 0).epoch * tables.num_heads + head].of(part);
        for (int k = 0; k < channels; ++k) result = fmaf(coefficients[local * channels + k], maps.element(maps.reader, k, channel, dim), result);
        if (maps.mean != nullptr) result += maps.mean[channel];
      }
      target.data[(begin + local) * target.token_stride + head * target.head_stride + channel] = result;
    }
    __syncthreads();
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
