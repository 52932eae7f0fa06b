// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/attend_pre_rope.cuh  Decode attention over plain tiles with
/// pre-RoPE keys: rows at full rank, the tail, and coefficients in f16 or bf16.
///
/// As attend_plain.cuh, with two differences. Logits come from keys that are up-projected and
/// rotated on read (cuda/attention/pre_rope/rope_on_read.cuh). Keys and values of a tile are
/// fetched alternately: there is more arithmetic to hide memory latency behind, and less shared
/// memory.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/attend_plain.cuh"
#include "lowrankkv/cuda/attention/pre_rope/rope_on_read.cuh"
#include "lowrankkv/cuda/tiles/code_products.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// The rows of one list that a warp of a pre-RoPE kernel attends to, and their positions.
struct PreRopeRows {
  /// Rows of the list. Of a tail: places of its ring. Of a prompt: rows up to the last one that a
  /// query of the block sees.
  int rows = 0;
  /// Position of row 0 if positions are contiguous.
  int first_position = 0;
  /// Otherwise: the position of every row.
  const std::int32_t* listed = nullptr;
  /// Or: the positions of the full rows, ascending. Compressed rows have the other positions.
  const std::int32_t* others = nullptr;
  int num_others = 0;
  /// Full rows before the tile that find() saw last; -1 if it saw none yet.
  int before = -1;
  DeviceLengths lengths;
  bool tail = false;
  const DeviceShift* shifts = nullptr;  ///< position shifts of the sequence
  int num_shifts = 0;

  /// Reads the position shifts of a sequence.
  __device__ void read_shifts(const Rotary& rotary, int slot) {
    num_shifts = __ldg(rotary.num_shifts + slot);
    shifts = rotary.shifts + slot * kMaxShifts;
  }
  /// Sets up the positions of the compressed rows of a head: listed, or else among the full rows.
  template <bool edits>
  __device__ __forceinline__ void read_compressed(const LayerTables<edits>& tables, int slot,
                                                  int head) {
    first_position = num_others = tables.num_rows(RowList::full, slot, head);
    listed = tables.row_positions(RowList::compressed, slot, head);
    others = listed == nullptr ? tables.row_positions(RowList::full, slot, head) : nullptr;
  }

  /// The number of full rows before compressed row `row`. A full row is one of them if fewer than
  /// row + 1 compressed rows stand before it.
  __device__ int others_before(int row) const {
    int low = 0, high = num_others;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (__ldg(others + middle) - middle <= row)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  /// Finds the positions of rows [first, first + 16 steps). Tiles come in ascending order. All
  /// lanes of a warp call it.
  template <int steps>
  __device__ __forceinline__ void find(int first, TilePlaces<steps>& tile) {
    tile.contiguous = !tail && listed == nullptr && num_shifts == 0;
    // No full row may stand between the tile's rows.
    if (others != nullptr) {
      meet_others(first);
      tile.contiguous = tile.contiguous && compressed_before(before) >= first + 16 * steps;
    }
    tile.base = first_position + first + (others != nullptr ? before - num_others : 0);
    if (!tile.contiguous) find_places<steps>(first, tile.places);
  }
  /// Positions of the lane's rows first + 16 i + 8 r + lane / 4; kNoPlace where there is no row.
  template <int steps>
  __device__ __forceinline__ void find_places(int first, int (&places)[steps][2]) {
    find_tokens<steps>(first, places);
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      int& place = places[i / 2][i % 2];
      const int token = place;
      for (int piece = 0; piece < num_shifts; ++piece) {
        const DeviceShift shift{__ldg(&shifts[piece].first), __ldg(&shifts[piece].offset),
                                __ldg(&shifts[piece].divisor)};
        if (token >= shift.first) place = shift.position(token);
      }
      place = token < 0 ? kNoPlace : place;
    }
  }
  /// The number of compressed rows before full row `at`.
  __device__ int compressed_before(int at) const {
    return at < num_others ? __ldg(others + at) - at : INT32_MAX;
  }
  /// Counts the full rows before compressed row `first` into `before`.
  __device__ __forceinline__ void meet_others(int first) {
    before = before < 0 ? others_before(first) : before;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int step = 32; step == 32; before += step)
      step = __popc(__ballot_sync(~0U, compressed_before(before + lane) <= first));
  }
  /// Tokens of the lane's rows; -1 where there is no row. `before` must be up to date.
  template <int steps>
  __device__ __forceinline__ void find_tokens(int first, int (&places)[steps][2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = first + 16 * i + 8 * r + lane / 4;
        int& place = places[i][r];
        if (tail) {
          const int index = at < rows ? (at - lengths.tail_first + rows) % rows : rows;
          place = index < lengths.tail_length ? lengths.tail_position + index : -1;
        } else {
          place = at >= rows          ? -1
                  : listed != nullptr ? __ldg(listed + at)
                  : others != nullptr ? at
                                      : first_position + at;
        }
      }
    }
    if (others == nullptr) return;
    for (int at = before, step = 32; step == 32; at += step) {
      const int mine = compressed_before(at + lane);
      step = __popc(__ballot_sync(~0U, mine < first + 16 * steps));
      for (int other = 0; other < step; ++other) {
        const int limit = __shfl_sync(~0U, mine, other);
#pragma unroll
        for (int i = 0; i < 2 * steps; ++i)
          places[i / 2][i % 2] +=
              places[i / 2][i % 2] >= 0 && first + 8 * i + lane / 4 >= limit ? 1 : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i)
      places[i / 2][i % 2] += places[i / 2][i % 2] >= 0 ? before : 0;
  }
};

