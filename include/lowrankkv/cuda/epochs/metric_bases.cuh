// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/metric_bases.cuh  Bases that move in a metric R of keys or values
/// (basis/per_head.hpp): moments in the metric, and the maps of a basis U.
///
/// Updaters see rows as (x - mean) R, so that their moments are R M R. A basis encodes by R U and
/// decodes by R^-1 U. R is symmetric; otherwise these two maps would not fit each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/cuda/epochs/working_bases.cuh"
#include "lowrankkv/cuda/maps/head_maps.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The metrics of a layer's heads, passed to kernels by value: R, then its inverse, in f32.
/// Null for a part in the plain metric.
struct BasisMetrics {
  const float* parts[2] = {};  ///< by Part: [heads, 2, head_dim, head_dim]

  __host__ __device__ bool any() const { return parts[0] != nullptr || parts[1] != nullptr; }
  __device__ const float* metric(Part part, int head, int head_dim) const {
    const float* all = parts[static_cast<int>(part)];
    return all == nullptr ? nullptr
                          : all + static_cast<std::size_t>(2 * head) *
                                      static_cast<std::size_t>(head_dim * head_dim);
  }
};

/// @brief The metrics of a layer's heads, owned.
class MetricStore {
 public:
  MetricStore() = default;
  explicit MetricStore(const LayerBasis& basis) {
    for (const Part part : {Part::key, Part::value}) {
      std::vector<float> values;
      for (const HeadBasis& head : basis.heads) {
        for (const std::vector<float>* matrix : {&metric(head, part), &inverse(head, part)})
          values.insert(values.end(), matrix->begin(), matrix->end());
      }
      checksum_ = ::lowrankkv::checksum(std::as_bytes(std::span(values)), checksum_);
      values_[static_cast<int>(part)] = DeviceArray<float>(values);
    }
  }
  BasisMetrics get() const { return {{values_[0].data(), values_[1].data()}}; }
  std::size_t bytes() const { return values_[0].bytes() + values_[1].bytes(); }
  /// @brief Checksum of the metrics.
  std::uint64_t checksum() const { return checksum_; }

  static const std::vector<float>& metric(const HeadBasis& head, Part part) {
    return part == Part::key ? head.key_metric : head.value_metric;
  }
  static const std::vector<float>& inverse(const HeadBasis& head, Part part) {
    return part == Part::key ? head.key_metric_inverse : head.value_metric_inverse;
  }
  /// @brief Whether a part has a metric: encoder and decoder are then two maps.
  static bool has_metric(const HeadBasis& head, Part part) { return !metric(head, part).empty(); }
  /// @brief The basis U [head_dim, rank] of a head, computed from its encoder R U.
  static std::vector<float> working_basis(const HeadBasis& head, Part part, int head_dim) {
    const std::vector<float>&down = part == Part::key ? head.key_down : head.value_down,
          &back = inverse(head, part);
    if (back.empty()) return down;
    const std::size_t dim = static_cast<std::size_t>(head_dim), rank = down.size() / dim;
    std::vector<float> basis(down.size());
    for (std::size_t row = 0; row < dim; ++row) {
      for (std::size_t column = 0; column < rank; ++column) {
        double sum = 0.0;
        for (std::size_t k = 0; k < dim; ++k)
          sum += static_cast<double>(back[row * dim + k]) *
                 static_cast<double>(down[k * rank + column]);
        basis[row * rank + column] = static_cast<float>(sum);
      }
    }
    return basis;
  }

 private:
  DeviceArray<float> values_[2];  // by Part
  std::uint64_t checksum_ = 0xcbf29ce484222325ULL;
};

namespace detail {

/// Columns of a moment that a thread block computes: two per warp.
inline constexpr int kMetricColumns = 16;
inline constexpr int kMetricThreads = 256;
inline constexpr int kMetricWarps = kMetricThreads / 32;

/// Adds x y to sums.
__device__ __forceinline__ void add_times(float4& sums, const float4& x, float y) {
  sums = {fmaf(x.x, y, sums.x), fmaf(x.y, y, sums.y), fmaf(x.z, y, sums.z), fmaf(x.w, y, sums.w)};
}

}  // namespace detail

/// @brief Bytes of shared memory of metric_moments_kernel.
inline std::size_t metric_bytes(int head_dim) {
  return 2 * sizeof(float) * static_cast<std::size_t>(head_dim * detail::kMetricColumns);
}

