// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/frequent_directions.cuh  Frequent Directions on the device: rows enter a
/// sequence's sketches, and the end of a chunk gives new bases (method and source:
/// cpu/frequent_directions.hpp).
///
/// One block a sketch; one launch for all heads, keys and values, and sequences of a batch.
/// Singular vectors come from one-sided Jacobi rotations of the buffered rows (cost and floor:
/// cuda/epochs/jacobi.cuh).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/epochs/jacobi.cuh"
#include "lowrankkv/cuda/update/adapt.cuh"
#include "lowrankkv/cuda/update/publish_on_device.cuh"
#include "lowrankkv/updater/frequent_directions.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The rows that enter sketches, and when a chunk ends.
struct SketchSteps {
  std::int32_t slots[kAdaptBatch];
  std::int32_t first[kAdaptBatch];  ///< row of the source
  std::int32_t count[kAdaptBatch];  ///< 0: nothing happens
  RowOrder order;                   ///< null: rows first, first + 1, ...
  std::int64_t chunk_length = 0;
  float share = 2.0F;            ///< sketch rows per rank
  float threshold_scale = 1.0F;  ///< 0: every batch ends a chunk
  /// True: a launch that only notes in `above` which heads have a key or a value above its
  /// threshold.
  bool measures = false;
  /// [sequences, heads]: ends chunks of keys and values alike. Null: each part has its own.
  std::int32_t* above = nullptr;
};

namespace detail {

/// Subtracts the mean, if there is one, from rows [count, stride]. A row whose squares could
/// overflow becomes zeros: it must not reach a basis. All threads call it and are synchronised at
/// the end.
__device__ inline void centre_rows(float* rows, int count, int dim, int stride, const float* mean) {
  constexpr float most = 1e18F;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < count; row += kSketchThreads / 32) {
    bool small = true;
    for (int channel = lane; channel < dim; channel += 32) {
      float& x = rows[row * stride + channel];
      x -= mean == nullptr ? 0.0F : mean[channel];
      small = small && fabsf(x) <= most;
    }
    if (__all_sync(~0U, small) != 0) continue;
    for (int channel = lane; channel < dim; channel += 32) rows[row * stride + channel] = 0.0F;
  }
  __syncthreads();
}

/// Squared lengths of rows, and the order of rows by length, the longest first; of equal ones the
/// earlier row. All threads call it and are synchronised at the end.
__device__ inline void rank_rows(const float* rows, int count, int dim, int stride, float* lengths,
                                 std::int16_t* order) {
  measure_rows(rows, count, dim, stride, lengths);
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kSketchThreads) {
    int place = 0;
    for (int other = 0; other < count; ++other)
      place +=
          lengths[other] > lengths[row] || (lengths[other] == lengths[row] && other < row) ? 1 : 0;
    order[place] = static_cast<std::int16_t>(row);
  }
  __syncthreads();
}

/// The largest distance of rows [first, end) of a buffer from the span of a basis [rank, head_dim].
/// A warp takes three rows at a time.
/// @param basis  numbers of `type` as bits, or f32
/// @return to every lane, the largest distance of its warp's rows
template <int channels, class Number>
__device__ float largest_residual(const float* rows, int first, int end, int dim, int stride,
                                  const Number* basis, [[maybe_unused]] DType type, int rank) {
  constexpr int parts = channels / 32, together = 3, warps = kSketchThreads / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = 0.0F;
  for (int begin = first + static_cast<int>(threadIdx.x) / 32; begin < end;
       begin += together * warps) {
    float x[together][parts], rest[together][parts], sums[together];
#pragma unroll
    for (int row = 0; row < together; ++row) {
#pragma unroll
      for (int i = 0; i < parts; ++i)
        rest[row][i] = x[row][i] = begin + row * warps < end && lane + 32 * i < dim
                                       ? rows[(begin + row * warps) * stride + lane + 32 * i]
                                       : 0.0F;
    }
    const auto sum_over_lanes = [&] {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
        for (int row = 0; row < together; ++row)
          sums[row] += __shfl_xor_sync(~0U, sums[row], distance);
      }
    };
#pragma unroll 2
    for (int column = 0; column < rank; ++column) {
      float u[parts];
#pragma unroll
      for (int i = 0; i < parts; ++i) {
        u[i] = 0.0F;
        if (lane + 32 * i >= dim) continue;
        const Number number = basis[column * dim + lane + 32 * i];
        if constexpr (std::is_same_v<Number, float>)
          u[i] = number;
        else
          u[i] = from_bits(type, number);
      }
#pragma unroll
      for (int row = 0; row < together; ++row) {
        sums[row] = 0.0F;
#pragma unroll
        for (int i = 0; i < parts; ++i) sums[row] = fmaf(x[row][i], u[i], sums[row]);
      }
      sum_over_lanes();
#pragma unroll
      for (int row = 0; row < together; ++row) {
#pragma unroll
        for (int i = 0; i < parts; ++i) rest[row][i] = fmaf(-sums[row], u[i], rest[row][i]);
      }
    }
#pragma unroll
    for (int row = 0; row < together; ++row) {
      sums[row] = 0.0F;
#pragma unroll
      for (int i = 0; i < parts; ++i) sums[row] = fmaf(rest[row][i], rest[row][i], sums[row]);
    }
    sum_over_lanes();
#pragma unroll
    for (int row = 0; row < together; ++row) largest = fmaxf(largest, sqrtf(sums[row]));
  }
  return largest;
}

}  // namespace detail

