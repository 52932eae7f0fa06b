// SPDX-License-Identifier: Apache-2.0
#include "serving/serve_command.hpp"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>

#include "divergence.hpp"
#include "progress.hpp"
#include "serving/device_server.hpp"
#include "serving/random_shape.hpp"

namespace llama {
namespace {

constexpr int kMostPlaces = 4096;

/// Bytes of the activations of a step and its logits, for each place: room that is left for them.
std::size_t bytes_of_place(const Config& config) {
  return sizeof(float) *
         static_cast<std::size_t>(config.vocabulary_size + 4 * config.intermediate_size +
                                  8 * config.hidden_size);
}

std::int64_t between(const std::vector<std::int64_t>& range, std::mt19937_64& random) {
  const auto span = static_cast<std::uint64_t>(range.back() - range.front() + 1);
  return range.front() + static_cast<std::int64_t>(random() % span);
}

void check_range(const char* name, const std::vector<std::int64_t>& range) {
  if (range.size() <= 2 && range.front() >= 1 && range.front() <= range.back()) return;
  std::string given;
  for (const std::int64_t value : range) {
    if (!given.empty()) given += ',';
    given += std::to_string(value);
  }
  throw std::runtime_error(std::string("serve-bench: ") + name + " " + given +
                           ", one number or the least and the most expected, from 1 on");
}

void write_json(const std::string& path, const nlohmann::ordered_json& list) {
  // Texts that end inside a character are not UTF-8.
  constexpr auto kReplace = nlohmann::ordered_json::error_handler_t::replace;
  if (!(std::ofstream(path) << list.dump(2, ' ', false, kReplace) << '\n'))
    throw std::runtime_error("cannot write " + path);
}

void write_csv(const std::string& path, const nlohmann::ordered_json& rows) {
  constexpr const char* kNumbers[] = {
      "ratio",       "places",         "tokens_per_second", "step_tokens_per_second",
      "step_ms",     "first_token_ms", "first_token_ms_99", "token_ms",
      "token_ms_99", "cache_bytes",    "bytes_per_token"};
  std::ofstream csv(path);
  csv << "method";
  for (const char* name : kNumbers) csv << ',' << name;
  csv << '\n';
  for (const auto& row : rows) {
    csv << row["method"].get<std::string>();
    for (const char* name : kNumbers) csv << ',' << row[name].dump();
    csv << '\n';
  }
  if (!csv) throw std::runtime_error("cannot write " + path);
}

}  // namespace

/// What was measured of a method.
struct ServeCommand::Row {
  std::string method;
  double ratio = 1.0;
  int places = 0;  // that there was memory for, or that were asked for
  std::vector<Request> requests;
  ServeReport report;
  std::size_t cancelled = 0;
  double tokens_per_second = 0.0;       // of answers, over all seconds
  double step_tokens_per_second = 0.0;  // of steps with the most sequences
  double step_ms = 0.0;                 // the median of those
  double first_token_ms[2] = {};        // from arrival: median, 99th percentile
  double token_ms[2] = {};              // between tokens of an answer, its mean: the same
  std::size_t weight_bytes = 0, slot_bytes = 0;
  std::size_t cache_bytes = 0;  // of all pages
  double bytes_per_token =
      0.0;  // of the pages and the slot of the longest sequence, over its tokens
  std::int64_t pages_left = 0;  // that did not come back

