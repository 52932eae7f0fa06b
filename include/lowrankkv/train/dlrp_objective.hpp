// SPDX-License-Identifier: Apache-2.0
/// @file train/dlrp_objective.hpp  What DLRP minimises: the task's loss plus alpha times the
/// Frobenius surrogate, and its gradient with respect to every factor (DLRP eq. 7, 9).
///
/// The task's loss and its gradient with respect to the chains' products come from the caller, who
/// has the model. With P a product and x its rows, the gradient with respect to P is x^T g, where g
/// is that with respect to x P.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/train/deep_projectors.hpp"
#include "lowrankkv/train/factor_chain.hpp"
#include "lowrankkv/train/nuclear_surrogate.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief The value of the objective, and its parts.
struct Objective {
  double task = 0.0;         ///< L_CE, as the caller gave it
  double regulariser = 0.0;  ///< L_Reg, before its weight; 0 where it has none
  double total = 0.0;        ///< L_CE + alpha L_Reg

  friend bool operator==(const Objective&, const Objective&) = default;
};

/// @brief L_Reg: the sum of ||D^n||_F over layers, projections, heads and factors (DLRP eq. 7,
/// which writes one head). Adds `weight` times its gradient to `gradients`.
/// @param gradients  one a factor, in the order of DeepProjectors::factors
/// @throws ShapeError if there are more or fewer gradients than factors, ValueError for a factor
/// that is not finite
///
/// Cost: three passes over the factors.
template <class Real = double>
double add_regulariser(const DeepProjectors& projectors, double weight,
                       std::vector<Eigen::MatrixX<Real>>& gradients) {
  ::lowrankkv::detail::check_equal("factors", "projectors", projectors.factors.size(), "gradients",
                                   gradients.size());
  double sum = 0.0;
  std::size_t at = 0;
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const ChainFunction part = frobenius_sum<Real>(projectors.chain(index));
    sum += part.value;
    for (const Eigen::MatrixX<Real>& gradient : part.gradients)
      gradients[at++] += weight * gradient;
  }
  return sum;
}

/// @brief The gradient of a loss with respect to every factor, given those with respect to every
/// product, in the order of chain_index(). @throws ShapeError, naming both values, if gradients are
/// missing or of other shapes; ValueError if one is not finite
///
/// Cost: chain_gradients() of every chain.
template <class Real = double>
std::vector<Eigen::MatrixXd> factor_gradients(
    const DeepProjectors& projectors, const std::vector<Eigen::MatrixX<Real>>& product_gradients) {
  ::lowrankkv::detail::check_equal("chains", "projectors",
                                   static_cast<std::size_t>(projectors.num_chains()), "gradients",
                                   product_gradients.size());
  std::vector<Eigen::MatrixX<Real>> gradients;
  gradients.reserve(projectors.factors.size());
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const Eigen::MatrixX<Real>& given = product_gradients[static_cast<std::size_t>(index)];
    if (!given.allFinite()) {
      const ChainPlace place = projectors.place_of(index);
      ::lowrankkv::detail::fail<ValueError>("gradient of layer ", place.layer, ", ",
                                            name_of(place.projection), " ", place.head,
                                            ": its norm is ", given.norm(), ", finite expected");
    }
    for (Eigen::MatrixX<Real>& gradient : chain_gradients<Real>(projectors.chain(index), given))
      gradients.push_back(std::move(gradient));
  }
  return gradients;
}

/// @brief L_CE + alpha L_Reg (DLRP eq. 9) and its gradient with respect to every factor.
/// @param task               L_CE of a mini-batch
/// @param product_gradients  its gradient with respect to every product, in the order of
/// chain_index()
/// @param alpha  0: the objective of fine-tuning, L_CE alone (DLRP algorithm 2, line 11)
/// @param gradients  result, one a factor
/// @throws ValueError for a loss or a gradient that is not finite, ShapeError as
/// factor_gradients(); `gradients` is then as it was
template <class Real = double>
Objective dlrp_objective(const DeepProjectors& projectors, double task,
                         const std::vector<Eigen::MatrixX<Real>>& product_gradients, double alpha,
                         std::vector<Eigen::MatrixX<Real>>& gradients) {
  if (!std::isfinite(task))
    ::lowrankkv::detail::fail<ValueError>("task loss: ", task, ", finite expected");
  std::vector<Eigen::MatrixX<Real>> result = factor_gradients<Real>(projectors, product_gradients);
  Objective objective{task, 0.0, task};
  if (alpha != 0.0) {
    objective.regulariser = add_regulariser<Real>(projectors, alpha, result);
    objective.total += alpha * objective.regulariser;
  }
  gradients = std::move(result);
  return objective;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
