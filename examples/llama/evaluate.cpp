// SPDX-License-Identifier: Apache-2.0
#include "evaluate.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <fstream>
#include <cstdint>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>

#include "checkpoint.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/calibrate/weights.hpp"
#include "progress.hpp"
#include "teacher_forcing.hpp"

namespace llama {

void prefill_all(const Engine& engine, std::vector<Contender>& contenders, const Ids& tokens) {
  if (contenders.front().options.prefill_chunk > 0 && contenders.size() > 1) {
    throw std::runtime_error("prefill in chunks: " + std::to_string(contenders.size()) +
                             " methods, one at a time is possible");
  }
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  for (Contender& contender : contenders) contender.store->create(kSequence);
  engine.model.forward(tokens, 0, [&](int layer, const Projected& rows, float* out) {
    contenders.front().store->prefill(layer, kSequence, n, rows, out);
    for (std::size_t i = 1; i < contenders.size(); ++i)
      contenders[i].store->ingest(layer, kSequence, n, rows);
  });
}

namespace {

std::int32_t argmax(const float* logits, int vocabulary) {
  return static_cast<std::int32_t>(std::max_element(logits, logits + vocabulary) - logits);
}

}  // namespace

double Row::mean_exact_match() const {
  double sum = 0.0;
  for (const auto& [task, score] : exact_match) sum += score;
  return exact_match.empty() ? 0.0 : sum / static_cast<double>(exact_match.size());
}

double Row::mean_string_match() const {
  double sum = 0.0;
  for (const auto& [task, score] : string_match) sum += score;
  return string_match.empty() ? 0.0 : sum / static_cast<double>(string_match.size());
}

double Row::excess() const {
  return knob.empty() ? 0.0 : std::max(0.0, largest_ratio_measured / ratio - 1.0);
}

namespace {

/// Bytes a token of the sequence at hand over those of f16 K and V.
double ratio_now(const Engine& engine, const KvStore& store) {
  const Config& config = engine.model.config();
  return static_cast<double>(store.memory(kSequence).total()) /
         static_cast<double>(store.num_tokens(kSequence)) /
         (2.0 * config.num_layers * config.num_kv_heads * config.head_dim * 2.0);
}

}  // namespace

void note_excess(const Engine& engine, Contender& contender) {
  const double ratio = ratio_now(engine, *contender.store);
  if (ratio <= contender.row.largest_ratio_measured) return;
  contender.row.largest_ratio_measured = ratio;
  contender.row.largest_context = contender.store->num_tokens(kSequence);
}

void note_memory(const Engine& engine, Contender& contender) {
  Row& row = contender.row;
  row.context = contender.store->num_tokens(kSequence);
  row.bytes_per_token = static_cast<double>(contender.store->memory(kSequence).total()) /
                        static_cast<double>(row.context);
  row.ratio_measured = ratio_now(engine, *contender.store);
  note_excess(engine, contender);
}

Engine::Engine(const std::string& folder, int num_threads)
    : threads(std::make_shared<lowrankkv::cpu::ThreadPool>(num_threads)),
      tokenizer(folder + "/tokenizer.json"),
      model(folder, threads) {
  const std::int32_t bos = model.config().bos;
  if (!tokenizer.bos()) return;
  if (*tokenizer.bos() >= 0 && bos >= 0 && *tokenizer.bos() != bos) {
    throw std::runtime_error("tokenizer.json: post_processor puts id " +
                             std::to_string(*tokenizer.bos()) +
                             " before a text, config.json: bos_token_id is " + std::to_string(bos));
  }
  model.begin_with(*tokenizer.bos());
}

std::vector<Contender> make_contenders(const Engine& engine, const std::vector<std::string>& names,
                                       const std::vector<double>& ratios, MethodOptions options,
                                       std::int64_t max_tokens, const Calibration& calibration) {
  std::vector<Contender> contenders;
  for (MethodOptions& own : at_ratios(names, ratios, std::move(options))) {
    Contender contender;
    contender.store =
        make_store(own, engine.model.config(), max_tokens, calibration, engine.threads);
    contender.row.method = own.method;
    contender.row.ratio = own.ratio;
    contender.row.knob = find_method(own.method).ratio;
    contender.options = std::move(own);
    contenders.push_back(std::move(contender));
  }
  if (contenders.empty()) throw std::runtime_error("no method named");
  return contenders;
}

std::string read_text(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open " + path);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<std::int32_t> encode_prompt(const Engine& engine, std::string_view text) {
  const std::int32_t bos = engine.model.config().bos;
  Ids ids = engine.tokenizer.encode(text);
  if (bos >= 0 && (ids.empty() || ids.front() != bos)) ids.insert(ids.begin(), bos);
  if (ids.empty())
    throw std::runtime_error("prompt: 0 tokens, and the model has no bos; at least 1 is needed");
  return ids;
}

std::vector<std::int32_t> encode_documents(const Engine& engine, const std::string& text) {
  constexpr std::string_view kSeparator = "\x1e\n";
  const std::int32_t bos = engine.model.config().bos;
  Ids ids;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(kSeparator, at), text.size());
    const Ids document = engine.tokenizer.encode(std::string_view(text).substr(at, end - at));
    ids.insert(ids.end(), document.begin(), document.end());
    if (end == text.size()) break;
    if (bos >= 0) ids.push_back(bos);
    at = end + kSeparator.size();
  }
  return ids;
}

