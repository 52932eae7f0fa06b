// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/prompt_parts.cuh  Stores the kept rows of a prompt part by part under
/// device-managed epochs.
///
/// Rows are kept by prompt scores or accumulated scores, so every head keeps different rows of a
/// part, and a different number. Only the device knows the number per part. The host knows how many
/// rows the lists will have, and has taken pages for them. Where errors choose among the rows of a
/// part, the host reads at the end how many are compressed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"
#include "lowrankkv/cuda/update/compress_scratch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Finds where the parts of every head's order end. Part i holds rows [i length, (i + 1)
/// length) of the source. Grid: heads.
/// @param count  rows of an order, if all heads have the same number
/// @param ends  output [heads, parts]
template <class = void>
__global__ void part_ends_kernel(RowOrder order, int count, int parts, int length,
                                 std::int32_t* ends) {
  const int heads = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x),
            all = order.active(0, heads, head, count).y;
  const std::int32_t* rows = order.of(0, heads, head);
  for (int part = static_cast<int>(threadIdx.x); part < parts;
       part += static_cast<int>(blockDim.x)) {
    int low = 0, high = all;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (rows[middle] < (part + 1) * length)
        low = middle + 1;
      else
        high = middle;
    }
    ends[head * parts + part] = low;
  }
}

/// @brief Adds the rows of a part to the lists' row counts. One block.
/// @param counts  [2, heads]: full rows, then compressed rows; null: all are compressed
template <class = void>
__global__ void note_part_kernel(LayerEdit tables, int slot, RowOrder order,
                                 const std::int32_t* counts) {
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads;
       head += static_cast<int>(blockDim.x)) {
    const int2 active = order.active(0, tables.num_heads, head, 0);
    HeadRows& rows = tables.rows[tables.index(slot, head)];
    rows.num_full += counts == nullptr ? 0 : counts[head];
    rows.num_compressed +=
        counts == nullptr ? active.y - active.x : counts[tables.num_heads + head];
  }
}

/// @brief Calls store(part, order, before) for each part of a prompt's kept rows, then adds the
/// part's rows to the device's row counts.
///
/// The prompt is the only sequence of the batch. `before` is an upper bound of the rows that were
/// stored in earlier parts. store() returns the counts that note_part_kernel takes, or null. Cost:
/// one launch, and one per part; with config.keep_residuals and rows kept by prompt scores, one
/// memset per head.
/// @param order  all rows that are compressed
/// @param length  rows of the prompt in a part
template <class Store>
void for_each_part(const LayerState& layer, const FlushBatch& flushed, RowOrder order,
                   std::int32_t length, const CompressScratch& scratch, cudaStream_t stream,
                   Store&& store) {
  const LayerEdit& tables = layer.tables();
  const int slot = flushed.slots[0], kept = flushed.candidates(0),
            parts = (flushed.rows[0] + length - 1) / length;
  part_ends_kernel<><<<static_cast<unsigned>(tables.num_heads), 256, 0, stream>>>(
      order, kept, parts, length, scratch.part_ends);
  check(cudaGetLastError(), "part_ends_kernel");
  order.ends = scratch.part_ends;
  order.parts = parts;
  // Clear the residuals: rows may be re-projected to another epoch before their residuals are
  // noted. Where rows are kept by accumulated score, evict_rows_kernel does it.
  if (layer.config().keep_residuals && flushed.limit[0] < 0) {
    for (int head = 0; head < tables.num_heads; ++head) {
      std::uint32_t* first = tables.residuals[1] +
                             static_cast<std::size_t>(slot * tables.num_heads + head) *
                                 static_cast<std::size_t>(tables.max_rows[1]) +
                             layer.sequence(slot).num_rows(RowList::compressed, head);
      check(cudaMemsetAsync(first, 0, static_cast<std::size_t>(kept) * sizeof *first, stream),
            "residuals");
    }
  }
  for (; order.part < parts; ++order.part) {
    FlushBatch part = flushed;
    part.compressed[0] = (std::min)(kept, length);  // the most of any head
    part.full[0] = part.pinned[0];
    const std::int32_t* counts = store(part, order, (std::min)(kept, order.part * length));
    note_part_kernel<><<<1, 128, 0, stream>>>(tables, slot, order, counts);
    check(cudaGetLastError(), "note_part_kernel");
  }
}

/// @brief Chooses the rows of a part that stay full: those with the largest errors under the maps
/// that would store them.
///
/// A head keeps `wanted` rows full, or fewer if it keeps fewer rows of the part, or if fewer errors
/// exceed `least` (> 0). Returns the orders of the full list and of the compressed list. In the
/// first part the prompt's pinned rows come first in the order of the full list. The counts of both
/// are written to scratch.exempt [2, heads].
/// @tparam coded_groups  scale groups of tiles of codes; 0: plain tiles
/// @param policy  the token policy
template <int coded_groups, class State, class Policy>
std::pair<RowOrder, RowOrder> exempt_of_part(const State& layer, const FlushBatch& part,
                                             const RowOrder& order, std::int32_t length,
                                             std::int64_t wanted, const Policy& policy,
                                             const RowSource& source,
                                             const CompressScratch& scratch, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(layer.tables().num_heads);
  const std::int32_t first = (std::max)(part.pinned[0], order.part * length),
                     end = (std::min)(part.rows[0], (order.part + 1) * length),
                     last = (std::max)(first, static_cast<std::int32_t>(
                                                  error_candidates(policy, part.position[0], end)));
  ErrorRows rows{};
  rows.slots[0] = part.slots[0];
  rows.first[0] = first;
  rows.count[0] = last - first;
  clear_errors(scratch, layer.tables().num_heads, 0, last, end, stream);
  if (rows.count[0] > 0)
    enqueue_errors<coded_groups, false>(layer, part, rows, relative_errors(policy), source, scratch,
                                        stream);
  float* own_errors = scratch.second_scores(layer.tables().num_heads);
  gather_scores_kernel<>
      <<<heads, kSelectThreads, 0, stream>>>(scratch.scores, scratch.rows, order, part, own_errors);
  check(cudaGetLastError(), "gather_scores_kernel");
  Candidates candidates{own_errors,     scratch.rows,       false, {}, {}, {}, order, true,
                        scratch.exempt, least_error(policy)};
  candidates.wanted[0] = static_cast<std::int32_t>(wanted);
  top_rows_kernel<><<<heads, kSelectThreads, 0, stream>>>(candidates, scratch.chosen, scratch.rest);
  check(cudaGetLastError(), "top_rows_kernel");
  FlushBatch named = part;
  if (order.part > 0) named.pinned[0] = 0;
  rows_of_indices_kernel<><<<heads, kSelectThreads, 0, stream>>>(
      order, named, scratch.exempt, scratch.chosen, scratch.rest, scratch.rows);
  check(cudaGetLastError(), "rows_of_indices_kernel");
  return {{scratch.chosen, scratch.rows, scratch.exempt, 1, 0},
          {scratch.rest, scratch.rows, scratch.exempt + heads, 1, 0}};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
