// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/row_operands.cuh  Operands of the products that decode rows: levels of codes,
/// made straight from the words of a tile, and the maps that read them.
///
/// A level is a code minus its centre, without its row's gain: exact in f16. A code that stands at
/// bit p of its byte, and is masked there, is 2^p times as large. With 0x64 as the high byte it
/// becomes the f16 number 1024 + 2^p code; one fused multiply-add takes 1024, 2^p and the centre
/// away without rounding. Words of keys hold four neighbouring channels of a row, so maps for keys
/// have their channels in that order (MapOperands). Words of values are transposed as they are, two
/// bytes an element, before they are unpacked.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/tiles/code_products.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Maps in shared memory, each element split into `parts` 16-bit numbers, the larger ones first.
/// f16: [step of 16 channels of tiles, block of eight row channels, lane, part]; bf16: [step,
/// block, part, lane].
template <DType type>
struct MapOperands {
  static constexpr int parts = type == DType::f16 ? 2 : 3;

  /// Bytes of the maps of so many steps and row channels.
  static __host__ __device__ std::size_t bytes(int steps, int channels) {
    return sizeof(uint2) * static_cast<std::size_t>(steps * channels / 8 * parts * 32);
  }
  __device__ static std::uint32_t packed(float low, float high) {
    return static_cast<std::uint32_t>(to_bits(type, low)) |
           static_cast<std::uint32_t>(to_bits(type, high)) << 16;
  }
  /// A lane's elements before their transposition: two row channels of channel g (lane / 4) of a
  /// step, and of channel g + 8. If `neighbours`, of channels 4 (g / 2) + g % 2 and 4 (g / 2) + g %
  /// 2 + 2 instead.
  __device__ static float4 elements(const MapElements& map, int first, int lane, bool neighbours) {
    if (!neighbours) return map.quad(first + lane);
    const int g = lane / 4, channel = 4 * (g / 2) + g % 2,
              place = first + channel % 8 * 4 + lane % 4;
    const float4 one = map.quad(place), other = map.quad(place + 8);
    return g < 4 ? float4{one.x, one.y, other.x, other.y} : float4{one.z, one.w, other.z, other.w};
  }
  /// Loads the maps of steps [first_step, first_step + steps), of `blocks` blocks from
  /// `first_block` on. All threads of the block call it.
  /// @param neighbours  lanes of rows have four neighbouring channels
  __device__ static void load(const PartMaps& maps, int first_step, int steps, int first_block,
                              int blocks, int dim, bool neighbours, uint2* target) {
    const float scale = __ldg(maps.reader_scale);
    const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    for (int own = 0; own < steps; ++own) {
      const int step = first_step + own;
      for (int block = static_cast<int>(threadIdx.x) / 32; block < blocks; block += warps) {
        float4 rest = 16 * step < maps.width
                          ? elements(maps.reader, (step * (dim / 8) + first_block + block) * 32,
                                     lane, neighbours)
                          : float4{};
        rest = {rest.x * scale, rest.y * scale, rest.z * scale, rest.w * scale};
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          const std::uint32_t low = packed(rest.x, rest.y), high = packed(rest.z, rest.w);
          const int place = own * blocks + block;
          target[parts == 2 ? (place * 32 + lane) * parts + part
                            : (place * parts + part) * 32 + lane] = {transposed(low),
                                                                     transposed(high)};
          rest = {rest.x - from_bits(type, static_cast<std::uint16_t>(low)),
                  rest.y - from_bits(type, static_cast<std::uint16_t>(low >> 16)),
                  rest.z - from_bits(type, static_cast<std::uint16_t>(high)),
                  rest.w - from_bits(type, static_cast<std::uint16_t>(high >> 16))};
        }
      }
    }
  }
  /// A lane's maps of a block of a step.
  /// @param own  the maps of the step
  __device__ __forceinline__ static void read(const uint2* own, int block, int lane,
                                              uint2 (&map)[parts]) {
    if constexpr (parts == 2) {
      const uint4 both = reinterpret_cast<const uint4*>(own)[block * 32 + lane];
      map[0] = uint2{both.x, both.y};
      map[1] = uint2{both.z, both.w};
    } else {
#pragma unroll
      for (int part = 0; part < parts; ++part) map[part] = own[(block * parts + part) * 32 + lane];
    }
  }
};

/// Where a unit of codes begins in its tile, and how many bits its codes have.
struct UnitPlace {
  int bits = 0;
  int at = 0;
};

/// A lane's words of 32 rows of a unit.
struct UnitWords {
  uint4 words[2];
};

