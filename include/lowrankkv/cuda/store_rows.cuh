// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store_rows.cuh  Rows leave full rank, or are stored as they are: project, quantise, pack into tiles.
///
/// A block stores what falls into 64 consecutive rows of a list of one KV head. Projections are f32 sums on tensor cores: rows of 16-bit numbers are tf32 as they are, maps are
/// the sum of two tf32; codes and gains are those of quantizer/code_layout.hpp.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/row_source.cuh"
#include "lowrankkv/cuda/tile_ring.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What is stored: plain rows, their coefficients in plain tiles, or their codes.
enum class StoreForm : std::uint8_t { full, coefficients, codes };

namespace detail {

/// Shared memory of a block, in order: rows, where they do not go straight from their words into products; coefficients, gains, a tile of codes.
struct StoreMemory {
  float* rows;           // [kStoreRows, row_stride(head_dim)], or nothing
  float* coefficients;   // [kStoreRows, rank + 1]
  float* inverse_gains;  // [kStoreRows]
  std::uint32_t* tile;
};

/// Elements from a row to the next: no two lanes of a fragment meet in a bank.
__host__ __device__ constexpr int row_stride(int head_dim) { return head_dim + 4; }

__host__ __device__ inline std::size_t store_bytes(int head_dim, bool stages_rows, int max_rank, int tile_bytes) {
  return sizeof(float) * static_cast<std::size_t>(kStoreRows * ((stages_rows ? row_stride(head_dim) : 0) + max_rank + 2)) + static_cast<std::size_t>(tile_bytes);
}

/// coefficients [16 row_blocks, coefficient_stride] = rows [16 row_blocks, head_dim] encoder [head_dim, rank] - offset. A warp makes 16 coefficients of
/// all rows at a time. exact_rows: they are numbers of 16 bits, tf32 as they are; others are the sum of two.
template <int row_blocks, bool exact_rows>
__device__ void project_rows(const float* rows, int head_dim, const PartMaps& maps, float* coefficients, int coefficient_stride) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int stride = row_stride(head_dim), steps = head_dim / 8;
  const bool exact = maps.type != DType::f32;  // maps of 16 bits are tf32 as they are; others the sum of two
  for (int block = warp; block < (maps.rank + 15) / 16; block += kStoreThreads / 32) {
    float sums[row_blocks][2][4] = {};
    #pragma unroll 2
    for (int k = 0; k < steps; ++k) {
      const float4 map = maps.quad(maps.encoder, (block * steps + k) * 32 + lane);
      const float4 rest = {beyond_tf32(map.x), beyond_tf32(map.y), beyond_tf32(map.z), beyond_tf32(map.w)};
      #pragma unroll
      for (int m = 0; m < row_blocks; ++m) {
        const float* own = rows + (16 * m + g) * stride + 8 * k + 2 * t;
        const float4 a = {own[0], own[8 * stride], own[1], own[8 * stride + 1]};
        if constexpr (!exact_rows) {
          const float4 a_rest = {beyond_tf32(a.x), beyond_tf32(a.y), beyond_tf32(a.z), beyond_tf32(a.w)};
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
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int channel = 16 * block + 8 * n + 2 * t + i;
        if (channel >= maps.rank) continue;
        const float offset = maps.offset == nullptr ? 0.0F : maps.offset[channel];
        #pragma unroll
        for (int m = 0; m < row_blocks; ++m) {
          coefficients[(16 * m + g) * coefficient_stride + channel] = sums[m][n][i] - offset;
          coefficients[(16 * m + g + 8) * coefficient_stride + channel] = sums[m][n][2 + i] - offset;
        }
      }
    }
  }
}

/// The same for rows first + i, i in [begin, end), of a source as they lie there, and maps of the rows' own type: straight from their words, exact
/// products of 16-bit numbers. A warp has sixteen rows, 128 channels of them at a time, and makes a third of their coefficients.
template <DType type>
__device__ void project_source(const SourceRows& source, Part part, int first, int begin, int end, int head_dim, const PartMaps& maps, float* coefficients, int coefficient_stride) {
  constexpr int kUnits = 8, kShares = 3;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int units = head_dim / kPlainUnit, blocks = (maps.rank + 15) / 16, first_step = source.step_of(first + begin), row_steps = source.step_of(first + end - 1) - first_step + 1;
  for (int item = warp; item < row_steps * kShares; item += kStoreThreads / 32) {
    const int step = first_step + item / kShares, row = step * kPlainRows + g - source.offset() - first;
    const uint4* words = source.words(part, step);
    for (int first_unit = 0; first_unit < units; first_unit += kUnits) {
      uint4 a[kUnits];
      #pragma unroll
      for (int i = 0; i < kUnits; ++i) a[i] = first_unit + i < units ? words[32 * (first_unit + i)] : uint4{0, 0, 0, 0};
      if (part == Part::value) {
        #pragma unroll
        for (int i = 0; i < kUnits; ++i) a[i] = {transposed(a[i].x), transposed(a[i].z), transposed(a[i].y), transposed(a[i].w)};
      }
      for (int block = item % kShares; block < blocks; block += kShares) {
        const uint2* map = static_cast<const uint2*>(maps.encoder) + (block * 2 * units + 2 * first_unit) * 32 + lane;
        float sums[2][4] = {};
        #pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          if (first_unit + i >= units) continue;
          const uint2 low = __ldg(map + 64 * i), high = __ldg(map + 64 * i + 32);
          mma_plain<type>(sums[0], a[i], low.x, high.x);
          mma_plain<type>(sums[1], a[i], low.y, high.y);
        }
        #pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int own = row + 8 * (i / 2 % 2), channel = 16 * block + 8 * (i / 4) + 2 * t + i % 2;
          if (own < begin || own >= end || channel >= maps.rank) continue;
          float& target = coefficients[own * coefficient_stride + channel];
          const float base = first_unit > 0 ? target : maps.offset == nullptr ? 0.0F : -maps.offset[channel];
          target = base + sums[i / 4][i % 4];
        }
      }
    }
  }
}

