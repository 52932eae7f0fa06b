// SPDX-License-Identifier: Apache-2.0
// Maps that up-project keys, as operands of tensor cores.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "lowrankkv/cuda/presets.cuh"

namespace key_up_projection_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

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

}  // namespace key_up_projection_tests
