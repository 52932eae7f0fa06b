// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/device_epochs.cuh  Device-managed epochs: the device's record of a sequence's
/// epochs and sketches, and the kernels that decide when an epoch begins.
///
/// Without them, the host decides from counts when an epoch is published
/// (cuda/epochs/epoch_store.cuh). With them, a kernel sets a flag where a chunk of rows has ended,
/// or, for rows kept by accumulated score, where enough of them have been stored. roll_over_kernel
/// then takes a free epoch, opens a segment, chooses the segments that merge, and plans which rows
/// of a merge in progress are re-projected next. It passes these decisions in device memory to the
/// kernels that write maps and re-project rows. The host reads them only to save or measure a
/// sequence.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/epochs/epoch_store.cuh"
#include "lowrankkv/cuda/epochs/host_epochs.cuh"
#include "lowrankkv/cuda/epochs/jacobi.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kMaxSketchBuffer = 640;  ///< most rows of a sketch's buffer
/// Most bytes of shared memory of sketch_kernel besides its buffer.
inline constexpr int kSketchShared = 22528;

namespace detail {

/// Most rows of the sketch of a basis with `rank` columns.
__host__ __device__ inline int sketch_rows(float share, int rank) {
  return static_cast<int>(ceilf(share * static_cast<float>(rank)));
}

}  // namespace detail

/// @brief The device's record of a sequence's epochs. Its segments are in LayerView::segments.
struct DeviceEpochState {
  std::int32_t current = 0;  ///< index in LayerView::maps of the epoch under which rows are written
  std::uint32_t used = 0;    ///< bit i: the sequence's own epoch i is in use
  /// For updaters that see rows kept by accumulated score: rows since the last publication,
  /// counting in every batch the head with the most rows.
  std::int64_t rows_since_publication = 0;
  std::int32_t unpublished = 0;            ///< whether bases have moved since the last publication
  std::int32_t merging = -1;               ///< as HostEpochs::merging
  std::int32_t levels[kMaxSegments] = {};  ///< rounds of merging, by segment
};

/// @brief The sketches of all sequences of a layer.
struct Sketches {
  float* rows = nullptr;              ///< [slots, heads, 2, capacity, head_dim]
  SketchState* states = nullptr;      ///< [slots, heads, 2]
  const float* thresholds = nullptr;  ///< [heads, 2]: larger residuals end a chunk
  std::int32_t capacity = 0;          ///< most rows of a sketch
};

/// @brief The device's decisions of a flush, in device memory, by sequence of the batch.
struct Rollover {
  std::int32_t* begun = nullptr;   ///< whether a new epoch begins
  std::int32_t* epochs = nullptr;  ///< epochs whose maps are to be written; -1: none
  MergePlan* plans = nullptr;      ///< rows of merges, which end_merges_kernel moves on
  std::int32_t* above = nullptr;   ///< [sequences, heads] whether a residual is above its threshold
};

/// @brief Counters of a layer since it was made.
struct DeviceEpochCounts {
  unsigned long long publications = 0, merges = 0;
};

/// @brief Limits of device-managed epochs, for roll_over_kernel.
struct DeviceEpochLimits {
  std::int32_t own = 0, slots_per_sequence = 0;
  bool rotates_calibrated_rows = false;
  /// Whether bases are published whenever they moved (sketches); else after so many rows.
  bool publishes_updates = false;
};

/// @brief Bits of a sequence's own epochs that have rows, or are current.
template <bool edits>
__device__ std::uint32_t used_epochs(const LayerTables<edits>& tables, int slot,
                                     std::int32_t current, int slots_per_sequence) {
  const auto bit = [&](std::int32_t epoch) {
    return epoch == 0 ? 0U : 1U << (epoch - slot * slots_per_sequence - 1);
  };
  std::uint32_t used = bit(current);
  for (int i = 0; i < tables.lengths[slot].num_segments; ++i)
    used |= bit(tables.segments_of(slot, 0)[i].epoch);
  return used;
}

/// @brief Plans the next rows of a sequence's merge in progress: the last ones of its older
/// segment, within `most` rows of the last one of any head. Adds each head's number of them to
/// `reprojected`. For one thread.
template <bool edits>
__device__ MergePlan next_merged_rows(const LayerTables<edits>& tables, int slot,
                                      std::int32_t merging, std::int32_t most,
                                      unsigned long long* reprojected) {
  if (merging < 0) return {};
  const auto border = [&](int head, int segment) {
    return tables.segments_of(slot, head)[merging + segment].first_row;
  };
  std::int32_t end = 0;
  for (int head = 0; head < tables.num_heads; ++head) {
    if (border(head, 0) < border(head, 1)) end = max(end, border(head, 1));
  }
  const DeviceSegment* segments = tables.segments_of(slot, 0) + merging;
  const MergePlan plan{slot, segments[0].epoch, segments[1].epoch, merging, max(0, end - most)};
  for (int head = 0; head < tables.num_heads; ++head) {
    const std::int32_t rows = border(head, 1) - max(border(head, 0), plan.begin);
    if (rows > 0) atomicAdd(reprojected + head, static_cast<unsigned long long>(rows));
  }
  return plan;
}

