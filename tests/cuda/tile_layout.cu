// SPDX-License-Identifier: Apache-2.0
// Layouts of tiles, on the host: needs no GPU.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE("codes of a unit fill its bits, none shared, none left over") {
  for (const int bits : {1, 2, 4, 8}) {
    for (const Part part : {Part::key, Part::value}) {
      std::set<int> used;
      for (int row = 0; row < gpu::kCodeRows; ++row) {
        for (int channel = 0; channel < gpu::kCodeUnit; ++channel) {
          const gpu::CodePlace place = part == Part::key ? gpu::key_place(bits, row, channel)
                                                         : gpu::value_place(bits, row, channel);
          const gpu::CodeIndex back =
              part == Part::key
                  ? gpu::key_code(bits, place.word / 4, place.shift % 8 / bits, place.shift / 8)
                  : gpu::value_code(bits, place.word / 4, place.shift % 8 / bits, place.shift / 8);
          CHECK(back.row == row);
          CHECK(back.channel == channel);
          CHECK(place.word % 4 == 0);
          for (int bit = 0; bit < bits; ++bit)
            CHECK(used.insert(8 * place.word + place.shift + bit).second);
        }
      }
      CHECK(static_cast<int>(used.size()) == 8 * gpu::code_unit_bytes(bits));
      CHECK(*used.rbegin() == 8 * gpu::code_unit_bytes(bits) - 1);
    }
  }
}

TEST_CASE("elements of a plain unit fill it") {
  for (const Part part : {Part::key, Part::value}) {
    std::set<int> used;
    for (int row = 0; row < gpu::kPlainRows; ++row) {
      for (int channel = 0; channel < gpu::kPlainUnit; ++channel)
        CHECK(used.insert(gpu::plain_place(part, row, channel)).second);
    }
    CHECK(used.size() == 256);
    CHECK(*used.rbegin() == 510);
  }
}

TEST_CASE("planes put every code back together, whatever its bits, and count their padding") {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::uint8_t> bits(1 + random() % 256);
    for (std::uint8_t& width : bits) width = static_cast<std::uint8_t>(random() % 9);
    std::sort(bits.rbegin(), bits.rend());
    const gpu::PartTiles tiles =
        Impl<TransformCode, Cuda>::tiles({}, static_cast<int>(bits.size()), bits);
    std::vector<unsigned> covered(bits.size(), 0);
    int stored = 0, wanted = 0;
    for (const std::uint8_t width : bits) wanted += width;
    CHECK(tiles.channels.size() == tiles.widths.size() * gpu::kCodeUnit);
    for (std::size_t i = 0; i < tiles.channels.size(); ++i) {
      const gpu::TileChannel& channel = tiles.channels[i];
      stored += tiles.widths[i / gpu::kCodeUnit];
      if (channel.source < 0) continue;
      CHECK(channel.width == tiles.widths[i / gpu::kCodeUnit]);
      CHECK(channel.bits == bits[static_cast<std::size_t>(channel.source)]);
      const unsigned mask = ((1U << channel.width) - 1U) << channel.shift;
      CHECK((covered[static_cast<std::size_t>(channel.source)] & mask) == 0);
      covered[static_cast<std::size_t>(channel.source)] |= mask;
    }
    for (std::size_t c = 0; c < bits.size(); ++c) CHECK(covered[c] == (1U << bits[c]) - 1U);
    CHECK(stored == wanted + tiles.padding_bits);
  }
}

