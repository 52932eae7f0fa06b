// SPDX-License-Identifier: Apache-2.0
// The C ABI: every method that it opens, checked against plain attention over what it says it
// stores; every status; what a null or a short struct is told.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv_c.h"

namespace {

using lowrankkv::CacheShape;

constexpr CacheShape kShape{4, 2, 32};
constexpr int kLayers = 2;

std::vector<float> rows(std::mt19937& random, std::int64_t tokens, int heads) {
  std::normal_distribution<float> normal;
  std::vector<float> all(static_cast<std::size_t>(tokens * heads * kShape.head_dim));
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = normal(random) * std::exp(-3.0F * static_cast<float>(i % 32) / 32.0F);
  return all;
}

/// A calibration bundle of random rows, on the disk while this lives.
struct Bundle {
  Bundle()
      : path((std::filesystem::temp_directory_path() /
              ("lowrankkv_c_api_" + std::to_string(std::random_device{}()) + ".safetensors"))
                 .string()) {
    std::mt19937 random(1);
    std::vector<lowrankkv::calibrate::LayerMoments> layers(
        kLayers, lowrankkv::calibrate::LayerMoments(kShape));
    for (auto& layer : layers) {
      const std::vector<float> q = rows(random, 300, 4), k = rows(random, 300, 2),
                               v = rows(random, 300, 2);
      layer.add({q.data(), 300, 4, 32}, {k.data(), 300, 2, 32}, {v.data(), 300, 2, 32});
      layer.coding().add({q.data(), 300, 4, 32}, {k.data(), 300, 2, 32}, {v.data(), 300, 2, 32},
                         200);
    }
    lowrankkv::calibrate::save_moments(path, layers);
  }
  ~Bundle() { std::remove(path.c_str()); }
  const std::string path;
};

lowrankkv_config config_of(const char* method, double ratio, const char* bases) {
  return {sizeof(lowrankkv_config), kLayers, 4, 2, 32, 2, 400, 1, method, ratio, bases,
          LOWRANKKV_ROTATED,        0.0};
}
lowrankkv_rows dense(const std::vector<float>& all, int heads) {
  return {all.data(), LOWRANKKV_F32, static_cast<std::int64_t>(all.size()) / (heads * 32), 0, 0, 0};
}

}  // namespace

TEST_CASE("the C ABI stores and attends") {
  const Bundle bundle;
  std::mt19937 random(2);
  double full = 0.0;
  for (const char* method : {"FullKV", "OjaKV", "Budgeted"}) {
    CAPTURE(std::string(method));
    const lowrankkv_config config = config_of(method, 0.4, bundle.path.c_str());
    lowrankkv_cache* cache = nullptr;
    const lowrankkv_status opened = lowrankkv_open(&config, &cache);
    REQUIRE_MESSAGE(opened == LOWRANKKV_OK, lowrankkv_last_error());
    const std::int64_t seq = 5;
    REQUIRE(lowrankkv_create(cache, seq) == LOWRANKKV_OK);
    const std::vector<float> q = rows(random, 300, 4), k = rows(random, 300, 2),
                             v = rows(random, 300, 2);
    const lowrankkv_rows queries = dense(q, 4), keys = dense(k, 2), values = dense(v, 2);
    std::vector<float> prompt_out(q.size());
    for (int layer = 0; layer < kLayers; ++layer) {
      if (layer == 0)
        REQUIRE(lowrankkv_ingest(cache, layer, seq, &keys, &values, &queries) == LOWRANKKV_OK);
      else
        REQUIRE(lowrankkv_prefill(cache, layer, seq, &queries, &keys, &values, prompt_out.data(),
                                  nullptr) == LOWRANKKV_OK);
    }
    const std::vector<float> one_q = rows(random, 1, 4), one_k = rows(random, 1, 2),
                             one_v = rows(random, 1, 2);
    const lowrankkv_rows step_q = dense(one_q, 4), step_k = dense(one_k, 2),
                         step_v = dense(one_v, 2);
    for (int layer = 0; layer < kLayers; ++layer) {
      REQUIRE(lowrankkv_append(cache, layer, &seq, 1, &step_k, &step_v) == LOWRANKKV_OK);
      std::vector<float> out(one_q.size()), lse(4), stored_k(301 * 64), stored_v(301 * 64);
      REQUIRE(lowrankkv_attend(cache, layer, &seq, 1, &step_q, out.data(), lse.data()) ==
              LOWRANKKV_OK);
      REQUIRE(lowrankkv_reconstruct(cache, layer, seq, 0, 301, stored_k.data(), stored_v.data()) ==
              LOWRANKKV_OK);
      for (int head = 0; head < 4; ++head) {
        std::vector<double> total(32, 0.0);
        double sum = 0.0;
        for (int token = 0; token < 301; ++token) {
          double logit = 0.0;
          for (int i = 0; i < 32; ++i)
            logit += static_cast<double>(one_q[static_cast<std::size_t>(head * 32 + i)]) *
                     static_cast<double>(
                         stored_k[static_cast<std::size_t>(token * 64 + head / 2 * 32 + i)]);
          const double weight = std::exp(logit / std::sqrt(32.0));
          sum += weight;
          for (int i = 0; i < 32; ++i)
            total[static_cast<std::size_t>(i)] +=
                weight * static_cast<double>(
                             stored_v[static_cast<std::size_t>(token * 64 + head / 2 * 32 + i)]);
        }
        CHECK(static_cast<double>(lse[static_cast<std::size_t>(head)]) ==
              doctest::Approx(std::log(sum)).epsilon(1e-4));
        for (int i = 0; i < 32; ++i)
          CHECK(std::abs(static_cast<double>(out[static_cast<std::size_t>(head * 32 + i)]) -
                         total[static_cast<std::size_t>(i)] / sum) < 2e-4);
      }
    }
    REQUIRE(lowrankkv_maintain(cache, &seq, 1) == LOWRANKKV_OK);
    lowrankkv_memory memory{};
    memory.size = sizeof memory;
    REQUIRE(lowrankkv_memory_of(cache, &seq, &memory) == LOWRANKKV_OK);
    CHECK(memory.size == sizeof memory);
    CHECK(memory.total > 0);
    CHECK(memory.total == memory.coefficients + memory.full_rows + memory.tail + memory.positions +
                              memory.epochs + memory.updater + memory.slack + memory.other);
    if (full == 0.0)
      full = static_cast<double>(memory.total);
    else
      CHECK(static_cast<double>(memory.total) < 0.8 * full);
    lowrankkv_close(cache);
  }
}

