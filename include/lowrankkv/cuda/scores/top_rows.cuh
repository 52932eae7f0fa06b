// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/top_rows.cuh  Choosing rows by score on the device, as cpu/top_rows.hpp does:
/// of equal scores the earlier row wins.
#pragma once

#include <cub/block/block_scan.cuh>

#include <cstdint>

#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kSelectThreads = 1024;  ///< of a block of top_rows_kernel

/// @brief The rows that are chosen among: of every sequence of a batch, the same in all heads.
struct Candidates {
  const float* scores = nullptr;  ///< [sequences, heads, stride]; not negative
  std::int32_t stride = 0;
  bool keeps_earlier = false;                     ///< rows before the candidates are chosen too
  std::int32_t first[kMaxBatch], end[kMaxBatch];  ///< rows that can be chosen
  std::int32_t wanted[kMaxBatch];                 ///< of them
  RowOrder among = {};   ///< where heads have different numbers of rows, [sequences]: no more are
                         ///< chosen than are meant of it; null: no such limit
  bool numbers = false;  ///< rows are the numbers of those, from `first` on; else, rows that are
                         ///< not among them have scores below all others
  std::int32_t* counts = nullptr;  ///< if heads have different numbers, [2, sequences, heads]: how
                                   ///< many stand in the two orders
  float above = 0.0F;              ///< above 0: only rows whose scores exceed it are chosen
};

