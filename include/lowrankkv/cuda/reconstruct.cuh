// SPDX-License-Identifier: Apache-2.0
/// @file cuda/reconstruct.cuh  Stored rows back as K and V, in the engine's own tensors.
///
/// Rows are taken list by list, as they lie, and written to where their positions belong. Coefficients, and levels of codes, are exact 16-bit operands; maps are sums of two such
/// numbers (three of bf16), so that products are those of f32.
/// Floor: the tiles' bytes once, the written rows once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lowrankkv/cuda/launch.cuh"
#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/row_stage.cuh"
#include "lowrankkv/cuda/scaled_tiles.cuh"
#include "lowrankkv/cuda/store_rows.cuh"
#include "lowrankkv/cuda/token_range.cuh"
#include "lowrankkv/cuda/unpack_levels.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kDecodeRows = 256;     ///< of a list, of which a block decodes a multiple with maps that it has in shared memory
inline constexpr int kMostDecodeRows = 2048;  ///< that it decodes at most
inline constexpr int kDecodeChannels = 64;  ///< of rows, that it has them for, at most
inline constexpr int kDecodeBlocks = kDecodeChannels / 8;
inline constexpr int kDecodeTiles = 2;       ///< of codes, that a block decodes at a time, at most: sixteen rows a warp
inline constexpr int kDecodeShared = 3072;   ///< bytes of shared memory of decode_rows_kernel besides, at most

namespace detail {

/// Operands of the products with maps, in shared memory: [step of 16 channels of tiles, block of eight row channels, part, lane]; sums of parts.
template <DType type>
struct MapOperands {
  static constexpr int parts = type == DType::f16 ? 2 : 3;

  static __host__ __device__ std::size_t bytes(int steps, int channels) { return sizeof(uint2) * static_cast<std::size_t>(steps * channels / 8 * parts * 32); }
  __device__ static std::uint32_t packed(float low, float high) { return static_cast<std::uint32_t>(to_bits(type, low)) | static_cast<std::uint32_t>(to_bits(type, high)) << 16; }
  /// Those of `blocks` blocks from `first_block` on. All threads of the block call it.
  __device__ static void load(const PartMaps& maps, int steps, int first_block, int blocks, int dim, uint2* target) {
    const float scale = __ldg(maps.reader_scale);
    for (int item = static_cast<int>(threadIdx.x); item < steps * blocks * 32; item += kStoreThreads) {  // whole warps
      const int lane = item % 32, block = item / 32 % blocks, step = item / (32 * blocks);
      float4 rest = 16 * step < maps.width ? maps.reader.quad((step * (dim / 8) + first_block + block) * 32 + lane) : float4{};
      rest = {rest.x * scale, rest.y * scale, rest.z * scale, rest.w * scale};
      #pragma unroll
      for (int part = 0; part < parts; ++part) {
        const std::uint32_t low = packed(rest.x, rest.y), high = packed(rest.z, rest.w);
        target[((item / 32) * parts + part) * 32 + lane] = {transposed(low), transposed(high)};
        rest = {rest.x - from_bits(type, static_cast<std::uint16_t>(low)), rest.y - from_bits(type, static_cast<std::uint16_t>(low >> 16)),
                rest.z - from_bits(type, static_cast<std::uint16_t>(high)), rest.w - from_bits(type, static_cast<std::uint16_t>(high >> 16))};
      }
    }
  }
};

/// Numbers of f16 of the levels of a tile of codes: keys [row, channel], values [channel, row].
inline __host__ __device__ int level_line(Part part, int channels) { return (part == Part::key ? channels : kStoreRows) + 8; }
inline __host__ __device__ int level_numbers(Part part, int channels) { return (part == Part::key ? kStoreRows : channels) * level_line(part, channels); }

}  // namespace detail

