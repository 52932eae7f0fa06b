// SPDX-License-Identifier: Apache-2.0
// Random layers for the CUDA tests, without Eigen: bases, rows that suit them, and float64
// attention written plainly.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda/support/cpu_side.hpp"
#include "lowrankkv/quantizer/flat_rotation.hpp"

namespace support {

using Random = std::mt19937_64;

/// 1 to most_kv_heads KV heads, as many query heads for each as one of `groups` says, one of `dims`
/// channels.
inline lowrankkv::CacheShape random_shape(Random& random, unsigned most_kv_heads,
                                          const std::vector<int>& groups,
                                          const std::vector<int>& dims) {
  lowrankkv::CacheShape shape;
  shape.num_kv_heads = 1 + static_cast<int>(random() % most_kv_heads);
  shape.num_qo_heads = shape.num_kv_heads * groups[random() % groups.size()];
  shape.head_dim = dims[random() % dims.size()];
  return shape;
}

/// [dim, rank] with orthonormal columns: Gram-Schmidt, twice.
inline std::vector<float> orthonormal(Random& random, int dim, int rank) {
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> columns;
  while (static_cast<int>(columns.size()) < rank) {
    std::vector<double> next(static_cast<std::size_t>(dim));
    for (double& x : next) x = normal(random);
    for (int round = 0; round < 2; ++round) {
      for (const auto& column : columns) {
        double dot = 0.0;
        for (std::size_t i = 0; i < next.size(); ++i) dot += next[i] * column[i];
        for (std::size_t i = 0; i < next.size(); ++i) next[i] -= dot * column[i];
      }
    }
    double norm = 0.0;
    for (const double x : next) norm += x * x;
    for (double& x : next) x /= std::sqrt(norm);
    columns.push_back(std::move(next));
  }
  std::vector<float> result;
  for (int row = 0; row < dim; ++row) {
    for (int column = 0; column < rank; ++column)
      result.push_back(static_cast<float>(
          columns[static_cast<std::size_t>(column)][static_cast<std::size_t>(row)]));
  }
  return result;
}

struct RandomLayer {
  lowrankkv::LayerBasis basis;
  lowrankkv::CacheShape shape;
  float scale = 1.0F;

  /// Rows [tokens, heads, dim] of a decaying spectrum along the basis, and a little of everything
  /// else.
  std::vector<float> rows(Random& random, std::int64_t tokens, bool key) const {
    std::normal_distribution<float> normal;
    std::vector<float> result(
        static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim));
    for (std::int64_t token = 0; token < tokens; ++token) {
      const float gain = std::exp(0.5F * normal(random));
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        const lowrankkv::HeadBasis& head = basis.heads[static_cast<std::size_t>(h)];
        const std::vector<float>& map = key ? head.key_down : head.value_down;
        const std::vector<float>& rms = key ? head.key_rms : head.value_rms;
        const std::vector<float>& mean = key ? head.key_mean : head.value_mean;
        const int rank = key ? head.key_rank : head.value_rank;
        float* row = result.data() + (token * shape.num_kv_heads + h) * shape.head_dim;
        for (int i = 0; i < shape.head_dim; ++i)
          row[i] =
              0.05F * normal(random) + (mean.empty() ? 0.0F : mean[static_cast<std::size_t>(i)]);
        for (int c = 0; c < rank; ++c) {
          const float z = gain * normal(random) * rms[static_cast<std::size_t>(c)];
          for (int i = 0; i < shape.head_dim; ++i)
            row[i] += z * map[static_cast<std::size_t>(i * rank + c)];
        }
      }
    }
    return result;
  }
  std::vector<float> queries(Random& random, std::int64_t tokens) const {
    std::normal_distribution<float> normal;
    std::vector<float> result(
        static_cast<std::size_t>(tokens * shape.num_qo_heads * shape.head_dim));
    for (float& x : result) x = scale * normal(random);
    return result;
  }
};

