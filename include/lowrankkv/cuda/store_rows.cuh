// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store_rows.cuh  Rows leave full rank, or are stored as they are: project, quantise, pack into tiles.
///
/// A block stores what falls into 64 consecutive rows of a list of one KV head. Rows are rounded to full_type first: everything sees
/// the rounded row. Projections are f32 sums; codes and gains are those of quantizer/transform_code.hpp.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/head_maps.cuh"
#include "lowrankkv/cuda/tables.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kStoreThreads = 256;  ///< of a block
inline constexpr int kStoreRows = 64;  ///< of a list, per block: a tile of codes, four plain ones

/// @brief What is stored: plain rows, their coefficients in plain tiles, or their codes.
enum class StoreForm : std::uint8_t { full, coefficients, codes };

/// @brief Where rows come from: the tails, or a view whose row `first` is the first to be stored.
struct RowSource {
  DeviceRows key, value;
  std::int64_t first = 0;
  bool from_tail = true;
  float limit = 0.0F;  ///< of a view: magnitudes above it, and NaN, are refused; 0: no check
};

namespace detail {

/// Shared memory of a block, in order: rows, coefficients, gains, a tile of codes.
struct StoreMemory {
  float* rows;           // [kStoreRows, head_dim]
  float* coefficients;   // [kStoreRows, rank + 1]
  float* inverse_gains;  // [kStoreRows]
  std::uint32_t* tile;
};

__host__ __device__ inline std::size_t store_bytes(int head_dim, int max_rank, int tile_bytes) {
  return sizeof(float) * static_cast<std::size_t>(kStoreRows * (head_dim + max_rank + 2)) + static_cast<std::size_t>(tile_bytes);
}

/// One element of a leaving row, rounded to full_type.
__device__ inline float source_value(const Tables& tables, const RowSource& source, int slot, int head, std::int64_t row, int channel, Part part) {
  if (!source.from_tail) return from_bits(tables.full_type, to_bits(tables.full_type, (part == Part::key ? source.key : source.value).at(source.first + row, head, channel)));
  const int place = (tables.lengths[slot].tail_first + static_cast<int>(row)) % tables.ring_rows();
  return from_bits(tables.full_type, *reinterpret_cast<const std::uint16_t*>(tables.tail_tile(slot, head, place) + tables.full.plain_byte(part, place % tables.full.rows, channel)));
}

/// coefficients [kStoreRows, rank + 1] = rows [kStoreRows, head_dim] encoder [head_dim, rank].
__device__ inline void project_rows(const float* rows, int head_dim, const PartMaps& maps, float* coefficients) {
  constexpr int kHalf = kStoreRows / 2;
  for (int item = static_cast<int>(threadIdx.x); item < 2 * maps.rank; item += kStoreThreads) {
    const int channel = item % maps.rank, first = item / maps.rank * kHalf;
    float sums[kHalf] = {};
    for (int d = 0; d < head_dim; d += 4) {
      float w[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __ldg(maps.encoder + (d + i) * maps.rank + channel);
      #pragma unroll
      for (int row = 0; row < kHalf; ++row) {
        const float4 x = *reinterpret_cast<const float4*>(rows + (first + row) * head_dim + d);
        sums[row] = fmaf(x.w, w[3], fmaf(x.z, w[2], fmaf(x.y, w[1], fmaf(x.x, w[0], sums[row]))));
      }
    }
    for (int row = 0; row < kHalf; ++row) coefficients[(first + row) * (maps.rank + 1) + channel] = sums[row];
  }
}

/// Writes rows of a part into plain tiles; rows past the list's end become zeros, which weigh nothing.
__device__ inline void store_plain(const Tables& tables, const std::int32_t* table, const HeadTiles& layout, Part part, DType type, const float* values, int stride, int width, int tile_row,
                                   int begin, int end) {
  const int channels = layout.channels(part);
  const int padded_end = (end + layout.rows - 1) / layout.rows * layout.rows;
  for (int item = static_cast<int>(threadIdx.x); item < (padded_end - begin) * channels; item += kStoreThreads) {
    const int row = begin + item / channels, channel = item % channels;
    const float value = row < end && channel < width ? values[row * stride + channel] : 0.0F;
    std::uint8_t* tile = tables.tile(table, layout, (tile_row + row) / layout.rows);
    *reinterpret_cast<std::uint16_t*>(tile + layout.plain_byte(part, row % layout.rows, channel)) = to_bits(type, value);
  }
}

/// 8-bit logarithmic gain: code 0 is 0, code c is 2^((c - 128) / 16).
__device__ inline int gain_code(float gain) {
  if (!(gain > 0.0F)) return 0;
  if (!(gain < 256.0F)) return 255;
  return min(255, max(1, static_cast<int>(lroundf(16.0F * log2f(gain))) + 128));
}
__device__ inline float gain_of(int code) { return code == 0 ? 0.0F : exp2f((static_cast<float>(code) - 128.0F) * 0.0625F); }

/// Gains of the rows, into the tile and as inverses.
__device__ inline void store_gains(const PartMaps& maps, Part part, const StoreMemory& memory, int begin, int end) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = begin + warp; row < end; row += kStoreThreads / 32) {
    float energy = 0.0F;
    for (int channel = lane; channel < maps.coded; channel += 32) {
      const float value = memory.coefficients[row * (maps.rank + 1) + channel];
      energy = fmaf(value, value, energy);
    }
    for (int distance = 16; distance > 0; distance /= 2) energy += __shfl_xor_sync(~0U, energy, distance);
    if (lane != 0) continue;
    const int code = gain_code(sqrtf(energy) / maps.reference_norm);
    reinterpret_cast<std::uint8_t*>(memory.tile)[(part == Part::key ? 0 : kCodeRows) + row] = static_cast<std::uint8_t>(code);
    memory.inverse_gains[row] = code == 0 ? 0.0F : 1.0F / gain_of(code);
  }
}

