// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/attend.cuh  Chooses and launches the kernels of one attention call.
///
/// With post-RoPE keys the call first projects the queries. It attends to each list, and combines
/// the partial states. A column of a kernel is one query row: a query token and a query head of the
/// KV head's group.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/attention/joint/fold_joint.cuh"
#include "lowrankkv/cuda/attention/post_rope/attend_codes.cuh"
#include "lowrankkv/cuda/attention/post_rope/attend_plain.cuh"
#include "lowrankkv/cuda/attention/post_rope/combine.cuh"
#include "lowrankkv/cuda/attention/post_rope/project_query.cuh"
#include "lowrankkv/cuda/attention/pre_rope/launch_pre_rope.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// kRingBytes: shared memory per block that lets two blocks share a multiprocessor. kMaxRingBytes:
/// the most a block may use.
inline constexpr int kRingBytes = 103 * 1024, kMaxRingBytes = 200 * 1024;
/// Row count that launches pass for a list that is long or may be long.
inline constexpr std::int64_t kManyRows = std::int64_t{1} << 30;

/// @brief Number of warps of a block of an attention kernel, as many as shared memory has room for.
///
/// More than 4 warps are used only if two blocks still fit a multiprocessor. Up to 4 warps may take
/// more than that.
/// @param warp_bytes  shared memory of one warp's ring and state
/// @param most_shared  shared memory that a block may have
/// @throws CapacityError if not even one warp fits
template <class... Parameters>
int warps_of(void (*kernel)(Parameters...), int warp_bytes, int most_shared) {
  const int limit = (std::min)(kMaxRingBytes, free_shared(kernel, most_shared));
  int warps = kAttendWarps;
  while (warps > 4 && warps * warp_bytes > kRingBytes) warps /= 2;
  while (warps > 1 && warps * warp_bytes > limit) warps /= 2;
  if (warps * warp_bytes > limit)
    ::lowrankkv::detail::fail<CapacityError>("attention: a warp needs ", warp_bytes,
                                             " bytes of shared memory, the device has ", limit,
                                             " to give");
  return warps;
}

/// Calls f with the number of column blocks that a warp serves at once, as a constant.
template <class Function>
void with_column_blocks(int blocks, Function&& function) {
  if (blocks == 1) {
    function(std::integral_constant<int, 1>{});
  } else {
    function(std::integral_constant<int, 2>{});
  }
}

/// Calls f with whether the maps from tiles to rows are f32, as a constant.
///
/// Maps that read codes are f32, because the quantizer's steps are folded into them. There are two
/// exceptions, for which the layer is asked: latents of joint values without steps, and bases that
/// move, which have no separate map with steps.
template <CodedForm form, bool joint, bool segmented, class Function>
void with_maps(const LayerState& layer, Part part, Function&& function) {
  if constexpr (form == CodedForm::none)
    function(std::false_type{});
  else if constexpr (form == CodedForm::codes && !joint && !segmented)
    function(std::true_type{});
  else
    with_bool(layer.wide_maps(part), function);
}

