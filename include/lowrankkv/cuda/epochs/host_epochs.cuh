// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/host_epochs.cuh  What the host knows of the epochs of sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/state/upload.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Sequences whose bases move in one launch: their moments, and transitions, are large.
inline constexpr int kAdaptBatch = 16;

/// @brief How many epochs of its own a sequence may have, as the cache's EpochPolicy says; 0: bases
/// never move.
struct EpochLimits {
  int own = 0;
  bool rotates_calibrated_rows = false;
  bool device_epochs = false;  ///< epochs begin when values say so (cuda/epochs/device_epochs.cuh):
                               ///< the host does not know which there are
  float sketch_share = 0.0F;   ///< then, rows of a sketch per rank
  /// @brief Segments that a sequence can have.
  constexpr int segments() const { return own == 0 ? 1 : own + 2; }
};

/// @brief Rows of a sequence's compressed lists that one epoch wrote, as the host knows them.
struct HostSegment {
  std::int32_t epoch = 0;                ///< in LayerView::maps
  std::int32_t level = 0;                ///< how many rounds of merging it went through
  std::vector<std::int32_t> first_rows;  ///< [heads]: from these to the next segment's, or the end
};

/// @brief What a sequence has published, as the host knows it.
struct HostEpochs {
  std::vector<HostSegment> segments;
  std::int32_t current = 0;  ///< the epoch that rows are written under
  std::int64_t rows_since_publication = 0;
  std::int64_t decode_steps = 0;  ///< of an updater; where epochs begin when values say so, batches
                                  ///< of rows so far: there are no more of its own
  bool moved = false;             ///< the working bases are no longer the calibrated ones
  bool unpublished = false;       ///< they have moved since they were published
};

/// @brief Tells the device where the segments of heads begin that differ from the first one's.
inline void write_first_rows(const LayerEdit& tables, int slot,
                             const std::vector<HostSegment>& segments, cudaStream_t stream) {
  const bool differ = std::any_of(segments.begin(), segments.end(), [](const HostSegment& segment) {
    return std::any_of(segment.first_rows.begin(), segment.first_rows.end(),
                       [&](std::int32_t row) { return row != segment.first_rows.front(); });
  });
  for (int head = 0; differ && head < tables.num_heads; head += FirstRowsList::kMost) {
    FirstRowsList own;
    own.first = head;
    own.count = (std::min)(FirstRowsList::kMost, tables.num_heads - head);
    for (const HostSegment& segment : segments) {
      for (int i = 0; i < own.count; ++i)
        own.rows[i][own.segments] = segment.first_rows[static_cast<std::size_t>(head + i)];
      ++own.segments;
    }
    write_first_rows_kernel<><<<1, FirstRowsList::kMost, 0, stream>>>(tables, slot, own);
    check(cudaGetLastError(), "write_first_rows_kernel");
  }
}

/// @brief Which of `count` segments a new one would push over the edge of `own` epochs: it is
/// merged into its successor; -1: none. As cpu/segments.hpp: neighbours of equal level first (the
/// newest such pair), else the two newest. Rows under the calibrated epoch stay there, unless they
/// are rotated. @param segment_at  gives what has an epoch and a level by its number
#pragma nv_exec_check_disable
template <class SegmentAt>
__host__ __device__ int merge_for_new_segment(int count, int own, bool rotates_calibrated_rows,
                                              SegmentAt&& segment_at) {
  int first_own = 0;
  while (!rotates_calibrated_rows && first_own < count && segment_at(first_own).epoch == 0)
    ++first_own;
  if (count - first_own + 1 <= own) return -1;
  for (int index = count - 2; index >= first_own; --index) {
    if (segment_at(index).level == segment_at(index + 1).level) return index;
  }
  return count - first_own >= 2 ? count - 2 : count - 1;
}

/// @brief A segment of a sequence that is to be re-projected: its rows, written under `from`, are
/// to be under `into`, as those of the next segment are. The layer has both segments until all rows
/// have been.
struct MergePlan {
  std::int32_t slot = 0, from = 0, into = 0;  ///< epochs in LayerView::maps
  std::int32_t segment = -1;                  ///< none, if negative
};
/// @brief Where kernels find the plans of a launch: one that the host made, or, where values
/// decide, those of its sequences in device memory.
struct MergePlans {
  MergePlan one;
  const MergePlan* decided = nullptr;
  std::int32_t
      begin = 0,
      end = std::numeric_limits<std::int32_t>::max();  ///< only rows of the lists between them

  __device__ MergePlan of(int sequence) const {
    return decided == nullptr ? one : decided[sequence];
  }
  /// @brief The rows [x, y) of a head that a plan is about.
  __device__ int2 rows_of(const LayerView& tables, const MergePlan& plan, int head) const {
    if (plan.segment < 0) return {0, 0};
    const SegmentRows own = tables.segment(
        plan.slot, head, tables.num_rows(RowList::compressed, plan.slot, head), plan.segment, 0);
    return {max(own.begin, begin), min(own.end, end)};
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