/// @brief Writes K and V (K alone, if there is no target for V) of the compressed rows of a range. A warp multiplies sixteen rows, or twice so many, with maps that its block has in shared memory; of plain tiles no
/// warp waits for another. Grid: (pieces of `block_rows` rows of a list x slices of channels) x KV heads x (keys, then values).
/// @tparam scale_groups  of tiles of codes; 0: plain ones  @tparam type  of the operands: that of plain coefficients; f16 for codes  @param slice  channels  @param map_bytes  of shared memory, for maps  @param tiles  of codes at a time
template <int scale_groups, DType type>
__global__ void __launch_bounds__(kStoreThreads, 2) decode_rows_kernel(Tables tables, int slot, TokenRange range, int block_rows, int slice, int map_bytes, int tiles, DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0, two_groups = scale_groups == 2;
  constexpr int sixteens = codes ? 1 : 2, warps = kStoreThreads / 32, own_rows = 16 * sixteens, parts = detail::MapOperands<type>::parts;
  __shared__ std::int64_t places[warps][own_rows];
  __shared__ __align__(8) float means[kDecodeChannels];
  __shared__ float gains[two_groups ? 2 : 1][codes ? kDecodeTiles * kStoreRows : 1];
  __shared__ int unit_places[codes ? kMaxUnits : 1], unit_bits[codes ? kMaxUnits : 1];
  if (range.wanted != nullptr && *range.wanted < 0) return;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  // Slices of the same rows stand side by side, so that what they read is in the cache.
  const int slices = (dim + slice - 1) / slice, piece = static_cast<int>(blockIdx.x) / slices, first_channel = static_cast<int>(blockIdx.x) % slices * slice, blocks = min(slice, dim - first_channel) / 8;
  const Part part = blockIdx.z == 0 ? Part::key : Part::value;
  const HeadTiles& layout = tables.compressed[head];
  if (part == Part::value && !layout.values) return;
  // What is asked for over and over: stores to shared memory would have it read again each time.
  const int tile_rows = layout.rows, tile_bytes = layout.bytes, tiles_per_page = layout.tiles_per_page, part_offset = layout.offset(part);
  DeviceTarget target = key;
  if (part == Part::value) target = value;
  uint2* maps_of_block = reinterpret_cast<uint2*>(shared_memory);
  const detail::RowStage stage(shared_memory + map_bytes + static_cast<std::size_t>(16 * warp) * detail::RowStage::bytes(target.dtype, slice), target.dtype, 8 * blocks);
  [[maybe_unused]] __half* levels = reinterpret_cast<__half*>(shared_memory + map_bytes + static_cast<std::size_t>(16 * warps) * detail::RowStage::bytes(target.dtype, slice));
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  const int num_rows = lists.num_compressed, segments = tables.num_segments(slot, num_rows), channels = layout.channels(part), units = layout.units(part), steps = (channels + 15) / 16;
  const int begin = range.first_piece(RowList::compressed) * kStoreRows + piece * block_rows, end = min(begin + block_rows, min(num_rows, static_cast<int>(range.end[1])));
  const int together = codes ? tiles * kStoreRows : warps * own_rows;  // rows at a time
  const bool works = warp * own_rows < together;
  const int first_tile = begin / tile_rows, first_page = first_tile / tiles_per_page, first_in_page = first_tile % tiles_per_page, log_rows = tile_rows == 64 ? 6 : tile_rows == 32 ? 5 : 4;
  const auto tile_of = [&](int row) {  // without a division
    int page = first_page, tile = first_in_page + (row >> log_rows) - first_tile;
    for (; tile >= tiles_per_page; tile -= tiles_per_page) ++page;
    return tables.pool + static_cast<std::size_t>(table[page]) * tables.page_bytes + static_cast<std::size_t>(tile) * static_cast<std::size_t>(tile_bytes);
  };
  const detail::RowWriter writer(stage, target, head, first_channel, lane, 32);
  if constexpr (codes) {
    if (thread < units) {
      unit_bits[thread] = layout.width(part, thread);
      unit_places[thread] = part_offset;
      for (int before = 0; before < thread; ++before) unit_places[thread] += code_unit_bytes(layout.width(part, before));
    }
  }
  int loaded = -1;  // epoch whose maps are there
  for (int index = 0; index < segments; ++index) {
    const SegmentRows segment = tables.segment(slot, head, num_rows, index, 0);
    const int from = max(begin, segment.begin), until = min(end, segment.end);
    if (from >= until) continue;
    const PartMaps& maps = tables.maps[segment.epoch * tables.num_heads + head].of(part);
    if (loaded != segment.epoch) {
      __syncthreads();  // nobody reads those before
      detail::MapOperands<type>::load(maps, steps, first_channel / 8, blocks, dim, maps_of_block);
      if (thread < 8 * blocks) means[thread] = maps.mean == nullptr ? 0.0F : maps.mean[first_channel + thread];
      loaded = segment.epoch;
      __syncthreads();
    }
    const float inverse = 1.0F / *maps.reader_scale;  // a power of two
    for (int base = begin + (from - begin) / together * together; base < until; base += together) {
      const int first = base + warp * own_rows;  // of the warp's
      bool wanted = false;
      __syncwarp();  // the rows before these are written
      if (works && lane < own_rows) {
        const int row = first + lane;
        const std::int64_t token = row >= from && row < until ? (range.by_row ? row : detail::position_of(tables, RowList::compressed, slot, head, lists, row)) - range.first : -1;
        const std::int64_t place = target.place_of(token, range.count);
        places[warp][lane] = place;
        wanted = place != kNowhere;
      }
      if constexpr (codes) {
        if (__syncthreads_or(wanted ? 1 : 0) == 0) continue;  // and nobody reads levels any more
        for (int item = warp; item < together / kStoreRows * units; item += warps) {
          const int tile = item / units, unit = item % units, row = base + tile * kStoreRows;
          if (row >= num_rows) continue;
          const std::uint8_t* unit_codes = tile_of(row) + unit_places[unit];
          __half* unpacked = levels + tile * detail::level_numbers(part, channels);
          const int line = detail::level_line(part, channels);
          if (part == Part::key) detail::unpack_levels<Part::key>(unit_codes, unit_bits[unit], unpacked + unit * kCodeUnit, line, lane);
          else detail::unpack_levels<Part::value>(unit_codes, unit_bits[unit], unpacked + unit * kCodeUnit * line, line, lane);
        }
        for (int item = thread; item < together; item += kStoreThreads) {
          #pragma unroll
          for (int group = 0; group < scale_groups; ++group) {
            if (base + item < num_rows) gains[group][item] = detail::stored_gain(tile_of(base + item), layout, part, (base + item) % kCodeRows, group);
          }
        }
        __syncthreads();
        if (!works) continue;
      } else {
        if (!__any_sync(~0U, wanted)) continue;
        __syncwarp();
      }
      float sums[sixteens][kDecodeBlocks][4] = {};
      [[maybe_unused]] float done[two_groups ? kDecodeBlocks : 1][4] = {};  // of the first scale group, with its gains
      const int second_step = two_groups ? layout.first_units(part) * (kCodeUnit / 16) : 0;
      // Of plain rows that are not there, others are multiplied, and written nowhere. Levels of keys are rows x channels, of values channels x rows.
      const uint4* rows_of[sixteens];
      const std::uint32_t* levels_of_warp = nullptr;
      int line = 0, levels_step = 0;
      if constexpr (codes) {
        const int row = 16 * warp % kStoreRows;
        line = detail::level_line(part, channels);
        levels_of_warp = reinterpret_cast<const std::uint32_t*>(levels + 16 * warp / kStoreRows * detail::level_numbers(part, channels) + (part == Part::key ? (row + g) * line : g * line + row) + 2 * t);
        levels_step = part == Part::key ? 8 : 8 * line;
      } else {
        #pragma unroll
        for (int m = 0; m < sixteens; ++m) {
          const int row = first + 16 * m < num_rows ? first + 16 * m : begin;
          rows_of[m] = reinterpret_cast<const uint4*>(tile_of(row) + part_offset + (row & (tile_rows - 1)) / kPlainRows * units * kPlainUnitBytes) + lane;
        }
      }
      const auto load = [&](int k, uint4 (&own)[sixteens]) {
        if constexpr (codes) {
          const std::uint32_t* words = levels_of_warp + k * levels_step;
          own[0] = {words[0], words[4 * line], words[4], words[4 * line + 4]};
        } else {
          #pragma unroll
          for (int m = 0; m < sixteens; ++m) own[m] = rows_of[m][k * (kPlainUnitBytes / 16)];
        }
      };
      uint4 a[sixteens], next[sixteens];
      if (steps > 0) load(0, next);
      #pragma unroll 2
      for (int k = 0; k < steps; ++k) {
        if constexpr (two_groups) {
          if (k == second_step) {
            #pragma unroll
            for (int i = 0; i < 4 * kDecodeBlocks; ++i) {
              done[i / 4][i % 4] = sums[0][i / 4][i % 4] * gains[0][16 * warp + g + 8 * (i / 2 % 2)];
              sums[0][i / 4][i % 4] = 0.0F;
            }
          }
        }
        #pragma unroll
        for (int m = 0; m < sixteens; ++m) a[m] = part == Part::key ? next[m] : uint4{transposed(next[m].x), transposed(next[m].z), transposed(next[m].y), transposed(next[m].w)};
        if (k + 1 < steps) load(k + 1, next);
        const uint2* own_maps = maps_of_block + k * blocks * parts * 32 + lane;
        const auto multiply = [&](auto all) {
          #pragma unroll
          for (int n = 0; n < kDecodeBlocks; ++n) {
            if (!decltype(all)::value && n >= blocks) break;
            #pragma unroll
            for (int i = parts - 1; i >= 0; --i) {
              const uint2 b = own_maps[(n * parts + i) * 32];
              #pragma unroll
              for (int m = 0; m < sixteens; ++m) mma_plain<type>(sums[m][n], a[m], b.x, b.y);
            }
          }
        };
        if (blocks == kDecodeBlocks) multiply(std::true_type{});
        else multiply(std::false_type{});
      }
      #pragma unroll
      for (int m = 0; m < sixteens; ++m) {
        if (m > 0) __syncwarp();  // the rows before these are written
        stage.with_type([&](auto target_type) {
          #pragma unroll
          for (int n = 0; n < kDecodeBlocks; ++n) {
            if (n >= blocks) break;
            const float2 mean = *reinterpret_cast<const float2*>(means + 8 * n + 2 * t);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int row = g + 8 * half;
              float low = sums[m][n][2 * half], high = sums[m][n][2 * half + 1], scale = inverse;
              if constexpr (two_groups) {
                const float gain = gains[second_step < steps ? 1 : 0][16 * warp + row];
                low = fmaf(low, gain, done[n][2 * half]);
                high = fmaf(high, gain, done[n][2 * half + 1]);
              } else if constexpr (codes) {
                scale *= gains[0][16 * warp + row];
              }
              stage.template put_as<decltype(target_type)::value>(row, 8 * n + 2 * t, fmaf(low, scale, mean.x), fmaf(high, scale, mean.y));
            }
          }
        });
        __syncwarp();
        writer.template write<16>(places[warp] + 16 * m);
      }
    }
  }
}

