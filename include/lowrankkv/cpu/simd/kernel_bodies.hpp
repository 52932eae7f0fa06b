// SPDX-License-Identifier: Apache-2.0
/// @file cpu/simd/kernel_bodies.hpp  The innermost loops of attention, written once for all
/// instruction sets. kernels.hpp includes this file once for each; alone it declares nothing.
///
/// LOWRANKKV_SIMD_LANES is the number of f32 in a register, LOWRANKKV_SIMD_X86 whether it has fused
/// products and conversions from f16 of x86. Vectors are the compiler's own (GCC, Clang): no header
/// of intrinsics, which would take a tenth of the time in which this library compiles. Three
/// instructions that compilers do not reliably find are written as such. Operands of these are
/// registers: loads stay visible to sanitizers.
///
/// Each logit, and each channel of an output, is one chain of sums over channels, or over rows, in
/// their order. So its bits do not depend on how many query rows, pieces or columns go together.
// No #pragma once: included several times.

#if defined(LOWRANKKV_SIMD_LANES)

/// f32 in a register.
inline constexpr int kLanes = LOWRANKKV_SIMD_LANES;
/// Registers of a piece of kPieceRows numbers.
inline constexpr int kParts = kPieceRows / kLanes;
/// Query rows that go over each loaded register together.
inline constexpr int kRows = LOWRANKKV_SIMD_ROWS;
/// Query rows of the loops for a single one. Fewer bodies compile faster: it is 1 where that pays.
inline constexpr int kAlone = kRows < 4 ? kRows : 1;
/// Pieces of keys that are read together, and registers of values.
inline constexpr int kPieces = LOWRANKKV_SIMD_PIECES;
static_assert(kPieces <= kPiecesTogether);
inline constexpr int kColumns = kPieces * kParts;
/// Registers of the compiler's vector types.
using Floats __attribute__((vector_size(4 * LOWRANKKV_SIMD_LANES))) = float;
using Ints __attribute__((vector_size(4 * LOWRANKKV_SIMD_LANES))) = std::int32_t;
using Bits __attribute__((vector_size(4 * LOWRANKKV_SIMD_LANES))) = std::uint32_t;
using Halves __attribute__((vector_size(2 * LOWRANKKV_SIMD_LANES))) = std::uint16_t;

LOWRANKKV_SIMD_INLINE Floats broadcast(float x) { return x - Floats{}; }
LOWRANKKV_SIMD_INLINE Floats load(const float* at) {
  Floats x;
  __builtin_memcpy(&x, at, sizeof x);
  return x;
}
LOWRANKKV_SIMD_INLINE void store(float* at, Floats x) { __builtin_memcpy(at, &x, sizeof x); }

/// a b + c, rounded once where the instruction set can.
LOWRANKKV_SIMD_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if LOWRANKKV_SIMD_X86
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
#else
  return a * b + c;
#endif
}
/// The larger one; x if either is not a number.
LOWRANKKV_SIMD_INLINE Floats larger(Floats a, Floats x) {
#if LOWRANKKV_SIMD_X86
  __asm__("vmaxps %1, %2, %0" : "=v"(a) : "v"(x), "v"(a));
  return a;
#else
  const Ints keep = a > x;
  return (Floats)(((Ints)a & keep) | ((Ints)x & ~keep));
#endif
}

/// kLanes numbers of a type from `at` on, as f32; exact.
template <Stored type>
LOWRANKKV_SIMD_INLINE Floats read(const std::byte* at) {
  if constexpr (type == Stored::f32) {
    Floats x;
    __builtin_memcpy(&x, at, sizeof x);
    return x;
  } else {
    Halves halves;
    __builtin_memcpy(&halves, at, sizeof halves);
    if constexpr (type == Stored::f16) {
#if LOWRANKKV_SIMD_X86
      Floats x;
      __asm__("vcvtph2ps %1, %0" : "=v"(x) : "v"(halves));
      return x;
#else
      // As to_float() of core/scalar.hpp.
      const Bits wide = __builtin_convertvector(halves, Bits);
      const Bits magnitude = (wide & 0x7fffU) << 13;
      const Bits special = (Bits)(magnitude >= 0x0f800000U);
      const Bits scaled = (Bits)((Floats)magnitude * 0x1p112F);
      return (Floats)((wide & 0x8000U) << 16 | (special & (0x7f800000U | magnitude)) |
                      (~special & scaled));
#endif
    } else {
      return (Floats)(__builtin_convertvector(halves, Bits) << 16);
    }
  }
}

