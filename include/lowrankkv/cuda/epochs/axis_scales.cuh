// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/axis_scales.cuh  Constants of codes whose channels are principal axes of
/// moving bases: sizes of calibrated coefficients, steps, rotations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/tiles/layer_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The axis constants of a layer's heads, passed to kernels by value.
struct AxisScales {
  /// [heads, 2, most]: root mean squares of calibrated coefficients; null: unknown.
  const float* rms = nullptr;
  /// [heads, 2, most]: the quantizer's step of a coefficient of rms 1; 0: the coefficient has no
  /// bits, and its step is 1; null: no steps.
  const float* units = nullptr;
  /// [heads, 2, most, most]: rotations from principal axes to the channels of codes; null: none.
  const float* rotations = nullptr;
  const float* longest = nullptr;  ///< [heads, 2]: bound of the norms of a decoder's rows
  std::int32_t most = 0;           ///< the largest rank

  /// @brief Index of a head's keys, or of its values, in [heads, 2].
  __device__ static int which(Part part, int head) { return 2 * head + static_cast<int>(part); }
};

/// @brief The axis constants of a layer's heads, owned. Empty unless channels must be principal
/// axes of moving bases.
class AxisStore {
 public:
  AxisStore() = default;
  AxisStore(const LayerBasis& basis, const LayerTiles& tiles, int most, int head_dim) {
    if (!tiles.orders) return;
    const std::size_t parts = tiles.parts.size(), side = static_cast<std::size_t>(most);
    std::vector<float> rms(parts * side, 0.0F), units(rms), rotations, longest;
    bool any_rms = false, any_units = false;
    for (std::size_t part = 0; part < parts; ++part) {
      const HeadBasis& head = basis.heads[part / 2];
      const std::vector<float>& own = part % 2 == 0 ? head.key_rms : head.value_rms;
      std::copy(own.begin(), own.end(), rms.begin() + static_cast<std::ptrdiff_t>(part * side));
      std::copy(tiles.units[part].begin(), tiles.units[part].end(),
                units.begin() + static_cast<std::ptrdiff_t>(part * side));
      any_rms = any_rms || !own.empty();
      any_units = any_units || !tiles.units[part].empty();
      longest.push_back(longest_decoder_row(
          part % 2 == 0 ? head.key_metric_inverse : head.value_metric_inverse, head_dim));
      const std::vector<float>& rotation = tiles.rotations[part];
      if (rotation.empty()) continue;
      rotations.resize(parts * side * side, 0.0F);
      const std::size_t rank =
          static_cast<std::size_t>(part % 2 == 0 ? head.key_rank : head.value_rank);
      for (std::size_t i = 0; i < rank * rank; ++i)
        rotations[(part * side + i / rank) * side + i % rank] = rotation[i];
    }
    rms_ = DeviceArray<float>(rms);
    units_ = DeviceArray<float>(units);
    rotations_ = DeviceArray<float>(rotations);
    longest_ = DeviceArray<float>(longest);
    scales_ = {any_rms ? rms_.data() : nullptr, any_units ? units_.data() : nullptr,
               rotations.empty() ? nullptr : rotations_.data(), longest_.data(), most};
  }
  bool any() const { return scales_.most > 0; }
  const AxisScales& get() const { return scales_; }
  std::size_t bytes() const {
    return rms_.bytes() + units_.bytes() + rotations_.bytes() + longest_.bytes();
  }

 private:
  DeviceArray<float> rms_, units_, rotations_, longest_;
  AxisScales scales_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
