// SPDX-License-Identifier: Apache-2.0
// Safetensors files: an input is one. What is accepted can be read, and written again.
#include "lowrankkv/io/safetensors.hpp"

#include "fuzz.hpp"

#if defined(LOWRANKKV_LIBFUZZER)
#include "safetensors_mutator.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t most, unsigned seed) {
  return fuzz::mutate_safetensors(data, size, most, seed);
}
#endif

namespace fuzz {
namespace {

using lowrankkv::io::Safetensors;
using lowrankkv::io::SafetensorsWriter;

/// Whether the tensor's type is one that values() reads.
bool is_read(const lowrankkv::io::TensorInfo& tensor) {
  return tensor.dtype == "F64" || tensor.dtype == "F32" || tensor.dtype == "F16" ||
         tensor.dtype == "BF16";
}

/// All of a file that can be read, as a file.
Bytes copy_of(const Safetensors& file) {
  SafetensorsWriter writer;
  for (const auto& [key, value] : file.metadata()) writer.set_metadata(key, value);
  for (const auto& [name, tensor] : file.tensors()) {
    if (is_read(tensor)) {
      // NaN keep their bits in a copy of a copy.
      writer.add(name, tensor.shape, file.values<double>(name, tensor.shape));
      continue;
    }
    try {
      static_cast<void>(file.values<float>(name, tensor.shape));
      require(tensor.num_elements() == 0, "only empty tensors of other types can be read");
    } catch (const lowrankkv::FormatError&) {
    }
  }
  return writer.bytes();
}

}  // namespace

bool accepts(Input input) {
  try {
    const Safetensors file(Bytes(input.begin(), input.end()));
    const Bytes copy = copy_of(file);
    try {
      const Safetensors again(copy);
      require(again.metadata() == file.metadata(), "metadata is written as it was read");
      for (const auto& [name, tensor] : again.tensors())
        require(tensor.shape == file.info(name).shape, "shapes are written as they were read");
      require(copy_of(again) == copy, "a copy of a copy is the copy");
    } catch (const lowrankkv::FormatError& error) {
      broken(std::string("what was written is refused: ") + error.what());
    }
  } catch (const lowrankkv::FormatError&) {
    return false;
  }
  return true;
}

std::vector<Seed> seeds() {
  const auto file = [](std::string header, std::size_t data) {
    const std::uint64_t length = header.size();
    std::string all(reinterpret_cast<const char*>(&length), sizeof length);
    all += header;
    for (std::size_t i = 0; i < data; ++i) all += static_cast<char>(i * 37);
    return bytes_of(all);
  };
  return {
      {"two", file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":)"
                   R"({"dtype":"F64","shape":[1,2],"data_offsets":[8,24]}})",
                   24)},
      {"metadata", file(R"({"__metadata__":{"format":"pt","\u00e9\n\"":"\\\u20ac"},"x.y":)"
                        R"({"dtype":"BF16","shape":[],"data_offsets":[0,2]}}      )",
                        2)},
      {"types", file(R"({"i":{"data_offsets":[4,12],"dtype":"I64","shape":[1]},"h":)"
                     R"({"dtype":"F16","shape":[2],"data_offsets":[0,4]},"e":)"
                     R"({"dtype":"F32","shape":[0,3],"data_offsets":[12,12]}})",
                     12)},
      {"none", file("{}", 0)},
  };
}

}  // namespace fuzz
