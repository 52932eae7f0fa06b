// SPDX-License-Identifier: Apache-2.0
/// @file core/memory_usage.hpp  Byte counts of a cache. Each byte is counted in exactly one column.
#pragma once

#include <cstddef>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Bytes of a sequence, a cache or a whole model.
struct MemoryUsage {
  std::size_t coefficient_bytes = 0;  ///< codes and scales of compressed rows
  /// Full-rank rows outside the tail (sinks, or every row under KeepFull).
  std::size_t full_row_bytes = 0;
  std::size_t tail_bytes = 0;  ///< full-rank rows of the recent window
  /// Where rows are stored: runs of positions of one state, 8 bytes each; position shifts, 24 each.
  std::size_t position_bytes = 0;
  std::size_t slack_bytes = 0;    ///< unused part of the pages in use
  std::size_t epoch_bytes = 0;    ///< projection maps that belong to the sequence alone
  std::size_t updater_bytes = 0;  ///< working bases and updater state; accumulated attention scores
  /// Norms of what compression lost of each row (config.keep_residuals).
  std::size_t residual_bytes = 0;
  /// Rows of an unfinished prefill chunk, at full rank, and unused capacity of their buffer.
  std::size_t pending_bytes = 0;
  /// The calibrated maps, one copy for all sequences. Not in total().
  std::size_t shared_bytes = 0;
  /// Reserved capacity that is not in use (free pages, tails, tables). Not in total().
  std::size_t reserved_bytes = 0;

  /// @brief Bytes that the sequence (or all sequences) costs; ratios are these over those of f16.
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
