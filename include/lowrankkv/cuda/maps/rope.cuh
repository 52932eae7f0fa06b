// SPDX-License-Identifier: Apache-2.0
/// @file cuda/maps/rope.cuh  The rotary embedding of keys that are stored before it (Rope::pre):
/// cosines and sines of any position without evaluating one.
///
/// A position is written in digits of base 64, the tables hold the angles of every digit, and
/// angles add (cpu/rotary_table.hpp does the same). Tables are computed in f64 and kept in f32.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/cuda/runtime/device.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kRopeDigitBase = 64, kRopeDigits = 6;  ///< positions below 2^31
/// @brief Rows of the table of small offsets: a tile's rows and what may be missing between them.
/// Rows that stand further apart cost another pass over the tile.
inline constexpr int kRopeRows = 80;
/// @brief Couples of blocks of eight pairs, the last of which may be half a one.
__host__ __device__ constexpr int rope_couples(int head_dim) { return (head_dim / 16 + 1) / 2; }
/// @brief Words of that table.
__host__ __device__ constexpr int rope_words(int head_dim) {
  return rope_couples(head_dim) * kRopeRows * 16;
}
/// @brief Pieces that the positions of a sequence may be moved in, and their farthest: differences
/// of positions are below 2^31.
inline constexpr int kMaxShifts = 32;
inline constexpr std::int64_t kFarthestPosition = (std::int64_t{1} << 30) - 1;
/// @brief The farthest that tokens of a sequence can be moved, either way.
inline std::int64_t farthest_shift(std::int64_t max_tokens) {
  return max_tokens < kFarthestPosition ? kFarthestPosition - max_tokens : 0;
}

/// @brief PositionShift on the device.
struct DeviceShift {
  std::int32_t first, offset, divisor;

  __device__ std::int32_t position(std::int32_t token) const {
    const std::int32_t moved = token + offset;
    return divisor == 1 ? moved : (moved - (moved < 0 ? divisor - 1 : 0)) / divisor;
  }
};
/// @brief The pieces of a sequence, given to a kernel by value.
struct ShiftList {
  std::int32_t count = 0;
  DeviceShift items[kMaxShifts];
};

/// @brief How a layer's channels turn, as kernels see it. Channels of head_dim stand in turning
/// order: the first of every pair, then the second of every pair; those that do not turn are pairs
/// of angle zero behind the others. Eight pairs are two blocks of eight channels of a row, so that
/// lanes find both channels of their pairs in their own registers.
struct Rotary {
  const float2* digits = nullptr;  ///< [kRopeDigits, kRopeDigitBase, head_dim / 2]: cosine and
                                   ///< sine, pairs in turning order
  const std::uint32_t* offsets =
      nullptr;  ///< [rope_couples, kRopeRows, t, block of the couple]: of small offsets, in f16,
                ///< cosines of pairs 2t and 2t + 1, sines. Null: keys are stored turned
  DeviceShift* shifts = nullptr;       ///< [slots, kMaxShifts], pieces in order of their tokens
  std::int32_t* num_shifts = nullptr;  ///< [slots]
  std::int32_t pairs = 0;              ///< that turn, a multiple of eight
  bool interleaved = false;

  __host__ __device__ bool pre_rope() const { return offsets != nullptr; }
  /// @brief The pair of the embedding that stands at `place` in turning order, for those that turn.
  __host__ __device__ int pair(int place) const {
    return interleaved ? place / 8 * 8 + place % 8 / 2 + 4 * (place % 2) : place;
  }
  /// @brief The channel at `place` in turning order.
  __host__ __device__ int channel(int place, int head_dim) const {
    const bool second = place >= head_dim / 2;
    const int own = second ? place - head_dim / 2 : place;
    if (own >= pairs) return own / 8 * 16 + own % 8 + (second ? 8 : 0);
    return interleaved ? 2 * pair(own) + (second ? 1 : 0) : own + (second ? pairs : 0);
  }
  /// @brief Where a token of a sequence stands.
  __device__ std::int32_t position(int slot, std::int32_t token) const {
    std::int32_t place = token;
    for (int piece = 0; piece < __ldg(num_shifts + slot); ++piece) {
      const DeviceShift* shift = shifts + slot * kMaxShifts + piece;
      if (token >= __ldg(&shift->first))
        place = DeviceShift{0, __ldg(&shift->offset), __ldg(&shift->divisor)}.position(token);
    }
    return place;
  }
  /// @brief Cosines and sines of pairs 2 two and 2 two + 1, in turning order, at a position. Up to
  /// 2^18, either way, its digits are loaded at once.
  __device__ float4 phases(int position, int two, int head_dim) const {
    const auto digit = [&](int power, unsigned value) {
      return __ldg(reinterpret_cast<const float4*>(digits) +
                   (power * kRopeDigitBase + static_cast<int>(value % kRopeDigitBase)) *
                       (head_dim / 4) +
                   two);
    };
    const auto add = [](const float4& x, const float4& y) {
      return float4{x.x * y.x - x.y * y.y, x.y * y.x + x.x * y.y, x.z * y.z - x.w * y.w,
                    x.w * y.z + x.z * y.w};
    };
    unsigned left = static_cast<unsigned>(abs(position));
    const float4 low = digit(0, left), middle = digit(1, left / kRopeDigitBase),
                 high = digit(2, left / kRopeDigitBase / kRopeDigitBase);
    float4 sum = add(add(low, middle), high);
    left /= kRopeDigitBase * kRopeDigitBase * kRopeDigitBase;
    for (int power = 3; left > 0; ++power, left /= kRopeDigitBase)
      sum = add(sum, digit(power, left));
    if (position < 0) {
      sum.y = -sum.y;
      sum.w = -sum.w;
    }
    return sum;
  }
};

