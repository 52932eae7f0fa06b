// SPDX-License-Identifier: Apache-2.0
/// @file concepts/token_policy.hpp  What a token policy must offer on a backend, and one readable
/// line for each thing missing.
///
/// A token policy is a parameter struct P plus `Impl<P, Backend>` with
///   static constexpr bool compresses;                  // false: no row is ever compressed, no
///   basis is needed static constexpr Evidence evidence;                // what classify() wants to
///   be shown static int recent(const P&);                       // rows that always stay in the
///   tail static RowBounds bounds(const P&, const RowBatch&);// most rows of a batch that may be
///   stored in each list, from counts
///                                                      // alone; of adjacent batches the sum must
///                                                      not exceed the whole's
///   static void classify(const P&, const RowBatch&, std::span<RowFate>);  // the fate of rows
///   leaving the tail
/// Rows are decided on in batches: a prompt (or a chunk of it), then T decoded rows at a time.
/// Evidence that cannot be had (attention while decoding, residuals before the basis is known) is
/// an empty span: decide without it. Optional: `static void validate(const P&)`, which raises what
/// is wrong with the parameters;
///   static AttentionScores attention_scores(const P&);  // with Evidence::attention: how the
///   prompt is to be scored static bool relative_residuals(const P&);  // with Evidence::residuals:
///   false: errors not divided by the rows' energy static bool pinned(const P&, std::int64_t
///   position); // with eviction elsewhere in a composition: never drop this one static void
///   evict(const P&, const RowBatch&, std::span<StoredRow>, std::span<RowFate>);  // with
///   Evidence::mass:
///                                                      // after classify(), drops stored rows and
///                                                      leaving ones
#pragma once

#include <concepts>
#include <cstdint>
#include <span>

#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief What a token policy says of a row. Under composition the larger wins: dropped beats full,
/// full beats compressed, and a pinned row (a sink) stays at full rank whatever the others say.
enum class RowFate : std::uint8_t { compressed, full, dropped, pinned };

/// @brief The state in which a row of this fate is stored.
constexpr RowState state_of(RowFate fate) {
  return fate == RowFate::compressed ? RowState::compressed
         : fate == RowFate::dropped  ? RowState::dropped
                                     : RowState::full;
}

/// @brief What a token policy decides by, besides positions. Flags.
enum class Evidence : unsigned {
  none = 0,
  attention = 1,  ///< SnapKV scores of a prompt's rows under its last queries
  residuals =
      2,  ///< relative reconstruction error of the rows under the basis that is about to store them
  accumulated = 4  ///< attention that every stored and leaving row has received so far
};
/// @brief Both.
constexpr Evidence operator|(Evidence a, Evidence b) {
  return static_cast<Evidence>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
/// @brief `all` contains `one`.
constexpr bool wants(Evidence all, Evidence one) {
  return (static_cast<unsigned>(all) & static_cast<unsigned>(one)) != 0;
}

/// @brief A row that has left the tail before, as an evicting policy sees it.
struct StoredRow {
  float accumulated = 0.0F;  ///< attention received so far
  bool pinned = false;       ///< may not be dropped
  bool gone = false;         ///< set by evict()
};

/// @brief Most rows of a batch that may end up in each list.
struct RowBounds {
  std::int64_t full = 0;
  std::int64_t compressed = 0;
};

/// @brief Consecutive rows of one KV head that a token policy decides on.
struct RowBatch {
  int kv_head = 0;
  std::int64_t first_position = 0;
  std::int64_t num_rows = 0;
  Phase phase = Phase::prefill;
  std::span<const float> attention{};  ///< [num_rows]; a prompt's rows only
  std::span<const float> residuals{};  ///< [num_rows] error of keys and of values in their metrics,
                                       ///< relative or not; -1: no candidate
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

/// Instantiating it raises one static_assert for each member that is missing.
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
