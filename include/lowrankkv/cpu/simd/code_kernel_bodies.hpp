// SPDX-License-Identifier: Apache-2.0
/// @file cpu/simd/code_kernel_bodies.hpp  The innermost loops of attention over packed codes,
/// written once for all instruction sets. kernel_bodies.hpp includes this file; alone it declares
/// nothing.
///
/// A register holds the codes of one channel in consecutive rows. They are unpacked, multiplied
/// with a channel of several query rows (or with their weights) and never stored. A row's scale is
/// common to the channels of a block: it multiplies the sum over channels, or the row's weight.
///
/// For AVX-512 and AVX2 alone: without shifts and shuffles of each lane's own, codes are unpacked
/// to tiles of f32, once for all query rows.
// No #pragma once: included several times.

#if defined(LOWRANKKV_SIMD_LANES)
#if LOWRANKKV_SIMD_X86

/// How codes are unpacked. `narrow`: of few bits, kLanes of them in eight bytes, looked up in a
/// register; `bytes`: 8 bits; `wide`: all others.
enum class Codes : unsigned char { narrow, wide, bytes };
/// The most bits of narrow codes whose first one begins at a byte, and at any bit.
inline constexpr int kNarrowBits = kLanes == 16 ? 4 : 3;
inline constexpr int kNarrowAnywhere = 3;
/// Channels of values that are summed together.
inline constexpr int kCodeChannels = kLanes == 16 ? 4 : 2;

/// Constants that unpack kLanes codes of a width, the first of which begins at bit `from` of a
/// byte.
struct CodeLanes {
  std::uint8_t bytes[4 * kLanes] = {};  ///< the two bytes that hold a lane's code
  std::int32_t shift[kLanes] = {};      ///< of the code's lowest bit in them
  constexpr CodeLanes() = default;
  constexpr CodeLanes(int bits, int from) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int bit = from + lane * bits;
      bytes[4 * lane] = static_cast<std::uint8_t>(bit / 8);
      bytes[4 * lane + 1] = static_cast<std::uint8_t>((bit / 8 + 1) % 16);
      bytes[4 * lane + 2] = bytes[4 * lane + 3] = 0x80;  // zero
      shift[lane] = bit % 8;
    }
  }
};
/// Those of every width and first bit, and what codes stand for.
struct CodeTable {
  CodeLanes lanes[9][8];
  float levels[9][16] = {};  ///< of a number whose lowest bits are a code
  constexpr CodeTable() {
    for (int bits = 1; bits <= 8; ++bits) {
      const float middle = 0.5F - static_cast<float>(1U << (bits - 1));
      for (int i = 0; i < 16; ++i)
        levels[bits][i] = static_cast<float>(i & ((1 << bits) - 1)) + middle;
      for (int from = 0; from < 8; ++from)
        lanes[bits][from] = CodeLanes(bits, bits == 8 ? 0 : from);
    }
  }
};
/// The one of this instruction set.
inline constexpr CodeTable kCodeTable;

/// Where the code of lane 0 of a channel's line is: a byte, and a bit in it. They may lie before
/// the line.
LOWRANKKV_SIMD_INLINE std::ptrdiff_t byte_of(int row, int bits) { return (row * bits) >> 3; }
LOWRANKKV_SIMD_INLINE const CodeLanes& lanes_of(int row, int bits) {
  return kCodeTable.lanes[bits][(row * bits) & 7];
}

/// Unpacks kLanes codes of a channel: levels q - 2^(b-1) + 1/2, exact.
template <Codes kind>
struct Unpack {
  using Longs __attribute__((vector_size(4 * LOWRANKKV_SIMD_LANES))) = std::uint64_t;
  using Pair __attribute__((vector_size(16))) = std::uint64_t;
  Bits mask;
  Floats levels;
  int bits;

  LOWRANKKV_SIMD_INLINE explicit Unpack(int width) : bits(width) {
    mask = Bits{} + ((1U << width) - 1U);
    const float* own = kCodeTable.levels[width];
    levels = kind == Codes::narrow ? load(own) : broadcast(own[0]);
  }

