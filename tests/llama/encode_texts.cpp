// SPDX-License-Identifier: Apache-2.0
// encode_texts TOKENIZER.json TEXTS.json: prints a JSON list of the ids of every text.
// against_tokenizers.py compares them with those of another implementation.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tokenizer.hpp"

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s TOKENIZER.json TEXTS.json\n", arguments[0]);
    return 2;
  }
  try {
    const llama::Tokenizer tokenizer(arguments[1]);
    nlohmann::json ids = nlohmann::json::array();
    for (const auto& text : nlohmann::json::parse(std::ifstream(arguments[2])))
      ids.push_back(tokenizer.encode(text.get<std::string>()));
    std::cout << ids << '\n';
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
