// SPDX-License-Identifier: Apache-2.0
// Bits that fill whole units of codes and whole pages go where they lose least.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "lowrankkv/calibrate/allocate_units.hpp"

namespace allocate_units_tests {

using namespace lowrankkv;

/// Whether all planes of these codes have room, one code after the other, widest planes first.
bool have_room(std::vector<std::uint8_t> bits, const CodeUnits& units) {
  int rooms[] = {32 * units.eights, 32 * units.fours, 32 * units.twos, 32 * units.ones};
  for (int i = 0; i < 4; ++i) {
    const int width = 8 >> i;
    for (std::uint8_t& left : bits) {
      for (; left >= width && rooms[i] > 0; --rooms[i])
        left = static_cast<std::uint8_t>(left - width);
    }
  }
  return std::all_of(bits.begin(), bits.end(), [](std::uint8_t left) { return left == 0; });
}

TEST_CASE("codes take the fewest units of the fewest bits that have room for them") {
  std::mt19937 random(4);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::uint8_t> bits(random() % 80);
    const unsigned most = 1 + random() % 8;
    int total = 0;
    for (std::uint8_t& own : bits) {
      own = static_cast<std::uint8_t>(random() % (most + 1));
      total += own;
    }
    const CodeUnits units = code_units(bits);
    CHECK(have_room(bits, units));
    if (units.count() <= kMaxCodeUnits) CHECK(units.row_bits() - total >= 0);
    const int size = units.row_bits() / 32;
    int fewest = std::numeric_limits<int>::max();
    for (int eights = 0; 8 * eights <= size; ++eights) {
      for (int fours = 0; 8 * eights + 4 * fours <= size; ++fours) {
        for (int twos = 0; 8 * eights + 4 * fours + 2 * twos <= size; ++twos) {
          const CodeUnits other{eights, fours, twos, size - 8 * eights - 4 * fours - 2 * twos};
          if (have_room(bits, other)) fewest = std::min(fewest, other.count());
        }
      }
    }
    CHECK(units.count() == fewest);
    // Units of 1 bit hold anything, so that only the limit of kernels can ask for more bits.
    const int least = (total + 31) / 32 * 32;
    CHECK((units.row_bits() == least || fewest <= kMaxCodeUnits));
  }
  CHECK(code_units(std::vector<std::uint8_t>(64, 3)) == CodeUnits{0, 0, 2, 2});
  CHECK(code_units(std::vector<std::uint8_t>(64, 4)) == CodeUnits{0, 2, 0, 0});
  CHECK(code_units(std::vector<std::uint8_t>(64, 8)) == CodeUnits{2, 0, 0, 0});
  CHECK(code_units(std::vector<std::uint8_t>{6, 6, 4}) == CodeUnits{0, 0, 0, 1});
  CHECK(code_units(std::vector<std::uint8_t>{}) == CodeUnits{});
  // 47 times 32 bits would be 17 units.
  CHECK(code_units(std::vector<std::uint8_t>(250, 6)) == CodeUnits{0, 8, 8, 0});
}

/// Errors of a head's keys or values that fall with the bits, though not evenly.
Eigen::MatrixXd random_errors(std::mt19937_64& random, int channels, std::size_t widths) {
  std::uniform_real_distribution<double> uniform;
  Eigen::MatrixXd errors(channels, static_cast<Eigen::Index>(widths) + 1);
  for (Eigen::Index channel = 0; channel < channels; ++channel) {
    double error = std::exp(8.0 * uniform(random));
    for (Eigen::Index column = 0; column < errors.cols(); ++column) {
      errors(channel, column) = error;
      error *= 0.2 + 0.4 * uniform(random);
    }
  }
  return errors;
}