  /// Codes [part kLanes, part kLanes + kLanes) of a piece, lane 0 of which is in the byte at `at`.
  LOWRANKKV_SIMD_INLINE Floats operator()(const std::byte* at, int part, Bits bytes,
                                          Bits shift) const {
    at += part * bits;  // part is 0, or eight codes further on
    Bits codes;
    if constexpr (kind == Codes::bytes) {
      Pair pair = {};
      __builtin_memcpy(&pair, at, kLanes);
      __asm__("vpmovzxbd %1, %0" : "=v"(codes) : "v"(pair));
      return __builtin_convertvector((Ints)codes, Floats) + levels;
    }
    if constexpr (kind == Codes::wide && kLanes == 16) {
      Pair pair;
      __builtin_memcpy(&pair, at, sizeof pair);
      __asm__("vshufi64x2 $0, %g1, %g1, %0" : "=v"(codes) : "v"(pair));
    } else {
      std::uint64_t word;
      __builtin_memcpy(&word, at, sizeof word);
      codes = (Bits)(Longs{} + word);
    }
    Bits own;
    __asm__("vpshufb %2, %1, %0" : "=v"(own) : "v"(codes), "v"(bytes));
    own >>= shift;
    if constexpr (kind == Codes::narrow) {
      Floats result;
      __asm__("vpermps %1, %2, %0" : "=v"(result) : "v"(levels), "v"(own));
      return result;
    } else {
      return __builtin_convertvector((Ints)(own & mask), Floats) + levels;
    }
  }
};

/// Calls call(kind, run) with how the codes of a run are unpacked, a constant, for each run.
/// @tparam narrow_bits  the most bits of codes that are looked up
template <int narrow_bits, class Call>
LOWRANKKV_SIMD_INLINE void for_each_run(const CodeBlock& block, const Call& call) {
  for (int i = 0; i < block.num_runs; ++i) {
    const CodeRun& run = block.runs[i];
    if (run.bits == 8)
      call(std::integral_constant<Codes, Codes::bytes>{}, run);
    else if (run.bits <= narrow_bits)
      call(std::integral_constant<Codes, Codes::narrow>{}, run);
    else
      call(std::integral_constant<Codes, Codes::wide>{}, run);
  }
}

/// Whether the kCodeBytes bytes at `at` lie in the block of a piece.
LOWRANKKV_SIMD_INLINE bool lie_in(const CodePiece& piece, const std::byte* at) {
  return at >= piece.block && piece.end - at >= kCodeBytes;
}
/// kCodeBytes bytes from `at` on, zero outside the block: not a byte beyond it.
LOWRANKKV_SIMD_INLINE const std::byte* copy_codes(const CodePiece& piece, const std::byte* at,
                                                  std::byte* copy) {
  const std::byte* first = at < piece.block ? piece.block : at;
  const std::byte* last = piece.end - at < kCodeBytes ? piece.end : at + kCodeBytes;
  __builtin_memset(copy, 0, kCodeBytes);
  __builtin_memcpy(copy + (first - at), first, static_cast<std::size_t>(last - first));
  return copy;
}

