// SPDX-License-Identifier: Apache-2.0
// What is measured on windows of texts: bits per byte, divergence from FullKV.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <stdexcept>

#include "divergence.hpp"
#include "progress.hpp"
#include "teacher_forcing.hpp"

namespace llama {
namespace {

/// The windows of a text.
struct Windows {
  std::vector<Ids> ids;
  WindowShape shape;
  std::size_t prompt() const { return static_cast<std::size_t>(shape.tokens - shape.decoded); }
};

void check(const Engine& engine, const std::string& what, const WindowShape& shape) {
  const std::int64_t most = engine.model.config().max_positions;
  if (shape.tokens < 3 || shape.tokens > most)
    throw std::runtime_error(what + ": windows of " + std::to_string(shape.tokens) +
                             " tokens, the model takes 3 to " + std::to_string(most));
  if (shape.decoded < 2 || shape.decoded >= shape.tokens)
    throw std::runtime_error(what + ": " + std::to_string(shape.decoded) +
                             " tokens are decoded of windows of " + std::to_string(shape.tokens) +
                             ", 2 to " + std::to_string(shape.tokens - 1) + " expected");
}

Windows cut(const Engine& engine, const std::string& what, const NamedText& text, int max_windows,
            const WindowShape& shape) {
  const std::int32_t bos = engine.model.config().bos;
  const Ids ids = encode_documents(engine, text.text);
  const std::size_t body = static_cast<std::size_t>(shape.tokens) - (bos >= 0 ? 1 : 0);
  const std::size_t count = std::min(ids.size() / body, static_cast<std::size_t>(max_windows));
  if (count == 0)
    throw std::runtime_error(what + ": " + text.name + " has " + std::to_string(ids.size()) +
                             " tokens, a window needs " + std::to_string(body));
  Windows windows{{}, shape};
  for (std::size_t w = 0; w < count; ++w) {
    windows.ids.push_back(slice(ids, w * body, body));
    if (bos >= 0) windows.ids.back().insert(windows.ids.back().begin(), bos);
  }
  return windows;
}

/// The next tokens that a step is scored by, and where in the step.
struct Targets {
  std::vector<std::size_t> rows;
  std::vector<std::int32_t> tokens;
};

Targets targets_of(const Engine& engine, const Ids& window, std::size_t at, std::size_t count) {
  Targets targets;
  for (std::size_t i = 0; i < count && at + i + 1 < window.size(); ++i) {
    const std::int32_t next = window[at + i + 1];
    if (engine.tokenizer.bytes(next).empty()) continue;  // a boundary of documents
    targets.rows.push_back(i);
    targets.tokens.push_back(next);
  }
  return targets;
}

/// What a contender has been scored by so far.
struct Score {
  double nats = 0.0;
  std::vector<double> divergence;
  std::int64_t agreed = 0;
};

/// Logits of a step of one contender: adds them to its score.
/// @param reference  FullKV's distributions of the step's targets; null: no divergence is asked for
void add(const Engine& engine, const std::vector<float>& logits, const Targets& targets,
         const std::vector<NextToken>* reference, Score& score) {
  const int vocabulary = engine.model.config().vocabulary_size;
  const std::size_t count = targets.rows.size();
  std::vector<double> nats(count), divergence(count);
  std::vector<char> agreed(count);
  engine.threads->run(static_cast<std::int64_t>(count), [&](std::int64_t index, int) {
    const auto i = static_cast<std::size_t>(index);
    const float* row = logits.data() + targets.rows[i] * static_cast<std::size_t>(vocabulary);
    nats[i] = -log_probability(row, vocabulary, targets.tokens[i]);
    if (reference == nullptr) return;
    divergence[i] = (*reference)[i].divergence(row);
    agreed[i] = most_likely(row, vocabulary) == (*reference)[i].top() ? 1 : 0;
  });
  for (std::size_t i = 0; i < count; ++i) score.nats += nats[i];
  if (reference == nullptr) return;
  score.divergence.insert(score.divergence.end(), divergence.begin(), divergence.end());
  score.agreed += std::count(agreed.begin(), agreed.end(), 1);
}

std::vector<NextToken> distributions(const Engine& engine, const std::vector<float>& logits,
                                     const Targets& targets) {
  const int vocabulary = engine.model.config().vocabulary_size;
  std::vector<NextToken> list;
  list.reserve(targets.rows.size());
  for (const std::size_t row : targets.rows)
    list.emplace_back(logits.data() + row * static_cast<std::size_t>(vocabulary), vocabulary);
  return list;
}

std::int64_t steps_of(std::size_t tokens) {
  return static_cast<std::int64_t>((tokens + kStep - 1) / kStep);
}

/// All contenders over one window, step by step.
/// @param order  contenders in the order in which each step is decoded
/// @param divergence  the first of them is the reference of all
void run_window(const Engine& engine, std::vector<Contender>& contenders, const Ids& window,
                std::size_t prompt, const std::vector<std::size_t>& order, bool divergence,
                std::vector<Score>& scores, Progress& progress) {
  prefill_all(engine, contenders, slice(window, 0, prompt));
  progress.step(steps_of(prompt));
  std::vector<NextToken> reference;
  for (std::size_t at = prompt; at < window.size(); at += kStep) {
    const std::size_t count = std::min(kStep, window.size() - at);
    const Ids step = slice(window, at, count);
    const Targets targets = targets_of(engine, window, at, count);
    for (const std::size_t c : order) {
      const std::vector<float> hidden = decode(engine, *contenders[c].store, kSequence, step);
      const std::vector<float> logits =
          engine.model.logits(hidden, 0, static_cast<std::int64_t>(count));
      if (divergence && c == order.front()) reference = distributions(engine, logits, targets);
      add(engine, logits, targets, divergence ? &reference : nullptr, scores[c]);
      progress.step();
    }
  }
  for (Contender& contender : contenders) {
    note_memory(engine, contender);
    contender.row.text_ratio_measured = contender.row.ratio_measured;
    contender.store->erase(kSequence);
  }
}

/// Bytes of the tokens that a window is scored by.
std::int64_t scored_bytes(const Engine& engine, const Ids& window, std::size_t prompt) {
  std::int64_t bytes = 0;
  for (std::size_t i = prompt + 1; i < window.size(); ++i)
    bytes += static_cast<std::int64_t>(engine.tokenizer.bytes(window[i]).size());
  return bytes;
}

/// All contenders over one text: fills what rows say of it, and returns their scores.
std::vector<Score> run_text(const Engine& engine, std::vector<Contender>& contenders,
                            const std::string& what, const std::string& name,
                            const Windows& windows, const std::vector<std::size_t>& order,
                            bool divergence) {
  std::vector<Score> scores(contenders.size());
  std::int64_t bytes = 0;
  const std::int64_t steps =
      steps_of(windows.prompt()) + static_cast<std::int64_t>(contenders.size()) *
                                       steps_of(static_cast<std::size_t>(windows.shape.decoded));
  Progress progress(what + ", " + name, static_cast<std::int64_t>(windows.ids.size()) * steps);
  for (const Ids& window : windows.ids) {
    run_window(engine, contenders, window, windows.prompt(), order, divergence, scores, progress);
    bytes += scored_bytes(engine, window, windows.prompt());
  }
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    Row& row = contenders[c].row;
    row.bits_per_byte[name] = scores[c].nats / std::log(2.0) / static_cast<double>(bytes);
    row.window = windows.shape;
    row.windows[name] = static_cast<int>(windows.ids.size());
    if (divergence) row.divergence[name] = summarize(scores[c].divergence, scores[c].agreed);
  }
  return scores;
}

}  // namespace

