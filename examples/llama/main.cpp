// SPDX-License-Identifier: Apache-2.0
// lowrankkv-llama: a Llama-architecture model on the CPU over a compressed KV cache.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <stdexcept>

#include "checkpoint.hpp"
#include "evaluate.hpp"
#include "json_file.hpp"
#include "loss_metric.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/version.hpp"
#include "report.hpp"
#include "serving/random_shape.hpp"
#include "serving/serve_command.hpp"
#include "speed.hpp"
#include "star_kv_trainer.hpp"
#include "synthesize.hpp"
#include "train_command.hpp"

namespace {

/// What the subcommands have in common.
struct Options {
  std::string model;
  std::vector<std::string> methods{"OjaKV"};
  std::vector<double> ratios{0.6};
  std::vector<std::string> bases;
  std::string trained;                         // what train-projector wrote
  std::vector<lowrankkv::LayerBasis> star_kv;  // its maps
  std::string json;
  std::string csv;
  int threads = 2;
  std::uint64_t seed = 0;
  llama::MethodOptions method;

  CLI::Option* add_model(CLI::App* app) {
    CLI::Option* folder =
        app->add_option("--model", model,
                        "Hugging Face folder: config.json, *.safetensors, tokenizer.json")
            ->required()
            ->check(CLI::ExistingDirectory);
    app->add_option("--threads", threads, "threads")
        ->check(CLI::Range(1, 256))
        ->capture_default_str();
    return folder;
  }
  /// Only where something is drawn; everything else is deterministic.
  CLI::Option* add_seed(CLI::App* app, const std::string& drawn) {
    return app->add_option("--seed", seed, "seed of " + drawn)->capture_default_str();
  }
  void add_method(CLI::App* app) {
    app->add_option("--json", json, "write the table's rows to this file");
    app->add_option("--csv", csv, "write the table's rows to this file, with commas between");
    app->add_option("--method", methods, "method, or several separated by commas (see 'methods')")
        ->delimiter(',')
        ->capture_default_str();
    app->add_option("--ratio", ratios,
                    "what a method calls ratio (see 'methods'), or several separated by commas")
        ->delimiter(',')
        ->check(CLI::Range(0.001, 1.0))
        ->capture_default_str();
    app->add_option("--bases", bases,
                    "bundle written by 'calibrate', or two separated by a comma, of post-RoPE and "
                    "of pre-RoPE keys; every method but those that choose tokens needs one")
        ->delimiter(',')
        ->check(CLI::ExistingFile);
    app->add_option("--trained", trained,
                    "file of train-projector: its weights of keys and values take the place of the "
                    "model's, for every method, and StarKV has its ranks")
        ->check(CLI::ExistingFile);
    const std::map<std::string, lowrankkv::DType> types{{"f32", lowrankkv::DType::f32},
                                                        {"f16", lowrankkv::DType::f16},
                                                        {"bf16", lowrankkv::DType::bf16}};
    app->add_option("--storage", method.storage, "type of coefficients and full rows")
        ->transform(CLI::CheckedTransformer(types))
        ->option_text("f32|f16|bf16 [f16]");
    const std::map<std::string, llama::KeyBasis> keys{
        {"keys", llama::KeyBasis::keys},
        {"queries-and-keys", llama::KeyBasis::queries_and_keys},
        {"query-aware", llama::KeyBasis::query_aware}};
    app->add_option("--key-basis", method.key_basis, "rows that key bases are fitted to")
        ->transform(CLI::CheckedTransformer(keys))
        ->option_text("keys|queries-and-keys|query-aware [queries-and-keys]");
    app->add_option("--context", method.context,
                    "tokens at which methods that think in bytes or windows meet their ratio; "
                    "default: bpb and kl their windows', retrieve its first prompt's, speed its "
                    "prompt's, generate "
                    "those of prompt and answer, but at least 2048 or the model's context if that "
                    "is less")
        ->check(CLI::PositiveNumber);
    add_coding(app);
    app->add_flag("--pre-rope", method.pre_rope,
                  "store keys before their rotary embedding (bases: calibrate --pre-rope-out)");
    const std::map<std::string, bool> devices{{"cpu", false}, {"cuda", true}};
    app->add_option("--device", method.on_gpu, "where the model is computed and its cache is")
        ->transform(CLI::CheckedTransformer(devices))
        ->option_text("cpu|cuda [cpu]");
    app->add_flag("--centred,!--uncentred", method.centred,
                  "subtract the calibrated means, or do not, as the papers do [--centred]");
    app->add_option("--prefill-rate", method.prefill_rate, "Oja's rate on the prompt")
        ->check(CLI::NonNegativeNumber);
    app->add_option("--publish-interval", method.publish_interval,
                    "rows between two epochs of a sequence; 0: the library's default")
        ->check(CLI::NonNegativeNumber);
    app->add_option("--prefill-chunk", method.prefill_chunk,
                    "prompt tokens compressed at a time; 0: the whole prompt")
        ->check(CLI::NonNegativeNumber);
    app->add_option("--decode-rate", method.decode_rate, "Oja's rate while decoding")
        ->check(CLI::NonNegativeNumber);
  }
  /// Which rows stay at full rank, and what codes Budgeted may choose.
  void add_coding(CLI::App* app) {
    app->add_option("--sinks", method.sinks,
                    "first tokens at full rank, for the methods that keep some with --recent last "
                    "ones (StarKV and SubSpaceA: none of either in their papers)")
        ->check(CLI::NonNegativeNumber);
    app->add_option("--recent", method.recent,
                    "last tokens at full rank, beside those that wait for a flush")
        ->check(CLI::NonNegativeNumber);
    app->add_option("--outliers", method.outlier_share,
                    "share of tokens at full rank because of their error (OjaKVv2, Budgeted)")
        ->check(CLI::Range(0.0, 1.0));
    app->add_option("--early-outliers", method.early_outliers,
                    "so many of the first 128 tokens at full rank because of their error "
                    "(Budgeted)")
        ->check(CLI::Range(0, 128));
    const std::map<std::string, int> row_bits{
        {"8", 8}, {"16", 0}, {"choose", llama::MethodOptions::kChooseRowBits}};
    app->add_option("--full-row-bits", method.full_row_bits, "bits of rows at full rank (Budgeted)")
        ->transform(CLI::CheckedTransformer(row_bits))
        ->option_text("8|16|choose: by layer [choose]");
    app->add_option("--unit-bits", method.unit_bits,
                    "Budgeted on the GPU: what a unit of 32 planes of codes counts besides its "
                    "bits; more make units fewer")
        ->check(CLI::Range(0.0, 1024.0));
    app->add_option("--widths", method.widths,
                    "Budgeted: bits that a channel may have besides 0, ascending, separated by "
                    "commas; default: 1,2,3,4,5,6,8")
        ->delimiter(',')
        ->check(CLI::Range(1, 8));
    app->add_flag(
        "--cpu-codes", method.cpu_codes,
        "Budgeted on the GPU: channels, widths and pages are chosen as on the CPU, so that "
        "codes are the same; the GPU stores them in more bytes than asked for");
  }
  llama::Calibration calibration(const llama::Engine& engine) const {
    llama::Calibration calibration = llama::load_bases(engine, bases);
    calibration.star_kv = star_kv;
    return calibration;
  }
  /// @param context  tokens at which methods that think in bytes meet their ratio
  std::vector<llama::Contender> contenders(const llama::Engine& engine, std::int64_t max_tokens,
                                           std::int64_t context) const {
    llama::MethodOptions options = method;
    if (options.context == 0) options.context = context;
    return llama::make_contenders(engine, methods, ratios, options, max_tokens,
                                  calibration(engine));
  }
};

std::vector<llama::Row> rows_of(const std::vector<llama::Contender>& contenders) {
  std::vector<llama::Row> rows;
  for (const llama::Contender& contender : contenders) rows.push_back(contender.row);
  return rows;
}

/// Says where more bytes were used than asked for, and writes --json and --csv.
void close(const Options& options, const std::vector<llama::Row>& rows) {
  for (const std::string& line : llama::excess_warnings(rows))
    std::fprintf(stderr, "%s\n", line.c_str());
  if (!options.json.empty()) llama::write_json(options.json, rows);
  if (!options.csv.empty()) llama::write_csv(options.csv, rows);
}

void finish(const Options& options, const std::vector<llama::Row>& rows) {
  llama::print_table(rows);
  std::fflush(stdout);  // before warnings, where both go to one file
  close(options, rows);
}

/// Writes the bundle of one form of the keys.
void save(const std::string& path, const std::vector<lowrankkv::calibrate::LayerMoments>& moments,
          const std::string& source) {
  lowrankkv::calibrate::save_moments(path, moments, {{"source", source}});
  std::printf("wrote %s: %s keys, %zu layers, %.0f tokens\n", path.c_str(),
              moments.front().rope().keys == lowrankkv::Rope::pre ? "pre-RoPE" : "post-RoPE",
              moments.size(), moments.front().head(0).key.count);
}

/// What `bpb` and `kl` are measured on.
struct TextOptions {
  std::vector<std::string> texts;
  int most = 64;
  llama::WindowShape shape;
  CLI::Option* decoded_given = nullptr;

