// SPDX-License-Identifier: Apache-2.0
// Merging attention states of disjoint sets of rows by their lse.
#include <doctest/doctest.h>

#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/core/online_softmax.hpp"

namespace online_softmax_tests {

using namespace lowrankkv;

TEST_CASE(
    "merging attention over disjoint sets is associative and commutative, and no tokens are "
    "neutral") {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const float none = -std::numeric_limits<float>::infinity();
  for (int round = 0; round < 200; ++round) {
    constexpr int width = 5;
    float out[3][width], lse[3];
    for (int part = 0; part < 3; ++part) {
      lse[part] = round % 10 == part ? none : 20.0F * normal(random);
      for (float& x : out[part]) x = lse[part] == none ? 0.0F : normal(random);
    }
    const auto merged = [&](std::vector<int> order, bool right) {
      std::vector<float> a(out[order[0]], out[order[0]] + width),
          b(out[order[1]], out[order[1]] + width);
      float la = lse[order[0]], lb = lse[order[1]];
      if (right) {
        merge_attention(b.data(), lb, out[order[2]], lse[order[2]], width);
        merge_attention(a.data(), la, b.data(), lb, width);
      } else {
        merge_attention(a.data(), la, b.data(), lb, width);
        merge_attention(a.data(), la, out[order[2]], lse[order[2]], width);
      }
      a.push_back(la);
      return a;
    };
    const auto left = merged({0, 1, 2}, false);
    for (const auto& other :
         {merged({0, 1, 2}, true), merged({2, 0, 1}, false), merged({1, 2, 0}, true)}) {
      for (std::size_t i = 0; i < left.size(); ++i)
        CHECK(other[i] == doctest::Approx(left[i]).epsilon(1e-5));
    }
  }
  float a[2] = {0, 0}, la = none;
  const float b[2] = {0, 0};
  merge_attention(a, la, b, none, 2);
  CHECK(la == none);
  CHECK(a[0] == 0.0F);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float c[2] = {nan, nan}, lc = none;  // an empty part, normalised by 0
  const float d[2] = {1.0F, 2.0F};
  merge_attention(c, lc, d, 3.0F, 2);
  CHECK((c[0] == 1.0F && c[1] == 2.0F && lc == 3.0F));
  float e[2] = {nan, nan};
  merge_attention(c, lc, e, none, 2);
  CHECK((c[0] == 1.0F && lc == 3.0F));
}

}  // namespace online_softmax_tests
