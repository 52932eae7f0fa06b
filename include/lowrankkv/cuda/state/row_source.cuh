// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/row_source.cuh  Source of flushed rows: the tails, or a prompt packed into
/// plain tiles.
///
/// A prompt is read from the engine's tensors once: its rows are checked, rounded to full_type and
/// packed into plain tiles, behind the rows that are still in the tail. Attention, scores, basis
/// updates and compression all read the packed tiles.
#pragma once

#include <cstdint>
#include <type_traits>

#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Row stride, in elements, of 16-bit rows in shared memory. Rows are 16-byte aligned, and
/// the rows of an 8 x 8 matrix fall into different banks.
__host__ __device__ constexpr int plain_stride(int channels) {
  return (channels + kPlainUnit - 1) / kPlainUnit * kPlainUnit + 8;
}

/// @brief Where flushed rows are read from.
struct RowSource {
  /// Plain tiles [heads, tiles] of one sequence; null: the rows are in the tails of the batch.
  const std::uint8_t* packed = nullptr;
  std::int32_t tiles = 0;  ///< of a head
  std::int32_t first = 0;  ///< packed row that is the oldest; rows before it are stored already
  /// Of a packed tile. 0: as tiles of full rows, with keys and values. Smaller: keys alone.
  std::int32_t tile_bytes = 0;
};

/// @brief The source rows of one (sequence, KV head). Row 0 is the oldest.
class SourceRows {
 public:
  template <bool edits>
  __device__ SourceRows(const LayerTables<edits>& tables, const RowSource& source, int slot,
                        int head)
      : layout_(tables.full),
        type_(tables.full_type),
        offset_(source.packed == nullptr ? tables.lengths[slot].tail_first : source.first),
        ring_(source.packed == nullptr ? tables.ring_rows() : 1 << 30),
        tile_bytes_(source.tile_bytes == 0 ? tables.full.bytes : source.tile_bytes),
        base_(source.packed == nullptr
                  ? tables.tail(slot, head)
                  : source.packed + static_cast<std::size_t>(head) *
                                        static_cast<std::size_t>(source.tiles) *
                                        static_cast<std::size_t>(tile_bytes_)) {}

  /// @brief One element as f32.
  __device__ float element(Part part, int row, int channel) const {
    const int place = (offset_ + row) % ring_;
    return from_bits(type_, *reinterpret_cast<const std::uint16_t*>(
                                tile(place / layout_.rows) +
                                layout_.plain_byte(part, place % layout_.rows, channel)));
  }
  /// @brief Loads source rows to rows[i, stride] for i in [begin, end): row first + i, or row
  /// order[first + i] if `order` is not null. Element float converts; std::uint16_t keeps the bits.
  /// All threads of the block call it; the caller synchronises.
  template <class Element>
  __device__ void load(Part part, const std::int32_t* order, int first, int begin, int end,
                       int head_dim, Element* rows, int stride) const {
    if (end <= begin) return;
    const auto put = [&](Element& target, std::uint32_t bits) {
      if constexpr (std::is_same_v<Element, float>)
        target = from_bits(type_, static_cast<std::uint16_t>(bits));
      else
        target = static_cast<std::uint16_t>(bits);
    };
    const int threads = static_cast<int>(blockDim.x);
    if (order != nullptr) {
      const int all_units = head_dim / kPlainUnit;
#pragma unroll 2
      for (int item = static_cast<int>(threadIdx.x); item < (end - begin) * all_units;
           item += threads) {
        const int row = begin + item / all_units, unit = item % all_units,
                  place = (offset_ + order[first + row]) % ring_, in_tile = place % layout_.rows,
                  in_step = in_tile % kPlainRows;
        const std::uint8_t* from = tile(place / layout_.rows) + layout_.offset(part) +
                                   (in_tile / kPlainRows * all_units + unit) * kPlainUnitBytes;
        Element* target = rows + row * stride + unit * kPlainUnit;
#pragma unroll
        for (int channel = 0; channel < kPlainUnit; channel += 2) {
          if (part == Part::key) {  // two channels of a row are a word
            const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(
                from + plain_place(Part::key, in_step, channel));
            put(target[channel], word);
            put(target[channel + 1], word >> 16);
          } else {
            put(target[channel], *reinterpret_cast<const std::uint16_t*>(
                                     from + plain_place(Part::value, in_step, channel)));
            put(target[channel + 1], *reinterpret_cast<const std::uint16_t*>(
                                         from + plain_place(Part::value, in_step, channel + 1)));
          }
        }
      }
      return;
    }
    // Sixteen rows of a unit are 16 bytes a lane. All are loaded, and unwanted rows skipped.
    const int from = offset_ + first + begin, until = offset_ + first + end,
              units = part == Part::key ? layout_.key_units : layout_.value_units;
    const int first_step = from / kPlainRows, steps = (until - 1) / kPlainRows - first_step + 1,
              steps_per_tile = layout_.rows / kPlainRows;
#pragma unroll 2
    for (int item = static_cast<int>(threadIdx.x); item < steps * units * 32; item += threads) {
      const int lane = item % 32, unit = item / 32 % units, step = first_step + item / 32 / units,
                physical = step % (ring_ / kPlainRows);
      const uint4 words = *reinterpret_cast<const uint4*>(
          tile(physical / steps_per_tile) + layout_.offset(part) +
          (physical % steps_per_tile * units + unit) * kPlainUnitBytes + 16 * lane);
      const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // A is [m, k]: m = lane / 4 (+ 8), k = 2 (lane % 4) (+ 1, + 8).
        const int m = lane / 4 + 8 * (i / 2 % 2), k = 2 * (lane % 4) + i % 2 + 8 * (i / 4);
        const int row = step * kPlainRows + (part == Part::key ? m : k) - offset_ - first,
                  channel = unit * kPlainUnit + (part == Part::key ? k : m);
        if (row >= begin && row < end)
          put(rows[row * stride + channel], all[i / 2] >> (16 * (i % 2)));
      }
    }
  }
  /// @brief The step, a group of sixteen rows in storage order, that holds a row. Steps count on
  /// where the ring wraps around.
  __device__ int step_of(int row) const { return (offset_ + row) / kPlainRows; }
  /// @brief Storage index of row 0: step s begins with row 16 s - offset().
  __device__ int offset() const { return offset_; }
  /// @brief This lane's sixteen bytes of a step's first unit. The bytes of every further unit are
  /// 32 elements further on.
  __device__ const uint4* words(Part part, int step) const {
    const int per_tile = layout_.rows / kPlainRows,
              units = part == Part::key ? layout_.key_units : layout_.value_units;
    const int physical = step < ring_ / kPlainRows ? step : step - ring_ / kPlainRows;
    const int index = physical >> (__ffs(per_tile) - 1);  // tiles have 1, 2 or 4 steps
    return reinterpret_cast<const uint4*>(tile(index) + layout_.offset(part) +
                                          (physical - index * per_tile) * units * kPlainUnitBytes) +
           threadIdx.x % 32;
  }

 private:
  __device__ const std::uint8_t* tile(int index) const {
    return base_ + static_cast<std::size_t>(index) * static_cast<std::size_t>(tile_bytes_);
  }
  const HeadTiles& layout_;
  DType type_;
  int offset_, ring_, tile_bytes_;
  const std::uint8_t* base_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