namespace {

/// Throws unless a bundle's rotary frequencies are the model's, but for the rounding of tools that
/// have them in f32.
void check_frequencies(const Engine& engine, const std::string& path,
                       const std::vector<double>& frequencies) {
  const std::vector<double>& own = engine.model.config().rope_frequencies;
  if (frequencies.size() != own.size())
    throw std::runtime_error("--bases: " + path + " is of keys with " +
                             std::to_string(frequencies.size()) +
                             " rotary frequencies, the model has " + std::to_string(own.size()));
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (std::abs(frequencies[i] - own[i]) > 1e-6 * own[i])
      throw std::runtime_error("--bases: " + path + " is of keys with the rotary frequency " +
                               std::to_string(frequencies[i]) + " in pair " + std::to_string(i) +
                               ", the model's is " + std::to_string(own[i]));
  }
}

}  // namespace

Calibration load_bases(const Engine& engine, const std::vector<std::string>& paths) {
  Calibration calibration;
  for (const std::string& path : paths) {
    auto moments = lowrankkv::calibrate::load_moments(path, engine.model.config().cache_shape(),
                                                      engine.model.config().num_layers);
    const bool pre_rope = moments.front().rope().keys == lowrankkv::Rope::pre;
    auto& target = calibration.of(moments.front().rope().keys);
    if (pre_rope) check_frequencies(engine, path, moments.front().rope().frequencies);
    if (!target.empty())
      throw std::runtime_error("--bases: " + path + " is a second bundle of " +
                               (pre_rope ? "unrotated" : "rotated") +
                               " keys, one was read before it");
    target = std::move(moments);
  }
  return calibration;
}

std::vector<float> prefill(const Engine& engine, KvStore& store, lowrankkv::SequenceId seq,
                           const Ids& tokens) {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  return engine.model.forward(tokens, store.num_tokens(seq),
                              [&](int layer, const Projected& rows, float* out) {
                                store.prefill(layer, seq, n, rows, out);
                              });
}

std::vector<float> decode(const Engine& engine, KvStore& store, lowrankkv::SequenceId seq,
                          const Ids& tokens) {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  std::vector<float> hidden = engine.model.forward(
      tokens, store.num_tokens(seq), [&](int layer, const Projected& rows, float* out) {
        store.decode(layer, seq, n, rows, out);
      });
  store.maintain(seq);
  return hidden;
}

namespace {

/// N_g = W_g W_g^T of every query head of a layer: how much of an error in a head's output reaches
/// the residual stream.
std::vector<Eigen::MatrixXd> output_grams(const Engine& engine, int layer) {
  const Config& config = engine.model.config();
  const Linear& output = engine.model.output_projection(layer);
  const Eigen::Map<const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>
      weight(output.weight.data(), output.out_features, output.in_features);
  std::vector<Eigen::MatrixXd> grams;
  for (int head = 0; head < config.num_qo_heads; ++head) {
    const Eigen::MatrixXd part =
        weight.middleCols(head * config.head_dim, config.head_dim).cast<double>();
    grams.emplace_back(part.transpose() * part);
  }
  return grams;
}

/// Empty statistics of all layers. A bundle names one rotary embedding, that of the layers that
/// have one; the rows of others are taken as they are.
std::vector<lowrankkv::calibrate::LayerMoments> empty_moments(const Config& config,
                                                              lowrankkv::Rope keys) {
  std::vector<lowrankkv::calibrate::LayerMoments> moments(
      static_cast<std::size_t>(config.num_layers),
      lowrankkv::calibrate::LayerMoments(config.cache_shape(), config.rope(keys)));
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!config.rotates(layer))
      moments[static_cast<std::size_t>(layer)].coding() =
          lowrankkv::calibrate::CodingStatistics(config.cache_shape(), config.rope(keys, layer));
  }
  return moments;
}

