// SPDX-License-Identifier: Apache-2.0
// What against_python.py asks of the library: bundles to be read in Python, and what it makes of
// those that come from there.
//
//   bundle_exchange write FOLDER         rows.safetensors, and bundles of these rows: loss (with
//                                        sinks), output, pre_rope
//   bundle_exchange load BUNDLE OUT      reads a bundle and writes it again, or prints the error
//   bundle_exchange same A B             whether two files have the same entries and tensors
//   bundle_exchange attend ROWS BUNDLE CENTRED
//                                        attention over the rows with the bundle's bases and with
//                                        those that are made here of the rows: largest difference,
//                                        and that from attention at full rank
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/presets.hpp"
#include "support/random_model.hpp"

namespace {

using namespace lowrankkv;

constexpr CacheShape kShape{.num_qo_heads = 4, .num_kv_heads = 2, .head_dim = 16};
constexpr int kLayers = 2, kTokens = 700;

/// Rows of a layer, dense.
struct Rows {
  std::vector<float> query, key, value, key_gradient, value_gradient;
};

KeyView keys(const std::vector<float>& rows) {
  return {rows.data(), kTokens, kShape.num_kv_heads, kShape.head_dim};
}
ValueView values(const std::vector<float>& rows) {
  return {rows.data(), kTokens, kShape.num_kv_heads, kShape.head_dim};
}
QueryView queries(const std::vector<float>& rows) {
  return {rows.data(), kTokens, kShape.num_qo_heads, kShape.head_dim};
}

std::vector<Rows> random_rows() {
  std::mt19937_64 random(3);
  const auto draw = [&](int heads, double decay, float mean) {
    auto rows =
        support::activations(random, kTokens * heads * kShape.head_dim, decay, kShape.head_dim);
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i] += i % 16 == 3 ? mean : 0.0F;
    return rows;
  };
  std::vector<Rows> layers(kLayers);
  for (Rows& rows : layers) {
    rows = {draw(kShape.num_qo_heads, 0.05, 0.0F), draw(kShape.num_kv_heads, 0.2, 1.0F),
            draw(kShape.num_kv_heads, 0.25, 0.5F), draw(kShape.num_kv_heads, 0.1, 0.0F),
            draw(kShape.num_kv_heads, 0.3, 0.0F)};
  }
  return layers;
}

void write(const std::string& folder) {
  const std::vector<Rows> layers = random_rows();
  io::SafetensorsWriter rows;
  std::vector<calibrate::LayerMoments> loss(kLayers, calibrate::LayerMoments(kShape)), output,
      pre_rope(kLayers, calibrate::LayerMoments(
                            kShape, {.keys = Rope::pre, .pairing = RopePairing::interleaved}));
  output = loss;
  for (int i = 0; i < kLayers; ++i) {
    const std::size_t at = static_cast<std::size_t>(i);
    const Rows& own = layers[at];
    const auto add = [&](const char* name, int heads, const std::vector<float>& tensor) {
      rows.add("layers." + std::to_string(i) + "." + name, {kTokens, heads, kShape.head_dim},
               tensor);
    };
    add("query", kShape.num_qo_heads, own.query);
    add("key", kShape.num_kv_heads, own.key);
    add("value", kShape.num_kv_heads, own.value);
    add("key_gradient", kShape.num_kv_heads, own.key_gradient);
    add("value_gradient", kShape.num_kv_heads, own.value_gradient);
    loss[at].coding() = calibrate::CodingStatistics(kShape, {}, 4);
    loss[at].coding().gather_sinks();
    loss[at].coding().add_gradients(keys(own.key), values(own.value), keys(own.key_gradient),
                                    values(own.value_gradient));
    output[at].coding().add(queries(own.query), keys(own.key), values(own.value), kTokens / 2);
    output[at].coding().add_residual_stream({own.query.data(), kTokens, 64});
    for (auto* moments : {&loss[at], &output[at], &pre_rope[at]})
      moments->add(queries(own.query), keys(own.key), values(own.value));
  }
  rows.write(folder + "/rows.safetensors");
  calibrate::save_moments(folder + "/loss.safetensors", loss, {{"source", "rows"}});
  calibrate::save_moments(folder + "/output.safetensors", output);
  calibrate::save_moments(folder + "/pre_rope.safetensors", pre_rope);
}

