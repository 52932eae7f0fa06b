// SPDX-License-Identifier: Apache-2.0
#include "train_command.hpp"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>

#include "checkpoint.hpp"
#include "lowrankkv/train/star_kv_state.hpp"
#include "progress.hpp"

namespace llama {
namespace {

namespace train = lowrankkv::train;
const std::string kLogHeader =
    "step,phase,divergence,objective,gradient_norm,kept_keys,kept_values";

const char* name_of(train::StarKvPhase phase) {
  return lowrankkv::detail::kStarKvPhases[static_cast<int>(phase)];
}

/// The lines of a log up to a step, so that a run that goes on writes each step once.
std::string log_until(const std::string& path, std::int64_t step) {
  std::string kept = kLogHeader + "\n", line;
  std::ifstream file(path);
  std::getline(file, line);
  while (std::getline(file, line))
    if (std::strtoll(line.c_str(), nullptr, 10) <= step) kept += line + "\n";
  return kept;
}

/// Ranks of every layer: of each head's keys, and of the values.
void print_ranks(const train::StarKvTraining& training) {
  std::printf("layer  rank of keys, by block; of values\n");
  for (int i = 0; i < training.num_layers(); ++i) {
    std::printf("%5d ", i);
    if (training.is_protected(i)) {
      std::printf(" protected\n");
      continue;
    }
    for (const train::StarKvFactors& block : training.layer(i).keys.blocks)
      std::printf(" %d", block.rank());
    std::printf(";");
    for (const train::StarKvFactors& block : training.layer(i).values.blocks)
      std::printf(" %d", block.rank());
    std::printf("\n");
  }
}

/// The same as a CSV file: a line a block; protected layers have none.
void write_ranks(const train::StarKvTraining& training, const std::string& path) {
  std::ofstream file(path);
  file << "layer,part,block,rank,channels\n";
  for (int i = 0; i < training.num_layers(); ++i) {
    const auto write = [&](const char* part, const train::StarKvProjection& projection) {
      for (std::size_t block = 0; block < projection.blocks.size(); ++block)
        file << i << ',' << part << ',' << block << ',' << projection.blocks[block].rank() << ','
             << projection.blocks[block].left.rows() << '\n';
    };
    write("keys", training.layer(i).keys);
    write("values", training.layer(i).values);
  }
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

std::vector<int> protected_layers(const std::string& given, int num_layers) {
  if (given == "paper") return train::paper_protected_layers(num_layers);
  std::vector<int> layers;
  if (given == "none") return layers;
  std::stringstream list(given);
  for (std::string item; std::getline(list, item, ',');) {
    std::size_t end = 0;
    int layer = -1;
    try {
      layer = std::stoi(item, &end);
    } catch (const std::exception&) {
      end = 0;
    }
    if (end != item.size() || item.empty())
      throw std::runtime_error("--protect: '" + item +
                               "', 'paper', 'none' or layers separated by commas expected");
    layers.push_back(layer);
  }
  return layers;
}

}  // namespace

void TrainCommand::add(CLI::App* app) {
  const auto number = [&](const char* name, auto& value, const char* text) {
    return app->add_option(name, value, text)->capture_default_str();
  };
  app->add_option("--text,text", texts_, "text file, or several separated by commas")
      ->delimiter(',')
      ->required()
      ->check(CLI::ExistingFile);
  number("--method", method_, "what is learned")->check(CLI::IsMember({"StarKV"}));
  number("--out", out_, "file of the trained factors, for --trained");
  app->add_option("--log", log_, "CSV file: a line a step");
  app->add_option("--ranks", ranks_, "CSV file: the ranks of every layer and block at the end");
  CLI::Option* checkpoint = app->add_option(
      "--checkpoint", checkpoint_,
      "file that is written between steps: a run that was stopped, started again with the same "
      "arguments, goes on from it, to the same bits. Removed at the end");
  number("--checkpoint-pause", checkpoint_pause_, "seconds between two such files at least")
      ->check(CLI::NonNegativeNumber)
      ->needs(checkpoint);
  number("--steps", options_.star.compress_steps, "of the first phase: thresholds rise")
      ->required()
      ->check(CLI::PositiveNumber);
  number("--recover-steps", options_.star.recover_steps, "of the second phase, thresholds fixed")
      ->check(CLI::NonNegativeNumber);
  number("--key-share", options_.star.key_share,
         "share of the keys' rank at which their thresholds stop; 0: none");
  number("--value-share", options_.star.value_share, "the same of values");
  number("--gamma", options_.star.gamma, "weight of the compression loss (eq. 5)");
  number("--sharpness", options_.star.sharpness, "s of the soft threshold (eq. 2)");
  number("--first-alpha", options_.star.first_alpha, "where thresholds begin");
  number("--protect", protect_,
         "layers that keep their weights: 'paper' (the first two and the last), 'none', or their "
         "numbers separated by commas");
  app->add_flag("--joint-keys", joint_keys_, "one block for the keys of all heads (JD)");
  app->add_flag("--head-wise-values", head_wise_values_, "a block a head for values (HD)");
  app->add_flag("--thresholds-follow", thresholds_follow_,
                "thresholds move in the second phase too");
  number("--window", options_.window, "tokens of a window");
  number("--batch", options_.batch, "windows a step");
  number("--rate", options_.rate, "AdamW's learning rate of the factors");
  number("--threshold-rate", options_.threshold_rate, "of the thresholds");
  number("--weight-decay", options_.weight_decay, "of the factors");
  number("--warmup", options_.warmup, "steps in which the rates grow from 0");
  number("--last-rate", options_.last_rate, "share of --rate at the last step, along a cosine");
  number("--clip", options_.clip, "the largest norm of a step's gradient; 0: any");
}

void TrainCommand::run(const Engine& engine, const std::string& folder, std::uint64_t seed) {
  options_.seed = seed;
  options_.star.keys = joint_keys_ ? train::Decomposition::joint : train::Decomposition::head_wise;
  options_.star.values =
      head_wise_values_ ? train::Decomposition::head_wise : train::Decomposition::joint;
  options_.star.freeze_thresholds = !thresholds_follow_;
  options_.star.protected_layers = protected_layers(protect_, engine.model.config().num_layers);
  std::vector<std::string> documents;
  for (const std::string& path : texts_) documents.push_back(read_text(path));
  Model student(folder, engine.threads);
  StarKvTrainer trainer(
      engine.model, student,
      calibration_tokens(engine, documents, std::numeric_limits<std::int64_t>::max()), options_);
  if (!checkpoint_.empty() && std::filesystem::exists(checkpoint_))
    trainer.restore(lowrankkv::io::Safetensors::read(checkpoint_));

  std::ofstream log;
  if (!log_.empty()) {
    const std::string before = log_until(log_, trainer.training().progress().step);
    log.open(log_, std::ios::trunc);
    if (!(log << before)) throw std::runtime_error("cannot write " + log_);
  }
  const std::int64_t most = options_.star.compress_steps + options_.star.recover_steps;
  const std::int64_t apart = std::max<std::int64_t>(1, most / 40);  // lines of the table
  std::printf("%8s %9s %12s %12s %9s %9s\n", "step", "phase", "KL, nats", "objective", "keys",
              "values");
  using Clock = std::chrono::steady_clock;
  Clock::time_point saved = Clock::now();
  {
    Progress progress("train-projector", most);
    progress.resume(trainer.training().progress().step);
    while (!trainer.finished()) {
      const train::StarKvPhase phase = trainer.training().progress().phase;
      const TrainStep step = trainer.step();
      const bool ends = trainer.training().progress().phase != phase;
      if (log.is_open() && !(log << step.step << ',' << name_of(phase) << ',' << step.divergence
                                 << ',' << step.objective << ',' << step.gradient_norm << ','
                                 << step.kept_keys << ',' << step.kept_values << '\n'))
        throw std::runtime_error("cannot write " + log_);
      if (step.step == 1 || step.step % apart == 0 || ends) {
        std::printf("%8lld %9s %12.5f %12.5f %9.4f %9.4f\n", static_cast<long long>(step.step),
                    name_of(phase), step.divergence, step.objective, step.kept_keys,
                    step.kept_values);
        std::fflush(stdout);
      }
      progress.step();
      const std::chrono::duration<double> since = Clock::now() - saved;
      if (!checkpoint_.empty() && (since.count() >= checkpoint_pause_ || trainer.finished())) {
        log.flush();
        write_whole(trainer.written(), checkpoint_);
        saved = Clock::now();
      }
    }
  }
  write_whole(trainer.written(), out_);
  if (!checkpoint_.empty()) std::filesystem::remove(checkpoint_);
  print_ranks(trainer.training());
  if (!ranks_.empty()) write_ranks(trainer.training(), ranks_);
  std::printf("wrote %s: %.4f of the keys' rank, %.4f of the values', %lld steps\n", out_.c_str(),
              trainer.training().kept_keys(), trainer.training().kept_values(),
              static_cast<long long>(trainer.training().progress().step));
}

}  // namespace llama
