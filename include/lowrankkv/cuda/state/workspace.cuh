// SPDX-License-Identifier: Apache-2.0
/// @file cuda/state/workspace.cuh  Device workspace of attention calls, for decode steps and for
/// prompts: query operands, partial states, log-sum-exp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/cuda/runtime/lent_memory.hpp"
#include "lowrankkv/cuda/state/attention_step.cuh"
#include "lowrankkv/cuda/tiles/joint_layout.cuh"
#include "lowrankkv/cuda/tiles/layer_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Budget in bytes for the logits of joint values with pre-RoPE keys, which take 4 bytes per
/// row and column. Logits are reserved for as many chunks of columns at a time as fit, for the
/// longest lists of all sequences (for a prompt: of one sequence). At least one chunk is reserved,
/// whose kJointColumns columns take 128 bytes per row and group of heads.
inline constexpr std::size_t kLogitBytes = std::size_t{64} << 20;

/// @brief The buffers of a layer's attention calls. Buffers of decode steps are allocated for
/// max_sequences and max_query_tokens and never move. Buffers of prompts grow.
class Workspace {
 public:
  Workspace() = default;
  /// @brief Reserves the buffers of decode steps.
  /// @param max_segments  of a sequence
  /// @param max_rows  of a head's lists, by RowList
  /// @param lent  memory for decode steps, 128-byte aligned; null: the workspace allocates and owns
  /// it
  /// @throws CapacityError if the lent memory is too small, ShapeError if it is not aligned
  Workspace(const CacheConfig& config, const LayerTiles& tiles, int max_segments,
            const std::int64_t (&max_rows)[2], const LentMemory& lent)
      : heads_(config.shape.num_kv_heads),
        qo_heads_(config.shape.num_qo_heads),
        pre_rope_(config.rope.keys == Rope::pre),
        step_(step_of(config, tiles, max_segments, max_rows)),
        lent_(lent) {
    decode_bytes_ = decode_bytes(config, tiles, max_segments, max_rows);
    if (tiles.joint_heads > 0)
      prompt_chunks_ = logit_chunks(heads_ / tiles.joint_heads, max_rows[1]);
    if (lent.data == nullptr) {
      decode_ = DeviceArray<std::uint8_t>(decode_bytes_);
    } else {
      const std::size_t offset = reinterpret_cast<std::uintptr_t>(lent.data) % 128;
      if (lent.bytes < decode_bytes_)
        ::lowrankkv::detail::fail<CapacityError>("workspace: ", lent.bytes, " bytes lent, ",
                                                 decode_bytes_, " needed");
      if (offset != 0)
        ::lowrankkv::detail::fail<ShapeError>("workspace: memory is ", offset,
                                              " bytes off a multiple of 128");
    }
    std::uint8_t* base = lent.data == nullptr ? decode_.data() : lent.data;
    step_lse_ = reinterpret_cast<float*>(base + carve(step_, config.max_sequences, base));
  }
  /// @brief Bytes of the buffers of decode steps.
  static std::size_t decode_bytes(const CacheConfig& config, const LayerTiles& tiles,
                                  int max_segments, const std::int64_t (&max_rows)[2]) {
    AttentionStep step = step_of(config, tiles, max_segments, max_rows);
    const std::size_t queries = static_cast<std::size_t>(config.max_sequences) *
                                static_cast<std::size_t>(config.max_query_tokens) *
                                static_cast<std::size_t>(config.shape.num_qo_heads);
    return carve(step, config.max_sequences, nullptr, config.shape.num_kv_heads) +
           queries * sizeof(float);
  }

  /// @brief Largest number of splits of a compressed list with so many rows, over all its segments.
  /// With joint values: of the list of latents.
  int coded_splits(std::int64_t list_rows) const {
    return step_.joint_width > 0 ? joint_splits(list_rows) : splits_in(list_rows, step_.segments);
  }
  /// @brief Buffers of a decode step over m query tokens per sequence.
  AttentionStep step(int m) const {
    AttentionStep step = step_;
    step.set_tokens(m);
    return step;
  }
  /// @brief Buffers of a step over `m` query tokens of one sequence's prompt. Grows them if they
  /// are too small, which allocates and synchronises.
  /// @param rows  largest numbers of stored rows of the sequence's heads
  /// @param packed_tiles  tiles of the packed prompt, per head
  /// @param packed  the packed prompt
  AttentionStep prompt_step(const HeadRows& rows, int m, std::int32_t packed_tiles,
                            const std::uint8_t* packed) {
    AttentionStep step = step_;
    step.set_tokens(m);
    if (step.joint_heads > 0) {
      step.joint_splits = joint_splits(rows.num_compressed);
      step.joint_chunks = (std::min)(kJointChunks, joint_chunks(step, step.joint_heads));
      if (pre_rope_) set_logits(step, prompt_chunks_, rows.num_compressed);
    } else {
      step.compressed_splits = coded_splits(rows.num_compressed);
    }
    step.full_splits = full_splits_of(rows.num_full, pre_rope_);
    step.prompt = packed;
    step.prompt_tiles = packed_tiles;
    const std::size_t bytes = carve(step, 1, nullptr);
    if (prompt_.size() < bytes) prompt_ = DeviceArray<std::uint8_t>(bytes);
    carve(step, 1, prompt_.data());
    return step;
  }

  /// @brief Memory for the log-sum-exp of a step's queries, [sequences x m, num_qo_heads]. For
  /// calls that ask for attention scores but not for the log-sum-exp.
  float* step_lse() const { return step_lse_; }
  /// @brief Memory for the log-sum-exp of so many query tokens of a prompt, for layers that
  /// accumulate scores. Grows if it is too small, which allocates and synchronises.
  float* prompt_lse(std::int64_t tokens) {
    const std::size_t size = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(qo_heads_);
    if (prompt_lse_.size() < size) prompt_lse_ = DeviceArray<float>(size);
    return prompt_lse_.data();
  }

