// SPDX-License-Identifier: Apache-2.0
// Samples in the format that RULER's generator writes, and RULER's scores. The samples here were
// written by hand.
#include "ruler.hpp"

#include <doctest/doctest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "report.hpp"
#include "synthesize.hpp"

using namespace llama;

namespace {

const std::string kData = LOWRANKKV_EXAMPLE_DATA;

// Both forms of a line: the end of the prompt in a field of its own, and in `input`.
const std::string kLines =
    R"({"index": 0, "input": "One of the numbers is: 7. What is it?", "outputs": ["7"], "length": 140, "length_w_model_temp": 140, "answer_prefix": " It is", "token_position_answer": 5})"
    "\n\n"
    R"({"index": 1, "input": "Caf\u00e9 numbers: 8, 9. What are they? They are", "outputs": ["8", "9"], "length": 141})"
    "\r\n";

RulerSample sample(const std::string& task, const std::vector<std::string>& references) {
  return {task, "prompt", references, ruler_scoring(task)};
}
void check_error(const std::string& line, const std::string& expected) {
  CHECK_THROWS_WITH_AS(read_ruler("vt", kLines + line, "f.jsonl"), expected.c_str(),
                       std::runtime_error);
}

/// A folder that is gone afterwards.
struct Folder {
  explicit Folder(std::string name) : path(std::move(name)) { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }
  void write(const std::string& file, const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(path + "/" + file).parent_path());
    std::ofstream(path + "/" + file) << content;
  }
  std::string path;
};

}  // namespace

TEST_CASE("a line is a prompt, with its prefix of the answer, and its references") {
  const auto samples = read_ruler("niah_single_1", kLines, "f.jsonl");
  REQUIRE(samples.size() == 2);
  CHECK(samples[0].task == "niah_single_1");
  CHECK(samples[0].prompt == "One of the numbers is: 7. What is it? It is");
  CHECK(samples[0].references == std::vector<std::string>{"7"});
  CHECK(samples[1].prompt == "Caf\xc3\xa9 numbers: 8, 9. What are they? They are");
  CHECK(samples[1].references == std::vector<std::string>{"8", "9"});
  CHECK(samples[1].scoring.all);
  CHECK(samples[1].scoring.tokens == 128);
}

TEST_CASE("tasks are scored as RULER scores them, by the beginning of their names") {
  for (const auto& [task, tokens] : std::vector<std::pair<std::string, int>>{
           {"niah_multikey_3", 128}, {"vt", 30}, {"cwe", 120}, {"fwe", 50}}) {
    CHECK(ruler_scoring(task).all);
    CHECK(ruler_scoring(task).tokens == tokens);
  }
  CHECK_FALSE(ruler_scoring("qa_2").all);
  CHECK(ruler_scoring("qa_2").tokens == 32);
  CHECK_THROWS_WITH_AS(ruler_scoring("s1"),
                       "ruler: task s1 is unknown; names begin with niah, vt, cwe, fwe or qa",
                       std::runtime_error);
}

TEST_CASE("what is no sample is refused, with file, line and field") {
  check_error("{\"input\": 3}", "f.jsonl, line 4: input is 3, expected a text");
  check_error("{\"outputs\": [\"a\"]}", "f.jsonl, line 4: input is missing, it must be there");
  check_error("{\"input\": \"a\"}", "f.jsonl, line 4: outputs is missing, it must be there");
  check_error("{\"input\": \"a\", \"outputs\": []}",
              "f.jsonl, line 4: outputs is [], expected one text at least");
  check_error("{\"input\": \"a\", \"outputs\": [\"b\", \"\"]}",
              "f.jsonl, line 4: outputs[1] is \"\", expected a text that is not empty");
  check_error("{\"input\": \"a\", \"outputs\": [\"b\"], \"answer_prefix\": 1}",
              "f.jsonl, line 4: answer_prefix is 1, expected a text");
  CHECK_THROWS_WITH_AS(read_ruler("vt", "{\"input\"", "f.jsonl"),
                       doctest::Contains("f.jsonl, line 1"), std::runtime_error);
  CHECK_THROWS_WITH_AS(read_ruler("vt", " \n\n", "f.jsonl"),
                       "ruler: f.jsonl has 0 samples, at least 1 is expected", std::runtime_error);
}

TEST_CASE("string match: all references count, or one does; capitals and edges do not") {
  const auto numbers = sample("niah_multivalue", {"12", "34", "56", "78"});
  CHECK(string_match(" 34, 12 and 99", numbers) == 0.5);
  CHECK(string_match("78 56 34 12", numbers) == 1.0);
  CHECK(string_match("", numbers) == 0.0);
  CHECK(string_match("128", numbers) == 0.25);  // a part of a word, too
  const auto names = sample("qa_1", {"Zürich", "ÉMILE ZOLA"});
  CHECK(string_match("in ZÜRICH", names) == 1.0);
  CHECK(string_match("émile zola\n", names) == 1.0);
  CHECK(string_match("Zola", names) == 0.0);
  CHECK(string_match("\xff zürich \xc3", names) == 1.0);  // half a character behind it
  // Control characters are newlines, so a tab is not the space of a reference.
  CHECK(string_match("\x01 a\tb\x02", sample("cwe", {"a b"})) == 0.0);
  CHECK(string_match("x a\tb", sample("cwe", {"a\nb"})) == 1.0);
}

