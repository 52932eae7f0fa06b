// SPDX-License-Identifier: Apache-2.0
#include "synthesize.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "progress.hpp"

namespace llama {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kLeastPercent = 93;       // of the length
constexpr std::size_t kLeastWords = 16;          // 256 keys: four different ones are found at once
constexpr std::int32_t kLargestShortId = 65535;  // ids are stored in 2 bytes, larger ones in 4
constexpr std::size_t kQuestion = 160;           // bytes of the prompt's end that the .json shows
constexpr std::string_view kWhitespace = " \t\r\n";
constexpr std::string_view kNoise =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

enum class Ground { noise, text, pairs };

struct Task {
  std::string_view name;
  Ground ground;
  std::size_t keys, values,
      queries;            // keys hidden, values of each, keys asked for; none in variable tracking
  std::string_view type;  // what the values are called
};
constexpr std::array<Task, 8> kTasks{{{"s1", Ground::noise, 1, 1, 1, "number"},
                                      {"s2", Ground::text, 1, 1, 1, "number"},
                                      {"s3", Ground::text, 1, 1, 1, "phrase"},
                                      {"mk1", Ground::text, 4, 1, 1, "number"},
                                      {"mk2", Ground::pairs, 1, 1, 1, "number"},
                                      {"mv", Ground::text, 1, 4, 1, "number"},
                                      {"mq", Ground::text, 4, 1, 4, "number"},
                                      {"vt", Ground::noise, 0, 0, 0, "variable"}}};

/// The engine's numbers are fixed by the standard, those of the standard's distributions are not.
/// For the same reason no expression below draws twice: the order in which operands are evaluated
/// is the compiler's choice.
class Random {
 public:
  explicit Random(std::seed_seq& seed) : engine_(seed) {}
  std::size_t below(std::size_t n) {
    const std::uint64_t limit =
        std::mt19937_64::max() -
        std::mt19937_64::max() % n;  // rejection: the remainder is not biased
    std::uint64_t x = engine_();
    while (x >= limit) x = engine_();
    return static_cast<std::size_t>(x % n);
  }
  double fraction() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  std::vector<double> fractions(std::size_t n) {
    std::vector<double> list(n);
    for (double& x : list) x = fraction();
    return list;
  }

 private:
  std::mt19937_64 engine_;
};

/// What is random in a sample, and the words it is made of.
struct Dice {
  Random& random;
  const std::vector<std::string>& words;

  const std::string& word() { return words[random.below(words.size())]; }
  std::string key() {
    const std::string& first = word();
    const std::string& second = word();
    return first + "-" + second;
  }
  std::string number(int digits) {
    std::string text(1, static_cast<char>('1' + random.below(9)));
    for (int i = 1; i < digits; ++i) text += static_cast<char>('0' + random.below(10));
    return text;
  }
  std::string phrase() {
    std::string text = word();
    for (int i = 1; i < 4; ++i) text += " " + word();
    return text;
  }
  std::string variable() {
    std::string text;
    for (int i = 0; i < 3; ++i) text += static_cast<char>('A' + random.below(26));
    return text;
  }
  std::string value(std::string_view type) { return type == "phrase" ? phrase() : number(7); }
};

template <class Draw>
std::vector<std::string> distinct(std::size_t n, Draw draw) {
  std::vector<std::string> list;
  while (list.size() < n) {
    std::string next = draw();
    if (std::find(list.begin(), list.end(), next) == list.end()) list.push_back(std::move(next));
  }
  return list;
}

std::string join(const std::vector<std::string>& list, std::string_view separator,
                 std::string_view last) {
  std::string text;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (i > 0) text += i + 1 == list.size() ? last : separator;
    text += list[i];
  }
  return text;
}

struct Needle {
  std::string text;
  double depth;
};

/// A sample but for its haystack.
struct Draft {
  std::string preamble;  // without its last newline: every haystack begins with one
  std::string question;
  std::string answer;
  std::vector<std::string> keys;
  std::vector<Needle> needles;
};

std::string needle_text(std::string_view type, const std::string& key, const std::string& value) {
  return "One of the special magic " + std::string(type) + "s for " + key + " is: " + value + ".";
}