/// Adds scale times logit to those of M query rows and P pieces of keys, for the channels of a run.
/// @param rows  how many of the M rows are asked for; the last one stands in for the others
template <Codes kind, int M, int P>
void code_logits_of(const CodeBlock& keys, const CodeRun& run, int piece, const float* query,
                    std::ptrdiff_t query_stride, int rows, float* logits,
                    std::ptrdiff_t logit_stride) {
  constexpr int N = P * kParts;
  const CodePiece* pieces = keys.pieces + piece;
  const Unpack<kind> unpack(run.bits);
  const CodeLanes& lanes = kCodeTable.lanes[run.bits][0];
  Bits bytes, shift;
  __builtin_memcpy(&bytes, lanes.bytes, sizeof bytes);
  __builtin_memcpy(&shift, lanes.shift, sizeof shift);
  const std::byte* at[P];
  for (int p = 0; p < P; ++p)
    at[p] = pieces[p].block + run.first + byte_of(pieces[p].row, run.bits);
  const std::byte* next = pieces[0].next + run.first + byte_of(pieces[0].next_row, run.bits);
  const float* factors[M];
  for (int m = 0; m < M; ++m)
    factors[m] = query + (m < rows ? m : rows - 1) * query_stride + run.channel;
  Floats sum[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) sum[m][n] = Floats{};
  }
  const auto add = [&](int channel, const std::byte* const* from) __attribute__((always_inline)) {
    Floats key[N];
    for (int n = 0; n < N; ++n) key[n] = unpack(from[n / kParts], n % kParts, bytes, shift);
    for (int m = 0; m < M; ++m) {
      const Floats factor = broadcast(factors[m][channel]);
      for (int n = 0; n < N; ++n) sum[m][n] = multiply_add(factor, key[n], sum[m][n]);
    }
  };
  int whole = run.count;  // channels of which kCodeBytes bytes of every piece lie in its block
  for (int p = 0; p < P; ++p) {
    while (whole > 0 && !lie_in(pieces[p], at[p] + (whole - 1) * run.line_bytes)) --whole;
  }
  for (int channel = 0; channel < whole; ++channel) {
    __builtin_prefetch(next, 0, 2);
    next += run.line_bytes;
    add(channel, at);
    for (int p = 0; p < P; ++p) at[p] += run.line_bytes;
  }
  for (int channel = whole; channel < run.count; ++channel) {
    std::byte copies[P][kCodeBytes];
    const std::byte* from[P];
    for (int p = 0; p < P; ++p)
      from[p] = copy_codes(pieces[p], at[p] + (channel - whole) * run.line_bytes, copies[p]);
    add(channel, from);
  }
  for (int m = 0; m < M && m < rows; ++m) {
    for (int p = 0; p < P; ++p) {
      const CodePiece& own = pieces[p];
      float* target = logits + m * logit_stride + own.column;
      const float* scales = keys.scales + own.column;
      if (own.count == kPieceRows) {
        for (int n = 0; n < kParts; ++n)
          store(target + n * kLanes, multiply_add(load(scales + n * kLanes), sum[m][p * kParts + n],
                                                  load(target + n * kLanes)));
        continue;
      }
      float lines[kPieceRows], factor[kPieceRows] = {}, result[kPieceRows] = {};
      const std::size_t size = static_cast<std::size_t>(own.count) * sizeof(float);
      __builtin_memcpy(factor + own.begin, scales, size);
      __builtin_memcpy(result + own.begin, target, size);
      for (int n = 0; n < kPieceRows; n += kLanes) {
        store(lines + n, sum[m][p * kParts + n / kLanes]);
        store(result + n, multiply_add(load(factor + n), load(lines + n), load(result + n)));
      }
      __builtin_memcpy(target, result + own.begin, size);
    }
  }
}

/// code_logits_of for all pieces and query rows, and one run.
template <Codes kind>
void code_logits_of_run(const CodeBlock& keys, const CodeRun& run, const float* query,
                        std::ptrdiff_t query_stride, int rows, float* out, std::ptrdiff_t stride) {
  for (int piece = 0; piece < keys.num_pieces;) {
    const int pieces = keys.num_pieces - piece >= kPieces ? kPieces : 1;
    for (int row = 0; row < rows; row += kRows) {
      const int together = rows - row >= kRows ? kRows : rows - row;
      const float* factors = query + row * query_stride;
      float* target = out + row * stride;
      if (pieces < kPieces)
        code_logits_of<kind, kRows, 1>(keys, run, piece, factors, query_stride, together, target,
                                       stride);
      else
        code_logits_of<kind, kRows, kPieces>(keys, run, piece, factors, query_stride, together,
                                             target, stride);
    }
    piece += pieces;
  }
}

/// See Kernels::code_logits.
inline void code_logits(const CodeBlock& keys, const float* query, std::ptrdiff_t query_stride,
                        int rows, float* out, std::ptrdiff_t stride) {
  for_each_run<kNarrowBits>(keys, [&](auto kind, const CodeRun& run) {
    code_logits_of_run<decltype(kind)::value>(keys, run, query, query_stride, rows, out, stride);
  });
}

