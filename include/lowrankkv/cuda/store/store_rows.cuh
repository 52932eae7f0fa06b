// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/store_rows.cuh  Stores flushed rows: at full rank as they are, or projected,
/// quantised and packed into tiles.
///
/// A block stores the rows that fall into 64 consecutive rows of a list of one KV head. Codes and
/// gains are those of quantizer/code_layout.hpp.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/store/plain_tiles.cuh"
#include "lowrankkv/cuda/store/project_rows.cuh"
#include "lowrankkv/cuda/tiles/int8_tiles.cuh"
#include "lowrankkv/cuda/tiles/row_gains.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What is stored: full-rank rows in plain tiles, coefficients in plain tiles, or codes.
enum class StoreForm : std::uint8_t { full, coefficients, codes };

namespace detail {

/// What a channel of a tile holds: bits from `shift` on of the code of coefficient `source` (see
/// TileChannel), which has 2 half_range levels.
struct CodePlan {
  std::int16_t source;
  std::uint16_t shift;
  float half_range;
};

/// Shared memory of store_rows_kernel in bytes: rows, then either the coefficients of keys and
/// values as plain tiles have them, or the f32 coefficients of one part, gains, plans and a tile of
/// codes.
__host__ __device__ inline std::size_t store_bytes(StoreForm form, RowPath path, int head_dim,
                                                   int max_rank, int tile_bytes, int scale_groups) {
  if (form == StoreForm::full)
    return static_cast<std::size_t>(2 * kStoreRows * 2 * plain_stride(head_dim));
  const int results = form == StoreForm::coefficients
                          ? 2 * kStoreRows * 2 * plain_stride(max_rank)
                          : kStoreRows * 4 * (max_rank + 1 + scale_groups) + tile_bytes +
                                kMaxUnits * kCodeUnit * static_cast<int>(sizeof(CodePlan));
  return static_cast<std::size_t>(path_bytes(path, head_dim) + results);
}

/// A row's gain: its stored bits, and the number that they stand for.
struct StoredGain {
  std::uint16_t bits = 0;
  float value = 0.0F;
};

/// Weighted sums of squares (ScaleKind::norm_log8) or largest magnitudes of coefficients [first,
/// end) of each of `rows` rows. A warp calls it; lane i gets that of row i.
/// @param coefficients  of the first row
__device__ __forceinline__ float size_of_rows(const PartMaps& maps, const float* coefficients,
                                              int stride, int rows, int first, int end) {
  const bool norm = maps.gains == ScaleKind::norm_log8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float result = 0.0F;
  for (int row = 0; row < rows; ++row) {
    const float* own = coefficients + row * stride;
    float size = 0.0F;
    for (int channel = first + lane; channel < end; channel += 32) {
      const float weighted = norm ? own[channel] * maps.norm_weights[maps.bits[channel]] : 0.0F;
      size = norm ? fmaf(weighted, weighted, size) : fmaxf(size, fabsf(own[channel]));
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(~0U, size, distance);
      size = norm ? size + other : fmaxf(size, other);
    }
    if (lane == row) result = size;
  }
  return result;
}

/// The gains of a warp's rows for one scale group, of channels [first, end); lane i gets that of
/// row i. ScaleKind says how they are chosen.
/// @param coefficients  in steps, of the first row
__device__ __forceinline__ StoredGain gains_of_rows(const PartMaps& maps, const float* coefficients,
                                                    int stride, int rows, int first, int end,
                                                    int group) {
  const float size = size_of_rows(maps, coefficients, stride, rows, first, end);
  if (maps.gains != ScaleKind::norm_log8) {
    // Rounded up: nothing is clipped.
    const __half up = __float2half_ru(fminf(size / maps.reference[group], 65504.0F));
    return {__half_as_ushort(up), __half2float(up)};
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int of_norm = gain_code(sqrtf(size) / maps.reference[group]);
  int chosen = of_norm;
  for (int row = 0; row < rows; ++row) {
    const int norm = __shfl_sync(~0U, of_norm, row);
    if (norm == 0) continue;
    int codes[kTriedGains];
    float errors[kTriedGains] = {}, gains[kTriedGains], inverses[kTriedGains];
#pragma unroll
    for (int i = 0; i < kTriedGains; ++i) {
      codes[i] = min(255, max(1, norm + gain_offset(i)));
      gains[i] = gain_of(codes[i]);
      inverses[i] = 1.0F / gains[i];
    }
    for (int channel = first + lane; channel < end; channel += 32) {
      const float own = coefficients[row * stride + channel],
                  half_range = static_cast<float>(1 << maps.bits[channel]) * 0.5F;
#pragma unroll
      for (int i = 0; i < kTriedGains; ++i) {
        const float level =
            fminf(fmaxf(floorf(own * inverses[i]), -half_range), half_range - 1.0F) + 0.5F;
        const float error = fmaf(-level, gains[i], own);
        errors[i] = fmaf(error, error, errors[i]);
      }
    }
    int best = norm;
    float least = INFINITY;
#pragma unroll
    for (int i = 0; i < kTriedGains; ++i) {
      for (int distance = 16; distance > 0; distance /= 2)
        errors[i] += __shfl_xor_sync(~0U, errors[i], distance);
      if (errors[i] < least) {
        least = errors[i];
        best = codes[i];
      }
    }
    if (lane == row) chosen = best;
  }
  return {static_cast<std::uint16_t>(chosen), gain_of(chosen)};
}

/// The code, of 2 half_range levels, of a coefficient in steps divided by its gain.
__device__ inline std::uint32_t code_of(float coefficient, float half_range) {
  return static_cast<std::uint32_t>(fminf(fmaxf(0.0F, floorf(coefficient) + half_range),
                                          2.0F * half_range - 1.0F));  // NaN becomes code 0
}

/// Shared memory in which a tile of codes is packed.
struct CodeMemory {
  float* coefficients;   // [kStoreRows, rank + 1]
  float* inverse_gains;  // [scale groups, kStoreRows]
  std::uint32_t* tile;
  CodePlan* plan;  // [channels of a part]
};

/// Loads the plans of the channels of a part into shared memory. The caller synchronises.
__device__ inline void load_plan(const PartMaps& maps, CodePlan* plan) {
  for (int channel = static_cast<int>(threadIdx.x); channel < maps.width;
       channel += kStoreThreads) {
    const TileChannel place = maps.channels[channel];
    plan[channel] = {place.source, place.shift, static_cast<float>(1 << place.bits) * 0.5F};
  }
}

/// Computes the gains of rows [begin, end), and writes them into the tile, and as inverses.
template <int scale_groups>
__device__ void store_gains(const HeadTiles& layout, const PartMaps& maps, Part part,
                            const CodeMemory& memory, int begin, int end) {
  constexpr int kWarpRows = kStoreRows / (kStoreThreads / 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            row = warp * kWarpRows + lane;
#pragma unroll
  for (int group = 0; group < scale_groups; ++group) {
    const int first = group == 0 ? 0 : maps.first_coded,
              last = scale_groups == 2 && group == 0 ? maps.first_coded : maps.coded;
    const StoredGain gain =
        gains_of_rows(maps, memory.coefficients + warp * kWarpRows * (maps.rank + 1), maps.rank + 1,
                      kWarpRows, first, last, group);
    if (lane >= kWarpRows || row < begin || row >= end) continue;
    std::uint8_t* place =
        reinterpret_cast<std::uint8_t*>(memory.tile) + layout.gain_place(part, row, group);
    if (layout.gain_bytes() == 1)
      *place = static_cast<std::uint8_t>(gain.bits);
    else
      *reinterpret_cast<std::uint16_t*>(place) = gain.bits;
    memory.inverse_gains[group * kStoreRows + row] = gain.value > 0.0F ? 1.0F / gain.value : 0.0F;
  }
}

/// Packs the codes of rows [begin, end) of a unit: words first_word, first_word + step, ... Codes
/// of rows before `begin` stay. Codes of rows from `end` on stay if keeps_later; else their bits
/// become zeros.
/// @param plan  of the unit's channels
template <Part part, int bits, bool keeps_later>
__device__ __forceinline__ void pack_words(const CodeMemory& memory, const float* inverse_gains,
                                           int stride, const CodePlan* plan, std::uint32_t* unit,
                                           int begin, int end, int first_word, int step) {
  constexpr std::uint32_t mask = (1U << bits) - 1U;
  for (int word = first_word; word < code_unit_bytes(bits) / 4; word += step) {
    std::uint32_t fresh = 0, kept = 0;
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
#pragma unroll
      for (int q = 0; q < 8 / bits; ++q) {
        const CodeIndex index =
            part == Part::key ? key_code(bits, word, q, byte) : value_code(bits, word, q, byte);
        const CodePlan channel = plan[index.channel];
        const int shift = 8 * byte + bits * q;
        if (index.row < begin || (keeps_later && index.row >= end)) kept |= mask << shift;
        if (index.row < begin || index.row >= end || channel.source < 0) continue;
        const std::uint32_t code = code_of(
            memory.coefficients[index.row * stride + channel.source] * inverse_gains[index.row],
            channel.half_range);
        fresh |= (code >> channel.shift & mask) << shift;
      }
    }
    unit[word] = (keeps_later || begin > 0 ? unit[word] & kept : 0U) | fresh;
  }
}

/// pack_words() for all words of a unit in shared memory, by all threads.
template <Part part, int bits, bool keeps_later>
__device__ void pack_unit(const CodeMemory& memory, const float* inverse_gains, int stride,
                          const CodePlan* plan, std::uint32_t* unit, int begin, int end) {
  pack_words<part, bits, keeps_later>(memory, inverse_gains, stride, plan, unit, begin, end,
                                      static_cast<int>(threadIdx.x), kStoreThreads);
}

/// pack_unit() for all units of a part.
template <Part part, int scale_groups, bool keeps_later = false>
__device__ void store_codes(const HeadTiles& layout, const CodeMemory& memory, int stride,
                            int begin, int end) {
  const int units = part == Part::key ? layout.key_units : layout.value_units;
  std::uint32_t* words = memory.tile + layout.offset(part) / 4;
  for (int unit = 0; unit < units; ++unit) {
    const int bits = part == Part::key ? layout.key_widths[unit] : layout.value_widths[unit];
    const CodePlan* plan = memory.plan + unit * kCodeUnit;
    const float* inverse_gains =
        memory.inverse_gains +
        (scale_groups == 2 && unit >= layout.first_units(part) ? kStoreRows : 0);
    if (bits == 8)
      pack_unit<part, 8, keeps_later>(memory, inverse_gains, stride, plan, words, begin, end);
    else if (bits == 4)
      pack_unit<part, 4, keeps_later>(memory, inverse_gains, stride, plan, words, begin, end);
    else if (bits == 2)
      pack_unit<part, 2, keeps_later>(memory, inverse_gains, stride, plan, words, begin, end);
    else
      pack_unit<part, 1, keeps_later>(memory, inverse_gains, stride, plan, words, begin, end);
    words += code_unit_bytes(bits) / 4;
  }
}

}  // namespace detail

/// @brief The part of a list that a block stores: 64 rows from tile_row on, of which [begin, end)
/// are new. Row r is row from + r of the order, or of the source if there is no order.
class ListPiece {
 public:
  /// @param sequence  of the batch
  /// @param index  of the list
  /// @param head   whose rows they are; the first of the heads that share the list
  /// @param piece  counted from the piece that holds the list's first new row
  __device__ ListPiece(const LayerEdit& tables, const FlushBatch& flushed, const RowOrder& order,
                       const StagingTiles& staging, RowList list, int sequence, int index, int head,
                       int piece)
      : layout_(list == RowList::full ? tables.listed : tables.compressed[index]),
        table_(tables.page_table(list, flushed.slots[sequence], index)),
        pool_(tables.pool),
        page_bytes_(tables.page_bytes) {
    const bool full = list == RowList::full, staged = staging.data != nullptr;
    const int stored = tables.num_rows(list, flushed.slots[sequence], head),
              first = staged ? 0 : stored,
              added = flushed.added(list, tables.scored, sequence, stored);
    const int2 active = order.active(sequence, tables.num_heads, head, added);
    const int count =
        staged ? staging.counts[sequence * tables.num_heads + head] : active.y - active.x;
    // Rows of the order, or of the source, that are stored elsewhere.
    const int skipped = order.rows == nullptr ? (full ? 0 : flushed.full[sequence])
                        : staged              ? added
                                              : active.x;
    tile_row = (first / kStoreRows + piece) * kStoreRows;
    begin = max(first - tile_row, 0);
    end = min(first + count - tile_row, kStoreRows);
    from = skipped + tile_row - first;
    if (staged) staging_ = staging.of(tables, sequence, index);
  }
  int tile_row, begin, end, from;
  /// @brief A tile of the list, or of its staging tiles.
  __device__ std::uint8_t* tile(int tile) const {
    if (staging_ != nullptr)
      return staging_ + static_cast<std::size_t>(tile) * static_cast<std::size_t>(layout_.bytes);
    return pool_ + static_cast<std::size_t>(table_[tile / layout_.tiles_per_page]) * page_bytes_ +
           static_cast<std::size_t>(tile % layout_.tiles_per_page) *
               static_cast<std::size_t>(layout_.bytes);
  }

