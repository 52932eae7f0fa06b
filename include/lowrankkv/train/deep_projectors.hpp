// SPDX-License-Identifier: Apache-2.0
/// @file train/deep_projectors.hpp  The projectors of a model: a chain of factors for the queries,
/// keys, values and outputs of every layer (DLRP eq. 5, 6, 10).
///
/// **Which head has which map.** The paper writes one head. A model with grouped queries has more
/// query heads than KV heads, and RoPE between projection and logits. Two geometries are known:
///
/// - DlrpGeometry::before_rope, the paper's: a chain belongs to a head's projection, and is folded
///   into its weights (DLRP section 3.1, algorithms 1 to 3). So each query head h has its own D_Q
///   and D_O, each KV head g its D_K and D_V. RoPE comes behind them:
///
///       q_h = RoPE(x W_Q,h D_Q,h),  k_g = RoPE(x W_K,g D_K,g),  v_g = x W_V,g D_V,g,
///       out = sum_h softmax(q_h K_g^T / sqrt(head_dim)) V_g D_O,h W_O,h.
///
///   Behind a map of r_qk columns, RoPE has r_qk channels to rotate. The paper does not say which
///   frequencies they have. Here they are r_qk / 2 of the model's pairs of channels
///   (HeadRanks::pairs) with their own frequencies, as pair selection is the only cut that RoPE
///   passes through.
/// - DlrpGeometry::after_rope, the basis policy Projector's: all four chains belong to a KV head
///   and see rows as a cache does, rotated:
///
///       logits of h = RoPE(x W_Q,h) D_Q,g (RoPE(x W_K,g) D_K,g)^T / sqrt(head_dim).
///
/// Both are the model itself while every chain is the identity. The softmax scale stays that of the
/// model's head_dim at every rank.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/train/factor_chain.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief Where the maps are applied, and to whom they belong (file comment).
enum class DlrpGeometry : std::uint8_t {
  before_rope,  ///< to projections before RoPE; query and output maps a query head: the paper's
  after_rope    ///< to rows behind RoPE; all maps a KV head: what Projector caches
};

/// @brief The four projections of an attention layer that have chains (DLRP eq. 6).
enum class Projection : std::uint8_t { query, key, value, output };

/// @brief The name of a projection, as files and errors have it.
inline const char* name_of(Projection projection) {
  constexpr const char* kNames[] = {"query", "key", "value", "output"};
  return kNames[static_cast<std::size_t>(projection)];
}

/// @brief What the chains are made of. Defaults are the paper's (section 4.1).
struct DlrpOptions {
  int num_factors = 2;  ///< N
  int hidden = 256;     ///< d_hidden, at least head_dim unless N = 1
  double alpha = 0.01;  ///< regularisation strength (DLRP eq. 9), at least 0
  DlrpGeometry geometry = DlrpGeometry::before_rope;
  /// Channels that RoPE rotates together, all head_dim of them in pairs; for before_rope.
  RopePairing pairing = RopePairing::half_split;

  friend bool operator==(const DlrpOptions&, const DlrpOptions&) = default;
};

/// @brief The ranks of a KV head and of the query heads that read it.
struct HeadRanks {
  int qk = 0;  ///< r_qk: columns of D_Q and D_K
  int vo = 0;  ///< r_vo: columns of D_V, rows of D_O
  /// before_rope: the pairs of channels behind D_Q and D_K, ascending, [qk / 2]; pair p has the
  /// model's frequency p. after_rope: empty.
  std::vector<int> pairs;

  friend bool operator==(const HeadRanks&, const HeadRanks&) = default;
};

/// @brief Where a chain belongs.
struct ChainPlace {
  int layer = 0;
  Projection projection = Projection::query;
  int head = 0;  ///< a query head or a KV head, as DeepProjectors::num_maps() counts them
};

/// @brief The chains of all layers of a model. identity_projectors() makes them.
struct DeepProjectors {
  CacheShape shape;
  int num_layers = 0;
  DlrpOptions options;
  std::vector<HeadRanks> ranks;  ///< [num_layers, num_kv_heads]
  /// All factors: N of each chain, D^1 first; chains in the order of chain_index().
  std::vector<Eigen::MatrixXd> factors;