/// Writes rows of a part into plain tiles. At a list's end, rows past it become zeros, which weigh nothing. tiles: those of the piece's rows.
__device__ inline void store_plain(const HeadTiles& layout, std::uint8_t* const* tiles, Part part, DType type, const float* values, int stride, int width, int begin, int end, bool at_end) {
  const int channels = layout.channels(part), units = channels / kPlainUnit;
  const int padded_end = at_end ? (end + layout.rows - 1) / layout.rows * layout.rows : end;
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
  // The others, at the beginning and, inside a list, at the end.
  const int head = min(whole * kPlainRows, padded_end) - begin, first_left = max(whole, padded_end / kPlainRows) * kPlainRows;
  for (int item = static_cast<int>(threadIdx.x); item < (head + max(0, padded_end - first_left)) * channels; item += kStoreThreads) {
    const int index = item / channels, row = index < head ? begin + index : first_left + index - head, channel = item % channels;
    *reinterpret_cast<std::uint16_t*>(tiles[row / layout.rows] + layout.plain_byte(part, row % layout.rows, channel)) = to_bits(type, value_at(row, channel));
  }
}

/// Copies rows of a source whose sixteens are those of the tiles. Rows past the end become zeros.
__device__ inline void copy_rows(const HeadTiles& layout, std::uint8_t* const* tiles, const SourceRows& source, int first, int begin, int end) {
  const int padded_end = (end + layout.rows - 1) / layout.rows * layout.rows;
  for (const Part part : {Part::key, Part::value}) {
    const int units = part == Part::key ? layout.key_units : layout.value_units;
    #pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x); item < (padded_end - begin) / kPlainRows * units * 32; item += kStoreThreads) {  // whole warps
      const int lane = item % 32, unit = item / 32 % units, row = begin + item / 32 / units * kPlainRows, left = end - row;  // rows that are there
      uint4 words = {0, 0, 0, 0};
      if (left > 0) words = source.words(part, source.step_of(first + row))[32 * unit];
      if (left < kPlainRows) {
        std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int m = lane / 4 + 8 * (word % 2), k = 2 * (lane % 4) + 8 * (word / 2);
          if (part == Part::key) all[word] = m < left ? all[word] : 0U;
          else all[word] &= (k < left ? 0xffffU : 0U) | (k + 1 < left ? 0xffff0000U : 0U);
        }
        words = {all[0], all[1], all[2], all[3]};
      }
      *reinterpret_cast<uint4*>(tiles[row / layout.rows] + layout.offset(part) + (row % layout.rows / kPlainRows * units + unit) * kPlainUnitBytes + 16 * lane) = words;
    }
  }
}