/// Shows a layer's statistics, of every form of the keys, the rows of a window of n tokens.
/// @param moments  so many rows enter the moments; 0: coding statistics alone
/// @param context  so many rows are those that coding statistics take as compressed; 0: none of
/// them
void observe(const Engine& engine, Calibration& calibration,
             const std::vector<lowrankkv::Rope>& forms, int layer, const Projected& rows,
             std::int64_t n, std::int64_t moments, std::int64_t context) {
  using lowrankkv::Rope;
  const Config& config = engine.model.config();
  const lowrankkv::QueryView query(rows.query, n, config.num_qo_heads, config.head_dim);
  const lowrankkv::ValueView value(rows.value, n, config.num_kv_heads, config.head_dim);
  const auto key = [&](Rope form) {
    return lowrankkv::KeyView(form == Rope::pre ? rows.pre_rope_key : rows.key, n,
                              config.num_kv_heads, config.head_dim);
  };
  const auto of = [&](Rope form) -> lowrankkv::calibrate::LayerMoments& {
    return calibration.of(form)[static_cast<std::size_t>(layer)];
  };
  const auto on_threads = [&](int count, auto&& function) {
    engine.threads->run(count, [&](std::int64_t index, int) { function(static_cast<int>(index)); });
  };
  for (const Rope form : forms) {
    if (moments > 0)
      of(form).add(query.tokens(0, moments), key(form).tokens(0, moments),
                   value.tokens(0, moments));
  }
  if (context == 0) return;
  if (forms.size() == 2)
    of(Rope::post)
        .coding()
        .add_both(of(Rope::pre).coding(), query, key(Rope::post), key(Rope::pre), value, context, 1,
                  on_threads);
  else
    of(forms.front()).coding().add(query, key(forms.front()), value, context, 1, on_threads);
}

}  // namespace

Ids with_copies(Ids window, std::size_t context, std::size_t copies, std::mt19937_64& random) {
  constexpr std::size_t kSpans = 8;
  const std::size_t span = std::max<std::size_t>(1, copies / kSpans);
  for (std::size_t added = 0; added < copies;) {
    const std::size_t count = std::min(span, copies - added);
    const std::size_t from = static_cast<std::size_t>(random() % (context - count + 1));
    for (std::size_t i = 0; i < count; ++i) window.push_back(window[from + i]);
    added += count;
  }
  return window;
}

Ids calibration_tokens(const Engine& engine, const std::vector<std::string>& texts,
                       std::int64_t max_tokens) {
  const std::int32_t bos = engine.model.config().bos;
  std::vector<Ids> all;
  std::int64_t total = 0;
  for (const std::string& text : texts) {
    all.push_back(encode_documents(engine, text));
    if (bos >= 0 && all.size() > 1) all.back().insert(all.back().begin(), bos);
    total += static_cast<std::int64_t>(all.back().size());
  }
  const std::int64_t limit = std::min(total, max_tokens);
  Ids ids;
  std::int64_t before = 0;  // tokens of this text and of those before it
  for (const Ids& own : all) {
    before += static_cast<std::int64_t>(own.size());
    const double until = static_cast<double>(before) / static_cast<double>(total);
    const std::int64_t share =
        (before == total ? limit : static_cast<std::int64_t>(until * static_cast<double>(limit))) -
        static_cast<std::int64_t>(ids.size());
    const std::int64_t count = std::clamp<std::int64_t>(share, 0, std::ssize(own));
    ids.insert(ids.end(), own.begin(), own.begin() + count);
  }
  return ids;
}