/// @brief The same of the full rows and of the tail's rows of a range, as they are stored. Grid: 64-row pieces of the full list, then of the tail, x KV heads x (keys, then values).
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) copy_rows_kernel(Tables tables, int slot, TokenRange range, int full_pieces, DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ std::int64_t places[kStoreRows];
  __shared__ const std::uint8_t* tiles[kStoreRows / kPlainRows];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, units = dim / kPlainUnit, thread = static_cast<int>(threadIdx.x);
  const Part part = blockIdx.z == 0 ? Part::key : Part::value;
  DeviceTarget target = key;  // a reference to either would be to a copy in local memory
  if (part == Part::value) target = value;
  const bool tail = static_cast<int>(blockIdx.x) >= full_pieces;
  const int begin = (static_cast<int>(blockIdx.x) + (tail ? -full_pieces : range.first_piece(RowList::full))) * kStoreRows;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const DeviceLengths lengths = tables.lengths[slot];
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const int num_rows = tail ? lengths.tail_length : lists.num_full, used = min(kStoreRows, num_rows - begin);
  if (thread < kStoreRows) {
    const std::int64_t position = thread >= used ? -1 : tail ? range.first_tail + begin + thread : range.by_row ? begin + thread : detail::position_of(tables, RowList::full, slot, head, lists, begin + thread);
    places[thread] = target.place_of(position - range.first, range.count);
  } else if (!tail && (thread - kStoreRows) * tables.listed.rows < used) {
    tiles[thread - kStoreRows] = tables.tile(table, tables.listed, begin / tables.listed.rows + thread - kStoreRows);
  }
  const SourceRows ring(tables, {}, slot, head);
  const detail::RowStage rows(shared_memory, target.dtype, dim);
  __syncthreads();
  if (tail) {
    for (int item = thread; item < used * dim / 2; item += kStoreThreads) {
      const int row = item / (dim / 2), channel = item % (dim / 2) * 2;
      rows.put(row, channel, ring.element(part, begin + row, channel), ring.element(part, begin + row, channel + 1));
    }
  } else if (tables.listed.scaled) {
    for (int item = thread; item < used * dim / 2; item += kStoreThreads) {
      const int row = item / (dim / 2), channel = item % (dim / 2) * 2, in_tile = row % tables.listed.rows;
      const auto element = [&](int own) { return detail::scaled_element(tables.listed, tiles[row / tables.listed.rows], part, in_tile, own); };
      rows.put(row, channel, element(channel), element(channel + 1));
    }
  } else {
    #pragma unroll 4
    for (int item = thread; item < (used + kPlainRows - 1) / kPlainRows * units * 32; item += kStoreThreads) {
      const int lane = item % 32, unit = item / 32 % units, row = item / 32 / units * kPlainRows;
      const uint4 words = *reinterpret_cast<const uint4*>(tiles[row / tables.listed.rows] + tables.listed.offset(part) + (row % tables.listed.rows / kPlainRows * units + unit) * kPlainUnitBytes + 16 * lane);
      // Keys are rows x channels, values channels x rows; whole warps are here.
      const std::uint32_t all[4] = {part == Part::key ? words.x : transposed(words.x), part == Part::key ? words.y : transposed(words.z), part == Part::key ? words.z : transposed(words.y),
                                    part == Part::key ? words.w : transposed(words.w)};
      #pragma unroll
      for (int i = 0; i < 4; ++i) rows.put_word(row + lane / 4 + 8 * (i % 2), unit * kPlainUnit + 2 * (lane % 4) + 8 * (i / 2), tables.full_type, all[i]);
    }
  }
  __syncthreads();
  detail::RowWriter(rows, target, head, 0, thread, kStoreThreads).template write<kStoreRows>(places);
}

