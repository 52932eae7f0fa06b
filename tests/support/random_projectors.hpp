// SPDX-License-Identifier: Apache-2.0
// Deep projectors of random shapes whose factors have left their start, and losses of their
// products.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <vector>

#include "lowrankkv/train/deep_projectors.hpp"
#include "support/matrices.hpp"

namespace support {

/// A shape with groups of 1 to 3 query heads; head_dim is odd now and then where nothing needs
/// pairs.
inline lowrankkv::CacheShape random_shape(Random& random, lowrankkv::train::DlrpGeometry geometry) {
  const int kv_heads = uniform(random, 1, 3);
  const int dim = geometry == lowrankkv::train::DlrpGeometry::before_rope
                      ? 2 * uniform(random, 1, 4)
                      : uniform(random, 1, 9);
  return {kv_heads * uniform(random, 1, 3), kv_heads, dim};
}

/// Projectors at full rank, `distance` away from the identity in every entry.
inline lowrankkv::train::DeepProjectors random_projectors(Random& random,
                                                          lowrankkv::train::DlrpGeometry geometry,
                                                          double distance = 0.3) {
  const lowrankkv::CacheShape shape = random_shape(random, geometry);
  lowrankkv::train::DlrpOptions options;
  options.num_factors = uniform(random, 1, 4);
  options.hidden = shape.head_dim + uniform(random, 0, 3);
  options.geometry = geometry;
  options.pairing = uniform(random, 0, 1) == 0 ? lowrankkv::RopePairing::half_split
                                               : lowrankkv::RopePairing::interleaved;
  auto projectors = lowrankkv::train::identity_projectors(shape, uniform(random, 1, 3), options);
  for (Eigen::MatrixXd& factor : projectors.factors)
    factor += distance * gaussian(random, factor.rows(), factor.cols());
  return projectors;
}

/// Ranks of every KV head, each its own; without pairs.
inline std::vector<lowrankkv::train::HeadRanks> random_ranks(
    Random& random, const lowrankkv::train::DeepProjectors& projectors) {
  std::vector<lowrankkv::train::HeadRanks> ranks(projectors.ranks.size());
  const int dim = projectors.shape.head_dim;
  for (auto& own : ranks) {
    own.vo = uniform(random, 1, dim);
    own.qk = projectors.options.geometry == lowrankkv::train::DlrpGeometry::before_rope
                 ? 2 * uniform(random, 1, dim / 2)
                 : uniform(random, 1, dim);
  }
  return ranks;
}

/// A loss of all products: the sum of weights times sines of the entries.
struct SineLoss {
  std::vector<Eigen::MatrixXd> weights;
  SineLoss(Random& random, const lowrankkv::train::DeepProjectors& projectors) {
    for (const Eigen::MatrixXd& product : lowrankkv::train::fold_chains(projectors))
      weights.push_back(gaussian(random, product.rows(), product.cols()));
  }
  double value(const std::vector<Eigen::MatrixXd>& products) const {
    double sum = 0.0;
    for (std::size_t i = 0; i < products.size(); ++i)
      sum += (weights[i].array() * products[i].array().sin()).sum();
    return sum;
  }
  std::vector<Eigen::MatrixXd> gradients(const std::vector<Eigen::MatrixXd>& products) const {
    std::vector<Eigen::MatrixXd> result;
    for (std::size_t i = 0; i < products.size(); ++i)
      result.emplace_back(weights[i].array() * products[i].array().cos());
    return result;
  }
};

/// The largest difference between a gradient and central differences of `value`, which reads
/// `matrix`, relative to the larger of the gradient's largest entry and 1.
template <class Value>
double gradient_error(Eigen::MatrixXd& matrix, const Eigen::MatrixXd& gradient, Value&& value) {
  constexpr double step = 1e-5;
  double worst = 0.0;
  for (Eigen::Index i = 0; i < matrix.size(); ++i) {
    double& entry = matrix.data()[i];
    const double own = entry;
    entry = own + step;
    const double above = value();
    entry = own - step;
    const double below = value();
    entry = own;
    worst = std::max(worst, std::abs((above - below) / (2.0 * step) - gradient.data()[i]));
  }
  return worst / std::max(1.0, gradient.cwiseAbs().maxCoeff());
}

}  // namespace support
