// SPDX-License-Identifier: Apache-2.0
/// @file cuda/evict.cuh  Rows leave the tail where masses decide: of stored and leaving rows the largest stay (cpu/evict.hpp, cpu/token_policy/heavy_hitters.hpp).
///
/// How many stay, the host knows from counts; which, is decided here. A leaving row that stays takes the place of a stored one that goes, or stands at the list's end; nothing else
/// moves. So positions of the list do not ascend, and pages that are shared with forks must be the sequence's own before.
#pragma once

#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/adapt.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kEvictThreads = 1024;  ///< of a block of evict_rows_kernel
inline constexpr int kReplaceRows = 8;      ///< of a block of replace_rows_kernel

/// @brief What is known of leaving rows besides Leaving, and where the decision goes.
struct Eviction {
  const float* masses = nullptr;   ///< of leaving rows, [heads, stride]; null: those of the tails
  std::int32_t* chosen = nullptr;  ///< [sequence of the batch, head, stride]: leaving rows that stay, ascending
  std::int32_t* freed = nullptr;   ///< the same: places of stored rows that go, ascending; then -1
  std::int32_t stride = 0;
  std::int32_t pinned = 0;         ///< positions below it stay in any case, and take nobody's place
};

/// @brief Decides which of the stored and the leaving rows stay: as many as are stored and leaving.full more, those with the largest masses, of equal ones those that came first.
/// Writes chosen and freed, and gives rows that stay their masses and positions: the first leaving.full ones at the list's end, the others in freed places. Lengths are those before.
/// Grid: heads x sequences. All keys differ: a radix selection, eight bits a pass until the smallest that stays is known, then one pass that writes.
template <class = void>
__global__ void __launch_bounds__(kEvictThreads) evict_rows_kernel(Tables tables, Leaving leaving, Eviction eviction) {
  using Scan = cub::BlockScan<int, kEvictThreads>;
  constexpr int kCopies = 16;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int histogram[kCopies][256];  // masses are alike in their first bits: lanes would wait for each other
  __shared__ std::uint64_t prefix;
  __shared__ int still_wanted, in_digit;
  const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y), slot = leaving.slots[sequence], thread = static_cast<int>(threadIdx.x);
  const int stored = tables.num_rows(RowList::full, slot, head), rows = leaving.rows[sequence], all = stored + rows, added = leaving.full[sequence], wanted = stored + added;
  const int tail_first = tables.lengths[slot].tail_first, ring = tables.ring_rows();
  float* masses = tables.row_masses(slot, head);
  std::int32_t* positions = tables.row_positions(RowList::full, slot, head);
  const float* tail = tables.tail_row_masses(slot, head);
  const float* packed = eviction.masses == nullptr ? nullptr : eviction.masses + static_cast<std::size_t>(head) * static_cast<std::size_t>(eviction.stride);
  const std::size_t list = (static_cast<std::size_t>(sequence) * gridDim.x + blockIdx.x) * static_cast<std::size_t>(eviction.stride);
  std::int32_t *chosen = eviction.chosen + list, *freed = eviction.freed + list;
  const auto leaving_mass = [&](int row) {
    const int place = tail_first + row;
    return packed != nullptr ? packed[row] : tail[place < ring ? place : place - ring];
  };
  // Bits of numbers that are not negative are in their order; below them, positions: the earlier row wins.
  const auto key_of = [&](float mass, std::int32_t position) {
    const std::uint32_t high = position < eviction.pinned ? ~0U : mass >= 0.0F ? __float_as_uint(mass + 0.0F) + 1U : 0U;
    return static_cast<std::uint64_t>(high) << 32 | ~static_cast<std::uint32_t>(position);
  };
  const auto key = [&](int row) { return row < stored ? key_of(masses[row], positions[row]) : key_of(leaving_mass(row - stored), leaving.position[sequence] + row - stored); };
  std::uint64_t smallest = wanted == 0 ? ~std::uint64_t{0} : 0;  // that stays; no row has the largest of all keys
  if (wanted > 0 && wanted < all) {
    if (thread == 0) {
      prefix = 0;
      still_wanted = wanted;
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
      for (int item = thread; item < kCopies * 256; item += kEvictThreads) histogram[item / 256][item % 256] = 0;
      __syncthreads();
      const std::uint64_t known = prefix;
      const int left = still_wanted;
      for (int row = thread; row < all; row += kEvictThreads) {
        const std::uint64_t own = key(row);
        if (shift == 56 || own >> (shift + 8) == known) atomicAdd(&histogram[thread % kCopies][own >> shift & 0xffU], 1);
      }
      __syncthreads();
      int count = 0, above = 0;  // rows of this thread's digit, of larger ones: 255 is the first
      if (thread < 256) {
        for (int copy = 0; copy < kCopies; ++copy) count += histogram[copy][255 - thread];
      }
      Scan(storage).ExclusiveSum(count, above);
      if (thread < 256 && above < left && left <= above + count) {
        prefix = known << 8 | static_cast<std::uint64_t>(255 - thread);
        still_wanted = left - above;
        in_digit = count;
      }
      __syncthreads();
      smallest = prefix << shift;
      if (in_digit == still_wanted) break;  // all rows that begin so stay
    }
  }
  int places = 0, stay = 0;
  for (int base = 0; base < stored; base += kEvictThreads) {
    const bool goes = base + thread < stored && key(base + thread) < smallest;
    int place = 0, count = 0;
    Scan(storage).ExclusiveSum(goes ? 1 : 0, place, count);
    __syncthreads();
    if (goes) freed[places + place] = base + thread;
    places += count;
  }
  for (int base = 0; base < rows; base += kEvictThreads) {
    const bool stays = base + thread < rows && key(stored + base + thread) >= smallest;
    int place = 0, count = 0;
    Scan(storage).ExclusiveSum(stays ? 1 : 0, place, count);
    __syncthreads();
    if (stays) chosen[stay + place] = base + thread;
    stay += count;
  }
  for (int i = places + thread; i < rows; i += kEvictThreads) freed[i] = -1;
  __syncthreads();  // the lists are written, and no key is read any more
  for (int i = thread; i < stay; i += kEvictThreads) {
    const int place = i < added ? stored + i : freed[i - added];
    masses[place] = leaving_mass(chosen[i]);
    positions[place] = leaving.position[sequence] + chosen[i];
  }
}

