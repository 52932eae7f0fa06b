// SPDX-License-Identifier: Apache-2.0
/// @file cuda/joint_ring.cuh  The tiles that a block of attention over joint values takes: keys of some heads and their group's latents.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/joint_products.cuh"
#include "lowrankkv/cuda/tables.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What the ring knows of a list: rows of a tile, tiles of a page, bytes of a tile, bytes of what an iteration's step takes of one.
struct JointList {
  int rows, tiles_per_page, bytes, step_bytes;
};

/// Stages of iterations: [heads, key_bytes] keys, then latents, sixteen rows after sixteen rows, or a tile of codes each. From sm_90 on a bulk copy each, before, copies by lanes.
class JointRing {
 public:
  /// @param heads  from `first_head` on, whose keys are wanted  @param list  of the latents  @param tile_rows  of an iteration's steps: 16, of codes 64
  /// @param lists  shared memory of heads + 2, which begin() fills: the last has the bytes of a step of all
  __device__ JointRing(const Tables& tables, int slot, int first_head, int heads, int list, int tile_rows, int tiles, const JointCall& call, std::uint8_t* memory, int stage_bytes, std::uint64_t* barriers,
                       JointList* lists)
      : memory_(memory), barriers_(barriers), lists_(lists), pool_(tables.pool), page_bytes_(tables.page_bytes), key_table_(tables.page_table(RowList::compressed, slot, first_head)),
        value_table_(tables.page_table(RowList::compressed, slot, list)), max_pages_(tables.max_pages[1]), stage_bytes_(stage_bytes), key_bytes_(call.key_bytes), stages_(call.stages),
        value_place_(call.heads * call.key_bytes), heads_(heads), tile_rows_(tile_rows), tiles_(tiles), steps_(tile_rows == kPlainRows ? call.steps : 1) {}

  /// Makes barriers and lists ready; all threads, before the block is synchronised.
  __device__ void begin(const HeadTiles* keys, const HeadTiles* values) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread <= heads_) {
      const HeadTiles& layout = thread < heads_ ? keys[thread] : *values;
      lists_[thread] = {layout.rows, layout.tiles_per_page, layout.bytes, !layout.codes && thread < heads_ ? layout.key_units * kPlainUnitBytes : layout.bytes};
    }
    if (thread == 32) {
      int total = values->bytes;
      for (int head = 0; head < heads_; ++head) total += keys[head].codes ? keys[head].bytes : keys[head].key_units * kPlainUnitBytes;
      lists_[heads_ + 1] = {1, 1, total, 0};
    }
#if __CUDA_ARCH__ >= 900
    if (thread > 0) return;
    for (int stage = 0; stage < stages_; ++stage) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers_ + stage)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  /// Looks up the pages of iteration `iteration` of the list, which fetch() is to be told of: they come while other things are done. All warps have a few lists.
  __device__ void look(int iteration) {
    const int lane = static_cast<int>(threadIdx.x) % 32, item = static_cast<int>(threadIdx.x) / 32 + static_cast<int>(blockDim.x) / 32 * lane, step = item / (heads_ + 1), index = iteration * steps_ + step;
    head_ = item - step * (heads_ + 1);  // heads_: latents
    step_ = step;
    row_ = index * tile_rows_;
    there_ = step < steps_ && index < tiles_;
    used_ = min(steps_, tiles_ - iteration * steps_);
    if (!there_) return;
    const JointList& list = lists_[head_];
    const std::int32_t* table = head_ < heads_ ? key_table_ + static_cast<std::size_t>(head_) * static_cast<std::size_t>(max_pages_) : value_table_;
    page_ = table[row_ / list.rows / list.tiles_per_page];
  }
  /// Starts to copy what was looked up into stage `stage`.
  __device__ void fetch(int stage) const {
    std::uint8_t* target = memory_ + stage * stage_bytes_;
    const JointList list = lists_[there_ ? head_ : 0];
    const bool key = head_ < heads_;
    const int tile = row_ / list.rows, bytes = there_ ? list.step_bytes : 0;
    const std::uint8_t* source = pool_ + static_cast<std::size_t>(page_) * page_bytes_ + static_cast<std::size_t>(tile % list.tiles_per_page) * static_cast<std::size_t>(list.bytes) +
                                 (key ? (row_ - tile * list.rows) / kPlainRows * list.step_bytes : 0);
    const int place = (key ? head_ * key_bytes_ : value_place_) + step_ * list.step_bytes;
#if __CUDA_ARCH__ >= 900
    const std::uint32_t barrier = shared_address(barriers_ + stage);
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(lists_[heads_ + 1].bytes * used_) : "memory");
    if (bytes == 0) return;
    std::uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));  // tiles are read once a step: they must not push maps and partial states out of the cache
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(target + place)), "l"(source), "r"(bytes), "r"(barrier),
                 "l"(policy) : "memory");
#else
    for (int from = 0; from < 32; ++from) {
      const int count = __shfl_sync(~0U, bytes, from), to = __shfl_sync(~0U, place, from);
      const std::uint8_t* own = reinterpret_cast<const std::uint8_t*>(__shfl_sync(~0U, reinterpret_cast<unsigned long long>(source), from));
      for (int at = static_cast<int>(threadIdx.x) % 32 * 16; at < count; at += 512) *reinterpret_cast<uint4*>(target + to + at) = *reinterpret_cast<const uint4*>(own + at);
    }
#endif
  }
  /// The stage of iteration `i` of a block, when it is there. Before sm_90, the block was synchronised twice since the fetch.
  __device__ __forceinline__ const std::uint8_t* wait(int i) const {
    const int stage = i % stages_;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra WAIT;\nREADY:\n}"
                 ::"r"(shared_address(barriers_ + stage)), "r"(i / stages_ & 1) : "memory");
#endif
    return memory_ + stage * stage_bytes_;
  }

 private:
  std::uint8_t* memory_;
  std::uint64_t* barriers_;
  JointList* lists_;
  const std::uint8_t* pool_;
  std::uint64_t page_bytes_;
  const std::int32_t *key_table_, *value_table_;
  int max_pages_, stage_bytes_, key_bytes_, stages_, value_place_, heads_, tile_rows_, tiles_, steps_;
  int head_ = 0, step_ = 0, row_ = 0, used_ = 0;  // of this lane's copy, that was looked up
  std::int32_t page_ = 0;
  bool there_ = false;
};

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
