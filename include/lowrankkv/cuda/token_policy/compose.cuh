// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/compose.cuh  What becomes of leaving rows on the Cuda backend: in which
/// numbers, which the host knows beforehand (over all parts of a prompt: of one part a head may
/// keep any), and by what the rows are chosen.
///
/// A token policy, alone or in a Compose, has an Impl<P, Cuda> with
/// - `static constexpr RowFate fate`: of rows that nothing else is said about: compressed, full or
/// dropped;
/// - optional `static int recent(const P&)`: rows that never leave the tail;
/// - optional `static std::int64_t pinned_rows(const P&, first_position, count)`: of so many rows
/// from a position on, the first so many are full in any case;
/// - optional `static constexpr RowChoice choice` and `static std::int64_t chosen_rows(const P&,
/// first_position, count, Phase)`: so many rows are chosen
///   among those that are not pinned. By errors: the chosen ones are full; with `static bool
///   relative_errors(const P&)` and optional `static float least_error(const P&)`: above 0, only
///   those whose error exceeds it, so that heads have other numbers of rows, which the host has to
///   read. By scores: the others are dropped; with `static AttentionScores attention_scores(const
///   P&)`. By masses, the attention that rows have received: chosen among all rows that have left
///   the tail, `count` from position 0 on, and that are still stored; the others are dropped, also
///   such as were stored before. Of the leaving rows that masses choose, errors then say which are
///   full, and the host has to read how many;
/// - optional `static void validate(const P&)`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/concepts/token_policy.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/token_policy/compress_all.cuh"
#include "lowrankkv/cuda/token_policy/row_choice.cuh"
#include "lowrankkv/token_policy/compose.hpp"
#include "lowrankkv/token_policy/compress_all.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What becomes of leaving rows. Those that are neither full nor compressed are dropped, or,
/// where rows are chosen by masses, take the places of stored ones that are.
struct RowCounts {
  std::int64_t pinned = 0;  ///< of the full ones: the oldest, whatever their values
  std::int64_t full = 0;  ///< by which the list of full rows grows; where it is masses that choose
                          ///< those, rows that they choose among; where errors choose too, at most
  std::int64_t compressed = 0;  ///< the same of compressed ones; where masses and errors choose,
                                ///< besides as many as are not full for their errors
  std::int64_t limit =
      -1;  ///< where rows are chosen by masses: rows that their list, or lists but for the pinned
           ///< ones, may have then, of which a head may have fewer; else -1
};

/// @brief The policy, or, if it has no Impl on this backend, another: the static_assert that says
/// so is then the only error.
template <class Policy, class Instead>
using Known = std::conditional_t<HasImpl<Policy, Cuda>, Policy, Instead>;

/// @brief The members of a token policy together: dropped beats full, full beats compressed, pinned
/// rows stay.
template <class... Members>
struct MemberRules {
  static_assert((HasImpl<Members, Cuda> && ...),
                "lowrankkv: this TokenPolicy has no Impl<TokenPolicy, Cuda>; "
                "cuda/token_policy/compose.cuh says what it needs, and which there are");
  template <class Member>
  static constexpr RowChoice choice_of() {
    if constexpr (requires { Impl<Member, Cuda>::choice; })
      return Impl<Member, Cuda>::choice;
    else
      return RowChoice::none;
  }
  template <RowChoice choice>
  static constexpr int asking = (0 + ... + (choice_of<Members>() == choice ? 1 : 0));
  static_assert(asking<RowChoice::errors> <= 1 && asking<RowChoice::scores> <= 1 &&
                    asking<RowChoice::accumulated_scores> <= 1,
                "lowrankkv: on the Cuda backend one member of a token policy may choose rows by "
                "the same thing");
  static constexpr RowFate fate = (std::max)({Impl<Known<Members, CompressAll>, Cuda>::fate...});
  static constexpr bool compresses = fate == RowFate::compressed;
  static constexpr bool accumulates_scores = asking<RowChoice::accumulated_scores> > 0;
  /// Nothing is to be chosen where all rows have one fate anyway.
  static constexpr bool by_errors = asking<RowChoice::errors> > 0 && compresses,
                        by_scores = asking<RowChoice::scores> > 0 && fate != RowFate::dropped;
  static constexpr bool chooses = by_errors || by_scores || accumulates_scores;
  static constexpr bool scores_both =
      accumulates_scores && by_errors;  ///< masses choose among the rows of both lists, and how
                                        ///< many of each a head has, values say
  static constexpr bool drops = fate == RowFate::dropped || by_scores || accumulates_scores;
};

