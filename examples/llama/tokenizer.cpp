// SPDX-License-Identifier: Apache-2.0
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.hpp"

#include <pcre2.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace llama {
namespace {

// GPT-2's own pattern, which ByteLevel uses when the file gives none.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

// Byte-level BPE writes each byte as a printable character; this undoes it: UTF-8 text of such
// characters to bytes.
std::string unmap_bytes(const std::string& text) {
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
    if (entry == table.end())
      throw std::runtime_error("tokenizer: '" + text + "' is not a byte-level token");
    out += entry->second;
    i += length;
  }
  return out;
}

std::string split_pattern(const nlohmann::json& pre) {
  std::string pattern;
  const auto visit = [&](const nlohmann::json& node) {
    const std::string type = node.at("type");
    if (type == "Split") {
      if (node.at("behavior") != "Isolated" || node.value("invert", false))
        throw std::runtime_error("tokenizer: only Isolated splits are supported");
      pattern = node.at("pattern").contains("Regex")
                    ? node.at("pattern").at("Regex").get<std::string>()
                    : "\\Q" + node.at("pattern").at("String").get<std::string>() + "\\E";
    } else if (type == "ByteLevel") {
      if (node.value("add_prefix_space", false))
        throw std::runtime_error("tokenizer: add_prefix_space is not supported");
      if (node.value("use_regex", true) && pattern.empty()) pattern = kGpt2Pattern;
    } else {
      throw std::runtime_error("tokenizer: pre_tokenizer of type " + type +
                               " is not supported, expected Split or ByteLevel");
    }
  };
  if (pre.is_null())
    throw std::runtime_error("tokenizer: no pre_tokenizer; a byte-level one is expected");
  if (pre.at("type") == "Sequence") {
    for (const auto& node : pre.at("pretokenizers")) visit(node);
  } else {
    visit(pre);
  }
  return pattern;
}

}  // namespace

struct Tokenizer::Pattern {
  explicit Pattern(const std::string& text) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.c_str()), text.size(),
                         PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &offset, nullptr);
    if (code == nullptr)
      throw std::runtime_error("tokenizer: split pattern does not compile at offset " +
                               std::to_string(offset));
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
    match = pcre2_match_data_create_from_pattern(code, nullptr);
  }
  ~Pattern() {
    pcre2_match_data_free(match);
    pcre2_code_free(code);
  }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;
  pcre2_code* code = nullptr;
  pcre2_match_data* match = nullptr;
};

Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;

Tokenizer::Tokenizer(const std::string& path) {
  std::ifstream stream(path);
  if (!stream) throw std::runtime_error("tokenizer: cannot open " + path);
  const nlohmann::json file = nlohmann::json::parse(stream);
  const nlohmann::json& model = file.at("model");
  if (model.at("type") != "BPE")
    throw std::runtime_error("tokenizer: model of type " + model.at("type").get<std::string>() +
                             ", expected BPE");
  if (file.contains("normalizer") && !file.at("normalizer").is_null())
    throw std::runtime_error("tokenizer: normalizers are not supported");
  pattern_ =
      std::make_unique<Pattern>(split_pattern(file.value("pre_tokenizer", nlohmann::json())));

  std::int32_t largest = -1;
  for (const auto& [token, id] : model.at("vocab").items())
    largest = std::max(largest, id.get<std::int32_t>());
  for (const auto& token : file.value("added_tokens", nlohmann::json::array()))
    largest = std::max(largest, token.at("id").get<std::int32_t>());
  bytes_.resize(static_cast<std::size_t>(largest + 1));
  std::unordered_map<std::int32_t, bool> is_special;
  for (const auto& token : file.value("added_tokens", nlohmann::json::array())) {
    const std::int32_t id = token.at("id");
    special_.emplace_back(token.at("content"), id);
    is_special[id] = true;
    if (!token.value("special", false)) bytes_[static_cast<std::size_t>(id)] = token.at("content");
  }
  for (const auto& [token, value] : model.at("vocab").items()) {
    const std::int32_t id = value;
    if (is_special.contains(id)) continue;
    bytes_[static_cast<std::size_t>(id)] = unmap_bytes(token);
    ids_[bytes_[static_cast<std::size_t>(id)]] = id;
  }
  std::int32_t rank = 0;
  for (const auto& merge : model.at("merges")) {
    std::string left, right;
    if (merge.is_array()) {
      left = merge.at(0);
      right = merge.at(1);
    } else {
      const std::string text = merge;
      const std::size_t space = text.find(' ');
      left = text.substr(0, space);
      right = text.substr(space + 1);
    }
    left = unmap_bytes(left);
    right = unmap_bytes(right);
    merges_[pair_key(ids_.at(left), ids_.at(right))] = {rank++, ids_.at(left + right)};
  }
}

void Tokenizer::encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const {
  std::vector<std::int32_t> parts;
  for (const char byte : piece) {
    const auto entry = ids_.find(std::string(1, byte));
    if (entry == ids_.end())
      throw std::runtime_error("tokenizer: byte " +
                               std::to_string(static_cast<unsigned char>(byte)) + " has no token");
    parts.push_back(entry->second);
  }
  while (parts.size() > 1) {
    std::int32_t best_rank = std::numeric_limits<std::int32_t>::max();
    std::int32_t merged = -1;
    std::size_t at = 0;
    for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto merge = merges_.find(pair_key(parts[i], parts[i + 1]));
      if (merge != merges_.end() && merge->second.first < best_rank) {
        best_rank = merge->second.first;
        merged = merge->second.second;
        at = i;
      }
    }
    if (merged < 0) break;
    // All occurrences of the pair, left to right, as the reference does.
    const std::int32_t left = parts[at];
    const std::int32_t right = parts[at + 1];
    std::size_t write = at;
    for (std::size_t read = at; read < parts.size();) {
      const bool pair = read + 1 < parts.size() && parts[read] == left && parts[read + 1] == right;
      parts[write++] = pair ? merged : parts[read];
      read += pair ? 2 : 1;
    }
    parts.resize(write);
  }
  ids.insert(ids.end(), parts.begin(), parts.end());
}

void Tokenizer::encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::size_t at = 0;
  while (at < text.size()) {
    const int found = pcre2_match(pattern_->code, reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), at, 0, pattern_->match, nullptr);
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(pattern_->match);
    const std::size_t begin = found > 0 ? range[0] : text.size();
    const std::size_t end = found > 0 ? range[1] : text.size();
    if (begin > at)
      encode_piece(text.substr(at, begin - at),
                   ids);  // what no alternative matches is a piece of its own
    if (end > begin) encode_piece(text.substr(begin, end - begin), ids);
    at = end > at ? end : at + 1;
  }
}

std::vector<std::int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<std::int32_t> ids;
  while (!text.empty()) {
    std::size_t first = std::string_view::npos;
    const std::pair<std::string, std::int32_t>* token = nullptr;
    for (const auto& candidate : special_) {
      const std::size_t at = text.find(candidate.first);
      if (at < first || (at == first && token != nullptr && at != std::string_view::npos &&
                         candidate.first.size() > token->first.size())) {
        first = at;
        token = &candidate;
      }
    }
    encode_plain(text.substr(0, std::min(first, text.size())), ids);
    if (token == nullptr) break;
    ids.push_back(token->second);
    text.remove_prefix(first + token->first.size());
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
