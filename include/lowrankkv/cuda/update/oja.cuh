// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/oja.cuh  Oja's rule on the device: K^T K of the observed rows, the step U <-
/// orth(U + eta s K^T K U) or a form that the paper prints, and U as an epoch's maps.
///
/// Symbols as in updater/oja.hpp; s = d / ||K||_F^2. One block a basis; one launch for all heads,
/// keys and values, and sequences of a batch.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/epochs/working_bases.cuh"
#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/tiles/tile_ring.cuh"
#include "lowrankkv/cuda/updater/oja.cuh"
#include "lowrankkv/updater/oja.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kMomentSide = 128;  ///< channels of a block of moment_kernel, both ways

/// @brief The rows that updaters observe, by sequence of the batch.
struct ObservedRows {
  RowOrder order;                 ///< null: rows first, first + 1, ...
  std::int32_t count[kMaxBatch];  ///< by sequence of the batch
  std::int32_t first[kMaxBatch];
  std::int32_t slots[kMaxBatch];
};

/// @brief Shared memory of moment_kernel in bytes.
inline std::size_t moment_bytes(int head_dim) {
  return sizeof(float) * static_cast<std::size_t>(kStoreRows * (head_dim + 8));
}
/// @brief Blocks of kMomentSide x kMomentSide channels that cover a moment.
constexpr int moment_blocks(int head_dim) {
  return (head_dim + kMomentSide - 1) / kMomentSide * ((head_dim + kMomentSide - 1) / kMomentSide);
}

namespace detail {

/// sums += X^T X of rows [16 steps, stride] of 16-bit numbers: channels [m0, m0 + 16) by channels
/// [n0, n0 + kMomentSide). Products are exact.
template <DType type>
__device__ __forceinline__ void add_moments(const std::uint16_t* rows, int stride, int steps,
                                            int m0, int n0, int dim,
                                            float (&sums)[kMomentSide / 8][4]) {
  for (int step = 0; step < steps; ++step) {
    const std::uint16_t* own = rows + step * kPlainRows * stride;
    const uint4 a = plain_words(Part::value, own, stride, m0 / kPlainUnit);
#pragma unroll
    for (int unit = 0; unit < kMomentSide / kPlainUnit; ++unit) {
      if (n0 + unit * kPlainUnit >= dim) break;
      const uint4 b = plain_words(Part::value, own, stride, n0 / kPlainUnit + unit);
      mma_plain<type>(sums[2 * unit], a, b.x, b.z);
      mma_plain<type>(sums[2 * unit + 1], a, b.y, b.w);
    }
  }
}

}  // namespace detail