/// @brief What the Cuda backend asks a token policy.
template <class Policy>
struct TokenRules : MemberRules<Policy> {};
template <class... Members>
struct TokenRules<Compose<Members...>> : MemberRules<Members...> {};

/// @brief Raises what is wrong with a policy's parameters. @throws ValueError, CapacityError
template <class Policy>
void validate_tokens(const Policy& policy) {
  for_each_member(policy, []<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::validate(member); })
      Impl<Member, Cuda>::validate(member);
  });
}
/// @brief Rows that stay in the tail.
template <class Policy>
int recent_rows(const Policy& policy) {
  int longest = 0;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::recent(member); })
      longest = (std::max)(longest, Impl<Member, Cuda>::recent(member));
  });
  return longest;
}
/// @brief Of `count` rows from a position on, how many are pinned: the first ones.
template <class Policy>
std::int64_t pinned_rows(const Policy& policy, std::int64_t first_position, std::int64_t count) {
  std::int64_t pinned = 0;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::pinned_rows(member, first_position, count); })
      pinned = (std::max)(pinned, Impl<Member, Cuda>::pinned_rows(member, first_position, count));
  });
  return pinned;
}
/// @brief What becomes of `count` rows from a position on.
template <class Policy>
RowCounts row_counts(const Policy& policy, std::int64_t first_position, std::int64_t count,
                     Phase phase) {
  using Rules = TokenRules<Policy>;
  const auto chosen_of = [&](RowChoice choice, std::int64_t first, std::int64_t rows) {
    std::int64_t chosen = 0;
    for_each_member(policy, [&]<class Member>(const Member& member) {
      if constexpr (requires { Impl<Member, Cuda>::choice; }) {
        if (Impl<Member, Cuda>::choice == choice)
          chosen = Impl<Member, Cuda>::chosen_rows(member, first, rows, phase);
      }
    });
    return chosen;
  };
  const std::int64_t pinned = pinned_rows(policy, first_position, count), rest = count - pinned;
  const std::int64_t kept =
      Rules::by_scores ? (std::min)(rest, chosen_of(RowChoice::scores, first_position, count))
      : Rules::fate == RowFate::dropped ? 0
                                        : rest;
  const std::int64_t exempt =
      Rules::by_errors    ? (std::min)(kept, chosen_of(RowChoice::errors, first_position, count))
      : Rules::compresses ? 0
                          : kept;   // of those, full ones
  if (Rules::accumulates_scores) {  // a share of all that have left the tail, the dropped ones
                                    // included, never shrinks
    const std::int64_t left = first_position + count, ever_pinned = pinned_rows(policy, 0, left),
                       limit = (std::min)(
                           left, ever_pinned + chosen_of(RowChoice::accumulated_scores, 0, left));
    return {pinned, pinned + exempt, kept - exempt,
            Rules::compresses ? limit - ever_pinned : limit};
  }
  return {pinned, pinned + exempt, kept - exempt};
}
/// @brief How many of `count` rows from a position on stay full for their errors, where so many
/// can.
template <class Policy>
std::int64_t exempt_rows(const Policy& policy, std::int64_t first_position, std::int64_t count,
                         Phase phase) {
  std::int64_t rows = 0;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::relative_errors(member); })
      rows = Impl<Member, Cuda>::chosen_rows(member, first_position, count, phase);
  });
  return rows;
}
/// @brief Whether errors are relative, where rows are chosen by them.
template <class Policy>
bool relative_errors(const Policy& policy) {
  bool relative = true;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::relative_errors(member); })
      relative = Impl<Member, Cuda>::relative_errors(member);
  });
  return relative;
}
/// @brief What errors of rows that stay full for them exceed, where rows are chosen by them; 0:
/// they are the largest, whatever they are.
template <class Policy>
float least_error(const Policy& policy) {
  float least = 0.0F;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::least_error(member); })
      least = Impl<Member, Cuda>::least_error(member);
  });
  return TokenRules<Policy>::by_errors ? least : 0.0F;
}
/// @brief The scores that rows are chosen by; a window of 0: they are not.
template <class Policy>
AttentionScores attention_scores(const Policy& policy) {
  AttentionScores scores;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::attention_scores(member); })
      scores = Impl<Member, Cuda>::attention_scores(member);
  });
  return TokenRules<Policy>::by_scores ? scores : AttentionScores{};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
