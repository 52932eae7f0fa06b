// SPDX-License-Identifier: Apache-2.0
/// @file cpu/segments.hpp  Opens segments under a new epoch, and merges old segments by
/// re-projection.
///
/// An older segment is merged into the next one by C' = (C query_down_old^T + mean_old - mean_new)
/// key_down_new for keys, and C' = (C output_up_old + mean_old - mean_new) value_down_new for
/// values, through the r x r product of the two maps. A decoded row loses its part outside the
/// newer basis, plus one rounding to the stored type. Rows move from the end of the older segment
/// to the front of the newer one, as many a flush as CacheConfig::merge_rows says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/product.hpp"
#include "lowrankkv/cpu/project.hpp"
#include "lowrankkv/cpu/residual_norms.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Loads rows of a list, row-major f32: out [count, rank].
template <class Rows>
void load_coefficients(const Rows& rows, int slot, int head, Part part, std::int32_t first,
                       std::int32_t count, float* out, int stride) {
  if (part == Part::value) {
    rows.load_values(slot, head, first, count, out, stride);
    return;
  }
  const int rank = rows.layout(head).key_rank;
  std::vector<float> tile(static_cast<std::size_t>(rank) * static_cast<std::size_t>(count));
  rows.load_keys(slot, head, first, count, tile.data(), count);
  for (std::int32_t row = 0; row < count; ++row) {
    for (int channel = 0; channel < rank; ++channel)
      out[row * stride + channel] = tile[static_cast<std::size_t>(channel * count + row)];
  }
}

/// @brief Decodes compressed rows [row, row + count) of one segment, count <= kTile: out [count,
/// padded(head_dim)].
template <class State>
void decode_rows(const State& state, int slot, int head, const EpochHead& maps, Part part,
                 std::int32_t row, std::int32_t count, float* out) {
  const int list = state.list_of(head, part);
  const int rank = state.compressed.layout(list).rank(part);
  std::vector<float> coefficients(static_cast<std::size_t>(count * rank));
  load_coefficients(state.compressed, slot, list, part, row, count, coefficients.data(), rank);
  Reconstruction(maps, part, state.head_dim()).apply(coefficients.data(), rank, count, out);
}

/// @brief Index of the segment to merge into its successor if a new segment is added. -1: none.
///
/// Prefers the newest pair of neighbours of equal level, then the two newest segments. If only one
/// segment can be merged, it is merged into the new one.
template <class State>
int merge_for_new_segment(const State& state, int slot) {
  const auto segments = state.used_segments(slot, 0);
  int first_own = 0;
  if (!State::Epochs::rotates_calibrated_rows) {
    while (first_own < static_cast<int>(segments.size()) &&
           segments[static_cast<std::size_t>(first_own)].epoch == 0)
      ++first_own;
  }
  const int count = static_cast<int>(segments.size());
  if (count - first_own + 1 <= State::Epochs::max_epochs) return -1;
  for (int index = count - 2; index >= first_own; --index) {
    if (segments[static_cast<std::size_t>(index)].level ==
        segments[static_cast<std::size_t>(index + 1)].level)
      return index;
  }
  return count - first_own >= 2 ? count - 2 : count - 1;
}