/// Logits of M query rows and P pieces of keys: rows `query`, pieces from `piece` on.
/// @param rows  how many of the M are asked for; the last one stands in for the others
template <Stored type, int M, int P>
void logits_of(const KeyBlock& keys, int piece, const float* query, std::ptrdiff_t query_stride,
               int rows, float* logits, std::ptrdiff_t logit_stride) {
  constexpr std::ptrdiff_t size = bytes_of(type);
  constexpr int N = P * kParts;
  const std::byte* first[P];
  const std::byte* at[P];
  const std::byte* next[P];
  int counts[P];
  int whole = keys.channels;
  for (int p = 0; p < P; ++p) {
    const KeyPiece& own = keys.pieces[piece + p];
    at[p] = first[p] = own.first;
    next[p] = own.next;
    counts[p] = own.count;
    whole = own.whole_channels < whole ? own.whole_channels : whole;
  }
  const float* factors[M];
  for (int m = 0; m < M; ++m) factors[m] = query + (m < rows ? m : rows - 1) * query_stride;
  // One fetch for every 64 bytes of a line of channels.
  const int every = keys.channel_bytes < 64 ? static_cast<int>(64 / keys.channel_bytes) : 1;

  Floats sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = Floats{};
  }
  int until_fetch = 1;
  // The pointers of the last channels are to copies: after them at[p] is not used.
  std::byte copies[P][kPieceRows * size];
  for (int channel = 0; channel < keys.channels; ++channel) {
    const std::ptrdiff_t line = channel * keys.channel_bytes;
    if (--until_fetch == 0) {
      until_fetch = every;
      for (int p = 0; p < P; ++p) __builtin_prefetch(next[p] + line, 0, 2);
    }
    if (channel >= whole) {  // the end of the memory that holds the rows: not a byte beyond them
      for (int p = 0; p < P; ++p) {
        __builtin_memset(copies[p], 0, sizeof copies[p]);
        __builtin_memcpy(copies[p], first[p] + line, static_cast<std::size_t>(counts[p] * size));
        at[p] = copies[p];
      }
    }
    Floats key[N];
    for (int n = 0; n < N; ++n) key[n] = read<type>(at[n / kParts] + n % kParts * kLanes * size);
    for (int p = 0; p < P; ++p) at[p] += keys.channel_bytes;
    for (int m = 0; m < M; ++m) {
      const Floats factor = broadcast(factors[m][channel]);
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(factor, key[n], sum[m][n]);
    }
  }
  for (int m = 0; m < M; ++m) {
    if (m >= rows) continue;
    for (int p = 0; p < P; ++p) {  // a piece of fewer rows writes on, where the next one follows
      float* target = logits + m * logit_stride + keys.pieces[piece + p].column;
      for (int n = 0; n < kParts; ++n) store(target + n * kLanes, sum[m][p * kParts + n]);
    }
  }
}

/// See Kernels::logits.
template <Stored type>
void logits(const KeyBlock& keys, const float* query, std::ptrdiff_t query_stride, int rows,
            float* out, std::ptrdiff_t stride) {
  for (int piece = 0; piece < keys.num_pieces;) {
    const int pieces = keys.num_pieces - piece >= kPieces ? kPieces : 1;
    for (int row = 0; row < rows;) {
      const int together = rows - row >= kRows ? kRows : rows - row;
      const float* factors = query + row * query_stride;
      float* target = out + row * stride;
      if (pieces < kPieces)
        logits_of<type, kRows, 1>(keys, piece, factors, query_stride, together, target, stride);
      else if (together > 1)
        logits_of<type, kRows, kPieces>(keys, piece, factors, query_stride, together, target,
                                        stride);
      else
        logits_of<type, kAlone, kPieces>(keys, piece, factors, query_stride, 1, target, stride);
      row += together;
    }
    piece += pieces;
  }
}

/// Adds weights times values to M rows of accumulators, N registers of them.
/// @param rows  how many of the M rows are asked for
template <Stored type, int M, int N>
void weighted_sum_of(const ValueBlock& values, int column, const float* weights,
                     std::ptrdiff_t weight_stride, int rows, float* sums,
                     std::ptrdiff_t sum_stride) {
  constexpr std::ptrdiff_t size = bytes_of(type);
  const float* factors[M];
  float* targets[M];
  for (int m = 0; m < M; ++m) {
    const int own = m < rows ? m : rows - 1;
    factors[m] = weights + own * weight_stride;
    targets[m] = sums + own * sum_stride + column;
  }
  Floats sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = load(targets[m] + n * kLanes);
  }
  const std::ptrdiff_t offset = column * size;
  for (int i = 0; i < values.num_runs; ++i) {
    const ValueRun& run = values.runs[i];
    const std::byte* at = run.first + offset;
    const std::byte* next = run.next + offset;
    for (int row = 0; row < run.count; ++row) {
      for (int line = 0; line < N * kLanes * static_cast<int>(size); line += 64)
        __builtin_prefetch(next + line, 0, 2);
      Floats value[N];
      for (int n = 0; n < N; ++n) value[n] = read<type>(at + n * kLanes * size);
      for (int m = 0; m < M; ++m) {
        const Floats factor = broadcast(factors[m][row]);
        for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(factor, value[n], sum[m][n]);
      }
      at += values.row_bytes;
      next += values.row_bytes;
    }
    for (int m = 0; m < M; ++m) factors[m] += run.count;
  }
  for (int m = 0; m < M; ++m) {
    if (m >= rows) continue;
    for (int n = 0; n < N; ++n) store(targets[m] + n * kLanes, sum[m][n]);
  }
}

