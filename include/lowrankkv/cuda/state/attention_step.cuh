// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/attention_step.cuh  What one attention call hands from kernel to kernel:
/// queries as operands, partial states.
///
/// The query rows of one (sequence, KV head), m tokens x group heads, are columns: column j group +
/// g is head g of token j. Four columns make a block: each stands twice in the eight columns of an
/// mma, as the high and the low part of its numbers, so that nothing of a query's precision is
/// lost. Logits are in units of log2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kBlockColumns = 4;     ///< of a block of columns
inline constexpr int kAttendThreads = 256;  ///< of a block of the attention kernels, at most
inline constexpr int kStepThreads =
    512;  ///< of the kernels before and after attention, whose blocks are few
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kAttendWarps = kAttendThreads / 32;  ///< at most; fewer where tiles are large

/// @brief Which rows a partial state is of. Prompt: rows of the chunk that is being prefilled,
/// which are stored nowhere yet.
enum class Source : std::uint8_t { compressed, full, tail, prompt };

/// @brief How a column's products become logits: logit = gain (unit product + constant) + shift, or
/// the sum of that over two scale groups. Gains: tiles of codes only.
struct alignas(16) ColumnScale {
  float unit = 0.0F;
  float constant = 0.0F;
  float shift = 0.0F;
  float second_constant = 0.0F;  ///< of the second scale group
};

/// @brief Buffers and sizes of an attention call. All device memory is part of the layer's
/// workspace.
struct AttentionStep {
  uint2* coded_queries = nullptr;       ///< [sequence, head, segment, block, coded units, 32 lanes]
  ColumnScale* coded_scales = nullptr;  ///< [sequence, head, segment, block, kBlockColumns]
  float* partial =
      nullptr;  ///< [sequence, head, entry, block, 3 + width, kBlockColumns]: maximum, sum, sum of
                ///< weights (with gains), values, sum of weights with the second gains
  std::int32_t coded_units = 0;        ///< the largest of a head
  std::int32_t width = 0;              ///< the largest number of HeadTiles::state_lines()
  std::int32_t compressed_splits = 0;  ///< entries set aside for each source; the tail has one
  std::int32_t full_splits = 0;
  std::int32_t blocks = 0;    ///< of columns
  std::int32_t segments = 1;  ///< that a sequence can have
  std::int32_t group = 1;     ///< query heads of a KV head
  std::int32_t m = 1;         ///< query tokens of a sequence
  bool sees_all =
      false;  ///< queries are of tokens behind the tail, stored elsewhere; else of its last m
  const std::uint8_t* prompt = nullptr;  ///< plain tiles of the rows of a prompt [head, prompt
                                         ///< tiles]; null: queries are of the tail
  std::int32_t prompt_tiles = 0;         ///< of a head
  std::int32_t prompt_first = 0;         ///< row of the prompt that the first query is of
  float* joint_partial =
      nullptr;  ///< [sequence, group of heads, split, chunk of columns, kJointLines + joint_width,
                ///< kJointColumns], of joint values (cuda/tiles/joint_layout.cuh); null: none
  float* joint_states = nullptr;  ///< [sequence, head, block, 3 + joint_width, kBlockColumns]:
                                  ///< those folded, as a head's only state of compressed rows
  std::int32_t joint_heads = 0;   ///< of a group whose values are joint; 0: none
  std::int32_t joint_width =
      0;  ///< channels of a latent as attention sums them, the most of a group
  std::int32_t joint_splits = 0;  ///< splits that partial states are set aside for
  std::int32_t joint_chunks = 0;  ///< chunks of columns, at most kJointChunks, that they are
  float* joint_logits = nullptr;  ///< [sequence, group of heads, column of a launch, row], of joint
                                  ///< values whose keys are turned when they are read; null: none
  std::int32_t logit_columns = 0;  ///< of a launch, at most
  std::int32_t logit_rows = 0;     ///< that are set aside, a multiple of 64