void ask(Draft& draft, std::string_view type, const std::vector<std::string>& keys, bool several) {
  const std::string things = std::string(type) + (several ? "s" : "");
  const std::string object = "special magic " + things + " for " + join(keys, ", ", ", and ");
  draft.preamble =
      std::string(several ? "Some" : "A") + " special magic " + things +
      (several ? " are" : " is") +
      " hidden within the following text. Make sure to memorize it. I will quiz you about the " +
      things + " afterwards.";
  draft.question = std::string("\nWhat ") + (several ? "are all the " : "is the ") + object +
                   " mentioned in the provided text? The " + object +
                   " mentioned in the provided text " + (several ? "are" : "is");
}

/// The first `n` places of a random order of `size` places.
std::vector<std::size_t> choose(Random& random, std::size_t size, std::size_t n) {
  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = 0; i < n; ++i) std::swap(order[i], order[i + random.below(size - i)]);
  order.resize(n);
  return order;
}

/// All tasks but vt: keys with values, and a question about some of the keys.
Draft keys_and_values(const Task& task, Dice dice) {
  Draft draft;
  const auto& keys = draft.keys = distinct(task.keys, [&] { return dice.key(); });
  const auto values = distinct(task.keys * task.values, [&] { return dice.value(task.type); });
  for (std::size_t k = 0; k < task.keys; ++k) {
    auto depths = dice.random.fractions(task.values);
    std::sort(depths.begin(),
              depths.end());  // several values are asked for in the order of the text
    for (std::size_t v = 0; v < task.values; ++v)
      draft.needles.push_back(
          {needle_text(task.type, keys[k], values[k * task.values + v]), depths[v]});
  }
  std::vector<std::string> asked, answers;
  for (const std::size_t k : choose(dice.random, task.keys, task.queries)) {
    asked.push_back(keys[k]);
    for (std::size_t v = 0; v < task.values; ++v) answers.push_back(values[k * task.values + v]);
  }
  ask(draft, task.type, asked, answers.size() > 1);
  draft.answer = " " + join(answers, ", ", ", ");
  return draft;
}

/// vt: a variable gets a value, a second one gets the first, a third one the second; in this order
/// in the text.
Draft variable_chain(Dice dice) {
  Draft draft;
  const auto names = distinct(3, [&] { return dice.variable(); });
  const std::string value = dice.number(5);
  auto depths = dice.random.fractions(names.size());
  std::sort(depths.begin(), depths.end());
  for (std::size_t i = 0; i < names.size(); ++i) {
    draft.needles.push_back(
        {"VAR " + names[i] + " = " + (i == 0 ? value : "VAR " + names[i - 1]) + ".", depths[i]});
  }
  draft.preamble =
      "Memorize and track the chain(s) of variable assignment hidden in the following text.\n";
  draft.question = "\nQuestion: Find all variables that are assigned the value " + value +
                   " in the text above. Answer: According to the chain(s) of variable assignment "
                   "in the text above, " +
                   std::to_string(names.size()) + " variables are assigned the value " + value +
                   ", they are:";
  draft.answer = " " + join(names, " ", " ");
  return draft;
}

struct Haystack {
  std::string text;
  std::vector<std::size_t> gaps;  // offsets at which a needle may go in, ascending
  char separator = '\n';          // between the text and a needle
};

/// A haystack of any size; a size is the number of blocks, bytes or pairs, whichever the haystack
/// consists of.
struct Source {
  std::function<Haystack(std::int64_t)> haystack;
  std::int64_t smallest;
  std::int64_t largest;
  std::string unit;
};

Source noise(std::int64_t largest) {
  const auto haystack = [](std::int64_t blocks) {
    Haystack hay;
    for (std::int64_t i = 0; i < blocks; ++i) {
      if (i > 0) hay.gaps.push_back(hay.text.size());
      hay.text.append("\n").append(kNoise);
    }
    return hay;
  };
  return {haystack, 2, largest, "blocks"};
}

