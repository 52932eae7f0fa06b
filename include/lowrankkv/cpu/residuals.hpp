// SPDX-License-Identifier: Apache-2.0
/// @file cpu/residuals.hpp  Norms of what compression lost of each row, and bounds on the resulting
/// change of attention outputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lowrankkv/cpu/attend.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/residual_norms.hpp"
#include "lowrankkv/cpu/segments.hpp"
#include "lowrankkv/diagnostics/certificate.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Records the distance between the stored form of rows [row, row + count) of a list of one
/// head and the exact rows.
/// @param keys, values  exact rows [count, head_dim]; count <= kTile
///
/// Cost: one decode.
template <class State>
void note_residuals(State& state, int slot, int head, RowState list, std::int32_t row,
                    std::int32_t count, const float* keys, const float* values) {
  const int dim = state.head_dim();
  const int width = padded(dim);
  RowResiduals& residuals = state.residuals(slot, head).of(list);
  residuals.resize((std::max)(residuals.key.size(), static_cast<std::size_t>(row + count)));
  std::vector<float> decoded(static_cast<std::size_t>(kTile * width));
  for (const Part part : {Part::key, Part::value}) {
    const float* exact = part == Part::key ? keys : values;
    if (list == RowState::full) {
      load_coefficients(state.full, slot, head, part, row, count, decoded.data(), width);
    } else {
      decode_rows(state, slot, head, state.epochs.head(state.sequence(slot).epoch, head), part, row,
                  count, decoded.data());
    }
    for (std::int32_t i = 0; i < count; ++i) {
      const float* wanted = exact + static_cast<std::ptrdiff_t>(i) * dim;
      residuals.of(part)[static_cast<std::size_t>(row + i)] = norm_not_below(
          distance_of(wanted, decoded.data() + i * width, dim) + 1e-6 * norm_of(wanted, dim));
    }
  }
}

/// @brief Writes to `out` bounds on the change of the outputs of query tokens [first_token,
/// first_token + num_tokens) of `block`, whose lse is known, over one KV head.
///
/// Only rows whose residuals are kept contribute. Cost: their logits once more.
/// @param largest_value  at least the norm of every value of the head
template <class Quantizer>
void certify_block(const StoredHead<Quantizer>& stored, const QueryBlock& block,
                   std::int64_t first_token, int num_tokens, const HeadResiduals& residuals,
                   double largest_value, AttentionWorkspace& work, const CertificateView& out) {
  struct Sums {
    double query_norm = 0.0, largest = 0.0, growth = 0.0, decay = 0.0, value = 0.0, lse = 0.0;
  };
  const int group = block.group_size;
  const QueryRows query =
      detail::load_queries(block, stored.head, stored.head_dim, first_token, num_tokens, work);
  std::vector<Sums> sums(static_cast<std::size_t>(query.rows));
  for (int row = 0; row < query.rows; ++row) {
    Sums& mine = sums[static_cast<std::size_t>(row)];
    // Includes the softmax scale.
    mine.query_norm = norm_of(query.data + row * query.stride, stored.head_dim);
    mine.lse = static_cast<double>(
        block.lse.at(first_token + row / group, stored.head * group + row % group));
  }
  const auto absorb = [&](const QueryRows& rows, const RowResiduals& lost, std::int32_t first,
                          int count) {
    for (int row = 0; row < query.rows; ++row) {
      Sums& mine = sums[static_cast<std::size_t>(row)];
      // lse and logits are f32, so weights are rounded up a little.
      const double slack = 1e-4 + 1e-6 * std::abs(mine.lse);
      const double shift =
          (rows.bias != nullptr ? static_cast<double>(rows.bias[row]) : 0.0) - mine.lse + slack;
      for (int token = 0; token < count; ++token) {
        const std::size_t at = static_cast<std::size_t>(first + token);
        const double exponent =
            static_cast<double>(work.logits[static_cast<std::size_t>(row * kTile + token)]) + shift;
        const double weight = std::exp(exponent);
        const double delta = ::lowrankkv::detail::bound_product(
            mine.query_norm, static_cast<double>(to_float(lost.key[at])));
        mine.largest = (std::max)(mine.largest, delta);
        // A weight that underflows may grow to one that does not: compute it in the exponent.
        mine.growth += weight > 1e-290
                           ? ::lowrankkv::detail::bound_product(weight, std::expm1(delta))
                           : std::exp(exponent + delta);
        mine.decay += weight * -std::expm1(-delta);
        mine.value += ::lowrankkv::detail::bound_product(
            weight, static_cast<double>(to_float(lost.value[at])));
      }
    }
  };
  KeyReader<Quantizer> keys(stored, work);
  for (std::int32_t done = 0; done < static_cast<std::int32_t>(residuals.full.key.size());
       done += kTile) {
    const int count = (std::min)(kTile, stored.full->size(stored.slot, stored.head) - done);
    tile_logits(query, keys.full(done, count), count, work.logits.data());
    absorb(query, residuals.full, done, count);
  }
  for (const Segment& segment : stored.segments) {
    if (segment.num_rows == 0) continue;
    const QueryRows opened = keys.open(stored.epochs->head(segment.epoch, stored.head), query, 0);
    for (std::int32_t done = 0; done < segment.num_rows; done += kTile) {
      const int count = (std::min)(kTile, segment.num_rows - done);
      keys.logits(opened, segment.first_row + done, count, work.logits.data());
      absorb(opened, residuals.compressed, segment.first_row + done, count);
    }
  }
  for (int row = 0; row < query.rows; ++row) {
    const Sums& mine = sums[static_cast<std::size_t>(row)];
    // Rows or queries that are not finite: no bound holds but the trivial one.
    if (std::isnan(mine.growth + mine.decay + mine.value + mine.query_norm)) {
      out.at(first_token + row / group, stored.head * group + row % group) = kUnboundedCertificate;
      continue;
    }
    const double softmax =
        (std::min)(diagnostics::weighted_softmax_error_bound(mine.growth, mine.decay),
                   diagnostics::softmax_error_bound(mine.largest));
    const double output = diagnostics::output_error_bound(softmax, largest_value, mine.value);
    out.at(first_token + row / group, stored.head * group + row % group) = {
        static_cast<float>(mine.largest), static_cast<float>(softmax), static_cast<float>(output)};
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
