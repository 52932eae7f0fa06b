// SPDX-License-Identifier: Apache-2.0
/// @file concepts/basis.hpp  The members that a basis policy must have on a backend, and one
/// readable error message for each missing member.
///
/// A basis policy is a parameter struct B plus `Impl<B, Backend>` with
///
///     // Raises unless the maps can be used.
///     static void validate(const B&, const LayerBasis&, const CacheShape&);
///     // Returns the orthonormal U [head_dim, rank] that an updater moves.
///     static std::vector<float> working_basis(const B&, const HeadBasis&, int head_dim, Part);
///     // Maps rows [count, head_dim], in place, to the space in which U is orthonormal.
///     static void to_metric(const B&, const HeadBasis&, int head_dim, Part, float* rows,
///                           int count);
///     // Returns the maps for moved bases.
///     static HeadBasis with_working_bases(const B&, const HeadBasis&, int head_dim,
///                                         std::vector<float> key_basis,
///                                         std::vector<float> value_basis);
///
/// Optional members:
///
///     // Number of heads that one row of value coefficients serves.
///     static int heads_per_group(const B&, int num_kv_heads);
///     // Maps of the policy's own. validate() then sees the basis that the caller gave.
///     static LayerBasis own_maps(const B&, const CacheShape&);
///     // true: no orthonormal basis to move; only validate() and to_metric() are needed.
///     static constexpr bool fixed;
#pragma once

#include <concepts>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/cache_config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <class P, class B>
concept BasisHasValidate = requires(const P& policy, const LayerBasis& basis,
                                    const CacheShape& shape) {
  Impl<P, B>::validate(policy, basis, shape);
};
template <class P, class B>
concept BasisHasWorkingBasis = requires(const P& policy, const HeadBasis& head) {
  { Impl<P, B>::working_basis(policy, head, 1, Part::key) } -> std::same_as<std::vector<float>>;
};
template <class P, class B>
concept BasisHasToMetric = requires(const P& policy, const HeadBasis& head, float* rows) {
  Impl<P, B>::to_metric(policy, head, 1, Part::key, rows, 1);
};
template <class P, class B>
concept BasisHasWithWorkingBases = requires(const P& policy, const HeadBasis& head,
                                            std::vector<float> basis) {
  { Impl<P, B>::with_working_bases(policy, head, 1, basis, basis) } -> std::same_as<HeadBasis>;
};

/// @brief Whether an updater cannot move the maps of P.
template <class P, class B>
constexpr bool basis_is_fixed() {
  if constexpr (requires { Impl<P, B>::fixed; })
    return Impl<P, B>::fixed;
  else
    return false;
}
/// @brief Whether one row of value coefficients of P serves several heads.
template <class P, class B>
constexpr bool joins_values() {
  return requires(const P& policy) { Impl<P, B>::heads_per_group(policy, 1); };
}

/// @brief Whether P makes its maps itself.
template <class P, class B>
constexpr bool has_own_maps() {
  return requires(const P& policy, const CacheShape& shape) {
    Impl<P, B>::own_maps(policy, shape);
  };
}

/// @brief P can be used as the Basis of a CompressedKVCache<B, ...>.
template <class P, class B>
concept BasisFor = HasImpl<P, B> && BasisHasValidate<P, B> && BasisHasToMetric<P, B> &&
    (basis_is_fixed<P, B>() || (BasisHasWorkingBasis<P, B> && BasisHasWithWorkingBases<P, B>));

namespace detail {

/// Its instantiation raises one static_assert for each missing member.
template <class P, class B>
struct DiagnoseBasis {
  static_assert(HasImpl<P, B>,
                "lowrankkv: this Basis has no Impl<Basis, Backend>; include the header that "
                "defines it or specialise "
                "lowrankkv::Impl; see concepts/basis.hpp");
  static_assert(!HasImpl<P, B> || BasisHasValidate<P, B>,
                "lowrankkv: Impl<Basis, Backend> is missing 'static void validate(const Basis&, "
                "const LayerBasis&, const "
                "CacheShape&)'; see concepts/basis.hpp");
  static_assert(!HasImpl<P, B> || basis_is_fixed<P, B>() || BasisHasWorkingBasis<P, B>,
                "lowrankkv: Impl<Basis, Backend> is missing 'static std::vector<float> "
                "working_basis(const Basis&, const "
                "HeadBasis&, int, Part)'; see concepts/basis.hpp");
  static_assert(!HasImpl<P, B> || BasisHasToMetric<P, B>,
                "lowrankkv: Impl<Basis, Backend> is missing 'static void to_metric(const Basis&, "
                "const HeadBasis&, int, "
                "Part, float*, int)'; see concepts/basis.hpp");
  static_assert(
      !HasImpl<P, B> || basis_is_fixed<P, B>() || BasisHasWithWorkingBases<P, B>,
      "lowrankkv: Impl<Basis, Backend> is missing 'static HeadBasis with_working_bases(const "
      "Basis&, const "
      "HeadBasis&, int, std::vector<float>, std::vector<float>)'; see concepts/basis.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
