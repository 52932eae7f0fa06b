// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/align_axes.cuh  Aligns bases that are about to be published to principal axes:
/// rotates each basis within its span to the principal axes of the rows that are written under it
/// first (cpu/fold_maps.hpp). Codes give the first channels more bits, and their steps follow how
/// large coefficients are.
///
/// With C the coefficients of n rows and, where their sizes (rms) are known, `rank` calibrated rows
/// besides:
///   G = C' C + rank diag(rms^2) = V L V'.
/// The axes are U V, largest first, and rms^2 = L / (n + rank). They are computed by one-sided
/// rotations: with G = R' R (Cholesky), rows of R U' become orthogonal (cuda/epochs/jacobi.cuh).
/// These rows are the axes, and their lengths are the roots of L. A millionth of G's largest
/// diagonal number is added to its diagonal, so that directions without rows become axes too. Sums
/// are f32. Cost: 2 head_dim^2 rank flops, and sweeps as of a sketch of `rank` rows.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/epochs/jacobi.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The rows whose principal axes are computed, by sequence of a launch.
struct AxisRows {
  std::int32_t count[kMaxBatch];
  RowOrder order;  ///< of a prompt's rows; its active range may be a part of them
};

/// @brief Scratch memory of align_axes().
struct AxisScratch {
  /// [sequence, head, part, most x head_dim]: G, then the axes before they are rotated into the
  /// codes' channels.
  float* products = nullptr;
  float* steps = nullptr;  ///< [sequence, head, part, most]: of the codes
  /// [sequence, head, part, rows, sketch_stride(head_dim)] where shared memory is too small; else
  /// null.
  float* buffers = nullptr;
};

inline constexpr int kAxisColumns = 16;  ///< columns of G of a block of axis_products_kernel
/// What is added to G's diagonal, as a share of its largest number.
inline constexpr float kAxisFloor = 1e-6F;

/// @brief G = U' M U [most, most] of each published basis; a block computes 16 columns. Grid:
/// blocks of columns x (heads x 2) x sequences.
/// @param moments  M [sequence, head, part, split, head_dim, head_dim] in the metric; the first of
/// `splits` has the sum
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    axis_products_kernel(LayerView tables, PublishedEpochs epochs, WorkingBases bases,
                         const float* moments, int splits, AxisScratch scratch) {
  static_assert(kStoreThreads >= kMaxHeadDim);
  __shared__ float columns[kAxisColumns][kMaxHeadDim], products[kMaxHeadDim][kAxisColumns];
  const int which = static_cast<int>(blockIdx.y), head = which / 2,
            sequence = static_cast<int>(blockIdx.z), dim = tables.head_dim,
            thread = static_cast<int>(threadIdx.x),
            first = static_cast<int>(blockIdx.x) * kAxisColumns;
  if (epochs.of(sequence) < 0) return;
  const int rank = tables.maps[head].of(which % 2 == 0 ? Part::key : Part::value).rank,
            count = min(kAxisColumns, rank - first);
  if (count <= 0) return;
  const std::size_t list = static_cast<std::size_t>(sequence * tables.num_heads * 2 + which);
  const float* moment =
      moments + list * static_cast<std::size_t>(splits) * static_cast<std::size_t>(dim * dim);
  for (int item = thread; item < kAxisColumns * dim; item += kStoreThreads)
    columns[item / dim][item % dim] =
        item / dim < count ? bases.element(epochs.slots[sequence], tables.num_heads, which,
                                           first + item / dim, item % dim, dim)
                           : 0.0F;
  __syncthreads();
  if (thread < dim) {
    float sums[kAxisColumns] = {};
    for (int k = 0; k < dim; ++k) {
      const float number = moment[k * dim + thread];  // symmetric
#pragma unroll
      for (int c = 0; c < kAxisColumns; ++c) sums[c] = fmaf(number, columns[c][k], sums[c]);
    }
#pragma unroll
    for (int c = 0; c < kAxisColumns; ++c) products[thread][c] = sums[c];
  }
  __syncthreads();
  if (thread >= rank) return;
  float sums[kAxisColumns] = {};
  for (int k = 0; k < dim; ++k) {
    const float number =
        bases.element(epochs.slots[sequence], tables.num_heads, which, thread, k, dim);
#pragma unroll
    for (int c = 0; c < kAxisColumns; ++c) sums[c] = fmaf(number, products[k][c], sums[c]);
  }
  float* target = scratch.products + list * static_cast<std::size_t>(bases.most * dim) +
                  thread * bases.most + first;
  for (int c = 0; c < count; ++c) target[c] = sums[c];
}

