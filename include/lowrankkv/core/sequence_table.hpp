// SPDX-License-Identifier: Apache-2.0
/// @file core/sequence_table.hpp  Maps the engine's sequence ids to the slots of a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Ids in use, free slots, and the maximum length of each sequence.
class SequenceTable {
 public:
  explicit SequenceTable(const CacheConfig& config)
      : max_sequences_(config.max_sequences),
        max_tokens_(config.max_tokens),
        limits_(static_cast<std::size_t>(config.max_sequences)),
        unusable_(static_cast<std::size_t>(config.max_sequences)) {
    for (int slot = max_sequences_; slot-- > 0;) free_.push_back(slot);
  }
  int add(SequenceId seq) {
    if (contains(seq)) fail<SequenceError>("sequence ", seq, " exists already");
    if (free_.empty())
      fail<CapacityError>("max_sequences: ", max_sequences_, " in use, no room for sequence ", seq);
    const int slot = free_.back();
    slots_.emplace(seq, slot);
    free_.pop_back();
    limits_[static_cast<std::size_t>(slot)] = max_tokens_;
    return slot;
  }
  /// Adds a copy of the sequence in slot `source`, with the same maximum length.
  int add_copy(int source, SequenceId seq) {
    const int slot = add(seq);
    limits_[static_cast<std::size_t>(slot)] = max_tokens(source);
    return slot;
  }
  /// Maximum length, in tokens, of the sequence in a slot.
  std::int64_t max_tokens(int slot) const { return limits_[static_cast<std::size_t>(slot)]; }
  /// Sets the maximum length. @param tokens  current length
  void limit(int slot, std::int64_t max_tokens, std::int64_t tokens) {
    check_limit(max_tokens, tokens);
    limits_[static_cast<std::size_t>(slot)] = max_tokens;
  }
  void check_limit(std::int64_t max_tokens, std::int64_t tokens) const {
    if (max_tokens > max_tokens_)
      fail<CapacityError>("limit: max_tokens ", max_tokens, ", those of the cache are ",
                          max_tokens_);
    if (max_tokens < tokens)
      fail<CapacityError>("limit: max_tokens ", max_tokens, ", sequence has ", tokens);
  }
  void remove(SequenceId seq) {
    const int slot = find_any(seq);
    free_.push_back(slot);  // within its capacity
    slots_.erase(seq);
    unusable_[static_cast<std::size_t>(slot)] = false;
  }
  bool contains(SequenceId seq) const { return slots_.find(seq) != slots_.end(); }
  /// The slot of a sequence. @throws StateError if set_unusable() was called for it
  int find(SequenceId seq) const {
    const int slot = find_any(seq);
    if (unusable_[static_cast<std::size_t>(slot)])
      fail<StateError>("sequence ", seq,
                       " is unusable: a call on it failed after it had changed it; erase it");
    return slot;
  }
  /// Lets find() raise from now on: a call failed after it had begun to change the sequence.
  void set_unusable(SequenceId seq) noexcept {
    const auto entry = slots_.find(seq);
    if (entry != slots_.end()) unusable_[static_cast<std::size_t>(entry->second)] = true;
  }
  /// The slot of a sequence, usable or not.
  int find_any(SequenceId seq) const {
    const auto entry = slots_.find(seq);
    if (entry == slots_.end())
      fail<SequenceError>("unknown sequence ", seq, "; ", slots_.size(), " sequences exist");
    return entry->second;
  }
  int num_free() const { return static_cast<int>(free_.size()); }
  template <class Function>
  void for_each(Function&& function) const {
    for (const auto& [seq, slot] : slots_) function(seq, slot);
  }

 private:
  int max_sequences_;
  std::int64_t max_tokens_;
  std::vector<std::int64_t> limits_;  ///< by slot
  std::vector<bool> unusable_;        ///< by slot
  std::vector<int> free_;
  std::unordered_map<SequenceId, int> slots_;
};

/// A sequence that a call adds. Unless keep() is called, the destructor removes it again.
class AddedSequence {
 public:
  AddedSequence(SequenceTable& table, SequenceId seq)
      : table_(table), seq_(seq), slot_(table.add(seq)) {}
  /// A copy of the sequence in slot `source`.
  AddedSequence(SequenceTable& table, int source, SequenceId seq)
      : table_(table), seq_(seq), slot_(table.add_copy(source, seq)) {}
  AddedSequence(const AddedSequence&) = delete;
  AddedSequence& operator=(const AddedSequence&) = delete;
  ~AddedSequence() {
    if (!kept_) table_.remove(seq_);
  }
  int slot() const { return slot_; }
  void keep() { kept_ = true; }

 private:
  SequenceTable& table_;
  SequenceId seq_;
  int slot_;
  bool kept_ = false;
};

/// Sequences that a call changes in ways that cannot be undone. Unless done() is called, the
/// destructor makes them unusable.
class ChangedSequences {
 public:
  ChangedSequences(SequenceTable& table, std::span<const SequenceId> seqs)
      : table_(table), seqs_(seqs) {}
  ChangedSequences(const ChangedSequences&) = delete;
  ChangedSequences& operator=(const ChangedSequences&) = delete;
  ~ChangedSequences() {
    for (const SequenceId seq : seqs_) table_.set_unusable(seq);
  }
  void done() { seqs_ = {}; }

 private:
  SequenceTable& table_;
  std::span<const SequenceId> seqs_;
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
