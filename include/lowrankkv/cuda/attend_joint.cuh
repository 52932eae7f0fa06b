// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attend_joint.cuh  Decode attention over joint values: the heads of a group together, so that a latent is read once a token and not once a head.
///
/// A block takes tile after tile of a split: sixteen plain rows, or 64 rows of codes, the keys of all heads and the latent together. Its warps make the weights of the heads' columns, a
/// head's at a time, which go to shared memory as operands; then each warp multiplies its own channels of the latent with those of all columns, while the next tile's weights
/// are made. Numbers are as exact as in cuda/attend_plain.cuh and cuda/attend_codes.cuh.
/// Floor: the tiles' bytes, once, at the memory's rate.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attend_codes.cuh"
#include "lowrankkv/cuda/joint_products.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// The tiles of a split of the lists of some heads and of their group, fetched stage by stage. From sm_90 on the first warp's lanes start one bulk copy each, before, all threads copy. All threads call everything.
class JointRing {
 public:
  /// @param first_head, heads  whose keys are wanted  @param rows  of an iteration
  __device__ JointRing(const Tables& tables, int slot, int first_head, int heads, int list, const JointCall& call, int rows, std::uint8_t* memory, int stage_bytes, std::uint64_t* barriers)
      : tables_(tables), memory_(memory), barriers_(barriers), stage_bytes_(stage_bytes), key_bytes_(call.key_bytes), stages_(call.stages), value_place_(call.heads * call.key_bytes), heads_(heads), rows_(rows),
        key_table_(tables.page_table(RowList::compressed, slot, first_head)), keys_(tables.compressed + first_head), value_table_(tables.page_table(RowList::compressed, slot, list)),
        values_(tables.compressed + list) {
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy_));
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int head = 0; head < heads; ++head) bytes_ += key_bytes_of(head);
    bytes_ += values_->bytes;
    own_bytes_ = lane < heads ? key_bytes_of(lane) : 0;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < stages_; ++stage) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers_ + stage)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#endif
  }
  /// Starts to copy tile `tile` of the lists into stage `stage`.
  __device__ void fetch(int tile, int stage) const {
    std::uint8_t* target = memory_ + stage * stage_bytes_;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x >= 32) return;
    const int lane = static_cast<int>(threadIdx.x);
    const std::uint32_t barrier = shared_address(barriers_ + stage);
    const auto copy = [&](std::uint8_t* to, const std::uint8_t* from, int bytes) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(barrier), "l"(policy_)
                   : "memory");
    };
    if (lane == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes_) : "memory");
    __syncwarp();
    if (own_bytes_ > 0) copy(target + lane * key_bytes_, key_source(lane, tile), own_bytes_);
    if (lane == 31) copy(target + value_place_, tables_.tile(value_table_, *values_, tile), values_->bytes);
#else
    for (int head = 0; head < heads_; ++head) copy_all(target + head * key_bytes_, key_source(head, tile), key_bytes_of(head));
    copy_all(target + value_place_, tables_.tile(value_table_, *values_, tile), values_->bytes);
#endif
  }
  /// The stage, once what the `use`-th fetch into it brought is there. Before sm_90 threads were synchronised since the fetch.
  __device__ const std::uint8_t* wait(int stage, int use) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra WAIT;\nREADY:\n}"
                 ::"r"(shared_address(barriers_ + stage)), "r"(use & 1) : "memory");