/// @brief Writes the shifts of a sequence. One warp.
template <class = void>
__global__ void write_shifts_kernel(Rotary rotary, int slot, ShiftList list) {
  if (threadIdx.x == 0) rotary.num_shifts[slot] = list.count;
  if (static_cast<int>(threadIdx.x) < list.count)
    rotary.shifts[slot * kMaxShifts + static_cast<int>(threadIdx.x)] = list.items[threadIdx.x];
}

/// @brief The tables of a layer, owned.
class RotaryTables {
 public:
  RotaryTables() = default;
  /// @throws ShapeError, ValueError as rope_frequencies(); ShapeError unless a multiple of 16
  /// channels turns
  RotaryTables(const RopeConfig& config, int head_dim, int max_sequences) {
    const std::vector<double> all = check(config, head_dim);
    rotary_.pairs = static_cast<std::int32_t>(all.size());
    rotary_.interleaved = config.pairing == RopePairing::interleaved;
    std::vector<double> frequencies(static_cast<std::size_t>(head_dim / 2));
    for (int place = 0; place < rotary_.pairs; ++place)
      frequencies[static_cast<std::size_t>(place)] =
          all[static_cast<std::size_t>(rotary_.pair(place))];
    std::vector<float2> digits;
    std::vector<std::uint32_t> offsets;
    double unit = 1.0;
    for (int power = 0; power < kRopeDigits; ++power, unit *= kRopeDigitBase) {
      for (int digit = 0; digit < kRopeDigitBase; ++digit)
        append(digits, frequencies, unit * digit);
    }
    for (int word = 0; word < rope_words(head_dim); ++word) {
      const auto of = [&](int pair) {
        const double angle = pair < head_dim / 2 ? frequencies[static_cast<std::size_t>(pair)] *
                                                       (word / 16 % kRopeRows)
                                                 : 0.0;
        return static_cast<std::uint32_t>(
            to_half(static_cast<float>(word % 2 == 0 ? std::cos(angle) : std::sin(angle))).bits);
      };
      const int pair = word / 16 / kRopeRows * 16 + word / 2 % 2 * 8 + word / 4 % 4 * 2;
      offsets.push_back(of(pair) | of(pair + 1) << 16);
    }
    digits_ = DeviceArray<float2>(digits);
    offsets_ = DeviceArray<std::uint32_t>(offsets);
    shifts_ = DeviceArray<DeviceShift>(static_cast<std::size_t>(max_sequences) * kMaxShifts);
    num_shifts_ = DeviceArray<std::int32_t>(static_cast<std::size_t>(max_sequences));
    rotary_.shifts = shifts_.data();
    rotary_.num_shifts = num_shifts_.data();
    rotary_.digits = digits_.data();
    rotary_.offsets = offsets_.data();
  }

  /// @brief The frequencies of a configuration that this backend can turn by.
  static std::vector<double> check(const RopeConfig& config, int head_dim) {
    std::vector<double> frequencies = rope_frequencies(config, head_dim);
    const int rotary_dim = 2 * static_cast<int>(frequencies.size());
    if (rotary_dim % 16 != 0)
      ::lowrankkv::detail::fail<ShapeError>("rope: rotary_dim ", rotary_dim,
                                            ", a multiple of 16 expected on this backend");
    return frequencies;
  }

  /// @brief Tells the device the shifts of a sequence, at most kMaxShifts pieces.
  void write_shifts(int slot, const PositionShifts& shifts, cudaStream_t stream) const {
    if (!rotary_.pre_rope()) return;
    ShiftList list;
    for (const PositionShift& piece : shifts.pieces())
      list.items[list.count++] = {static_cast<std::int32_t>(piece.first),
                                  static_cast<std::int32_t>(piece.offset),
                                  static_cast<std::int32_t>(piece.divisor)};
    write_shifts_kernel<><<<1, 32, 0, stream>>>(rotary_, slot, list);
    cuda::check(cudaGetLastError(), "write_shifts_kernel");
  }

  const Rotary& get() const { return rotary_; }
  /// @brief Of the tables that all sequences share.
  std::size_t bytes() const { return digits_.bytes() + offsets_.bytes(); }
  /// @brief Of what is set aside for shifts.
  std::size_t shift_bytes() const { return shifts_.bytes() + num_shifts_.bytes(); }

 private:
  static void append(std::vector<float2>& table, const std::vector<double>& frequencies,
                     double position) {
    for (const double frequency : frequencies)
      table.push_back({static_cast<float>(std::cos(frequency * position)),
                       static_cast<float>(std::sin(frequency * position))});
  }
  Rotary rotary_;
  DeviceArray<float2> digits_;
  DeviceArray<std::uint32_t> offsets_;
  DeviceArray<DeviceShift> shifts_;
  DeviceArray<std::int32_t> num_shifts_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
