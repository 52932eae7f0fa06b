// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/joint/attend_joint.cuh  Decode attention over joint values: one block
/// serves all heads of a group, so that a latent is read once per token and not once per head.
///
/// A block goes through a split, 16 or 64 rows per iteration, reading the keys of all heads and the
/// latents together. Its warps compute the weights of the heads' columns, one head at a time, and
/// write them to shared memory as operands. Then each warp multiplies its own channels of the
/// latents with the weights of all columns, while the next weights are computed. Queries and
/// weights enter as a high and a low part, as in cuda/attention/post_rope/attend_plain.cuh; queries
/// for keys in codes as in cuda/attention/post_rope/attend_codes.cuh. With pre-RoPE keys an earlier
/// kernel has written the logits (cuda/attention/pre_rope/logits.cuh), and only latents are
/// fetched. Floor: the tiles' bytes, read once.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/joint/joint_ring.cuh"
#include "lowrankkv/cuda/attention/post_rope/attend_codes.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Raises a column's maximum if logits, which are relative to it, exceed the headroom, and lowers
/// the logits by the same amount. Returns the factor for the sums so far.
template <int count>
__device__ __forceinline__ float raise_maximum(float& top, float (&logits)[count], bool& raised) {
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < count; ++i) highest = fmaxf(highest, logits[i]);
  const bool first = top == -INFINITY;
  if (__any_sync(~0U, first || highest > kHeadroom) == 0) return 1.0F;
  raised = true;
  highest = column_max(highest);  // finite: an iteration has at least one row
  const bool moves = first || highest > kHeadroom;
  const float by = moves ? highest : 0.0F;
  top = (first ? 0.0F : top) + by;
#pragma unroll
  for (int i = 0; i < count; ++i) logits[i] -= by;
  return first ? 0.0F : exp2_fast(-by);
}

/// Raises the reference of a column's weights with gains. They are stored relative to 2^reference;
/// the reference is raised if they exceed the headroom. Returns the factor for the sums so far.
/// @param weights  in: weights; out: weights times 2^-reference
template <int count>
__device__ __forceinline__ float raise_reference(float& reference, float (&weights)[count],
                                                 bool& raised) {
  float highest = 0.0F;
#pragma unroll
  for (int i = 0; i < count; ++i) highest = fmaxf(highest, weights[i]);
  const float before = reference;
  if (__any_sync(~0U, highest > exp2_fast(reference + kHeadroom)) != 0) {
    raised = true;
    highest = column_max(highest);
    if (highest > exp2_fast(reference + kHeadroom)) reference = ceilf(log2f(highest));
  }
  const float unit = exp2_fast(-reference);
#pragma unroll
  for (int i = 0; i < count; ++i) weights[i] *= unit;
  return exp2_fast(before - reference);
}

}  // namespace detail

