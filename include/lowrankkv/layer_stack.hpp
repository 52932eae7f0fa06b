// SPDX-License-Identifier: Apache-2.0
/// @file layer_stack.hpp  LayerStack: the caches of all layers of a model, with one page pool and
/// one set of sequence ids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/page_allocator.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Owns one Cache per layer, of either backend. Call prefill, append and attend on layer(i),
/// one layer after the other. Operations on a whole sequence (create, fork, erase, truncate,
/// maintain, memory) are called here, and apply to all layers or to none, whatever throws. On a GPU
/// this holds for errors of arguments, missing pages and the engine's page source; what a layer has
/// enqueued cannot be taken back when the host runs out of memory in a later one.
///
/// On the Cuda backend, calls that enqueue work take a cudaStream_t as their last argument (`On`).
/// On the CPU, `On` is empty.
///
/// Threads: on the CPU different layers may be called from different threads at a time, with any
/// call of a cache. What they share, free pages and threads, has locks; results are those of one
/// call after the other. One thread at a time calls one layer. While a thread is in a call of the
/// stack itself, no other calls the stack or its layers. On the Cuda backend layers share a
/// workspace: one thread at a time calls any of them.
template <class Cache>
class LayerStack {
 public:
  using Pool = typename Cache::Pool;      ///< owner of the pages
  using Shared = typename Cache::Shared;  ///< also shared by layers: threads, or a workspace

  /// @param configs   one a layer, or one for all. Layers may differ in how rows are stored
  /// (full_type, full_row_bits, epoch_type, keep_residuals), in their rotary embedding and softmax
  /// scale, in check_finite and in how often epochs are published and merged; not in the other
  /// fields. num_pages and page_bytes are those of the shared pool (0: enough for all layers)
  /// @param bases     one LayerBasis per layer
  /// @param policies  one set for all layers
  /// @param shared    resources that all layers use: threads on the CPU, a workspace on the GPU;
  /// null: the stack makes them
  /// @param pool      for example of pool_size(); null: the stack makes it
  /// @throws what the Cache constructor throws; ShapeError if there is no layer, or if there are
  /// neither one configuration nor as many as layers; ShapeError or ValueError if they differ in
  /// other fields
  LayerStack(const std::vector<CacheConfig>& configs, std::vector<LayerBasis> bases,
             const typename Cache::PolicySet& policies = {}, Shared shared = {},
             std::shared_ptr<Pool> pool = nullptr)
      : pool_(std::move(pool)) {
    const PoolSize size = pool_size(configs, bases, policies);
    if (pool_ == nullptr) {
      const std::int64_t num_pages = configs.front().num_pages;
      pool_ = std::make_shared<Pool>(size.page_bytes, num_pages != 0 ? num_pages : size.num_pages);
    }
    if (!shared) {
      shared = Cache::make_shared(configs, bases, policies);
      shared_bytes_ = Cache::bytes_of(shared);
    }
    for (std::size_t layer = 0; layer < bases.size(); ++layer) {
      layers_.push_back(std::make_unique<Cache>(detail::config_of(configs, layer),
                                                std::move(bases[layer]), policies, pool_, shared));
    }
  }
  /// @brief The same with one configuration for all layers.
  LayerStack(const CacheConfig& config, std::vector<LayerBasis> bases,
             const typename Cache::PolicySet& policies = {}, Shared shared = {},
             std::shared_ptr<Pool> pool = nullptr)
      : LayerStack(std::vector{config}, std::move(bases), policies, std::move(shared),
                   std::move(pool)) {}
  /// @brief Size of the pool that the layers can ever need, for callers that make the pool
  /// themselves. Pages have page_bytes bytes, or if that is 0 a size that suits all layers.
  /// @throws as the constructor
  static PoolSize pool_size(std::span<const CacheConfig> configs, std::span<const LayerBasis> bases,
                            const typename Cache::PolicySet& policies = {}) {
    if (bases.empty()) detail::fail<ShapeError>("LayerStack: num_layers 0, at least 1 needed");
    return Cache::pool_size(configs, bases, policies);
  }
  static PoolSize pool_size(const CacheConfig& config, std::span<const LayerBasis> bases,
                            const typename Cache::PolicySet& policies = {}) {
    return pool_size(std::span(&config, 1), bases, policies);
  }

