// SPDX-License-Identifier: Apache-2.0
// Generated retrieval samples on the model in examples/data: length, seed, and that each can be
// answered from its prompt.
#include "synthesize.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

using namespace llama;

namespace {

const std::string kData = LOWRANKKV_EXAMPLE_DATA;
const std::string kMagic = "One of the special magic ";

const Tokenizer& tokenizer() {
  static const Tokenizer own(kData + "/nano/tokenizer.json");
  return own;
}
const Config& config() {
  static const Config own(kData + "/nano/config.json");
  return own;
}
const std::string& text() {
  static const std::string own = read_text(kData + "/text/prose.txt");
  return own;
}
const std::vector<std::string>& words() {
  static const auto own = read_words(kData + "/words.txt");
  return own;
}

std::vector<SyntheticSample> make(const SynthesisOptions& options) {
  return synthesize(tokenizer(), config(), text(), words(), options);
}
std::vector<SyntheticSample> make(const std::string& task, std::int64_t length, int samples,
                                  std::uint64_t seed = 1) {
  return make({.tasks = {task}, .length = length, .samples = samples, .seed = seed});
}
std::vector<std::vector<std::int32_t>> ids(const std::vector<SyntheticSample>& samples) {
  std::vector<std::vector<std::int32_t>> list;
  for (const SyntheticSample& made : samples) {
    list.push_back(made.sample.prompt);
    list.push_back(made.sample.answer);
  }
  return list;
}
/// The parts of a text between separators.
std::vector<std::string> split(const std::string& joined, const std::string& separator) {
  std::vector<std::string> parts;
  std::size_t at = 0;
  for (std::size_t end; (end = joined.find(separator, at)) != std::string::npos;
       at = end + separator.size())
    parts.push_back(joined.substr(at, end - at));
  parts.push_back(joined.substr(at));
  return parts;
}
std::vector<std::string> answers(const SyntheticSample& made) {
  return split(made.answer_text.substr(1), made.sample.task == "vt" ? " " : ", ");
}
/// The keys in the question, in its order.
std::vector<std::string> asked(const SyntheticSample& made) {
  const std::string question = made.prompt_text.substr(made.prompt_text.rfind("\nWhat "));
  const std::size_t first = question.find(" for ") + 5;
  const std::string list = question.substr(first, question.find(" mentioned") - first);
  return split(std::regex_replace(list, std::regex(", and "), ", "), ", ");
}
/// The keys of all needles and their values, in the order of the text.
std::vector<std::pair<std::string, std::string>> hidden(const std::string& prompt) {
  static const std::regex needle(kMagic + "\\w+s for (\\S+) is: ([^.]+)\\.");
  std::vector<std::pair<std::string, std::string>> list;
  for (std::sregex_iterator at(prompt.begin(), prompt.end(), needle), end; at != end; ++at)
    list.emplace_back((*at)[1], (*at)[2]);
  return list;
}
void check_error(const SynthesisOptions& options, const std::string& expected) {
  CHECK_THROWS_WITH_AS(make(options), ("synthesize: " + expected).c_str(), std::runtime_error);
}
std::string message(const SynthesisOptions& options, const std::string& of_text) {
  try {
    synthesize(tokenizer(), config(), of_text, words(), options);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE(
    "samples have at most the tokens asked for and at least 93 % of them, begin with BOS, and "
    "their text is that of the ids") {
  for (const std::int64_t length : {512, 1024, 2048}) {
    const auto samples = make({.length = length, .samples = 4});
    CHECK(samples.size() == 4 * synthetic_tasks().size());
    for (const SyntheticSample& made : samples) {
      CAPTURE(made.sample.task);
      const auto tokens =
          static_cast<std::int64_t>(made.sample.prompt.size() + made.sample.answer.size());
      CHECK(tokens <= length);
      CHECK(100 * tokens >= 93 * length);
      CHECK(made.sample.prompt.front() == config().bos);
      CHECK((tokenizer().decode(made.sample.prompt) == made.prompt_text));
      CHECK(made.sample.answer.size() > 1);
      CHECK(tokenizer().decode(made.sample.answer) == made.answer_text);
      CHECK(made.answer_text.front() == ' ');
    }
  }
}

TEST_CASE("the seed decides; tasks and number of samples change no sample") {
  const SynthesisOptions options{.length = 512, .samples = 3, .seed = 7};
  const auto samples = make(options);
  CHECK(ids(samples) == ids(make(options)));
  for (std::size_t task = 0; task < synthetic_tasks().size(); ++task) {
    const auto own = ids({samples.begin() + static_cast<std::ptrdiff_t>(3 * task),
                          samples.begin() + static_cast<std::ptrdiff_t>(3 * task + 2)});
    CHECK(own == ids(make(synthetic_tasks()[task], 512, 2, 7)));
    for (const std::uint64_t other :
         {std::uint64_t{8}, std::uint64_t{7} + (std::uint64_t{1} << 32)}) {
      const auto others = ids(make(synthetic_tasks()[task], 512, 2, other));
      for (std::size_t i = 0; i < own.size(); ++i) CHECK(own[i] != others[i]);
    }
  }
  // Pinned: every compiler and platform makes the same samples.
  const auto first = make("mq", 512, 1, 7).front();
  CHECK(asked(first) ==
        std::vector<std::string>{"rule-series", "check-loose", "duty-deep", "inquiry-control"});
  CHECK(first.answer_text == " 6031653, 2493687, 7964981, 2465695");
}

TEST_CASE("every needle lies at its depth") {
  std::string even;  // a depth counts sentences; in sentences of one length it is one of bytes too
  for (int i = 0; i < 2000; ++i) even += "Nothing happens here. ";
  for (const std::string& task : synthetic_tasks()) {
    CAPTURE(task);
    for (const SyntheticSample& made :
         synthesize(tokenizer(), config(), even, words(),
                    {.tasks = {task}, .length = 4096, .samples = 6})) {
      const bool chain = task == "vt";
      const auto needles = hidden(made.prompt_text);
      if (task != "mk2") CHECK(made.depths.size() == (chain ? 3 : needles.size()));
      std::vector<double> found;
      const double whole =
          static_cast<double>(made.prompt_text.rfind(chain ? "\nQuestion" : "\nWhat "));
      for (std::size_t at = 0;
           (at = made.prompt_text.find(chain ? "VAR " : kMagic, at + 1)) != std::string::npos;) {
        if (chain && made.prompt_text[at - 1] != '\n')
          continue;  // the second variable of an assignment
        if (task == "mk2" &&
            made.prompt_text.compare(at, kMagic.size() + 12 + asked(made)[0].size(),
                                     kMagic + "numbers for " + asked(made)[0]) != 0)
          continue;
        found.push_back(static_cast<double>(at) / whole);
      }
      std::vector<double> stated = made.depths;
      std::sort(stated.begin(), stated.end());
      REQUIRE(found.size() == stated.size());
      // The preamble and the needles take room of their own.
      for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::abs(found[i] - stated[i]) < 0.04);
    }
  }
}

TEST_CASE(
    "the answer is the values of the keys asked for, in the question's order and then the text's") {
  struct Expected {
    const char* name;
    std::size_t keys, values, asked;
  };
  for (const auto& [name, keys, values, questions] : {Expected{"s1", 1, 1, 1},
                                                      {"s2", 1, 1, 1},
                                                      {"s3", 1, 1, 1},
                                                      {"mk1", 4, 1, 1},
                                                      {"mv", 1, 4, 1},
                                                      {"mq", 4, 1, 4},
                                                      {"mk2", 0, 1, 1}}) {
    const std::string task = name;
    CAPTURE(task);
    for (const SyntheticSample& made : make(task, 1024, 6)) {
      const auto needles = hidden(made.prompt_text);
      if (keys > 0) CHECK(needles.size() == keys * values);
      if (keys == 0) CHECK(needles.size() > 20);
      REQUIRE(asked(made).size() == questions);
      std::vector<std::string> expected;
      for (const std::string& key : asked(made)) {
        const std::size_t before = expected.size();
        for (const auto& [hidden_key, value] : needles) {
          if (hidden_key == key) expected.push_back(value);
        }
        CHECK(expected.size() == before + values);
      }
      CHECK(answers(made) == expected);
      const std::regex form(task == "s3" ? "[a-z]+( [a-z]+){3}" : "[1-9][0-9]{6}");
      for (const std::string& value : expected) CHECK(std::regex_match(value, form));
      CHECK(std::set<std::string>(expected.begin(), expected.end()).size() == expected.size());
    }
  }
}

TEST_CASE("mq asks in another order than the text's") {
  bool differs = false;
  for (const SyntheticSample& made : make("mq", 1024, 6)) {
    std::vector<std::string> in_text;
    for (const auto& [key, value] : hidden(made.prompt_text)) in_text.push_back(key);
    differs = differs || asked(made) != in_text;
    CHECK(std::is_permutation(in_text.begin(), in_text.end(), asked(made).begin()));
  }
  CHECK(differs);
}

TEST_CASE("vt's chain leads from the value to every variable of the answer") {
  for (const SyntheticSample& made : make("vt", 1024, 6)) {
    static const std::regex assignment("VAR ([A-Z]{3}) = (VAR )?([A-Z]{3}|[0-9]{5})\\.");
    std::vector<std::string> names;
    std::string last;
    for (std::sregex_iterator at(made.prompt_text.begin(), made.prompt_text.end(), assignment), end;
         at != end; ++at) {
      if (names.empty())
        CHECK(made.prompt_text.find("assigned the value " + (*at)[3].str() +
                                    " in the text above") != std::string::npos);
      if (!names.empty()) CHECK((*at)[3] == names.back());
      names.push_back((*at)[1]);
    }
    CHECK(names.size() == 3);
    CHECK(std::set<std::string>(names.begin(), names.end()).size() == 3);
    CHECK(answers(made) == names);
    CHECK(std::is_sorted(made.depths.begin(), made.depths.end()));
  }
}

TEST_CASE("load_samples reads back what was written") {
  const std::string prefix =
      (std::filesystem::temp_directory_path() / "lowrankkv_synthesize").string();
  const auto samples = make({.length = 512, .samples = 2});
  write_samples(prefix, samples, 512);
  const auto read = load_samples(prefix, {}, 50);
  REQUIRE(read.size() == samples.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    CHECK(read[i].task == samples[i].sample.task);
    CHECK(read[i].prompt == samples[i].sample.prompt);
    CHECK(read[i].answer == samples[i].sample.answer);
  }
  // The rows have the fields of the evaluation sets.
  const auto fields = [](const std::string& path) {
    std::vector<std::string> names;
    const auto rows = nlohmann::ordered_json::parse(std::ifstream(path));
    for (const auto& [name, value] : rows.at(0).items()) names.push_back(name);
    return names;
  };
  CHECK(fields(prefix + ".json") == fields(kData + "/nano/eval/retrieval_1024.json"));
  // Ids beyond 65535 take four bytes.
  auto wide = samples;
  wide.back().sample.prompt.back() = 151935;
  write_samples(prefix, wide, 512);
  const auto read_wide = load_samples(prefix, {}, 50);
  REQUIRE(read_wide.size() == wide.size());
  for (std::size_t i = 0; i < wide.size(); ++i) CHECK(read_wide[i].prompt == wide[i].sample.prompt);
  std::remove((prefix + ".json").c_str());
  std::remove((prefix + ".bin").c_str());
}

TEST_CASE("text in any script and with separators gives whole characters and no separator") {
  std::string unbroken, documents;
  for (int i = 0; i < 600; ++i) unbroken += "数学";
  for (int i = 0; i < 300; ++i) documents += "Ein kurzes Stück, größer als nichts.\x1e\n";
  for (const std::string& own : {unbroken, documents}) {
    for (const SyntheticSample& made :
         synthesize(tokenizer(), config(), own, words(),
                    {.tasks = {"s2", "mq"}, .length = 512, .samples = 5})) {
      CHECK_NOTHROW(nlohmann::json(made.prompt_text).dump());  // refuses what is no UTF-8
      CHECK(made.prompt_text.find('\x1e') == std::string::npos);
    }
  }
}

TEST_CASE("words are looked for beside the program, wherever that is") {
  CHECK(words_beside(kData + "/lowrankkv-llama") == kData + "/words.txt");
  CHECK_THROWS_WITH_AS(words_beside("/nowhere/lowrankkv-llama"),
                       "synthesize: no words at /nowhere/words.txt; name a file with --words "
                       "(examples/data/words.txt of the sources)",
                       std::runtime_error);
  CHECK(this_program().filename().string().starts_with("test_"));
}

TEST_CASE("errors name both values") {
  check_error({.tasks = {"s1", "s9"}},
              "task s9 is unknown; there are: s1, s2, s3, mk1, mk2, mv, mq, vt");
  check_error({.length = 8192}, "length 8192, the model's context is 1 to 4096 tokens");
  check_error({.length = 0}, "length 0, the model's context is 1 to 4096 tokens");
  check_error({.samples = 0}, "0 samples a task, at least 1 is needed");
  for (const std::string& task : synthetic_tasks()) {
    const std::string error = message({.tasks = {task}, .length = 64}, text());
    CHECK(std::regex_match(error, std::regex("synthesize: task " + task +
                                             " has [0-9]+ tokens with [0-9]+ (blocks|bytes of "
                                             "text|pairs), 60 to 64 are asked for")));
  }
  CHECK(std::regex_match(message({.tasks = {"s2"}}, text().substr(0, 2000)),
                         std::regex("synthesize: task s2 has [0-9]+ tokens with 2000 bytes of "
                                    "text, 3810 to 4096 are asked for")));
  CHECK(message({}, "short") == "synthesize: the text has 5 bytes, at least 64 are needed");
  CHECK_THROWS_WITH_AS(synthesize(tokenizer(), config(), text(), {"one", "two"}, {}),
                       "synthesize: 2 different words, at least 16 are needed", std::runtime_error);
  CHECK_THROWS_WITH_AS(read_words("/nowhere/words.txt"), "cannot open /nowhere/words.txt",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(write_samples("/nowhere/set", {}, 512),
                       "synthesize: cannot write /nowhere/set.bin", std::runtime_error);
}
