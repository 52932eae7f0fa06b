// SPDX-License-Identifier: Apache-2.0
// Evaluation sets: an input is the text of the .json, a NUL, and the bytes of the .bin.
#include "samples.hpp"
#include "json_file.hpp"
#include "json_target.hpp"

namespace fuzz {
namespace {

std::vector<llama::Sample> read(const llama::JsonValue& rows, const std::string& raw,
                                const std::vector<std::string>& tasks, int per_task) {
  return llama::read_samples("set", rows, raw, tasks, per_task);
}

}  // namespace

bool accepts(Input input) {
  const TwoParts parts = two_parts(input);
  const std::string raw(parts.second);
  return read_engine_file([&] {
    const nlohmann::json json = llama::parse_json(parts.first, "set.json", "set.json");
    const llama::JsonValue rows("set.json", json);
    const auto all = read(rows, raw, {}, 1000);
    require(!all.empty() && all.size() <= rows.size(), "samples are rows of the file");
    for (const llama::Sample& sample : all) {
      require(sample.prompt.size() >= 2, "a prompt has two tokens at least");
      require(sample.prompt.size() <= raw.size() / 2, "a prompt lies in the file");
      require(!sample.answer.empty(), "an answer has one token at least");
      for (const std::int32_t id : sample.prompt)
        require(id >= 0 && id < 65536, "ids of a prompt have 16 bits");
      for (const std::int32_t id : sample.answer) require(id >= 0, "ids are not negative");
    }
    const auto one = read(rows, raw, {all.back().task}, 1);
    require(one.size() == 1 && one.front().task == all.back().task, "one sample of a task");
  });
}

std::vector<Seed> seeds() {
  const auto join = [](const std::string& json, std::string_view raw) {
    return bytes_of(json + '\0' + std::string(raw));
  };
  return {
      {"one", join(R"([{"task":"s1","offset":0,"num_tokens":2,"answer_ids":[7]}])",
                   std::string_view("\1\0\2\0", 4))},
      {"two",
       join(
           R"([{"task":"s1","offset":1,"num_tokens":3,"answer_ids":[7,8]},{"task":"s2","offset":0,"num_tokens":2,"answer_ids":[65535],"answer":"x"}])",
           std::string_view("\1\0\2\0\xff\xff\0\1", 8))},
  };
}

}  // namespace fuzz
