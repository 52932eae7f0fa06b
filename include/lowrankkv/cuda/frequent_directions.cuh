// SPDX-License-Identifier: Apache-2.0
/// @file cuda/frequent_directions.cuh  Frequent Directions on the device: rows enter a sequence's sketches, and a chunk's end gives bases (cpu/frequent_directions.hpp says what and why).
///
/// One block a sketch, of all heads, keys and values, and sequences of a batch at once. Singular vectors by one-sided Jacobi rotations of the buffered rows, in f32: rows become orthogonal to
/// 1e-5 of their lengths, which holds for small singular values as for large ones. Cost: about seven sweeps of n (n - 1) / 2 rotations of rows of head_dim numbers, n = buffered rows.
/// Floor of a sweep: n / 2 - 1 times all rows through shared memory and back, at 128 bytes a cycle.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/adapt.cuh"
#include "lowrankkv/updater/frequent_directions.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kSketchThreads = 256;  ///< of a block of sketch_kernel
inline constexpr int kMaxSweeps = 16;        ///< of rotations; half are enough for most
inline constexpr float kNothing = 1e-11F;    ///< of the longest row's squared length: rows of less are what rounding leaves of rows that depend on others, and have no direction
inline constexpr float kOrthogonal = 1e-5F;  ///< cosine of rows that need no rotation: f32 leaves about 1e-6, a basis in f16 has 5e-4
inline constexpr float kSettled = 1e-3F;     ///< a sweep that met no larger cosine was the last: what it leaves are their products

/// @brief The rows that enter sketches, and when a chunk ends.
struct SketchSteps {
  std::int32_t slots[kAdaptBatch];
  std::int32_t first[kAdaptBatch];  ///< row of the source
  std::int32_t count[kAdaptBatch];  ///< 0: nothing happens
  std::int64_t chunk_length = 0;
  float share = 2.0F;               ///< sketch rows per rank
  float threshold_scale = 1.0F;     ///< 0: every batch ends a chunk
};

namespace detail {

/// Takes the mean, if there is one, out of rows [count, stride]. A row whose squares could overflow becomes zeros: it must not reach a basis. All threads call it and are synchronised at the end.
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

/// Some channels of a row in the registers of a lane.
template <int vectors>
struct RowShare {
  float4 x[vectors];

  /// Its share of a product of two rows.
  __device__ __forceinline__ float dot(const RowShare& other) const {
    float sum = 0.0F;
    #pragma unroll
    for (int i = 0; i < vectors; ++i) sum = fmaf(x[i].x, other.x[i].x, fmaf(x[i].y, other.x[i].y, fmaf(x[i].z, other.x[i].z, fmaf(x[i].w, other.x[i].w, sum))));
    return sum;
  }
};

/// Sum over the lanes that rotate rows together.
__device__ __forceinline__ float rotation_sum(float x) {
  #pragma unroll
  for (int distance = 1; distance < kRotationLanes; distance *= 2) x += __shfl_xor_sync(~0U, x, distance);
  return x;
}

/// Squared lengths of rows. The caller synchronises.
__device__ inline void measure_rows(const float* rows, int count, int dim, int stride, float* lengths) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = warp; row < count; row += kSketchThreads / 32) {
    float sum = 0.0F;
    for (int channel = lane; channel < dim; channel += 32) sum = fmaf(rows[row * stride + channel], rows[row * stride + channel], sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    if (lane == 0) lengths[row] = sum;
  }
}

