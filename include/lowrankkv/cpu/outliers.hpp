// SPDX-License-Identifier: Apache-2.0
/// @file cpu/outliers.hpp  Reconstruction errors of rows before they are stored, and exempting
/// outlier rows from compression.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lowrankkv/cpu/adapt.hpp"
#include "lowrankkv/cpu/project.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

/// error[i] += ||x_i - x^_i||^2, if `relative` divided by ||x_i - mean||^2, in the metric in which
/// the basis is orthonormal. rows [count, head_dim], decoded [count, padded(head_dim)]. A row
/// without energy adds no relative error.
template <class State>
void add_error_of_rows(const State& state, int head, Part part, bool relative, const float* rows,
                       const float* decoded, std::int32_t count, float* error) {
  const int dim = state.head_dim();
  const HeadBasis& basis = state.calibrated.heads[static_cast<std::size_t>(head)];
  std::vector<float> exact(rows, rows + static_cast<std::ptrdiff_t>(count) * dim),
      approximate(exact.size());
  for (std::int32_t row = 0; row < count; ++row)
    std::copy_n(decoded + row * padded(dim), dim, approximate.begin() + row * dim);
  State::BasisImpl::to_metric(state.basis_policy, basis, dim, part, exact.data(), count);
  State::BasisImpl::to_metric(state.basis_policy, basis, dim, part, approximate.data(), count);
  for (std::int32_t row = 0; row < count; ++row) {
    double energy = 0.0, lost = 0.0;
    for (int channel = 0; channel < dim; ++channel) {
      const double value = exact[static_cast<std::size_t>(row * dim + channel)];
      const double difference = value - approximate[static_cast<std::size_t>(row * dim + channel)];
      energy += value * value;
      lost += difference * difference;
    }
    if (!relative || energy > 0.0)
      error[row] += static_cast<float>(relative ? lost / energy : lost);
  }
}

}  // namespace detail

/// @brief Adds the (relative) errors of the rows of `range` to error[0, range.size()): after
/// projection and quantisation under the current epoch. Errors are summed over heads
/// [first, first + heads), whose rows share one code. Cost: one encode and one decode.
template <class State>
void add_error(const State& state, int slot, int first, int heads, Part part, bool relative,
               const std::vector<FlushedRows>& rows, RowRange range, float* error) {
  using Codec = typename State::Codec;
  const int dim = state.head_dim();
  const auto& layout = state.code_layout(first, part);
  const int per_block = kTile;
  std::vector<Projection> projections;
  std::vector<Reconstruction> reconstructions;
  for (int head = first; head < first + heads; ++head) {
    const EpochHead& maps = state.epochs.head(state.sequence(slot).epoch, head);
    projections.emplace_back(maps, dim);
    reconstructions.emplace_back(maps, part, dim);
  }
  const int stride = projections.front().stride(part);
  std::vector<std::byte> block(Codec::block_bytes(layout, per_block));
  std::vector<float> coefficients(static_cast<std::size_t>(kTile * stride)),
      codes(static_cast<std::size_t>(kTile * stride));
  std::vector<float> decoded(static_cast<std::size_t>(kTile * padded(dim)));
  for (std::int64_t begin = range.begin; begin < range.end; begin += kTile) {
    const std::int32_t count =
        static_cast<std::int32_t>((std::min)(std::int64_t{kTile}, range.end - begin));
    const auto source = [&](int member) {
      const FlushedRows& mine = rows[static_cast<std::size_t>(first + member)];
      return (part == Part::key ? mine.keys : mine.values).data() + begin * dim;
    };
    std::fill(coefficients.begin(), coefficients.end(), 0.0F);
    for (int member = 0; member < heads; ++member) {
      const float* projected =
          projections[static_cast<std::size_t>(member)].project(part, source(member), count);
      for (std::int32_t i = 0; i < count * stride; ++i)
        coefficients[static_cast<std::size_t>(i)] += projected[i];
    }
    Codec::encode(layout, part, per_block, block.data(), 0, count, coefficients.data(), stride);
    // Keys come back channel-major.
    if (part == Part::key) {
      Codec::decode(layout, part, per_block, block.data(), 0, count, codes.data(), count);
      const int rank = state.epochs.head(state.sequence(slot).epoch, first).rank(part);
      for (std::int32_t row = 0; row < count; ++row) {
        for (int channel = 0; channel < rank; ++channel)
          coefficients[static_cast<std::size_t>(row * stride + channel)] =
              codes[static_cast<std::size_t>(channel * count + row)];
      }
    } else {
      Codec::decode(layout, part, per_block, block.data(), 0, count, coefficients.data(), stride);
    }
    for (int member = 0; member < heads; ++member) {
      reconstructions[static_cast<std::size_t>(member)].apply(coefficients.data(), stride, count,
                                                              decoded.data());
      detail::add_error_of_rows(state, first + member, part, relative, source(member),
                                decoded.data(), count, error + (begin - range.begin));
    }
  }
}

/// @brief Classifies rows again, now that the basis is known under which they would be stored: rows
/// of `range` that the token policy keeps at full rank are exempted, in all heads of the group.
template <class State>
void exempt_outliers(const State& state, int slot, int group, std::vector<FlushedRows>& rows,
                     RowRange range, Phase phase) {
  const int heads = state.heads_per_group();
  const int first = group * heads;
  const std::int64_t position = state.first_tail_position(slot) + range.begin;
  RowRange asked = range;  // the rows whose residuals are asked for
  if constexpr (requires {
                  State::TokenImpl::residual_candidates(state.token_policy, position, range.size());
                }) {
    asked.end = range.begin +
                State::TokenImpl::residual_candidates(state.token_policy, position, range.size());
    if (asked.size() == 0) return;
  }
  std::vector<float> residuals(static_cast<std::size_t>(range.size()), -1.0F);
  std::fill_n(residuals.begin(), asked.size(), 0.0F);
  bool relative = true;
  if constexpr (requires { State::TokenImpl::relative_residuals(state.token_policy); })
    relative = State::TokenImpl::relative_residuals(state.token_policy);
  for (int head = first; head < first + heads; ++head)
    add_error(state, slot, head, 1, Part::key, relative, rows, asked, residuals.data());
  add_error(state, slot, first, heads, Part::value, relative, rows, asked, residuals.data());
  const auto fates_of = [&](int head) {
    return std::span(rows[static_cast<std::size_t>(head)].fates)
        .subspan(static_cast<std::size_t>(range.begin), static_cast<std::size_t>(range.size()));
  };
  const std::span<RowFate> fates = fates_of(first);
  for (std::size_t row = 0; row < fates.size(); ++row) {
    if (fates[row] != RowFate::compressed) residuals[row] = -1.0F;  // not a candidate
  }
  RowBatch batch{first, position, range.size(), phase};
  batch.residuals = residuals;
  std::vector<RowFate> wish(fates.size());
  State::TokenImpl::classify(state.token_policy, batch, wish);
  for (std::size_t row = 0; row < fates.size(); ++row) {
    if (fates[row] == RowFate::compressed && wish[row] == RowFate::full) fates[row] = RowFate::full;
  }
  for (int head = first + 1; head < first + heads; ++head)
    std::copy(fates.begin(), fates.end(), fates_of(head).begin());
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