TEST_CASE("a folder as prepare.py writes it, a file of it, and what is none") {
  const Folder folder("ruler_set");
  folder.write("vt/validation.jsonl", kLines);
  folder.write("niah_single_2/validation.jsonl", kLines);
  const auto all = load_ruler(folder.path, {}, 1);
  REQUIRE(all.size() == 2);
  CHECK(all[0].task == "niah_single_2");
  CHECK(all[1].task == "vt");
  CHECK(all[1].scoring.tokens == 30);
  const auto one = load_ruler(folder.path, {"vt"}, 50);
  REQUIRE(one.size() == 2);
  CHECK(one[0].task == "vt");
  CHECK(load_ruler(folder.path + "/vt/validation.jsonl", {}, 50)[0].task == "vt");
  folder.write("qa_1.jsonl", kLines);
  CHECK(load_ruler(folder.path + "/qa_1.jsonl", {}, 50)[0].task == "qa_1");
  CHECK_THROWS_WITH_AS(load_ruler(folder.path, {"cwe"}, 1),
                       "ruler: task cwe is none of 2 in ruler_set", std::runtime_error);
  folder.write("vt/test.jsonl", kLines);
  CHECK_THROWS_WITH_AS(load_ruler(folder.path, {}, 1),
                       "ruler: ruler_set/vt has 2 files *.jsonl, 1 is expected; name the one that "
                       "is asked for",
                       std::runtime_error);
  folder.write("other/validation.jsonl", kLines);
  CHECK_THROWS_WITH_AS(load_ruler(folder.path, {"other"}, 1),
                       "ruler: task other is unknown; names begin with niah, vt, cwe, fwe or qa",
                       std::runtime_error);
  const Folder empty("ruler_none");
  std::filesystem::create_directories(empty.path);
  CHECK_THROWS_WITH_AS(load_ruler(empty.path, {}, 1),
                       "ruler: ruler_none has 0 folders of tasks, at least 1 is expected",
                       std::runtime_error);
}

TEST_CASE(
    "answers are generated behind a compressed prompt and scored; what loses the needle fails") {
  const Engine engine(kData + "/nano", 2);
  const auto synthetic = synthesize(
      engine.tokenizer, engine.model.config(), read_text(kData + "/text/prose.txt"),
      read_words(kData + "/words.txt"), {.tasks = {"s1"}, .length = 600, .samples = 4, .seed = 5});
  std::vector<RulerSample> samples;
  for (const SyntheticSample& made : synthetic) {
    const std::string answer = made.answer_text.substr(1);
    samples.push_back(
        {"niah_single_1", made.prompt_text, {answer, "not there"}, {.all = true, .tokens = 20}});
    samples.push_back(
        {"qa_1", made.prompt_text, {"not there", answer}, {.all = false, .tokens = 20}});
  }
  const std::int64_t longest = longest_sample(engine, samples);
  CHECK(longest > 560);  // prompts of 600 tokens at most, and the answers' 20
  CHECK(longest <= 620);
  auto contenders =
      make_contenders(engine, {"FullKV", "StreamingLLM"}, {0.15}, {.context = 600}, longest, {});
  measure_ruler(engine, contenders, "set", samples, 32);
  const Row &full = contenders[0].row, &cut = contenders[1].row;
  CHECK(full.retrieval_set == "set");
  CHECK(full.match_scores.at("niah_single_1").size() == 4);
  CHECK(full.samples.at("qa_1") == 4);
  CHECK(full.string_match.at("niah_single_1") >= 0.375);  // of 0.5: one of two references
  CHECK(full.string_match.at("niah_single_1") <= 0.5);
  CHECK(full.string_match.at("qa_1") == 2.0 * full.string_match.at("niah_single_1"));
  CHECK(full.mean_string_match() == 1.5 * full.string_match.at("niah_single_1"));
  CHECK(cut.string_match.at("qa_1") <= 0.5);
  CHECK(cut.ratio_measured < 0.5);
  const char* path = "ruler_rows.json";
  write_json(path, {full});
  const auto json = nlohmann::json::parse(std::ifstream(path));
  std::remove(path);
  CHECK(json[0]["string_match"]["qa_1"] == full.string_match.at("qa_1"));
  CHECK(json[0]["match_scores"]["qa_1"] == full.match_scores.at("qa_1"));
  CHECK_FALSE(json[0].contains("exact_match"));

  samples[1].scoring.tokens = 4000;
  CHECK(longest_sample(engine, samples) == engine.model.config().max_positions);
  CHECK_THROWS_WITH_AS(measure_ruler(engine, contenders, "set", samples, 32),
                       doctest::Contains("ruler: sample 1 of task qa_1: "), std::runtime_error);
  CHECK_THROWS_WITH_AS(measure_ruler(engine, contenders, "set", {}, 0),
                       "ruler: a tail of 0 tokens, at least 1 expected", std::runtime_error);
}