  /// @brief Maps of a projection in a layer: a head each, query heads or KV heads.
  int num_maps(Projection projection) const {
    const bool of_queries = projection == Projection::query || projection == Projection::output;
    return of_queries && options.geometry == DlrpGeometry::before_rope ? shape.num_qo_heads
                                                                       : shape.num_kv_heads;
  }
  /// @brief Chains of a layer.
  int layer_chains() const { return 2 * (num_maps(Projection::query) + shape.num_kv_heads); }
  /// @brief Chains of the model.
  int num_chains() const { return num_layers * layer_chains(); }
  /// @brief Layer by layer; in it queries, keys, values, outputs; in them head by head.
  /// @throws ShapeError for a layer or a head that is not there
  int chain_index(const ChainPlace& place) const {
    const int maps = num_maps(place.projection);
    if (place.layer < 0 || place.layer >= num_layers)
      ::lowrankkv::detail::fail<ShapeError>("layer: ", place.layer, " of ", num_layers);
    if (place.head < 0 || place.head >= maps)
      ::lowrankkv::detail::fail<ShapeError>("head: ", name_of(place.projection), " ", place.head,
                                            " of ", maps);
    int index = place.layer * layer_chains() + place.head;
    for (int before = 0; before < static_cast<int>(place.projection); ++before)
      index += num_maps(static_cast<Projection>(before));
    return index;
  }
  /// @brief The inverse of chain_index(). @throws ShapeError for a chain that is not there
  ChainPlace place_of(int chain) const {
    if (chain < 0 || chain >= num_chains())
      ::lowrankkv::detail::fail<ShapeError>("chain: ", chain, " of ", num_chains());
    ChainPlace place{chain / layer_chains(), Projection::query, chain % layer_chains()};
    while (place.head >= num_maps(place.projection)) {
      place.head -= num_maps(place.projection);
      place.projection = static_cast<Projection>(static_cast<int>(place.projection) + 1);
    }
    return place;
  }
  /// @brief The factors of a chain, [num_factors].
  std::span<const Eigen::MatrixXd> chain(int index) const {
    const std::size_t count = static_cast<std::size_t>(options.num_factors);
    return std::span(factors).subspan(static_cast<std::size_t>(index) * count, count);
  }
  /// @brief The KV head that a map serves: of a query head, the one that it reads.
  int kv_head(const ChainPlace& place) const {
    return place.head / (num_maps(place.projection) / shape.num_kv_heads);
  }
  /// @brief The ranks of a KV head.
  const HeadRanks& head_ranks(int layer, int kv_head) const {
    return ranks[static_cast<std::size_t>(layer * shape.num_kv_heads + kv_head)];
  }
  /// @brief Rows and columns of a chain's product: [head_dim, r_qk] of query and key, [head_dim,
  /// r_vo] of value, [r_vo, head_dim] of output (DLRP eq. 10, which prints r_qk there; algorithms 2
  /// and 3 print its transpose).
  std::pair<int, int> chain_extents(const ChainPlace& place) const {
    const HeadRanks& own = head_ranks(place.layer, kv_head(place));
    switch (place.projection) {
      case Projection::value:
        return {shape.head_dim, own.vo};
      case Projection::output:
        return {own.vo, shape.head_dim};
      case Projection::query:
      case Projection::key:
        break;
    }
    return {shape.head_dim, own.qk};
  }
};

namespace detail {

/// Raises ShapeError or ValueError for a model, or options, that no projectors can have.
inline void check_options(const CacheShape& shape, int num_layers, const DlrpOptions& options) {
  using ::lowrankkv::detail::fail;
  CacheConfig config;
  config.shape = shape;
  ::lowrankkv::detail::validate(config);
  if (num_layers < 1) fail<ShapeError>("num_layers: ", num_layers, ", at least 1 needed");
  if (options.num_factors < 1)
    fail<ShapeError>("num_factors: ", options.num_factors, ", at least 1 needed");
  if (options.num_factors > 1 && options.hidden < shape.head_dim)
    fail<ShapeError>("hidden: ", options.hidden, ", below head_dim ", shape.head_dim,
                     ": a chain could not start as the identity");
  if (!(options.alpha >= 0.0) || !std::isfinite(options.alpha))
    fail<ValueError>("alpha: finite and at least 0, given ", options.alpha);
  if (options.geometry == DlrpGeometry::before_rope && shape.head_dim % 2 != 0)
    fail<ShapeError>("head_dim: ", shape.head_dim,
                     " has no pairs of channels, which maps before RoPE need");
}

/// Raises ShapeError unless the ranks of a head are such as its layer can have.
inline void check_ranks(const DeepProjectors& projectors, const HeadRanks& ranks) {
  using ::lowrankkv::detail::fail;
  const int dim = projectors.shape.head_dim;
  if (ranks.qk < 1 || ranks.qk > dim) fail<ShapeError>("rank: r_qk ", ranks.qk, ", head_dim ", dim);
  if (ranks.vo < 1 || ranks.vo > dim) fail<ShapeError>("rank: r_vo ", ranks.vo, ", head_dim ", dim);
  if (projectors.options.geometry == DlrpGeometry::after_rope) {
    if (!ranks.pairs.empty())
      fail<ShapeError>("pairs: ", ranks.pairs.size(), " given, maps after RoPE have 0");
    return;
  }
  if (ranks.qk % 2 != 0) fail<ShapeError>("rank: r_qk ", ranks.qk, ", even before RoPE");
  if (ranks.pairs.size() != static_cast<std::size_t>(ranks.qk / 2))
    fail<ShapeError>("pairs: ", ranks.pairs.size(), " given, r_qk ", ranks.qk, " has ",
                     ranks.qk / 2);
  for (std::size_t i = 0; i < ranks.pairs.size(); ++i) {
    if (ranks.pairs[i] < (i == 0 ? 0 : ranks.pairs[i - 1] + 1) || ranks.pairs[i] >= dim / 2)
      fail<ShapeError>("pairs: entry ", i, " is ", ranks.pairs[i], ", ascending below ", dim / 2,
                       " expected");
  }
}

}  // namespace detail

