// SPDX-License-Identifier: Apache-2.0
// Compiles and links without Eigen. That kernels do is what other consumers show.
#include <cstdio>
#include <lowrankkv/cuda/presets.cuh>

int main() {
  const lowrankkv::CacheConfig config{.shape = {4, 2, 64}};
  std::printf("head_dim %d\n", config.shape.head_dim);
}