/// Pairs of random keys and values; the needle is one more of them, and may be the first or the
/// last. None has a key asked for.
Source pairs(std::int64_t largest, const Task& task, const std::vector<std::string>& taken,
             Dice dice) {
  const auto lines = std::make_shared<std::vector<std::string>>();
  const auto haystack = [lines, type = task.type, taken, dice](std::int64_t count) mutable {
    while (static_cast<std::int64_t>(lines->size()) < count) {
      const std::string key = dice.key();
      if (std::find(taken.begin(), taken.end(), key) != taken.end()) continue;
      lines->push_back("\n" + needle_text(type, key, dice.value(type)));
    }
    Haystack hay;
    hay.gaps.push_back(0);
    for (std::int64_t i = 0; i < count; ++i)
      hay.gaps.push_back((hay.text += (*lines)[static_cast<std::size_t>(i)]).size());
    return hay;
  };
  return {haystack, 2, largest, "pairs"};
}

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0U) == 0x80U; }

/// `count` bytes from `start` on; behind the last byte comes the first one.
std::string cyclic(const std::string& text, std::size_t start, std::size_t count) {
  std::string slice = text.substr(start, count);
  return slice + text.substr(0, count - slice.size());
}

/// A place near `at` where a sentence, else a line, else a word, else a character begins.
std::size_t beginning_near(const std::string& text, std::size_t at) {
  const std::string window = cyclic(text, at, std::min<std::size_t>(text.size(), 400));
  std::size_t offset = 0;
  for (const std::string_view end : {". ", "\n", " "}) {
    const std::size_t found = window.find(end);
    if (found == std::string::npos) continue;
    offset = found + 1;
    break;
  }
  while (offset < window.size() && (kWhitespace.find(window[offset]) != std::string_view::npos ||
                                    continues_character(window[offset])))
    ++offset;
  return (at + offset) % text.size();
}

std::vector<std::size_t> sentence_ends(const std::string& text) {
  std::vector<std::size_t> ends;
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (std::string_view(".!?").find(text[i - 1]) != std::string_view::npos &&
        kWhitespace.find(text[i]) != std::string_view::npos)
      ends.push_back(i);
  }
  return ends;
}

std::vector<std::size_t> word_ends(const std::string& text) {
  std::vector<std::size_t> ends;
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (text[i] == ' ') ends.push_back(i);
  }
  return ends;
}

Source text_slice(const std::string& text, Random& random) {
  const std::size_t start = beginning_near(text, random.below(text.size()));
  const auto haystack = [&text, start](std::int64_t bytes) {
    std::size_t end = static_cast<std::size_t>(bytes);
    while (end > 0 && continues_character(text[(start + end) % text.size()]))
      --end;  // no half character at the end
    Haystack hay{"\n" + cyclic(text, start, end), {}, ' '};
    hay.gaps = sentence_ends(hay.text);
    if (hay.gaps.size() < 3) hay.gaps = word_ends(hay.text);
    return hay;
  };
  return {haystack, 64, static_cast<std::int64_t>(text.size()), "bytes of text"};
}

std::string prompt_text(const Draft& draft, const Haystack& hay) {
  std::vector<Needle> needles = draft.needles;
  std::stable_sort(needles.begin(), needles.end(),
                   [](const Needle& a, const Needle& b) { return a.depth < b.depth; });
  std::string text = draft.preamble;
  std::size_t done = 0;
  for (const Needle& needle : needles) {
    const std::size_t places = hay.gaps.size();
    const std::size_t place = static_cast<std::size_t>(needle.depth * static_cast<double>(places));
    const std::size_t gap = places == 0 ? hay.text.size() : hay.gaps[std::min(place, places - 1)];
    text.append(hay.text, done, gap - done).append(1, hay.separator).append(needle.text);
    done = gap;
  }
  return text.append(hay.text, done).append(draft.question);
}

struct Fitted {
  std::string text;
  Ids ids;
};

