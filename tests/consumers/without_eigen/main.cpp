// SPDX-License-Identifier: Apache-2.0
// What both backends share needs neither Eigen nor CUDA.
#include <lowrankkv/core/cache_config.hpp>

#include <cstdio>

int main() {
  const lowrankkv::CacheConfig config{.shape = {4, 2, 64}};
  std::printf("head_dim %d\n", config.shape.head_dim);
}
