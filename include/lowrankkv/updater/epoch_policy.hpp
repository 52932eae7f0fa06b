// SPDX-License-Identifier: Apache-2.0
/// @file updater/epoch_policy.hpp  What happens to rows written under an older basis: KeepEpochs or
/// RotateNow.
#pragma once

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Keeps up to `max` bases of a sequence alive; rows are read with the maps that wrote them.
///
/// Beyond `max`, two neighbouring segments are merged by re-projecting the older rows onto the
/// newer basis, in the way of a log-structured store: neighbours of equal level first. Each row is
/// then re-projected O(log n) times, O(r^2 log n) amortised, if max >= ceil(log2(published epochs))
/// + 1; with a smaller max the oldest rows are merged at every publication once the levels run out,
/// O(n r^2) each.
template <int max = 8>
struct KeepEpochs {
  static_assert(max >= 1, "lowrankkv: KeepEpochs needs room for at least one epoch");
  static constexpr int max_epochs = max;
  static constexpr bool rotates_calibrated_rows =
      false;  ///< rows under the calibrated maps cost no epoch: leave them
};

/// @brief One live basis: every publication re-projects all compressed rows of the sequence, those
/// under the calibrated maps included. Reads and rewrites n (r_k + r_v) coefficients at every
/// publication; CacheStatistics reports it.
struct RotateNow {
  static constexpr int max_epochs = 1;
  static constexpr bool rotates_calibrated_rows = true;
};

LOWRANKKV_NAMESPACE_END