#endif
    return memory_ + stage * stage_bytes_;
  }

 private:
  __device__ int key_bytes_of(int head) const { return keys_[head].codes ? keys_[head].bytes : keys_[head].key_units * kPlainUnitBytes; }
  /// Keys of a head: a tile of codes, or sixteen rows of a plain one.
  __device__ const std::uint8_t* key_source(int head, int tile) const {
    const HeadTiles& layout = keys_[head];
    const int per_tile = layout.rows / rows_, steps = tile / per_tile;
    return tables_.tile(key_table_ + static_cast<std::size_t>(head) * static_cast<std::size_t>(tables_.max_pages[1]), layout, steps) + (tile - steps * per_tile) * layout.key_units * kPlainUnitBytes;
  }
  __device__ static void copy_all(std::uint8_t* to, const std::uint8_t* from, int bytes) {
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += kJointThreads * 16) *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
  }

  const Tables& tables_;
  std::uint8_t* memory_;
  std::uint64_t* barriers_;
  int stage_bytes_, key_bytes_, stages_, value_place_, heads_, rows_;
  const std::int32_t* key_table_;
  const HeadTiles* keys_;
  const std::int32_t* value_table_;
  const HeadTiles* values_;
  [[maybe_unused]] int bytes_ = 0, own_bytes_ = 0;
  [[maybe_unused]] std::uint64_t policy_ = 0;
};

/// Raises a column's maximum where logits, relative to it, exceed the headroom, and lowers them. Returns what sums so far count.
template <int count>
__device__ __forceinline__ float raise_maximum(float& top, float (&logits)[count], bool& raised) {
  float highest = -INFINITY;
  #pragma unroll
  for (int i = 0; i < count; ++i) highest = fmaxf(highest, logits[i]);
  const bool first = top == -INFINITY;
  raised = __any_sync(~0U, first || highest > kHeadroom) != 0;
  if (!raised) return 1.0F;
  highest = column_max(highest);  // finite: a tile has a row
  const bool moves = first || highest > kHeadroom;
  const float by = moves ? highest : 0.0F;
  top = (first ? 0.0F : top) + by;
  #pragma unroll
  for (int i = 0; i < count; ++i) logits[i] -= by;
  return first ? 0.0F : exp2_fast(-by);
}

}  // namespace detail