TEST_CASE("the C ABI says what went wrong") {
  lowrankkv_cache* cache = nullptr;
  const auto says = [](lowrankkv_status status, lowrankkv_status expected, const char* message) {
    CHECK(status == expected);
    CHECK(std::string(lowrankkv_last_error()) == message);
  };
  lowrankkv_config config = config_of("Nothing", 0.4, nullptr);
  says(lowrankkv_open(&config, &cache), LOWRANKKV_VALUE_ERROR,
       "method: Nothing, one of FullKV, OjaKV, Budgeted expected");
  config = config_of("OjaKV", 0.4, nullptr);
  says(lowrankkv_open(&config, &cache), LOWRANKKV_VALUE_ERROR, "bases: null, an address expected");
  config = config_of("FullKV", 1.0, nullptr);
  config.size = 8;
  says(lowrankkv_open(&config, &cache), LOWRANKKV_SHAPE_ERROR,
       ("config: 8 bytes, " + std::to_string(sizeof(lowrankkv_config)) + " expected").c_str());
  config = config_of("FullKV", 1.0, "");
  CHECK(lowrankkv_open(nullptr, &cache) == LOWRANKKV_VALUE_ERROR);
  CHECK(cache == nullptr);
  says(lowrankkv_create(nullptr, 1), LOWRANKKV_VALUE_ERROR, "cache: null, an address expected");
  REQUIRE(lowrankkv_open(&config, &cache) == LOWRANKKV_OK);
  REQUIRE(lowrankkv_create(cache, 1) == LOWRANKKV_OK);
  CHECK(lowrankkv_create(cache, 1) == LOWRANKKV_SEQUENCE_ERROR);
  std::mt19937 random(3);
  const std::vector<float> k = rows(random, 10, 2);
  lowrankkv_rows keys = dense(k, 2);
  says(lowrankkv_ingest(cache, 2, 1, &keys, &keys, nullptr), LOWRANKKV_SHAPE_ERROR,
       "layer: 2, num_layers 2");
  says(lowrankkv_ingest(cache, 0, 1, nullptr, &keys, nullptr), LOWRANKKV_VALUE_ERROR,
       "keys: null, an address expected");
  const lowrankkv_rows values = keys;
  keys.type = 7;
  says(lowrankkv_ingest(cache, 0, 1, &keys, &values, nullptr), LOWRANKKV_VALUE_ERROR,
       "keys: type 7, 0 to 2 expected");
  keys.type = LOWRANKKV_F32;
  REQUIRE(lowrankkv_ingest(cache, 0, 1, &keys, &keys, nullptr) == LOWRANKKV_OK);
  const std::vector<float> q = rows(random, 1, 4);
  const lowrankkv_rows query = dense(q, 4);
  const std::int64_t one = 1;
  says(lowrankkv_attend(cache, 0, &one, 1, &query, nullptr, nullptr), LOWRANKKV_VALUE_ERROR,
       "out: null, an address expected");
  std::vector<float> bad = k;
  bad[3] = NAN;
  const lowrankkv_rows damaged = dense(bad, 2);
  CHECK(lowrankkv_ingest(cache, 0, 1, &damaged, &damaged, nullptr) == LOWRANKKV_VALUE_ERROR);
  says(lowrankkv_shift(cache, 1, 0, 5), LOWRANKKV_STATE_ERROR,
       "shift_positions: keys are stored rotated (Rope::post), Rope::pre is needed to move them by "
       "5");
  std::size_t bytes = 0;
  REQUIRE(lowrankkv_save(cache, 1, nullptr, &bytes) == LOWRANKKV_OK);
  std::vector<std::byte> saved(bytes);
  REQUIRE(lowrankkv_save(cache, 1, saved.data(), &bytes) == LOWRANKKV_OK);
  bytes = 10;
  CHECK(lowrankkv_save(cache, 1, saved.data(), &bytes) == LOWRANKKV_CAPACITY_ERROR);
  saved[saved.size() / 2] ^= std::byte{1};
  CHECK(lowrankkv_load(cache, 2, saved.data(), saved.size()) == LOWRANKKV_FORMAT_ERROR);
  std::int64_t tokens = -1;
  CHECK(lowrankkv_num_tokens(cache, 2, &tokens) == LOWRANKKV_SEQUENCE_ERROR);
  CHECK(tokens == -1);
  lowrankkv_memory part{};
  part.size = offsetof(lowrankkv_memory, tail);  // of an older version
  part.tail = 77;
  REQUIRE(lowrankkv_memory_of(cache, nullptr, &part) == LOWRANKKV_OK);
  CHECK(part.tail == 77);
  CHECK(lowrankkv_abi_version() == LOWRANKKV_ABI_VERSION);
  lowrankkv_close(cache);

  // Pre-RoPE keys: tokens are removed from the middle, and those behind move up.
  config.keys = LOWRANKKV_UNROTATED_PAIRS;
  config.rope_theta = 1e4;
  REQUIRE(lowrankkv_open(&config, &cache) == LOWRANKKV_OK);
  REQUIRE(lowrankkv_create(cache, 1) == LOWRANKKV_OK);
  for (int layer = 0; layer < kLayers; ++layer)
    REQUIRE(lowrankkv_ingest(cache, layer, 1, &keys, &keys, nullptr) == LOWRANKKV_OK);
  says(lowrankkv_remove(cache, 1, 8, 3), LOWRANKKV_SHAPE_ERROR,
       "remove: 3 tokens from token 8 on, sequence has 10 tokens");
  REQUIRE(lowrankkv_remove(cache, 1, 2, 3) == LOWRANKKV_OK);
  std::int64_t position = 0;
  REQUIRE(lowrankkv_position(cache, 1, 7, &position) == LOWRANKKV_OK);
  CHECK(position == 10);
  REQUIRE(lowrankkv_shift(cache, 1, 2, -3) == LOWRANKKV_OK);
  REQUIRE(lowrankkv_position(cache, 1, 7, &position) == LOWRANKKV_OK);
  CHECK(position == 7);
  says(lowrankkv_divide(cache, 1, 6, 2, 2), LOWRANKKV_SHAPE_ERROR,
       "divide_positions: 2 tokens from token 6 on, sequence has 7 tokens");
  REQUIRE(lowrankkv_divide(cache, 1, 4, 2, 2) == LOWRANKKV_OK);
  REQUIRE(lowrankkv_position(cache, 1, 5, &position) == LOWRANKKV_OK);
  CHECK(position == 2);
  lowrankkv_close(cache);
  const Bundle bundle;
  config.method = "OjaKV";
  config.bases = bundle.path.c_str();
  says(lowrankkv_open(&config, &cache), LOWRANKKV_VALUE_ERROR, "keys: 2, the bundle is of others");
  lowrankkv_close(nullptr);
}
