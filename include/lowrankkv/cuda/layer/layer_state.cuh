// SPDX-License-Identifier: Apache-2.0
/// @file cuda/layer/layer_state.cuh  Everything the Cuda backend stores for one attention layer:
/// tables, pages, tails, maps, workspace.
///
/// The host knows every length and decides which pages are used. It computes lengths from token
/// counts. It reads them from the device where only values determine them: after tokens are
/// removed, and where errors choose a number of rows that counts do not give. Kernels read their
/// own copies of the lengths, which the launches that move rows update in stream order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/kernel_set.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cuda/epochs/device_epochs.cuh"
#include "lowrankkv/cuda/epochs/epoch_store.cuh"
#include "lowrankkv/cuda/layer/host_sequence.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/runtime/page_pool.cuh"
#include "lowrankkv/cuda/state/append_rows.cuh"
#include "lowrankkv/cuda/state/residual_store.cuh"
#include "lowrankkv/cuda/state/workspace.cuh"
#include "lowrankkv/cuda/tiles/page_size.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The stored state of one layer: owns its memory and counts its rows. The steps of the
/// algorithm are free functions and kernels over it.
class LayerState {
 public:
  using Kernels = KernelSet;  ///< the kernels that functions of this state launch
  /// @param most  rows that the lists of a sequence of config.max_tokens tokens may have
  /// @param listed  the lists whose rows have explicit positions and scores
  /// @param shared_pool  pages shared with other layers; null: the layer makes a pool
  /// @param workspace  memory that the caller lends; null: the layer allocates it
  LayerState(const CacheConfig& config, LayerTiles tiles, const LayerBasis& basis,
             const MostRows& most, EpochLimits limits, ListedRows listed,
             std::shared_ptr<PagePool> shared_pool, const LentMemory& workspace = {})
      : config_(config), tiles_(std::move(tiles)), pool_(std::move(shared_pool)) {
    const int heads = config.shape.num_kv_heads;
    const std::size_t slots = static_cast<std::size_t>(config.max_sequences),
                      rows = slots * static_cast<std::size_t>(heads);
    tables_.num_lists = (std::max)(heads, num_lists(RowList::compressed));
    tables_.joint_heads = tiles_.joint_heads;
    const std::size_t tables = slots * static_cast<std::size_t>(tables_.num_lists);
    max_rows_[0] = most.full + most.spare_full;
    max_rows_[1] = most.compressed;
    if (pool_ == nullptr)
      pool_ = std::make_shared<PagePool>(
          tiles_.page_bytes,
          config.num_pages != 0 ? config.num_pages : pages_needed(config, tiles_, most));
    for (int list = 0; list < 2; ++list) {
      std::int64_t pages = 0;
      for (int index = 0; index < num_lists(static_cast<RowList>(list)); ++index)
        pages = (std::max)(pages, pages_for(static_cast<RowList>(list), index, max_rows_[list]));
      constexpr std::int64_t limit = (std::int64_t{1} << 31) - 1;
      if (pages > limit / static_cast<std::int64_t>(tables))
        ::lowrankkv::detail::fail<CapacityError>("page tables: ", tables, " lists of ", pages,
                                                 " pages, at most ", limit, " in all");
      tables_.max_pages[list] = static_cast<std::int32_t>(pages);
      pages_[list] = DeviceArray<std::int32_t>(tables * static_cast<std::size_t>(pages));
      tables_.pages[list] = pages_[list].data();
    }
    lengths_ = DeviceArray<DeviceLengths>(slots);
    rows_ = DeviceArray<HeadRows>(rows);
    faults_ = DeviceArray<std::uint32_t>(1);
    compressed_ = DeviceArray<HeadTiles>(tiles_.compressed);
    tables_.lengths = lengths_.data();
    tables_.rows = rows_.data();
    tables_.faults = faults_.data();
    tables_.pool = pool_->memory();
    tables_.page_bytes = pool_->page_bytes();
    tables_.tail_tiles = (config.tail_capacity + tiles_.full.rows - 1) / tiles_.full.rows;
    tables_.num_heads = heads;
    tables_.head_dim = config.shape.head_dim;
    tables_.full_type = config.full_type;
    tables_.full = tiles_.full;
    tables_.listed = tiles_.listed;
    tables_.compressed = compressed_.data();
    if (config.rope.keys == Rope::pre)
      rotary_ = RotaryTables(config.rope, config.shape.head_dim, config.max_sequences);
    tables_.rotary = rotary_.get();
    tails_ = DeviceArray<std::uint8_t>(rows * static_cast<std::size_t>(tables_.tail_tiles) *
                                       static_cast<std::size_t>(tiles_.full.bytes));
    tables_.tails = tails_.data();
    if (!tiles_.compressed.empty())
      maps_ = LayerMaps(basis, tiles_.parts, tiles_.steps, tiles_.compressed, config.shape.head_dim,
                        config.epoch_type, tables_.rotary, tiles_.coded_type, limits.own > 0);
    epochs_ = EpochStore(config, basis, maps_, tiles_, limits);
    tables_.maps = epochs_.maps();
    tables_.max_segments = epochs_.max_segments();
    if (epochs_.adapts())
      segments_ = DeviceArray<DeviceSegment>(rows * static_cast<std::size_t>(tables_.max_segments));
    tables_.segments = segments_.data();
    if (limits.device_epochs && epochs_.adapts()) {
      int most_sketched = 0;
      std::vector<float> thresholds;
      for (const HeadBasis& head : basis.heads) {
        for (const int rank : {head.key_rank, head.value_rank})
          most_sketched = (std::max)(most_sketched, detail::sketch_rows(limits.sketch_share, rank));
        thresholds.push_back(head.key_threshold);
        thresholds.push_back(head.value_threshold);
      }
      device_epochs_ =
          DeviceEpochStore(config.max_sequences, heads, config.shape.head_dim, most_sketched,
                           config.flush_interval, thresholds,
                           {limits.own, epochs_.slots_per_sequence(),
                            limits.rotates_calibrated_rows, limits.sketch_share > 0.0F});
    }
    if (listed.errors) {
      metrics_ = LayerMetrics(basis, config.shape.head_dim);
      tables_.metrics = metrics_.heads();
    }
    for (int list = 0; list < 2; ++list) {
      if (!(list == 0 ? listed.full : listed.compressed)) continue;
      // Not null even for a list that stays empty.
      positions_[list] = DeviceArray<std::int32_t>(
          (std::max)(std::size_t{1}, rows * static_cast<std::size_t>(max_rows_[list])));
      tables_.positions[list] = positions_[list].data();
      tables_.max_rows[list] = static_cast<std::int32_t>(max_rows_[list]);
      if (!listed.has_scores(static_cast<RowList>(list))) continue;
      accumulated_scores_[list] = DeviceArray<float>(positions_[list].size());
      tables_.accumulated_scores[list] = accumulated_scores_[list].data();
    }
    residuals_ = ResidualStore(config, max_rows_, tables_);
    if (listed.accumulated_scores) {
      tables_.scored = listed.scored();
      tail_scores_ = DeviceArray<float>(
          (std::max)(std::size_t{1}, rows * static_cast<std::size_t>(tables_.ring_rows())));
      tables_.tail_scores = tail_scores_.data();
    }
    sequences_.resize(slots);
    for (HostSequence& sequence : sequences_) {
      for (auto& pages : sequence.pages) pages.resize(static_cast<std::size_t>(tables_.num_lists));
      sequence.joint_heads = tables_.joint_heads;
    }
    workspace_ = Workspace(config, tiles_, tables_.max_segments, max_rows_, workspace);
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
          "cudaDeviceGetAttribute");
    cudaFuncAttributes compiled{};
    check(cudaFuncGetAttributes(&compiled, append_kernel<DeviceRows>), "cudaFuncGetAttributes");
    // Kernels compiled for older devices do not wait for the previous kernel: no overlap then.
    overlaps_ = major >= 9 && compiled.ptxVersion >= 90;
    check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&shared_bytes_, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_),
          "cudaDeviceGetAttribute");
  }

  LayerState(const LayerState&) = delete;
  LayerState& operator=(const LayerState&) = delete;
  /// Releases all pages: a shared pool outlives the layer.
  ~LayerState() {
    for (const HostSequence& sequence : sequences_) {
      for (const auto& list : sequence.pages) {
        for (const auto& pages : list) {
          for (const std::int32_t page : pages) pool_->allocator().release(page);
        }
      }
    }
  }

  const CacheConfig& config() const { return config_; }
  /// @brief The device that was current when the layer was made: its memory and streams.
  int device() const { return device_; }
  const LayerTiles& tiles() const { return tiles_; }
  const LayerEdit& tables() const { return tables_; }
  /// @brief Checksum of the calibrated maps as stored.
  std::uint64_t maps_checksum() const { return maps_.checksum(); }
  /// @brief Bytes of device memory that all sequences share: maps, metrics, rotary tables.
  std::size_t shared_map_bytes() const {
    return maps_.bytes() + metrics_.bytes() + epochs_.metric_store().bytes() + rotary_.bytes();
  }
  const RotaryTables& rotary() const { return rotary_; }
  EpochStore& epochs() { return epochs_; }
  const EpochStore& epochs() const { return epochs_; }
  const DeviceEpochStore& device_epochs() const { return device_epochs_; }
  /// @brief Whether rows that enter sketches are buffered in scratch memory because shared memory
  /// is too small.
  bool sketches_apart() const {
    return device_epochs_.buffer_bytes() + kSketchShared > static_cast<std::size_t>(shared_bytes_);
  }
  PagePool& pool() const { return *pool_; }
  HostSequence& sequence(int slot) { return sequences_[static_cast<std::size_t>(slot)]; }
  const HostSequence& sequence(int slot) const {
    return sequences_[static_cast<std::size_t>(slot)];
  }
  /// @brief Number of lists of this kind that a sequence has.
  int num_lists(RowList list) const {
    return list == RowList::full ? config_.shape.num_kv_heads
                                 : static_cast<int>(tiles_.compressed.size());
  }
  const HeadTiles& layout(RowList list, int head) const {
    return list == RowList::full ? tiles_.listed
                                 : tiles_.compressed[static_cast<std::size_t>(head)];
  }
  std::int64_t pages_for(RowList list, int head, std::int64_t rows) const {
    // A list that does not exist has no layout.
    return rows == 0 ? 0 : layout(list, head).pages_for(rows);
  }
  std::int64_t max_rows(RowList list) const { return max_rows_[static_cast<int>(list)]; }

  /// @brief Whether this is a scored list: its rows are kept by accumulated score, in any order.
  bool is_scored(RowList list) const { return tables_.has_scores(list); }
  /// @brief Copy on write: gives a sequence its own copies of the shared pages that hold rows
  /// [first_row, end_row) of a list.
  ///
  /// Rows are numbered as in the head with the longest list; in a shorter list they are counted
  /// from the end. The caller has checked that the pool has the pages.
  void own_pages(int slot, RowList list, std::int64_t first_row, std::int64_t end_row,
                 cudaStream_t stream) {
    HostSequence& now = sequence(slot);
    PageCopies copies;
    const auto flush = [&] {
      if (copies.count == 0) return;
      copy_pages_kernel<><<<static_cast<unsigned>(copies.count), 256, 0, stream>>>(tables_, copies);
      check(cudaGetLastError(), "copy_pages_kernel");
      copies.count = 0;
    };
    // Takes all pages before anything changes: an engine's source may raise.
    TakenPages taken(pool_->allocator());
    for_each_shared(slot, list, first_row, end_row, [&](int, std::size_t) { taken.take(); });
    for_each_shared(slot, list, first_row, end_row, [&](int head, std::size_t index) {
      std::int32_t& page = now.pages[static_cast<int>(list)][static_cast<std::size_t>(head)][index];
      if (copies.count == kMaxEdits) flush();
      const std::int32_t own = taken.next();
      copies.from[copies.count] = page;
      copies.to[copies.count++] = own;
      pool_->allocator().release(page);  // other sequences still hold it
      page = own;
      edit(static_cast<int>(list),
           (slot * tables_.num_lists + head) * tables_.max_pages[static_cast<int>(list)] +
               static_cast<std::int32_t>(index),
           page, stream);
    });
    flush();
    flush_edits(stream);
  }
  /// @brief Bytes of a sequence's tail over all heads.
  std::size_t tail_bytes() const {
    return static_cast<std::size_t>(tables_.num_heads) *
           static_cast<std::size_t>(tables_.tail_tiles) *
           static_cast<std::size_t>(tiles_.full.bytes);
  }

  /// @brief Adds to `demand` the shared pages that a sequence must copy before it writes rows
  /// [first_row, end_row) of a list, numbered as in own_pages().
  void demand_writes(int slot, RowList list, std::int64_t first_row, std::int64_t end_row,
                     PageDemand& demand) const {
    const auto& pages = sequence(slot).pages[static_cast<int>(list)];
    for_each_shared(slot, list, first_row, end_row, [&](int head, std::size_t index) {
      demand.add_write(pool_->allocator(), pages[static_cast<std::size_t>(head)][index]);
    });
  }
  /// @brief Adds to `demand` the pages that a sequence needs to grow its lists to the rows of
  /// `after`: new pages, and copies of the shared pages that will be written.
  /// @param replaces  any row of the scored lists may be replaced
  void demand_rows(int slot, const SequenceRows& after, bool replaces, PageDemand& demand) const {
    const HostSequence& now = sequence(slot);
    for (const RowList list : {RowList::full, RowList::compressed}) {
      // A merge of epochs rewrites compressed rows.
      const bool grows = now.grows(after, list),
                 rewrites = (replaces && is_scored(list)) ||
                            (grows && list == RowList::compressed && epochs_.adapts());
      if (grows || rewrites)
        demand_writes(slot, list, rewrites ? 0 : now.num_rows(list), now.num_rows(list) + 1,
                      demand);
      for (int index = 0; index < num_lists(list); ++index) {
        const std::int64_t pages = pages_for(list, index, after.num_rows(list, index)),
                           own = static_cast<std::int64_t>(
                               now.pages[static_cast<int>(list)][static_cast<std::size_t>(index)]
                                   .size());
        demand.add_new((std::max)(std::int64_t{0}, pages - own));
      }
    }
  }

  /// @brief Pages that a sequence with these rows takes.
  std::int64_t pages_of(const SequenceRows& own) const {
    std::int64_t pages = 0;
    for (const RowList list : {RowList::full, RowList::compressed}) {
      for (int index = 0; index < num_lists(list); ++index)
        pages += pages_for(list, index, own.num_rows(list, index));
    }
    return pages;
  }
  /// @brief Gives a sequence the pages for the rows of `after`, and enqueues the new page table
  /// entries.
  void add_pages(int slot, const SequenceRows& after, cudaStream_t stream) {
    HostSequence& now = sequence(slot);
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (now.grows(after, list))
        own_pages(slot, list, now.num_rows(list), now.num_rows(list) + 1, stream);
    }
    for (int list = 0; list < 2; ++list) {
      for (int head = 0; head < num_lists(static_cast<RowList>(list)); ++head) {
        const std::int64_t rows = after.num_rows(static_cast<RowList>(list), head);
        std::vector<std::int32_t>& pages = now.pages[list][static_cast<std::size_t>(head)];
        const std::int64_t needed = pages_for(static_cast<RowList>(list), head, rows);
        if (needed > static_cast<std::int64_t>(pages.capacity()))
          pages.reserve((std::max)(static_cast<std::size_t>(needed), 2 * pages.size()));
        while (static_cast<std::int64_t>(pages.size()) < needed) {
          const std::int32_t page = pool_->allocator().take();
          edit(list,
               (slot * tables_.num_lists + head) * tables_.max_pages[list] +
                   static_cast<std::int32_t>(pages.size()),
               page, stream);
          pages.push_back(page);
        }
      }
    }
    flush_edits(stream);
  }

  /// @brief Frees the pages beyond a sequence's rows, and uploads its lengths and segments.
  /// @param counted  the device has counted the rows itself: nothing is uploaded if bases do not
  /// move
  void release_and_upload(int slot, cudaStream_t stream, bool counted = false) {
    HostSequence& now = sequence(slot);
    for (int list = 0; list < 2; ++list) {
      for (int head = 0; head < num_lists(static_cast<RowList>(list)); ++head) {
        const std::int64_t rows = now.num_rows(static_cast<RowList>(list), head);
        std::vector<std::int32_t>& pages = now.pages[list][static_cast<std::size_t>(head)];
        const std::size_t needed =
            pages.empty()
                ? 0
                : static_cast<std::size_t>(pages_for(static_cast<RowList>(list), head, rows));
        for (; pages.size() > needed; pages.pop_back()) pool_->allocator().release(pages.back());
      }
    }
    if (counted && !epochs_.adapts()) return;
    now.trim_segments();
    epochs_.free_unused(slot, now.epochs);
    write_lengths(slot, now.epochs.segments, device_epochs_.used(), stream);
    if (device_epochs_.used()) trim_device_epochs(tables_, device_epochs_, {1, {slot}}, stream);
  }

  /// @brief Enqueues the upload of a sequence's lengths and segments.
  /// @param keeps  the device keeps the segments that it has
  void write_lengths(int slot, const std::vector<HostSegment>& segments, bool keeps,
                     cudaStream_t stream) const {
    const HostSequence& now = sequence(slot);
    SegmentList list;
    for (const HostSegment& segment : segments)
      list.items[list.count++] = {segment.epoch, segment.first_rows.front()};
    if (keeps) list.count = -1;
    write_lengths_kernel<><<<1, 128, 0, stream>>>(tables_, slot, now.tail_length,
                                                  static_cast<std::int32_t>(now.first_tail()),
                                                  now.rows, list);
    check(cudaGetLastError(), "write_lengths_kernel");
    if (!keeps) write_first_rows(tables_, slot, segments, stream);
    for (int head = 0; head < static_cast<int>(now.missing.size()); head += HeadRowsList::kMost) {
      HeadRowsList own;
      own.first = head;
      for (; own.count < HeadRowsList::kMost && head + own.count < tables_.num_heads; ++own.count)
        own.items[own.count] = now.rows_of(head + own.count);
      write_rows_kernel<><<<1, HeadRowsList::kMost, 0, stream>>>(tables_, slot, own);
      check(cudaGetLastError(), "write_rows_kernel");
    }
  }

  /// @brief Forgets a sequence that was not completed, and frees its pages. Enqueues nothing, and
  /// cannot fail: whoever uses the slot next writes what the device knows of it.
  void drop(int slot) noexcept {
    HostSequence& now = sequence(slot);
    for (auto& list : now.pages) {
      for (auto& pages : list) {
        for (const std::int32_t page : pages) pool_->allocator().release(page);
        pages.clear();
      }
    }
    static_cast<SequenceRows&>(now) = {};
    now.joint_heads = tables_.joint_heads;
    now.num_tokens = 0;
    now.tail_length = 0;
    now.epochs = {};
    now.shifts = {};
    epochs_.free_unused(slot, now.epochs);
  }
  /// @brief Empties a sequence and frees its pages.
  void clear(int slot, cudaStream_t stream) {
    HostSequence& now = sequence(slot);
    now.num_tokens = 0;
    now.tail_length = 0;
    now.rows = {};
    now.missing.clear();
    now.epochs = {};
    if (!now.shifts.pieces().empty()) rotary_.write_shifts(slot, now.shifts = {}, stream);
    release_and_upload(slot, stream);
    residuals_.clear(slot, stream);
    if (!device_epochs_.used()) return;
    begin_device_epochs_kernel<>
        <<<1, 128, 0, stream>>>(tables_, slot, device_epochs_.states(), device_epochs_.sketches());
    check(cudaGetLastError(), "begin_device_epochs_kernel");
    if (device_epochs_.sketches_rows())
      check(cudaMemsetAsync(device_epochs_.rows_of(slot), 0, device_epochs_.sketch_bytes(), stream),
            "sketches");
    epochs_.begin_bases(slot, stream);
  }
  /// @brief A sequence's epochs and segments. Device-managed epochs are read from the device, which
  /// waits for the stream; for the whole device if the stream is null.
  HostEpochs epochs_of(int slot, cudaStream_t stream) const {
    HostEpochs known = sequence(slot).epochs;
    if (!device_epochs_.used()) return known;
    DeviceEpochState state;
    DeviceLengths lengths;
    std::vector<DeviceSegment> segments(
        static_cast<std::size_t>(tables_.num_heads * tables_.max_segments));
    if (stream == nullptr)
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // its calls may be on any stream
    const auto read = [&](void* target, const void* from, std::size_t bytes) {
      check(cudaMemcpyAsync(target, from, bytes, cudaMemcpyDeviceToHost, stream), "epochs");
    };
    read(&state, device_epochs_.states() + slot, sizeof state);
    read(&lengths, tables_.lengths + slot, sizeof lengths);
    read(segments.data(), tables_.segments + static_cast<std::size_t>(slot) * segments.size(),
         segments.size() * sizeof(DeviceSegment));
    check(cudaStreamSynchronize(stream), "epochs");
    known.current = state.current;
    known.rows_since_publication = state.rows_since_publication;
    known.moved = true;
    known.unpublished = state.unpublished != 0;
    known.merging = state.merging;
    for (int i = 0; i < lengths.num_segments; ++i) {
      HostSegment& own = known.segments.emplace_back(
          HostSegment{segments[static_cast<std::size_t>(i)].epoch, state.levels[i], {}});
      for (int head = 0; head < tables_.num_heads; ++head)
        own.first_rows.push_back(
            segments[static_cast<std::size_t>(head * tables_.max_segments + i)].first_row);
    }
    return known;
  }

  /// @brief Whether a kernel of a step may begin while the one before it ends.
  bool overlaps() const { return overlaps_; }
  /// @brief Multiprocessors of this device.
  int multiprocessors() const { return multiprocessors_; }
  /// @brief Bytes of shared memory that a block may have on this device.
  int shared_bytes() const { return shared_bytes_; }
  /// @brief Whether the maps that decode a part's tiles are f32 (else 16 bits), in all heads and
  /// epochs.
  bool wide_maps(Part part) const {
    return !maps_.heads().empty() && maps_.heads().front().of(part).reader.type == DType::f32;
  }
  /// @brief Memory for row moves in scored lists (cuda/store/compaction/retain_rows.cuh). Empty
  /// until rows are first removed from one.
  DeviceArray<std::int32_t>& moves() { return moves_; }
  /// @brief The workspace of attention calls.
  Workspace& workspace() { return workspace_; }
  const Workspace& workspace() const { return workspace_; }
  /// @brief The largest rank of any head's keys or values; with joint values, of its keys only.
  int most_rank() const {
    int most = 1;
    for (const HeadMaps& maps : maps_.heads())
      most = (std::max)({most, static_cast<int>(maps.key.rank),
                         tiles_.joint_heads > 0 ? 0 : static_cast<int>(maps.value.rank)});
    return most;
  }
  /// @brief The largest rank of any head's values; with joint values, of a group's latent.
  int most_value_rank() const {
    int most = 1;
    for (const HeadMaps& maps : maps_.heads())
      most = (std::max)(most, static_cast<int>(maps.value.rank));
    return most;
  }
  /// @brief Rows between two publications of a sequence. The default is four times the largest
  /// rank, so that the rows outweigh the epoch's own bytes.
  std::int64_t publish_interval() const {
    return config_.publish_interval > 0 ? config_.publish_interval
                                        : 4 * std::int64_t{epochs_.most()};
  }
  /// @brief Tiles per head that this many packed rows fill.
  std::int32_t packed_tiles(std::int64_t tokens) const {
    return static_cast<std::int32_t>((tokens + tiles_.full.rows - 1) / tiles_.full.rows);
  }
  /// @brief Bytes of device memory besides pages and maps: tables, tails, workspace.
  std::size_t reserved_bytes() const {
    return moves_.bytes() + pages_[0].bytes() + pages_[1].bytes() + lengths_.bytes() +
           rows_.bytes() + compressed_.bytes() + tails_.bytes() + segments_.bytes() +
           rotary_.shift_bytes() + positions_[0].bytes() + positions_[1].bytes() +
           residuals_.bytes() + accumulated_scores_[0].bytes() + accumulated_scores_[1].bytes() +
           tail_scores_.bytes() + epochs_.reserved_bytes() + device_epochs_.bytes() +
           workspace_.bytes();
  }

 private:
  /// Calls function(head, index of the page) for each page that holds some of rows [first_row,
  /// end_row) of a list and is shared with other sequences. Rows are numbered as in own_pages().
  template <class Function>
  void for_each_shared(int slot, RowList list, std::int64_t first_row, std::int64_t end_row,
                       Function&& function) const {
    if (list == RowList::compressed && tiles_.compressed.empty()) return;
    for (int head = 0; head < num_lists(list); ++head) {
      const std::vector<std::int32_t>& pages =
          sequence(slot).pages[static_cast<int>(list)][static_cast<std::size_t>(head)];
      const std::int64_t rows = std::int64_t{layout(list, head).rows} *
                                layout(list, head).tiles_per_page,
                         missing = sequence(slot).missing_in(list, head),
                         first = (std::max)(std::int64_t{0}, first_row - missing);
      for (std::size_t index = static_cast<std::size_t>(first / rows);
           index < pages.size() && static_cast<std::int64_t>(index) * rows < end_row - missing;
           ++index) {
        if (pool_->allocator().shared(pages[index])) function(head, index);
      }
    }
  }
  void edit(int list, std::int32_t index, std::int32_t page, cudaStream_t stream) {
    if (edits_.count == kMaxEdits || (edits_.count > 0 && edits_.list != list)) flush_edits(stream);
    edits_.list = list;
    edits_.index[edits_.count] = index;
    edits_.page[edits_.count++] = page;
  }
  void flush_edits(cudaStream_t stream) {
    if (edits_.count == 0) return;
    write_pages_kernel<><<<1, 128, 0, stream>>>(tables_, edits_);
    edits_.count = 0;
    check(cudaGetLastError(), "write_pages_kernel");
  }

  CacheConfig config_;
  LayerTiles tiles_;
  std::shared_ptr<PagePool> pool_;
  std::int64_t max_rows_[2] = {0, 0};
  LayerEdit tables_;
  DeviceArray<DeviceLengths> lengths_;
  DeviceArray<HeadRows> rows_;
  DeviceArray<std::int32_t> moves_;
  DeviceArray<std::int32_t> pages_[2];
  DeviceArray<std::uint32_t> faults_;
  DeviceArray<HeadTiles> compressed_;
  DeviceArray<std::uint8_t> tails_;
  RotaryTables rotary_;
  LayerMaps maps_;
  LayerMetrics metrics_;
  EpochStore epochs_;
  DeviceArray<DeviceSegment> segments_;
  DeviceEpochStore device_epochs_;
  DeviceArray<std::int32_t> positions_[2];
  ResidualStore residuals_;
  DeviceArray<float> accumulated_scores_[2], tail_scores_;
  std::vector<HostSequence> sequences_;
  Workspace workspace_;
  PageEdits edits_;
  bool overlaps_ = false;
  int device_ = current_device();
  int shared_bytes_ = 0, multiprocessors_ = 1;
};

/// @brief The state of a layer whose functions launch the kernels of a set.
template <class Set>
class LayerStateWith : public LayerState {
 public:
  using LayerState::LayerState;
  using Kernels = Set;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
