// SPDX-License-Identifier: Apache-2.0
/// @file cuda/scores/top_rows.cuh  Chooses rows by score on the device, as cpu/top_rows.hpp does:
/// of equal scores the earlier row wins.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/runtime/block_scan.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kSelectThreads = 1024;  ///< threads of a block of top_rows_kernel

/// @brief The candidate rows of every sequence of a batch, the same in all heads.
struct Candidates {
  const float* scores = nullptr;  ///< [sequences, heads, stride]; not negative
  std::int32_t stride = 0;
  /// Rows before the candidates are chosen as well.
  bool keeps_earlier = false;
  std::int32_t first[kMaxBatch], end[kMaxBatch];  ///< candidates [first, end)
  std::int32_t wanted[kMaxBatch];                 ///< number of candidates to choose
  /// If heads have different numbers of rows: an order per sequence. No more rows are chosen than
  /// its active range has. Null: no such limit.
  RowOrder among = {};
  /// True: candidates are indices into the active range of `among`, counted from `first`. False:
  /// candidates are rows; rows that are not in `among` have scores below all others.
  bool numbers = false;
  /// If heads have different numbers of rows, [2, sequences, heads]: takes the numbers of rows in
  /// `chosen` and in `rest`.
  std::int32_t* counts = nullptr;
  /// If above 0: only rows whose scores exceed it are chosen.
  float above = 0.0F;
};

/// @brief Writes the `wanted` rows with the largest scores, ascending, to chosen [sequences, heads,
/// stride], and the other candidates, ascending, to `rest` (if not null). Chooses fewer if no more
/// scores exceed `above`. Grid: heads x sequences.
///
/// A radix selection, eight bits per pass, finds the smallest score that is chosen. One more pass
/// writes the rows. Reads the scores once if there are at most 32768; otherwise five times, or six
/// with `above`.
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    top_rows_kernel(Candidates all, std::int32_t* chosen, std::int32_t* rest) {
  using Scan = BlockScan<kSelectThreads>;
  // kRounds: rounds whose keys stay in registers. kItems: neighbouring rows of a thread in a round.
  constexpr int kCopies = 16, kItems = 8, kRounds = 4;
  __shared__ Scan::Storage storage;
  // Scores have similar leading bits: with one copy, the atomic additions of lanes would serialise.
  __shared__ int histogram[256][kCopies + 1];
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
  // Bits of non-negative numbers sort like the numbers. NaN and negative numbers come last.
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
  // Calls f(first row, keys) for the rows of this thread, one round at a time. All threads of the
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
    Scan::exclusive_sum(own, before, above, storage);
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
    // A lane has eight digits; lane 0 has the highest.
    if (thread < 32) {
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
      // The digit at which `left` rows are reached; the highest digit if none are wanted.
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
  // Only so many rows of the smallest chosen score are chosen: the first ones.
  const int equals_wanted = still_wanted;
  std::int32_t* own = chosen + list;
  std::int32_t* own_rest = rest == nullptr ? nullptr : rest + list;
  for (int row = thread; row < earlier; row += kSelectThreads) own[row] = row;
  int larger_before = 0, equals_before = 0;  // rows of earlier rounds
  // A thread's rows are neighbours, so one prefix sum gives their ranks. Its low 16 bits count
  // larger scores, its high 16 bits equal ones.
  for_each_round([&](int row, const std::uint32_t(&keys)[kItems]) {
    int counts = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool there = row + i < from.end && from.wanted > 0;
      counts += there && keys[i] > smallest ? 1 : there && keys[i] == smallest ? 1 << 16 : 0;
    }
    int before = 0, all_counts = 0;
    Scan::exclusive_sum(counts, before, all_counts, storage);
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

/// @brief Copies the scores of the rows of an order [heads, stride] to `target` [heads, stride].
/// The scores of the other rows below `count` become -1, so that they are chosen last. Grid: heads.
/// @param num_rows  rows of an order, if all heads have the same number
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

/// @brief Copies the scores of the rows in the active range of an order to the front of `target`
/// [sequences, heads, stride]. Grid: heads x sequences.
/// @param flushed  gives the number of candidates, if all heads have the same number
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

/// @brief Replaces indices into an order by the rows at those places. Grid: heads x sequences.
///
/// On entry, chosen [sequences, heads, stride] and `rest` hold indices into the order's active
/// range. On return, `chosen` holds the rows that the full list gets, the pinned rows first, and
/// `rest` the other rows of the active range.
/// @param flushed  gives the numbers of rows, if all heads have the same number
/// @param counts  [2, sequences, heads] if heads have different numbers, else null. In: rows
///   chosen, without pinned ones. Out: rows in `chosen`, then rows in `rest`.
template <class = void>
__global__ void __launch_bounds__(kSelectThreads)
    rows_of_indices_kernel(RowOrder order, FlushBatch flushed, std::int32_t* counts,
                           std::int32_t* chosen, std::int32_t* rest, int stride) {
  const int heads = static_cast<int>(gridDim.x), head = static_cast<int>(blockIdx.x),
            sequence = static_cast<int>(blockIdx.y), list = sequence * heads + head,
            pinned = flushed.pinned[sequence];
  const int2 active = order.active(sequence, heads, head, flushed.candidates(sequence));
  const std::int32_t* active_rows = order.of(sequence, heads, head) + active.x;
  const int count = active.y - active.x,
            wanted = counts != nullptr ? counts[list] : flushed.full[sequence] - pinned;
  std::int32_t *own = chosen + static_cast<std::size_t>(list) * static_cast<std::size_t>(stride),
               *others = rest + static_cast<std::size_t>(list) * static_cast<std::size_t>(stride);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < count - wanted; i += kSelectThreads) others[i] = active_rows[others[i]];
  // From the end, since rows move back by `pinned`.
  for (int base = (wanted - 1) / kSelectThreads * kSelectThreads; base >= 0 && wanted > 0;
       base -= kSelectThreads) {
    const int row = base + thread < wanted ? active_rows[own[base + thread]] : 0;
    __syncthreads();
    if (base + thread < wanted) own[pinned + base + thread] = row;
    __syncthreads();
  }
  for (int row = thread; row < pinned; row += kSelectThreads) own[row] = row;
  __syncthreads();  // all threads have read `wanted`
  if (counts == nullptr || thread > 0) return;
  counts[list] = pinned + wanted;
  counts[heads * static_cast<int>(gridDim.y) + list] = count - wanted;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
