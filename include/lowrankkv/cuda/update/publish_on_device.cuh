// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/publish_on_device.cuh  Publishes bases of device-managed epochs. Where the
/// device decides that an epoch begins, maps are written, a segment is opened for the rows that are
/// stored next, and a merge of old segments may begin. The kernels that decide are in
/// cuda/epochs/device_epochs.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lowrankkv/cuda/epochs/device_epochs.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"
#include "lowrankkv/cuda/update/oja.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief When bases are published that rows kept by accumulated score have moved, as in
/// cpu/adapt.hpp. Rows are those of the head that has the most.
struct PublicationRule {
  std::int64_t interval = 0;       ///< rows since the last publication
  std::int32_t rows[kAdaptBatch];  ///< rows of one call that are enough, by sequence
  bool decode = false;             ///< the updater's steps are counted
  bool observes = false;           ///< the updater sees rows: of prompts it may see none
  bool waits = false;              ///< for the end of a merge in progress
};

/// @brief Notes that the rows of an order have moved bases, and decides whether these are
/// published. Grid: sequences.
template <class = void>
__global__ void publication_kernel(LayerView tables, FlushBatch flushed, RowOrder order,
                                   int first_sequence, PublicationRule rule,
                                   DeviceEpochState* states, SketchState* updates,
                                   std::int32_t* begun) {
  __shared__ int most;
  const int index = static_cast<int>(blockIdx.x), slot = flushed.slots[first_sequence + index];
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    const int2 active = order.active(index, tables.num_heads, head, 0);
    atomicMax(&most, active.y - active.x);
    if (!rule.decode || active.x == active.y) continue;
    for (int part = 0; part < 2; ++part) ++updates[tables.index(slot, head) * 2 + part].chunk_rows;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  const std::int64_t since = states[slot].rows_since_publication + most;
  const bool moved = states[slot].unpublished != 0 || (most > 0 && rule.observes);
  const bool waits = rule.waits && states[slot].merging >= 0;
  const bool due =
      most > 0 && moved && !waits && (since >= rule.interval || most >= rule.rows[index]);
  states[slot].rows_since_publication = due ? 0 : since;
  states[slot].unpublished = moved && !due ? 1 : 0;
  begun[index] = due ? 1 : 0;
}

/// @brief The fewest rows of every head whose compressed form has more bytes than an epoch; `most`
/// + 1, if `most` rows have not.
inline std::int32_t rows_that_outweigh_an_epoch(const LayerState& layer, std::int32_t most) {
  std::int32_t low = 0, high = most + 1;
  while (low + 1 < high) {
    const std::int32_t middle = low + (high - low) / 2;
    (compressed_bytes(layer, middle) > layer.epochs().epoch_bytes() ? high : low) = middle;
  }
  return high;
}

/// @brief Enqueues publication_kernel for the sequences of one adapt().
/// @param order     of their rows, from the first of these sequences on
/// @param observes  whether the updater saw some of the rows, if there are any
template <class = void>
void decide_publications(const LayerState& layer, const FlushBatch& flushed, int first_sequence,
                         int count, const RowOrder& order, Phase phase, bool observes,
                         const CompressScratch& scratch, cudaStream_t stream) {
  PublicationRule rule{layer.publish_interval(),
                       {},
                       phase == Phase::decode,
                       observes,
                       !layer.epochs().merges_at_once(phase)};
  for (int i = 0; i < count; ++i)
    rule.rows[i] = phase == Phase::prefill
                       ? rows_that_outweigh_an_epoch(layer, flushed.candidates(first_sequence + i))
                       : std::numeric_limits<std::int32_t>::max();
  publication_kernel<><<<static_cast<unsigned>(count), 128, 0, stream>>>(
      layer.tables(), flushed, order, first_sequence, rule, layer.device_epochs().states(),
      layer.device_epochs().sketches().states, scratch.rollover.begun);
  check(cudaGetLastError(), "publication_kernel");
}

/// @brief Re-projects the rows that scratch.rollover.plans names, and gives them to the next
/// segments.
/// @param most    so many rows of a head's list at most, in a plan
/// @param before  rows of the prompt that are stored and that the host does not count yet
template <int coded_groups>
void merge_planned_rows(LayerState& layer, const ObservedRows& observed, int count,
                        std::int32_t most, std::int32_t before, const CompressScratch& scratch,
                        cudaStream_t stream) {
  const DeviceEpochStore& device_epochs = layer.device_epochs();
  MergePlans plans;
  plans.decided = scratch.rollover.plans;
  const auto rows_of = [&](int i) {
    return (std::min)(most, layer.sequence(observed.slots[i]).rows.num_compressed + before);
  };
  const auto merge = [&](const MergePlans& some, int sequences, std::int32_t rows) {
    enqueue_merges<coded_groups>(layer, some, sequences, (rows + kStoreRows - 1) / kStoreRows + 1,
                                 scratch, stream);
  };
  std::int32_t most_rows = 0;
  for (int i = 0; i < count; ++i) {
    if (observed.count[i] > 0) most_rows = (std::max)(most_rows, rows_of(i));
  }
  if (layer.config().keep_residuals) {
    for (int i = 0; i < count; ++i, ++plans.decided) {
      if (observed.count[i] == 0) continue;
      merge_noting_moves<coded_groups>(
          layer, observed.slots[i], plans, 0, rows_of(i), scratch.decoded, stream,
          [&](const MergePlans& some) { merge(some, 1, some.end - some.begin); });
    }
  } else {
    merge(plans, count, most_rows);
  }
  end_merges_kernel<><<<static_cast<unsigned>(count), 128, 0, stream>>>(
      layer.tables(), device_epochs.limits(), device_epochs.states(), device_epochs.counts(),
      scratch.rollover.plans);
  check(cudaGetLastError(), "end_merges_kernel");
}

