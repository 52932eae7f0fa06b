// SPDX-License-Identifier: Apache-2.0
/// @file train/low_rank_projectors.hpp  From trained projectors to low-rank ones, whose maps have
/// r_qk and r_vo columns (DLRP section 3.2, step 2; algorithm 2, line 6).
///
/// The depth and the hidden width stay (DLRP section 3.2). Only the factor at a chain's end is cut:
/// D^N becomes D^N T [hidden, r] in queries, keys and values, and D^1 becomes T D^1 [r, hidden] in
/// outputs.
///
/// What the new factors start from the paper does not say. LowRankStart::truncated keeps what was
/// trained:
///
/// - Maps that meet without RoPE between them, D_V and the D_O of its group, and after RoPE D_Q and
///   D_K, act through their product M alone (D_V [D_O,1 D_O,2 ...], D_Q D_K^T). With its SVD
///   M = U S W^T, the left map becomes U_r S_r^(1/2), the right one S_r^(1/2) W_r^T. No other maps
///   of that rank come closer to M in the Frobenius norm; those from the leading singular vectors
///   of each map alone, which the energy rule has in view, are among them. Both factors are
///   multiplied by what gives these maps: T = B W_r S_r^(-1/2) of M = A B for the left one,
///   S_r^(-1/2) U_r^T A for the right one. Nothing is inverted but S_r; directions below the
///   rounding of M become zeros in both maps, which training leaves as they are.
/// - With RoPE between them, D_Q and D_K keep whole pairs of channels, those of the largest
///   sum_h ||D_Q,h e_p||_F^2 ||D_K e_p||_F^2, e_p the two columns of pair p. For white rows that is
///   twice the pair's mean square in the logits, and over all distances pairs do not correlate. It
///   can lose much more than 1 - e of the energy, as singular vectors are not pairs: fine-tuning
///   has to recover it.
#pragma once

#include <Eigen/Core>
#include <Eigen/SVD>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/train/deep_projectors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief What the factors of low-rank projectors start from.
enum class LowRankStart : std::uint8_t {
  truncated,  ///< the trained ones, cut (file comment)
  identity    ///< identities, cut: nothing of the training is kept but the ranks and the pairs
};

/// @brief The channels of a head that r_qk coefficients stand for, where RoPE rotates them as it
/// rotates the model's: half-split, the first channels of all pairs, then the second ones;
/// interleaved, pair by pair. [2 pairs.size()]
inline std::vector<int> pair_channels(const std::vector<int>& pairs, int head_dim,
                                      RopePairing pairing) {
  std::vector<int> channels;
  if (pairing == RopePairing::interleaved) {
    for (const int pair : pairs) channels.insert(channels.end(), {2 * pair, 2 * pair + 1});
  } else {
    for (const int pair : pairs) channels.push_back(pair);
    for (const int pair : pairs) channels.push_back(pair + head_dim / 2);
  }
  return channels;
}

/// @brief What cuts the space between two maps: `left` [inner, rank] goes behind the first, `right`
/// [rank, inner] before the second.
struct InnerCut {
  Eigen::MatrixXd left;
  Eigen::MatrixXd right;
};