/// @brief Adds rows to sketches. Where a chunk ends, the working basis becomes the sketch's top
/// directions, and begun[sequence] 1. If steps.measures, only steps.above is written. Grid: 2 x
/// heads x sequences.
/// @tparam channels  at least head_dim
/// @param buffers  [sequences, heads, 2, buffer rows, stride] where shared memory is too small;
/// else null
template <int channels>
__global__ void __launch_bounds__(kSketchThreads)
    sketch_kernel(LayerView tables, RowSource source, SketchSteps steps, Sketches sketches,
                  WorkingBases bases, BasisMetrics metrics, float* buffers, int buffer_rows,
                  std::int32_t* begun) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ detail::RowProducts products;
  __shared__ float lengths[kMaxSketchBuffer];
  __shared__ std::int16_t order[kMaxSketchBuffer];
  __shared__ float new_column[kMaxHeadDim];
  const Part part = blockIdx.x == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z),
            slot = steps.slots[sequence], dim = tables.head_dim,
            stride = detail::sketch_stride(dim), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32, warps = kSketchThreads / 32;
  const int2 active = steps.order.active(sequence, tables.num_heads, head, steps.count[sequence]);
  const int count = active.y - active.x, first_row = steps.first[sequence] + active.x;
  if (count == 0) return;
  const std::size_t which = static_cast<std::size_t>(head * 2 + static_cast<int>(part)),
                    own = static_cast<std::size_t>(slot * tables.num_heads * 2) + which;
  const PartMaps& maps = tables.maps[head].of(part);
  const int rank = maps.rank, limit = detail::sketch_rows(steps.share, rank);
  float* rows = buffers == nullptr ? reinterpret_cast<float*>(shared_memory)
                                   : buffers + (static_cast<std::size_t>(sequence) *
                                                    static_cast<std::size_t>(tables.num_heads * 2) +
                                                which) *
                                                   static_cast<std::size_t>(buffer_rows * stride);
  float* stored = sketches.rows + own * static_cast<std::size_t>(sketches.capacity * dim);
  const std::size_t basis_size = static_cast<std::size_t>(bases.most * dim),
                    element = bases.type == DType::f32 ? 4 : 2;
  std::uint8_t* basis = static_cast<std::uint8_t*>(bases.moved) + own * basis_size * element;
  SketchState& state = sketches.states[own];
  int held = steps.measures ? 0 : min(state.held, min(limit, dim));  // a loaded state may say more
  const std::int64_t chunk_rows = state.chunk_rows;
  const auto load_stored = [&] {
    for (int row = warp; row < held; row += warps) {
      for (int channel = 4 * lane; channel < dim; channel += 128)
        *reinterpret_cast<float4*>(rows + row * stride + channel) =
            *reinterpret_cast<const float4*>(stored + row * dim + channel);
    }
    __syncthreads();
  };
  // The buffered rows become diag(sqrt(sigma^2 - delta)) V^T, the longest first, in `stored`: at
  // most as many as a sketch may have.
  const auto compress = [&](bool shrinks) {
    detail::make_orthogonal<channels>(rows, held, dim, stride, lengths, products);
    detail::rank_rows(rows, held, dim, stride, lengths, order);
    const int most = min(limit, min(held, dim));
    const float delta = shrinks && held > limit && dim >= limit ? lengths[order[limit - 1]] : 0.0F;
    const float least = held > 0 ? fmaxf(delta, kNothing * lengths[order[0]]) : 0.0F;
    int longer = 0;
    for (int row = lane; row < held; row += 32) longer += lengths[row] > least ? 1 : 0;
    for (int distance = 16; distance > 0; distance /= 2)
      longer += __shfl_xor_sync(~0U, longer, distance);
    held = min(most, longer);
    for (int place = warp; place < held; place += warps) {
      const int row = order[place];
      const float factor = sqrtf(1.0F - delta / lengths[row]);
      for (int channel = lane; channel < dim; channel += 32)
        stored[place * dim + channel] = factor * rows[row * stride + channel];
    }
    __syncthreads();
  };
  load_stored();
  const SourceRows from(tables, source, slot, head);
  const std::int32_t* order_of_rows = steps.order.of(sequence, tables.num_heads, head);
  const float *mean = maps.mean, *metric = metrics.metric(part, head, dim),
              threshold = steps.threshold_scale * sketches.thresholds[which];
  std::int32_t* above =
      steps.above == nullptr ? nullptr : steps.above + sequence * tables.num_heads + head;
  bool exceeded =
           !(steps.threshold_scale > 0.0F) || (above != nullptr && !steps.measures && *above != 0),
       ends = false;
  for (int done = 0; done < count;) {
    const int taken = min(count - done, min(buffer_rows, 2 * limit) - held);
    from.load(part, order_of_rows, first_row + done, 0, taken, dim, rows + held * stride, stride);
    __syncthreads();
    detail::centre_rows(rows + held * stride, taken, dim, stride, mean);
    if (metric != nullptr) {
      __syncthreads();
      detail::rows_to_metric(rows + held * stride, taken, dim, stride, metric);
      __syncthreads();
      // Squares may overflow in the metric.
      detail::centre_rows(rows + held * stride, taken, dim, stride, nullptr);
    }
    const auto residual = [&](const auto* numbers) {
      return detail::largest_residual<channels>(rows, held, held + taken, dim, stride, numbers,
                                                bases.type, rank);
    };
    exceeded =
        exceeded || (bases.type == DType::f32
                         ? residual(reinterpret_cast<const float*>(basis))
                         : residual(reinterpret_cast<const std::uint16_t*>(basis))) > threshold;
    done += taken;
    if (steps.measures) {
      __syncthreads();  // the next rows take the place of these
      continue;
    }
    held += taken;
    if (done == count)
      ends = __syncthreads_or(exceeded ? 1 : 0) != 0 || chunk_rows + count >= steps.chunk_length;
    const bool shrinks = done < count || held > min(limit, dim);
    if (shrinks || ends) {
      compress(shrinks);
    } else {
      for (int item = thread; item < held * dim; item += kSketchThreads)
        stored[item] = rows[item / dim * stride + item % dim];
    }
    if (done < count) load_stored();
  }
  if (steps.measures) {
    if (exceeded && lane == 0) *above = 1;  // all blocks and warps write the same
    return;
  }
  if (thread == 0) state = {ends ? 0 : chunk_rows + count, held, 0};
  if (!ends) return;
  // The new basis has the directions of the longest rows. Each missing column is the unit vector
  // that is furthest from the columns before it, made orthogonal to them.
  const auto put = [&](int column, int channel, float value) {
    const int place = column * dim + channel;
    if (bases.type == DType::f32)
      reinterpret_cast<float*>(basis)[place] = value;
    else
      reinterpret_cast<std::uint16_t*>(basis)[place] = to_bits(bases.type, value);
  };
  load_stored();
  const int known = min(rank, held);
  detail::measure_rows(rows, known, dim, stride, lengths);
  __syncthreads();
  for (int column = warp; column < known; column += warps) {
    const float inverse = 1.0F / sqrtf(lengths[column]);  // stored rows have a length
    for (int channel = lane; channel < dim; channel += 32) {
      rows[column * stride + channel] *= inverse;
      put(column, channel, rows[column * stride + channel]);
    }
  }
  __syncthreads();
  for (int column = known; column < rank; ++column) {
    float* target = rows + column * stride;  // the buffer has room for a basis
    if (thread < dim) {
      float left = 1.0F;  // squared length of unit vector `thread`
      for (int before = 0; before < column; ++before)
        left = fmaf(-rows[before * stride + thread], rows[before * stride + thread], left);
      new_column[thread] = left;
    }
    __syncthreads();
    int furthest = 0;
    for (int channel = 1; channel < dim; ++channel)
      furthest = new_column[channel] > new_column[furthest] ? channel : furthest;
    __syncthreads();
    for (int round = 0; round < 2; ++round) {
      if (thread < dim)
        new_column[thread] = round > 0 ? target[thread] : thread == furthest ? 1.0F : 0.0F;
      __syncthreads();
      for (int before = warp; before < column; before += warps) {
        float dot = 0.0F;
        for (int channel = lane; channel < dim; channel += 32)
          dot = fmaf(rows[before * stride + channel], new_column[channel], dot);
        for (int distance = 16; distance > 0; distance /= 2)
          dot += __shfl_xor_sync(~0U, dot, distance);
        if (lane == 0) lengths[before] = dot;
      }
      __syncthreads();
      if (thread < dim) {
        float rest = new_column[thread];
        for (int before = 0; before < column; ++before)
          rest = fmaf(-lengths[before], rows[before * stride + thread], rest);
        target[thread] = rest;
      }
      __syncthreads();
    }
    float sum = 0.0F;
    for (int channel = 0; channel < dim; ++channel)
      sum = fmaf(target[channel], target[channel], sum);
    __syncthreads();
    if (thread < dim) {
      target[thread] /= sqrtf(sum);
      put(column, thread, target[thread]);
    }
    __syncthreads();
  }
  if (thread == 0) begun[sequence] = 1;  // all blocks of a sequence write the same
}

