// SPDX-License-Identifier: Apache-2.0
/// @file io/safetensors.hpp  Reading and writing safetensors files: named tensors with a JSON
/// header.
///
/// Layout: 8 bytes of little-endian header length, the header, the data. Files are not trusted:
/// lengths, shapes, offsets and duplicates are checked, and FormatError names the values that do
/// not fit together.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/io/json_header.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace io {

static_assert(std::endian::native == std::endian::little,
              "lowrankkv: safetensors files are little-endian");

/// @brief One tensor of a file. `F64`, `F32`, `F16` and `BF16` can be read; other types can only be
/// listed.
struct TensorInfo {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::size_t begin = 0;  ///< bytes from the start of the data
  std::size_t end = 0;    ///< one past the last byte

  std::int64_t num_elements() const {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    return count;
  }
};

namespace detail {

inline std::size_t dtype_size(const std::string& dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype == "F8_E4M3" || dtype == "F8_E5M2")
    return 1;
  return 0;
}

/// Raises FormatError unless the tensor's offsets lie in the data and fit its shape.
inline void check_tensor(const std::string& name, const TensorInfo& tensor,
                         std::size_t data_bytes) {
  using ::lowrankkv::detail::fail;
  const std::size_t size = dtype_size(tensor.dtype);
  if (size == 0)
    fail<FormatError>("safetensors: tensor ", name, " has unknown dtype ", tensor.dtype);
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    fail<FormatError>("safetensors: tensor ", name, " lies at bytes ", tensor.begin, " to ",
                      tensor.end, ", data has ", data_bytes);
  }
  // A tensor with an extent of 0 has no bytes, whatever its other extents; their product must fit,
  // as that of any type's bytes.
  const bool empty = std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end();
  const std::size_t most = empty ? (std::numeric_limits<std::int64_t>::max)() : data_bytes;
  std::size_t bytes = empty ? 8 : size;
  for (const std::int64_t extent : tensor.shape) {
    if (extent < 0 || (extent > 0 && bytes > most / static_cast<std::size_t>(extent))) {
      fail<FormatError>("safetensors: tensor ", name, " has an extent of ", extent, ", data has ",
                        data_bytes, " bytes");
    }
    if (extent > 0) bytes *= static_cast<std::size_t>(extent);
  }
  if (empty) bytes = 0;
  if (bytes != tensor.end - tensor.begin) {
    fail<FormatError>("safetensors: tensor ", name, " needs ", bytes, " bytes, offsets give ",
                      tensor.end - tensor.begin);
  }
}

}  // namespace detail

/// @brief A safetensors file in memory.
class Safetensors {
 public:
  /// @brief Reads a file. @throws FormatError if it cannot be read or is not a valid safetensors
  /// file.
  static Safetensors read(const std::string& path) {
    std::ifstream stream(path, std::ios::binary | std::ios::ate);
    if (!stream) ::lowrankkv::detail::fail<FormatError>("safetensors: cannot open ", path);
    const std::int64_t size = static_cast<std::int64_t>(stream.tellg());
    stream.seekg(0);
    // Opening a folder succeeds and gives a size, but its first read fails.
    const bool readable =
        size == 0 || (size > 0 && stream.peek() != std::ifstream::traits_type::eof());
    if (!readable)
      ::lowrankkv::detail::fail<FormatError>("safetensors: ", path,
                                             " is no regular file, one is expected");
    std::vector<std::byte> bytes(static_cast<std::size_t>(size));
    stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!stream)
      ::lowrankkv::detail::fail<FormatError>("safetensors: cannot read ", bytes.size(),
                                             " bytes from ", path);
    return Safetensors(std::move(bytes));
  }

  /// @brief Parses a file's bytes. @throws FormatError that names the inconsistent values
  explicit Safetensors(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {
    using ::lowrankkv::detail::fail;
    if (bytes_.size() < 8)
      fail<FormatError>("safetensors: file has ", bytes_.size(),
                        " bytes, the header length alone takes 8");
    std::uint64_t header = 0;
    std::memcpy(&header, bytes_.data(), 8);
    if (header > bytes_.size() - 8)
      fail<FormatError>("safetensors: header of ", header, " bytes, file has ", bytes_.size());
    data_ = 8 + static_cast<std::size_t>(header);
    const std::size_t data_bytes = bytes_.size() - data_;
    detail::HeaderParser parser(reinterpret_cast<const char*>(bytes_.data()) + 8,
                                static_cast<std::size_t>(header));
    parser.object([&](const std::string& name) {
      if (name == "__metadata__") {
        parser.object([&](const std::string& key) { metadata_[key] = parser.string(); });
        return;
      }
      TensorInfo tensor;
      std::vector<std::int64_t> offsets;
      bool shaped = false;
      parser.object([&](const std::string& key) {
        if (key == "dtype")
          tensor.dtype = parser.string();
        else if (key == "shape")
          tensor.shape = parser.integers(), shaped = true;
        else if (key == "data_offsets")
          offsets = parser.integers();
        else
          parser.fail("an unknown key '" + key + "' in tensor " + name);
      });
      if (!shaped) fail<FormatError>("safetensors: tensor ", name, " has 0 shapes, expected 1");
      if (offsets.size() != 2)
        fail<FormatError>("safetensors: tensor ", name, " has ", offsets.size(),
                          " data_offsets, expected 2");
      tensor.begin = static_cast<std::size_t>(offsets[0]);
      tensor.end = static_cast<std::size_t>(offsets[1]);
      detail::check_tensor(name, tensor, data_bytes);
      if (!tensors_.emplace(name, std::move(tensor)).second)
        fail<FormatError>("safetensors: tensor ", name, " stands twice");
    });
    parser.end();
    check_layout(data_bytes);
  }

  const std::map<std::string, TensorInfo>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(const std::string& name) const { return tensors_.contains(name); }

  /// @brief A tensor's description. @throws FormatError if it is missing.
  const TensorInfo& info(const std::string& name) const {
    const auto entry = tensors_.find(name);
    if (entry == tensors_.end())
      ::lowrankkv::detail::fail<FormatError>("safetensors: tensor ", name, " is missing among ",
                                             tensors_.size());
    return entry->second;
  }

  /// @brief A tensor's elements as T (float or double). @param shape the shape it must have.
  template <class T>
  std::vector<T> values(const std::string& name, const std::vector<std::int64_t>& shape) const {
    using ::lowrankkv::detail::fail;
    const TensorInfo& tensor = info(name);
    if (tensor.shape != shape)
      fail<FormatError>("safetensors: tensor ", name, " has shape ", shape_text(tensor.shape),
                        ", expected ", shape_text(shape));
    std::vector<T> out(static_cast<std::size_t>(tensor.num_elements()));
    const std::byte* source = bytes_.data() + data_ + tensor.begin;
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (tensor.dtype == "F32")
        out[i] = static_cast<T>(load<float>(source, i));
      else if (tensor.dtype == "F64")
        out[i] = static_cast<T>(load<double>(source, i));
      else if (tensor.dtype == "F16")
        out[i] = static_cast<T>(to_float(load<Half>(source, i)));
      else if (tensor.dtype == "BF16")
        out[i] = static_cast<T>(to_float(load<BFloat16>(source, i)));
      else
        fail<FormatError>("safetensors: tensor ", name, " has dtype ", tensor.dtype,
                          ", expected F32, F64, F16 or BF16");
    }
    return out;
  }

  /// @brief A shape as text, for example `[2, 3]`.
  static std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t i = 0; i < shape.size(); ++i)
      text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
  }

 private:
  template <class T>
  static T load(const std::byte* source, std::size_t index) {
    T value;
    std::memcpy(&value, source + index * sizeof(T), sizeof(T));
    return value;
  }
  /// Tensors must cover the data without gaps or overlaps, as the format demands.
  void check_layout(std::size_t data_bytes) const {
    std::vector<std::pair<std::size_t, std::size_t>> ranges;
    for (const auto& [name, tensor] : tensors_) ranges.emplace_back(tensor.begin, tensor.end);
    std::sort(ranges.begin(), ranges.end());
    std::size_t at = 0;
    for (const auto& [begin, end] : ranges) {
      if (begin != at)
        ::lowrankkv::detail::fail<FormatError>("safetensors: a tensor begins at byte ", begin,
                                               ", the one before ends at ", at);
      at = end;
    }
    if (at != data_bytes)
      ::lowrankkv::detail::fail<FormatError>("safetensors: tensors cover ", at, " bytes, data has ",
                                             data_bytes);
  }

  std::vector<std::byte> bytes_;
  std::size_t data_ = 0;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// @brief Collects tensors and writes them as one file.