/// @brief The cut for which A left right B is the best approximation of A B of this rank, split
/// evenly: A left = U_r S_r^(1/2), right B = S_r^(1/2) W_r^T (file comment).
/// @throws ShapeError unless the maps meet and 1 <= rank <= inner, ValueError if A B is not finite.
/// Cost: an SVD of A B.
template <class Real = double>
InnerCut balanced_cut(const linalg::MatrixRef<Real>& a, const linalg::MatrixRef<Real>& b,
                      int rank) {
  ::lowrankkv::detail::check_equal("inner", "left map", a.cols(), "right map", b.rows());
  if (rank < 1 || rank > a.cols())
    ::lowrankkv::detail::fail<ShapeError>("rank: ", rank, ", inner ", a.cols());
  const Eigen::MatrixX<Real> product = a * b;
  if (!product.allFinite())
    ::lowrankkv::detail::fail<ValueError>("cut: the product's norm is ", product.norm(),
                                          ", finite expected");
  const Eigen::JacobiSVD<Eigen::MatrixX<Real>> svd(product,
                                                   Eigen::ComputeThinU | Eigen::ComputeThinV);
  const Eigen::VectorX<Real>& sigma = svd.singularValues();
  const double rounding = std::numeric_limits<Real>::epsilon() * static_cast<double>(a.cols()) *
                          a.norm() * b.norm();  // of the product's entries
  InnerCut cut{Eigen::MatrixX<Real>::Zero(a.cols(), rank),
               Eigen::MatrixX<Real>::Zero(rank, a.cols())};
  for (Eigen::Index i = 0; i < (std::min)(Eigen::Index{rank}, sigma.size()); ++i) {
    if (!(sigma[i] > rounding)) break;
    const double scale = 1.0 / std::sqrt(sigma[i]);
    cut.left.col(i) = scale * (b * svd.matrixV().col(i));
    cut.right.row(i) = scale * (svd.matrixU().col(i).transpose() * a);
  }
  return cut;
}

namespace detail {

/// The chains of one KV head and of the query heads that read it.
struct HeadChains {
  std::vector<int> query, output;
  int key = 0, value = 0;
};

inline HeadChains chains_of(const DeepProjectors& projectors, int layer, int kv_head) {
  HeadChains chains;
  const int group = projectors.num_maps(Projection::query) / projectors.shape.num_kv_heads;
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    chains.query.push_back(projectors.chain_index({layer, Projection::query, head}));
    chains.output.push_back(projectors.chain_index({layer, Projection::output, head}));
  }
  chains.key = projectors.chain_index({layer, Projection::key, kv_head});
  chains.value = projectors.chain_index({layer, Projection::value, kv_head});
  return chains;
}

/// The `count` pairs of channels with the most energy in a head's logits, ascending; equal ones
/// in their order.
template <class Real>
std::vector<int> largest_pairs(const std::vector<Eigen::MatrixX<Real>>& products,
                               const HeadChains& chains, int count, RopePairing pairing) {
  const Eigen::MatrixX<Real>& key = products[static_cast<std::size_t>(chains.key)];
  const int dim = static_cast<int>(key.cols());
  const auto square = [&](const Eigen::MatrixX<Real>& map, int pair) {
    double sum = 0.0;
    for (const int channel : pair_channels({pair}, dim, pairing))
      sum += map.col(channel).squaredNorm();
    return sum;
  };
  std::vector<double> energy(static_cast<std::size_t>(dim / 2));
  for (int pair = 0; pair < dim / 2; ++pair) {
    for (const int query : chains.query)
      energy[static_cast<std::size_t>(pair)] +=
          square(products[static_cast<std::size_t>(query)], pair) * square(key, pair);
  }
  std::vector<int> pairs(energy.size());
  std::iota(pairs.begin(), pairs.end(), 0);
  std::stable_sort(pairs.begin(), pairs.end(), [&](int left, int right) {
    return energy[static_cast<std::size_t>(left)] > energy[static_cast<std::size_t>(right)];
  });
  pairs.resize(static_cast<std::size_t>(count));
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

/// Columns of the identity [dim, dim].
template <class Real>
Eigen::MatrixX<Real> identity_columns(int dim, const std::vector<int>& columns) {
  Eigen::MatrixX<Real> matrix =
      Eigen::MatrixX<Real>::Zero(dim, static_cast<Eigen::Index>(columns.size()));
  for (std::size_t i = 0; i < columns.size(); ++i)
    matrix(columns[i], static_cast<Eigen::Index>(i)) = 1.0;
  return matrix;
}

}  // namespace detail

