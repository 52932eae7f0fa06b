// SPDX-License-Identifier: Apache-2.0
// Fifteen lines: a cache, a prompt, one decoded token.
//! [program]
#include <lowrankkv/lowrankkv.hpp>

#include <cstdio>
#include <random>
#include <vector>

int main() {
  const lowrankkv::CacheShape shape{.num_qo_heads = 8, .num_kv_heads = 2, .head_dim = 64};
  const int n = 512;  // prompt tokens; your engine has real queries, keys and values
  std::vector<float> q(n * 8 * 64), k(n * 2 * 64), v(n * 2 * 64), out(q.size());
  std::mt19937 random(1);
  for (auto* rows : {&q, &k, &v}) {
    for (float& x : *rows) x = std::normal_distribution<float>()(random);
  }

  //! [calibrate]
  lowrankkv::calibrate::LayerMoments moments(shape);  // of a calibration text: made once, saved
  moments.add({q.data(), n, 8, 64}, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});
  //! [calibrate]
  const lowrankkv::LayerBasis basis = moments.basis({.key_ratio = 0.5, .value_ratio = 0.5});

  lowrankkv::OjaKV<> cache({.shape = shape, .max_tokens = 4096}, basis);
  cache.create(0);  // a sequence
  cache.prefill(0, {q.data(), n, 8, 64}, {k.data(), n, 2, 64}, {v.data(), n, 2, 64},
                {out.data(), n, 8, 64});
  cache.append(0, {k.data(), 1, 2, 64}, {v.data(), 1, 2, 64});    // a decoded token
  cache.attend(0, {q.data(), 1, 8, 64}, {out.data(), 1, 8, 64});  // attention over all of it
  std::printf("%.2f bytes a token instead of 512\n",
              static_cast<double>(cache.memory(0).total()) / (n + 1));
  //! [program]
}