namespace detail {

/// The Cholesky factor L of a symmetric matrix [rank, stride], in place in its lower half. All
/// threads of a block call it.
/// @param column  [rank] in shared memory
/// @return whether the matrix is positive definite
__device__ inline bool factorise(float* matrix, int rank, int stride, float* column) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x),
            warp = thread / 32, lane = thread % 32;
  for (int k = 0; k < rank; ++k) {
    __syncthreads();
    const float pivot = matrix[k * stride + k];
    if (!(pivot > 0.0F) || !(pivot < INFINITY)) return false;  // the same in all threads
    const float root = sqrtf(pivot), inverse = 1.0F / root;
    for (int i = k + 1 + thread; i < rank; i += threads)
      column[i] = matrix[i * stride + k] * inverse;
    __syncthreads();
    for (int i = k + thread; i < rank; i += threads)
      matrix[i * stride + k] = i == k ? root : column[i];
    for (int i = k + 1 + warp; i < rank; i += threads / 32) {
      const float own = column[i];
      for (int j = k + 1 + lane; j <= i; j += 32)
        matrix[i * stride + j] = fmaf(-own, column[j], matrix[i * stride + j]);
    }
  }
  __syncthreads();
  return true;
}

}  // namespace detail

/// @brief Aligns the working bases of sequences to principal axes, in place, and writes the steps
/// of their codes. A basis without rows stays as it is, unless the rms of calibrated coefficients
/// is known; so does a basis whose rows are not finite. Grid: 2 x heads x sequences.
/// @tparam channels  at least head_dim
template <int channels>
__global__ void __launch_bounds__(kSketchThreads)
    align_axes_kernel(LayerView tables, PublishedEpochs epochs, WorkingBases bases,
                      AxisScales scales, AxisRows rows, AxisScratch scratch, int buffer_rows) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ float lengths[kMaxHeadDim], column[kMaxHeadDim];
  __shared__ std::int32_t places[kMaxHeadDim];
  __shared__ detail::RowProducts products;
  __shared__ float added;
  const Part part = blockIdx.x == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            which = AxisScales::which(part, head), dim = tables.head_dim,
            stride = detail::sketch_stride(dim), most = bases.most;
  if (epochs.of(sequence) < 0) return;
  const int2 active = rows.order.active(sequence, tables.num_heads, head, rows.count[sequence]);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            slot = epochs.slots[sequence], rank = tables.maps[head].of(part).rank,
            count = active.y - active.x;
  const std::size_t list = static_cast<std::size_t>(sequence * tables.num_heads * 2 + which);
  float* matrix = scratch.products + list * static_cast<std::size_t>(most * dim);
  float* axes = scratch.buffers == nullptr
                    ? reinterpret_cast<float*>(shared_memory)
                    : scratch.buffers + list * static_cast<std::size_t>(buffer_rows * stride);
  float* steps = scratch.steps + list * static_cast<std::size_t>(most);
  const float* rms = scales.rms == nullptr ? nullptr : scales.rms + which * most;
  if (thread < rank && rms != nullptr)
    matrix[thread * most + thread] += static_cast<float>(rank) * rms[thread] * rms[thread];
  __syncthreads();
  if (warp == 0) {
    float largest = 0.0F;
    for (int i = lane; i < rank; i += 32) largest = fmaxf(largest, matrix[i * most + i]);
    for (int distance = 16; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
    if (lane == 0) added = kAxisFloor * largest;
  }
  __syncthreads();
  if (thread < rank) matrix[thread * most + thread] += added;
  bool aligned = count > 0 || rms != nullptr;
  aligned = aligned && detail::factorise(matrix, rank, most, column);
  if (aligned) {
    for (int row = warp; row < rank; row += kSketchThreads / 32) {  // of R U'
      float sums[channels / 32] = {};
      for (int k = row; k < rank; ++k) {
        const float number = matrix[k * most + row];
#pragma unroll
        for (int i = 0; i < channels / 32; ++i) {
          if (lane + 32 * i < dim)
            sums[i] =
                fmaf(number, bases.element(slot, tables.num_heads, which, k, lane + 32 * i, dim),
                     sums[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < channels / 32; ++i) {
        if (lane + 32 * i < dim) axes[row * stride + lane + 32 * i] = sums[i];
      }
    }
    __syncthreads();
    detail::make_orthogonal<channels>(axes, rank, dim, stride, lengths, products);
    detail::measure_rows(axes, rank, dim, stride, lengths);
    __syncthreads();
    aligned = __syncthreads_and(thread >= rank ||
                                (lengths[thread] > 0.0F && lengths[thread] < INFINITY)) != 0;
  }
  if (thread < rank) {
    int place = 0;
    for (int other = 0; aligned && other < rank; ++other)
      place +=
          lengths[other] > lengths[thread] || (lengths[other] == lengths[thread] && other < thread)
              ? 1
              : 0;
    place = aligned ? place : thread;
    places[thread] = place;
    const float size = !aligned ? (rms == nullptr ? 1.0F : rms[thread])
                                : fmaxf(1e-20F, sqrtf(fmaxf(0.0F, lengths[thread] - added) /
                                                      static_cast<float>(count + rank)));
    const float unit = scales.units == nullptr ? 0.0F : scales.units[which * most + place];
    steps[place] = unit == 0.0F ? 1.0F : unit * size;
  }
  if (!aligned) return;
  __syncthreads();
  // The axes are written in order and normalised. Where codes want rotated axes, they go to
  // `matrix` first, which has room for them.
  const float* rotation = scales.rotations == nullptr
                              ? nullptr
                              : scales.rotations + static_cast<std::size_t>(which) *
                                                       static_cast<std::size_t>(most * most);
  for (int row = warp; row < rank; row += kSketchThreads / 32) {
    const float inverse = rsqrtf(lengths[row]);
    for (int channel = lane; channel < dim; channel += 32) {
      const float number = axes[row * stride + channel] * inverse;
      if (rotation == nullptr)
        bases.put(slot, tables.num_heads, which, places[row], channel, dim, number);
      else
        matrix[places[row] * dim + channel] = number;
    }
  }
  if (rotation == nullptr) return;
  __syncthreads();
  for (int row = warp; row < rank; row += kSketchThreads / 32) {
    float sums[channels / 32] = {};
    for (int k = 0; k < rank; ++k) {
      const float number = rotation[k * most + row];
      if (number == 0.0F) continue;  // the rotation has two diagonal blocks
#pragma unroll
      for (int i = 0; i < channels / 32; ++i) {
        if (lane + 32 * i < dim) sums[i] = fmaf(number, matrix[k * dim + lane + 32 * i], sums[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < channels / 32; ++i) {
      if (lane + 32 * i < dim)
        bases.put(slot, tables.num_heads, which, row, lane + 32 * i, dim, sums[i]);
    }
  }
}

/// @brief Static shared memory of align_axes_kernel, in bytes, at most.
inline constexpr std::size_t kAxisShared = 22528;

/// @brief Bytes of a buffer of align_axes_kernel.
inline std::size_t axis_buffer_bytes(int most, int head_dim) {
  return sizeof(float) *
         static_cast<std::size_t>(detail::buffered_rows(most) * detail::sketch_stride(head_dim));
}

/// @brief Aligns the bases that `count` sequences publish to principal axes, and writes them as the
/// maps of their epochs. Three launches.
/// @param moments  of the rows that are written under these bases first, in the metric; the first
/// of `splits` has the sum
template <class = void>
void align_axes(const LayerState& layer, const PublishedEpochs& published, int count,
                const float* moments, int splits, const AxisRows& rows, const AxisScratch& scratch,
                cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const EpochStore& store = layer.epochs();
  const unsigned heads = static_cast<unsigned>(tables.num_heads),
                 sequences = static_cast<unsigned>(count);
  const dim3 columns(static_cast<unsigned>((store.most() + kAxisColumns - 1) / kAxisColumns),
                     2 * heads, sequences);
  detail::launch_kernel(axis_products_kernel<>, columns, kStoreThreads, 0, "axis_products_kernel",
                        stream, tables, published, store.bases(), moments, splits, scratch);
  const std::size_t bytes = axis_buffer_bytes(store.most(), tables.head_dim);
  const auto align = [&](auto* kernel) {
    detail::launch_kernel(kernel, dim3(2, heads, sequences), kSketchThreads,
                          scratch.buffers == nullptr ? bytes : 0, "align_axes_kernel", stream,
                          tables, published, store.bases(), store.axes(), rows, scratch,
                          detail::buffered_rows(store.most()));
  };
  if (tables.head_dim <= 128)
    align(align_axes_kernel<128>);
  else
    align(align_axes_kernel<kMaxHeadDim>);
  publish_kernel<>
      <<<dim3(2, heads, sequences), kStoreThreads, 0, stream>>>(tables, store.bases(), published);
  check(cudaGetLastError(), "publish_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