  int num_layers() const { return static_cast<int>(layers_.size()); }  ///< of the model
  /// @brief The cache of one layer.
  Cache& layer(int index) { return *layers_[static_cast<std::size_t>(index)]; }
  const Cache& layer(int index) const { return *layers_[static_cast<std::size_t>(index)]; }
  /// @brief Tokens of a sequence, in layer 0.
  std::int64_t num_tokens(SequenceId seq) const { return layers_.front()->num_tokens(seq); }

  /// @brief The slot of a sequence, the same in every layer and until it is erased. For SlotView.
  /// @throws SequenceError; StateError if layers differ: sequences were created on single layers
  int slot(SequenceId seq) const {
    const int slot = layers_.front()->slot(seq);
    for (const auto& layer : layers_) {
      if (layer->slot(seq) != slot)
        detail::fail<StateError>("sequence ", seq, ": slot ", slot, " in layer 0, ",
                                 layer->slot(seq), " in another, the same expected");
    }
    return slot;
  }

  /// @brief Starts an empty sequence in every layer.
  template <class... On>
  void create(SequenceId seq, On... on) {
    check_room(seq);
    add_to_all(seq, [&](Cache& layer) { layer.create(seq, on...); });
  }
  /// @brief Sets the number of tokens that a sequence may have in every layer. Raises the errors of
  /// CompressedKVCache::limit before any layer has changed.
  void limit(SequenceId seq, std::int64_t max_tokens) {
    for (const auto& layer : layers_) layer->check_limit(seq, max_tokens);
    for (auto& layer : layers_) layer->limit(seq, max_tokens);
  }
  /// @brief Copy-on-write copy of `source` in every layer.
  template <class... On>
  void fork(SequenceId source, SequenceId target, On... on) {
    check_room(target);
    // rollback_limit() raises unless the sequence exists and has no unfinished prompt.
    for (auto& layer : layers_) static_cast<void>(layer->rollback_limit(source));
    add_to_all(target, [&](Cache& layer) { layer.fork(source, target, on...); });
  }
  /// @brief Ends a sequence in every layer.
  template <class... On>
  void erase(SequenceId seq, On... on) {
    for (auto& layer : layers_) static_cast<void>(layer->num_tokens(seq));
    for (auto& layer : layers_) layer->erase(seq, on...);
  }
  /// @brief The shortest length that truncate() reaches exactly in every layer.
  std::int64_t rollback_limit(SequenceId seq) const {
    std::int64_t limit = 0;
    for (const auto& layer : layers_) limit = (std::max)(limit, layer->rollback_limit(seq));
    return limit;
  }
  /// @brief Removes the tokens from `length` on in every layer. The result is exact if it is exact
  /// in all layers. Raises the errors of CompressedKVCache::truncate before any layer has changed.
  template <class... On>
  TruncateResult truncate(SequenceId seq, std::int64_t length, On... on) {
    for (const auto& layer : layers_) layer->check_truncate(seq, length);
    TruncateResult result = TruncateResult::exact;
    for (auto& layer : layers_) {
      if (layer->truncate(seq, length, on...) == TruncateResult::inexact)
        result = TruncateResult::inexact;
    }
    return result;
  }
  /// @brief Removes the tokens [first, first + count) in every layer, or in none. Errors as in
  /// CompressedKVCache::remove.
  template <class... On>
  void remove(SequenceId seq, std::int64_t first, std::int64_t count, On... on) {
    std::int64_t pages = 0;
    for (const auto& layer : layers_) pages += layer->pages_to_remove(seq, first, count);
    const HeldPages held(pool_->allocator(), pages);
    all_or_none([&](auto& layer) { return Calls::try_remove(layer, seq, first, count, on...); });
  }
  /// @brief Moves tokens of a sequence to other positions in every layer, or in none. Errors and
  /// limits as in the backend's CompressedKVCache::shift_positions; the limits of the two backends
  /// differ.
  template <class... On>
  void shift_positions(SequenceId seq, std::int64_t first, std::int64_t delta, On... on) {
    for (auto& layer : layers_) layer->check_shift_positions(seq, first, delta);
    all_or_none([&](auto& layer) { return Calls::try_shift(layer, seq, first, delta, on...); });
  }
  /// @brief Divides positions of a sequence's tokens in every layer, or in none. Errors and limits
  /// as in the backend's CompressedKVCache::divide_positions; the limits of the two backends
  /// differ.
  template <class... On>
  void divide_positions(SequenceId seq, std::int64_t first, std::int64_t count,
                        std::int64_t divisor, On... on) {
    for (auto& layer : layers_) layer->check_divide_positions(seq, first, count, divisor);
    all_or_none(
        [&](auto& layer) { return Calls::try_divide(layer, seq, first, count, divisor, on...); });
  }
  /// @brief Rotary position of a token, or of the next one.
  std::int64_t position(SequenceId seq, std::int64_t token) const {
    return layers_.front()->position(seq, token);
  }

