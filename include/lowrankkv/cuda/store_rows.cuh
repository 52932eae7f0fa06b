// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store_rows.cuh  Rows leave full rank, or are stored as they are: project, quantise, pack into tiles.
///
/// A block stores what falls into 64 consecutive rows of a list of one KV head. Rows are rounded to full_type first: everything sees
/// the rounded row. Projections are f32 sums on tensor cores: rows of 16-bit numbers are tf32 as they are, maps are the sum of two tf32; codes and gains are those of quantizer/transform_code.hpp.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/head_maps.cuh"
#include "lowrankkv/cuda/tables.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

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
  float limit = 0.0F;  ///< of a view: magnitudes above it, and NaN, are refused
};

namespace detail {

/// Shared memory of a block, in order: rows, coefficients, gains, a tile of codes.
struct StoreMemory {
  float* rows;           // [kStoreRows, row_stride(head_dim)]
  float* coefficients;   // [kStoreRows, rank + 1]
  float* inverse_gains;  // [kStoreRows]
  std::uint32_t* tile;
};

/// Elements from a row to the next: no two lanes of a fragment meet in a bank.
__host__ __device__ constexpr int row_stride(int head_dim) { return head_dim + 4; }

__host__ __device__ inline std::size_t store_bytes(int head_dim, int max_rank, int tile_bytes) {
  return sizeof(float) * static_cast<std::size_t>(kStoreRows * (row_stride(head_dim) + max_rank + 2)) + static_cast<std::size_t>(tile_bytes);
}

/// One element of a leaving row, rounded to full_type.
__device__ inline float source_value(const Tables& tables, const RowSource& source, int slot, int head, std::int64_t row, int channel, Part part) {
  if (!source.from_tail) return from_bits(tables.full_type, to_bits(tables.full_type, (part == Part::key ? source.key : source.value).at(source.first + row, head, channel)));
  const int place = (tables.lengths[slot].tail_first + static_cast<int>(row)) % tables.ring_rows();
  return from_bits(tables.full_type, *reinterpret_cast<const std::uint16_t*>(tables.tail_tile(slot, head, place) + tables.full.plain_byte(part, place % tables.full.rows, channel)));
}

/// Rows [begin, end) of a part to shared memory, rounded to full_type, the others zeros.
__device__ inline void load_rows(const Tables& tables, const RowSource& source, int slot, int head, std::int64_t first, Part part, const int* refused, int begin, int end, float* rows) {
  const int dim = tables.head_dim, stride = row_stride(dim);
  const DeviceRows& view = part == Part::key ? source.key : source.value;
  const auto address = reinterpret_cast<std::uintptr_t>(view.data);
  const bool packed = !source.from_tail && view.dtype == tables.full_type && view.element_stride == 1 && address % 16 == 0 && view.token_stride % 8 == 0 && view.head_stride % 8 == 0;
  if (packed) {  // eight elements a load
    const int per_row = dim / 8;
    #pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * per_row; item += kStoreThreads) {
      const int row = item / per_row, channel = item % per_row * 8;
      uint4 words = {0, 0, 0, 0};
      if (row >= begin && row < end && refused[row] == 0) {
        words = __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(view.data) + (source.first + first + row) * view.token_stride + head * view.head_stride + channel));
      }
      const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
      float values[8];
      #pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = from_bits(tables.full_type, static_cast<std::uint16_t>(all[i / 2] >> (16 * (i % 2))));
      *reinterpret_cast<float4*>(rows + row * stride + channel) = {values[0], values[1], values[2], values[3]};
      *reinterpret_cast<float4*>(rows + row * stride + channel + 4) = {values[4], values[5], values[6], values[7]};
    }
    return;
  }
  #pragma unroll 4
  for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * dim; item += kStoreThreads) {
    const int row = item / dim, channel = item % dim;
    rows[row * stride + channel] = row >= begin && row < end && refused[row] == 0 ? source_value(tables, source, slot, head, first + row, channel, part) : 0.0F;
  }
}

/// coefficients [kStoreRows, rank + 1] = rows [kStoreRows, head_dim] encoder [head_dim, rank] - offset. A warp makes 16 coefficients of all
/// rows at a time.
__device__ inline void project_rows(const float* rows, int head_dim, const PartMaps& maps, float* coefficients) {
  constexpr int kRowBlocks = kStoreRows / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int stride = row_stride(head_dim), steps = head_dim / 8;
  const bool exact = maps.type != DType::f32;  // maps of 16 bits are tf32 as they are; others the sum of two
  for (int block = warp; block < (maps.rank + 15) / 16; block += kStoreThreads / 32) {
    float sums[kRowBlocks][2][4] = {};
    #pragma unroll 2
    for (int k = 0; k < steps; ++k) {
      const float4 map = maps.quad(maps.encoder, (block * steps + k) * 32 + lane);
      const float4 rest = {beyond_tf32(map.x), beyond_tf32(map.y), beyond_tf32(map.z), beyond_tf32(map.w)};
      #pragma unroll
      for (int m = 0; m < kRowBlocks; ++m) {
        const float* own = rows + (16 * m + g) * stride + 8 * k + t;
        const float4 a = {own[0], own[8 * stride], own[4], own[8 * stride + 4]};
        if (!exact) {
          mma_tf32(sums[m][0], a, rest.x, rest.z);
          mma_tf32(sums[m][1], a, rest.y, rest.w);
        }
        mma_tf32(sums[m][0], a, map.x, map.z);
        mma_tf32(sums[m][1], a, map.y, map.w);
      }
    }
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = 16 * block + 8 * n + 2 * t + i;
        if (channel >= maps.rank) continue;
        const float offset = maps.offset[channel];
        #pragma unroll
        for (int m = 0; m < kRowBlocks; ++m) {
          coefficients[(16 * m + g) * (maps.rank + 1) + channel] = sums[m][n][i] - offset;
          coefficients[(16 * m + g + 8) * (maps.rank + 1) + channel] = sums[m][n][2 + i] - offset;
        }
      }
    }
  }
}

