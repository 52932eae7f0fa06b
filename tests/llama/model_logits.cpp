// SPDX-License-Identifier: Apache-2.0
// model_logits FOLDER PROMPTS.json STEPS LOGITS.f32: writes the f32 logits of every token of every
// prompt, in one forward pass each, and prints a JSON list of the STEPS ids that follow greedily,
// decoded one at a time from the cache. against_transformers.py compares both.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "kv_store.hpp"
#include "model.hpp"

namespace {

using Ids = std::vector<std::int32_t>;

/// Logits of some more tokens of the sequence in `store`: a prompt, or decode steps behind it.
std::vector<float> logits_of(const llama::Model& model, llama::KvStore& store, const Ids& tokens,
                             bool prompt) {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const std::vector<float> hidden = model.forward(
      tokens, store.num_tokens(0), [&](int layer, const llama::Projected& rows, float* out) {
        if (prompt)
          store.prefill(layer, 0, n, rows, out);
        else
          store.decode(layer, 0, n, rows, out);
      });
  store.maintain(0);
  return model.logits(hidden, 0, n);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 5) {
    std::fprintf(stderr, "usage: %s FOLDER PROMPTS.json STEPS LOGITS.f32\n", arguments[0]);
    return 2;
  }
  try {
    const llama::Model model(arguments[1], std::make_shared<lowrankkv::cpu::ThreadPool>(2));
    const std::ptrdiff_t vocabulary = model.config().vocabulary_size;
    const int steps = std::stoi(arguments[3]);
    std::ofstream file(arguments[4], std::ios::binary);
    nlohmann::json greedy = nlohmann::json::array();
    for (const auto& prompt : nlohmann::json::parse(std::ifstream(arguments[2]))) {
      const Ids tokens = prompt.get<Ids>();
      const auto store =
          llama::make_store({.method = "FullKV", .storage = lowrankkv::DType::f32}, model.config(),
                            static_cast<std::int64_t>(tokens.size()) + steps, {}, model.threads());
      store->create(0);
      std::vector<float> logits = logits_of(model, *store, tokens, true);
      file.write(reinterpret_cast<const char*>(logits.data()),
                 static_cast<std::streamsize>(logits.size() * sizeof(float)));
      Ids next;
      while (static_cast<int>(next.size()) < steps) {
        const auto last = logits.end() - vocabulary;
        next.push_back(static_cast<std::int32_t>(std::max_element(last, logits.end()) - last));
        logits = logits_of(model, *store, {next.back()}, false);
      }
      greedy.push_back(next);
    }
    if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + arguments[4]);
    std::cout << greedy << '\n';
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