/// Unpacks the channels of a run to a tile.
template <Codes kind>
void code_tile_of_run(const CodeBlock& keys, const CodeRun& run, float* tile,
                      std::ptrdiff_t stride) {
  const Unpack<kind> unpack(run.bits);
  const CodeLanes& lanes = kCodeTable.lanes[run.bits][0];
  Bits bytes, shift;
  __builtin_memcpy(&bytes, lanes.bytes, sizeof bytes);
  __builtin_memcpy(&shift, lanes.shift, sizeof shift);
  for (int p = 0; p < keys.num_pieces; ++p) {
    const CodePiece& piece = keys.pieces[p];
    const std::size_t size = static_cast<std::size_t>(piece.count) * sizeof(float);
    float scales[kPieceRows] = {}, line[kPieceRows];
    __builtin_memcpy(scales + piece.begin, keys.scales + piece.column, size);
    Floats scale[kParts];
    for (int n = 0; n < kParts; ++n) scale[n] = load(scales + n * kLanes);
    const std::byte* at = piece.block + run.first + byte_of(piece.row, run.bits);
    float* target = tile + run.channel * stride + piece.column;
    for (int channel = 0; channel < run.count; ++channel) {
      std::byte copy[kCodeBytes];
      const std::byte* from = lie_in(piece, at) ? at : copy_codes(piece, at, copy);
      float* to = piece.count == kPieceRows ? target : line;
      for (int n = 0; n < kParts; ++n)
        store(to + n * kLanes, unpack(from, n, bytes, shift) * scale[n]);
      if (piece.count < kPieceRows) __builtin_memcpy(target, line + piece.begin, size);
      at += run.line_bytes;
      target += stride;
    }
  }
}

/// See Kernels::code_tile.
inline void code_tile(const CodeBlock& keys, float* tile, std::ptrdiff_t stride) {
  for_each_run<kNarrowBits>(keys, [&](auto kind, const CodeRun& run) {
    code_tile_of_run<decltype(kind)::value>(keys, run, tile, stride);
  });
}

/// The sum of a register's numbers, which were stored, by halves.
LOWRANKKV_SIMD_INLINE float total(const float* lines) {
  using Quad __attribute__((vector_size(16))) = float;
  Quad parts[kLanes / 4];
  __builtin_memcpy(parts, lines, sizeof parts);
  Quad quad = parts[0] + parts[1];
  if constexpr (kLanes == 16) quad += parts[2] + parts[3];
  return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

/// Adds weights times levels to C channels of `rows` rows of sums, at most kRows, from channel
/// `channel` of the run on. C = 1: pieces of which kCodeBytes bytes do not lie in their block are
/// copied.
/// @param weights  [kRows, num_pieces kPieceRows], times the scales of their rows; 0 in lanes that
/// are not wanted
template <Codes kind, int C>
void code_sum_of(const CodeBlock& values, const CodeRun& run, int channel, const float* weights,
                 int rows, float* sums, std::ptrdiff_t sum_stride) {
  const std::ptrdiff_t weight_stride = values.num_pieces * kPieceRows;
  const Unpack<kind> unpack(run.bits);
  const std::ptrdiff_t line = run.first + channel * run.line_bytes;
  Floats sum[kRows][C] = {};
  for (int p = 0; p < values.num_pieces; ++p) {
    const CodePiece& piece = values.pieces[p];
    const CodeLanes& lanes = lanes_of(piece.row, run.bits);
    Bits bytes, shift;
    __builtin_memcpy(&bytes, lanes.bytes, sizeof bytes);
    __builtin_memcpy(&shift, lanes.shift, sizeof shift);
    const std::byte* at = piece.block + line + byte_of(piece.row, run.bits);
    std::byte copy[kCodeBytes];
    if (C == 1 && !lie_in(piece, at)) at = copy_codes(piece, at, copy);
    if (p % 4 == 0) {  // 64 rows of 8 bits fill 64 bytes
      const std::byte* next = piece.next + line + byte_of(piece.next_row, run.bits);
      for (int c = 0; c < C; ++c) __builtin_prefetch(next + c * run.line_bytes, 0, 2);
    }
    Floats value[C * kParts];
    for (int n = 0; n < C * kParts; ++n)
      value[n] = unpack(at + n / kParts * run.line_bytes, n % kParts, bytes, shift);
    for (int m = 0; m < kRows; ++m) {
      const float* own = weights + m * weight_stride + p * kPieceRows;
      for (int n = 0; n < C * kParts; ++n)
        sum[m][n / kParts] =
            multiply_add(load(own + n % kParts * kLanes), value[n], sum[m][n / kParts]);
    }
  }
  float lines[kRows][C][kLanes];
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < C; ++c) store(lines[m][c], sum[m][c]);
  }
  for (int m = 0; m < kRows && m < rows; ++m) {
    float* target = sums + m * sum_stride + run.channel + channel;
    for (int c = 0; c < C; ++c) target[c] += total(lines[m][c]);
  }
}

