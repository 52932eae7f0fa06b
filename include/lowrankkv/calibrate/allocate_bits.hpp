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

namespace detail {

/// @throws ValueError, ShapeError  as allocate_by_errors()
template <class Real>
void check_errors(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> errors,
                  std::span<const int> widths) {
  using ::lowrankkv::detail::fail;
  int previous = 0;
  for (const int width : widths) {
    if (width <= previous || width > 8)
      fail<ValueError>("allocate_bits: widths ascend from 1 to 8, given ", width, " after ",
                       previous);
    previous = width;
  }
  for (std::size_t spectrum = 0; spectrum < errors.size(); ++spectrum) {
    const Eigen::MatrixX<Real>& own = errors[spectrum];
    if (own.cols() != static_cast<Eigen::Index>(widths.size()) + 1)
      fail<ShapeError>("allocate_bits: spectrum ", spectrum, " has errors of ", own.cols(),
                       " widths, expected ", widths.size() + 1);
    if (!own.allFinite() || (own.size() > 0 && own.minCoeff() < 0.0)) {
      fail<ValueError>("allocate_bits: energies of spectrum ", spectrum, " from ", own.minCoeff(),
                       " to ", own.maxCoeff(), ", finite and at least 0 expected");
    }
  }
}

/// A channel's step from one width to a larger one.
struct WidthStep {
  double gain_per_bit, gain;
  std::size_t spectrum, channel;
  int from, to;
};

/// Appends the steps of a spectrum's channels along the lower convex hulls of their errors: from
/// each width to the one with the largest gain per bit. Steps of a channel gain less and less.
/// @param allowed  whether a width may be used
template <class Real, class Allowed>
void append_width_steps(const Eigen::MatrixX<Real>& errors, std::span<const int> widths,
                        std::size_t spectrum, Allowed&& allowed, std::vector<WidthStep>& steps) {
  const auto width_at = [&](Eigen::Index column) {
    return column == 0 ? 0 : widths[static_cast<std::size_t>(column) - 1];
  };
  for (Eigen::Index channel = 0; channel < errors.rows(); ++channel) {
    for (Eigen::Index at = 0, next = -1; next != 0; at = next) {
      WidthStep best{0.0, 0.0, spectrum, static_cast<std::size_t>(channel), width_at(at), 0};
      next = 0;
      for (Eigen::Index to = at + 1; to < errors.cols(); ++to) {
        const double gain = errors(channel, at) - errors(channel, to),
                     per_bit = gain / (width_at(to) - best.from);
        if (!allowed(width_at(to)) || per_bit <= best.gain_per_bit) continue;
        best.gain_per_bit = per_bit;
        best.gain = gain;
        best.to = width_at(to);
        next = to;
      }
      if (next != 0) steps.push_back(best);
    }
  }
}

/// Sorts steps by their gain per bit, largest first. The order of a channel's steps stays.
inline void sort_steps(std::vector<WidthStep>& steps) {
  std::stable_sort(steps.begin(), steps.end(), [](const WidthStep& a, const WidthStep& b) {
    return a.gain_per_bit > b.gain_per_bit;
  });
}

}  // namespace detail

/// @brief Bits for every channel of every spectrum such that their sum stays within `budget` and
/// the sum of errors is minimal (up to one step of one channel).
///
/// This is reverse water-filling in discrete form. Each channel has the widths on the lower convex
/// hull of its errors; all steps from one such width to the next are taken in the order of their
/// gain per bit, until one does not fit. So the steps for a small budget are the first of those for
/// a larger one: more bits never bring a larger sum of errors.
/// @param errors  per spectrum [channels, widths + 1]: a channel's error without bits, then at each
///   width, >= 0. Column order as `widths`
/// @param budget  bits of one row over all spectra
/// @param widths  widths that may be used besides 0, ascending, 1 to 8
/// @return bits of every channel of every spectrum
/// @throws ValueError for widths out of order or range, and for errors that are negative or not
/// finite; ShapeError unless there is a column for every width and one more
///
/// Cost: O(steps log steps), steps = channels x widths.
template <class Real = double>
std::vector<std::vector<std::uint8_t>> allocate_by_errors(
    std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> errors, double budget,
    std::span<const int> widths) {
  detail::check_errors<Real>(errors, widths);
  std::vector<detail::WidthStep> steps;
  std::vector<std::vector<std::uint8_t>> bits(errors.size());
  for (std::size_t spectrum = 0; spectrum < errors.size(); ++spectrum) {
    bits[spectrum].resize(static_cast<std::size_t>(errors[spectrum].rows()));
    detail::append_width_steps<Real>(
        errors[spectrum], widths, spectrum, [](int) { return true; }, steps);
  }
  detail::sort_steps(steps);
  double left = budget;
  for (const detail::WidthStep& step : steps) {
    if (step.to - step.from > left) break;
    bits[step.spectrum][step.channel] = static_cast<std::uint8_t>(step.to);
    left -= step.to - step.from;
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
    std::span<const int> widths) {
  std::vector<Eigen::MatrixX<Real>> errors;
  for (const Eigen::VectorX<Real>& own : energies)
    errors.push_back(gaussian_errors<Real>(own, widths));
  return allocate_by_errors(errors, budget, widths);
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
