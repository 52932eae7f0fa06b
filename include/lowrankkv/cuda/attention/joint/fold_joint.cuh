// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/joint/fold_joint.cuh  Launches attention over joint values and folds the
/// partial states of the splits into one state per head.
///
/// cuda/attention/post_rope/combine.cuh takes that state as the one of the head's compressed rows.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/attention/joint/attend_joint.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kFoldChannels = 16;  ///< of a block of fold_joint_kernel

/// @brief Folds the splits of joint values in order, subtracts the centres of codes, and writes
/// each head's columns. Grid: groups of kFoldChannels channels x (chunks of columns x groups of
/// heads) x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups>
__global__ void __launch_bounds__(32 * kFoldWarps)
    fold_joint_kernel(LayerView tables, AttentionStep step, Batch batch, JointCall call,
                      int first_sequence) {
  constexpr int groups = scale_groups == 2 ? 2 : 1;
  // `factors` scale the sums; `references` scale the values and the sums of weights.
  __shared__ float factors[kMaxJointSplits][kJointColumns],
      references[groups][kMaxJointSplits][kJointColumns];
  const int group = static_cast<int>(blockIdx.y) / call.chunks,
            chunk = static_cast<int>(blockIdx.y) % call.chunks,
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            heads = tables.num_heads, leader = group * tables.joint_heads;  // a lane is a column
  const int splits =
                slot < 0 ? 0 : joint_splits(tables.num_rows(RowList::compressed, slot, leader)),
            columns = step.columns(), column = (call.first_chunk + chunk) * kJointColumns + lane;
  wait_for_last_kernel();
  release_next_kernel();
  if (splits == 0) return;
  const std::size_t lines =
                        static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns),
                    split_stride = static_cast<std::size_t>(step.joint_chunks) * lines;
  const float* states =
      step.joint_partial +
      (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads / tables.joint_heads) +
       static_cast<std::size_t>(group)) *
          static_cast<std::size_t>(step.joint_splits) * split_stride +
      static_cast<std::size_t>(chunk) * lines + lane;
  const bool there = column < tables.joint_heads * columns;
  for (int split = warp; split < splits; split += kFoldWarps) {
    factors[split][lane] =
        there ? states[static_cast<std::size_t>(split) * split_stride] : -INFINITY;
#pragma unroll
    for (int s = 0; s < groups; ++s)
      references[s][split][lane] = there && scale_groups > 0
                                       ? states[static_cast<std::size_t>(split) * split_stride +
                                                static_cast<std::size_t>((4 + s) * kJointColumns)]
                                       : 0.0F;
  }
  __syncthreads();
  float top = -INFINITY;
  for (int split = 0; split < splits; ++split) top = fmaxf(top, factors[split][lane]);
  __syncthreads();
  for (int split = warp; split < splits; split += kFoldWarps) {
    const float own = factors[split][lane];
    factors[split][lane] = own > -INFINITY ? exp2f(own - top) : 0.0F;
#pragma unroll
    for (int s = 0; s < groups; ++s)
      references[s][split][lane] =
          own > -INFINITY ? exp2f(own - top + references[s][split][lane]) : 0.0F;
  }
  __syncthreads();
  if (!there) return;
  // Sums some lines that share a factor over the splits, in order. The lines of eight splits are in
  // flight at a time.
  const auto fold_lines = [&]<int count>(const float(&counts)[kMaxJointSplits][kJointColumns],
                                         const int(&which)[count], float(&totals)[count]) {
    constexpr int at_once = 8;
#pragma unroll
    for (float& total : totals) total = 0.0F;
    for (int first = 0; first < splits; first += at_once) {
      float values[at_once][count];
#pragma unroll
      for (int i = 0; i < at_once * count; ++i)
        values[i / count][i % count] =
            states[static_cast<std::size_t>(min(first + i / count, splits - 1)) * split_stride +
                   static_cast<std::size_t>(which[i % count] * kJointColumns)];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        // A factor of 0 means that nothing was written there. Compilers load the next
        // line before they know that there is one.
        const float own = counts[min(first + i, splits - 1)][lane],
                    factor = first + i < splits ? own : 0.0F;
#pragma unroll
        for (int line = 0; line < count; ++line)
          totals[line] =
              factor == 0.0F ? totals[line] : fmaf(factor, values[i][line], totals[line]);
      }
    }
  };
  const int head = leader + column / columns, in_head = column % columns,
            block = in_head / kBlockColumns, t = in_head % kBlockColumns;
  float* target =
      step.joint_state(static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) +
                           static_cast<std::size_t>(head),
                       block) +
      t;
  if (blockIdx.x == 0 && warp == 0) {
    // The key mean shifts all logits of a column equally. With pre-RoPE keys the logits include it.
    const float shift = tables.rotary.pre_rope()
                            ? 0.0F
                            : step.coded_scales[(step.query_row(sequence, heads, head, 0) +
                                                 static_cast<std::size_t>(block)) *
                                                    kBlockColumns +
                                                static_cast<std::size_t>(t)]
                                  .shift;
    const int sum_line[1] = {1};
    float sum[1];
    fold_lines(factors, sum_line, sum);
    target[0] = top + shift;
    target[kBlockColumns] = sum[0];
    target[2 * kBlockColumns] = sum[0];
  }
  const HeadTiles& layout = tables.compressed[heads + group];
  const int first_blocks = scale_groups > 0 ? joint_blocks(layout, 0) : 0,
            blocks = first_blocks + (scale_groups == 2 ? joint_blocks(layout, 1) : 0);
  const int channels = scale_groups > 0 ? kCodeUnit * blocks : layout.channels(Part::value),
            begin = static_cast<int>(blockIdx.x) * kFoldChannels;
  static_assert(kCodeUnit % kFoldChannels == 0);  // they are of one block
  if (begin >= channels) return;
  const bool in_second = scale_groups == 2 && begin >= kCodeUnit * first_blocks;
  constexpr int mine = kFoldChannels / kFoldWarps;
  // For codes, one more line: the sum of weights with their gains.
  int which[mine + (scale_groups > 0 ? 1 : 0)];
  float totals[mine + (scale_groups > 0 ? 1 : 0)];
  // Lines are clamped to ones that exist.
  which[mine - 1 + (scale_groups > 0 ? 1 : 0)] = in_second ? 3 : 2;