Calibration calibrate(const Engine& engine, const std::string& text, std::int64_t max_tokens,
                      int window_tokens, const std::vector<lowrankkv::Rope>& forms,
                      lowrankkv::calibrate::CodingMetric metric) {
  return calibrate(engine, calibration_tokens(engine, {text}, max_tokens), window_tokens, forms,
                   metric, nullptr);
}

Calibration calibrate(const Engine& engine, const Ids& ids, int window_tokens,
                      const std::vector<lowrankkv::Rope>& forms,
                      lowrankkv::calibrate::CodingMetric metric, Checkpoint* checkpoint) {
  if (forms.empty() || forms.size() > 2 || (forms.size() == 2 && forms[0] == forms[1]))
    throw std::runtime_error("calibration: " + std::to_string(forms.size()) +
                             " forms of the keys, post-RoPE, pre-RoPE or each once expected");
  const Config& config = engine.model.config();
  const int layers = config.num_layers;
  Calibration calibration;
  for (const lowrankkv::Rope keys : forms) calibration.of(keys) = empty_moments(config, keys);
  const bool coding = metric == lowrankkv::calibrate::CodingMetric::output;
  for (int layer = 0; coding && layer < layers; ++layer) {
    const auto grams = output_grams(engine, layer);
    for (const lowrankkv::Rope keys : forms)
      calibration.of(keys)[static_cast<std::size_t>(layer)].coding().set_output_grams(grams);
  }
  const auto store = make_store({.method = "FullKV", .storage = lowrankkv::DType::f32}, config,
                                window_tokens, {}, engine.threads);
  const std::size_t limit = ids.size();
  if (limit == 0) throw std::runtime_error("calibration: the text has no tokens");
  CalibrationPlace place;
  if (checkpoint != nullptr && checkpoint->restore(place, calibration) && place.gradients)
    return calibration;  // this pass is behind it
  if (place.done > static_cast<std::int64_t>(limit))
    throw std::runtime_error("calibration: the checkpoint has done " + std::to_string(place.done) +
                             " tokens, the text has " + std::to_string(limit));
  Progress progress("calibrate", static_cast<std::int64_t>(limit));
  progress.resume(place.done);
  // Every second window is half as long, for coding alone: its metrics must serve contexts of all
  // lengths. Low-rank bases want the whole length: keys are rotated by their positions.
  while (place.done < static_cast<std::int64_t>(limit)) {
    const bool half = place.half;
    const std::size_t at = static_cast<std::size_t>(place.done);
    const std::size_t length =
        static_cast<std::size_t>(half ? (window_tokens + 1) / 2 : window_tokens);
    const std::size_t copies = coding ? std::min<std::size_t>(512, length / 8) : 0;
    const std::size_t begin = config.bos >= 0 ? 1 : 0;
    const std::size_t body =
        std::min(std::max<std::size_t>(1, length - copies - begin), limit - at);
    Ids window = slice(ids, at, body);
    if (config.bos >= 0) window.insert(window.begin(), config.bos);
    const std::int64_t text_tokens = static_cast<std::int64_t>(window.size());
    const std::int64_t context =
        std::max<std::int64_t>(1, text_tokens - static_cast<std::int64_t>(copies));
    window = with_copies(std::move(window), static_cast<std::size_t>(context),
                         std::min(copies, static_cast<std::size_t>(context)), place.random);
    const std::int64_t n = static_cast<std::int64_t>(window.size());
    store->create(kSequence);
    engine.model.forward(
        window, 0,
        [&](int layer, const Projected& rows, float* out) {
          store->prefill(layer, kSequence, n, rows, out);
          observe(engine, calibration, forms, layer, rows, n, half ? 0 : text_tokens,
                  coding ? context : 0);
        },
        [&](int layer, std::int64_t tokens, const float* rows) {
          if (!coding) return;
          for (const lowrankkv::Rope form : forms)
            calibration.of(form)[static_cast<std::size_t>(layer)].coding().add_residual_stream(
                {rows, tokens, config.hidden_size});
        });
    store->erase(kSequence);
    place.done += static_cast<std::int64_t>(body);
    place.half = coding && !half;
    progress.step(static_cast<std::int64_t>(body));
    if (checkpoint != nullptr)
      checkpoint->save(place, calibration, place.done == static_cast<std::int64_t>(limit));
  }
  return calibration;
}

