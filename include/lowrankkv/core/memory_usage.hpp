// SPDX-License-Identifier: Apache-2.0
/// @file core/memory_usage.hpp  Where the bytes go. Everything is counted, each byte in one column.
#pragma once

#include <cstddef>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Bytes of a sequence, a cache or a whole model.
struct MemoryUsage {
  std::size_t coefficient_bytes = 0;  ///< codes and scales of compressed rows
  std::size_t full_row_bytes =
      0;  ///< full-rank rows outside the tail (sinks, or every row under KeepFull)
  std::size_t tail_bytes = 0;      ///< full-rank rows of the recent window
  std::size_t position_bytes = 0;  ///< where rows are: runs of positions of one state, 8 bytes
                                   ///< each; position shifts, 24 each
  std::size_t slack_bytes = 0;     ///< unused part of the pages in use
  std::size_t epoch_bytes = 0;     ///< projection maps that belong to the sequence alone
  std::size_t updater_bytes = 0;   ///< the updater's working bases and state; accumulated attention
  std::size_t residual_bytes =
      0;  ///< norms of what compression lost of every row (config.keep_residuals)
  std::size_t pending_bytes = 0;  ///< rows of an unfinished prefill chunk, at full rank; room for
                                  ///< more of them, where there is some
  std::size_t shared_bytes =
      0;  ///< the calibrated maps, one copy for all sequences; not in total()
  std::size_t reserved_bytes =
      0;  ///< capacity set aside and not in use (free pages, tails, tables); not in total()

  /// @brief What the sequence (or all sequences) costs: the numerator of `ratio_measured`.
  std::size_t total() const {
    return coefficient_bytes + full_row_bytes + tail_bytes + position_bytes + slack_bytes +
           epoch_bytes + updater_bytes + residual_bytes + pending_bytes;
  }
  MemoryUsage& operator+=(const MemoryUsage& other) {
    coefficient_bytes += other.coefficient_bytes;
    full_row_bytes += other.full_row_bytes;
    tail_bytes += other.tail_bytes;
    position_bytes += other.position_bytes;
    slack_bytes += other.slack_bytes;
    epoch_bytes += other.epoch_bytes;
    updater_bytes += other.updater_bytes;
    residual_bytes += other.residual_bytes;
    pending_bytes += other.pending_bytes;
    shared_bytes += other.shared_bytes;
    reserved_bytes += other.reserved_bytes;
    return *this;
  }
};

LOWRANKKV_NAMESPACE_END
