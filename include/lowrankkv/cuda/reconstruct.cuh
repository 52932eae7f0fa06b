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
#include <type_traits>

#include "lowrankkv/cuda/launch.cuh"
#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/scaled_tiles.cuh"
#include "lowrankkv/cuda/store_rows.cuh"
#include "lowrankkv/cuda/token_range.cuh"
#include "lowrankkv/cuda/unpack_levels.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kDecodeRows = 512;     ///< of a list, that a block decodes with maps that it has in shared memory
inline constexpr int kDecodeChannels = 64;  ///< of rows, that it has them for, at most
inline constexpr int kDecodeBlocks = kDecodeChannels / 8;
inline constexpr int kDecodeTiles = 2;       ///< of codes, that a block decodes at a time, at most: sixteen rows a warp
inline constexpr int kDecodeShared = 3072;   ///< bytes of shared memory of decode_rows_kernel besides, at most

namespace detail {

/// Rows in shared memory as the target has them, before they go there 16 bytes at a time.
struct RowStage {
  std::uint8_t* base;
  DType dtype;
  int channels;
  int stride;  ///< bytes from a row to the next: no two rows of a product meet in a bank

  __device__ RowStage(std::uint8_t* memory, DType type, int row_channels) : base(memory), dtype(type), channels(row_channels), stride(static_cast<int>(bytes(type, row_channels))) {}
  static __host__ __device__ std::size_t bytes(DType type, int channels) { return static_cast<std::size_t>(channels) * (type == DType::f32 ? 4 : 2) + 16; }
  /// Two neighbouring channels of a row, the first even.
  __device__ void put(int row, int channel, float first, float second) const {
    std::uint8_t* at = base + row * stride;
    if (dtype == DType::f32) *reinterpret_cast<float2*>(at + 4 * channel) = {first, second};
    else *reinterpret_cast<std::uint32_t*>(at + 2 * channel) = static_cast<std::uint32_t>(to_bits(dtype, first)) | static_cast<std::uint32_t>(to_bits(dtype, second)) << 16;
  }
  /// The same of two numbers of a type of 16 bits.
  __device__ void put_word(int row, int channel, DType type, std::uint32_t word) const {
    if (dtype == type) *reinterpret_cast<std::uint32_t*>(base + row * stride + 2 * channel) = word;
    else put(row, channel, from_bits(type, static_cast<std::uint16_t>(word)), from_bits(type, static_cast<std::uint16_t>(word >> 16)));
  }
  /// Writes rows to the target, its channels from `first` on; row i to its place places[i], if it has one. Of so many threads this one is number `thread`.
  template <int rows, int threads>
  __device__ void write(const std::int64_t* places, int head, int first, const DeviceTarget& target, int thread) const {
    const int size = dtype == DType::f32 ? 4 : 2, per_row = channels * size / 16, at_once = threads / per_row, byte = thread % per_row * 16;
    const bool wide = target.wide();
    if (thread >= at_once * per_row) return;
    for (int row = thread / per_row; row < rows; row += at_once) {
      if (places[row] == kNowhere) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(base + row * stride + byte);
      std::uint8_t* at = static_cast<std::uint8_t*>(target.data) + (places[row] + head * target.head_stride + first) * size + byte;
      if (wide) {
        *reinterpret_cast<uint4*>(at) = words;
      } else {
        const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
        for (int i = 0; i < 16 / size; ++i) {
          if (size == 4) reinterpret_cast<std::uint32_t*>(at)[i] = all[i];
          else reinterpret_cast<std::uint16_t*>(at)[i] = static_cast<std::uint16_t>(all[i / 2] >> (16 * (i % 2)));
        }
      }
    }
  }
};

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
/// warp waits for another. Grid: kDecodeRows of a list x KV heads x (slices of channels of keys, then of values).
/// @tparam scale_groups  of tiles of codes; 0: plain ones  @tparam type  of the operands: that of plain coefficients; f16 for codes  @param slice  channels  @param map_bytes  of shared memory, for maps  @param tiles  of codes at a time
template <int scale_groups, DType type>
__global__ void __launch_bounds__(kStoreThreads, 2) decode_rows_kernel(Tables tables, int slot, TokenRange range, int slice, int map_bytes, int tiles, DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0, two_groups = scale_groups == 2;
  constexpr int sixteens = codes ? 1 : 2, warps = kStoreThreads / 32, own_rows = 16 * sixteens, parts = detail::MapOperands<type>::parts;
  __shared__ std::int64_t places[warps][own_rows];
  __shared__ __align__(8) float means[kDecodeChannels];
  __shared__ float gains[two_groups ? 2 : 1][codes ? kDecodeTiles * kStoreRows : 1];
  if (range.wanted != nullptr && *range.wanted < 0) return;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int slices = (dim + slice - 1) / slice, first_channel = static_cast<int>(blockIdx.z) % slices * slice, blocks = min(slice, dim - first_channel) / 8;
  const Part part = static_cast<int>(blockIdx.z) < slices ? Part::key : Part::value;
  const HeadTiles& layout = tables.compressed[head];
  if (part == Part::value && !layout.values) return;
  DeviceTarget target = key;
  if (part == Part::value) target = value;
  uint2* maps_of_block = reinterpret_cast<uint2*>(shared_memory);
  const detail::RowStage stage(shared_memory + map_bytes + static_cast<std::size_t>(16 * warp) * detail::RowStage::bytes(target.dtype, slice), target.dtype, 8 * blocks);
  [[maybe_unused]] __half* levels = reinterpret_cast<__half*>(shared_memory + map_bytes + static_cast<std::size_t>(16 * warps) * detail::RowStage::bytes(target.dtype, slice));
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  const int num_rows = lists.num_compressed, segments = tables.num_segments(slot, num_rows), channels = layout.channels(part), units = layout.units(part), steps = (channels + 15) / 16;
  const int begin = range.first_piece(RowList::compressed) * kStoreRows + static_cast<int>(blockIdx.x) * kDecodeRows, end = min(begin + kDecodeRows, min(num_rows, static_cast<int>(range.end[1])));
  const int together = codes ? tiles * kStoreRows : warps * own_rows;  // rows at a time
  const bool works = warp * own_rows < together;
  const auto tile_of = [&](int row) { return tables.tile(table, layout, row / layout.rows) + layout.offset(part); };
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
          const std::uint8_t* unit_codes = tile_of(row);
          for (int before = 0; before < unit; ++before) unit_codes += code_unit_bytes(layout.width(part, before));
          __half* unpacked = levels + tile * detail::level_numbers(part, channels);
          const int line = detail::level_line(part, channels);
          if (part == Part::key) detail::unpack_levels<Part::key>(unit_codes, layout.width(part, unit), unpacked + unit * kCodeUnit, line, lane);
          else detail::unpack_levels<Part::value>(unit_codes, layout.width(part, unit), unpacked + unit * kCodeUnit * line, line, lane);
        }
        for (int item = thread; item < together; item += kStoreThreads) {
          #pragma unroll
          for (int group = 0; group < scale_groups; ++group) {
            if (base + item < num_rows) gains[group][item] = detail::stored_gain(tables.tile(table, layout, (base + item) / kCodeRows), layout, part, (base + item) % kCodeRows, group);
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
      const int second_step = layout.first_units(part) * (kCodeUnit / 16);
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
        uint4 a[sixteens];
        #pragma unroll
        for (int m = 0; m < sixteens; ++m) {
          if constexpr (codes) {  // keys are rows x channels, values channels x rows
            const int row = 16 * warp % kStoreRows, line = detail::level_line(part, channels), lines = part == Part::key ? row : 16 * k, columns = part == Part::key ? 16 * k : row;
            const std::uint32_t* own = reinterpret_cast<const std::uint32_t*>(levels + 16 * warp / kStoreRows * detail::level_numbers(part, channels) + (lines + g) * line + columns + 2 * t);
            a[m] = {own[0], own[4 * line], own[4], own[4 * line + 4]};
          } else {
            const int row = first + 16 * m;
            a[m] = row < num_rows ? *reinterpret_cast<const uint4*>(tile_of(row) + (row % layout.rows / kPlainRows * units + k) * kPlainUnitBytes + 16 * lane) : uint4{};
          }
          if (part == Part::value) a[m] = {transposed(a[m].x), transposed(a[m].z), transposed(a[m].y), transposed(a[m].w)};
        }
        #pragma unroll
        for (int n = 0; n < kDecodeBlocks; ++n) {
          if (n >= blocks) break;
          #pragma unroll
          for (int i = parts - 1; i >= 0; --i) {
            const uint2 b = maps_of_block[((k * blocks + n) * parts + i) * 32 + lane];
            #pragma unroll
            for (int m = 0; m < sixteens; ++m) mma_plain<type>(sums[m][n], a[m], b.x, b.y);
          }
        }
      }
      #pragma unroll
      for (int m = 0; m < sixteens; ++m) {
        if (m > 0) __syncwarp();  // the rows before these are written
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
            stage.put(row, 8 * n + 2 * t, fmaf(low, scale, mean.x), fmaf(high, scale, mean.y));
          }
        }
        __syncwarp();
        stage.template write<16, 32>(places[warp] + 16 * m, head, first_channel, target, lane);
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
  rows.template write<kStoreRows, kStoreThreads>(places, head, 0, target, thread);
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
    const int slices = (tables.head_dim + slice - 1) / slice, blocks = (pieces * kStoreRows + kDecodeRows - 1) / kDecodeRows;
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(value.data == nullptr ? slices : 2 * slices));
    detail::launch_kernel(kernel, grid, kStoreThreads, bytes(), "decode_rows_kernel", stream, tables, slot, range, slice, static_cast<int>(maps()), tiles, key, value);
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