/// @brief Partial states of joint values. Grid: (splits x chunks of columns x parts of the
/// channels) x groups of heads x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles, of `type`
/// @tparam mine  times sixteen channels of a warp
/// @tparam steps  times sixteen rows of an iteration; 4 for codes
/// @tparam rotated  logits were computed by an earlier kernel
template <int scale_groups, DType type, int mine, int steps, bool rotated>
__global__ void __launch_bounds__(32 * joint_warps(scale_groups), 1)
    attend_joint_kernel(LayerView tables, AttentionStep step, Batch batch, JointCall call,
                        int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0;
  constexpr int warps = joint_warps(scale_groups), threads = 32 * warps,
                groups = scale_groups == 2 ? 2 : 1, rows_at_once = kPlainRows * steps,
                all_tiles = kJointColumns / 8;
  // Most pairs of a warp.
  constexpr int most_pairs = steps > 1 && !codes ? 1 : (kJointColumns + warps - 1) / warps;
  __shared__ __align__(8) std::uint64_t barriers[kMaxJointStages];
  __shared__ detail::JointCopy copies[detail::joint_copies(codes ? 1 : steps)];
  // Of each head: units, patterns of the two scale groups, where codes begin.
  __shared__ int4 key_info[kJointColumns];
  __shared__ JointBlock blocks[mine * warps / 2];  // for codes: blocks of the part
  const int split = static_cast<int>(blockIdx.x) % call.splits,
            chunk = static_cast<int>(blockIdx.x) / call.splits % call.chunks,
            part = static_cast<int>(blockIdx.x) / call.splits / call.chunks;
  const int group = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4;
  const int leader = group * tables.joint_heads, columns = step.columns(),
            first_column = (call.first_chunk + chunk) * kJointColumns,
            last_column = min(first_column + kJointColumns, tables.joint_heads * columns) - 1;
  const int rows = slot < 0 ? 0 : tables.num_rows(RowList::compressed, slot, leader),
            splits = joint_splits(rows);
  if (split >= splits || last_column < first_column) {
    wait_for_last_kernel();
    return;
  }
  const JointMemory memory(call, scale_groups, step.coded_units);
  const HeadTiles& layout = tables.compressed[tables.num_heads + group];
  // Pairs (head, block of its columns), in order.
  const int first_pair = step.pair_of(first_column),
            pairs = step.pair_of(last_column) - first_pair + 1,
            first_head = first_pair / step.blocks,
            heads = (first_pair + pairs - 1) / step.blocks - first_head + 1;
  const int all = (rows + rows_at_once - 1) / rows_at_once, per_split = (all + splits - 1) / splits,
            first_iteration = split * per_split,
            count = max(0, min(per_split, all - first_iteration));
  constexpr int tile_rows = codes ? kCodeRows : kPlainRows;
  constexpr int list_steps = rows_at_once / tile_rows;  // of an iteration
  const int end = min((first_iteration + count) * list_steps, (rows + tile_rows - 1) / tile_rows);
  detail::JointRing ring(tables, slot, leader + first_head, rotated ? 0 : heads,
                         tables.compressed + leader + first_head, tables.num_heads + group, layout,
                         tile_rows, first_iteration * list_steps, end, call, shared_memory,
                         memory.stage_bytes, barriers, copies);
  if (!rotated && thread < heads) {
    const HeadTiles& keys = tables.compressed[leader + first_head + thread];
    key_info[thread] = {keys.key_units, keys.first_key_pattern,
                        keys.key_pattern - keys.first_key_pattern, keys.key_offset};
  }
  // all_halves: groups of sixteen channels of a latent.
  const int first_blocks = codes ? joint_blocks(layout, 0) : 0,
            all_halves = codes ? 2 * (first_blocks + (groups == 2 ? joint_blocks(layout, 1) : 0))
                               : layout.value_units;
  // halves: groups of sixteen channels of the part. The number of warps is even.
  const int part_first = part * mine * warps,
            halves = max(0, min(mine * warps, all_halves - part_first));
  if (codes && 2 * thread < halves) blocks[thread] = joint_block(layout, part_first / 2 + thread);
  __syncthreads();
  for (int i = 0; i < min(call.stages, count); ++i) {
    ring.look();
    ring.fetch();
  }
  for (int item = thread; item < call.buffers * memory.weight_bytes / 16; item += threads)
    reinterpret_cast<uint4*>(shared_memory + memory.weights)[item] = uint4{0, 0, 0, 0};
  for (int item = thread; item < call.buffers * groups * kJointColumns; item += threads)
    reinterpret_cast<float*>(shared_memory + memory.factors)[item] = 1.0F;
  wait_for_last_kernel();  // for the queries; tiles are in flight already
  release_next_kernel();
  uint2* const queries = reinterpret_cast<uint2*>(shared_memory + memory.queries);
  JointPair* const shared_pairs = reinterpret_cast<JointPair*>(shared_memory + memory.states);
  JointPair own[codes ? 1 : most_pairs];                              // lane t has column t
  float sums[most_pairs] = {}, weight_sums[most_pairs][groups] = {};  // over this lane's rows
  // Of each pair: its head; the column of the chunk that lane t has; and the column of the lane's
  // words of transposed weights. Columns are -1 where there is none.
  int heads_of[most_pairs], columns_of[most_pairs], word_columns[most_pairs];
  // Logits of the chunk's columns, computed by an earlier kernel. Lane t reads the logits of one
  // column of a pair.
  [[maybe_unused]] const float* const chunk_logits =
      !rotated ? nullptr
               : step.logits(static_cast<std::size_t>(sequence) * gridDim.y +
                                 static_cast<std::size_t>(group),
                             chunk * kJointColumns) +
                     first_iteration * rows_at_once;
  const auto logits_of = [&](int column, int i) {
    return chunk_logits +
           static_cast<std::size_t>(column) * static_cast<std::size_t>(step.logit_rows) +
           i * rows_at_once;
  };
  const auto prefetch_logits = [&](int column, int i) {
    if (column >= 0 && i < count && 32 * g < rows_at_once)
      prefetch_line(logits_of(column, i) + 32 * g);
  };
#pragma unroll
  for (int k = 0; k < most_pairs; ++k) {
    const int pair = warp + warps * k, index = first_pair + pair, head = index / step.blocks,
              first_in_head = index % step.blocks * kBlockColumns;
    const auto column_of = [&](int in_block) {
      const int column = head * columns + first_in_head + in_block - first_column;
      return first_in_head + in_block < columns && column >= 0 && column < kJointColumns ? column
                                                                                         : -1;
    };
    heads_of[k] = head - first_head;
    columns_of[k] = column_of(t);
    word_columns[k] = column_of(g / 2);  // transposed: lane (2 c + low, t) has column c
    if (pair >= pairs) continue;
    if constexpr (rotated) {
      prefetch_logits(columns_of[k], 0);
      prefetch_logits(columns_of[k], 1);
      if (codes && g == 0) shared_pairs[pair * kBlockColumns + t] = JointPair{};
      continue;
    }
    const std::size_t row = step.query_row(sequence, tables.num_heads, leader + head, 0) +
                            static_cast<std::size_t>(index % step.blocks);
    const uint2* source =
        step.coded_queries + row * static_cast<std::size_t>(step.coded_units) * 32;
    for (int unit = 0; unit < step.coded_units; ++unit)
      queries[(pair * step.coded_units + unit) * 32 + lane] = source[unit * 32 + lane];
    const ColumnScale scale = step.coded_scales[row * kBlockColumns + static_cast<std::size_t>(t)];
    JointPair begin;
    begin.unit = scale.unit;
    begin.constants[0] = scale.constant;
    begin.constants[1] = scale.second_constant;
    if constexpr (!codes)
      own[k] = begin;
    else if (g == 0)
      shared_pairs[pair * kBlockColumns + t] = begin;
  }
  __syncwarp();

  const bool ahead = call.buffers == 2;
  // Computes the weights of the columns for an iteration, as operands, into its buffer.
  const auto make_weights = [&](int i) {
    const int buffer = ahead ? i & 1 : 0, valid = rows - (first_iteration + i) * rows_at_once;
    // Logits of a pair, loaded while latents are in flight or the previous pair is computed.
    [[maybe_unused]] float given[2 * steps];
    const auto load_logits = [&](int k) {
      if (k >= most_pairs || warp + warps * k >= pairs) return;
      const int column = columns_of[k];
      const float* own_logits = logits_of(max(0, column), i) + g;
#pragma unroll
      for (int j = 0; j < 2 * steps; ++j)
        given[j] = 8 * j + g >= valid ? -INFINITY : column >= 0 ? own_logits[8 * j] : 0.0F;
      prefetch_logits(column, i + 2);
    };
    if constexpr (rotated) load_logits(0);
    const std::uint8_t* stage = ring.wait();
    std::uint32_t* const weights = reinterpret_cast<std::uint32_t*>(shared_memory + memory.weights +
                                                                    buffer * memory.weight_bytes);
    float* const factors =
        reinterpret_cast<float*>(shared_memory + memory.factors) + buffer * groups * kJointColumns;
    const auto put = [&](int k, int s, int m, int r, float weight) {
      const std::uint32_t word = transposed(split_in_two<type>(weight));
      const int column = word_columns[k];
      if (column >= 0)
        weights[(((s * steps + m) * all_tiles + column / 8) * 32 + column % 8 * 4 + t) * 4 + r +
                2 * (g % 2)] = word;
    };
    bool raised = false;
    if constexpr (!codes) {
      float products[most_pairs][steps][4] = {};
#pragma unroll
      for (int k = 0; k < most_pairs; ++k) {
        if (rotated || warp + warps * k >= pairs) continue;
        const int units = key_info[heads_of[k]].x;
        const uint4* words =
            reinterpret_cast<const uint4*>(stage + heads_of[k] * call.key_bytes) + lane;
        const uint2* query = queries + (warp + warps * k) * step.coded_units * 32 + lane;
        for (int unit = 0; unit < units; ++unit) {
          const uint2 b = query[unit * 32];
#pragma unroll
          for (int m = 0; m < steps; ++m)
            mma_plain<type>(products[k][m], words[(m * units + unit) * 32], b.x, b.y);
        }
      }
#pragma unroll
      for (int k = 0; k < most_pairs; ++k) {
        if (warp + warps * k >= pairs) continue;
        JointPair& state = own[codes ? 0 : k];
        const float base = state.top > -INFINITY ? state.top : 0.0F;
        float logits[2 * steps];
#pragma unroll
        for (int j = 0; j < 2 * steps; ++j) {
          const float(&product)[4] = products[k][j / 2];
          if constexpr (rotated)
            logits[j] = given[j] - base;
          else
            logits[j] =
                16 * (j / 2) + 8 * (j % 2) + g < valid
                    ? fmaf(product[2 * (j % 2)] + product[2 * (j % 2) + 1], state.unit, -base)
                    : -INFINITY;
        }
        if constexpr (rotated) load_logits(k + 1);
        const float correction = detail::raise_maximum(state.top, logits, raised);
        sums[k] *= correction;
        if (g == 0 && columns_of[k] >= 0) factors[columns_of[k]] = correction;
#pragma unroll
        for (int j = 0; j < 2 * steps; ++j) {
          logits[j] = exp2_fast(logits[j]);
          sums[k] += logits[j];
        }
#pragma unroll
        for (int j = 0; j < 2 * steps; ++j) put(k, 0, j / 2, j % 2, logits[j]);
      }
    } else {
      const auto gain = [&](const std::uint8_t* gains, int row) {
        return groups == 2 || layout.gain_bytes() == 2
                   ? __half2float(reinterpret_cast<const __half*>(gains)[row])
                   : detail::gain_of_byte(gains[row], 0x7650);
      };
      const std::uint8_t* value_gains = stage + call.heads * call.key_bytes;
#pragma unroll
      for (int k = 0; k < most_pairs; ++k) {
        const int pair = warp + warps * k;
        if (pair >= pairs) continue;
        JointPair state = shared_pairs[pair * kBlockColumns + t];
        const float base = state.top > -INFINITY ? state.top : 0.0F;
        float logits[8];
        if constexpr (rotated) {
#pragma unroll
          for (int j = 0; j < 8; ++j) logits[j] = given[j] - base;
          load_logits(k + 1);
        } else {
          const int4 keys = key_info[heads_of[k]];
          const std::uint8_t* at = stage + heads_of[k] * call.key_bytes;
          const std::uint8_t* gains = at;
          const uint2* query = queries + pair * step.coded_units * 32 + lane;
          const float unit[1] = {state.unit};
          at += keys.w;
#pragma unroll
          for (int s = 0; s < groups; ++s) {
            float products[1][4][2];
#pragma unroll
            for (int m = 0; m < 4; ++m) products[0][m][0] = products[0][m][1] = state.constants[s];
            const unsigned pattern = static_cast<unsigned>(s == 0 ? keys.y : keys.z);
            detail::key_products<8, 1>(at, static_cast<int>(pattern & 0xffU), query, unit,
                                       products);
            detail::key_products<4, 1>(at, static_cast<int>(pattern >> 8 & 0xffU), query, unit,
                                       products);
            detail::key_products<2, 1>(at, static_cast<int>(pattern >> 16 & 0xffU), query, unit,
                                       products);
            detail::key_products<1, 1>(at, static_cast<int>(pattern >> 24), query, unit, products);
#pragma unroll
            for (int j = 0; j < 8; ++j)
              logits[j] = fmaf(products[0][j / 2][j % 2],
                               gain(gains, s * kCodeRows + 16 * (j / 2) + 8 * (j % 2) + g),
                               s == 0 ? -base : logits[j]);
          }
#pragma unroll
          for (int j = 0; j < 8; ++j)
            logits[j] = 16 * (j / 2) + 8 * (j % 2) + g < valid ? logits[j] : -INFINITY;
        }
        const float correction = detail::raise_maximum(state.top, logits, raised);
        sums[k] *= correction;
#pragma unroll
        for (float& logit : logits) {
          logit = exp2_fast(logit);
          sums[k] += logit;
        }
#pragma unroll
        for (int s = 0; s < groups; ++s) {
          float weighted[8];
#pragma unroll
          for (int j = 0; j < 8; ++j)
            weighted[j] =
                logits[j] * gain(value_gains, s * kCodeRows + 16 * (j / 2) + 8 * (j % 2) + g);
          const float factor =
              correction * detail::raise_reference(state.reference[s], weighted, raised);
          weight_sums[k][s] *= factor;
          if (g == 0 && columns_of[k] >= 0) factors[s * kJointColumns + columns_of[k]] = factor;
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            weight_sums[k][s] += weighted[j];
            put(k, s, j / 2, j % 2, weighted[j]);
          }
        }
        __syncwarp();  // all lanes have read the previous state
        if (g == 0) shared_pairs[pair * kBlockColumns + t] = state;
      }
    }
    if (lane == 0)
      reinterpret_cast<int*>(shared_memory + memory.raised)[buffer * kMostJointWarps + warp] =
          raised ? 1 : 0;
  };

  float out[mine][all_tiles][4] = {};
  // Bits of the warp's groups of sixteen channels, four bits each. Known before their addresses are
  // loaded.
  [[maybe_unused]] std::uint32_t bits_of_halves = 0;