/// @brief Low-rank projectors of given ranks (DLRP eq. 10), to be fine-tuned.
/// @param trained  projectors at full rank
/// @param ranks    [num_layers, num_kv_heads], as select_ranks() gives them or as you choose them.
/// Pairs that are given are kept (maps before RoPE); where there are none, the largest
/// @throws ShapeError, ValueError if `trained` is not whole or not at full rank, or a rank cannot
/// be
///
/// Cost: an SVD [head_dim, group head_dim] a KV head, after RoPE two.
template <class Real = double>
DeepProjectors low_rank_projectors(const DeepProjectors& trained, std::vector<HeadRanks> ranks,
                                   LowRankStart start = LowRankStart::truncated) {
  check_projectors<Real>(trained);
  const int dim = trained.shape.head_dim, heads = trained.shape.num_kv_heads;
  ::lowrankkv::detail::check_equal("ranks", "heads", trained.ranks.size(), "given", ranks.size());
  for (const HeadRanks& own : trained.ranks) {
    ::lowrankkv::detail::check_equal("rank", "trained r_qk", own.qk, "head_dim", dim);
    ::lowrankkv::detail::check_equal("rank", "trained r_vo", own.vo, "head_dim", dim);
  }
  const bool before_rope = trained.options.geometry == DlrpGeometry::before_rope;
  const std::vector<Eigen::MatrixX<Real>> products = fold_chains<Real>(trained);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const auto chains =
        detail::chains_of(trained, static_cast<int>(i) / heads, static_cast<int>(i) % heads);
    if (before_rope && ranks[i].pairs.empty() && ranks[i].qk >= 2 && ranks[i].qk <= dim)
      ranks[i].pairs =
          detail::largest_pairs(products, chains, ranks[i].qk / 2, trained.options.pairing);
    detail::check_ranks(trained, ranks[i]);
  }
  const bool truncated = start == LowRankStart::truncated;
  DeepProjectors cut =
      truncated ? trained
                : identity_projectors<Real>(trained.shape, trained.num_layers, trained.options);
  cut.ranks = std::move(ranks);
  const int depth = cut.options.num_factors;
  const auto narrow = [&](int chain, const Eigen::MatrixX<Real>& columns) {
    Eigen::MatrixX<Real>& last = cut.factors[static_cast<std::size_t>((chain + 1) * depth - 1)];
    last = (last * columns).eval();
  };
  for (std::size_t i = 0; i < cut.ranks.size(); ++i) {
    const HeadRanks& own = cut.ranks[i];
    const auto chains =
        detail::chains_of(cut, static_cast<int>(i) / heads, static_cast<int>(i) % heads);
    const auto product = [&](int chain) -> const Eigen::MatrixX<Real>& {
      return products[static_cast<std::size_t>(chain)];
    };
    InnerCut logits{Eigen::MatrixX<Real>::Identity(dim, own.qk),
                    Eigen::MatrixX<Real>::Identity(own.qk, dim)};
    if (before_rope) {
      logits.left =
          detail::identity_columns<Real>(dim, pair_channels(own.pairs, dim, cut.options.pairing));
      logits.right = logits.left.transpose();
    } else if (truncated) {
      logits = balanced_cut<Real>(product(chains.query.front()), product(chains.key).transpose(),
                                  own.qk);
    }
    for (const int query : chains.query) narrow(query, logits.left);
    narrow(chains.key, logits.right.transpose());
    InnerCut values{Eigen::MatrixX<Real>::Identity(dim, own.vo),
                    Eigen::MatrixX<Real>::Identity(own.vo, dim)};
    if (truncated) {
      Eigen::MatrixX<Real> outputs(dim, dim * static_cast<Eigen::Index>(chains.output.size()));
      for (std::size_t head = 0; head < chains.output.size(); ++head)
        outputs.middleCols(static_cast<Eigen::Index>(head) * dim, dim) =
            product(chains.output[head]);
      values = balanced_cut<Real>(product(chains.value), outputs, own.vo);
    }
    narrow(chains.value, values.left);
    for (const int output : chains.output) {
      Eigen::MatrixX<Real>& first = cut.factors[static_cast<std::size_t>(output * depth)];
      first = (values.right * first).eval();
    }
  }
  return cut;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