/// @brief Zeros, where rows may have been dropped. Grid: tokens of the range x KV heads.
template <class = void>
__global__ void zero_rows_kernel(std::int64_t count, int dim, DeviceTarget key, DeviceTarget value) {
  for (std::int64_t token = blockIdx.x; token < count; token += gridDim.x) {
    for (int channel = static_cast<int>(threadIdx.x); channel < dim; channel += static_cast<int>(blockDim.x)) {
      for (const DeviceTarget* target : {&key, &value}) {
        const std::int64_t at = target->place(token) + static_cast<std::int64_t>(blockIdx.y) * target->head_stride + channel;
        if (target->dtype == DType::f32) static_cast<float*>(target->data)[at] = 0.0F;
        else static_cast<std::uint16_t*>(target->data)[at] = 0;
      }
    }
  }
}

namespace detail {

/// Rows that a block of decode_rows_kernel has: so many that the fewest are waited for, of blocks that run side by side, two on a multiprocessor, and that load their maps first. @param lists  that have `rows` rows
inline int decode_block_rows(std::int64_t rows, int lists, int multiprocessors) {
  constexpr int kLoad = 128;  // maps, in rows
  int best = kDecodeRows;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int own = kDecodeRows; own <= kMostDecodeRows; own += kDecodeRows) {
    const std::int64_t blocks = (rows + own - 1) / own * lists, rounds = (blocks - 1) / (2 * multiprocessors) + 1, cost = rounds * (own + kLoad);
    if (cost < least) best = own;
    least = (std::min)(least, cost);
  }
  return best;
}

}  // namespace detail

