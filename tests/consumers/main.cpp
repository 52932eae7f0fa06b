// SPDX-License-Identifier: Apache-2.0
// A program of a consumer: three tokens at full rank, attention as a softmax written by hand.
#include <lowrankkv/lowrankkv.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  const int dim = 64, tokens = 3;
  std::vector<float> query(dim), key(tokens * dim), value(tokens * dim), out(dim);
  for (int i = 0; i < dim; ++i) query[i] = 0.125F * static_cast<float>(i % 5);
  for (int i = 0; i < tokens * dim; ++i) {
    key[i] = 0.25F * static_cast<float>(i % 7);
    value[i] = 0.5F * static_cast<float>(i % 3);
  }
  lowrankkv::FullKV<> cache(
      {.shape = {.num_qo_heads = 1, .num_kv_heads = 1, .head_dim = dim}, .max_tokens = 16}, {});
  cache.create(0);
  cache.append(0, {key.data(), tokens, 1, dim}, {value.data(), tokens, 1, dim});
  cache.attend(0, {query.data(), 1, 1, dim}, {out.data(), 1, 1, dim});

  double weights[tokens], sum = 0.0, worst = 0.0;
  for (int t = 0; t < tokens; ++t) {
    double logit = 0.0;
    for (int i = 0; i < dim; ++i)
      logit += static_cast<double>(query[i]) * static_cast<double>(key[t * dim + i]);
    sum += weights[t] = std::exp(logit / std::sqrt(static_cast<double>(dim)));
  }
  for (int i = 0; i < dim; ++i) {
    double expected = 0.0;
    for (int t = 0; t < tokens; ++t)
      expected += weights[t] / sum * static_cast<double>(value[t * dim + i]);
    worst = std::fmax(worst, std::fabs(expected - static_cast<double>(out[i])));
  }
  std::printf("lowrankkv %d.%d.%d: outputs within %.1e\n", LOWRANKKV_VERSION_MAJOR,
              LOWRANKKV_VERSION_MINOR, LOWRANKKV_VERSION_PATCH, worst);
  return worst < 1e-5 ? 0 : 1;
}
