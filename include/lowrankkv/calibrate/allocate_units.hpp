// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/allocate_units.hpp  Distributes one byte budget over layers, KV heads, keys and
/// values where codes fill whole units and rows whole pages, as in the Cuda backend's lists.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/allocate_bits.hpp"
#include "lowrankkv/core/device_tiles.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The bits of all channels, and what they lose.
struct AllocatedBits {
  std::vector<std::vector<std::uint8_t>> bits;  ///< per spectrum, of every channel
  double error = 0.0;                           ///< sum over all spectra
};

/// @brief Reverse water-filling as allocate_by_errors() does it, for codes that take whole units of
/// 32 planes (code_units()), in lists whose bytes are any function of the bits of a row.
///
/// Every spectrum has candidates: for each number of 32 bits, the bits of its channels that lose
/// least; once of all widths, and once of even ones alone, which need no units of 1 bit and so
/// fewer units. Pairs of these are the candidates of a head. Of them the lower convex hull of error
/// over bytes is taken, and steps along the hulls of all heads in the order of their gain by byte.
/// So a larger budget never brings a larger error.
class UnitAllocation {
 public:
  /// @param errors  as allocate_by_errors() has them: of every head its keys, then its values
  /// @param widths  widths that may be used besides 0, ascending, 1 to 8
  /// @param key_units_at_once  where it is more than 1, units of keys take the time of the next
  ///   multiple of it, and none that of one multiple
  /// @param most_units  units of a spectrum, 1 to kMaxCodeUnits
  /// @throws ValueError, ShapeError  as allocate_by_errors(), and for an odd number of spectra, or
  ///   most_units out of range
  ///
  /// Cost: O(channels^2 x widths) for each spectrum, O(channels^2) for each head.
  template <class Real = double>
  UnitAllocation(std::type_identity_t<std::span<const Eigen::MatrixX<Real>>> errors,
                 std::span<const int> widths, int key_units_at_once = 1,
                 int most_units = kMaxCodeUnits) {
    detail::check_errors<Real>(errors, widths);
    if (errors.size() % 2 != 0)
      ::lowrankkv::detail::fail<ShapeError>(
          "allocate_units: ", errors.size(),
          " spectra, an even number expected: keys and values of every head");
    if (most_units < 1 || most_units > kMaxCodeUnits)
      ::lowrankkv::detail::fail<ValueError>("allocate_units: at most 1 to ", kMaxCodeUnits,
                                            " units, given ", most_units);
    for (std::size_t spectrum = 0; spectrum < errors.size(); spectrum += 2)
      heads_.emplace_back(errors[spectrum], errors[spectrum + 1], widths, key_units_at_once,
                          most_units);
  }

  /// @brief The allocation that loses least in at most `budget` bytes (up to one step of one head).
  /// @param list_bytes  f(row_bits): bytes of a head's list whose rows have so many bits of keys
  ///   and values together, a multiple of 32; it does not fall. infinity(): too many
  /// @param unit_bytes  what a unit of a head's keys or values counts besides, at least 0:
  ///   attention takes time for every unit, however few bits it has. Not part of the budget
  template <class ListBytes>
  AllocatedBits within(double budget, ListBytes&& list_bytes, double unit_bytes) const {
    struct Step {
      double gain, bytes;  // gain: of error by what it costs
      std::size_t head;
      const Pair* to;
    };
    std::vector<Step> steps;
    std::vector<const Pair*> chosen;
    double left = budget;
    for (const Head& head : heads_) {
      const Pair* at = &head.pairs.front();  // without bits
      chosen.push_back(at);
      left -= list_bytes(0);
      for (const Pair* next = at;; at = next) {
        double best = 0.0;
        for (const Pair& to : head.pairs) {
          const double bytes = list_bytes(to.row_bits) - list_bytes(at->row_bits),
                       cost = bytes + unit_bytes * (to.units - at->units);
          if (cost <= 0.0 || (at->error - to.error) / cost <= best) continue;
          best = (at->error - to.error) / cost;
          next = &to;
        }
        if (next == at) break;
        steps.push_back(
            {best, list_bytes(next->row_bits) - list_bytes(at->row_bits), chosen.size() - 1, next});
      }
    }
    std::stable_sort(steps.begin(), steps.end(),
                     [](const Step& a, const Step& b) { return a.gain > b.gain; });
    for (const Step& step : steps) {
      if (step.bytes > left) break;
      left -= step.bytes;
      chosen[step.head] = step.to;
    }
    AllocatedBits result;
    for (std::size_t head = 0; head < heads_.size(); ++head) {
      for (const std::size_t part : {std::size_t{0}, std::size_t{1}})
        result.bits.push_back(heads_[head].parts[part][chosen[head]->candidates[part]].bits);
      result.error += chosen[head]->error;
    }
    return result;
  }