  /// @brief Sets the query tokens of a sequence, and with them the blocks of columns.
  void set_tokens(int tokens) {
    m = tokens;
    blocks = (columns() + kBlockColumns - 1) / kBlockColumns;
  }
  __host__ __device__ std::int32_t columns() const { return group * m; }
  /// @brief The pair of a head of a group and a block of its columns that column `column` of the
  /// group, whose heads' columns follow each other, is in.
  __host__ __device__ std::int32_t pair_of(int column) const {
    return column / columns() * blocks + column % columns() / kBlockColumns;
  }
  /// @brief Logits of a column of a launch, in units of log2, row after row; `list` is sequence x
  /// groups + group.
  __device__ float* logits(std::size_t list, int column) const {
    return joint_logits +
           (list * static_cast<std::size_t>(logit_columns) + static_cast<std::size_t>(column)) *
               static_cast<std::size_t>(logit_rows);
  }
  __host__ __device__ std::int32_t entries() const {
    return compressed_splits + full_splits + (prompt == nullptr ? 1 : 2);
  }
  __host__ __device__ std::int32_t first_entry(Source source) const {
    return source == Source::compressed ? 0
           : source == Source::full
               ? compressed_splits
               : compressed_splits + full_splits + (source == Source::tail ? 0 : 1);
  }
  /// @brief The first block of columns of a segment, in coded_queries and coded_scales.
  __device__ std::size_t query_row(int sequence, int heads, int head, int segment) const {
    return ((static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads) +
             static_cast<std::size_t>(head)) *
                static_cast<std::size_t>(segments) +
            static_cast<std::size_t>(segment)) *
           static_cast<std::size_t>(blocks);
  }
  __host__ __device__ std::size_t state_floats() const {
    return static_cast<std::size_t>(3 + width) * kBlockColumns;
  }
  __host__ __device__ std::size_t joint_floats() const {
    return static_cast<std::size_t>(3 + joint_width) * kBlockColumns;
  }
  /// @brief The folded state of joint values of a head for a block of columns.
  __device__ float* joint_state(std::size_t row, int block) const {
    return joint_states +
           (row * static_cast<std::size_t>(blocks) + static_cast<std::size_t>(block)) *
               joint_floats();
  }
  /// @brief The state of an entry for a block of columns; `row` is sequence x heads + head.
  __device__ float* state(std::size_t row, int entry, int block) const {
    return partial +
           ((row * static_cast<std::size_t>(entries()) + static_cast<std::size_t>(entry)) *
                static_cast<std::size_t>(blocks) +
            static_cast<std::size_t>(block)) *
               state_floats();
  }
};

/// @brief Merges the states of the warps of a block, in shared memory [warps, 3 + channels,
/// kBlockColumns], into one in global memory, its maxima moved by `shift` (of this thread's
/// column). All threads call it.
/// @param factors  shared memory of warps x kBlockColumns numbers
__device__ inline void merge_warps(const float* states, int channels, float shift, float* factors,
                                   float* target) {
  const int size = (3 + channels) * kBlockColumns, warps = static_cast<int>(blockDim.x) / 32,
            thread = static_cast<int>(threadIdx.x);
  if (thread < warps * kBlockColumns) {
    const int column = thread % kBlockColumns;
    const float own = states[thread / kBlockColumns * size + column];
    float top = own;
    for (int warp = 0; warp < warps; ++warp) top = fmaxf(top, states[warp * size + column]);
    factors[thread] = own > -INFINITY ? exp2f(own - top) : 0.0F;
    if (thread < kBlockColumns) target[column] = top + shift;
  }
  __syncthreads();
  for (int item = 1 + thread; item < 3 + channels; item += static_cast<int>(blockDim.x)) {
    float4 total = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
    for (int warp = 0; warp < warps; ++warp) {
      const float4 value = *reinterpret_cast<const float4*>(states + warp * size +
                                                            item * kBlockColumns),
                   factor = *reinterpret_cast<const float4*>(factors + warp * kBlockColumns);
      total = {fmaf(factor.x, value.x, total.x), fmaf(factor.y, value.y, total.y),
               fmaf(factor.z, value.z, total.z), fmaf(factor.w, value.w, total.w)};
    }
    *reinterpret_cast<float4*>(target + item * kBlockColumns) = total;
  }
}

/// @brief Copies a layout to shared memory, a word a thread. The caller synchronises.
__device__ inline void copy_tiles(const HeadTiles* source, HeadTiles* shared) {
  static_assert(sizeof(HeadTiles) % 4 == 0 && alignof(HeadTiles) == 4);
  const int word = static_cast<int>(threadIdx.x);
  if (word < static_cast<int>(sizeof(HeadTiles) / 4))
    reinterpret_cast<std::uint32_t*>(shared)[word] =
        reinterpret_cast<const std::uint32_t*>(source)[word];
}

/// @brief Copies the operands of `count` blocks of columns, `units` units each, to shared memory
/// [units, column_blocks, 32]; blocks beyond are zeros. All threads call it.
template <int column_blocks>
__device__ inline void load_queries(const uint2* queries, int units, int unit_stride, int count,
                                    uint2* shared) {
#pragma unroll
  for (int block = 0; block < column_blocks; ++block) {
    const uint2* source = queries + block * unit_stride * 32;
    for (int item = static_cast<int>(threadIdx.x); item < units * 32;
         item += static_cast<int>(blockDim.x)) {
      shared[(item / 32 * column_blocks + block) * 32 + item % 32] =
          block < count ? source[item] : uint2{0, 0};
    }
  }
}

/// @brief Times kJointColumns that the columns of a group fill.
inline int joint_chunks(const AttentionStep& step, int heads) {
  return (heads * step.columns() + kJointColumns - 1) / kJointColumns;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
