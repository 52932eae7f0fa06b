// SPDX-License-Identifier: Apache-2.0
#include "loss_metric.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <vector>

#include "progress.hpp"

namespace llama {
namespace {

constexpr int kSinks = 4;  // rows that are never coded, whatever BudgetOptions::sinks is

// A label with the probabilities that a model gives: the first whose sum exceeds a random number.
std::int32_t draw(const float* probabilities, int count, std::mt19937_64& random) {
  const double limit = std::uniform_real_distribution<double>()(random);
  double sum = 0.0;
  for (std::int32_t id = 0; id < count; ++id) {
    sum += static_cast<double>(probabilities[id]);
    if (sum > limit) return id;
  }
  return static_cast<std::int32_t>(std::max_element(probabilities, probabilities + count) -
                                   probabilities);
}

// Dense rows [n, heads, head_dim] behind the sinks, which have their place at a text's beginning,
// rotated by `positions` more.
std::vector<float> rotated_further(const Config& config, const float* rows, std::int64_t n,
                                   std::int64_t positions) {
  const int dim = config.head_dim, half = dim / 2;
  const std::int64_t width = std::int64_t{config.num_kv_heads} * dim;
  std::vector<float> result(rows, rows + n * width);
  for (int i = 0; i < half; ++i) {
    const double angle =
        config.rope_frequencies[static_cast<std::size_t>(i)] * static_cast<double>(positions);
    const auto cosine = static_cast<float>(std::cos(angle));
    const auto sine = static_cast<float>(std::sin(angle));
    for (std::int64_t row = kSinks * width + i; row < n * width; row += dim) {
      float& first = result[static_cast<std::size_t>(row)];
      float& second = result[static_cast<std::size_t>(row + half)];
      const float before = first;
      first = before * cosine - second * sine;
      second = second * cosine + before * sine;
    }
  }
  return result;
}

// A window: its rows, those of them that statistics are of, and the position of its first.
struct GradientWindow {
  std::int64_t rows, context, begins;
};

// Adds a layer's rows of a window, and their gradients, with keys in this form.
void add_gradients(const Config& config, lowrankkv::Rope form, int layer,
                   const GradientWindow& window, const RowGradients& own,
                   lowrankkv::calibrate::CodingStatistics& coding) {
  const auto keys = [&](const float* rows) {
    return lowrankkv::KeyView(rows, window.rows, config.num_kv_heads, config.head_dim)
        .tokens(0, window.context);
  };
  const auto values = [&](const float* rows) {
    return lowrankkv::ValueView(rows, window.rows, config.num_kv_heads, config.head_dim)
        .tokens(0, window.context);
  };
  if (form == lowrankkv::Rope::pre) {
    coding.add_gradients(keys(own.rows.pre_rope_key), values(own.rows.value),
                         keys(own.pre_rope_key), values(own.value));
  } else if (window.begins == 0 || !config.rotates(layer)) {
    coding.add_gradients(keys(own.rows.key), values(own.rows.value), keys(own.key),
                         values(own.value));
  } else {
    const auto key = rotated_further(config, own.rows.key, window.rows, window.begins);
    const auto gradient = rotated_further(config, own.key, window.rows, window.begins);
    coding.add_gradients(keys(key.data()), values(own.rows.value), keys(gradient.data()),
                         values(own.value));
  }
}

}  // namespace

std::int64_t first_position(std::int64_t index, std::int64_t span) {
  // Multiples of the golden ratio: any number of them is spread evenly, in no order.
  const double place = static_cast<double>(index) * 0.6180339887498949;
  return static_cast<std::int64_t>((place - std::floor(place)) * static_cast<double>(span + 1));
}

void use_loss_metric(const Engine& engine, const std::string& text, std::int64_t max_tokens,
                     int window, Calibration& calibration) {
  use_loss_metric(engine, encode_documents(engine, text), {max_tokens, window}, calibration,
                  nullptr);
}

void use_loss_metric(const Engine& engine, const std::vector<std::int32_t>& ids,
                     const GradientOptions& options, Calibration& calibration,
                     Checkpoint* checkpoint) {
  const Config& config = engine.model.config();
  const std::int64_t size = static_cast<std::int64_t>(ids.size());
  const std::int64_t length = std::min<std::int64_t>(options.window, size);
  if (length < 2)
    throw std::runtime_error("calibration: the text has " + std::to_string(size) +
                             " tokens, at least 2 are expected");
  const std::int64_t windows =
      std::clamp<std::int64_t>(std::min(options.max_tokens, size) / length, 1, size / length);
  const std::vector<lowrankkv::Rope> forms = {lowrankkv::Rope::post, lowrankkv::Rope::pre};
  for (const lowrankkv::Rope form : forms) {
    calibration.outputs(form).clear();
    auto& layers = calibration.of(form);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      auto& coding = layers[i].coding();
      const lowrankkv::calibrate::CodingStatistics none(
          config.cache_shape(), config.rope(form, static_cast<int>(i)), kSinks);
      auto& kept = calibration.outputs(form);
      if (options.combine) kept.push_back(none);
      // A run that goes on has gradients in `coding`; the checkpoint has the outputs.
      if (options.combine && coding.metric() == lowrankkv::calibrate::CodingMetric::output)
        kept.back() = std::move(coding);
      coding = none;
      if (options.sinks) coding.gather_sinks();
    }
  }
  const std::int64_t copies = length / 4;
  CalibrationPlace place;
  place.gradients = true;
  if (checkpoint != nullptr) checkpoint->restore_gradients(place, calibration);
  if (place.done > windows)
    throw std::runtime_error("calibration: the checkpoint has done " + std::to_string(place.done) +
                             " windows of gradients, there are " + std::to_string(windows));
  std::mt19937_64& random = place.random;
  Progress progress("gradients", windows * length);
  progress.resume(place.done * length);
  while (place.done < windows) {
    const auto begin =
        ids.begin() + place.done * (size - length) / std::max<std::int64_t>(1, windows - 1);
    std::vector<std::int32_t> tokens(begin, begin + length - copies);
    if (config.bos >= 0) tokens.insert(tokens.begin(), config.bos);
    const std::int64_t context = static_cast<std::int64_t>(tokens.size());
    tokens = with_copies(std::move(tokens), static_cast<std::size_t>(context),
                         static_cast<std::size_t>(copies), random);
    const std::int64_t last = static_cast<std::int64_t>(tokens.size()) - 1;
    const std::int64_t begins = first_position(
        place.done, std::max<std::int64_t>(0, options.positions - std::ssize(tokens)));
    engine.model.loss_gradients(
        tokens,
        [&](std::int64_t row, const float* probabilities) {
          return row == last ? -1 : draw(probabilities, config.vocabulary_size, random);
        },
        [&](int layer, std::int64_t n, const RowGradients& own) {
          for (const lowrankkv::Rope form : forms) {
            if (!calibration.of(form).empty())
              add_gradients(config, form, layer, {n, context, begins}, own,
                            calibration.of(form)[static_cast<std::size_t>(layer)].coding());
          }
        });
    ++place.done;
    progress.step(length);
    if (checkpoint != nullptr) checkpoint->save(place, calibration, place.done == windows);
  }
  if (!options.combine) return;
  for (const lowrankkv::Rope form : forms) {
    for (std::size_t layer = 0; layer < calibration.of(form).size(); ++layer)
      calibration.of(form)[layer].coding().combine(calibration.outputs(form)[layer]);
    calibration.outputs(form).clear();
  }
}

}  // namespace llama
