// SPDX-License-Identifier: Apache-2.0
#include "ruler.hpp"

#include <utf8proc.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "json_file.hpp"

namespace llama {
namespace {

namespace fs = std::filesystem;

/// Every character's lower case; bytes that are no UTF-8 stay.
std::string lower(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    utf8proc_int32_t character = 0;
    const auto* from = reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at);
    const utf8proc_ssize_t length =
        utf8proc_iterate(from, static_cast<utf8proc_ssize_t>(text.size() - at), &character);
    if (length < 1) {
      out += text[at++];
      continue;
    }
    utf8proc_uint8_t bytes[4];
    const utf8proc_ssize_t count = utf8proc_encode_char(utf8proc_tolower(character), bytes);
    out.append(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(count));
    at += static_cast<std::size_t>(length);
  }
  return out;
}

std::string trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpace) - first + 1));
}

RulerSample sample_of(const std::string& task, const JsonValue& line) {
  RulerSample sample{task, line.at("input").text(), {}, ruler_scoring(task)};
  if (line.has("answer_prefix")) sample.prompt += line.at("answer_prefix").text();
  const JsonValue outputs = line.at("outputs");
  if (outputs.size() == 0) outputs.fail("one text at least");
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    sample.references.push_back(outputs.at(i).text());
    if (sample.references.back().empty()) outputs.at(i).fail("a text that is not empty");
  }
  return sample;
}

std::string read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("ruler: cannot open " + path.string());
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

struct TaskFile {
  std::string task;
  fs::path path;
};

/// The one file *.jsonl of a folder.
fs::path only_file(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().extension() == ".jsonl")
      files.push_back(entry.path());
  if (files.size() != 1)
    throw std::runtime_error("ruler: " + folder.string() + " has " + std::to_string(files.size()) +
                             " files *.jsonl, 1 is expected; name the one that is asked for");
  return files.front();
}

std::vector<TaskFile> files_of(const fs::path& path) {
  if (!fs::is_directory(path)) {
    const std::string stem = path.stem().string();
    const bool is_subset = stem == "validation" || stem == "test";
    return {{is_subset ? fs::absolute(path).parent_path().filename().string() : stem, path}};
  }
  std::vector<TaskFile> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path))
    if (entry.is_directory()) files.push_back({entry.path().filename().string(), entry.path()});
  std::sort(files.begin(), files.end(),
            [](const TaskFile& a, const TaskFile& b) { return a.task < b.task; });
  return files;
}

}  // namespace

RulerScoring ruler_scoring(const std::string& task) {
  struct Known {
    std::string_view prefix;
    RulerScoring scoring;
  };
  static constexpr Known kKnown[] = {{"niah", {true, 128}},
                                     {"vt", {true, 30}},
                                     {"cwe", {true, 120}},
                                     {"fwe", {true, 50}},
                                     {"qa", {false, 32}}};
  for (const Known& known : kKnown)
    if (task.compare(0, known.prefix.size(), known.prefix) == 0) return known.scoring;
  throw std::runtime_error("ruler: task " + task +
                           " is unknown; names begin with niah, vt, cwe, fwe or qa");
}

std::vector<RulerSample> read_ruler(const std::string& task, std::string_view lines,
                                    const std::string& file) {
  ruler_scoring(task);  // before any line
  std::vector<RulerSample> samples;
  std::size_t number = 0;
  for (std::size_t at = 0; at < lines.size();) {
    const std::size_t end = std::min(lines.find('\n', at), lines.size());
    const std::string_view line = lines.substr(at, end - at);
    at = end + 1;
    ++number;
    if (trimmed(line).empty()) continue;
    const std::string name = file + ", line " + std::to_string(number);
    const nlohmann::json json = parse_json(line, file, name);
    samples.push_back(sample_of(task, JsonValue(name, json)));
  }
  if (samples.empty())
    throw std::runtime_error("ruler: " + file + " has 0 samples, at least 1 is expected");
  return samples;
}

std::vector<RulerSample> load_ruler(const std::string& path, const std::vector<std::string>& tasks,
                                    int per_task) {
  const std::vector<TaskFile> files = files_of(path);
  const auto missing = std::find_if(tasks.begin(), tasks.end(), [&](const std::string& task) {
    return std::none_of(files.begin(), files.end(),
                        [&](const TaskFile& file) { return file.task == task; });
  });
  if (missing != tasks.end())
    throw std::runtime_error("ruler: task " + *missing + " is none of " +
                             std::to_string(files.size()) + " in " + path);
  std::vector<RulerSample> samples;
  for (const TaskFile& file : files) {
    if (!tasks.empty() && std::find(tasks.begin(), tasks.end(), file.task) == tasks.end()) continue;
    ruler_scoring(file.task);
    const fs::path lines = fs::is_directory(file.path) ? only_file(file.path) : file.path;
    auto of_file = read_ruler(file.task, read_file(lines), lines.string());
    of_file.resize(std::min(of_file.size(), static_cast<std::size_t>(per_task)));
    samples.insert(samples.end(), of_file.begin(), of_file.end());
  }
  if (samples.empty())
    throw std::runtime_error("ruler: " + path + " has 0 folders of tasks, at least 1 is expected");
  return samples;
}

double string_match(std::string_view answer, const RulerSample& sample) {
  std::string text = trimmed(answer);
  for (char& byte : text)
    if (static_cast<unsigned char>(byte) < 0x20U) byte = '\n';
  text = lower(trimmed(text));
  const auto hits = std::count_if(sample.references.begin(), sample.references.end(),
                                  [&](const std::string& reference) {
                                    return text.find(lower(reference)) != std::string::npos;
                                  });
  if (!sample.scoring.all) return hits > 0 ? 1.0 : 0.0;
  return static_cast<double>(hits) / static_cast<double>(sample.references.size());
}

}  // namespace llama
