// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/store_joint.cuh  Joint values of flushed rows: projects the values of all heads
/// of a group onto their latent, quantises and packs it.
///
/// Rows are taken in portions whose f32 coefficients fit scratch memory: one launch computes them,
/// the next stores them. Every sum has one order, so results do not depend on portions. Floor: 2 x
/// heads x head_dim x rank flops a row and group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/store/row_errors.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kLatentPieces = 64;     ///< 64-row pieces of a portion, at most
inline constexpr int kLatentChannels = 128;  ///< channels of a block of project_latents_kernel

/// @brief The rows of a portion, and where their coefficients are.
struct LatentPortion {
  std::int32_t first_sequence = 0;  ///< of the flush batch
  std::int32_t first_piece = 0;     ///< of a list, in pieces of 64 rows
  std::int32_t pieces = 0;          ///< of each sequence
  /// Numbers set aside for a row; rows of a group of lower rank stand closer.
  std::int32_t stride = 0;
  float* latents = nullptr;  ///< [sequence of the portion, group, 64 pieces, stride]
  RowOrder order;            ///< of the rows that are compressed
  StagingTiles staging;      ///< where rows go; empty: to the lists' ends

  /// @brief The coefficients of a piece, for this block's sequence (blockIdx.z) and group
  /// (blockIdx.y).
  __device__ float* of(int piece) const {
    return latents + ((static_cast<std::size_t>(blockIdx.z) * gridDim.y + blockIdx.y) *
                          static_cast<std::size_t>(pieces) +
                      static_cast<std::size_t>(piece)) *
                         kStoreRows * static_cast<std::size_t>(stride);
  }
};

/// @brief Scratch memory that a portion takes, in floats.
/// @param rank  the largest of a group
inline std::size_t latent_floats(int groups, int rank) {
  return static_cast<std::size_t>(kLatentPieces * kStoreRows) * static_cast<std::size_t>(groups) *
         static_cast<std::size_t>(rank + 1);
}

/// @brief Computes the coefficients, in steps, of the values of a group's heads. Grid: (groups of
/// kLatentChannels channels x pieces) x groups of heads x sequences.
/// @tparam type  of full rows
template <DType type>
__global__ void __launch_bounds__(kStoreThreads, 2)
    project_latents_kernel(LayerEdit tables, RowSource source, FlushBatch flushed,
                           LatentPortion portion) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int piece = static_cast<int>(blockIdx.x) % portion.pieces,
            group = static_cast<int>(blockIdx.y),
            index = portion.first_sequence + static_cast<int>(blockIdx.z),
            slot = flushed.slots[index];
  const int leader = group * tables.joint_heads, dim = tables.head_dim, units = dim / kPlainUnit,
            stride = plain_stride(dim);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const ListPiece range(tables, flushed, portion.order, portion.staging, RowList::compressed, index,
                        tables.num_heads + group, leader, portion.first_piece + piece);
  if (range.begin >= range.end) return;
  const std::int32_t* chosen = portion.order.of(index, tables.num_heads, leader);
  std::uint16_t* rows = reinterpret_cast<std::uint16_t*>(shared_memory);
  const int block = static_cast<int>(blockIdx.x) / portion.pieces * (kLatentChannels / 16) +
                    warp,  // of 16 channels
      rank = tables.maps[leader].value.rank;
  const bool there = 16 * block < rank, exact = tables.maps[leader].value.encoder.type == type;
  // In f16: numbers of orthonormal maps, and the remainders of their splits, are then far from the
  // smallest numbers.
  const float scale = exact || type == DType::bf16 ? 1.0F : 1024.0F;
  float sums[kStoreRows / 16][2][4] = {};
  for (int head = leader; head < leader + tables.joint_heads; ++head) {
    __syncthreads();
    SourceRows(tables, source, slot, head)
        .load(Part::value, chosen, range.from, range.begin, range.end, dim, rows, stride);
    __syncthreads();
    if (!there) continue;
    const MapElements& encoder = tables.maps[head].value.encoder;
    for (int unit = 0; unit < units; ++unit) {
      float4 low = encoder.quad((block * 2 * units + 2 * unit) * 32 + lane),
             high = encoder.quad((block * 2 * units + 2 * unit + 1) * 32 + lane);
      uint4 a[kStoreRows / 16];
#pragma unroll
      for (int m = 0; m < kStoreRows / 16; ++m)
        a[m] = detail::plain_words(Part::key, rows + 16 * m * stride, stride, unit);
      low = {low.x * scale, low.y * scale, low.z * scale, low.w * scale};
      high = {high.x * scale, high.y * scale, high.z * scale, high.w * scale};
      // A map of another type is split into two numbers (bf16: three), the largest first.
      for (int part = exact ? 1 : type == DType::f16 ? 2 : 3; part > 0; --part) {
        const std::uint32_t words[4] = {detail::half_of<type>(low.x, low.y, false),
                                        detail::half_of<type>(high.x, high.y, false),
                                        detail::half_of<type>(low.z, low.w, false),
                                        detail::half_of<type>(high.z, high.w, false)};
#pragma unroll
        for (int m = 0; m < kStoreRows / 16; ++m) {
          mma_plain<type>(sums[m][0], a[m], words[0], words[1]);
          mma_plain<type>(sums[m][1], a[m], words[2], words[3]);
        }
        if (part == 1) break;
        const auto less = [](float& first, float& second, std::uint32_t word) {
          first -= from_bits(type, static_cast<std::uint16_t>(word));
          second -= from_bits(type, static_cast<std::uint16_t>(word >> 16));
        };
        less(low.x, low.y, words[0]);
        less(high.x, high.y, words[1]);
        less(low.z, low.w, words[2]);
        less(high.z, high.w, words[3]);
      }
    }
  }
  if (!there) return;
  const int row_stride = rank + 1;
  float* target = portion.of(piece);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int channel = 16 * block + 8 * (i / 2) + 2 * t + i % 2;
    if (channel >= rank) continue;
    float2 steps = tables.maps[leader].value.to_steps(channel);
    for (int head = leader + 1; head < leader + tables.joint_heads; ++head)
      steps.y += tables.maps[head].value.to_steps(channel).y;  // offsets of all heads add up