/// @brief Writes the numbers of the `wanted` rows with the largest scores, or of fewer, where no
/// more exceed `above`, ascending, to chosen [sequences, heads, stride], and those of the other
/// candidates, ascending, to rest (if not null). Grid: heads x sequences.
///
/// A radix selection, eight bits a pass, finds the smallest score that is chosen; one more pass
/// writes. Reads the scores once where there are at most 32768, else five times, or six, if they
/// must exceed something.
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    top_rows_kernel(Candidates all, std::int32_t* chosen, std::int32_t* rest) {
  using Scan = cub::BlockScan<int, kSelectThreads>;
  constexpr int kCopies = 16, kItems = 8,
                kRounds = 4;  // rounds that stay in registers, of so many neighbours a thread
  __shared__ typename Scan::TempStorage storage;
  __shared__ int histogram[256][kCopies + 1];  // scores are alike in their first bits: lanes would
                                               // wait for each other
  __shared__ std::uint32_t prefix;
  __shared__ int still_wanted;
  const std::size_t list = (static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x) *
                           static_cast<std::size_t>(all.stride);
  const float* scores = all.scores + list;
  const int2 among = all.among.active(static_cast<int>(blockIdx.y), static_cast<int>(gridDim.x),
                                      static_cast<int>(blockIdx.x), all.wanted[blockIdx.y]);
  struct {
    int first, end, wanted;
  } from{all.first[blockIdx.y],
         all.numbers ? all.first[blockIdx.y] + among.y - among.x : all.end[blockIdx.y],
         min(all.wanted[blockIdx.y], among.y - among.x)};
  const int thread = static_cast<int>(threadIdx.x);
  // Bits of numbers that are not negative are in their order; NaN and negative ones are last.
  const auto key_of = [&](int row) {
    const float score = __ldg(scores + row);
    return score >= 0.0F ? __float_as_uint(score + 0.0F) + 1U : 0U;
  };
  const auto load = [&](int base, std::uint32_t(&keys)[kItems]) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) keys[i] = base + i < from.end ? key_of(base + i) : 0U;
  };
  const bool resident = from.end - from.first <= kRounds * kItems * kSelectThreads;
  std::uint32_t kept[kRounds][kItems];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (resident) load(from.first + (round * kSelectThreads + thread) * kItems, kept[round]);
  }
  // Calls f(first row, keys) for the rows of this thread, a round at a time; all threads of the
  // block take part in every round.
  const auto for_each_round = [&](auto&& function) {
    if (resident) {
#pragma unroll
      for (int round = 0; round < kRounds; ++round) {
        if (from.first + round * kSelectThreads * kItems < from.end)
          function(from.first + (round * kSelectThreads + thread) * kItems, kept[round]);
      }
      return;
    }
    for (int base = from.first; base < from.end; base += kSelectThreads * kItems) {
      std::uint32_t keys[kItems];
      load(base + thread * kItems, keys);
      function(base + thread * kItems, keys);
    }
  };
  if (all.above > 0.0F) {
    const std::uint32_t limit = __float_as_uint(all.above) + 1U;
    int own = 0, before = 0, above = 0;
    for_each_round([&](int row, const std::uint32_t(&keys)[kItems]) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) own += row + i < from.end && keys[i] > limit ? 1 : 0;
    });
    Scan(storage).ExclusiveSum(own, before, above);
    from.wanted = min(from.wanted, above);
  }
  const int earlier = all.keeps_earlier ? from.first : 0;
  if (thread == 0) {
    prefix = 0;
    still_wanted = from.wanted;
    if (all.counts != nullptr) {
      const unsigned own = blockIdx.y * gridDim.x + blockIdx.x;
      all.counts[own] = earlier + from.wanted;
      all.counts[gridDim.x * gridDim.y + own] = from.end - from.first - from.wanted;
    }
  }
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int item = thread; item < 256 * (kCopies + 1); item += kSelectThreads)
      reinterpret_cast<int*>(histogram)[item] = 0;
    __syncthreads();
    const std::uint32_t known = prefix;
    for_each_round([&](int row, const std::uint32_t(&keys)[kItems]) {
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (row + i < from.end && (shift == 24 || keys[i] >> (shift + 8) == known))
          atomicAdd(&histogram[keys[i] >> shift & 0xffU][thread % kCopies], 1);
      }
    });
    __syncthreads();
    if (thread < 256) {
      int total = 0;
      for (int copy = 0; copy < kCopies; ++copy) total += histogram[thread][copy];
      histogram[thread][0] = total;
    }
    __syncthreads();
    if (thread < 32) {  // a lane has eight digits, those of lane 0 are the highest
      const int top = 255 - 8 * thread;
      int own = 0;
      for (int i = 0; i < 8; ++i) own += histogram[top - i][0];
      int before = own;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0U, before, distance);
        if (thread >= distance) before += other;
      }
      before -= own;
      const int left = still_wanted;
      __syncwarp();
      // The digit with which so many are reached; the highest if none are wanted.
      if (left == 0 ? thread == 0 : before < left && before + own >= left) {
        int digit = top, missing = left - before;
        for (; missing > histogram[digit][0]; --digit) missing -= histogram[digit][0];
        prefix = known << 8 | static_cast<std::uint32_t>(digit);
        still_wanted = missing;
      }
    }
    __syncthreads();
  }
  const std::uint32_t smallest = prefix;
  const int equals_wanted =
      still_wanted;  // of the smallest score only so many, the first ones, are chosen
  std::int32_t* own = chosen + list;
  std::int32_t* own_rest = rest == nullptr ? nullptr : rest + list;
  for (int row = thread; row < earlier; row += kSelectThreads) own[row] = row;
  int larger_before = 0, equals_before = 0;  // among the rows of earlier rounds
  for_each_round(
      [&](int row,
          const std::uint32_t(
              &keys)[kItems]) {  // a thread's rows are neighbours: ranks follow from one sum
        int counts = 0;          // larger ones, and equal ones from bit 16 on
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const bool there = row + i < from.end && from.wanted > 0;
          counts += there && keys[i] > smallest ? 1 : there && keys[i] == smallest ? 1 << 16 : 0;
        }
        int before = 0, all_counts = 0;
        Scan(storage).ExclusiveSum(counts, before, all_counts);
        __syncthreads();
        int larger = larger_before + (before & 0xffff), equals = equals_before + (before >> 16);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (row + i >= from.end) break;
          const int place = larger + min(equals, equals_wanted);
          const bool is_larger = from.wanted > 0 && keys[i] > smallest,
                     is_equal = from.wanted > 0 && keys[i] == smallest;
          if (is_larger || (is_equal && equals < equals_wanted))
            own[earlier + place] = row + i;
          else if (own_rest != nullptr)
            own_rest[row + i - from.first - place] = row + i;
          larger += is_larger ? 1 : 0;
          equals += is_equal ? 1 : 0;
        }
        larger_before += all_counts & 0xffff;
        equals_before += all_counts >> 16;
      });
}

