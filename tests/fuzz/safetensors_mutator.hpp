// SPDX-License-Identifier: Apache-2.0
// Mutations of safetensors files: what libFuzzer does to the header or to the data alone, with a
// header length that fits, and data as long as the header says.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <string_view>

#include "fuzz.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

namespace fuzz {

/// The largest end among the header's data_offsets.
inline std::size_t end_of_data(std::string_view header) {
  constexpr std::string_view kKey = "data_offsets";
  std::size_t end = 0;
  for (std::size_t at = header.find(kKey); at != header.npos; at = header.find(kKey, at + 1)) {
    const std::size_t comma = header.find(',', at);
    std::size_t value = 0;
    for (std::size_t i = comma; comma != header.npos && i + 1 < header.size() && value < 100000;) {
      const char digit = header[++i];
      if (digit < '0' || digit > '9') break;
      value = value * 10 + static_cast<std::size_t>(digit - '0');
    }
    end = std::max(end, value);
  }
  return end;
}

/// Puts a number that is hard to handle in place of one of the data.
inline void put_number(std::string& data, std::mt19937& random) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kNumbers[] = {0.0,  -1.0,   1.0,   1e-320, 1e308,     -1e308,
                                 1e38, 1e-310, 1e154, 1e200,  kInfinity, kNan};
  const double number = kNumbers[random() % std::size(kNumbers)];
  if (data.size() < sizeof number) return;
  if (random() % 4 == 0) {
    const float narrow = static_cast<float>(number);
    std::memcpy(data.data() + random() % (data.size() / 4) * 4, &narrow, sizeof narrow);
  } else {
    std::memcpy(data.data() + random() % (data.size() / 8) * 8, &number, sizeof number);
  }
}

/// What LLVMFuzzerCustomMutator returns for a safetensors file.
inline std::size_t mutate_safetensors(std::uint8_t* bytes, std::size_t size, std::size_t most,
                                      unsigned seed) {
  std::mt19937 random(seed);
  constexpr std::size_t kLength = sizeof(std::uint64_t);
  if (size < kLength || most < kLength || random() % 16 == 0)
    return LLVMFuzzerMutate(bytes, size, most);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes, kLength);
  length = std::min<std::uint64_t>(length, size - kLength);
  const char* text = reinterpret_cast<const char*>(bytes) + kLength;
  std::string header(text, static_cast<std::size_t>(length));
  std::string data(text + length, size - kLength - static_cast<std::size_t>(length));
  const auto mutate = [&](std::string& part) {
    const std::size_t now = part.size();
    part.resize(now + 64);
    part.resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(part.data()), now, part.size()));
  };
  const unsigned choice = random() % 8;
  if (choice < 4 || data.empty())
    mutate(header);
  else if (choice < 7)
    put_number(data, random);
  else
    mutate(data);
  if (random() % 4 != 0) data.resize(end_of_data(header));
  length = header.size();
  std::string file(reinterpret_cast<const char*>(&length), kLength);
  file += header + data;
  if (file.size() > most) return LLVMFuzzerMutate(bytes, size, most);
  std::memcpy(bytes, file.data(), file.size());
  return file.size();
}

}  // namespace fuzz