/// @brief moments [sequence, head, part, split, head_dim, head_dim] = sum of (x - mean)^T (x -
/// mean) over a share of the observed rows, f32. Without a mean, rows are operands as they are;
/// centred rows are split into two tf32 numbers. Grid: (splits x blocks of channels) x (heads x 2)
/// x sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    moment_kernel(LayerView tables, RowSource source, ObservedRows observed, int splits,
                  float* moments) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* rows = reinterpret_cast<float*>(shared_memory);
  const int dim = tables.head_dim, stride = dim + 8, sides = (dim + kMomentSide - 1) / kMomentSide;
  const int split = static_cast<int>(blockIdx.x) % splits,
            quadrant = static_cast<int>(blockIdx.x) / splits,
            head = static_cast<int>(blockIdx.y) / 2, sequence = static_cast<int>(blockIdx.z);
  const Part part = blockIdx.y % 2 == 0 ? Part::key : Part::value;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4, slot = observed.slots[sequence];
  const int m0 = quadrant / sides * kMomentSide + 16 * warp, n0 = quadrant % sides * kMomentSide;
  const int2 active =
      observed.order.active(sequence, tables.num_heads, head, observed.count[sequence]);
  const int count = active.y - active.x, first_row = observed.first[sequence] + active.x,
            pieces = (count + kStoreRows - 1) / kStoreRows,
            per_split = (pieces + splits - 1) / splits;
  const float* mean = tables.maps[head].of(part).mean;
  const SourceRows from(tables, source, slot, head);
  const std::int32_t* order = observed.order.of(sequence, tables.num_heads, head);
  float sums[kMomentSide / 8][4] = {};
  for (int piece = split * per_split; piece < min(pieces, (split + 1) * per_split); ++piece) {
    const int first = piece * kStoreRows, used = min(kStoreRows, count - first);
    if (mean == nullptr) {
      std::uint16_t* stage = reinterpret_cast<std::uint16_t*>(shared_memory);
      const int stage_stride = plain_stride(dim), steps = (used + kPlainRows - 1) / kPlainRows;
      from.load(part, order, first_row + first, 0, used, dim, stage, stage_stride);
      for (int item = static_cast<int>(threadIdx.x); item < (steps * kPlainRows - used) * dim;
           item += kStoreThreads)
        stage[(used + item / dim) * stage_stride + item % dim] = 0;
      __syncthreads();
      if (m0 < dim) {
        if (tables.full_type == DType::f16)
          detail::add_moments<DType::f16>(stage, stage_stride, steps, m0, n0, dim, sums);
        else
          detail::add_moments<DType::bf16>(stage, stage_stride, steps, m0, n0, dim, sums);
      }
      __syncthreads();
      continue;
    }
    from.load(part, order, first_row + first, 0, used, dim, rows, stride);
    for (int item = static_cast<int>(threadIdx.x); item < (kStoreRows - used) * dim;
         item += kStoreThreads)
      rows[(used + item / dim) * stride + item % dim] = 0.0F;
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < used * dim; item += kStoreThreads)
      rows[item / dim * stride + item % dim] -= mean[item % dim];
    __syncthreads();
    for (int step = 0; step < (used + 7) / 8 && m0 < dim; ++step) {
      const float* low = rows + (8 * step + t) * stride + g;
      const float* high = low + 4 * stride;
      const float4 a = {low[m0], low[m0 + 8], high[m0], high[m0 + 8]};
      const float4 a_rest = {beyond_tf32(a.x), beyond_tf32(a.y), beyond_tf32(a.z),
                             beyond_tf32(a.w)};
#pragma unroll
      for (int n = 0; n < kMomentSide / 8; ++n) {
        if (n0 + 8 * n >= dim) break;
        const float b0 = low[n0 + 8 * n], b1 = high[n0 + 8 * n];
        mma_tf32(sums[n], a_rest, b0, b1);
        mma_tf32(sums[n], a, beyond_tf32(b0), beyond_tf32(b1));
        mma_tf32(sums[n], a, b0, b1);
      }
    }
    __syncthreads();
  }
  float* target =
      moments +
      (static_cast<std::size_t>((sequence * tables.num_heads + head) * 2 + static_cast<int>(part)) *
           static_cast<std::size_t>(splits) +
       static_cast<std::size_t>(split)) *
          static_cast<std::size_t>(dim * dim);
#pragma unroll
  for (int n = 0; n < kMomentSide / 8; ++n) {
    if (m0 >= dim || n0 + 8 * n >= dim) break;
    float* own = target + (m0 + g) * dim + n0 + 8 * n + 2 * t;
    *reinterpret_cast<float2*>(own) = {sums[n][0], sums[n][1]};
    *reinterpret_cast<float2*>(own + 8 * dim) = {sums[n][2], sums[n][3]};
  }
}

/// @brief What happens to the bases of each sequence of a batch.
struct OjaSteps {
  std::int32_t slots[kMaxBatch];
  float rate[kMaxBatch];  ///< negative: no step
  OjaRate of_steps;       ///< the rate after any number of steps, where the device counts them
  const SketchState* states = nullptr;  ///< [slots, heads, 2]: steps so far; null: `rate` holds
  std::int32_t epoch[kMaxBatch];        ///< in LayerView::maps, to be written; -1: none
  bool moved[kMaxBatch];                ///< the bases have moved before
  OjaForm form = OjaForm::power;
};

/// @brief Sums the splits of moments [matrices, splits, size], in order, into the first split.
/// Grid: pieces of 1024 numbers x matrices.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    sum_moments_kernel(float* moments, int splits, int size) {
  const int place = static_cast<int>(blockIdx.x) * kStoreThreads +
                    static_cast<int>(threadIdx.x);  // of four numbers
  if (4 * place >= size) return;
  float4* own = reinterpret_cast<float4*>(moments + static_cast<std::size_t>(blockIdx.y) *
                                                        static_cast<std::size_t>(splits) *
                                                        static_cast<std::size_t>(size)) +
                place;
  float4 sum = own[0];
#pragma unroll 8
  for (int split = 1; split < splits; ++split) {
    const float4 more = own[static_cast<std::size_t>(split) * static_cast<std::size_t>(size / 4)];
    sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
  }
  own[0] = sum;
}

