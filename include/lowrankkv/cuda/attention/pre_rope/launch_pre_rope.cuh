// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/launch_pre_rope.cuh  Chooses and launches the kernels that attend
/// to pre-RoPE keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/attention/joint/fold_joint.cuh"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope.cuh"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope_codes.cuh"
#include "lowrankkv/cuda/attention/pre_rope/logits.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How a pre-RoPE kernel is launched: with as many warps as fit. Up-projection maps stay in global
/// memory (units = 0) if copies would leave room for fewer than 4 warps.
struct PreRopeLaunch {
  int warps = 0, ring_bytes = 0, bytes = 0, units = 0;

  /// @param most_warps  of a block
  /// @param stage_bytes  of a ring's stage
  /// @param state_bytes  of a warp's state
  /// @param key_up_units  of the up-projection maps
  /// @throws CapacityError if not even one warp fits
  template <class... Parameters>
  PreRopeLaunch(void (*kernel)(Parameters...), const LayerState& layer, int most_warps,
                int stage_bytes, int state_bytes, int key_up_units)
      : units(key_up_units) {
    const int room = free_shared(kernel, layer.shared_bytes()), ring = kPreRopeStages * stage_bytes;
    // States reuse the memory of the rotated queries.
    const int head_dim = layer.tables().head_dim,
              warp = ring + (std::max)(rope_warp_bytes(head_dim), state_bytes);
    const auto block = [&] { return rope_block_bytes(head_dim, units); };
    const auto fitting = [&] { return (std::min)(most_warps, (room - block()) / warp); };
    warps = fitting();
    if (warps < 4 && units > 0) {
      units = 0;
      warps = fitting();
    }
    if (warps < 1)
      ::lowrankkv::detail::fail<CapacityError>("attention: a warp needs ", block() + warp,
                                               " bytes of shared memory, the device has ", room,
                                               " to give");
    ring_bytes = warps * ring;
    bytes = block() + warps * warp;
  }
};

/// Blocks that share the entries of a list: one per multiprocessor. Two do not fit, and the start
/// of a block is expensive.
inline int pre_rope_blocks(const LayerState& layer, const AttentionStep& step, const Batch& batch,
                           int entries) {
  return (std::clamp)(
      layer.multiprocessors() / (layer.tables().num_heads * batch.count * step.blocks), 1, entries);
}

/// Launches attention over plain rows of one kind.
/// @tparam scattered  rows of lists may stand in any order
/// @tparam scaled  full rows in pages are in 8 bits
/// @tparam segmented  sequences may have epochs of their own
template <PlainRows which, bool scattered, bool scaled = false, bool segmented = false, class State>
void attend_pre_rope_plain(const State& layer, const AttentionStep& step, const Batch& batch,
                           const StepQueries& queries, int first_sequence, int splits,
                           cudaStream_t stream) {
  constexpr bool coded = which == PlainRows::compressed;
  const LayerEdit& tables = layer.tables();
  int units = 0, stage_bytes = 0, channels = 0, key_up_units = 0;
  for (int head = 0; head < (coded ? tables.num_heads : 1); ++head) {
    // Tiles of `full` are no smaller than those of full rows in 8 bits.
    const HeadTiles& tiles = coded ? layer.layout(RowList::compressed, head) : tables.full;
    units = (std::max)({units, tiles.key_units, tiles.value_units});
    stage_bytes = (std::max)({stage_bytes, tiles.value_offset, tiles.bytes - tiles.value_offset});
    channels = (std::max)(channels, tiles.channels(Part::value));
    if (coded) key_up_units = (std::max)(key_up_units, cuda::key_up_units(false, tiles.key_units));
  }
  with_type<typename State::Kernels>(
      coded ? layer.tiles().coded_type : layer.config().full_type, [&](auto type) {
        with_units<coded, coded ? 1 : kLeastFullUnits<typename State::Kernels>,
                   coded ? kMostRankUnits<typename State::Kernels>
                         : kMostFullUnits<typename State::Kernels>>(units, [&](auto max_units) {
          const auto kernel =
              attend_pre_rope_kernel<type(), which, max_units(), scaled, segmented, scattered>;
          const PreRopeLaunch launch(
              kernel, layer, pre_rope_warps(max_units()), stage_bytes,
              (3 + channels) * kBlockColumns * static_cast<int>(sizeof(float)), key_up_units);
          const int blocks = pre_rope_blocks(layer, step, batch, splits);
          const dim3 grid(static_cast<unsigned>(blocks * step.blocks),
                          static_cast<unsigned>(tables.num_heads),
                          static_cast<unsigned>(batch.count));
          launch_step_kernel(kernel, grid, launch.warps * 32,
                             static_cast<std::size_t>(launch.bytes),
                             which != PlainRows::recent && layer.overlaps(),
                             "attend_pre_rope_kernel", stream, tables, step, batch, queries,
                             first_sequence, blocks, stage_bytes, launch.ring_bytes, launch.units);
        });
      });
}

