// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/attention_step.cuh  Buffers that the kernels of one attention call share: query
/// operands and partial states.
///
/// The query rows of one (sequence, KV head), m tokens x group heads, are called columns: column j
/// group + g is query head g of token j. Four columns make a block. Each column occupies two of the
/// eight columns of an mma, one for the high and one for the low part of its numbers, so that
/// queries lose no precision. Logits are in units of log2.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/maps/head_maps.cuh"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

inline constexpr int kBlockColumns = 4;  ///< columns of a block of columns
/// Most threads of a thread block of the attention kernels.
inline constexpr int kAttendThreads = 256;
/// Threads of a thread block of the kernels before and after attention, which have few blocks.
inline constexpr int kStepThreads = 512;
inline constexpr int kStepWarps = kStepThreads / 32;
inline constexpr int kAttendWarps = kAttendThreads / 32;  ///< at most; fewer where tiles are large

/// @brief The rows that a partial state covers. Prompt: rows of the chunk that is being prefilled,
/// which are not in the cache yet.
enum class Source : std::uint8_t { compressed, full, tail, prompt };

/// @brief Converts a column's products to logits: logit = gain (unit product + constant) + shift.
/// With two scale groups, gain (unit product + constant) is summed over both. Only tiles of codes
/// have gains.
struct alignas(16) ColumnScale {
  float unit = 0.0F;
  float constant = 0.0F;
  float shift = 0.0F;
  float second_constant = 0.0F;  ///< of the second scale group
};

/// @brief Buffers and sizes of an attention call. All buffers are part of the layer's workspace.
struct AttentionStep {
  uint2* coded_queries = nullptr;       ///< [sequence, head, segment, block, coded units, 32 lanes]
  ColumnScale* coded_scales = nullptr;  ///< [sequence, head, segment, block, kBlockColumns]
  /// Partial states [sequence, head, entry, block, 3 + width, kBlockColumns]: maximum; sum; sum of
  /// weights (times gains); values; sum of weights times the gains of the second scale group.
  float* partial = nullptr;
  std::int32_t coded_units = 0;        ///< the largest number of key units of a head
  std::int32_t width = 0;              ///< the largest HeadTiles::state_lines()
  std::int32_t compressed_splits = 0;  ///< entries reserved for compressed rows
  std::int32_t full_splits = 0;        ///< entries reserved for full rows; the tail has one
  std::int32_t blocks = 0;             ///< of columns
  std::int32_t segments = 1;           ///< most segments of a sequence
  std::int32_t group = 1;              ///< query heads of a KV head
  std::int32_t m = 1;                  ///< query tokens of a sequence
  /// Queries belong to tokens after the tail, stored elsewhere, and see the whole tail. Else they
  /// belong to the tail's last m tokens.
  bool sees_all = false;
  /// Plain tiles of the rows of a prompt [head, prompt tiles]; null: queries belong to the tail.
  const std::uint8_t* prompt = nullptr;
  std::int32_t prompt_tiles = 0;  ///< of a head
  std::int32_t prompt_first = 0;  ///< row of the prompt to which the first query belongs
  /// Partial states of joint values (cuda/tiles/joint_layout.cuh): [sequence, group of heads,
  /// split, chunk of columns, kJointLines + joint_width, kJointColumns]; null: none.
  float* joint_partial = nullptr;
  /// The merged states of joint values, one per head for all compressed rows: [sequence, head,
  /// block, 3 + joint_width, kBlockColumns].
  float* joint_states = nullptr;
  std::int32_t joint_heads = 0;  ///< heads of a group whose values are joint; 0: none
  /// Channels of a latent as attention sums them: the largest number over the groups.
  std::int32_t joint_width = 0;
  std::int32_t joint_splits = 0;  ///< splits for which partial states are reserved
  /// Chunks of columns for which partial states are reserved, at most kJointChunks.
  std::int32_t joint_chunks = 0;
  /// Logits of joint values with pre-RoPE keys: [sequence, group of heads, column of a launch,
  /// row]; null: none.
  float* joint_logits = nullptr;
  std::int32_t logit_columns = 0;  ///< most columns of a launch
  std::int32_t logit_rows = 0;     ///< reserved rows, a multiple of 64

  /// @brief Sets the number of query tokens of a sequence, and with it the number of blocks of
  /// columns.
  void set_tokens(int tokens) {
    m = tokens;
    blocks = (columns() + kBlockColumns - 1) / kBlockColumns;
  }
  __host__ __device__ std::int32_t columns() const { return group * m; }
  /// @brief Index of the pair (head of the group, block of its columns) that contains column
  /// `column` of the group. The columns of a group are those of its heads, head after head.
  __host__ __device__ std::int32_t pair_of(int column) const {
    return column / columns() * blocks + column % columns() / kBlockColumns;
  }
  /// @brief Logits of a column of a launch, row after row, in units of log2. @param list  sequence
  /// x groups + group
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
  /// @brief Index of the first block of columns of a segment in coded_queries and coded_scales.
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
  /// @brief The merged state of a head's joint values for a block of columns. @param row  sequence
  /// x heads + head
  __device__ float* joint_state(std::size_t row, int block) const {
    return joint_states +
           (row * static_cast<std::size_t>(blocks) + static_cast<std::size_t>(block)) *
               joint_floats();
  }
  /// @brief The partial state of an entry for a block of columns. @param row  sequence x heads +
  /// head
  __device__ float* state(std::size_t row, int entry, int block) const {
    return partial +
           ((row * static_cast<std::size_t>(entries()) + static_cast<std::size_t>(entry)) *
                static_cast<std::size_t>(blocks) +
            static_cast<std::size_t>(block)) *
               state_floats();
  }
};

/// @brief Merges the partial states of a thread block's warps into one state in global memory. All
/// threads call it.
/// @param states  shared memory [warps, 3 + channels, kBlockColumns]
/// @param shift  added to the maximum of this thread's column
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

/// @brief Copies a layout to shared memory, one word per thread. The caller synchronises.
__device__ inline void copy_tiles(const HeadTiles* source, HeadTiles* shared) {
  static_assert(sizeof(HeadTiles) % 4 == 0 && alignof(HeadTiles) == 4);
  const int word = static_cast<int>(threadIdx.x);
  if (word < static_cast<int>(sizeof(HeadTiles) / 4))
    reinterpret_cast<std::uint32_t*>(shared)[word] =
        reinterpret_cast<const std::uint32_t*>(source)[word];
}

/// @brief Copies the query operands of `count` blocks of columns, `units` units each, to shared
/// memory [units, column_blocks, 32]. Blocks from `count` on become zeros. All threads call it.
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

/// @brief Chunks of kJointColumns columns that the columns of a group of `heads` heads fill.
inline int joint_chunks(const AttentionStep& step, int heads) {
  return (heads * step.columns() + kJointColumns - 1) / kJointColumns;
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
