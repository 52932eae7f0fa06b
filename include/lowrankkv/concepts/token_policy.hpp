// SPDX-License-Identifier: Apache-2.0
/// @file concepts/token_policy.hpp  What a token policy must offer on a backend, and one readable line for each thing missing.
///
/// A token policy is a parameter struct P plus `Impl<P, Backend>` with
///   static constexpr bool compresses;                                // false: no basis is needed
///   static int recent(const P&);                                     // rows that always stay in the tail
///   static std::int64_t max_full_rows(const P&, std::int64_t tokens);  // upper bound outside the tail
///   static void classify(const P&, const RowBatch&, std::span<RowState>);  // the fate of rows leaving the tail
/// Optional: `static void validate(const Policy&)`, which raises what is wrong with the parameters.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <class P, class B>
concept TokenPolicyHasCompresses = requires { { Impl<P, B>::compresses } -> std::convertible_to<bool>; };
template <class P, class B>
concept TokenPolicyHasRecent = requires(const P& policy) { { Impl<P, B>::recent(policy) } -> std::convertible_to<int>; };
template <class P, class B>
concept TokenPolicyHasMaxFullRows = requires(const P& policy) {
  { Impl<P, B>::max_full_rows(policy, std::int64_t{}) } -> std::convertible_to<std::int64_t>;
};
template <class P, class B>
concept TokenPolicyHasClassify = requires(const P& policy, const RowBatch& batch, std::span<RowState> states) {
  Impl<P, B>::classify(policy, batch, states);
};

/// @brief P can be used as the TokenPolicy of a CompressedKVCache<B, ...>.
template <class P, class B>
concept TokenPolicyFor = HasImpl<P, B> && TokenPolicyHasCompresses<P, B> && TokenPolicyHasRecent<P, B> &&
                         TokenPolicyHasMaxFullRows<P, B> && TokenPolicyHasClassify<P, B>;

namespace detail {

/// Instantiating it raises one static_assert for each member that is missing.
template <class P, class B>
struct DiagnoseTokenPolicy {
  static_assert(HasImpl<P, B>,
                "lowrankkv: this TokenPolicy has no Impl<TokenPolicy, Backend>; include the header that defines it or "
                "specialise lowrankkv::Impl; see concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasCompresses<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static constexpr bool compresses'; see "
                "concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasRecent<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static int recent(const TokenPolicy&)'; see "
                "concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasMaxFullRows<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static std::int64_t max_full_rows(const "
                "TokenPolicy&, std::int64_t)'; see concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasClassify<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static void classify(const TokenPolicy&, const "
                "RowBatch&, std::span<RowState>)'; see concepts/token_policy.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