/// @brief Adds the flushed rows of at most kAdaptBatch sequences to their sketches. Where a chunk
/// ends, rows are stored under a new epoch from then on, and old ones may merge. While a merge is
/// in progress, the new epoch waits for its end. One launch, two if a key or a value ends the
/// chunks of both, and those of begin_epochs().
/// @param source  its row 0 is the first flushed row
/// @param order   of the rows that are compressed, if scores chose them
/// @param exempt  so many of every head's rows will stay full after all
/// @param before  rows of the prompt that are stored and that the host does not count yet
template <int coded_groups>
void roll_over(LayerState& layer, const FrequentDirections& policy, const FlushBatch& flushed,
               int first_sequence, int count, const RowSource& source, const RowOrder& order,
               int exempt, std::int32_t before, Phase phase, const CompressScratch& scratch,
               cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const DeviceEpochStore& device_epochs = layer.device_epochs();
  const unsigned heads = static_cast<unsigned>(tables.num_heads),
                 sequences = static_cast<unsigned>(count);
  SketchSteps steps{};
  steps.chunk_length = policy.chunk_length;
  steps.share = policy.sketch_share;
  steps.threshold_scale = policy.threshold_scale;
  steps.order = order;
  for (int i = 0; i < count; ++i) {
    const int from = first_sequence + i;
    steps.slots[i] = flushed.slots[from];
    steps.first[i] = order.rows == nullptr ? flushed.pinned[from] : 0;
    steps.count[i] = flushed.candidates(from);  // errors choose among them under the new basis
  }
  check(cudaMemsetAsync(scratch.rollover.begun, 0,
                        static_cast<std::size_t>(count) * sizeof(std::int32_t), stream),
        "roll_over");
  const auto launch = [&](auto* kernel) {
    float* buffers = layer.sketches_apart() ? scratch.sketch_buffers : nullptr;
    detail::launch_kernel(kernel, dim3(2, heads, sequences), kSketchThreads,
                          buffers == nullptr ? device_epochs.buffer_bytes() : 0, "sketch_kernel",
                          stream, tables, source, steps, device_epochs.sketches(),
                          layer.epochs().bases(), layer.epochs().metrics(), buffers,
                          device_epochs.buffer_rows(), scratch.rollover.begun);
  };
  const auto sketch = [&](auto* kernel) {
    if (policy.ends_both && policy.threshold_scale > 0.0F) {
      steps.above = scratch.rollover.above;
      check(cudaMemsetAsync(steps.above, 0, sequences * heads * sizeof(std::int32_t), stream),
            "roll_over");
      steps.measures = true;
      launch(kernel);
      steps.measures = false;
    }
    launch(kernel);
  };
  if (tables.head_dim <= 128)
    sketch(sketch_kernel<128>);
  else
    sketch(sketch_kernel<kMaxHeadDim>);
  begin_epochs<coded_groups>(layer, flushed, first_sequence, count, source, order, exempt, before,
                             1, phase, scratch, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
