// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE as in Hugging Face's tokenizer.json: special tokens, the file's own split pattern,
// merges by rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace llama {

class Tokenizer {
 public:
  /// Reads tokenizer.json. Throws std::runtime_error naming what is not supported.
  explicit Tokenizer(const std::string& path);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  /// Text to ids; special tokens in the text become their ids. No BOS is added.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Ids to bytes; special tokens give nothing.
  std::string decode(const std::vector<std::int32_t>& ids) const;
  /// The bytes of one id, empty for a special token.
  const std::string& bytes(std::int32_t id) const;
  std::int32_t vocabulary_size() const { return static_cast<std::int32_t>(bytes_.size()); }

 private:
  struct Pattern;  // a compiled PCRE2 expression
  void encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const;
  void encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const;

  std::unique_ptr<Pattern> pattern_;
  std::vector<std::string> bytes_;                     // by id
  std::unordered_map<std::string, std::int32_t> ids_;  // by bytes
  std::unordered_map<std::uint64_t, std::pair<std::int32_t, std::int32_t>>
      merges_;  // pair -> (rank, merged id)
  std::vector<std::pair<std::string, std::int32_t>> special_;
};

}  // namespace llama