/// Rotates rows a and b, c and d, of squared lengths aa to dd, so that each pair becomes orthogonal. Returns the larger cosine, 0 where both were; rows of no more than `nothing` count as if they were, since what
/// rounding leaves of rows that depend on others never is. Without branches: the lanes of a warp have different rows.
template <int vectors>
__device__ __forceinline__ float rotate_pairs(RowShare<vectors>& a, RowShare<vectors>& b, RowShare<vectors>& c, RowShare<vectors>& d, float& aa, float& bb, float& cc, float& dd, float nothing) {
  const float products[2] = {rotation_sum(a.dot(b)), rotation_sum(c.dot(d))};
  float largest = 0.0F;
  const auto rotate = [&](RowShare<vectors>& x, RowShare<vectors>& y, float& xx, float& yy, float xy) {
    const float cosine_before = fabsf(xy) * rsqrtf(xx) * rsqrtf(yy);
    const bool turns = fminf(xx, yy) > nothing && cosine_before > kOrthogonal;
    const float ratio = fminf(fmaxf(__fdividef(yy - xx, 2.0F * xy), -1e9F), 1e9F), square = fmaf(ratio, ratio, 1.0F);
    const float tangent = turns ? copysignf(__fdividef(1.0F, fabsf(ratio) + square * rsqrtf(square)), ratio) : 0.0F;
    const float secant = fmaf(tangent, tangent, 1.0F), near = rsqrtf(secant), cosine = near * fmaf(-0.5F * secant * near, near, 1.5F), sine = cosine * tangent;  // a step of Newton's: lengths stay
    const float moved = turns ? tangent * xy : 0.0F;
    xx = fmaxf(xx - moved, 0.0F);
    yy = fmaxf(yy + moved, 0.0F);
    const auto turn = [&](float& u, float& v) {
      const float before = u;
      u = fmaf(cosine, u, -sine * v);
      v = fmaf(sine, before, cosine * v);
    };
    #pragma unroll
    for (int i = 0; i < vectors; ++i) {
      turn(x.x[i].x, y.x[i].x);
      turn(x.x[i].y, y.x[i].y);
      turn(x.x[i].z, y.x[i].z);
      turn(x.x[i].w, y.x[i].w);
    }
    largest = turns ? fmaxf(largest, cosine_before) : largest;
  };
  rotate(a, b, aa, bb, products[0]);
  rotate(c, d, cc, dd, products[1]);
  return largest;
}

/// Rotates rows [count, stride] in pairs until all are orthogonal. All threads call it and are synchronised at the end.
/// Rows meet two by two: kRotationLanes lanes have four of them in registers, so that they are fetched once for four rotations.
/// @param lengths  of `count` numbers  @tparam vectors  times four channels that a lane has of a row, at most
template <int vectors>
__device__ void make_orthogonal(float* rows, int count, int dim, int stride, float* lengths) {
  const int group = static_cast<int>(threadIdx.x) / kRotationLanes, lane = static_cast<int>(threadIdx.x) % kRotationLanes, groups = kSketchThreads / kRotationLanes;
  const int twos = (count + 1) / 2, even = max(2, twos + twos % 2);
  RowShare<vectors> own[4];
  for (int sweep = 0; sweep < kMaxSweeps; ++sweep) {
    float largest = 0.0F;
    measure_rows(rows, count, dim, stride, lengths);  // rotations keep them up to date, but for rounding
    __syncthreads();
    float nothing = 0.0F;
    for (int row = 0; row < count; ++row) nothing = fmaxf(nothing, kNothing * lengths[row]);
    __syncthreads();
    for (int round = 0; round + 1 < even; ++round) {
      // Everybody meets everybody once: the first stays, the others go round.
      const auto player = [&](int place) { return place == 0 ? 0 : 1 + (place - 1 + round) % (even - 1); };
      for (int first = 0; first < even / 2; first += groups) {
        const int pair = first + group, a = pair < even / 2 ? player(pair) : twos, b = pair < even / 2 ? player(even - 1 - pair) : twos;
        const int numbers[4] = {2 * a, 2 * a + 1, 2 * b, 2 * b + 1};
        const auto share = [&](int row, int i) { return reinterpret_cast<float4*>(rows + numbers[row] * stride) + lane + kRotationLanes * i; };
        float squares[4];
        #pragma unroll
        for (int row = 0; row < 4; ++row) {
          squares[row] = numbers[row] < count ? lengths[numbers[row]] : 0.0F;
          #pragma unroll
          for (int i = 0; i < vectors; ++i) own[row].x[i] = numbers[row] < count && 4 * (lane + kRotationLanes * i) < dim ? *share(row, i) : float4{};
        }
        float turned = 0.0F;
        if (round == 0) turned = rotate_pairs(own[0], own[1], own[2], own[3], squares[0], squares[1], squares[2], squares[3], nothing);
        turned = fmaxf(turned, rotate_pairs(own[0], own[2], own[1], own[3], squares[0], squares[2], squares[1], squares[3], nothing));
        turned = fmaxf(turned, rotate_pairs(own[0], own[3], own[1], own[2], squares[0], squares[3], squares[1], squares[2], nothing));
        largest = fmaxf(largest, turned);
        __syncwarp();  // all lanes have read the lengths that one of them writes
        #pragma unroll
        for (int row = 0; row < 4; ++row) {
          if (turned == 0.0F || numbers[row] >= count) continue;
          #pragma unroll
          for (int i = 0; i < vectors; ++i) {
            if (4 * (lane + kRotationLanes * i) < dim) *share(row, i) = own[row].x[i];
          }
          if (lane == 0) lengths[numbers[row]] = squares[row];
        }
      }
      __syncthreads();
    }
    if (__syncthreads_or(largest > kSettled) == 0) return;
  }
}