/// Launches attention over plain rows of one kind.
/// @param early  whether the kernel may begin while the kernel before it ends
/// @param most_rows  upper bound of the rows of a split. Short splits get shallow rings, so that
///   more blocks share a multiprocessor.
template <PlainRows which, bool scaled = false, class State>
void attend_plain(const State& layer, const AttentionStep& step, const Batch& batch,
                  const StepQueries& queries, int first_sequence, int splits,
                  std::int64_t most_rows, bool early, cudaStream_t stream) {
  constexpr bool coded = which == PlainRows::compressed;
  int units = 0, bytes = 0, channels = 0;
  for (int head = 0; head < (coded ? layer.tables().num_heads : 1); ++head) {
    const HeadTiles& tiles = which == PlainRows::prompt
                                 ? layer.tiles().full
                                 : layer.layout(coded ? RowList::compressed : RowList::full, head);
    units = (std::max)(units, (std::max)(tiles.key_units, tiles.value_units));
    bytes = (std::max)(bytes, tiles.bytes);
    channels = (std::max)(channels, tiles.channels(Part::value));
  }
  with_type<typename State::Kernels>(
      coded ? layer.tiles().coded_type : layer.config().full_type, [&](auto type) {
        with_units<true, coded ? 1 : kLeastFullUnits<typename State::Kernels>,
                   coded ? kMostRankUnits<typename State::Kernels>
                         : kMostFullUnits<typename State::Kernels>>(units, [&](auto max_units) {
          with_column_blocks(step.blocks, [&](auto column_blocks) {
            const int groups = (step.blocks + column_blocks - 1) / column_blocks;
            const dim3 grid(static_cast<unsigned>(splits * groups),
                            static_cast<unsigned>(layer.tables().num_heads),
                            static_cast<unsigned>(batch.count));
            const auto kernel =
                attend_plain_kernel<type(), which, max_units(), column_blocks(), scaled>;
            const int tail_bytes = scaled ? layer.tiles().full.bytes : 0;
            const auto warp_bytes = [&](int stages) {
              return (std::max)({stages * bytes, tail_bytes,
                                 (3 + channels) * kBlockColumns * static_cast<int>(sizeof(float))});
            };  // states reuse the memory of the rings
            // The order of sums depends on the number of warps, so that number does not depend
            // on the rows.
            const int warps = warps_of(kernel, warp_bytes(kPlainStages), layer.shared_bytes());
            const int stages =
                static_cast<int>((std::clamp)(most_rows / (warps * layer.tables().full.rows),
                                              std::int64_t{1}, std::int64_t{kPlainStages}));
            launch_step_kernel(kernel, grid, warps * 32,
                               static_cast<std::size_t>(warps * warp_bytes(stages)),
                               early && layer.overlaps(), "attend_plain_kernel", stream,
                               layer.tables(), step, batch, queries, first_sequence, stages);
          });
        });
      });
}

/// Launches attention over lists of codes.
/// @tparam segmented  sequences may have epochs of their own
template <int scale_groups, bool segmented, class State>
void attend_codes(const State& layer, const AttentionStep& step, const Batch& batch,
                  int first_sequence, int splits, cudaStream_t stream) {
  int lines = 0, half_bytes = 0;
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    lines = (std::max)(lines, tiles.state_lines());
    half_bytes = (std::max)({half_bytes, tiles.value_offset, tiles.bytes - tiles.value_offset});
  }
  with_units<false, 1, kMostCodeUnits<typename State::Kernels>>(
      layer.tiles().max_units(Part::value), [&](auto max_units) {
        with_column_blocks(step.blocks, [&](auto column_blocks) {
          constexpr int running_bytes = running_floats(max_units(), column_blocks()) * 128;
          const int state_bytes = (std::max)(
              running_bytes, (3 + lines) * kBlockColumns * static_cast<int>(sizeof(float)));
          const auto launch = [&](auto* kernel, int stages, int bytes) {
            const int warp_bytes = stages * bytes + state_bytes,
                      warps = warps_of(kernel, warp_bytes, layer.shared_bytes());
            const int groups = (step.blocks + column_blocks - 1) / column_blocks,
                      heads = layer.tables().num_heads;
            // As many blocks as fit the device at once, or one warp per split. More blocks would
            // only divide the same work further.
            const int wanted = 2 * layer.multiprocessors() / (groups * heads * batch.count),
                      blocks = running_bytes == 0 || segmented
                                   ? splits
                                   : (std::clamp)((std::max)(splits / warps, wanted), 1, splits);
            const dim3 grid(static_cast<unsigned>(blocks * groups), static_cast<unsigned>(heads),
                            static_cast<unsigned>(batch.count));
            launch_step_kernel(kernel, grid, warps * 32,
                               static_cast<std::size_t>(warps * warp_bytes), layer.overlaps(),
                               "attend_codes_kernel", stream, layer.tables(), step, batch,
                               first_sequence, blocks, stages, bytes);
          };
          const int whole_bytes = layer.tiles().max_tile_bytes();
          if (whole_bytes <= kLargeTile) {
            launch(attend_codes_kernel<max_units(), column_blocks(), CodeRing::tiles, scale_groups,
                                       segmented>,
                   code_stages(CodeRing::tiles), whole_bytes);
          } else {
            constexpr int most = code_stages(CodeRing::halves);
            launch(attend_codes_kernel<max_units(), column_blocks(), CodeRing::halves, scale_groups,
                                       segmented>,
                   kAttendWarps * (most * half_bytes + state_bytes) <= kRingBytes ? most : most - 1,
                   half_bytes);
          }
        });
      });
}