/// Calls f(channel, row, word of the tile, shift) for the codes of rows [begin, end) of a part.
template <class Function>
__device__ void for_each_code(const HeadTiles& layout, Part part, int begin, int end, Function&& function) {
  const int units = part == Part::key ? layout.key_units : layout.value_units;
  int offset = layout.offset(part);
  for (int unit = 0; unit < units; ++unit) {
    const int bits = part == Part::key ? layout.key_widths[unit] : layout.value_widths[unit];
    for (int item = static_cast<int>(threadIdx.x); item < kCodeUnit * kCodeRows; item += kStoreThreads) {
      const int channel = item / kCodeRows, row = item % kCodeRows;
      if (row < begin || row >= end) continue;
      const CodePlace place = part == Part::key ? key_place(bits, row, channel) : value_place(bits, row, channel);
      function(unit * kCodeUnit + channel, row, (offset + place.word) / 4, place.shift);
    }
    offset += code_unit_bytes(bits);
  }
}

/// Codes of rows [begin, end) of a part into the tile in shared memory, whose bits there are clear.
__device__ inline void store_codes(const HeadTiles& layout, const PartMaps& maps, Part part, const StoreMemory& memory, int begin, int end) {
  for_each_code(layout, part, begin, end, [&](int index, int row, int word, int shift) {
    const TileChannel channel = maps.channels[index];
    if (channel.source < 0) return;
    const float half_range = static_cast<float>(1U << (channel.bits - 1));
    const float level = floorf(memory.coefficients[row * (maps.rank + 1) + channel.source] * memory.inverse_gains[row]) + half_range;
    const std::uint32_t code = static_cast<std::uint32_t>(fminf(fmaxf(0.0F, level), 2.0F * half_range - 1.0F));  // NaN becomes the lowest level
    atomicOr(memory.tile + word, (code >> channel.shift & ((1U << channel.width) - 1U)) << shift);
  });
}

}  // namespace detail