/// @brief Threads of oja_kernel.
inline constexpr int kOjaThreads = 512;
/// @brief The most channels whose moment fits the shared memory of oja_kernel.
inline constexpr int kOjaKept = 128;
/// @brief Shared memory of oja_kernel in bytes.
inline std::size_t oja_bytes(int head_dim) {
  return head_dim <= kOjaKept ? sizeof(float) * static_cast<std::size_t>(head_dim * head_dim) : 0;
}

namespace detail {

/// The columns of a basis in the registers of a block. A warp has columns warp + kOjaThreads / 32
/// i, a lane channels lane + 32 q of them. All threads of the block call the functions.
/// @tparam columns  of a warp, at most
/// @tparam parts    channels of a lane in a column, at most
template <int columns, int parts>
struct BasisColumns {
  static constexpr int kWarps = kOjaThreads / 32;
  float x[columns][parts];

  /// The sum, over this warp, of products of two bases' numbers.
  __device__ float warp_dot(const BasisColumns& other) const {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
#pragma unroll
      for (int q = 0; q < parts; ++q) sum = fmaf(x[i][q], other.x[i][q], sum);
    }
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    return sum;
  }
  /// x <- a x + b other.
  __device__ __forceinline__ void mix(float a, float b, const BasisColumns& other) {
#pragma unroll
    for (int i = 0; i < columns; ++i) {
#pragma unroll
      for (int q = 0; q < parts; ++q) x[i][q] = fmaf(a, x[i][q], b * other.x[i][q]);
    }
  }
  /// x <- moment u; moment [dim, dim] is symmetric.
  __device__ __forceinline__ void multiply(const float* moment, const BasisColumns& u, int rank,
                                           int dim) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < columns; ++i) {
#pragma unroll
      for (int q = 0; q < parts; ++q) x[i][q] = 0.0F;
    }
#pragma unroll
    for (int from = 0; from < parts; ++from) {
#pragma unroll 4
      for (int k = 0; k < min(32, dim - 32 * from); ++k) {
        float m[parts];
#pragma unroll
        for (int q = 0; q < parts; ++q)
          m[q] = lane + 32 * q < dim ? moment[(32 * from + k) * dim + lane + 32 * q] : 0.0F;
#pragma unroll
        for (int i = 0; i < columns; ++i) {
          if (kWarps * i >= rank) break;
          const float other = __shfl_sync(~0U, u.x[i][from], k);
#pragma unroll
          for (int q = 0; q < parts; ++q) x[i][q] = fmaf(m[q], other, x[i][q]);
        }
      }
    }
  }
  /// Removes the component along a column of length 1 from the columns j of this warp for which
  /// wanted(j).
  template <class Wanted>
  __device__ __forceinline__ void remove(const float* column, int dim, Wanted&& wanted) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float done[parts];
#pragma unroll
    for (int q = 0; q < parts; ++q) done[q] = lane + 32 * q < dim ? column[lane + 32 * q] : 0.0F;
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      if (!wanted(j)) continue;
      float dot = 0.0F;
#pragma unroll
      for (int q = 0; q < parts; ++q) dot = fmaf(done[q], x[j][q], dot);
      for (int distance = 16; distance > 0; distance /= 2)
        dot += __shfl_xor_sync(~0U, dot, distance);