#pragma unroll
    for (int m = 0; m < kStoreRows / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + 8 * half + g;
        if (row >= range.begin && row < range.end)
          target[row * row_stride + channel] =
              fmaf(sums[m][i / 2][2 * half + i % 2] / scale, steps.x, steps.y);
      }
    }
  }
}

/// @brief Stores the coefficients of a portion. Pages are in place; lengths of lists are those
/// before the flush. Grid: pieces x groups of heads x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param type  of plain coefficients
template <int scale_groups>
__global__ void __launch_bounds__(kStoreThreads)
    store_latents_kernel(LayerEdit tables, FlushBatch flushed, LatentPortion portion, DType type) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int piece = static_cast<int>(blockIdx.x), group = static_cast<int>(blockIdx.y),
            index = portion.first_sequence + static_cast<int>(blockIdx.z);
  const int leader = group * tables.joint_heads, list = tables.num_heads + group,
            thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const ListPiece range(tables, flushed, portion.order, portion.staging, RowList::compressed, index,
                        tables.num_heads + group, leader, portion.first_piece + piece);
  if (range.begin >= range.end) return;
  const HeadTiles& layout = tables.compressed[list];
  const PartMaps& maps = tables.maps[leader].value;
  float* latents = portion.of(piece);
  if constexpr (scale_groups == 0) {
    // Rows past a list's end become zeros, which add nothing to products.
    const int channels = layout.channels(Part::value),
              padded_end = (range.end + layout.rows - 1) / layout.rows * layout.rows;
    for (int item = thread; item < (padded_end - range.begin) * channels; item += kStoreThreads) {
      const int row = range.begin + item / channels, channel = item % channels;
      const float value =
          row < range.end && channel < maps.rank ? latents[row * (maps.rank + 1) + channel] : 0.0F;
      *reinterpret_cast<std::uint16_t*>(
          range.tile((range.tile_row + row) / layout.rows) +
          layout.plain_byte(Part::value, row % layout.rows, channel)) = to_bits(type, value);
    }
  } else {
    __shared__ float inverse_gains[scale_groups * kStoreRows];
    std::uint8_t* tile = range.tile(range.tile_row / kCodeRows);
    detail::CodePlan* plan = reinterpret_cast<detail::CodePlan*>(shared_memory);
    const int channels = layout.channels(Part::value);
    for (int channel = thread; channel < channels; channel += kStoreThreads) {
      const TileChannel place = maps.channels[channel];
      plan[channel] = {place.source, place.shift, static_cast<float>(1 << place.bits) * 0.5F};
    }
    for (int item = thread; range.begin == 0 && item < layout.value_offset / 4;
         item += kStoreThreads)
      reinterpret_cast<std::uint32_t*>(tile)[item] = 0;  // gains of later rows
    __syncthreads();
    const detail::CodeMemory memory{latents, inverse_gains, reinterpret_cast<std::uint32_t*>(tile),
                                    plan};
    detail::store_gains<scale_groups>(layout, maps, Part::value, memory, range.begin, range.end);
    __syncthreads();
    // Units group after group, plane after plane; a warp packs a unit.
    int unit = 0;
    std::uint8_t* at = tile + layout.value_offset;
    for (int own = 0; own < scale_groups; ++own) {
      for (int bits = 8; bits > 0; bits /= 2) {
        int units = 0;  // of the plane
        for (int all = bits; all <= 8; ++all)
          units += (all & bits) != 0 ? layout.blocks_of(own, all) : 0;
        for (int end = unit + units; unit < end; ++unit, at += code_unit_bytes(bits)) {
          if (unit % (kStoreThreads / 32) != warp) continue;
          const auto pack = [&](auto width) {
            detail::pack_words<Part::value, decltype(width)::value, false>(
                memory, inverse_gains + own * kStoreRows, maps.rank + 1, plan + unit * kCodeUnit,
                reinterpret_cast<std::uint32_t*>(at), range.begin, range.end, thread % 32, 32);
          };
          if (bits == 8)
            pack(std::integral_constant<int, 8>{});
          else if (bits == 4)
            pack(std::integral_constant<int, 4>{});
          else if (bits == 2)
            pack(std::integral_constant<int, 2>{});
          else
            pack(std::integral_constant<int, 1>{});
        }
      }
    }
  }
}