 private:
  const HeadTiles& layout_;
  const std::int32_t* table_;
  std::uint8_t* pool_;
  std::uint64_t page_bytes_;
  std::uint8_t* staging_ = nullptr;
};

/// @brief Stores flushed rows of a batch in the full list (StoreForm::full), in the compressed
/// list, or in staging tiles. Pages are in place; lengths of lists are those before the flush.
/// Grid: 64-row pieces of a list x KV heads x sequences.
/// @tparam scale_groups  of tiles of codes
/// @param type  of plain coefficients
template <StoreForm form, RowPath path, int scale_groups>
__global__ void __launch_bounds__(kStoreThreads, 2)
    store_rows_kernel(LayerEdit tables, RowSource source, FlushBatch flushed, RowOrder order,
                      StagingTiles staging, DType type) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  const int head = static_cast<int>(blockIdx.y), index = static_cast<int>(blockIdx.z),
            slot = flushed.slots[index], dim = tables.head_dim;
  constexpr RowList list = form == StoreForm::full ? RowList::full : RowList::compressed;
  const HeadTiles& layout = form == StoreForm::full ? tables.listed : tables.compressed[head];
  const ListPiece piece(tables, flushed, order, staging, list, index, head, head,
                        static_cast<int>(blockIdx.x));
  const int tile_row = piece.tile_row, begin = piece.begin, end = piece.end, from = piece.from;
  if (begin >= end) return;
  const SourceRows rows(tables, source, slot, head);
  const std::int32_t* chosen = order.of(index, static_cast<int>(gridDim.y), head);
  if (std::int32_t* positions = tables.row_positions(list, slot, head);
      positions != nullptr && staging.data == nullptr) {
    for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += kStoreThreads)
      positions[tile_row + row] =
          flushed.position[index] + (chosen == nullptr ? from + row : chosen[from + row]);
  }
  if constexpr (form == StoreForm::codes) {
    const HeadMaps& maps = tables.current_maps(slot, head);
    detail::CodeMemory memory;
    memory.coefficients = reinterpret_cast<float*>(shared_memory + detail::path_bytes(path, dim));
    memory.inverse_gains =
        memory.coefficients +
        kStoreRows * (max(maps.key.rank, layout.values ? maps.value.rank : 0) + 1);
    memory.plan =
        reinterpret_cast<detail::CodePlan*>(memory.inverse_gains + scale_groups * kStoreRows);
    memory.tile = reinterpret_cast<std::uint32_t*>(memory.plan + kMaxUnits * kCodeUnit);
    std::uint32_t* target = reinterpret_cast<std::uint32_t*>(piece.tile(tile_row / kCodeRows));
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads)
      memory.tile[word] = begin > 0 ? target[word] : 0U;
    __syncthreads();
    for (const Part part : {Part::key, Part::value}) {
      if (part == Part::value && !layout.values) break;
      const PartMaps& own = maps.of(part);
      const int coefficients_stride = own.rank + 1;
      detail::load_plan(own, memory.plan);
      detail::project_block<path>(
          rows, tables.full_type, chosen, from, begin, end, dim, maps, static_cast<int>(part), 1,
          shared_memory, [&](Part, int row, int channel, float one, float two) {
            float* at = memory.coefficients + row * coefficients_stride + channel;
            if (channel < own.rank) at[0] = one;
            if (channel + 1 < own.rank) at[1] = two;
          });
      __syncthreads();
      detail::store_gains<scale_groups>(layout, own, part, memory, begin, end);
      __syncthreads();
      if (part == Part::key)
        detail::store_codes<Part::key, scale_groups>(layout, memory, coefficients_stride, begin,
                                                     end);
      else
        detail::store_codes<Part::value, scale_groups>(layout, memory, coefficients_stride, begin,
                                                       end);
      __syncthreads();
    }
    for (int word = static_cast<int>(threadIdx.x); word < layout.bytes / 4; word += kStoreThreads)
      target[word] = memory.tile[word];
  } else {
    __shared__ std::uint8_t* tiles[kStoreRows / kPlainRows];
    __shared__ float inverse_steps[form == StoreForm::full ? kStoreRows : 1];  // of rows in 8 bits
    if (threadIdx.x < static_cast<unsigned>(kStoreRows / layout.rows) &&
        static_cast<int>(threadIdx.x) * layout.rows < end) {
      tiles[threadIdx.x] = piece.tile(tile_row / layout.rows + static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    if (form == StoreForm::full && !layout.scaled && chosen == nullptr && begin % kPlainRows == 0 &&
        (rows.offset() + from) % kPlainRows == 0) {
      detail::copy_rows(layout, tiles, rows, from, begin, end);
      return;
    }
    std::uint16_t* results;
    int stride;
    if constexpr (form == StoreForm::full) {
      results = reinterpret_cast<std::uint16_t*>(shared_memory);
      stride = plain_stride(dim);
      rows.load(Part::key, chosen, from, begin, end, dim, results, stride);
      rows.load(Part::value, chosen, from, begin, end, dim, results + kStoreRows * stride, stride);
    } else {
      const HeadMaps& maps = tables.current_maps(slot, head);
      results = reinterpret_cast<std::uint16_t*>(shared_memory + detail::path_bytes(path, dim));
      stride = plain_stride(max(maps.key.rank, layout.values ? maps.value.rank : 0));
      detail::project_block<path>(
          rows, tables.full_type, chosen, from, begin, end, dim, maps, 0, layout.values ? 2 : 1,
          shared_memory, [&](Part part, int row, int channel, float one, float two) {
            *reinterpret_cast<std::uint32_t*>(
                results + (static_cast<int>(part) * kStoreRows + row) * stride + channel) =
                to_word(type, one, two);
          });
    }
    __syncthreads();
    for (const Part part : {Part::key, Part::value}) {
      if (part == Part::value && !layout.values) break;
      if (form == StoreForm::full && layout.scaled) {
        detail::store_scaled(layout, tiles, part,
                             results + static_cast<int>(part) * kStoreRows * stride, stride,
                             tables.full_type, inverse_steps, begin, end);
        continue;
      }
      detail::store_plain(layout, tiles, part,
                          results + static_cast<int>(part) * kStoreRows * stride, stride, begin,
                          end, true);
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