#pragma unroll
  for (int k = 0; codes && k < mine; ++k) {
    if (warp + warps * k < halves)
      bits_of_halves |= static_cast<std::uint32_t>(blocks[(warp + warps * k) / 2].bits) << (4 * k);
  }
  int using_stage = 0;
  const int units = layout.value_units;
  const auto in_second = [&](int own_half) {
    return groups == 2 && (part_first + own_half) / 2 >= first_blocks;
  };
  const int used_tiles = (last_column - first_column) / 8 + 1, half = warp % 2;
  const auto add_values = [&](int i) {
    const std::uint8_t* latents =
        shared_memory + using_stage * memory.stage_bytes + call.heads * call.key_bytes;
    using_stage = using_stage + 1 == call.stages ? 0 : using_stage + 1;
    const int buffer = ahead ? i & 1 : 0;
    const uint4* all_weights = reinterpret_cast<const uint4*>(shared_memory + memory.weights +
                                                              buffer * memory.weight_bytes) +
                               lane;
    const bool raised =
        lane < warps && reinterpret_cast<const int*>(
                            shared_memory + memory.raised)[buffer * kMostJointWarps + lane] != 0;
    if (__any_sync(~0U, raised) != 0) {
      const float* factors = reinterpret_cast<const float*>(shared_memory + memory.factors) +
                             buffer * groups * kJointColumns + 2 * t;
#pragma unroll
      for (int k = 0; k < mine; ++k) {
        const float* own_factors = factors + (in_second(warp + warps * k) ? kJointColumns : 0);
#pragma unroll
        for (int n = 0; n < all_tiles; ++n) {
          const float2 factor = *reinterpret_cast<const float2*>(own_factors + 8 * n);
          out[k][n][0] *= factor.x;
          out[k][n][1] *= factor.y;
          out[k][n][2] *= factor.x;
          out[k][n][3] *= factor.y;
        }
      }
    }
    // Groups of sixteen rows that exist.
    const int left = codes ? steps : ((rows - 1) / kPlainRows - (first_iteration + i) * steps) + 1;
    uint4 weights[all_tiles];
    const auto load_weights = [&](int s, int m) {
#pragma unroll
      for (int n = 0; n < all_tiles; ++n)
        weights[n] = all_weights[((s * steps + m) * all_tiles + n) * 32];
    };
#pragma unroll 1
    for (int m = 0; m < min(steps, left); ++m) {
      if constexpr (codes) {
#pragma unroll
        for (int k = 0; k < mine; ++k) {
          const int own_half = warp + warps * k;
          if (own_half >= halves) continue;
          const bool second = in_second(own_half);
          if (k == 0 || second != in_second(own_half - warps)) load_weights(second ? 1 : 0, m);
          const int bits = static_cast<int>(bits_of_halves >> (4 * k) & 15U);
          const int* at = blocks[own_half / 2].at;
          const uint4 a = bits == 3 ? detail::joint_operand<3>(latents, at, 3, half, m)
                                    : detail::joint_operand<0>(latents, at, bits, half, m);
          detail::add_products<type>(a, weights, used_tiles, out[k]);
        }
      } else {
        load_weights(0, m);
        const uint4* words =
            reinterpret_cast<const uint4*>(latents) + (m * units + part_first) * 32 + lane;
        // All loads are issued before one is used.
        uint4 a[mine];
#pragma unroll
        for (int k = 0; k < mine; ++k) a[k] = words[max(0, min(warp + warps * k, halves - 1)) * 32];
#pragma unroll
        for (int k = 0; k < mine; ++k) {
          if (warp + warps * k < halves)
            detail::add_products<type>(a[k], weights, used_tiles, out[k]);
        }
      }
    }
  };
  // With two buffers, an iteration's weights are computed while the previous ones are used. On each
  // scheduler half of the warps compute weights first, while the others multiply.
  const bool weights_first = !ahead || warp / 4 % 2 == 0;
  __syncthreads();
  for (int i = ahead ? -1 : 0; i < count; ++i) {
    const int next = ahead ? i + 1 : i;
    const bool more = i >= 0 && i + call.stages < count;
    if (more) ring.look();
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {
      if ((phase == 0) == weights_first) {
        if (next < count) make_weights(next);
      } else if (i >= 0) {
        add_values(i);
      }
      if (!ahead && phase == 0) __syncthreads();
    }
    __syncthreads();
    if (more) ring.fetch();
#if __CUDA_ARCH__ < 900
    __syncthreads();
#endif
  }
  float* const target =
      step.joint_partial +
      (((static_cast<std::size_t>(sequence) * gridDim.y + static_cast<std::size_t>(group)) *
            static_cast<std::size_t>(step.joint_splits) +
        static_cast<std::size_t>(split)) *
           static_cast<std::size_t>(step.joint_chunks) +
       static_cast<std::size_t>(chunk)) *
          static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns);
