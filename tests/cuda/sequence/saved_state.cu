// SPDX-License-Identifier: Apache-2.0
// Copies of sequences, and saved states: what goes on as the original, and what is refused.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace saved_state_tests {

using namespace lowrankkv;
using support::Device;
using support::DeviceSide;
using support::effort;
using support::make_device;
using support::Method;
using support::Random;
using support::Settings;

TEST_CASE("a fork and a loaded copy go on as the original, bit for bit, and leave it alone") {
  Random random(23);
  for (const Method method :
       {Method::full, Method::hybrid, Method::codes, Method::int8, Method::oja_merging,
        Method::oja_rotating, Method::oja_int8, Method::subspace_a, Method::directions,
        Method::oja_outliers, Method::oja_snapkv, Method::budgeted, Method::snapkv_only,
        Method::streaming}) {
    if (effort() == 0 && method != Method::codes && method != Method::subspace_a &&
        method != Method::oja_merging && method != Method::oja_snapkv)
      continue;
    for (const bool pre_rope : {false, true}) {  // maps that up-project keys are copied with bases
                                                 // that move; else all sequences share them
      if (pre_rope && !support::adapts(method)) continue;
      CAPTURE(std::string(support::kMethodNames[static_cast<int>(method)]));
      CAPTURE(pre_rope);
      Settings settings;
      settings.method = method;
      settings.outliers.share = 0.05F;
      settings.sinks = 4;
      settings.recent = 40;
      CacheConfig config;
      config.shape = {8, 2, 64};
      config.max_sequences = 4;
      config.max_tokens = 2000;
      config.flush_interval = 16;
      config.publish_interval = 40;
      settings.directions.chunk_length = 60;
      if (pre_rope) config.rope.keys = Rope::pre;
      const auto layer = support::random_layer(random, config.shape, settings, 24);
      const auto device = make_device(settings, config, layer.basis);
      device->create(1);
      const auto prompt_key = layer.rows(random, 700, true),
                 prompt_value = layer.rows(random, 700, false);
      auto window = layer.queries(random, 32);
      device->ingest(1, prompt_key, prompt_value, window);
      const auto grow = [&](SequenceId seq, const std::vector<std::vector<float>>& rows) {
        for (std::size_t i = 0; i + 1 < rows.size(); i += 2)
          device->append_maintained(std::span(&seq, 1), rows[i], rows[i + 1]);
      };
      const auto steps = [&](int count) {
        std::vector<std::vector<float>> rows;
        for (int i = 0; i < count; ++i) {
          rows.push_back(layer.rows(random, 2, true));
          rows.push_back(layer.rows(random, 2, false));
        }
        return rows;
      };
      struct Answer {
        std::vector<float> key, value, out, lse;
      };
      const auto query = layer.queries(random, 1);
      const auto answer = [&](SequenceId seq) {
        Answer all;
        device->reconstruct(seq, all.key, all.value);
        device->attend(std::span(&seq, 1), query, all.out, all.lse);
        return all;
      };
      const auto same = [](const Answer& a, const Answer& b) {
        CHECK(a.key == b.key);
        CHECK(a.value == b.value);
        CHECK(a.out == b.out);
        CHECK(a.lse == b.lse);
      };
      grow(1, steps(effort() == 0 ? 12 : 50));
      const Answer before = answer(1);
      const std::int64_t free = device->free_pages();
      device->fork(1, 2);
      CHECK(device->free_pages() == free);  // nothing is copied yet
      const std::vector<std::byte> saved = device->save(1);
      device->load(3, saved);
      CHECK(device->save(3) == saved);
      same(answer(2), before);
      same(answer(3), before);
      const auto more = steps(effort() == 0 ? 10 : 60);
      grow(2, more);  // writes to pages that 1 reads
      same(answer(1), before);
      device->fork(2, 4);
      grow(1, more);
      grow(3, more);
      const Answer after = answer(1);
      for (const SequenceId seq : {2, 3, 4}) same(answer(seq), after);
      grow(4, steps(effort() == 0 ? 2 : 40));
      device->truncate(2, device->num_tokens(2) - 3);
      device->erase(4);
      same(answer(1), after);
      grow(2, steps(effort() == 0 ? 2 : 30));
      same(answer(3), after);
      for (const SequenceId seq : {1, 2, 3}) device->erase(seq);
      CHECK(device->memory().total() == 0);
    }
  }
}

