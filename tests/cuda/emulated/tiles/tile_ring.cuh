// SPDX-License-Identifier: Apache-2.0
// Takes the place of cuda/tiles/tile_ring.cuh where kernels run on the host: the same functions, in
// plain C++.
#pragma once

#include "emulator.hpp"
#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

template <int stages>
class TileRing {
 public:
  TileRing(std::uint8_t* memory, std::uint64_t*, int most_bytes, int used = stages)
      : memory_(memory), most_bytes_(most_bytes), used_(used) {}
  void fetch(const std::uint8_t* source, int bytes) {
    if (source != nullptr && threadIdx.x % 32 == 0)
      std::memcpy(memory_ + filling_ * most_bytes_, source, static_cast<std::size_t>(bytes));
    filling_ = (filling_ + 1) % used_;
  }
  const std::uint8_t* wait() {
    __syncwarp();
    const std::uint8_t* tile = memory_ + using_ * most_bytes_;
    using_ = (using_ + 1) % used_;
    return tile;
  }

 private:
  std::uint8_t* memory_;
  int most_bytes_, used_, filling_ = 0, using_ = 0;
};

inline void release_to_copies() {}
inline void prefetch_line(const float*) {}
inline void release_next_kernel() {}
inline void wait_for_last_kernel() {}
inline void end_after_last_kernel() {}
inline float exp2_fast(float x) { return std::exp2(x); }
inline float rsqrt_fast(float x) { return 1.0F / std::sqrt(x); }
inline std::uint32_t transposed(std::uint32_t x) {
  return emulated::together<std::uint32_t>("movmatrix", x, [](const auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane) {
      const auto at = [&](int row, int column) {
        return in[static_cast<std::size_t>(row * 4 + column / 2)] >> (16 * (column % 2)) & 0xffffU;
      };
      out[static_cast<std::size_t>(lane)] =
          at(lane % 4 * 2, lane / 4) | at(lane % 4 * 2 + 1, lane / 4) << 16;
    }
  });
}
template <DType type>
void mma_plain(float (&c)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  using Sums = std::array<float, 4>;
  const Sums d = emulated::together<Sums>(
      "mma", emulated::Operands{{a.x, a.y, a.z, a.w}, {b0, b1}}, [](const auto& in, auto& out) {
        emulated::products(
            in,
            [](std::uint32_t word, int place) {
              return type == DType::f16 ? emulated::half_of(word, place)
                                        : emulated::bfloat_of(word, place);
            },
            [&](int lane, int half, int column, double sum) {
              out[static_cast<std::size_t>(lane)][static_cast<std::size_t>(2 * half + column)] =
                  static_cast<float>(sum);
            });
      });
  for (std::size_t i = 0; i < 4; ++i) c[i] += d[i];
}
inline void mma_half_onto(std::uint32_t (&d)[2], const uint4& a, std::uint32_t b0, std::uint32_t b1,
                          const std::uint32_t (&c)[2]) {
  using Sums = std::array<double, 4>;
  const Sums sums = emulated::together<Sums>(
      "mma.f16", emulated::Operands{{a.x, a.y, a.z, a.w}, {b0, b1}}, [](const auto& in, auto& out) {
        emulated::products(in, emulated::half_of, [&](int lane, int half, int column, double sum) {
          out[static_cast<std::size_t>(lane)][static_cast<std::size_t>(2 * half + column)] = sum;
        });
      });
  for (std::size_t half = 0; half < 2; ++half) {
    const std::uint32_t onto = c[half];
    d[half] =
        emulated::half_bits(sums[2 * half] + static_cast<double>(emulated::half_of(onto, 0))) |
        emulated::half_bits(sums[2 * half + 1] + static_cast<double>(emulated::half_of(onto, 1)))
            << 16;
  }
}
inline void mma_half_onto(std::uint32_t (&d)[2], const uint4& a, std::uint32_t b0, std::uint32_t b1,
                          std::uint32_t c) {
  const std::uint32_t both[2] = {c, c};
  mma_half_onto(d, a, b0, b1, both);
}
inline void mma_half(std::uint32_t (&c)[2], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  const std::uint32_t onto[2] = {c[0], c[1]};
  mma_half_onto(c, a, b0, b1, onto);
}
/// m16n8k8 of tf32: bits beyond the first ten of a fraction are not read.
inline void mma_tf32(float (&c)[4], const float4& a, float b0, float b1) {
  using Sums = std::array<float, 4>;
  const auto read = [](std::uint32_t bits) {
    return static_cast<double>(__uint_as_float(bits & ~0x1fffU));
  };
  const emulated::Operands mine{
      {__float_as_uint(a.x), __float_as_uint(a.y), __float_as_uint(a.z), __float_as_uint(a.w)},
      {__float_as_uint(b0), __float_as_uint(b1)}};
  const Sums d = emulated::together<Sums>("mma.tf32", mine, [&](const auto& in, auto& out) {
    emulated::multiply<8, double>(
        [&](int row, int k) {
          return read(in[static_cast<std::size_t>(row % 8 * 4 + k % 4)].a[row / 8 + 2 * (k / 4)]);
        },
        [&](int k, int column) {
          return read(in[static_cast<std::size_t>(column * 4 + k % 4)].b[k / 4]);
        },
        [&](int lane, int half, int column, double sum) {
          out[static_cast<std::size_t>(lane)][static_cast<std::size_t>(2 * half + column)] =
              static_cast<float>(sum);
        });
  });
  for (std::size_t i = 0; i < 4; ++i) c[i] += d[i];
}
inline float beyond_tf32(float value) {
  return value - __uint_as_float(__float_as_uint(value) & ~0x1fffU);
}
/// ldmatrix: four 8 x 8 matrices of 16-bit elements, transposed or not; lane 8 m + i names row i of
/// matrix m.
template <bool transposes>
uint4 load_matrices(const std::uint16_t* row) {
  using Words = std::array<std::uint32_t, 4>;
  const Words words = emulated::together<Words>("ldmatrix", row, [](const auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto at = [&](int i, int j) {
          return static_cast<std::uint32_t>(in[static_cast<std::size_t>(8 * matrix + i)][j]);
        };
        const int g = lane / 4, t = 2 * (lane % 4);
        out[static_cast<std::size_t>(lane)][static_cast<std::size_t>(matrix)] =
            transposes ? at(t, g) | at(t + 1, g) << 16 : at(g, t) | at(g, t + 1) << 16;
      }
    }
  });
  return {words[0], words[1], words[2], words[3]};
}
/// m16n8k32 of unsigned and signed bytes.
inline void mma_codes(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                      std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  using Sums = std::array<int, 4>;
  const Sums d = emulated::together<Sums>(
      "mma.s8", emulated::Operands{{a0, a1, a2, a3}, {b0, b1}}, [](const auto& in, auto& out) {
        const auto byte = [](std::uint32_t word, int k) { return word >> (8 * (k % 4)) & 0xffU; };
        emulated::multiply<32, int>(
            [&](int row, int k) {
              return static_cast<int>(byte(
                  in[static_cast<std::size_t>(row % 8 * 4 + k % 16 / 4)].a[row / 8 + 2 * (k / 16)],
                  k));
            },
            [&](int k, int column) {
              return static_cast<int>(static_cast<std::int8_t>(
                  byte(in[static_cast<std::size_t>(column * 4 + k % 16 / 4)].b[k / 16], k)));
            },
            [&](int lane, int half, int column, int sum) {
              out[static_cast<std::size_t>(lane)][static_cast<std::size_t>(2 * half + column)] =
                  sum;
            });
      });
  for (std::size_t i = 0; i < 4; ++i) c[i] += d[i];
}
inline void mma_codes_new(int (&c)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                          std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  for (int& sum : c) sum = 0;
  mma_codes(c, a0, a1, a2, a3, b0, b1);
}
template <DType type>
std::uint32_t split_in_two(float weight) {
  const float high = round_to(type, weight);
  const auto bits = [](float value) {
    return static_cast<std::uint32_t>(type == DType::f16 ? to_half(value).bits
                                                         : to_bfloat16(value).bits);
  };
  return bits(high) | bits(weight - high) << 16;
}
inline float column_max(float x) {
  for (const int distance : {4, 8, 16}) x = std::max(x, __shfl_xor_sync(~0U, x, distance));
  return x;
}
inline float column_sum(float x) {
  for (const int distance : {4, 8, 16}) x += __shfl_xor_sync(~0U, x, distance);
  return x;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
