// SPDX-License-Identifier: Apache-2.0
/// @file updater/epoch_policy.hpp  KeepEpochs and RotateNow: what happens to rows that an older
/// basis wrote.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Keeps up to `max` bases of a sequence alive. Rows are read with the maps that wrote them.
///
/// Beyond `max`, two neighbouring segments are merged: the older rows are re-projected onto the
/// newer basis. As in a log-structured store, neighbours of equal level merge first. If max >=
/// ceil(log2(published epochs)) + 1, each row is re-projected O(log n) times, at O(r^2 log n)
/// amortised; with a smaller max, more often.
///
/// Decoding, a flush re-projects at most CacheConfig::merge_rows rows per KV head. A merge of more
/// rows takes several flushes, in which the sequence has max + 1 epochs and publishes no other.
template <int max = 8>
struct KeepEpochs {
  static_assert(max >= 1, "lowrankkv: KeepEpochs needs room for at least one epoch");
  static constexpr int max_epochs = max;
  /// false: rows under the calibrated maps cost no epoch, and are left as they are.
  static constexpr bool rotates_calibrated_rows = false;
};

/// @brief Keeps one live basis: every publication re-projects all compressed rows of the sequence,
/// including rows under the calibrated maps, in the flush that publishes. It reads and rewrites
/// n (r_k + r_v) coefficients; CacheStatistics reports this traffic.
struct RotateNow {
  static constexpr int max_epochs = 1;
  static constexpr bool rotates_calibrated_rows = true;
};

LOWRANKKV_NAMESPACE_END
