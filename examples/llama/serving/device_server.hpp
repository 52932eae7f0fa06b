// SPDX-License-Identifier: Apache-2.0
// serve()'s sequences on a GPU: a BatchModel and its caches.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <unordered_map>
#include <vector>

#include "serving/batch_model.hpp"
#include "serving/serve.hpp"

namespace llama {

class DeviceServer final : public SequenceServer {
 public:
  struct Options {
    int most_sequences = 1;          ///< at most those that the caches were made for
    std::int64_t max_tokens = 4096;  ///< of a sequence
    /// Steps are captured for these numbers of places; a step takes the least that is enough. The
    /// same number for all gives every sequence the same bits whoever else is there: products of
    /// another number of rows may add in another order. Empty: most_sequences and every power of
    /// two below.
    std::vector<int> sizes = {};
    /// Prompts are stored as random rows of this size by channel instead of being run. Empty: they
    /// are run.
    std::vector<float> random_rows = {};
  };
  /// Captures the steps, which waits. Both are kept by reference.
  DeviceServer(BatchModel& model, DeviceCaches& caches, Options options);

  int most_sequences() const override { return options_.most_sequences; }
  std::int64_t num_pages() const override { return caches_.num_pages(); }
  std::int64_t pages_for(std::int64_t tokens) const override;
  void begin(lowrankkv::SequenceId seq) override;
  void end(lowrankkv::SequenceId seq) override;
  std::int32_t prompt(lowrankkv::SequenceId seq, std::span<const std::int32_t> tokens,
                      std::int64_t first, bool complete) override;
  void step(std::span<Turn> turns) override;
  double now() override;
  void wait(double seconds) override;

 private:
  BatchModel& model_;
  DeviceCaches& caches_;
  Options options_;
  mutable std::map<std::int64_t, std::int64_t> pages_;  // by tokens, of pages_for()
  std::unordered_map<lowrankkv::SequenceId, std::int32_t> slots_;
  std::vector<StepPlace> places_;
  std::vector<lowrankkv::SequenceId> stepping_;
};

}  // namespace llama
