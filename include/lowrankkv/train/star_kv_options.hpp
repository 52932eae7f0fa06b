// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_options.hpp  Parameters and phases of STAR-KV's training (STAR-KV
/// section 4.2 and appendix A.3).
///
/// Where the paper is silent, the defaults are those of the program that its authors published:
/// s = 50, thresholds that begin at 0 and stay where they are in the second phase. A remark there
/// says why: L_KD alone drives them down, and ranks up again. A share of the rank at which the
/// thresholds of the keys, or of the values, stop in the first phase is that program's too: it is
/// how a budget is met, for eq. 11 knows none.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/train/star_kv_factors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief How STAR-KV trains.
struct StarKvOptions {
  Decomposition keys = Decomposition::head_wise;  ///< section 4.3.3
  Decomposition values = Decomposition::joint;
  double sharpness = 50.0;            ///< s of eq. 2, per unit of a singular value
  double first_alpha = 0.0;           ///< where every threshold begins
  double gamma = 0.1;                 ///< weight of L_acmp in eq. 5 (table 10: 0.01 to 1)
  std::int64_t compress_steps = 0;    ///< optimiser steps of the first phase; at least 1 expected
  std::int64_t recover_steps = 1000;  ///< of the second phase (A.3)
  /// The share of the rank, over all trained layers, at which the thresholds of the keys (values)
  /// stop in the first phase, which ends once both have. 0: they move for compress_steps, as the
  /// paper has it. 75 % of the cache gone: 0.25.
  double key_share = 0.0;
  double value_share = 0.0;
  bool freeze_thresholds = true;      ///< in the second phase; false: they follow L_KD
  std::vector<int> protected_layers;  ///< not trained, not compressed: paper_protected_layers()
  friend bool operator==(const StarKvOptions&, const StarKvOptions&) = default;
};

/// @brief The layers that the paper protects, 0, 1 and 31 of 32 (A.3), for a model of num_layers:
/// the first two and the last.
inline std::vector<int> paper_protected_layers(int num_layers) {
  const std::set<int> layers{0, (std::min)(1, num_layers - 1), num_layers - 1};
  return num_layers > 0 ? std::vector<int>(layers.begin(), layers.end()) : std::vector<int>();
}

/// @brief What a step of training minimises.
enum class StarKvPhase {
  compress,  ///< L_KD + gamma L_acmp
  recover,   ///< L_KD
  finished,  ///< nothing: to be truncated
};

/// @brief How far training has come.
struct StarKvProgress {
  StarKvPhase phase = StarKvPhase::compress;
  std::int64_t step = 0;         ///< optimiser steps taken
  std::int64_t phase_steps = 0;  ///< of which in this phase
  bool keys_stopped = false;     ///< key_share was reached
  bool values_stopped = false;   ///< value_share was reached
  friend bool operator==(const StarKvProgress&, const StarKvProgress&) = default;
};

}  // namespace train
namespace detail {

/// Raises ValueError if an option is out of its range, names no layer, or protects all of them.
inline void check_star_kv_options(const train::StarKvOptions& options, int num_layers) {
  const auto check = [](const char* name, auto value, bool right, const char* expected) {
    if (!right) fail<ValueError>("STAR-KV: ", name, " ", value, ", ", expected, " expected");
  };
  const auto share = [&](const char* name, double value) {
    check(name, value, value >= 0.0 && value <= 1.0, "0 to 1");
  };
  constexpr std::int64_t kMost = std::int64_t{1} << 40;  // sums of steps stay far from overflow
  check("sharpness", options.sharpness, options.sharpness > 0.0 && std::isfinite(options.sharpness),
        "above 0 and finite");
  check("first_alpha", options.first_alpha, std::isfinite(options.first_alpha), "a finite number");
  check("gamma", options.gamma, options.gamma >= 0.0 && std::isfinite(options.gamma),
        "0 or more and finite");
  share("key_share", options.key_share);
  share("value_share", options.value_share);
  check("compress_steps", options.compress_steps,
        options.compress_steps >= 1 && options.compress_steps <= kMost, "1 to 2^40");
  check("recover_steps", options.recover_steps,
        options.recover_steps >= 0 && options.recover_steps <= kMost, "0 to 2^40");
  const std::set<int> distinct(options.protected_layers.begin(), options.protected_layers.end());
  if (distinct.size() != options.protected_layers.size())
    fail<ValueError>("STAR-KV: ", options.protected_layers.size(), " protected_layers, ",
                     distinct.size(), " of them distinct");
  for (const int layer : distinct) {
    if (layer < 0 || layer >= num_layers)
      fail<ValueError>("STAR-KV: protected layer ", layer, ", num_layers ", num_layers);
  }
  if (static_cast<int>(distinct.size()) >= num_layers)
    fail<ValueError>("STAR-KV: ", distinct.size(), " protected_layers, num_layers ", num_layers,
                     ", one to train expected");
}

/// Raises ValueError if training with these options cannot be where `progress` says.
inline void check_star_kv_progress(const train::StarKvOptions& options,
                                   const train::StarKvProgress& progress) {
  using train::StarKvPhase;
  const auto check = [](const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
    if (value < low || value > high)
      fail<ValueError>("STAR-KV: ", name, " ", value, ", ", low, " to ", high, " expected");
  };
  const std::int64_t first = options.compress_steps, second = options.recover_steps;
  const bool compress = progress.phase == StarKvPhase::compress;
  const bool recover = progress.phase == StarKvPhase::recover;
  check("step", progress.step, 0, first + second);
  // Steps in this phase, and those of the phases before it.
  check("phase_steps", progress.phase_steps, 0, compress ? first - 1 : recover ? second - 1 : 0);
  const std::int64_t before =
      progress.step - progress.phase_steps - (compress || recover ? 0 : second);
  check("steps before this phase", before, compress ? 0 : 1, compress ? 0 : first);
  const auto stopped = [&](const char* part, bool is_stopped, double share) {
    if (is_stopped && !(share > 0.0))
      fail<ValueError>("STAR-KV: thresholds of the ", part, " stopped at share ", share,
                       ", above 0 expected");
  };
  stopped("keys", progress.keys_stopped, options.key_share);
  stopped("values", progress.values_stopped, options.value_share);
  if (compress && progress.keys_stopped && progress.values_stopped)
    fail<ValueError>("STAR-KV: 2 parts stopped in the first phase, at most 1 expected");
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