/// @brief Writes the keys and values of leaving rows that stay to freed places. Grid: pieces of kReplaceRows places x heads x sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) replace_rows_kernel(Tables tables, RowSource source, Leaving leaving, Eviction eviction) {
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z), slot = leaving.slots[sequence], dim = tables.head_dim;
  const std::size_t list = (static_cast<std::size_t>(sequence) * gridDim.y + blockIdx.y) * static_cast<std::size_t>(eviction.stride);
  const std::int32_t *chosen = eviction.chosen + list + leaving.full[sequence], *freed = eviction.freed + list;
  const int first = static_cast<int>(blockIdx.x) * kReplaceRows, end = min(first + kReplaceRows, leaving.rows[sequence]);
  if (first >= end || freed[first] < 0) return;
  const HeadTiles& layout = tables.full;
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const SourceRows rows(tables, source, slot, head);
  for (int i = first; i < end && freed[i] >= 0; ++i) {
    const int place = freed[i], in_tile = place % layout.rows;
    std::uint8_t* tile = tables.tile(table, layout, place / layout.rows);
    for (int channel = static_cast<int>(threadIdx.x); channel < 2 * dim; channel += kStoreThreads) {
      const Part part = channel < dim ? Part::key : Part::value;
      const int own = channel < dim ? channel : channel - dim;
      *reinterpret_cast<std::uint16_t*>(tile + layout.plain_byte(part, in_tile, own)) = to_bits(tables.full_type, rows.element(part, chosen[i], own));
    }
  }
}

/// @brief The tail's masses become those of rows [first, first + count) of a prompt [heads, stride]. Grid: heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) renew_masses_kernel(Tables tables, int slot, const float* masses, int stride, int first, int count) {
  const int head = static_cast<int>(blockIdx.x), begin = tables.lengths[slot].tail_first, ring = tables.ring_rows();
  for (int row = static_cast<int>(threadIdx.x); row < count; row += kStoreThreads) {
    const int place = begin + row;
    tables.tail_row_masses(slot, head)[place < ring ? place : place - ring] = masses[static_cast<std::size_t>(head) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(first + row)];
  }
}

/// @brief Of stored and leaving rows, those with the largest masses stay; those that take the places of others are stored here. Returns the order of the ones that go to the list's end.
/// The pages of the full lists are the sequences' own. Two launches. @param pinned  positions below it stay
template <class = void>
RowOrder evict_rows(const LayerState& layer, const Leaving& leaving, std::int64_t pinned, const RowSource& source, const CompressScratch& scratch, cudaStream_t stream) {
  const Eviction eviction{source.packed == nullptr ? nullptr : scratch.scores, scratch.chosen, scratch.rest, scratch.rows, static_cast<std::int32_t>(pinned)};
  const unsigned heads = static_cast<unsigned>(layer.tables().num_heads), sequences = static_cast<unsigned>(leaving.count);
  evict_rows_kernel<><<<dim3(heads, sequences), kEvictThreads, 0, stream>>>(layer.tables(), leaving, eviction);
  check(cudaGetLastError(), "evict_rows_kernel");
  std::int32_t most = 0;  // places that can be freed
  for (int i = 0; i < leaving.count; ++i) most = (std::max)(most, (std::min)(leaving.rows[i] - leaving.full[i], layer.sequence(leaving.slots[i]).rows.num_full));
  if (most > 0) {
    replace_rows_kernel<><<<dim3(static_cast<unsigned>((most + kReplaceRows - 1) / kReplaceRows), heads, sequences), kStoreThreads, 0, stream>>>(layer.tables(), source, leaving, eviction);
    check(cudaGetLastError(), "replace_rows_kernel");
  }
  return {scratch.chosen, scratch.rows};
}

/// @brief Enqueues renew_masses_kernel: the tail is rows [first, first + count) of a packed prompt now.
template <class = void>
void renew_masses(const LayerState& layer, int slot, const CompressScratch& scratch, int first, int count, cudaStream_t stream) {
  renew_masses_kernel<><<<static_cast<unsigned>(layer.tables().num_heads), kStoreThreads, 0, stream>>>(layer.tables(), slot, scratch.scores, scratch.rows, first, count);
  check(cudaGetLastError(), "renew_masses_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