class SafetensorsWriter {
 public:
  void set_metadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  void add(const std::string& name, const std::vector<std::int64_t>& shape,
           const std::vector<float>& values) {
    add(name, "F32", shape, values.data(), values.size() * 4);
  }
  void add(const std::string& name, const std::vector<std::int64_t>& shape,
           const std::vector<double>& values) {
    add(name, "F64", shape, values.data(), values.size() * 8);
  }

  /// @brief The file's bytes.
  std::vector<std::byte> bytes() const {
    std::string header = "{\"__metadata__\":{";
    for (const auto& [key, value] : metadata_) {
      if (header.back() != '{') header += ',';
      header += detail::quoted(key) + ":" + detail::quoted(value);
    }
    header += '}';
    for (const auto& [name, tensor] : tensors_) {
      header += ',';
      header += detail::quoted(name) + ":{\"dtype\":\"" + tensor.dtype +
                "\",\"shape\":" + Safetensors::shape_text(tensor.shape) + ",\"data_offsets\":[" +
                std::to_string(tensor.begin) + "," + std::to_string(tensor.end) + "]}";
    }
    header += '}';
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const std::uint64_t length = header.size();
    std::vector<std::byte> file(8 + header.size() + data_.size());
    std::memcpy(file.data(), &length, 8);
    std::memcpy(file.data() + 8, header.data(), header.size());
    std::copy(data_.begin(), data_.end(),
              file.begin() + static_cast<std::ptrdiff_t>(8 + header.size()));
    return file;
  }
  /// @brief Writes the file. @throws FormatError if that fails.
  void write(const std::string& path) const {
    const std::vector<std::byte> file = bytes();
    std::ofstream stream(path, std::ios::binary);
    stream.write(reinterpret_cast<const char*>(file.data()),
                 static_cast<std::streamsize>(file.size()));
    stream.flush();
    if (!stream)
      ::lowrankkv::detail::fail<FormatError>("safetensors: cannot write ", file.size(),
                                             " bytes to ", path);
  }

 private:
  void add(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape,
           const void* values, std::size_t bytes) {
    TensorInfo tensor{dtype, shape, data_.size(), data_.size() + bytes};
    ::lowrankkv::detail::check_equal(
        "elements", name.c_str(),
        static_cast<std::size_t>(tensor.num_elements()) * detail::dtype_size(dtype), "bytes given",
        bytes);
    const std::byte* source = static_cast<const std::byte*>(values);
    data_.insert(data_.end(), source, source + bytes);
    tensors_.emplace_back(name, std::move(tensor));
  }
  std::map<std::string, std::string> metadata_;
  std::vector<std::pair<std::string, TensorInfo>> tensors_;
  std::vector<std::byte> data_;
};

}  // namespace io
LOWRANKKV_NAMESPACE_END
