// SPDX-License-Identifier: Apache-2.0
/// @file cuda/evict.cuh  Rows leave the tail where masses decide: of stored and leaving rows the largest stay (cpu/evict.hpp, cpu/token_policy/heavy_hitters.hpp).
///
/// How many stay, the host knows from counts; which, is decided here. A leaving row that stays takes the place of a stored one that goes, or stands at the list's end; nothing else
/// moves. Where bases move, places of an epoch's rows are no others': lists close up (cuda/close_rows.cuh), and all rows that come stand at the end. Either way positions of the list do not ascend, and pages
/// that are shared with forks must be the sequence's own before. Heads with joint values have one fate, by the sum of their masses.
#pragma once

#include <cub/block/block_scan.cuh>

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/adapt.cuh"
#include "lowrankkv/cuda/close_rows.cuh"
#include "lowrankkv/cuda/keep_rows.cuh"
#include "lowrankkv/cuda/scaled_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kReplaceRows = 8;      ///< of a block of replace_rows_kernel

/// @brief What is known of leaving rows besides Leaving, and where the decision goes.
struct Eviction {
  const float* masses = nullptr;   ///< of leaving rows, [heads, stride], negative ones of those that are dropped whatever their mass; null: those of the tails
  std::int32_t* chosen = nullptr;  ///< [sequence of the batch, head, stride]: leaving rows that stay, ascending
  std::int32_t* freed = nullptr;   ///< the same: places of stored rows that go, ascending
  std::int32_t stride = 0;
  std::int32_t pinned = 0;         ///< positions below it stay in any case, and take nobody's place
  std::int32_t* counts = nullptr;    ///< [sequence of the batch, head]: how many places are freed; where lists close up, how many leaving rows stay
  const float* group_masses = nullptr;  ///< [sequence of the batch, group of heads, group_stride] of group_masses_kernel; null: every head has a fate of its own
  std::int64_t group_stride = 0;
  RowMoves moves;                    ///< where lists close up
};

/// @brief The stored rows and the leaving ones among which masses decide.
struct Weighed {
  int slot, stored, rows, added;  ///< rows: leaving ones; added: by which the list grows
  int first;                      ///< the first leaving row that is weighed: those before it go to another list
  int position;                   ///< of that one
  __device__ Weighed(const Tables& tables, const Leaving& leaving, int sequence, int head)
      : slot(leaving.slots[sequence]), stored(tables.num_rows(tables.weighed, slot, head)), added(leaving.added(tables.weighed, tables.weighed, sequence, stored)),
        first(tables.weighed == RowList::full ? 0 : leaving.full[sequence]), position(leaving.position[sequence] + first) {
    rows = leaving.rows[sequence] - first;
  }
};

/// @brief Masses of leaving rows of a head: of a packed prompt's [heads, stride], or the tail's.
__device__ inline float leaving_mass(const Tables& tables, const float* packed, std::int64_t stride, int slot, int head, int row) {
  if (packed != nullptr) return packed[head * stride + row];
  const int place = tables.lengths[slot].tail_first + row, ring = tables.ring_rows();
  return tables.tail_row_masses(slot, head)[place < ring ? place : place - ring];
}

/// @brief Sums of the masses of a group's heads, of stored rows, then of leaving ones: [sequence, group, stride]. Grid: rows x groups x sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) group_masses_kernel(Tables tables, Leaving leaving, const float* packed, std::int64_t packed_stride, std::int64_t stride, float* sums) {
  const int leader = static_cast<int>(blockIdx.y) * tables.joint_heads, row = static_cast<int>(blockIdx.x) * kStoreThreads + static_cast<int>(threadIdx.x);
  const Weighed weighed(tables, leaving, static_cast<int>(blockIdx.z), leader);
  if (row >= weighed.stored + weighed.rows) return;
  float sum = 0.0F;
  for (int head = leader; head < leader + tables.joint_heads; ++head) {
    sum += row < weighed.stored ? tables.row_masses(weighed.slot, head)[row] : leaving_mass(tables, packed, packed_stride, weighed.slot, head, weighed.first + row - weighed.stored);
  }
  sums[(static_cast<std::size_t>(blockIdx.z) * gridDim.y + blockIdx.y) * static_cast<std::size_t>(stride) + static_cast<std::size_t>(row)] = sum;
}

