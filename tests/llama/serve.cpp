// SPDX-License-Identifier: Apache-2.0
// Requests served together, against a server that counts: who is admitted, what is promised, what
// comes back.
#include "serving/serve.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <string>

using namespace llama;

namespace serving {
namespace {

/// A page holds ten tokens. The token behind another one is what both give by a rule, so that an
/// answer shows whether every token of its sequence, and no other's, was stored. A call takes a
/// second.
class CountingServer final : public SequenceServer {
 public:
  CountingServer(int sequences, std::int64_t pages) : sequences_(sequences), pages_(pages) {}

  static std::int32_t behind(std::int32_t sum) { return (sum * 31 + 7) % 1009; }

  int most_sequences() const override { return sequences_; }
  std::int64_t num_pages() const override { return pages_; }
  std::int64_t pages_for(std::int64_t tokens) const override { return (tokens + 9) / 10; }
  void begin(lowrankkv::SequenceId seq) override {
    CHECK(stored_.try_emplace(seq).second);
    CHECK(static_cast<int>(stored_.size()) <= sequences_);
  }
  void end(lowrankkv::SequenceId seq) override { CHECK(stored_.erase(seq) == 1); }
  std::int32_t prompt(lowrankkv::SequenceId seq, std::span<const std::int32_t> tokens,
                      std::int64_t first, bool complete) override {
    time_ += 1.0;
    longest_part = std::max(longest_part, tokens.size());
    CHECK(static_cast<std::int64_t>(stored_.at(seq).size()) == first);
    for (const std::int32_t token : tokens) store(seq, token);
    return complete ? next(seq) : -1;
  }
  void step(std::span<Turn> turns) override {
    time_ += 1.0;
    for (Turn& turn : turns) {
      store(turn.seq, turn.token);
      turn.token = next(turn.seq);
    }
  }
  double now() override { return time_; }
  void wait(double seconds) override {
    CHECK(seconds > 0.0);
    waited += seconds;
    time_ += seconds;
  }
  bool empty() const { return stored_.empty(); }

  std::size_t longest_part = 0;
  double waited = 0.0;

 private:
  void store(lowrankkv::SequenceId seq, std::int32_t token) {
    stored_.at(seq).push_back(token);
    std::int64_t used = 0;
    for (const auto& [id, tokens] : stored_)
      used += pages_for(static_cast<std::int64_t>(tokens.size()));
    CHECK(used <= pages_);
  }
  std::int32_t next(lowrankkv::SequenceId seq) const {
    std::int32_t sum = 0;
    for (const std::int32_t token : stored_.at(seq)) sum = behind(sum + token);
    return sum;
  }

