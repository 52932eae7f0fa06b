// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.hpp"

#include <pcre2.h>
#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <queue>
#include <stdexcept>

#include "json_file.hpp"

namespace llama {
namespace {

// GPT-2's own pattern, which ByteLevel uses where use_regex is true.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// \s and \w of the expressions with which tokenizers decides what lstrip, rstrip and single_word
// mean.
constexpr const char* kSpace =
    R"([\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}])";
constexpr const char* kWord =
    R"([\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{200c}\x{200d}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189}])";

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

// Byte-level BPE writes each byte as a printable character; this undoes it: UTF-8 text of such
// characters to bytes; nothing for other texts.
std::optional<std::string> unmap_bytes(const std::string& text) {
  static const std::unordered_map<std::uint32_t, char> table = [] {
    std::unordered_map<std::uint32_t, char> map;
    std::uint32_t next = 256;
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      map[printable ? byte : next++] = static_cast<char>(byte);
    }
    return map;
  }();
  std::string out;
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = lead < 0x80 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    std::uint32_t code = length == 1 ? lead : lead & (0x7fU >> length);
    for (std::size_t k = 1; k < length && i + k < text.size(); ++k)
      code = code << 6 | (static_cast<unsigned char>(text[i + k]) & 0x3fU);
    const auto entry = table.find(code);
    if (entry == table.end()) return std::nullopt;
    out += entry->second;
    i += length;
  }
  return out;
}

// What the regular expressions of tokenizers (Oniguruma) and PCRE2 read in two ways is refused.
void check_portable(const JsonValue& field) {
  const std::string text = field.text();
  const auto refuse = [&](const std::string& what) {
    field.fail("an expression without " + what + ", which has another meaning here");
  };
  bool in_class = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::string_view rest = std::string_view(text).substr(i);
    const char c = text[i];
    if (c == '\\') {
      const char escaped = rest.size() > 1 ? rest[1] : ' ';
      if (std::isalnum(static_cast<unsigned char>(escaped)) != 0 &&
          std::string_view("dDsSpPrntf").find(escaped) == std::string_view::npos)
        refuse("\\" + std::string(1, escaped));
      const bool property = rest.starts_with("\\p{") || rest.starts_with("\\P{");
      i = property ? std::min(text.find('}', i), text.size()) : i + 1;
    } else if (in_class) {
      if (c == '[' || rest.starts_with("&&")) refuse(c == '[' ? "[ in a class" : "&&");
      in_class = c != ']';
    } else if (c == '[') {
      in_class = true;
      if (rest.starts_with("[^]")) refuse("[^]");
      if (rest.starts_with("[]")) refuse("[]");
      if (rest.starts_with("[^")) ++i;
    } else if (c == '^' || c == '$') {
      refuse(std::string(1, c));
    } else if (rest.starts_with("}+")) {
      refuse("}+");
    } else if (rest.starts_with("(*")) {
      refuse("(*");
    } else if (rest.starts_with("(?")) {
      const auto known = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)"};
      if (std::none_of(known.begin(), known.end(),
                       [&](const char* group) { return rest.starts_with(group); }))
        refuse(std::string(rest.substr(0, 4)));
    }
  }
}

// One pattern, compiled.
struct Pattern {
  explicit Pattern(const std::string& text) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &offset,
                             nullptr));
    if (code == nullptr) return;
    pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
    match.reset(pcre2_match_data_create_from_pattern(code.get(), nullptr));
  }
  bool matches_empty() const {
    std::uint32_t empty = 0;
    pcre2_pattern_info(code.get(), PCRE2_INFO_MATCHEMPTY, &empty);
    return empty != 0;
  }
  // The first match at or behind `at`: its begin and end; two ends of the text if there is none.
  std::pair<std::size_t, std::size_t> find(std::string_view text, std::size_t at) const {
    const int found = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), at, 0, match.get(), nullptr);
    if (found == PCRE2_ERROR_NOMATCH) return {text.size(), text.size()};
    if (found < 0)
      throw std::runtime_error("tokenizer: error " + std::to_string(found) +
                               " of the regular expression at byte " + std::to_string(at) + " of " +
                               std::to_string(text.size()));
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match.get());
    return {range[0], range[1]};
  }
  struct Free {
    void operator()(pcre2_code* done) const { pcre2_code_free(done); }
    void operator()(pcre2_match_data* done) const { pcre2_match_data_free(done); }
  };
  std::unique_ptr<pcre2_code, Free> code;  // null: does not compile
  std::unique_ptr<pcre2_match_data, Free> match;
};

