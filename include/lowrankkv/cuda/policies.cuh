// SPDX-License-Identifier: Apache-2.0
/// @file cuda/policies.cuh  What a policy must offer on the Cuda backend, and the policies that do.
///
/// A basis: `static void validate(const B&, const LayerBasis&, const CacheShape&)`; with one latent for the values of several heads,
/// `static int joint_heads(const B&, num_kv_heads)` of a group; `static constexpr bool moves` (optional): maps are those of an orthonormal basis, in a metric or not, so that updaters may move it.
/// An updater: `static constexpr bool adapts`; one that does, Oja's rule: `static void validate(const U&)`, `static PromptSelection prompt_selection(const U&)`,
/// `static OjaForm form(const U&)` and `static OjaRate rate(const U&, Phase)` of its steps.
/// One whose epochs begin when values say so, FrequentDirections: `validate` and `static constexpr bool rolls`; prompts are shown to it flush_interval rows at a time.
/// A token policy: cuda/token_rules.cuh.
/// A quantizer: `static constexpr CodedForm form`, and with codes `static PartTiles tiles(const Q&, rank, bits)`, for bases that move one of two: `static PartTiles moving_tiles(const Q&, rank)`,
/// whole planes of 8 bits without steps, which a basis that moves reads itself, or `static constexpr bool orders_channels`: they are turned to the principal axes of rows, with
/// `static std::vector<float> unit_steps(const Q&, bits)`, steps of coefficients of rms 1, 0 without bits, or empty;
/// `static std::vector<float> steps(const Q&, bits, rms)`, optional `static constexpr int scale_groups` of a row and part (1 or 2; by default 1), optional
/// `static std::vector<float> rotation(const Q&, rank)` [rank, rank] that maps take over, and, for joint values,
/// `static PartTiles joint_tiles(const Q&, rank, bits)`; without codes, `static DType type(const Q&)`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/basis/joint_values.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/basis/rotate_maps.hpp"
#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/cuda/attention_step.cuh"
#include "lowrankkv/cuda/head_maps.cuh"
#include "lowrankkv/cuda/oja.cuh"
#include "lowrankkv/cuda/token_rules.cuh"
#include "lowrankkv/quantizer/block_hadamard.hpp"
#include "lowrankkv/quantizer/int8.hpp"
#include "lowrankkv/quantizer/no_quantizer.hpp"
#include "lowrankkv/quantizer/transform_layout.hpp"
#include "lowrankkv/updater/epoch_policy.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"
#include "lowrankkv/updater/oja.hpp"
#include "lowrankkv/updater/static.hpp"

LOWRANKKV_NAMESPACE_BEGIN

template <>
struct Impl<PerHead, Cuda> {
  static void validate(const PerHead& policy, const LayerBasis& basis, const CacheShape& shape) { ::lowrankkv::validate(policy, basis, shape); }
  static constexpr bool moves = true;  ///< bases may move, in the metrics of keys and values
};
template <>
struct Impl<JointValues, Cuda> {
  static int joint_heads(const JointValues& policy, int num_kv_heads) { return policy.group_of(num_kv_heads); }
  static void validate(const JointValues& policy, const LayerBasis& basis, const CacheShape& shape) { ::lowrankkv::validate(policy, basis, shape); }
};
template <>
struct Impl<Projector, Cuda> {
  static void validate(const Projector& policy, const LayerBasis& basis, const CacheShape& shape) { ::lowrankkv::validate(policy, basis, shape); }
};

template <>
struct Impl<Static, Cuda> {
  static constexpr bool adapts = false;
};

/// Rates are at most 1e6, which is as good as infinity: the old basis counts for nothing.
template <>
struct Impl<Oja, Cuda> {
  static constexpr bool adapts = true;
  static void validate(const Oja& policy) { check_oja(policy); }
  static OjaForm form(const Oja& policy) { return policy.form; }
  static PromptSelection prompt_selection(const Oja& policy) { return {policy.prefill_share, {policy.importance_window, policy.importance_kernel, policy.importance_pooling}}; }
  static cuda::OjaRate rate(const Oja& policy, Phase phase) { return phase == Phase::prefill ? cuda::OjaRate{policy.prefill_rate, 0.0F} : cuda::OjaRate{policy.decode_rate, policy.decode_decay}; }
};

template <>
struct Impl<FrequentDirections, Cuda> {
  static constexpr bool adapts = true;
  static constexpr bool rolls = true;
  static void validate(const FrequentDirections& policy) { check_frequent_directions(policy); }
};

