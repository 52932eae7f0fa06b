// SPDX-License-Identifier: Apache-2.0
// Compares answers that a GPU served (serve-bench --answers) with those of the engine on the CPU,
// FullKV in f32: `test_cpu_answers MODEL ANSWERS.json`. Not a test of its own: it needs a GPU's
// file. Fails where a token differs that was clearly the most likely one.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "evaluate.hpp"
#include "json_file.hpp"

namespace {

/// Logits that far apart cannot be told by rows in f16.
constexpr float kClear = 0.05F;

int compare(const char* folder, const char* path) {
  const llama::Engine engine(folder, 2);
  const llama::Config& config = engine.model.config();
  const auto width = static_cast<std::int64_t>(config.hidden_size);
  int clear = 0;
  for (const auto& entry : llama::read_json(path, path)) {
    const auto prompt = entry.at("prompt_ids").get<std::vector<std::int32_t>>();
    const auto answer = entry.at("answer_ids").get<std::vector<std::int32_t>>();
    llama::MethodOptions full;
    full.method = "FullKV";
    full.storage = lowrankkv::DType::f32;
    const auto store = llama::make_store(
        full, config, static_cast<std::int64_t>(prompt.size() + answer.size()), {}, engine.threads);
    store->create(1);
    std::vector<float> hidden = llama::prefill(engine, *store, 1, prompt);
    std::size_t same = 0;
    float above = 0.0F;
    for (const std::int32_t id : answer) {
      const std::vector<float> logits =
          engine.model.logits(hidden, static_cast<std::int64_t>(hidden.size()) / width - 1, 1);
      const auto best = std::max_element(logits.begin(), logits.end());
      above = *best - logits[static_cast<std::size_t>(id)];
      if (best - logits.begin() != id) break;
      ++same;
      hidden = llama::decode(engine, *store, 1, {id});
    }
    std::printf("%-12s prompt of %zu tokens: %zu of %zu tokens are the CPU's",
                entry.at("method").get<std::string>().c_str(), prompt.size(), same, answer.size());
    if (same < answer.size())
      std::printf("; the CPU's next one is %.4f above the GPU's", static_cast<double>(above));
    std::printf("\n");
    std::fflush(stdout);
    clear += same < answer.size() && above > kClear ? 1 : 0;
  }
  return clear == 0 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) try {
  if (count == 3) return compare(arguments[1], arguments[2]);
  std::fprintf(stderr, "usage: test_cpu_answers MODEL ANSWERS.json\n");
  return 2;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
