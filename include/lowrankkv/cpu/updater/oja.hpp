// SPDX-License-Identifier: Apache-2.0
/// @file cpu/updater/oja.hpp  The Oja step on Eigen matrices, and Oja as an updater of the CPU
/// backend.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstdint>

#include "lowrankkv/concepts/updater.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/linalg/orthonormalize.hpp"
#include "lowrankkv/updater/oja.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief One Oja step. Equation and source: updater/oja.hpp.
/// @param moment  K^T K of the batch, [d, d]
/// @param basis   [d, r] with orthonormal columns
/// @return the new basis, orthonormal; `basis` if the batch has no energy, or if no step is safe
/// (printed_normalised)
///
/// Cost: O(d^2 r). Accumulates in f64.
template <class Real = double>
Eigen::MatrixXd oja_step(const linalg::MatrixIn<Real>& moment, const linalg::MatrixIn<Real>& basis,
                         double rate, OjaForm form) {
  const double energy = moment.trace();
  if (!(energy > 0.0) || !(rate > 0.0) || !std::isfinite(energy)) return basis;
  const Eigen::MatrixX<Real> pull = moment * basis;  // K^T K U
  const double scale =
      form == OjaForm::printed_raw ? 1.0 : static_cast<double>(moment.rows()) / energy;
  if (form == OjaForm::power) {
    // Divided by (1 + rate): the span is the same, and no rate overflows, not even infinity.
    const double keep = 1.0 / (1.0 + rate);
    return linalg::orthonormal_columns(keep * basis + ((1.0 - keep) * scale) * pull);
  }
  // (I - U U^T) K^T K U
  const Eigen::MatrixX<Real> residual = pull - basis * (basis.transpose() * pull);
  if (form == OjaForm::printed_raw) return linalg::orthonormal_columns(basis + rate * residual);
  const auto captured = [&](const Eigen::MatrixX<Real>& u) {
    return (u.transpose() * moment * u).trace();
  };
  const double before = captured(basis);
  for (int attempt = 0; attempt < 20; ++attempt, rate *= 0.5) {
    Eigen::MatrixX<Real> moved = linalg::orthonormal_columns(basis + rate * scale * residual);
    if (captured(moved) >= before) return moved;
  }
  return basis;
}

/// @brief One Oja step from the batch itself, rows [n, d]; for use on matrices outside a cache.
/// `basis = lowrankkv::cpu::oja_update(keys, basis, 0.1);`
template <class Real = double>
Eigen::MatrixXd oja_update(const linalg::MatrixRef<Real>& rows, const linalg::MatrixIn<Real>& basis,
                           double rate, OjaForm form = OjaForm::power) {
  if (rows.cols() != basis.rows())
    ::lowrankkv::detail::fail<ShapeError>("head_dim: rows ", rows.cols(), ", basis ", basis.rows());
  if (basis.cols() > basis.rows())
    ::lowrankkv::detail::fail<ShapeError>("rank: ", basis.cols(), ", head_dim ", basis.rows());
  return oja_step(rows.transpose() * rows, basis, rate, form);
}

}  // namespace cpu

template <>
struct Impl<Oja, Cpu> {
  static constexpr bool adapts = true;
  /// K^T K of the rows seen since the last step; empty between steps.
  struct State {
    Eigen::MatrixXd moment;
    std::int64_t decode_steps = 0;  ///< steps taken so far while decoding
  };

  static void validate(const Oja& policy) { check_oja(policy); }
  static PromptSelection prompt_selection(const Oja& policy) {
    return {policy.prefill_share,
            {policy.importance_window, policy.importance_kernel, policy.importance_pooling},
            policy.importance_scope};
  }

  template <class Real = double>
  static void observe(const Oja&, State& state, MatrixView rows, MatrixView, Phase) {
    const Eigen::MatrixX<Real> wide = linalg::to_matrix(rows);
    if (state.moment.size() == 0) state.moment = Eigen::MatrixX<Real>::Zero(rows.cols, rows.cols);
    state.moment.noalias() += wide.transpose() * wide;
  }

  template <class Real = double, class Stored = float>
  static bool maybe_update(const Oja& policy, State& state, MatrixView basis,
                           MutableMatrixView updated, Phase phase) {
    if (state.moment.size() == 0) return false;
    using RowMajor = Eigen::Matrix<Stored, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    double rate = policy.prefill_rate;
    if (phase == Phase::decode)
      rate = policy.decode_rate / (1.0 + static_cast<double>(policy.decode_decay) *
                                             static_cast<double>(state.decode_steps++));
    const Eigen::MatrixX<Real> moved =
        cpu::oja_step(state.moment, linalg::to_matrix(basis), rate, policy.form);
    Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>(updated.data, updated.rows, updated.cols,
                                                  Eigen::OuterStride<>(updated.row_stride)) =
        moved.template cast<float>();
    state.moment.resize(0, 0);
    return true;
  }

  // Between two steps the moment is empty: the state is only the position in the schedule.
  static void write_state(ByteWriter& out, const State& state) { out.value(state.decode_steps); }
  static void read_state(ByteReader& in, State& state) {
    state.decode_steps = in.value<std::int64_t>();
    if (state.decode_steps < 0 || state.decode_steps > std::int64_t{1} << 48)
      ::lowrankkv::detail::fail<FormatError>("saved state: decode_steps ", state.decode_steps,
                                             ", 0 to 2^48 expected");
  }
  static std::size_t state_bytes(const State& state) {
    return static_cast<std::size_t>(state.moment.size()) * sizeof(double);
  }
};

static_assert(UpdaterFor<Oja, Cpu>);

LOWRANKKV_COMPILED_TEMPLATE(Eigen::MatrixXd cpu::oja_update<double>(
    const linalg::MatrixRef<double>&, const linalg::MatrixIn<double>&, double, OjaForm))
LOWRANKKV_COMPILED_TEMPLATE(bool Impl<Oja, Cpu>::maybe_update<double, float>(
    const Oja&, State&, MatrixView, MutableMatrixView, Phase))
LOWRANKKV_COMPILED_TEMPLATE(void Impl<Oja, Cpu>::observe<double>(const Oja&, State&, MatrixView,
                                                                 MatrixView, Phase))

LOWRANKKV_NAMESPACE_END
