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
/// the sum of errors is minimal (up to one step of one group of channels).
///
/// This is reverse water-filling in discrete form. Each group of channels has the widths on the
/// lower convex hull of its errors; all steps from one such width to the next are taken in the
/// order of their gain per bit, until one does not fit. So the steps for a small budget are the
/// first of those for a larger one: more bits never bring a larger sum of errors.
/// @param errors  per spectrum [channels, widths + 1]: a channel's error without bits, then at each
///   width, >= 0. Column order as `widths`
/// @param budget    bits of one row over all spectra
/// @param widths    widths that may be used besides 0, ascending, 1 to 8
/// @param together  number of consecutive channels that get the same width, as tiles of tensor
///   cores need it. A smaller last group costs as much as a whole group, because tiles pad to it
/// @return bits of every channel of every spectrum
/// @throws ValueError for widths out of order or range, and for errors that are negative or not
/// finite; ShapeError unless there is a column for every width and one more
///
/// Cost: O(steps log steps), steps = channels x widths.
template <class Real = double>
std::vector<std::vector<std::uint8_t>> allocate_by_errors(
    std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> errors, double budget,
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
    int to;
    double cost;
  };
  std::vector<Step> steps;
  std::vector<std::vector<std::uint8_t>> bits(errors.size());
  for (std::size_t spectrum = 0; spectrum < errors.size(); ++spectrum) {
    const Eigen::MatrixX<Real>& own = errors[spectrum];
    if (own.cols() != static_cast<Eigen::Index>(widths.size()) + 1)
      fail<ShapeError>("allocate_bits: spectrum ", spectrum, " has errors of ", own.cols(),
                       " widths, expected ", widths.size() + 1);
    if (!own.allFinite() || (own.size() > 0 && own.minCoeff() < 0.0)) {
      fail<ValueError>("allocate_bits: energies of spectrum ", spectrum, " from ", own.minCoeff(),
                       " to ", own.maxCoeff(), ", finite and at least 0 expected");
    }
    bits[spectrum].resize(static_cast<std::size_t>(own.rows()));
    for (std::size_t channel = 0; channel < bits[spectrum].size();
         channel += static_cast<std::size_t>(together)) {
      const std::size_t count =
          (std::min)(static_cast<std::size_t>(together), bits[spectrum].size() - channel);
      const Eigen::RowVectorX<Real> group =
          own.middleRows(static_cast<Eigen::Index>(channel), static_cast<Eigen::Index>(count))
              .colwise()
              .sum();
      const auto width_at = [&](Eigen::Index column) {
        return column == 0 ? 0 : widths[static_cast<std::size_t>(column) - 1];
      };
      // Along the hull: from each width to the one with the largest gain per bit.
      for (Eigen::Index at = 0; at + 1 < group.size();) {
        Step best{0.0, spectrum, channel, count, 0, 0.0};
        Eigen::Index next = 0;
        for (Eigen::Index to = at + 1; to < group.size(); ++to) {
          // A smaller last group costs as much as a whole group.
          const double cost = static_cast<double>(width_at(to) - width_at(at)) * together;
          const double gain = (group[at] - group[to]) / cost;
          if (gain <= best.gain_per_bit) continue;
          best = {gain, spectrum, channel, count, width_at(to), cost};
          next = to;
        }
        if (next == 0) break;
        steps.push_back(best);
        at = next;
      }
    }
  }
  std::stable_sort(steps.begin(), steps.end(),
                   [](const Step& a, const Step& b) { return a.gain_per_bit > b.gain_per_bit; });
  double left = budget;
  for (const Step& step : steps) {
    if (step.cost > left) break;
    std::fill_n(bits[step.spectrum].begin() + static_cast<std::ptrdiff_t>(step.channel), step.count,
                static_cast<std::uint8_t>(step.to));
    left -= step.cost;
  }
  return bits;
}

/// @brief Errors of channels that are Gaussian, for allocate_by_errors(): [channels, widths + 1],
/// energy times gaussian_distortion(bits).
template <class Real = double>
Eigen::MatrixX<Real> gaussian_errors(const Eigen::VectorX<Real>& energies,
                                     std::span<const int> widths) {
  Eigen::RowVectorX<Real> distortions(static_cast<Eigen::Index>(widths.size()) + 1);
  distortions[0] = 1.0;
  for (std::size_t i = 0; i < widths.size(); ++i)
    distortions[static_cast<Eigen::Index>(i) + 1] =
        gaussian_distortion(std::clamp(widths[i], 0, 8));
  return energies * distortions;
}

/// @brief allocate_by_errors() for channels that are Gaussian.
/// @param energies  per spectrum, the cost of losing each channel: its variance times a weight;
///   any order, >= 0
template <class Real = double>
std::vector<std::vector<std::uint8_t>> allocate_bits(
    std::type_identity_t<std::span<const Eigen::VectorX<Real>>> energies, double budget,
    std::span<const int> widths, int together = 1) {
  std::vector<Eigen::MatrixX<Real>> errors;
  for (const Eigen::VectorX<Real>& own : energies)
    errors.push_back(gaussian_errors<Real>(own, widths));
  return allocate_by_errors(errors, budget, widths, together);
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