/// Logits of a plain tile of coefficients, as pre_rope_logits() returns them.
/// @param operands  of the up-projection map
template <DType type, int max_units, bool scattered>
__device__ __forceinline__ void plain_logits(const Rotary& rotary, const RopeShared& rope,
                                             const std::uint8_t* tile, int key_units,
                                             const uint4* operands, int head_dim,
                                             std::uint32_t* rotated,
                                             const TilePlaces<rotated_steps(max_units)>& places,
                                             float (&s)[rotated_steps(max_units)][4]) {
  constexpr int steps = rotated_steps(max_units), at_once = max_units <= 2 ? steps / 2 : steps;
  const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
  const uint4* words = reinterpret_cast<const uint4*>(tile) + lane;
  pre_rope_logits<steps, at_once, scattered>(
      rotary, rope, head_dim, rotated, places,
      [&](int first_step, auto&& use) {
        const auto read = [&](int i, int unit) {
          return half_words<type>(words[((first_step + i) * key_units + unit) * 32]);
        };
        const auto key_up_block = [&](auto all, auto&& keys) {
          use([&](int at, std::uint32_t(&x)[at_once][2], std::uint32_t(&y)[at_once][2]) {
            up_project_pairs<at_once, max_units, decltype(all)::value == 1>(
                operands, head_dim, keys, key_units, at, rope.means[4 * at + t], x, y);
          });
        };
        if constexpr (max_units <= 2) {  // they fit registers
          uint4 keys[at_once][max_units];
#pragma unroll
          for (int i = 0; i < at_once * max_units; ++i)
            keys[i / max_units][i % max_units] =
                i % max_units < key_units ? read(i / max_units, i % max_units) : uint4{};
          key_up_block(Constant<1>{}, [&](int i, int unit) { return keys[i][unit]; });
        } else {
          key_up_block(Constant<0>{}, read);
        }
      },
      s);
}

