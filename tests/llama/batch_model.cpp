// SPDX-License-Identifier: Apache-2.0
// Many sequences at a time on a GPU: the text is the CPU's, a sequence's bits do not depend on who
// else is there, and everything comes back.
#include "serving/batch_model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "nano_engine.hpp"
#include "serving/device_server.hpp"
#include "serving/random_shape.hpp"
#include "serving/serve.hpp"

using namespace llama;

namespace batch_model {
namespace {

/// A model on the GPU, and caches of one method for its steps.
struct OnGpu {
  OnGpu(const std::string& method, WeightType type, int sequences, std::int64_t max_tokens)
      : model(make_batch_model(nano().model, type)) {
    MethodOptions options;
    options.method = method;
    options.ratio = 0.4;
    options.context = max_tokens;
    options.on_gpu = true;
    options.sequences = sequences;
    options.query_tokens = 1;
    options.stream = model->stream();
    store = make_store(options, nano().model.config(), max_tokens,
                       random_calibration(nano().model.config(), false), nano().threads);
  }
  DeviceCaches& caches() { return *store->on_device(); }

  std::unique_ptr<BatchModel> model;
  std::unique_ptr<KvStore> store;
};

std::vector<std::int32_t> drawn(std::mt19937_64& random, std::int64_t count) {
  std::vector<std::int32_t> ids;
  const auto width = static_cast<std::uint64_t>(nano().model.config().vocabulary_size);
  while (static_cast<std::int64_t>(ids.size()) < count)
    ids.push_back(static_cast<std::int32_t>(random() % width));
  return ids;
}

/// A sequence's prompt and its steps among those of others, at a place of theirs.
struct Sequence {
  lowrankkv::SequenceId seq = 0;
  std::vector<std::int32_t> prompt;
  std::size_t place = 0;
};

/// Logits of every step of the first sequence, which is alone, or among the others.
std::vector<float> logits_of_first(OnGpu& gpu, const std::vector<Sequence>& sequences, int places,
                                   int steps) {
  DeviceCaches& caches = gpu.caches();
  const auto width = static_cast<std::size_t>(nano().model.config().vocabulary_size);
  std::vector<StepPlace> turn(static_cast<std::size_t>(places));
  std::vector<lowrankkv::SequenceId> seqs;
  for (const Sequence& own : sequences) {
    caches.create(own.seq);
    seqs.push_back(own.seq);
    // In two parts: what came before is read from where parts are kept.
    const std::size_t half = own.prompt.size() / 2;
    const std::span<const std::int32_t> all(own.prompt);
    gpu.model->prompt(caches, own.seq, all.first(half), 0, false);
    turn[own.place] = {caches.slot(own.seq),
                       gpu.model->prompt(caches, own.seq, all.subspan(half),
                                         static_cast<std::int64_t>(half), true),
                       static_cast<std::int32_t>(own.prompt.size())};
  }
  std::vector<float> logits;
  for (int step = 0; step < steps; ++step) {
    caches.advance(seqs);
    gpu.model->begin_step(turn);
    caches.maintain(seqs);
    const std::span<const std::int32_t> next = gpu.model->end_step();
    const std::vector<float> all = gpu.model->step_logits();
    for (const Sequence& own : sequences) {
      StepPlace& place = turn[own.place];
      const auto row = all.begin() + static_cast<std::ptrdiff_t>(own.place * width);
      CHECK(next[own.place] ==
            std::max_element(row, row + static_cast<std::ptrdiff_t>(width)) - row);
      if (own.seq == sequences.front().seq)
        logits.insert(logits.end(), row, row + static_cast<std::ptrdiff_t>(width));
      place.token = next[own.place];
      ++place.position;
    }
  }
  for (const Sequence& own : sequences) caches.erase(own.seq);
  return logits;
}

/// The text that follows a prompt on the CPU, with rows in f16 as on the GPU; and by how much each
/// token's logit was above that of `other`, the same place's in another text.
std::vector<std::int32_t> text_on_cpu(const std::vector<std::int32_t>& prompt,
                                      const std::vector<std::int32_t>& other,
                                      std::vector<float>& above) {
  MethodOptions full;
  full.method = "FullKV";
  const std::unique_ptr<KvStore> store =
      make_store(full, nano().model.config(), 1024, {}, nano().threads);
  store->create(1);
  std::vector<float> hidden = prefill(nano(), *store, 1, prompt);
  const auto width = static_cast<std::size_t>(nano().model.config().hidden_size);
  std::vector<std::int32_t> text;
  for (const std::int32_t id : other) {
    const std::vector<float> logits =
        nano().model.logits(hidden, static_cast<std::int64_t>(hidden.size() / width) - 1, 1);
    const auto best = std::max_element(logits.begin(), logits.end());
    text.push_back(static_cast<std::int32_t>(best - logits.begin()));
    above.push_back(*best - logits[static_cast<std::size_t>(id)]);
    hidden = decode(nano(), *store, 1, {text.back()});
  }
  return text;
}

TEST_CASE("greedy text of 64 tokens is that of the CPU") {
  OnGpu gpu("FullKV", WeightType::f32, 4, 1024);
  DeviceServer server(*gpu.model, gpu.caches(), {.most_sequences = 4, .max_tokens = 1024});
  const std::string text = read_text(kData + "/text/prose.txt");
  std::vector<Request> requests;
  for (const std::size_t length : {90U, 700U, 1300U}) {
    Request request;
    request.prompt = encode_prompt(nano(), text.substr(length, length));
    request.output_tokens = 64;
    requests.push_back(std::move(request));
  }
  ServeOptions options;
  options.prompt_chunk = 100;
  const ServeReport report = serve(server, requests, options);
  std::size_t same = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::vector<std::int32_t>& answer = report.requests[i].answer;
    std::vector<float> above;
    const std::vector<std::int32_t> expected = text_on_cpu(requests[i].prompt, answer, above);
    const auto [own, other] = std::mismatch(answer.begin(), answer.end(), expected.begin());
    const auto place = static_cast<std::size_t>(own - answer.begin());
    same += place;
    CAPTURE(place);
    // Texts part for good where two tokens are as likely as sums in another order can tell.
    if (own != answer.end()) CHECK(above[place] < 2e-3F);
  }
  CHECK(same > 96);
}

TEST_CASE("a sequence gives the same bits alone and among others, at any place") {
  std::mt19937_64 random(5);
  for (const char* method : {"FullKV", "Budgeted", "OjaKV", "StarKVStatic"}) {
    for (const WeightType type : {WeightType::f16, WeightType::bf16}) {
      CAPTURE(method);
      OnGpu gpu(method, type, 6, 900);
      gpu.model->capture(gpu.caches(), {6}, 900);
      std::vector<Sequence> sequences;
      for (std::size_t i = 0; i < 5; ++i)
        sequences.push_back({static_cast<lowrankkv::SequenceId>(10 + i),
                             drawn(random, 50 + static_cast<std::int64_t>(random() % 500)), i});
      const auto alone = logits_of_first(gpu, {sequences.front()}, 6, 40);
      const auto among = logits_of_first(gpu, sequences, 6, 40);
      CHECK(alone == among);
      sequences.front().place = 5;
      sequences.front().seq = 99;
      std::swap(sequences.front(), sequences.back());
      std::rotate(sequences.begin(), sequences.end() - 1, sequences.end());
      CHECK(logits_of_first(gpu, sequences, 6, 40) == alone);
    }
  }
}

TEST_CASE("requests of random lengths with cancellations leave nothing behind") {
  std::mt19937_64 random(6);
  OnGpu gpu("Budgeted", WeightType::f16, 16, 400);
  DeviceServer server(*gpu.model, gpu.caches(), {.most_sequences = 16, .max_tokens = 400});
  std::vector<Request> requests;
  for (int i = 0; i < 10000; ++i) {
    Request request;
    request.prompt = drawn(random, 1 + static_cast<std::int64_t>(random() % 60));
    request.output_tokens = 1 + static_cast<std::int64_t>(random() % 12);
    if (random() % 4 == 0) request.cancelled_after = static_cast<std::int64_t>(random() % 12);
    requests.push_back(std::move(request));
  }
  ServeOptions options;
  options.prompt_chunk = 64;
  const std::vector<Request> first(requests.begin(), requests.begin() + 100);
  serve(server, first, options);  // memory grows to what the longest prompt needs
  const std::size_t free = gpu.model->free_bytes();
  const std::int64_t pages = gpu.caches().num_free_pages();
  CHECK(pages == gpu.caches().num_pages());
  const ServeReport report = serve(server, requests, options);
  CHECK(gpu.caches().num_free_pages() == pages);
  CHECK(gpu.model->free_bytes() == free);
  CHECK(report.most_sequences == 16);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::int64_t expected = std::min(requests[i].output_tokens, requests[i].cancelled_after);
    CHECK(static_cast<std::int64_t>(report.requests[i].answer.size()) == expected);
  }
}

TEST_CASE("methods whose steps have to say what they attended to are refused") {
  OnGpu gpu("H2O", WeightType::f16, 2, 128);
  CHECK_THROWS_WITH_AS(gpu.model->capture(gpu.caches(), {1}, 128),
                       "steps of many sequences: this method evicts by accumulated attention "
                       "scores, methods that do not are expected",
                       std::runtime_error);
}

TEST_CASE("steps and positions that were not captured are refused") {
  OnGpu gpu("FullKV", WeightType::f16, 2, 128);
  gpu.model->capture(gpu.caches(), {1, 2}, 128);
  const std::vector<StepPlace> three(3);
  CHECK_THROWS_WITH_AS(gpu.model->begin_step(three),
                       "a step of 3 places, captured were steps of 1 2", std::runtime_error);
  gpu.caches().create(1);
  const std::vector<std::int32_t> prompt(129, 5);
  CHECK_THROWS_WITH_AS(gpu.model->prompt(gpu.caches(), 1, prompt, 0, true),
                       "a prompt to position 129, steps were captured for 128", std::runtime_error);
}

}  // namespace
}  // namespace batch_model