/// 8-bit logarithmic gain: code 0 is 0, code c is 2^((c - 128) / 16).
__device__ inline int gain_code(float gain) {
  if (!(gain > 0.0F)) return 0;
  if (!(gain < 256.0F)) return 255;
  return min(255, max(1, static_cast<int>(lroundf(16.0F * log2f(gain))) + 128));
}
__device__ inline float gain_of(int code) { return code == 0 ? 0.0F : exp2f((static_cast<float>(code) - 128.0F) * 0.0625F); }

/// A row's gain as it is stored, and what that stands for.
struct StoredGain {
  std::uint16_t bits = 0;
  float value = 0.0F;
};

/// The gain of a row of coefficients in steps; a warp makes it.
__device__ inline StoredGain gain_of_row(const PartMaps& maps, const float* coefficients) {
  const bool norm = maps.gains == ScaleKind::norm_log8;
  float size = 0.0F;
  for (int channel = static_cast<int>(threadIdx.x) % 32; channel < maps.coded; channel += 32) size = norm ? fmaf(coefficients[channel], coefficients[channel], size) : fmaxf(size, fabsf(coefficients[channel]));
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other = __shfl_xor_sync(~0U, size, distance);
    size = norm ? size + other : fmaxf(size, other);
  }
  if (norm) {
    const int code = gain_code(sqrtf(size) / maps.reference);
    return {static_cast<std::uint16_t>(code), gain_of(code)};
  }
  const __half up = __float2half_ru(fminf(size / maps.reference, 65504.0F));  // not below: nothing is clipped
  return {__half_as_ushort(up), __half2float(up)};
}
/// The gain of a row of a tile of codes.
__device__ inline float stored_gain(const std::uint8_t* tile, const HeadTiles& layout, Part part, int row) {
  const std::uint8_t* place = tile + layout.gain_place(part, row);
  return layout.gains == ScaleKind::norm_log8 ? gain_of(*place) : __half2float(*reinterpret_cast<const __half*>(place));
}

/// The code of so many bits of a coefficient in steps, gains taken out.
__device__ inline std::uint32_t code_of(float coefficient, int bits) {
  const float half_range = static_cast<float>(1U << (bits - 1));
  return static_cast<std::uint32_t>(fminf(fmaxf(0.0F, floorf(coefficient) + half_range), 2.0F * half_range - 1.0F));  // NaN becomes the lowest
}

/// Gains of the rows, into the tile and as inverses.
__device__ inline void store_gains(const HeadTiles& layout, const PartMaps& maps, Part part, const StoreMemory& memory, int begin, int end) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = begin + warp; row < end; row += kStoreThreads / 32) {
    const StoredGain gain = gain_of_row(maps, memory.coefficients + row * (maps.rank + 1));
    if (lane != 0) continue;
    std::uint8_t* place = reinterpret_cast<std::uint8_t*>(memory.tile) + layout.gain_place(part, row);
    if (layout.gain_bytes() == 1) *place = static_cast<std::uint8_t>(gain.bits);
    else *reinterpret_cast<std::uint16_t*>(place) = gain.bits;
    memory.inverse_gains[row] = gain.value > 0.0F ? 1.0F / gain.value : 0.0F;
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
    const std::uint32_t code = code_of(memory.coefficients[row * (maps.rank + 1) + channel.source] * memory.inverse_gains[row], channel.bits);
    atomicOr(memory.tile + word, (code >> channel.shift & ((1U << channel.width) - 1U)) << shift);
  });
}

}  // namespace detail

/// @brief Which leaving rows go to a list, in order: [sequence of the batch, head, stride] numbers of rows of the source, which policies that decide
/// by values chose; null: those to the full list come first, in their order, the others follow.
struct RowOrder {
  const std::int32_t* rows = nullptr;
  std::int32_t stride = 0;
};

