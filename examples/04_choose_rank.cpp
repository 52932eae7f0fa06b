// SPDX-License-Identifier: Apache-2.0
// Choosing ranks: moments, their spectrum, and the rank that keeps a share of its energy.
#include <lowrankkv/lowrankkv.hpp>

#include <cmath>
#include <cstdio>
#include <random>

int main() {
  const lowrankkv::CacheShape shape{.num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 64};
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const int n = 2000;
  std::vector<float> q(n * 4 * 64), k(n * 2 * 64), v(n * 2 * 64);
  // Channels whose energy decays, as that of keys does in their principal axes.
  for (auto* rows : {&q, &k, &v}) {
    for (std::size_t i = 0; i < rows->size(); ++i) {
      (*rows)[i] = normal(random) * std::exp(-0.06F * static_cast<float>(i % 64));
    }
  }
  lowrankkv::calibrate::LayerMoments moments(shape);
  moments.add({q.data(), n, 4, 64}, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});

  std::printf("%8s %12s %12s %12s\n", "energy", "key head 0", "key head 1", "layer's rank");
  //! [ranks]
  for (const double energy : {0.8, 0.9, 0.95, 0.99, 0.999}) {
    int ranks[2];
    for (int head = 0; head < 2; ++head) {
      const auto spectrum = moments.key_spectrum(
          head, {.key_source = lowrankkv::calibrate::KeySource::queries_and_keys});
      ranks[head] = lowrankkv::calibrate::rank_by_energy(spectrum.values, energy);
    }
    std::printf("%8.3f %12d %12d %12d\n", energy, ranks[0], ranks[1],
                lowrankkv::calibrate::max_over_heads(ranks));
  }
  //! [ranks]
}
