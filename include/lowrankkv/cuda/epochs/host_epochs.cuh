// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/host_epochs.cuh  The host's record of sequences' epochs and segments, and the
/// plans of merges.
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

/// @brief Most sequences whose bases move in one launch. It is small because moments and
/// transitions are large.
inline constexpr int kAdaptBatch = 16;

/// @brief How many own epochs a sequence may have, from the cache's EpochPolicy. 0: bases never
/// move.
struct EpochLimits {
  int own = 0;
  bool rotates_calibrated_rows = false;
  /// Device-managed epochs (cuda/epochs/device_epochs.cuh): the device decides from values when an
  /// epoch begins, and the host does not know which epochs exist.
  bool device_epochs = false;
  float sketch_share = 0.0F;  ///< with device-managed epochs: rows of a sketch per rank
  /// @brief Most segments of a sequence.
  constexpr int segments() const { return own == 0 ? 1 : own + 2; }
};

/// @brief The host's record of a segment: the rows of a sequence's compressed lists that one epoch
/// wrote.
struct HostSegment {
  std::int32_t epoch = 0;                ///< in LayerView::maps
  std::int32_t level = 0;                ///< rounds of merging that it went through
  std::vector<std::int32_t> first_rows;  ///< [heads]; it ends where the next segment begins
};

/// @brief The host's record of a sequence's epochs.
struct HostEpochs {
  std::vector<HostSegment> segments;
  std::int32_t current = 0;  ///< the epoch under which rows are written
  std::int64_t rows_since_publication = 0;
  /// Decode steps of the updater. With device-managed epochs: batches of rows so far, an upper
  /// bound of the number of own epochs.
  std::int64_t decode_steps = 0;
  bool moved = false;        ///< the working bases differ from the calibrated ones
  bool unpublished = false;  ///< the working bases moved since they were published
  /// Number of the segment whose rows a merge is moving to the next one, from its end on; -1: none.
  std::int32_t merging = -1;
};

/// @brief Enqueues the upload of the segments' first rows, if heads differ in them.
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

/// @brief Chooses the segment that must merge into its successor so that, with a new segment, at
/// most `own` own epochs have rows. Like cpu/segments.hpp, it merges neighbours of equal level
/// first (the newest such pair), else the two newest; a single own segment merges into the new one.
/// Rows under the calibrated epoch stay there, unless rotates_calibrated_rows.
/// @param count  number of segments
/// @param segment_at  gives an object with `epoch` and `level` by the segment's number
/// @return the segment's number; -1: none has to merge
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

/// @brief A merge of one segment into the next: its rows, written under `from`, are re-projected to
/// `into`, the epoch of the next segment. The layer keeps both segments until all rows are
/// re-projected.
struct MergePlan {
  std::int32_t slot = 0, from = 0, into = 0;  ///< from, into: epochs in LayerView::maps
  std::int32_t segment = -1;                  ///< negative: no merge
  /// With device-managed epochs: the row of the lists from which on rows are re-projected. The host
  /// does not know it.
  std::int32_t begin = 0;
};
/// @brief The merge plans of a launch: one plan from the host, or, with device-managed epochs, one
/// plan per sequence in device memory.
struct MergePlans {
  MergePlan one;
  const MergePlan* decided = nullptr;
  /// Only rows [begin, end) are re-projected: of the lists, or, with device-managed epochs, counted
  /// from the plan's own first row.
  std::int32_t begin = 0, end = std::numeric_limits<std::int32_t>::max();

  __device__ MergePlan of(int sequence) const {
    return decided == nullptr ? one : decided[sequence];
  }
  /// @brief The rows [x, y) of a head that a plan re-projects.
  template <bool edits>
  __device__ int2 rows_of(const LayerTables<edits>& tables, const MergePlan& plan, int head) const {
    if (plan.segment < 0) return {0, 0};
    const SegmentRows own = tables.segment(
        plan.slot, head, tables.num_rows(RowList::compressed, plan.slot, head), plan.segment, 0);
    return {max(own.begin, plan.begin + begin), plan.begin + min(own.end - plan.begin, end)};
  }
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