/// Writes a warp's state over the memory of the rotated queries and merges the states of the
/// block's warps into one. All threads call it.
/// @param weight  sums of weights with the gains of each scale group
/// @param channel  (unit, i) -> channel of the lane's i-th value of a unit; negative: none
template <int scale_groups, int max_units, class Channel>
__device__ inline void finish_rotation(std::uint8_t* memory, float top, float sum,
                                       const float (&weight)[scale_groups],
                                       const float (&out)[max_units][4], int units, int channels,
                                       Channel&& channel, float* factors, float* target) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  __syncthreads();  // the queries are no longer needed
  float* const states = reinterpret_cast<float*>(memory);
  float* const state =
      states + static_cast<std::size_t>(threadIdx.x / 32) *
                   static_cast<std::size_t>((2 + scale_groups + channels) * kBlockColumns);
  if (g == 0) {
    state[t] = top;
    state[kBlockColumns + t] = sum;
    state[2 * kBlockColumns + t] = weight[0];
    if constexpr (scale_groups == 2) state[(3 + channels) * kBlockColumns + t] = weight[1];
  }
#pragma unroll
  for (int unit = 0; unit < max_units; ++unit) {
    if (unit < units) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (channel(unit, i) >= 0) state[(3 + channel(unit, i)) * kBlockColumns + t] = out[unit][i];
      }
    }
  }
  __syncthreads();
  merge_warps(states, channels + scale_groups - 1, 0.0F, factors, target);
}

}  // namespace detail