/// @brief Decides which of the stored and the leaving rows stay: as many as are stored and so many more as the list grows by, those with the largest masses, of equal ones those that came
/// first. Writes chosen, freed and counts, and gives rows that stay their masses and positions: the first ones at the list's end, the others in freed places. Lengths are those before.
/// Grid: heads, or groups of them, x sequences. The smallest key that stays (cuda/select_masses.cuh), then one pass that writes.
/// @tparam closes  lists close up, and leaving rows that stay stand behind them: writes chosen, counts and moves, and the list's length and segments are those before they are stored
template <bool closes>
__global__ void __launch_bounds__(kEvictThreads) evict_rows_kernel(Tables tables, Leaving leaving, Eviction eviction) {
  using Scan = detail::PlaceScan;
  __shared__ typename Scan::TempStorage storage;
  __shared__ MassSelection selection;
  const int heads = eviction.group_masses == nullptr ? 1 : tables.joint_heads, leader = static_cast<int>(blockIdx.x) * heads, sequence = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
  const Weighed weighed(tables, leaving, sequence, leader);
  const int slot = weighed.slot, stored = weighed.stored, rows = weighed.rows, all = stored + rows, added = weighed.added, wanted = stored + added;
  const float* masses = tables.row_masses(slot, leader);
  const std::int32_t* positions = tables.row_positions(tables.weighed, slot, leader);
  const float* sums = eviction.group_masses == nullptr ? nullptr : eviction.group_masses + (static_cast<std::size_t>(sequence) * gridDim.x + blockIdx.x) * static_cast<std::size_t>(eviction.group_stride);
  const auto list_of = [&](std::int32_t* lists, int head) { return lists + static_cast<std::size_t>(sequence * tables.num_heads + head) * static_cast<std::size_t>(eviction.stride); };
  std::int32_t *chosen = list_of(eviction.chosen, leader), *freed = list_of(eviction.freed, leader);
  const auto mass_of = [&](int head, int row) { return leaving_mass(tables, eviction.masses, eviction.stride, slot, head, weighed.first + row); };
  const auto key = [&](int row) {
    const bool leaves = row >= stored;
    const float mass = sums != nullptr ? sums[row] : leaves ? mass_of(leader, row - stored) : masses[row];
    return mass_key(mass, leaves ? weighed.position + row - stored : positions[row], eviction.pinned);
  };
  const std::uint64_t smallest = smallest_kept(key, all, wanted, selection);  // that stays
  [[maybe_unused]] int places = 0, kept = 0;
  int stay = 0;
  const RowMoves moves = eviction.moves.of(sequence * tables.num_heads + leader);
  if constexpr (closes) {
    kept = detail::plan_moves(tables, slot, leader, stored, [&](int row) { return key(row) >= smallest; }, moves, storage);
  } else {
    for (int base = 0; base < stored; base += kEvictThreads) {
      const bool goes = base + thread < stored && key(base + thread) < smallest;
      int place = 0, count = 0;
      Scan(storage).ExclusiveSum(goes ? 1 : 0, place, count);
      __syncthreads();
      if (goes) freed[places + place] = base + thread;
      places += count;
    }
  }
  for (int base = 0; base < rows; base += kEvictThreads) {
    const bool stays = base + thread < rows && key(stored + base + thread) >= smallest;
    int place = 0, count = 0;
    Scan(storage).ExclusiveSum(stays ? 1 : 0, place, count);
    __syncthreads();
    if (stays) chosen[stay + place] = weighed.first + base + thread;
    stay += count;
  }
  __syncthreads();  // the lists are written, and no key is read any more
  if constexpr (closes) {
    detail::move_numbers(tables, slot, leader, moves);
    for (int i = thread; i < stay; i += kEvictThreads) {
      tables.row_masses(slot, leader)[kept + i] = mass_of(leader, chosen[i] - weighed.first);
      tables.row_positions(tables.weighed, slot, leader)[kept + i] = leaving.position[sequence] + chosen[i];
      if (tables.residuals[static_cast<int>(tables.weighed)] != nullptr) tables.row_residuals(tables.weighed, slot, leader)[kept + i] = 0;  // the row may go to another epoch before what it lost is noted
    }
    if (thread == 0) {
      eviction.counts[sequence * tables.num_heads + leader] = stay;
      tables.rows[tables.index(slot, leader)].num_compressed = kept;
    }
  } else {
    for (int head = leader; head < leader + heads; ++head) {
      float* own_masses = tables.row_masses(slot, head);
      std::int32_t *own_positions = tables.row_positions(tables.weighed, slot, head), *own_chosen = list_of(eviction.chosen, head), *own_freed = list_of(eviction.freed, head);
      for (int i = thread; i < stay; i += kEvictThreads) {
        const int place = i < added ? stored + i : freed[i - added];
        own_masses[place] = mass_of(head, chosen[i] - weighed.first);
        own_positions[place] = leaving.position[sequence] + chosen[i];
        if (head == leader) continue;
        own_chosen[i] = chosen[i];
        if (i >= added) own_freed[i - added] = place;
      }
      if (thread == 0) eviction.counts[sequence * tables.num_heads + head] = places;
    }
  }
}

