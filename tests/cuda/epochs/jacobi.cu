// SPDX-License-Identifier: Apache-2.0
// Jacobi rotations: rows become orthogonal in f32, and the products of their channels stay.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "cuda/support/device_tools.cuh"
#include "lowrankkv/cuda/epochs/device_epochs.cuh"
#include "lowrankkv/cuda/epochs/jacobi.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"

namespace jacobi_tests {

using namespace support;

namespace {

/// In global memory, or, as most sketches are, in shared memory.
__global__ void __launch_bounds__(gpu::kSketchThreads)
    orthogonal_kernel(float* buffer, int count, int dim, bool apart, std::int32_t* sweeps) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ gpu::detail::RowProducts products;
  __shared__ float lengths[gpu::kMaxSketchBuffer];
  const int stride = gpu::detail::sketch_stride(dim), thread = static_cast<int>(threadIdx.x);
  float* rows = apart ? buffer : reinterpret_cast<float*>(shared_memory);
  for (int i = thread; i < count * stride && !apart; i += gpu::kSketchThreads) rows[i] = buffer[i];
  __syncthreads();
  const int made =
      dim <= 128 ? gpu::detail::make_orthogonal<128>(rows, count, dim, stride, lengths, products)
                 : gpu::detail::make_orthogonal<gpu::kMaxHeadDim>(rows, count, dim, stride, lengths,
                                                                  products);
  if (thread == 0) *sweeps = made;
  for (int i = thread; i < count * stride && !apart; i += gpu::kSketchThreads) buffer[i] = rows[i];
}

struct Rotated {
  double cosine = 0.0;  ///< the largest of two rows that have a direction
  int sweeps = 0;
  double change = 0.0;  ///< of the products of channels, against their largest
};

Rotated rotated(const std::vector<float>& rows, int count, int dim, bool apart) {
  const int stride = gpu::detail::sketch_stride(dim), room = gpu::detail::buffered_rows(count);
  std::vector<float> buffer(static_cast<std::size_t>(room * stride),
                            7.0F);  // what is not a row is not read
  for (int row = 0; row < count; ++row)
    std::copy_n(rows.begin() + row * dim, dim, buffer.begin() + row * stride);
  const gpu::DeviceArray<float> device(buffer);
  const gpu::DeviceArray<std::int32_t> sweeps(1);
  gpu::detail::launch_kernel(orthogonal_kernel, dim3(1), gpu::kSketchThreads,
                             apart ? 0 : device.bytes(), "orthogonal_kernel", nullptr,
                             device.data(), count, dim, apart, sweeps.data());
  gpu::check(cudaDeviceSynchronize(), "orthogonal_kernel");
  const std::vector<float> found = host(device);
  const auto product = [](const float* a, const float* b, int size, int step) {
    double sum = 0.0;
    for (int i = 0; i < size; ++i)
      sum += static_cast<double>(a[i * step]) * static_cast<double>(b[i * step]);
    return sum;
  };
  Rotated result;
  result.sweeps = host(sweeps)[0];
  double longest = 0.0, largest = 1e-300;
  const auto row = [&](int i) { return found.data() + i * stride; };
  for (int i = 0; i < count; ++i) longest = std::max(longest, product(row(i), row(i), dim, 1));
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < i; ++j) {
      const double a = product(row(i), row(i), dim, 1), b = product(row(j), row(j), dim, 1);
      if (std::min(a, b) <= 4.0 * static_cast<double>(gpu::kNothing) * longest) continue;
      result.cosine =
          std::max(result.cosine, std::abs(product(row(i), row(j), dim, 1)) / std::sqrt(a * b));
    }
  }
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j <= i; ++j) {
      const double before = product(rows.data() + i, rows.data() + j, count, dim),
                   after = product(found.data() + i, found.data() + j, count, stride);
      largest = std::max(largest, std::abs(before));
      result.change = std::max(result.change, std::abs(after - before));
    }
  }
  result.change /= largest;
  return result;
}

}  // namespace

TEST_CASE("rows become orthogonal, and what they span and accumulate stays") {
  std::mt19937_64 random(11);
  std::normal_distribution<float> normal;
  const int counts[] = {0, 1, 2, 7, 8, 9, 16, 17, 33, 63, 95, 96, 128, 130, 200},
            dims[] = {16, 80, 128, 256};
  const int trials = effort() == 0 ? 6 : 60 * effort();
  Rotated worst;
  for (int trial = 0; trial < trials; ++trial) {
    const int count = trial < 15 ? counts[trial] : counts[random() % 15], dim = dims[random() % 4],
              kind = trial % 5;
    const bool apart =
        random() % 4 == 0 || static_cast<std::size_t>(gpu::detail::buffered_rows(count) *
                                                      gpu::detail::sketch_stride(dim)) *
                                     sizeof(float) >
                                 180000;
    std::vector<float> rows(static_cast<std::size_t>(count * dim));
    std::vector<float> common(static_cast<std::size_t>(dim));
    for (float& x : common) x = normal(random);
    for (int row = 0; row < count; ++row) {
      // Rows alike; of lengths from 1 to 1e-4; nearly all in one direction; with copies, zeros and
      // single channels; as long or short as f32 bears.
      const float length =
          kind == 1   ? std::pow(10.0F, -4.0F * static_cast<float>(row) / static_cast<float>(count))
          : kind == 4 ? (trial % 2 == 0 ? 1e16F : 1e-15F)
                      : 1.0F;
      for (int channel = 0; channel < dim; ++channel) {
        float& x = rows[static_cast<std::size_t>(row * dim + channel)];
        x = length * normal(random);
        if (kind == 2) x = common[static_cast<std::size_t>(channel)] + 1e-3F * x;
        if (kind == 3 && row % 4 == 1)
          x = rows[static_cast<std::size_t>((row - 1) * dim + channel)];
        if (kind == 3 && row % 4 == 2) x = 0.0F;
        if (kind == 3 && row % 4 == 3) x = channel == row % dim ? 3.0F : 0.0F;
      }
    }
    const Rotated one = rotated(rows, count, dim, apart);
    CAPTURE(count);
    CAPTURE(dim);
    CAPTURE(kind);
    CHECK(one.cosine <= 3e-5);  // kOrthogonal, met by sums in f32
    CHECK(
        one.change <=
        1e-4);  // what a few hundred rotations lose: tensor cores cut digits off where others round
    CHECK(one.sweeps < gpu::kMaxSweeps);
    worst = {std::max(worst.cosine, one.cosine), std::max(worst.sweeps, one.sweeps),
             std::max(worst.change, one.change)};
  }
  MESSAGE("largest cosine " << worst.cosine << ", largest change of a product of channels "
                            << worst.change);
}

}  // namespace jacobi_tests
