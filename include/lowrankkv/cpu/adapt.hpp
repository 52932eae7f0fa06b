// SPDX-License-Identifier: Apache-2.0
/// @file cpu/adapt.hpp  Running the updater on rows about to be compressed, and publishing the basis it arrives at.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/orthonormalize.hpp"
#include "lowrankkv/cpu/segments.hpp"
#include "lowrankkv/cpu/snapkv_scores.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Rows of one KV head that are leaving full rank, f32 as stored: the first `count` are decided on, the others
/// (the recent window) only take part in scoring.
struct LeavingRows {
  std::vector<float> keys, values;  ///< [total, head_dim]
  std::int64_t total = 0;
  std::int64_t count = 0;
  std::vector<RowState> states;     ///< [count]
  int rejected = 0;                 ///< updates that gave no usable basis
};

/// @brief The basis that the updater would move next: its working basis, or else that of the current epoch.
template <class State>
std::vector<float> working_basis(const State& state, int slot, int head, Part part) {
  const auto& sequence = state.sequence(slot);
  const auto& adaptation = sequence.adaptation[static_cast<std::size_t>(head)];
  const StoredMatrix& moved = part == Part::key ? adaptation.key_basis : adaptation.value_basis;
  if (!moved.empty()) {
    std::vector<float> basis = moved.values();
    orthonormalize(basis, state.head_dim());  // rounding for storage cost it that
    return basis;
  }
  HeadBasis maps = state.calibrated.heads[static_cast<std::size_t>(head)];
  if (sequence.epoch != 0) {
    const EpochHead& epoch = state.epochs.head(sequence.epoch, head);
    maps.key_down = epoch.key_down.values();
    maps.value_down = epoch.value_down.values();
  }
  std::vector<float> basis = State::BasisImpl::working_basis(state.basis_policy, maps, state.head_dim(), part);
  if (sequence.epoch != 0) orthonormalize(basis, state.head_dim());
  return basis;
}

/// @brief The rows that the updater observes: of a prompt those with the highest SnapKV scores, of decoded rows all.
/// Only rows that will be compressed are candidates: the basis has nothing to do with the others.
template <class State>
std::vector<std::int64_t> observed_rows(const State& state, int slot, int head, const LeavingRows& rows, Phase phase) {
  const PromptSelection selection = State::UpdaterImpl::prompt_selection(state.updater);
  const PromptChunk& chunk = state.sequence(slot).chunk;
  std::vector<std::int64_t> chosen;
  std::int64_t candidates = 0;
  for (const RowState row : rows.states) candidates += row == RowState::compressed ? 1 : 0;
  const bool scored = phase == Phase::prefill && selection.share < 1.0F && chunk.num_window_queries() > 0;
  if (!scored) {
    for (std::int64_t row = 0; row < rows.count; ++row) {
      if (rows.states[static_cast<std::size_t>(row)] == RowState::compressed) chosen.push_back(row);
    }
    return chosen;
  }
  const int group = state.config.shape.group_size();
  const int num_queries = chunk.num_window_queries();
  std::vector<float> queries(static_cast<std::size_t>(num_queries * group * state.head_dim()));
  for (int query = 0; query < num_queries; ++query) {
    for (int member = 0; member < group; ++member) {
      const float* source = chunk.window_query(query, head * group + member);
      std::copy(source, source + state.head_dim(), queries.begin() + (query * group + member) * state.head_dim());
    }
  }
  std::vector<float> scores = snapkv_scores({queries.data(), std::int64_t{num_queries} * group, state.head_dim()}, group,
                                            {rows.keys.data(), rows.total, state.head_dim()}, state.config.scale());
  for (std::int64_t row = 0; row < rows.count; ++row) {
    if (rows.states[static_cast<std::size_t>(row)] != RowState::compressed) scores[static_cast<std::size_t>(row)] = -1.0F;
  }
  const double wanted = std::ceil(static_cast<double>(selection.share) * static_cast<double>(rows.total));
  return top_tokens(scores, rows.count, (std::min)(candidates, static_cast<std::int64_t>(wanted)));
}