/// Launches attention over lists of codes.
/// @tparam segmented  sequences may have epochs of their own
/// @tparam scattered  rows may stand in any order
template <int scale_groups, bool segmented, bool scattered, class State>
void attend_pre_rope_codes(const State& layer, const AttentionStep& step, const Batch& batch,
                           const StepQueries& queries, int first_sequence, int splits,
                           cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  int lines = 0, stage_bytes = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    lines = (std::max)(lines, tiles.state_lines());
    stage_bytes = (std::max)({stage_bytes, tiles.value_offset, tiles.bytes - tiles.value_offset});
  }
  with_units<false, 1, kMostCodeUnits<typename State::Kernels>>(
      layer.tiles().max_units(Part::value), [&](auto max_units) {
        const int state_bytes = (3 + lines) * kBlockColumns * static_cast<int>(sizeof(float));
        const auto start = [&](auto* kernel, const PreRopeLaunch& launch) {
          const int blocks = pre_rope_blocks(layer, step, batch, splits);
          const dim3 grid(static_cast<unsigned>(blocks * step.blocks),
                          static_cast<unsigned>(tables.num_heads),
                          static_cast<unsigned>(batch.count));
          launch_step_kernel(kernel, grid, launch.warps * 32,
                             static_cast<std::size_t>(launch.bytes), layer.overlaps(),
                             "attend_pre_rope_codes_kernel", stream, tables, step, batch, queries,
                             first_sequence, blocks, stage_bytes, launch.ring_bytes, launch.units);
        };
        const auto kernel =
            attend_pre_rope_codes_kernel<max_units(), true, segmented, scattered, scale_groups>;
        const PreRopeLaunch launch(kernel, layer, kPreRopeCodeWarps, stage_bytes, state_bytes,
                                   key_up_units(true, layer.tiles().max_units(Part::key)));
        if (launch.units > 0) return start(kernel, launch);
        const auto reading =
            attend_pre_rope_codes_kernel<max_units(), false, segmented, scattered, scale_groups>;
        start(reading,
              PreRopeLaunch(reading, layer, kPreRopeCodeWarps, stage_bytes, state_bytes, 0));
      });
}