TEST_CASE("what this backend cannot do is refused with both values, before any device is touched") {
  const auto message = [](CacheConfig config, auto policies) {
    using Cache = CompressedKVCache<Cuda, decltype(policies.basis), decltype(policies.updater),
                                    decltype(policies.token_policy), decltype(policies.quantizer)>;
    if (config.shape.head_dim == 0) config.shape = {4, 2, 64};
    try {
      Cache::num_pages(config, {}, policies);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  const FullKV<Cuda>::PolicySet full;
  CHECK(message({}, full) == "nothing was raised");
  CHECK(message({.shape = {4, 2, 40}}, full) ==
        "head_dim: 40, a multiple of 16 up to 256 expected on this backend");
  CHECK(message({.shape = {4, 2, 272}}, full) ==
        "head_dim: 272, a multiple of 16 up to 256 expected on this backend");
  CHECK(message({.full_type = DType::f32}, full) ==
        "full_type: f32, f16 or bf16 expected on this backend");
  CHECK(message({.full_row_bits = 8}, full) == "nothing was raised");
  CHECK(message({.full_row_bits = 4}, full) == "full_row_bits: 0 or 8, given 4");
  CHECK(message({.keep_residuals = true}, full) == "nothing was raised");
  CHECK(message({.rope = {.keys = Rope::pre, .rotary_dim = 24}}, full) ==
        "rope: rotary_dim 24, a multiple of 16 expected on this backend");
  CHECK(message({.max_query_tokens = 0}, full) == "max_query_tokens: at least 1, given 0");
  CHECK(message({.page_bytes = 1024}, full) == "page_bytes: a tile needs 8192, a page has 1024");
  CHECK(message({.tail_capacity = 64}, full) ==
        "tail_capacity: 64, must exceed recent + flush_interval = 64");
  StaticPCA<Cuda>::PolicySet plain;
  plain.quantizer.type = DType::f32;
  CHECK(message({}, plain) == "NoQuantizer: type f32, f16 or bf16 expected on this backend");
}

TEST_CASE(
    "channels in rotary_dim order: all of them once, both of a pair in the same place of its "
    "halves, others behind") {
  for (const int dim : {16, 64, 80, 128, 256}) {
    for (int rotary_dim = 16; rotary_dim <= dim; rotary_dim += 16) {
      for (const bool interleaved : {false, true}) {
        gpu::Rotary rotary;
        rotary.pairs = rotary_dim / 2;
        rotary.interleaved = interleaved;
        std::vector<bool> met(static_cast<std::size_t>(dim), false),
            pairs(static_cast<std::size_t>(rotary_dim / 2), false);
        for (int place = 0; place < dim; ++place) {
          const int channel = rotary.channel(place, dim);
          REQUIRE((channel >= 0 && channel < dim));
          CHECK_FALSE(met[static_cast<std::size_t>(channel)]);
          met[static_cast<std::size_t>(channel)] = true;
        }
        for (int place = 0; place < rotary_dim / 2; ++place) {
          const int pair = rotary.pair(place), first = rotary.channel(place, dim),
                    second = rotary.channel(place + dim / 2, dim);
          REQUIRE((pair >= 0 && pair < rotary_dim / 2));
          CHECK_FALSE(pairs[static_cast<std::size_t>(pair)]);
          pairs[static_cast<std::size_t>(pair)] = true;
          CHECK(first == (interleaved ? 2 * pair : pair));
          CHECK(second == (interleaved ? 2 * pair + 1 : pair + rotary_dim / 2));
        }
        for (int place = rotary_dim / 2; place < dim / 2; ++place) {
          CHECK(rotary.channel(place, dim) >= rotary_dim);
          CHECK(rotary.channel(place + dim / 2, dim) >= rotary_dim);
        }
      }
    }
  }
}

TEST_CASE(
    "maps that up-project keys are those of coefficients, and of codes, to what their operands can "
    "say") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int dim = 32, units = 2, width = 48;
  std::vector<float> values(static_cast<std::size_t>(2 * gpu::kCodeUnit * dim)), mean;
  for (float& x : values) x = normal(random);
  for (int i = 0; i < dim; ++i) mean.push_back(normal(random));
  const auto number = [](std::uint32_t word, int place) {
    return to_float(Half{static_cast<std::uint16_t>(word >> (16 * place))});
  };
  // What lane 4 (channel % 8) + t has of a channel: four numbers of every unit.
  const auto element = [&](const gpu::HostKeyUp& key_up, int unit, int channel, int t, int i) {
    const bool second = channel >= dim / 2;
    const int place = channel % (dim / 2);
    const uint4& words = key_up.operands[static_cast<std::size_t>(
        (unit * (dim / 16) + place / 8) * 32 + place % 8 * 4 + t)];
    return number(i < 2 ? (second ? words.z : words.x) : (second ? words.w : words.y), i % 2);
  };
  const auto check_means = [&](const gpu::HostKeyUp& key_up, float range) {
    for (int channel = 0; channel < dim; ++channel) {
      const uint2& words = key_up.means[static_cast<std::size_t>(channel % (dim / 2) / 2)];
      CHECK(number(channel < dim / 2 ? words.x : words.y, channel % 2) * key_up.factor ==
            round_to(DType::f16, mean[static_cast<std::size_t>(channel)] / key_up.factor * range) *
                key_up.factor / range);
    }
  };
  for (const DType type : {DType::f16, DType::bf16}) {
    const auto value = [&](int coefficient, int channel) {
      return coefficient < 20
                 ? round_to(DType::f16,
                            values[static_cast<std::size_t>(coefficient * dim + channel)])
                 : 0.0F;
    };
    const gpu::HostKeyUp key_up = gpu::up_project_plain(type, units, dim, mean, 0.0F, value);
    const float range = type == DType::f16 ? 1.0F : gpu::kRotatedBFloat;
    for (int unit = 0; unit < units; ++unit) {
      for (int channel = 0; channel < dim; ++channel) {
        for (int item = 0; item < 16; ++item) {
          const int t = item / 4, i = item % 4,
                    coefficient = 16 * unit + 2 * t + i % 2 + 8 * (i / 2);
          CHECK(element(key_up, unit, channel, t, i) * key_up.factor * range ==
                value(coefficient, channel));
        }
      }
    }
    check_means(key_up, 1.0F);
  }
  const std::vector<std::uint8_t> widths{8, 2};
  const auto plane = [&](int place, int channel) {
    return place < width ? values[static_cast<std::size_t>(place * dim + channel)] : 0.0F;
  };
  const gpu::HostKeyUp key_up = gpu::up_project_codes(widths, dim, mean, 0.0F, plane);
  float largest = 0.0F;
  for (int channel = 0; channel < dim; ++channel) {
    float sum = 0.0F;  // over the largest levels
    for (int place = 0; place < 2 * gpu::kCodeUnit; ++place) {
      const int unit = place / 32;
      const float found = element(key_up, place / 16, channel, place % 16 / 4, place % 4),
                  entered = unit == 0 ? 1.0F : 0.5F;
      CHECK(found * key_up.factor ==
            doctest::Approx(static_cast<double>(entered * plane(place, channel))).epsilon(1e-3));
      sum += std::abs(found) * (unit == 0 ? 127.5F : 3.0F);
    }
    largest = std::max(largest, sum);
  }
  CHECK(largest <= 16.1F);
  CHECK(largest > 7.9F);
  check_means(key_up, 1.0F);
  // Where bases move, the scale is that of any orthonormal basis: unit vectors, or all numbers
  // alike.
  const auto unit = [](int coefficient, int channel) {
    return coefficient == channel ? 1.0F : 0.0F;
  };
  const auto spread = [](int coefficient, int channel) {
    return coefficient < 32
               ? ((__builtin_popcount(static_cast<unsigned>(coefficient & channel)) & 1) != 0
                      ? -1.0F
                      : 1.0F) /
                     std::sqrt(32.0F)
               : 0.0F;
  };
  CHECK(gpu::up_project_plain(DType::f16, units, dim, mean, 1.0F, unit).scale == 1.0F);
  CHECK(gpu::up_project_plain(DType::f16, units, dim, mean, 1.0F, spread).scale == 1.0F);
  CHECK(gpu::up_project_plain(DType::f16, units, dim, mean, 0.0F, spread).scale == 4.0F);
  const float most = 127.5F * std::sqrt(32.0F);
  CHECK(gpu::up_project_codes({8}, dim, mean, most, unit).scale ==
        gpu::up_project_codes({8}, dim, mean, most, spread).scale);
  CHECK(gpu::up_project_codes({8}, dim, mean, most, spread).scale * most <= 16.0F);
}

TEST_CASE("pages hold the largest tile, and waste the least of those considered") {
  std::mt19937 random(2);
  for (int trial = 0; trial < 50; ++trial) {
    StaticPCAHybrid<Cuda>::PolicySet policies;
    CacheConfig config;
    config.shape = {4, 2, 16 * (1 + static_cast<int>(random() % 16))};
    config.max_tokens = 1 + static_cast<std::int64_t>(random() % 20000);
    LayerBasis basis;
    for (int head = 0; head < 2; ++head) {  // coordinates themselves
      HeadBasis maps;
      maps.key_rank = maps.value_rank =
          1 + static_cast<int>(random() % static_cast<unsigned>(config.shape.head_dim));
      maps.key_down.assign(static_cast<std::size_t>(config.shape.head_dim * maps.key_rank), 0.0F);
      for (int i = 0; i < maps.key_rank; ++i)
        maps.key_down[static_cast<std::size_t>(i * maps.key_rank + i)] = 1.0F;
      maps.value_down = maps.key_down;
      basis.heads.push_back(maps);
    }
    const std::size_t page = StaticPCAHybrid<Cuda>::page_bytes(config, basis, policies);
    const auto bytes = [&](std::size_t page_bytes) {
      config.page_bytes = page_bytes;
      return static_cast<std::size_t>(StaticPCAHybrid<Cuda>::num_pages(config, basis, policies)) *
             page_bytes;
    };
    CHECK(page % 128 == 0);
    const std::size_t least = bytes(page),
                      tile = static_cast<std::size_t>(
                          gpu::plain_tiles(config.shape.head_dim, config.shape.head_dim,
                                           gpu::plain_units(config.shape.head_dim), false)
                              .bytes);
    int most = 0, largest = static_cast<int>(tile);
    for (const HeadBasis& maps : basis.heads)
      most = (std::max)(most, gpu::plain_units(maps.key_rank));
    for (const HeadBasis& maps : basis.heads)
      largest =
          (std::max)(largest, gpu::plain_tiles(maps.key_rank, maps.value_rank, most, false).bytes);
    CHECK(page >= static_cast<std::size_t>(largest));
    for (std::size_t count = 1; count <= 4; ++count) {
      if (count * tile >= static_cast<std::size_t>(largest)) CHECK(least <= bytes(count * tile));
    }
  }
}

namespace {

/// Counts of a prompt and the flushes behind it never exceed what a cache has room for.
template <class Policy>
void counts_fit(const Policy& policy, std::mt19937& random) {
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t tokens = 1 + random() % 3000, flush = 1 + random() % 64;
    const auto most = [&](std::int64_t rows) {
      return std::max(gpu::row_counts(policy, 0, rows, Phase::prefill).full,
                      gpu::row_counts(policy, 0, rows, Phase::decode).full);
    };
    std::int64_t left = 0, full = 0, compressed = 0;
    Phase phase = Phase::prefill;
    for (std::int64_t rows = random() % static_cast<unsigned>(tokens + 1); left + rows <= tokens;
         rows = flush) {
      const gpu::RowCounts counts = gpu::row_counts(policy, left, rows, phase);
      CHECK(0 <= counts.pinned);
      CHECK(counts.pinned <= counts.full);
      CHECK(0 <= counts.compressed);
      CHECK(counts.full + counts.compressed <= rows);
      left += rows;
      full += counts.full;
      compressed += counts.compressed;
      CHECK(full <= most(left));
      CHECK(most(left) <= most(tokens));
      phase = Phase::decode;
    }
    CHECK(full + compressed <= tokens);
  }
}

}  // namespace

TEST_CASE("full rows of any prompt and flushes stay within the room that counts leave them") {
  std::mt19937 random(2);
  counts_fit(KeepFull{}, random);
  counts_fit(CompressAll{}, random);
  counts_fit(SinkRecent{37, 20}, random);
  counts_fit(SlidingWindow{5, 100}, random);
  counts_fit(SnapKV{}, random);
  counts_fit(Compose(KeepFull{}, SnapKV{.keep = 0.3F}), random);
  counts_fit(Compose(SinkRecent{9, 32}, SnapKV{.budget = 70}), random);
  counts_fit(Compose(SinkRecent{33, 32}, ResidualOutliers{.share = 0.13F}), random);
  counts_fit(Compose(SlidingWindow{4, 32}, ResidualOutliers{}), random);
}