/// @brief Partial states of joint values. Grid: (splits x chunks of columns x parts of the channels) x groups of heads x sequences.
/// @tparam scale_groups  of tiles of codes; 0: plain ones, of `type`  @tparam mine  times sixteen channels that a warp has
template <int scale_groups, DType type, int mine>
__global__ void __launch_bounds__(kJointThreads, 1) attend_joint_kernel(Tables tables, AttentionStep step, Batch batch, JointCall call, int first_sequence) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0;
  constexpr int groups = scale_groups == 2 ? 2 : 1, tile_rows = codes ? kCodeRows : kPlainRows, all_tiles = codes ? kJointColumns / 4 : kJointColumns / 8;
  __shared__ __align__(8) std::uint64_t barriers[kMaxJointStages];
  const int split = static_cast<int>(blockIdx.x) % call.splits, chunk = static_cast<int>(blockIdx.x) / call.splits % call.chunks, part = static_cast<int>(blockIdx.x) / call.splits / call.chunks;
  const int group = static_cast<int>(blockIdx.y), sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slots[blockIdx.z];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int leader = group * tables.joint_heads, columns = step.columns(), first_column = (call.first_chunk + chunk) * kJointColumns, last_column = min(first_column + kJointColumns, tables.joint_heads * columns) - 1;
  const int rows = tables.num_rows(RowList::compressed, slot, leader), splits = joint_splits(rows);
  if (split >= splits || last_column < first_column) {
    wait_for_last_kernel();
    return;
  }
  const JointMemory memory(call, scale_groups, step.coded_units);
  const HeadTiles& layout = tables.compressed[tables.num_heads + group];
  // Pairs of a head and a block of its columns, in order.
  const auto pair_of = [&](int column) { return column / columns * step.blocks + column % columns / kBlockColumns; };
  const int first_pair = pair_of(first_column), pairs = pair_of(last_column) - first_pair + 1, first_head = first_pair / step.blocks, heads = (first_pair + pairs - 1) / step.blocks - first_head + 1;
  const int tiles = (rows + tile_rows - 1) / tile_rows, per_split = (tiles + splits - 1) / splits, first_tile = split * per_split, count = max(0, min(per_split, tiles - first_tile));
  const detail::JointRing ring(tables, slot, leader + first_head, heads, tables.num_heads + group, call, tile_rows, shared_memory, memory.stage_bytes, barriers);
  __syncthreads();
  for (int i = 0; i < min(call.stages, count); ++i) ring.fetch(first_tile + i, i);
  for (int item = static_cast<int>(threadIdx.x); item < 2 * memory.weight_bytes / 16; item += kJointThreads) reinterpret_cast<uint4*>(shared_memory + memory.weights)[item] = uint4{0, 0, 0, 0};
  for (int item = static_cast<int>(threadIdx.x); item < 2 * kJointColumns; item += kJointThreads) reinterpret_cast<float*>(shared_memory + memory.factors)[item] = 1.0F;
  for (int item = static_cast<int>(threadIdx.x); item < 2 * scale_groups * kJointColumns; item += kJointThreads) reinterpret_cast<float*>(shared_memory + memory.scales)[item] = 0.0F;
  wait_for_last_kernel();  // for the queries; the tiles were there
  release_next_kernel();
  uint2* const queries = reinterpret_cast<uint2*>(shared_memory + memory.queries);
  const auto row_of = [&](int pair) {  // of a pair's queries
    return step.query_row(sequence, tables.num_heads, leader + (first_pair + pair) / step.blocks, 0) + static_cast<std::size_t>((first_pair + pair) % step.blocks);
  };
  for (int pair = warp; pair < pairs; pair += kJointWarps) {
    const uint2* source = step.coded_queries + row_of(pair) * static_cast<std::size_t>(step.coded_units) * 32;
    for (int unit = 0; unit < step.coded_units; ++unit) queries[(pair * step.coded_units + unit) * 32 + lane] = source[unit * 32 + lane];
  }
  float sums_of_lane[kJointPairs] = {};  // of exponentials
  JointPair own[codes ? 1 : kJointPairs];  // lane t has column t
  JointPair* const shared_pairs = reinterpret_cast<JointPair*>(shared_memory + memory.states);
  #pragma unroll
  for (int k = 0; k < kJointPairs; ++k) {
    if (warp + kJointWarps * k >= pairs) break;
    const ColumnScale scale = step.coded_scales[row_of(warp + kJointWarps * k) * kBlockColumns + static_cast<std::size_t>(t)];
    const JointPair begin{scale.unit, {scale.constant, scale.second_constant}, -INFINITY, {}};
    if constexpr (!codes) own[k] = begin;
    else if (g == 0) shared_pairs[(warp + kJointWarps * k) * kBlockColumns + t] = begin;
  }
  // The column of the chunk that lane t has of a pair, or that words of transposed weights are of; negative: none.
  const auto column_of = [&](int pair, int in_block) {
    const int index = first_pair + pair, in_head = index % step.blocks * kBlockColumns + in_block, column = index / step.blocks * columns + in_head - first_column;
    return in_head < columns && column >= 0 && column < kJointColumns ? column : -1;
  };
  const int used_tiles = (last_column - first_column) / (codes ? 4 : 8) + 1;
  __syncthreads();

  // Weights of the columns for tile i, as operands, into its half of the buffers.
  const auto make_weights = [&](int i) {
    const std::uint8_t* stage = ring.wait(i % call.stages, i / call.stages);
    const std::uint8_t* latents = stage + call.heads * call.key_bytes;
    const int half = i & 1, valid = rows - (first_tile + i) * tile_rows;
    std::uint32_t* const weights = reinterpret_cast<std::uint32_t*>(shared_memory + memory.weights + half * memory.weight_bytes);
    float* const factors = reinterpret_cast<float*>(shared_memory + memory.factors) + half * kJointColumns;
    float* const scales = reinterpret_cast<float*>(shared_memory + memory.scales) + half * scale_groups * kJointColumns;
    bool any_raised = false;
    #pragma unroll
    for (int k = 0; k < kJointPairs; ++k) {
      const int pair = warp + kJointWarps * k;
      if (pair >= pairs) break;
      const int head = (first_pair + pair) / step.blocks - first_head;
      const HeadTiles& keys = tables.compressed[leader + first_head + head];
      const std::uint8_t* at = stage + head * call.key_bytes;
      const uint2* query = queries + pair * step.coded_units * 32 + lane;
      const int column = column_of(pair, t), word_column = column_of(pair, g / 2);  // transposed: lane (2 c + low, t) has column c
      JointPair local;
      if constexpr (codes) local = shared_pairs[pair * kBlockColumns + t];
      JointPair& state = codes ? local : own[codes ? 0 : k];
      const float base = state.top > -INFINITY ? state.top : 0.0F;
      bool raised;
      if constexpr (!codes) {
        float sums[2][4] = {};  // of even units and of odd ones
        const uint4* words = reinterpret_cast<const uint4*>(at) + lane;
        for (int unit = 0; unit < keys.key_units; unit += 2) {
          mma_plain<type>(sums[0], words[unit * 32], query[unit * 32].x, query[unit * 32].y);
          if (unit + 1 < keys.key_units) mma_plain<type>(sums[1], words[unit * 32 + 32], query[unit * 32 + 32].x, query[unit * 32 + 32].y);
        }
        float logits[2];
        #pragma unroll
        for (int r = 0; r < 2; ++r) logits[r] = 8 * r + g < valid ? fmaf(sums[0][2 * r] + sums[1][2 * r] + sums[0][2 * r + 1] + sums[1][2 * r + 1], state.unit, -base) : -INFINITY;
        const float correction = detail::raise_maximum(state.top, logits, raised);
        sums_of_lane[k] *= correction;
        if (g == 0 && column >= 0) factors[column] = correction;
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float e = exp2_fast(logits[r]);
          sums_of_lane[k] += e;
          const std::uint32_t word = transposed(split_in_two<type>(e));
          if (word_column >= 0) weights[((word_column / 8 * 32) + word_column % 8 * 4 + t) * 4 + r + 2 * (g % 2)] = word;
        }
      } else {
        float products[groups][1][4][2];
        const float unit[1] = {state.unit};
        const __half* gains = reinterpret_cast<const __half*>(at);
        at += keys.key_offset;
        #pragma unroll
        for (int s = 0; s < groups; ++s) {
          #pragma unroll
          for (int m = 0; m < 4; ++m) products[s][0][m][0] = products[s][0][m][1] = state.constants[s];
          const unsigned pattern = static_cast<unsigned>(s == 0 ? keys.first_key_pattern : keys.key_pattern - keys.first_key_pattern);
          detail::key_products<8, 1>(at, static_cast<int>(pattern & 0xffU), query, unit, products[s]);
          detail::key_products<4, 1>(at, static_cast<int>(pattern >> 8 & 0xffU), query, unit, products[s]);
          detail::key_products<2, 1>(at, static_cast<int>(pattern >> 16 & 0xffU), query, unit, products[s]);
          detail::key_products<1, 1>(at, static_cast<int>(pattern >> 24), query, unit, products[s]);
        }
        float logits[8];
        #pragma unroll
        for (int m = 0; m < 4; ++m) {
          #pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = 16 * m + 8 * r + g;
            float logit = fmaf(products[0][0][m][r], __half2float(gains[row]), -base);
            if constexpr (groups == 2) logit = fmaf(products[1][0][m][r], __half2float(gains[kCodeRows + row]), logit);
            logits[2 * m + r] = row < valid ? logit : -INFINITY;
          }
        }
        const float correction = detail::raise_maximum(state.top, logits, raised);
        sums_of_lane[k] *= correction;
        if (g == 0 && column >= 0) factors[column] = correction;
        #pragma unroll
        for (float& logit : logits) {
          logit = exp2_fast(logit);
          sums_of_lane[k] += logit;
        }
        #pragma unroll
        for (int s = 0; s < groups; ++s) {
          const __half* value_gains = reinterpret_cast<const __half*>(latents) + s * kCodeRows;
          float own_weights[8], largest = 0.0F;
          #pragma unroll
          for (int j = 0; j < 8; ++j) {
            own_weights[j] = logits[j] * __half2float(value_gains[16 * (j / 2) + 8 * (j % 2) + g]);
            largest = fmaxf(largest, own_weights[j]);
          }
          largest = fmaxf(column_max(largest), 1e-30F);
          const float to_integer = __fdividef(32512.0F, largest), from_integer = largest * (1.0F / 32512.0F);
          std::uint32_t p[4];
          #pragma unroll
          for (int m = 0; m < 4; ++m) p[m] = detail::weight_bytes(own_weights[2 * m], own_weights[2 * m + 1], to_integer);
          int c[4];  // the sum of the weights as the values meet them
          mma_codes_new(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[0], p[1]);
          mma_codes(c, 0x01010101U, 0x01010101U, 0x01010101U, 0x01010101U, p[2], p[3]);
          state.weight[s] = fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer, state.weight[s] * correction);
          if (g == 0 && column >= 0) scales[s * kJointColumns + column] = from_integer;
          if (word_column >= 0) reinterpret_cast<uint4*>(weights)[(s * all_tiles + word_column / 4) * 32 + (2 * (word_column % 4) + g % 2) * 4 + t] = uint4{p[0], p[1], p[2], p[3]};
        }
        __syncwarp();  // all lanes have what was there before
        if (g == 0) shared_pairs[pair * kBlockColumns + t] = state;
      }
      any_raised = any_raised || raised;
    }
    if (lane == 0) reinterpret_cast<int*>(shared_memory + memory.raised)[half * kJointWarps + warp] = any_raised ? 1 : 0;
  };

  float out[mine][kJointColumns / 2] = {};  // plain: [tile of eight columns][row pair of the product]; codes: [tile of four columns][half of the sixteen channels]
  const int part_first = part * mine * kJointWarps, all_halves = step.joint_width / 16;  // sixteens of channels
  const JointCodes first_codes = codes ? joint_codes(layout, 0) : JointCodes{}, second_codes = groups == 2 ? joint_codes(layout, 1) : JointCodes{};
  const int halves = min(mine * kJointWarps, (codes ? 2 * (first_codes.blocks + second_codes.blocks) : layout.value_units) - part_first);
  const auto add_values = [&](int i) {
    const std::uint8_t* latents = shared_memory + i % call.stages * memory.stage_bytes + call.heads * call.key_bytes;
    const int half = i & 1;
    const uint4* weights = reinterpret_cast<const uint4*>(shared_memory + memory.weights + half * memory.weight_bytes);
    const int4* raised = reinterpret_cast<const int4*>(shared_memory + memory.raised) + half * kJointWarps / 4;
    const int4 some = raised[0], others = raised[1];
    if ((some.x | some.y | some.z | some.w | others.x | others.y | others.z | others.w) != 0) {
      const float* factors = reinterpret_cast<const float*>(shared_memory + memory.factors) + half * kJointColumns;
      #pragma unroll
      for (int n = 0; n < all_tiles; ++n) {
        const float first = factors[codes ? 4 * n + t : 8 * n + 2 * t], second = codes ? first : factors[8 * n + 2 * t + 1];
        #pragma unroll
        for (int k = 0; k < mine; ++k) {
          #pragma unroll
          for (int j = 0; j < kJointColumns / 2 / all_tiles; ++j) out[k][kJointColumns / 2 / all_tiles * n + j] *= j % 2 == 0 ? first : second;
        }
      }
    }
    if constexpr (codes) {
      const float* scales = reinterpret_cast<const float*>(shared_memory + memory.scales) + half * scale_groups * kJointColumns;
      #pragma unroll
      for (int k = 0; k < mine; ++k) {
        const int own_half = warp + kJointWarps * k;
        if (own_half >= halves) break;
        const int block = (part_first + own_half) / 2;
        const bool second = groups == 2 && block >= first_codes.blocks;
        float(&sums)[kJointColumns / 4][2] = reinterpret_cast<float(&)[kJointColumns / 4][2]>(out[k]);
        detail::joint_products(latents, second ? second_codes : first_codes, second ? block - first_codes.blocks : block, (part_first + own_half) % 2, weights + (second ? all_tiles * 32 : 0),
                               scales + (second ? kJointColumns : 0), used_tiles, sums);
      }
    } else {
      uint4 p[all_tiles];
      #pragma unroll
      for (int n = 0; n < all_tiles; ++n) p[n] = weights[n * 32 + lane];
      const uint4* words = reinterpret_cast<const uint4*>(latents) + part_first * 32 + lane;
      #pragma unroll
      for (int k = 0; k < mine; ++k) {
        const int own_half = warp + kJointWarps * k;
        if (own_half >= halves) break;
        const uint4 a = words[own_half * 32];
        #pragma unroll
        for (int n = 0; n < all_tiles; ++n) {
          if (n >= used_tiles) break;
          float(&sums)[4] = reinterpret_cast<float(&)[4]>(out[k][4 * n]);
          mma_plain<type>(sums, a, p[n].x, p[n].y);  // the weights' larger parts, then what those lack
          mma_plain<type>(sums, a, p[n].z, p[n].w);
        }
      }
    }
  };
  if (count > 0) make_weights(0);
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    if (i + 1 < count) make_weights(i + 1);
    add_values(i);
    __syncthreads();
    if (i + call.stages < count) ring.fetch(first_tile + i + call.stages, i % call.stages);
