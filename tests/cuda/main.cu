// SPDX-License-Identifier: Apache-2.0
// Entry point of the tests that need a GPU: without one they are skipped (exit code 77), or fail
// where LOWRANKKV_REQUIRE_GPU is set.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    if (std::getenv("LOWRANKKV_REQUIRE_GPU") != nullptr) {
      std::puts("no CUDA device, and LOWRANKKV_REQUIRE_GPU is set");
      return 1;
    }
    std::puts("no CUDA device: skipped");
    return 77;
  }
  doctest::Context context(argc, argv);
  return context.run();
}
