// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/saved_block.cuh  Gathers the device memory of a sequence into one block, and
/// scatters it back.
///
/// The block contains, in order:
/// - tiles of the full lists, head after head;
/// - tiles of the compressed lists, those of joint values last;
/// - own epochs;
/// - moved bases;
/// - rows of the tail [head, tile], in ring order;
/// - for each list: positions of its rows [head, most rows], if explicit, and their residuals, if
///   kept, in the same shape;
/// - the heads' largest values;
/// - accumulated scores of the scored lists [head, most rows], then of the tail's ring [head,
///   place];
/// - sketches and their states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The numbers that are saved besides the block. Epochs are numbered by first use; 0 is the
/// calibrated epoch.
struct SavedCounts {
  std::int64_t num_tokens = 0, rows_since_publication = 0, decode_steps = 0;
  HeadRows rows;  ///< the most of any head
  std::int32_t tail_length = 0, tail_first = 0, current_epoch = 0, own_epochs = 0;
  std::int32_t moved = 0, unpublished = 0;
};

/// @brief Byte offsets of the parts of the block, and its size.
struct SavedBlock {
  std::size_t lists[2] = {}, epochs = 0, bases = 0, tail = 0, positions[2] = {}, residuals[2] = {},
              largest_values = 0, accumulated_scores[2] = {}, tail_scores = 0, sketches = 0,
              sketch_states = 0, size = 0;
};

/// @brief Copies tiles between pages and a block, for lists from `first` on that have `rows` rows
/// each. In the block they lie list after list. Grid: tiles x lists.
template <bool to_block>
__global__ void move_tiles_kernel(LayerEdit tables, RowList list, int slot, int first, int rows,
                                  std::uint8_t* block) {
  const int head = first + static_cast<int>(blockIdx.y), tile = static_cast<int>(blockIdx.x);
  const auto layout_of = [&](int index) -> const HeadTiles& {
    return list == RowList::full ? tables.listed : tables.compressed[index];
  };
  const HeadTiles& layout = layout_of(head);
  if (tile * layout.rows >= rows) return;
  std::size_t offset = 0;
  for (int i = first; i < head; ++i)
    offset += static_cast<std::size_t>((rows + layout_of(i).rows - 1) / layout_of(i).rows) *
              static_cast<std::size_t>(layout_of(i).bytes);
  uint4* packed = reinterpret_cast<uint4*>(
      block + offset + static_cast<std::size_t>(tile) * static_cast<std::size_t>(layout.bytes));
  uint4* paged =
      reinterpret_cast<uint4*>(tables.tile(tables.page_table(list, slot, head), layout, tile));
  for (int i = static_cast<int>(threadIdx.x); i < layout.bytes / 16;
       i += static_cast<int>(blockDim.x)) {
    if (to_block)
      packed[i] = paged[i];
    else
      paged[i] = packed[i];
  }
}