/// @brief True if the columns of `basis` [dim, rank] are finite and orthonormal: what an updater must return.
inline bool is_orthonormal(const std::vector<float>& basis, int dim, int rank) {
  return ::lowrankkv::detail::biorthogonality_error(basis, basis, dim, rank) < 1e-2;
}

/// @brief Lets the updater observe the rows of one head and move its working bases. Heads are independent.
/// @return how many bases were refused because they were not finite and orthonormal; the old ones stay
template <class State>
int adapt_head(State& state, int slot, int head, const LeavingRows& rows, Phase phase) {
  const std::vector<std::int64_t> chosen = observed_rows(state, slot, head, rows, phase);
  if (chosen.empty()) return 0;
  int rejected = 0;
  const int dim = state.head_dim();
  const HeadBasis& calibrated = state.calibrated.heads[static_cast<std::size_t>(head)];
  auto& adaptation = state.sequence(slot).adaptation[static_cast<std::size_t>(head)];
  std::vector<float> batch(chosen.size() * static_cast<std::size_t>(dim));
  for (const Part part : {Part::key, Part::value}) {
    const bool keys = part == Part::key;
    const std::vector<float>& source = keys ? rows.keys : rows.values;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      std::copy_n(source.begin() + chosen[i] * dim, dim, batch.begin() + static_cast<std::ptrdiff_t>(i) * dim);
    }
    State::BasisImpl::to_metric(state.basis_policy, calibrated, dim, part, batch.data(), static_cast<int>(chosen.size()));
    auto& updater_state = keys ? adaptation.key_state : adaptation.value_state;
    State::UpdaterImpl::observe(state.updater, updater_state, MatrixView(batch.data(), static_cast<std::int64_t>(chosen.size()), dim), phase);
    const int rank = keys ? calibrated.key_rank : calibrated.value_rank;
    const std::vector<float> current = working_basis(state, slot, head, part);
    std::vector<float> moved(current.size());
    if (State::UpdaterImpl::maybe_update(state.updater, updater_state, MatrixView(current.data(), dim, rank),
                                         MutableMatrixView(moved.data(), dim, rank), phase)) {
      if (is_orthonormal(moved, dim, rank)) {
        (keys ? adaptation.key_basis : adaptation.value_basis) = StoredMatrix(state.config.epoch_type, dim, rank, moved);
      } else {
        ++rejected;
      }
    }
  }
  return rejected;
}

/// @brief Whether `rows` rows that are about to be written are reason to publish: alone they outweigh an epoch's bytes
/// (a prompt), or enough have gone by since the last one (decoding).
template <class State>
bool publication_due(const State& state, int slot, std::int64_t rows, Phase phase) {
  if (!State::UpdaterImpl::adapts || rows == 0) return false;
  const std::int64_t since = state.sequence(slot).rows_since_publication + rows;
  if (since >= state.publish_interval()) return true;
  return phase == Phase::prefill && static_cast<std::size_t>(rows) * state.compressed_row_bytes() > state.epochs.bytes(0);
}

/// @brief Publishes the working bases as the sequence's own epoch, if any has moved: rows are written under it from now on.
template <class State>
bool publish(State& state, int slot) {
  auto& sequence = state.sequence(slot);
  bool moved = false;
  for (const auto& adaptation : sequence.adaptation) moved = moved || !adaptation.key_basis.empty() || !adaptation.value_basis.empty();
  if (!moved) return false;
  std::vector<HeadBasis> maps;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    maps.push_back(State::BasisImpl::with_working_bases(
        state.basis_policy, state.calibrated.heads[static_cast<std::size_t>(head)], state.head_dim(),
        working_basis(state, slot, head, Part::key), working_basis(state, slot, head, Part::value)));
  }
  for (auto& adaptation : sequence.adaptation) {
    adaptation.key_basis = {};
    adaptation.value_basis = {};
  }
  const std::int32_t epoch = state.epochs.add(maps, state.head_dim());
  state.epochs.release(sequence.epoch);
  sequence.epoch = epoch;
  ++state.statistics.publications;
  return true;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
