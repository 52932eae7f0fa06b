// SPDX-License-Identifier: Apache-2.0
// A cache on the GPU from a calibration on the host: 08_cuda_calibrated BUNDLE. The bundle is what
// 08_calibrate or `lowrankkv-llama calibrate` wrote. No kernel is compiled here: the host's
// compiler reads this source, nvcc those that lowrankkv_add_cuda_caches() writes.
#include <lowrankkv/budgeted.hpp>
#include <lowrankkv/calibrate/bundle.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <vector>

#include "08_rows.hpp"
#include "cuda_caches.hpp"

using lowrankkv::cuda::check;
template <class T>
using Device = lowrankkv::cuda::DeviceArray<T>;

/// Squares of what attention over all rows at full rank gives, and of how far `out` is from it.
struct Error {
  double difference = 0.0, exact = 0.0;
  void add(const LayerRows& rows, std::int64_t tokens, const std::vector<float>& out) {
    const int dim = kShape.head_dim;
    for (int head = 0; head < kShape.num_qo_heads; ++head) {
      const float* query = rows.query.data() + ((tokens - 1) * kShape.num_qo_heads + head) * dim;
      std::vector<double> sums(static_cast<std::size_t>(dim), 0.0);
      double total = 0.0;
      for (std::int64_t token = 0; token < tokens; ++token) {
        const std::int64_t row = token * kShape.num_kv_heads + head / kShape.group_size();
        double logit = 0.0;
        for (int i = 0; i < dim; ++i)
          logit += double{query[i]} * double{rows.key[static_cast<std::size_t>(row * dim + i)]};
        const double weight = std::exp(logit / std::sqrt(dim));
        total += weight;
        for (std::size_t i = 0; i < sums.size(); ++i)
          sums[i] += weight * double{rows.value[static_cast<std::size_t>(row * dim) + i]};
      }
      for (std::size_t i = 0; i < sums.size(); ++i) {
        exact += std::pow(sums[i] / total, 2);
        const float got = out[static_cast<std::size_t>(head * dim) + i];
        difference += std::pow(sums[i] / total - double{got}, 2);
      }
    }
  }
};

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "08_cuda_calibrated BUNDLE: a file of 08_calibrate\n");
    return 2;
  }
  const std::int64_t prompt = 1500, steps = 60;
  const auto [qo, kv, dim] = kShape;
  //! [load]
  const auto layers = lowrankkv::calibrate::load_moments(argv[1], kShape, kLayers);
  lowrankkv::calibrate::BudgetOptions options{.ratio = 0.35, .context = prompt + steps};
  options.for_cuda();  // bytes as its tiles and pages take them
  const auto model = lowrankkv::calibrate::budgeted(layers, options);
  lowrankkv::CacheConfig config{.shape = kShape, .max_tokens = options.context};
  config.rope = layers.front().rope();
  lowrankkv::LayerStack<BudgetedOnGpu> stack(model.configs(config), model.bases, model.policies);
  //! [load]

  //! [decode]
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  stack.create(0, stream);
  Error error;
  std::vector<LayerRows> rows;
  std::vector<Device<float>> queries, keys, values;  // your engine computes them there
  for (int layer = 0; layer < kLayers; ++layer) {
    rows.emplace_back(layer, prompt + steps, 2);
    queries.emplace_back(rows.back().query);
    keys.emplace_back(rows.back().key);
    values.emplace_back(rows.back().value);
  }
  const Device<float> out(rows[0].query.size());
  for (int layer = 0; layer < kLayers; ++layer)
    stack.layer(layer).prefill(
        0, {queries[layer].data(), prompt, qo, dim}, {keys[layer].data(), prompt, kv, dim},
        {values[layer].data(), prompt, kv, dim}, {out.data(), prompt, qo, dim}, {}, stream);
  for (std::int64_t token = prompt; token < prompt + steps; ++token) {
    for (int layer = 0; layer < kLayers; ++layer) {
      stack.layer(layer).append(0, {keys[layer].data() + token * kv * dim, 1, kv, dim},
                                {values[layer].data() + token * kv * dim, 1, kv, dim}, stream);
      stack.layer(layer).attend(0, {queries[layer].data() + token * qo * dim, 1, qo, dim},
                                {out.data(), 1, qo, dim}, {}, stream);
      std::vector<float> result(static_cast<std::size_t>(qo * dim));
      check(cudaMemcpyAsync(result.data(), out.data(), result.size() * sizeof(float),
                            cudaMemcpyDeviceToHost, stream),
            "copy");
      check(cudaStreamSynchronize(stream), "decode");
      error.add(rows[static_cast<std::size_t>(layer)], token + 1, result);
    }
    stack.maintain(0, stream);  // rows leave full tails; takes pages
  }
  //! [decode]

  const double ratio = static_cast<double>(stack.memory(0).total()) /
                       static_cast<double>(4 * kLayers * kv * dim * stack.num_tokens(0));
  const double relative = std::sqrt(error.difference / error.exact);
  std::printf("%lld tokens at %.3f of f16's bytes; outputs are %.4f from those at full rank\n",
              static_cast<long long>(stack.num_tokens(0)), ratio, relative);
  cudaStreamDestroy(stream);
  return relative < 0.05 && ratio < 0.4 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "08_cuda_calibrated: %s\n", error.what());
  return 1;
}
