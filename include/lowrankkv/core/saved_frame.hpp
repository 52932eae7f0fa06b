// SPDX-License-Identifier: Apache-2.0
/// @file core/saved_frame.hpp  The frame around a saved sequence, for every backend, and the check
/// that it belongs to a layer.
///
/// Format, little-endian: 8 characters that name contents and version; u64 total size; u64 checksum
/// of all that follows; a description of the layer, which must equal the reader's; the contents.
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

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Properties of a layer that saved rows depend on: named values, compared one by one.
using LayerDescription = std::vector<std::pair<const char*, std::uint64_t>>;

/// @brief Writes a frame; `write(ByteWriter&)` writes its contents.
/// @param count_only  only count the bytes; `buffer` is not used
/// @return bytes written or counted
/// @throws CapacityError if the buffer is too small
template <class Write>
std::size_t save_framed(std::string_view magic, const LayerDescription& description,
                        std::span<std::byte> buffer, bool count_only, Write&& write) {
  ByteWriter out = count_only ? ByteWriter() : ByteWriter(buffer);
  out.bytes(magic.data(), magic.size());
  std::byte* frame = out.reserve(2 * sizeof(std::uint64_t));
  const std::size_t begin = out.size();
  out.value(static_cast<std::uint64_t>(description.size()));
  for (const auto& [name, value] : description) out.value(value);
  write(out);
  if (frame != nullptr) {
    const std::uint64_t values[2] = {
        out.size(),
        checksum(std::span<const std::byte>(buffer).subspan(begin, out.size() - begin))};
    std::memcpy(frame, values, sizeof values);
  }
  return out.size();
}

/// @brief Opens a frame and checks that it belongs to a layer of this description.
/// @return a reader positioned at the contents
/// @throws FormatError if the frame is damaged or of another format, ShapeError naming both values
/// if it belongs to another layer
inline ByteReader open_framed(std::string_view magic, const LayerDescription& expected,
                              std::span<const std::byte> buffer) {
  using detail::fail;
  ByteReader in(buffer);
  const std::span<const std::byte> found_magic = in.bytes(magic.size());
  if (std::memcmp(found_magic.data(), magic.data(), magic.size()) != 0) {
    fail<FormatError>(
        "saved state: begins with '",
        detail::printable({reinterpret_cast<const char*>(found_magic.data()), magic.size()}),
        "', expected '", magic, "'");
  }
  const auto size = in.value<std::uint64_t>();
  const auto sum = in.value<std::uint64_t>();
  if (size != buffer.size())
    fail<FormatError>("saved state: ", size, " bytes were saved, ", buffer.size(), " are given");
  const std::uint64_t found = checksum(buffer.subspan(buffer.size() - in.left()));
  if (found != sum) fail<FormatError>("saved state: checksum ", found, ", expected ", sum);
  const auto count = in.value<std::uint64_t>();
  for (std::size_t i = 0; i < (std::min)(static_cast<std::size_t>(count), expected.size()); ++i) {
    const auto value = in.value<std::uint64_t>();
    if (value != expected[i].second)
      fail<ShapeError>(expected[i].first, ": cache ", expected[i].second, ", saved ", value);
  }
  if (count != expected.size())
    fail<ShapeError>("layer description: cache ", expected.size(), " entries, saved ", count);
  return in;
}

LOWRANKKV_NAMESPACE_END
