// SPDX-License-Identifier: Apache-2.0
/// @file layer_stack.hpp  LayerStack: the caches of all layers of a model, with one page pool and one set of sequence ids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/compressed_kv_cache.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Owns one Cache per layer. Prefill, append and attend go to layer(i), one layer after the other; what concerns a
/// sequence as a whole (create, fork, erase, truncate, maintain, memory) is done here for all layers or for none.
template <class Cache>
class LayerStack {
 public:
  using Pool = typename Cache::Pool;
  using Executor = typename Cache::Executor;

  /// @param config    of every layer; num_pages and page_bytes are those of the shared pool (0: enough for all layers)
  /// @param bases     one LayerBasis per layer
  /// @param policies  one set for all layers
  /// @throws what the Cache constructor throws; ShapeError if there is no layer
  LayerStack(const CacheConfig& config, std::vector<LayerBasis> bases, const typename Cache::PolicySet& policies = {},
             std::shared_ptr<Executor> threads = nullptr) {
    if (bases.empty()) detail::fail<ShapeError>("LayerStack: num_layers 0, at least 1 needed");
    for (const LayerBasis& basis : bases) Cache::check(config, basis, policies);
    std::int64_t pages = 0;
    for (const LayerBasis& basis : bases) pages += Cache::num_pages(config, basis, policies);
    pool_ = std::make_shared<Pool>(Cache::page_bytes(config, bases.front(), policies), config.num_pages != 0 ? config.num_pages : pages);
    if (!threads) threads = std::make_shared<Executor>(config.num_threads);
    for (LayerBasis& basis : bases) layers_.push_back(std::make_unique<Cache>(config, std::move(basis), policies, pool_, threads));
  }

  int num_layers() const { return static_cast<int>(layers_.size()); }
  Cache& layer(int index) { return *layers_[static_cast<std::size_t>(index)]; }
  const Cache& layer(int index) const { return *layers_[static_cast<std::size_t>(index)]; }
  std::int64_t num_tokens(SequenceId seq) const { return layers_.front()->num_tokens(seq); }