// The bytes of white space at an end of a text.
std::size_t spaces_before(std::string_view text) {
  static const Pattern space(std::string(R"(\A)") + kSpace);
  std::size_t begin = text.size();
  while (begin > 0) {
    std::size_t at = begin - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80) --at;
    if (space.find(text.substr(at, begin - at), 0).first != 0) break;
    begin = at;
  }
  return text.size() - begin;
}
std::size_t spaces_after(std::string_view text) {
  static const Pattern spaces(std::string(R"(\A)") + kSpace + "+");
  const auto [begin, end] = spaces.find(text, 0);
  return begin == 0 ? end : 0;
}
bool is_word_before(std::string_view text) {
  static const Pattern word(std::string(R"(\A)") + kWord);
  if (text.empty()) return false;
  std::size_t at = text.size() - 1;
  while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0U) == 0x80) --at;
  return word.find(text.substr(at), 0).first == 0;
}
bool is_word_after(std::string_view text) {
  static const Pattern word(std::string(R"(\A)") + kWord);
  return !text.empty() && word.find(text.substr(0, 4), 0).first == 0;
}

void check_byte_level(const JsonValue& node) {
  node.members({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  if (node.has("trim_offsets")) node.at("trim_offsets").flag();
}

// One post-processor: it adds nothing (ByteLevel), or it is a template of one BOS and the text;
// `bos` becomes the id.
void read_post_processor(const JsonValue& node, std::int32_t& bos) {
  const std::string type = node.at("type").text();
  if (type == "ByteLevel") return check_byte_level(node);
  if (type != "TemplateProcessing")
    node.at("type").fail("ByteLevel or TemplateProcessing, or a Sequence of them");
  node.members({"type", "single", "pair", "special_tokens"});
  const JsonValue single = node.at("single");
  bool text_seen = false;
  for (std::size_t i = 0; i < single.size(); ++i) {
    const JsonValue item = single.at(i);
    if (item.has("Sequence") && !text_seen) {
      text_seen = true;
    } else if (item.has("SpecialToken") && !text_seen && bos < 0) {
      const JsonValue ids =
          node.at("special_tokens").at(item.at("SpecialToken").at("id").text()).at("ids");
      if (ids.size() != 1) ids.fail("one id");
      bos = static_cast<std::int32_t>(ids.at(0).integer(0, INT32_MAX));
    } else {
      item.fail("one special token at most, and then the text");
    }
  }
  if (!text_seen) single.fail("the text, a Sequence");
}

// Whether texts are brought to Unicode's normal form C; other normalizers are refused.
bool composes(const JsonValue& normalizer) {
  const auto check = [](const JsonValue& step) {
    if (step.at("type").text() != "NFC") step.at("type").fail("NFC, or no normalizer");
  };
  if (normalizer.at("type").text() != "Sequence") {
    check(normalizer);
    return true;
  }
  const JsonValue steps = normalizer.at("normalizers");
  for (std::size_t i = 0; i < steps.size(); ++i) check(steps.at(i));
  return steps.size() > 0;
}

std::string normal_form_c(std::string_view text) {
  utf8proc_uint8_t* composed = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (size < 0)
    throw std::runtime_error(std::string("tokenizer: a text cannot be normalised: ") +
                             utf8proc_errmsg(size) + ", UTF-8 is expected");
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(composed, &std::free);
  return {reinterpret_cast<const char*>(composed), static_cast<std::size_t>(size)};
}

// Members of the file that are as if they were not there, or refused.
void check_members(const JsonValue& file) {
  file.members({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                "post_processor", "decoder", "model"});
  if (file.has("version") && file.at("version").text() != "1.0") file.at("version").fail("1.0");
  for (const char* key : {"truncation", "padding"}) {
    if (file.has(key)) file.at(key).fail("null");
  }
  if (file.has("decoder")) {
    if (file.at("decoder").at("type").text() != "ByteLevel")
      file.at("decoder").at("type").fail("ByteLevel");
    check_byte_level(file.at("decoder"));
  }
  const JsonValue model = file.at("model");
  if (model.at("type").text() != "BPE") model.at("type").fail("BPE");
  model.members({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.has("dropout") && model.at("dropout").json() != 0.0) model.at("dropout").fail("null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.has(key) && !model.at(key).text().empty()) model.at(key).fail("null");
  }
}

}  // namespace

struct Tokenizer::Added {
  std::string content;
  std::int32_t id = 0;
  bool single_word = false, lstrip = false, rstrip = false;
};

// A trie of added tokens' bytes.
struct Tokenizer::Finder {
  void add(const std::string& content, std::size_t index) {
    std::uint32_t node = 0;
    for (const char byte : content) {
      const auto next = static_cast<std::uint32_t>(tokens.size());
      const auto [entry, added] = edges.try_emplace(edge(node, byte), next);
      if (added) tokens.push_back(kNone);
      node = entry->second;
    }
    tokens[node] = index;
    first[static_cast<unsigned char>(content.front())] = true;
  }
  // The longest token that stands at the text's byte `at`; kNone if there is none.
  std::size_t longest(std::string_view text, std::size_t at) const {
    if (!first[static_cast<unsigned char>(text[at])]) return kNone;
    std::size_t found = kNone;
    std::uint32_t node = 0;
    for (; at < text.size(); ++at) {
      const auto entry = edges.find(edge(node, text[at]));
      if (entry == edges.end()) break;
      node = entry->second;
      if (tokens[node] != kNone) found = tokens[node];
    }
    return found;
  }
  static std::uint64_t edge(std::uint32_t node, char byte) {
    return std::uint64_t{node} << 8 | static_cast<unsigned char>(byte);
  }
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::array<bool, 256> first{};
  std::unordered_map<std::uint64_t, std::uint32_t> edges;
  std::vector<std::size_t> tokens{kNone};  // by node: an index among the added tokens
};

// Matches, and what lies between them, become pieces.
struct Tokenizer::Split {
  // A regular expression.
  Split(const std::string& text, const JsonValue& field) : pattern(std::in_place, text) {
    if (pattern->code == nullptr) field.fail("an expression that compiles");
    if (pattern->matches_empty()) field.fail("an expression that matches no empty text");
  }
  // A text that is looked for as it is.
  explicit Split(std::string text) : literal(std::move(text)) {}

  std::pair<std::size_t, std::size_t> find(std::string_view text, std::size_t at) const {
    if (pattern) return pattern->find(text, at);
    const std::size_t begin = std::min(text.find(literal, at), text.size());
    return {begin, std::min(begin + literal.size(), text.size())};
  }
  static std::vector<Split> read(const JsonValue& pre);

  std::optional<Pattern> pattern;
  std::string literal;
};

std::vector<Tokenizer::Split> Tokenizer::Split::read(const JsonValue& pre) {
  std::vector<Split> splits;
  const bool sequence = pre.at("type").text() == "Sequence";
  if (sequence) pre.members({"type", "pretokenizers"});
  const std::size_t count = sequence ? pre.at("pretokenizers").size() : 1;
  bool mapped = false;  // ByteLevel was there: later steps would see its characters
  for (std::size_t i = 0; i < count; ++i) {
    const JsonValue node = sequence ? pre.at("pretokenizers").at(i) : pre;
    const JsonValue type = node.at("type");
    if (mapped) type.fail("nothing behind ByteLevel");
    if (type.text() == "Split") {
      node.members({"type", "pattern", "behavior", "invert"});
      if (node.at("behavior").text() != "Isolated") node.at("behavior").fail("Isolated");
      if (node.has("invert") && node.at("invert").flag()) node.at("invert").fail("false");
      const JsonValue pattern = node.at("pattern");
      pattern.members({"Regex", "String"});
      if (pattern.object().size() != 1) pattern.fail("either Regex or String");
      if (pattern.has("Regex")) {
        check_portable(pattern.at("Regex"));
        splits.emplace_back(pattern.at("Regex").text(), pattern.at("Regex"));
      } else {
        if (pattern.at("String").text().empty()) pattern.at("String").fail("a text of one byte");
        splits.emplace_back(pattern.at("String").text());
      }
    } else if (type.text() == "Digits") {
      node.members({"type", "individual_digits"});
      const bool individual = node.has("individual_digits") && node.at("individual_digits").flag();
      splits.emplace_back(individual ? R"(\p{N})" : R"(\p{N}+)", type);
    } else if (type.text() == "ByteLevel") {
      check_byte_level(node);
      if (node.at("add_prefix_space").flag()) node.at("add_prefix_space").fail("false");
      if (!node.has("use_regex") || node.at("use_regex").flag())
        splits.emplace_back(kGpt2Pattern, type);
      mapped = true;
    } else {
      type.fail("Split, Digits or ByteLevel");
    }
  }
  if (!mapped) pre.fail("a ByteLevel at its end");
  return splits;
}

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

Tokenizer::Tokenizer(const std::string& path)
    : Tokenizer(JsonValue(file_name(path), read_json(path, file_name(path)))) {}

Tokenizer::Tokenizer(const JsonValue& file) {
  check_members(file);
  composes_ = file.has("normalizer") && composes(file.at("normalizer"));
  splits_ = Split::read(file.at("pre_tokenizer"));
  read_vocabulary(file.at("model"));
  read_added(file);
  read_merges(file.at("model"));
  check_unknown(file.at("model"));
  if (file.has("post_processor")) {
    std::int32_t bos = -1;
    const JsonValue node = file.at("post_processor");
    const bool sequence = node.at("type").text() == "Sequence";
    if (sequence) node.members({"type", "processors"});
    for (std::size_t i = 0; i < (sequence ? node.at("processors").size() : 1); ++i)
      read_post_processor(sequence ? node.at("processors").at(i) : node, bos);
    if (bos >= vocabulary_size())
      file.at("post_processor").fail("a special token below " + std::to_string(vocabulary_size()));
    bos_ = bos;
  }
}

void Tokenizer::read_vocabulary(const JsonValue& model) {
  const JsonValue vocabulary = model.at("vocab");
  byte_ids_.fill(-1);
  // Ids may have gaps, but not such that a few entries need much memory.
  const auto most = static_cast<std::int64_t>(4 * vocabulary.object().size() + 65536);
  std::vector<bool> taken;
  for (const auto& [token, value] : vocabulary.object().items()) {
    if (!value.is_number_integer() || value < 0 || value > most)
      vocabulary.at(token).integer(0, most);
    const auto id = value.get<std::size_t>();
    if (id >= bytes_.size()) bytes_.resize(id + 1);
    taken.resize(bytes_.size());
    if (taken[id]) vocabulary.at(token).fail("an id that no other token has");
    taken[id] = true;
    // What is not made of byte-level characters has no bytes yet; an added token must name it.
    const std::optional<std::string> bytes = unmap_bytes(token);
    if (token.empty()) vocabulary.at(token).fail("a token that is not empty");
    if (!bytes) continue;
    bytes_[id] = *bytes;
    ids_[*bytes] = static_cast<std::int32_t>(id);
    if (bytes->size() == 1)
      byte_ids_[static_cast<unsigned char>(bytes->front())] = static_cast<std::int32_t>(id);
  }
}

void Tokenizer::read_added(const JsonValue& file) {
  finders_.resize(2);
  const nlohmann::json& vocabulary = file.at("model").at("vocab").json();
  const bool any = file.has("added_tokens");
  std::int64_t next = static_cast<std::int64_t>(vocabulary.size());
  std::unordered_map<std::string, std::size_t> contents;
  for (std::size_t i = 0; any && i < file.at("added_tokens").size(); ++i) {
    const JsonValue token = file.at("added_tokens").at(i);
    token.members({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    Added added{token.at("content").text()};
    const auto flag = [&](const char* key) { return token.has(key) && token.at(key).flag(); };
    added.single_word = flag("single_word");
    added.lstrip = flag("lstrip");
    added.rstrip = flag("rstrip");
    if (added.content.empty()) token.at("content").fail("a text that is not empty");
    if (composes_ && flag("normalized") && normal_form_c(added.content) != added.content)
      token.at("content").fail("a text in normal form C, as the normalizer makes");
    if (!contents.emplace(added.content, i).second)
      token.at("content").fail("a text that no other added token has");
    // A token of the vocabulary keeps its id, a new one gets the next: so tokenizers numbers them.
    const auto entry = vocabulary.find(added.content);
    const std::int64_t expected = entry != vocabulary.end() ? entry->get<std::int64_t>() : next;
    const std::int64_t id = token.at("id").integer(0, INT32_MAX);
    if (id != expected)
      token.at("id").fail(std::to_string(expected) + ", the id that " + added.content +
                          (entry != vocabulary.end() ? " has in model.vocab" : " gets"));
    if (entry == vocabulary.end() && static_cast<std::size_t>(id) < bytes_.size())
      token.at("id").fail("an id above those of model.vocab, " + std::to_string(bytes_.size() - 1) +
                          " at most");
    next = std::max(next, id + 1);
    added.id = static_cast<std::int32_t>(id);
    if (static_cast<std::size_t>(id) >= bytes_.size())
      bytes_.resize(static_cast<std::size_t>(id) + 1);
    bytes_[static_cast<std::size_t>(id)] =
        flag("special") ? "" : unmap_bytes(added.content).value_or(added.content);
    finders_[flag("normalized") ? 1 : 0].add(added.content, added_.size());
    added_.push_back(std::move(added));
  }
  for (const auto& [token, id] : vocabulary.items()) {
    if (!contents.contains(token) && !unmap_bytes(token))
      throw std::runtime_error(file.file() + ": model.vocab has '" + token + "' with id " +
                               id.dump() + ", expected a byte-level token or an added one");
  }
}

void Tokenizer::read_merges(const JsonValue& model) {
  const JsonValue list = model.at("merges");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const nlohmann::json& merge = list.json()[i];
    std::string parts[2];
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      parts[0] = merge[0];
      parts[1] = merge[1];
    } else if (merge.is_string()) {
      const std::string text = merge;
      const std::size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos)
        list.at(i).fail("two tokens with a space between them");
      parts[0] = text.substr(0, space);
      parts[1] = text.substr(space + 1);
    } else {
      list.at(i).fail("a text or two texts");
    }
    const auto id_of = [&](const std::string& token) {
      const std::optional<std::string> bytes = unmap_bytes(token);
      const auto entry = bytes ? ids_.find(*bytes) : ids_.end();
      if (entry == ids_.end()) list.at(i).fail("tokens of model.vocab, '" + token + "' is none");
      return entry->second;
    };
    const std::int32_t left = id_of(parts[0]), right = id_of(parts[1]);
    merges_[pair_key(left, right)] = {static_cast<std::int32_t>(i), id_of(parts[0] + parts[1])};
  }
  ignore_merges_ = model.has("ignore_merges") && model.at("ignore_merges").flag();
}

// With a token for every byte nothing is unknown, and what the file says of unknown text is
// without effect.
void Tokenizer::check_unknown(const JsonValue& model) const {
  if (std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end()) return;
  if (model.has("unk_token"))
    model.at("unk_token").fail("null, or a model.vocab with all 256 bytes");
  for (const char* key : {"fuse_unk", "byte_fallback"}) {
    if (model.has(key) && model.at(key).flag())
      model.at(key).fail("false, or a model.vocab with all 256 bytes");
  }
}

void Tokenizer::encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const {
  if (ignore_merges_) {
    const auto entry = ids_.find(std::string(piece));
    if (entry != ids_.end()) {
      ids.push_back(entry->second);
      return;
    }
  }
  struct Part {
    std::int32_t id;
    std::ptrdiff_t previous, next;
  };
  struct Merge {
    std::int32_t rank, id;
    std::ptrdiff_t at;
    bool operator<(const Merge& other) const {  // the top of the queue is the largest
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  const auto count = static_cast<std::ptrdiff_t>(piece.size());
  std::vector<Part> parts;
  for (const char byte : piece) {
    const std::int32_t id = byte_ids_[static_cast<unsigned char>(byte)];
    if (id < 0)
      throw std::runtime_error("tokenizer: byte " +
                               std::to_string(static_cast<unsigned char>(byte)) +
                               " has no token, expected one in model.vocab");
    const auto i = static_cast<std::ptrdiff_t>(parts.size());
    parts.push_back({id, i - 1, i + 1 < count ? i + 1 : -1});
  }
  std::priority_queue<Merge> queue;
  const auto part = [&](std::ptrdiff_t i) -> Part& { return parts[static_cast<std::size_t>(i)]; };
  const auto merge_at = [&](std::ptrdiff_t at) {
    if (at < 0 || part(at).id < 0 || part(at).next < 0) return merges_.end();
    return merges_.find(pair_key(part(at).id, part(part(at).next).id));
  };
  const auto push = [&](std::ptrdiff_t at) {
    const auto entry = merge_at(at);
    if (entry != merges_.end()) queue.push({entry->second.first, entry->second.second, at});
  };
  for (std::ptrdiff_t i = 0; i + 1 < count; ++i) push(i);
  while (!queue.empty()) {
    const Merge top = queue.top();
    queue.pop();
    const auto entry = merge_at(top.at);
    if (entry == merges_.end() || entry->second.second != top.id) continue;  // it was merged since
    Part& left = part(top.at);
    Part& right = part(left.next);
    left.id = top.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) part(left.next).previous = top.at;
    push(left.previous);
    push(top.at);
  }
  for (const Part& left : parts) {
    if (left.id >= 0) ids.push_back(left.id);
  }
}

// Every step splits the pieces that the one before it left.
void Tokenizer::encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::vector<std::string_view> pieces{text}, finer;
  for (const Split& split : splits_) {
    finer.clear();
    for (const std::string_view piece : pieces) {
      for (std::size_t at = 0; at < piece.size();) {
        const auto [begin, end] = split.find(piece, at);
        if (begin > at) finer.push_back(piece.substr(at, begin - at));
        if (end > begin) finer.push_back(piece.substr(begin, end - begin));
        at = end;
      }
    }
    pieces.swap(finer);
  }
  for (const std::string_view piece : pieces) encode_piece(piece, ids);
}

// Leftmost and longest tokens of a text, each with the spaces that its flags give it.
std::vector<Tokenizer::Segment> Tokenizer::find_added(std::string_view text,
                                                      const Finder& finder) const {
  std::vector<Segment> segments;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t index = finder.longest(text, at);
    if (index == Finder::kNone) {
      ++at;
      continue;
    }
    const Added& token = added_[index];
    std::size_t begin = at, end = at + token.content.size();
    at = end;
    if (token.single_word &&
        (is_word_before(text.substr(0, begin)) || is_word_after(text.substr(end))))
      continue;
    if (token.lstrip && begin > done) begin -= spaces_before(text.substr(done, begin - done));
    if (token.rstrip) end += spaces_after(text.substr(end));
    if (begin > done) segments.push_back({text.substr(done, begin - done), -1});
    segments.push_back({{}, token.id});
    done = end;
  }
  if (done < text.size()) segments.push_back({text.substr(done), -1});
  return segments;
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  if (text.empty()) return ids;
  for (const Segment& outer : find_added(text, finders_[0])) {
    if (outer.id >= 0) {
      ids.push_back(outer.id);
      continue;
    }
    const std::string composed = composes_ ? normal_form_c(outer.text) : std::string();
    const std::string_view plain = composes_ ? std::string_view(composed) : outer.text;
    for (const Segment& inner : find_added(plain, finders_[1])) {
      if (inner.id >= 0)
        ids.push_back(inner.id);
      else
        encode_plain(inner.text, ids);
    }
  }
  return ids;
}

const std::string& Tokenizer::bytes(std::int32_t id) const {
  if (id < 0 || id >= vocabulary_size())
    throw std::runtime_error("tokenizer: id " + std::to_string(id) + ", vocabulary has " +
                             std::to_string(vocabulary_size()));
  return bytes_[static_cast<std::size_t>(id)];
}

std::string Tokenizer::decode(const std::vector<std::int32_t>& ids) const {
  std::string text;
  for (const std::int32_t id : ids) text += bytes(id);
  return text;
}

}  // namespace llama