std::vector<lowrankkv::calibrate::LayerMoments> calibrate_from_weights(const Engine& engine) {
  namespace calibrate = lowrankkv::calibrate;
  const Config& config = engine.model.config();
  if (config.head_norms)
    throw std::runtime_error(
        "calibration from weights: the model's queries and keys have norms of each head, whose "
        "statistics need a text");
  std::vector<calibrate::LayerMoments> moments = empty_moments(config, lowrankkv::Rope::pre);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::vector<float>& gain = engine.model.attention_gain(layer);
    const Eigen::VectorXd squares =
        Eigen::Map<const Eigen::VectorXf>(gain.data(), config.hidden_size)
            .cast<double>()
            .cwiseAbs2();
    calibrate::Moments input(config.hidden_size);
    input.second = squares.asDiagonal();
    input.count = 1.0;
    const auto of = [&](const Linear& linear) {
      return calibrate::weight_moments(
          {linear.weight.data(), linear.out_features, linear.in_features}, input, linear.bias);
    };
    calibrate::LayerMoments& target = moments[static_cast<std::size_t>(layer)];
    target.values() = of(engine.model.value_projection(layer));
    const auto values = calibrate::head_moments(target.values(), config.num_kv_heads);
    const auto keys =
        calibrate::head_moments(of(engine.model.key_projection(layer)), config.num_kv_heads);
    const auto queries =
        calibrate::head_moments(of(engine.model.query_projection(layer)), config.num_qo_heads);
    std::vector<std::int64_t> distances;
    for (int i = 0; i < 64; ++i) distances.push_back(std::int64_t{i} * config.max_positions / 64);
    const int group = config.num_qo_heads / config.num_kv_heads;
    for (int index = 0; index < config.num_kv_heads; ++index) {
      calibrate::HeadMoments& head = target.head(index);
      head.key = keys[static_cast<std::size_t>(index)];
      head.value = values[static_cast<std::size_t>(index)];
      for (int member = 0; member < group; ++member) {
        const calibrate::Moments query =
            calibrate::rotated_moments(queries[static_cast<std::size_t>(index * group + member)],
                                       target.coding().rotary(), distances);
        head.query.second += query.second;
        head.query.first += query.first;
        head.query.count += query.count;
      }
    }
  }
  return moments;
}

namespace {

/// What measure_retrieval needs of a sample, which may be one that nobody loaded from a file.
void check_sample(const Sample& sample, const Config& config, std::size_t index) {
  const auto fail = [&](const std::string& what) {
    throw std::runtime_error("evaluation set: sample " + std::to_string(index) + " of task " +
                             sample.task + ": " + what);
  };
  if (sample.prompt.size() < 2)
    fail("a prompt of " + std::to_string(sample.prompt.size()) + " tokens, at least 2 expected");
  if (sample.answer.empty()) fail("an answer of 0 tokens, at least 1 expected");
  for (const Ids* ids : {&sample.prompt, &sample.answer}) {
    for (const std::int32_t id : *ids) {
      if (id < 0 || id >= config.vocabulary_size)
        fail((ids == &sample.prompt ? "prompt has id " : "answer has id ") + std::to_string(id) +
             ", vocabulary has " + std::to_string(config.vocabulary_size));
    }
  }
  const std::size_t positions = sample.prompt.size() + sample.answer.size() - 1;
  if (positions > static_cast<std::size_t>(config.max_positions))
    fail(std::to_string(positions) + " positions, the model has " +
         std::to_string(config.max_positions));
}

}  // namespace

std::int64_t longest_sample(const Engine& engine, const std::vector<Sample>& samples) {
  std::size_t most = 0;
  for (const Sample& sample : samples)
    most = std::max(most, sample.prompt.size() + sample.answer.size());
  return std::min<std::int64_t>(static_cast<std::int64_t>(most),
                                engine.model.config().max_positions);
}

std::int64_t longest_sample(const Engine& engine, const std::vector<RulerSample>& samples) {
  std::int64_t most = 0;
  for (const RulerSample& sample : samples)
    most = std::max(most, static_cast<std::int64_t>(encode_prompt(engine, sample.prompt).size()) +
                              sample.scoring.tokens);
  return std::min<std::int64_t>(most, engine.model.config().max_positions);
}

