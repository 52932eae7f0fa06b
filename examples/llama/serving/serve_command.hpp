// SPDX-License-Identifier: Apache-2.0
// `lowrankkv-llama serve-bench`: what a GPU serves, by method.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "serving/batch_model.hpp"
#include "serving/serve.hpp"

namespace llama {

/// What is served with, besides the requests.
struct ServedMethods {
  std::vector<std::string> names;
  std::vector<double> ratios;
  MethodOptions options;
  std::string json, csv;
  std::uint64_t seed = 0;
};

/// The options of the command, and what it does.
class ServeCommand {
 public:
  /// Adds the options but those of the model, the methods and the seed.
  void add(CLI::App* app);
  /// The public shape that was asked for instead of a model; empty: none.
  const std::string& shape() const { return shape_; }
  /// Serves the same requests with every method, one after the other. Prints a table, and writes
  /// the files that were asked for.
  /// @param engine  null: random weights of `config`
  void run(const Engine* engine, const Config& config, const Calibration& calibration,
           const ServedMethods& methods) const;

 private:
  struct Row;
  /// Makes the caches of a method.
  std::unique_ptr<KvStore> store_of(const BatchModel& model, const Config& config,
                                    const Calibration& calibration, const MethodOptions& options,
                                    int sequences, std::size_t pool_bytes) const;
  /// Bytes of the pages and of the slot of the longest sequence, and how many there are places for.
  struct Room {
    std::size_t pages = 0, slot = 0;
    int places = 0;
  };
  Room room_for(const BatchModel& model, const Config& config, const Calibration& calibration,
                const MethodOptions& options) const;
  Row measure(BatchModel& model, const Config& config, const Calibration& calibration,
              const MethodOptions& options, const std::vector<std::int32_t>& text,
              std::uint64_t seed) const;
  /// @param text  that prompts are parts of; empty: of drawn ids
  std::vector<Request> requests(const Config& config, std::int64_t count,
                                const std::vector<std::int32_t>& text, std::uint64_t seed) const;
  /// Most tokens that a sequence stores.
  std::int64_t most_tokens() const;
  static void print(const Row& row);
  nlohmann::ordered_json json_of(const Row& row) const;

  std::string shape_, text_, answers_;
  WeightType weights_ = WeightType::f16;
  std::int64_t count_ = 0;
  std::vector<std::int64_t> prompt_{1024}, output_{128};  // one number, or the least and the most
  double rate_ = 0.0, cancelled_ = 0.0, reserve_ = 4.0;
  int places_ = 0, parts_ = 1;
  std::int64_t chunk_ = 2048;
  bool random_prompts_ = false, one_graph_ = false;
};

}  // namespace llama
