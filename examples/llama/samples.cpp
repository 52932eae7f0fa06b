// SPDX-License-Identifier: Apache-2.0
#include "samples.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>

#include "json_file.hpp"

namespace llama {
namespace {

// One row of an evaluation set's .json, and its prompt from the .bin.
Sample read_sample(const JsonValue& row, const std::string& raw) {
  const auto tokens_in_file = static_cast<std::int64_t>(raw.size() / 2);
  const std::int64_t offset = row.at("offset").integer(0, tokens_in_file);
  // Of the prompt's tokens one at least is compressed, and one at least is read behind that.
  const std::int64_t tokens = row.at("num_tokens").integer(2, INT32_MAX);
  if (tokens > tokens_in_file - offset) {
    throw std::runtime_error("evaluation set: a sample lies at tokens " + std::to_string(offset) +
                             " to " + std::to_string(offset + tokens) + ", the file has " +
                             std::to_string(tokens_in_file));
  }
  Sample sample{row.at("task").text(), {}, {}};
  const JsonValue answer = row.at("answer_ids");
  if (answer.size() == 0) answer.fail("one id at least");
  for (std::size_t i = 0; i < answer.size(); ++i)
    sample.answer.push_back(static_cast<std::int32_t>(answer.at(i).integer(0, INT32_MAX)));
  for (std::size_t i = 0; i < static_cast<std::size_t>(tokens); ++i) {
    const std::size_t at = 2 * (static_cast<std::size_t>(offset) + i);
    const auto low = static_cast<unsigned char>(raw[at]);
    const auto high = static_cast<unsigned char>(raw[at + 1]);
    sample.prompt.push_back(low | high << 8);
  }
  return sample;
}

}  // namespace

std::vector<Sample> load_samples(const std::string& prefix, const std::vector<std::string>& tasks,
                                 int per_task) {
  std::ifstream data(prefix + ".bin", std::ios::binary);
  if (!data || !std::ifstream(prefix + ".json"))
    throw std::runtime_error("evaluation set: cannot open " + prefix + ".json and .bin");
  const std::string raw((std::istreambuf_iterator<char>(data)), std::istreambuf_iterator<char>());
  const std::string name = file_name(prefix) + ".json";
  const nlohmann::json json = read_json(prefix + ".json", name);
  return read_samples(prefix, JsonValue(name, json), raw, tasks, per_task);
}

std::vector<Sample> read_samples(const std::string& prefix, const JsonValue& rows,
                                 const std::string& raw, const std::vector<std::string>& tasks,
                                 int per_task) {
  if (raw.size() % 2 != 0)
    throw std::runtime_error("evaluation set: " + prefix + ".bin has " +
                             std::to_string(raw.size()) + " bytes, expected 2 a token");
  std::vector<Sample> samples;
  std::map<std::string, int> count;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string task = rows.at(i).at("task").text();
    if (!tasks.empty() && std::find(tasks.begin(), tasks.end(), task) == tasks.end()) continue;
    if (count[task]++ < per_task) samples.push_back(read_sample(rows.at(i), raw));
  }
  const auto missing = std::find_if(tasks.begin(), tasks.end(),
                                    [&](const std::string& task) { return !count.contains(task); });
  if (missing != tasks.end())
    throw std::runtime_error("evaluation set: " + rows.file() + " has 0 samples of task " +
                             *missing + " among " + std::to_string(rows.size()));
  if (samples.empty())
    throw std::runtime_error("evaluation set: no sample of the tasks asked for in " + prefix);
  return samples;
}

}  // namespace llama