/// @brief Partial states of plain rows. Grid: (blocks x blocks of columns) x heads x sequences.
///
/// Entries are splits; a block attends to every blocks-th entry. Entries of `recent` are the tail,
/// then the splits of the full rows; `prompt` has one entry. Depends on earlier kernels only for
/// what they all read.
/// @tparam type  of the tiles
/// @tparam which  rows
/// @tparam max_units  units of keys, or of values, that a tile may have
/// @tparam scaled  full rows in pages are in 8 bits
/// @tparam segmented  compressed rows may be of several epochs; a split is of one epoch
/// @tparam scattered  rows of lists may stand in any order
/// @param stage_bytes  of a ring's stage: the keys, or the values, of a tile
/// @param key_up_units  units of the up-projection maps that are copied to shared memory, behind
///   the rings; 0: the maps stay in global memory
template <DType type, PlainRows which, int max_units, bool scaled, bool segmented, bool scattered>
__global__ void __launch_bounds__(32 * pre_rope_warps(max_units))
    attend_pre_rope_kernel(LayerView tables, AttentionStep step, Batch batch, StepQueries queries,
                           int first_sequence, int blocks, int stage_bytes, int ring_bytes,
                           int key_up_units) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ __align__(8) std::uint64_t barriers[pre_rope_warps(max_units)][kPreRopeStages];
  __shared__ __align__(16) float factors[pre_rope_warps(max_units) * kBlockColumns];
  constexpr bool coded = which == PlainRows::compressed, prompt = which == PlainRows::prompt,
                 recent = which == PlainRows::recent;
  constexpr int steps = rotated_steps(max_units), tile_rows = steps * kPlainRows;
  // Whether the next split's tiles are fetched while states are merged. Where sixteen warps share
  // the registers, that costs more than it gains.
  constexpr bool ahead = !coded || max_units > 2;
  const int first_entry = static_cast<int>(blockIdx.x) / step.blocks,
            block = static_cast<int>(blockIdx.x) % step.blocks;
  const int head = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z),
            head_dim = tables.head_dim;
  if (slot < 0) {
    if (!recent) wait_for_last_kernel();
    return;
  }
  const RowList list = coded ? RowList::compressed : RowList::full;
  const DeviceLengths lengths = tables.lengths[slot];
  const int last_token = min((block + 1) * kBlockColumns - 1, step.columns() - 1) / step.group;
  const int list_rows =
                prompt ? step.prompt_first + last_token + 1 : tables.num_rows(list, slot, head),
            list_splits = prompt      ? 1
                          : segmented ? tables.list_splits(slot, head, list_rows)
                                      : splits_of(list_rows),
            entries = list_splits + (recent ? 1 : 0);
  if (first_entry >= entries) {
    if (!recent) wait_for_last_kernel();
    return;
  }
  static_assert((!scaled || recent) && (!segmented || coded));
  // Tiles of a tail are laid out as `full`.
  const HeadTiles layout = coded ? tables.compressed[head] : prompt ? tables.full : tables.listed;
  const std::uint8_t* const rows_of_prompt =
      step.prompt + static_cast<std::size_t>(head) * static_cast<std::size_t>(step.prompt_tiles) *
                        static_cast<std::size_t>(layout.bytes);
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int key_units = layout.key_units, value_units = layout.value_units;
  int key_bytes = layout.value_offset, tile_bytes = layout.bytes;
  // Rows of a stored tile. Tiles of full rows in pages may have fewer than a warp processes at
  // once.
  int stored_rows = tile_rows;
  TileRing<kPreRopeStages> ring(shared_memory + warp * kPreRopeStages * stage_bytes, barriers[warp],
                                stage_bytes);
  // A prompt's tiles are not in pages.
  PageWalk walk(tables, tables.page_table(list, slot, head), prompt ? tables.listed : layout, 0);
  bool tail = false;
  SegmentRows rows_of{0, 0, list_rows, 0, list_splits};  // rows of the entry's segment
  int first = 0, last = 0;                               // the entry's tiles
  const std::uint8_t* next = nullptr;
  // Called for every warps-th tile, in order.
  const auto tile_at = [&](int tile) -> const std::uint8_t* {
    if (tile >= last) return nullptr;
    const std::size_t place = static_cast<std::size_t>(tile) * static_cast<std::size_t>(tile_bytes);
    return prompt ? rows_of_prompt + place
           : tail ? tables.tail(slot, head) + place
                  : walk.next(warps);
  };
  // Starts an entry: its first tiles are in flight afterwards.
  const auto begin = [&](int entry) {
    tail = recent && entry == 0;
    if (recent) {
      key_bytes = tail ? tables.full.value_offset : layout.value_offset;
      tile_bytes = tail ? tables.full.bytes : layout.bytes;
      stored_rows = tail ? tile_rows : layout.rows;
    }
    [[maybe_unused]] int segment = 0;
    if constexpr (segmented)
      rows_of = tables.segment_of_split(slot, head, list_rows, entry, segment);
    const int splits = tail ? 1 : rows_of.splits,
              first_tile = segmented ? rows_of.begin / tile_rows : 0;
    const int tiles = ((tail ? tables.ring_rows() : rows_of.end) + stored_rows - 1) / stored_rows,
              per_split = (tiles - first_tile + splits - 1) / splits;
    first = tail ? 0 : first_tile + (recent ? entry - 1 : entry - rows_of.first_split) * per_split;
    last = min(tiles, first + per_split);
    walk.seek(first + warp);
    next = tile_at(first + warp);
    ring.fetch(next, key_bytes);
    ring.fetch(next == nullptr ? nullptr : next + key_bytes, tile_bytes - key_bytes);
  };
  if (ahead) begin(first_entry);
  release_next_kernel();
  const KeyUpMap key_up = coded ? tables.maps[head].key_up : KeyUpMap{};
  const uint4* map = key_up.operands;  // in global memory
  [[maybe_unused]] int epoch = -1;     // epoch of the map, if there are several
  RopeShared rope(shared_memory + ring_bytes, tables.rotary, head_dim, coded ? &key_up : nullptr);
  const int copied = coded && key_up_units > 0 ? cuda::key_up_units(false, key_units) : 0;
  if constexpr (!segmented) rope.copy_map(map, head_dim, copied);
  // Holds rotated queries during an entry and states at its end.
  std::uint8_t* const states =
      shared_memory + ring_bytes + rope_block_bytes(head_dim, key_up_units);
  std::uint32_t* const rotated =
      reinterpret_cast<std::uint32_t*>(states + warp * rope_warp_bytes(head_dim));
  rope.load_queries(queries, tables.rotary, step, static_cast<int>(blockIdx.z), head, block,
                    head_dim);
  const float unit_of_logits = rope.largest[t] * (coded                ? __ldg(key_up.scales).y
                                                  : type == DType::f16 ? 1.0F
                                                                       : 1.0F / kRotatedBFloat);
  // Rows of the tail, or of the prompt, that a column sees: those up to its own token. With a
  // prompt, the rows of the tail are packed in front of it, so the tail itself is not attended to.
  const int token = min((block * kBlockColumns + t) / step.group, step.m - 1);
  const int limit = prompt                   ? step.prompt_first + token + 1
                    : step.prompt != nullptr ? 0
                    : step.sees_all          ? lengths.tail_length
                                             : lengths.tail_length - step.m + token + 1;
  for (int entry = first_entry; entry < entries; entry += blocks) {
    if (!ahead) begin(entry);
    [[maybe_unused]] const int first_row = rows_of.begin;
    if constexpr (segmented) {
      // Uniform over the block; no thread reads the previous map any more.
      if (rows_of.epoch != epoch) {
        epoch = rows_of.epoch;
        map = tables.maps[epoch * tables.num_heads + head].key_up.operands;
        rope.copy_map(map, head_dim, copied);
        __syncthreads();
      }
    }
    detail::PreRopeRows range;
    range.read_shifts(tables.rotary, slot);
    range.lengths = lengths;
    range.tail = tail;
    range.rows = range.tail ? tables.ring_rows() : rows_of.end;
    if constexpr (coded) {
      range.read_compressed(tables, slot, head);
    } else {
      range.listed = range.tail || prompt ? nullptr : tables.row_positions(list, slot, head);
      range.first_position = prompt ? lengths.tail_position : 0;
    }
    float out[max_units][4] = {}, top = -INFINITY, sum = 0.0F;
    const auto attend_tiles = [&](auto bytes) {
      constexpr bool in_bytes = decltype(bytes)::value;
      const float unit = in_bytes ? rope.largest[t] : unit_of_logits;
      for (int tile = first + warp; tile < last; tile += warps) {
        next = tile_at(tile + warps);
        const std::uint8_t* here = ring.wait();
        TilePlaces<steps> places;
        range.find(tile * stored_rows, places);
        float s[steps][4];
        if constexpr (coded) {
          const auto with_map = [&](const uint4* operands) {
            detail::plain_logits<type, max_units, scattered>(
                tables.rotary, rope, here, key_units, operands, head_dim, rotated, places, s);
          };
          if (key_up_units > 0)
            with_map(rope.operands);
          else
            with_map(map);
        } else {
          pre_rope_logits<steps, steps, scattered>(
              tables.rotary, rope, head_dim, rotated, places,
              [&](int, auto&& use) {
                use([&](int at, std::uint32_t(&x)[steps][2], std::uint32_t(&y)[steps][2]) {
                  read_pairs<type, steps, in_bytes>(
                      tables.rotary, here + (in_bytes ? layout.key_offset : 0), key_units, at, x, y,
                      recent ? stored_rows / kPlainRows : steps);
                });
              },
              s);
        }
        std::uint32_t p[steps][2];
        float logits[steps][2], best = top;
        // Quantizer steps of the rows. Steps of keys multiply logits. Steps of values multiply
        // weights, as logarithms added to logits.
        float key_steps[steps][2], value_steps[steps][2];
#pragma unroll
        for (int i = 0; i < 2 * steps && in_bytes; ++i) {
          key_steps[i / 2][i % 2] = detail::step_of(layout, here, Part::key, 8 * i + g);
          value_steps[i / 2][i % 2] =
              fmaxf(detail::step_of(layout, here, Part::value, 8 * i + g), kLeastStep);
        }
        __syncwarp();
        ring.fetch(next, key_bytes);
#pragma unroll
        for (int i = 0; i < steps; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            logits[i][r] = (s[i][2 * r] + s[i][2 * r + 1]) * unit;
            if constexpr (in_bytes)
              logits[i][r] = fmaf(logits[i][r], key_steps[i][r], __log2f(value_steps[i][r]));
          }
        }
        // Rows of the tile that the column sees.
        const int seen = min(stored_rows, (prompt ? limit : range.rows) - tile * stored_rows);
        // Rows of the tile that belong to earlier epochs.
        const int before = segmented ? first_row - tile * tile_rows : 0;
        if (range.tail || before > 0 || __any_sync(~0U, seen < tile_rows)) {
#pragma unroll
          for (int i = 0; i < 2 * steps; ++i) {
            const int at = 8 * i + g;
            if (at >= seen || at < before ||
                (range.tail &&
                 (tile * stored_rows + at - range.lengths.tail_first + range.rows) % range.rows >=
                     limit))
              logits[i / 2][i % 2] = -INFINITY;
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * steps; ++i) best = fmaxf(best, logits[i / 2][i % 2]);
        best = column_max(best);
        if (__any_sync(~0U, best > top)) {
          const float correction = top == best ? 1.0F : exp2_fast(top - best);
          sum *= correction;
          top = best;
#pragma unroll
          for (int unit = 0; unit < max_units; ++unit) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[unit][i] *= correction;
          }
        }
        const float base = best == -INFINITY ? 0.0F : best;  // a column may see no row of this tile
#pragma unroll
        for (int i = 0; i < steps; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float e = exp2_fast(logits[i][r] - base);
            sum += in_bytes ? __fdividef(e, value_steps[i][r]) : e;
            p[i][r] = transposed(split_in_two<type>(e));
          }
        }
        const std::uint8_t* values = ring.wait();
#pragma unroll
        for (int i = 0; i < steps; ++i) {
          if (recent && i * kPlainRows >= stored_rows) continue;
#pragma unroll
          for (int unit = 0; unit < max_units; ++unit) {
            if (unit >= value_units) continue;
            uint4 a;
            if constexpr (in_bytes)
              a = detail::scaled_words<type>(
                  reinterpret_cast<const uint2*>(values)[(i * value_units + unit) * 32 + lane]);
            else
              a = reinterpret_cast<const uint4*>(values)[(i * value_units + unit) * 32 + lane];
            mma_plain<type>(out[unit], a, p[i][0], p[i][1]);
          }
        }
        __syncwarp();
        ring.fetch(next == nullptr ? nullptr : next + key_bytes, tile_bytes - key_bytes);
      }
    };
    if constexpr (scaled) {
      if (range.tail)
        attend_tiles(std::false_type{});
      else
        attend_tiles(std::true_type{});
    } else {
      attend_tiles(std::false_type{});
    }
#pragma unroll
    // Adds the products with high and low parts of the weights.
    for (int unit = 0; unit < max_units; ++unit) {
      out[unit][0] += out[unit][1];
      out[unit][2] += out[unit][3];
    }
    const std::size_t row =
        static_cast<std::size_t>(sequence) * static_cast<std::size_t>(tables.num_heads) +
        static_cast<std::size_t>(head);
    const int target = step.first_entry(coded        ? Source::compressed
                                        : prompt     ? Source::prompt
                                        : range.tail ? Source::tail
                                                     : Source::full) +
                       (range.tail || prompt ? 0
                        : recent             ? entry - 1
                                             : entry);
    const float total = column_sum(sum);
    if (ahead && entry + blocks < entries) begin(entry + blocks);
    const float weights[1] = {total};
    detail::finish_rotation(
        states, top, total, weights, out, value_units, layout.channels(Part::value),
        [&](int unit, int i) { return i % 2 == 0 ? unit * kPlainUnit + 4 * i + g : -1; }, factors,
        step.state(row, target, block));
    __syncthreads();  // states were merged; queries may overwrite them
  }
  // Kernels after this one then also come after the kernel before it.
  if (which != PlainRows::recent) wait_for_last_kernel();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
