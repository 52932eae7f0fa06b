// SPDX-License-Identifier: Apache-2.0
// The example engine on the real model in examples/data (and on more, if LOWRANKKV_TEST_MODELS
// names folders, ':' between them).
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "evaluate.hpp"
#include "loss_metric.hpp"
#include "nano_engine.hpp"

using namespace llama;

namespace {

std::vector<std::string> models() {
  std::vector<std::string> list{kData + "/nano"};
  if (const char* more = std::getenv("LOWRANKKV_TEST_MODELS")) {
    std::istringstream stream(more);
    for (std::string folder; std::getline(stream, folder, ':');) list.push_back(folder);
  }
  return list;
}
nlohmann::json json_of(const std::string& path) {
  return nlohmann::json::parse(std::ifstream(path));
}

const Calibration& nano_moments() {
  static const Calibration calibration =
      calibrate(nano(), read_text(kData + "/text/calibration_prose.txt"), 16384, 4096,
                {lowrankkv::Rope::post, lowrankkv::Rope::pre});
  return calibration;
}

}  // namespace

TEST_CASE(
    "token ids and logits are those of the reference, to 2e-3 in f32, whether prefilled or "
    "decoded") {
  for (const std::string& folder : models()) {
    CAPTURE(folder);
    const Engine engine(folder, 2);
    const auto reference = json_of(folder + "/reference_logits.json");
    for (const auto& prompt : reference.at("prompts")) {
      const std::vector<std::int32_t> ids = prompt.at("ids");
      if (prompt.at("text").is_string()) {  // one prompt is given by its ids alone
        std::vector<std::int32_t> own =
            engine.tokenizer.encode(prompt.at("text").get<std::string>());
        own.insert(own.begin(), engine.model.config().bos);
        CHECK(own == ids);
      }
      for (const bool decoded : {false, true}) {
        const auto store = make_store({.method = "FullKV", .storage = lowrankkv::DType::f32},
                                      engine.model.config(), static_cast<std::int64_t>(ids.size()),
                                      {}, engine.threads);
        store->create(0);
        std::vector<float> hidden;
        if (decoded) {
          hidden = prefill(engine, *store, 0, {ids.begin(), ids.begin() + 1});
          for (std::size_t i = 1; i < ids.size(); ++i) {
            const auto row = decode(engine, *store, 0, {ids[i]});
            hidden.insert(hidden.end(), row.begin(), row.end());
          }
        } else {
          hidden = prefill(engine, *store, 0, ids);
        }
        for (std::size_t p = 0; p < prompt.at("positions").size(); ++p) {
          const auto logits =
              engine.model.logits(hidden, prompt.at("positions").at(p).get<std::int64_t>(), 1);
          for (std::size_t k = 0; k < prompt.at("top5_ids").at(p).size(); ++k) {
            const std::size_t id = prompt.at("top5_ids").at(p).at(k);
            CHECK(std::abs(static_cast<double>(logits[id]) -
                           prompt.at("top5_logits").at(p).at(k).get<double>()) <= 2e-3);
          }
        }
      }
    }
  }
}

TEST_CASE("a short prompt has the budget of a text, not of its own few tokens") {
  CHECK(generation_context(4 + 64, 8192) == 2048);
  CHECK(generation_context(4 + 64, 512) == 512);
  CHECK(generation_context(3000 + 64, 8192) == 3064);
}

TEST_CASE("text to ids to text is the identity") {
  for (const std::string& folder : models()) {
    const Tokenizer tokenizer(folder + "/tokenizer.json");
    std::vector<std::string> texts{"",
                                   " ",
                                   "\n\n \t x",
                                   "naïve café — 数学 🙂 \xff\xfe broken",
                                   std::string("nul\0byte", 8),
                                   "I'LL we've don't 12345  spaces   end "};
    for (const char* name : {"prose", "code", "dialogue", "calibration_prose"})
      texts.push_back(read_text(kData + "/text/" + name + ".txt"));
    if (const char* more = std::getenv("LOWRANKKV_TEST_TEXTS")) {
      std::istringstream stream(more);
      for (std::string path; std::getline(stream, path, ':');) texts.push_back(read_text(path));
    }
    for (const std::string& text : texts) CHECK((tokenizer.decode(tokenizer.encode(text)) == text));
    CHECK(tokenizer.encode("a<|endoftext|>b").size() == 3);
    CHECK(tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "ab");
  }
}

