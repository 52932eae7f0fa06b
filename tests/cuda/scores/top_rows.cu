// SPDX-License-Identifier: Apache-2.0
// The selection of rows by their scores, against a plain sort.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/support/device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"

namespace top_rows_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::host;

TEST_CASE("top rows: the largest scores, of equal ones the earlier, both lists ascending") {
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 40; ++trial) {
    const int lists = 3, stride = 1 + static_cast<int>(random() % 5000),
              first = static_cast<int>(random() % static_cast<unsigned>(stride)),
              end = first + static_cast<int>(random() % static_cast<unsigned>(stride - first + 1));
    const int wanted =
        end == first ? 0 : static_cast<int>(random() % static_cast<unsigned>(end - first + 1));
    std::vector<float> scores(static_cast<std::size_t>(lists * stride));
    const int levels = trial % 3 == 0 ? 4 : 1 << 20;  // few: many are equal
    for (float& score : scores)
      score = static_cast<float>(random() % static_cast<unsigned>(levels)) *
              (trial % 2 == 0 ? 1e-7F : 3.0F);
    const gpu::DeviceArray<float> device(scores);
    const gpu::DeviceArray<std::int32_t> chosen(std::vector<std::int32_t>(scores.size(), -1)),
        rest(std::vector<std::int32_t>(scores.size(), -1));
    gpu::Candidates candidates{device.data(), stride, false, {first}, {end}, {wanted}};
    gpu::top_rows_kernel<><<<lists, gpu::kSelectThreads>>>(candidates, chosen.data(), rest.data());
    gpu::check(cudaDeviceSynchronize(), "top_rows_kernel");
    const auto found = host(chosen), others = host(rest);
    for (int list = 0; list < lists; ++list) {
      const float* own = scores.data() + list * stride;
      std::vector<std::int32_t> order(static_cast<std::size_t>(end - first));
      std::iota(order.begin(), order.end(), first);
      std::stable_sort(order.begin(), order.end(),
                       [&](std::int32_t a, std::int32_t b) { return own[a] > own[b]; });
      std::sort(order.begin(), order.begin() + wanted);
      std::sort(order.begin() + wanted, order.end());
      order.resize(static_cast<std::size_t>(stride), -1);
      std::vector<std::int32_t> expected(order.begin(), order.begin() + wanted),
          expected_rest(order.begin() + wanted, order.begin() + (end - first));
      expected.resize(static_cast<std::size_t>(stride), -1);
      expected_rest.resize(static_cast<std::size_t>(stride), -1);
      CHECK(std::equal(expected.begin(), expected.end(), found.begin() + list * stride));
      CHECK(std::equal(expected_rest.begin(), expected_rest.end(), others.begin() + list * stride));
    }
  }
}

}  // namespace top_rows_tests
