// SPDX-License-Identifier: Apache-2.0
/// @file cuda/row_source.cuh  Rows that are about to leave full rank: of a tail, or of a prompt, packed once into plain tiles.
///
/// A prompt is read from the engine's tensors once: rows are checked, rounded to full_type and written as plain tiles, behind the rows that
/// are still in the tail. Attention, scores, updates and compression all read those.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/tables.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kStoreThreads = 256;  ///< of the blocks that handle leaving rows
inline constexpr int kStoreRows = 64;      ///< rows that such a block takes at a time: a tile of codes, up to four plain ones

/// @brief Where leaving rows are.
struct RowSource {
  const std::uint8_t* packed = nullptr;  ///< plain tiles [heads, tiles] of one sequence; null: the tails of the batch
  std::int32_t tiles = 0;                ///< of a head
};

/// @brief The rows of one (sequence, KV head): row 0 is the oldest.
class SourceRows {
 public:
  __device__ SourceRows(const Tables& tables, const RowSource& source, int slot, int head)
      : layout_(tables.full), type_(tables.full_type), offset_(source.packed == nullptr ? tables.lengths[slot].tail_first : 0), ring_(source.packed == nullptr ? tables.ring_rows() : 1 << 30),
        base_(source.packed == nullptr ? tables.tail(slot, head) : source.packed + static_cast<std::size_t>(head) * static_cast<std::size_t>(source.tiles) * static_cast<std::size_t>(tables.full.bytes)) {}

  /// @brief One element.
  __device__ float element(Part part, int row, int channel) const {
    const int place = (offset_ + row) % ring_;
    return from_bits(type_, *reinterpret_cast<const std::uint16_t*>(tile(place / layout_.rows) + layout_.plain_byte(part, place % layout_.rows, channel)));
  }
  /// @brief rows[i, stride] for i in [begin, end) = row first + i, or row order[first + i], as f32. All threads of the block call it; the caller
  /// synchronises.
  __device__ void load(Part part, const std::int32_t* order, int first, int begin, int end, int head_dim, float* rows, int stride) const {
    if (end <= begin) return;
    const int threads = static_cast<int>(blockDim.x);
    if (order != nullptr) {
      const int all_units = head_dim / kPlainUnit;
      #pragma unroll 2
      for (int item = static_cast<int>(threadIdx.x); item < (end - begin) * all_units; item += threads) {
        const int row = begin + item / all_units, unit = item % all_units, place = (offset_ + order[first + row]) % ring_, in_tile = place % layout_.rows, in_step = in_tile % kPlainRows;
        const std::uint8_t* from = tile(place / layout_.rows) + layout_.offset(part) + (in_tile / kPlainRows * all_units + unit) * kPlainUnitBytes;
        float* target = rows + row * stride + unit * kPlainUnit;
        #pragma unroll
        for (int channel = 0; channel < kPlainUnit; channel += 2) {
          if (part == Part::key) {  // two channels of a row are a word
            const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(from + plain_place(Part::key, in_step, channel));
            target[channel] = from_bits(type_, static_cast<std::uint16_t>(word));
            target[channel + 1] = from_bits(type_, static_cast<std::uint16_t>(word >> 16));
          } else {
            target[channel] = from_bits(type_, *reinterpret_cast<const std::uint16_t*>(from + plain_place(Part::value, in_step, channel)));
            target[channel + 1] = from_bits(type_, *reinterpret_cast<const std::uint16_t*>(from + plain_place(Part::value, in_step, channel + 1)));
          }
        }
      }
      return;
    }
    // Sixteen rows of a unit are 16 bytes a lane, whatever of them is wanted.
    const int from = offset_ + first + begin, until = offset_ + first + end, units = part == Part::key ? layout_.key_units : layout_.value_units;
    const int first_step = from / kPlainRows, steps = (until - 1) / kPlainRows - first_step + 1, steps_per_tile = layout_.rows / kPlainRows;
    #pragma unroll 2
    for (int item = static_cast<int>(threadIdx.x); item < steps * units * 32; item += threads) {
      const int lane = item % 32, unit = item / 32 % units, step = first_step + item / 32 / units, physical = step % (ring_ / kPlainRows);
      const uint4 words = *reinterpret_cast<const uint4*>(tile(physical / steps_per_tile) + layout_.offset(part) + (physical % steps_per_tile * units + unit) * kPlainUnitBytes + 16 * lane);
      const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
      #pragma unroll
      for (int i = 0; i < 8; ++i) {
        // A is [m, k]: m = lane / 4 (+ 8), k = 2 (lane % 4) (+ 1, + 8).
        const int m = lane / 4 + 8 * (i / 2 % 2), k = 2 * (lane % 4) + i % 2 + 8 * (i / 4);
        const int row = step * kPlainRows + (part == Part::key ? m : k) - offset_ - first, channel = unit * kPlainUnit + (part == Part::key ? k : m);
        if (row >= begin && row < end) rows[row * stride + channel] = from_bits(type_, static_cast<std::uint16_t>(all[i / 2] >> (16 * (i % 2))));
      }
    }
  }
  /// @brief Which sixteen rows, as they lie, a row is in; steps go on where a ring begins anew.
  __device__ int step_of(int row) const { return (offset_ + row) / kPlainRows; }
  /// @brief Where row 0 lies, so that step s begins with row 16 s - offset().
  __device__ int offset() const { return offset_; }
  /// @brief This lane's sixteen bytes of a step's first unit; those of the next units are 32 further on each.
  __device__ const uint4* words(Part part, int step) const {
    const int steps_per_tile = layout_.rows / kPlainRows, units = part == Part::key ? layout_.key_units : layout_.value_units, physical = step % (ring_ / kPlainRows);
    return reinterpret_cast<const uint4*>(tile(physical / steps_per_tile) + layout_.offset(part) + physical % steps_per_tile * units * kPlainUnitBytes) + threadIdx.x % 32;
  }

