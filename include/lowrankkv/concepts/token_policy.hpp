// SPDX-License-Identifier: Apache-2.0
/// @file concepts/token_policy.hpp  The members that a token policy must have on a backend, and one
/// readable error message for each missing member.
///
/// A token policy is a parameter struct P plus `Impl<P, Backend>` with
///
///     // false: no row is ever compressed, and no basis is needed.
///     static constexpr bool compresses;
///     // The evidence that classify() needs.
///     static constexpr Evidence evidence;
///     // Number of last rows that always stay in the tail.
///     static int recent(const P&);
///     // Most rows of a batch that may be stored in each list, from counts alone. The bounds of
///     // adjacent batches must not add up to more than the bound of their union.
///     static RowBounds bounds(const P&, const RowBatch&);
///     // Decides the fate of rows that leave the tail.
///     static void classify(const P&, const RowBatch&, std::span<RowFate>);
///
/// Rows are classified in batches: a prompt (or a chunk of it), then T decoded rows at a time.
/// Evidence that is not available (attention while decoding, residuals before the basis is known)
/// is an empty span. The policy then decides without it.
///
/// Optional members:
///
///     // Raises if the parameters are invalid.
///     static void validate(const P&);
///     // With Evidence::attention: how to score the prompt.
///     static AttentionScores attention_scores(const P&);
///     // With Evidence::residuals. false: errors are not divided by the rows' energy.
///     static bool relative_residuals(const P&);
///     // With Evidence::residuals: of `count` rows from a position on, so many of the first have
///     // residuals that classify() reads; the others are given -1. None: it is not called.
///     static std::int64_t residual_candidates(const P&, std::int64_t first, std::int64_t count);
///     // Whether no other member of a composition may evict this row.
///     static bool pinned(const P&, std::int64_t position);
///     // With Evidence::accumulated: called after classify(); drops stored and flushed rows.
///     static void evict(const P&, const RowBatch&, std::span<StoredRow>, std::span<RowFate>);
#pragma once

#include <concepts>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief A token policy's decision on a row. In a composition the larger value wins: dropped beats
/// full, full beats compressed, and a pinned row (a sink) stays at full rank whatever other members
/// decide.
enum class RowFate : std::uint8_t { compressed, full, dropped, pinned };

/// @brief The state in which a row of this fate is stored.
constexpr RowState state_of(RowFate fate) {
  return fate == RowFate::compressed ? RowState::compressed
         : fate == RowFate::dropped  ? RowState::dropped
                                     : RowState::full;
}

/// @brief What a token policy decides by, besides positions. Bit flags.
enum class Evidence : unsigned {
  none = 0,
  attention = 1,  ///< SnapKV scores of a prompt's rows under its last queries
  /// Reconstruction error of the rows under the basis that is about to store them.
  residuals = 2,
  accumulated = 4  ///< accumulated attention score of every stored row and every flushed row
};
/// @brief The union of both.
constexpr Evidence operator|(Evidence a, Evidence b) {
  return static_cast<Evidence>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
/// @brief Whether `all` contains `one`.
constexpr bool wants(Evidence all, Evidence one) {
  return (static_cast<unsigned>(all) & static_cast<unsigned>(one)) != 0;
}

/// @brief A row that left the tail earlier, as an evicting policy sees it.
struct StoredRow {
  float accumulated = 0.0F;  ///< attention score received so far
  bool pinned = false;       ///< may not be dropped
  bool gone = false;         ///< set by evict()
};

/// @brief Most rows of a batch that may end up in each list.
struct RowBounds {
  std::int64_t full = 0;
  std::int64_t compressed = 0;
};

/// @brief Consecutive rows of one KV head that a token policy classifies.
struct RowBatch {
  int kv_head = 0;
  std::int64_t first_position = 0;
  std::int64_t num_rows = 0;
  Phase phase = Phase::prefill;
  std::span<const float> attention{};  ///< [num_rows]; a prompt's rows only
  /// [num_rows] error of keys plus error of values in their metrics, relative or absolute. -1: not
  /// a candidate.
  std::span<const float> residuals{};
  std::span<const float> accumulated{};  ///< [num_rows]
};

template <class P, class B>
concept TokenPolicyHasCompresses = requires {
  { Impl<P, B>::compresses } -> std::convertible_to<bool>;
};
template <class P, class B>
concept TokenPolicyHasEvidence = requires {
  { Impl<P, B>::evidence } -> std::convertible_to<Evidence>;
};
template <class P, class B>
concept TokenPolicyHasRecent = requires(const P& policy) {
  { Impl<P, B>::recent(policy) } -> std::convertible_to<int>;
};
template <class P, class B>
concept TokenPolicyHasBounds = requires(const P& policy, const RowBatch& batch) {
  { Impl<P, B>::bounds(policy, batch) } -> std::same_as<RowBounds>;
};
template <class P, class B>
concept TokenPolicyHasClassify = requires(const P& policy, const RowBatch& batch,
                                          std::span<RowFate> fates) {
  Impl<P, B>::classify(policy, batch, fates);
};

/// @brief P can be used as the TokenPolicy of a CompressedKVCache<B, ...>.
template <class P, class B>
concept TokenPolicyFor =
    HasImpl<P, B> && TokenPolicyHasCompresses<P, B> && TokenPolicyHasEvidence<P, B> &&
    TokenPolicyHasRecent<P, B> && TokenPolicyHasBounds<P, B> && TokenPolicyHasClassify<P, B>;

namespace detail {

/// Its instantiation raises one static_assert for each missing member.
template <class P, class B>
struct DiagnoseTokenPolicy {
  static_assert(HasImpl<P, B>,
                "lowrankkv: this TokenPolicy has no Impl<TokenPolicy, Backend>; include the header "
                "that defines it or "
                "specialise lowrankkv::Impl; see concepts/token_policy.hpp");
  static_assert(
      !HasImpl<P, B> || TokenPolicyHasCompresses<P, B>,
      "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static constexpr bool compresses'; see "
      "concepts/token_policy.hpp");
  static_assert(
      !HasImpl<P, B> || TokenPolicyHasEvidence<P, B>,
      "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static constexpr Evidence evidence'; see "
      "concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasRecent<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static int recent(const "
                "TokenPolicy&)'; see "
                "concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasBounds<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static RowBounds bounds(const "
                "TokenPolicy&, const "
                "RowBatch&)'; see concepts/token_policy.hpp");
  static_assert(!HasImpl<P, B> || TokenPolicyHasClassify<P, B>,
                "lowrankkv: Impl<TokenPolicy, Backend> is missing 'static void classify(const "
                "TokenPolicy&, const "
                "RowBatch&, std::span<RowFate>)'; see concepts/token_policy.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
