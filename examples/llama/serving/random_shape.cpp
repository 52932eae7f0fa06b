// SPDX-License-Identifier: Apache-2.0
#include "serving/random_shape.hpp"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>

#include "lowrankkv/core/rope.hpp"

namespace llama {
namespace {

struct Shape {
  const char* name;
  int hidden, inner, layers, query_heads, kv_heads, head_dim, vocabulary, positions;
  bool tied;
  double theta;
};
constexpr Shape kShapes[] = {
    {"llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, 131072, false, 500000.0},
    {"llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256, 131072, true, 500000.0},
};

}  // namespace

std::vector<std::string> shape_names() {
  std::vector<std::string> names;
  for (const Shape& shape : kShapes) names.emplace_back(shape.name);
  return names;
}

Config shape_of(const std::string& name) {
  std::string known;
  for (const Shape& shape : kShapes) {
    known += std::string(" ") + shape.name;
    if (name != shape.name) continue;
    Config config;
    config.hidden_size = shape.hidden;
    config.intermediate_size = shape.inner;
    config.num_layers = shape.layers;
    config.num_qo_heads = shape.query_heads;
    config.num_kv_heads = shape.kv_heads;
    config.head_dim = shape.head_dim;
    config.vocabulary_size = shape.vocabulary;
    config.max_positions = shape.positions;
    config.tied_head = shape.tied;
    config.rope_frequencies = lowrankkv::rope_frequencies(shape.head_dim, shape.theta);
    return config;
  }
  throw std::runtime_error("shape " + name + " is unknown; there are:" + known);
}

std::vector<float> random_spectrum(int head_dim) {
  std::vector<float> sizes;
  for (int i = 0; i < head_dim; ++i)
    sizes.push_back(2.0F * std::exp(-6.0F * static_cast<float>(i) / static_cast<float>(head_dim)) +
                    0.05F);
  return sizes;
}

Calibration random_calibration(const Config& config, bool pre_rope) {
  constexpr std::int64_t kTokens = 1024, kContext = 768;
  const std::vector<float> sizes = random_spectrum(config.head_dim);
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const auto rows = [&](int heads) {
    std::vector<float> values(static_cast<std::size_t>(kTokens * heads * config.head_dim));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = sizes[i % sizes.size()] * normal(random);
    return values;
  };
  const std::vector<float> query = rows(config.num_qo_heads), key = rows(config.num_kv_heads),
                           value = rows(config.num_kv_heads);
  const auto moments_of = [&](lowrankkv::Rope keys) {
    lowrankkv::calibrate::LayerMoments layer(
        config.cache_shape(),
        keys == lowrankkv::Rope::pre ? config.rope(lowrankkv::Rope::pre) : lowrankkv::RopeConfig{});
    const lowrankkv::QueryView q(query.data(), kTokens, config.num_qo_heads, config.head_dim);
    const lowrankkv::KeyView k(key.data(), kTokens, config.num_kv_heads, config.head_dim);
    const lowrankkv::ValueView v(value.data(), kTokens, config.num_kv_heads, config.head_dim);
    layer.add(q, k, v);
    layer.coding().add(q, k, v, kContext, 1, [](int count, auto&& function) {
      for (int i = 0; i < count; ++i) function(i);
    });
    return std::vector(static_cast<std::size_t>(config.num_layers), layer);
  };
  Calibration calibration;
  calibration.post_rope = moments_of(lowrankkv::Rope::post);
  if (pre_rope) calibration.pre_rope = moments_of(lowrankkv::Rope::pre);
  return calibration;
}

}  // namespace llama
