// SPDX-License-Identifier: Apache-2.0
/// @file core/byte_stream.hpp  Writing and reading saved state: little-endian values in a caller's
/// buffer, with a checksum.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

static_assert(std::endian::native == std::endian::little,
              "lowrankkv: saved state is little-endian, and so must the machine be");

/// @brief FNV-1a over 64-bit words in four interleaved lanes, then over the remaining bytes one by
/// one. Detects damage; does not authenticate. Cost: about 7 GB/s.
inline std::uint64_t checksum(std::span<const std::byte> bytes,
                              std::uint64_t hash = 0xcbf29ce484222325ULL) {
  constexpr std::uint64_t prime = 0x100000001b3ULL;
  std::uint64_t lanes[4] = {hash, hash + 1, hash + 2, hash + 3}, words[4];
  std::size_t at = 0;
  for (; bytes.size() - at >= sizeof(words); at += sizeof(words)) {
    std::memcpy(words, bytes.data() + at, sizeof(words));
    for (int lane = 0; lane < 4; ++lane)
      lanes[lane] = std::rotl((lanes[lane] ^ words[lane]) * prime, 29);
  }
  for (const std::uint64_t lane : lanes) hash = std::rotl((hash ^ lane) * prime, 31);
  for (; at < bytes.size(); ++at) hash = (hash ^ std::to_integer<std::uint64_t>(bytes[at])) * prime;
  return hash;
}

/// @brief Appends values to a buffer, or only counts their bytes if there is no buffer: the same
/// code computes the space needed and writes.
class ByteWriter {
 public:
  ByteWriter() = default;  ///< only counts
  explicit ByteWriter(std::span<std::byte> buffer) : buffer_(buffer), counting_(false) {}

  std::size_t size() const { return size_; }
  bool counting() const { return counting_; }
  void bytes(const void* data, std::size_t count) {
    if (!counting_) {
      if (count > buffer_.size() - size_)
        detail::fail<CapacityError>("save: buffer of ", buffer_.size(), " bytes, more than ",
                                    size_ + count, " needed");
      if (count > 0) std::memcpy(buffer_.data() + size_, data, count);
    }
    size_ += count;
  }
  template <class T>
  void value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes(&value, sizeof value);
  }
  /// @brief Writes the number of elements (u64), then the elements.
  template <class T>
  void list(const std::vector<T>& values) {
    static_assert(std::is_trivially_copyable_v<T>);
    value(static_cast<std::uint64_t>(values.size()));
    bytes(values.data(), values.size() * sizeof(T));
  }
  /// @brief Reserves `count` zeroed bytes for the caller to fill. @return null while counting
  std::byte* reserve(std::size_t count) {
    if (counting_) {
      size_ += count;
      return nullptr;
    }
    if (count > buffer_.size() - size_)
      detail::fail<CapacityError>("save: buffer of ", buffer_.size(), " bytes, more than ",
                                  size_ + count, " needed");
    std::byte* at = buffer_.data() + size_;
    std::memset(at, 0, count);
    size_ += count;
    return at;
  }

 private:
  std::span<std::byte> buffer_;
  bool counting_ = true;
  std::size_t size_ = 0;
};

/// @brief Reads what a ByteWriter wrote. Raises FormatError instead of reading past the end.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> buffer) : buffer_(buffer) {}

  std::size_t left() const { return buffer_.size() - at_; }
  std::span<const std::byte> bytes(std::size_t count) {
    if (count > left())
      detail::fail<FormatError>("saved state: ", count, " bytes expected at ", at_,
                                ", the end is at ", buffer_.size());
    const std::span<const std::byte> part = buffer_.subspan(at_, count);
    at_ += count;
    return part;
  }
  template <class T>
  T value() {
    static_assert(std::is_trivially_copyable_v<T>);
    T result;
    std::memcpy(&result, bytes(sizeof result).data(), sizeof result);
    return result;
  }
  template <class T>
  std::vector<T> list() {
    const auto count = value<std::uint64_t>();
    if (count > left() / sizeof(T))
      detail::fail<FormatError>("saved state: a list of ", count, " elements, ", left(),
                                " bytes are left");
    std::vector<T> values(static_cast<std::size_t>(count));
    const std::span<const std::byte> part = bytes(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), part.data(), part.size());
    return values;
  }

 private:
  std::span<const std::byte> buffer_;
  std::size_t at_ = 0;
};

LOWRANKKV_NAMESPACE_END