/// @brief Copies the scores of the rows of an order [heads, stride] to `target` [heads, stride];
/// those of the others, up to `count`, are -1: they are chosen last. Grid: heads.
/// @param num_rows  of an order, if heads have the same number
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    mask_scores_kernel(const float* scores, int stride, int count, RowOrder order, int num_rows,
                       float* target) {
  const std::size_t head = blockIdx.x;
  const int heads = static_cast<int>(gridDim.x),
            own_rows = order.active(0, heads, static_cast<int>(head), num_rows).y;
  const std::int32_t* rows = order.of(0, heads, static_cast<int>(head));
  float* own = target + head * static_cast<std::size_t>(stride);
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kSelectThreads)
    own[row] = -1.0F;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < own_rows; i += kSelectThreads) {
    const int row = rows[i];
    own[row] = scores[head * static_cast<std::size_t>(stride) + static_cast<std::size_t>(row)];
  }
}

/// @brief Copies the scores of the rows of an order that are meant to the front of `target`
/// [sequences, heads, stride]. Grid: heads x sequences. @param leaving  whose candidates they are,
/// if heads have the same number
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    gather_scores_kernel(const float* scores, int stride, RowOrder order, FlushBatch flushed,
                         float* target) {
  const int heads = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x),
            sequence = static_cast<int>(blockIdx.y);
  const int2 active = order.active(sequence, heads, head, flushed.candidates(sequence));
  const std::int32_t* rows = order.of(sequence, heads, head) + active.x;
  const std::size_t own =
      static_cast<std::size_t>(sequence * heads + head) * static_cast<std::size_t>(stride);
  for (int i = static_cast<int>(threadIdx.x); i < active.y - active.x; i += kSelectThreads)
    target[own + static_cast<std::size_t>(i)] = scores[own + static_cast<std::size_t>(rows[i])];
}

/// @brief Numbers of rows of an order become those rows: as many as the full list gets in chosen
/// [sequences, heads, stride], behind the pinned ones then, and the others of those that are meant
/// in rest. Grid: heads x sequences.
/// @param leaving  says how many, and of how many, if heads have the same number  @param counts [2,
/// sequences, heads], where they have not: how many are chosen, of which none is pinned; then how
/// many stand in chosen, and in rest
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    name_rows_kernel(RowOrder order, FlushBatch flushed, std::int32_t* counts, std::int32_t* chosen,
                     std::int32_t* rest, int stride) {
  const int heads = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x),
            sequence = static_cast<int>(blockIdx.y), list = sequence * heads + head,
            pinned = flushed.pinned[sequence];
  const int2 active = order.active(sequence, heads, head, flushed.candidates(sequence));
  const std::int32_t* named = order.of(sequence, heads, head) + active.x;
  const int count = active.y - active.x,
            wanted = counts != nullptr ? counts[list] : flushed.full[sequence] - pinned;
  std::int32_t *own = chosen + static_cast<std::size_t>(list) * static_cast<std::size_t>(stride),
               *others = rest + static_cast<std::size_t>(list) * static_cast<std::size_t>(stride);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < count - wanted; i += kSelectThreads) others[i] = named[others[i]];
  for (int base = (wanted - 1) / kSelectThreads * kSelectThreads; base >= 0 && wanted > 0;
       base -= kSelectThreads) {  // from the end: they move back by `pinned`
    const int row = base + thread < wanted ? named[own[base + thread]] : 0;
    __syncthreads();
    if (base + thread < wanted) own[pinned + base + thread] = row;
    __syncthreads();
  }
  for (int row = thread; row < pinned; row += kSelectThreads) own[row] = row;
  __syncthreads();  // everybody knows how many are wanted
  if (counts == nullptr || thread > 0) return;
  counts[list] = pinned + wanted;
  counts[heads * static_cast<int>(gridDim.y) + list] = count - wanted;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
