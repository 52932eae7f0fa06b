// SPDX-License-Identifier: Apache-2.0
// Full rows in 8 bits: codes as the CPU's, attention as float64 over what they stand for, bytes as
// promised. Other compositions: compressed_kv_cache.cu.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_sequences.cuh"

namespace full_row_bits_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Answer;
using support::DeviceCache;
using support::distance;
using support::effort;
using support::message_of;
using support::Method;
using support::Random;
using support::Settings;

namespace {

std::unique_ptr<support::DeviceSide> make_device(const Settings& settings,
                                                 const CacheConfig& config,
                                                 const LayerBasis& basis) {
  const auto make =
      [&]<class Cache>(typename Cache::PolicySet policies) -> std::unique_ptr<support::DeviceSide> {
    return std::make_unique<support::Device<Cache>>(config, basis,
                                                    support::configured(policies, settings));
  };
  switch (settings.method) {
    case Method::full:
      return make.operator()<FullKV<Cuda>>({});
    case Method::budgeted:
      return make.operator()<Budgeted<Cuda>>({});
    default:
      return nullptr;
  }
}

/// How far attention is from float64 over what is stored.
template <class Cache>
double off(const CacheConfig& config, const DeviceCache<Cache>& device, SequenceId seq,
           const std::vector<float>& query, const Answer& answer) {
  std::vector<float> key, value;
  device.reconstruct(seq, key, value);
  std::vector<double> expected, lse;
  support::attend_f64(config.shape, config.scale(), key, value, query, expected, lse);
  return std::max(distance(answer.out, expected),
                  support::furthest(answer.lse, lse) /
                      std::max(1.0, support::furthest(lse, std::vector<double>(lse.size()))));
}

}  // namespace

TEST_CASE(
    "random sequences with full rows in 8 bits: rows as on the CPU, answers as in float64, the "
    "same in any batch") {
  std::uint64_t seed = 700;
  for (const Method method : {Method::full, Method::budgeted, Method::full, Method::budgeted}) {
    for (const DType type : {DType::f16, DType::bf16}) {
      ++seed;
      if (effort() == 0 && seed % 2 == (seed > 704 ? 1 : 0))
        continue;  // a type for each form of keys
      Settings settings;
      settings.pre_rope = seed > 704;
      settings.method = method;
      settings.coefficients = type;
      settings.full_row_bits = 8;
      const std::string name = support::kMethodNames[static_cast<int>(method)];
      CAPTURE(name);
      CAPTURE(std::string(name_of(type)));
      const support::Worst worst =
          support::random_sequences(make_device, settings, type, seed, std::max(1, 3 * effort()));
      MESSAGE(name << " " << std::string(name_of(type))
                   << std::string(settings.pre_rope ? ", unrotated" : "")
                   << ", full rows in 8 bits: outputs " << worst.out << ", lse " << worst.lse
                   << ", stored rows and the CPU's " << worst.rows);
    }
  }
}

