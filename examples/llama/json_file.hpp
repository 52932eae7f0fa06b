// SPDX-License-Identifier: Apache-2.0
// JSON files that are not trusted: every read that fails names the file, the field, what stands
// there and what is expected.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace llama {

/// A value of a JSON file and where it stands. It refers to the file's JSON, which must outlive it.
/// All reads throw std::runtime_error.
class JsonValue {
 public:
  /// The whole of `json`, read from a file called `file` in errors.
  JsonValue(std::string file, const nlohmann::json& json);

  /// There is a member `key`, and it is not null.
  bool has(const std::string& key) const;
  /// A member that must be there.
  JsonValue at(const std::string& key) const;
  /// An element of an array.
  JsonValue at(std::size_t index) const;
  /// Elements of a value that must be an array.
  std::size_t size() const;
  /// Members of a value that must be an object.
  const nlohmann::json& object() const;
  /// Refuses members that are in no list of known ones.
  void members(std::initializer_list<const char*> known) const;

  std::string text() const;
  bool flag() const;
  /// An integer from `least` to `most`.
  std::int64_t integer(std::int64_t least, std::int64_t most) const;
  /// A number above 0.
  double positive() const;
  /// A number that is above 0 and finite as f32.
  float positive_f32() const;

  const nlohmann::json& json() const { return *json_; }
  const std::string& file() const { return file_; }
  /// Throws "FILE: FIELD is VALUE, expected EXPECTED".
  [[noreturn]] void fail(const std::string& expected) const;

 private:
  JsonValue(std::string file, std::string field, const nlohmann::json& json);
  std::string file_;
  std::string field_;  // empty: the whole file
  const nlohmann::json* json_;
};

/// The JSON of a file. Throws std::runtime_error if it cannot be opened, is no JSON, or nests its
/// values more than 100 deep.
/// @param name  what errors call it
nlohmann::json read_json(const std::string& path, const std::string& name);
/// The same of a text in memory; errors say that it is from `path`.
nlohmann::json parse_json(std::string_view text, const std::string& path, const std::string& name);
/// What comes after the last slash of a path.
std::string file_name(const std::string& path);

}  // namespace llama