/// The prompt whose haystack makes the sample as long as asked for. Tokens are about linear in the
/// size, so a line through the smallest and the last size gives the next one; where it misses, the
/// bracket shrinks. `extra`: tokens besides the prompt's.
Fitted fit(const Tokenizer& tokenizer, std::string_view task, const Draft& draft,
           const Source& source, std::int64_t extra, std::int64_t length) {
  const auto make = [&](std::int64_t size) {
    Fitted fitted{prompt_text(draft, source.haystack(size)), {}};
    fitted.ids = tokenizer.encode(fitted.text);
    return fitted;
  };
  const auto tokens = [&](const Fitted& fitted) {
    return static_cast<std::int64_t>(fitted.ids.size()) + extra;
  };
  const std::int64_t least = (kLeastPercent * length + 99) / 100;
  const std::int64_t target = (least + length) / 2;
  const auto fail = [&](std::int64_t size, std::int64_t have) {
    throw std::runtime_error("synthesize: task " + std::string(task) + " has " +
                             std::to_string(have) + " tokens with " + std::to_string(size) + " " +
                             source.unit + ", " + std::to_string(least) + " to " +
                             std::to_string(length) + " are asked for");
  };
  Fitted fitted = make(source.smallest);
  const std::int64_t base = tokens(fitted);
  if (base > length) fail(source.smallest, base);  // the fixed part alone is too long
  if (base >= least) return fitted;
  std::int64_t low = source.smallest, low_tokens = base, high = source.largest + 1;
  for (std::int64_t size = std::min(2 * low, source.largest); high - low > 1;) {
    fitted = make(size);
    const std::int64_t have = tokens(fitted);
    if (have >= least && have <= length) return fitted;
    if (have < least) {
      low = size;
      low_tokens = have;
    } else {
      high = size;
    }
    const std::int64_t grown = std::max<std::int64_t>(have - base, 1);
    const std::int64_t next = source.smallest + (target - base) * (size - source.smallest) / grown;
    size = std::clamp(next, low + 1, std::max(high - 1, low + 1));
  }
  fail(low, low_tokens);  // all of the text is too short, or two sizes lie on either side of what
                          // is asked for
  return fitted;
}

Source make_source(const Task& task, const Draft& draft, const std::string& text, Dice dice,
                   std::int64_t length) {
  switch (task.ground) {
    case Ground::noise:
      return noise(length);
    case Ground::pairs:
      return pairs(length, task, draft.keys, dice);
    case Ground::text:
      break;
  }
  return text_slice(text, dice.random);
}

struct Inputs {
  const Tokenizer& tokenizer;
  const Config& config;
  const std::string& text;
  const std::vector<std::string>& words;
};

SyntheticSample make_sample(const Inputs& in, const Task& task, Dice dice, std::int64_t length) {
  const Draft draft = task.keys == 0 ? variable_chain(dice) : keys_and_values(task, dice);
  SyntheticSample made{
      {std::string(task.name), {}, in.tokenizer.encode(draft.answer)}, {}, draft.answer, {}};
  if (in.config.bos >= 0) made.sample.prompt.push_back(in.config.bos);
  const auto extra =
      static_cast<std::int64_t>(made.sample.prompt.size() + made.sample.answer.size());
  Fitted fitted = fit(in.tokenizer, task.name, draft,
                      make_source(task, draft, in.text, dice, length), extra, length);
  made.sample.prompt.insert(made.sample.prompt.end(), fitted.ids.begin(), fitted.ids.end());
  made.prompt_text = std::move(fitted.text);
  for (const Needle& needle : draft.needles) made.depths.push_back(needle.depth);
  return made;
}

/// The place of a task in kTasks, by which its random numbers are seeded.
std::size_t find_task(const std::string& name) {
  const auto task = std::find_if(kTasks.begin(), kTasks.end(),
                                 [&](const Task& candidate) { return candidate.name == name; });
  if (task == kTasks.end())
    throw std::runtime_error("synthesize: task " + name +
                             " is unknown; there are: " + join(synthetic_tasks(), ", ", ", "));
  return static_cast<std::size_t>(task - kTasks.begin());
}

void check(const Inputs& in, const SynthesisOptions& options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw std::runtime_error("synthesize: " + message);
  };
  require(options.samples >= 1,
          std::to_string(options.samples) + " samples a task, at least 1 is needed");
  require(options.length >= 1 && options.length <= in.config.max_positions,
          "length " + std::to_string(options.length) + ", the model's context is 1 to " +
              std::to_string(in.config.max_positions) + " tokens");
  require(in.words.size() >= kLeastWords, std::to_string(in.words.size()) +
                                              " different words, at least " +
                                              std::to_string(kLeastWords) + " are needed");
  require(in.text.size() >= 64,
          "the text has " + std::to_string(in.text.size()) + " bytes, at least 64 are needed");
}

