// SPDX-License-Identifier: Apache-2.0
/// @file train/dlrp_ranks.hpp  The ranks that trained projectors need, by the energy of their
/// singular values (DLRP section 3.2, step 1; algorithm 2, lines 1 to 5).
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/train/deep_projectors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief Who shares r_qk and r_vo.
enum class RankScope : std::uint8_t {
  layer,   ///< all heads of a layer: the paper's r^l
  kv_head  ///< a KV head and the query heads that read it
};

/// @brief sigma^2 of every chain's product, descending, in the order of chain_index().
/// @throws ShapeError if factors do not fit, ValueError on NaN or Inf. Cost: an SVD a chain.
template <class Real = double>
std::vector<Eigen::VectorXd> chain_spectra(const DeepProjectors& projectors) {
  std::vector<Eigen::VectorX<Real>> spectra;
  for (const Eigen::MatrixX<Real>& product : fold_chains<Real>(projectors))
    spectra.emplace_back(diagnostics::singular_values<Real>(product).cwiseAbs2());
  return spectra;
}

/// @brief The ranks of every KV head: with r(D) the smallest rank whose leading sigma^2 reach
/// `energy` of all, r_qk = max(r(D_Q), r(D_K)) and r_vo = max(r(D_V), r(D_O)), so that each of the
/// two keeps its energy. The maxima are over all heads in the scope.
///
/// Before RoPE, r_qk is rounded up to an even number, since RoPE rotates pairs.
/// @param spectra  chain_spectra() of the projectors
/// @param energy   e in (0, 1]
/// @return [num_layers, num_kv_heads], without pairs, which low_rank_projectors() chooses
/// @throws ShapeError unless there is one spectrum a chain, ValueError unless 0 < energy <= 1
template <class Real = double>
std::vector<HeadRanks> select_ranks(const DeepProjectors& projectors,
                                    const std::vector<Eigen::VectorX<Real>>& spectra, double energy,
                                    RankScope scope = RankScope::layer) {
  ::lowrankkv::detail::check_equal("spectra", "chains",
                                   static_cast<std::size_t>(projectors.num_chains()), "given",
                                   spectra.size());
  const int heads = projectors.shape.num_kv_heads;
  std::vector<HeadRanks> ranks(static_cast<std::size_t>(projectors.num_layers * heads));
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const ChainPlace place = projectors.place_of(index);
    HeadRanks& own =
        ranks[static_cast<std::size_t>(place.layer * heads + projectors.kv_head(place))];
    const int rank =
        calibrate::rank_by_energy<void>(spectra[static_cast<std::size_t>(index)], energy);
    const bool logits =
        place.projection == Projection::query || place.projection == Projection::key;
    int& shared = logits ? own.qk : own.vo;
    shared = (std::max)(shared, rank);
  }
  for (std::size_t first = 0; first < ranks.size(); first += static_cast<std::size_t>(heads)) {
    HeadRanks largest;
    for (std::size_t i = first; i < first + static_cast<std::size_t>(heads); ++i) {
      if (projectors.options.geometry == DlrpGeometry::before_rope) ranks[i].qk += ranks[i].qk % 2;
      largest.qk = (std::max)(largest.qk, ranks[i].qk);
      largest.vo = (std::max)(largest.vo, ranks[i].vo);
    }
    for (std::size_t i = first; scope == RankScope::layer && i < first + std::size_t(heads); ++i)
      ranks[i] = largest;
  }
  return ranks;
}

/// @brief The share of a cache that ranks save: 1 - sum (r_qk + r_vo) / sum 2 head_dim over all
/// layers and KV heads (the compression rate of the paper's tables). @throws ShapeError without
/// ranks, or for a head_dim below 1
inline double compression_rate(const std::vector<HeadRanks>& ranks, int head_dim) {
  if (ranks.empty() || head_dim < 1)
    ::lowrankkv::detail::fail<ShapeError>("compression rate: heads ", ranks.size(), ", head_dim ",
                                          head_dim, "; both must be at least 1");
  double kept = 0.0;
  for (const HeadRanks& head : ranks) kept += head.qk + head.vo;
  return 1.0 - kept / (2.0 * head_dim * static_cast<double>(ranks.size()));
}

/// @brief The largest energy threshold e whose ranks save at least `rate` (DLRP section 4.1:
/// thresholds "that correspond approximately to 10%, 25%, and 50%"). Ranks are steps in e, so the
/// rate that it gives may be larger. By bisection, to the last bits of e.
/// @param rate  a compression_rate(), in [0, 1)
/// @throws ValueError if the smallest ranks do not save as much; as select_ranks()
template <class Real = double>
double energy_for_compression(const DeepProjectors& projectors,
                              const std::vector<Eigen::VectorX<Real>>& spectra, double rate,
                              RankScope scope = RankScope::layer) {
  const auto rate_at = [&](double energy) {
    return compression_rate(select_ranks<Real>(projectors, spectra, energy, scope),
                            projectors.shape.head_dim);
  };
  double low = 1e-12;
  const double most = rate_at(low);
  if (!(rate >= 0.0) || rate > most)
    ::lowrankkv::detail::fail<ValueError>("compression rate: ", rate,
                                          ", ranks by energy save 0 to ", most);
  double high = 1.0;
  if (rate_at(high) >= rate) return high;
  for (int step = 0; step < 60; ++step) {
    const double middle = 0.5 * (low + high);
    (rate_at(middle) >= rate ? low : high) = middle;
  }
  return low;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
