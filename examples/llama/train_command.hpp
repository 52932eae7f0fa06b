// SPDX-License-Identifier: Apache-2.0
// `lowrankkv-llama train-projector`: the command line of a training, its progress, log and files.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "star_kv_trainer.hpp"

namespace llama {

/// The options of the command, and what it does.
class TrainCommand {
 public:
  /// Adds the options but those of the model and the seed.
  void add(CLI::App* app);
  /// Trains, or goes on with what --checkpoint has, and writes --out.
  /// @param folder  the model's: it is read a second time, for the student
  void run(const Engine& engine, const std::string& folder, std::uint64_t seed);

 private:
  std::vector<std::string> texts_;
  std::string method_ = "StarKV", out_ = "star_kv.safetensors", log_, ranks_, checkpoint_;
  double checkpoint_pause_ = 30.0;
  std::string protect_ = "paper";
  bool joint_keys_ = false, head_wise_values_ = false, thresholds_follow_ = false;
  TrainOptions options_;
};

}  // namespace llama