TEST_CASE(
    "exact match under FullKV is that of the model's report, and compression is really read") {
  const std::vector<std::string> tasks{"s1", "s3", "mk2", "vt"};
  const auto samples = load_samples(kData + "/nano/eval/retrieval_1024", tasks, 20);
  const std::int64_t longest = longest_sample(nano(), samples);
  CHECK(longest > 1000);
  CHECK(longest < 1100);
  auto contenders =
      make_contenders(nano(), {"FullKV", "StaticPCA", "OjaKV"}, {0.25}, {},
                      std::max<std::int64_t>(longest, 1024), nano_moments());  // windows, too
  const auto report = json_of(kData + "/nano/report.json").at("em");
  measure_retrieval(nano(), contenders, "set", samples, 32);
  for (const std::string& task : tasks) {
    CAPTURE(task);
    const double expected = report.at(task).at("1024");
    // 20 samples of a share p: four standard deviations, and one sample of slack where p is 0 or 1.
    CHECK(std::abs(contenders[0].row.exact_match.at(task) - expected) <=
          4.0 * std::sqrt(expected * (1.0 - expected) / 20.0) + 0.051);
    CHECK(contenders[1].row.exact_match.at(task) <= contenders[0].row.exact_match.at(task));
  }
  CHECK(contenders[0].row.mean_exact_match() > contenders[1].row.mean_exact_match() + 0.3);
  measure_bits_per_byte(nano(), contenders, "prose", read_text(kData + "/text/prose.txt"), 4);
  const double full = contenders[0].row.bits_per_byte.at("prose");
  CHECK(full == doctest::Approx(0.95).epsilon(0.15));
  CHECK(contenders[1].row.bits_per_byte.at("prose") > full + 0.05);
  CHECK(contenders[2].row.bits_per_byte.at("prose") > full + 0.01);
  CHECK(contenders[2].row.bits_per_byte.at("prose") < contenders[1].row.bits_per_byte.at("prose"));
  CHECK(contenders[1].row.ratio_measured < 0.35);
}

TEST_CASE("a method that keeps everything is FullKV") {
  const auto samples = load_samples(kData + "/nano/eval/retrieval_1024", {"mk1"}, 1);
  const auto& config = nano().model.config();
  std::vector<std::int32_t> answer;
  for (const char* method : {"FullKV", "StaticPCA", "StaticPCAHybrid", "OjaKV", "OjaKVv2", "Dlrp",
                             "SnapKVOnly", "StreamingLLM", "H2O", "OjaKV+SnapKV"}) {
    CAPTURE(method);
    const auto store =
        make_store({.method = method, .ratio = 1.0, .storage = lowrankkv::DType::f32}, config, 1100,
                   nano_moments(), nano().threads);
    const auto ids = generate(nano(), *store, samples[0].prompt, 24, {}, {});
    if (answer.empty()) answer = ids;
    CHECK(ids == answer);
  }
  CHECK(std::equal(samples[0].answer.begin(), samples[0].answer.end(), answer.begin()));
}

TEST_CASE("the first and last tokens at full rank are as many as were asked for") {
  const auto samples = load_samples(kData + "/nano/eval/retrieval_1024", {"mk1"}, 1);
  for (const char* method : {"StaticPCAHybrid", "OjaKV", "OjaKVv2", "OjaKV+SnapKV", "SubSpaceA",
                             "StarKVStatic", "StarKV+H2O", "Budgeted"}) {
    CAPTURE(method);
    std::optional<std::size_t> before;
    for (const auto& [sinks, recent] : {std::pair{0, 0}, std::pair{40, 0}, std::pair{40, 50}}) {
      const auto store = make_store({.method = method,
                                     .ratio = 0.4,
                                     .storage = lowrankkv::DType::f32,
                                     .sinks = sinks,
                                     .recent = recent},
                                    nano().model.config(), 1100, nano_moments(), nano().threads);
      store->create(0);
      prefill(nano(), *store, 0, samples[0].prompt);
      const lowrankkv::MemoryUsage usage = store->memory(0);
      const std::size_t full = usage.full_row_bytes + usage.tail_bytes;
      if (before.has_value()) CHECK(full > *before);
      before = full;
    }
  }
}

TEST_CASE(
    "every method runs by name, costs about what its ratio says, and less at a smaller ratio") {
  std::vector<std::string> names;
  for (const MethodInfo& info : methods())
    if (!info.trained) names.push_back(info.name);
  CHECK(names.size() == 24);
  auto contenders = make_contenders(nano(), names, {}, {.context = 1024}, 1100, nano_moments());
  measure_retrieval(nano(), contenders, "set",
                    load_samples(kData + "/nano/eval/retrieval_1024", {"s1"}, 1), 32);
  const Row* previous = nullptr;
  for (const Contender& contender : contenders) {
    const Row& row = contender.row;
    CAPTURE(row.method);
    CAPTURE(row.ratio);
    // Besides the knob: 64 tokens at full rank of 1000, an epoch of the sequence's own; SubSpaceA
    // keeps its sketch, and KIVI 128 to 159 tokens at full rank.
    const double extra = row.method == "SubSpaceA"        ? 0.7
                         : row.method == "Budgeted"       ? 0.005
                         : row.method.starts_with("Kivi") ? 0.17
                                                          : 0.13;
    CHECK(row.ratio_measured > 0.8 * row.ratio);
    CHECK(row.ratio_measured < row.ratio + extra);
    if (previous != nullptr && previous->method == row.method)
      CHECK(row.ratio_measured < previous->ratio_measured);
    previous = &row;
  }
}

