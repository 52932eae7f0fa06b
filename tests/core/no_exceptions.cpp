// SPDX-License-Identifier: Apache-2.0
// Compiled without exceptions and RTTI, as engines are: a cache works, and an error reaches the
// engine's handler, with its text.
#include <lowrankkv/lowrankkv.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
  lowrankkv::error_handler() = [](const char* message) {
    std::printf("told: %s\n", message);
    std::fflush(stdout);
    std::_Exit(0);  // a handler does not return
  };
  const int dim = 32, n = 200;
  std::vector<float> rows(n * dim), out(dim), all(n * dim);
  for (int i = 0; i < n * dim; ++i)
    rows[static_cast<std::size_t>(i)] =
        std::sin(static_cast<float>(i % 97) + 0.1F * static_cast<float>(i / dim));
  lowrankkv::calibrate::LayerMoments moments({1, 1, dim});
  moments.add({rows.data(), n, 1, dim}, {rows.data(), n, 1, dim}, {rows.data(), n, 1, dim});
  lowrankkv::CacheConfig config{.shape = {1, 1, dim}, .max_tokens = 512, .num_threads = 2};
  lowrankkv::StaticPCAHybrid<> cache(config, moments.basis({.key_ratio = 1.0, .value_ratio = 1.0}));
  cache.create(0);
  cache.prefill(0, {rows.data(), n, 1, dim}, {rows.data(), n, 1, dim}, {rows.data(), n, 1, dim},
                {all.data(), n, 1, dim});
  cache.append(0, {rows.data(), 1, 1, dim}, {rows.data(), 1, 1, dim});
  cache.attend(0, {rows.data(), 1, 1, dim}, {out.data(), 1, 1, dim});
  std::vector<double> weights;
  double sum = 0.0, worst = 0.0;
  for (int token = 0; token <= n; ++token) {
    double logit = 0.0;
    for (int i = 0; i < dim; ++i)
      logit += static_cast<double>(rows[static_cast<std::size_t>(i)]) *
               static_cast<double>(rows[static_cast<std::size_t>((token % n) * dim + i)]);
    weights.push_back(std::exp(logit / std::sqrt(static_cast<double>(dim))));
    sum += weights.back();
  }
  for (int i = 0; i < dim; ++i) {
    double expected = 0.0;
    for (int token = 0; token <= n; ++token)
      expected += weights[static_cast<std::size_t>(token)] / sum *
                  static_cast<double>(rows[static_cast<std::size_t>((token % n) * dim + i)]);
    worst = std::fmax(worst,
                      std::fabs(expected - static_cast<double>(out[static_cast<std::size_t>(i)])));
  }
  std::printf("attention %s\n",
              worst < 2e-3 ? "right" : "wrong");  // at the full rank: rows and maps in f16
  cache.append(0, {rows.data(), 1, 1, dim / 2}, {rows.data(), 1, 1, dim / 2});
  std::printf("nobody was told\n");
}