namespace detail {

/// Enqueues the coefficients of the joint values of flushed rows, a portion at a time. After each
/// portion calls then(portion, grid), which enqueues what uses them; grid is pieces x groups of
/// heads x sequences.
/// @param most  rows of a sequence, at most
/// @param order, staging  as store_rows_kernel takes them
/// @param scratch  latent_floats() numbers
template <class Function>
void for_each_portion(const LayerState& layer, const FlushBatch& flushed, const RowSource& source,
                      std::int64_t most, const RowOrder& order, const StagingTiles& staging,
                      float* scratch, cudaStream_t stream, Function&& then) {
  const LayerEdit& tables = layer.tables();
  const int groups = tables.num_heads / tables.joint_heads, dim = tables.head_dim,
            // One more, since new rows may begin inside a piece.
      all_pieces = static_cast<int>((most + kStoreRows - 1) / kStoreRows) + 1;
  const int rank = layer.most_value_rank();
  LatentPortion portion;
  portion.pieces = (std::min)(all_pieces, kLatentPieces);
  portion.stride = rank + 1;
  portion.latents = scratch;
  portion.order = order;
  portion.staging = staging;
  const int at_once = kLatentPieces / portion.pieces;  // sequences
  for (portion.first_sequence = 0; portion.first_sequence < flushed.count;
       portion.first_sequence += at_once) {
    const unsigned sequences =
        static_cast<unsigned>((std::min)(at_once, flushed.count - portion.first_sequence));
    for (portion.first_piece = 0; portion.first_piece < all_pieces;
         portion.first_piece += portion.pieces) {
      const dim3 products(
          static_cast<unsigned>((rank + kLatentChannels - 1) / kLatentChannels * portion.pieces),
          static_cast<unsigned>(groups), sequences);
      with_type(tables.full_type, [&](auto type) {
        launch_kernel(project_latents_kernel<type()>, products, kStoreThreads,
                      static_cast<std::size_t>(2 * kStoreRows * plain_stride(dim)),
                      "project_latents_kernel", stream, tables, source, flushed, portion);
      });
      then(portion,
           dim3(static_cast<unsigned>(portion.pieces), static_cast<unsigned>(groups), sequences));
    }
  }
}

}  // namespace detail

/// @brief Enqueues what stores the joint values of flushed rows.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param most  rows of a sequence that are stored, at most
/// @param order, staging  as store_rows_kernel takes them
/// @param scratch  latent_floats() numbers
template <int scale_groups>
void store_latents(const LayerState& layer, const FlushBatch& flushed, const RowSource& source,
                   std::int64_t most, const RowOrder& order, const StagingTiles& staging,
                   float* scratch, cudaStream_t stream) {
  int channels = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed)
    channels = (std::max)(channels, tiles.keys ? 0 : tiles.channels(Part::value));
  const std::size_t bytes =
      scale_groups == 0 ? 0 : static_cast<std::size_t>(channels) * sizeof(detail::CodePlan);
  detail::for_each_portion(layer, flushed, source, most, order, staging, scratch, stream,
                           [&](const LatentPortion& portion, const dim3& pieces) {
                             detail::launch_kernel(store_latents_kernel<scale_groups>, pieces,
                                                   kStoreThreads, bytes, "store_latents_kernel",
                                                   stream, layer.tables(), flushed, portion,
                                                   layer.tiles().coded_type);
                           });
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
