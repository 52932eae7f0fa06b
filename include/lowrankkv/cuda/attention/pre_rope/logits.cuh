// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/logits.cuh  Logits of joint values' heads whose keys are stored
/// before their rotary embedding: lifted, turned (cuda/attention/pre_rope/rope_on_read.cuh), left
/// in memory for the kernel that has all heads together.
///
/// Lifting maps, offsets and queries of a head take most of a multiprocessor's shared memory,
/// latents and what is summed of them the rest and all registers: one kernel has no room for both
/// (cuda/attention/joint/attend_joint.cuh). Logits are f32, 4 bytes a row and column, written once
/// and read once. Cost: head_dim x planes (or rank) products a row, head and block of columns;
/// floor: the keys' bytes and the logits'.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/joint/joint_products.cuh"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope_codes.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Warps of a block of pre_rope_logits_kernel, at most.
__host__ __device__ constexpr int logit_warps(int scale_groups, int max_units) {
  return scale_groups > 0 ? kPreRopeCodeWarps : pre_rope_warps(max_units);
}

/// @brief Logits of the columns of a launch, of all rows of the compressed lists, in units of log2:
/// AttentionStep::logits(). Rows behind the last of a list get some, up to a tile's end. Grid:
/// (pairs of a head and a block of its columns x blocks) x groups of heads x sequences; warps of
/// the `blocks` blocks of a pair take its tiles in rope, and nothing depends on how many there are.
/// Needs nothing of the kernels before it but what they all read.
/// @tparam scale_groups  of tiles of codes; 0: plain ones, of `type`  @tparam max_units  units of
/// plain keys that a head may have  @tparam copied  lifting maps are copied to shared memory
/// @tparam scattered  rows may stand in any order
/// @param  stage_bytes   of a ring's stage: the keys of a tile  @param key_up_units  as of
/// attend_pre_rope_kernel
template <int scale_groups, DType type, int max_units, bool copied, bool scattered>
__global__ void __launch_bounds__(32 * logit_warps(scale_groups, max_units))
    pre_rope_logits_kernel(LayerView tables, AttentionStep step, Batch batch, StepQueries queries,
                           JointCall call, int first_sequence, int blocks, int stage_bytes,
                           int ring_bytes, int key_up_units) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr bool codes = scale_groups > 0;
  constexpr int steps = codes ? kCodeRows / kPlainRows : rotated_steps(max_units),
                tile_rows = steps * kPlainRows;
  __shared__ __align__(8)
      std::uint64_t barriers[logit_warps(scale_groups, max_units)][kPreRopeStages];
  __shared__ HeadTiles layout;
  const int pair = static_cast<int>(blockIdx.x) / blocks, group = static_cast<int>(blockIdx.y),
            sequence = first_sequence + static_cast<int>(blockIdx.z),
            slot = batch.slots[blockIdx.z];
  const int first_column = call.first_chunk * kJointColumns,
            last_column = min((call.first_chunk + call.chunks) * kJointColumns,
                              tables.joint_heads * step.columns()) -
                          1;
  const int index = step.pair_of(first_column) + pair,
            head = group * tables.joint_heads + index / step.blocks, block = index % step.blocks,
            head_dim = tables.head_dim;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(blockIdx.x) % blocks * warps, apart = blocks * warps;  // tiles
  const bool there = index <= step.pair_of(last_column);
  const int rows = there ? tables.num_rows(RowList::compressed, slot, head) : 0,
            tiles = (rows + tile_rows - 1) / tile_rows;
  if (first >= tiles) {
    wait_for_last_kernel();  // kernels after this one rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  TileRing<kPreRopeStages> ring(shared_memory + warp * kPreRopeStages * stage_bytes, barriers[warp],
                                stage_bytes);
  PageWalk walk(tables, tables.page_table(RowList::compressed, slot, head), layout, first + warp);
  int coming = first + warp;
  const auto fetch = [&] {
    ring.fetch(coming < tiles ? walk.next(apart) : nullptr,
               layout.bytes);  // keys are all that a head has
    coming += apart;
  };
  for (int stage = 0; stage < kPreRopeStages; ++stage) fetch();
  release_next_kernel();
  const KeyUpMap key_up = tables.maps[head].key_up;
  RopeShared rope(shared_memory + ring_bytes, tables.rotary, head_dim, &key_up);
  if constexpr (copied)
    rope.copy_map(key_up.operands, head_dim, cuda::key_up_units(codes, layout.key_units));
  std::uint32_t* const rotated = reinterpret_cast<std::uint32_t*>(
      shared_memory + ring_bytes + rope_block_bytes(head_dim, key_up_units) +
      warp * rope_warp_bytes(head_dim));
  rope.load_queries(queries, tables.rotary, step, static_cast<int>(blockIdx.z), head, block,
                    head_dim);
  const float unit = rope.largest[t] * __ldg(key_up.scales).y;
  detail::PreRopeRows range;
  range.read_shifts(tables.rotary, slot);
  range.rows = rows;
  range.read_compressed(tables, slot, head);
  const uint4* const map = copied ? rope.operands : key_up.operands;
  // Lane t's column of the launch: of a pair that two launches share, some are in the other.
  const int in_head = block * kBlockColumns + t,
            column = index / step.blocks * step.columns() + in_head;
  const bool writes = in_head < step.columns() && column >= first_column && column <= last_column;
  float* const target = writes ? step.logits(static_cast<std::size_t>(sequence) * gridDim.y +
                                                 static_cast<std::size_t>(group),
                                             column - first_column) +
                                     g
                               : nullptr;
  for (int tile = first + warp; tile < tiles; tile += apart) {
    const std::uint8_t* here = ring.wait();
    TilePlaces<steps> places;
    range.find(tile * tile_rows, places);
    float s[steps][4];
    if constexpr (codes)
      detail::code_logits<scale_groups, scattered>(tables.rotary, rope, layout, here, map, head_dim,
                                                   rotated, places, s);
    else
      detail::plain_logits<type, max_units, scattered>(tables.rotary, rope, here, layout.key_units,
                                                       map, head_dim, rotated, places, s);
    __syncwarp();
    fetch();
#pragma unroll
    for (int i = 0; i < 2 * steps; ++i) {
      if (target != nullptr)
        target[tile * tile_rows + 8 * i] = (s[i / 2][i % 2 * 2] + s[i / 2][i % 2 * 2 + 1]) * unit;
    }
  }
  wait_for_last_kernel();  // what comes after this kernel comes after the one before it too
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
