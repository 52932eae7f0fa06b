// SPDX-License-Identifier: Apache-2.0
/// @file cuda/fold_joint.cuh  Attention over joint values, launched: splits attended to, their partial states folded into one a head, which cuda/combine.cuh takes as that of its compressed rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/attend_joint.cuh"
#include "lowrankkv/cuda/launch.cuh"
#include "lowrankkv/cuda/layer.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kFoldChannels = 64;  ///< of a block of fold_joint_kernel

/// @brief Folds the splits of joint values, in order, takes codes' centres out, and hands every head its columns. Grid: groups of kFoldChannels channels x (chunks of columns x groups of heads) x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain ones
template <int scale_groups>
__global__ void __launch_bounds__(kJointThreads) fold_joint_kernel(Tables tables, AttentionStep step, Batch batch, JointCall call, int first_sequence) {
  __shared__ float factors[kMaxJointSplits][kJointColumns];
  const int group = static_cast<int>(blockIdx.y) / call.chunks, chunk = static_cast<int>(blockIdx.y) % call.chunks, sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, heads = tables.num_heads, leader = group * tables.joint_heads;  // lane: the column
  const int splits = joint_splits(tables.num_rows(RowList::compressed, slot, leader)), columns = step.columns(), column = (call.first_chunk + chunk) * kJointColumns + lane;
  wait_for_last_kernel();
  release_next_kernel();
  if (splits == 0) return;
  const std::size_t lines = static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns), apart = static_cast<std::size_t>(step.joint_chunks) * lines;
  const float* states = step.joint_partial + (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads / tables.joint_heads) + static_cast<std::size_t>(group)) * static_cast<std::size_t>(step.joint_splits) * apart +
                        static_cast<std::size_t>(chunk) * lines + lane;
  const bool there = column < tables.joint_heads * columns;
  for (int split = warp; split < splits; split += kJointWarps) factors[split][lane] = there ? states[static_cast<std::size_t>(split) * apart] : -INFINITY;
  __syncthreads();
  float top = -INFINITY;
  for (int split = 0; split < splits; ++split) top = fmaxf(top, factors[split][lane]);
  __syncthreads();
  for (int split = warp; split < splits; split += kJointWarps) {
    const float own = factors[split][lane];
    factors[split][lane] = own > -INFINITY ? exp2f(own - top) : 0.0F;
  }
  __syncthreads();
  if (!there) return;
  const auto folded = [&](int line) {
    float total = 0.0F;
    #pragma unroll 8
    for (int split = 0; split < splits; ++split) {
      const float factor = factors[split][lane];
      total = factor == 0.0F ? total : fmaf(factor, states[static_cast<std::size_t>(split) * apart + static_cast<std::size_t>(line * kJointColumns)], total);
    }
    return total;
  };
  const int head = leader + column / columns, in_head = column % columns, block = in_head / kBlockColumns, t = in_head % kBlockColumns;
  float* target = step.joint_state(static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) + static_cast<std::size_t>(head), block) + t;
  if (blockIdx.x == 0 && warp == 0) {
    const float shift = step.coded_scales[(step.query_row(sequence, heads, head, 0) + static_cast<std::size_t>(block)) * kBlockColumns + static_cast<std::size_t>(t)].shift, sum = folded(1);
    target[0] = top + shift;  // the means of keys shift every logit of a column alike
    target[kBlockColumns] = sum;
    target[2 * kBlockColumns] = sum;
  }
  const HeadTiles& layout = tables.compressed[heads + group];
  const JointCodes first = scale_groups > 0 ? joint_codes(layout, 0) : JointCodes{}, second = scale_groups == 2 ? joint_codes(layout, 1) : JointCodes{};
  const float first_weight = scale_groups > 0 ? folded(2) : 0.0F, second_weight = scale_groups == 2 ? folded(3) : 0.0F;
  const int channels = scale_groups > 0 ? kCodeUnit * (first.blocks + second.blocks) : layout.channels(Part::value), begin = static_cast<int>(blockIdx.x) * kFoldChannels;
  for (int channel = begin + warp; channel < min(begin + kFoldChannels, channels); channel += kJointWarps) {
    float total = folded(kJointLines + channel);
    if constexpr (scale_groups > 0) {  // mid-rise: codes of b bits are centred at (2^b - 1) / 2
      const bool in_first = channel < kCodeUnit * first.blocks;
      total = fmaf(-0.5F * static_cast<float>((1 << (in_first ? first.bits : second.bits)) - 1), in_first ? first_weight : second_weight, total);
    }
    target[(3 + channel) * kBlockColumns] = total;
  }
}

