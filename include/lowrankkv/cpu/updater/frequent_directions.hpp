// SPDX-License-Identifier: Apache-2.0
/// @file cpu/updater/frequent_directions.hpp  FrequentDirections as an updater of the CPU backend.
///
/// Between two batches a sequence keeps only B, in f32 (StoredSketch): at most min(l, head_dim)
/// rows, and no unused capacity. The sketch thus depends on where batches end. A cache ends them
/// every flush_interval rows, however the calls split the stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/cpu/frequent_directions.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<FrequentDirections, Cpu> {
  static constexpr bool adapts = true;
  static constexpr bool sequential = true;
  static constexpr bool publishes = true;

  struct State {
    cpu::StoredSketch sketch;
    double threshold = 0.0;
    std::int64_t chunk_rows = 0;  ///< rows of the current chunk
    bool exceeded = false;        ///< a row's residual was above the threshold
  };

  static void validate(const FrequentDirections& policy) { check_frequent_directions(policy); }
  static void validate_basis(const FrequentDirections& policy, const LayerBasis& basis) {
    check_thresholds(policy, basis);
  }
  static PromptSelection prompt_selection(const FrequentDirections&) { return {}; }

  static State start(const FrequentDirections& policy, const UpdaterStart& of) {
    const int rows = static_cast<int>(std::ceil(policy.sketch_share * static_cast<float>(of.rank)));
    // A scale of 0 means one chunk per batch. Avoid 0 times an infinite threshold.
    const double threshold =
        policy.threshold_scale > 0.0F
            ? static_cast<double>(policy.threshold_scale) * of.residual_threshold
            : -1.0;
    return {{rows, of.head_dim, {}}, threshold, 0, false};
  }

  /// Cost: one eigendecomposition of the smaller Gram matrix of l + rows.rows rows, plus
  /// O(head_dim^2) per row.
  template <class Real = double>
  static void observe(const FrequentDirections&, State& state, MatrixView rows, MatrixView basis,
                      Phase) {
    cpu::FrequentDirectionsSketch sketch(state.sketch);
    sketch.add(rows);
    state.sketch = sketch.stored();
    state.chunk_rows += rows.rows;
    const Eigen::MatrixX<Real> x = linalg::to_matrix(rows);
    const Eigen::MatrixX<Real> u = linalg::to_matrix(basis);
    const Eigen::VectorX<Real> residual = (x - (x * u) * u.transpose()).rowwise().norm();
    state.exceeded = state.exceeded || residual.maxCoeff() > state.threshold;
  }

  static void join(const FrequentDirections& policy, State& keys, State& values) {
    if (policy.ends_both) keys.exceeded = values.exceeded = keys.exceeded || values.exceeded;
  }

  template <class = void>
  static bool maybe_update(const FrequentDirections& policy, State& state, MatrixView basis,
                           MutableMatrixView updated, Phase) {
    if (!state.exceeded && state.chunk_rows < policy.chunk_length) return false;
    const std::vector<float> moved = linalg::to_row_major(
        cpu::FrequentDirectionsSketch(state.sketch).basis(static_cast<int>(basis.cols)));
    for (std::int64_t row = 0; row < updated.rows; ++row)
      std::copy_n(moved.begin() + row * updated.cols, updated.cols, updated.row(row));
    state.chunk_rows = 0;
    state.exceeded = false;
    return true;
  }

  static void write_state(ByteWriter& out, const State& state) {
    out.value(state.threshold);
    out.value(state.chunk_rows);
    out.value(static_cast<std::uint8_t>(state.exceeded ? 1 : 0));
    state.sketch.write(out);
  }
  static void read_state(ByteReader& in, State& state) {
    state.threshold = in.value<double>();
    state.chunk_rows = in.value<std::int64_t>();
    state.exceeded = in.value<std::uint8_t>() != 0;
    if (state.chunk_rows < 0)
      ::lowrankkv::detail::fail<FormatError>("saved state: a chunk of ", state.chunk_rows,
                                             " rows, at least 0 expected");
    state.sketch = cpu::StoredSketch::read(in, state.sketch.sketch_rows, state.sketch.head_dim);
  }
  static std::size_t state_bytes(const State& state) { return state.sketch.bytes(); }
};

static_assert(UpdaterFor<FrequentDirections, Cpu>);

LOWRANKKV_COMPILED_TEMPLATE(void Impl<FrequentDirections, Cpu>::observe<double>(
    const FrequentDirections&, State&, MatrixView, MatrixView, Phase))
LOWRANKKV_COMPILED_TEMPLATE(bool Impl<FrequentDirections, Cpu>::maybe_update<void>(
    const FrequentDirections&, State&, MatrixView, MutableMatrixView, Phase))

LOWRANKKV_NAMESPACE_END
