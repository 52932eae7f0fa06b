// SPDX-License-Identifier: Apache-2.0
/// @file cuda/prompt_parts.cuh  Rows of a prompt that scores or masses chose go under epochs that begin when values say so: part by part of the prompt, of which every head keeps other rows, and another number of them.
///
/// Only the device knows how many; the host knows how many rows lists will have, and has their pages ready.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/compress_scratch.cuh"
#include "lowrankkv/cuda/layer.cuh"
#include "lowrankkv/cuda/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Where the parts of every head's order end: part i has those of rows [i length, (i + 1) length) of the source. Grid: heads. @param count  rows of an order, if heads have the same number
template <class = void>
__global__ void part_ends_kernel(RowOrder order, int count, int parts, int length, std::int32_t* ends) {
  const int heads = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x), all = order.meant(0, heads, head, count).y;
  const std::int32_t* rows = order.of(0, heads, head);
  for (int part = static_cast<int>(threadIdx.x); part < parts; part += static_cast<int>(blockDim.x)) {
    int low = 0, high = all;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (rows[middle] < (part + 1) * length) low = middle + 1;
      else high = middle;
    }
    ends[head * parts + part] = low;
  }
}

/// @brief The compressed lists have the rows of a part. One block.
template <class = void>
__global__ void note_part_kernel(Tables tables, int slot, RowOrder order) {
  for (int head = static_cast<int>(threadIdx.x); head < tables.num_heads; head += static_cast<int>(blockDim.x)) {
    const int2 meant = order.meant(0, tables.num_heads, head, 0);
    tables.rows[tables.index(slot, head)].num_compressed += meant.y - meant.x;
  }
}

/// @brief Calls store(leaving, order, before) for the parts of the rows that leave a prompt, which is alone, and that scores or masses chose, `before` of them at most having been stored; then the device knows that the part's are.
/// A launch, and one a part; where residuals are kept of rows that scores chose, one a head. @param length  rows of the prompt in a part  @param order  of all rows that are compressed
template <class Store>
void for_each_part(const LayerState& layer, const Leaving& leaving, RowOrder order, std::int32_t length, const CompressScratch& scratch, cudaStream_t stream, Store&& store) {
  const Tables& tables = layer.tables();
  const int slot = leaving.slots[0], kept = leaving.most_compressed(0), parts = (leaving.rows[0] + length - 1) / length;
  part_ends_kernel<><<<static_cast<unsigned>(tables.num_heads), 256, 0, stream>>>(order, kept, parts, length, scratch.part_ends);
  check(cudaGetLastError(), "part_ends_kernel");
  order.ends = scratch.part_ends;
  order.parts = parts;
  if (layer.config().keep_residuals && leaving.limit[0] < 0) {  // evict_rows_kernel does so itself; rows may go to another epoch before what they lost is noted
    for (int head = 0; head < tables.num_heads; ++head) {
      std::uint32_t* first = tables.residuals[1] + static_cast<std::size_t>(slot * tables.num_heads + head) * static_cast<std::size_t>(tables.max_rows[1]) + layer.sequence(slot).num_rows(RowList::compressed, head);
      check(cudaMemsetAsync(first, 0, static_cast<std::size_t>(kept) * sizeof *first, stream), "residuals");
    }
  }
  for (; order.part < parts; ++order.part) {
    Leaving part = leaving;
    part.compressed[0] = (std::min)(kept, length);  // of a head at most
    part.full[0] = part.pinned[0];
    store(part, order, (std::min)(kept, order.part * length));
    note_part_kernel<><<<1, 128, 0, stream>>>(tables, slot, order);
    check(cudaGetLastError(), "note_part_kernel");
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