/// @brief Stores leaving rows of a batch in the full list (StoreForm::full) or the compressed one. Pages are in place; lengths are
/// those before. stages_rows: rows go through shared memory, which chosen rows must, and those whose maps are of another type. Grid: 64-row pieces of a list x KV heads x sequences.
template <StoreForm form>
__global__ void __launch_bounds__(kStoreThreads, 2) store_rows_kernel(Tables tables, RowSource source, Leaving leaving, RowOrder order, bool stages_rows, DType type) {
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
  const HeadMaps* maps_now = form == StoreForm::full ? nullptr : &tables.current_maps(slot, head);
  const int max_rank = form == StoreForm::full ? 0 : max(maps_now->key.rank, maps_now->value.rank);
  detail::StoreMemory memory;
  memory.rows = reinterpret_cast<float*>(shared_memory);
  memory.coefficients = memory.rows + (stages_rows ? kStoreRows * detail::row_stride(dim) : 0);
  memory.inverse_gains = memory.coefficients + kStoreRows * (max_rank + 1);
  memory.tile = reinterpret_cast<std::uint32_t*>(memory.inverse_gains + kStoreRows);
  __shared__ std::uint8_t* tiles[kStoreRows / kPlainRows];  // plain ones
  if (form != StoreForm::codes && threadIdx.x < static_cast<unsigned>(kStoreRows / layout.rows) && static_cast<int>(threadIdx.x) * layout.rows < end) {
    tiles[threadIdx.x] = tables.tile(table, layout, tile_row / layout.rows + static_cast<int>(threadIdx.x));
  }
  std::uint32_t* target = nullptr;
  if constexpr (form == StoreForm::codes) {
    target = reinterpret_cast<std::uint32_t*>(tables.tile(table, layout, tile_row / kCodeRows));
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads) memory.tile[word] = begin > 0 ? target[word] : 0U;
  }
  __syncthreads();
  if constexpr (form == StoreForm::codes) {
    for (const Part part : {Part::key, Part::value}) {
      if (begin == 0) break;  // rows that were here and are dropped left their bits
      const PartMaps& maps = maps_now->of(part);
      detail::for_each_code(layout, part, begin, kCodeRows, [&](int channel, int, int word, int shift) {
        if (maps.channels[channel].source >= 0) atomicAnd(memory.tile + word, ~(((1U << maps.channels[channel].width) - 1U) << shift));
      });
    }
  }
  const SourceRows rows(tables, source, slot, head);
  const std::int32_t* chosen = order.rows == nullptr ? nullptr : order.rows + (static_cast<std::size_t>(index) * gridDim.y + static_cast<std::size_t>(head)) * static_cast<std::size_t>(order.stride);
  if (std::int32_t* positions = tables.row_positions(list, slot, head); positions != nullptr) {
    for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += kStoreThreads) {
      const int at = (chosen == nullptr ? skipped : 0) + tile_row - first + row;
      positions[tile_row + row] = leaving.position[index] + (chosen == nullptr ? at : chosen[at]);
    }
  }
  const int from = (chosen == nullptr ? skipped : 0) + tile_row - first;  // the source's row for row 0 of this piece
  if (form == StoreForm::full && chosen == nullptr && begin % kPlainRows == 0 && (rows.offset() + from) % kPlainRows == 0) {
    detail::copy_rows(layout, tiles, rows, from, begin, end);
    return;
  }
  for (const Part part : {Part::key, Part::value}) {
    if constexpr (form == StoreForm::full) {
      rows.load(part, chosen, from, begin, end, dim, memory.rows, detail::row_stride(dim));
      __syncthreads();
      detail::store_plain(layout, tiles, part, type, memory.rows, detail::row_stride(dim), dim, begin, end, true);
    } else {
      const PartMaps& maps = maps_now->of(part);
      if (form == StoreForm::codes || stages_rows) {
        rows.load(part, chosen, from, begin, end, dim, memory.rows, detail::row_stride(dim));
        __syncthreads();
        detail::project_rows<kStoreRows / 16, true>(memory.rows, dim, maps, memory.coefficients, maps.rank + 1);
      } else if constexpr (form == StoreForm::coefficients) {
        if (tables.full_type == DType::f16) detail::project_source<DType::f16>(rows, part, from, begin, end, dim, maps, memory.coefficients, maps.rank + 1);
        else detail::project_source<DType::bf16>(rows, part, from, begin, end, dim, maps, memory.coefficients, maps.rank + 1);
      }
      __syncthreads();
      if constexpr (form == StoreForm::coefficients) {
        detail::store_plain(layout, tiles, part, type, memory.coefficients, maps.rank + 1, maps.rank, begin, end, true);
      } else {
        detail::store_gains(layout, maps, part, memory, begin, end);
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