/// @brief Plans the rest of every merge in progress. Grid: sequences, of one thread.
template <class = void>
__global__ void plan_rest_of_merges_kernel(LayerView tables, FlushBatch flushed, int first_sequence,
                                           const DeviceEpochState* states, MergePlan* plans,
                                           unsigned long long* reprojected) {
  const int index = static_cast<int>(blockIdx.x), slot = flushed.slots[first_sequence + index];
  plans[index] = next_merged_rows(tables, slot, states[slot].merging, INT_MAX, reprojected);
}

/// @brief Takes a free epoch for every sequence that begins one. Opens a segment, and chooses the
/// segments that merge, where rows are to be written under another epoch than the last segment's,
/// or are the first rows. While a merge is in progress, no epoch begins. Plans its next rows. Row
/// counts are those before the flush. Grid: sequences.
/// @param order  the flushed rows, of prompts and of tails, that prompt scores or accumulated
/// scores chose. If heads have different numbers of rows, it includes the rows that the sequence's
/// counts take as full for their errors
/// @param exempt  further rows of every head that stay full
/// @param most_rows  of a merge that are re-projected
/// @param reprojected  [heads]: numbers of rows that merges re-project are added
template <class = void>
__global__ void roll_over_kernel(LayerEdit tables, FlushBatch flushed, RowOrder order, int exempt,
                                 int first_sequence, DeviceEpochLimits limits,
                                 std::int32_t most_rows, DeviceEpochState* states,
                                 Rollover rollover, DeviceEpochCounts* counts,
                                 unsigned long long* reprojected) {
  __shared__ int opened;  // number of the segment; -1: none
  const int index = static_cast<int>(blockIdx.x), sequence = first_sequence + index,
            slot = flushed.slots[sequence];
  DeviceEpochState& state = states[slot];
  bool any = false;  // whether some row is to be compressed
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    const int2 active = order.active(index, tables.num_heads, head, flushed.compressed[sequence]);
    any = any ||
          active.y - active.x >
              exempt +
                  (order.ends == nullptr ? 0 : flushed.full[sequence] - flushed.pinned[sequence]);
  }
  const bool stores = __syncthreads_or(any ? 1 : 0) != 0;
  if (threadIdx.x == 0) {
    DeviceLengths& lengths = tables.lengths[slot];
    const DeviceSegment* segments = tables.segments_of(slot, 0);
    opened = rollover.epochs[index] = -1;
    bool begins = rollover.begun[index] != 0;
    if (limits.publishes_updates) {
      const bool waits = state.merging >= 0;
      begins = begins || (state.unpublished != 0 && stores);
      state.unpublished = state.unpublished != 0 || begins ? 1 : 0;
      begins = begins && !waits;
      if (begins) state.unpublished = 0;
    }
    if (begins) {
      // The epoch that ends is in use only if rows were written under it.
      state.used = used_epochs(tables, slot, 0, limits.slots_per_sequence);
      int own = 0;
      while ((state.used >> own & 1U) != 0) ++own;  // there is one more epoch than segments need
      state.used |= 1U << own;
      state.current = rollover.epochs[index] = slot * limits.slots_per_sequence + own + 1;
      atomicAdd(&counts->publications, 1ULL);
    }
    const int count = lengths.num_segments;
    if (stores && (count == 0 || segments[count - 1].epoch != state.current)) {
      opened = count;
      // With a merge in progress, this segment takes the place of one that lost its last row.
      if (state.merging < 0) {
        state.merging = merge_for_new_segment(
            count, limits.own, limits.rotates_calibrated_rows, [&](int segment) {
              return Segment{segments[segment].epoch, 0, 0, state.levels[segment]};
            });
      }
      state.levels[count] = 0;
      lengths.num_segments = count + 1;
    }
  }
  __syncthreads();
  for (int head = static_cast<int>(threadIdx.x); opened >= 0 && head < tables.num_heads;
       head += static_cast<int>(blockDim.x))
    tables.segments_of(slot, head)[opened] = {state.current,
                                              tables.num_rows(RowList::compressed, slot, head)};
  __syncthreads();
  if (threadIdx.x == 0)
    rollover.plans[index] =
        next_merged_rows(tables, slot, stores ? state.merging : -1, most_rows, reprojected);
}

