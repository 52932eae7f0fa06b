// SPDX-License-Identifier: Apache-2.0
// What the CUDA tests share: device memory to the host and back, how hard to try, what was raised,
// how far two answers are apart.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/runtime/device.cuh"

namespace support {

namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

template <class T>
std::vector<T> host(const gpu::DeviceArray<T>& array) {
  std::vector<T> values(array.size());
  gpu::check(cudaMemcpy(values.data(), array.data(), array.bytes(), cudaMemcpyDeviceToHost),
             "cudaMemcpy");
  return values;
}
/// Device memory that no result may be taken from: every bit set.
inline gpu::DeviceArray<float> poisoned(std::size_t size) {
  gpu::DeviceArray<float> array(size);
  if (size > 0) gpu::check(cudaMemset(array.data(), 0xff, array.bytes()), "cudaMemset");
  return array;
}
/// LOWRANKKV_TEST_EFFORT: so many times the usual trials; 0: as few steps as the tools that watch
/// every access want.
inline int effort() {
  const char* wished = std::getenv("LOWRANKKV_TEST_EFFORT");
  return wished == nullptr ? 1 : std::atoi(wished);
}
template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const lowrankkv::Error& error) {
    return error.what();
  }
  return "nothing was raised";
}
/// A saved state that was changed, as one that was saved: what a load refuses is what it says, not
/// that it was damaged.
inline std::vector<std::byte> with_checksum(std::vector<std::byte> saved) {
  const std::uint64_t sum = lowrankkv::checksum(std::span<const std::byte>(saved).subspan(24));
  std::memcpy(saved.data() + 16, &sum, sizeof sum);
  return saved;
}
/// || a - b || / || b ||
template <class A, class B>
double distance(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double error = 0.0, norm = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    error += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return std::sqrt(error / norm);  // NaN stays NaN, and fails every comparison
}
/// max | a - b |, NaN if there is one.
template <class A, class B>
double furthest(const std::vector<A>& a, const std::vector<B>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(d <= worst)) worst = d;
  }
  return worst;
}

/// How many rows are not the same up to sums in another order: a code, or a scale, that lies on a
/// boundary may go to the next.
inline std::size_t different_rows(const std::vector<float>& own, const std::vector<float>& other,
                                  int dim) {
  REQUIRE(own.size() == other.size());
  double energy = 0.0;
  for (const float x : other) energy += static_cast<double>(x) * x;
  const double typical = energy * dim / static_cast<double>(other.size());
  std::size_t different = 0;
  for (std::size_t row = 0; row < own.size(); row += static_cast<std::size_t>(dim)) {
    double error = 0.0, norm = 0.0;
    for (std::size_t i = row; i < row + static_cast<std::size_t>(dim); ++i) {
      const double d = static_cast<double>(own[i]) - other[i];
      error += d * d;
      norm += static_cast<double>(other[i]) * other[i];
    }
    if (!(error <= 1e-6 * std::max(norm, 0.1 * typical)))
      ++different;  // of rows of zeros nothing differs
  }
  return different;
}

}  // namespace support