  /// Rates and latencies of the report.
  void summarise() {
    std::vector<double> first, between_tokens, steps;
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const Served& served = report.requests[i];
      tokens += served.answer.size();
      cancelled += served.cancelled ? 1 : 0;
      if (served.answer.empty()) continue;
      first.push_back(1e3 * (served.first_token - requests[i].arrival));
      if (served.answer.size() > 1)
        between_tokens.push_back(1e3 * (served.finished - served.first_token) /
                                 static_cast<double>(served.answer.size() - 1));
    }
    int most = 0;
    for (const Step& step : report.steps) most = std::max(most, step.sequences);
    for (const Step& step : report.steps) {
      if (step.sequences == most) steps.push_back(step.seconds);
    }
    tokens_per_second = static_cast<double>(tokens) / report.seconds;
    if (!steps.empty()) {
      const double median = quantile(steps, 0.5);
      step_ms = 1e3 * median;
      step_tokens_per_second = most / median;
    }
    const double shares[] = {0.5, 0.99};
    for (int i = 0; i < 2; ++i) {
      if (!first.empty()) first_token_ms[i] = quantile(first, shares[i]);
      if (!between_tokens.empty()) token_ms[i] = quantile(between_tokens, shares[i]);
    }
  }
  void add_answers(const Engine& engine, nlohmann::ordered_json& list) const {
    for (std::size_t i = 0; i < requests.size(); ++i)
      list.push_back({{"method", method},
                      {"ratio", ratio},
                      {"prompt_ids", requests[i].prompt},
                      {"answer_ids", report.requests[i].answer},
                      {"prompt", engine.tokenizer.decode(requests[i].prompt)},
                      {"answer", engine.tokenizer.decode(report.requests[i].answer)}});
  }
};

void ServeCommand::add(CLI::App* app) {
  app->add_option("--shape", shape_,
                  "instead of --model: random weights of a public model's shape, and prompts of "
                  "random rows, which are stored and not run")
      ->check(CLI::IsMember(shape_names()));
  const std::map<std::string, WeightType> types{
      {"f32", WeightType::f32}, {"f16", WeightType::f16}, {"bf16", WeightType::bf16}};
  app->add_option("--weights", weights_, "type of weights")
      ->transform(CLI::CheckedTransformer(types))
      ->option_text("f32|f16|bf16 [f16]");
  app->add_option("--requests", count_, "requests; 0: as many as there are places")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--prompt-tokens", prompt_, "of a request: one number, or the least and the most")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--output-tokens", output_, "of an answer: the same")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--rate", rate_, "requests a second; 0: all are there at the start")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app->add_option("--cancelled", cancelled_, "share of the clients that leave before the end")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app->add_option("--places", places_,
                  "sequences at a time; 0: as many of the longest request as memory has room for")
      ->check(CLI::Range(0, kMostPlaces))
      ->capture_default_str();
  app->add_option("--reserve-gb", reserve_, "memory that is not for the cache, with --places 0")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI::Option* chunk =
      app->add_option("--prompt-chunk", chunk_, "most tokens of a part of a prompt")
          ->check(CLI::PositiveNumber)
          ->capture_default_str();
  app->add_option("--parts-between-steps", parts_, "most parts of prompts between two steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app->add_flag("--random-prompts", random_prompts_,
                "prompts of random rows, which are stored and not run");
  CLI::Option* text =
      app->add_option("--text", text_, "text file that prompts are parts of; default: drawn ids")
          ->check(CLI::ExistingFile);
  for (CLI::Option* of_texts : {chunk, text})  // where prompts are run
    of_texts->excludes(app->get_option("--shape"))->excludes(app->get_option("--random-prompts"));
  app->add_option("--answers", answers_,
                  "write every request's prompt and answer, by method, to this file (JSON)")
      ->needs(text);
  app->add_flag("--one-graph", one_graph_,
                "steps always have all places: a sequence's bits do not depend on who else is "
                "there");
}

std::int64_t ServeCommand::most_tokens() const { return prompt_.back() + output_.back(); }

std::vector<Request> ServeCommand::requests(const Config& config, std::int64_t count,
                                            const std::vector<std::int32_t>& text,
                                            std::uint64_t seed) const {
  std::mt19937_64 random(seed);
  std::exponential_distribution<double> pause(rate_ > 0.0 ? rate_ : 1.0);
  std::vector<Request> all(static_cast<std::size_t>(count));
  double now = 0.0;
  for (Request& request : all) {
    if (rate_ > 0.0) request.arrival = now += pause(random);
    request.prompt.resize(static_cast<std::size_t>(between(prompt_, random)));
    const std::uint64_t first = text.empty() ? 0 : random() % (text.size() - request.prompt.size());
    for (std::size_t i = 0; i < request.prompt.size(); ++i)
      request.prompt[i] = text.empty()
                              ? static_cast<std::int32_t>(
                                    random() % static_cast<std::uint64_t>(config.vocabulary_size))
                              : text[static_cast<std::size_t>(first) + i];
    if (config.bos >= 0) request.prompt.front() = config.bos;
    request.output_tokens = between(output_, random);
    if (static_cast<double>(random() >> 11) * 0x1p-53 < cancelled_)
      request.cancelled_after =
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(request.output_tokens));
  }
  return all;
}

