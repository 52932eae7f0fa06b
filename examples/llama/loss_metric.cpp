// SPDX-License-Identifier: Apache-2.0
#include "loss_metric.hpp"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include "progress.hpp"

namespace llama {
namespace {

constexpr int kSinks = 4;  // BudgetOptions::sinks: rows that are never coded

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

}  // namespace

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
    engine.model.loss_gradients(
        tokens,
        [&](std::int64_t row, const float* probabilities) {
          return row == last ? -1 : draw(probabilities, config.vocabulary_size, random);
        },
        [&](int layer, std::int64_t n, const RowGradients& own) {
          const auto keys = [&](const float* rows) {
            return lowrankkv::KeyView(rows, n, config.num_kv_heads, config.head_dim)
                .tokens(0, context);
          };
          const auto values = [&](const float* rows) {
            return lowrankkv::ValueView(rows, n, config.num_kv_heads, config.head_dim)
                .tokens(0, context);
          };
          for (const lowrankkv::Rope form : forms) {
            if (calibration.of(form).empty()) continue;
            const bool pre = form == lowrankkv::Rope::pre;
            calibration.of(form)[static_cast<std::size_t>(layer)].coding().add_gradients(
                keys(pre ? own.rows.pre_rope_key : own.rows.key), values(own.rows.value),
                keys(pre ? own.pre_rope_key : own.key), values(own.value));
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
