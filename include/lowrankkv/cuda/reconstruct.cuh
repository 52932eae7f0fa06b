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

#include "lowrankkv/cuda/launch.cuh"
#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/scaled_tiles.cuh"
#include "lowrankkv/cuda/store_rows.cuh"
#include "lowrankkv/cuda/token_range.cuh"
#include "lowrankkv/cuda/unpack_levels.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kDecodePieces = 4;   ///< of 64 rows, that a block decodes one after the other with maps that it has in registers
inline constexpr int kDecodeSteps = 8;    ///< of 16 channels, that it has them for

namespace detail {

/// Rows in shared memory as the target has them, before they go there 16 bytes at a time.
struct RowStage {
  std::uint8_t* base;
  DType dtype;
  int stride;  ///< bytes from a row to the next: no two rows of a product meet in a bank

  __device__ RowStage(std::uint8_t* memory, DType type, int head_dim) : base(memory), dtype(type), stride(head_dim * static_cast<int>(type == DType::f32 ? 4 : 2) + 16) {}
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
  /// Writes channels [first, end), multiples of 16, to the target; row i to its place places[i], if it has one.
  __device__ void write(const std::int64_t* places, int head, int first, int end, const DeviceTarget& target) const {
    const int size = dtype == DType::f32 ? 4 : 2, per_row = (end - first) * size / 16;
    const bool wide = target.wide();
    for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * per_row; item += kStoreThreads) {
      const int row = item / per_row, byte = first * size + item % per_row * 16;
      if (places[row] == kNowhere) continue;
      const uint4 words = *reinterpret_cast<const uint4*>(base + row * stride + byte);
      std::uint8_t* at = static_cast<std::uint8_t*>(target.data) + (places[row] + head * target.head_stride) * size + byte;
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

/// Operands of the products with maps: two blocks of eight row channels, so many steps of 16 channels of tiles; sums of parts.
template <DType type>
struct MapOperands {
  static constexpr int parts = type == DType::f16 ? 2 : 3;
  uint2 words[2][kDecodeSteps][parts];

  __device__ static std::uint32_t packed(float low, float high) { return static_cast<std::uint32_t>(to_bits(type, low)) | static_cast<std::uint32_t>(to_bits(type, high)) << 16; }
  /// Steps [first, first + kDecodeSteps) of the blocks `block` and `block` + 1.
  __device__ void load(const PartMaps& maps, int first, int block, int dim) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float scale = __ldg(maps.reader_scale);
    #pragma unroll
    for (int n = 0; n < 2; ++n) {
      #pragma unroll
      for (int k = 0; k < kDecodeSteps; ++k) {
        const bool there = 16 * (first + k) < maps.width && 8 * (block + n) < dim;
        float4 rest = there ? maps.reader.quad(((first + k) * (dim / 8) + block + n) * 32 + lane) : float4{};
        rest = {rest.x * scale, rest.y * scale, rest.z * scale, rest.w * scale};
        #pragma unroll
        for (int part = 0; part < parts; ++part) {
          const std::uint32_t low = packed(rest.x, rest.y), high = packed(rest.z, rest.w);
          words[n][k][part] = {transposed(low), transposed(high)};
          rest = {rest.x - from_bits(type, static_cast<std::uint16_t>(low)), rest.y - from_bits(type, static_cast<std::uint16_t>(low >> 16)),
                  rest.z - from_bits(type, static_cast<std::uint16_t>(high)), rest.w - from_bits(type, static_cast<std::uint16_t>(high >> 16))};
        }
      }
    }
  }
};

}  // namespace detail

/// @brief Shared memory of decode_rows_kernel in bytes. @param part_bytes  most of the keys, or the values, of 64 rows  @param channels  most of them, in tiles of codes
inline std::size_t decode_bytes(int head_dim, int part_bytes, int channels) {
  return static_cast<std::size_t>(kStoreRows * (4 * head_dim + 16) + part_bytes) + sizeof(__half) * static_cast<std::size_t>((std::max)(kStoreRows * (channels + 8), channels * (kStoreRows + 8)));
}

/// @brief Writes K and V (K alone, if there is no target for V) of the compressed rows of a range. Grid: kDecodePieces x 64 rows of a list x KV heads.
/// @tparam scale_groups  of tiles of codes; 0: plain ones  @tparam type  of the operands: that of plain coefficients; f16 for codes
template <int scale_groups, DType type>
__global__ void __launch_bounds__(kStoreThreads, type == DType::f16 && scale_groups < 2 ? 2 : 1) decode_rows_kernel(Tables tables, int slot, TokenRange range, int part_bytes, DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, blocks = dim / 8;
  std::uint8_t* stored = shared_memory + kStoreRows * (4 * dim + 16);  // behind the rows: what is stored of the part, as it lies
  __half* levels = reinterpret_cast<__half*>(stored + part_bytes);     // of codes: keys [kStoreRows, channels + 8], values [channels, kStoreRows + 8]
  __shared__ const std::uint8_t* tiles[kStoreRows / kPlainRows];
  __shared__ std::int64_t places[kStoreRows];
  constexpr bool codes = scale_groups > 0, two_groups = scale_groups == 2;
  __shared__ float gains[two_groups ? 2 : 1][kStoreRows];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  if (range.wanted != nullptr && *range.wanted < 0) return;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const HeadTiles& layout = tables.compressed[head];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, head);
  const int num_rows = lists.num_compressed, segments = tables.num_segments(slot, num_rows), first_piece = range.first_piece(RowList::compressed) + static_cast<int>(blockIdx.x) * kDecodePieces;
  const int pieces = min(kDecodePieces, (min(num_rows, static_cast<int>(range.end[1])) + kStoreRows - 1) / kStoreRows - first_piece);
  for (const Part part : {Part::key, Part::value}) {
    if (part == Part::value && (!layout.values || value.data == nullptr)) break;
    const DeviceTarget& target = part == Part::key ? key : value;
    const detail::RowStage rows(shared_memory, target.dtype, dim);
    const int channels = layout.channels(part), units = part == Part::key ? layout.key_units : layout.value_units, steps = (channels + 15) / 16;
    const int tile_bytes = part == Part::key ? layout.value_offset - layout.key_offset : layout.bytes - layout.value_offset;  // of the part
    for (int first_block = 0; first_block < blocks; first_block += 2 * kStoreThreads / 32) {  // once up to head_dim 128
      const int block = first_block + 2 * warp;
      detail::MapOperands<type> operands;
      int loaded = -1;  // epoch whose maps they are, the first steps of them
      for (int piece = 0; piece < pieces; ++piece) {
        const int begin = (first_piece + piece) * kStoreRows;
        bool wanted = false;
        __syncthreads();  // the rows before these are written
        if (thread < kStoreRows) {
          const int row = begin + thread;
          const std::int64_t token = row < num_rows ? (range.by_row ? row : detail::position_of(tables, RowList::compressed, slot, head, lists, row)) - range.first : -1;
          places[thread] = target.place_of(token, range.count);
          wanted = places[thread] != kNowhere;
          #pragma unroll
          for (int group = 0; group < scale_groups; ++group) {
            if (row < num_rows) gains[group][thread] = detail::stored_gain(tables.tile(table, layout, begin / kCodeRows), layout, part, thread, group);
          }
        } else if (thread - kStoreRows < kStoreRows / layout.rows) {
          const int row = begin + (thread - kStoreRows) * layout.rows;
          tiles[thread - kStoreRows] = row < num_rows ? tables.tile(table, layout, row / layout.rows) + layout.offset(part) : nullptr;
        }
        if (__syncthreads_or(wanted ? 1 : 0) == 0) continue;
        for (int item = thread; item < kStoreRows / layout.rows * (tile_bytes / 16); item += kStoreThreads) {
          const std::uint8_t* tile = tiles[item / (tile_bytes / 16)];
          reinterpret_cast<uint4*>(stored)[item] = tile == nullptr ? uint4{} : reinterpret_cast<const uint4*>(tile)[item % (tile_bytes / 16)];
        }
        __syncthreads();
        if constexpr (codes) {
          const std::uint8_t* from = stored;
          for (int unit = 0; unit < units; ++unit) {
            const int bits = part == Part::key ? layout.key_widths[unit] : layout.value_widths[unit];
            if (part == Part::key) detail::unpack_levels<Part::key>(from, bits, levels + unit * kCodeUnit, channels + 8);
            else detail::unpack_levels<Part::value>(from, bits, levels + unit * kCodeUnit * (kStoreRows + 8), kStoreRows + 8);
            from += code_unit_bytes(bits);
          }
          __syncthreads();
        }
        for (int index = 0; index < segments; ++index) {
          const SegmentRows segment = tables.segment(slot, head, num_rows, index, 0);
          if (segment.end <= begin || segment.begin >= begin + kStoreRows) continue;
          const PartMaps& maps = tables.maps[segment.epoch * tables.num_heads + head].of(part);
          float sums[kStoreRows / 16][2][4] = {};
          [[maybe_unused]] float done[two_groups ? kStoreRows / 16 : 1][2][4] = {};  // of the first scale group, with its gains
          const int second_step = layout.first_units(part) * (kCodeUnit / 16);
          for (int first_step = 0; first_step < steps && block < blocks; first_step += kDecodeSteps) {  // once up to 128 channels
            if (loaded != segment.epoch || steps > kDecodeSteps) {
              operands.load(maps, first_step, block, dim);
              loaded = segment.epoch;
            }
            #pragma unroll
            for (int k = 0; k < kDecodeSteps; ++k) {
              if (first_step + k >= steps) break;
              if constexpr (two_groups) {
                if (first_step + k == second_step) {
                  #pragma unroll
                  for (int i = 0; i < kStoreRows / 2; ++i) {
                    float& sum = sums[i / 8][i / 4 % 2][i % 4];
                    done[i / 8][i / 4 % 2][i % 4] = sum * gains[0][16 * (i / 8) + g + 8 * (i / 2 % 2)];
                    sum = 0.0F;
                  }
                }
              }
              #pragma unroll
              for (int m = 0; m < kStoreRows / 16; ++m) {
                uint4 a;
                if constexpr (codes) {  // keys are rows x channels, values channels x rows
                  const int lines = part == Part::key ? 16 * m : 16 * (first_step + k), columns = part == Part::key ? 16 * (first_step + k) : 16 * m, line = part == Part::key ? channels + 8 : kStoreRows + 8;
                  const std::uint32_t* own = reinterpret_cast<const std::uint32_t*>(levels + (lines + g) * line + columns + 2 * t);
                  a = {own[0], own[4 * line], own[4], own[4 * line + 4]};
                } else {
                  a = reinterpret_cast<const uint4*>(stored)[(m * units + first_step + k) * 32 + lane];  // sixteen rows after sixteen rows
                }
                if (part == Part::value) a = {transposed(a.x), transposed(a.z), transposed(a.y), transposed(a.w)};
                #pragma unroll
                for (int n = 0; n < 2; ++n) {
                  #pragma unroll
                  for (int i = detail::MapOperands<type>::parts - 1; i >= 0; --i) mma_plain<type>(sums[m][n], a, operands.words[n][k][i].x, operands.words[n][k][i].y);
                }
              }
            }
          }
          #pragma unroll
          for (int n = 0; n < 2; ++n) {
            if (block + n >= blocks) continue;
            #pragma unroll
            for (int m = 0; m < kStoreRows / 16; ++m) {
              const auto put = [&](int row, float first, float second, const float* before) {
                if (begin + row < segment.begin || begin + row >= segment.end) return;
                const int channel = 8 * (block + n) + 2 * t;
                if constexpr (two_groups) {
                  const float gain = gains[second_step < steps ? 1 : 0][row];
                  first = fmaf(first, gain, before[0]);
                  second = fmaf(second, gain, before[1]);
                }
                const float scale = (scale_groups == 1 ? gains[0][row] : 1.0F) / *maps.reader_scale;  // by a power of two
                rows.put(row, channel, first * scale + (maps.mean == nullptr ? 0.0F : maps.mean[channel]), second * scale + (maps.mean == nullptr ? 0.0F : maps.mean[channel + 1]));
              };
              put(16 * m + g, sums[m][n][0], sums[m][n][1], done[two_groups ? m : 0][n]);
              put(16 * m + g + 8, sums[m][n][2], sums[m][n][3], done[two_groups ? m : 0][n] + 2);
            }
          }
        }
        __syncthreads();
        rows.write(places, head, first_block * 8, min(dim, first_block * 8 + kStoreThreads / 2), target);
      }
    }
  }
}

