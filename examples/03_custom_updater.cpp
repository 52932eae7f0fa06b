// SPDX-License-Identifier: Apache-2.0
// An updater of your own in a page: a forgetting PCA that recomputes the basis from its moment.
#include <lowrankkv/lowrankkv.hpp>

#include <Eigen/Eigenvalues>
#include <cstdio>
#include <random>

//! [updater]
/// The parameters: a plain struct.
struct ForgettingPca {
  float memory = 0.9F;  // weight of the past at every batch
};

/// What it does on the CPU.
template <>
struct lowrankkv::Impl<ForgettingPca, lowrankkv::Cpu> {
  using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  static constexpr bool adapts = true;
  struct State {
    Eigen::MatrixXf moment;  // one per (sequence, KV head, key or value)
  };
  // It sees every row of a prompt.
  static PromptSelection prompt_selection(const ForgettingPca&) { return {}; }
  static void observe(const ForgettingPca& policy, State& state, MatrixView rows, MatrixView,
                      Phase) {
    const Eigen::Map<const RowMajor> batch(rows.data, rows.rows, rows.cols);
    if (state.moment.size() == 0) state.moment = Eigen::MatrixXf::Zero(rows.cols, rows.cols);
    state.moment = policy.memory * state.moment + batch.transpose() * batch;
  }
  static bool maybe_update(const ForgettingPca&, State& state, MatrixView,
                           MutableMatrixView updated, Phase) {
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXf> solver(state.moment);
    Eigen::Map<RowMajor>(updated.data, updated.rows, updated.cols) =
        solver.eigenvectors().rightCols(updated.cols);
    return true;
  }
  static std::size_t state_bytes(const State& state) {
    return sizeof(float) * static_cast<std::size_t>(state.moment.size());
  }
};
//! [updater]

int main() {
  //! [cache]
  using Cache = lowrankkv::CompressedKVCache<lowrankkv::Cpu, lowrankkv::PerHead, ForgettingPca>;
  //! [cache]
  const lowrankkv::CacheShape shape{.num_qo_heads = 4, .num_kv_heads = 1, .head_dim = 32};
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const int n = 600;
  std::vector<float> k(n * 32), v(n * 32), k_hat(k.size()), v_hat(v.size());
  // Rows that live in 8 of 32 directions, not those of the calibration.
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = v[i] = i % 32 >= 24 ? normal(random) : 0.0F;
  lowrankkv::HeadBasis head;
  head.key_rank = head.value_rank = 8;
  head.key_down.resize(32 * 8);
  // The first 8 channels: useless here.
  for (std::size_t i = 0; i < 8; ++i) head.key_down[i * 8 + i] = 1.0F;
  head.value_down = head.key_down;
  Cache cache({.shape = shape}, {{head}});
  cache.create(0);
  cache.ingest(0, {k.data(), n, 1, 32}, {v.data(), n, 1, 32});
  cache.reconstruct(0, 0, {k_hat.data(), n, 1, 32}, {v_hat.data(), n, 1, 32});
  double error = 0.0, energy = 0.0;
  for (std::size_t i = 0; i < k.size(); ++i) {
    error += (k[i] - k_hat[i]) * (k[i] - k_hat[i]);
    energy += k[i] * k[i];
  }
  std::printf("the updater's own basis loses %.2g of the keys' energy at a quarter of the rank\n",
              error / energy);
}