/// Launches the projection of the queries onto the maps of the compressed rows.
///
/// This kernel is not launched early, so it waits for the work before it in the stream. Every later
/// kernel of the step waits for this one, and so for that work too.
template <CodedForm form, bool segmented, class State>
void project_queries(const State& layer, const AttentionStep& step, const Batch& batch,
                     const StepQueries& queries, int first_sequence, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const int key_channels =
      layer.tiles().max_units(Part::key) * (form == CodedForm::codes ? kCodeUnit : kPlainUnit);
  const int together = project_sequences(step.columns(), segmented);
  const std::size_t bytes = project_query_bytes(
      (std::min)(together * step.columns(), kProjectColumns), tables.head_dim, key_channels);
  const dim3 grid(static_cast<unsigned>(tables.num_heads * step.segments),
                  static_cast<unsigned>((batch.count + together - 1) / together),
                  static_cast<unsigned>((step.columns() + kProjectColumns - 1) / kProjectColumns));
  const auto project = [&](auto* kernel) {
    launch_step_kernel(kernel, grid, kStepThreads, bytes, false, "project_query_kernel", stream,
                       tables, step, batch, queries, key_channels, first_sequence);
  };
  with_maps<form, false, segmented>(layer, Part::key, [&](auto wide) {
    with_bool(together > 1, [&](auto packs) {
      if constexpr (form == CodedForm::codes)
        // operands of codes are integers, whatever the type
        project(project_query_kernel<DType::f16, form, wide(), packs()>);
      else
        with_type<typename State::Kernels>(layer.tiles().coded_type, [&](auto type) {
          project(project_query_kernel<type(), form, wide(), packs()>);
        });
    });
  });
}

/// Launches attention over all rows, for post-RoPE keys.
///
/// Compressed rows need the projected queries. The kernel for recent rows is launched after theirs:
/// its blocks take the multiprocessors that are left over, or finish first. With joint values it is
/// launched before theirs, because the states of joint values must be folded afterwards.
template <CodedForm form, int scale_groups, bool joint, bool segmented, bool prompts, class State>
void attend_projected(const State& layer, const AttentionStep& step, const Batch& batch,
                      const StepQueries& queries, int first_sequence, int compressed_splits,
                      std::int64_t full_rows, cudaStream_t stream) {
  const bool projects = form != CodedForm::none && compressed_splits > 0;
  const auto attend_recent = [&] {
    const int full_splits = full_splits_of(full_rows, false);
    const std::int64_t split_rows =
                           full_splits == 0 ? 0 : (full_rows + full_splits - 1) / full_splits,
                       recent_rows =
                           (std::max)(split_rows, std::int64_t{layer.tables().ring_rows()});
    with_scaled<typename State::Kernels>(layer.tiles().listed.scaled, [&](auto scaled) {
      attend_plain<PlainRows::recent, scaled()>(layer, step, batch, queries, first_sequence,
                                                1 + full_splits, recent_rows, projects, stream);
    });
    if constexpr (prompts) {
      if (step.prompt != nullptr)
        attend_plain<PlainRows::prompt>(layer, step, batch, queries, first_sequence, 1, kManyRows,
                                        true, stream);
    }
  };
  if constexpr (form != CodedForm::none) {
    if (projects) {
      project_queries<form, segmented>(layer, step, batch, queries, first_sequence, stream);
      if constexpr (joint) {
        attend_recent();
        attend_joint<form == CodedForm::codes ? scale_groups : 0>(
            layer, step, batch, first_sequence, compressed_splits, stream);
        return;
      } else if constexpr (form == CodedForm::codes) {
        attend_codes<scale_groups, segmented>(layer, step, batch, first_sequence, compressed_splits,
                                              stream);
      } else {
        attend_plain<PlainRows::compressed>(layer, step, batch, queries, first_sequence,
                                            compressed_splits, kManyRows, true, stream);
      }
    }
  }
  attend_recent();
}

}  // namespace detail