/// weighted_sum_of for all columns of `rows` rows, M at a time.
template <Stored type, int M>
void weighted_columns(const ValueBlock& values, const float* weights, std::ptrdiff_t weight_stride,
                      int rows, float* sums, std::ptrdiff_t sum_stride) {
  int column = 0;
  for (; column + kColumns * kLanes <= values.width; column += kColumns * kLanes)
    weighted_sum_of<type, M, kColumns>(values, column, weights, weight_stride, rows, sums,
                                       sum_stride);
  if constexpr (kPieces >= 4 && M > 1) {
    for (; column + 2 * kPieceRows <= values.width; column += 2 * kPieceRows)
      weighted_sum_of<type, M, 2 * kParts>(values, column, weights, weight_stride, rows, sums,
                                           sum_stride);
  }
  if constexpr (kPieces > 1) {
    for (; column < values.width; column += kPieceRows)
      weighted_sum_of<type, M, kParts>(values, column, weights, weight_stride, rows, sums,
                                       sum_stride);
  }
}

/// See Kernels::weighted_sum.
template <Stored type>
void weighted_sum(const ValueBlock& values, const float* weights, std::ptrdiff_t weight_stride,
                  int rows, float* sums, std::ptrdiff_t sum_stride) {
  for (int row = 0; row < rows;) {
    const int together = rows - row >= kRows ? kRows : rows - row;
    const float* factors = weights + row * weight_stride;
    float* target = sums + row * sum_stride;
    if (together > 1)
      weighted_columns<type, kRows>(values, factors, weight_stride, together, target, sum_stride);
    else
      weighted_columns<type, kAlone>(values, factors, weight_stride, 1, target, sum_stride);
    row += together;
  }
}

/// e^x for x <= 0; 0 below -88. Relative error below 2^-22 where e^x is normal.
///
/// x = n ln 2 + r with n the nearest integer, in two parts of ln 2; e^r = 1 + r + r^2 g(r), whose g
/// of degree 4 has the least largest relative error, 3.2e-9, found by reweighted least squares.
LOWRANKKV_SIMD_INLINE Floats exponential(Floats x) {
  x = larger(broadcast(-88.0F), x);  // there n is -127, and the factor 2^n zero
  const Ints n = __builtin_convertvector(multiply_add(x, broadcast(1.44269504F), broadcast(-0.5F)),
                                         Ints);  // towards zero: x <= 0
  const Floats whole = __builtin_convertvector(n, Floats);
  Floats r = multiply_add(whole, broadcast(-0.693359375F), x);
  r = multiply_add(whole, broadcast(2.12194440e-4F), r);
  Floats g = multiply_add(broadcast(0.001381432F), r, broadcast(0.008368851F));
  g = multiply_add(g, r, broadcast(0.0416684F));
  g = multiply_add(g, r, broadcast(0.1666652F));
  g = multiply_add(g, r, broadcast(0.49999994F));
  g = multiply_add(g * r, r, r + 1.0F);
  return g * (Floats)((n + 127) << 23);
}

/// See Kernels::largest.
inline float largest(float* line, int count, float bias) {
  constexpr float lowest = -__builtin_inff();
  Floats top = broadcast(lowest);
  const Floats shift = broadcast(bias);
  for (int i = count; i % kPieceRows != 0; ++i) line[i] = lowest;
  for (int i = 0; i < count; i += kLanes) {
    Floats x = load(line + i);
    if (bias != 0.0F) {
      x += shift;
      store(line + i, x);
    }
    top = larger(top, x);
  }
  float lanes[kLanes];
  store(lanes, top);
  float result = lanes[0];
  for (int i = 1; i < kLanes; ++i) result = lanes[i] < result ? result : lanes[i];
  return result;
}