/// @brief Begins new epochs for the flushed rows of at most kAdaptBatch sequences, where
/// scratch.rollover.begun says so, and goes on with merges in progress: by
/// CacheConfig::most_merge_rows() rows, or, with a prompt, to their end. Up to eight launches, and
/// five more where codes want principal axes. Where residuals are kept, and there are epochs enough
/// that some could merge: six launches for every 2048 rows that a merge may re-project, which end
/// at once unless there is a merge. With a prompt and so many epochs: twice the merges' launches,
/// since a merge in progress ends before the prompt's epoch begins.
/// @param source  its row 0 is the first flushed row
/// @param order   of the rows that are compressed, if values chose them; from the first of these
/// sequences on
/// @param exempt  so many of every head's rows are not compressed: errors choose them under the new
/// epoch
/// @param before  rows of the prompt that are stored and that the host does not count yet
/// @param splits  shares in which the moments of a sequence's rows are summed
template <int coded_groups>
void begin_epochs(LayerState& layer, const FlushBatch& flushed, int first_sequence, int count,
                  const RowSource& source, const RowOrder& order, int exempt, std::int32_t before,
                  int splits, Phase phase, const CompressScratch& scratch, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const DeviceEpochStore& device_epochs = layer.device_epochs();
  const unsigned heads = static_cast<unsigned>(tables.num_heads),
                 sequences = static_cast<unsigned>(count);
  ObservedRows observed{};
  observed.order = order;
  const bool at_once = layer.epochs().merges_at_once(phase);
  const std::int32_t most = static_cast<std::int32_t>(
      (std::min)(at_once ? std::int64_t{INT32_MAX} : layer.config().most_merge_rows(),
                 std::int64_t{INT32_MAX}));
  bool may_merge = false;
  for (int i = 0; i < count; ++i) {
    const int from = first_sequence + i;
    HostSequence& now = layer.sequence(flushed.slots[from]);
    observed.slots[i] = flushed.slots[from];
    observed.first[i] = order.rows == nullptr ? flushed.pinned[from] : 0;
    observed.count[i] = flushed.candidates(from);
    if (observed.count[i] == 0) continue;
    // Before this many steps there are too few epochs to merge any.
    if (++now.epochs.decode_steps >= device_epochs.limits().own && flushed.compressed[from] > 0) {
      may_merge = true;
      layer.own_pages(flushed.slots[from], RowList::compressed, 0, now.rows.num_compressed, stream);
    }
  }
  if (may_merge && phase == Phase::prefill) {
    plan_rest_of_merges_kernel<>
        <<<sequences, 1, 0, stream>>>(tables, flushed, first_sequence, device_epochs.states(),
                                      scratch.rollover.plans, device_epochs.reprojected());
    check(cudaGetLastError(), "plan_rest_of_merges_kernel");
    merge_planned_rows<coded_groups>(layer, observed, count, most, before, scratch, stream);
  }
  roll_over_kernel<><<<sequences, 128, 0, stream>>>(
      tables, flushed, order, exempt, first_sequence, device_epochs.limits(), most,
      device_epochs.states(), scratch.rollover, device_epochs.counts(),
      device_epochs.reprojected());
  check(cudaGetLastError(), "roll_over_kernel");
  PublishedEpochs published{};
  std::copy_n(observed.slots, count, published.slots);
  published.decided = scratch.rollover.epochs;
  if (layer.epochs().axis_store().any()) {
    AxisRows rows{};
    rows.order = order;
    std::copy_n(observed.count, count, rows.count);
    const Moments moments =
        enqueue_moments(layer, source, observed, count, splits, scratch, stream);
    align_axes(layer, published, count, moments.sums, moments.splits, rows, scratch.axes, stream);
  } else {
    publish_kernel<><<<dim3(2, heads, sequences), kStoreThreads, 0, stream>>>(
        tables, layer.epochs().bases(), published);
    check(cudaGetLastError(), "publish_kernel");
  }
  finish_epochs(tables, layer.epochs(), published, count, scratch.axes.steps, stream);
  if (may_merge)
    merge_planned_rows<coded_groups>(layer, observed, count, most, before, scratch, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