TEST_CASE(
    "saved sequences whose epochs begin when values say so: hostile ones under a right checksum "
    "are refused, or do no harm") {
  Random random(53);
  Settings settings;
  settings.method = Method::subspace_a;
  settings.directions.chunk_length = 40;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 900;
  config.max_sequences = 2;
  const auto layer = support::random_layer(random, config.shape, settings, 16);
  const auto device = make_device(settings, config, layer.basis);
  device->create(1);
  device->ingest(1, layer.rows(random, 700, true), layer.rows(random, 700, false));
  const std::vector<std::byte> saved = device->save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return support::message_of([&] { device->load(2, support::with_checksum(bytes)); });
  };
  // From the end: states of the sketches, their rows.
  const std::size_t states = saved.size() - 4 * 16, rows = states - 4 * 32 * 64 * 4;
  const auto with = [&](std::size_t place, auto value) {
    auto hostile = saved;
    std::memcpy(hostile.data() + place, &value, sizeof value);
    return load(hostile);
  };
  CHECK(with(states + 8, std::int32_t{33}).find("sketch 0 holds 33 rows") != std::string::npos);
  CHECK(with(states + 8, std::int32_t{-1}).find("sketch 0 holds -1 rows") != std::string::npos);
  CHECK(with(states + 16, std::int64_t{1} << 50).find("sketch 1 holds") != std::string::npos);
  CHECK(with(rows + 4, std::nanf("")).find("number 1 of the sketches is nan") != std::string::npos);
  // Truncated rows leave their chunk: what is saved then can be loaded.
  device->truncate(1, 100);
  CHECK(load(device->save(1)) == "nothing was raised");
  device->erase(2);
  int loaded = 0;
  for (int trial = 0; trial < (effort() == 0 ? 60 : 400); ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place =
        trial % 2 == 0 ? 24 + random() % 600 : saved.size() - 1 - random() % (saved.size() - rows);
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    if (load(hostile) != "nothing was raised") continue;
    ++loaded;
    const SequenceId seq = 2;
    std::vector<float> key, value, out, lse;
    device->reconstruct(seq, key, value);
    try {
      for (int step = 0; step < 40; ++step)
        device->append_maintained(std::span(&seq, 1), layer.rows(random, 2, true),
                                  layer.rows(random, 2, false));
    } catch (const CapacityError&) {  // its tail may be full
    }
    if (device->tail_length(seq) > 0)
      device->attend(std::span(&seq, 1), layer.queries(random, 1), out, lse);
    device->erase(seq);
  }
  CHECK(loaded > 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE(
    "saved bytes that are damaged or belong elsewhere are refused, hostile ones under a right "
    "checksum do no harm") {
  Random random(29);
  Settings settings;
  settings.method = Method::oja_snapkv;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.max_sequences = 2;
  config.publish_interval = 40;
  const auto layer = support::random_layer(random, config.shape, settings, 16);
  const auto device = make_device(settings, config, layer.basis);
  device->create(1);
  device->ingest(1, layer.rows(random, 300, true), layer.rows(random, 300, false),
                 layer.queries(random, 32));
  const std::vector<std::byte> saved = device->save(1);
  const auto message = [&](DeviceSide& side, const std::vector<std::byte>& bytes) {
    try {
      side.load(2, bytes);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    side.erase(2);
    return std::string("nothing was raised");
  };
  std::vector<std::byte> damaged = saved;
  damaged[saved.size() / 2] ^= std::byte{1};
  CHECK(message(*device, damaged).find("checksum") != std::string::npos);
  CHECK(message(*device, {saved.begin(), saved.end() - 1}).find("bytes were saved") !=
        std::string::npos);
  Settings other = settings;
  other.method = Method::codes;
  CHECK(message(*make_device(other, config, layer.basis), saved)
            .find("listed full rows: cache 0, saved 1") != std::string::npos);
  const auto stranger = support::random_layer(random, config.shape, settings, 16);
  CHECK(message(*make_device(settings, config, stranger.basis), saved).find("calibrated maps") !=
        std::string::npos);
  config.max_tokens = 200;
  CHECK(message(*make_device(settings, config, layer.basis), saved) ==
        "max_tokens: 200, saved 300");
  int loaded = 0;
  for (int trial = 0; trial < 600; ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place =
        trial % 2 == 0 ? 24 + random() % 400
                       : saved.size() - 1 - random() % 2000;  // counts and segments; positions
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      device->load(2, support::with_checksum(hostile));
    } catch (const Error&) {
      continue;
    }
    ++loaded;
    const SequenceId seq = 2;
    std::vector<float> key, value, out, lse;
    device->reconstruct(seq, key, value);
    if (device->tail_length(seq) > 0)
      device->attend(std::span(&seq, 1), layer.queries(random, 1), out, lse);
    try {
      device->append_maintained(std::span(&seq, 1), layer.rows(random, 1, true),
                                layer.rows(random, 1, false));
    } catch (const CapacityError&) {  // its tail may be full
    }
    device->erase(seq);
  }
  CHECK(loaded < 600);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE("a state may hold no more full rows than the policies that load it would have kept") {
  Random random(37);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 2000;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  const auto policies = [](float share) {
    OjaKVv2<Cuda>::PolicySet result;
    result.token_policy.get<ResidualOutliers>().share = share;
    return result;
  };
  Device<OjaKVv2<Cuda>> many(config, layer.basis, policies(0.45F)),
      few(config, layer.basis, policies(0.02F));
  many.create(1);
  many.ingest(1, layer.rows(random, 400, true), layer.rows(random, 400, false),
              layer.queries(random, 32));
  const std::vector<std::byte> saved = many.save(1);
  const std::int64_t free = few.free_pages();
  std::string message;
  try {
    few.load(5, saved);
  } catch (const FormatError& error) {
    message = error.what();
  }
  // 32 sinks, and nearly a half of the 368 rows before a window of 32. Allowed are a fiftieth of
  // them, and as many again as heads may differ by.
  CHECK(message.find("this cache's token policy keeps at most") != std::string::npos);
  CHECK(!few.cache().contains(5));
  CHECK(few.free_pages() == free);
  many.load(5, saved);
  CHECK(many.num_tokens(5) == 400);
}

}  // namespace saved_state_tests