/// @brief Gives rows that were re-projected as planned to the next segment. When no head has a row
/// left in the older one, the next one takes its place. Grid: sequences.
template <class = void>
__global__ void end_merges_kernel(LayerEdit tables, DeviceEpochLimits limits,
                                  DeviceEpochState* states, DeviceEpochCounts* counts,
                                  const MergePlan* plans) {
  const MergePlan plan = plans[blockIdx.x];
  if (plan.segment < 0) return;
  const int slot = plan.slot, merged = plan.segment, count = tables.lengths[slot].num_segments;
  bool left = false;
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    DeviceSegment* own = tables.segments_of(slot, head) + merged;
    own[1].first_row = max(own[0].first_row, min(own[1].first_row, plan.begin));
    left = left || own[0].first_row < own[1].first_row;
  }
  if (__syncthreads_or(left ? 1 : 0) != 0) return;
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    DeviceSegment* own = tables.segments_of(slot, head);
    for (int i = merged; i + 1 < count; ++i) own[i] = own[i + 1];
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  DeviceEpochState& state = states[slot];
  state.levels[merged + 1] = max(state.levels[merged], state.levels[merged + 1]) + 1;
  for (int i = merged; i + 1 < count; ++i) state.levels[i] = state.levels[i + 1];
  tables.lengths[slot].num_segments = count - 1;
  state.merging = -1;
  state.used = used_epochs(tables, slot, state.current, limits.slots_per_sequence);
  atomicAdd(&counts->merges, 1ULL);
}

/// @brief Initialises a new sequence: no segment, empty sketches. One block. The rows of sketches
/// are zeroed separately.
template <class = void>
__global__ void begin_device_epochs_kernel(LayerEdit tables, int slot, DeviceEpochState* states,
                                           Sketches sketches) {
  if (threadIdx.x == 0) {
    states[slot] = {};
    tables.lengths[slot].num_segments = 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i < 2 * tables.num_heads;
       i += static_cast<int>(blockDim.x))
    sketches.states[slot * tables.num_heads * 2 + i] = {};
}

/// @brief Drops segments without rows, as HostSequence::trim_segments() does on the host. A merge
/// of such a segment is over. Grid: sequences.
template <class = void>
__global__ void trim_device_epochs_kernel(LayerEdit tables, Batch batch, DeviceEpochLimits limits,
                                          DeviceEpochState* states) {
  __shared__ std::uint32_t filled;  // bits of segments that have rows in some head
  const int slot = batch.slots[blockIdx.x], count = tables.lengths[slot].num_segments,
            thread = static_cast<int>(threadIdx.x);
  if (thread == 0) filled = 0;
  __syncthreads();
  for (int head = thread; head < tables.num_heads; head += static_cast<int>(blockDim.x)) {
    DeviceSegment* own = tables.segments_of(slot, head);
    const int rows = tables.num_rows(RowList::compressed, slot, head);
    std::uint32_t bits = 0;
    for (int i = 0; i < count; ++i) {
      const int end = i + 1 < count ? min(own[i + 1].first_row, rows) : rows;
      own[i].first_row = min(own[i].first_row, rows);
      if (own[i].first_row < end) bits |= 1U << i;
    }
    atomicOr(&filled, bits);
  }
  __syncthreads();
  const auto close = [&](auto* items) {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if ((filled >> i & 1U) != 0) items[kept++] = items[i];
    }
    return kept;
  };
  for (int head = thread; head < tables.num_heads; head += static_cast<int>(blockDim.x))
    close(tables.segments_of(slot, head));
  __syncthreads();
  if (thread > 0) return;
  DeviceEpochState& state = states[slot];
  tables.lengths[slot].num_segments = close(state.levels);
  if (const int merging = state.merging; merging >= 0) {
    const bool both = (filled >> merging & 3U) == 3U;
    state.merging = both ? __popc(filled & ((1U << merging) - 1U)) : -1;
  }
  state.used = used_epochs(tables, slot, state.current, limits.slots_per_sequence);
}

/// @brief Copies segments and epochs from slot `source` to `target`, with epoch indices of `target`
/// in LayerView::maps. One block.
template <class = void>
__global__ void fork_device_epochs_kernel(LayerEdit tables, int source, int target,
                                          DeviceEpochLimits limits, DeviceEpochState* states) {
  const auto moved = [&](std::int32_t epoch) {
    return epoch == 0 ? 0 : epoch + (target - source) * limits.slots_per_sequence;
  };
  const int count = tables.lengths[source].num_segments;
  for (int item = static_cast<int>(threadIdx.x); item < tables.num_heads * count;
       item += static_cast<int>(blockDim.x)) {
    const DeviceSegment segment = tables.segments_of(source, item / count)[item % count];
    tables.segments_of(target, item / count)[item % count] = {moved(segment.epoch),
                                                              segment.first_row};
  }
  if (threadIdx.x > 0) return;
  tables.lengths[target].num_segments = count;
  states[target] = states[source];
  states[target].current = moved(states[source].current);
}