namespace detail {

/// Bytes of the tiles of a list.
inline std::size_t list_bytes(const LayerState& layer, const SequenceRows& all, RowList list,
                              int index) {
  const HeadTiles& tiles = layer.layout(list, index);
  return static_cast<std::size_t>((all.num_rows(list, index) + tiles.rows - 1) / tiles.rows) *
         static_cast<std::size_t>(tiles.bytes);
}

inline SavedBlock block_of(const LayerState& layer, const SequenceRows& all,
                           const SavedCounts& counts) {
  SavedBlock block;
  const std::size_t heads = static_cast<std::size_t>(layer.tables().num_heads);
  const auto part = [&](std::size_t bytes) {
    return std::exchange(block.size, block.size + (bytes + 15) / 16 * 16);
  };
  for (const RowList list : {RowList::full, RowList::compressed}) {
    std::size_t bytes = 0;
    for (int index = 0; all.num_rows(list) > 0 && index < layer.num_lists(list); ++index)
      bytes += list_bytes(layer, all, list, index);
    block.lists[static_cast<int>(list)] = part(bytes);
  }
  block.epochs = part(static_cast<std::size_t>(counts.own_epochs) * layer.epochs().own_size());
  block.bases = part(counts.moved != 0 ? layer.epochs().bases_size() : 0);
  block.tail = part(layer.tail_bytes());
  for (int list = 0; list < 2; ++list) {
    const std::size_t rows = static_cast<std::size_t>(all.num_rows(static_cast<RowList>(list)));
    block.positions[list] =
        part(layer.tables().positions[list] == nullptr ? 0 : heads * rows * sizeof(std::int32_t));
    block.residuals[list] =
        part(layer.tables().residuals[list] == nullptr ? 0 : heads * rows * sizeof(std::uint32_t));
  }
  block.largest_values = part(layer.tables().largest_values == nullptr ? 0 : heads * sizeof(float));
  for (const RowList list : {RowList::full, RowList::compressed})
    block.accumulated_scores[static_cast<int>(list)] = part(
        layer.is_scored(list) ? heads * static_cast<std::size_t>(all.num_rows(list)) * sizeof(float)
                              : 0);
  block.tail_scores =
      part(layer.tables().tail_scores != nullptr
               ? heads * static_cast<std::size_t>(layer.tables().ring_rows()) * sizeof(float)
               : 0);
  block.sketches = part(layer.device_epochs().used() ? layer.device_epochs().sketch_bytes() : 0);
  block.sketch_states =
      part(layer.device_epochs().used() ? layer.device_epochs().state_bytes() : 0);
  return block;
}

/// Copies everything except epochs between a sequence and a block in device memory.
template <bool to_block>
void move_block(const LayerState& layer, int slot, const SequenceRows& all,
                const SavedCounts& counts, const SavedBlock& block, std::uint8_t* memory,
                cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const auto copy = [&](void* own, std::size_t offset, std::size_t bytes) {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(to_block ? memory + offset : own, to_block ? own : memory + offset, bytes,
                          cudaMemcpyDeviceToDevice, stream),
          "saved state");
  };
  for (const RowList list : {RowList::full, RowList::compressed}) {
    const int which = static_cast<int>(list), lists = layer.num_lists(list);
    const std::size_t most_rows = static_cast<std::size_t>(all.num_rows(list));
    if (most_rows == 0) continue;
    // Lists with equally many rows are copied at once: all lists, or one at a time if heads differ.
    const int together = all.missing.empty() ? lists : 1;
    std::size_t begin = block.lists[which];
    for (int first = 0; first < lists; first += together) {
      const int rows = static_cast<int>(all.num_rows(list, first));
      int tiles = 0;
      for (int index = first; index < first + together; ++index)
        tiles = (std::max)(
            tiles, (rows + layer.layout(list, index).rows - 1) / layer.layout(list, index).rows);
      if (tiles == 0) continue;
      move_tiles_kernel<to_block>
          <<<dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(together)), 128, 0, stream>>>(
              tables, list, slot, first, rows, memory + begin);
      check(cudaGetLastError(), "move_tiles_kernel");
      begin += list_bytes(layer, all, list, first);  // only used if together == 1
    }
    const auto copy_listed = [&](auto* own, std::size_t offset) {  // four bytes per row
      if (own == nullptr) return;
      const std::size_t width = most_rows * sizeof(*own),
                        pitch = static_cast<std::size_t>(tables.max_rows[which]) * sizeof(*own);
      own += static_cast<std::size_t>(slot * tables.num_heads) *
             static_cast<std::size_t>(tables.max_rows[which]);
      if (all.missing.empty()) {
        check(cudaMemcpy2DAsync(
                  to_block ? static_cast<void*>(memory + offset) : own, to_block ? width : pitch,
                  to_block ? static_cast<void*>(own) : memory + offset, to_block ? pitch : width,
                  width, static_cast<std::size_t>(tables.num_heads), cudaMemcpyDeviceToDevice,
                  stream),
              "saved state");
        return;
      }
      for (int head = 0; head < tables.num_heads; ++head) {
        copy(
            own + static_cast<std::size_t>(head) * static_cast<std::size_t>(tables.max_rows[which]),
            offset + static_cast<std::size_t>(head) * width,
            static_cast<std::size_t>(all.num_rows(list, head)) * sizeof(*own));
      }
    };
    copy_listed(tables.positions[which], block.positions[which]);
    copy_listed(tables.residuals[which], block.residuals[which]);
    copy_listed(tables.accumulated_scores[which], block.accumulated_scores[which]);
  }
  if (tables.largest_values != nullptr)
    copy(tables.largest_values + slot * tables.num_heads, block.largest_values,
         static_cast<std::size_t>(tables.num_heads) * sizeof(float));
  if (tables.tail_scores != nullptr) {
    const std::size_t ring =
        static_cast<std::size_t>(tables.num_heads) * static_cast<std::size_t>(tables.ring_rows());
    copy(tables.tail_scores + static_cast<std::size_t>(slot) * ring, block.tail_scores,
         ring * sizeof(float));
  }
  copy(tables.tails + static_cast<std::size_t>(slot) * layer.tail_bytes(), block.tail,
       layer.tail_bytes());
  if (counts.moved != 0)
    copy(layer.epochs().bases_of(slot), block.bases, layer.epochs().bases_size());
  if (!layer.device_epochs().used()) return;
  copy(layer.device_epochs().rows_of(slot), block.sketches, layer.device_epochs().sketch_bytes());
  copy(layer.device_epochs().states_of(slot), block.sketch_states,
       layer.device_epochs().state_bytes());
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
