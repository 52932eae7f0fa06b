// SPDX-License-Identifier: Apache-2.0
/// @file token_policy/compose.hpp  Compose: several token policies decide together.
#pragma once

#include <tuple>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Token policy that combines several policies: every member classifies each row, and the
/// strongest fate wins (RowFate: dropped beats full, full beats compressed, a pinned sink stays).
/// The recent window is the longest of the members' windows.
///
/// `Compose<SinkRecent, SnapKV> policy; policy.get<SnapKV>().keep = 0.25F;`
template <class... Members>
struct Compose {
  std::tuple<Members...> members{};

  Compose() = default;
  explicit Compose(Members... of) : members(of...) {}
  template <class Member>
  Member& get() {
    return std::get<Member>(members);
  }
  template <class Member>
  const Member& get() const {
    return std::get<Member>(members);
  }
  friend bool operator==(const Compose&, const Compose&) = default;
};

/// @brief Calls `function` with a policy that is no composition.
template <class Policy, class Function>
void for_each_member(const Policy& policy, Function&& function) {
  function(policy);
}
/// @brief Calls `function` with every member of a Compose.
template <class... Members, class Function>
void for_each_member(const Compose<Members...>& policy, Function&& function) {
  std::apply([&](const Members&... member) { (function(member), ...); }, policy.members);
}

namespace detail {

template <class P, class B>
struct DiagnoseTokenPolicy;
/// One static_assert for each member function that a policy of a Compose lacks.
template <class... Members, class B>
struct DiagnoseTokenPolicy<Compose<Members...>, B> {
  static_assert((sizeof(DiagnoseTokenPolicy<Members, B>) + ... + 1) > 0,
                "every member is diagnosed");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