#pragma unroll
  for (int k = 0; k < most_pairs; ++k) {
    if (part > 0 || warp + warps * k >= pairs) continue;
    const float lines[kJointLines] = {0.0F,
                                      column_sum(sums[k]),
                                      column_sum(weight_sums[k][0]),
                                      column_sum(weight_sums[k][groups - 1]),
                                      0.0F,
                                      0.0F};
    const int column = columns_of[k];
    if (g > 0 || column < 0) continue;
    const JointPair& state =
        codes ? shared_pairs[(warp + warps * k) * kBlockColumns + t] : own[codes ? 0 : k];
    target[column] = state.top;
#pragma unroll
    for (int line = 1; line < 4; ++line) target[line * kJointColumns + column] = lines[line];
    target[4 * kJointColumns + column] = codes ? state.reference[0] : 0.0F;
    target[5 * kJointColumns + column] = codes ? state.reference[1] : 0.0F;
  }
#pragma unroll
  for (int k = 0; k < mine; ++k) {
    if (warp + warps * k >= halves) continue;
    float* lines =
        target + (kJointLines + 16 * (part_first + warp + warps * k) + g) * kJointColumns + 2 * t;
#pragma unroll
    for (int n = 0; n < all_tiles; ++n) {
      *reinterpret_cast<float2*>(lines + 8 * n) = {out[k][n][0], out[k][n][1]};
      *reinterpret_cast<float2*>(lines + 8 * kJointColumns + 8 * n) = {out[k][n][2], out[k][n][3]};
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
