// SPDX-License-Identifier: Apache-2.0
/// @file cpu/token_policy/compose.hpp  Compose on the CPU: the strongest fate among the members
/// wins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/token_policy/compose.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Compose on the CPU, of members that are token policies themselves. Where one is not,
/// DiagnoseTokenPolicy names what it lacks.
template <class... Members>
requires(TokenPolicyFor<Members, Cpu>&&...) struct Impl<Compose<Members...>, Cpu> {
  using Policy = Compose<Members...>;
  static_assert(sizeof...(Members) > 0, "lowrankkv: Compose needs at least one token policy");
  static constexpr int evictors =
      (0 + ... + (wants(Impl<Members, Cpu>::evidence, Evidence::accumulated) ? 1 : 0));
  static constexpr int scorers =
      (0 + ... + (wants(Impl<Members, Cpu>::evidence, Evidence::attention) ? 1 : 0));
  static constexpr int exempters =
      (0 + ... + (wants(Impl<Members, Cpu>::evidence, Evidence::residuals) ? 1 : 0));
  static_assert(
      evictors <= 1 && scorers <= 1 && exempters <= 1,
      "lowrankkv: Compose takes one member of each kind that decides by evidence at most");

  static constexpr bool compresses = (Impl<Members, Cpu>::compresses && ...);
  static constexpr Evidence evidence = (Evidence::none | ... | Impl<Members, Cpu>::evidence);

  static void validate(const Policy& policy) {
    for_each_member(policy, []<class Member>(const Member& member) {
      if constexpr (requires { Impl<Member, Cpu>::validate(member); })
        Impl<Member, Cpu>::validate(member);
    });
  }
  static int recent(const Policy& policy) {
    int longest = 0;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      longest = (std::max)(longest, Impl<Member, Cpu>::recent(member));
    });
    return longest;
  }
  static AttentionScores attention_scores(const Policy& policy) {
    AttentionScores scores;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (wants(Impl<Member, Cpu>::evidence, Evidence::attention))
        scores = Impl<Member, Cpu>::attention_scores(member);
    });
    return scores;
  }
  static bool relative_residuals(const Policy& policy) {
    bool relative = true;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (wants(Impl<Member, Cpu>::evidence, Evidence::residuals))
        relative = relative_of(member);
    });
    return relative;
  }
  /// Of `count` rows from a position on, so many of the first have residuals that a member asks
  /// for.
  static std::int64_t residual_candidates(const Policy& policy, std::int64_t first,
                                          std::int64_t count) {
    std::int64_t most = 0;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (wants(Impl<Member, Cpu>::evidence, Evidence::residuals))
        most = candidates_of(member, first, count);
    });
    return most;
  }
  static RowBounds bounds(const Policy& policy, const RowBatch& batch) {
    RowBounds all{0, batch.num_rows};
    for_each_member(policy, [&]<class Member>(const Member& member) {
      const RowBounds one = Impl<Member, Cpu>::bounds(member, batch);
      all.full = (std::min)(batch.num_rows, all.full + one.full);
      all.compressed = (std::min)(all.compressed, one.compressed);
    });
    return all;
  }
  static void classify(const Policy& policy, const RowBatch& batch, std::span<RowFate> fates) {
    std::fill(fates.begin(), fates.end(), RowFate::compressed);
    std::vector<RowFate> wish(fates.size());
    for_each_member(policy, [&]<class Member>(const Member& member) {
      Impl<Member, Cpu>::classify(member, batch, wish);
      for (std::size_t row = 0; row < wish.size(); ++row)
        fates[row] = (std::max)(fates[row], wish[row]);
    });
  }
  static bool pinned(const Policy& policy, std::int64_t position) {
    bool any = false;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (requires { Impl<Member, Cpu>::pinned(member, position); })
        any = any || Impl<Member, Cpu>::pinned(member, position);
    });
    return any;
  }
  static void evict(const Policy& policy, const RowBatch& batch, std::span<StoredRow> stored,
                    std::span<RowFate> fates) {
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (wants(Impl<Member, Cpu>::evidence, Evidence::accumulated))
        Impl<Member, Cpu>::evict(member, batch, stored, fates);
    });
  }

 private:
  template <class Member>
  static std::int64_t candidates_of(const Member& member, std::int64_t first, std::int64_t count) {
    if constexpr (requires { Impl<Member, Cpu>::residual_candidates(member, first, count); })
      return Impl<Member, Cpu>::residual_candidates(member, first, count);
    else
      return count;
  }
  template <class Member>
  static bool relative_of(const Member& member) {
    if constexpr (requires { Impl<Member, Cpu>::relative_residuals(member); })
      return Impl<Member, Cpu>::relative_residuals(member);
    else
      return true;
  }
};

LOWRANKKV_NAMESPACE_END
