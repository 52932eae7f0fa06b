// SPDX-License-Identifier: Apache-2.0
#include "serving/serve.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace llama {
namespace {

/// A request that has a place.
struct Active {
  std::size_t request = 0;      // its number, and its sequence's id
  std::int64_t prompted = 0;    // tokens of the prompt that are stored
  std::int64_t pages = 0;       // promised
  std::int32_t next_token = 0;  // that the next step stores
};

class Service {
 public:
  Service(SequenceServer& server, const std::vector<Request>& requests, const ServeOptions& options)
      : server_(server), requests_(requests), options_(options) {
    if (options.prompt_chunk < 1)
      throw std::runtime_error("serve: prompt chunks of " + std::to_string(options.prompt_chunk) +
                               " tokens, at least 1 expected");
    if (options.parts_between_steps < 1)
      throw std::runtime_error("serve: " + std::to_string(options.parts_between_steps) +
                               " parts of prompts between two steps, at least 1 expected");
    for (std::size_t i = 0; i < requests.size(); ++i) check(i);
    report_.requests.resize(requests.size());
    order_.resize(requests.size());
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) {
      return requests[a].arrival < requests[b].arrival;
    });
  }

  ServeReport run() {
    start_ = server_.now();
    while (done_ < requests_.size()) {
      admit();
      if (prompting_.empty() && decoding_.empty()) {
        // Not for less than the clock may resolve.
        server_.wait(std::max(1e-6, requests_[order_[next_]].arrival - seconds()));
        continue;
      }
      step();
      for (int part = 0; part < options_.parts_between_steps; ++part) prompt();
    }
    report_.seconds = seconds();
    return std::move(report_);
  }

 private:
  double seconds() { return server_.now() - start_; }
  static lowrankkv::SequenceId sequence(std::size_t request) {
    return static_cast<lowrankkv::SequenceId>(request);
  }

  void check(std::size_t index) const {
    const Request& request = requests_[index];
    const std::string name = "serve: request " + std::to_string(index);
    if (request.prompt.empty() || request.output_tokens < 1)
      throw std::runtime_error(name + " has " + std::to_string(request.prompt.size()) +
                               " tokens and asks for " + std::to_string(request.output_tokens) +
                               ", at least 1 of each expected");
    const std::int64_t pages = server_.pages_for(request.stored_tokens());
    if (pages > server_.num_pages())
      throw std::runtime_error(name + " of " + std::to_string(request.stored_tokens()) +
                               " tokens needs " + std::to_string(pages) + " pages, there are " +
                               std::to_string(server_.num_pages()));
  }

  void admit() {
    while (next_ < order_.size() && requests_[order_[next_]].arrival <= seconds()) {
      const std::size_t index = order_[next_];
      if (requests_[index].cancelled_after == 0) {  // left while it waited
        ++next_;
        report_.requests[index].admitted = seconds();
        finish(index, true);
        continue;
      }
      const std::int64_t pages = server_.pages_for(requests_[index].stored_tokens());
      const auto active = static_cast<int>(prompting_.size() + decoding_.size());
      if (active == server_.most_sequences() || reserved_ + pages > server_.num_pages()) return;
      server_.begin(sequence(index));
      ++next_;
      reserved_ += pages;
      report_.most_reserved_pages = std::max(report_.most_reserved_pages, reserved_);
      report_.most_sequences = std::max(report_.most_sequences, active + 1);
      report_.requests[index].admitted = seconds();
      prompting_.push_back({index, 0, pages, 0});
    }
  }

  /// A part of the oldest prompt.
  void prompt() {
    if (prompting_.empty()) return;
    Active& active = prompting_.front();
    const std::vector<std::int32_t>& tokens = requests_[active.request].prompt;
    const auto length = static_cast<std::int64_t>(tokens.size());
    const std::int64_t count = std::min(options_.prompt_chunk, length - active.prompted);
    const bool complete = active.prompted + count == length;
    const std::int32_t token =
        server_.prompt(sequence(active.request),
                       std::span(tokens).subspan(static_cast<std::size_t>(active.prompted),
                                                 static_cast<std::size_t>(count)),
                       active.prompted, complete);
    active.prompted += count;
    if (!complete) return;
    Active ready = active;
    prompting_.pop_front();
    report_.requests[ready.request].first_token = seconds();
    if (!take(ready, token)) decoding_.push_back(ready);
  }

  /// A token for each sequence that decodes.
  void step() {
    if (decoding_.empty()) return;
    turns_.clear();
    for (const Active& active : decoding_)
      turns_.push_back({sequence(active.request), active.next_token});
    const double begin = server_.now();
    server_.step(turns_);
    report_.steps.push_back({static_cast<int>(turns_.size()), server_.now() - begin});
    std::size_t kept = 0;
    for (std::size_t i = 0; i < turns_.size(); ++i) {
      Active active = decoding_[i];
      if (!take(active, turns_[i].token)) decoding_[kept++] = active;
    }
    decoding_.resize(kept);
  }

  /// A token of an answer. Returns whether it was the last one; the sequence is ended then.
  bool take(Active& active, std::int32_t token) {
    const Request& request = requests_[active.request];
    std::vector<std::int32_t>& answer = report_.requests[active.request].answer;
    answer.push_back(token);
    active.next_token = token;
    const auto tokens = static_cast<std::int64_t>(answer.size());
    if (tokens < request.output_tokens && tokens < request.cancelled_after) return false;
    server_.end(sequence(active.request));
    reserved_ -= active.pages;
    finish(active.request, tokens < request.output_tokens);
    return true;
  }

  void finish(std::size_t request, bool cancelled) {
    report_.requests[request].finished = seconds();
    report_.requests[request].cancelled = cancelled;
    ++done_;
    if (options_.progress) options_.progress(static_cast<std::int64_t>(done_));
  }

  SequenceServer& server_;
  const std::vector<Request>& requests_;
  const ServeOptions& options_;
  double start_ = 0.0;
  std::vector<std::size_t> order_;  // of arrival
  std::size_t next_ = 0;            // of order_: the first that has no place yet
  std::size_t done_ = 0;
  std::int64_t reserved_ = 0;     // pages
  std::deque<Active> prompting_;  // in the order of their admission
  std::vector<Active> decoding_;
  std::vector<SequenceServer::Turn> turns_;
  ServeReport report_;
};

}  // namespace

ServeReport serve(SequenceServer& server, const std::vector<Request>& requests,
                  const ServeOptions& options) {
  return Service(server, requests, options).run();
}

}  // namespace llama
