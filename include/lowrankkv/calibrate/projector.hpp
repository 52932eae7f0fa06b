// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/projector.hpp  Deep Low-Rank Projectors (DLRP sections 3.1 to 3.3): folding
/// chains of factors, choosing ranks, and making the maps of a cache.
///
/// A projector is a chain of trained factors D = D^1 D^2 ... D^N, applied to row vectors. There is
/// one each for query, key, value and output. Logits are (q D_Q) (k D_K)^T, and outputs are sum
/// alpha_i (v_i D_V) D_O. None of the four maps is orthonormal.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <type_traits>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Raises ShapeError if the chain is empty or neighbours do not fit.
template <class Real = double>
void check_chain(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  if (chain.empty())
    ::lowrankkv::detail::fail<ShapeError>("projector: num_factors ", chain.size(),
                                          ", at least 1 needed");
  for (std::size_t n = 1; n < chain.size(); ++n) {
    if (chain[n - 1].cols() != chain[n].rows()) {
      ::lowrankkv::detail::fail<ShapeError>("projector: factor ", n - 1, " has ",
                                            chain[n - 1].cols(), " columns, factor ", n, " has ",
                                            chain[n].rows(), " rows");
    }
  }
}

/// @brief The product D^1 D^2 ... D^N (DLRP eq. 11). @throws ShapeError if the chain is empty or
/// neighbours do not fit
///
/// Cost: N - 1 products.
template <class Real = double>
Eigen::MatrixXd fold(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  check_chain<Real>(chain);
  Eigen::MatrixX<Real> product = chain.front();
  for (std::size_t n = 1; n < chain.size(); ++n) product = product * chain[n];
  return product;
}

/// @brief ||D||_*, the sum of the singular values. @throws ValueError on NaN or Inf. Cost: O(rows
/// cols min(rows, cols)).
template <class Real = double>
double nuclear_norm(const linalg::MatrixRef<Real>& matrix) {
  return diagnostics::singular_values(matrix).sum();
}

/// @brief ((sum_n ||D^n||_F) / N)^N >= ||D^1 ... D^N||_*, the bound behind the regulariser (DLRP
/// theorem 3.1, whose printed factor 1/N instead of N^-N is loose).
///
/// ||A B||_* <= ||A||_F ||B||_F and ||A B||_F <= ||A||_F ||B||_F bound the left side by the product
/// of the norms, which is at most the N-th power of their mean. Equality: N = 2 and D^2 = (D^1)^T,
/// or rank-one factors of equal norm whose inner vectors agree.
/// @throws ValueError for fewer than two factors, because ||D||_* exceeds ||D||_F
///
/// Cost: one pass over the factors.
template <class Real = double>
double nuclear_norm_bound(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> chain) {
  if (chain.size() < 2)
    ::lowrankkv::detail::fail<ValueError>("projector: num_factors ", chain.size(),
                                          ", the nuclear-norm bound needs at least 2");
  double sum = 0.0;
  for (const Eigen::MatrixX<Real>& factor : chain) sum += factor.norm();
  const double count = static_cast<double>(chain.size());
  return std::pow(sum / count, count);
}

/// @brief The smallest common rank of two paired projectors that keeps `energy` of sigma^2 in both:
/// the larger of their own ranks. r_qk comes from (D_Q, D_K), r_vo from (D_V, D_O) (DLRP section
/// 3.2, step 1). @throws ValueError unless 0 < energy <= 1, or on NaN or Inf
template <class Real = double>
int paired_rank(const linalg::MatrixRef<Real>& first, const linalg::MatrixRef<Real>& second,
                double energy) {
  const auto rank = [&](const Eigen::Ref<const Eigen::MatrixX<Real>>& matrix) {
    return rank_by_energy(diagnostics::singular_values(matrix).cwiseAbs2(), energy);
  };
  return (std::max)(rank(first), rank(second));
}

/// @brief The maps of one KV head from folded projectors: key_down = D_K, query_down = D_Q,
/// value_down = D_V, output_up = D_O (DLRP eq. 10, whose D_O is [r_vo, head_dim], not [r_qk,
/// head_dim]).
/// @param query  D_Q [head_dim, r_qk]   @param key    D_K [head_dim, r_qk]
/// @param value  D_V [head_dim, r_vo]   @param output D_O [r_vo, head_dim]
/// @throws ShapeError if extents differ or a rank exceeds head_dim, ValueError if a map is not
/// finite in f32
template <class Real = double>
HeadBasis make_projector_head(const linalg::MatrixRef<Real>& query,
                              const linalg::MatrixRef<Real>& key,
                              const linalg::MatrixRef<Real>& value,
                              const linalg::MatrixRef<Real>& output) {
  const Eigen::Index dim = key.rows();
  using ::lowrankkv::detail::check_equal;
  check_equal("head_dim", "key", dim, "query", query.rows());
  check_equal("head_dim", "key", dim, "value", value.rows());
  check_equal("head_dim", "key", dim, "output", output.cols());
  check_equal("key_rank", "key", key.cols(), "query", query.cols());
  check_equal("value_rank", "value", value.cols(), "output", output.rows());
  const auto check_rank = [&](const char* name, Eigen::Index rank) {
    if (rank < 1 || rank > dim)
      ::lowrankkv::detail::fail<ShapeError>("rank: ", name, " ", rank, ", head_dim ", dim);
  };
  check_rank("key_rank", key.cols());
  check_rank("value_rank", value.cols());
  const auto stored = [](const char* name, const Eigen::Ref<const Eigen::MatrixX<Real>>& map) {
    if (!map.template cast<float>().allFinite())
      ::lowrankkv::detail::fail<ValueError>("projector: ", name, " holds ",
                                            map.cwiseAbs().maxCoeff(), ", not finite in f32");
    return linalg::to_row_major(map);
  };
  HeadBasis head;
  head.key_rank = static_cast<int>(key.cols());
  head.value_rank = static_cast<int>(value.cols());
  head.key_down = stored("D_K", key);
  head.query_down = stored("D_Q", query);
  head.value_down = stored("D_V", value);
  head.output_up = stored("D_O", output);
  return head;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