TEST_CASE(
    "Budgeted retrieves at a tenth of the bytes what FullKV does, StaticPCA not at six tenths") {
  auto contenders = make_contenders(nano(), {"FullKV", "Budgeted"}, {0.1}, {.context = 1024}, 1100,
                                    nano_moments());
  auto low_rank =
      make_contenders(nano(), {"StaticPCAHybrid"}, {0.6}, {.context = 1024}, 1100, nano_moments());
  contenders.push_back(std::move(low_rank.front()));
  measure_retrieval(
      nano(), contenders, "set",
      load_samples(kData + "/nano/eval/retrieval_1024", {"s1", "s2", "mk1", "mk2"}, 6), 32);
  CHECK(contenders[1].row.ratio_measured < 0.105);
  CHECK(contenders[1].row.mean_exact_match() > 0.85 * contenders[0].row.mean_exact_match());
  CHECK(contenders[2].row.mean_exact_match() < 0.5 * contenders[0].row.mean_exact_match());
}

TEST_CASE(
    "keys stored before their rotary embedding: FullKV's answers, and less lost at equal bytes") {
  const auto samples = load_samples(kData + "/nano/eval/retrieval_1024", {"mk1"}, 1);
  std::vector<std::vector<std::int32_t>> answers;
  for (const bool pre_rope : {false, true}) {
    const auto store =
        make_store({.method = "FullKV", .storage = lowrankkv::DType::f32, .pre_rope = pre_rope},
                   nano().model.config(), 1100, {}, nano().threads);
    answers.push_back(generate(nano(), *store, samples[0].prompt, 24, {}, {}));
  }
  CHECK(answers[0] == answers[1]);
  auto contenders = make_contenders(nano(), {"FullKV", "Budgeted", "Budgeted+PreRoPE"}, {0.07},
                                    {.context = 1024}, 1100, nano_moments());
  measure_bits_per_byte(nano(), contenders, "prose", read_text(kData + "/text/prose.txt"), 4);
  const auto lost = [&](std::size_t index) {
    return contenders[index].row.bits_per_byte.at("prose") -
           contenders[0].row.bits_per_byte.at("prose");
  };
  CHECK(contenders[2].row.text_ratio_measured < 1.02 * contenders[1].row.text_ratio_measured);
  CHECK(lost(2) < 0.7 * lost(1));
  // Decoded tokens that wait for a flush are not in the budget: the row says so.
  const Row& over = contenders[1].row;
  CHECK(over.largest_ratio_measured >= over.text_ratio_measured);
  CHECK(over.largest_context == 1024);
  CHECK(over.excess() > 0.1);
  CHECK_THROWS_AS(make_store({.method = "Budgeted+PreRoPE"}, nano().model.config(), 1100,
                             {nano_moments().post_rope, {}}, nano().threads),
                  std::runtime_error);
}

TEST_CASE("bases from the projections' weights alone, without a text") {
  const Calibration weights{{}, calibrate_from_weights(nano())};
  auto contenders = make_contenders(nano(), {"FullKV", "StaticPCAHybrid"}, {0.9},
                                    {.context = 1024, .pre_rope = true}, 1100, weights);
  auto without = make_contenders(nano(), {"StaticPCAHybrid"}, {0.3},
                                 {.context = 1024, .pre_rope = true}, 1100, weights);
  contenders.push_back(std::move(without.front()));
  measure_bits_per_byte(nano(), contenders, "prose", read_text(kData + "/text/prose.txt"), 2);
  const double full = contenders[0].row.bits_per_byte.at("prose");
  CHECK(contenders[1].row.bits_per_byte.at("prose") < full + 0.1);
  CHECK(contenders[2].row.bits_per_byte.at("prose") >
        contenders[1].row.bits_per_byte.at("prose") + 0.05);
}

