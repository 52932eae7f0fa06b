// SPDX-License-Identifier: Apache-2.0
// What `speed` measures and what tables say of bytes, on the model in examples/data. No time is
// compared with another: only what is made of them.
#include "speed.hpp"

#include <doctest/doctest.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "nano_engine.hpp"
#include "report.hpp"

using namespace llama;

namespace {

/// Speed of methods that need no bases.
std::vector<Row> measure(const std::vector<std::int64_t>& lengths, const SpeedOptions& options,
                         std::int64_t tokens = 400) {
  return measure_speed_at(nano(), {"StreamingLLM"}, {0.5, 0.25}, {}, {}, lengths,
                          drawn_tokens(nano().model.config(), tokens, 1), options);
}
nlohmann::json written(const std::vector<Row>& rows) {
  const char* path = "speed_rows.json";
  write_json(path, rows);
  const nlohmann::json json = nlohmann::json::parse(std::ifstream(path));
  std::remove(path);
  return json;
}

}  // namespace

TEST_CASE("the median") {
  CHECK(median({3.0, 1.0, 2.0}) == 2.0);
  CHECK(median({4.0, 1.0, 3.0, 2.0}) == 2.5);
  CHECK(median({7.0}) == 7.0);
  CHECK_THROWS_WITH_AS(median({}), "median: 0 values, at least 1 is needed", std::runtime_error);
}

TEST_CASE("drawn tokens are ids of the vocabulary behind BOS, the same for the same seed") {
  const Config& config = nano().model.config();
  const auto tokens = drawn_tokens(config, 500, 1);
  CHECK(tokens.size() == 500);
  CHECK(tokens.front() == config.bos);
  for (const std::int32_t id : tokens) CHECK((id >= 0 && id < config.vocabulary_size));
  const auto shorter = drawn_tokens(config, 100, 1);
  CHECK(std::equal(shorter.begin(), shorter.end(), tokens.begin()));
  CHECK(drawn_tokens(config, 500, 1) == tokens);
  CHECK(drawn_tokens(config, 500, 2) != tokens);
  CHECK(drawn_tokens(config, 0, 1).empty());
}

TEST_CASE("speed: every method at every length, paired with FullKV round by round") {
  const auto rows = measure({300, 100}, {.decode_tokens = 5, .rounds = 3});
  REQUIRE(rows.size() == 6);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const Row& full = rows[i / 3 * 3];
    CAPTURE(i);
    const std::int64_t length = i < 3 ? 300 : 100;
    CHECK(row.method == (i % 3 == 0 ? "FullKV" : "StreamingLLM"));
    CHECK(row.ratio == (i % 3 == 0 ? 1.0 : i % 3 == 1 ? 0.5 : 0.25));
    CHECK(row.prompt_tokens == length);
    CHECK(row.context == length);
    CHECK(row.largest_context >= length);
    for (const auto& [own, baseline, tokens] :
         {std::tuple{&row.prefill, &full.prefill, static_cast<double>(length)},
          std::tuple{&row.decode, &full.decode, 5.0}}) {
      REQUIRE(own->seconds.size() == 3);
      CHECK(own->tokens_per_second == tokens / median(own->seconds));
      std::vector<double> times;
      for (std::size_t round = 0; round < 3; ++round)
        times.push_back(baseline->seconds[round] / own->seconds[round]);
      CHECK(own->times_full == median(times));
    }
    if (i % 3 == 0) CHECK(row.decode.times_full == 1.0);
  }
  // The budget is that of each length: half of its tokens, and of those a window.
  CHECK(rows[1].bytes_per_token < 0.6 * rows[0].bytes_per_token);
  CHECK(rows[2].bytes_per_token < rows[1].bytes_per_token);
  const nlohmann::json json = written(rows);
  REQUIRE(json.size() == 6);
  CHECK(json[4]["prompt_tokens"] == 100);
  CHECK(json[4]["tokens_per_second"]["decode"] == rows[4].decode.tokens_per_second);
  CHECK(json[4]["times_full"]["prefill"] == rows[4].prefill.times_full);
  CHECK(json[4]["seconds"]["decode"] == rows[4].decode.seconds);
}