  /// @brief Starts an empty sequence in every layer.
  void create(SequenceId seq) {
    check_room(seq);
    for (auto& layer : layers_) layer->create(seq);
  }
  /// @brief Copy-on-write copy of `source` in every layer.
  void fork(SequenceId source, SequenceId target) {
    check_room(target);
    for (auto& layer : layers_) static_cast<void>(layer->rollback_limit(source));  // raises unless known and idle
    for (auto& layer : layers_) layer->fork(source, target);
  }
  /// @brief Ends a sequence in every layer.
  void erase(SequenceId seq) {
    for (auto& layer : layers_) static_cast<void>(layer->num_tokens(seq));
    for (auto& layer : layers_) layer->erase(seq);
  }
  /// @brief The shortest length that truncate() reaches exactly in every layer.
  std::int64_t rollback_limit(SequenceId seq) const {
    std::int64_t limit = 0;
    for (const auto& layer : layers_) limit = (std::max)(limit, layer->rollback_limit(seq));
    return limit;
  }
  /// @brief Forgets the tokens from `length` on in every layer; exact if it is exact in all of them.
  TruncateResult truncate(SequenceId seq, std::int64_t length) {
    static_cast<void>(rollback_limit(seq));
    for (auto& layer : layers_) {
      if (length < 0 || length > layer->num_tokens(seq)) {
        detail::fail<ShapeError>("truncate: length ", length, ", sequence has ", layer->num_tokens(seq), " tokens");
      }
    }
    TruncateResult result = TruncateResult::exact;
    for (auto& layer : layers_) {
      if (layer->truncate(seq, length) == TruncateResult::inexact) result = TruncateResult::inexact;
    }
    return result;
  }
  /// @brief Moves tokens of a sequence to other positions in every layer, or in none. Errors as of CompressedKVCache::shift_positions.
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta) {
    for (auto& layer : layers_) layer->check_shift_positions(seq, first, delta);
    for (auto& layer : layers_) layer->shift_positions(seq, first, delta);
  }
  /// @brief Rotary position of a token, or of the next one.
  std::int64_t position(SequenceId seq, std::int64_t token) const { return layers_.front()->position(seq, token); }

  /// @brief maintain() in every layer; the pool is checked for all of them before anything is flushed.
  void maintain(std::span<const SequenceId> seqs) {
    std::int64_t pages = 0;
    for (const auto& layer : layers_) pages += layer->pages_to_maintain(seqs);
    pool_->allocator().require(pages);
    for (auto& layer : layers_) layer->maintain(seqs);
  }
  void maintain(SequenceId seq) { maintain(std::span(&seq, 1)); }

  /// @brief Bytes that save() writes for a sequence.
  std::size_t save_bytes(SequenceId seq) const {
    std::size_t bytes = 2 * sizeof(std::uint64_t);
    for (const auto& layer : layers_) bytes += sizeof(std::uint64_t) + layer->save_bytes(seq);
    return bytes;
  }
  /// @brief Writes a sequence of all layers to the caller's buffer. @throws CapacityError if it is smaller than save_bytes()
  std::size_t save(SequenceId seq, std::span<std::byte> buffer) const {
    if (buffer.size() < save_bytes(seq)) detail::fail<CapacityError>("save: buffer of ", buffer.size(), " bytes, ", save_bytes(seq), " needed");
    ByteWriter out(buffer);
    out.value(kSavedStack);
    out.value(static_cast<std::uint64_t>(layers_.size()));
    for (const auto& layer : layers_) {
      const std::size_t bytes = layer->save_bytes(seq);
      out.value(static_cast<std::uint64_t>(bytes));
      layer->save(seq, {out.reserve(bytes), bytes});
    }
    return out.size();
  }
  /// @brief Starts `seq` in every layer from what save() wrote, or in none. Errors as of CompressedKVCache::load.
  void load(SequenceId seq, std::span<const std::byte> saved) {
    check_room(seq);
    ByteReader in(saved);
    const auto magic = in.value<std::uint64_t>();
    if (magic != kSavedStack) detail::fail<FormatError>("saved state: begins with ", magic, ", expected ", kSavedStack);
    const auto count = in.value<std::uint64_t>();
    if (count != layers_.size()) detail::fail<ShapeError>("num_layers: stack ", layers_.size(), ", saved ", count);
    // Cut into layers first, then erase what was loaded if a later layer fails.
    std::vector<std::span<const std::byte>> parts;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) parts.push_back(in.bytes(static_cast<std::size_t>(in.value<std::uint64_t>())));
    if (in.left() != 0) detail::fail<FormatError>("saved state: ", in.left(), " bytes too many, 0 expected");
    struct Undo {
      std::vector<std::unique_ptr<Cache>>& layers;
      SequenceId seq;
      std::size_t loaded = 0;
      ~Undo() {
        for (std::size_t layer = 0; layer < loaded; ++layer) layers[layer]->erase(seq);
      }
    } undo{layers_, seq};
    for (; undo.loaded < layers_.size(); ++undo.loaded) {
      Cache& layer = *layers_[undo.loaded];
      layer.load(seq, parts[undo.loaded]);
      const std::int64_t tokens = layer.num_tokens(seq);
      const bool moved_alike = layer.position_shifts(seq) == layers_.front()->position_shifts(seq);
      if (tokens == layers_.front()->num_tokens(seq) && moved_alike) continue;
      layer.erase(seq);
      if (!moved_alike) detail::fail<FormatError>("saved state: layer ", undo.loaded, " moved its tokens otherwise than layer 0");
      detail::fail<FormatError>("saved state: layer 0 has ", layers_.front()->num_tokens(seq), " tokens, layer ", undo.loaded, " has ", tokens);
    }
    undo.loaded = 0;
  }

  /// @brief Bytes of one sequence over all layers.
  MemoryUsage memory(SequenceId seq) const {
    MemoryUsage usage;
    for (const auto& layer : layers_) usage += layer->memory(seq);
    return usage;
  }
  /// @brief Bytes of all sequences over all layers; the shared pool's free pages are counted once.
  MemoryUsage memory() const {
    MemoryUsage usage;
    const std::size_t free_bytes = static_cast<std::size_t>(pool_->allocator().num_free()) * pool_->page_bytes();
    for (const auto& layer : layers_) {
      usage += layer->memory();
      usage.reserved_bytes -= free_bytes;
    }
    usage.reserved_bytes += free_bytes;
    return usage;
  }
  const Pool& pool() const { return *pool_; }

 private:
  static constexpr std::uint64_t kSavedStack = 0x314b5453564b524cULL;  // "LRKVSTK1"
  void check_room(SequenceId seq) const {
    for (const auto& layer : layers_) {
      if (layer->contains(seq)) detail::fail<SequenceError>("sequence ", seq, " exists already");
      if (layer->num_free_sequences() == 0) {
        detail::fail<CapacityError>("max_sequences: ", layer->config().max_sequences, " in use, no room for sequence ", seq);
      }
    }
  }

  std::shared_ptr<Pool> pool_;
  std::vector<std::unique_ptr<Cache>> layers_;
};

LOWRANKKV_NAMESPACE_END