/// Squared lengths of rows, and their places by length: the longest first, of equal ones the first. All threads call it and are synchronised at the end.
__device__ inline void rank_rows(const float* rows, int count, int dim, int stride, float* lengths, std::int16_t* order) {
  measure_rows(rows, count, dim, stride, lengths);
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kSketchThreads) {
    int place = 0;
    for (int other = 0; other < count; ++other) place += lengths[other] > lengths[row] || (lengths[other] == lengths[row] && other < row) ? 1 : 0;
    order[place] = static_cast<std::int16_t>(row);
  }
  __syncthreads();
}

/// The largest distance of rows [first, end) of a buffer from the space of a basis [rank, head_dim] of `type`: of each row by a warp; every lane of a warp gets that of the warp's rows.
__device__ inline float largest_residual(const float* rows, int first, int end, int dim, int stride, const void* basis, DType type, int rank) {
  constexpr int kParts = kMaxHeadDim / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float largest = 0.0F;
  for (int row = first + warp; row < end; row += kSketchThreads / 32) {
    float x[kParts], rest[kParts];
    #pragma unroll
    for (int i = 0; i < kParts; ++i) rest[i] = x[i] = lane + 32 * i < dim ? rows[row * stride + lane + 32 * i] : 0.0F;
    #pragma unroll 4
    for (int column = 0; column < rank; ++column) {
      float u[kParts], dot = 0.0F;
      #pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int place = column * dim + lane + 32 * i;
        u[i] = lane + 32 * i >= dim ? 0.0F : type == DType::f32 ? static_cast<const float*>(basis)[place] : from_bits(type, static_cast<const std::uint16_t*>(basis)[place]);
        dot = fmaf(x[i], u[i], dot);
      }
      for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0U, dot, distance);
      #pragma unroll
      for (int i = 0; i < kParts; ++i) rest[i] = fmaf(-dot, u[i], rest[i]);
    }
    float sum = 0.0F;
    #pragma unroll
    for (int i = 0; i < kParts; ++i) sum = fmaf(rest[i], rest[i], sum);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0U, sum, distance);
    largest = fmaxf(largest, sqrtf(sum));
  }
  return largest;
}

}  // namespace detail