#if __CUDA_ARCH__ < 900
    __syncthreads();  // copied by all threads
#endif
  }
  float* const target = step.joint_partial + (((static_cast<std::size_t>(sequence) * gridDim.y + static_cast<std::size_t>(group)) * static_cast<std::size_t>(step.joint_splits) + static_cast<std::size_t>(split)) *
                                                  static_cast<std::size_t>(step.joint_chunks) + static_cast<std::size_t>(chunk)) * static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns);
  #pragma unroll
  for (int k = 0; k < kJointPairs; ++k) {
    if (part > 0 || warp + kJointWarps * k >= pairs) break;
    const int column = column_of(warp + kJointWarps * k, t);
    const float total = column_sum(sums_of_lane[k]);
    if (g > 0 || column < 0) continue;
    const JointPair& state = codes ? shared_pairs[(warp + kJointWarps * k) * kBlockColumns + t] : own[codes ? 0 : k];
    target[column] = state.top;
    target[kJointColumns + column] = total;
    target[2 * kJointColumns + column] = state.weight[0];
    target[3 * kJointColumns + column] = state.weight[1];
  }
  #pragma unroll
  for (int k = 0; k < mine; ++k) {
    const int own_half = part_first + warp + kJointWarps * k;
    if (warp + kJointWarps * k >= halves || own_half >= all_halves) break;
    float* lines = target + (kJointLines + 16 * own_half + g) * kJointColumns;
    #pragma unroll
    for (int n = 0; n < all_tiles; ++n) {
      if constexpr (codes) {
        lines[4 * n + t] = out[k][2 * n];
        lines[8 * kJointColumns + 4 * n + t] = out[k][2 * n + 1];
      } else {
        *reinterpret_cast<float2*>(lines + 8 * n + 2 * t) = {out[k][4 * n], out[k][4 * n + 1]};
        *reinterpret_cast<float2*>(lines + 8 * kJointColumns + 8 * n + 2 * t) = {out[k][4 * n + 2], out[k][4 * n + 3]};
      }
    }
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