#pragma unroll
      for (int q = 0; q < parts; ++q) x[j][q] = fmaf(-dot, done[q], x[j][q]);
    }
  }
  /// Broadcasts the columns one after the other: the warp that has column i calls put(i, shared);
  /// then, after a barrier, all warps call seen(i, column, shared).
  /// @param buffers  two columns in shared memory
  template <class Put, class Seen>
  static __device__ __forceinline__ void pass_columns(int rank, float (&buffers)[2][kMaxHeadDim],
                                                      Put&& put, Seen&& seen) {
#pragma unroll
    for (int i = 0; i < columns; ++i) {
      for (int owner = 0; owner < kWarps; ++owner) {
        const int c = owner + kWarps * i;
        if (c >= rank) break;
        float* shared = buffers[c % 2];
        if (static_cast<int>(threadIdx.x) / 32 == owner) put(i, shared);
        __syncthreads();
        seen(i, c, shared);
      }
    }
  }
  /// Gram-Schmidt, one column after the other; the later columns are updated in registers.
  /// @param buffers  two columns in shared memory
  /// @param least    squared length that must remain of a column
  /// @return to this warp, whether its columns had more than that, and a finite length
  __device__ __forceinline__ bool orthonormalise(int rank, int dim,
                                                 float (&buffers)[2][kMaxHeadDim],
                                                 float least = 1e-12F) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    bool usable = true;
    const auto normalise = [&](int i, float* shared) {
      float norm = 0.0F;
#pragma unroll
      for (int q = 0; q < parts; ++q) norm = fmaf(x[i][q], x[i][q], norm);
      for (int distance = 16; distance > 0; distance /= 2)
        norm += __shfl_xor_sync(~0U, norm, distance);
      const float inverse = rsqrtf(norm);
      usable = usable && norm > least && norm < 3e38F;
#pragma unroll
      for (int q = 0; q < parts; ++q) {
        x[i][q] *= inverse;
        if (lane + 32 * q < dim) shared[lane + 32 * q] = x[i][q];
      }
    };
    pass_columns(rank, buffers, normalise, [&](int i, int c, const float* shared) {
      remove(shared, dim,
             [&](int j) { return j >= i && warp + kWarps * j > c && warp + kWarps * j < rank; });
    });
    return usable;
  }
  /// x <- (I - U U^T) x: removes the span of an orthonormal basis.
  __device__ void leave_space(const BasisColumns& u, int rank, int dim,
                              float (&buffers)[2][kMaxHeadDim]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const auto copy = [&](int i, float* shared) {
#pragma unroll
      for (int q = 0; q < parts; ++q) {
        if (lane + 32 * q < dim) shared[lane + 32 * q] = u.x[i][q];
      }
    };
    pass_columns(rank, buffers, copy, [&](int, int, const float* shared) {
      remove(shared, dim, [&](int j) { return warp + kWarps * j < rank; });
    });
    __syncthreads();
  }
};

/// The sum over all warps of a number that each warp has.
/// @param partial  [warps] in shared memory
__device__ inline float block_sum(float of_warp, float* partial) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0) partial[warp] = of_warp;
  __syncthreads();
  float total = 0.0F;
  for (int i = 0; i < kOjaThreads / 32; ++i) total += partial[i];
  __syncthreads();
  return total;
}

}  // namespace detail

