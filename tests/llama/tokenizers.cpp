// SPDX-License-Identifier: Apache-2.0
// Tokenizer files: what each member does to the ids (those of the tokenizers library, 0.23.3), and
// members and entries that are refused.
#include <doctest/doctest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tokenizer.hpp"

using namespace llama;
using Json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

namespace {

// Byte b as byte-level BPE writes it, as UTF-8.
std::string character(int byte) {
  int code = byte;
  const auto printable = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  };
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

/// Ids 0 to 255 are the bytes; then he, ll, hell, "Ġ1" and 12, each with its merge.
Json small() {
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[character(byte)] = byte;
  const std::vector<std::pair<std::string, std::string>> merges{
      {"h", "e"}, {"l", "l"}, {"he", "ll"}, {"\u0120", "1"}, {"1", "2"}};
  Json list = Json::array();
  for (const auto& [left, right] : merges) {
    vocabulary[left + right] = vocabulary.size();
    list.push_back({left, right});
  }
  return {{"version", "1.0"},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", list}}}};
}

Json added(int id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

Tokenizer load(const Json& json) {
  const std::string path = "tokenizers_test.json";
  std::ofstream(path) << json.dump();
  const struct Remove {
    std::string name;
    ~Remove() { std::filesystem::remove(name); }
  } remove{path};
  return Tokenizer(path);
}
std::string error_of(const Json& json) {
  try {
    load(json);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "loaded";
}
/// The error of the small file with one value changed.
std::string error_with(const std::string& pointer, const Json& value) {
  Json json = small();
  json[Json::json_pointer(pointer)] = value;
  return error_of(json);
}
bool starts(const std::string& text, const std::string& begin) {
  CAPTURE(text);
  CHECK(text.rfind(begin, 0) == 0);
  return text.rfind(begin, 0) == 0;
}

}  // namespace

TEST_CASE("merges go by rank, one pair after the other; ignore_merges takes whole pieces first") {
  Json json = small();
  CHECK(load(json).encode("hello") == Ids{258, 'o'});
  json["model"]["vocab"]["hello"] = 261;  // no merge leads there
  CHECK(load(json).encode("hello") == Ids{258, 'o'});
  json["model"]["ignore_merges"] = true;
  CHECK(load(json).encode("hello hello") == Ids{261, ' ', 258, 'o'});
  // A pair that a merge makes may rank before the others of the pair merged: it goes first.
  json = small();
  json["model"]["vocab"]["aba"] = 261;
  json["model"]["vocab"]["ab"] = 262;
  json["model"]["merges"] = Json::array({"ab a", "a b"});
  CHECK(load(json).encode("abab") == Ids{261, 'b'});
}

TEST_CASE("added tokens: the flags, and vocabulary tokens that merges use") {
  Json json = small();
  Json mask = added(261, "<m>");
  const auto encode = [&](const std::string& text) {
    json["added_tokens"] = Json::array({mask});
    return load(json).encode(text);
  };
  CHECK(encode("a  <m>  b") == Ids{'a', ' ', ' ', 261, ' ', ' ', 'b'});
  mask["lstrip"] = true;
  CHECK(encode("a \u2003<m>  b") == Ids{'a', 261, ' ', ' ', 'b'});
  mask["rstrip"] = true;
  CHECK(encode("a  <m>  b <m>") == Ids{'a', 261, 'b', 261});
  mask = added(261, "ab");
  mask["single_word"] = true;
  CHECK(encode("ab cab abc ab.") ==
        Ids{261, ' ', 'c', 'a', 'b', ' ', 'a', 'b', 'c', ' ', 261, '.'});
  CHECK(encode("ab\u00e9") == Ids{'a', 'b', 0xc3, 0xa9});
  // Tokens that normalizers do not touch are found before the others, wherever they stand.
  mask = added(261, "<m><");
  mask["normalized"] = true;
  json["added_tokens"] = Json::array({mask, added(262, "<n>")});
  CHECK(load(json).encode("<m><n>") == Ids{'<', 'm', '>', 262});
  // The longest one at a place.
  json["added_tokens"] = Json::array({added(261, "<m"), added(262, "<m>>")});
  CHECK(load(json).encode("<m>><m>") == Ids{262, 261, '>'});
  // A normalizer works on the text between tokens that it does not touch.
  json = small();
  json["normalizer"] = {{"type", "NFC"}};
  mask = added(261, "e\u0301");
  mask["normalized"] = false;
  json["added_tokens"] = Json::array({mask});
  CHECK(load(json).encode("E\u0301e\u0301\u00e9") == Ids{0xc3, 0x89, 261, 0xc3, 0xa9});
  CHECK(load(json).encode("o\u0302\u0323") == Ids{0xe1, 0xbb, 0x99});
  CHECK_THROWS_WITH(load(json).encode("a\xff"),
                    "tokenizer: a text cannot be normalised: Invalid UTF-8 string, UTF-8 is "
                    "expected");
  mask["normalized"] = true;
  json["added_tokens"] = Json::array({mask});
  CHECK_THROWS_WITH_AS(load(json),
                       doctest::Contains("expected a text in normal form C, as the normalizer"),
                       std::runtime_error);
  // A token of the vocabulary: found in the text first, and still one that merges make.
  json = small();
  json["added_tokens"] = Json::array({added(257, "ll")});
  json["added_tokens"][0]["special"] = false;
  const Tokenizer tokenizer = load(json);
  CHECK(tokenizer.encode("hello") == Ids{256, 257, 'o'});
  CHECK(tokenizer.decode({256, 257, 258}) == "hellhell");
  CHECK(starts(error_with("/added_tokens", Json::array({added(3, "ll")})),
               "tokenizers_test.json: added_tokens[0].id is 3, expected 257, the id that ll has"));
  CHECK(starts(error_with("/added_tokens", Json::array({added(300, "<m>")})),
               "tokenizers_test.json: added_tokens[0].id is 300, expected 261, the id that <m> "));
}

TEST_CASE("steps of a pre-tokenizer follow each other") {
  Json json = small();
  const Json bytes{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const auto steps = [&](const Json& first) {
    json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {first, bytes}}};
    return load(json);
  };
  const auto split = [](const char* kind, const char* text) {
    return Json{{"type", "Split"}, {"pattern", {{kind, text}}}, {"behavior", "Isolated"}};
  };
  CHECK(load(json).encode("x 12") == Ids{'x', 259, '2'});  // one piece " 12"
  CHECK(steps(split("Regex", "\\d")).encode("x 12 he") ==
        Ids{'x', ' ', '1', '2', ' ', 256});  // GPT-2's expression would join " 1" and "12"
  CHECK(steps({{"type", "Digits"}, {"individual_digits", true}}).encode("12") == Ids{'1', '2'});
  CHECK(steps({{"type", "Digits"}, {"individual_digits", false}}).encode(" 12") == Ids{' ', 260});
  // A text as a pattern is that text, whatever it means elsewhere.
  CHECK(steps(split("String", "e\\El")).encode("he\\Ell") == Ids{'h', 'e', '\\', 'E', 'l', 'l'});
  CHECK(steps(split("String", ".")).encode("hell") == Ids{258});
}

TEST_CASE("the post-processor says which token a text begins with") {
  Json json = small();
  CHECK(!load(json).bos().has_value());
  json["post_processor"] = {{"type", "ByteLevel"}, {"trim_offsets", false}};
  CHECK(load(json).bos() == -1);
  json["added_tokens"] = Json::array({added(261, "<s>")});
  const Json text{{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const Json bos{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}};
  Json processor{{"type", "TemplateProcessing"},
                 {"single", {bos, text}},
                 {"pair", Json::array()},
                 {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {261}}}}}}};
  json["post_processor"] = {{"type", "Sequence"},
                            {"processors", {json["post_processor"], processor}}};
  CHECK(load(json).bos() == 261);
  processor["single"] = Json::array({bos, text, bos});
  json["post_processor"] = processor;
  CHECK(starts(error_of(json), "tokenizers_test.json: post_processor.single[2] is "));
  json["post_processor"] = {{"type", "BertProcessing"}};
  CHECK(error_of(json) ==
        "tokenizers_test.json: post_processor.type is \"BertProcessing\", expected ByteLevel or "
        "TemplateProcessing, or a Sequence of them");
}

