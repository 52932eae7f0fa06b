// SPDX-License-Identifier: Apache-2.0
/// @file cpu/saved_frame.hpp  What surrounds a saved sequence, and the decision whether it belongs here.
///
/// Format, version 1, little-endian: "LRKVSEQ1", u64 total size, u64 checksum of all that follows; a description of the layer
/// (shape, types, layouts, fingerprint of the calibrated maps), which must equal the reader's; then cpu/state_io.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/cpu/state_io.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The first bytes of a saved sequence; the last digit is the version.
inline constexpr std::string_view kSavedMagic = "LRKVSEQ1";

namespace detail {

/// What must be equal for saved rows to mean the same here: named values, compared one by one.
template <class State>
std::vector<std::pair<const char*, std::uint64_t>> describe_layer(const State& state) {
  std::vector<std::pair<const char*, std::uint64_t>> all;
  const auto add = [&](const char* name, auto value) { all.emplace_back(name, static_cast<std::uint64_t>(value)); };
  add("num_kv_heads", state.num_kv_heads());
  add("num_qo_heads", state.config.shape.num_qo_heads);
  add("head_dim", state.head_dim());
  add("full_type", state.config.full_type);
  add("full_row_bits", state.config.full_row_bits);
  add("compresses", State::TokenImpl::compresses);
  add("keeps_mass", State::keeps_mass);
  add("adapts", State::UpdaterImpl::adapts);
  add("recent", state.recent());
  add("keep_residuals", state.config.keep_residuals);
  add("unrotated keys", state.stores_unrotated());
  if (state.stores_unrotated()) {
    const RopeConfig& rope = state.config.rope;
    add("rope pairing", rope.pairing);
    const std::vector<double> frequencies = rope_frequencies(rope, state.head_dim());
    add("rope frequencies", checksum(std::as_bytes(std::span(frequencies))));
  }
  if (!State::TokenImpl::compresses) return all;
  add("num_lists", state.num_lists());
  for (int list = 0; list < state.num_lists(); ++list) {
    const auto& layout = state.compressed.layout(list);
    add("key_rank", layout.key_rank);
    add("value_rank", layout.value_rank);
    add("key_row_bits", State::Codec::row_bits(layout.key));
    add("value_row_bits", State::Codec::row_bits(layout.value));
    for (const Part part : {Part::key, Part::value}) {
      if constexpr (requires { layout.of(part).bits; }) {
        add("bits of channels", checksum(std::as_bytes(std::span(layout.of(part).bits))));
      } else if constexpr (requires { layout.of(part).type; }) {
        add("coefficient type", layout.of(part).type);
      }
    }
  }
  std::vector<EpochHead> calibrated;
  for (int head = 0; head < state.num_kv_heads(); ++head) calibrated.push_back(state.epochs.head(0, head));
  ByteWriter count;
  write_epoch(count, calibrated);
  std::vector<std::byte> maps(count.size());
  ByteWriter writer(maps);
  write_epoch(writer, calibrated);
  add("calibrated maps", checksum(maps));
  return all;
}

}  // namespace detail

/// @brief Frames a sequence: magic, size, checksum, description, contents. @return bytes written (or counted)
template <class State>
std::size_t save_sequence(const State& state, int slot, std::span<std::byte> buffer, bool count_only) {
  ByteWriter out = count_only ? ByteWriter() : ByteWriter(buffer);
  out.bytes(kSavedMagic.data(), kSavedMagic.size());
  std::byte* frame = out.reserve(2 * sizeof(std::uint64_t));
  const std::size_t begin = out.size();
  const auto description = detail::describe_layer(state);
  out.value(static_cast<std::uint64_t>(description.size()));
  for (const auto& [name, value] : description) out.value(value);
  write_sequence(state, slot, out);
  if (frame != nullptr) {
    const std::uint64_t values[2] = {out.size(), checksum(std::span<const std::byte>(buffer).subspan(begin, out.size() - begin))};
    std::memcpy(frame, values, sizeof values);
  }
  return out.size();
}

/// @brief Opens a frame and checks that it belongs to a layer like this. @return the reader at the contents
/// @throws FormatError if it is damaged or no saved sequence, ShapeError naming both values if it belongs to another layer
template <class State>
ByteReader open_saved(const State& state, std::span<const std::byte> buffer) {
  using ::lowrankkv::detail::fail;
  ByteReader in(buffer);
  const std::span<const std::byte> magic = in.bytes(kSavedMagic.size());
  if (std::memcmp(magic.data(), kSavedMagic.data(), magic.size()) != 0) {
    fail<FormatError>("saved state: begins with '", std::string_view(reinterpret_cast<const char*>(magic.data()), magic.size()), "', expected '", kSavedMagic, "'");
  }
  const auto size = in.value<std::uint64_t>();
  const auto sum = in.value<std::uint64_t>();
  if (size != buffer.size()) fail<FormatError>("saved state: ", size, " bytes were saved, ", buffer.size(), " are given");
  const std::uint64_t found = checksum(buffer.subspan(buffer.size() - in.left()));
  if (found != sum) fail<FormatError>("saved state: checksum ", found, ", expected ", sum);
  const auto expected = detail::describe_layer(state);
  const auto count = in.value<std::uint64_t>();
  for (std::size_t i = 0; i < (std::min)(static_cast<std::size_t>(count), expected.size()); ++i) {
    const auto value = in.value<std::uint64_t>();
    if (value != expected[i].second) fail<ShapeError>(expected[i].first, ": cache ", expected[i].second, ", saved ", value);
  }
  if (count != expected.size()) fail<ShapeError>("layer description: cache ", expected.size(), " entries, saved ", count);
  return in;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
