// SPDX-License-Identifier: Apache-2.0
// A CUDA program of a consumer: one token at full rank, whose value attention returns. Without a
// GPU it only says so.
#include <cuda_runtime.h>

#ifdef CONSUMER_CACHES  // kernels are compiled elsewhere: by lowrankkv_add_cuda_caches()
#include CONSUMER_CACHES
#else
#include <lowrankkv/cuda/presets.cuh>
using Cache = lowrankkv::FullKV<lowrankkv::Cuda>;
#endif

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU here: compiled and linked\n");
    return 0;
  }
  const int dim = 64;
  std::vector<float> rows(dim), out(dim);
  for (int i = 0; i < dim; ++i)
    rows[static_cast<std::size_t>(i)] = 0.125F * static_cast<float>(i % 5);
  float *in = nullptr, *result = nullptr;
  cudaMalloc(&in, dim * sizeof(float));
  cudaMalloc(&result, dim * sizeof(float));
  cudaMemcpy(in, rows.data(), dim * sizeof(float), cudaMemcpyHostToDevice);

  Cache cache({.shape = {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim = dim}, .max_tokens = 16},
              {});
  cache.create(0);
  cache.append(0, {in, 1, 1, dim}, {in, 1, 1, dim});
  cache.attend(0, {in, 1, 1, dim}, {result, 1, 1, dim});
  cudaMemcpy(out.data(), result, dim * sizeof(float), cudaMemcpyDeviceToHost);
  float worst = 0.0F;
  for (std::size_t i = 0; i < out.size(); ++i)
    worst = std::fmax(worst, std::fabs(out[i] - rows[i]));
  std::printf("outputs within %.1e\n", static_cast<double>(worst));
  return worst < 1e-5F ? 0 : 1;
}
