// SPDX-License-Identifier: Apache-2.0
/// @file cuda/token_policy/compose.cuh  What becomes of flushed rows on the Cuda backend: how many
/// go to each list, and by what evidence they are chosen.
///
/// The host knows the numbers beforehand. In the parts of a prompt it knows only their sum: a head
/// may keep any number of one part's rows.
///
/// A token policy, alone or in a Compose, has an Impl<P, Cuda> with
/// - `static constexpr RowFate fate`: compressed, full or dropped, for rows that no other rule
///   covers;
/// - optional `static int recent(const P&)`: rows that never leave the tail;
/// - optional `static std::int64_t pinned_rows(const P&, first_position, count)`: of `count` rows
///   from a position on, how many of the first are full in any case;
/// - optional `static constexpr RowChoice choice` and `static std::int64_t chosen_rows(const P&,
///   first_position, count, Phase)`: how many of the rows that are not pinned are chosen, by
///   - errors: the chosen rows are full. Also `static bool relative_errors(const P&)` and optional
///     `static float least_error(const P&)`: above 0, only rows whose error exceeds it are chosen,
///     so that heads have different numbers of rows, which the host must read back. Also optional
///     `static std::int64_t candidate_rows(const P&, first_position, count)`: of `count` rows from
///     a position on, so many of the first may be chosen; else all;
///   - scores: the other rows are dropped. Also `static AttentionScores attention_scores(const
///     P&)`;
///   - accumulated_scores, the attention that rows have received: rows are chosen among all stored
///     rows that have left the tail, `count` from position 0 on. The others are dropped, even if
///     they were stored before. If errors then say which of the chosen flushed rows are full, the
///     host must read their number back;
/// - optional `static void validate(const P&)`.
#pragma once

#include <algorithm>
#include <cfloat>
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

/// @brief How many flushed rows go to each list. Rows that are neither full nor compressed are
/// dropped. Where rows are kept by accumulated score, flushed rows may also take the places of
/// stored rows that are dropped.
struct RowCounts {
  std::int64_t pinned = 0;  ///< full rows that are full whatever their values: the oldest
  /// Rows added to the full list. If it is the scored list: rows that scores choose among. If
  /// errors choose too: an upper bound.
  std::int64_t full = 0;
  /// Rows added to the compressed list. If it is the scored list: rows that scores choose among. If
  /// errors choose too, rows whose errors do not make them full come on top.
  std::int64_t compressed = 0;
  /// Where rows are kept by accumulated score: the most rows of the scored list afterwards; if both
  /// lists are scored, of both without their pinned rows. A head may have fewer. Else -1.
  std::int64_t limit = -1;
};

/// @brief The policy, or `Instead` if it has no Impl on this backend, so that the static_assert
/// about it is the only error.
template <class Policy, class Instead>
using Known = std::conditional_t<HasImpl<Policy, Cuda>, Policy, Instead>;

/// @brief The combined rules of a token policy's members: dropped beats full, full beats
/// compressed, pinned rows stay.
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
  /// If all rows have one fate anyway, there is nothing to choose.
  static constexpr bool by_errors = asking<RowChoice::errors> > 0 && compresses,
                        by_scores = asking<RowChoice::scores> > 0 && fate != RowFate::dropped;
  static constexpr bool chooses = by_errors || by_scores || accumulates_scores;
  /// Both lists are scored: rows of both are kept by accumulated score. Only values determine how
  /// many of each a head has.
  static constexpr bool scores_both = accumulates_scores && by_errors;
  static constexpr bool drops = fate == RowFate::dropped || by_scores || accumulates_scores;
};

/// @brief The rules of a token policy, alone or a Compose.
template <class Policy>
struct TokenRules : MemberRules<Policy> {};
template <class... Members>
struct TokenRules<Compose<Members...>> : MemberRules<Members...> {};

/// @brief Checks a policy's parameters. @throws ValueError, CapacityError
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
/// @brief How many of `count` rows from a position on are pinned: these are the first of them.
template <class Policy>
std::int64_t pinned_rows(const Policy& policy, std::int64_t first_position, std::int64_t count) {
  std::int64_t pinned = 0;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::pinned_rows(member, first_position, count); })
      pinned = (std::max)(pinned, Impl<Member, Cuda>::pinned_rows(member, first_position, count));
  });
  return pinned;
}
/// @brief Of `count` rows from a position on, so many of the first may be full for their errors.
template <class Policy>
std::int64_t error_candidates(const Policy& policy, std::int64_t first_position,
                              std::int64_t count) {
  std::int64_t rows = count;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::candidate_rows(member, first_position, count); })
      rows = Impl<Member, Cuda>::candidate_rows(member, first_position, count);
  });
  return rows;
}
/// @brief How many of `count` flushed rows from a position on go to each list.
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
  const std::int64_t candidates =
      (std::max)(std::int64_t{0}, error_candidates(policy, first_position, count) - pinned);
  const std::int64_t exempt =
      Rules::by_errors
          ? (std::min)({kept, candidates, chosen_of(RowChoice::errors, first_position, count)})
      : Rules::compresses ? 0
                          : kept;  // full rows among the kept ones
  if (Rules::accumulates_scores) {
    // A share of all rows that have left the tail, dropped ones included: it never shrinks.
    const std::int64_t left = first_position + count, pinned_so_far = pinned_rows(policy, 0, left),
                       limit = (std::min)(
                           left, pinned_so_far + chosen_of(RowChoice::accumulated_scores, 0, left));
    return {pinned, pinned + exempt, kept - exempt,
            Rules::compresses ? limit - pinned_so_far : limit};
  }
  return {pinned, pinned + exempt, kept - exempt};
}
/// @brief How many of `count` rows from a position on stay full for their errors, if a head keeps
/// enough rows.
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
/// @brief Whether the errors by which rows are chosen are relative; true if none are.
template <class Policy>
bool relative_errors(const Policy& policy) {
  bool relative = true;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::relative_errors(member); })
      relative = Impl<Member, Cuda>::relative_errors(member);
  });
  return relative;
}
/// @brief The threshold that a row's error must exceed for the row to stay full; 0: no threshold,
/// the largest errors win. Where only some rows may stay full for their errors, and scores may drop
/// any of them, there is the smallest one: other rows are given no error.
template <class Policy>
float least_error(const Policy& policy) {
  float least = 0.0F;
  for_each_member(policy, [&]<class Member>(const Member& member) {
    if constexpr (requires { Impl<Member, Cuda>::least_error(member); })
      least = Impl<Member, Cuda>::least_error(member);
  });
  using Rules = TokenRules<Policy>;
  if (!Rules::by_errors) return 0.0F;
  constexpr std::int64_t all = std::int64_t{1} << 32;
  const bool some = error_candidates(policy, 0, all) < all;
  return some && Rules::drops ? (std::max)(least, FLT_MIN) : least;
}
/// @brief The scores by which prompt rows are chosen; a window of 0: rows are not chosen by score.
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
