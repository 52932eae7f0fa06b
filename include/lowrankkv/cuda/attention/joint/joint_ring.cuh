// SPDX-License-Identifier: Apache-2.0
/// @file cuda/attention/joint/joint_ring.cuh  Ring of the tiles that a block of attention over
/// joint values reads: keys of some heads and their group's latents.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/attention/joint/joint_products.cuh"
#include "lowrankkv/cuda/state/layer_view.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What a lane copies in every iteration: one step of one list. In shared memory, since registers
/// are short.
struct JointCopy {
  const std::int32_t* table;
  // step: which step of an iteration. place: byte offset in a stage. bytes: of the copy. per_page:
  // steps of a page.
  int step, place, bytes, per_page;
  int page, in_page;  // of the next iteration
};
/// Most copies of an iteration: 32 heads and the latents; with more than one step, four steps of up
/// to 16 heads and the latents. Kept small for one step, where shared memory is short.
__host__ __device__ constexpr int joint_copies(int list_steps) { return list_steps > 1 ? 68 : 33; }

/// A ring of stages, one per iteration. A stage holds keys [heads, key_bytes], then latents. Each
/// list contributes one or more groups of sixteen rows, or a tile of codes.
///
/// From sm_90 on, each copy is one bulk copy; before, lanes copy. Four warps do it, with one lane
/// per step of each list. Tiles are contiguous within a page, so steps are too.
class JointRing {
 public:
  static constexpr int kWarps = 4;  ///< the last warps of a block

  /// @param keys  layouts of the wanted heads' tiles; `first_head` is the first of these heads
  /// @param list, latents  the group's list of latents and its layout
  /// @param tile_rows  rows of a step: 16, or 64 for codes
  /// @param first, end  steps of the list that the block covers
  /// @param copies  shared memory of joint_copies() entries
  __device__ JointRing(const LayerView& tables, int slot, int first_head, int heads,
                       const HeadTiles* keys, int list, const HeadTiles& latents, int tile_rows,
                       int first, int end, const JointCall& call, std::uint8_t* memory,
                       int stage_bytes, std::uint64_t* barriers, JointCopy* copies)
      : tables_(tables),
        memory_(memory),
        barriers_(barriers),
        stage_bytes_(stage_bytes),
        stages_(call.stages),
        steps_(tile_rows == kPlainRows ? call.steps : 1),
        left_(end - first),
        copies_(copies) {
    const int place = static_cast<int>(threadIdx.x + kWarps * 32) - static_cast<int>(blockDim.x),
              item = place / 32 + kWarps * (place % 32);
    // Index `heads` is the list of latents.
    const int head = item % (heads + 1), step = item / (heads + 1);
    if (place < 0 || step >= steps_) return;
    own_ = item;
    const bool key = head < heads;
    const HeadTiles& layout = key ? keys[head] : latents;
    const int bytes = step_bytes(layout),
              per_page = layout.rows / tile_rows * layout.tiles_per_page,
              page = (first + step) / per_page;
    copies[item] = {key ? tables.page_table(RowList::compressed, slot, first_head + head)
                        : tables.page_table(RowList::compressed, slot, list),
                    step,
                    (key ? head * call.key_bytes : call.heads * call.key_bytes) + step * bytes,
                    bytes,
                    per_page,
                    page,
                    first + step - page * per_page};
    if (item > 0) return;
    int total = step_bytes(latents);
    for (int i = 0; i < heads; ++i) total += step_bytes(keys[i]);
    total_ = total;
#if __CUDA_ARCH__ >= 900
    for (int stage = 0; stage < stages_; ++stage)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers_ + stage))
                   : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

  /// Looks up the page of the next iteration's step, so that the load overlaps other work. fetch()
  /// must follow.
  __device__ __forceinline__ void look() {
    if (own_ < 0 || copies_[own_].step >= left_) return;
    found_ = copies_[own_].table[copies_[own_].page];
  }
  /// Starts to copy the step found by look() into the stage that was filled longest ago.
  __device__ __forceinline__ void fetch() {
    if (own_ < 0) return;
    JointCopy& own = copies_[own_];
    std::uint8_t* target = memory_ + filling_ * stage_bytes_ + own.place;
    const bool there = own.step < left_;
    const std::uint8_t* source =
        tables_.pool + static_cast<std::size_t>(found_) * tables_.page_bytes +
        static_cast<std::size_t>(own.in_page) * static_cast<std::size_t>(own.bytes);
#if __CUDA_ARCH__ >= 900
    const std::uint32_t barrier = shared_address(barriers_ + filling_);
    if (own_ == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(total_ * min(steps_, left_))
                   : "memory");
    if (there) {
      // Tiles are read once a step. They must not evict maps and partial states from the cache.
      std::uint64_t policy;
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
          "[%1], %2, [%3], %4;" ::"r"(shared_address(target)),
          "l"(source), "r"(own.bytes), "r"(barrier), "l"(policy)
          : "memory");
    }
#else
    for (int at = 0; there && at < own.bytes; at += 16)
      *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(source + at);
#endif
    left_ -= steps_;
    for (own.in_page += steps_; own.in_page >= own.per_page; own.in_page -= own.per_page)
      ++own.page;
    filling_ = filling_ + 1 == stages_ ? 0 : filling_ + 1;
  }
  /// Waits for the next iteration's stage and returns it. Before sm_90, the block must have
  /// synchronised twice since the fetch.
  __device__ __forceinline__ const std::uint8_t* wait() {
    const int stage = using_;
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], "
        "%1;\n@done bra READY;\nbra WAIT;\nREADY:\n}" ::"r"(shared_address(barriers_ + stage)),
        "r"(phase_)
        : "memory");
#endif
    using_ = stage + 1 == stages_ ? 0 : stage + 1;
    if (using_ == 0) phase_ ^= 1U;
    return memory_ + stage * stage_bytes_;
  }

 private:
  __device__ static int step_bytes(const HeadTiles& layout) {
    return !layout.codes && layout.keys ? layout.key_units * kPlainUnitBytes : layout.bytes;
  }

  const LayerView& tables_;
  std::uint8_t* memory_;
  std::uint64_t* barriers_;
  int stage_bytes_, stages_, steps_, left_;
  int filling_ = 0, using_ = 0;
  std::uint32_t phase_ = 0;
  JointCopy* copies_;
  int own_ = -1;  // index of this lane's copy; -1: none
  // Bytes of one step of all lists; only the lane of copy 0 knows it.
  int total_ = 0;
  std::int32_t found_ = 0;
};

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
