// SPDX-License-Identifier: Apache-2.0
/// @file cpu/fold_maps.hpp  Folds of the quantizer for the stored maps, and alignment of bases to
/// the channel order that the quantizer needs.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "lowrankkv/cpu/layer_state.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The quantizer's folds for the maps of all heads. Empty folds if the quantizer has none.
template <class State>
std::vector<HeadFolds> fold_maps(const State& state, const std::vector<HeadBasis>& heads) {
  using Codec = typename State::Codec;
  std::vector<HeadFolds> folds(heads.size());
  if constexpr (requires(const typename Codec::Layout& layout, std::span<const float> rms) {
                  Codec::fold(state.quantizer, layout, rms);
                }) {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      const int index = static_cast<int>(head);
      folds[head] = {
          Codec::fold(state.quantizer, state.code_layout(index, Part::key), heads[head].key_rms),
          Codec::fold(state.quantizer, state.code_layout(index, Part::value),
                      heads[head].value_rms)};
    }
  }
  return folds;
}

/// @brief Removes the quantizer's rotation from a basis [head_dim, rank] that was read from an
/// epoch. Its channels are then ordered by energy again.
template <class State, class Stored = float>
void undo_rotation(const State& state, int head, Part part, std::vector<float>& basis) {
  const HeadBasis& calibrated = state.calibrated.heads[static_cast<std::size_t>(head)];
  using Codec = typename State::Codec;
  if constexpr (requires(const typename Codec::Layout& layout, std::span<const float> rms) {
                  Codec::fold(state.quantizer, layout, rms);
                }) {
    const ChannelFold fold =
        Codec::fold(state.quantizer, state.code_layout(head, part),
                    part == Part::key ? calibrated.key_rms : calibrated.value_rms);
    if (fold.rotation.empty()) return;
    using RowMajor = Eigen::Matrix<Stored, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    const int rank = part == Part::key ? calibrated.key_rank : calibrated.value_rank;
    Eigen::Map<RowMajor> columns(basis.data(), state.head_dim(), rank);
    columns =
        (columns * Eigen::Map<const RowMajor>(fold.rotation.data(), rank, rank).transpose()).eval();
  }
}

/// @brief Aligns an orthonormal basis, within its span, to the principal axes of `rows`, largest
/// first, and computes the rms of the coefficients along them.
///
/// The calibrated rms count as `rank` additional rows, in axes and in rms: this damps chance in
/// short batches. Without rms and without rows, nothing is done.
/// @param rows   [count, head_dim] in the space in which the basis is orthonormal
/// @param basis  [head_dim, rank], rotated in place
/// @param rms    the calibrated rms of the channels, or empty; replaced by the new rms
template <class Real = double, class Stored = float>
void align_to_axes(MatrixView rows, std::vector<float>& basis, std::vector<float>& rms, int rank) {
  using RowMajor = Eigen::Matrix<Stored, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>> batch(
      rows.data, rows.rows, rows.cols, Eigen::OuterStride<>(rows.row_stride));
  Eigen::Map<RowMajor> columns(basis.data(), rows.cols, rank);
  if (rms.empty() && rows.rows == 0) return;
  const Eigen::MatrixX<Real> coefficients = (batch * columns).template cast<double>();
  Eigen::MatrixX<Real> gram = coefficients.transpose() * coefficients;
  for (std::size_t channel = 0; channel < rms.size(); ++channel) {
    const Eigen::Index index = static_cast<Eigen::Index>(channel);
    gram(index, index) += rank * static_cast<double>(rms[channel]) * rms[channel];
  }
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixX<Real>> solver(gram);
  columns = (columns.template cast<double>() * solver.eigenvectors().rowwise().reverse())
                .template cast<float>()
                .eval();
  const Eigen::VectorX<Real> energy = solver.eigenvalues().reverse().cwiseMax(0.0);
  for (std::size_t channel = 0; channel < rms.size(); ++channel) {
    rms[channel] =
        (std::max)(1e-20F, static_cast<float>(std::sqrt(energy[static_cast<Eigen::Index>(channel)] /
                                                        static_cast<double>(rows.rows + rank))));
  }
}

LOWRANKKV_COMPILED_TEMPLATE(void align_to_axes<double, float>(MatrixView, std::vector<float>&,
                                                              std::vector<float>&, int))

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