/// @brief Transforms moments to the metric: rotated [sequence, head, part, head_dim, head_dim] = R
/// M R, in f32, of the first of `splits` splits of the moments. In the plain metric a copy. Grid:
/// blocks of columns x (heads x 2) x sequences.
/// Matrices are symmetric, so their columns are read as rows: a lane loads four adjacent numbers of
/// a row, and its warp multiplies them by two columns of the other matrix.
template <class = void>
__global__ void __launch_bounds__(detail::kMetricThreads)
    metric_moments_kernel(BasisMetrics metrics, int dim, const float* moments, int splits,
                          float* rotated) {
  constexpr int columns = detail::kMetricColumns;
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  float* own = reinterpret_cast<float*>(shared_memory);  // columns of R, [dim, columns]
  float* half = own + dim * columns;                     // columns of M R, [dim, columns]
  const int thread = static_cast<int>(threadIdx.x), first = static_cast<int>(blockIdx.x) * columns,
            column = thread / 32 * 2, lane = thread % 32;
  const std::size_t which = static_cast<std::size_t>(blockIdx.z) * gridDim.y + blockIdx.y,
                    size = static_cast<std::size_t>(dim * dim);
  const float* moment = moments + which * static_cast<std::size_t>(splits) * size;
  const float* metric = metrics.metric(blockIdx.y % 2 == 0 ? Part::key : Part::value,
                                       static_cast<int>(blockIdx.y) / 2, dim);
  float* target = rotated + which * size + first;
  if (metric == nullptr) {
    for (int item = thread; item < dim * columns; item += detail::kMetricThreads)
      target[item / columns * dim + item % columns] =
          moment[item / columns * dim + first + item % columns];
    return;
  }
  for (int item = thread; item < dim * columns; item += detail::kMetricThreads)
    own[item] = __ldg(metric + item / columns * dim + first + item % columns);
  __syncthreads();
  // Rows of left times this warp's two columns of right; put(row, two sums) stores a row.
  const auto product = [&](const float* left, const float* right, auto&& put) {
    for (int row = 4 * lane; row < dim; row += 128) {
      float4 sums[2] = {};
#pragma unroll 8
      for (int k = 0; k < dim; ++k) {
        const float4 four = *reinterpret_cast<const float4*>(left + k * dim + row);
        const float2 two = *reinterpret_cast<const float2*>(right + k * columns + column);
        detail::add_times(sums[0], four, two.x);
        detail::add_times(sums[1], four, two.y);
      }
      put(row, float2{sums[0].x, sums[1].x});
      put(row + 1, float2{sums[0].y, sums[1].y});
      put(row + 2, float2{sums[0].z, sums[1].z});
      put(row + 3, float2{sums[0].w, sums[1].w});
    }
  };
  product(moment, own, [&](int row, const float2& two) {
    *reinterpret_cast<float2*>(half + row * columns + column) = two;
  });
  __syncwarp();  // a warp reads what it has written
  product(metric, half, [&](int row, const float2& two) {
    *reinterpret_cast<float2*>(target + row * dim + column) = two;
  });
}

/// @brief Writes working bases to the maps of the epochs that sequences publish: R U, R^-1 U and
/// the encoded mean. Skips parts in the plain metric. Each warp computes a column. Grid: (groups of
/// columns x 2) x heads x sequences.
template <class = void>
__global__ void __launch_bounds__(detail::kMetricThreads)
    metric_epochs_kernel(LayerView tables, BasisMetrics metrics, WorkingBases bases,
                         PublishedEpochs epochs) {
  __shared__ float columns[detail::kMetricWarps][kMaxHeadDim];
  const Part part = blockIdx.x % 2 == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), slot = epochs.slots[blockIdx.z],
            epoch = epochs.of(static_cast<int>(blockIdx.z)), dim = tables.head_dim;
  const float* metric = metrics.metric(part, head, dim);
  if (epoch < 0 || metric == nullptr) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            index = static_cast<int>(blockIdx.x) / 2 * detail::kMetricWarps + warp;
  const PartMaps& target = tables.maps[epoch * tables.num_heads + head].of(part);
  if (index >= target.rank) return;
  float* column = columns[warp];
  for (int channel = lane; channel < dim; channel += 32)
    column[channel] = bases.element(slot, tables.num_heads, 2 * head + static_cast<int>(part),
                                    index, channel, dim);
  __syncwarp();
  float shift = 0.0F;
  for (int channel = 4 * lane; channel < dim; channel += 128) {
    float4 encoded = {}, decoded = {};
#pragma unroll 8
    for (int k = 0; k < dim; ++k) {
      detail::add_times(encoded, __ldg(reinterpret_cast<const float4*>(metric + k * dim + channel)),
                        column[k]);
      detail::add_times(decoded,
                        __ldg(reinterpret_cast<const float4*>(metric + (dim + k) * dim + channel)),
                        column[k]);
    }
    const float encodes[4] = {encoded.x, encoded.y, encoded.z, encoded.w},
                decodes[4] = {decoded.x, decoded.y, decoded.z, decoded.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float stored = target.encoder.put(index, channel + i, dim, encodes[i]);
      target.decoder.put(index, channel + i, dim, decodes[i]);
      if (target.mean != nullptr) shift = fmaf(target.mean[channel + i], stored, shift);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2)
    shift += __shfl_xor_sync(~0U, shift, distance);
  if (lane == 0) const_cast<float*>(target.offset)[index] = shift;
}

namespace detail {

/// Replaces centred rows x [count, stride], f32 in shared memory, by x R. All warps of a block
/// share the work, three rows per warp at a time. The caller synchronises before and after.
__device__ inline void rows_to_metric(float* rows, int count, int dim, int stride,
                                      const float* metric) {
  constexpr int together = 3, parts = kMaxHeadDim / 128;
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = together * warp; first < count; first += together * warps) {
    float4 sums[together][parts] = {};
    const float* own[together];
#pragma unroll
    for (int row = 0; row < together; ++row) own[row] = rows + min(first + row, count - 1) * stride;
#pragma unroll 4
    for (int k = 0; k < dim; ++k) {
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        if (4 * lane + 128 * i >= dim) break;
        const float4 four =
            __ldg(reinterpret_cast<const float4*>(metric + k * dim + 4 * lane + 128 * i));
#pragma unroll
        for (int row = 0; row < together; ++row) add_times(sums[row][i], four, own[row][k]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < together; ++row) {
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        if (first + row < count && 4 * lane + 128 * i < dim)
          *reinterpret_cast<float4*>(rows + (first + row) * stride + 4 * lane + 128 * i) =
              sums[row][i];
      }
    }
    __syncwarp();
  }
}

}  // namespace detail

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
