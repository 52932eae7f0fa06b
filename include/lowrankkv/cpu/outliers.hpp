// SPDX-License-Identifier: Apache-2.0
/// @file cpu/outliers.hpp  How badly rows would be reconstructed, and exempting the worst of them from compression.
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

/// @brief ||x - x^||^2 / ||x - mean||^2 of rows [count, head_dim] under an epoch's maps and the quantizer, in the metric in
/// which the basis is orthonormal; added to error[0, count). A row without energy has no error. Cost: one encode and one decode.
template <class State>
void add_relative_error(const State& state, int head, const EpochHead& maps, Part part, const float* rows, std::int32_t count, float* error) {
  using Codec = typename State::Codec;
  const int dim = state.head_dim();
  const auto& layout = state.compressed.layout(head);
  const int tile = (std::min)(kTile, layout.rows_per_page);
  const int rank = layout.rank(part);
  Projection projection(maps, dim);
  const Reconstruction reconstruction(maps, part, dim);
  std::vector<std::byte> block(static_cast<std::size_t>((Codec::row_bits(layout.of(part)) * layout.rows_per_page + 7) / 8));
  std::vector<float> codes(static_cast<std::size_t>(rank * tile)), coefficients(codes.size());
  std::vector<float> decoded(static_cast<std::size_t>(tile * padded(dim))), exact(static_cast<std::size_t>(tile * dim)), approximate(exact.size());
  for (std::int32_t done = 0; done < count; done += tile) {
    const std::int32_t n = (std::min)(tile, count - done);
    const float* source = rows + static_cast<std::ptrdiff_t>(done) * dim;
    const float* projected = projection.project(part, source, n);
    Codec::encode(layout.of(part), part, layout.rows_per_page, block.data(), 0, n, projected, projection.stride(part));
    Codec::decode(layout.of(part), part, layout.rows_per_page, block.data(), 0, n, codes.data(), part == Part::key ? n : rank);
    for (std::int32_t row = 0; row < n; ++row) {
      for (int channel = 0; channel < rank; ++channel) {
        coefficients[static_cast<std::size_t>(row * rank + channel)] = codes[static_cast<std::size_t>(part == Part::key ? channel * n + row : row * rank + channel)];
      }
    }
    reconstruction.apply(coefficients.data(), rank, n, decoded.data());
    std::copy_n(source, static_cast<std::ptrdiff_t>(n) * dim, exact.begin());
    for (std::int32_t row = 0; row < n; ++row) std::copy_n(decoded.begin() + row * padded(dim), dim, approximate.begin() + row * dim);
    State::BasisImpl::to_metric(state.basis_policy, state.calibrated.heads[static_cast<std::size_t>(head)], dim, part, exact.data(), n);
    State::BasisImpl::to_metric(state.basis_policy, state.calibrated.heads[static_cast<std::size_t>(head)], dim, part, approximate.data(), n);
    for (std::int32_t row = 0; row < n; ++row) {
      double energy = 0.0, lost = 0.0;
      for (int channel = 0; channel < dim; ++channel) {
        const double value = exact[static_cast<std::size_t>(row * dim + channel)];
        const double difference = value - approximate[static_cast<std::size_t>(row * dim + channel)];
        energy += value * value;
        lost += difference * difference;
      }
      if (energy > 0.0) error[done + row] += static_cast<float>(lost / energy);
    }
  }
}

/// @brief Asks the token policy again, now that the basis is known under which rows would be stored: those of `range` that
/// it wants at full rank are exempted.
template <class State>
void exempt_outliers(const State& state, int slot, int head, LeavingRows& rows, RowRange range, Phase phase) {
  const int dim = state.head_dim();
  const EpochHead& maps = state.epochs.head(state.sequence(slot).epoch, head);
  const std::int32_t count = static_cast<std::int32_t>(range.size());
  std::vector<float> residuals(static_cast<std::size_t>(count), 0.0F);
  add_relative_error(state, head, maps, Part::key, rows.keys.data() + range.begin * dim, count, residuals.data());
  add_relative_error(state, head, maps, Part::value, rows.values.data() + range.begin * dim, count, residuals.data());
  const std::span<RowFate> fates = std::span(rows.fates).subspan(static_cast<std::size_t>(range.begin), static_cast<std::size_t>(count));
  for (std::size_t row = 0; row < fates.size(); ++row) {
    if (fates[row] != RowFate::compressed) residuals[row] = -1.0F;  // not a candidate
  }
  RowBatch batch{head, state.first_tail_position(slot) + range.begin, count, phase};
  batch.residuals = residuals;
  std::vector<RowFate> wish(fates.size());
  State::TokenImpl::classify(state.token_policy, batch, wish);
  for (std::size_t row = 0; row < fates.size(); ++row) {
    if (fates[row] == RowFate::compressed && wish[row] == RowFate::full) fates[row] = RowFate::full;
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