/// @brief Moves bases, and publishes them. A basis stays as it is if its rows have no energy, or if
/// a column would vanish or not be finite. Grid: 2 x heads x sequences.
/// @tparam columns, parts  as of BasisColumns
/// @tparam printed  steps as the paper prints them (steps.form), not the power form
/// @param moments  of moment_kernel; the first of `splits` has the sum
template <int columns, int parts, bool printed>
__global__ void __launch_bounds__(kOjaThreads)
    oja_kernel(LayerView tables, OjaSteps steps, WorkingBases bases, const float* moments,
               int splits) {
  constexpr int kWarps = kOjaThreads / 32;
  constexpr bool keeps_moment = 32 * parts <= kOjaKept;
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* kept = reinterpret_cast<float*>(shared_memory);
  __shared__ float column[2][kMaxHeadDim];
  __shared__ float partial[kWarps];
  const Part part = blockIdx.x == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            slot = steps.slots[sequence], dim = tables.head_dim;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const PartMaps& calibrated = tables.maps[head].of(part);
  const int rank = calibrated.rank;
  const std::size_t basis_size =
                        static_cast<std::size_t>(bases.most) * static_cast<std::size_t>(dim),
                    which = static_cast<std::size_t>(head * 2 + static_cast<int>(part));
  const auto at = [&](const void* base, std::size_t index) {
    return bases.type == DType::f32
               ? static_cast<const float*>(base)[index]
               : from_bits(bases.type, static_cast<const std::uint16_t*>(base)[index]);
  };
  const std::size_t own_basis =
      (static_cast<std::size_t>(slot * tables.num_heads * 2) + which) * basis_size;
  const void* from = steps.moved[sequence] ? bases.moved : bases.start;
  const std::size_t offset = steps.moved[sequence] ? own_basis : which * basis_size;
  detail::BasisColumns<columns, parts> u{};
#pragma unroll
  for (int i = 0; i < columns; ++i) {
#pragma unroll
    for (int q = 0; q < parts; ++q) {
      const int c = warp + kWarps * i, d = lane + 32 * q;
      if (c < rank && d < dim) u.x[i][q] = at(from, offset + static_cast<std::size_t>(c * dim + d));
    }
  }
  if (steps.rate[sequence] >= 0.0F) {
    const float* moment =
        moments + (static_cast<std::size_t>(sequence * tables.num_heads * 2) + which) *
                      static_cast<std::size_t>(splits) * static_cast<std::size_t>(dim * dim);
    float trace = thread < dim ? moment[thread * (dim + 1)] : 0.0F;
    if constexpr (keeps_moment) {
      for (int place = thread; place < dim * dim / 4; place += kOjaThreads)
        reinterpret_cast<float4*>(kept)[place] = reinterpret_cast<const float4*>(moment)[place];
      moment = kept;
    }
    for (int distance = 16; distance > 0; distance /= 2)
      trace += __shfl_xor_sync(~0U, trace, distance);
    const float energy = detail::block_sum(trace, partial);
    if (energy > 0.0F && energy < 3e38F) {
      const float
          rate =
              steps.states == nullptr
                  ? steps.rate[sequence]
                  : steps.of_steps.after(
                        steps.states[static_cast<std::size_t>(slot * tables.num_heads * 2) + which]
                            .chunk_rows),
          per_energy = static_cast<float>(dim) / energy;
      if constexpr (printed) u.orthonormalise(rank, dim, column);  // storing it has rounded it
      detail::BasisColumns<columns, parts> pull;                   // K^T K U
      pull.multiply(moment, u, rank, dim);
      if constexpr (!printed) {
        const float keep = 1.0F / (1.0F + rate);
        pull.mix((1.0F - keep) * per_energy, keep, u);
        if (__syncthreads_and(pull.orthonormalise(rank, dim, column)) != 0) u = pull;
      } else {
        // f32 sums give the captured energy to about 1e-6.
        const bool raw = steps.form == OjaForm::printed_raw;
        const float before = 0.999998F * detail::block_sum(u.warp_dot(pull), partial);
        pull.leave_space(u, rank, dim, column);
        float step = rate * (raw ? 1.0F : per_energy);
        for (int attempt = 0; attempt < (raw ? 1 : 20); ++attempt, step *= 0.5F) {
          detail::BasisColumns<columns, parts> moved = u, again;
          // Scaled by this, columns have the same span, and numbers do not overflow.
          const float keep = 1.0F / (1.0F + step * energy);
          moved.mix(keep, keep * step, pull);
          // Columns of a large step are nearly parallel: the second pass removes what the first one
          // leaves.
          const bool usable =
              __syncthreads_and(moved.orthonormalise(rank, dim, column, 1e-6F * keep * keep)) != 0;
          if (__syncthreads_and(usable && moved.orthonormalise(rank, dim, column)) == 0) continue;
          if (!raw) {
            again.multiply(moment, moved, rank, dim);
            if (!(detail::block_sum(moved.warp_dot(again), partial) >= before)) continue;
          }
          u = moved;
          break;
        }
      }
    }
  }
  const auto put = [&](void* base, std::size_t index, float value) {
    if (bases.type == DType::f32)
      static_cast<float*>(base)[index] = value;
    else
      static_cast<std::uint16_t*>(base)[index] = to_bits(bases.type, value);
  };
  const PartMaps* target =
      steps.epoch[sequence] < 0
          ? nullptr
          : &tables.maps[steps.epoch[sequence] * tables.num_heads + head].of(part);
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    const int c = warp + kWarps * i;
    if (c >= rank) break;
    float shift = 0.0F;
#pragma unroll
    for (int q = 0; q < parts; ++q) {
      const int d = lane + 32 * q;
      if (d >= dim) continue;
      put(bases.moved, own_basis + static_cast<std::size_t>(c * dim + d), u.x[i][q]);
      if (target == nullptr) continue;
      put(const_cast<void*>(target->encoder.data),
          static_cast<std::size_t>(place_in_map(c, d, dim)), u.x[i][q]);
      if (target->mean != nullptr)
        shift =
            fmaf(target->mean[d],
                 bases.type == DType::f32 ? u.x[i][q]
                                          : from_bits(bases.type, to_bits(bases.type, u.x[i][q])),
                 shift);
    }
    for (int distance = 16; distance > 0; distance /= 2)
      shift += __shfl_xor_sync(~0U, shift, distance);
    if (target != nullptr && lane == 0) const_cast<float*>(target->offset)[c] = shift;
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