std::vector<NamedText> read_texts(const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    const std::size_t before = files.size();
    for (const fs::directory_entry& entry : fs::directory_iterator(path))
      if (entry.is_regular_file() && entry.path().extension() == ".txt")
        files.push_back(entry.path());
    if (files.size() == before)
      throw std::runtime_error("texts: folder " + path + " has 0 files *.txt, at least 1 expected");
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  std::vector<NamedText> texts;
  std::map<std::string, std::string> taken;
  for (const fs::path& file : files) {
    const std::string name = file.stem().string();
    const auto [entry, is_new] = taken.emplace(name, file.string());
    if (!is_new)
      throw std::runtime_error("texts: " + entry->second + " and " + file.string() +
                               " are both called " + name);
    texts.push_back({name, read_text(file.string())});
  }
  return texts;
}

void measure_bits_per_byte(const Engine& engine, std::vector<Contender>& contenders,
                           const std::string& name, const std::string& text, int max_windows,
                           const WindowShape& shape) {
  check(engine, "bits per byte", shape);
  const Windows windows = cut(engine, "bits per byte", {name, text}, max_windows, shape);
  std::vector<std::size_t> order;
  for (std::size_t c = 0; c < contenders.size(); ++c) order.push_back(c);
  run_text(engine, contenders, "bits per byte", name, windows, order, false);
}

void measure_divergence(const Engine& engine, std::vector<Contender>& contenders,
                        const std::vector<NamedText>& texts, int max_windows,
                        const WindowShape& shape) {
  check(engine, "kl", shape);
  const auto full =
      std::find_if(contenders.begin(), contenders.end(),
                   [](const Contender& contender) { return contender.row.method == "FullKV"; });
  if (full == contenders.end())
    throw std::runtime_error("kl: FullKV is none of " + std::to_string(contenders.size()) +
                             " methods, divergence is from it");
  std::vector<std::size_t> order{static_cast<std::size_t>(full - contenders.begin())};
  for (std::size_t c = 0; c < contenders.size(); ++c)
    if (c != order.front()) order.push_back(c);
  std::vector<Windows> cuts;  // of all texts before anything takes time
  for (const NamedText& text : texts) cuts.push_back(cut(engine, "kl", text, max_windows, shape));
  std::vector<Score> all(contenders.size());
  for (std::size_t t = 0; t < texts.size(); ++t) {
    const std::vector<Score> scores =
        run_text(engine, contenders, "kl", texts[t].name, cuts[t], order, true);
    for (std::size_t c = 0; c < contenders.size(); ++c) {
      all[c].divergence.insert(all[c].divergence.end(), scores[c].divergence.begin(),
                               scores[c].divergence.end());
      all[c].agreed += scores[c].agreed;
    }
  }
  for (std::size_t c = 0; c < contenders.size(); ++c)
    contenders[c].row.all_texts = summarize(all[c].divergence, all[c].agreed);
}

}  // namespace llama