/// @brief Device memory of a layer with device-managed epochs. Empty in other layers.
class DeviceEpochStore {
 public:
  DeviceEpochStore() = default;
  /// @brief Allocates the memory.
  /// @param most_rows  of a sketch, from its rank; a sketch holds no more than head_dim rows
  /// @param thresholds  [heads, 2]
  /// @param batch  rows that enter a sketch at a time
  DeviceEpochStore(int max_sequences, int heads, int head_dim, int most_rows, int batch,
                   const std::vector<float>& thresholds, DeviceEpochLimits limits)
      : DeviceEpochStore(max_sequences, heads, head_dim, (std::min)(most_rows, head_dim),
                         thresholds, limits) {
    // Room for a full sketch and a batch, or for as many rows as make the sketch step in between.
    buffer_rows_ = detail::buffered_rows(
        (std::min)({kMaxSketchBuffer, 2 * most_rows, sketches_.capacity + batch}));
    buffer_bytes_ =
        sizeof(float) * static_cast<std::size_t>(buffer_rows_ * detail::sketch_stride(head_dim));
  }

  bool used() const { return limits_.own > 0; }
  /// @brief Whether there are sketches. If not, an updater of another kind sees rows kept by
  /// accumulated score.
  bool sketches_rows() const { return sketches_.capacity > 0; }
  /// @brief Rows of a sketch's buffer in sketch_kernel, and their bytes.
  int buffer_rows() const { return buffer_rows_; }
  std::size_t buffer_bytes() const { return buffer_bytes_; }
  const DeviceEpochLimits& limits() const { return limits_; }
  const Sketches& sketches() const { return sketches_; }
  DeviceEpochState* states() const { return states_.data(); }
  DeviceEpochCounts* counts() const { return counts_.data(); }
  /// @brief [heads]: numbers of rows that merges re-projected.
  unsigned long long* reprojected() const { return reprojected_.data(); }
  std::size_t bytes() const {
    return states_.bytes() + counts_.bytes() + reprojected_.bytes() + sketch_rows_.bytes() +
           sketch_states_.bytes() + thresholds_.bytes();
  }
  /// @brief Bytes reserved for a sequence's sketches.
  std::size_t sketch_bytes() const { return sketch_size_ * sizeof(float); }
  /// @brief Device memory of a slot's sketches, sketch_bytes() bytes, and of their states,
  /// state_bytes() bytes.
  float* rows_of(int slot) const {
    return sketch_rows_.data() + static_cast<std::size_t>(slot) * sketch_size_;
  }
  SketchState* states_of(int slot) const {
    return sketch_states_.data() + static_cast<std::size_t>(slot) * parts_;
  }
  std::size_t state_bytes() const { return parts_ * sizeof(SketchState); }

 private:
  DeviceEpochStore(int max_sequences, int heads, int head_dim, int capacity,
                   const std::vector<float>& thresholds, DeviceEpochLimits limits)
      : limits_(limits),
        sketch_size_(static_cast<std::size_t>(2 * heads) *
                     static_cast<std::size_t>(capacity * head_dim)),
        parts_(static_cast<std::size_t>(2 * heads)),
        states_(static_cast<std::size_t>(max_sequences)),
        counts_(1),
        reprojected_(static_cast<std::size_t>(heads)),
        sketch_rows_(static_cast<std::size_t>(max_sequences) * sketch_size_),
        sketch_states_(static_cast<std::size_t>(max_sequences) * parts_),
        thresholds_(thresholds) {
    sketches_ = {sketch_rows_.data(), sketch_states_.data(), thresholds_.data(), capacity};
  }
  DeviceEpochLimits limits_;
  int buffer_rows_ = 0;
  std::size_t buffer_bytes_ = 0, sketch_size_ = 0, parts_ = 0;
  DeviceArray<DeviceEpochState> states_;
  DeviceArray<DeviceEpochCounts> counts_;
  DeviceArray<unsigned long long> reprojected_;
  DeviceArray<float> sketch_rows_;
  DeviceArray<SketchState> sketch_states_;
  DeviceArray<float> thresholds_;
  Sketches sketches_;
};

/// @brief Enqueues trim_device_epochs_kernel.
template <class = void>
void trim_device_epochs(const LayerEdit& tables, const DeviceEpochStore& device_epochs,
                        const Batch& batch, cudaStream_t stream) {
  trim_device_epochs_kernel<><<<static_cast<unsigned>(batch.count), 128, 0, stream>>>(
      tables, batch, device_epochs.limits(), device_epochs.states());
  check(cudaGetLastError(), "trim_device_epochs_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
