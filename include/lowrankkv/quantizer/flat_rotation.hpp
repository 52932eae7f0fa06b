// SPDX-License-Identifier: Apache-2.0
/// @file quantizer/flat_rotation.hpp  Orthogonal matrices of any size that spread each coordinate
/// over all coordinates.
#pragma once

#include <cmath>
#include <numbers>
#include <vector>

#include "lowrankkv/core/error.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief A symmetric orthogonal matrix [size, size], row-major, whose entries all have about the
/// same magnitude.
///
/// If size is a power of two: Sylvester's Hadamard matrix (entries +-1/sqrt(n)). If a power of two
/// divides size: the Kronecker product of that matrix and a Hartley matrix (entries up to
/// sqrt(2/n)). Otherwise: the Hartley matrix. Never a truncated Hadamard matrix, which would not be
/// orthogonal. @throws ShapeError for size < 1
inline std::vector<float> flat_rotation(int size) {
  if (size < 1)
    ::lowrankkv::detail::fail<ShapeError>("flat_rotation: size at least 1, given ", size);
  int power = 1;
  while (size % (2 * power) == 0) power *= 2;
  const int odd = size / power;
  std::vector<float> matrix(static_cast<std::size_t>(size) * static_cast<std::size_t>(size));
  for (int row = 0; row < size; ++row) {
    for (int col = 0; col < size; ++col) {
      const unsigned common =
          static_cast<unsigned>(row % power) & static_cast<unsigned>(col % power);
      int parity = 0;
      for (unsigned bit = common; bit != 0; bit &= bit - 1) parity ^= 1;
      // The discrete Hartley transform cas(2 pi i j / n) / sqrt(n) is orthogonal and symmetric for
      // every n.
      const int i = row / power, j = col / power;
      const double angle = 2.0 * std::numbers::pi * i * j / odd;
      const double value =
          (std::cos(angle) + std::sin(angle)) / std::sqrt(static_cast<double>(size));
      matrix[static_cast<std::size_t>(row) * static_cast<std::size_t>(size) +
             static_cast<std::size_t>(col)] = static_cast<float>(parity != 0 ? -value : value);
    }
  }
  return matrix;
}

LOWRANKKV_NAMESPACE_END
