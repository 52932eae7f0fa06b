// SPDX-License-Identifier: Apache-2.0
/// @file cpu/saved_frame.hpp  A framed sequence of the CPU backend: core/saved_frame.hpp around
/// cpu/state_io.hpp, with the description of the layer (shape, types, layouts, fingerprint of the
/// calibrated maps).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/core/saved_frame.hpp"
#include "lowrankkv/cpu/state_io.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The first bytes of a saved sequence. The last digit is the version.
inline constexpr std::string_view kSavedMagic = "LRKVSEQ4";
/// @brief An older version, which is still read: it has a byte a position instead of runs.
inline constexpr std::string_view kSavedMagic3 = "LRKVSEQ3";

namespace detail {

/// The properties of a layer that a saved sequence must match to be loaded.
template <class State>
LayerDescription describe_layer(const State& state) {
  LayerDescription all;
  const auto add = [&](const char* name, auto value) {
    all.emplace_back(name, static_cast<std::uint64_t>(value));
  };
  add("num_kv_heads", state.num_kv_heads());
  add("num_qo_heads", state.config.shape.num_qo_heads);
  add("head_dim", state.head_dim());
  add("full_type", state.config.full_type);
  add("full_row_bits", state.config.full_row_bits);
  add("compresses", State::TokenImpl::compresses);
  add("accumulates_scores", State::accumulates_scores);
  add("adapts", State::UpdaterImpl::adapts);
  add("recent", state.recent());
  add("keep_residuals", state.config.keep_residuals);
  add("pre-RoPE keys", state.stores_pre_rope());
  if (state.stores_pre_rope()) {
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
      if constexpr (requires { layout.of(part).format; }) {
        add("format of codes", layout.of(part).format);
      } else if constexpr (requires { layout.of(part).bits; }) {
        add("bits of channels", checksum(std::as_bytes(std::span(layout.of(part).bits))));
      } else if constexpr (requires { layout.of(part).type; }) {
        add("coefficient type", layout.of(part).type);
      }
    }
  }
  std::vector<EpochHead> calibrated;
  for (int head = 0; head < state.num_kv_heads(); ++head)
    calibrated.push_back(state.epochs.head(0, head));
  ByteWriter count;
  write_epoch(count, calibrated);
  std::vector<std::byte> maps(count.size());
  ByteWriter writer(maps);
  write_epoch(writer, calibrated);
  add("calibrated maps", checksum(maps));
  return all;
}

}  // namespace detail

/// @brief Saves a framed sequence. @return bytes written (or counted)
template <class State>
std::size_t save_sequence(const State& state, int slot, std::span<std::byte> buffer,
                          bool count_only) {
  return save_framed(kSavedMagic, detail::describe_layer(state), buffer, count_only,
                     [&](ByteWriter& out) { write_sequence(state, slot, out); });
}

/// @brief A saved sequence whose frame is opened: a reader of its contents, and their version.
struct OpenedSequence {
  ByteReader in;
  int version = 4;
};

/// @brief Opens the frame of a saved sequence of this version or of version 3. @throws as
/// open_framed()
template <class State>
OpenedSequence open_saved(const State& state, std::span<const std::byte> buffer) {
  const bool third = buffer.size() >= kSavedMagic3.size() &&
                     std::memcmp(buffer.data(), kSavedMagic3.data(), kSavedMagic3.size()) == 0;
  return {open_framed(third ? kSavedMagic3 : kSavedMagic, detail::describe_layer(state), buffer),
          third ? 3 : 4};
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