/// code_sum_of for all channels of a run.
template <Codes kind>
void code_sum_of_run(const CodeBlock& values, const CodeRun& run, const float* weights, int rows,
                     float* sums, std::ptrdiff_t sum_stride) {
  // Channels of which kCodeBytes bytes of every piece lie in its block.
  int first = 0, last = run.count;
  for (int p = 0; p < values.num_pieces; ++p) {
    const CodePiece& piece = values.pieces[p];
    const std::byte* at = piece.block + run.first + byte_of(piece.row, run.bits);
    while (last > 0 && piece.end - at < (last - 1) * run.line_bytes + kCodeBytes) --last;
    while (first < last && at + first * run.line_bytes < piece.block) ++first;
  }
  for (int channel = 0; channel < run.count;) {
    if (channel >= first && channel + kCodeChannels <= last) {
      code_sum_of<kind, kCodeChannels>(values, run, channel, weights, rows, sums, sum_stride);
      channel += kCodeChannels;
    } else {
      code_sum_of<kind, 1>(values, run, channel++, weights, rows, sums, sum_stride);
    }
  }
}

/// code_sum_of for all channels of a block and `rows` query rows, at most kRows.
inline void code_sum_of_rows(const CodeBlock& values, const float* weights,
                             std::ptrdiff_t weight_stride, int rows, float* sums,
                             std::ptrdiff_t sum_stride) {
  static_assert(kRows * kPieceRows <= kCodeScratch);
  // Weights times scales, in the pieces' lanes.
  float* scaled = values.scratch;
  for (int m = 0; m < kRows; ++m) {
    for (int p = 0; p < values.num_pieces; ++p) {
      const CodePiece& piece = values.pieces[p];
      float* target = scaled + (m * values.num_pieces + p) * kPieceRows;
      const float* own = weights + (m < rows ? m : 0) * weight_stride + piece.column;
      const float* scales = values.scales + piece.column;
      if (m < rows && piece.count == kPieceRows) {
        for (int i = 0; i < kPieceRows; i += kLanes)
          store(target + i, load(own + i) * load(scales + i));
        continue;
      }
      for (int i = 0; i < kPieceRows; i += kLanes) store(target + i, Floats{});
      for (int i = 0; m < rows && i < piece.count; ++i)
        target[piece.begin + i] = own[i] * scales[i];
    }
  }
  for_each_run<kNarrowAnywhere>(values, [&](auto kind, const CodeRun& run) {
    code_sum_of_run<decltype(kind)::value>(values, run, scaled, rows, sums, sum_stride);
  });
}

/// See Kernels::code_sum.
inline void code_sum(const CodeBlock& values, const float* weights, std::ptrdiff_t weight_stride,
                     int rows, float* sums, std::ptrdiff_t sum_stride) {
  for (int row = 0; row < rows; row += kRows)
    code_sum_of_rows(values, weights + row * weight_stride, weight_stride,
                     rows - row >= kRows ? kRows : rows - row, sums + row * sum_stride, sum_stride);
}

#define LOWRANKKV_SIMD_COMPILED(kind)                                                          \
  LOWRANKKV_COMPILED_TEMPLATE(void code_logits_of_run<kind>(const CodeBlock&, const CodeRun&,  \
                                                            const float*, std::ptrdiff_t, int, \
                                                            float*, std::ptrdiff_t))           \
  LOWRANKKV_COMPILED_TEMPLATE(                                                                 \
      void code_tile_of_run<kind>(const CodeBlock&, const CodeRun&, float*, std::ptrdiff_t))   \
  LOWRANKKV_COMPILED_TEMPLATE(void code_sum_of_run<kind>(                                      \
      const CodeBlock&, const CodeRun&, const float*, int, float*, std::ptrdiff_t))
LOWRANKKV_SIMD_COMPILED(Codes::narrow)
LOWRANKKV_SIMD_COMPILED(Codes::wide)
LOWRANKKV_SIMD_COMPILED(Codes::bytes)
#undef LOWRANKKV_SIMD_COMPILED

#else
inline constexpr decltype(Kernels::code_logits) code_logits = nullptr;
inline constexpr decltype(Kernels::code_tile) code_tile = nullptr;
inline constexpr decltype(Kernels::code_sum) code_sum = nullptr;
#endif
#endif  // defined(LOWRANKKV_SIMD_LANES)