/// The words of rows [32 half, 32 half + 32) of a unit whose codes have so many bits.
template <Part part, int bits>
__device__ __forceinline__ UnitWords unit_words(const std::uint8_t* unit, int half, int lane) {
  UnitWords own{};
  const auto four = [&](int at) { return *reinterpret_cast<const uint4*>(unit + at + 16 * lane); };
  const auto two = [&](int at) {
    const uint2 words = *reinterpret_cast<const uint2*>(unit + at);
    return uint4{words.x, words.y, 0, 0};
  };
  if constexpr (bits == 1)
    own.words[0] = two(8 * lane);
  else if constexpr (part == Part::key && bits == 8)
    own = {{four(1024 * half), four(1024 * half + 512)}};
  else if constexpr (part == Part::key)
    own.words[0] = four(bits == 4 ? 512 * half : 0);
  else if constexpr (bits == 8)
    own = {{four(512 * half), four(512 * half + 1024)}};
  else if constexpr (bits == 4)
    own = {{two(16 * lane + 8 * half), two(16 * lane + 8 * half + 512)}};
  else
    own.words[0] = two(16 * lane + 8 * half);
  return own;
}
template <Part part>
__device__ __forceinline__ UnitWords unit_words(const std::uint8_t* unit, int bits, int half,
                                                int lane) {
  if (bits == 8) return unit_words<part, 8>(unit, half, lane);
  if (bits == 4) return unit_words<part, 4>(unit, half, lane);
  return bits == 2 ? unit_words<part, 2>(unit, half, lane) : unit_words<part, 1>(unit, half, lane);
}