/// @brief Enqueues attention of a step's queries over the stored rows of some sequences and over a
/// prompt's own rows.
///
/// Post-RoPE keys: two launches; four with compressed rows; five with joint values. Pre-RoPE keys:
/// two; three with compressed rows; five with joint values. A prompt adds one. Joint values whose
/// columns do not fit one launch repeat theirs (fold_joint.cuh). Allocates nothing and does not
/// wait.
///
/// With post-RoPE keys, compressed rows depend on the projected queries. Recent rows and a prompt's
/// own rows do not, and use the multiprocessors that are left over. They are launched first if
/// values are joint or keys are pre-RoPE.
/// @param batch  at most kMaxBatch sequences. The first is sequence `first_sequence` of the call;
///   its queries begin at row `first_row`.
/// @param compressed_splits  upper bound of the splits of the compressed lists
/// @param full_rows  upper bound of the rows of the full lists
/// @tparam form  of the compressed rows
/// @tparam scattered  rows of lists may stand in any order
/// @tparam scale_groups  of tiles of codes
/// @tparam joint  values are joint
/// @tparam segmented  sequences may have epochs of their own
/// @tparam prompts  steps may be of a prompt: kernels for its own rows are compiled
template <CodedForm form, bool scattered, int scale_groups, bool joint, bool segmented,
          bool prompts, class State>
void attend_step(const State& layer, const AttentionStep& step, const Batch& batch,
                 const DeviceRows& query, const DeviceOutput& out, std::int64_t first_row,
                 int first_sequence, int compressed_splits, std::int64_t full_rows,
                 cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  constexpr float log2e = 1.44269504F;
  const StepQueries queries{query, first_row, layer.config().scale() * log2e};
  const auto attend_post_rope = [&] {
    detail::attend_projected<form, scale_groups, joint, segmented, prompts>(
        layer, step, batch, queries, first_sequence, compressed_splits, full_rows, stream);
  };
  if constexpr (State::Kernels::rope_pre) {
    if (tables.rotary.pre_rope())
      detail::attend_pre_rope<form, scale_groups, joint, segmented, scattered, prompts>(
          layer, step, batch, queries, first_sequence, compressed_splits, splits_of(full_rows),
          stream);
    else
      attend_post_rope();
  } else {
    attend_post_rope();
  }
  const dim3 outputs(static_cast<unsigned>(step.blocks), static_cast<unsigned>(tables.num_heads),
                     static_cast<unsigned>(batch.count));
  // Folded joint values are one plain state per head: the centres of codes were already subtracted.
  const auto combine = [&](auto* kernel) {
    detail::launch_step_kernel(
        kernel, outputs, kStepThreads, combine_bytes((std::max)(step.width, step.joint_width)),
        layer.overlaps(), "combine_kernel", stream, tables, step, joint ? CodedForm::plain : form,
        batch, out, first_row, first_sequence);
  };
  detail::with_maps<form, joint, segmented>(layer, Part::value, [&](auto wide) {
    constexpr int groups = joint ? 1 : scale_groups;
    detail::with_bool(step.columns() == 1, [&](auto single) {
      constexpr int columns = single() ? 1 : kBlockColumns;
      if (tables.head_dim > 8 * kStepWarps)
        combine(combine_kernel<groups, columns, 2, wide()>);
      else
        combine(combine_kernel<groups, columns, 1, wide()>);
    });
  });
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
