// SPDX-License-Identifier: Apache-2.0
// Safetensors files: what is written is read back, and damaged or hostile files are refused.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/io/safetensors.hpp"

using namespace lowrankkv;

namespace {
std::vector<std::byte> file(const std::string& header, std::size_t data,
                            std::uint64_t length = ~std::uint64_t{0}) {
  if (length == ~std::uint64_t{0}) length = header.size();
  std::vector<std::byte> bytes(8 + header.size() + data);
  std::memcpy(bytes.data(), &length, 8);
  std::memcpy(bytes.data() + 8, header.data(), header.size());
  return bytes;
}
std::string error_of(std::vector<std::byte> bytes) {
  try {
    io::Safetensors parsed(std::move(bytes));
  } catch (const FormatError& error) {
    return error.what();
  }
  return "accepted";
}
}  // namespace

TEST_CASE("tensors and metadata survive writing and reading") {
  io::SafetensorsWriter writer;
  writer.set_metadata("quote\"d", "line\nbreak");
  writer.add("a", {2, 3}, std::vector<float>{1, 2, 3, 4, 5, 6});
  writer.add("b.c", {1}, std::vector<double>{0.1});
  writer.add("empty", {0, 4}, std::vector<float>{});
  writer.add("wide", {1000, 0}, std::vector<float>{});  // more than there are bytes
  const io::Safetensors read(writer.bytes());
  CHECK(read.values<float>("a", {2, 3}) == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(read.values<double>("b.c", {1}) == std::vector<double>{0.1});
  CHECK(read.values<float>("empty", {0, 4}).empty());
  CHECK(read.values<float>("wide", {1000, 0}).empty());
  CHECK(read.metadata().at("quote\"d") == "line\nbreak");
  CHECK_THROWS_WITH_AS(read.values<float>("a", {3, 2}),
                       "safetensors: tensor a has shape [2, 3], expected [3, 2]", FormatError);
  CHECK_THROWS_WITH_AS(read.info("z"), "safetensors: tensor z is missing among 4", FormatError);
}

TEST_CASE("damaged and hostile files are refused with what does not fit") {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  CHECK(error_of(file(good, 8)) == "accepted");
  CHECK(error_of({}) == "safetensors: file has 0 bytes, the header length alone takes 8");
  CHECK(error_of(file(good, 8, 1000)) == "safetensors: header of 1000 bytes, file has 70");
  CHECK(error_of(file(good, 8, ~std::uint64_t{1}))
            .find("safetensors: header of 18446744073709551614 bytes") == 0);
  CHECK(error_of(file(good, 4)) == "safetensors: tensor a lies at bytes 0 to 8, data has 4");
  CHECK(error_of(file(good, 12)) == "safetensors: tensors cover 8 bytes, data has 12");
  CHECK(error_of(file(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8)) ==
        "safetensors: tensor a has an extent of 3, data has 8 bytes");
  CHECK(error_of(file(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}})", 8)) ==
        "safetensors: tensor a needs 4 bytes, offsets give 8");
  CHECK(
      error_of(
          file(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0))
          .find("has an extent of") != std::string::npos);
  CHECK(error_of(file(
            R"({"a":{"dtype":"F32","shape":[4611686018427387904,4,0],"data_offsets":[0,0]}})",
            0)) == "safetensors: tensor a has an extent of 4611686018427387904, data has 0 bytes");
  CHECK(error_of(file(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8)) ==
        "safetensors: tensor a lies at bytes 8 to 0, data has 8");
  CHECK(error_of(file(R"({"a":{"dtype":"X9","shape":[2],"data_offsets":[0,8]}})", 8)) ==
        "safetensors: tensor a has unknown dtype X9");
  CHECK(error_of(file(R"({"a":{"dtype":"F32","shape":[2]}})", 0)) ==
        "safetensors: tensor a has 0 data_offsets, expected 2");
  CHECK(error_of(
            file(R"({"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}})", 8))
            .find("a number beyond 63 bits") != std::string::npos);
  CHECK(error_of(file(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8))
            .find("no non-negative integer at byte") != std::string::npos);
  CHECK(
      error_of(
          file(
              R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
              6))
          .find("begins at byte 2") != std::string::npos);
  CHECK(
      error_of(
          file(
              R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
              8))
          .find("a second time") != std::string::npos);
  CHECK(error_of(file(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4)) ==
        "safetensors: tensor a has 0 shapes, expected 1");
  CHECK_THROWS_WITH_AS(io::Safetensors::read("/"),
                       "safetensors: / is no regular file, one is expected", FormatError);
  CHECK(error_of(file("[1,2]", 0)).find("no '{'") != std::string::npos);
  CHECK(error_of(file("{\"a", 0)).find("the end of the header in a string") != std::string::npos);
  CHECK(error_of(file("{\"\\u12g4\":1}", 0)).find("a bad \\u escape") != std::string::npos);
  CHECK(error_of(file(good + "x", 8)).find("something after the end") != std::string::npos);
}

TEST_CASE("no mutation of a file crashes the reader") {
  io::SafetensorsWriter writer;
  writer.set_metadata("k", "v");
  writer.add("first", {2, 2}, std::vector<float>{1, 2, 3, 4});
  writer.add("second", {3}, std::vector<double>{1, 2, 3});
  const std::vector<std::byte> good = writer.bytes();
  std::mt19937 random(3);
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes = good;
    for (int edit = std::uniform_int_distribution<int>(1, 3)(random); edit > 0; --edit) {
      bytes[std::uniform_int_distribution<std::size_t>(0, bytes.size() - 1)(random)] =
          static_cast<std::byte>(random() & 255U);
    }
    if (round % 3 == 0)
      bytes.resize(std::uniform_int_distribution<std::size_t>(0, bytes.size())(random));
    refused += error_of(std::move(bytes)) == "accepted" ? 0 : 1;
  }
  CHECK(refused > 10000);  // most mutations hit the header
}