  void add(CLI::App* app) {
    // Whether they exist is seen when they are read: the value behind an option that is not known
    // is one of them too, and the option is what the error has to name.
    app->add_option("--text,text", texts,
                    "text files, and folders whose *.txt are; several one after the other")
        ->required();
    app->add_option("--windows", most, "windows of each text at most")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    app->add_option("--window", shape.tokens, "tokens of a window, at most the model's context")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    decoded_given = app->add_option("--decoded", shape.decoded,
                                    "tokens at a window's end that are decoded and scored; the "
                                    "others are its prompt; default: 768, or three quarters of a "
                                    "window of fewer than 1024")
                        ->check(CLI::PositiveNumber);
  }
  llama::WindowShape window() const {
    llama::WindowShape given = shape;
    if (decoded_given->count() == 0) given.decoded = std::min(shape.decoded, shape.tokens * 3 / 4);
    return given;
  }
};

/// "%016llx" of a checksum.
std::string hexadecimal(std::uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

/// What a checkpoint of `calibrate` is of.
struct CalibrateOptions {
  std::vector<std::string> texts;
  std::int64_t tokens = 98304, gradient_tokens = 40960;
  int window = 0, gradient_window = 0;
  std::string metric = "output";
  bool sinks = false;
  std::vector<lowrankkv::Rope> forms;

  bool has_gradients() const { return metric != "output"; }
  llama::Checkpoint::Job job(const llama::Engine& engine,
                             const std::vector<std::int32_t>& all_tokens) const {
    llama::Checkpoint::Job job{
        {"program", std::to_string(LOWRANKKV_VERSION_MAJOR) + "." +
                        std::to_string(LOWRANKKV_VERSION_MINOR) + "." +
                        std::to_string(LOWRANKKV_VERSION_PATCH)},
        {"model", hexadecimal(engine.model.fingerprint())},
        {"text", std::to_string(all_tokens.size()) + " tokens, " +
                     hexadecimal(lowrankkv::checksum(std::as_bytes(std::span(all_tokens))))},
        {"tokens", std::to_string(tokens)},
        {"window", std::to_string(window)},
        {"metric", metric},
        {"keys", forms.size() == 2                       ? "post_rope and pre_rope"
                 : forms.front() == lowrankkv::Rope::pre ? "pre_rope"
                                                         : "post_rope"}};
    if (!has_gradients()) return job;
    job["gradient_tokens"] = std::to_string(gradient_tokens);
    job["gradient_window"] = std::to_string(gradient_window);
    job["sinks"] = sinks ? "yes" : "no";
    return job;
  }
};

std::string file_stem(const std::string& path) {
  const std::size_t slash = path.find_last_of('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  return name.substr(0, name.find_last_of('.'));
}

struct CheckpointOptions {
  std::string path;
  double pause = 30.0;
};

/// Calibrates with texts and writes a bundle of each form of the keys, the second, if there is one,
/// to `pre_rope_out`.
void run_calibration(const llama::Engine& engine, CalibrateOptions options,
                     const CheckpointOptions& checkpointing, const std::string& out,
                     const std::string& pre_rope_out) {
  using lowrankkv::calibrate::CodingMetric;
  const int positions = engine.model.config().max_positions;
  if (options.window == 0) options.window = positions;
  options.gradient_tokens = std::min(options.gradient_tokens, options.tokens);
  options.gradient_window = std::min(1024, positions - 1);
  std::vector<std::string> documents;
  std::string source;
  for (const std::string& path : options.texts) {
    documents.push_back(llama::read_text(path));
    source += (source.empty() ? "" : ",") + file_stem(path);
  }
  const std::vector<std::int32_t> all =
      llama::calibration_tokens(engine, documents, std::numeric_limits<std::int64_t>::max());
  std::optional<llama::Checkpoint> checkpoint;
  if (!checkpointing.path.empty())
    checkpoint.emplace(checkpointing.path, options.job(engine, all), checkpointing.pause);
  llama::Checkpoint* const kept = checkpoint ? &*checkpoint : nullptr;
  llama::Calibration moments = llama::calibrate(
      engine, llama::calibration_tokens(engine, documents, options.tokens), options.window,
      options.forms, options.metric == "loss" ? CodingMetric::loss : CodingMetric::output, kept);
  if (options.has_gradients())
    llama::use_loss_metric(engine, all,
                           {options.gradient_tokens, options.gradient_window, options.sinks,
                            options.metric == "combined", options.window},
                           moments, kept);
  save(out, moments.of(options.forms.front()), source);
  if (!pre_rope_out.empty()) save(pre_rope_out, moments.pre_rope, source);
  if (checkpoint) checkpoint->remove();
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app{"A Llama-architecture model over lowrankkv's compressed KV cache"};
  app.require_subcommand(1);
  Options options;

  CLI::App* generate = app.add_subcommand("generate", "continue a prompt");
  std::string prompt;
  int max_tokens = 64;
  llama::Sampling sampling;
  options.add_model(generate);
  options.add_method(generate);
  generate->add_option("--prompt", prompt, "text; '-' reads standard input")->required();
  generate->add_option("--max-tokens", max_tokens, "tokens to generate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  generate->add_option("--temperature", sampling.temperature, "0 is greedy")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  const CLI::Option* nucleus =
      generate->add_option("--top-p", sampling.top_p, "nucleus, with a --temperature above 0")
          ->check(CLI::Range(0.0, 1.0))
          ->capture_default_str();
  const CLI::Option* sampling_seed =
      options.add_seed(generate, "what is drawn with a --temperature above 0");

  CLI::App* bpb = app.add_subcommand("bpb", "bits per byte of texts");
  TextOptions bpb_texts;
  options.add_model(bpb);
  options.add_method(bpb);
  bpb_texts.add(bpb);

  CLI::App* kl = app.add_subcommand(
      "kl", "divergence of next-token distributions from FullKV's, and bits per byte, of texts");
  TextOptions kl_texts;
  options.add_model(kl);
  options.add_method(kl);
  kl_texts.add(kl);

  CLI::App* retrieve = app.add_subcommand(
      "retrieve", "exact match on an evaluation set, or string match on RULER's samples");
  std::string eval;
  std::string ruler;
  std::vector<std::string> tasks;
  int samples = 50;
  int tail = 32;
  options.add_model(retrieve);
  options.add_method(retrieve);
  CLI::Option* eval_given =
      retrieve->add_option("--eval", eval, "prefix of the set's .json and .bin");
  retrieve
      ->add_option("--ruler", ruler,
                   "samples that RULER's prepare.py wrote: its --save_dir, or one file *.jsonl")
      ->check(CLI::ExistingPath)
      ->excludes(eval_given);
  retrieve->add_option("--tasks", tasks, "tasks separated by commas; default: all")->delimiter(',');
  retrieve->add_option("--samples", samples, "samples a task")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  retrieve->add_option("--tail", tail, "prompt tokens that are processed after compression")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();

  std::string text;
  CLI::App* speed = app.add_subcommand(
      "speed", "tokens/s of prompts and of decode steps, paired with FullKV in one run");
  std::vector<std::int64_t> contexts{1024};
  llama::SpeedOptions timing;
  options.add_model(speed);
  options.add_method(speed);
  speed->add_option("--contexts", contexts, "tokens of the prompt, or several separated by commas")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  speed->add_option("--decode-tokens", timing.decode_tokens, "steps of one token behind a prompt")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  speed->add_option("--repeats", timing.rounds, "repeats, of which the median counts")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI::Option* prompt_text =
      speed
          ->add_option(
              "--text,text", text,
              "text file whose beginning prompts are; default: ids drawn from the vocabulary")
          ->check(CLI::ExistingFile);
  options.add_seed(speed, "ids drawn from the vocabulary")->excludes(prompt_text);

  CLI::App* serving = app.add_subcommand(
      "serve-bench", "requests served together on a GPU: tokens/s, latencies, sequences that fit");
  llama::ServeCommand serve_command;
  CLI::Option* served_model = options.add_model(serving);
  options.add_method(serving);
  serve_command.add(serving);
  options.add_seed(serving, "requests, and with --shape of weights");
  served_model->required(false);
  for (const char* of_model : {"--model", "--bases", "--trained", "--threads"})
    serving->get_option("--shape")->excludes(serving->get_option(of_model));

  CLI::App* calibrate = app.add_subcommand(
      "calibrate", "moments of a text's queries, keys and values, from which every basis follows");
  std::string out = "bases.safetensors";
  CalibrateOptions calibration;
  CheckpointOptions checkpoint;
  options.add_model(calibrate);
  bool from_weights = false;
  CLI::Option* calibration_text = calibrate
                                      ->add_option("--text,text", calibration.texts,
                                                   "text file, or several separated by commas")
                                      ->delimiter(',')
                                      ->check(CLI::ExistingFile);
  calibrate
      ->add_flag("--from-weights", from_weights,
                 "no text: statistics of pre-RoPE keys and of values from the projections' "
                 "weights (low-rank methods with --pre-rope)")
      ->excludes(calibration_text);
  calibrate->add_option("--out", out, "bundle to write")->capture_default_str();
  calibrate
      ->add_option("--tokens", calibration.tokens,
                   "tokens at most, the same share of each text, from its beginning on")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  calibrate
      ->add_option("--window", calibration.window,
                   "tokens of a window; default: the model's context")
      ->check(CLI::Range(2, 1 << 20));
  const CLI::Option* metric_given =
      calibrate
          ->add_option(
              "--metric", calibration.metric,
              "what an error in a row costs, for Budgeted: a layer's output, by forward passes "
              "alone; the model's loss, by back-propagation; or the mean of both")
          ->check(CLI::IsMember({"combined", "loss", "output"}))
          ->capture_default_str();
  const CLI::Option* gradients_given =
      calibrate
          ->add_option("--gradient-tokens", calibration.gradient_tokens,
                       "tokens that gradients are of, at most, and at most --tokens: windows of "
                       "1024, spread evenly over all texts")
          ->check(CLI::PositiveNumber)
          ->capture_default_str();
  calibrate->add_flag(
      "--sinks", calibration.sinks,
      "moments and gradients of the first 4 rows of each window too, apart from the "
      "others, for other tools (with gradients)");
  CLI::Option* checkpoint_given = calibrate->add_option(
      "--checkpoint", checkpoint.path,
      "file that is written between windows: a run that was stopped, started again with the same "
      "arguments, goes on from it. Removed at the end");
  calibrate
      ->add_option("--checkpoint-pause", checkpoint.pause,
                   "seconds between two such files at least")
      ->check(CLI::NonNegativeNumber)
      ->needs(checkpoint_given)
      ->capture_default_str();

  bool pre_rope = false;
  CLI::Option* pre_rope_alone = calibrate->add_flag(
      "--pre-rope", pre_rope, "statistics of keys before their rotary embedding, and no others");
  std::string pre_rope_out;
  calibrate
      ->add_option("--pre-rope-out", pre_rope_out,
                   "a second bundle, of keys before their rotary embedding, in the same pass")
      ->excludes(pre_rope_alone);

  CLI::App* training = app.add_subcommand(
      "train-projector", "ranks of keys and values, learned from a text by back-propagation");
  llama::TrainCommand train_command;
  options.add_model(training);
  train_command.add(training);
  options.add_seed(training, "which windows of the text a step sees");

  CLI::App* synthesize = app.add_subcommand(
      "synthesize", "fresh samples of the retrieval tasks, to tune constants on");
  llama::SynthesisOptions synthesis;
  std::string words;
  std::string prefix;
  options.add_model(synthesize);
  synthesize->add_option("--text,text", text, "text file of which haystacks are slices")
      ->required()
      ->check(CLI::ExistingFile);
  synthesize
      ->add_option("--words", words,
                   "file of words for keys and phrases; default: words.txt beside this program")
      ->check(CLI::ExistingFile);
  synthesize->add_option("--length", synthesis.length, "tokens of a sample")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  synthesize->add_option("--samples", synthesis.samples, "samples a task")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  synthesize->add_option("--tasks", synthesis.tasks, "tasks separated by commas; default: all")
      ->delimiter(',');
  synthesize->add_option("--out", prefix, "prefix of the .json and .bin to write")->required();
  options.add_seed(synthesize, "all that samples have at random");

  CLI::App* methods = app.add_subcommand("methods", "what --method can name");
  methods->add_option("--json", options.json, "write the list to this file");
  CLI11_PARSE(app, argc, argv);

  if (methods->parsed()) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const llama::MethodInfo& info : llama::methods()) {
      std::printf("%-16s %s\n%-16s   %s\n", info.name.c_str(), info.description.c_str(), "",
                  info.ratio.empty() ? "no --ratio" : ("--ratio: " + info.ratio).c_str());
      list.push_back(
          {{"method", info.name}, {"ratio", info.ratio}, {"description", info.description}});
    }
    if (!options.json.empty() && !(std::ofstream(options.json) << list.dump(2) << '\n'))
      throw std::runtime_error("cannot write " + options.json);
    return 0;
  }
  if (serving->parsed()) {
    if (serving->get_option("--device")->count() > 0 && !options.method.on_gpu)
      throw std::runtime_error("serve-bench: --device cpu, cuda expected");
    options.method.on_gpu = true;
  }
  if (options.method.cpu_codes && !options.method.on_gpu)
    throw std::runtime_error("--cpu-codes with --device cpu, where there are no others");
  if (sampling_seed->count() > 0 && sampling.temperature == 0.0F)
    throw std::runtime_error("generate: --seed " + std::to_string(options.seed) +
                             " with --temperature 0, which draws nothing");
  if (nucleus->count() > 0 && sampling.temperature == 0.0F)
    throw std::runtime_error("generate: --top-p " + nucleus->results().front() +
                             " with --temperature 0, which draws nothing");
  const auto served = [&] {
    return llama::ServedMethods{options.methods, options.ratios, options.method,
                                options.json,    options.csv,    options.seed};
  };
  if (serving->parsed() && !serve_command.shape().empty()) {
    const llama::Config config = llama::shape_of(serve_command.shape());
    const bool unrotated_keys =
        options.method.pre_rope ||
        std::any_of(options.methods.begin(), options.methods.end(),
                    [](const std::string& name) { return llama::find_method(name).pre_rope; });
    serve_command.run(nullptr, config, llama::random_calibration(config, unrotated_keys), served());
    return 0;
  }
  if (serving->parsed() && options.model.empty())
    throw std::runtime_error("serve-bench: --model or --shape is needed");
  if (synthesize->parsed() && words.empty()) words = llama::words_beside(llama::this_program());
  llama::Engine engine(options.model, options.threads);
  if (!options.trained.empty())
    options.star_kv = llama::use_trained_weights(options.trained, engine.model);
  if (serving->parsed()) {
    serve_command.run(&engine, engine.model.config(), options.calibration(engine), served());
    return 0;
  }
  if (options.method.on_gpu) engine.model.compute_on_gpu();
  if (calibrate->parsed()) {
    if (calibration.texts.empty() && !from_weights)
      throw std::runtime_error("calibrate: --text or --from-weights is needed");
    if (gradients_given->count() > 0 && !calibration.has_gradients())
      throw std::runtime_error("calibrate: --gradient-tokens " +
                               std::to_string(calibration.gradient_tokens) + " with --metric " +
                               calibration.metric + ", which has no gradients");
    if (calibration.sinks && !calibration.has_gradients())
      throw std::runtime_error("calibrate: --sinks with --metric " + calibration.metric +
                               ", which has no gradients");
    if (from_weights) {
      if (metric_given->count() > 0)
        throw std::runtime_error("calibrate: --metric " + calibration.metric +
                                 " with --from-weights, which has no metric");
      if (!checkpoint.path.empty())
        throw std::runtime_error("calibrate: --checkpoint " + checkpoint.path +
                                 " with --from-weights, which has no windows");
      if (!pre_rope_out.empty())
        throw std::runtime_error("calibrate: --from-weights has pre-RoPE keys alone, for --out; " +
                                 pre_rope_out + " asked for by --pre-rope-out");
      save(out, llama::calibrate_from_weights(engine), "weights");
      return 0;
    }
    const std::pair<const char*, std::string> files[] = {
        {"--out", out}, {"--pre-rope-out", pre_rope_out}, {"--checkpoint", checkpoint.path}};
    for (const auto& [name, path] : files) {
      for (const auto& [other, second] : files) {
        if (name == other || path.empty() || second.empty()) continue;
        if (std::filesystem::weakly_canonical(path) == std::filesystem::weakly_canonical(second))
          lowrankkv::detail::fail<lowrankkv::ValueError>("calibrate: ", name, " ", path, " and ",
                                                         other, " ", second,
                                                         " are one file, two needed");
      }
    }
    calibration.forms = {pre_rope ? lowrankkv::Rope::pre : lowrankkv::Rope::post};
    if (!pre_rope_out.empty()) calibration.forms.push_back(lowrankkv::Rope::pre);
    run_calibration(engine, calibration, checkpoint, out, pre_rope_out);
    return 0;
  }
  if (training->parsed()) {
    train_command.run(engine, options.model, options.seed);
    return 0;
  }
  if (synthesize->parsed()) {
    synthesis.seed = options.seed;
    const auto set = llama::synthesize(engine.tokenizer, engine.model.config(),
                                       llama::read_text(text), llama::read_words(words), synthesis);
    llama::write_samples(prefix, set, synthesis.length);
    std::printf("wrote %s.json and .bin: %zu samples of at most %lld tokens\n", prefix.c_str(),
                set.size(), static_cast<long long>(synthesis.length));
    return 0;
  }
  if (bpb->parsed()) {
    const llama::WindowShape shape = bpb_texts.window();
    const auto texts = llama::read_texts(bpb_texts.texts);
    auto contenders = options.contenders(engine, shape.tokens, shape.tokens);
    for (const llama::NamedText& of : texts)
      llama::measure_bits_per_byte(engine, contenders, of.name, of.text, bpb_texts.most, shape);
    finish(options, rows_of(contenders));
    return 0;
  }
  if (kl->parsed()) {
    const llama::WindowShape shape = kl_texts.window();
    const auto texts = llama::read_texts(kl_texts.texts);
    if (std::find(options.methods.begin(), options.methods.end(), "FullKV") ==
        options.methods.end())
      options.methods.insert(options.methods.begin(), "FullKV");
    auto contenders = options.contenders(engine, shape.tokens, shape.tokens);
    llama::measure_divergence(engine, contenders, texts, kl_texts.most, shape);
    const auto rows = rows_of(contenders);
    llama::print_divergence(rows);
    std::fflush(stdout);
    close(options, rows);
    return 0;
  }
  if (retrieve->parsed() && !ruler.empty()) {
    while (ruler.size() > 1 && ruler.back() == '/') ruler.pop_back();
    const auto set = llama::load_ruler(ruler, tasks, samples);
    const auto first = llama::encode_prompt(engine, set.front().prompt);
    auto contenders = options.contenders(engine, llama::longest_sample(engine, set),
                                         static_cast<std::int64_t>(first.size()));
    llama::measure_ruler(engine, contenders, llama::file_name(ruler), set, tail);
    finish(options, rows_of(contenders));
    return 0;
  }
  if (retrieve->parsed()) {
    if (eval.empty()) throw std::runtime_error("retrieve: --eval or --ruler is needed");
    const auto set = llama::load_samples(eval, tasks, samples);
    auto contenders = options.contenders(engine, llama::longest_sample(engine, set),
                                         static_cast<std::int64_t>(set.front().prompt.size()));
    llama::measure_retrieval(engine, contenders, eval.substr(eval.find_last_of('/') + 1), set,
                             tail);
    finish(options, rows_of(contenders));
    return 0;
  }
  if (speed->parsed()) {
    const std::int64_t longest = *std::max_element(contexts.begin(), contexts.end());
    const auto tokens = text.empty()
                            ? llama::drawn_tokens(engine.model.config(), longest, options.seed)
                            : llama::encode_prompt(engine, llama::read_text(text));
    finish(options, llama::measure_speed_at(engine, options.methods, options.ratios, options.method,
                                            options.calibration(engine), contexts, tokens, timing));
    return 0;
  }
  if (prompt == "-") prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
  const std::vector<std::int32_t> ids = llama::encode_prompt(engine, prompt);
  const std::int64_t most_tokens = engine.model.config().max_positions;
  auto contenders = options.contenders(
      engine, most_tokens,
      llama::generation_context(static_cast<std::int64_t>(ids.size()) + max_tokens, most_tokens));
  sampling.seed = options.seed;
  for (llama::Contender& contender : contenders) {
    if (contenders.size() > 1)
      std::printf("--- %s %.2f\n", contender.row.method.c_str(), contender.row.ratio);
    std::printf("%s", prompt.c_str());
    llama::generate(
        engine, *contender.store, ids, max_tokens, sampling,
        [&](std::int32_t id) {
          std::fputs(engine.tokenizer.bytes(id).c_str(), stdout);
          std::fflush(stdout);
        },
        [&] { llama::note_memory(engine, contender); });
    std::printf("\n");
  }
  std::fflush(stdout);
  close(options, rows_of(contenders));
  return 0;
} catch (const std::bad_alloc&) {
  std::fprintf(stderr, "lowrankkv-llama: not enough memory\n");
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "lowrankkv-llama: %s\n", error.what());
  return 1;
}