/// @brief The same of the full rows and of the tail's rows of a range, as they are stored. Grid: 64-row pieces of the full list, then of the tail, x KV heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) copy_rows_kernel(Tables tables, int slot, TokenRange range, int full_pieces, DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ std::int64_t places[2][kStoreRows];  // by part
  __shared__ const std::uint8_t* tiles[kStoreRows / kPlainRows];
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, units = dim / kPlainUnit, thread = static_cast<int>(threadIdx.x);
  const bool tail = static_cast<int>(blockIdx.x) >= full_pieces;
  const int begin = (static_cast<int>(blockIdx.x) + (tail ? -full_pieces : range.first_piece(RowList::full))) * kStoreRows;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const DeviceLengths lengths = tables.lengths[slot];
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const int num_rows = tail ? lengths.tail_length : lists.num_full, used = min(kStoreRows, num_rows - begin);
  if (thread < kStoreRows) {
    const std::int64_t position = thread >= used ? -1 : tail ? range.first_tail + begin + thread : range.by_row ? begin + thread : detail::position_of(tables, RowList::full, slot, head, lists, begin + thread);
    places[0][thread] = key.place_of(position - range.first, range.count);
    places[1][thread] = value.place_of(position - range.first, range.count);
  } else if (!tail && (thread - kStoreRows) * tables.listed.rows < used) {
    tiles[thread - kStoreRows] = tables.tile(table, tables.listed, begin / tables.listed.rows + thread - kStoreRows);
  }
  const SourceRows ring(tables, {}, slot, head);
  const auto copy = [&](Part part, const DeviceTarget& target) {  // of each: a reference to either would be to a copy in local memory
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
    rows.write(places[static_cast<int>(part)], head, 0, dim, target);
  };
  copy(Part::key, key);
  if (value.data != nullptr) copy(Part::value, value);
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
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(tables.num_heads));
  detail::launch_kernel(copy_rows_kernel<>, grid, kStoreThreads, decode_bytes(tables.head_dim, 0, 0), "copy_rows_kernel", stream, tables, slot, range, full, key, value);
}

