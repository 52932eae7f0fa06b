// SPDX-License-Identifier: Apache-2.0
/// @file concepts/quantizer.hpp  What a quantizer must offer on a backend, and one readable line for each thing missing.
///
/// A page holds the keys of its rows, then their values: two blocks of rows_per_page rows. A quantizer is a parameter
/// struct Q plus `Impl<Q, Backend>` with
///   static std::size_t row_bytes(const Q&, int rank);   // of one row of one block, scales included
///   static void encode(const Q&, Part, BlockShape, std::byte* block, int first, int count, const float* rows, int stride);
///   static void decode(const Q&, Part, BlockShape, const std::byte* block, int first, int count, float* tile, int stride);
/// encode takes rows row-major; decode gives keys channel-major [rank, stride] and values row-major [count, stride].
/// Optional: `static void validate(const Policy&)`, which raises what is wrong with the parameters.
#pragma once

#include <concepts>
#include <cstddef>

#include "lowrankkv/concepts/impl.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief One block of a page.
struct BlockShape {
  int rows_per_page = 0;
  int rank = 0;
};

template <class Q, class B>
concept QuantizerHasRowBytes =
    requires(const Q& policy) { { Impl<Q, B>::row_bytes(policy, 1) } -> std::convertible_to<std::size_t>; };
template <class Q, class B>
concept QuantizerHasEncode = requires(const Q& policy, std::byte* block, const float* rows) {
  Impl<Q, B>::encode(policy, Part::key, BlockShape{}, block, 0, 0, rows, 0);
};
template <class Q, class B>
concept QuantizerHasDecode = requires(const Q& policy, const std::byte* block, float* tile) {
  Impl<Q, B>::decode(policy, Part::key, BlockShape{}, block, 0, 0, tile, 0);
};

/// @brief Q can be used as the Quantizer of a CompressedKVCache<B, ...>.
template <class Q, class B>
concept QuantizerFor = HasImpl<Q, B> && QuantizerHasRowBytes<Q, B> && QuantizerHasEncode<Q, B> && QuantizerHasDecode<Q, B>;

namespace detail {

/// Instantiating it raises one static_assert for each member that is missing.
template <class Q, class B>
struct DiagnoseQuantizer {
  static_assert(HasImpl<Q, B>,
                "lowrankkv: this Quantizer has no Impl<Quantizer, Backend>; include the header that defines it or "
                "specialise lowrankkv::Impl; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || QuantizerHasRowBytes<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static std::size_t row_bytes(const Quantizer&, int)'; "
                "see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || QuantizerHasEncode<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static void encode(const Quantizer&, Part, BlockShape, "
                "std::byte*, int, int, const float*, int)'; see concepts/quantizer.hpp");
  static_assert(!HasImpl<Q, B> || QuantizerHasDecode<Q, B>,
                "lowrankkv: Impl<Quantizer, Backend> is missing 'static void decode(const Quantizer&, Part, BlockShape, "
                "const std::byte*, int, int, float*, int)'; see concepts/quantizer.hpp");
};

}  // namespace detail
LOWRANKKV_NAMESPACE_END