/// Ranks and bits differ from head to head.
inline RandomLayer random_layer(Random& random, const lowrankkv::CacheShape& shape,
                                const Settings& settings, int rank) {
  RandomLayer layer{{}, shape};
  std::normal_distribution<float> normal;
  for (int h = 0; h < shape.num_kv_heads; ++h) {
    lowrankkv::HeadBasis head;
    head.key_rank = std::max(1, rank - h % 3);
    head.value_rank = std::max(1, rank - (h + 1) % 2 * 5);
    head.key_threshold = head.value_threshold = std::numeric_limits<float>::infinity();
    head.key_down = orthonormal(random, shape.head_dim, head.key_rank);
    head.value_down = orthonormal(random, shape.head_dim, head.value_rank);
    for (const bool key : {true, false}) {
      const int own = key ? head.key_rank : head.value_rank;
      const int widths[] = {8, 6, 5, 4, 3, 2, 1, 0};
      std::vector<int> bits;
      for (int c = 0; c < own; ++c) bits.push_back(widths[std::min<std::size_t>(7, random() % 8)]);
      std::sort(bits.rbegin(), bits.rend());
      for (int c = 0; c < own; ++c) {
        (key ? head.key_bits : head.value_bits)
            .push_back(static_cast<std::uint8_t>(bits[static_cast<std::size_t>(c)]));
        (key ? head.key_rms : head.value_rms)
            .push_back(2.0F * std::exp(-3.0F * static_cast<float>(c) /
                                       static_cast<float>(shape.head_dim)));
      }
      if (settings.basis.centred) {
        for (int i = 0; i < shape.head_dim; ++i)
          (key ? head.key_mean : head.value_mean).push_back(0.5F * normal(random));
      }
    }
    // Metrics: symmetric, of eigenvalues 1/2 to 2; then maps are R U and R^-1 U.
    for (const bool key : {true, false}) {
      if (!(key ? settings.basis.key_metric == lowrankkv::KeyMetric::query_aware
                : settings.basis.value_metric == lowrankkv::ValueMetric::output_aware))
        continue;
      const int dim = shape.head_dim, own = key ? head.key_rank : head.value_rank;
      const std::vector<float> axes = orthonormal(random, dim, dim);
      std::vector<float> metric(static_cast<std::size_t>(dim * dim)), inverse(metric.size());
      for (int a = 0; a < dim; ++a) {
        const float eigenvalue =
            std::exp2(2.0F * static_cast<float>(a) / static_cast<float>(dim) - 1.0F);
        for (int i = 0; i < dim; ++i) {
          for (int j = 0; j < dim; ++j) {
            const float product = axes[static_cast<std::size_t>(i * dim + a)] *
                                  axes[static_cast<std::size_t>(j * dim + a)];
            metric[static_cast<std::size_t>(i * dim + j)] += eigenvalue * product;
            inverse[static_cast<std::size_t>(i * dim + j)] += product / eigenvalue;
          }
        }
      }
      std::vector<float>& down = key ? head.key_down : head.value_down;
      const std::vector<float> basis_before = down;
      std::vector<float> up(down.size());
      for (int i = 0; i < dim; ++i) {
        for (int c = 0; c < own; ++c) {
          double with_metric = 0.0, with_inverse = 0.0;
          for (int j = 0; j < dim; ++j) {
            with_metric += static_cast<double>(metric[static_cast<std::size_t>(i * dim + j)]) *
                           basis_before[static_cast<std::size_t>(j * own + c)];
            with_inverse += static_cast<double>(inverse[static_cast<std::size_t>(i * dim + j)]) *
                            basis_before[static_cast<std::size_t>(j * own + c)];
          }
          down[static_cast<std::size_t>(i * own + c)] = static_cast<float>(with_metric);
          up[static_cast<std::size_t>(key ? i * own + c : c * dim + i)] =
              static_cast<float>(with_inverse);
        }
      }
      (key ? head.query_down : head.output_up) = up;
      (key ? head.key_metric : head.value_metric) = metric;
      (key ? head.key_metric_inverse : head.value_metric_inverse) = inverse;
    }
    if (settings.method == Method::projector) {
      head.query_down = head.key_down;
      for (float& x : head.query_down) x += 0.02F * normal(random);
      head.output_up.resize(head.value_down.size());
      for (int i = 0; i < shape.head_dim; ++i) {
        for (int c = 0; c < head.value_rank; ++c)
          head.output_up[static_cast<std::size_t>(c * shape.head_dim + i)] =
              head.value_down[static_cast<std::size_t>(i * head.value_rank + c)] +
              0.02F * normal(random);
      }
    }
    layer.basis.heads.push_back(std::move(head));
  }
  return layer;
}

