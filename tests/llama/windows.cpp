// SPDX-License-Identifier: Apache-2.0
// Bits per byte and divergence from FullKV on windows of texts, on the model in examples/data.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <sstream>

#include "divergence.hpp"
#include "evaluate.hpp"
#include "nano_engine.hpp"
#include "report.hpp"

using namespace llama;

namespace {

std::string text(const std::string& name) { return read_text(kData + "/text/" + name + ".txt"); }
std::vector<Contender> contenders(const std::vector<std::string>& names,
                                  const std::vector<double>& ratios, std::int64_t tokens) {
  return make_contenders(nano(), names, ratios, {.context = tokens}, tokens, {});
}

using Wide = std::vector<long double>;

/// log softmax as it is defined.
Wide plain_log_softmax(const std::vector<float>& logits) {
  long double sum = 0.0L;
  for (const float x : logits) sum += std::exp(static_cast<long double>(x));
  Wide out;
  for (const float x : logits) out.push_back(static_cast<long double>(x) - std::log(sum));
  return out;
}
double plain_divergence(const std::vector<float>& p_logits, const std::vector<float>& q_logits) {
  const Wide p = plain_log_softmax(p_logits), q = plain_log_softmax(q_logits);
  long double sum = 0.0L;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(p[i]) * (p[i] - q[i]);
  return static_cast<double>(sum);
}
NextToken next(const std::vector<float>& logits) {
  return {logits.data(), static_cast<int>(logits.size())};
}

}  // namespace

TEST_CASE("divergence is that of its definition in long double, 0 of itself, never below") {
  std::mt19937 random(3);
  for (const float scale : {0.01F, 1.0F, 10.0F, 60.0F}) {
    std::normal_distribution<float> normal(0.0F, scale);
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<float> p(11), q(11);
      for (float& x : p) x = normal(random);
      for (float& x : q) x = normal(random);
      const double expected = plain_divergence(p, q);
      CHECK(next(p).divergence(q.data()) == doctest::Approx(expected).epsilon(1e-9));
      CHECK(next(p).divergence(p.data()) == 0.0);
      std::vector<float> moved = p;
      for (float& x : moved) x += 64.0F;  // the same distribution, to the rounding of its logits
      CHECK(next(p).divergence(moved.data()) >= 0.0);
      CHECK(next(p).divergence(moved.data()) < 1e-9);
      CHECK(log_probability(p.data(), 11, 4) ==
            doctest::Approx(static_cast<double>(plain_log_softmax(p)[4])).epsilon(1e-12));
    }
  }
}

TEST_CASE("logits far apart do not overflow; the first of equal ones is the most likely") {
  const std::vector<float> one{3.0e4F, -3.0e4F, 0.0F}, other{-3.0e4F, 3.0e4F, 0.0F};
  CHECK(next(one).divergence(other.data()) == doctest::Approx(6.0e4));
  CHECK(next({1.0F, 2.0F, 2.0F}).top() == 1);
  CHECK(most_likely(other.data(), 3) == 1);
}