namespace detail {

/// Attention over joint values: two launches for every kJointChunks x kJointColumns columns of a group.
/// @tparam scale_groups  of tiles of codes; 0: plain ones  @throws CapacityError where shared memory does not hold a stage
template <int scale_groups>
void attend_joint(const LayerState& layer, const AttentionStep& step, const Batch& batch, int first_sequence, int splits, cudaStream_t stream) {
  const LayerTiles& tiles = layer.tiles();
  const int heads = layer.tables().num_heads, members = tiles.joint_heads, columns = step.columns(), chunks = joint_chunks(step, members);
  constexpr bool codes = scale_groups > 0;
  JointCall call;
  for (const HeadTiles& layout : tiles.compressed) {
    if (layout.keys) call.key_bytes = (std::max)(call.key_bytes, codes ? layout.bytes : layout.key_units * kPlainUnitBytes);
    else call.value_bytes = (std::max)(call.value_bytes, layout.bytes);
  }
  call.heads = (std::min)(members, kJointColumns % columns == 0 ? kJointColumns / columns : (kJointColumns - 2) / columns + 2);
  call.pairs = (std::min)(call.heads * step.blocks, kJointColumns);
  call.splits = splits;
  const auto launch = [&](auto* kernel, auto* fold, int mine) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    const int limit = layer.shared_bytes() - static_cast<int>(attributes.sharedSizeBytes);
    for (call.stages = kMaxJointStages; call.stages > 1 && JointMemory(call, scale_groups, step.coded_units).bytes > limit;) --call.stages;
    const int bytes = JointMemory(call, scale_groups, step.coded_units).bytes;
    if (bytes > limit) ::lowrankkv::detail::fail<CapacityError>("joint values: the keys and latents of ", codes ? kCodeRows : kPlainRows, " rows need ", bytes, " bytes of shared memory, the device has ", limit, " to give");
    call.parts = (step.joint_width / 16 + mine * kJointWarps - 1) / (mine * kJointWarps);
    for (call.first_chunk = 0; call.first_chunk < chunks; call.first_chunk += call.chunks) {
      call.chunks = (std::min)(step.joint_chunks, chunks - call.first_chunk);
      const unsigned together = static_cast<unsigned>(heads / members), sequences = static_cast<unsigned>(batch.count);
      launch_early(kernel, dim3(static_cast<unsigned>(call.splits * call.chunks * call.parts), together, sequences), kJointThreads, static_cast<std::size_t>(bytes), layer.overlaps(), "attend_joint_kernel", stream,
                   layer.tables(), step, batch, call, first_sequence);
      const dim3 folds(static_cast<unsigned>((step.joint_width + kFoldChannels - 1) / kFoldChannels), static_cast<unsigned>(call.chunks) * together, sequences);
      launch_early(fold, folds, kJointThreads, 0, layer.overlaps(), "fold_joint_kernel", stream, layer.tables(), step, batch, call, first_sequence);
    }
  };
  const auto with_mine = [&](auto&& function) {  // times sixteen channels that a warp has: rank 512, or 1024 and what codes are filled up to
    if (step.joint_width <= 4 * 16 * kJointWarps) function(std::integral_constant<int, 4>{});
    else function(std::integral_constant<int, 9>{});
  };
  with_mine([&](auto mine) {
    if constexpr (scale_groups > 0) {
      launch(attend_joint_kernel<scale_groups, DType::f16, mine()>, fold_joint_kernel<scale_groups>, mine);
    } else {
      with_type(tiles.coded_type, [&](auto type) { launch(attend_joint_kernel<0, type(), mine()>, fold_joint_kernel<0>, mine); });
    }
  });
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
