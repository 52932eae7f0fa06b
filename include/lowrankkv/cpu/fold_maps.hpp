// SPDX-License-Identifier: Apache-2.0
/// @file cpu/fold_maps.hpp  What the stored maps take over from the quantizer, and bases turned to the order it wants.
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <cmath>
#include <span>
#include <vector>

#include "lowrankkv/cpu/layer_state.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The quantizer's folds for the maps of all heads; empty ones if it has none.
template <class State>
std::vector<HeadFolds> fold_maps(const State& state, const std::vector<HeadBasis>& heads) {
  using Codec = typename State::Codec;
  std::vector<HeadFolds> folds(heads.size());
  if constexpr (requires(const typename Codec::Layout& layout, std::span<const float> rms) { Codec::fold(state.quantizer, layout, rms); }) {
    for (std::size_t head = 0; head < heads.size(); ++head) {
      const int index = static_cast<int>(head);
      folds[head] = {Codec::fold(state.quantizer, state.code_layout(index, Part::key), heads[head].key_rms),
                     Codec::fold(state.quantizer, state.code_layout(index, Part::value), heads[head].value_rms)};
    }
  }
  return folds;
}

/// @brief Turns an orthonormal basis within its span to the principal axes of `rows`, largest first, and says how large the
/// coefficients are along them.
/// @param rows   [count, head_dim] in the space in which the basis is orthonormal
/// @param basis  [head_dim, rank], turned in place
/// @param rms    the calibrated rms of the channels, or empty; replaced by that of the rows, with the weight of `rank`
///               calibrated rows against chance in short batches
inline void turn_to_axes(MatrixView rows, std::vector<float>& basis, std::vector<float>& rms, int rank) {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>> batch(rows.data, rows.rows, rows.cols, Eigen::OuterStride<>(rows.row_stride));
  Eigen::Map<RowMajor> columns(basis.data(), rows.cols, rank);
  const Eigen::MatrixXd coefficients = (batch * columns).template cast<double>();
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(coefficients.transpose() * coefficients);
  columns = (columns.template cast<double>() * solver.eigenvectors().rowwise().reverse()).template cast<float>().eval();
  const Eigen::VectorXd energy = solver.eigenvalues().reverse().cwiseMax(0.0);
  for (std::size_t channel = 0; channel < rms.size(); ++channel) {
    const double calibrated = static_cast<double>(rms[channel]) * rms[channel];
    rms[channel] = static_cast<float>(std::sqrt((energy[static_cast<Eigen::Index>(channel)] + rank * calibrated) / static_cast<double>(rows.rows + rank)));
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