std::unique_ptr<KvStore> ServeCommand::store_of(const BatchModel& model, const Config& config,
                                                const Calibration& calibration,
                                                const MethodOptions& options, int sequences,
                                                std::size_t pool_bytes) const {
  MethodOptions own = options;
  own.sequences = sequences;
  own.pool_bytes = pool_bytes;
  own.query_tokens = 1;
  own.stream = model.stream();
  if (own.context == 0) own.context = most_tokens();
  return make_store(own, config, most_tokens(), calibration,
                    std::make_shared<lowrankkv::cpu::ThreadPool>(1));
}

ServeCommand::Room ServeCommand::room_for(const BatchModel& model, const Config& config,
                                          const Calibration& calibration,
                                          const MethodOptions& options) const {
  // What a slot takes beside its pages: the difference that eight more make.
  std::size_t with[2] = {};
  Room room;
  for (const int more : {0, 8}) {
    const std::size_t before = model.free_bytes();
    const auto probe = store_of(model, config, calibration, options, 1 + more, 1);
    with[more / 8] = before - std::min(before, model.free_bytes());
    const DeviceCaches& caches = *probe->on_device();
    room.pages = static_cast<std::size_t>(caches.pages_for(most_tokens())) * caches.page_bytes();
  }
  room.slot = (with[1] - std::min(with[0], with[1])) / 8;
  room.places = places_;
  if (places_ > 0) return room;
  const std::size_t used = static_cast<std::size_t>(reserve_ * 1e9) + with[0];
  const std::size_t free = model.free_bytes();
  const std::size_t fit =
      (free - std::min(free, used)) / (room.pages + room.slot + bytes_of_place(config));
  if (fit == 0)
    throw std::runtime_error("serve-bench: " + options.method + " needs " +
                             std::to_string(room.pages + room.slot + used) +
                             " bytes for a sequence of " + std::to_string(most_tokens()) +
                             " tokens, free are " + std::to_string(free));
  room.places = static_cast<int>(std::min<std::size_t>(fit, kMostPlaces));
  return room;
}

ServeCommand::Row ServeCommand::measure(BatchModel& model, const Config& config,
                                        const Calibration& calibration,
                                        const MethodOptions& options,
                                        const std::vector<std::int32_t>& text,
                                        std::uint64_t seed) const {
  Row row;
  row.method = options.method;
  row.ratio = options.ratio;
  const Room room = room_for(model, config, calibration, options);
  row.places = room.places;
  row.slot_bytes = room.slot;
  row.bytes_per_token =
      static_cast<double>(room.pages + room.slot) / static_cast<double>(most_tokens());
  const auto store = store_of(model, config, calibration, options, room.places,
                              room.pages * static_cast<std::size_t>(room.places));
  DeviceCaches& caches = *store->on_device();
  row.weight_bytes = model.weight_bytes();
  row.cache_bytes = static_cast<std::size_t>(caches.num_pages()) * caches.page_bytes();
  DeviceServer::Options how;
  how.most_sequences = room.places;
  how.max_tokens = most_tokens();
  if (one_graph_) how.sizes = {room.places};
  if (random_prompts_ || !shape_.empty()) how.random_rows = random_spectrum(config.head_dim);
  DeviceServer server(model, caches, how);

  row.requests = requests(config, count_ > 0 ? count_ : room.places, text, seed);
  Progress progress(row.method, static_cast<std::int64_t>(row.requests.size()));
  std::int64_t shown = 0;
  ServeOptions serving;
  serving.parts_between_steps = parts_;
  serving.prompt_chunk = how.random_rows.empty() ? chunk_ : prompt_.back();
  serving.progress = [&](std::int64_t done) {
    progress.step(done - shown);
    shown = done;
  };
  row.report = serve(server, row.requests, serving);
  row.pages_left = caches.num_pages() - caches.num_free_pages();
  row.summarise();
  return row;
}

