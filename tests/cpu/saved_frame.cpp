// SPDX-License-Identifier: Apache-2.0
// States of version 3, with a byte a position and merges done at once, are still loaded.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lowrankkv/presets.hpp"

namespace saved_frame_tests {

using namespace lowrankkv;

namespace {

// Sequence 3 after 20 tokens of life(), as commit e312e37 saved it.
constexpr std::string_view kStreaming =
    "4c524b56534551331401000000000000ad813284e5cab2d60b00000000000000010000000000000001000000"
    "0000000002000000000000000100000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000030000000000000000000000000000000000000000000000140000000000000004000000"
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000010000000"
    "000000000000020202020202020202020202020200bd0038000000bc003d00b4003400bd000040bf0000003f"
    "0000803f000000bf000000000000a03f000080bf0000803e000080bf0000803e0000403f000040bf000080be"
    "0000803f0000a0bf00000000";
// Under three epochs of its own.
constexpr std::string_view kOja =
    "4c524b565345513304040000000000004b9e8540a5a0b78f1300000000000000010000000000000001000000"
    "0000000002000000000000000100000000000000000000000000000001000000000000000000000000000000"
    "0100000000000000030000000000000000000000000000000000000000000000010000000000000001000000"
    "0000000001000000000000001000000000000000100000000000000001000000000000000100000000000000"
    "cfd887bf2f5f8130140000000000000004000000040000000200000000000000000000000000000003000000"
    "0400000000000000000000000000000002000000000000000100000002000000040000000000000002000000"
    "060000000400000000000000030000000a000000040000000000000003000000000000000100000002000000"
    "010000000400000000000000fd3b06ab00000000000000000000000000000000000000000100000002000000"
    "01000000040000000000000052aafe3b00000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000001000000020000000100000004000000"
    "00000000f53bafae000000000000000000000000000000000000000001000000020000000100000004000000"
    "0000000074aef63b000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000000000000000000000100000002000000010000000400000000000000e73bfdb0"
    "00000000000000000000000000000000000000000100000002000000010000000400000000000000d6b0e83b"
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
    "00000000000000000000000010000000000000000000010101010101010101010101010100bd0038000000bc"
    "003d00b4003400bd0100000002000000010000000400000000000000e13b89b1010000000200000001000000"
    "040000000000000036b1e53b0700000000000000070000000000000000b8003d173536ba1b3c64ac15bc983a"
    "a6b5f9bc3339e3b8183d1237003800b8ff3cc9344aba0c3c08302fbc603affb518bddc382ab9f13c000040bf"
    "0000003f0000803f000000bf000000000000a03f000080bf0000803e000080bf0000803e0000403f000040bf"
    "000080be0000803f0000a0bf00000000";

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> bytes;
  for (std::size_t at = 0; at < text.size(); at += 2)
    bytes.push_back(
        static_cast<std::byte>(std::stoi(std::string(text.substr(at, 2)), nullptr, 16)));
  return bytes;
}
CacheConfig config() {
  return {.shape = {1, 1, 2},
          .max_sequences = 2,
          .max_tokens = 64,
          .flush_interval = 2,
          .publish_interval = 4};
}
/// Appends the tokens [first, end) of a stream that every machine computes alike.
template <class Cache>
void life(Cache& cache, SequenceId seq, int first, int end) {
  const auto at = [](int token, int channel) {
    return static_cast<float>((token * 7 + channel * 5) % 11 - 5) * 0.25F;
  };
  for (int token = first; token < end; ++token) {
    const float key[2] = {at(token, 0), at(token, 1)}, value[2] = {at(token, 2), at(token, 3)};
    cache.append_maintained(seq, {key, 1, 1, 2}, {value, 1, 1, 2});
  }
}
/// Keys, then values.
template <class Cache>
std::vector<float> contents(const Cache& cache, SequenceId seq) {
  const std::int64_t n = cache.num_tokens(seq);
  std::vector<float> all(static_cast<std::size_t>(4 * n));
  cache.reconstruct(seq, 0, {all.data(), n, 1, 2}, {all.data() + 2 * n, n, 1, 2});
  return all;
}
template <class Cache>
std::vector<std::byte> saved(const Cache& cache, SequenceId seq) {
  std::vector<std::byte> bytes(cache.save_bytes(seq));
  cache.save(seq, bytes);
  return bytes;
}
template <class Cache>
std::vector<RowState> states(const Cache& cache, SequenceId seq) {
  std::vector<RowState> all(static_cast<std::size_t>(cache.num_tokens(seq)));
  cache.row_states(seq, 0, 0, all);
  return all;
}

}  // namespace

TEST_CASE("a sliding window saved by version 3 is loaded and goes on") {
  StreamingLLM<>::PolicySet policies;
  policies.token_policy = {2, 3};
  StreamingLLM<> old(config(), {}, policies), now(config(), {}, policies);
  now.create(3);
  life(now, 3, 0, 20);
  old.load(3, bytes_of(kStreaming));
  CHECK(saved(old, 3) == saved(now, 3));
  CHECK(saved(old, 3).size() < bytes_of(kStreaming).size());
  life(old, 3, 20, 40);
  life(now, 3, 20, 40);
  CHECK(saved(old, 3) == saved(now, 3));
}

TEST_CASE("a sequence with epochs of its own, saved by version 3, is loaded and goes on") {
  HeadBasis head;
  head.key_rank = head.value_rank = 1;
  head.key_down = {1.0F, 0.0F};
  head.value_down = {0.0F, 1.0F};
  LayerBasis basis;
  basis.heads.push_back(head);
  OjaKV<>::PolicySet policies;
  policies.token_policy = {2, 3};
  OjaKV<> old(config(), basis, policies), now(config(), basis, policies);
  now.create(3);
  life(now, 3, 0, 20);
  old.load(3, bytes_of(kOja));
  CHECK(states(old, 3) == states(now, 3));
  CHECK(old.memory(3).epoch_bytes == now.memory(3).epoch_bytes);
  for (const int end : {20, 40}) {
    life(old, 3, static_cast<int>(old.num_tokens(3)), end);
    life(now, 3, static_cast<int>(now.num_tokens(3)), end);
    const std::vector<float> found = contents(old, 3), expected = contents(now, 3);
    REQUIRE(found.size() == expected.size());
    for (std::size_t i = 0; i < found.size(); ++i)  // bases are rounded in another way elsewhere
      CHECK(found[i] == doctest::Approx(expected[i]).epsilon(0.01).scale(1.0));
  }
  old.load(4, saved(old, 3));
  CHECK(contents(old, 4) == contents(old, 3));
}

}  // namespace saved_frame_tests