/// @brief Raises ShapeError or ValueError, naming both values, unless all factors are there, have
/// the shapes that the ranks give them, and are finite. Cost: one pass over the factors.
template <class Real = double>
void check_projectors(const DeepProjectors& projectors) {
  using ::lowrankkv::detail::check_equal;
  using ::lowrankkv::detail::fail;
  detail::check_options(projectors.shape, projectors.num_layers, projectors.options);
  check_equal("ranks", "heads",
              static_cast<std::size_t>(projectors.num_layers * projectors.shape.num_kv_heads),
              "given", projectors.ranks.size());
  for (const HeadRanks& ranks : projectors.ranks) detail::check_ranks(projectors, ranks);
  const std::size_t depth = static_cast<std::size_t>(projectors.options.num_factors);
  check_equal("factors", "chains have", static_cast<std::size_t>(projectors.num_chains()) * depth,
              "given", projectors.factors.size());
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const ChainPlace place = projectors.place_of(index);
    const auto [rows, cols] = projectors.chain_extents(place);
    const std::span<const Eigen::MatrixX<Real>> chain = projectors.chain(index);
    for (std::size_t n = 0; n < depth; ++n) {
      const Eigen::Index own_rows = n == 0 ? rows : projectors.options.hidden;
      const Eigen::Index own_cols = n + 1 == depth ? cols : projectors.options.hidden;
      const bool fits = chain[n].rows() == own_rows && chain[n].cols() == own_cols;
      if (!fits)
        fail<ShapeError>("factor ", n, " of layer ", place.layer, ", ", name_of(place.projection),
                         " ", place.head, ": [", chain[n].rows(), ", ", chain[n].cols(),
                         "], expected [", own_rows, ", ", own_cols, "]");
      if (!chain[n].allFinite())
        fail<ValueError>("factor ", n, " of layer ", place.layer, ", ", name_of(place.projection),
                         " ", place.head, ": its norm is ", chain[n].norm(), ", finite expected");
    }
  }
}

/// @brief The projectors that training starts from: every chain the identity [head_dim, head_dim]
/// (DLRP algorithm 1, line 1; section 4.1).
/// @throws ShapeError, ValueError for a shape or options that cannot be
///
/// Memory: 8 bytes for each of 2 head_dim hidden + (N - 2) hidden^2 numbers a chain.
template <class Real = double>
DeepProjectors identity_projectors(const CacheShape& shape, int num_layers,
                                   const DlrpOptions& options = {}) {
  detail::check_options(shape, num_layers, options);
  DeepProjectors projectors{shape, num_layers, options, {}, {}};
  HeadRanks full{shape.head_dim, shape.head_dim, {}};
  if (options.geometry == DlrpGeometry::before_rope) {
    for (int pair = 0; pair < shape.head_dim / 2; ++pair) full.pairs.push_back(pair);
  }
  projectors.ranks.assign(static_cast<std::size_t>(num_layers * shape.num_kv_heads), full);
  const std::vector<Eigen::MatrixX<Real>> chain =
      identity_chain<Real>(shape.head_dim, shape.head_dim, options.hidden, options.num_factors);
  for (int index = 0; index < projectors.num_chains(); ++index)
    projectors.factors.insert(projectors.factors.end(), chain.begin(), chain.end());
  return projectors;
}

/// @brief The product of every chain, in the order of chain_index() (DLRP eq. 11; algorithm 3, line
/// 1, and line 2 of algorithm 1, line 7 of algorithm 2). @throws ShapeError if factors do not fit
///
/// Cost: N - 1 products a chain.
template <class Real = double>
std::vector<Eigen::MatrixXd> fold_chains(const DeepProjectors& projectors) {
  std::vector<Eigen::MatrixX<Real>> products;
  for (int index = 0; index < projectors.num_chains(); ++index)
    products.push_back(calibrate::fold<Real>(projectors.chain(index)));
  return products;
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