template <>
struct Impl<NoQuantizer, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::plain;
  static DType type(const NoQuantizer& policy) { return policy.type; }
  static void validate(const NoQuantizer& policy) {
    if (policy.type == DType::f32) ::lowrankkv::detail::fail<ValueError>("NoQuantizer: type ", name_of(policy.type), ", f16 or bf16 expected on this backend");
  }
};

namespace cuda {

/// @brief Codes as planes of 8, 4, 2 and 1 bits, most significant first; channels of one width and scale group fill units of 32. Codes of 8 bits
/// are one plane, or two of 4 bits.
inline PartTiles code_planes(const CodeLayout& layout, bool whole_bytes) {
  PartTiles result;
  result.gains = layout.scale;
  std::vector<int> left(layout.bits.begin(), layout.bits.end());  // bits of every code that are not in a plane yet
  for (std::size_t group = 0; group < layout.groups.size(); ++group) {
    const std::size_t first = static_cast<std::size_t>(layout.groups[group].first), end = first + static_cast<std::size_t>(layout.groups[group].count);
    if (group == 1) {
      result.first_coded = result.coded;
      result.first_units = static_cast<int>(result.widths.size());
    }
    result.coded += layout.groups[group].count;
    result.reference[group] = layout.scale == ScaleKind::norm_log8 ? layout.reference_norm : static_cast<float>(1 << (layout.bits[first] - 1));
    for (const int width : {8, 4, 2, 1}) {
      if (width == 8 && !whole_bytes) continue;
      // A code wider than two planes of a width (8 as 4 + 4) takes a second round.
      std::vector<TileChannel> channels;
      for (int round = 0; round < 2; ++round) {
        for (std::size_t channel = first; channel < end; ++channel) {
          if (left[channel] < width) continue;
          left[channel] -= width;
          channels.push_back({static_cast<std::int16_t>(channel), layout.bits[channel], static_cast<std::uint8_t>(left[channel]), static_cast<std::uint8_t>(width)});
        }
      }
      while (channels.size() % kCodeUnit != 0) {
        channels.push_back({});
        result.padding_bits += width;
      }
      result.widths.insert(result.widths.end(), channels.size() / kCodeUnit, static_cast<std::uint8_t>(width));
      result.channels.insert(result.channels.end(), channels.begin(), channels.end());
    }
  }
  if (layout.groups.size() < 2) {
    result.first_coded = result.coded;
    result.first_units = static_cast<int>(result.widths.size());
  }
  return result;
}
/// @brief The same, in whichever way leaves less padding.
inline PartTiles code_planes(const CodeLayout& layout) {
  PartTiles whole = code_planes(layout, true), split = code_planes(layout, false);
  return whole.padding_bits <= split.padding_bits ? whole : split;
}

/// @brief Codes that bases read which move: a channel is a whole code, so that the basis is all that an epoch has to keep.
inline PartTiles moving_code_planes(const CodeLayout& layout) {
  PartTiles result = code_planes(layout, true);
  result.by_basis = true;
  return result;
}

/// @brief Codes of joint values: blocks of 32 channels of equal bits, the last of each filled up, as attention sums them; a block is a unit in every plane that its bits have.
/// Bits do not rise within a scale group.
inline PartTiles joint_code_planes(const CodeLayout& layout) {
  PartTiles result = code_planes(layout, true);
  result.channels.clear();
  result.widths.clear();
  result.padding_bits = 0;
  for (std::size_t group = 0; group < layout.groups.size(); ++group) {
    if (group == 1) result.first_units = static_cast<int>(result.widths.size());
    const std::size_t begin = result.readers.size();
    const int first = layout.groups[group].first, end = first + layout.groups[group].count;
    for (int channel = first; channel < end; ++channel) {
      const std::uint8_t bits = layout.bits[static_cast<std::size_t>(channel)];
      result.readers.push_back({static_cast<std::int16_t>(channel), bits, 0, 0});
      const bool last = channel + 1 == end || layout.bits[static_cast<std::size_t>(channel) + 1] != bits;
      while (last && result.readers.size() % kCodeUnit != 0) {
        result.readers.push_back({-1, bits, 0, 0});
        result.padding_bits += bits;
      }
    }
    for (const int width : {8, 4, 2, 1}) {
      const std::size_t before = result.channels.size();
      for (std::size_t at = begin; at < result.readers.size(); ++at) {
        const TileChannel& reader = result.readers[at];
        if ((reader.bits & width) != 0) result.channels.push_back({reader.source, reader.bits, static_cast<std::uint8_t>(reader.bits & (width - 1)), static_cast<std::uint8_t>(width)});
      }
      result.widths.insert(result.widths.end(), (result.channels.size() - before) / kCodeUnit, static_cast<std::uint8_t>(width));
    }
  }
  if (layout.groups.size() < 2) result.first_units = static_cast<int>(result.widths.size());
  return result;
}

/// @brief Scale groups of a row of keys, and of values.
template <class Codec>
constexpr int scale_groups_of() {
  if constexpr (requires { Codec::scale_groups; }) return Codec::scale_groups;
  else return 1;
}

/// @brief Calibrated bases as the quantizer's codes want them: rotated, if it has rotations.
template <class Quantizer>
LayerBasis folded_basis(LayerBasis basis, const Quantizer& quantizer, int head_dim) {
  if constexpr (requires { Impl<Quantizer, Cuda>::rotation(quantizer, 1); }) {
    std::vector<float> keys, values;
    int key_rank = 0, value_rank = 0;  // that they are of
    for (HeadBasis& head : basis.heads) {
      if (head.key_rank != key_rank) keys = Impl<Quantizer, Cuda>::rotation(quantizer, key_rank = head.key_rank);
      if (head.value_rank != value_rank) values = Impl<Quantizer, Cuda>::rotation(quantizer, value_rank = head.value_rank);
      head.key_down = rotated_columns(head.key_down, head_dim, head.key_rank, keys);
      head.query_down = rotated_columns(head.query_down, head_dim, head.key_rank, keys);
      head.value_down = rotated_columns(head.value_down, head_dim, head.value_rank, values);
      head.output_up = rotated_rows(head.output_up, head.value_rank, head_dim, values);
    }
  }
  return basis;
}

}  // namespace cuda

