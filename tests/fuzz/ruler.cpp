// SPDX-License-Identifier: Apache-2.0
// RULER's samples: an input is the text of a file of JSON Lines.
#include "ruler.hpp"

#include "json_target.hpp"

namespace fuzz {

bool accepts(Input input) {
  const std::string_view lines(reinterpret_cast<const char*>(input.data()), input.size());
  return read_engine_file([&] {
    const auto samples = llama::read_ruler("qa_1", lines, "set.jsonl");
    require(!samples.empty(), "a file has a sample");
    for (const llama::RulerSample& sample : samples) {
      require(sample.task == "qa_1" && !sample.scoring.all, "a sample is of the file's task");
      require(!sample.references.empty(), "a sample has a reference");
      for (const std::string& reference : sample.references)
        require(!reference.empty(), "a reference is not empty");
      require(llama::string_match("", sample) == 0.0, "no answer is no match");
      const double score = llama::string_match(sample.prompt, sample);
      require(score == 0.0 || score == 1.0, "any reference is enough");
      // Letters stay what they are, and nothing around them matters.
      llama::RulerSample plain = sample;
      plain.references = {"needle"};
      require(llama::string_match(sample.prompt + "\tNEEDLE\n" + sample.prompt, plain) == 1.0,
              "an answer that has the reference matches");
    }
  });
}

std::vector<Seed> seeds() {
  return {
      {"one", bytes_of(R"({"index":0,"input":"a","outputs":["b"],"length":9})"
                       "\n")},
      {"two", bytes_of(R"({"index":0,"input":"a","outputs":["B"],"length":9,"answer_prefix":"b"})"
                       "\n\n"
                       R"({"input":"\u00e9","outputs":["c","d"]})")},
  };
}

}  // namespace fuzz
