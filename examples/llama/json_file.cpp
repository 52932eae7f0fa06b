// SPDX-License-Identifier: Apache-2.0
#include "json_file.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace llama {
namespace {

// A value as an error shows it: in one line, and not all of a long one.
std::string shown(const nlohmann::json& json) {
  constexpr std::size_t kMost = 80;
  if (json.is_structured() && json.size() > 16)
    return (json.is_array() ? "an array of " : "an object of ") + std::to_string(json.size());
  const std::string text = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  return text.size() <= kMost ? text : text.substr(0, kMost) + "...";
}

// Values are compared and shown by functions that call themselves: a few hundred kB of brackets
// would end the stack.
void check_depth(std::string_view text, const std::string& path, const std::string& name) {
  constexpr int kMost = 100;
  int depth = 0;
  bool quoted = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const char c = text[at];
    if (quoted) {
      if (c == '\\')
        ++at;
      else
        quoted = c != '"';
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMost) {
        std::ostringstream message;
        message << name << ": " << path << " has values " << depth << " deep in each other at byte "
                << at << ", at most " << kMost << " are expected";
        throw std::runtime_error(message.str());
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

}  // namespace

JsonValue::JsonValue(std::string file, const nlohmann::json& json)
    : JsonValue(std::move(file), "", json) {}

JsonValue::JsonValue(std::string file, std::string field, const nlohmann::json& json)
    : file_(std::move(file)), field_(std::move(field)), json_(&json) {}

void JsonValue::fail(const std::string& expected) const {
  throw std::runtime_error(file_ + ": " + (field_.empty() ? "the file" : field_) + " is " +
                           shown(*json_) + ", expected " + expected);
}

const nlohmann::json& JsonValue::object() const {
  if (!json_->is_object()) fail("an object");
  return *json_;
}

bool JsonValue::has(const std::string& key) const {
  const auto entry = object().find(key);
  return entry != json_->end() && !entry->is_null();
}

JsonValue JsonValue::at(const std::string& key) const {
  const std::string field = field_.empty() ? key : field_ + "." + key;
  const auto entry = object().find(key);
  if (entry == json_->end())
    throw std::runtime_error(file_ + ": " + field + " is missing, it must be there");
  return {file_, field, *entry};
}

JsonValue JsonValue::at(std::size_t index) const {
  if (index >= size()) fail("more than " + std::to_string(index) + " elements");
  return {file_, field_ + "[" + std::to_string(index) + "]", (*json_)[index]};
}

std::size_t JsonValue::size() const {
  if (!json_->is_array()) fail("an array");
  return json_->size();
}

void JsonValue::members(std::initializer_list<const char*> known) const {
  for (const auto& [key, value] : object().items()) {
    if (std::find(known.begin(), known.end(), key) != known.end()) continue;
    std::string list;
    for (const char* name : known) list += (list.empty() ? "" : ", ") + std::string(name);
    at(key).fail("no such field; known are " + list);
  }
}

std::string JsonValue::text() const {
  if (!json_->is_string()) fail("a text");
  return json_->get<std::string>();
}

bool JsonValue::flag() const {
  if (!json_->is_boolean()) fail("true or false");
  return json_->get<bool>();
}

std::int64_t JsonValue::integer(std::int64_t least, std::int64_t most) const {
  const bool fits = json_->is_number_integer() &&
                    (!json_->is_number_unsigned() ||
                     json_->get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX));
  if (!fits || json_->get<std::int64_t>() < least || json_->get<std::int64_t>() > most)
    fail("an integer from " + std::to_string(least) + " to " + std::to_string(most));
  return json_->get<std::int64_t>();
}

double JsonValue::positive() const {
  if (!json_->is_number() || !(json_->get<double>() > 0.0)) fail("a number above 0");
  return json_->get<double>();
}

float JsonValue::positive_f32() const {
  const double wide = positive();
  constexpr double kMost = std::numeric_limits<float>::max();
  if (wide > kMost || static_cast<float>(wide) <= 0.0F) fail("a number above 0 that f32 can hold");
  return static_cast<float>(wide);
}

nlohmann::json read_json(const std::string& path, const std::string& name) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error(name + ": cannot open " + path);
  std::string text;
  // Opening a folder succeeds, but its first read fails.
  if (stream.peek() != std::ifstream::traits_type::eof())
    text.assign(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  return parse_json(text, path, name);
}

nlohmann::json parse_json(std::string_view text, const std::string& path, const std::string& name) {
  if (text.empty())
    throw std::runtime_error(name + ": " + path +
                             " has 0 bytes that can be read, JSON is expected");
  check_depth(text, path, name);
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    throw std::runtime_error(name + ": " + path + " is no JSON at byte " +
                             std::to_string(error.byte) + ", an object is expected");
  } catch (const nlohmann::json::exception&) {  // a number that no double holds
    throw std::runtime_error(name + ": " + path + " has a number out of range of a double");
  }
}

std::string file_name(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

}  // namespace llama