void measure_retrieval(const Engine& engine, std::vector<Contender>& contenders,
                       const std::string& set, const std::vector<Sample>& samples, int tail) {
  const int vocabulary = engine.model.config().vocabulary_size;
  if (tail < 1)
    throw std::runtime_error("retrieval: a tail of " + std::to_string(tail) +
                             " tokens, at least 1 expected");
  for (std::size_t i = 0; i < samples.size(); ++i)
    check_sample(samples[i], engine.model.config(), i);
  for (Contender& contender : contenders)
    contender.row.outcomes.clear(), contender.row.retrieval_set = set;
  Progress progress("retrieval", static_cast<std::int64_t>(samples.size()));
  for (const Sample& sample : samples) {
    const std::size_t prompt =
        sample.prompt.size() - std::min(sample.prompt.size() - 1, static_cast<std::size_t>(tail));
    prefill_all(engine, contenders, slice(sample.prompt, 0, prompt));
    Ids rest = slice(sample.prompt, prompt, sample.prompt.size() - prompt);
    const std::size_t question = rest.size();
    rest.insert(rest.end(), sample.answer.begin(), sample.answer.end() - 1);
    for (Contender& contender : contenders) {
      KvStore& store = *contender.store;
      note_memory(engine, contender);
      bool right = true;
      for (std::size_t at = 0; at < rest.size() && right; at += kStep) {
        const std::size_t count = std::min<std::size_t>(kStep, rest.size() - at);
        const std::vector<float> hidden = decode(engine, store, kSequence, slice(rest, at, count));
        const std::size_t first = std::max(at, question - 1);
        if (first >= at + count) continue;
        const std::vector<float> logits =
            engine.model.logits(hidden, static_cast<std::int64_t>(first - at),
                                static_cast<std::int64_t>(at + count - first));
        for (std::size_t i = first; i < at + count; ++i) {
          const float* line = logits.data() + (i - first) * static_cast<std::size_t>(vocabulary);
          right = right && argmax(line, vocabulary) == sample.answer[i + 1 - question];
        }
      }
      contender.row.outcomes[sample.task].push_back(right ? '1' : '0');
      store.erase(kSequence);
    }
    progress.step();
  }
  for (Contender& contender : contenders) {
    for (const auto& [task, outcomes] : contender.row.outcomes) {
      const auto hits = std::count(outcomes.begin(), outcomes.end(), '1');
      contender.row.exact_match[task] =
          static_cast<double>(hits) / static_cast<double>(outcomes.size());
      contender.row.samples[task] = static_cast<int>(outcomes.size());
    }
  }
}

namespace {

/// What measure_ruler needs of a sample: its prompt's ids, and that the answer has room behind
/// them.
std::vector<Ids> encode_ruler(const Engine& engine, const std::vector<RulerSample>& samples) {
  const std::int64_t most = engine.model.config().max_positions;
  std::vector<Ids> prompts;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    prompts.push_back(encode_prompt(engine, samples[i].prompt));
    const auto tokens = static_cast<std::int64_t>(prompts.back().size());
    const std::string name =
        "ruler: sample " + std::to_string(i) + " of task " + samples[i].task + ": ";
    if (tokens < 2)
      throw std::runtime_error(name + "a prompt of " + std::to_string(tokens) +
                               " tokens, at least 2 expected");
    if (tokens + samples[i].scoring.tokens - 1 > most)
      throw std::runtime_error(name + std::to_string(tokens) + " tokens and an answer of " +
                               std::to_string(samples[i].scoring.tokens) + ", the model has " +
                               std::to_string(most) + " positions");
  }
  return prompts;
}

/// Decodes `rest` behind what is stored, then generates until the score is certain.
double ruler_score(const Engine& engine, KvStore& store, const Ids& rest,
                   const RulerSample& sample) {
  const Config& config = engine.model.config();
  std::vector<float> hidden;
  std::size_t count = 0;
  for (std::size_t at = 0; at < rest.size(); at += count) {
    count = std::min(kStep, rest.size() - at);
    hidden = decode(engine, store, kSequence, slice(rest, at, count));
  }
  Ids answer;
  double score = 0.0;
  for (auto last = static_cast<std::int64_t>(count) - 1;; last = 0) {
    const std::vector<float> logits = engine.model.logits(hidden, last, 1);
    const std::int32_t next = argmax(logits.data(), config.vocabulary_size);
    if (std::find(config.eos.begin(), config.eos.end(), next) != config.eos.end()) break;
    answer.push_back(next);
    score = string_match(engine.tokenizer.decode(answer), sample);
    if (score == 1.0 || static_cast<int>(answer.size()) == sample.scoring.tokens) break;
    hidden = decode(engine, store, kSequence, {next});
  }
  return score;
}

}  // namespace

