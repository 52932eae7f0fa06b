// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/pre_rope/logits.cuh  Logits of heads with joint values and pre-RoPE keys,
/// left in memory for the kernel that attends with all heads of a group
/// (cuda/attention/joint/attend_joint.cuh).
///
/// Keys are up-projected and rotated on read (cuda/attention/pre_rope/rope_on_read.cuh). One kernel
/// has no room to do that and to sum latents: a head's up-projection map, offsets and queries take
/// most of a multiprocessor's shared memory; latents and their sums take the rest and all
/// registers. Logits are f32, 4 bytes per row and column, written once and read once. Cost:
/// head_dim x planes (or rank) products per row, head and block of columns. Floor: the bytes of the
/// keys and of the logits.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/joint/joint_products.cuh"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope_codes.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Most warps of a block of pre_rope_logits_kernel.
__host__ __device__ constexpr int logit_warps(int scale_groups, int max_units) {
  return scale_groups > 0 ? kPreRopeCodeWarps : pre_rope_warps(max_units);
}

/// @brief Writes the logits of the columns of a launch for all rows of the compressed lists, in
/// units of log2, to AttentionStep::logits(). Grid: (pairs x blocks) x groups of heads x sequences.
///
/// A pair is a head and a block of its columns. The warps of the `blocks` blocks of a pair divide
/// its tiles; results do not depend on how many blocks there are. Places behind the last row of a
/// list, up to the end of its tile, are written too. Depends on earlier kernels only for what they
/// all read.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles, of `type`
/// @tparam max_units  units of plain keys that a head may have
/// @tparam copied  up-projection maps are copied to shared memory
/// @tparam scattered  rows may stand in any order
/// @param stage_bytes  of a ring's stage: the keys of a tile
/// @param key_up_units  as of attend_pre_rope_kernel
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
            sequence = first_sequence + static_cast<int>(blockIdx.z), slot = batch.slot(blockIdx.z);
  const int first_column = call.first_chunk * kJointColumns,
            last_column = min((call.first_chunk + call.chunks) * kJointColumns,
                              tables.joint_heads * step.columns()) -
                          1;
  const int index = step.pair_of(first_column) + pair,
            head = group * tables.joint_heads + index / step.blocks, block = index % step.blocks,
            head_dim = tables.head_dim;
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(blockIdx.x) % blocks * warps,
            tile_stride = blocks * warps;  // in tiles
  const bool there = slot >= 0 && index <= step.pair_of(last_column);
  const int rows = there ? tables.num_rows(RowList::compressed, slot, head) : 0,
            tiles = (rows + tile_rows - 1) / tile_rows;
  if (first >= tiles) {
    wait_for_last_kernel();  // later kernels rely on it
    return;
  }
  copy_tiles(tables.compressed + head, &layout);
  __syncthreads();
  TileRing<kPreRopeStages> ring(shared_memory + warp * kPreRopeStages * stage_bytes, barriers[warp],
                                stage_bytes);
  PageWalk walk(tables, tables.page_table(RowList::compressed, slot, head), layout, first + warp);
  int coming = first + warp;
  const auto fetch = [&] {
    // A head has keys only.
    ring.fetch(coming < tiles ? walk.next(tile_stride) : nullptr, layout.bytes);
    coming += tile_stride;
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
  // Lane t's column of the launch. Of a pair that two launches share, the other launch has some
  // columns.
  const int in_head = block * kBlockColumns + t,
            column = index / step.blocks * step.columns() + in_head;
  const bool writes = in_head < step.columns() && column >= first_column && column <= last_column;
  float* const target = writes ? step.logits(static_cast<std::size_t>(sequence) * gridDim.y +
                                                 static_cast<std::size_t>(group),
                                             column - first_column) +
                                     g
                               : nullptr;
  for (int tile = first + warp; tile < tiles; tile += tile_stride) {
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
  // Kernels after this one then also come after the kernel before it.
  wait_for_last_kernel();
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
