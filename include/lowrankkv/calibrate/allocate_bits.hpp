// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/allocate_bits.hpp  Distributes one byte budget over layers, KV heads, keys and
/// values by reverse water-filling.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Mean squared error of the best uniform mid-rise quantiser with 2^bits levels on a unit
/// Gaussian (Max, 1960); bits 0 to 8. Convex in bits: each further bit gains less.
constexpr double gaussian_distortion(int bits) {
  constexpr double table[] = {1.0,      0.3634,   0.1188,    0.03744,   0.01154,
                              0.003495, 0.001041, 0.0003035, 0.00008714};
  return table[bits];
}

/// @brief Bits for every channel of every spectrum such that their sum stays within `budget` and
/// the sum of energy * gaussian_distortion(bits) is minimal (up to one step of one channel).
///
/// This is reverse water-filling in discrete form: all steps from one width to the next are taken
/// in the order of their gain per bit. Because the distortion is convex, this order takes the steps
/// of a channel in sequence, and the result is optimal at every budget that it meets exactly.
/// @param energies  per spectrum, the cost of losing each channel: its variance times a weight;
///   any order, >= 0
/// @param budget    bits of one row over all spectra
/// @param widths    widths that may be used besides 0, ascending, 1 to 8
/// @param together  number of consecutive channels that get the same width, as tiles of tensor
/// cores
///   need it (the energies are then sorted). A smaller last group costs as much as a whole group,
///   because tiles pad to it
/// @return bits of the same shape as `energies`
/// @throws ValueError for widths out of order or range, and for energies that are negative or not
/// finite
///
/// Cost: O(steps log steps), steps = channels x widths.
template <class Real = double>
std::vector<std::vector<std::uint8_t>> allocate_bits(
    std::type_identity_t<std::span<const Eigen::VectorX<Real>>> energies, double budget,
    std::span<const int> widths, int together = 1) {
  using ::lowrankkv::detail::fail;
  int previous = 0;
  for (const int width : widths) {
    if (width <= previous || width > 8)
      fail<ValueError>("allocate_bits: widths ascend from 1 to 8, given ", width, " after ",
                       previous);
    previous = width;
  }
  if (together < 1)
    fail<ValueError>("allocate_bits: at least 1 channel together, given ", together);
  struct Step {
    double gain_per_bit;
    std::size_t spectrum, channel, count;  // channels [channel, channel + count)
    int from, to;
  };
  std::vector<Step> steps;
  std::vector<std::vector<std::uint8_t>> bits(energies.size());
  for (std::size_t spectrum = 0; spectrum < energies.size(); ++spectrum) {
    if (!energies[spectrum].allFinite() ||
        (energies[spectrum].size() > 0 && energies[spectrum].minCoeff() < 0.0)) {
      fail<ValueError>("allocate_bits: energies of spectrum ", spectrum, " from ",
                       energies[spectrum].minCoeff(), " to ", energies[spectrum].maxCoeff(),
                       ", finite and at least 0 expected");
    }
    bits[spectrum].resize(static_cast<std::size_t>(energies[spectrum].size()));
    for (std::size_t channel = 0; channel < bits[spectrum].size();
         channel += static_cast<std::size_t>(together)) {
      const std::size_t count =
          (std::min)(static_cast<std::size_t>(together), bits[spectrum].size() - channel);
      const double energy =
          energies[spectrum]
              .segment(static_cast<Eigen::Index>(channel), static_cast<Eigen::Index>(count))
              .mean();
      int from = 0;
      for (const int to : widths) {
        const double gain = energy * static_cast<double>(count) / together *
                            (gaussian_distortion(from) - gaussian_distortion(to)) / (to - from);
        if (gain > 0.0) steps.push_back({gain, spectrum, channel, count, from, to});
        from = to;
      }
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.gain_per_bit > b.gain_per_bit; });
  double left = budget;
  for (const Step& step : steps) {
    const auto now = bits[step.spectrum].begin() + static_cast<std::ptrdiff_t>(step.channel);
    // A smaller last group costs as much as a whole group.
    const double cost = static_cast<double>(step.to - step.from) * together;
    // Skip the step if an earlier step of this channel did not fit, or if this one does not.
    if (*now != step.from || cost > left) continue;
    std::fill_n(now, step.count, static_cast<std::uint8_t>(step.to));
    left -= cost;
  }
  return bits;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
