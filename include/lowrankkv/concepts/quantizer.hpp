// SPDX-License-Identifier: Apache-2.0
/// @file concepts/quantizer.hpp  The members that a quantizer must have on a backend, and one
/// readable error message for each missing member.
///
/// A page holds the keys of its rows, then their values: two blocks of rows_per_page rows. A
/// quantizer is a parameter struct Q plus `Impl<Q, Backend>` with
///
///     // How the keys (or values) of one KV head lie in a block. Copyable.
///     using Layout = ...;
///     // bits: of the basis's channels, or empty.
///     static Layout layout(const Q&, int rank, std::span<const std::uint8_t> bits);
///     // Or, if keys and values lie differently, layout(const Q&, Part, int rank, bits).
///     // Bits of one row of a block, scales included: memory() counts these.
///     static std::int64_t row_bits(const Layout&);
///     // Bytes of a block of `rows` rows. Padding may make it larger than rows x row_bits.
///     static std::size_t block_bytes(const Layout&, int rows);
///     // rows: row-major [count, stride].
///     static void encode(const Layout&, Part, int rows_per_page, std::byte* block, int first,
///                        int count, const float* rows, int stride);
///     // tile: keys channel-major [rank, stride], values row-major [count, stride].
///     static void decode(const Layout&, Part, int rows_per_page, const std::byte* block,
///                        int first, int count, float* tile, int stride);
///     // Copies codes between blocks of from_rows and of to_rows rows (may be the same block).
///     static void copy_row(const Layout&, Part, const std::byte* from, int from_rows,
///                          int from_row, std::byte* to, int to_rows, int to_row);
///
/// Optional members:
///
///     // Raises if the parameters are invalid.
///     static void validate(const Q&);
///     // The transform that the stored maps take over.
///     static ChannelFold fold(const Q&, const Layout&, std::span<const float> rms);
///     // true: channels must stay sorted by energy when a basis moves.
///     static constexpr bool orders_channels;
///     // Rows share codes in groups of so many successive rows of a list: rows leave the tail in
///     // whole groups, and pages have whole groups. encode() of a later row, and copy_row() into a
///     // group, may rewrite the group's earlier rows. Only with the Static updater.
///     static int rows_together(const Q&);
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief A transform that a quantizer delegates to the stored maps: rows are encoded with
/// down * rotation * diag(1 / scale) and read with up * rotation * diag(scale). Empty members mean
/// the identity.
struct ChannelFold {
  std::vector<float> rotation;  ///< [rank, rank] orthogonal, row-major
  std::vector<float> scale;     ///< [rank] positive
};

template <class Q, class B>
concept QuantizerHasLayoutOfPart = requires(const Q& policy, std::span<const std::uint8_t> bits) {
  { Impl<Q, B>::layout(policy, Part::key, 1, bits) } -> std::same_as<typename Impl<Q, B>::Layout>;
};
template <class Q, class B>
concept QuantizerHasCommonLayout = requires(const Q& policy, std::span<const std::uint8_t> bits) {
  { Impl<Q, B>::layout(policy, 1, bits) } -> std::same_as<typename Impl<Q, B>::Layout>;
};
template <class Q, class B>
concept QuantizerHasLayout = requires {
  requires std::copyable<typename Impl<Q, B>::Layout>;
  requires QuantizerHasCommonLayout<Q, B> || QuantizerHasLayoutOfPart<Q, B>;
};
template <class Q, class B>
concept QuantizerHasRowBits = requires(const typename Impl<Q, B>::Layout& layout) {
  { Impl<Q, B>::row_bits(layout) } -> std::convertible_to<std::int64_t>;
  { Impl<Q, B>::block_bytes(layout, 1) } -> std::convertible_to<std::size_t>;
};
template <class Q, class B>
concept QuantizerHasEncode = requires(const typename Impl<Q, B>::Layout& layout, std::byte* block,
                                      const float* rows) {
  Impl<Q, B>::encode(layout, Part::key, 1, block, 0, 0, rows, 0);
};
template <class Q, class B>
concept QuantizerHasDecode = requires(const typename Impl<Q, B>::Layout& layout,
                                      const std::byte* block, float* tile) {
  Impl<Q, B>::decode(layout, Part::key, 1, block, 0, 0, tile, 0);
};
template <class Q, class B>
concept QuantizerHasCopyRow = requires(const typename Impl<Q, B>::Layout& layout,
                                       const std::byte* from, std::byte* to) {
  Impl<Q, B>::copy_row(layout, Part::key, from, 1, 0, to, 1, 0);
};

/// @brief Q can be used as the Quantizer of a CompressedKVCache<B, ...>.
template <class Q, class B>
concept QuantizerFor = HasImpl<Q, B> && QuantizerHasLayout<Q, B> && QuantizerHasRowBits<Q, B> &&
    QuantizerHasEncode<Q, B> && QuantizerHasDecode<Q, B> && QuantizerHasCopyRow<Q, B>;

/// @brief Whether Q needs channels sorted by energy, largest first.
template <class Q, class B>
constexpr bool orders_channels() {
  if constexpr (requires { Impl<Q, B>::orders_channels; })
    return Impl<Q, B>::orders_channels;
  else
    return false;
}

/// @brief The layout of the keys or values of one head.
template <class B, class Q>
typename Impl<Q, B>::Layout layout_of(const Q& policy, Part part, int rank,
                                      std::span<const std::uint8_t> bits) {
  if constexpr (QuantizerHasLayoutOfPart<Q, B>)
    return Impl<Q, B>::layout(policy, part, rank, bits);
  else
    return Impl<Q, B>::layout(policy, rank, bits);
}
/// @brief Whether rows of Q share codes in groups.
template <class Q, class B>
constexpr bool groups_rows() {
  return requires(const Q& policy) { Impl<Q, B>::rows_together(policy); };
}
/// @brief Rows of a group; 1 if every row has its own codes.
template <class B, class Q>
int rows_together([[maybe_unused]] const Q& policy) {
  if constexpr (groups_rows<Q, B>())
    return Impl<Q, B>::rows_together(policy);
  else
    return 1;
}

namespace detail {

/// Its instantiation raises one static_assert for each missing member.
template <class Q, class B>
struct DiagnoseQuantizer {
  static_assert(HasImpl<Q, B>,
                "lowrankkv: this Quantizer has no Impl<Quantizer, Backend>; include the header "
                "that defines it or "
                "specialise lowrankkv::Impl; see concepts/quantizer.hpp");
  static_assert(
      !HasImpl<Q, B> || QuantizerHasLayout<Q, B>,
      "lowrankkv: Impl<Quantizer, Backend> is missing a copyable type 'Layout' or 'static Layout "
      "layout(const "
      "Quantizer&, int rank, std::span<const std::uint8_t> bits)'; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || !QuantizerHasLayout<Q, B> || QuantizerHasRowBits<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static std::int64_t "
                "row_bits(const Layout&)' or 'static "
                "std::size_t block_bytes(const Layout&, int rows)'; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || !QuantizerHasLayout<Q, B> || QuantizerHasEncode<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static void encode(const Layout&, "
                "Part, int, std::byte*, "
                "int, int, const float*, int)'; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || !QuantizerHasLayout<Q, B> || QuantizerHasDecode<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static void decode(const Layout&, "
                "Part, int, const "
                "std::byte*, int, int, float*, int)'; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || !QuantizerHasLayout<Q, B> || QuantizerHasCopyRow<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static void copy_row(const "
                "Layout&, Part, const "
                "std::byte*, int, int, std::byte*, int, int)'; see concepts/quantizer.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
