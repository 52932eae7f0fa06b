// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/decode_rows.cuh  Compressed rows back as K and V, in the engine's own tensors.
///
/// Coefficients, and levels of codes, are exact 16-bit operands. Maps are split into two such
/// numbers (bf16: three), so that products are those of f32. Warps of a block synchronise only
/// where its maps change or outgrow shared memory. Floor: the tiles' bytes once, the written rows
/// once; on tensor cores 2 x parts x channels x head_dim products a row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lowrankkv/cuda/decode/row_operands.cuh"
#include "lowrankkv/cuda/decode/row_stage.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/layer/token_range.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Rows of a list that a block decodes at a time, 32 a warp, with maps in shared memory; it decodes
/// a multiple of them.
inline constexpr int kDecodeRows = 256;
inline constexpr int kMostDecodeRows = 2048;  ///< rows of a list that a block decodes, at most
inline constexpr int kDecodeChannels = 64;    ///< row channels that a block decodes, at most
inline constexpr int kDecodeBlocks = kDecodeChannels / 8;
/// Static shared memory of decode_rows_kernel, in bytes, at most.
inline constexpr int kDecodeShared = 3072;

namespace detail {

/// Where a unit of codes, or a block of joint values, stands in a tile; in shared memory.
template <bool joint>
using UnitOfRows = std::conditional_t<joint, JointBlock, UnitPlace>;

/// The least that a second scale group's gain is taken for, so that the first group's gain can be
/// divided by it. Levels times this gain are nothing.
inline constexpr float kLeastGain = 0x1p-60F;

/// Reads the gains of rows from a tile of codes.
struct RowGains {
  int at = 0, bytes = 0;  // where the first row's gain stands; bytes of a gain
  __device__ RowGains(const HeadTiles& layout, Part part)
      : at(layout.gain_place(part, 0)), bytes(layout.gain_bytes()) {}
  __device__ __forceinline__ std::uint32_t bits(const std::uint8_t* tile, int row,
                                                int group) const {
    const std::uint8_t* place = tile + at + (group * kCodeRows + row) * bytes;
    return bytes == 1 ? *place : *reinterpret_cast<const std::uint16_t*>(place);
  }
  __device__ __forceinline__ float of(std::uint32_t bits) const {
    return bytes == 1 ? gain_of(static_cast<int>(bits))
                      : from_bits(DType::f16, static_cast<std::uint16_t>(bits));
  }
};

/// How a launch of decode_rows_kernel is laid out.
struct DecodeCall {
  int block_rows = 0;  ///< rows of a list that a block decodes
  /// Steps of 16 channels of tiles whose maps are in shared memory at a time.
  int chunk = 0;
  int stage_at = 0;  ///< byte of shared memory at which the rows' stages begin
  int units_at = 0;  ///< byte at which the places of units begin
};

}  // namespace detail