namespace detail {

/// [rank_old, rank_new] product of two maps over head_dim, and the constant term from the
/// difference of their means.
struct Transition {
  std::vector<float> matrix, shift;
  int rank = 0, stride = 0;
};

inline Transition make_transition(const EpochHead& from, const EpochHead& to, Part part,
                                  int head_dim) {
  const int old_rank = from.rank(part);
  Transition result;
  result.rank = to.rank(part);
  result.stride = padded(result.rank);
  const int width = padded(head_dim);
  std::vector<float> decode(static_cast<std::size_t>(old_rank) * static_cast<std::size_t>(width));
  std::vector<float> scratch(static_cast<std::size_t>(width));
  from.load_decoder(part, decode.data(), width, scratch.data());
  std::vector<float> encoder(static_cast<std::size_t>(head_dim) *
                             static_cast<std::size_t>(result.stride));
  to.load_encoder(part, encoder.data(), result.stride);
  result.matrix.resize(static_cast<std::size_t>(old_rank) *
                       static_cast<std::size_t>(result.stride));
  product(old_rank, result.stride, head_dim, decode.data(), width, encoder.data(), result.stride,
          result.matrix.data(), result.stride);
  result.shift.resize(static_cast<std::size_t>(result.stride));
  const StoredMatrix& old_mean = from.mean(part);
  const StoredMatrix& new_mean = to.mean(part);
  std::vector<float> difference(static_cast<std::size_t>(head_dim));
  if (!old_mean.empty()) difference = old_mean.values();
  if (!new_mean.empty()) {
    const std::vector<float> mean = new_mean.values();
    for (std::size_t i = 0; i < mean.size(); ++i) difference[i] -= mean[i];
  }
  product(1, result.stride, head_dim, difference.data(), head_dim, encoder.data(), result.stride,
          result.shift.data(), result.stride);
  return result;
}

/// Updates the residuals of rows of one head that are moved to other maps. The residual of a row
/// may grow: the norms of the losses are added.
template <class State>
class MoveLosses {
 public:
  MoveLosses(State& state, int slot, int head) : state_(state), slot_(slot), head_(head) {}
  /// Call before rows [first, first + count), count <= kTile, are written again.
  void before(const EpochHead& maps, std::int32_t first, std::int32_t count) {
    if (!state_.config.keep_residuals) return;
    decode(maps, Part::key, first, count, key_);
    decode(maps, Part::value, first, count, value_);
  }
  /// Call after they are written.
  void after(const EpochHead& maps, std::int32_t first, std::int32_t count) {
    if (!state_.config.keep_residuals) return;
    for (const Part part : {Part::key, Part::value}) {
      const std::vector<float>& old = part == Part::key ? key_ : value_;
      std::vector<Half>& norms = state_.residuals(slot_, head_).compressed.of(part);
      decode(maps, part, first, count, now_);
      for (std::int32_t row = 0; row < count; ++row) {
        Half& norm = norms[static_cast<std::size_t>(first + row)];
        const std::ptrdiff_t at = row * padded(state_.head_dim());
        norm = norm_not_below(static_cast<double>(to_float(norm)) +
                              distance_of(old.data() + at, now_.data() + at, state_.head_dim()));
      }
    }
  }

 private:
  void decode(const EpochHead& maps, Part part, std::int32_t first, std::int32_t count,
              std::vector<float>& out) {
    out.resize(static_cast<std::size_t>(kTile * padded(state_.head_dim())));
    decode_rows(state_, slot_, head_, maps, part, first, count, out.data());
  }
  State& state_;
  int slot_, head_;
  std::vector<float> key_, value_, now_;
};

}  // namespace detail

namespace detail {

/// Re-projects rows [first, first + count) of one head from the maps of one epoch onto those of
/// another. Their pages are the sequence's own.
template <class State>
void reproject_rows(State& state, int slot, int head, const EpochHead& old_maps,
                    const EpochHead& new_maps, std::int32_t first, std::int32_t count) {
  const Transition keys = make_transition(old_maps, new_maps, Part::key, state.head_dim());
  const Transition values = make_transition(old_maps, new_maps, Part::value, state.head_dim());
  std::vector<float> coefficients(static_cast<std::size_t>(kTile) *
                                  static_cast<std::size_t>((std::max)(keys.stride, values.stride)));
  std::vector<float> new_keys(static_cast<std::size_t>(kTile) *
                              static_cast<std::size_t>(keys.stride));
  std::vector<float> new_values(static_cast<std::size_t>(kTile) *
                                static_cast<std::size_t>(values.stride));
  const auto project = [&](const Transition& map, Part part, std::int32_t row, std::int32_t rows,
                           std::vector<float>& out) {
    load_coefficients(state.compressed, slot, head, part, row, rows, coefficients.data(),
                      map.stride);
    for (std::int32_t i = 0; i < rows; ++i)
      std::copy(map.shift.begin(), map.shift.end(), out.begin() + i * map.stride);
    add_product(rows, map.stride, map.rank, coefficients.data(), map.stride, map.matrix.data(),
                map.stride, out.data(), map.stride);
  };
  MoveLosses<State> losses(state, slot, head);
  for (std::int32_t done = 0; done < count; done += kTile) {
    const std::int32_t row = first + done;
    const std::int32_t rows = (std::min)(kTile, count - done);
    losses.before(old_maps, row, rows);
    project(keys, Part::key, row, rows, new_keys);
    project(values, Part::value, row, rows, new_values);
    state.compressed.overwrite(slot, head, row, rows, new_keys.data(), keys.stride,
                               new_values.data(), values.stride);
    losses.after(new_maps, row, rows);
  }
}

}  // namespace detail

