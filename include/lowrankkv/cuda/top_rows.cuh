// SPDX-License-Identifier: Apache-2.0
/// @file cuda/top_rows.cuh  Choosing rows by score on the device, as cpu/top_rows.hpp does: of equal scores the earlier row wins.
#pragma once

#include <cub/block/block_scan.cuh>

#include <cstdint>

#include "lowrankkv/cuda/tables.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kSelectThreads = 1024;  ///< of a block of top_rows_kernel

/// @brief The rows that are chosen among: of every sequence of a batch, the same in all heads.
struct Candidates {
  const float* scores = nullptr;  ///< [sequences, heads, stride]; not negative
  std::int32_t stride = 0;
  bool keeps_earlier = false;     ///< rows before the candidates are chosen too
  std::int32_t first[kMaxBatch], end[kMaxBatch];  ///< rows that can be chosen
  std::int32_t wanted[kMaxBatch];                 ///< of them
};

/// @brief Writes the numbers of the `wanted` rows with the largest scores, ascending, to chosen [sequences, heads, stride], and those of the other
/// candidates, ascending, to rest (if not null). Grid: heads x sequences.
///
/// A radix selection, eight bits a pass, finds the smallest score that is chosen; one more pass writes. Reads the scores five times.
template <class = void>
__global__ void __launch_bounds__(kSelectThreads) top_rows_kernel(Candidates all, std::int32_t* chosen, std::int32_t* rest) {
  using Scan = cub::BlockScan<int, kSelectThreads>;
  constexpr int kCopies = 16;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int histogram[kCopies][256];  // scores are alike in their first bits: lanes would wait for each other
  __shared__ std::uint32_t prefix;
  __shared__ int still_wanted;
  const std::size_t list = (static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * static_cast<std::size_t>(all.stride);
  const float* scores = all.scores + list;
  struct {
    int first, end, wanted;
  } const from{all.first[blockIdx.y], all.end[blockIdx.y], all.wanted[blockIdx.y]};
  const int thread = static_cast<int>(threadIdx.x);
  // Bits of numbers that are not negative are in their order; NaN and negative ones are last.
  const auto key_of = [&](int row) { return scores[row] >= 0.0F ? __float_as_uint(scores[row] + 0.0F) + 1U : 0U; };
  if (thread == 0) {
    prefix = 0;
    still_wanted = from.wanted;
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int item = thread; item < kCopies * 256; item += kSelectThreads) histogram[item / 256][item % 256] = 0;
    __syncthreads();
    const std::uint32_t known = prefix;
    for (int row = from.first + thread; row < from.end; row += kSelectThreads) {
      const std::uint32_t key = key_of(row);
      if (shift == 24 || key >> (shift + 8) == known) atomicAdd(&histogram[thread % kCopies][key >> shift & 0xffU], 1);
    }
    __syncthreads();
    if (thread < 256) {
      int total = 0;
      for (int copy = 0; copy < kCopies; ++copy) total += histogram[copy][thread];
      histogram[0][thread] = total;
    }
    __syncthreads();
    if (thread == 0) {
      int digit = 255, left = still_wanted;
      for (; digit > 0 && histogram[0][digit] < left; --digit) left -= histogram[0][digit];
      prefix = known << 8 | static_cast<std::uint32_t>(digit);
      still_wanted = left;
    }
    __syncthreads();
  }
  const std::uint32_t smallest = prefix;
  int equals_left = still_wanted, written = all.keeps_earlier ? from.first : 0, others = 0;  // of the smallest score only so many, the first ones, are chosen
  std::int32_t* own = chosen + list;
  std::int32_t* own_rest = rest == nullptr ? nullptr : rest + list;
  for (int row = thread; row < written; row += kSelectThreads) own[row] = row;
  for (int base = from.first; base < from.end; base += kSelectThreads) {
    const int row = base + thread;
    const std::uint32_t key = row < from.end ? key_of(row) : 0U;
    const bool equal = row < from.end && key == smallest && from.wanted > 0;
    int rank = 0, equals = 0;
    Scan(storage).ExclusiveSum(equal ? 1 : 0, rank, equals);
    __syncthreads();
    const bool taken = row < from.end && from.wanted > 0 && (key > smallest || (equal && rank < equals_left));
    int place = 0, count = 0;
    Scan(storage).ExclusiveSum(taken ? 1 : 0, place, count);
    __syncthreads();
    if (taken) own[written + place] = row;
    if (!taken && row < from.end && own_rest != nullptr) own_rest[others + thread - place] = row;
    written += count;
    others += min(kSelectThreads, from.end - base) - count;
    equals_left -= min(equals_left, equals);
  }
}

/// @brief Copies the scores of some rows of each head [heads, stride] to `target` [heads, stride]; those of the others, up to `count`, are -1: they are chosen last.
/// Grid: heads.
template <class = void>
__global__ void __launch_bounds__(kSelectThreads) mask_scores_kernel(const float* scores, int stride, int count, const std::int32_t* rows, int row_stride, int num_rows, float* target) {
  const std::size_t head = blockIdx.x;
  float* own = target + head * static_cast<std::size_t>(stride);
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kSelectThreads) own[row] = -1.0F;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += kSelectThreads) {
    const int row = rows[head * static_cast<std::size_t>(row_stride) + static_cast<std::size_t>(i)];
    own[row] = scores[head * static_cast<std::size_t>(stride) + static_cast<std::size_t>(row)];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