/// Separators of documents are no text; a slice may reach over one.
std::string without_separators(const std::string& text) {
  std::string out;
  std::copy_if(text.begin(), text.end(), std::back_inserter(out),
               [](char byte) { return byte != '\x1e'; });
  return out;
}

/// The last bytes of a text, from the beginning of a character on.
std::string ending(const std::string& text) {
  std::size_t first = text.size() - std::min(text.size(), kQuestion);
  while (first < text.size() && continues_character(text[first])) ++first;
  return text.substr(first);
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream stream(path, std::ios::binary);
  if (!(stream << bytes).flush()) throw std::runtime_error("synthesize: cannot write " + path);
}

}  // namespace

const std::vector<std::string>& synthetic_tasks() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Task& task : kTasks) list.emplace_back(task.name);
    return list;
  }();
  return names;
}

std::string words_beside(const std::filesystem::path& program) {
  return beside(program, "words.txt", "synthesize: no words",
                "name a file with --words (examples/data/words.txt of the sources)");
}

std::vector<std::string> read_words(const std::string& path) {
  std::istringstream stream(read_text(path));
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  std::sort(words.begin(), words.end());
  words.erase(std::unique(words.begin(), words.end()), words.end());
  return words;
}

std::vector<SyntheticSample> synthesize(const Tokenizer& tokenizer, const Config& config,
                                        const std::string& text,
                                        const std::vector<std::string>& words,
                                        const SynthesisOptions& options) {
  const std::string documents = without_separators(text);
  const Inputs in{tokenizer, config, documents, words};
  check(in, options);
  std::vector<std::size_t> tasks;
  for (const std::string& name : options.tasks.empty() ? synthetic_tasks() : options.tasks)
    tasks.push_back(find_task(name));
  std::vector<SyntheticSample> samples;
  Progress progress("synthesize", static_cast<std::int64_t>(tasks.size()) * options.samples);
  for (const std::size_t task : tasks) {
    for (int i = 0; i < options.samples; ++i) {
      std::seed_seq seed{options.seed & 0xffffffffU, options.seed >> 32, std::uint64_t{task},
                         static_cast<std::uint64_t>(i), static_cast<std::uint64_t>(options.length)};
      Random random(seed);
      samples.push_back(make_sample(in, kTasks[task], {random, words}, options.length));
      progress.step();
    }
  }
  return samples;
}

void write_samples(const std::string& prefix, const std::vector<SyntheticSample>& samples,
                   std::int64_t length) {
  std::string rows, data;
  std::map<std::string, int> count;
  const bool wide = std::any_of(samples.begin(), samples.end(), [](const SyntheticSample& made) {
    return std::any_of(made.sample.prompt.begin(), made.sample.prompt.end(),
                       [](std::int32_t id) { return id > kLargestShortId; });
  });
  const std::size_t id_bytes = wide ? 4 : 2;
  for (const SyntheticSample& made : samples) {
    nlohmann::ordered_json depths = nlohmann::ordered_json::array();
    for (const double depth : made.depths) depths.push_back(std::round(depth * 1000.0) / 1000.0);
    nlohmann::ordered_json row{{"task", made.sample.task},
                               {"length", length},
                               {"index", count[made.sample.task]++},
                               {"answer_ids", made.sample.answer},
                               {"answer", made.answer_text},
                               {"depths", depths},
                               {"question", ending(made.prompt_text)},
                               {"offset", data.size() / id_bytes},
                               {"num_tokens", made.sample.prompt.size()}};
    if (wide) row["id_bytes"] = id_bytes;
    // The text may hold bytes that are no UTF-8; the question is there to be read only.
    rows += (rows.empty() ? "[\n" : ",\n") +
            row.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    for (const std::int32_t id : made.sample.prompt) {
      for (std::size_t byte = 0; byte < id_bytes; ++byte)
        data += static_cast<char>(id >> 8 * byte & 0xff);
    }
  }
  write_file(prefix + ".bin", data);
  write_file(prefix + ".json", rows + "\n]\n");
}

}  // namespace llama