template <>
struct Impl<TransformCode, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static constexpr bool orders_channels = true;
  static void validate(const TransformCode& policy) {
    if (!(policy.step_scale > 0.0F) || !std::isfinite(policy.step_scale)) {
      ::lowrankkv::detail::fail<ValueError>("TransformCode: step_scale is finite and positive, given ", policy.step_scale);
    }
  }
  static cuda::PartTiles tiles(const TransformCode& policy, int rank, std::span<const std::uint8_t> bits) { return cuda::code_planes(transform_layout(policy, rank, bits)); }
  static cuda::PartTiles joint_tiles(const TransformCode& policy, int rank, std::span<const std::uint8_t> bits) { return cuda::joint_code_planes(transform_layout(policy, rank, bits)); }
  static std::vector<float> steps(const TransformCode& policy, std::span<const std::uint8_t> bits, std::span<const float> rms) { return transform_steps(policy, bits, rms); }
  static std::vector<float> unit_steps(const TransformCode& policy, std::span<const std::uint8_t> bits) {
    std::vector<float> units;
    for (const std::uint8_t own : bits) units.push_back(own == 0 ? 0.0F : policy.step_scale * gaussian_step(own));
    return units;
  }
};

template <>
struct Impl<Int8, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static void validate(const Int8&) {}
  static cuda::PartTiles tiles(const Int8&, int rank, std::span<const std::uint8_t>) { return cuda::code_planes(int8_layout(rank)); }
  static cuda::PartTiles moving_tiles(const Int8&, int rank) { return cuda::moving_code_planes(int8_layout(rank)); }
  static cuda::PartTiles joint_tiles(const Int8&, int rank, std::span<const std::uint8_t>) { return cuda::joint_code_planes(int8_layout(rank)); }
  static std::vector<float> steps(const Int8&, std::span<const std::uint8_t>, std::span<const float>) { return {}; }
};

/// Tiles have both gains, also where a small rank leaves one block without channels.
template <>
struct Impl<BlockHadamard, Cuda> {
  static constexpr cuda::CodedForm form = cuda::CodedForm::codes;
  static constexpr bool orders_channels = true;
  static constexpr int scale_groups = 2;
  static void validate(const BlockHadamard& policy) { check_block_hadamard(policy); }
  static cuda::PartTiles tiles(const BlockHadamard& policy, int rank, std::span<const std::uint8_t>) { return cuda::code_planes(block_hadamard_layout(policy, rank)); }
  static cuda::PartTiles joint_tiles(const BlockHadamard& policy, int rank, std::span<const std::uint8_t>) { return cuda::joint_code_planes(block_hadamard_layout(policy, rank)); }
  static std::vector<float> steps(const BlockHadamard&, std::span<const std::uint8_t>, std::span<const float>) { return {}; }
  static std::vector<float> unit_steps(const BlockHadamard&, std::span<const std::uint8_t>) { return {}; }
  static std::vector<float> rotation(const BlockHadamard& policy, int rank) { return block_hadamard_rotation(policy, block_hadamard_layout(policy, rank)); }
};

LOWRANKKV_NAMESPACE_END
