// SPDX-License-Identifier: Apache-2.0
/// @file cuda/workspace.cuh  Memory that attention works in: queries as operands, partial states, sums of exponentials; of decode steps, and of prompts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/joint_tiles.cuh"
#include "lowrankkv/cuda/layer_tiles.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The buffers of a layer's attention calls. Those of decode steps are made for max_sequences and max_query_tokens and never move; those of prompts grow.
class Workspace {
 public:
  Workspace() = default;
  /// @param max_segments  of a sequence  @param max_rows  of its lists  @param masses  whether attention is measured
  Workspace(const CacheConfig& config, const LayerTiles& tiles, int max_segments, const std::int64_t (&max_rows)[2], bool masses) : heads_(config.shape.num_kv_heads), qo_heads_(config.shape.num_qo_heads) {
    step_.group = config.shape.group_size();
    step_.set_tokens(config.max_query_tokens);
    step_.segments = max_segments;
    step_.compressed_splits = coded_splits(max_rows[1]);
    step_.full_splits = splits_of(max_rows[0]);
    step_.width = config.shape.head_dim;
    for (const HeadTiles& layout : tiles.compressed) step_.width = !layout.keys ? step_.width : (std::max)(step_.width, layout.state_lines());
    step_.coded_units = tiles.max_units(Part::key);
    if (tiles.joint_heads > 0) {
      joint_heads_ = tiles.joint_heads;
      step_.compressed_splits = 0;  // states of joint values are apart
      step_.joint_width = tiles.joint_width();
      step_.joint_splits = joint_splits(max_rows[1]);
      step_.joint_chunks = (std::min)(kJointChunks, joint_chunks(step_, joint_heads_));
    }
    const std::size_t sequences = static_cast<std::size_t>(config.max_sequences), rows = sequences * static_cast<std::size_t>(heads_) * static_cast<std::size_t>(step_.blocks);
    decode_.fit(step_, rows, joint_heads_ == 0 ? 0 : sequences * static_cast<std::size_t>(heads_ / joint_heads_));
    decode_.give(step_);
    if (masses) step_lse_ = DeviceArray<float>(sequences * static_cast<std::size_t>(config.max_query_tokens * qo_heads_));
  }

  /// @brief Splits that a compressed list of so many rows may have, over all its segments; that of joint values, where there are some.
  int coded_splits(std::int64_t list_rows) const { return list_rows == 0 ? 0 : joint_heads_ > 0 ? joint_splits(list_rows) : splits_of(list_rows) + step_.segments - 1; }
  /// @brief Buffers of a step over so many query tokens.
  AttentionStep step(int m) const {
    AttentionStep step = step_;
    step.set_tokens(m);
    return step;
  }
  /// @brief Buffers of a step over `m` query tokens of a prompt of one sequence, which has `rows`; grown if they are too small, which allocates and waits.
  /// @param packed  tiles of the prompt, so many a head
  AttentionStep prompt_step(const HeadRows& rows, int m, std::int32_t packed_tiles, const std::uint8_t* packed) {
    AttentionStep step = step_;
    step.set_tokens(m);
    if (joint_heads_ > 0) {
      step.joint_splits = joint_splits(rows.num_compressed);
      step.joint_chunks = (std::min)(kJointChunks, joint_chunks(step, joint_heads_));
    } else {
      step.compressed_splits = coded_splits(rows.num_compressed);
    }
    step.full_splits = splits_of(rows.num_full);
    step.prompt = packed;
    step.prompt_tiles = packed_tiles;
    prompt_.fit(step, static_cast<std::size_t>(heads_) * static_cast<std::size_t>(step.blocks), joint_heads_ == 0 ? 0 : static_cast<std::size_t>(heads_ / joint_heads_));
    prompt_.give(step);
    return step;
  }

  /// @brief Memory for the log-sum-exp of a step's queries [sequences x m, num_qo_heads], where masses are kept.
  float* step_lse() const { return step_lse_.data(); }
  /// @brief The same for so many queries of a prompt; grown if it is too small, which allocates and waits.
  float* prompt_lse(std::int64_t tokens) {
    const std::size_t size = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(qo_heads_);
    if (prompt_lse_.size() < size) prompt_lse_ = DeviceArray<float>(size);
    return prompt_lse_.data();
  }

  /// @brief Device memory of all of it.
  std::size_t bytes() const { return decode_.bytes() + prompt_.bytes() + step_lse_.bytes() + prompt_lse_.bytes(); }

 private:
  struct Buffers {
    DeviceArray<uint2> queries;
    DeviceArray<ColumnScale> scales;
    DeviceArray<float> partial, joint_partial, joint_states;

    /// Grows to what a step over so many rows (sequences x heads x blocks of columns) needs. @param groups  sequences x groups of heads whose values are joint
    void fit(const AttentionStep& step, std::size_t rows, std::size_t groups) {
      const auto grow = [](auto& array, std::size_t size) {
        using Array = std::remove_reference_t<decltype(array)>;
        if (array.size() < size) array = Array(size);
      };
      grow(queries, rows * static_cast<std::size_t>(step.segments * step.coded_units) * 32);
      grow(scales, rows * static_cast<std::size_t>(step.segments) * kBlockColumns);
      grow(partial, rows * static_cast<std::size_t>(step.entries()) * step.state_floats());
      if (groups == 0) return;
      grow(joint_partial, groups * static_cast<std::size_t>(step.joint_splits * step.joint_chunks) * static_cast<std::size_t>((kJointLines + step.joint_width) * kJointColumns));
      grow(joint_states, rows * step.joint_floats());
    }
    void give(AttentionStep& step) const {
      step.coded_queries = queries.data();
      step.coded_scales = scales.data();
      step.partial = partial.data();
      step.joint_partial = joint_partial.data();
      step.joint_states = joint_states.data();
    }
    std::size_t bytes() const { return queries.bytes() + scales.bytes() + partial.bytes() + joint_partial.bytes() + joint_states.bytes(); }
  };

  int heads_ = 0, qo_heads_ = 0, joint_heads_ = 0;
  AttentionStep step_;
  Buffers decode_, prompt_;
  DeviceArray<float> step_lse_, prompt_lse_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