  /// @brief Bytes of a list that cannot be.
  static constexpr double infinity() { return std::numeric_limits<double>::infinity(); }

 private:
  static constexpr int kLeastBits = 32;  // of a unit
  struct Candidate {
    double error;
    CodeUnits units;
    std::vector<std::uint8_t> bits;
  };
  struct Pair {
    double error;
    int row_bits, units;
    std::array<std::size_t, 2> candidates;  // of keys, of values
  };
  struct Head {
    std::array<std::vector<Candidate>, 2> parts;
    std::vector<Pair> pairs;  // the first one has no bits

    template <class Real>
    Head(const Eigen::MatrixX<Real>& keys, const Eigen::MatrixX<Real>& values,
         std::span<const int> widths, int key_units_at_once, int most_units)
        : parts{candidates_of(keys, widths, most_units),
                candidates_of(values, widths, most_units)} {
      std::map<std::pair<int, int>, Pair> least;  // by bits and units
      for (std::size_t key = 0; key < parts[0].size(); ++key) {
        for (std::size_t value = 0; value < parts[1].size(); ++value) {
          const Candidate &k = parts[0][key], &v = parts[1][value];
          const Pair own{k.error + v.error,
                         k.units.row_bits() + v.units.row_bits(),
                         timed_units(k.units, key_units_at_once) + v.units.count(),
                         {key, value}};
          const auto [at, is_new] = least.try_emplace({own.row_bits, own.units}, own);
          if (!is_new && own.error < at->second.error) at->second = own;
        }
      }
      // Ascending in bits, then in units. Left out: those that others with no more of both
      // undercut.
      for (const auto& entry : least) {
        const Pair& own = entry.second;
        const bool undercut = std::any_of(pairs.begin(), pairs.end(), [&](const Pair& other) {
          return other.units <= own.units && other.error <= own.error;
        });
        if (!undercut) pairs.push_back(own);
      }
    }
  };

  /// The units of keys whose time attention takes.
  static int timed_units(const CodeUnits& keys, int at_once) {
    if (at_once == 1) return keys.count();
    return (std::max)(1, (keys.count() + at_once - 1) / at_once) * at_once;
  }
  /// The first one has no bits.
  template <class Real>
  static std::vector<Candidate> candidates_of(const Eigen::MatrixX<Real>& errors,
                                              std::span<const int> widths, int most_units) {
    const std::vector<std::uint8_t> none(static_cast<std::size_t>(errors.rows()), 0);
    const double all = errors.col(0).sum();
    std::vector<Candidate> result{{all, {}, none}};
    const int most = (8 * static_cast<int>(errors.rows()) + kLeastBits - 1) / kLeastBits;
    for (const bool even : {false, true}) {
      std::vector<detail::WidthStep> steps;
      detail::append_width_steps<Real>(
          errors, widths, 0, [&](int width) { return !even || width % 2 == 0; }, steps);
      detail::sort_steps(steps);
      for (int size = 1; size <= most; ++size) {
        Candidate own{all, {}, none};
        fill(steps, size * kLeastBits, own);
        own.units = code_units(own.bits);
        if (own.units.count() <= most_units) result.push_back(std::move(own));
      }
    }
    return result;
  }
  /// Takes steps in their order as long as they fit. A channel whose step does not fit takes no
  /// later one, since its steps build on each other.
  static void fill(std::span<const detail::WidthStep> steps, int row_bits, Candidate& own) {
    int left = row_bits;
    for (const detail::WidthStep& step : steps) {
      std::uint8_t& bits = own.bits[step.channel];
      if (bits != step.from || step.to - step.from > left) continue;
      bits = static_cast<std::uint8_t>(step.to);
      own.error -= step.gain;
      left -= step.to - step.from;
    }
  }

  std::vector<Head> heads_;
};

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