TEST_CASE("a larger budget never loses more, and no page is exceeded") {
  std::mt19937_64 random(8);
  const std::vector<int> widths{1, 2, 3, 4, 5, 6, 8};
  for (const int channels : {24, 64}) {
    std::vector<Eigen::MatrixXd> errors;
    for (int spectrum = 0; spectrum < 8; ++spectrum)
      errors.push_back(random_errors(random, channels, widths.size()));
    const calibrate::UnitAllocation units(errors, widths);
    const double page = 1500.0, rows = 1000.0;
    // Pages of whole tiles of 64 rows.
    const auto list_bytes = [&](int row_bits) {
      const double per_page = std::floor(page / static_cast<double>(code_tile(row_bits).bytes));
      return per_page == 0.0 ? calibrate::UnitAllocation::infinity()
                             : std::ceil(rows / 64.0 / per_page) * page;
    };
    for (const double unit_bytes : {0.0, 100.0, 1e5}) {
      double last = std::numeric_limits<double>::infinity();
      for (double budget = 4.0 * list_bytes(0); budget < 4e5; budget += 5000.0) {
        const calibrate::AllocatedBits own = units.within(budget, list_bytes, unit_bytes);
        REQUIRE(own.bits.size() == errors.size());
        double bytes = 0.0, error = 0.0;
        for (std::size_t head = 0; head < errors.size(); head += 2) {
          bytes += list_bytes(code_units(own.bits[head]).row_bits() +
                              code_units(own.bits[head + 1]).row_bits());
        }
        for (std::size_t spectrum = 0; spectrum < errors.size(); ++spectrum) {
          REQUIRE(own.bits[spectrum].size() == static_cast<std::size_t>(channels));
          for (std::size_t channel = 0; channel < own.bits[spectrum].size(); ++channel) {
            const int bits = own.bits[spectrum][channel];
            const auto at = std::find(widths.begin(), widths.end(), bits);
            REQUIRE((bits == 0 || at != widths.end()));
            error += errors[spectrum](static_cast<Eigen::Index>(channel),
                                      bits == 0 ? 0 : at - widths.begin() + 1);
          }
        }
        REQUIRE(bytes <= budget);
        REQUIRE(error == doctest::Approx(own.error));
        REQUIRE(error <= last * (1.0 + 1e-12));
        last = error;
      }
    }
  }
}

TEST_CASE("units that cost time are fewer, and whole groups of 32 channels lose more") {
  std::mt19937_64 random(9);
  const std::vector<int> widths{1, 2, 3, 4, 5, 6, 8};
  std::vector<Eigen::MatrixXd> errors;
  for (int spectrum = 0; spectrum < 8; ++spectrum)
    errors.push_back(random_errors(random, 64, widths.size()));
  const calibrate::UnitAllocation units(errors, widths);
  const auto list_bytes = [](int row_bits) { return static_cast<double>(row_bits); };
  const auto count = [](const calibrate::AllocatedBits& own) {
    int sum = 0;
    for (const std::vector<std::uint8_t>& bits : own.bits) sum += code_units(bits).count();
    return sum;
  };
  // Two bits a channel.
  const calibrate::AllocatedBits free = units.within(8 * 128.0, list_bytes, 0.0),
                                 dear = units.within(8 * 128.0, list_bytes, 256.0);
  CHECK(count(dear) < count(free));
  CHECK(free.error <= dear.error);
  double even = 0.0;
  for (const Eigen::MatrixXd& own : errors) even += own.col(2).sum();
  CHECK(free.error < even);
  CHECK_THROWS_WITH_AS(
      calibrate::UnitAllocation(std::vector<Eigen::MatrixXd>(3, errors[0]), widths),
      "allocate_units: 3 spectra, an even number expected: keys and values of "
      "every head",
      ShapeError);
  CHECK_THROWS_AS(calibrate::UnitAllocation(errors, std::vector<int>{3, 2}), ValueError);
  // Kernels for few units: no head has more.
  for (const int most : {1, 2, 16}) {
    const calibrate::UnitAllocation few(errors, widths, 1, most);
    for (const double budget : {512.0, 4096.0}) {
      for (const std::vector<std::uint8_t>& bits : few.within(budget, list_bytes, 0.0).bits)
        CHECK(code_units(bits).count() <= most);
    }
  }
  CHECK_THROWS_WITH_AS(calibrate::UnitAllocation(errors, widths, 1, 17),
                       "allocate_units: at most 1 to 16 units, given 17", ValueError);
  // Units of keys that take time in fours: none are as dear as four.
  const auto keys_of = [&](int at_once) {
    const calibrate::UnitAllocation own(errors, widths, at_once);
    const calibrate::AllocatedBits all = own.within(8 * 128.0, list_bytes, 64.0);
    int over = 0;
    for (std::size_t head = 0; head < all.bits.size(); head += 2)
      over += code_units(all.bits[head]).count() > 4 ? 1 : 0;
    return std::pair{over, all.error};
  };
  CHECK(keys_of(4).first == 0);
  CHECK(keys_of(4).second < keys_of(1).second);
}

}  // namespace allocate_units_tests
