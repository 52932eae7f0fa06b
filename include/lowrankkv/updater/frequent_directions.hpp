// SPDX-License-Identifier: Apache-2.0
/// @file updater/frequent_directions.hpp  FrequentDirections: bases of chunks from a running sketch
/// of the stream (SubSpace-A).
#pragma once

#include <cmath>
#include <cstddef>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Updater policy of SubSpace-A (section 3.3 B): every row enters a Frequent Directions
/// sketch, and each chunk of rows has its own basis from that sketch.
///
/// A chunk ends when the residual of a row (key or value) under the chunk's basis exceeds its
/// threshold, or when the chunk has chunk_length rows. The next chunk gets the sketch's top
/// directions as its basis (rollover). Old rows keep the basis that wrote them; beyond
/// KeepEpochs<max> chunks, old chunks are merged by re-projection. On the CPU, a decoded chunk that
/// begins while a merge is in progress gets its basis when the merge is done (docs/epochs.md).
///
/// Prompts too are processed flush_interval rows at a time, in order. A rollover concerns all rows
/// of such a batch; with flush_interval 1 it is decided row by row, as in the paper. The warm-up
/// tokens at full rank are the token policy's sinks. After every batch the sketch is reduced to
/// min(sketch rows, head_dim) rows and kept in f32: a shorter flush_interval costs proportionally
/// more eigendecompositions. Thresholds are calibrated percentiles of residuals:
/// HeadBasis::key_threshold and value_threshold, which have to be set unless threshold_scale is 0.
struct FrequentDirections {
  float sketch_share = 2.0F;  ///< sketch rows per rank, m / r; at least 2
  int chunk_length = 256;     ///< L
  /// Factor on the thresholds. 0: every batch begins a chunk.
  float threshold_scale = 1.0F;
  /// Whether a key or a value above its threshold ends the chunks of both, as section 3.3 B prints
  /// it: "r_k > tau_k or r_v > tau_v". False: keys and values of a head have chunks of their own.
  bool ends_both = false;
  friend bool operator==(const FrequentDirections&, const FrequentDirections&) = default;
};

/// @brief Checks the parameters. @throws ValueError
inline void check_frequent_directions(const FrequentDirections& policy) {
  using detail::fail;
  if (!(policy.sketch_share >= 2.0F && policy.sketch_share <= 64.0F))
    fail<ValueError>("FrequentDirections: sketch_share is 2 to 64, given ", policy.sketch_share);
  if (policy.chunk_length < 1)
    fail<ValueError>("FrequentDirections: chunk_length is at least 1, given ", policy.chunk_length);
  if (!(policy.threshold_scale >= 0.0F))
    fail<ValueError>("FrequentDirections: threshold_scale is at least 0, given ",
                     policy.threshold_scale);
}

/// @brief Checks that the thresholds of every head are set, if they are read. @throws ValueError
inline void check_thresholds(const FrequentDirections& policy, const LayerBasis& basis) {
  if (policy.threshold_scale == 0.0F) return;
  for (std::size_t head = 0; head < basis.heads.size(); ++head) {
    const HeadBasis& own = basis.heads[head];
    if (std::isnan(own.key_threshold) || std::isnan(own.value_threshold))
      detail::fail<ValueError>("FrequentDirections: KV head ", head, " has key_threshold ",
                               own.key_threshold, " and value_threshold ", own.value_threshold,
                               ", residual norms expected, or infinity for never");
  }
}

LOWRANKKV_NAMESPACE_END
