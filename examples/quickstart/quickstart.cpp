// SPDX-License-Identifier: Apache-2.0
// The main job: calibrate on a text, then measure methods' bytes and accuracy: every method and
// its speed on nano, a few methods on a larger model.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "loss_metric.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "program_folder.hpp"
#include "report.hpp"
#include "speed.hpp"
#include "synthesize.hpp"

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

/// What the program does with a model.
struct Job {
  std::string name, folder;
  llama::Calibration calibration;
  std::vector<llama::Contender> contenders;
  std::vector<llama::Sample> samples;
  std::string set;    ///< what the samples are called
  std::string tasks;  ///< of the samples, for people
  bool timed = false;
};

/// How much of the texts is read, and how many questions are asked.
struct Size {
  std::int64_t tokens;  ///< of the calibration text
  int windows;          ///< of 1024 tokens, of each text
  int samples;          ///< of each retrieval task
};
constexpr Size kNano{98304, 8, 16}, kLarger{24576, 3, 5};

/// Every method on nano, which lies beside the texts: 8 minutes with the build, on 2 cores.
void prepare_nano(Job& job, const llama::Engine& engine, const std::string& data,
                  const Size& size) {
  const auto& config = engine.model.config();
  job.calibration =
      llama::calibrate(engine, llama::read_text(data + "/text/calibration_prose.txt"), size.tokens,
                       config.max_positions, {lowrankkv::Rope::post, lowrankkv::Rope::pre});
  std::vector<std::string> names;
  // Of the baselines that only quantise, those of 4 bits: all eight would take minutes more.
  const std::set<std::string> left_out{"Q8_0", "Fp8", "TurboQuant3", "TurboQuant2", "Kivi2"};
  for (const llama::MethodInfo& info : llama::methods()) {
    if (!info.trained && !left_out.contains(info.name)) names.push_back(info.name);
  }
  job.contenders = llama::make_contenders(engine, names, {}, {.context = 1024},
                                          config.max_positions, job.calibration);
  job.set = "retrieval_1024";
  job.tasks = "s1 ... vt";
  job.samples = llama::load_samples(data + "/nano/eval/" + job.set,
                                    {"s1", "s2", "s3", "mk1", "mk2", "vt"}, size.samples);
  job.timed = true;
}

/// A model of a hundred times as many parameters: methods that matter on it, and less of each text.
/// Bits are allocated by gradients and outputs (CodingMetric::combined).
void prepare_model(Job& job, const llama::Engine& engine, const std::string& data,
                   const Size& size) {
  const auto& config = engine.model.config();
  const int window = std::min(1024, config.max_positions - 1);
  const std::string text = llama::read_text(data + "/text/calibration_prose.txt");
  job.calibration = llama::calibrate(engine, text, size.tokens, window,
                                     {lowrankkv::Rope::post, lowrankkv::Rope::pre});
  llama::use_loss_metric(engine, engine.tokenizer.encode(text),
                         {size.tokens, window, /*sinks=*/false, /*combine=*/true, 2 * window},
                         job.calibration, nullptr);
  const std::pair<const char*, std::vector<double>> methods[] = {
      {"FullKV", {}},
      {"StarKVStatic", {0.2}},
      {"Budgeted", {0.2, 0.14, 0.1}},
      {"Budgeted+PreRoPE", {0.2, 0.14, 0.1}}};
  for (const auto& [name, ratios] : methods) {
    for (llama::Contender& contender :
         llama::make_contenders(engine, {name}, ratios, {.context = 1024},
                                std::min(2048, config.max_positions), job.calibration))
      job.contenders.push_back(std::move(contender));
  }
  job.set = "synthesized_1024";
  job.tasks = "mk1, s1, s2";
  for (llama::SyntheticSample& sample :
       llama::synthesize(engine.tokenizer, config, llama::read_text(data + "/text/prose.txt"),
                         llama::read_words(data + "/words.txt"),
                         {.tasks = {"s1", "s2", "mk1"}, .length = 1024, .samples = size.samples}))
    job.samples.push_back(std::move(sample.sample));
}