/// @brief Rows enter sketches; where a chunk ends, the working basis becomes the sketch's top directions, and rolled[sequence] 1. Grid: 2 x heads x sequences.
/// @param buffers  [sequences, heads, 2, buffer rows, stride] where shared memory is too small; else null
/// @tparam vectors  times four channels that a lane has of a row, at most, while rows rotate
template <int vectors>
__global__ void __launch_bounds__(kSketchThreads) sketch_kernel(Tables tables, RowSource source, SketchSteps steps, Sketches sketches, WorkingBases bases, float* buffers, int buffer_rows, std::int32_t* rolled) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ float lengths[kMaxSketchBuffer];
  __shared__ std::int16_t order[kMaxSketchBuffer];
  __shared__ float new_column[kMaxHeadDim];
  const Part part = blockIdx.x == 0 ? Part::key : Part::value;
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z), slot = steps.slots[sequence], dim = tables.head_dim, stride = detail::sketch_stride(dim), thread = static_cast<int>(threadIdx.x);
  const int count = steps.count[sequence];
  if (count == 0) return;
  const std::size_t which = static_cast<std::size_t>(head * 2 + static_cast<int>(part)), own = static_cast<std::size_t>(slot * tables.num_heads * 2) + which;
  const PartMaps& maps = tables.maps[head].of(part);
  const int rank = maps.rank, limit = detail::sketch_rows(steps.share, rank);
  float* rows = buffers == nullptr ? reinterpret_cast<float*>(shared_memory) : buffers + (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads * 2) + which) * static_cast<std::size_t>(buffer_rows * stride);
  float* stored = sketches.rows + own * static_cast<std::size_t>(sketches.capacity * dim);
  const std::size_t basis_size = static_cast<std::size_t>(bases.most * dim), element = bases.type == DType::f32 ? 4 : 2;
  std::uint8_t* basis = static_cast<std::uint8_t*>(bases.moved) + own * basis_size * element;
  SketchState& state = sketches.states[own];
  int held = min(state.held, min(limit, dim));  // as it is, unless a saved state says otherwise
  const std::int64_t chunk_rows = state.chunk_rows;
  const auto load_stored = [&] {
    for (int item = thread; item < held * dim; item += kSketchThreads) rows[item / dim * stride + item % dim] = stored[item];
    __syncthreads();
  };
  // The rows become diag(sqrt(sigma^2 - delta)) V^T, the longest first, in `stored`: as few as a sketch may have.
  const auto compress = [&](bool shrinks) {
    detail::make_orthogonal<vectors>(rows, held, dim, stride, lengths);
    detail::rank_rows(rows, held, dim, stride, lengths, order);
    const int most = min(limit, min(held, dim));
    const float delta = shrinks && held > limit && dim >= limit ? lengths[order[limit - 1]] : 0.0F;
    const float least = held > 0 ? fmaxf(delta, kNothing * lengths[order[0]]) : 0.0F;
    int kept = 0;
    while (kept < most && lengths[order[kept]] > least) ++kept;
    for (int item = thread; item < kept * dim; item += kSketchThreads) {
      const int row = order[item / dim];
      stored[item] = sqrtf(1.0F - delta / lengths[row]) * rows[row * stride + item % dim];
    }
    held = kept;
    __syncthreads();
  };
  load_stored();
  const SourceRows from(tables, source, slot, head);
  const float *mean = maps.mean, threshold = steps.threshold_scale * sketches.thresholds[which];
  bool exceeded = !(steps.threshold_scale > 0.0F);
  for (int done = 0; done < count;) {
    const int taken = min(count - done, min(buffer_rows, 2 * limit) - held);
    from.load(part, nullptr, steps.first[sequence] + done, 0, taken, dim, rows + held * stride, stride);
    __syncthreads();
    detail::centre_rows(rows + held * stride, taken, dim, stride, mean);
    exceeded = exceeded || detail::largest_residual(rows, held, held + taken, dim, stride, basis, bases.type, rank) > threshold;
    done += taken;
    held += taken;
    if (done == count) break;
    compress(true);
    load_stored();
  }
  const bool ends = __syncthreads_or(exceeded) != 0 || chunk_rows + count >= steps.chunk_length;
  if (held > min(limit, dim)) {
    compress(true);
  } else if (ends) {
    compress(false);
  } else {
    for (int item = thread; item < held * dim; item += kSketchThreads) stored[item] = rows[item / dim * stride + item % dim];
  }
  if (thread == 0) state = {ends ? 0 : chunk_rows + count, held, 0};
  if (!ends) return;
  // The directions of the longest rows; missing ones are unit vectors made orthogonal to all before them, each the one that is furthest from those.
  const auto put = [&](int column, int channel, float value) {
    const int place = column * dim + channel;
    if (bases.type == DType::f32) reinterpret_cast<float*>(basis)[place] = value;
    else reinterpret_cast<std::uint16_t*>(basis)[place] = to_bits(bases.type, value);
  };
  load_stored();
  const int warp = thread / 32, lane = thread % 32, known = min(rank, held);
  detail::measure_rows(rows, known, dim, stride, lengths);
  __syncthreads();
  for (int column = warp; column < known; column += kSketchThreads / 32) {
    const float inverse = 1.0F / sqrtf(lengths[column]);  // rows that are kept have a length
    for (int channel = lane; channel < dim; channel += 32) {
      rows[column * stride + channel] *= inverse;
      put(column, channel, rows[column * stride + channel]);
    }
  }
  __syncthreads();
  for (int column = known; column < rank; ++column) {
    float* target = rows + column * stride;  // the buffer has room for a basis
    if (thread < dim) {
      float left = 1.0F;  // of unit vector `thread`
      for (int before = 0; before < column; ++before) left = fmaf(-rows[before * stride + thread], rows[before * stride + thread], left);
      new_column[thread] = left;
    }
    __syncthreads();
    int furthest = 0;
    for (int channel = 1; channel < dim; ++channel) furthest = new_column[channel] > new_column[furthest] ? channel : furthest;
    __syncthreads();
    for (int round = 0; round < 2; ++round) {
      if (thread < dim) new_column[thread] = round > 0 ? target[thread] : thread == furthest ? 1.0F : 0.0F;
      __syncthreads();
      for (int before = warp; before < column; before += kSketchThreads / 32) {
        float dot = 0.0F;
        for (int channel = lane; channel < dim; channel += 32) dot = fmaf(rows[before * stride + channel], new_column[channel], dot);
        for (int distance = 16; distance > 0; distance /= 2) dot += __shfl_xor_sync(~0U, dot, distance);
        if (lane == 0) lengths[before] = dot;
      }
      __syncthreads();
      if (thread < dim) {
        float rest = new_column[thread];
        for (int before = 0; before < column; ++before) rest = fmaf(-lengths[before], rows[before * stride + thread], rest);
        target[thread] = rest;
      }
      __syncthreads();
    }
    float sum = 0.0F;
    for (int channel = 0; channel < dim; ++channel) sum = fmaf(target[channel], target[channel], sum);
    __syncthreads();
    if (thread < dim) {
      target[thread] /= sqrtf(sum);
      put(column, thread, target[thread]);
    }
    __syncthreads();
  }
  if (thread == 0) rolled[sequence] = 1;  // whoever says so says the same
}