/// Launches the logits of heads with joint values, for the columns of one launch of
/// attend_joint_kernel.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @tparam scattered  rows may stand in any order
template <int scale_groups, bool scattered, class State>
void make_logits(const State& layer, const AttentionStep& step, const Batch& batch,
                 const StepQueries& queries, const JointCall& call, int first_sequence,
                 cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const int groups = tables.num_heads / tables.joint_heads,
            units = layer.tiles().max_units(Part::key),
            last_column = (std::min)((call.first_chunk + call.chunks) * kJointColumns,
                                     tables.joint_heads * step.columns()) -
                          1;
  const int pairs = step.pair_of(last_column) - step.pair_of(call.first_chunk * kJointColumns) + 1;
  constexpr bool codes = scale_groups > 0;
  int stage_bytes = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed)
    stage_bytes = (std::max)(stage_bytes, tiles.keys ? tiles.bytes : 0);
  const auto start = [&](auto* kernel, const PreRopeLaunch& launch) {
    // One block per multiprocessor, but no more than the longest list has tiles of codes for.
    const int blocks =
        (std::clamp)(layer.multiprocessors() / (pairs * groups * batch.count), 1,
                     (std::max)(1, call.splits * (kJointSplitRows / kCodeRows) / launch.warps));
    // Launches for later columns overwrite the logits of earlier ones, which are read until the
    // preceding kernel is done. So only the first launch may begin early.
    launch_step_kernel(kernel,
                       dim3(static_cast<unsigned>(pairs * blocks), static_cast<unsigned>(groups),
                            static_cast<unsigned>(batch.count)),
                       launch.warps * 32, static_cast<std::size_t>(launch.bytes),
                       layer.overlaps() && call.first_chunk == 0, "pre_rope_logits_kernel", stream,
                       tables, step, batch, queries, call, first_sequence, blocks, stage_bytes,
                       launch.ring_bytes, launch.units);
  };
  const auto choose = [&](auto type, auto max_units) {
    const auto copying = pre_rope_logits_kernel<scale_groups, type(), max_units(), true, scattered>;
    const PreRopeLaunch launch(copying, layer, logit_warps(scale_groups, max_units()), stage_bytes,
                               0, key_up_units(codes, units));
    if (launch.units > 0) return start(copying, launch);
    const auto reading =
        pre_rope_logits_kernel<scale_groups, type(), max_units(), false, scattered>;
    start(reading,
          PreRopeLaunch(reading, layer, logit_warps(scale_groups, max_units()), stage_bytes, 0, 0));
  };
  if constexpr (codes)
    choose(std::integral_constant<DType, DType::f16>{}, std::integral_constant<int, 1>{});
  else
    with_type<typename State::Kernels>(layer.tiles().coded_type, [&](auto type) {
      with_units<true>(units, [&](auto max_units) { choose(type, max_units); });
    });
}

/// Launches attention over all rows. No kernel needs results of another, except that joint values
/// need the logits of their heads.
/// @tparam scattered  rows of lists may stand in any order
template <CodedForm form, int scale_groups, bool joint, bool segmented, bool scattered,
          bool prompts, class State>
void attend_pre_rope(const State& layer, const AttentionStep& step, const Batch& batch,
                     const StepQueries& queries, int first_sequence, int compressed_splits,
                     int full_splits, cudaStream_t stream) {
  with_scaled<typename State::Kernels>(layer.tiles().listed.scaled, [&](auto scaled) {
    attend_pre_rope_plain<PlainRows::recent, scattered, scaled()>(
        layer, step, batch, queries, first_sequence, 1 + full_splits, stream);
  });
  if constexpr (prompts) {
    if (step.prompt != nullptr)
      attend_pre_rope_plain<PlainRows::prompt, false>(layer, step, batch, queries, first_sequence,
                                                      1, stream);
  }
  if (compressed_splits == 0) return;
  if constexpr (joint) {
    constexpr int groups = form == CodedForm::codes ? scale_groups : 0;
    attend_joint<groups, true>(
        layer, step, batch, first_sequence, compressed_splits, stream, [&](const JointCall& call) {
          make_logits<groups, scattered>(layer, step, batch, queries, call, first_sequence, stream);
        });
  } else if constexpr (form == CodedForm::codes) {
    attend_pre_rope_codes<scale_groups, segmented, scattered>(
        layer, step, batch, queries, first_sequence, compressed_splits, stream);
  } else if constexpr (form == CodedForm::plain) {
    attend_pre_rope_plain<PlainRows::compressed, scattered, false, segmented>(
        layer, step, batch, queries, first_sequence, compressed_splits, stream);
  }
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
