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
Sample read_sample(const JsonValue& row, const std::string& raw, std::size_t id_bytes) {
  const auto tokens_in_file = static_cast<std::int64_t>(raw.size() / id_bytes);
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
    const std::size_t at = id_bytes * (static_cast<std::size_t>(offset) + i);
    std::uint32_t id = 0;
    for (std::size_t byte = 0; byte < id_bytes; ++byte)
      id |= std::uint32_t{static_cast<unsigned char>(raw[at + byte])} << 8 * byte;
    if (id > INT32_MAX)
      throw std::runtime_error(
          "evaluation set: token " + std::to_string(static_cast<std::size_t>(offset) + i) + " is " +
          std::to_string(id) + ", at most " + std::to_string(INT32_MAX) + " is expected");
    sample.prompt.push_back(static_cast<std::int32_t>(id));
  }
  return sample;
}

// Bytes of an id in the .bin: id_bytes of every row, 2 where it is not given.
std::size_t id_bytes_of(const JsonValue& rows) {
  std::int64_t bytes = 2;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const JsonValue row = rows.at(i);
    const std::int64_t own = row.has("id_bytes") ? row.at("id_bytes").integer(2, 4) : 2;
    if (own == 3) row.at("id_bytes").fail("2 or 4");
    if (i > 0 && own != bytes)
      throw std::runtime_error("evaluation set: id_bytes is " + std::to_string(bytes) +
                               " in the first row, " + std::to_string(own) + " in row " +
                               std::to_string(i));
    bytes = own;
  }
  return static_cast<std::size_t>(bytes);
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
  const std::size_t id_bytes = id_bytes_of(rows);
  if (raw.size() % id_bytes != 0)
    throw std::runtime_error("evaluation set: " + prefix + ".bin has " +
                             std::to_string(raw.size()) + " bytes, expected " +
                             std::to_string(id_bytes) + " a token");
  std::vector<Sample> samples;
  std::map<std::string, int> count;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::string task = rows.at(i).at("task").text();
    if (!tasks.empty() && std::find(tasks.begin(), tasks.end(), task) == tasks.end()) continue;
    if (count[task]++ < per_task) samples.push_back(read_sample(rows.at(i), raw, id_bytes));
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
