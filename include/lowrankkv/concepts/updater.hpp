// SPDX-License-Identifier: Apache-2.0
/// @file concepts/updater.hpp  The members that an updater must have on a backend, and one readable
/// error message for each missing member.
///
/// An updater is a parameter struct U plus `Impl<U, Backend>` with
///
///     // false: the basis never moves, and no member below is called.
///     static constexpr bool adapts;
///     // One per (sequence, KV head, key or value). fork() copies it.
///     using State = ...;
///     // The prompt rows that observe() gets.
///     static PromptSelection prompt_selection(const U&);
///     // rows [n, head_dim]: mean subtracted, and in the metric in which `basis` is orthonormal.
///     static void observe(const U&, State&, MatrixView rows, MatrixView basis, Phase);
///     // basis, updated: [head_dim, rank], orthonormal. Returns whether the basis moved.
///     static bool maybe_update(const U&, State&, MatrixView basis, MutableMatrixView updated,
///                              Phase);
///     // Bytes that the state holds between two calls.
///     static std::size_t state_bytes(const State&);
///
/// Optional members:
///
///     // Raises if the parameters are invalid.
///     static void validate(const U&);
///     // Raises if the calibrated basis lacks what the updater needs.
///     static void validate_basis(const U&, const LayerBasis&);
///     // The state of a new sequence. Default: State{}.
///     static State start(const U&, const UpdaterStart&);
///     // Called after observe() of the keys and the values of a KV head, before maybe_update() of
///     // them: lets one decide for both.
///     static void join(const U&, State& keys, State& values);
///     // For save and load. read_state() gets the state of a new sequence.
///     static void write_state(ByteWriter&, const State&);
///     static void read_state(ByteReader&, State&);
///     // true: observe() gets prompts too in order, flush_interval rows at a time.
///     static constexpr bool sequential;
///     // true: every update begins an epoch. Default: when enough rows pay for an epoch's bytes.
///     static constexpr bool publishes;
#pragma once

#include <concepts>
#include <cstddef>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/views.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief What the updater state of a new sequence is told about its (KV head, key or value).
struct UpdaterStart {
  int head_dim = 0;
  int rank = 0;
  Part part = Part::key;
  float residual_threshold = 0.0F;  ///< HeadBasis::key_threshold or value_threshold
};

template <class U, class B>
concept UpdaterHasAdapts = requires {
  { Impl<U, B>::adapts } -> std::convertible_to<bool>;
};
template <class U, class B>
concept UpdaterHasState = requires {
  requires std::copyable<typename Impl<U, B>::State>;
};
template <class U, class B>
concept UpdaterHasSelection = requires(const U& policy) {
  { Impl<U, B>::prompt_selection(policy) } -> std::same_as<PromptSelection>;
};
template <class U, class B>
concept UpdaterHasObserve = requires(const U& policy, typename Impl<U, B>::State& state,
                                     MatrixView rows) {
  Impl<U, B>::observe(policy, state, rows, rows, Phase::prefill);
};
template <class U, class B>
concept UpdaterHasMaybeUpdate = requires(const U& policy, typename Impl<U, B>::State& state,
                                         MatrixView basis, MutableMatrixView updated) {
  { Impl<U, B>::maybe_update(policy, state, basis, updated, Phase::prefill) } -> std::same_as<bool>;
};
template <class U, class B>
concept UpdaterHasStateBytes = requires(const typename Impl<U, B>::State& state) {
  { Impl<U, B>::state_bytes(state) } -> std::convertible_to<std::size_t>;
};

/// @brief U can be used as the Updater of a CompressedKVCache<B, ...>.
template <class U, class B>
concept UpdaterFor =
    HasImpl<U, B> && UpdaterHasAdapts<U, B> && UpdaterHasState<U, B> && UpdaterHasSelection<U, B> &&
    UpdaterHasObserve<U, B> && UpdaterHasMaybeUpdate<U, B> && UpdaterHasStateBytes<U, B>;

/// @brief Whether U observes prompts in stream order, a few rows at a time.
template <class U, class B>
constexpr bool updates_sequentially() {
  if constexpr (requires { Impl<U, B>::sequential; })
    return Impl<U, B>::sequential;
  else
    return false;
}
/// @brief Whether every update of U begins an epoch.
template <class U, class B>
constexpr bool publishes_updates() {
  if constexpr (requires { Impl<U, B>::publishes; })
    return Impl<U, B>::publishes;
  else
    return false;
}

namespace detail {

/// Its instantiation raises one static_assert for each missing member.
template <class U, class B>
struct DiagnoseUpdater {
  static_assert(HasImpl<U, B>,
                "lowrankkv: this Updater has no Impl<Updater, Backend>; include the header that "
                "defines it or specialise "
                "lowrankkv::Impl; see concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || UpdaterHasAdapts<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing 'static constexpr bool adapts'; see "
                "concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || UpdaterHasState<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing a copyable type 'State'; see "
                "concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || UpdaterHasSelection<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing 'static PromptSelection "
                "prompt_selection(const Updater&)'; "
                "see concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || !UpdaterHasState<U, B> || UpdaterHasObserve<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing 'static void observe(const Updater&, "
                "State&, MatrixView, "
                "MatrixView, Phase)'; see concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || !UpdaterHasState<U, B> || UpdaterHasMaybeUpdate<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing 'static bool maybe_update(const "
                "Updater&, State&, "
                "MatrixView, MutableMatrixView, Phase)'; see concepts/updater.hpp");
  static_assert(!HasImpl<U, B> || !UpdaterHasState<U, B> || UpdaterHasStateBytes<U, B>,
                "lowrankkv: Impl<Updater, Backend> is missing 'static std::size_t "
                "state_bytes(const State&)'; see "
                "concepts/updater.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
