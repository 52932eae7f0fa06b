// SPDX-License-Identifier: Apache-2.0
/// @file cpu/adapt.hpp  Runs the updater on rows about to be compressed, and publishes the bases
/// that it moved.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/cpu/fold_maps.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/segments.hpp"
#include "lowrankkv/cpu/snapkv_scores.hpp"
#include "lowrankkv/cpu/top_rows.hpp"
#include "lowrankkv/linalg/orthonormalize.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Flushed rows of one KV head, in f32 with the values as stored. The first `count` rows are
/// decided on; the other rows (the recent window) only take part in scoring.
struct FlushedRows {
  std::vector<float> keys, values;  ///< [total, head_dim]
  std::int64_t total = 0;
  std::int64_t count = 0;
  /// [count] attention of a prompt's last queries, if the token policy asks for it.
  std::vector<float> scores;
  /// [count] the same for the updater, if it observes the rows with the highest scores.
  std::vector<float> importance;
  std::vector<RowFate> fates;  ///< [count]
  int rejected = 0;            ///< rows that were not finite, and updates that gave no usable basis
  bool moved = false;          ///< a working basis moved
};

/// @brief Scores of the rows of a prompt under its last queries, pooled over the flushed rows:
/// [count]. Empty if no queries are known.
template <class State>
std::vector<float> prompt_scores(const State& state, int slot, int head, const FlushedRows& rows,
                                 const AttentionScores& wanted) {
  const PromptChunk& chunk = state.sequence(slot).chunk;
  const int num_queries = (std::min)(chunk.num_window_queries(), wanted.window);
  if (num_queries == 0) return {};
  const int group = state.config.shape.group_size();
  const int first = chunk.num_window_queries() - num_queries;
  std::vector<float> queries(static_cast<std::size_t>(num_queries * group * state.head_dim()));
  for (int query = 0; query < num_queries; ++query) {
    for (int member = 0; member < group; ++member) {
      const float* source = chunk.window_query(first + query, head * group + member);
      std::copy(source, source + state.head_dim(),
                queries.begin() + (query * group + member) * state.head_dim());
    }
  }
  std::vector<float> rotated;
  if (state.stores_pre_rope()) {
    rotated = rows.keys;
    state.rotary.rotate_rows(state.sequence(slot).shifts, state.first_tail_position(slot),
                             rows.total, rotated.data(), state.head_dim());
  }
  const std::vector<float>& keys = state.stores_pre_rope() ? rotated : rows.keys;
  const std::vector<float> scores =
      snapkv_scores({queries.data(), std::int64_t{num_queries} * group, state.head_dim()}, group,
                    {keys.data(), rows.total, state.head_dim()}, state.config.scale());
  return pool_scores(std::span(scores).first(static_cast<std::size_t>(rows.count)), wanted.kernel,
                     wanted.pooling);
}

/// @brief Range of the flushed rows that a step processes.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// @brief The basis that the updater moves next: the working basis, or the current epoch's basis if
/// there is none.
template <class State>
std::vector<float> working_basis(const State& state, int slot, int head, Part part) {
  const auto& sequence = state.sequence(slot);
  const auto& adaptation = sequence.adaptation[static_cast<std::size_t>(head)];
  const StoredMatrix& moved = part == Part::key ? adaptation.key_basis : adaptation.value_basis;
  if (!moved.empty()) {
    std::vector<float> basis = moved.values();
    linalg::orthonormalize(basis, state.head_dim());  // rounding for storage made it inexact
    return basis;
  }
  HeadBasis maps = state.calibrated.heads[static_cast<std::size_t>(head)];
  if (sequence.epoch != 0) {
    const EpochHead& epoch = state.epochs.head(sequence.epoch, head);
    maps.key_down = epoch.key_down.values();
    maps.value_down = epoch.value_down.values();
  }
  std::vector<float> basis =
      State::BasisImpl::working_basis(state.basis_policy, maps, state.head_dim(), part);
  if (sequence.epoch != 0) undo_rotation(state, head, part, basis);
  if (sequence.epoch != 0) linalg::orthonormalize(basis, state.head_dim());
  return basis;
}

/// @brief Scores the rows of a prompt for an updater that observes those with the highest scores.
/// `rows` are those of every KV head.
template <class State>
void score_for_updater(const State& state, int slot, std::vector<FlushedRows>& rows, Phase phase) {
  const PromptSelection selection = State::UpdaterImpl::prompt_selection(state.updater);
  if (phase == Phase::decode || selection.share >= 1.0F) return;
  state.threads->run(state.num_kv_heads(), [&](std::int64_t head, int) {
    FlushedRows& own = rows[static_cast<std::size_t>(head)];
    own.importance = prompt_scores(state, slot, static_cast<int>(head), own, selection.scores);
  });
  if (selection.scope == ScoreScope::kv_head) return;
  std::vector<float> sum = std::move(rows.front().importance);
  for (std::size_t head = 1; head < rows.size(); ++head) {
    for (std::size_t row = 0; row < sum.size(); ++row) sum[row] += rows[head].importance[row];
  }
  for (FlushedRows& own : rows) own.importance = sum;
}