__device__ __forceinline__ __half2 two_halves(float number) { return __float2half2_rn(number); }
/// Two masked bytes of a word, each byte b as the f16 number 1024 + b.
__device__ __forceinline__ __half2 raised_bytes(std::uint32_t word, std::uint32_t selector) {
  const std::uint32_t words = __byte_perm(word, 0x64646464U, selector);
  return *reinterpret_cast<const __half2*>(&words);
}
__device__ __forceinline__ std::uint32_t word_of(const __half2& both) {
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// Two codes that stand at bit `shift` of their bytes, as levels times `weight`, which is 1 or
/// 2^shift.
template <int bits, int shift, int weight>
__device__ __forceinline__ std::uint32_t level_pair(std::uint32_t word, std::uint32_t selector) {
  constexpr float centre = 0.5F * static_cast<float>((1 << bits) - 1) * static_cast<float>(weight),
                  factor = static_cast<float>(weight) / static_cast<float>(1 << shift);
  const __half2 raised =
      raised_bytes(word & 0x01010101U * (((1U << bits) - 1U) << shift), selector);
  if constexpr (shift == 0)
    return word_of(__hsub2(__hsub2(raised, two_halves(1024.0F)),
                           two_halves(centre)));  // 1024 and a half is not an f16 number
  else if constexpr (weight == 1)
    return word_of(__hfma2(raised, two_halves(factor), two_halves(-1024.0F * factor - centre)));
  else
    return word_of(__hsub2(raised, two_halves(1024.0F + centre)));
}

/// Levels of a unit as operands a[half of the channels][half of the rows]. Levels of values stay
/// multiplied by 2^p, which their maps take back.
/// @param half  of the tile's rows
template <Part part, int bits>
__device__ __forceinline__ void unit_levels(UnitWords own, int half, uint4 (&a)[2][2]) {
  if (bits == 1 || (part == Part::key && bits == 2)) {  // rows share their words
    own.words[0] = {own.words[0].x >> (4 * half), own.words[0].y >> (4 * half),
                    own.words[0].z >> (4 * half), own.words[0].w >> (4 * half)};
  }
  const auto word = [&](int which, int i) {
    const uint4& words = own.words[which];
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  };
  if constexpr (part == Part::key) {
    for_each_unit<4>([&](auto index) {
      constexpr int deep = decltype(index)::value / 2, m = decltype(index)::value % 2;
      constexpr int shift = bits == 4 ? 4 * m : bits == 8 ? 0 : 2 * m, which = bits == 8 ? m : 0;
      const std::uint32_t first = word(which, bits == 1 ? deep : 2 * deep),
                          second = word(which, bits == 1 ? deep : 2 * deep + 1);
      constexpr int second_shift = shift + (bits == 1 ? 1 : 0);
      a[deep][m] = {level_pair<bits, shift, 1>(first, 0x4140U),
                    level_pair<bits, second_shift, 1>(second, 0x4140U),
                    level_pair<bits, shift, 1>(first, 0x4342U),
                    level_pair<bits, second_shift, 1>(second, 0x4342U)};
    });
  } else {
    UnitWords rotated{};
#pragma unroll
    for (int which = 0; which < (bits >= 4 ? 2 : 1); ++which) {
      rotated.words[which].x = transposed(own.words[which].x);
      rotated.words[which].y = transposed(own.words[which].y);
      if constexpr (bits == 8) {
        rotated.words[which].z = transposed(own.words[which].z);
        rotated.words[which].w = transposed(own.words[which].w);
      }
    }
    own = rotated;
    for_each_unit<4>([&](auto index) {
      constexpr int deep = decltype(index)::value / 2, m = decltype(index)::value % 2;
      constexpr int shift = bits == 8   ? 0
                            : bits == 4 ? 0
                                        : 2 * bits * deep,
                    second_shift = bits == 8   ? 0
                                   : bits == 4 ? 4
                                               : shift + bits,
                    which = bits >= 4 ? deep : 0;
      const std::uint32_t first = word(which, bits == 8 ? 2 * m : m),
                          second = word(which, bits == 8 ? 2 * m + 1 : m);
      a[deep][m] = {level_pair<bits, shift, 1 << shift>(first, 0x4240U),
                    level_pair<bits, shift, 1 << shift>(first, 0x4341U),
                    level_pair<bits, second_shift, 1 << second_shift>(second, 0x4240U),
                    level_pair<bits, second_shift, 1 << second_shift>(second, 0x4341U)};
    });
  }
}
template <Part part>
__device__ __forceinline__ void unit_levels(const UnitWords& own, int bits, int half,
                                            uint4 (&a)[2][2]) {
  if (bits == 8)
    unit_levels<part, 8>(own, half, a);
  else if (bits == 4)
    unit_levels<part, 4>(own, half, a);
  else if (bits == 2)
    unit_levels<part, 2>(own, half, a);
  else
    unit_levels<part, 1>(own, half, a);
}

/// Adds a plane of a block of joint values to operands in the order of unit_levels().
/// @param lowest  bit of the codes that is the plane's lowest
template <int bits>
__device__ __forceinline__ void add_plane(UnitWords own, int half, int lowest, uint4 (&a)[2][2]) {
  const auto add = [&](std::uint32_t word, auto shift, std::uint32_t selector, std::uint32_t& sum) {
    constexpr int at = decltype(shift)::value;
    const __half2 code =
        __hsub2(raised_bytes(word & 0x01010101U * (((1U << bits) - 1U) << at), selector),
                two_halves(1024.0F));
    // 2^(lowest - at), twice.
    const std::uint32_t factor = static_cast<std::uint32_t>(15 + lowest - at) << 10 |
                                 static_cast<std::uint32_t>(15 + lowest - at) << 26;
    sum = word_of(__hfma2(code, *reinterpret_cast<const __half2*>(&factor),
                          *reinterpret_cast<const __half2*>(&sum)));
  };
  if constexpr (bits == 1)
    own.words[0] = {own.words[0].x >> (4 * half), own.words[0].y >> (4 * half), 0, 0};
  for_each_unit<4>([&](auto index) {
    constexpr int deep = decltype(index)::value / 2, m = decltype(index)::value % 2,
                  which = bits >= 4 ? deep : 0;
    using First = Constant<(bits >= 4 ? 0 : 2 * bits * deep)>;
    using Second = Constant<(bits == 8 ? 0 : bits == 4 ? 4 : First::value + bits)>;
    const uint4& words = own.words[which];
    const std::uint32_t first = transposed(bits == 8 ? (m == 0 ? words.x : words.z)
                                           : m == 0  ? words.x
                                                     : words.y);
    const std::uint32_t second = bits == 8 ? transposed(m == 0 ? words.y : words.w) : first;
    add(first, First{}, 0x4240U, a[deep][m].x);
    add(first, First{}, 0x4341U, a[deep][m].y);
    add(second, Second{}, 0x4240U, a[deep][m].z);
    add(second, Second{}, 0x4341U, a[deep][m].w);
  });
}
/// Levels of a block of joint values of a tile, in the order of unit_levels().
__device__ __forceinline__ void block_levels(const std::uint8_t* tile, const JointBlock& block,
                                             int half, int lane, uint4 (&a)[2][2]) {
  const std::uint32_t centre =
      word_of(two_halves(-0.5F * static_cast<float>((1 << block.bits) - 1)));
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i / 2][i % 2] = {centre, centre, centre, centre};
  for_each_unit<4>([&](auto plane) {
    constexpr int bits = 8 >> decltype(plane)::value;
    if ((block.bits & bits) != 0)
      add_plane<bits>(
          unit_words<Part::value, bits>(tile + block.at[decltype(plane)::value], half, lane), half,
          block.shift(bits), a);
  });
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
