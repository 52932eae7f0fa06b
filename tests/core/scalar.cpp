// SPDX-License-Identifier: Apache-2.0
// Conversion between f32, f16 and bf16: exact where it can be, rounding to nearest even,
// saturation.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/core/scalar.hpp"
#include "lowrankkv/cpu/convert.hpp"

namespace scalar_tests {

using namespace lowrankkv;

namespace {
double half_value(std::uint16_t bits) {  // straight from IEEE 754
  const int exponent = bits >> 10 & 31;
  const double mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}
}  // namespace

TEST_CASE("every finite half converts exactly and comes back, by scalar and by array") {
  std::vector<std::uint16_t> all;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    if ((bits >> 10 & 31) == 31) continue;
    all.push_back(static_cast<std::uint16_t>(bits));
    CHECK(to_float(Half{all.back()}) == static_cast<float>(half_value(all.back())));
    CHECK(to_half(to_float(Half{all.back()})).bits == bits);
  }
  std::vector<float> wide(all.size());
  cpu::to_f32(DType::f16, all.data(), static_cast<std::int64_t>(all.size()), wide.data());
  for (std::size_t i = 0; i < all.size(); ++i) CHECK(wide[i] == to_float(Half{all[i]}));
  CHECK(std::isinf(to_float(Half{0x7c00})));
  CHECK(std::isnan(to_float(Half{0x7e00})));
}

TEST_CASE("f32 rounds to the nearest half, ties to even, and saturates") {
  std::mt19937 random(5);
  std::uniform_int_distribution<std::uint32_t> bits;
  for (int i = 0; i < 200000; ++i) {
    const float x = std::bit_cast<float>(bits(random));
    if (!std::isfinite(x)) continue;
    const double rounded = half_value(to_half(x).bits);
    if (std::abs(x) >= 65504.0F) {
      CHECK(std::abs(rounded) == 65504.0);
      continue;
    }
    const std::uint16_t b = to_half(x).bits;
    for (const int step : {-1, 1}) {
      const std::uint16_t neighbour = static_cast<std::uint16_t>(b + step);
      if ((neighbour >> 10 & 31) == 31 || ((neighbour ^ b) & 0x8000)) continue;
      const double here = std::abs(rounded - x);
      const double there = std::abs(half_value(neighbour) - x);
      CHECK((here < there || (here == there && b % 2 == 0)));
    }
  }
  CHECK(std::isnan(to_float(to_half(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isinf(to_float(to_half(std::numeric_limits<float>::infinity()))));
}

TEST_CASE("bf16 keeps 8 bits of mantissa and saturates") {
  CHECK(to_float(to_bfloat16(1.0F)) == 1.0F);
  CHECK(to_float(to_bfloat16(3.4e38F)) == max_finite(DType::bf16));
  std::mt19937 random(6);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 10000; ++i) {
    const float x = normal(random);
    CHECK(std::abs(to_float(to_bfloat16(x)) - x) <= unit_roundoff(DType::bf16) * std::abs(x));
    CHECK(std::abs(round_to(DType::f16, x) - x) <=
          unit_roundoff(DType::f16) * std::abs(x) + 0x1p-25F);
  }
}

}  // namespace scalar_tests