  int sequences_;
  std::int64_t pages_;
  double time_ = 100.0;
  std::map<lowrankkv::SequenceId, std::vector<std::int32_t>> stored_;
};

std::vector<std::int32_t> expected_answer(const Request& request) {
  std::int32_t sum = 0;
  for (const std::int32_t token : request.prompt) sum = CountingServer::behind(sum + token);
  std::vector<std::int32_t> answer;
  const std::int64_t tokens = std::min(request.output_tokens, request.cancelled_after);
  while (static_cast<std::int64_t>(answer.size()) < tokens) {
    answer.push_back(sum);
    sum = CountingServer::behind(sum + sum);
  }
  return answer;
}

Request request_of(std::int64_t prompt, std::int64_t output, double arrival = 0.0) {
  Request request;
  request.arrival = arrival;
  request.prompt.assign(static_cast<std::size_t>(prompt), 3);
  request.output_tokens = output;
  return request;
}

std::string message_of(CountingServer& server, const std::vector<Request>& requests,
                       const ServeOptions& options = {}) {
  try {
    serve(server, requests, options);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("ten thousand requests of random lengths, some cancelled: each gets its own answer") {
  std::mt19937_64 random(3);
  const auto number = [&](std::int64_t most) {
    return 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most));
  };
  std::vector<Request> requests;
  double arrival = 0.0;
  for (int i = 0; i < 10000; ++i) {
    Request request = request_of(0, number(6), arrival += 0.1 * static_cast<double>(random() % 8));
    for (std::int64_t left = number(30); left > 0; --left)
      request.prompt.push_back(static_cast<std::int32_t>(random() % 500));
    if (random() % 5 == 0) request.cancelled_after = number(request.output_tokens + 1) - 1;
    requests.push_back(std::move(request));
  }
  CountingServer server(7, 19);
  std::int64_t done = 0;
  ServeOptions options;
  options.prompt_chunk = 8;
  options.progress = [&](std::int64_t now) { CHECK(now == ++done); };
  const ServeReport report = serve(server, requests, options);
  CHECK(server.empty());
  CHECK(done == 10000);
  CHECK(server.longest_part == 8);
  CHECK(report.most_sequences > 3);
  CHECK(report.most_sequences <= 7);
  CHECK(report.most_reserved_pages <= 19);
  std::size_t wrong = 0, cancelled = 0;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const Served& served = report.requests[i];
    wrong += served.answer == expected_answer(requests[i]) ? 0 : 1;
    cancelled += served.cancelled ? 1 : 0;
    CHECK(served.cancelled == (requests[i].cancelled_after < requests[i].output_tokens));
    CHECK(served.admitted >= requests[i].arrival);
    if (served.answer.empty()) continue;
    CHECK(served.first_token > served.admitted);
    CHECK(served.finished >= served.first_token);
  }
  CHECK(wrong == 0);
  CHECK(cancelled > 1000);
  for (const Step& step : report.steps) CHECK(step.seconds == doctest::Approx(1.0));
}

TEST_CASE("requests queue where pages or places are promised, in the order of their arrival") {
  CountingServer server(2, 10);
  // The second needs all pages, so it waits for the first; the third would fit, and waits behind.
  const std::vector<Request> requests{request_of(15, 10), request_of(90, 11), request_of(5, 2)};
  const ServeReport report = serve(server, requests, {});
  CHECK(report.requests[1].admitted >= report.requests[0].finished);
  CHECK(report.requests[2].admitted >= report.requests[1].finished);
  CHECK(report.most_reserved_pages == 10);
  CHECK(report.most_sequences == 1);
}

TEST_CASE("nothing is served before it has arrived, and a part of a prompt waits for no answer") {
  CountingServer server(4, 100);
  const std::vector<Request> requests{request_of(10, 4, 50.0), request_of(40, 2, 50.5)};
  ServeOptions options;
  options.prompt_chunk = 10;
  const ServeReport report = serve(server, requests, options);
  CHECK(server.waited == 50.0);
  CHECK(report.requests[0].first_token == 51.0);
  // Parts of the second prompt stand between the steps of the first.
  CHECK(report.requests[0].finished == 56.0);
  CHECK(report.requests[1].first_token == 58.0);
  CHECK(report.steps.size() == 4);
  // With three parts between two steps the second prompt is there sooner, the first answer later.
  options.parts_between_steps = 3;
  const ServeReport sooner = serve(server, requests, options);
  CHECK(sooner.requests[1].first_token < 58.0);
  CHECK(sooner.requests[0].finished >= 56.0);
}

TEST_CASE("requests that can never be served are refused before any is") {
  CountingServer server(2, 10);
  CHECK(message_of(server, {request_of(5, 1), request_of(95, 7)}) ==
        "serve: request 1 of 101 tokens needs 11 pages, there are 10");
  CHECK(message_of(server, {request_of(0, 1)}) ==
        "serve: request 0 has 0 tokens and asks for 1, at least 1 of each expected");
  CHECK(message_of(server, {request_of(4, 0)}) ==
        "serve: request 0 has 4 tokens and asks for 0, at least 1 of each expected");
  ServeOptions options;
  options.parts_between_steps = 0;
  CHECK(message_of(server, {request_of(4, 1)}, options) ==
        "serve: 0 parts of prompts between two steps, at least 1 expected");
  options.prompt_chunk = 0;
  CHECK(message_of(server, {request_of(4, 1)}, options) ==
        "serve: prompt chunks of 0 tokens, at least 1 expected");
  CHECK(server.empty());
  CHECK(serve(server, {}, {}).requests.empty());
}

}  // namespace
}  // namespace serving