  /// @brief maintain() in every layer. Checks the pool for all layers before anything is flushed.
  template <class... On>
  void maintain(std::span<const SequenceId> seqs, On... on) {
    std::int64_t pages = 0;
    for (const auto& layer : layers_) pages += layer->pages_to_maintain(seqs);
    const HeldPages held(pool_->allocator(), pages);
    all_or_none([&](auto& layer) { return Calls::try_maintain(layer, seqs, on...); });
  }
  template <class... On>
  void maintain(SequenceId seq, On... on) {
    maintain(std::span<const SequenceId>(&seq, 1), on...);
  }
  /// @brief Tells all layers that captured append() calls of m tokens per sequence are about to be
  /// replayed. Raises the errors of CompressedKVCache::advance before any layer has changed.
  void advance(std::span<const SequenceId> seqs, int m) requires requires(Cache& layer) {
    layer.advance(seqs, m);
  }
  {
    for (const auto& layer : layers_) layer->check_advance(seqs, m);
    for (auto& layer : layers_) layer->advance(seqs, m);
  }

  /// @brief Bytes that save() writes for a sequence.
  std::size_t save_bytes(SequenceId seq) const {
    std::size_t bytes = 2 * sizeof(std::uint64_t);
    for (const auto& layer : layers_) bytes += sizeof(std::uint64_t) + layer->save_bytes(seq);
    return bytes;
  }
  /// @brief Writes a sequence of all layers to the caller's buffer. @throws CapacityError if it is
  /// smaller than save_bytes()
  template <class... On>
  std::size_t save(SequenceId seq, std::span<std::byte> buffer, On... on) const {
    if (buffer.size() < save_bytes(seq))
      detail::fail<CapacityError>("save: buffer of ", buffer.size(), " bytes, ", save_bytes(seq),
                                  " needed");
    ByteWriter out(buffer);
    out.value(kSavedStack);
    out.value(static_cast<std::uint64_t>(layers_.size()));
    for (const auto& layer : layers_) {
      const std::size_t bytes = layer->save_bytes(seq);
      out.value(static_cast<std::uint64_t>(bytes));
      layer->save(seq, {out.reserve(bytes), bytes}, on...);
    }
    return out.size();
  }
  /// @brief Starts `seq` in every layer from bytes of save(), or in none. Errors as in
  /// CompressedKVCache::load.
  template <class... On>
  void load(SequenceId seq, std::span<const std::byte> saved, On... on) {
    check_room(seq);
    ByteReader in(saved);
    const auto magic = in.value<std::uint64_t>();
    if (magic != kSavedStack) {
      const auto shown = [](const std::uint64_t& bytes) {
        return detail::printable({reinterpret_cast<const char*>(&bytes), sizeof bytes});
      };
      detail::fail<FormatError>("saved state: begins with '", shown(magic), "', expected '",
                                shown(kSavedStack), "'");
    }
    const auto count = in.value<std::uint64_t>();
    if (count != layers_.size())
      detail::fail<ShapeError>("num_layers: stack ", layers_.size(), ", saved ", count);
    std::vector<std::span<const std::byte>> parts;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer)
      parts.push_back(in.bytes(static_cast<std::size_t>(in.value<std::uint64_t>())));
    if (in.left() != 0)
      detail::fail<FormatError>("saved state: ", in.left(), " bytes too many, 0 expected");
    std::size_t index = 0;
    add_to_all(
        seq, [&](Cache& layer) { layer.load(seq, parts[index++], on...); },
        [&] {
          for (std::size_t other = 0; other < layers_.size(); ++other) {
            const Cache &first = *layers_.front(), &layer = *layers_[other];
            if (layer.num_tokens(seq) != first.num_tokens(seq))
              detail::fail<FormatError>("saved state: layer 0 has ", first.num_tokens(seq),
                                        " tokens, layer ", other, " has ", layer.num_tokens(seq));
            if (layer.position_shifts(seq) != first.position_shifts(seq))
              detail::fail<FormatError>("saved state: layer ", other,
                                        " moved its tokens otherwise than layer 0");
          }
        });
  }

  /// @brief Bytes of one sequence over all layers.
  MemoryUsage memory(SequenceId seq) const {
    MemoryUsage usage;
    for (const auto& layer : layers_) usage += layer->memory(seq);
    return usage;
  }
  /// @brief Bytes of all sequences over all layers. Free pages of the shared pool and the shared
  /// workspace count once.
  MemoryUsage memory() const {
    MemoryUsage usage;
    for (const auto& layer : layers_) {
      usage += layer->memory();
      usage.reserved_bytes -= pool_->idle_bytes();
    }
    usage.reserved_bytes += pool_->idle_bytes() + shared_bytes_;
    return usage;
  }
  const Pool& pool() const { return *pool_; }  ///< pages of all layers

 private:
  using Calls = typename Cache::Calls;
  static constexpr std::uint64_t kSavedStack = 0x314b5453564b524cULL;  // "LRKVSTK1"
  /// Calls change(layer's state) for all layers. Keeps the changes if none of them throws.
  template <class Change>
  void all_or_none(Change&& change) {
    std::vector<decltype(change(*layers_.front()->layer_))> changes;
    changes.reserve(layers_.size());
    for (auto& layer : layers_) changes.push_back(change(*layer->layer_));
    for (auto& done : changes) done.commit();
  }
  /// Calls add(layer), which adds sequence `seq`, for all layers, and then check(). If something
  /// throws, the sequence is erased again.
  template <class Add, class Check>
  void add_to_all(SequenceId seq, Add&& add, Check&& check) {
    struct Undo {
      std::vector<std::unique_ptr<Cache>>& layers;
      SequenceId seq;
      std::size_t added = 0;
      ~Undo() {
        for (std::size_t layer = 0; layer < added; ++layer) layers[layer]->erase(seq);
      }
    } undo{layers_, seq};
    for (; undo.added < layers_.size(); ++undo.added) add(*layers_[undo.added]);
    check();
    undo.added = 0;
  }
  template <class Add>
  void add_to_all(SequenceId seq, Add&& add) {
    add_to_all(seq, add, [] {});
  }
  void check_room(SequenceId seq) const {
    for (const auto& layer : layers_) {
      if (layer->contains(seq)) detail::fail<SequenceError>("sequence ", seq, " exists already");
      if (layer->num_free_sequences() == 0) {
        detail::fail<CapacityError>("max_sequences: ", layer->config().max_sequences,
                                    " in use, no room for sequence ", seq);
      }
    }
  }

  std::shared_ptr<Pool> pool_;
  std::size_t shared_bytes_ = 0;  ///< of shared resources that the stack made itself
  std::vector<std::unique_ptr<Cache>> layers_;
};

LOWRANKKV_NAMESPACE_END
