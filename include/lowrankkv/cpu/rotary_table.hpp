// SPDX-License-Identifier: Apache-2.0
/// @file cpu/rotary_table.hpp  Rotates tiles of keys with tabulated cosines and sines of any
/// position.
///
/// A position is written in digits of base 64. Tables hold the angles of each digit, and angles
/// add: cos(a + b) = cos a cos b - sin a sin b. Tables are computed in f64 and kept in f32. A
/// position has at most six digits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/cpu/simd/kernels.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The rotary embedding of one layer. Pair i rotates channels (first(i), second(i)).
class RotaryTable {
  static constexpr int kBase = 64;
  static constexpr int kDigits = 6;  // magnitudes below 2^36

 public:
  RotaryTable() = default;
  /// @throws ShapeError, ValueError as rope_frequencies()
  RotaryTable(const RopeConfig& config, int head_dim) {
    const std::vector<double> frequencies = rope_frequencies(config, head_dim);
    pairs_ = static_cast<int>(frequencies.size());
    interleaved_ = config.pairing == RopePairing::interleaved;
    std::int64_t unit = 1;
    for (Table& digit : digits_) {
      for (int value = 0; value < kBase; ++value) {
        for (const double frequency : frequencies) {
          const double angle = frequency * static_cast<double>(unit * value);
          digit.cosines.push_back(static_cast<float>(std::cos(angle)));
          digit.sines.push_back(static_cast<float>(std::sin(angle)));
        }
      }
      unit *= kBase;
    }
    for (std::size_t pair = 0; pair < frequencies.size(); ++pair) {
      for (std::size_t value = 0; value < kBase; ++value) {
        line_cosines_.push_back(digits_[0].cosines[value * frequencies.size() + pair]);
        line_sines_.push_back(digits_[0].sines[value * frequencies.size() + pair]);
      }
    }
  }

  int num_pairs() const { return pairs_; }
  int first(int pair) const { return interleaved_ ? 2 * pair : pair; }
  int second(int pair) const { return interleaved_ ? 2 * pair + 1 : pair + pairs_; }
  /// @brief Number of channels that are rotated. Later channels are not.
  int rotary_dim() const { return 2 * pairs_; }
  std::size_t bytes() const {
    return 2 * sizeof(float) * (line_cosines_.size() + kDigits * digits_[0].cosines.size());
  }

  /// @brief Cosines and sines of positions [position, position + count): out [num_pairs, stride],
  /// from column 0. Any count; |position| below 2 PositionShifts::kLimit (the Cuda backend's
  /// positions stay within +-2^30).
  void angles(std::int64_t position, int count, float* cosines, float* sines, int stride) const {
    for (int done = 0; done < count; done += kBase)
      angles_of_line(position + done, (std::min)(kBase, count - done), cosines + done, sines + done,
                     stride);
  }

  /// @brief Rotates keys [head_dim, stride], channel-major, columns [0, count), to positions
  /// [position, position + count). No column from `count` on is touched.
  void rotate(std::int64_t position, int count, float* tile, int stride) const {
    for (int done = 0; done < count; done += kBase)
      rotate_line(position + done, (std::min)(kBase, count - done), tile + done, stride);
  }

  /// @brief Rotates one row [head_dim] to a position.
  void rotate_row(std::int64_t position, float* row) const {
    const Digits digits = digits_of(position);
    for (int pair = 0; pair < pairs_; ++pair) {
      const Phasor phasor = phasor_of(digits, pair);
      float& x = row[first(pair)];
      float& y = row[second(pair)];
      const float rotated = x * phasor.cosine - y * phasor.sine;
      y = y * phasor.cosine + x * phasor.sine;
      x = rotated;
    }
  }
  /// @brief Rotates rows [count, head_dim] of tokens [first_token, first_token + count) to their
  /// positions.
  void rotate_rows(const PositionShifts& shifts, std::int64_t first_token, std::int64_t count,
                   float* rows, int head_dim) const {
    shifts.for_each(
        first_token, count, [&](std::int64_t begin, std::int64_t length, std::int64_t position) {
          for (std::int64_t token = 0; token < length; ++token)
            rotate_row(position + token, rows + (begin - first_token + token) * head_dim);
        });
  }

 private:
  struct Table {
    std::vector<float> cosines, sines;  // [kBase, pairs]
  };
  struct Digits {
    std::array<std::size_t, kDigits> row{};  // start of each digit's row in its table
    std::size_t used = 0;
    bool negative = false;
  };
  struct Phasor {
    float cosine = 1.0F, sine = 0.0F;
  };

  Digits digits_of(std::int64_t position) const {
    Digits digits;
    digits.negative = position < 0;
    for (std::int64_t left = digits.negative ? -position : position;
         left > 0 && digits.used < kDigits; left /= kBase) {
      digits.row[digits.used++] =
          static_cast<std::size_t>(left % kBase) * static_cast<std::size_t>(pairs_);
    }
    return digits;
  }
  Phasor phasor_of(const Digits& digits, int pair) const {
    Phasor sum;
    for (std::size_t d = 0; d < digits.used; ++d) {
      const std::size_t at = digits.row[d] + static_cast<std::size_t>(pair);
      sum = {sum.cosine * digits_[d].cosines[at] - sum.sine * digits_[d].sines[at],
             sum.sine * digits_[d].cosines[at] + sum.cosine * digits_[d].sines[at]};
    }
    return {sum.cosine, digits.negative ? -sum.sine : sum.sine};
  }

  void angles_of_line(std::int64_t position, int count, float* cosines, float* sines,
                      int stride) const {
    const Digits digits = digits_of(position);
    for (int pair = 0; pair < pairs_; ++pair) {
      const Phasor start = phasor_of(digits, pair);
      const float* line_cosine = line_cosines_.data() + pair * kBase;
      const float* line_sine = line_sines_.data() + pair * kBase;
      float* to_cosine = cosines + pair * stride;
      float* to_sine = sines + pair * stride;
      for (int token = 0; token < count; ++token) {
        to_cosine[token] = start.cosine * line_cosine[token] - start.sine * line_sine[token];
        to_sine[token] = start.sine * line_cosine[token] + start.cosine * line_sine[token];
      }
    }
  }

  void rotate_line(std::int64_t position, int count, float* tile, int stride) const {
    constexpr int most = 64;  // pairs at a time
    float cosines[most], sines[most];
    const Digits digits = digits_of(position);
    for (int begin = 0; begin < pairs_; begin += most) {
      const int pairs = (std::min)(most, pairs_ - begin);
      for (int pair = 0; pair < pairs; ++pair) {
        const Phasor start = phasor_of(digits, begin + pair);
        cosines[pair] = start.cosine;
        sines[pair] = start.sine;
      }
      const std::ptrdiff_t line = std::ptrdiff_t{begin} * kBase;
      simd::kernels().rotate({tile + std::ptrdiff_t{first(begin)} * stride,
                              std::ptrdiff_t{second(begin) - first(begin)} * stride,
                              std::ptrdiff_t{interleaved_ ? 2 : 1} * stride, pairs, count, cosines,
                              sines, line_cosines_.data() + line, line_sines_.data() + line,
                              kBase});
    }
  }

  int pairs_ = 0;
  bool interleaved_ = false;
  std::array<Table, kDigits> digits_;
  std::vector<float> line_cosines_, line_sines_;  // digit 0 transposed: [pairs, kBase]
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