void ServeCommand::print(const Row& row) {
  std::printf("%-16s %5.2f %6d %8.0f %9.1f %9.1f %8.3f %8.1f %8.1f %8.3f %8.3f %9.2f\n",
              row.method.c_str(), row.ratio, row.places, row.bytes_per_token, row.tokens_per_second,
              row.step_tokens_per_second, row.step_ms, row.first_token_ms[0], row.first_token_ms[1],
              row.token_ms[0], row.token_ms[1], 1e-9 * static_cast<double>(row.cache_bytes));
  std::fflush(stdout);
}

nlohmann::ordered_json ServeCommand::json_of(const Row& row) const {
  return {{"method", row.method},
          {"ratio", row.ratio},
          {"places", row.places},
          {"requests", row.requests.size()},
          {"cancelled", row.cancelled},
          {"most_sequences", row.report.most_sequences},
          {"prompt_tokens", prompt_},
          {"output_tokens", output_},
          {"seconds", row.report.seconds},
          {"tokens_per_second", row.tokens_per_second},
          {"step_tokens_per_second", row.step_tokens_per_second},
          {"step_ms", row.step_ms},
          {"first_token_ms", row.first_token_ms[0]},
          {"first_token_ms_99", row.first_token_ms[1]},
          {"token_ms", row.token_ms[0]},
          {"token_ms_99", row.token_ms[1]},
          {"weight_bytes", row.weight_bytes},
          {"cache_bytes", row.cache_bytes},
          {"slot_bytes", row.slot_bytes},
          {"bytes_per_token", row.bytes_per_token}};
}

void ServeCommand::run(const Engine* engine, const Config& config, const Calibration& calibration,
                       const ServedMethods& methods) const {
  check_range("--prompt-tokens", prompt_);
  check_range("--output-tokens", output_);
  if (most_tokens() > config.max_positions)
    throw std::runtime_error("serve-bench: requests of up to " + std::to_string(most_tokens()) +
                             " tokens, the model has " + std::to_string(config.max_positions) +
                             " positions");
  std::vector<std::int32_t> text;
  if (!text_.empty()) text = encode_documents(*engine, read_text(text_));
  if (!text_.empty() && static_cast<std::int64_t>(text.size()) <= prompt_.back())
    throw std::runtime_error("serve-bench: --text " + text_ + " has " +
                             std::to_string(text.size()) + " tokens, more than the " +
                             std::to_string(prompt_.back()) + " of a prompt expected");
  const auto on_gpu = engine != nullptr ? make_batch_model(engine->model, weights_)
                                        : make_batch_model(config, methods.seed, weights_);
  std::printf("%-16s %5s %6s %8s %9s %9s %8s %17s %17s %9s\n", "", "", "places", "bytes/",
              "tokens/s", "in full", "step", "first token ms", "between tokens ms", "cache");
  std::printf("%-16s %5s %6s %8s %9s %9s %8s %8s %8s %8s %8s %9s\n", "method", "ratio", "", "token",
              "", "steps", "ms", "median", "99 %", "median", "99 %", "GB");
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  nlohmann::ordered_json answers = nlohmann::ordered_json::array();
  for (const MethodOptions& options : at_ratios(methods.names, methods.ratios, methods.options)) {
    const Row row = measure(*on_gpu, config, calibration, options, text, methods.seed);
    print(row);
    if (row.pages_left != 0)
      throw std::runtime_error("serve-bench: " + std::to_string(row.pages_left) +
                               " pages did not come back, 0 expected");
    rows.push_back(json_of(row));
    if (!answers_.empty()) row.add_answers(*engine, answers);
  }
  if (!methods.json.empty()) write_json(methods.json, rows);
  if (!methods.csv.empty()) write_csv(methods.csv, rows);
  if (!answers_.empty()) write_json(answers_, answers);
}

}  // namespace llama