/// @brief Writes K and V (K alone, if there is no target for V) of the compressed rows of a range;
/// of joint values V alone. A warp multiplies 32 rows with maps that its block has in shared
/// memory. Grid: (pieces of `block_rows` rows of a list x slices of kDecodeChannels channels) x KV
/// heads x (keys, then values).
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam type   of the operands: that of plain coefficients; f16 for codes
/// @tparam joint  decodes the latents that heads share
template <int scale_groups, DType type, bool joint>
__global__ void __launch_bounds__(kStoreThreads, 2)
    decode_rows_kernel(LayerView tables, int slot, TokenRange range, detail::DecodeCall call,
                       DeviceTarget key, DeviceTarget value) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0, two_groups = scale_groups == 2;
  constexpr int warps = kStoreThreads / 32;
  using Operands = detail::MapOperands<type>;
  __shared__ std::int64_t places[warps][32];
  __shared__ __align__(8) float means[kDecodeChannels];
  if (range.merge != nullptr && range.merge->segment < 0) return;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim,
            thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4;
  // Slices of the same rows are neighbouring blocks, so that what they read is in the cache.
  const int slices = (dim + kDecodeChannels - 1) / kDecodeChannels,
            piece = static_cast<int>(blockIdx.x) / slices,
            first_channel = static_cast<int>(blockIdx.x) % slices * kDecodeChannels;
  const int blocks = min(kDecodeChannels, dim - first_channel) / 8,
            list = joint ? tables.num_heads + head / tables.joint_heads : head;
  const Part part = !joint && blockIdx.z == 0 ? Part::key : Part::value;
  const HeadTiles& layout = tables.compressed[list];
  if (part == Part::value && !layout.values) return;
  // Copies of members that are used often: the compiler would reload those after every store to
  // shared memory.
  const int tile_rows = layout.rows, tile_bytes = layout.bytes,
            tiles_per_page = layout.tiles_per_page, part_offset = layout.offset(part);
  DeviceTarget target = key;
  if (part == Part::value) target = value;
  uint2* maps_of_block = reinterpret_cast<uint2*>(shared_memory);
  const detail::RowStage stage(shared_memory + call.stage_at +
                                   static_cast<std::size_t>(16 * warp) *
                                       detail::RowStage::bytes(target.dtype, kDecodeChannels),
                               target.dtype, 8 * blocks);
  [[maybe_unused]] auto* const units_of_rows =
      reinterpret_cast<detail::UnitOfRows<joint>*>(shared_memory + call.units_at);
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const std::int32_t* table = tables.page_table(RowList::compressed, slot, list);
  const int num_rows = lists.num_compressed, segments = tables.num_segments(slot, num_rows);
  const int first_units = !codes  ? 0
                          : joint ? joint_blocks(layout, 0)
                                  : layout.first_units(part),
            units = joint && codes ? first_units + (two_groups ? joint_blocks(layout, 1) : 0)
                                   : layout.units(part);
  const int steps = codes ? units * (kCodeUnit / 16) : units;
  [[maybe_unused]] const detail::RowGains row_gains(layout, part);
  const bool whole = steps <= call.chunk;  // all maps fit shared memory at a time
  const int first_row = range.merge == nullptr ? 0 : range.merge->begin,
            begin = first_row / kStoreRows * kStoreRows +
                    range.first_piece(RowList::compressed) * kStoreRows + piece * call.block_rows,
            end = min(begin + call.block_rows,
                      min(num_rows, first_row + static_cast<int>(range.end[1])));
  const int first_tile = begin / tile_rows, first_page = first_tile / tiles_per_page,
            first_in_page = first_tile % tiles_per_page,
            log_rows = tile_rows == 64   ? 6
                       : tile_rows == 32 ? 5
                                         : 4;
  const auto tile_of = [&](int row) -> const std::uint8_t* {  // without a division
    int page = first_page, tile = first_in_page + (row >> log_rows) - first_tile;
    for (; tile >= tiles_per_page; tile -= tiles_per_page) ++page;
    return tables.pool + static_cast<std::size_t>(table[page]) * tables.page_bytes +
           static_cast<std::size_t>(tile) * static_cast<std::size_t>(tile_bytes);
  };
  const detail::RowWriter writer(stage, target, head, first_channel, lane, 32);
  if constexpr (codes) {
    for (int unit = thread; unit < units; unit += kStoreThreads) {
      if constexpr (joint) {
        units_of_rows[unit] = joint_block(layout, unit);
      } else {
        detail::UnitPlace own{layout.width(part, unit), part_offset};
        for (int before = 0; before < unit; ++before)
          own.at += code_unit_bytes(layout.width(part, before));
        units_of_rows[unit] = own;
      }
    }
  }
  int loaded = -1;  // epoch whose means, and maps if all fit, are loaded
  for (int index = 0; index < segments; ++index) {
    const SegmentRows segment = tables.segment(slot, head, num_rows, index, 0);
    const int from = max(begin, segment.begin), until = min(end, segment.end);
    if (from >= until) continue;
    const PartMaps& maps = tables.maps[segment.epoch * tables.num_heads + head].of(part);
    const auto load_maps = [&](int first, int count) {
      Operands::load(maps, first, count, first_channel / 8, blocks, dim, codes && part == Part::key,
                     maps_of_block);
    };
    if (loaded != segment.epoch) {
      __syncthreads();  // the maps before these are no longer read
      if (whole) load_maps(0, steps);
      if (thread < 8 * blocks)
        means[thread] = maps.mean == nullptr ? 0.0F : maps.mean[first_channel + thread];
      loaded = segment.epoch;
      __syncthreads();
    }
    const float inverse = 1.0F / *maps.reader_scale;  // a power of two
    for (int base = begin + (from - begin) / kDecodeRows * kDecodeRows; base < until;
         base += kDecodeRows) {
      const int first = base + 32 * warp;  // the warp's first row
      __syncwarp();                        // the rows before these are written
      const int own_row = first + lane;
      // In place of rows that do not exist others are multiplied, and written nowhere.
      [[maybe_unused]] const std::uint8_t* tile =
          tile_of(first < num_rows ? first : begin);     // of codes
      [[maybe_unused]] const int half = first / 32 % 2;  // of its rows
      [[maybe_unused]] std::uint32_t gain_bits[2] = {};  // of the lane's row, in the scale groups
      if constexpr (codes) {
#pragma unroll
        for (int group = 0; group < scale_groups; ++group)
          gain_bits[group] =
              own_row < num_rows ? row_gains.bits(tile, own_row % kCodeRows, group) : 0;
      }
      const std::int64_t token =
          own_row >= from && own_row < until
              ? (range.by_row ? own_row - first_row
                              : detail::position_of(tables, RowList::compressed, slot, head, lists,
                                                    own_row)) -
                    range.first
              : -1;
      const std::int64_t place = target.place_of(token, range.count);
      places[warp][lane] = place;
      const bool wanted = __any_sync(~0U, place != kNowhere);
      if (whole && !wanted) continue;
      __syncwarp();
      float sums[2][kDecodeBlocks][4] = {};
      // Multiplies with the maps of step k of the loaded chunk.
      const auto multiply = [&](int k, const uint4(&a)[2]) {
        const uint2* own = maps_of_block + k * blocks * Operands::parts * 32;
        const auto with_blocks = [&](auto all) {
#pragma unroll
          for (int n = 0; n < kDecodeBlocks; ++n) {
            if (!decltype(all)::value && n >= blocks) break;
            uint2 b[Operands::parts];
            Operands::read(own, n, lane, b);
#pragma unroll
            for (int i = Operands::parts - 1; i >= 0; --i) {
#pragma unroll
              for (int m = 0; m < 2; ++m) mma_plain<type>(sums[m][n], a[m], b[i].x, b[i].y);
            }
          }
        };
        if (blocks == kDecodeBlocks)
          with_blocks(std::true_type{});
        else
          with_blocks(std::false_type{});
      };
      // Of the lane's row: the last scale group's gain, and the first group's gain over it.
      [[maybe_unused]] float gain = row_gains.of(gain_bits[0]), ratio = 0.0F;
      if (two_groups && first_units < units) {
        const float last = fmaxf(row_gains.of(gain_bits[1]), detail::kLeastGain);
        ratio = gain / last;
        gain = last;
      }
      for (int from_step = 0; from_step < steps; from_step += call.chunk) {
        const int until_step = min(steps, from_step + call.chunk);
        if (!whole) {
          __syncthreads();
          load_maps(from_step, until_step - from_step);
          __syncthreads();
          if (!wanted) continue;
        }
        if constexpr (codes) {
          const auto multiply_unit = [&](int unit, const uint4(&a)[2][2]) {
            if (two_groups && unit == first_units) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float own = __shfl_sync(~0U, ratio, 8 * i + g);
#pragma unroll
                for (int n = 0; n < 2 * kDecodeBlocks; ++n)
                  sums[i / 2][n / 2][2 * (i % 2) + n % 2] *= own;
              }
            }
            multiply(2 * unit - from_step, a[0]);
            multiply(2 * unit - from_step + 1, a[1]);
          };
          if constexpr (joint) {
            for (int unit = from_step / 2; unit < until_step / 2; ++unit) {
              uint4 a[2][2];
              detail::block_levels(tile, units_of_rows[unit], half, lane, a);
              multiply_unit(unit, a);
            }
          } else {
            const auto of_part = [&](auto constant) {
              constexpr Part own_part = decltype(constant)::value;
              detail::UnitPlace next = units_of_rows[from_step / 2];
              detail::UnitWords words =
                  detail::unit_words<own_part>(tile + next.at, next.bits, half, lane);
              for (int unit = from_step / 2; unit < until_step / 2; ++unit) {
                uint4 a[2][2];
                detail::unit_levels<own_part>(words, next.bits, half, a);
                if (unit + 1 < until_step / 2) {
                  next = units_of_rows[unit + 1];
                  words = detail::unit_words<own_part>(tile + next.at, next.bits, half, lane);
                }
                multiply_unit(unit, a);
              }
            };
            if (part == Part::key)
              of_part(std::integral_constant<Part, Part::key>{});
            else
              of_part(std::integral_constant<Part, Part::value>{});
          }
        } else {
          const uint4* rows_of[2];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int row = first + 16 * m < num_rows ? first + 16 * m : begin;
            rows_of[m] = reinterpret_cast<const uint4*>(tile_of(row) + part_offset +
                                                        (row & (tile_rows - 1)) / kPlainRows *
                                                            units * kPlainUnitBytes) +
                         lane;
          }
          const auto load = [&](int k, uint4(&own)[2]) {
#pragma unroll
            for (int m = 0; m < 2; ++m) own[m] = rows_of[m][k * (kPlainUnitBytes / 16)];
          };
          uint4 a[2], next[2];
          load(from_step, next);
#pragma unroll 2
          for (int k = from_step; k < until_step; ++k) {
            // Units of keys are rows x channels, units of values channels x rows.
#pragma unroll
            for (int m = 0; m < 2; ++m)
              a[m] = part == Part::key ? next[m]
                                       : uint4{transposed(next[m].x), transposed(next[m].z),
                                               transposed(next[m].y), transposed(next[m].w)};
            if (k + 1 < until_step) load(k + 1, next);
            multiply(k - from_step, a);
          }
        }
      }
      if (!wanted) continue;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float scales[2] = {inverse, inverse};
        if constexpr (codes) {
#pragma unroll
          for (int r = 0; r < 2; ++r) scales[r] *= __shfl_sync(~0U, gain, 16 * m + 8 * r + g);
        }
        if (m > 0) __syncwarp();  // the rows before these are written
        stage.with_type([&](auto target_type) {
#pragma unroll
          for (int n = 0; n < kDecodeBlocks; ++n) {
            if (n >= blocks) break;
            const float2 mean = *reinterpret_cast<const float2*>(means + 8 * n + 2 * t);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              stage.template put_as<decltype(target_type)::value>(
                  g + 8 * r, 8 * n + 2 * t, fmaf(sums[m][n][2 * r], scales[r], mean.x),
                  fmaf(sums[m][n][2 * r + 1], scales[r], mean.y));
            }
          }
        });
        __syncwarp();
        writer.template write<16>(places[warp] + 16 * m);
      }
    }
  }
}

