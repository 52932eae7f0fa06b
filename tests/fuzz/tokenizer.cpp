// SPDX-License-Identifier: Apache-2.0
// tokenizer.json: an input is its text, and then, behind a NUL, a text to encode.
#include "tokenizer.hpp"

#include "json_file.hpp"
#include "json_target.hpp"

namespace fuzz {
namespace {

/// Texts that each tokenizer encodes besides the input's own.
constexpr std::string_view kTexts[] = {"", "Hello  a1b2'll\n\t12 <s>",
                                       "\xc3\xa9\xff\xe2\x82 <s> a"};

// Encodes a text. Where no added token takes spaces or hides its own text, and every byte has a
// token, ids must decode to the text again.
void check_text(const llama::Tokenizer& tokenizer, std::string_view text, bool keeps_text) {
  std::vector<std::int32_t> ids;
  const bool encoded = read_engine_file([&] { ids = tokenizer.encode(text); });
  if (!encoded) return;
  for (const std::int32_t id : ids)
    require(id >= 0 && id < tokenizer.vocabulary_size(), "ids are in the vocabulary");
  require(ids.size() <= text.size(), "an id stands for one byte at least");
  const std::string decoded = tokenizer.decode(ids);
  require(!keeps_text || decoded == text, "ids decode to the text");
}

}  // namespace

bool accepts(Input input) {
  const TwoParts parts = two_parts(input);
  return read_engine_file([&] {
    const nlohmann::json json = llama::parse_json(parts.first, "tokenizer.json", "input");
    const llama::JsonValue file("tokenizer.json", json);
    const llama::Tokenizer tokenizer(file);
    require(!tokenizer.bos() ||
                (*tokenizer.bos() >= -1 && *tokenizer.bos() < tokenizer.vocabulary_size()),
            "bos is in the vocabulary");
    for (std::int32_t id = 0; id < std::min(tokenizer.vocabulary_size(), 300); ++id)
      static_cast<void>(tokenizer.bytes(id));
    const bool keeps_text = !file.has("added_tokens") || file.at("added_tokens").size() == 0;
    for (const std::string_view text : kTexts) check_text(tokenizer, text, keeps_text);
    // Splits search again at every byte: longer texts cost time and show nothing new.
    check_text(tokenizer, parts.second.substr(0, 48), keeps_text);
  });
}

std::vector<Seed> seeds() {
  const auto file = [](const std::string& pre, const std::string& vocabulary,
                       const std::string& merges, const std::string& more,
                       const std::string& text) {
    return bytes_of(R"({"version":"1.0","pre_tokenizer":)" + pre +
                    R"(,"model":{"type":"BPE","vocab":{)" + vocabulary + R"(},"merges":[)" +
                    merges + "]}" + more + "}" + '\0' + text);
  };
  const std::string byte_level =
      R"({"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true})";
  const std::string letters = R"("a":0,"b":1,"c":2,"ab":3,"abc":4,"Ġ":5,"Ġa":6,"1":7)";
  return {
      {"byte_level", file(byte_level, letters, R"("a b","ab c",["Ġ","a"])", "", "abc ab 1a")},
      {"split",
       file(R"j({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":)j"
            R"j("\\p{N}{1,3}| ?\\p{L}+|\\s+(?!\\S)"},"behavior":"Isolated","invert":false},)j"
            R"j({"type":"Split","pattern":{"String":"b"},"behavior":"Isolated"},)j"
            R"j({"type":"Digits","individual_digits":true},)j" +
                byte_level + "]}",
            letters, R"("a b","ab c")",
            R"(,"normalizer":null,"decoder":null,"truncation":null,"padding":null)", "abcb11 a")},
      {"added",
       file(
           byte_level, letters, R"("a b")",
           R"(,"added_tokens":[{"id":8,"content":"<s>","single_word":false,"lstrip":true,"rstrip":true,"normalized":false,"special":true},{"id":3,"content":"ab","single_word":true,"normalized":true,"special":false}],"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<s>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"<s>":{"id":"<s>","ids":[8],"tokens":["<s>"]}}})",
           " <s> ab aab")},
  };
}

}  // namespace fuzz
