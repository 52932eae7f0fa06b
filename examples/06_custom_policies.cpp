// SPDX-License-Identifier: Apache-2.0
// A token policy and a quantizer of your own, composed with the library's others.
#include <lowrankkv/lowrankkv.hpp>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

//! [token policy]
/// Every `stride`-th token stays at full rank, an anchor that a question can find.
struct Anchors {
  int stride = 16;
  int recent = 32;  // tokens that stay in the tail
};

template <>
struct lowrankkv::Impl<Anchors, lowrankkv::Cpu> {
  static constexpr bool compresses = true;
  static constexpr Evidence evidence = Evidence::none;  // positions are all it looks at
  static int recent(const Anchors& policy) { return policy.recent; }
  // From counts alone: most rows of this batch in either list, so that pages can be asked for
  // before anything changes.
  static RowBounds bounds(const Anchors& policy, const RowBatch& batch) {
    const std::int64_t last = batch.first_position + batch.num_rows;
    const std::int64_t anchors = (last + policy.stride - 1) / policy.stride -
                                 (batch.first_position + policy.stride - 1) / policy.stride;
    return {anchors, batch.num_rows - anchors};
  }
  static void classify(const Anchors& policy, const RowBatch& batch, std::span<RowFate> fates) {
    for (std::size_t row = 0; row < fates.size(); ++row) {
      fates[row] = (batch.first_position + static_cast<std::int64_t>(row)) % policy.stride == 0
                       ? RowFate::full
                       : RowFate::compressed;
    }
  }
};
//! [token policy]

//! [quantizer]
/// A sign a channel and one float a row: its mean magnitude.
struct Signs {};

template <>
struct lowrankkv::Impl<Signs, lowrankkv::Cpu> {
  struct Layout {
    int rank = 0;
    std::size_t row_bytes() const { return sizeof(float) + static_cast<std::size_t>(rank + 7) / 8; }
  };
  static Layout layout(const Signs&, int rank, std::span<const std::uint8_t>) { return {rank}; }
  static std::int64_t row_bits(const Layout& layout) {
    return 8 * static_cast<std::int64_t>(layout.row_bytes());
  }
  static std::size_t block_bytes(const Layout& layout, int rows) {
    return layout.row_bytes() * static_cast<std::size_t>(rows);
  }

  static void encode(const Layout& layout, Part, int, std::byte* block, int first, int count,
                     const float* rows, int stride) {
    for (int row = 0; row < count; ++row) {
      const float* from = rows + row * stride;
      std::byte* to = block + layout.row_bytes() * static_cast<std::size_t>(first + row);
      float gain = 0.0F;
      for (int i = 0; i < layout.rank; ++i)
        gain += std::abs(from[i]) / static_cast<float>(layout.rank);
      std::memcpy(to, &gain, sizeof gain);
      std::memset(to + sizeof gain, 0, layout.row_bytes() - sizeof gain);
      for (int i = 0; i < layout.rank; ++i) {
        if (from[i] < 0.0F)
          to[sizeof gain + static_cast<std::size_t>(i / 8)] |= std::byte{1} << (i % 8);
      }
    }
  }
  // Keys channel by channel [rank, stride], values row by row [count, stride].
  static void decode(const Layout& layout, Part part, int, const std::byte* block, int first,
                     int count, float* tile, int stride) {
    for (int row = 0; row < count; ++row) {
      const std::byte* from = block + layout.row_bytes() * static_cast<std::size_t>(first + row);
      float gain = 0.0F;
      std::memcpy(&gain, from, sizeof gain);
      for (int i = 0; i < layout.rank; ++i) {
        const bool negative = (from[sizeof gain + static_cast<std::size_t>(i / 8)] &
                               (std::byte{1} << (i % 8))) != std::byte{0};
        tile[part == Part::key ? i * stride + row : row * stride + i] = negative ? -gain : gain;
      }
    }
  }
  static void copy_row(const Layout& layout, Part, const std::byte* from, int, int from_row,
                       std::byte* to, int, int to_row) {
    std::memmove(to + layout.row_bytes() * static_cast<std::size_t>(to_row),
                 from + layout.row_bytes() * static_cast<std::size_t>(from_row),
                 layout.row_bytes());
  }
};
//! [quantizer]

//! [composition]
using Cache =
    lowrankkv::CompressedKVCache<lowrankkv::Cpu, lowrankkv::PerHead, lowrankkv::Static,
                                 lowrankkv::Compose<lowrankkv::SinkRecent, Anchors>, Signs>;
//! [composition]

int main() {
  const lowrankkv::CacheShape shape{.num_qo_heads = 4, .num_kv_heads = 1, .head_dim = 64};
  const int n = 1024;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> k(n * 64), v(k.size()), q(n * 4 * 64), k_hat(k.size()), v_hat(v.size());
  for (std::size_t i = 0; i < k.size(); ++i) {  // a spectrum that falls
    k[i] = normal(random) / (1.0F + 0.2F * static_cast<float>(i % 64));
    v[i] = normal(random) / (1.0F + 0.2F * static_cast<float>(i % 64));
  }
  for (float& x : q) x = normal(random);
  lowrankkv::calibrate::LayerMoments moments(shape);
  moments.add({q.data(), n, 4, 64}, {k.data(), n, 1, 64}, {v.data(), n, 1, 64});
  Cache cache({.shape = shape}, moments.basis({.key_ratio = 1.0, .value_ratio = 1.0}));
  cache.create(0);
  cache.ingest(0, {k.data(), n, 1, 64}, {v.data(), n, 1, 64});
  cache.reconstruct(0, 0, {k_hat.data(), n, 1, 64}, {v_hat.data(), n, 1, 64});
  double error = 0.0, energy = 0.0, anchor_error = 0.0;
  for (std::size_t i = 0; i < k.size(); ++i) {
    const double d = k[i] - k_hat[i];
    error += d * d;
    energy += static_cast<double>(k[i]) * k[i];
    if ((i / 64) % 16 == 0) anchor_error += d * d;
  }
  std::printf(
      "%.0f bytes a token instead of 256; signs lose %.2f of the keys' energy, anchors %.1g\n",
      static_cast<double>(cache.memory(0).total()) / n, error / energy, anchor_error / energy);
}