TEST_CASE("logits that are no numbers are refused, with token and value") {
  const std::vector<float> good{1.0F, 2.0F}, bad{1.0F, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<float> infinite{std::numeric_limits<float>::infinity(), 1.0F};
  CHECK_THROWS_WITH_AS(next(bad), "logits: token 1 has nan, finite numbers are expected",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(next(good).divergence(infinite.data()),
                       "logits: token 0 has inf, finite numbers are expected", std::runtime_error);
  CHECK_THROWS_WITH_AS(most_likely(good.data(), 0),
                       "logits: a vocabulary of 0, at least 1 is expected", std::runtime_error);
}

TEST_CASE("quantiles by nearest rank, and what positions say together") {
  std::vector<double> values(1000);
  std::iota(values.rbegin(), values.rend(), 1.0);
  CHECK(quantile(values, 0.999) == 999.0);
  CHECK(quantile(values, 0.5) == 500.0);
  CHECK(quantile(values, 1.0) == 1000.0);
  CHECK(quantile(values, 1e-6) == 1.0);
  CHECK(quantile({3.0, 1.0, 2.0}, 0.5) == 2.0);
  CHECK(quantile({3.0, 1.0, 2.0}, 0.999) == 3.0);
  CHECK_THROWS_WITH_AS(quantile({}, 0.5),
                       "quantile: rank 0.500000 of 0 values, above 0 to 1 of at least 1 expected",
                       std::runtime_error);
  CHECK_THROWS_AS(quantile({1.0}, 0.0), std::runtime_error);
  CHECK_THROWS_AS(quantile({1.0}, 1.5), std::runtime_error);
  const Divergence all = summarize({4.0, 0.0, 1.0, 3.0}, 3);
  CHECK(all.mean == 2.0);
  CHECK(all.median == 1.0);
  CHECK(all.p999 == 4.0);
  CHECK(all.top1 == 0.75);
  CHECK(all.positions == 4);
}

TEST_CASE("bits per byte of a window are those of one forward pass over it, whatever its shape") {
  const WindowShape shape{.tokens = 200, .decoded = 41};  // no multiple of a step
  auto full = make_contenders(nano(), {"FullKV"}, {},
                              {.context = 200, .storage = lowrankkv::DType::f32}, 200, {});
  measure_bits_per_byte(nano(), full, "prose", text("prose"), 2, shape);
  const auto ids = encode_documents(nano(), text("prose"));
  const auto store = make_store({.method = "FullKV", .storage = lowrankkv::DType::f32},
                                nano().model.config(), 200, {}, nano().threads);
  const auto vocabulary = static_cast<std::size_t>(nano().model.config().vocabulary_size);
  double nats = 0.0;
  std::size_t bytes = 0;
  for (int w = 0; w < 2; ++w) {
    std::vector<std::int32_t> window(ids.begin() + w * 199, ids.begin() + (w + 1) * 199);
    window.insert(window.begin(), nano().model.config().bos);
    store->create(0);
    const auto logits = nano().model.logits(prefill(nano(), *store, 0, window), 0, 200);
    store->erase(0);
    for (std::size_t i = 200 - 41; i + 1 < 200; ++i) {
      const auto from = logits.begin() + static_cast<std::ptrdiff_t>(i * vocabulary);
      const std::size_t size = nano().tokenizer.bytes(window[i + 1]).size();
      if (size == 0) continue;
      bytes += size;
      nats -= static_cast<double>(plain_log_softmax(
          {from, from + static_cast<std::ptrdiff_t>(
                            vocabulary)})[static_cast<std::size_t>(window[i + 1])]);
    }
  }
  CHECK(full[0].row.bits_per_byte.at("prose") ==
        doctest::Approx(nats / std::log(2.0) / static_cast<double>(bytes)).epsilon(1e-4));
  CHECK(full[0].row.windows.at("prose") == 2);
  CHECK(full[0].row.window.tokens == 200);
  CHECK(full[0].row.context == 200);
}

TEST_CASE("FullKV is its own reference: 0 nats and all tokens; coarser methods are further away") {
  const WindowShape shape{.tokens = 512, .decoded = 130};
  const std::vector<NamedText> texts{{"prose", text("prose")}, {"code", text("code")}};
  // Not first in the list, and there twice: the second one decodes for itself.
  auto rivals = contenders({"StreamingLLM", "FullKV", "FullKV"}, {0.9, 0.3}, 512);
  REQUIRE(rivals.size() == 4);
  measure_divergence(nano(), rivals, texts, 2, shape);
  const Row &less = rivals[0].row, &least = rivals[1].row, &full = rivals[2].row,
            &again = rivals[3].row;
  for (const std::string name : {"prose", "code"}) {
    CAPTURE(name);
    const Divergence& own = full.divergence.at(name);
    CHECK(own.mean == 0.0);
    CHECK(own.p999 == 0.0);
    CHECK(own.top1 == 1.0);
    CHECK(own.positions <= 2 * 129);
    CHECK(own.positions > 2 * 120);
    CHECK(again.divergence.at(name).p999 <= 1e-6);
    CHECK(least.divergence.at(name).mean > 0.01);
    CHECK(least.divergence.at(name).mean > less.divergence.at(name).mean);
    CHECK(least.divergence.at(name).p999 > least.divergence.at(name).median);
    CHECK(least.divergence.at(name).top1 < 0.99);
    CHECK(least.divergence.at(name).positions == own.positions);
    CHECK(full.windows.at(name) == 2);
  }
  const auto total = full.divergence.at("prose").positions + full.divergence.at("code").positions;
  CHECK(least.all_texts.positions == total);
  CHECK(least.all_texts.mean ==
        doctest::Approx((least.divergence.at("prose").mean *
                             static_cast<double>(full.divergence.at("prose").positions) +
                         least.divergence.at("code").mean *
                             static_cast<double>(full.divergence.at("code").positions)) /
                        static_cast<double>(total)));
  // The same pass gives the same bits per byte as `bpb`.
  auto alone = contenders({"StreamingLLM", "FullKV"}, {0.3}, 512);
  measure_bits_per_byte(nano(), alone, "code", text("code"), 2, shape);
  CHECK(least.bits_per_byte.at("code") ==
        doctest::Approx(alone[0].row.bits_per_byte.at("code")).epsilon(1e-5));
  CHECK(full.bits_per_byte.at("code") ==
        doctest::Approx(alone[1].row.bits_per_byte.at("code")).epsilon(1e-5));
  CHECK(alone[0].row.divergence.empty());
}

TEST_CASE("what cannot be measured is refused before anything runs, with both values") {
  auto full = contenders({"FullKV"}, {}, 512);
  const auto bits = [&](const std::string& of, const WindowShape& shape) {
    measure_bits_per_byte(nano(), full, "x", of, 1, shape);
  };
  CHECK_THROWS_WITH_AS(bits("a few words", {.tokens = 64, .decoded = 32}),
                       doctest::Contains("tokens, a window needs 63"), std::runtime_error);
  CHECK_THROWS_WITH_AS(bits("", {.tokens = 5000}),
                       "bits per byte: windows of 5000 tokens, the model takes 3 to 4096",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(bits("", {.tokens = 512, .decoded = 512}),
                       "bits per byte: 512 tokens are decoded of windows of 512, 2 to 511 expected",
                       std::runtime_error);
  CHECK_THROWS_WITH_AS(bits("", {.tokens = 512, .decoded = 1}),
                       "bits per byte: 1 tokens are decoded of windows of 512, 2 to 511 expected",
                       std::runtime_error);
  auto none = contenders({"StreamingLLM"}, {0.5}, 512);
  CHECK_THROWS_WITH_AS(measure_divergence(nano(), none, {}, 1),
                       "kl: FullKV is none of 1 methods, divergence is from it",
                       std::runtime_error);
  // The second text is too short: the first is not begun.
  CHECK_THROWS_WITH_AS(
      measure_divergence(nano(), full, {{"prose", text("prose")}, {"short", "x"}}, 1),
      doctest::Contains("kl: short has 1 tokens"), std::runtime_error);
  CHECK(full[0].row.bits_per_byte.empty());
}

TEST_CASE("texts are files, and the *.txt of folders in the order of their names") {
  namespace fs = std::filesystem;
  const std::string folder = "windows_texts";
  fs::create_directories(folder + "/inner.txt");  // no file
  for (const char* name : {"b.txt", "a.txt", "notes.md"})
    std::ofstream(folder + "/" + name) << name;
  const auto texts = read_texts({kData + "/text/prose.txt", folder});
  REQUIRE(texts.size() == 3);
  CHECK(texts[0].name == "prose");
  CHECK((texts[0].text == text("prose")));
  CHECK(texts[1].name == "a");
  CHECK(texts[2].name == "b");
  CHECK(texts[2].text == "b.txt");
  CHECK_THROWS_WITH_AS(read_texts({folder, folder + "/a.txt"}),
                       "texts: windows_texts/a.txt and windows_texts/a.txt are both called a",
                       std::runtime_error);
  fs::create_directories(folder + "/empty");
  CHECK_THROWS_WITH_AS(read_texts({folder + "/empty"}),
                       "texts: folder windows_texts/empty has 0 files *.txt, at least 1 expected",
                       std::runtime_error);
  fs::remove_all(folder);
}

TEST_CASE("rows say how much more a method loses than FullKV, and all that was measured") {
  Row full, row, other;
  full.method = "FullKV";
  full.bits_per_byte = {{"a", 1.0}, {"b", 0.5}};
  row.method = "StarKV";
  row.bits_per_byte = {{"a", 1.1}, {"b", 0.5}};
  row.windows = {{"a", 3}, {"b", 2}};
  row.divergence["a"] = {.mean = 0.25, .median = 0.125, .p999 = 2.0, .top1 = 0.75, .positions = 9};
  row.all_texts = row.divergence["a"];
  other.method = "OjaKV";
  other.bits_per_byte = {{"c", 1.0}};
  const std::vector<Row> rows{other, full, row};
  CHECK(*mean_relative_rise(row, rows) == doctest::Approx(0.05));
  CHECK(*mean_relative_rise(full, rows) == 0.0);
  CHECK_FALSE(mean_relative_rise(other, rows));  // FullKV was not measured on its text
  CHECK_FALSE(mean_relative_rise(row, {row}));
  const char* path = "windows_rows.json";
  write_json(path, rows);
  const auto json = nlohmann::json::parse(std::ifstream(path));
  CHECK(json[2]["mean_relative_rise"].get<double>() == doctest::Approx(0.05));
  CHECK_FALSE(json[0].contains("mean_relative_rise"));
  CHECK(json[2]["window"] == nlohmann::json{{"tokens", 1024}, {"decoded", 768}});
  CHECK(json[2]["windows"] == nlohmann::json{{"a", 3}, {"b", 2}});
  CHECK(json[2]["kl"]["a"] ==
        nlohmann::json{
            {"mean", 0.25}, {"median", 0.125}, {"p999", 2.0}, {"top1", 0.75}, {"positions", 9}});
  CHECK(json[2]["kl_all_texts"] == json[2]["kl"]["a"]);
  CHECK_FALSE(json[1].contains("kl"));
  write_csv(path, rows);
  std::ifstream csv(path);
  std::vector<std::vector<std::string>> lines;
  for (std::string line; std::getline(csv, line);) {
    lines.emplace_back();
    std::istringstream cells(line);
    for (std::string cell; std::getline(cells, cell, ',');) lines.back().push_back(cell);
  }
  REQUIRE(lines.size() == 4);
  for (const auto& line : lines) CHECK(line.size() == lines[0].size());
  const auto column = [&](const std::string& name) {
    return std::find(lines[0].begin(), lines[0].end(), name) - lines[0].begin();
  };
  const auto at = [&](std::size_t line, const std::string& name) {
    return lines[line].at(static_cast<std::size_t>(column(name)));
  };
  CHECK(at(3, "kl_p999_a") == "2");
  CHECK(at(3, "kl_positions_a") == "9");
  CHECK(at(2, "kl_mean_a").empty());
  CHECK(at(3, "mean_relative_rise") == "0.050000");
  CHECK(at(1, "mean_relative_rise").empty());
  std::remove(path);
}