int same(const std::string& first, const std::string& second) {
  const auto a = io::Safetensors::read(first), b = io::Safetensors::read(second);
  if (a.metadata() != b.metadata() || a.tensors().size() != b.tensors().size()) {
    std::printf("%zu entries and %zu tensors, %zu and %zu\n", a.metadata().size(),
                a.tensors().size(), b.metadata().size(), b.tensors().size());
    return 1;
  }
  for (const auto& [name, info] : a.tensors()) {
    const io::TensorInfo& other = b.info(name);
    const auto left = a.values<double>(name, info.shape),
               right = b.values<double>(name, info.shape);
    if (info.dtype != other.dtype ||
        std::memcmp(left.data(), right.data(), left.size() * sizeof(double)) != 0) {
      std::printf("%s: %s and %s, or other numbers\n", name.c_str(), info.dtype.c_str(),
                  other.dtype.c_str());
      return 1;
    }
  }
  std::printf("the same %zu tensors\n", a.tensors().size());
  return 0;
}

int load(const std::string& path, const std::string& out) {
  try {
    const auto layers = calibrate::load_moments(path, kShape, kLayers);
    auto metadata = io::Safetensors::read(path).metadata();
    calibrate::save_moments(out, layers, metadata);
    std::printf("loaded\n");
    return 0;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}

/// Output of the last token's query over the rows, stored in `Cache`.
template <class Cache>
std::vector<float> outputs(const Rows& rows, const LayerBasis& basis, bool centred) {
  typename Cache::PolicySet policies;
  policies.basis.centred = centred;
  policies.quantizer.type = DType::f32;
  CacheConfig config{.shape = kShape, .max_tokens = kTokens, .full_type = DType::f32};
  config.epoch_type = DType::f32;
  Cache cache(config, basis, policies);
  cache.create(0);
  constexpr int kPrompt = kTokens - 1;
  std::vector<float> out(rows.query.size());
  cache.prefill(0, queries(rows.query).tokens(0, kPrompt), keys(rows.key).tokens(0, kPrompt),
                values(rows.value).tokens(0, kPrompt),
                {out.data(), kPrompt, kShape.num_qo_heads, kShape.head_dim});
  // The prompt itself is attended to exactly; the token behind it reads what is stored of it.
  std::vector<float> last(static_cast<std::size_t>(kShape.num_qo_heads * kShape.head_dim));
  cache.append(0, keys(rows.key).tokens(kPrompt, 1), values(rows.value).tokens(kPrompt, 1));
  cache.attend(0, queries(rows.query).tokens(kPrompt, 1),
               {last.data(), 1, kShape.num_qo_heads, kShape.head_dim});
  return last;
}

double difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return largest;
}

void attend(const std::string& rows_path, const std::string& bundle, bool centred) {
  const auto file = io::Safetensors::read(rows_path);
  const auto loaded = calibrate::load_moments(bundle, kShape, kLayers);
  double apart = 0.0, lost = 0.0;
  for (int i = 0; i < kLayers; ++i) {
    const auto tensor = [&](const char* name, int heads) {
      return file.values<float>("layers." + std::to_string(i) + "." + name,
                                {kTokens, heads, kShape.head_dim});
    };
    const Rows rows{tensor("query", kShape.num_qo_heads),
                    tensor("key", kShape.num_kv_heads),
                    tensor("value", kShape.num_kv_heads),
                    {},
                    {}};
    calibrate::LayerMoments own(kShape);
    own.add(queries(rows.query), keys(rows.key), values(rows.value));
    calibrate::BasisOptions options{.key_ratio = 0.5, .value_ratio = 0.5};
    options.policy.centred = centred;
    const auto here = outputs<StaticPCA<>>(rows, own.basis(options), centred);
    const auto there =
        outputs<StaticPCA<>>(rows, loaded[static_cast<std::size_t>(i)].basis(options), centred);
    apart = std::max(apart, difference(here, there));
    lost = std::max(lost, difference(here, outputs<FullKV<>>(rows, {}, false)));
  }
  std::printf("%.9g %.9g\n", apart, lost);
}

}  // namespace

int main(int count, char** arguments) try {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  const std::string what = given.empty() ? "" : given[0];
  if (what == "write" && given.size() == 2) return write(given[1]), 0;
  if (what == "same" && given.size() == 3) return same(given[1], given[2]);
  if (what == "load" && given.size() == 3) return load(given[1], given[2]);
  if (what == "attend" && given.size() == 4)
    return attend(given[1], given[2], given[3] == "centred"), 0;
  std::fprintf(stderr,
               "usage: write FOLDER | load BUNDLE OUT | same A B | attend ROWS BUNDLE "
               "centred|uncentred\n");
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 3;
}