/// @brief The rows of `range` that the updater observes: of a prompt, the rows with the highest
/// scores; of decoded rows, all. Only rows that will be compressed are candidates, because only
/// they use the basis.
template <class State>
std::vector<std::int64_t> observed_rows(const State& state, const FlushedRows& rows,
                                        RowRange range) {
  std::vector<std::int64_t> candidates;
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    if (rows.fates[static_cast<std::size_t>(row)] == RowFate::compressed) candidates.push_back(row);
  }
  if (rows.importance.empty() || candidates.empty()) return candidates;
  std::vector<float> of_candidates;
  of_candidates.reserve(candidates.size());
  for (const std::int64_t row : candidates)
    of_candidates.push_back(rows.importance[static_cast<std::size_t>(row)]);
  // The share refers to all rows of the prompt, including exempt rows. For a part of the prompt, it
  // is reduced in proportion.
  const double part = static_cast<double>(range.size()) / static_cast<double>(rows.count);
  const float share = State::UpdaterImpl::prompt_selection(state.updater).share;
  const double wanted = static_cast<double>(share) * static_cast<double>(rows.total) * part;
  std::vector<std::int64_t> chosen;
  for (const std::int64_t index :
       top_rows(of_candidates, static_cast<std::int64_t>(std::ceil(wanted))))
    chosen.push_back(candidates[static_cast<std::size_t>(index)]);
  return chosen;
}

/// @brief Whether the columns of `basis` [dim, rank] are finite and orthonormal, as an updater must
/// return them.
inline bool is_orthonormal(const std::vector<float>& basis, int dim, int rank) {
  return ::lowrankkv::detail::biorthogonality_error(basis, basis, dim, rank) < 1e-2;
}

/// @brief The keys (or values) of some flushed rows, mean subtracted and in the metric of the
/// basis: [chosen, head_dim].
template <class State>
std::vector<float> rows_in_metric(const State& state, int head, const FlushedRows& rows,
                                  const std::vector<std::int64_t>& chosen, Part part) {
  const int dim = state.head_dim();
  const std::vector<float>& source = part == Part::key ? rows.keys : rows.values;
  std::vector<float> batch(chosen.size() * static_cast<std::size_t>(dim));
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    std::copy_n(source.begin() + chosen[i] * dim, dim,
                batch.begin() + static_cast<std::ptrdiff_t>(i) * dim);
  }
  State::BasisImpl::to_metric(state.basis_policy,
                              state.calibrated.heads[static_cast<std::size_t>(head)], dim, part,
                              batch.data(), static_cast<int>(chosen.size()));
  return batch;
}

/// @brief The rows of `chosen` whose keys and values are finite in the metric of the basis. NaN,
/// Inf and overflowing values must not reach a basis, which would carry them to other rows.
template <class State>
std::vector<std::int64_t> finite_rows(const State& state, int head, const FlushedRows& rows,
                                      const std::vector<std::int64_t>& chosen) {
  const int dim = state.head_dim();
  std::vector<bool> finite(chosen.size(), true);
  for (const Part part : {Part::key, Part::value}) {
    const std::vector<float> batch = rows_in_metric(state, head, rows, chosen, part);
    for (std::size_t i = 0; i < batch.size(); ++i) {
      // The squares of larger values overflow f32.
      if (!(std::abs(batch[i]) <= 1e18F)) finite[i / static_cast<std::size_t>(dim)] = false;
    }
  }
  std::vector<std::int64_t> kept;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (finite[i]) kept.push_back(chosen[i]);
  }
  return kept;
}

/// @brief Lets the updater observe rows of one head and move its working bases. Heads are
/// independent.
///
/// Sets rows.moved if a basis moved. rows.rejected counts rows that were not finite, and bases that
/// were not finite and orthonormal; for such a basis the old one stays.
template <class State>
void adapt_head(State& state, int slot, int head, FlushedRows& rows, RowRange range, Phase phase) {
  rows.moved = false;
  rows.rejected = 0;
  const std::vector<std::int64_t> wanted = observed_rows(state, rows, range);
  const std::vector<std::int64_t> chosen = finite_rows(state, head, rows, wanted);
  rows.rejected += static_cast<int>(wanted.size() - chosen.size());
  if (chosen.empty()) return;
  const int dim = state.head_dim();
  const HeadBasis& calibrated = state.calibrated.heads[static_cast<std::size_t>(head)];
  auto& adaptation = state.sequence(slot).adaptation[static_cast<std::size_t>(head)];
  std::vector<float> bases[2];
  for (const Part part : {Part::key, Part::value}) {
    const bool keys = part == Part::key;
    const std::vector<float> batch = rows_in_metric(state, head, rows, chosen, part);
    std::vector<float>& current = bases[keys ? 0 : 1] = working_basis(state, slot, head, part);
    State::UpdaterImpl::observe(
        state.updater, keys ? adaptation.key_state : adaptation.value_state,
        MatrixView(batch.data(), static_cast<std::int64_t>(chosen.size()), dim),
        MatrixView(current.data(), dim, keys ? calibrated.key_rank : calibrated.value_rank), phase);
  }
  if constexpr (requires {
                  State::UpdaterImpl::join(state.updater, adaptation.key_state,
                                           adaptation.value_state);
                }) {
    State::UpdaterImpl::join(state.updater, adaptation.key_state, adaptation.value_state);
  }
  for (const Part part : {Part::key, Part::value}) {
    const bool keys = part == Part::key;
    auto& updater_state = keys ? adaptation.key_state : adaptation.value_state;
    const int rank = keys ? calibrated.key_rank : calibrated.value_rank;
    const std::vector<float>& current = bases[keys ? 0 : 1];
    std::vector<float> moved(current.size());
    if (State::UpdaterImpl::maybe_update(state.updater, updater_state,
                                         MatrixView(current.data(), dim, rank),
                                         MutableMatrixView(moved.data(), dim, rank), phase)) {
      if (is_orthonormal(moved, dim, rank)) {
        (keys ? adaptation.key_basis : adaptation.value_basis) =
            StoredMatrix(state.config.epoch_type, dim, rank, moved);
        rows.moved = true;
      } else {
        ++rows.rejected;
      }
    }
  }
}