TEST_CASE(
    "rows of any size in 8 bits: within half a step of what came, attention to them as in float64; "
    "copies and saved states go on as the original") {
  Random random(711);
  std::normal_distribution<float> normal;
  double worst = 0.0, worst_code = 0.0;
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const int dim : {64, 80, 128, 256}) {
      if (effort() == 0 && dim == 256) continue;
      CacheConfig config;
      config.shape = {6, 2, dim};
      config.max_sequences = 3;
      config.max_tokens = 3000;
      config.max_query_tokens = 3;
      config.full_type = type;
      config.full_row_bits = 8;
      const std::size_t row = static_cast<std::size_t>(2 * dim);
      // Rows of zeros, of numbers that no step of 16 bits tells from zero, and of large ones.
      const auto rows = [&](std::int64_t tokens, bool key) {
        std::vector<float> all;
        for (std::int64_t token = 0; token < tokens; ++token) {
          const std::uint64_t kind = random() % 8;
          const float size = kind == 0           ? 0.0F
                             : kind == 1         ? 1e-7F
                             : kind == 2         ? 1e-4F
                             : kind == 3 && !key ? 2000.0F
                                                 : 1.0F;
          for (std::size_t i = 0; i < row; ++i)
            all.push_back(round_to(type, size * normal(random)));
        }
        return all;
      };
      DeviceCache<FullKV<Cuda>> device(config, {}, {}), other(config, {}, {});
      const SequenceId one = 1, two = 2, three = 3;
      device.cache.create(1);
      std::vector<float> came[2], stored[2];
      for (const std::int64_t n : {1, 15, 130, 7}) {
        const auto key = rows(n, true), value = rows(n, false);
        device.ingest(1, key, value);
        came[0].insert(came[0].end(), key.begin(), key.end());
        came[1].insert(came[1].end(), value.begin(), value.end());
      }
      device.reconstruct(1, stored[0], stored[1]);
      const std::size_t in_pages =
          (came[0].size() / row - static_cast<std::size_t>(device.cache.tail_length(1))) * row;
      REQUIRE(in_pages > 0);
      for (int part = 0; part < 2; ++part) {
        for (std::size_t first = 0; first < stored[part].size();
             first += static_cast<std::size_t>(dim)) {
          float largest = 0.0F;
          for (std::size_t i = first; i < first + static_cast<std::size_t>(dim); ++i)
            largest = std::max(largest, std::abs(came[part][i]));
          const float step = first < in_pages ? std::max(largest / 128.0F * (1.0F + 0x1p-10F),
                                                         largest / 128.0F + 0x1p-24F)
                                              : 0.0F;  // rounded up to f16
          for (std::size_t i = first; i < first + static_cast<std::size_t>(dim); ++i) {
            CHECK(std::abs(stored[part][i] - came[part][i]) <= 0.5001F * step);
            if (largest > 0.01F && step > 0.0F)
              worst_code = std::max(
                  worst_code,
                  static_cast<double>(std::abs(stored[part][i] - came[part][i]) / largest));
          }
        }
      }
      std::vector<float> query(static_cast<std::size_t>(3 * 6 * dim));
      for (float& x : query) x = 0.2F * normal(random);
      const auto last = [&](std::int64_t tokens) {
        return std::vector<float>(query.begin(),
                                  query.begin() + static_cast<std::ptrdiff_t>(tokens * 6 * dim));
      };
      const double limit = type == DType::f16 ? 3e-5 : 3e-4;
      for (const std::int64_t m : {1, 3}) {
        const Answer answer = device.attend(std::span(&one, 1), last(m));
        worst = std::max(worst, off(config, device, 1, last(m), answer));
        CHECK(off(config, device, 1, last(m), answer) < limit);
      }
      // A fork appends rows that share a tile with the original's; a loaded sequence continues.
      const Answer before = device.attend(std::span(&one, 1), last(1));
      device.cache.fork(1, 2);
      device.ingest(2, rows(50, true), rows(50, false));
      CHECK(device.attend(std::span(&one, 1), last(1)) == before);
      CHECK(off(config, device, 2, last(1), device.attend(std::span(&two, 1), last(1))) < limit);
      other.cache.load(3, device.save(2));
      CHECK(other.attend(std::span(&three, 1), last(1)) ==
            device.attend(std::span(&two, 1), last(1)));
      for (DeviceCache<FullKV<Cuda>>* side : {&device, &other}) {
        const SequenceId seq = side == &device ? two : three;
        side->cache.truncate(seq, 70);
        Random same(5);
        std::vector<float> more(40 * row);
        for (float& x : more) x = round_to(type, normal(same));
        side->ingest(seq, more, more);
        side->cache.remove(seq, 20, 33);
      }
      CHECK(other.attend(std::span(&three, 1), last(1)) ==
            device.attend(std::span(&two, 1), last(1)));
      CHECK(off(config, device, 2, last(1), device.attend(std::span(&two, 1), last(1))) < limit);
      CHECK(other.save(3) == device.save(2));
    }
  }
  CHECK(worst_code < 1.0 / 254);
  MESSAGE("full rows in 8 bits: outputs " << worst << ", of a row's largest number " << worst_code);
}

TEST_CASE("full rows in 8 bits take half of the bytes, and states of 16 bits are not theirs") {
  Random random(712);
  CacheConfig config;
  config.shape = {4, 2, 128};
  config.max_sequences = 1;
  config.max_tokens = 4096;
  DeviceCache<FullKV<Cuda>> plain(config, {}, {});
  config.full_row_bits = 8;
  DeviceCache<FullKV<Cuda>> coded(config, {}, {});
  std::vector<float> rows(4000 * 2 * 128);
  std::normal_distribution<float> normal;
  for (float& x : rows) x = normal(random);
  // A prompt attends to its own rows before they are coded.
  std::vector<float> query(200 * 4 * 128);
  for (float& x : query) x = normal(random);
  const std::vector<float> prompt(rows.begin(), rows.begin() + 200 * 2 * 128);
  for (auto* side : {&plain, &coded}) side->cache.create(1);
  CHECK(plain.prefill(1, query, prompt, prompt) == coded.prefill(1, query, prompt, prompt));
  for (auto* side : {&plain, &coded}) {
    side->cache.erase(1);
    side->cache.create(1);
    side->ingest(1, rows, rows);
  }
  // A row of a head: 256 codes and two steps; sixteen of them fill up to a multiple of 128 bytes.
  const std::int64_t in_pages = 4000 - coded.cache.tail_length(1);
  const MemoryUsage usage = coded.cache.memory(1), before = plain.cache.memory(1);
  const double of_plain =
      static_cast<double>(usage.full_row_bytes) / static_cast<double>(before.full_row_bytes);
  CHECK(of_plain == (16 * 256 + 128.0) / (16 * 512));
  CHECK(in_pages > 3900);
  const std::string refused = message_of([&] { coded.cache.load(2, plain.save(1)); });
  CHECK(refused.find("full_row_bits") != std::string::npos);
  CHECK(coded.cache.faults() == 0);
  config.full_type = DType::bf16;
  DeviceCache<FullKV<Cuda>> wide(config, {}, {});
  wide.cache.create(1);
  std::vector<float> large(2 * 128, 1.0F);
  large[5] = 1e7F;  // more than 128 steps of f16
  wide.ingest(1, large, large);
  CHECK(wide.cache.faults() > 0);
}

}  // namespace full_row_bits_tests
