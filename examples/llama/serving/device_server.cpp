// SPDX-License-Identifier: Apache-2.0
#include "serving/device_server.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace llama {

DeviceServer::DeviceServer(BatchModel& model, DeviceCaches& caches, Options options)
    : model_(model), caches_(caches), options_(std::move(options)) {
  if (options_.sizes.empty()) {
    for (int size = 1; size < options_.most_sequences; size *= 2) options_.sizes.push_back(size);
    options_.sizes.push_back(options_.most_sequences);
  }
  std::sort(options_.sizes.begin(), options_.sizes.end());
  if (options_.sizes.front() < 1 || options_.sizes.back() != options_.most_sequences)
    throw std::runtime_error("steps of " + std::to_string(options_.sizes.front()) + " to " +
                             std::to_string(options_.sizes.back()) +
                             " places, 1 at least and most_sequences " +
                             std::to_string(options_.most_sequences) + " at most expected");
  model_.capture(caches_, options_.sizes, options_.max_tokens);
}

std::int64_t DeviceServer::pages_for(std::int64_t tokens) const {
  const auto [entry, added] = pages_.try_emplace(tokens, 0);
  if (added) entry->second = caches_.pages_for(tokens);
  return entry->second;
}

void DeviceServer::begin(lowrankkv::SequenceId seq) {
  caches_.create(seq);
  slots_[seq] = caches_.slot(seq);
}
void DeviceServer::end(lowrankkv::SequenceId seq) {
  slots_.erase(seq);
  caches_.erase(seq);
}

std::int32_t DeviceServer::prompt(lowrankkv::SequenceId seq, std::span<const std::int32_t> tokens,
                                  std::int64_t first, bool complete) {
  if (options_.random_rows.empty()) return model_.prompt(caches_, seq, tokens, first, complete);
  if (!complete || first != 0)
    throw std::runtime_error("random prompts: a part that begins at " + std::to_string(first) +
                             ", whole prompts expected: prompt chunks of their length");
  model_.store_random(caches_, seq, static_cast<std::int64_t>(tokens.size()), options_.random_rows);
  return tokens.back();
}

void DeviceServer::step(std::span<Turn> turns) {
  const auto size = *std::lower_bound(options_.sizes.begin(), options_.sizes.end(),
                                      static_cast<int>(turns.size()));
  places_.assign(static_cast<std::size_t>(size), StepPlace{});
  stepping_.clear();
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto position = static_cast<std::int32_t>(caches_.num_tokens(turns[i].seq));
    places_[i] = {slots_.at(turns[i].seq), turns[i].token, position};
    stepping_.push_back(turns[i].seq);
  }
  caches_.advance(stepping_);
  model_.begin_step(places_);
  caches_.maintain(stepping_);  // enqueued while the step runs
  const std::span<const std::int32_t> next = model_.end_step();
  for (std::size_t i = 0; i < turns.size(); ++i) turns[i].token = next[i];
}

double DeviceServer::now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void DeviceServer::wait(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace llama