/// @brief Leaving rows of at most kAdaptBatch sequences enter their sketches; where a chunk ends, they go on under a new epoch, and old ones may merge. Up to six launches.
/// @param source  whose row 0 is the first that leaves
template <class = void>
void roll_over(LayerState& layer, const FrequentDirections& policy, const Leaving& leaving, int first_sequence, int count, const RowSource& source, const CompressScratch& scratch, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const RollStore& rolls = layer.rolls();
  const unsigned heads = static_cast<unsigned>(tables.num_heads), sequences = static_cast<unsigned>(count);
  SketchSteps steps{};
  steps.chunk_length = policy.chunk_length;
  steps.share = policy.sketch_share;
  steps.threshold_scale = policy.threshold_scale;
  int most_rows = 0;
  bool may_merge = false;
  for (int i = 0; i < count; ++i) {
    const int from = first_sequence + i;
    HostSequence& now = layer.sequence(leaving.slots[from]);
    steps.slots[i] = leaving.slots[from];
    steps.first[i] = leaving.full[from];
    steps.count[i] = leaving.compressed[from];
    if (leaving.compressed[from] == 0) continue;
    if (++now.epochs.decode_steps >= rolls.limits().own) {  // before, there are too few epochs to merge any
      may_merge = true;
      most_rows = (std::max)(most_rows, now.rows.num_compressed);
      layer.own_pages(leaving.slots[from], RowList::compressed, 0, now.rows.num_compressed, stream);
    }
  }
  check(cudaMemsetAsync(scratch.rollover.rolled, 0, static_cast<std::size_t>(count) * sizeof(std::int32_t), stream), "roll_over");
  const auto sketch = [&](auto* kernel) {
    float* buffers = layer.sketches_apart() ? scratch.sketch_buffers : nullptr;
    detail::launch_kernel(kernel, dim3(2, heads, sequences), kSketchThreads, buffers == nullptr ? rolls.buffer_bytes() : 0, "sketch_kernel", stream, tables, source, steps, rolls.sketches(), layer.epochs().bases(), buffers,
                         rolls.buffer_rows(), scratch.rollover.rolled);
  };
  if (tables.head_dim <= 16 * kRotationLanes) sketch(sketch_kernel<4>);
  else sketch(sketch_kernel<8>);
  roll_over_kernel<><<<sequences, 1, 0, stream>>>(tables, leaving, first_sequence, rolls.limits(), rolls.states(), scratch.rollover, rolls.counts());
  check(cudaGetLastError(), "roll_over_kernel");
  publish_kernel<><<<dim3(2, heads, sequences), kStoreThreads, 0, stream>>>(tables, leaving, first_sequence, layer.epochs().bases(), scratch.rollover.epochs);
  check(cudaGetLastError(), "publish_kernel");
  MergePlans plans;
  plans.decided = scratch.rollover.plans;
  if (may_merge) enqueue_merges(layer, plans, count, (most_rows + kStoreRows - 1) / kStoreRows + 1, scratch, stream);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
