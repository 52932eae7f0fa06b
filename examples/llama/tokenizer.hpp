// SPDX-License-Identifier: Apache-2.0
// Byte-level BPE as in Hugging Face's tokenizer.json: added tokens, the file's own splits, merges
// by rank.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace llama {

class JsonValue;

/// A tokenizer.json. What it does with a member of the file is what the `tokenizers` library does;
/// members for which that is not so are refused.
class Tokenizer {
 public:
  /// Reads tokenizer.json. Throws std::runtime_error naming what is not supported: file, field,
  /// value.
  explicit Tokenizer(const std::string& path);
  /// The same of a file that was read before.
  explicit Tokenizer(const JsonValue& file);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;

  /// Text to ids; added tokens in the text become their ids. No BOS is added.
  std::vector<std::int32_t> encode(std::string_view text) const;
  /// Ids to bytes; special tokens give nothing.
  std::string decode(const std::vector<std::int32_t>& ids) const;
  /// The bytes of one id, empty for a special token.
  const std::string& bytes(std::int32_t id) const;
  /// One more than the largest id.
  std::int32_t vocabulary_size() const { return static_cast<std::int32_t>(bytes_.size()); }
  /// The id that the post-processor puts before a text, -1 if it puts none; nothing if the file has
  /// no post-processor.
  std::optional<std::int32_t> bos() const { return bos_; }

 private:
  struct Split;   // a step of the pre-tokenizer
  struct Added;   // an added token and its flags
  struct Finder;  // finds added tokens in a text
  struct Segment {
    std::string_view text;
    std::int32_t id;  // of an added token; -1: text
  };

  void read_added(const JsonValue& file);
  void read_vocabulary(const JsonValue& model);
  void read_merges(const JsonValue& model);
  void check_unknown(const JsonValue& model) const;
  void encode_piece(std::string_view piece, std::vector<std::int32_t>& ids) const;
  void encode_plain(std::string_view text, std::vector<std::int32_t>& ids) const;
  std::vector<Segment> find_added(std::string_view text, const Finder& finder) const;

  std::vector<Split> splits_;
  std::vector<Added> added_;
  std::vector<Finder> finders_;     // of tokens that normalizers do not touch, then of the others
  std::vector<std::string> bytes_;  // by id
  std::unordered_map<std::string, std::int32_t> ids_;  // by bytes
  std::array<std::int32_t, 256> byte_ids_{};           // -1: none
  std::unordered_map<std::uint64_t, std::pair<std::int32_t, std::int32_t>>
      merges_;  // pair -> (rank, merged id)
  bool ignore_merges_ = false;
  bool composes_ = false;  // texts are brought to normal form C
  std::optional<std::int32_t> bos_;
};

}  // namespace llama