TEST_CASE("what is wrong or not supported is named: file, field, value") {
  const std::string file = "tokenizers_test.json: ";
  CHECK(starts(error_with("/model/vocab/he", -5), file + "model.vocab.he is -5, expected an int"));
  CHECK(starts(error_with("/model/vocab/he", 2147483647), file + "model.vocab.he is 2147483647"));
  CHECK(starts(error_with("/model/vocab/he", 1.5), file + "model.vocab.he is 1.5, expected an i"));
  CHECK(starts(error_with("/model/vocab/he", 257), file + "model.vocab."));  // ll has it, too
  CHECK(starts(error_with("/added_tokens", Json::array({added(261, "")})),
               file + "added_tokens[0].content is \"\", expected a text that is not empty"));
  CHECK(starts(error_with("/added_tokens", Json::array({added(2147483647, "x y")})),
               file + "added_tokens[0].id is 2147483647, expected 261"));
  CHECK(starts(error_with("/added_tokens", Json::array({added(-1, "x y")})),
               file + "added_tokens[0].id is -1"));
  CHECK(starts(error_with("/added_tokens", Json::array({added(261, "<a>"), added(262, "<a>")})),
               file + "added_tokens[1].content is \"<a>\""));
  CHECK(starts(error_with("/model/merges", {"h e x"}), file + "model.merges[0] is \"h e x\""));
  CHECK(starts(error_with("/model/merges", {"h l"}),
               file + "model.merges[0] is \"h l\", expected tokens of model.vocab, 'hl' is none"));
  for (const char* key : {"truncation", "padding"})
    CHECK(error_with(std::string("/") + key, 5) == file + key + " is 5, expected null");
  CHECK(starts(error_with("/normalizer", {{"type", "Lowercase"}}),
               file + "normalizer.type is \"Lowercase\", expected NFC"));
  CHECK(starts(error_with("/decoder", {{"type", "WordPiece"}}), file + "decoder.type is \"WordP"));
  CHECK(error_with("/model/type", "Unigram") == file + "model.type is \"Unigram\", expected BPE");
  CHECK(error_with("/pre_tokenizer/type", "Metaspace") ==
        file + "pre_tokenizer.type is \"Metaspace\", expected Split, Digits or ByteLevel");
  CHECK(starts(error_with("/model/dropout", 0.5), file + "model.dropout is 0.5, expected null"));
  CHECK(starts(error_with("/model/end_of_word_suffix", "</w>"), file + "model.end_of_word_suffix"));
  CHECK(starts(error_with("/model/ignore_merges", "yes"), file + "model.ignore_merges is \"yes\""));
  CHECK(starts(error_with("/model/new", 1), file + "model.new is 1, expected no such field"));
  CHECK(starts(error_with("/extra", 1), file + "extra is 1, expected no such field"));
  CHECK(starts(error_with("/version", "2.0"), file + "version is \"2.0\", expected 1.0"));
  CHECK(starts(error_with("/model/vocab", 1), file + "model.vocab is 1, expected an object"));
  CHECK(starts(error_with("/pre_tokenizer/add_prefix_space", true),
               file + "pre_tokenizer.add_prefix_space is true, expected false"));
  CHECK(starts(error_with("/pre_tokenizer", nullptr), file + "pre_tokenizer is null, expected an"));
  for (const char* expression :
       {"\\w+", "\\bx", "^a", "a$", "[a-z&&[b]]", "[[a]]", "(?m:a)", "\\h", "a{1,2}+", "(", "a*"}) {
    const Json split{
        {"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", "Isolated"}};
    CHECK(starts(error_with("/pre_tokenizer",
                            {{"type", "Sequence"}, {"pretokenizers", Json::array({split})}}),
                 file + "pre_tokenizer.pretokenizers[0].pattern.Regex is "));
  }
  const Json removed{{"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Removed"}};
  CHECK(
      starts(error_with("/pre_tokenizer", removed), file + "pre_tokenizer.behavior is \"Removed"));
  Json json = small();
  json["model"]["vocab"]["a b"] = 97;  // not of bytes, and the id of a
  json["added_tokens"].push_back(added(97, "a b"));
  CHECK(starts(error_of(json), file + "model.vocab.a"));
  json = small();
  json["model"]["vocab"]["abc"] = 262;  // 262 entries with a gap: the next id is taken
  json["added_tokens"].push_back(added(262, "<s>"));
  CHECK(starts(error_of(json), file + "added_tokens[0].id is 262, expected an id above those of"));
  json = small();
  json["model"]["vocab"].erase("z");
  CHECK_THROWS_WITH(load(json).encode("z"),
                    "tokenizer: byte 122 has no token, expected one in model.vocab");
  json["model"]["unk_token"] = "a";
  CHECK(starts(error_of(json), file + "model.unk_token is \"a\""));
}

TEST_CASE("time is linear in the text, with hundreds of special tokens and in long pieces") {
  Json json = small();
  for (int i = 0; i < 252; ++i)
    json["added_tokens"].push_back(added(261 + i, "<|reserved_" + std::to_string(i) + "|>"));
  const Tokenizer tokenizer = load(json);
  std::string text, letters(200000, 'h');
  for (int i = 0; i < 20000; ++i) text += "some words <|reserved_" + std::to_string(i % 252) + "|>";
  const auto start = std::chrono::steady_clock::now();
  CHECK(tokenizer.encode(text).size() == 20000 * 12);
  CHECK(tokenizer.encode(letters).size() == 200000);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));  // quadratic: minutes
}