 private:
  __device__ const std::uint8_t* tile(int index) const { return base_ + static_cast<std::size_t>(index) * static_cast<std::size_t>(layout_.bytes); }
  const HeadTiles& layout_;
  DType type_;
  int offset_, ring_;
  const std::uint8_t* base_;
};

/// @brief Shared memory of pack_rows_kernel in bytes.
inline std::size_t pack_rows_bytes(int head_dim) { return sizeof(std::uint16_t) * static_cast<std::size_t>(2 * kStoreRows * (head_dim + 8)); }

/// @brief The `tail_rows` rows of a tail, then `count` rows of a prompt, as plain tiles [head, tiles]. A row of a head that is not finite, or beyond
/// `limit`, becomes zeros and is counted in tables.faults. Rows past the end are zeros. Grid: 64-row pieces x heads.
template <class = void>
__global__ void __launch_bounds__(kStoreThreads) pack_rows_kernel(Tables tables, int slot, DeviceRows key, DeviceRows value, int tail_rows, std::int64_t count, std::uint8_t* packed, int tiles, float limit) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  std::uint16_t* stage = reinterpret_cast<std::uint16_t*>(shared_memory);  // [part, kStoreRows, head_dim + 8]
  __shared__ int refused[kStoreRows];
  const HeadTiles& layout = tables.full;
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, stride = dim + 8, first = static_cast<int>(blockIdx.x) * kStoreRows;
  const std::int64_t rows = tail_rows + count;
  const SourceRows tail(tables, {}, slot, head);
  if (threadIdx.x < kStoreRows) refused[threadIdx.x] = 0;
  __syncthreads();
  for (const Part part : {Part::key, Part::value}) {
    const DeviceRows& view = part == Part::key ? key : value;
    std::uint16_t* target = stage + (part == Part::key ? 0 : kStoreRows * stride);
    const bool wide = view.dtype == tables.full_type && view.element_stride == 1 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.token_stride % 8 == 0 && view.head_stride % 8 == 0;
    if (wide && first >= tail_rows) {  // eight elements a load
      const int per_row = dim / 8;
      #pragma unroll 4
      for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * per_row; item += kStoreThreads) {
        const int row = item / per_row, channel = item % per_row * 8;
        uint4 words = {0, 0, 0, 0};
        if (first + row < rows) {
          words = __ldg(reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(view.data) + static_cast<std::int64_t>(first + row - tail_rows) * view.token_stride + head * view.head_stride + channel));
        }
        const std::uint32_t all[4] = {words.x, words.y, words.z, words.w};
        bool usable = true;
        #pragma unroll
        for (int i = 0; i < 8; ++i) usable = usable && fabsf(from_bits(tables.full_type, static_cast<std::uint16_t>(all[i / 2] >> (16 * (i % 2))))) <= limit;
        if (!usable) atomicExch(&refused[row], 1);
        *reinterpret_cast<uint4*>(target + row * stride + channel) = words;
      }
      continue;
    }
    #pragma unroll 4
    for (int item = static_cast<int>(threadIdx.x); item < kStoreRows * dim; item += kStoreThreads) {
      const int row = item / dim, channel = item % dim;
      const float x = first + row < tail_rows ? tail.element(part, first + row, channel) : first + row < rows ? view.at(first + row - tail_rows, head, channel) : 0.0F;
      if (!(fabsf(x) <= limit)) atomicExch(&refused[row], 1);
      target[row * stride + channel] = to_bits(tables.full_type, x);
    }
  }
  __syncthreads();
  if (threadIdx.x < kStoreRows && refused[threadIdx.x] != 0) atomicAdd(tables.faults, 1U);
  std::uint8_t* base = packed + static_cast<std::size_t>(head) * static_cast<std::size_t>(tiles) * static_cast<std::size_t>(layout.bytes);
  const int steps_per_tile = layout.rows / kPlainRows;
  for (const Part part : {Part::key, Part::value}) {
    const int units = part == Part::key ? layout.key_units : layout.value_units;
    const std::uint16_t* source = stage + (part == Part::key ? 0 : kStoreRows * stride);
    for (int item = static_cast<int>(threadIdx.x); item < kStoreRows / kPlainRows * units * 32; item += kStoreThreads) {
      const int lane = item % 32, unit = item / 32 % units, step = item / 32 / units, global_step = first / kPlainRows + step;
      if (global_step / steps_per_tile >= tiles) continue;
      std::uint32_t words[4];
      #pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int m = lane / 4 + 8 * (word % 2), k = 2 * (lane % 4) + 8 * (word / 2);
        const int row = step * kPlainRows + (part == Part::key ? m : k), channel = unit * kPlainUnit + (part == Part::key ? k : m);
        const std::uint16_t low = refused[row] != 0 ? std::uint16_t{0} : source[row * stride + channel];
        const int next_row = part == Part::key ? row : row + 1, next_channel = part == Part::key ? channel + 1 : channel;
        const std::uint16_t high = refused[next_row] != 0 ? std::uint16_t{0} : source[next_row * stride + next_channel];
        words[word] = static_cast<std::uint32_t>(low) | static_cast<std::uint32_t>(high) << 16;
      }
      *reinterpret_cast<uint4*>(base + static_cast<std::size_t>(global_step / steps_per_tile) * static_cast<std::size_t>(layout.bytes) + layout.offset(part) +
                                (global_step % steps_per_tile * units + unit) * kPlainUnitBytes + 16 * lane) = {words[0], words[1], words[2], words[3]};
    }
  }
}

inline constexpr int kRenewRows = 8;  ///< of a block of renew_tail_kernel

/// @brief A tail becomes rows [first, first + count) of a packed source. Grid: pieces of kRenewRows rows (at least one) x KV heads.
template <class = void>
__global__ void renew_tail_kernel(Tables tables, int slot, RowSource source, int first, int count) {
  const int head = static_cast<int>(blockIdx.y), dim = tables.head_dim, begin = tables.lengths[slot].tail_first, piece = static_cast<int>(blockIdx.x) * kRenewRows;
  const SourceRows rows(tables, source, slot, head);
  for (int item = static_cast<int>(threadIdx.x); item < min(kRenewRows, count - piece) * dim; item += static_cast<int>(blockDim.x)) {
    const int row = piece + item / dim, channel = item % dim, place = (begin + row) % tables.ring_rows();
    for (const Part part : {Part::key, Part::value}) {
      *reinterpret_cast<std::uint16_t*>(tables.tail_tile(slot, head, place) + tables.full.plain_byte(part, place % tables.full.rows, channel)) =
          to_bits(tables.full_type, rows.element(part, first + row, channel));
    }
  }
  if (head == 0 && piece == 0 && threadIdx.x == 0) tables.lengths[slot].tail_length = count;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