void measure_ruler(const Engine& engine, std::vector<Contender>& contenders, const std::string& set,
                   const std::vector<RulerSample>& samples, int tail) {
  if (tail < 1)
    throw std::runtime_error("ruler: a tail of " + std::to_string(tail) +
                             " tokens, at least 1 expected");
  const std::vector<Ids> prompts = encode_ruler(engine, samples);
  for (Contender& contender : contenders)
    contender.row.match_scores.clear(), contender.row.retrieval_set = set;
  Progress progress("ruler", static_cast<std::int64_t>(samples.size() * contenders.size()));
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Ids& ids = prompts[i];
    const std::size_t prompt =
        ids.size() - std::min(ids.size() - 1, static_cast<std::size_t>(tail));
    prefill_all(engine, contenders, slice(ids, 0, prompt));
    for (Contender& contender : contenders) {
      note_memory(engine, contender);
      contender.row.match_scores[samples[i].task].push_back(ruler_score(
          engine, *contender.store, slice(ids, prompt, ids.size() - prompt), samples[i]));
      contender.store->erase(kSequence);
      progress.step();
    }
  }
  for (Contender& contender : contenders) {
    for (const auto& [task, scores] : contender.row.match_scores) {
      contender.row.string_match[task] =
          std::accumulate(scores.begin(), scores.end(), 0.0) / static_cast<double>(scores.size());
      contender.row.samples[task] = static_cast<int>(scores.size());
    }
  }
}

Ids generate(const Engine& engine, KvStore& store, const Ids& prompt, int max_tokens,
             const Sampling& sampling, const std::function<void(std::int32_t)>& on_token,
             const std::function<void()>& at_end) {
  const Config& config = engine.model.config();
  if (prompt.empty())
    throw std::runtime_error("generate: a prompt of 0 tokens, at least 1 is needed");
  std::mt19937_64 random(sampling.seed);
  store.create(kSequence);
  std::vector<float> hidden = prefill(engine, store, kSequence, prompt);
  std::int64_t last = static_cast<std::int64_t>(prompt.size()) - 1;
  Ids out;
  while (static_cast<int>(out.size()) < max_tokens) {
    const std::vector<float> logits = engine.model.logits(hidden, last, 1);
    std::int32_t next = argmax(logits.data(), config.vocabulary_size);
    if (sampling.temperature > 0.0F) {
      // Nucleus sampling: the smallest set of most likely tokens whose probability reaches top_p.
      std::vector<std::pair<double, std::int32_t>> candidates;
      const float top = logits[static_cast<std::size_t>(next)];
      double sum = 0.0;
      for (int i = 0; i < config.vocabulary_size; ++i) {
        candidates.emplace_back(
            std::exp(static_cast<double>(logits[static_cast<std::size_t>(i)] - top) /
                     sampling.temperature),
            i);
        sum += candidates.back().first;
      }
      std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
      });
      double kept = 0.0;
      std::size_t count = 0;
      while (count < candidates.size() &&
             (count == 0 || kept < static_cast<double>(sampling.top_p) * sum))
        kept += candidates[count++].first;
      double draw = std::generate_canonical<double, 53>(random) * kept;
      std::size_t chosen = 0;
      while (chosen + 1 < count && draw >= candidates[chosen].first)
        draw -= candidates[chosen++].first;
      next = candidates[chosen].second;
    }
    if (std::find(config.eos.begin(), config.eos.end(), next) != config.eos.end()) break;
    out.push_back(next);
    if (on_token) on_token(next);
    if (store.num_tokens(kSequence) + 1 >= config.max_positions ||
        static_cast<int>(out.size()) == max_tokens)
      break;
    hidden = decode(engine, store, kSequence, {next});
    last = 0;
  }
  if (at_end) at_end();
  store.erase(kSequence);
  return out;
}

}  // namespace llama