/// What the columns of the table are.
void explain_table(const Job& job, int threads) {
  std::printf(
      "\nBytes are measured at the end of prompts of about 1000 tokens (text x: at the end of the "
      "texts' windows, 256 tokens of prompt\n"
      "and 768 decoded), everything counted. over %%: by how much the most that a method took "
      "exceeds its ratio. bpb: bits per byte (lower is better), rise %%: over FullKV, mean of "
      "both;\n"
      "%s: retrieval, exact match in %%",
      job.tasks.c_str());
  if (job.timed)
    std::printf(
        "; tokens/s on %d threads, prefill of %zu tokens, then one token at a time, and how many "
        "times as fast as FullKV",
        threads, job.samples.front().prompt.size());
  std::printf(".\n\n");
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app{
      "Calibrates bases on a text and measures methods on a model: all of them on nano, or some on "
      "another"};
  std::string data, model, out;
  int threads = 2;
  Size size{0, 0, 0};
  app.add_option("--data", data, "folder with nano/ and text/; default: data beside this program")
      ->check(CLI::ExistingDirectory);
  app.add_option(
         "--model", model,
         "Hugging Face folder of another model, on which FullKV, StarKVStatic, Budgeted and "
         "Budgeted+PreRoPE are measured. quickstart.sh makes that of SmolLM2-135M-Instruct: "
         "--model smollm2")
      ->check(CLI::ExistingDirectory);
  app.add_option(
      "--out", out,
      "folder for results.json, results.csv and the plot [build/quickstart, with --model a "
      "folder in it]");
  app.add_option("--threads", threads, "threads")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--samples", size.samples, "retrieval samples a task [16, with --model 5]")
      ->check(CLI::Range(1, 50));
  app.add_option("--windows", size.windows,
                 "windows of 1024 tokens of each text [8, with --model 3]")
      ->check(CLI::Range(1, 50));
  app.add_option("--tokens", size.tokens,
                 "tokens of the calibration text [98304, with --model 24576]")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (data.empty())
    data = llama::beside(llama::this_program(), "data", "no data",
                         "name a folder with --data (examples/data of the sources)");
  const bool nano = model.empty();
  Job job;
  job.folder = nano ? data + "/nano" : model;
  job.name = std::filesystem::weakly_canonical(job.folder).filename().string();
  const Size& usual = nano ? kNano : kLarger;
  if (size.tokens == 0) size.tokens = usual.tokens;
  if (size.windows == 0) size.windows = usual.windows;
  if (size.samples == 0) size.samples = usual.samples;
  if (out.empty()) out = nano ? "build/quickstart" : "build/quickstart/" + job.name;
  std::filesystem::create_directories(out);

  const llama::Engine engine(job.folder, threads);
  const auto& config = engine.model.config();
  std::printf(
      "%s: %d layers, %d query heads, %d KV heads, head_dim %d; f16 K and V take %d bytes a "
      "token\n\n",
      job.name.c_str(), config.num_layers, config.num_qo_heads, config.num_kv_heads,
      config.head_dim, 4 * config.num_layers * config.num_kv_heads * config.head_dim);
  std::fflush(stdout);  // before minutes of progress on stderr
  if (nano)
    prepare_nano(job, engine, data, size);
  else
    prepare_model(job, engine, data, size);
  lowrankkv::calibrate::save_moments(out + "/bases.safetensors", job.calibration.post_rope,
                                     {{"source", "calibration_prose"}});
  lowrankkv::calibrate::save_moments(out + "/bases_unrotated.safetensors", job.calibration.pre_rope,
                                     {{"source", "calibration_prose"}});

  // In the domain of the calibration text, and shifted away from it.
  for (const char* name : {"prose", "code"}) {
    const std::string text =
        llama::read_text(std::string(data).append("/text/").append(name).append(".txt"));
    llama::measure_bits_per_byte(engine, job.contenders, name, text, size.windows);
  }
  if (job.timed)
    llama::measure_speed(engine, job.contenders, job.samples.front().prompt,
                         {.decode_tokens = 64, .rounds = 3});
  llama::measure_retrieval(engine, job.contenders, job.set, job.samples,
                           32);  // last: the bytes in the table are those of these prompts

  explain_table(job, threads);
  std::vector<llama::Row> rows;
  for (const llama::Contender& contender : job.contenders) rows.push_back(contender.row);
  llama::print_table(rows);
  show_needle(engine, job.contenders, job.samples);
  llama::write_json(out + "/results.json", rows);
  llama::write_csv(out + "/results.csv", rows);
  const bool drawn = llama::write_plot(out + "/accuracy_against_bytes",
                                       job.name + ": accuracy against measured bytes", rows);
  std::printf("\nWrote %s/results.json, results.csv, bases.safetensors%s\n", out.c_str(),
              drawn ? ", accuracy_against_bytes.svg and .png" : " (no gnuplot: no plot)");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "lowrankkv-quickstart: %s\n", error.what());
  return 1;
}