/// See Kernels::exponentials.
inline float exponentials(float* line, int count, int width, float top) {
  const Floats shift = broadcast(top);
  for (int i = count; i % kPieceRows != 0; ++i) line[i] = -__builtin_inff();
  const int padded_count = (count + kPieceRows - 1) / kPieceRows * kPieceRows;
  Floats sum = Floats{}, other = Floats{};  // two chains; a whole piece has an even number of parts
  for (int i = 0; i < padded_count; i += kPieceRows) {
    for (int part = 0; part < kParts; ++part) {
      const Floats weight = exponential(load(line + i + part * kLanes) - shift);
      store(line + i + part * kLanes, weight);
      ((i / kPieceRows + part) % 2 == 0 ? sum : other) += weight;
    }
  }
  for (int i = padded_count; i < width; ++i) line[i] = 0.0F;
  float lanes[kLanes];
  store(lanes, sum + other);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

/// See Kernels::to_f32.
template <Stored type>
void convert(const std::byte* numbers, std::ptrdiff_t count, float* target) {
  std::ptrdiff_t i = 0;
  constexpr std::ptrdiff_t size = bytes_of(type);
  for (; i + kLanes <= count; i += kLanes) store(target + i, read<type>(numbers + i * size));
  if (i == count) return;
  std::byte copy[kLanes * size] = {};
  float last[kLanes];
  __builtin_memcpy(copy, numbers + i * size, static_cast<std::size_t>((count - i) * size));
  store(last, read<type>(copy));
  __builtin_memcpy(target + i, last, static_cast<std::size_t>(count - i) * sizeof(float));
}

/// Rotates kLanes columns of a pair: x and y by the angle (cosine, sine) plus those of the line.
LOWRANKKV_SIMD_INLINE void rotate_lanes(float* x, float* y, Floats cosine, Floats sine,
                                        const float* line_cosines, const float* line_sines) {
  const Floats c = load(line_cosines), s = load(line_sines);
  const Floats cosines = multiply_add(cosine, c, -(sine * s));
  const Floats sines = multiply_add(sine, c, cosine * s);
  const Floats from = load(x), with = load(y);
  store(x, multiply_add(from, cosines, -(with * sines)));
  store(y, multiply_add(with, cosines, from * sines));
}

/// See Kernels::rotate.
inline void rotate(const RotatedPairs& numbers) {
  const int whole = numbers.count / kLanes * kLanes, rest = numbers.count - whole;
  const std::size_t size = static_cast<std::size_t>(rest) * sizeof(float);
  for (int pair = 0; pair < numbers.pairs; ++pair) {
    float* x = numbers.first + pair * numbers.stride;
    float* y = x + numbers.to_second;
    const float* cosines = numbers.line_cosines + pair * numbers.line_stride;
    const float* sines = numbers.line_sines + pair * numbers.line_stride;
    const Floats cosine = broadcast(numbers.cosines[pair]), sine = broadcast(numbers.sines[pair]);
    for (int i = 0; i < whole; i += kLanes)
      rotate_lanes(x + i, y + i, cosine, sine, cosines + i, sines + i);
    if (rest == 0) continue;
    float copies[2][kLanes] = {};
    __builtin_memcpy(copies[0], x + whole, size);
    __builtin_memcpy(copies[1], y + whole, size);
    rotate_lanes(copies[0], copies[1], cosine, sine, cosines + whole, sines + whole);
    __builtin_memcpy(x + whole, copies[0], size);
    __builtin_memcpy(y + whole, copies[1], size);
  }
}

#define LOWRANKKV_SIMD_COMPILED(type)                                                          \
  LOWRANKKV_COMPILED_TEMPLATE(void logits<type>(const KeyBlock&, const float*, std::ptrdiff_t, \
                                                int, float*, std::ptrdiff_t))                  \
  LOWRANKKV_COMPILED_TEMPLATE(void weighted_sum<type>(                                         \
      const ValueBlock&, const float*, std::ptrdiff_t, int, float*, std::ptrdiff_t))
LOWRANKKV_SIMD_COMPILED(Stored::f32)
LOWRANKKV_SIMD_COMPILED(Stored::f16)
LOWRANKKV_SIMD_COMPILED(Stored::bf16)
#undef LOWRANKKV_SIMD_COMPILED

#include "lowrankkv/cpu/simd/code_kernel_bodies.hpp"

/// The table of this instruction set.
inline constexpr Kernels kKernels{
    LOWRANKKV_SIMD_NAME,
    {logits<Stored::f32>, logits<Stored::f16>, logits<Stored::bf16>},
    {weighted_sum<Stored::f32>, weighted_sum<Stored::f16>, weighted_sum<Stored::bf16>},
    largest,
    exponentials,
    {convert<Stored::f32>, convert<Stored::f16>, convert<Stored::bf16>},
    rotate,
    code_logits,
    code_tile,
    code_sum};

#endif  // defined(LOWRANKKV_SIMD_LANES)