/// Writes rows of a part into plain tiles; rows past the list's end become zeros, which weigh nothing. tiles: those of the piece's rows.
__device__ inline void store_plain(const HeadTiles& layout, std::uint8_t* const* tiles, Part part, DType type, const float* values, int stride, int width, int begin, int end) {
  const int channels = layout.channels(part), units = channels / kPlainUnit;
  const int padded_end = (end + layout.rows - 1) / layout.rows * layout.rows;
  const auto value_at = [&](int row, int channel) { return row < end && channel < width ? values[row * stride + channel] : 0.0F; };
  // Sixteen rows that are all new: lanes write their 16 bytes of every unit.
  const int whole = (begin + kPlainRows - 1) / kPlainRows;  // steps of 16 rows from here on
  for (int item = static_cast<int>(threadIdx.x); item < (padded_end / kPlainRows - whole) * units * 32; item += kStoreThreads) {
    const int lane = item % 32, unit = item / 32 % units, step = whole + item / 32 / units;
    std::uint32_t words[4];
    #pragma unroll
    for (int word = 0; word < 4; ++word) {
      // A is [m, k]: m = lane / 4 (+ 8), k = 2 (lane % 4) (+ 8), two at a time.
      const int m = lane / 4 + 8 * (word % 2), k = 2 * (lane % 4) + 8 * (word / 2);
      const int row = step * kPlainRows + (part == Part::key ? m : k), channel = unit * kPlainUnit + (part == Part::key ? k : m);
      const float first = value_at(row, channel), second = part == Part::key ? value_at(row, channel + 1) : value_at(row + 1, channel);
      words[word] = static_cast<std::uint32_t>(to_bits(type, first)) | static_cast<std::uint32_t>(to_bits(type, second)) << 16;
    }
    const int row = step * kPlainRows;
    std::uint8_t* tile = tiles[row / layout.rows];
    *reinterpret_cast<uint4*>(tile + layout.offset(part) + (row % layout.rows / kPlainRows * units + unit) * kPlainUnitBytes + 16 * lane) = {words[0], words[1], words[2], words[3]};
  }
  const int partial_end = min(whole * kPlainRows, padded_end);
  for (int item = static_cast<int>(threadIdx.x); item < (partial_end - begin) * channels; item += kStoreThreads) {
    const int row = begin + item / channels, channel = item % channels;
    *reinterpret_cast<std::uint16_t*>(tiles[row / layout.rows] + layout.plain_byte(part, row % layout.rows, channel)) = to_bits(type, value_at(row, channel));
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
__global__ void __launch_bounds__(kStoreThreads) store_rows_kernel(Tables tables, RowSource source, Leaving leaving, DType type) {
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
  HeadMaps maps_now;
  if constexpr (form != StoreForm::full) maps_now = tables.current_maps(slot, head);
  const int max_rank = max(maps_now.key.rank, maps_now.value.rank);
  detail::StoreMemory memory;
  memory.rows = reinterpret_cast<float*>(shared_memory);
  memory.coefficients = memory.rows + kStoreRows * detail::row_stride(dim);
  memory.inverse_gains = memory.coefficients + kStoreRows * (max_rank + 1);
  memory.tile = reinterpret_cast<std::uint32_t*>(memory.inverse_gains + kStoreRows);
  __shared__ int refused[kStoreRows];
  __shared__ std::uint8_t* tiles[kStoreRows / kPlainRows];  // plain ones
  if (form != StoreForm::codes && threadIdx.x < static_cast<unsigned>(kStoreRows / layout.rows) && static_cast<int>(threadIdx.x) * layout.rows < end) {
    tiles[threadIdx.x] = tables.tile(table, layout, tile_row / layout.rows + static_cast<int>(threadIdx.x));
  }
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
      const PartMaps& maps = maps_now.of(part);
      detail::for_each_code(layout, part, begin, kCodeRows, [&](int channel, int, int word, int shift) {
        if (maps.channels[channel].source >= 0) atomicAnd(memory.tile + word, ~(((1U << maps.channels[channel].width) - 1U) << shift));
      });
    }
  }
  if (!source.from_tail) {
    for (int item = static_cast<int>(threadIdx.x); item < (end - begin) * dim; item += kStoreThreads) {
      const int row = begin + item / dim;
      const std::int64_t from = source.first + skipped + tile_row + row - first;
      const bool usable = fabsf(source.key.at(from, head, item % dim)) <= source.limit && fabsf(source.value.at(from, head, item % dim)) <= source.limit;
      if (!usable && atomicExch(&refused[row], 1) == 0) atomicAdd(tables.faults, 1U);
    }
  }
  __syncthreads();
  for (const Part part : {Part::key, Part::value}) {
    detail::load_rows(tables, source, slot, head, skipped + tile_row - first, part, refused, begin, end, memory.rows);
    __syncthreads();
    if constexpr (form == StoreForm::full) {
      detail::store_plain(layout, tiles, part, type, memory.rows, detail::row_stride(dim), dim, begin, end);
    } else {
      const PartMaps& maps = maps_now.of(part);
      detail::project_rows(memory.rows, dim, maps, memory.coefficients);
      __syncthreads();
      if constexpr (form == StoreForm::coefficients) {
        detail::store_plain(layout, tiles, part, type, memory.coefficients, maps.rank + 1, maps.rank, begin, end);
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