/// @brief The same of the compressed rows (joint values: K alone). @tparam scale_groups  of tiles of codes; 0: plain ones
template <int scale_groups>
void decode_rows(const LayerState& layer, int slot, const TokenRange& range, const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const int pieces = range.pieces(RowList::compressed);
  if (pieces == 0) return;
  int channels = 0, part_bytes = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    if (!tiles.keys) continue;
    channels = (std::max)({channels, tiles.channels(Part::key), tiles.channels(Part::value)});
    part_bytes = (std::max)({part_bytes, kStoreRows / tiles.rows * (tiles.value_offset - tiles.key_offset), kStoreRows / tiles.rows * (tiles.bytes - tiles.value_offset)});
  }
  const auto launch = [&](auto* kernel) {
    const dim3 grid(static_cast<unsigned>((pieces + kDecodePieces - 1) / kDecodePieces), static_cast<unsigned>(tables.num_heads));
    detail::launch_kernel(kernel, grid, kStoreThreads, decode_bytes(tables.head_dim, part_bytes, scale_groups > 0 ? channels : 0), "decode_rows_kernel", stream, tables, slot, range, part_bytes, key, value);
  };
  if (scale_groups > 0 || layer.tiles().coded_type == DType::f16) launch(decode_rows_kernel<scale_groups, DType::f16>);
  else if constexpr (scale_groups == 0) launch(decode_rows_kernel<0, DType::bf16>);
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
