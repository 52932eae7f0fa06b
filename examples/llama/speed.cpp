// SPDX-License-Identifier: Apache-2.0
#include "speed.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <utility>

#include "progress.hpp"

namespace llama {
namespace {

using Ids = std::vector<std::int32_t>;
constexpr lowrankkv::SequenceId kSequence = 0;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// What a row says of the seconds of its rounds.
Speed speed_of(std::size_t tokens, std::vector<double> seconds) {
  return {static_cast<double>(tokens) / median(seconds), 0.0, std::move(seconds)};
}

/// The median over the rounds of how many times as fast as `baseline` a contender was.
double paired(const Speed& own, const Speed& baseline) {
  std::vector<double> times;
  for (std::size_t round = 0; round < own.seconds.size(); ++round)
    times.push_back(baseline.seconds[round] / own.seconds[round]);
  return median(std::move(times));
}

void check(const Config& config, std::size_t prompt, const SpeedOptions& options) {
  if (prompt == 0) throw std::runtime_error("speed: a prompt of 0 tokens, at least 1 is needed");
  if (options.decode_tokens < 1 || options.rounds < 1) {
    throw std::runtime_error("speed: " + std::to_string(options.decode_tokens) +
                             " decode steps in " + std::to_string(options.rounds) +
                             " rounds, at least 1 of each is needed");
  }
  if (prompt + static_cast<std::size_t>(options.decode_tokens) >
      static_cast<std::size_t>(config.max_positions)) {
    throw std::runtime_error("speed: a prompt of " + std::to_string(prompt) + " tokens and " +
                             std::to_string(options.decode_tokens) +
                             " decode steps, the model has " +
                             std::to_string(config.max_positions) + " positions");
  }
}

/// Decode steps of one token, with their logits. The tokens are those of the prompt again.
void decode_steps(const Engine& engine, KvStore& store, const Ids& prompt, int steps) {
  for (int i = 0; i < steps; ++i) {
    const std::vector<float> hidden =
        decode(engine, store, kSequence, {prompt[static_cast<std::size_t>(i) % prompt.size()]});
    engine.model.logits(hidden, 0, 1);
  }
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) throw std::runtime_error("median: 0 values, at least 1 is needed");
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

Ids drawn_tokens(const Config& config, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Ids tokens;
  while (static_cast<std::int64_t>(tokens.size()) < count)
    tokens.push_back(
        static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(config.vocabulary_size)));
  if (count > 0 && config.bos >= 0) tokens.front() = config.bos;
  return tokens;
}

void measure_speed(const Engine& engine, std::vector<Contender>& contenders, const Ids& prompt,
                   const SpeedOptions& options) {
  check(engine.model.config(), prompt.size(), options);
  const std::size_t count = contenders.size();
  // Weights and kernels are where they will be from the first round on.
  const std::size_t few = std::min<std::size_t>(prompt.size(), 32);
  for (Contender& contender : contenders) {
    contender.store->create(kSequence);
    prefill(engine, *contender.store, kSequence,
            Ids(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(few)));
    decode_steps(engine, *contender.store, prompt, 1);
    contender.store->erase(kSequence);
  }
  std::vector<std::vector<double>> prompt_seconds(count), decode_seconds(count);
  Progress progress("speed, " + std::to_string(prompt.size()) + " tokens",
                    static_cast<std::int64_t>(count) * options.rounds);
  for (int round = 0; round < options.rounds; ++round) {
    for (std::size_t turn = 0; turn < count; ++turn) {
      const std::size_t c = (static_cast<std::size_t>(round) + turn) % count;
      KvStore& store = *contenders[c].store;
      store.create(kSequence);
      auto start = std::chrono::steady_clock::now();
      prefill(engine, store, kSequence, prompt);
      prompt_seconds[c].push_back(seconds_since(start));
      note_memory(engine, contenders[c]);
      start = std::chrono::steady_clock::now();
      decode_steps(engine, store, prompt, options.decode_tokens);
      decode_seconds[c].push_back(seconds_since(start));
      note_excess(engine, contenders[c]);
      store.erase(kSequence);
      progress.step();
    }
  }
  for (std::size_t c = 0; c < count; ++c) {
    contenders[c].row.prompt_tokens = static_cast<std::int64_t>(prompt.size());
    contenders[c].row.prefill = speed_of(prompt.size(), std::move(prompt_seconds[c]));
    contenders[c].row.decode =
        speed_of(static_cast<std::size_t>(options.decode_tokens), std::move(decode_seconds[c]));
  }
  const auto full =
      std::find_if(contenders.begin(), contenders.end(),
                   [](const Contender& contender) { return contender.row.method == "FullKV"; });
  if (full == contenders.end()) return;
  for (Contender& contender : contenders) {
    contender.row.prefill.times_full = paired(contender.row.prefill, full->row.prefill);
    contender.row.decode.times_full = paired(contender.row.decode, full->row.decode);
  }
}

std::vector<Row> measure_speed_at(const Engine& engine, std::vector<std::string> names,
                                  const std::vector<double>& ratios, const MethodOptions& method,
                                  const Calibration& calibration,
                                  const std::vector<std::int64_t>& lengths, const Ids& tokens,
                                  const SpeedOptions& options) {
  if (std::find(names.begin(), names.end(), "FullKV") == names.end())
    names.insert(names.begin(), "FullKV");
  for (const std::int64_t length : lengths) {  // before anything takes time
    if (length < 1 || length > static_cast<std::int64_t>(tokens.size()))
      throw std::runtime_error("speed: a prompt of " + std::to_string(length) +
                               " tokens, there are " + std::to_string(tokens.size()));
    check(engine.model.config(), static_cast<std::size_t>(length), options);
  }
  std::vector<Row> rows;
  for (const std::int64_t length : lengths) {
    MethodOptions at = method;
    if (at.context == 0) at.context = length;
    std::vector<Contender> contenders =
        make_contenders(engine, names, ratios, at, length + options.decode_tokens, calibration);
    measure_speed(engine, contenders, Ids(tokens.begin(), tokens.begin() + length), options);
    for (Contender& contender : contenders) rows.push_back(std::move(contender.row));
  }
  return rows;
}

}  // namespace llama