  /// @brief Bytes of owned device memory.
  std::size_t bytes() const { return decode_.bytes() + prompt_.bytes() + prompt_lse_.bytes(); }
  /// @brief Bytes of the buffers of decode steps, owned or lent.
  std::size_t decode_bytes() const { return decode_bytes_; }

 private:
  static int splits_in(std::int64_t list_rows, int segments) {
    return list_rows == 0 ? 0 : splits_of(list_rows) + segments - 1;
  }
  static AttentionStep step_of(const CacheConfig& config, const LayerTiles& tiles, int max_segments,
                               const std::int64_t (&max_rows)[2]) {
    AttentionStep step;
    step.group = config.shape.group_size();
    step.set_tokens(config.max_query_tokens);
    step.segments = max_segments;
    step.compressed_splits = splits_in(max_rows[1], max_segments);
    step.full_splits = full_splits_of(max_rows[0], config.rope.keys == Rope::pre);
    step.width = config.shape.head_dim;
    for (const HeadTiles& layout : tiles.compressed)
      step.width = !layout.keys ? step.width : (std::max)(step.width, layout.state_lines());
    // Pre-RoPE keys are multiplied by the queries themselves.
    step.coded_units = config.rope.keys == Rope::pre ? 0 : tiles.max_units(Part::key);
    if (tiles.joint_heads == 0) return step;
    step.joint_heads = tiles.joint_heads;
    step.joint_width = tiles.joint_width();
    step.compressed_splits = 0;  // joint values have buffers of their own
    step.joint_splits = joint_splits(max_rows[1]);
    step.joint_chunks = (std::min)(kJointChunks, joint_chunks(step, tiles.joint_heads));
    if (config.rope.keys == Rope::pre)
      set_logits(
          step,
          logit_chunks(config.max_sequences * (config.shape.num_kv_heads / tiles.joint_heads),
                       max_rows[1]),
          max_rows[1]);
    return step;
  }
  static std::int32_t logit_rows(std::int64_t rows) {
    return static_cast<std::int32_t>((rows + kCodeRows - 1) / kCodeRows * kCodeRows);
  }
  /// Most chunks of columns in a launch, such that kLogitBytes hold the logits of so many lists of
  /// joint values.
  static std::int32_t logit_chunks(int lists, std::int64_t rows) {
    const std::int64_t bytes = std::int64_t{lists} * logit_rows(rows) * kJointColumns *
                               static_cast<std::int64_t>(sizeof(float));
    return static_cast<std::int32_t>(
        (std::clamp)(static_cast<std::int64_t>(kLogitBytes) / (std::max)(bytes, std::int64_t{1}),
                     std::int64_t{1}, std::int64_t{kJointChunks}));
  }
  /// Sets the sizes of a step's logits, for lists of joint values with so many rows.
  static void set_logits(AttentionStep& step, std::int32_t most_chunks, std::int64_t rows) {
    step.joint_chunks = (std::min)(step.joint_chunks, most_chunks);
    step.logit_columns =
        (std::min)(step.joint_chunks * kJointColumns, step.joint_heads * step.columns());
    step.logit_rows = logit_rows(rows);
  }
  /// Assigns the buffers of a step over so many sequences, from `base` on; null: only counts their
  /// bytes.
  /// @return bytes of all buffers
  static std::size_t carve(AttentionStep& step, int sequences, std::uint8_t* base, int heads) {
    const std::size_t rows = static_cast<std::size_t>(sequences) * static_cast<std::size_t>(heads) *
                             static_cast<std::size_t>(step.blocks);
    std::size_t end = 0;
    const auto reserve = [&](auto*& pointer, std::size_t size) {
      pointer = base == nullptr
                    ? nullptr
                    : reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + end);
      end += (size * sizeof(*pointer) + 127) / 128 * 128;
    };
    reserve(step.coded_queries,
            rows * static_cast<std::size_t>(step.segments * step.coded_units) * 32);
    reserve(step.coded_scales, rows * static_cast<std::size_t>(step.segments) * kBlockColumns);
    reserve(step.partial, rows * static_cast<std::size_t>(step.entries()) * step.state_floats());
    if (step.joint_heads == 0) return end;
    const std::size_t parts = static_cast<std::size_t>(sequences * (heads / step.joint_heads)) *
                              static_cast<std::size_t>(step.joint_splits * step.joint_chunks);
    reserve(step.joint_partial,
            parts * static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns));
    reserve(step.joint_states, rows * step.joint_floats());
    reserve(step.joint_logits, static_cast<std::size_t>(sequences * (heads / step.joint_heads)) *
                                   static_cast<std::size_t>(step.logit_columns) *
                                   static_cast<std::size_t>(step.logit_rows));
    return end;
  }
  std::size_t carve(AttentionStep& step, int sequences, std::uint8_t* base) const {
    return carve(step, sequences, base, heads_);
  }

  int heads_ = 0, qo_heads_ = 0;
  bool pre_rope_ = false;  ///< attention applies RoPE when it reads keys
  /// Most chunks of columns in a prompt's launch over joint values of pre-RoPE keys. It does not
  /// depend on the rows, so that longer lists never need less memory.
  std::int32_t prompt_chunks_ = 0;
  AttentionStep step_;
  std::size_t decode_bytes_ = 0;
  DeviceArray<std::uint8_t> decode_, prompt_;
  DeviceArray<float> prompt_lse_;
  float* step_lse_ = nullptr;
  LentMemory lent_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
