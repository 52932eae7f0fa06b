// SPDX-License-Identifier: Apache-2.0
/// @file train/factor_chain.hpp  A deep linear projector: a chain of N factors D = D^1 D^2 ... D^N,
/// where it starts, and the gradient of every factor (DLRP eq. 5, 10).
///
/// A chain is a span of matrices, applied to row vectors from the left end on: x D^1 ... D^N. Its
/// product is calibrate::fold(). Depth adds nothing that one matrix could not express; it changes
/// the path that training takes.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief N factors, each with ones on its main diagonal and zeros elsewhere: D^1 [rows, hidden],
/// D^2 ... D^(N-1) [hidden, hidden], D^N [hidden, cols] (DLRP eq. 5, section 4.1: "initialized as
/// identity matrices"). Their product is the identity [rows, cols], cut where rows and cols differ.
/// @param hidden  d_hidden; no factor has it if N = 1
/// @throws ShapeError unless rows, cols and num_factors are at least 1, and hidden is at least
/// min(rows, cols): a narrower chain cannot start as the identity
template <class Real = double>
std::vector<Eigen::MatrixXd> identity_chain(int rows, int cols, int hidden, int num_factors) {
  using ::lowrankkv::detail::fail;
  if (rows < 1 || cols < 1)
    fail<ShapeError>("chain: rows ", rows, ", cols ", cols, "; both must be at least 1");
  if (num_factors < 1) fail<ShapeError>("chain: num_factors ", num_factors, ", at least 1 needed");
  if (num_factors > 1 && hidden < (std::min)(rows, cols))
    fail<ShapeError>("chain: hidden ", hidden, ", below the ", (std::min)(rows, cols),
                     " of an identity [", rows, ", ", cols, "]");
  std::vector<Eigen::MatrixX<Real>> chain;
  for (int n = 0; n < num_factors; ++n)
    chain.push_back(Eigen::MatrixX<Real>::Identity(n == 0 ? rows : hidden,
                                                   n == num_factors - 1 ? cols : hidden));
  return chain;
}

/// @brief The gradient of a loss with respect to every factor, given G, that with respect to the
/// product: (D^1 ... D^(n-1))^T G (D^(n+1) ... D^N)^T, in reverse mode.
/// @param product_gradient  G, of the product's shape
/// @return one matrix a factor, of its shape
/// @throws ShapeError if the chain is empty, if neighbours do not fit, or if G does not
///
/// Cost: about three products a factor.
template <class Real = double>
std::vector<Eigen::MatrixXd> chain_gradients(
    std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain,
    const linalg::MatrixRef<Real>& product_gradient) {
  using ::lowrankkv::detail::check_equal;
  calibrate::check_chain<Real>(chain);
  check_equal("rows", "chain", chain.front().rows(), "gradient", product_gradient.rows());
  check_equal("cols", "chain", chain.back().cols(), "gradient", product_gradient.cols());
  std::vector<Eigen::MatrixX<Real>> before{chain.front()};  // D^1 ... D^(n+1) at n
  for (std::size_t n = 1; n + 1 < chain.size(); ++n) before.emplace_back(before.back() * chain[n]);
  std::vector<Eigen::MatrixX<Real>> gradients(chain.size());
  Eigen::MatrixX<Real> behind = product_gradient;  // G (D^(n+1) ... D^N)^T
  for (std::size_t n = chain.size() - 1; n > 0; --n) {
    gradients[n] = before[n - 1].transpose() * behind;
    behind = (behind * chain[n].transpose()).eval();
  }
  gradients[0] = behind;
  return gradients;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