/// A layer with joint values of rank `joint_rank`: some columns of a flat orthogonal matrix.
inline RandomLayer joint_layer(Random& random, const lowrankkv::CacheShape& shape,
                               const lowrankkv::PerHead& basis, int heads_per_group, int rank,
                               int joint_rank) {
  Settings plain;
  plain.basis = basis;
  RandomLayer layer = random_layer(random, shape, plain, rank);
  const int members = heads_per_group > 0 ? heads_per_group : shape.num_kv_heads,
            width = members * shape.head_dim;
  const std::vector<float> flat = lowrankkv::flat_rotation(width);
  for (int leader = 0; leader < shape.num_kv_heads; leader += members) {
    std::vector<int> columns(static_cast<std::size_t>(width));
    for (int i = 0; i < width; ++i) columns[static_cast<std::size_t>(i)] = i;
    std::shuffle(columns.begin(), columns.end(), random);
    const int own_rank = std::max(1, joint_rank - leader);  // groups differ
    std::vector<std::uint8_t> bits;
    for (int c = 0; c < own_rank; ++c)
      bits.push_back(std::array<std::uint8_t, 8>{8, 6, 5, 4, 3, 2, 1, 0}[random() % 8]);
    std::sort(bits.rbegin(), bits.rend());
    for (int h = leader; h < leader + members; ++h) {
      lowrankkv::HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
      head.value_rank = own_rank;
      head.value_down.clear();
      head.value_bits = bits;
      head.value_rms.clear();
      for (int c = 0; c < own_rank; ++c)
        head.value_rms.push_back(
            2.0F * std::exp(-3.0F * static_cast<float>(c) / static_cast<float>(own_rank)));
      for (int i = (h - leader) * shape.head_dim; i < (h - leader + 1) * shape.head_dim; ++i) {
        for (int c = 0; c < own_rank; ++c)
          head.value_down.push_back(
              flat[static_cast<std::size_t>(i * width + columns[static_cast<std::size_t>(c)])]);
      }
    }
  }
  return layer;
}
/// Keys, or values, [tokens, heads, dim] that suit a joint layer: latents of a decaying spectrum,
/// and a little of everything else.
inline std::vector<float> joint_rows(Random& random, const RandomLayer& layer, std::int64_t tokens,
                                     bool key) {
  if (key) return layer.rows(random, tokens, true);
  std::normal_distribution<float> normal;
  const int dim = layer.shape.head_dim, heads = layer.shape.num_kv_heads;
  std::vector<float> result(static_cast<std::size_t>(tokens * heads * dim)), latent;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const float gain = std::exp(0.5F * normal(random));
    for (int h = 0; h < heads; ++h) {
      const lowrankkv::HeadBasis& head = layer.basis.heads[static_cast<std::size_t>(h)];
      const std::size_t rank = static_cast<std::size_t>(head.value_rank);
      if (h == 0 || layer.basis.heads[static_cast<std::size_t>(h - 1)].value_rank !=
                        head.value_rank) {  // another group
        latent.assign(rank, 0.0F);
        for (std::size_t c = 0; c < rank; ++c)
          latent[c] = 2.0F * gain * normal(random) *
                      std::exp(-3.0F * static_cast<float>(c) / static_cast<float>(rank));
      }
      for (int i = 0; i < dim; ++i) {
        float sum = 0.05F * normal(random) +
                    (head.value_mean.empty() ? 0.0F : head.value_mean[static_cast<std::size_t>(i)]);
        for (std::size_t c = 0; c < rank; ++c)
          sum += latent[c] * head.value_down[static_cast<std::size_t>(i) * rank + c];
        result[static_cast<std::size_t>((token * heads + h) * dim + i)] = sum;
      }
    }
  }
  return result;
}

/// A rotary embedding of pre-RoPE keys: any pairing, all channels or some.
inline lowrankkv::RopeConfig random_rope(Random& random, int head_dim) {
  lowrankkv::RopeConfig rope;
  rope.keys = lowrankkv::Rope::pre;
  rope.pairing =
      random() % 3 == 0 ? lowrankkv::RopePairing::interleaved : lowrankkv::RopePairing::half_split;
  rope.rotary_dim =
      random() % 3 == 0
          ? 16 * (1 + static_cast<int>(random() % static_cast<unsigned>(head_dim / 16)))
          : 0;
  rope.theta = random() % 2 == 0 ? 10000.0 : 500.0;
  return rope;
}
/// Keys [tokens, heads, dim], rotated if they are pre-RoPE keys; rows of zeros stay so.
/// @param position_of  gives a token's position
template <class Position>
std::vector<float> rotated(const lowrankkv::CacheConfig& config, std::vector<float> keys,
                           Position&& position_of) {
  if (config.rope.keys == lowrankkv::Rope::post) return keys;
  const std::vector<double> frequencies =
      lowrankkv::rope_frequencies(config.rope, config.shape.head_dim);
  const std::size_t heads = static_cast<std::size_t>(config.shape.num_kv_heads),
                    dim = static_cast<std::size_t>(config.shape.head_dim);
  for (std::size_t row = 0; row < keys.size() / dim; ++row)
    lowrankkv::apply_rope(keys.data() + row * dim, frequencies,
                          position_of(static_cast<std::int64_t>(row / heads)), config.rope.pairing);
  return keys;
}
/// The same of positions from 0 on.
inline std::vector<float> rotated(const lowrankkv::CacheConfig& config, std::vector<float> keys) {
  return rotated(config, std::move(keys), [](std::int64_t token) { return token; });
}

