// SPDX-License-Identifier: Apache-2.0
/// @file cpu/operation.hpp  Operation: changes of sequences of a layer, all of them or none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cpu/page_undo.hpp"
#include "lowrankkv/cpu/prompt_chunk.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief A sequence as it was before an operation, without its pages (PageUndo has them).
template <class Sequence>
struct SlotBackup {
  int slot = 0;
  SequenceLengths lengths;
  std::vector<HeadRows> rows;               ///< per list
  std::vector<Segment> segments;            ///< per KV head, those in use
  typename Sequence::State state;           ///< everything but the prompt chunk
  std::vector<std::byte> tail;              ///< all rows
  std::int64_t chunk_rows = 0;              ///< of the prompt chunk
  std::vector<float> chunk_queries;         ///< of the prompt chunk
  std::optional<PromptChunk> stored_chunk;  ///< the chunk, if the operation has stored its rows
};

/// @brief What it takes to undo an operation on a layer. Empty between operations.
template <class Sequence>
struct LayerBackup {
  std::vector<SlotBackup<Sequence>> slots;
  std::vector<int> epochs;  ///< references of each epoch
  CacheStatistics statistics;
};

/// @brief An operation that changes sequences of a layer. Unless commit() is called, the destructor
/// restores the layer: whatever throws in between, the layer is as it was.
///
/// Cost: pages that are written are copied once; the tail, the segments and the tables of positions
/// of each sequence too.
template <class Layer>
class Operation {
 public:
  /// @param pages  pages that the operation may take; see PageUndo::begin
  Operation(Layer& layer, std::int64_t pages) : layer_(&layer) {
    if (pages > 0) layer.changes.begin(pages);
  }
  Operation(Operation&& other) noexcept : layer_(std::exchange(other.layer_, nullptr)) {}
  Operation& operator=(Operation&&) = delete;
  ~Operation() {
    if (layer_ != nullptr) undo();
  }

  /// @brief Call before a sequence is changed.
  void will_change(int slot) {
    const auto& table = layer_->table;
    const auto& sequence = layer_->sequence(slot);
    SlotBackup<typename Layer::Sequence> saved;
    saved.slot = slot;
    saved.lengths = table.lengths(slot);
    for (int list = 0; list < table.num_lists(); ++list)
      saved.rows.push_back(table.rows(slot, list));
    for (int head = 0; head < layer_->num_kv_heads(); ++head) {
      const auto segments = std::as_const(*layer_).used_segments(slot, head);
      saved.segments.insert(saved.segments.end(), segments.begin(), segments.end());
    }
    saved.state = sequence;
    saved.tail = layer_->tail.save(slot);
    saved.chunk_rows = sequence.chunk.size();
    saved.chunk_queries = sequence.chunk.window_queries();
    auto& backup = layer_->backup;
    backup.slots.reserve(backup.slots.size() + 1);
    if (backup.slots.empty()) {
      backup.epochs = layer_->epochs.hold();
      backup.statistics = layer_->statistics;
    }
    backup.slots.push_back(std::move(saved));  // what is held is released if there is a backup
  }

  /// @brief Keeps the changes.
  void commit() noexcept {
    Layer& layer = *std::exchange(layer_, nullptr);
    layer.changes.commit();
    if (layer.backup.slots.empty()) return;
    layer.epochs.release_held(layer.backup.epochs);
    layer.backup.slots.clear();
  }

 private:
  void undo() noexcept {
    Layer& layer = *layer_;
    layer.changes.undo();
    if (layer.backup.slots.empty()) return;
    layer.epochs.restore_held(layer.backup.epochs);
    layer.statistics = layer.backup.statistics;
    for (auto& saved : layer.backup.slots) restore(saved);
    layer.backup.slots.clear();
  }
  void restore(SlotBackup<typename Layer::Sequence>& saved) noexcept {
    Layer& layer = *layer_;
    const int slot = saved.slot;
    layer.table.lengths(slot) = saved.lengths;
    for (int list = 0; list < layer.table.num_lists(); ++list)
      layer.table.rows(slot, list) = saved.rows[static_cast<std::size_t>(list)];
    auto segment = saved.segments.begin();
    for (int head = 0; head < layer.num_kv_heads(); ++head) {
      for (Segment& target : layer.used_segments(slot, head)) target = *segment++;
    }
    auto& sequence = layer.sequence(slot);
    static_cast<typename Layer::Sequence::State&>(sequence) = std::move(saved.state);
    layer.tail.restore(slot, saved.tail);
    if (saved.stored_chunk) sequence.chunk = std::move(*saved.stored_chunk);
    sequence.chunk.rewind(saved.chunk_rows, std::move(saved.chunk_queries));
  }

  Layer* layer_;
};

/// @brief Empties the prompt chunk of a slot, whose rows have been stored.
template <class State>
void clear_chunk(State& state, int slot) {
  PromptChunk& chunk = state.sequence(slot).chunk;
  PromptChunk stored = chunk.empty_like();
  std::swap(stored, chunk);
  for (auto& saved : state.backup.slots) {
    if (saved.slot != slot) continue;
    if (saved.chunk_rows > 0 && !saved.stored_chunk) saved.stored_chunk = std::move(stored);
    return;
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
