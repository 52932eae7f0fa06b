// SPDX-License-Identifier: Apache-2.0
// The main job: calibrate on a text, then measure every method's bytes, accuracy and speed on a
// small real model.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "program_folder.hpp"
#include "report.hpp"
#include "speed.hpp"

namespace {

/// A needle question, asked of a full and of a compressed cache: the prompt's last line and what
/// each cache answers.
void show_needle(const llama::Engine& engine, std::vector<llama::Contender>& contenders,
                 const std::vector<llama::Sample>& samples) {
  const auto sample = std::find_if(samples.begin(), samples.end(),
                                   [](const llama::Sample& s) { return s.task == "mk1"; });
  if (sample == samples.end()) return;
  const std::string prompt = engine.tokenizer.decode(sample->prompt);
  const std::size_t line = prompt.find_last_of('\n');
  std::printf(
      "\nA needle question: %zu tokens of text in which four special magic numbers are hidden, and "
      "then\n  %s\n",
      sample->prompt.size(), prompt.substr(line + 1).c_str());
  std::printf("  %-24s %s\n", "the right answer:", engine.tokenizer.decode(sample->answer).c_str());
  for (llama::Contender& contender : contenders) {
    const auto& row = contender.row;
    const bool shown = row.method == "FullKV" || (row.method == "OjaKV" && row.ratio == 0.6) ||
                       (row.method == "Budgeted" && row.ratio == 0.1);
    if (!shown) continue;
    const auto ids = llama::generate(engine, *contender.store, sample->prompt,
                                     static_cast<int>(sample->answer.size()), {}, {});
    char name[64];
    std::snprintf(name, sizeof name, "%s at %.3f of f16:", contender.row.method.c_str(),
                  contender.row.ratio_measured);
    std::printf("  %-24s %s\n", name, engine.tokenizer.decode(ids).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app{"Calibrates bases on a text and measures every method on the nano model"};
  std::string data;
  std::string out = "build/quickstart";
  int threads = 2;
  int samples = 16;
  app.add_option("--data", data, "folder with nano/ and text/; default: data beside this program")
      ->check(CLI::ExistingDirectory);
  app.add_option("--out", out, "folder for results.json, results.csv and the plot")
      ->capture_default_str();
  app.add_option("--threads", threads, "threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--samples", samples, "retrieval samples a task")
      ->check(CLI::Range(1, 50))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  if (data.empty())
    data = llama::beside(llama::this_program(), "data", "no data",
                         "name a folder with --data (examples/data of the sources)");
  std::filesystem::create_directories(out);

  const llama::Engine engine(data + "/nano", threads);
  const auto& config = engine.model.config();
  std::printf(
      "nano: %d layers, %d query heads, %d KV heads, head_dim %d; f16 K and V take %d bytes a "
      "token\n\n",
      config.num_layers, config.num_qo_heads, config.num_kv_heads, config.head_dim,
      4 * config.num_layers * config.num_kv_heads * config.head_dim);
  const llama::Calibration moments =
      llama::calibrate(engine, llama::read_text(data + "/text/calibration_prose.txt"), 98304,
                       config.max_positions, {lowrankkv::Rope::post, lowrankkv::Rope::pre});
  lowrankkv::calibrate::save_moments(out + "/bases.safetensors", moments.post_rope,
                                     {{"source", "calibration_prose"}});
  lowrankkv::calibrate::save_moments(out + "/bases_unrotated.safetensors", moments.pre_rope,
                                     {{"source", "calibration_prose"}});

  std::vector<std::string> names;
  // Of the baselines that only quantise, those of 4 bits: all eight would take minutes more.
  const std::set<std::string> left_out{"Q8_0", "Fp8", "TurboQuant3", "TurboQuant2", "Kivi2"};
  for (const llama::MethodInfo& info : llama::methods()) {
    if (!left_out.contains(info.name)) names.push_back(info.name);
  }
  auto contenders =
      llama::make_contenders(engine, names, {}, {.context = 1024}, config.max_positions, moments);
  // In the domain of the calibration text, and shifted away from it.
  llama::measure_bits_per_byte(engine, contenders, "prose",
                               llama::read_text(data + "/text/prose.txt"), 8);
  llama::measure_bits_per_byte(engine, contenders, "code",
                               llama::read_text(data + "/text/code.txt"), 8);
  const auto set = llama::load_samples(data + "/nano/eval/retrieval_1024",
                                       {"s1", "s2", "s3", "mk1", "mk2", "vt"}, samples);
  llama::measure_speed(engine, contenders, set.front().prompt, {.decode_tokens = 64, .rounds = 3});
  llama::measure_retrieval(engine, contenders, "retrieval_1024", set,
                           32);  // last: the bytes in the table are those of these prompts

  std::printf(
      "\nBytes are measured at the end of prompts of about 1000 tokens (text x: at the end of the "
      "texts' windows, 256 tokens of prompt\n"
      "and 768 decoded), everything counted. over %%: by how much the most that a method took "
      "exceeds its ratio. bpb: bits per byte (lower is better), rise %%: over FullKV, mean of "
      "both;\n"
      "s1 ... vt: retrieval, exact match in %%; tokens/s on %d threads, prefill of %zu tokens, "
      "then one token at a time, and how many times as fast as FullKV.\n\n",
      threads, set.front().prompt.size());
  std::vector<llama::Row> rows;
  for (const llama::Contender& contender : contenders) rows.push_back(contender.row);
  llama::print_table(rows);
  show_needle(engine, contenders, set);
  llama::write_json(out + "/results.json", rows);
  llama::write_csv(out + "/results.csv", rows);
  const bool drawn = llama::write_plot(out + "/accuracy_against_bytes",
                                       "nano: accuracy against measured bytes", rows);
  std::printf("\nWrote %s/results.json, results.csv, bases.safetensors%s\n", out.c_str(),
              drawn ? ", accuracy_against_bytes.svg and .png" : " (no gnuplot: no plot)");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "lowrankkv-quickstart: %s\n", error.what());
  return 1;
}