/// @brief Stores leaving rows of a batch in the full list (StoreForm::full) or the compressed one. Pages are in place; lengths are
/// those before. Grid: 64-row pieces of a list x KV heads x sequences.
template <StoreForm form>
__global__ void __launch_bounds__(kStoreThreads) store_rows_kernel(Tables tables, const HeadMaps* all_maps, RowSource source, Leaving leaving, DType type) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int head = static_cast<int>(blockIdx.y), index = static_cast<int>(blockIdx.z), slot = leaving.slots[index], dim = tables.head_dim;
  constexpr RowList list = form == StoreForm::full ? RowList::full : RowList::compressed;
  const HeadTiles& layout = form == StoreForm::full ? tables.full : tables.compressed[head];
  const std::int32_t* table = tables.page_table(list, slot, head);
  const int first = tables.num_rows(list, slot, head);
  const int count = form == StoreForm::full ? leaving.full[index] : leaving.compressed[index];
  const int skipped = form == StoreForm::full ? 0 : leaving.full[index];  // of the source: they went to the full list
  const int tile_row = (first / kStoreRows + static_cast<int>(blockIdx.x)) * kStoreRows;
  const int begin = max(first - tile_row, 0), end = min(first + count - tile_row, kStoreRows);
  if (begin >= end) return;
  int max_rank = 0;
  if constexpr (form != StoreForm::full) max_rank = max(all_maps[head].key.rank, all_maps[head].value.rank);
  detail::StoreMemory memory;
  memory.rows = reinterpret_cast<float*>(shared_memory);
  memory.coefficients = memory.rows + kStoreRows * dim;
  memory.inverse_gains = memory.coefficients + kStoreRows * (max_rank + 1);
  memory.tile = reinterpret_cast<std::uint32_t*>(memory.inverse_gains + kStoreRows);
  __shared__ int refused[kStoreRows];
  for (int row = static_cast<int>(threadIdx.x); row < kStoreRows; row += kStoreThreads) refused[row] = 0;
  std::uint32_t* target = nullptr;
  if constexpr (form == StoreForm::codes) {
    target = reinterpret_cast<std::uint32_t*>(tables.tile(table, layout, tile_row / kCodeRows));
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads) memory.tile[word] = begin > 0 ? target[word] : 0U;
  }
  __syncthreads();
  if constexpr (form == StoreForm::codes) {
    for (const Part part : {Part::key, Part::value}) {
      if (begin == 0) break;  // rows that were here and are dropped left their bits
      const PartMaps& maps = all_maps[head].of(part);
      detail::for_each_code(layout, part, begin, kCodeRows, [&](int channel, int, int word, int shift) {
        if (maps.channels[channel].source >= 0) atomicAnd(memory.tile + word, ~(((1U << maps.channels[channel].width) - 1U) << shift));
      });
    }
  }
  if (!source.from_tail && source.limit > 0.0F) {
    for (int item = static_cast<int>(threadIdx.x); item < (end - begin) * dim; item += kStoreThreads) {
      const int row = begin + item / dim;
      const std::int64_t from = source.first + skipped + tile_row + row - first;
      const bool usable = fabsf(source.key.at(from, head, item % dim)) <= source.limit && fabsf(source.value.at(from, head, item % dim)) <= source.limit;
      if (!usable && atomicExch(&refused[row], 1) == 0) atomicAdd(tables.faults, 1U);
    }
  }
  __syncthreads();
  for (const Part part : {Part::key, Part::value}) {
    const float* mean = nullptr;
    if constexpr (form != StoreForm::full) mean = all_maps[head].of(part).mean;
    for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * dim; item += kStoreThreads) {
      const int row = item / dim, channel = item % dim;
      float value = 0.0F;
      if (row >= begin && row < end) {
        if (refused[row] == 0) value = detail::source_value(tables, source, slot, head, skipped + tile_row + row - first, channel, part);
        if (mean != nullptr) value -= mean[channel];
      }
      memory.rows[item] = value;
    }
    __syncthreads();
    if constexpr (form == StoreForm::full) {
      detail::store_plain(tables, table, layout, part, type, memory.rows, dim, dim, tile_row, begin, end);
    } else {
      const PartMaps& maps = all_maps[head].of(part);
      detail::project_rows(memory.rows, dim, maps, memory.coefficients);
      __syncthreads();
      if constexpr (form == StoreForm::coefficients) {
        detail::store_plain(tables, table, layout, part, type, memory.coefficients, maps.rank + 1, maps.rank, tile_row, begin, end);
      } else {
        detail::store_gains(maps, part, memory, begin, end);
        __syncthreads();
        detail::store_codes(layout, maps, part, memory, begin, end);
      }
    }
    __syncthreads();
  }
  if constexpr (form == StoreForm::codes) {
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads) target[word] = memory.tile[word];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