TEST_CASE("speed: what cannot be measured is refused before anything runs, with both values") {
  CHECK_THROWS_WITH_AS(measure({100, 401}, {}), "speed: a prompt of 401 tokens, there are 400",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(measure({0}, {}), "speed: a prompt of 0 tokens, there are 400",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(measure({4095}, {.decode_tokens = 2}, 5000),
                       "speed: a prompt of 4095 tokens and 2 decode steps, the model has 4096 "
                       "positions",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(measure({10}, {.decode_tokens = 0}),
                       "speed: 0 decode steps in 5 rounds, at least 1 of each is needed",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(measure({10}, {.rounds = 0}),
                       "speed: 64 decode steps in 0 rounds, at least 1 of each is needed",
                       std::runtime_error);
}

TEST_CASE("a row knows by how much its bytes exceed its ratio, and a line says so") {
  Row row;
  row.method = "Budgeted";
  row.ratio = 0.05;
  row.knob = "bytes, everything counted";
  row.largest_ratio_measured = 0.081;
  row.largest_context = 1024;
  CHECK(row.excess() == doctest::Approx(0.62));
  Row met = row;
  met.largest_ratio_measured = 0.052;
  Row full;
  full.method = "FullKV";
  full.largest_ratio_measured = 1.4;  // unfilled pages: there is no ratio that it exceeds
  CHECK(full.excess() == 0.0);
  const auto lines = excess_warnings({full, met, row});
  REQUIRE(lines.size() == 2);
  CHECK(lines[0] ==
        "warning: Budgeted (ratio: bytes, everything counted): 0.05 asked for, 0.081 of the bytes "
        "of f16 used at 1024 tokens, 62 % more");
  CHECK(excess_warnings({full, met}).empty());
  const nlohmann::json json = written({row, full});
  CHECK(json[0]["over_ratio"].get<double>() == doctest::Approx(0.62));
  CHECK(json[0]["largest_ratio_measured"] == 0.081);
  CHECK(json[0]["largest_context"] == 1024);
  CHECK_FALSE(json[1].contains("over_ratio"));
}

TEST_CASE("the largest bytes of a sequence count, those of generation too") {
  auto contenders = make_contenders(nano(), {"StreamingLLM"}, {0.1}, {.context = 1000}, 1100, {});
  Contender& contender = contenders.front();
  const auto prompt = drawn_tokens(nano().model.config(), 50, 1);
  std::int64_t at_end = 0;
  const auto ids = generate(nano(), *contender.store, prompt, 4, {}, {}, [&] {
    note_memory(nano(), contender);
    at_end = contender.store->num_tokens(0);
  });
  // A window of 96 tokens holds all of 50 and more: ten times what was asked for.
  CHECK(at_end == 50 + static_cast<std::int64_t>(ids.size()) - 1);
  CHECK(contender.row.context == at_end);
  CHECK(contender.row.largest_context == at_end);
  CHECK(contender.row.excess() >= 8.9);
  CHECK(contender.row.largest_ratio_measured == contender.row.ratio_measured);
  CHECK(excess_warnings({contender.row}).size() == 2);
}

TEST_CASE("calibration is of one form of the keys or of each once") {
  for (const auto& forms :
       {std::vector<lowrankkv::Rope>{}, {lowrankkv::Rope::post, lowrankkv::Rope::post}})
    CHECK_THROWS_WITH_AS(calibrate(nano(), "text", 100, 64, forms),
                         ("calibration: " + std::to_string(forms.size()) +
                          " forms of the keys, post-RoPE, pre-RoPE or each once expected")
                             .c_str(),
                         std::runtime_error);
}

TEST_CASE("one pass calibrates both forms of the keys as two passes do") {
  const std::string text = read_text(kData + "/text/calibration_prose.txt");
  const auto pass = [&](const std::vector<lowrankkv::Rope>& forms) {
    return calibrate(nano(), text, 1500, 512, forms);
  };
  // To rounding: the model's own sums depend on where its rows lie in memory, and attention weights
  // with respect to pre-RoPE keys are here those of keys as the model rotates them.
  const auto distance = [](const auto& one, const auto& other) {
    return (one - other).norm() / one.norm();
  };
  const Calibration both = pass({lowrankkv::Rope::post, lowrankkv::Rope::pre});
  for (const lowrankkv::Rope form : {lowrankkv::Rope::post, lowrankkv::Rope::pre}) {
    const Calibration one = pass({form});
    CHECK(one.of(form == lowrankkv::Rope::pre ? lowrankkv::Rope::post : lowrankkv::Rope::pre)
              .empty());
    REQUIRE(one.of(form).size() == both.of(form).size());
    for (std::size_t layer = 0; layer < one.of(form).size(); ++layer) {
      const auto &own = one.of(form)[layer], &shared = both.of(form)[layer];
      CHECK(own.rope() == shared.rope());
      CHECK(own.coding().num_queries() == shared.coding().num_queries());
      CHECK(shared.coding().stream_square() ==
            doctest::Approx(own.coding().stream_square()).epsilon(1e-5));
      CHECK(distance(own.values().second, shared.values().second) < 1e-5);
      for (int head = 0; head < own.shape().num_kv_heads; ++head) {
        const auto &alone = own.head(head), &of_both = shared.head(head);
        CHECK(alone.query.count == of_both.query.count);
        CHECK(alone.key_sample.size() == of_both.key_sample.size());
        CHECK(distance(alone.query.second, of_both.query.second) < 1e-5);
        CHECK(distance(alone.key.second, of_both.key.second) < 1e-5);
        CHECK(distance(alone.value.second, of_both.value.second) < 1e-5);
        const auto &coding = own.coding().head(head), &coding_both = shared.coding().head(head);
        CHECK(distance(coding.key.second, coding_both.key.second) < 1e-5);
        CHECK(distance(coding.value.second, coding_both.value.second) < 1e-5);
        CHECK(distance(coding.key_metric, coding_both.key_metric) < 1e-3);
        CHECK(distance(coding.value_metric, coding_both.value_metric) < 1e-3);
      }
    }
  }
  for (std::size_t layer = 0; layer < both.post_rope.size(); ++layer)  // the forms are not the same
    CHECK(distance(both.post_rope[layer].coding().head(0).key_metric,
                   both.pre_rope[layer].coding().head(0).key_metric) > 0.05);
}
