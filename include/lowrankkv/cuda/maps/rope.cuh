// SPDX-License-Identifier: Apache-2.0
/// @file cuda/maps/rope.cuh  Rotary embedding (RoPE) of pre-RoPE keys: cosines and sines of any
/// position from tables.
///
/// A position is written in digits of base 64. The tables hold the angles of every digit, and
/// angles of digits add (cpu/rotary_table.hpp does the same). Tables are computed in f64 and stored
/// in f32; the table of small offsets is stored in f16.
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
/// @brief Rows of the table of small offsets: enough for the rows of a tile and for gaps between
/// their positions. Rows that are further apart cost another pass over the tile.
inline constexpr int kRopeRows = 80;
/// @brief Couples of blocks of eight channel pairs. The last couple may have only one block.
__host__ __device__ constexpr int rope_couples(int head_dim) { return (head_dim / 16 + 1) / 2; }
/// @brief 32-bit words of the table of small offsets.
__host__ __device__ constexpr int rope_words(int head_dim) {
  return rope_couples(head_dim) * kRopeRows * 16;
}
/// @brief Most pieces of a sequence whose positions are shifted separately, and the farthest
/// position from 0. Differences of positions stay below 2^31.
inline constexpr int kMaxShifts = 32;
inline constexpr std::int64_t kFarthestPosition = (std::int64_t{1} << 30) - 1;
/// @brief The largest position shift of a sequence's tokens, in either direction.
inline std::int64_t farthest_shift(std::int64_t max_tokens) {
  return max_tokens < kFarthestPosition ? kFarthestPosition - max_tokens : 0;
}

/// @brief PositionShift on the device: token t from `first` on is at position floor((t + offset) /
/// divisor).
struct DeviceShift {
  std::int32_t first, offset, divisor;

  __device__ std::int32_t position(std::int32_t token) const {
    const std::int32_t moved = token + offset;
    return divisor == 1 ? moved : (moved - (moved < 0 ? divisor - 1 : 0)) / divisor;
  }
};
/// @brief The shifted pieces of a sequence, passed to a kernel by value.
struct ShiftList {
  std::int32_t count = 0;
  DeviceShift items[kMaxShifts];
};

/// @brief RoPE of a layer, passed to kernels by value.
///
/// Kernels use the channels of head_dim in RoPE order: the first channel of every pair, then the
/// second channel of every pair. Channels without RoPE form pairs of angle zero behind the other
/// pairs. Eight pairs are two blocks of eight channels of a row, so that a lane holds both channels
/// of its pairs in registers.
struct Rotary {
  /// [kRopeDigits, kRopeDigitBase, head_dim / 2]: cosine and sine, pairs in RoPE order.
  const float2* digits = nullptr;
  /// [rope_couples, kRopeRows, t, block of the couple], two words each: cosines of pairs 2t and 2t
  /// + 1, then their sines, of small offsets, in f16. Null: keys are stored post-RoPE.
  const std::uint32_t* offsets = nullptr;
  DeviceShift* shifts = nullptr;       ///< [slots, kMaxShifts], pieces in order of their tokens
  std::int32_t* num_shifts = nullptr;  ///< [slots]
  std::int32_t pairs = 0;              ///< pairs with RoPE, a multiple of eight
  bool interleaved = false;

  __host__ __device__ bool pre_rope() const { return offsets != nullptr; }
  /// @brief The pair of the embedding at `place` in RoPE order. For pairs with RoPE only.
  __host__ __device__ int pair(int place) const {
    return interleaved ? place / 8 * 8 + place % 8 / 2 + 4 * (place % 2) : place;
  }
  /// @brief The channel of head_dim at `place` in RoPE order.
  __host__ __device__ int channel(int place, int head_dim) const {
    const bool second = place >= head_dim / 2;
    const int own = second ? place - head_dim / 2 : place;
    if (own >= pairs) return own / 8 * 16 + own % 8 + (second ? 8 : 0);
    return interleaved ? 2 * pair(own) + (second ? 1 : 0) : own + (second ? pairs : 0);
  }
  /// @brief The position of a token of a sequence, shifts applied.
  __device__ std::int32_t position(int slot, std::int32_t token) const {
    std::int32_t place = token;
    for (int piece = 0; piece < __ldg(num_shifts + slot); ++piece) {
      const DeviceShift* shift = shifts + slot * kMaxShifts + piece;
      if (token >= __ldg(&shift->first))
        place = DeviceShift{0, __ldg(&shift->offset), __ldg(&shift->divisor)}.position(token);
    }
    return place;
  }
  /// @brief Cosine and sine of pair 2 two, then of pair 2 two + 1, in RoPE order, at a position.
  /// For positions of magnitude below 2^18, all digits are loaded at once.
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

/// @brief The RoPE tables of a layer, owned.
class RotaryTables {
 public:
  RotaryTables() = default;
  /// @brief Computes and uploads the tables. Allocates.
  /// @throws ShapeError, ValueError as rope_frequencies(); ShapeError unless rotary_dim is a
  /// multiple of 16
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

  /// @brief The frequencies of a configuration, checked for this backend. @throws as the
  /// constructor
  static std::vector<double> check(const RopeConfig& config, int head_dim) {
    std::vector<double> frequencies = rope_frequencies(config, head_dim);
    const int rotary_dim = 2 * static_cast<int>(frequencies.size());
    if (rotary_dim % 16 != 0)
      ::lowrankkv::detail::fail<ShapeError>("rope: rotary_dim ", rotary_dim,
                                            ", a multiple of 16 expected on this backend");
    return frequencies;
  }

  /// @brief Enqueues the upload of a sequence's shifts, at most kMaxShifts pieces. Does nothing for
  /// post-RoPE keys.
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
  /// @brief Bytes of the tables that all sequences share.
  std::size_t bytes() const { return digits_.bytes() + offsets_.bytes(); }
  /// @brief Bytes reserved for shifts.
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
