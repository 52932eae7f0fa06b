// SPDX-License-Identifier: Apache-2.0
/// @file updater/frequent_directions.hpp  FrequentDirections: bases of chunks from a running sketch
/// of the stream (SubSpace-A).
#pragma once

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Updater policy of SubSpace-A (section 3.3 B): every row enters a Frequent Directions
/// sketch; a chunk of rows is closed and the next one gets the sketch's top directions as its basis
/// when a row's residual under the chunk's basis exceeds its threshold, in keys or in values, or
/// when the chunk has chunk_length rows. Old rows keep the basis that wrote them; beyond
/// KeepEpochs<max> chunks, old ones are merged by re-projection.
///
/// Prompts too are taken flush_interval rows at a time, in order; a rollover concerns all rows of
/// such a batch (with flush_interval 1 it is decided row by row, as printed). Warm-up tokens at
/// full rank are the token policy's sinks. After every batch the sketch is cut to min(sketch rows,
/// head_dim) rows and kept in f32; a short flush_interval costs that many more eigendecompositions.
/// Thresholds are calibrated percentiles of residuals, HeadBasis::key_threshold and
/// value_threshold.
struct FrequentDirections {
  float sketch_share = 2.0F;  ///< sketch rows per rank, m / r; at least 2
  int chunk_length = 256;     ///< L
  float threshold_scale =
      1.0F;  ///< thresholds are multiplied with it; 0: every batch begins a chunk
  friend bool operator==(const FrequentDirections&, const FrequentDirections&) = default;
};

/// @brief Raises what is wrong with the parameters. @throws ValueError
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

LOWRANKKV_NAMESPACE_END