#pragma unroll
  for (int i = 0; i < mine; ++i)
    which[i] = kJointLines + min(begin + warp + i * kFoldWarps, channels - 1);
  fold_lines(references[in_second ? groups - 1 : 0], which, totals);
  // Codes are mid-rise: b bits are centred at (2^b - 1) / 2.
  const float centre =
      scale_groups > 0
          ? -0.5F * static_cast<float>((1 << joint_block(layout, begin / kCodeUnit).bits) - 1)
          : 0.0F;
#pragma unroll
  for (int i = 0; i < mine; ++i) {
    const int channel = begin + warp + i * kFoldWarps;
    if (channel < channels)
      target[(3 + channel) * kBlockColumns] =
          scale_groups > 0 ? fmaf(centre, totals[scale_groups > 0 ? mine : 0],
                                  totals[i] * exp2f(kCodeUnitExponent))
                           : totals[i];
  }
}

namespace detail {

/// Launches attention over joint values: two launches for every step.joint_chunks x kJointColumns
/// columns of a group.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam rotated  logits come from an earlier kernel; keys are not read
/// @param before  (call): enqueues what a launch needs
/// @throws CapacityError if shared memory does not hold one stage
template <int scale_groups, bool rotated, class Before>
void attend_joint(const LayerState& layer, const AttentionStep& step, const Batch& batch,
                  int first_sequence, int splits, cudaStream_t stream, Before&& before) {
  const LayerTiles& tiles = layer.tiles();
  const int heads = layer.tables().num_heads, members = tiles.joint_heads, columns = step.columns(),
            chunks = joint_chunks(step, members);
  constexpr bool codes = scale_groups > 0;
  JointCall call;
  for (const HeadTiles& layout : tiles.compressed) {
    if (layout.keys)
      call.key_bytes = rotated
                           ? 0
                           : (std::max)(call.key_bytes,
                                        codes ? layout.bytes : layout.key_units * kPlainUnitBytes);
    else
      call.value_bytes = (std::max)(call.value_bytes, layout.bytes);
  }
  call.heads =
      (std::min)(members, kJointColumns % columns == 0 ? kJointColumns / columns
                                                       : (kJointColumns - 2) / columns + 2);
  call.pairs = (std::min)(call.heads * step.blocks, kJointColumns);
  call.splits = splits;
  const auto launch = [&](auto* kernel, auto* fold, int mine) {
    const int limit = free_shared(kernel, layer.shared_bytes());
    const auto bytes_of = [&](int stages, int buffers) {
      call.stages = stages;
      call.buffers = buffers;
      return JointMemory(call, scale_groups, step.coded_units).bytes;
    };
    // Choices of stages. Negative: with one buffer of weights.
    int bytes = 0;
    for (const int choice : {4, 3, 2, -4, -3, -2, -1}) {
      if ((bytes = bytes_of(std::abs(choice), choice > 0 ? 2 : 1)) <= limit) break;
    }
    if (bytes > limit)
      ::lowrankkv::detail::fail<CapacityError>(
          "joint values: the keys and latents of ", codes ? kCodeRows : kPlainRows, " rows need ",
          bytes, " bytes of shared memory, the device has ", limit, " to give");
    const int warps = joint_warps(scale_groups);
    call.parts = (step.joint_width / 16 + mine * warps - 1) / (mine * warps);
    for (call.first_chunk = 0; call.first_chunk < chunks; call.first_chunk += call.chunks) {
      call.chunks = (std::min)(step.joint_chunks, chunks - call.first_chunk);
      before(call);
      const unsigned together = static_cast<unsigned>(heads / members),
                     sequences = static_cast<unsigned>(batch.count);
      launch_step_kernel(
          kernel,
          dim3(static_cast<unsigned>(call.splits * call.chunks * call.parts), together, sequences),
          32 * warps, static_cast<std::size_t>(bytes), layer.overlaps(), "attend_joint_kernel",
          stream, layer.tables(), step, batch, call, first_sequence);
      const dim3 folds(
          static_cast<unsigned>((step.joint_width + kFoldChannels - 1) / kFoldChannels),
          static_cast<unsigned>(call.chunks) * together, sequences);
      launch_step_kernel(fold, folds, 32 * kFoldWarps, 0, layer.overlaps(), "fold_joint_kernel",
                         stream, layer.tables(), step, batch, call, first_sequence);
    }
  };
  // Groups of sixteen channels per warp, so that one part covers latents of 512 or of 1024
  // channels. For codes it covers 576 or 1152, since codes are padded.
  const bool small = step.joint_width <= (codes ? 3 : 2) * 16 * joint_warps(scale_groups);
  if constexpr (codes) {
    call.steps = kCodeRows / kPlainRows;
    if (small)
      launch(attend_joint_kernel<scale_groups, DType::f16, 3, 4, rotated>,
             fold_joint_kernel<scale_groups>, 3);
    else
      launch(attend_joint_kernel<scale_groups, DType::f16, 6, 4, rotated>,
             fold_joint_kernel<scale_groups>, 6);
  } else {
    // Sixteen rows are little work if heads are few: use four times as many if three stages of them
    // fit.
    const int key_bytes = call.key_bytes, value_bytes = call.value_bytes;
    const bool more =
        call.heads <= 16 && call.pairs <= joint_warps(0) &&
        3 * 4 * (call.heads * key_bytes + value_bytes) + step.coded_units * call.pairs * 256 <=
            200 * 1024;
    call.steps = more ? 4 : 1;
    call.key_bytes *= call.steps;
    call.value_bytes *= call.steps;
    with_type(tiles.coded_type, [&](auto type) {
      if (more && small)
        launch(attend_joint_kernel<0, type(), 2, 4, rotated>, fold_joint_kernel<0>, 2);
      else if (more)
        launch(attend_joint_kernel<0, type(), 4, 4, rotated>, fold_joint_kernel<0>, 4);
      else
        launch(attend_joint_kernel<0, type(), 4, 1, rotated>, fold_joint_kernel<0>, 4);
    });
  }
}
/// Launches attention over joint values for post-RoPE keys.
template <int scale_groups>
void attend_joint(const LayerState& layer, const AttentionStep& step, const Batch& batch,
                  int first_sequence, int splits, cudaStream_t stream) {
  attend_joint<scale_groups, false>(layer, step, batch, first_sequence, splits, stream,
                                    [](const JointCall&) {});
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