/// Softmax attention in float64 of the last m tokens over rows [tokens, kv heads, dim]; also lse.
/// drops: rows that are all zeros are not there.
inline void attend_f64(const lowrankkv::CacheShape& shape, double scale,
                       const std::vector<float>& key, const std::vector<float>& value,
                       const std::vector<float>& query, std::vector<double>& out,
                       std::vector<double>& lse, bool drops = false) {
  const int dim = shape.head_dim, heads = shape.num_kv_heads, queries = shape.num_qo_heads;
  const std::int64_t tokens = static_cast<std::int64_t>(key.size()) / (heads * dim),
                     m = static_cast<std::int64_t>(query.size()) / (queries * dim);
  out.assign(query.size(), 0.0);
  lse.assign(static_cast<std::size_t>(m * queries), 0.0);
  std::vector<double> logits(static_cast<std::size_t>(tokens));
  std::vector<bool> gone(static_cast<std::size_t>(tokens * heads), false);
  for (std::size_t row = 0; drops && row < gone.size(); ++row) {
    const auto zeros = [&](const std::vector<float>& all) {
      return std::all_of(all.begin() + static_cast<std::ptrdiff_t>(row) * dim,
                         all.begin() + static_cast<std::ptrdiff_t>(row + 1) * dim,
                         [](float x) { return x == 0.0F; });
    };
    gone[row] = zeros(key) && zeros(value);
  }
  for (std::int64_t j = 0; j < m; ++j) {
    for (int h = 0; h < queries; ++h) {
      const std::int64_t seen = tokens - m + j + 1;
      const float* q = query.data() + (j * queries + h) * dim;
      double top = -1e300;
      for (std::int64_t t = 0; t < seen; ++t) {
        const float* k = key.data() + (t * heads + h / shape.group_size()) * dim;
        double dot = 0.0;
        for (int i = 0; i < dim; ++i) dot += static_cast<double>(q[i]) * k[i];
        logits[static_cast<std::size_t>(t)] = scale * dot;
        if (gone[static_cast<std::size_t>(t * heads + h / shape.group_size())]) continue;
        top = std::max(top, scale * dot);
      }
      double sum = 0.0;
      double* o = out.data() + (j * queries + h) * dim;
      for (std::int64_t t = 0; t < seen; ++t) {
        if (gone[static_cast<std::size_t>(t * heads + h / shape.group_size())]) continue;
        const double e = std::exp(logits[static_cast<std::size_t>(t)] - top);
        const float* v = value.data() + (t * heads + h / shape.group_size()) * dim;
        sum += e;
        for (int i = 0; i < dim; ++i) o[i] += e * v[i];
      }
      for (int i = 0; i < dim; ++i) o[i] /= sum;
      lse[static_cast<std::size_t>(j * queries + h)] = top + std::log(sum);
    }
  }
}

/// What ResidualOutliers calls a row's error of one part, in the plain metric and float64: rows
/// [head_dim], exact and as it is stored.
inline double row_error(const std::vector<float>& mean, const float* exact, const float* stored,
                        int head_dim, bool relative) {
  double lost = 0.0, energy = 0.0;
  for (int i = 0; i < head_dim; ++i) {
    const double x = static_cast<double>(exact[i]), away = x - static_cast<double>(stored[i]),
                 centred =
                     x -
                     (mean.empty() ? 0.0 : static_cast<double>(mean[static_cast<std::size_t>(i)]));
    lost += away * away;
    energy += centred * centred;
  }
  return relative ? lost / energy : lost;
}

}  // namespace support
