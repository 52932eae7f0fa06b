// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/weights.hpp  Moments of keys and values from projection weights, without a pass
/// over K and V (Palu; STAR-KV section 4.1).
///
/// A head's keys are k = W x + b. From the moments of the layer's input x (S = sum x x^T, s = sum
/// x, n rows) follows exactly
///
///     sum k k^T = W S W^T + (W s) b^T + b (W s)^T + n b b^T,   sum k = W s + n b.
///
/// Bases from these moments are those of an SVD of the whitened weights W S^(1/2). Without an input
/// moment, S = I gives the bases of an SVD of W itself. RoPE is not linear in x: for keys these are
/// moments before RoPE. Values have no RoPE.
///
/// For one head, W is [head_dim, hidden]. Several heads stacked, [num_kv_heads head_dim, hidden],
/// give the joint moments for calibrate/joint_values.hpp; head_moments() extracts the moments of
/// each head from them.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/rotary_table.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// head_dim of `width` channels of stacked heads. Raises ShapeError unless num_kv_heads divides
/// `width`.
inline Eigen::Index joint_head_dim(Eigen::Index width, int num_kv_heads) {
  if (num_kv_heads < 1 || width % num_kv_heads != 0) {
    ::lowrankkv::detail::fail<ShapeError>("num_kv_heads: ", num_kv_heads,
                                          " does not divide the joint width ", width);
  }
  return width / num_kv_heads;
}

}  // namespace detail
namespace calibrate {

/// @brief The moments of W x + b from the moments of x (whitened; equations in the file comment).
/// @param weight  W [channels, hidden], row-major: each row makes one output channel
/// (torch.nn.Linear.weight)
/// @param input   moments of x [hidden]: second, first and count as Moments::add collects them
/// @param bias    b [channels]; empty: none
/// @throws ShapeError if hidden or channels differ
///
/// Cost: O(channels hidden^2). In f64.
template <class Real = double, class Stored = float>
Moments weight_moments(MatrixView weight, const Moments& input, std::span<const float> bias = {}) {
  ::lowrankkv::detail::check_equal("hidden", "weight", weight.cols, "second moment",
                                   std::int64_t{input.second.rows()});
  ::lowrankkv::detail::check_equal("hidden", "weight", weight.cols, "sum",
                                   std::int64_t{input.first.size()});
  if (!bias.empty())
    ::lowrankkv::detail::check_equal("channels", "weight", static_cast<std::size_t>(weight.rows),
                                     "bias", bias.size());
  const Eigen::MatrixX<Real> w = linalg::to_matrix(weight);
  Moments moments;
  moments.count = input.count;
  moments.second = w * input.second * w.transpose();
  moments.first = w * input.first;
  if (!bias.empty()) {
    const Eigen::VectorX<Real>& sum = moments.first;
    const Eigen::VectorX<Real> b =
        Eigen::Map<const Eigen::VectorX<Stored>>(bias.data(), weight.rows).template cast<double>();
    moments.second += sum * b.transpose() + b * sum.transpose() + input.count * b * b.transpose();
    moments.first += input.count * b;
  }
  return moments;
}

/// @brief The moments of W x from the mean second moment E[x x^T] [hidden, hidden] alone. `count`
/// is the number of rows that it stands for. The mean is not known, so the sum is 0, and centring
/// has no effect. @throws ShapeError if a size differs, ValueError if count < 0
template <class Real = double>
Moments weight_moments(MatrixView weight, const linalg::MatrixRef<Real>& mean_second_moment,
                       double count) {
  if (mean_second_moment.rows() != mean_second_moment.cols()) {
    ::lowrankkv::detail::fail<ShapeError>("hidden: second moment has ", mean_second_moment.rows(),
                                          " rows, ", mean_second_moment.cols(), " columns");
  }
  if (!(count >= 0.0)) ::lowrankkv::detail::fail<ValueError>("count: at least 0, given ", count);
  Moments input;
  input.second = mean_second_moment * count;
  input.first = Eigen::VectorX<Real>::Zero(mean_second_moment.rows());
  input.count = count;
  return weight_moments(weight, input);
}

/// @brief Moments without whitening: W W^T, as if the input were one row of white noise. The
/// spectrum is the squared singular values of W (STAR-KV eq. 1 thresholds the singular values
/// themselves, calibrate/soft_threshold.hpp). Cost: O(channels^2 hidden).
template <class Real = double>
Moments weight_moments(MatrixView weight) {
  const Eigen::MatrixX<Real> w = linalg::to_matrix(weight);
  Moments moments(static_cast<int>(weight.rows));
  moments.second = w * w.transpose();
  moments.count = 1.0;
  return moments;
}

/// @brief Moments of rows that are rotated by each of some distances, from the moments of the
/// pre-RoPE rows. With respect to pre-RoPE keys, queries have these moments. The sum is rotated
/// too, so that centring stays consistent.
/// @param rotary     of head_dim
/// @param distances  spread over a context
template <class Real = double, class Stored = float>
Moments rotated_moments(const Moments& moments, const cpu::RotaryTable& rotary,
                        std::span<const std::int64_t> distances) {
  using Rows = Eigen::Matrix<Stored, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::VectorX<Real>& sum = moments.first;
  Moments result(static_cast<int>(moments.second.rows()));
  result.count = moments.count;
  for (const std::int64_t distance : distances) {
    const auto turn = [&](const Eigen::MatrixX<Real>& rows) {  // every row
      Rows rotated = rows.template cast<float>();
      for (Eigen::Index row = 0; row < rotated.rows(); ++row)
        rotary.rotate_row(distance, rotated.row(row).data());
      return Eigen::MatrixX<Real>(rotated.template cast<double>());
    };
    const double share = 1.0 / static_cast<double>(distances.size());
    result.second += share * turn(turn(moments.second).transpose());
    result.first += share * turn(sum.transpose()).transpose();
  }
  return result;
}

/// @brief The moments of each head from the moments of all heads stacked: the diagonal blocks.
/// @param joint  moments of [h_0 | h_1 | ...], num_kv_heads head_dim wide
/// @throws ShapeError unless num_kv_heads divides the width
template <class Real = double>
std::vector<Moments> head_moments(const Moments& joint, int num_kv_heads) {
  const Eigen::MatrixX<Real>& second = joint.second;
  const Eigen::VectorX<Real>& first = joint.first;
  const Eigen::Index width = second.rows();
  const Eigen::Index dim = ::lowrankkv::detail::joint_head_dim(width, num_kv_heads);
  std::vector<Moments> heads(static_cast<std::size_t>(num_kv_heads));
  for (Eigen::Index head = 0; head < num_kv_heads; ++head) {
    Moments& moments = heads[static_cast<std::size_t>(head)];
    moments.second = second.block(head * dim, head * dim, dim, dim);
    moments.first = first.segment(head * dim, dim);
    moments.count = joint.count;
  }
  return heads;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
