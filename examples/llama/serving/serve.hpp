// SPDX-License-Identifier: Apache-2.0
// Requests that come and go, served together: a queue, admission by pages, prompts in chunks
// between decode steps. Nothing of CUDA: what computes is behind an interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"

namespace llama {

/// A text that is to be continued by so many tokens.
struct Request {
  double arrival = 0.0;              ///< seconds behind the start
  std::vector<std::int32_t> prompt;  ///< ids; where texts do not matter, only how many
  std::int64_t output_tokens = 1;    ///< that are asked for
  /// The client leaves when it has so many tokens of the answer; 0: before the first.
  std::int64_t cancelled_after = std::numeric_limits<std::int64_t>::max();

  /// Tokens that have been stored at the end: the last one of an answer never is.
  std::int64_t stored_tokens() const {
    return static_cast<std::int64_t>(prompt.size()) + output_tokens - 1;
  }
};

/// What became of a request. Times are in seconds behind the start.
struct Served {
  double admitted = 0.0;     ///< a place and pages were there
  double first_token = 0.0;  ///< of the answer
  double finished = 0.0;
  bool cancelled = false;
  std::vector<std::int32_t> answer;
};

/// What computes. A sequence is begun, gets its prompt in parts, takes part in steps, and ends.
class SequenceServer {
 public:
  /// A sequence of a step: the token that it gets. Comes back with the one behind it.
  struct Turn {
    lowrankkv::SequenceId seq = 0;
    std::int32_t token = 0;
  };

  virtual ~SequenceServer() = default;
  virtual int most_sequences() const = 0;
  virtual std::int64_t num_pages() const = 0;
  /// Pages that a sequence of so many tokens can ever need.
  virtual std::int64_t pages_for(std::int64_t tokens) const = 0;
  virtual void begin(lowrankkv::SequenceId seq) = 0;
  virtual void end(lowrankkv::SequenceId seq) = 0;
  /// The part of a prompt that begins at token `first`. @return the token behind it, if complete
  virtual std::int32_t prompt(lowrankkv::SequenceId seq, std::span<const std::int32_t> tokens,
                              std::int64_t first, bool complete) = 0;
  /// A decode step of several sequences.
  virtual void step(std::span<Turn> turns) = 0;
  /// Seconds since some time, and waiting for so many.
  virtual double now() = 0;
  virtual void wait(double seconds) = 0;
};

struct ServeOptions {
  std::int64_t prompt_chunk = 2048;  ///< most tokens of a part of a prompt
  int parts_between_steps = 1;       ///< most parts of prompts between two decode steps
  /// Called whenever a request is done with the number of those that are.
  std::function<void(std::int64_t)> progress = {};
};

/// A decode step as it was measured.
struct Step {
  int sequences = 0;
  double seconds = 0.0;  ///< of the step alone, prompts beside it not counted
};

struct ServeReport {
  std::vector<Served> requests;  ///< in the order in which they were given
  std::vector<Step> steps;
  double seconds = 0.0;    ///< from the start to the last token
  int most_sequences = 0;  ///< that were there at a time
  std::int64_t most_reserved_pages = 0;
};

/// Serves requests in the order of their arrival. One is admitted when a place is free and the
/// pages that it can ever need are not promised to others: so none is ever out of pages. Between
/// two steps of the sequences that decode, parts of the oldest unfinished prompts are run. A
/// client that has left is noticed between steps; its pages go back.
/// @throws std::runtime_error, before anything is served, for a request without a prompt or an
///         answer, or one that needs more pages than there are
ServeReport serve(SequenceServer& server, const std::vector<Request>& requests,
                  const ServeOptions& options);

}  // namespace llama