/// @brief Writes the keys and values of leaving rows that stay to freed places of the full list. Grid: pieces of kReplaceRows places x heads x sequences.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) replace_rows_kernel(Tables tables, RowSource source, Leaving leaving, Eviction eviction) {
  const int head = static_cast<int>(blockIdx.y), sequence = static_cast<int>(blockIdx.z), slot = leaving.slots[sequence], dim = tables.head_dim;
  const std::size_t list = (static_cast<std::size_t>(sequence) * gridDim.y + blockIdx.y) * static_cast<std::size_t>(eviction.stride);
  const std::int32_t *chosen = eviction.chosen + list + leaving.added(RowList::full, RowList::full, sequence, tables.num_rows(RowList::full, slot, head)), *freed = eviction.freed + list;
  const int first = static_cast<int>(blockIdx.x) * kReplaceRows, end = min(first + kReplaceRows, eviction.counts[sequence * tables.num_heads + head]);
  const HeadTiles& layout = tables.listed;
  const std::int32_t* table = tables.page_table(RowList::full, slot, head);
  const SourceRows rows(tables, source, slot, head);
  for (int i = first; i < end; ++i) {
    const int place = freed[i], in_tile = place % layout.rows;
    std::uint8_t* tile = tables.tile(table, layout, place / layout.rows);
    if (layout.scaled) {
      const int part_warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
      if (part_warp > 1) continue;  // a warp the key, one the value
      const Part part = part_warp == 0 ? Part::key : Part::value;
      const auto number = [&](int channel) { return rows.element(part, chosen[i], channel); };
      const __half step = detail::row_step(dim, number);
      if (lane == 0) *reinterpret_cast<__half*>(tile + layout.step_byte(part, in_tile)) = step;
      for (int channel = lane; channel < dim; channel += 32) tile[layout.plain_byte(part, in_tile, channel)] = static_cast<std::uint8_t>(detail::scaled_code(number(channel), detail::inverse_of(step)));
      continue;
    }
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

/// @brief Of stored and leaving rows, those with the largest masses stay. Returns the order of leaving ones that do: first those that go to the list's end, then, `replacing` a sequence at
/// most, those that take the places of others, of which full rows are stored here. The pages of the lists are the sequences' own. Up to three launches. @param pinned  positions below it stay  @param masses  Eviction::masses
/// @tparam closes  bases move: none takes another's place, and the device alone knows where lists end until the rows are stored
template <bool closes>
RowOrder evict_rows(const LayerState& layer, const Leaving& leaving, std::int64_t pinned, const float* masses, const RowSource& source, const CompressScratch& scratch, std::int64_t& replacing, cudaStream_t stream) {
  const Tables& tables = layer.tables();
  const bool full = tables.weighed == RowList::full, joint = !full && tables.joint_heads > 0;
  Eviction eviction{masses, scratch.chosen, scratch.rest, scratch.rows, static_cast<std::int32_t>(pinned), scratch.replaced, nullptr, 0, scratch.moves};
  const unsigned heads = static_cast<unsigned>(tables.num_heads), sequences = static_cast<unsigned>(leaving.count), fates = joint ? heads / static_cast<unsigned>(tables.joint_heads) : heads;
  std::int64_t most_rows = 0;
  replacing = 0;
  for (int i = 0; i < leaving.count; ++i) {
    const std::int64_t stored = layer.sequence(leaving.slots[i]).num_rows(tables.weighed);
    most_rows = (std::max)(most_rows, stored + leaving.rows[i]);
    replacing = (std::max)(replacing, (std::min)(std::int64_t{leaving.offered(tables.weighed, i)} - leaving.added(tables.weighed, tables.weighed, i, static_cast<std::int32_t>(stored)), stored));
  }
  if (joint) {
    eviction.group_masses = scratch.group_masses;
    eviction.group_stride = most_rows;
    const dim3 grid(static_cast<unsigned>((most_rows + kStoreThreads - 1) / kStoreThreads), fates, sequences);
    group_masses_kernel<><<<grid, kStoreThreads, 0, stream>>>(tables, leaving, eviction.masses, eviction.stride, eviction.group_stride, scratch.group_masses);
    check(cudaGetLastError(), "group_masses_kernel");
  }
  evict_rows_kernel<closes><<<dim3(fates, sequences), kEvictThreads, 0, stream>>>(tables, leaving, eviction);
  check(cudaGetLastError(), "evict_rows_kernel");
  if constexpr (closes) {
    Batch batch;
    batch.count = leaving.count;
    std::copy_n(leaving.slots, leaving.count, batch.slots);
    if (replacing > 0) move_rows(tables, batch, scratch.moves, tables.num_heads, most_rows, stream);
    trim_rolls(tables, layer.rolls(), batch, stream);
    replacing = 0;
    return {scratch.chosen, scratch.rows, scratch.replaced, 1, 0};
  } else if (full && replacing > 0) {
    replace_rows_kernel<><<<dim3(static_cast<unsigned>((replacing + kReplaceRows - 1) / kReplaceRows), heads, sequences), kStoreThreads, 0, stream>>>(tables, source, leaving, eviction);
    check(cudaGetLastError(), "replace_rows_kernel");
  }
  return {scratch.chosen, scratch.rows, nullptr, 0, 0};
}

/// @brief Enqueues renew_masses_kernel: the tail is rows [first, first + count) of a packed prompt now.
template <class = void>
void renew_masses(const LayerState& layer, int slot, const CompressScratch& scratch, int first, int count, cudaStream_t stream) {
  renew_masses_kernel<><<<static_cast<unsigned>(layer.tables().num_heads), kStoreThreads, 0, stream>>>(layer.tables(), slot, scratch.masses, scratch.rows, first, count);
  check(cudaGetLastError(), "renew_masses_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