/// @brief Goes on with the merge in progress, if there is one: re-projects the last rows of its
/// older segment onto the epoch of the successor, and moves the border between the two segments
/// before them. At most `most` per KV head: if heads have different numbers of rows, those within
/// `most` rows of the last one of any head. When no head has a row left in the older one, the
/// successor takes its place. The caller has checked the pages. Heads run in parallel.
///
/// Every row is always read with the maps that wrote it, so that a merge may stop at any row.
/// Cost: O(r^2) per row, and O(head_dim r^2) per head for the product of the maps.
template <class State>
void advance_merge(State& state, int slot, std::int64_t most) {
  // Only an updater makes a second epoch, and joint values work only with the Static updater.
  if constexpr (State::joins) return;
  auto& sequence = state.sequence(slot);
  if (sequence.merging < 0) return;
  const auto older = static_cast<std::size_t>(sequence.merging);
  std::int64_t end = 0;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const Segment& from = state.used_segments(slot, head)[older];
    if (from.num_rows > 0) end = (std::max)(end, from.first_row + std::int64_t{from.num_rows});
  }
  std::vector<std::int32_t> counts;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const Segment& from = state.used_segments(slot, head)[older];
    const std::int64_t behind = from.first_row + std::int64_t{from.num_rows} - (end - most);
    const auto count =
        static_cast<std::int32_t>(std::clamp(behind, std::int64_t{0}, std::int64_t{from.num_rows}));
    counts.push_back(count);
    state.compressed.make_writable(slot, head, from.first_row + from.num_rows - count, count);
  }
  state.threads->run(state.num_kv_heads(), [&](std::int64_t index, int) {
    const int head = static_cast<int>(index);
    const std::int32_t count = counts[static_cast<std::size_t>(head)];
    Segment& from = state.used_segments(slot, head)[older];
    Segment& into = state.used_segments(slot, head)[older + 1];
    if (count == 0) return;
    detail::reproject_rows(state, slot, head, state.epochs.head(from.epoch, head),
                           state.epochs.head(into.epoch, head),
                           from.first_row + from.num_rows - count, count);
    from.num_rows -= count;
    into.first_row -= count;
    into.num_rows += count;
  });
  bool done = true;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    const std::int32_t count = counts[static_cast<std::size_t>(head)];
    state.statistics.rows_reprojected += count;
    state.statistics.bytes_reprojected +=
        2 * static_cast<std::int64_t>(state.compressed.layout(head).bytes(count));
    done = done && state.used_segments(slot, head)[older].num_rows == 0;
  }
  if (!done) return;
  state.epochs.release(state.used_segments(slot, 0)[older].epoch);
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    auto segments = state.used_segments(slot, head);
    Segment& into = segments[older + 1];
    into.level = (std::max)(into.level, segments[older].level) + 1;
    std::copy(segments.begin() + sequence.merging + 1, segments.end(),
              segments.begin() + sequence.merging);
  }
  --state.table.lengths(slot).num_segments;
  sequence.merging = -1;
  ++state.statistics.merges;
}

/// @brief Whether a merge is done in the call that begins it: with a prompt, and under RotateNow.
/// Otherwise flushes do config.most_merge_rows() rows of it each.
template <class State>
constexpr bool merges_at_once(Phase phase) {
  return phase == Phase::prefill || State::Epochs::rotates_calibrated_rows;
}

/// @brief Ensures that the last segment is under the sequence's current epoch. If it is not, opens
/// a segment, and begins a merge of old segments if there are now too many. Then goes on with the
/// merge in progress.
///
/// With a merge in progress a sequence has one epoch more than KeepEpochs says; it publishes the
/// next one when the merge is done (publication_due()).
template <class State>
void open_segment(State& state, int slot, Phase phase) {
  constexpr std::int64_t all = (std::numeric_limits<std::int32_t>::max)();
  SequenceLengths& lengths = state.table.lengths(slot);
  auto& sequence = state.sequence(slot);
  const bool at_once = merges_at_once<State>(phase);
  if (lengths.num_segments == 0 || state.used_segments(slot, 0).back().epoch != sequence.epoch) {
    if (at_once) advance_merge(state, slot, all);
    // With a merge in progress, this segment takes the place of one that lost its last row.
    const int merge = sequence.merging >= 0 ? sequence.merging : merge_for_new_segment(state, slot);
    ++lengths.num_segments;
    state.epochs.share(sequence.epoch);
    for (int head = 0; head < state.num_kv_heads(); ++head) {
      state.used_segments(slot, head).back() =
          Segment{sequence.epoch, state.compressed.size(slot, head), 0, 0};
    }
    sequence.merging = merge;
  }
  advance_merge(state, slot, at_once ? all : state.config.most_merge_rows());
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