/// @brief Enqueues the stored K and V, or K alone, of the full rows of a range, and of those that are in the tail.
template <class = void>
void copy_rows(const LayerState& layer, int slot, const TokenRange& range, const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const bool reaches_tail = !range.by_row && range.first + range.count > range.first_tail;
  const int full = range.pieces(RowList::full), pieces = full + (reaches_tail ? (layer.sequence(slot).tail_length + kStoreRows - 1) / kStoreRows : 0);
  if (pieces == 0) return;
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(tables.num_heads), value.data == nullptr ? 1U : 2U);
  const std::size_t stage = kStoreRows * (std::max)(detail::RowStage::bytes(key.dtype, tables.head_dim), detail::RowStage::bytes(value.dtype, tables.head_dim));
  detail::launch_kernel(copy_rows_kernel<>, grid, kStoreThreads, stage, "copy_rows_kernel", stream, tables, slot, range, full, key, value);
}

/// @brief The same of the compressed rows (joint values: K alone). @tparam scale_groups  of tiles of codes; 0: plain ones
template <int scale_groups>
void decode_rows(const LayerState& layer, int slot, const TokenRange& range, const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const int pieces = range.pieces(RowList::compressed);
  if (pieces == 0) return;
  int channels = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    if (tiles.keys) channels = (std::max)({channels, tiles.channels(Part::key), tiles.channels(Part::value)});
  }
  const auto launch = [&]<DType type>(std::integral_constant<DType, type>) {
    constexpr bool codes = scale_groups > 0;
    auto* const kernel = decode_rows_kernel<scale_groups, type>;
    const int numbers = codes ? (std::max)(detail::level_numbers(Part::key, channels), detail::level_numbers(Part::value, channels)) : 0;  // of a tile's levels
    const std::size_t most = static_cast<std::size_t>(layer.shared_bytes() - kDecodeShared);
    int slice = kDecodeChannels, tiles = codes ? kDecodeTiles : 1;
    const auto maps = [&] { return detail::MapOperands<type>::bytes((channels + 15) / 16, slice); };
    const auto bytes = [&] { return maps() + kStoreThreads / 2 * (std::max)(detail::RowStage::bytes(key.dtype, slice), detail::RowStage::bytes(value.dtype, slice)) + sizeof(__half) * static_cast<std::size_t>(tiles * numbers); };
    while (bytes() > most && (slice > 16 || tiles > 1)) {
      slice = slice > 16 ? slice / 2 : kDecodeChannels;
      if (slice == kDecodeChannels) tiles = 1;
    }
    const int slices = (tables.head_dim + slice - 1) / slice, parts = value.data == nullptr ? 1 : 2;
    const std::int64_t rows = std::int64_t{pieces} * kStoreRows;
    const int block_rows = detail::decode_block_rows(rows, tables.num_heads * slices * parts, layer.multiprocessors());
    const dim3 grid(static_cast<unsigned>((rows + block_rows - 1) / block_rows * slices), static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(parts));
    detail::launch_kernel(kernel, grid, kStoreThreads, bytes(), "decode_rows_kernel", stream, tables, slot, range, block_rows, slice, static_cast<int>(maps()), tiles, key, value);
  };
  if (scale_groups > 0 || layer.tiles().coded_type == DType::f16) launch(std::integral_constant<DType, DType::f16>{});
  else if constexpr (scale_groups == 0) launch(std::integral_constant<DType, DType::bf16>{});
}

/// @brief Enqueues the stored K and V (joint values: but for the compressed rows' V) of a range of a sequence's tokens. @param drops  some of them may be stored nowhere
template <int scale_groups>
void reconstruct_rows(const LayerState& layer, int slot, const TokenRange& range, bool drops, const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  if (drops) {
    const dim3 grid(static_cast<unsigned>((std::min)(range.count, std::int64_t{1} << 20)), static_cast<unsigned>(layer.tables().num_heads));
    zero_rows_kernel<><<<grid, 128, 0, stream>>>(range.count, layer.tables().head_dim, key, value);
    check(cudaGetLastError(), "zero_rows_kernel");
  }
  copy_rows(layer, slot, range, key, value, stream);
  decode_rows<scale_groups>(layer, slot, range, key, value, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
