// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/compaction/split_lists.cuh  Where a position splits the lists of every head.
///
/// Row counts say where, unless values chose among the rows. Then positions are read from the
/// device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/cuda/layer/layer_state.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Where positions split the lists of a sequence's heads. Valid while the sequence does not
/// change.
class ListBounds {
 public:
  /// @param first   the smallest position that below() may be asked for
  /// @param chosen  values decided which rows are stored how. Then positions are read, if any row
  /// from `first` on has left the tail; this waits for the stream
  /// @param stream  null: waits for the device
  ListBounds(const LayerState& layer, int slot, std::int64_t first, bool chosen,
             cudaStream_t stream)
      : now_(layer.sequence(slot)),
        heads_(layer.tables().num_heads),
        chosen_(chosen),
        scored_(layer.tables().tail_scores != nullptr) {
    if (!chosen || first >= now_.first_tail()) return;
    if (stream == nullptr)
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the calls may be on any stream
    const LayerEdit& tables = layer.tables();
    for (const RowList list : {RowList::full, RowList::compressed}) {
      const int which = static_cast<int>(list);
      listed_[which] = tables.positions[which] != nullptr;
      for (int head = 0; listed_[which] && head < heads_; ++head) {
        std::vector<std::int32_t>& own =
            positions_[which].emplace_back(static_cast<std::size_t>(now_.num_rows(list, head)));
        if (own.empty()) continue;
        const std::int32_t* from =
            tables.positions[which] + static_cast<std::size_t>(slot * heads_ + head) *
                                          static_cast<std::size_t>(tables.max_rows[which]);
        check(cudaMemcpyAsync(own.data(), from, own.size() * sizeof(std::int32_t),
                              cudaMemcpyDeviceToHost, stream),
              "positions");
      }
    }
    check(cudaStreamSynchronize(stream), "positions");
  }
  /// @brief Rows of every head's lists that stand before a position, which is at least `first`. All
  /// rows of the lists, if the position is in the tail.
  std::vector<HeadRows> below(std::int64_t position) const {
    std::vector<HeadRows> rows;
    for (int head = 0; head < heads_; ++head)
      rows.push_back(position >= now_.first_tail() ? now_.rows_of(head)
                                                   : rows_below(head, position));
    return rows;
  }

 private:
  HeadRows rows_below(int head, std::int64_t position) const {
    const HeadRows own = now_.rows_of(head);
    // Positions ascend, unless rows took the places of evicted rows.
    const auto listed = [&](RowList list) {
      const std::vector<std::int32_t>& all =
          positions_[static_cast<int>(list)][static_cast<std::size_t>(head)];
      if (scored_)
        return static_cast<std::int32_t>(
            std::count_if(all.begin(), all.end(),
                          [&](std::int32_t own_position) { return own_position < position; }));
      return static_cast<std::int32_t>(std::lower_bound(all.begin(), all.end(), position) -
                                       all.begin());
    };
    // Where counts decide, full rows are the first tokens. Compressed rows have all positions
    // without a full row, unless rows were dropped.
    const std::int32_t full =
        chosen_ ? listed(RowList::full)
                : static_cast<std::int32_t>((std::min)(position, std::int64_t{own.num_full}));
    return {full, listed_[1]
                      ? listed(RowList::compressed)
                      : (std::min)(static_cast<std::int32_t>(position) - full, own.num_compressed)};
  }

  const HostSequence& now_;
  int heads_;
  bool chosen_, scored_;
  bool listed_[2] = {false, false};
  std::vector<std::vector<std::int32_t>> positions_[2];  ///< by RowList; of heads
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