/// @brief Whether a working basis of the sequence differs from its epoch's.
template <class Sequence>
bool has_moved(const Sequence& sequence) {
  for (const auto& adaptation : sequence.adaptation) {
    if (!adaptation.key_basis.empty() || !adaptation.value_basis.empty()) return true;
  }
  return false;
}

/// @brief Whether to publish before `rows` rows are written: they alone outweigh an epoch's bytes
/// (a prompt), or enough rows were written since the last publication (decoding). Updaters with
/// `publishes` publish whenever a basis moved. While decoding, a publication waits until the merge
/// that the last one began is done; what it waits for keeps it due.
template <class State>
bool publication_due(const State& state, int slot, std::int64_t rows, bool moved, Phase phase) {
  if (!State::UpdaterImpl::adapts || rows == 0) return false;
  const auto& sequence = state.sequence(slot);
  if (!merges_at_once<State>(phase) && sequence.merging >= 0) return false;
  if (publishes_updates<typename State::UpdaterPolicy, Cpu>()) return moved || has_moved(sequence);
  const std::int64_t since = sequence.rows_since_publication + rows;
  if (since >= state.publish_interval()) return true;
  return phase == Phase::prefill && state.compressed_bytes(rows) > state.epochs.bytes(0);
}

namespace detail {

/// The maps of one head for its working bases, with channels in the order that the quantizer needs.
template <class State>
HeadBasis maps_to_publish(const State& state, int slot, int head, const FlushedRows& rows,
                          RowRange range) {
  const HeadBasis& calibrated = state.calibrated.heads[static_cast<std::size_t>(head)];
  std::vector<float> bases[2] = {working_basis(state, slot, head, Part::key),
                                 working_basis(state, slot, head, Part::value)};
  std::vector<float> rms[2] = {calibrated.key_rms, calibrated.value_rms};
  if constexpr (orders_channels<typename State::QuantizerPolicy, Cpu>()) {
    std::vector<std::int64_t> chosen;
    for (std::int64_t row = range.begin; row < range.end; ++row) {
      if (rows.fates[static_cast<std::size_t>(row)] == RowFate::compressed) chosen.push_back(row);
    }
    chosen = finite_rows(state, head, rows, chosen);
    for (const Part part : {Part::key, Part::value}) {
      const std::vector<float> batch = rows_in_metric(state, head, rows, chosen, part);
      const std::size_t which = part == Part::key ? 0 : 1;
      align_to_axes(
          MatrixView(batch.data(), static_cast<std::int64_t>(chosen.size()), state.head_dim()),
          bases[which], rms[which],
          part == Part::key ? calibrated.key_rank : calibrated.value_rank);
    }
  }
  HeadBasis maps = State::BasisImpl::with_working_bases(
      state.basis_policy, calibrated, state.head_dim(), std::move(bases[0]), std::move(bases[1]));
  maps.key_rms = std::move(rms[0]);
  maps.value_rms = std::move(rms[1]);
  return maps;
}

}  // namespace detail

/// @brief Publishes the working bases as the sequence's own epoch, if any basis has moved. Rows are
/// written under this epoch from now on.
/// @param rows  per KV head; the rows of `range` that will be compressed determine the order and
/// scale of channels
/// @return whether an epoch was published
template <class State>
bool publish(State& state, int slot, const std::vector<FlushedRows>& rows, RowRange range) {
  auto& sequence = state.sequence(slot);
  if (!has_moved(sequence)) return false;
  std::vector<HeadBasis> maps;
  for (int head = 0; head < state.num_kv_heads(); ++head)
    maps.push_back(
        detail::maps_to_publish(state, slot, head, rows[static_cast<std::size_t>(head)], range));
  for (auto& adaptation : sequence.adaptation) {
    adaptation.key_basis = {};
    adaptation.value_basis = {};
  }
  const std::int32_t epoch = state.epochs.add(maps, fold_maps(state, maps), state.head_dim());
  state.epochs.release(sequence.epoch);
  sequence.epoch = epoch;
  ++state.statistics.publications;
  return true;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