namespace detail {

/// How many rows of a list a block of decode_rows_kernel decodes: minimises rounds of blocks times
/// the rows of a block, and the loading of its maps in rows. Two blocks run on a multiprocessor at
/// a time.
/// @param lists  lists of `rows` rows, counted once for each slice and part
inline int decode_block_rows(std::int64_t rows, int lists, int multiprocessors) {
  constexpr int kLoad = 128;  // what loading maps costs, in rows
  int best = kDecodeRows;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int own = kDecodeRows; own <= kMostDecodeRows; own += kDecodeRows) {
    const std::int64_t blocks = (rows + own - 1) / own * lists,
                       rounds = (blocks - 1) / (2 * multiprocessors) + 1,
                       cost = rounds * (own + kLoad);
    if (cost < least) best = own;
    least = (std::min)(least, cost);
  }
  return best;
}

}  // namespace detail

/// @brief Enqueues the stored K and V, or K alone, of the compressed rows of a range of a sequence.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam joint  V of joint values alone
template <int scale_groups, bool joint = false>
void decode_rows(const LayerState& layer, int slot, const TokenRange& range,
                 const DeviceTarget& key, const DeviceTarget& value, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const int pieces = range.pieces(RowList::compressed);
  if (pieces == 0) return;
  int units = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    if (tiles.keys == joint) continue;
    units = joint && tiles.codes
                ? (std::max)(units, joint_blocks(tiles, 0) + joint_blocks(tiles, 1))
                : (std::max)({units, tiles.units(Part::key), tiles.units(Part::value)});
  }
  const auto launch = [&]<DType type>(std::integral_constant<DType, type>) {
    constexpr bool codes = scale_groups > 0;
    const int per_unit = codes ? kCodeUnit / 16 : 1, steps = per_unit * units;
    const std::size_t stages = kStoreThreads / 2 *
                               (std::max)(detail::RowStage::bytes(key.dtype, kDecodeChannels),
                                          detail::RowStage::bytes(value.dtype, kDecodeChannels));
    const std::size_t step_bytes = detail::MapOperands<type>::bytes(1, kDecodeChannels),
                      rest = stages + (codes ? static_cast<std::size_t>(units) *
                                                   sizeof(detail::UnitOfRows<joint>)
                                             : 0);
    // Maps that do not fit are loaded in parts, for every kDecodeRows rows, by two blocks on a
    // multiprocessor.
    const std::size_t most = static_cast<std::size_t>(layer.shared_bytes() - kDecodeShared),
                      some = most / 2 > rest + step_bytes * static_cast<std::size_t>(2 * per_unit)
                                 ? most / 2 - rest
                                 : most - rest;
    detail::DecodeCall call;
    call.chunk = static_cast<std::size_t>(steps) * step_bytes + rest <= most
                     ? steps
                     : static_cast<int>(some / step_bytes) / per_unit * per_unit;
    call.stage_at = static_cast<int>(step_bytes) * call.chunk;
    call.units_at = call.stage_at + static_cast<int>(stages);
    const int slices = (tables.head_dim + kDecodeChannels - 1) / kDecodeChannels,
              parts = joint || value.data == nullptr ? 1 : 2;
    const std::int64_t rows = std::int64_t{pieces} * kStoreRows;
    call.block_rows =
        detail::decode_block_rows(rows, tables.num_heads * slices * parts, layer.multiprocessors());
    const dim3 grid(static_cast<unsigned>((rows + call.block_rows - 1) / call.block_rows * slices),
                    static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(parts));
    detail::launch_kernel(decode_rows_kernel<scale_groups, type, joint>, grid, kStoreThreads,
                          static_cast<std::size_t>(call.stage_at) + rest, "decode_rows_kernel",
                          stream, tables, slot, range, call, key, value);
  };
  if (scale_groups > 0 || layer.tiles().coded_type == DType::f16)
    launch(std::integral_constant<DType, DType::f16>{});
  else if constexpr (scale_groups == 0)
    launch(std::integral_constant<DType, DType::bf16>{});
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