TEST_CASE("sampling follows its seed, its temperature and its nucleus") {
  const auto store =
      make_store({.method = "FullKV"}, nano().model.config(), 256, {}, nano().threads);
  const auto prompt = nano().tokenizer.encode("The history of");
  const auto run = [&](float temperature, float top_p, std::uint64_t seed) {
    return generate(nano(), *store, prompt, 20, {temperature, top_p, seed}, {});
  };
  const auto greedy = run(0.0F, 1.0F, 1);
  CHECK(greedy == run(0.0F, 1.0F, 2));
  CHECK(run(1.0F, 1.0F, 1) == run(1.0F, 1.0F, 1));
  CHECK(run(1.0F, 1.0F, 1) != run(1.0F, 1.0F, 2));
  CHECK(run(1.0F, 1e-6F, 3) == greedy);  // a nucleus of one token
}

TEST_CASE("windows of gradients are spread evenly over the positions") {
  for (const std::int64_t span : {0, 1, 1000}) {
    std::vector<std::int64_t> all;
    for (std::int64_t index = 0; index < 40; ++index) all.push_back(first_position(index, span));
    CHECK(all.front() == 0);
    std::sort(all.begin(), all.end());
    CHECK(all.back() <= span);
    // 40 of them: no gap of more than 3 fortieths.
    for (std::size_t i = 1; i < all.size(); ++i) CHECK(all[i] - all[i - 1] <= 3 * span / 40 + 1);
    CHECK(span - all.back() <= 3 * span / 40 + 1);
  }
}

TEST_CASE("the metric of the loss: rows of every window but sinks and copies, the same every run") {
  using lowrankkv::Rope;
  using lowrankkv::calibrate::CodingMetric;
  const std::string text = read_text(kData + "/text/calibration_prose.txt");
  const auto once = [&] {
    Calibration calibration =
        calibrate(nano(), text, 600, 300, {Rope::post, Rope::pre}, CodingMetric::loss);
    CHECK(calibration.post_rope[0].coding().num_queries() == 0.0);
    use_loss_metric(nano(), text, 600, 200, calibration);
    return calibration;
  };
  const Calibration a = once(), b = once();
  for (const Rope form : {Rope::post, Rope::pre}) {
    for (std::size_t layer = 0; layer < a.of(form).size(); ++layer) {
      const auto &own = a.of(form)[layer].coding(), &other = b.of(form)[layer].coding();
      CHECK(own.metric() == CodingMetric::loss);
      // 3 windows of 150 tokens, BOS before them and 50 read again behind them; 4 sinks left out.
      CHECK(own.num_queries() == 3.0 * (151 - 4));
      CHECK(own.head(0).key.count == own.num_queries());
      CHECK(own.head(0).key_metric.trace() > 0.0);
      CHECK((own.head(0).key_metric - other.head(0).key_metric).norm() <=
            1e-4 * own.head(0).key_metric.norm());
    }
  }
  // Combined with the metric of the output, the shapes of both are in it.
  Calibration outputs = calibrate(nano(), text, 600, 300, {Rope::pre});
  auto by_hand = a.pre_rope[1].coding();
  by_hand.combine(outputs.pre_rope[1].coding());
  use_loss_metric(nano(), nano().tokenizer.encode(text), {600, 200, false, true}, outputs, nullptr);
  const auto& combined = outputs.pre_rope[1].coding();
  CHECK(combined.metric() == CodingMetric::combined);
  CHECK(combined.num_queries() == by_hand.num_queries());
  CHECK((combined.head(0).key_metric - by_hand.head(0).key_metric).norm() <=
        1e-4 * by_hand.head(0).key_metric.norm());
  CHECK(outputs.pre_rope_outputs.empty());
  // Windows that are taken to begin elsewhere rotate post-RoPE keys further, and nothing else.
  Calibration elsewhere =
      calibrate(nano(), text, 600, 300, {Rope::post, Rope::pre}, CodingMetric::loss);
  use_loss_metric(nano(), nano().tokenizer.encode(text), {600, 200, false, false, 900}, elsewhere,
                  nullptr);
  for (std::size_t layer = 0; layer < a.post_rope.size(); ++layer) {
    for (const Rope form : {Rope::post, Rope::pre}) {
      const auto &here = a.of(form)[layer].coding().head(1),
                 &there = elsewhere.of(form)[layer].coding().head(1);
      CHECK(there.key.second.trace() == doctest::Approx(here.key.second.trace()).epsilon(1e-4));
      CHECK(there.key_metric.trace() == doctest::Approx(here.key_metric.trace()).epsilon(1e-3));
      CHECK((there.value.second - here.value.second).norm() <= 1e-4 * here.value.second.norm());
      const double moved = (there.key.second - here.key.second).norm() / here.key.second.norm();
      CHECK((form == Rope::pre ? moved < 1e-4 : moved > 1e-2));
    }
  }
  Calibration none;
  CHECK_THROWS_WITH_AS(use_loss_metric(nano(), "", 600, 200, none),
                       doctest::Contains("at least 2 are expected"), std::runtime_error);
}
