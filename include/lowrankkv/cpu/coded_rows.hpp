// SPDX-License-Identifier: Apache-2.0
/// @file cpu/coded_rows.hpp  Attention over packed codes (quantizer/code_layout.hpp) where they
/// are: kernels unpack them in registers.
///
/// With s_t the scale of row t in a group of channels and x_tc the level of a code, logit_t = sum
/// over groups of s_t sum_c q_c x_tc, and out_c = sum_t (p_t s_t) x_tc. Keys are taken in pieces of
/// 16 rows of a page, from a multiple of 16 on, so that the codes of a piece begin at a whole byte.
/// The lanes of values are those of their columns, and their sums those of a block, so that the
/// bits of a result do not depend on where pages end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/paged_rows.hpp"
#include "lowrankkv/cpu/quantizer/packed_codes.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The codes of a block of rows of a list, for the kernels.
class CodedRows {
 public:
  /// @param list   PagedRows of a quantizer whose keys, or values, have the layout `layout`
  /// @param count  at most kBlockRows
  template <class Rows>
  CodedRows(const CodeLayout& layout, Part part, const Rows& list, int slot, int head,
            std::int32_t first, int count, AttentionWorkspace& work)
      : layout_(layout), work_(work), rows_per_page_(list.layout(head).rows_per_page) {
    const std::int32_t last = list.size(slot, head) - 1;
    const std::size_t bytes = list.block_bytes(part, head);
    for (int done = 0; done < count;) {
      const std::int32_t row = first + done;
      const std::int32_t later = (std::min)(row + simd::kBlockRows, last);
      const int in_page = row % rows_per_page_;
      simd::CodePiece& piece = work.code_pieces[static_cast<std::size_t>(num_pieces_++)];
      piece.block = list.block_of(part, slot, head, row);
      piece.end = piece.block + bytes;
      piece.next = list.block_of(part, slot, head, later);
      piece.next_row = later % rows_per_page_;
      piece.begin = (part == Part::key ? in_page : done) % simd::kPieceRows;
      piece.row = in_page - piece.begin;
      piece.count =
          (std::min)({simd::kPieceRows - piece.begin, rows_per_page_ - in_page, count - done});
      piece.column = done;
      done += piece.count;
    }
  }

  /// @brief Calls function(CodeBlock) for all channels that have bits: the runs of one scale group
  /// after the other.
  template <class Function>
  void for_each_group(Function&& function) {
    auto line = static_cast<std::ptrdiff_t>(layout_.first_code_line(rows_per_page_));
    for (std::size_t group = 0; group < layout_.groups.size(); ++group) {
      load_scales(group);
      const int end = layout_.groups[group].first + layout_.groups[group].count;
      for (int channel = layout_.groups[group].first; channel < end;) {
        simd::CodeRun runs[kRuns];
        simd::CodeBlock block{work_.code_pieces.data(), num_pieces_, scales_, runs, 0,
                              work_.code_weights.data()};
        while (channel < end && block.num_runs < kRuns) {
          const int bits = layout_.bits[static_cast<std::size_t>(channel)];
          int stop = channel + 1;
          while (stop < end && layout_.bits[static_cast<std::size_t>(stop)] == bits) ++stop;
          if (bits > 0) {
            const auto bytes = static_cast<std::ptrdiff_t>(packed_bytes(rows_per_page_, bits));
            runs[block.num_runs++] = {bits, channel, stop - channel, line, bytes};
            line += (stop - channel) * bytes;
          }
          channel = stop;
        }
        function(block);
      }
    }
  }

 private:
  static constexpr int kRuns = 16;

  void load_scales(std::size_t group) {
    for (int i = 0; i < num_pieces_; ++i) {
      const simd::CodePiece& piece = work_.code_pieces[static_cast<std::size_t>(i)];
      detail::read_scales(layout_, group, rows_per_page_, piece.block, piece.row + piece.begin,
                          piece.count, scales_ + piece.column);
    }
  }

  const CodeLayout& layout_;
  AttentionWorkspace& work_;
  int rows_per_page_;
  int num_pieces_ = 0;
  float scales_[simd::kBlockRows];
};

namespace detail {

/// The layout of a list's packed codes; null if its quantizer stores others, or none, or if the
/// kernels in use have no loops over them.
template <class Quantizer>
const CodeLayout* codes_of([[maybe_unused]] const PagedRows<Quantizer>& list,
                           [[maybe_unused]] int head, [[maybe_unused]] Part part) {
  using Codec = Impl<Quantizer, Cpu>;
  if constexpr (requires { Codec::codes(list.layout(head).of(part)); })
    return simd::kernels().code_logits == nullptr ? nullptr
                                                  : Codec::codes(list.layout(head).of(part));
  else
    return nullptr;
}

}  // namespace detail

/// @brief Computes logits [rows, kLogitStride] of the packed keys of rows [first, first + count) of
/// a list, count <= kBlockRows. Does not add the queries' bias. @return false, and nothing is done,
/// if the kernels cannot unpack them
template <class Quantizer>
bool coded_logits(const PagedRows<Quantizer>& list, int slot, int head, const QueryRows& query,
                  std::int32_t first, int count, AttentionWorkspace& work, float* logits) {
  const CodeLayout* layout = detail::codes_of(list, head, Part::key);
  if (layout == nullptr) return false;
  for (int row = 0; row < query.rows; ++row) std::fill_n(logits + row * kLogitStride, count, 0.0F);
  CodedRows codes(*layout, Part::key, list, slot, head, first, count, work);
  codes.for_each_group([&](const simd::CodeBlock& block) {
    simd::kernels().code_logits(block, query.data, query.stride, query.rows, logits, kLogitStride);
  });
  return true;
}

/// @brief Unpacks the keys of rows [first, first + count) of a list, count <= kBlockRows, to a tile
/// [key_rank, stride], channel-major: PagedRows::load_keys() by the processor's kernels, with the
/// same bits. @return false, and nothing is done, if the kernels cannot unpack them
template <class Quantizer>
bool load_coded_keys(const PagedRows<Quantizer>& list, int slot, int head, std::int32_t first,
                     int count, AttentionWorkspace& work, float* tile, int stride) {
  const CodeLayout* layout = detail::codes_of(list, head, Part::key);
  if (layout == nullptr) return false;
  for (std::size_t channel = 0; channel < layout->bits.size(); ++channel) {
    if (layout->bits[channel] == 0)
      std::fill_n(tile + static_cast<std::ptrdiff_t>(channel) * stride, count, 0.0F);
  }
  CodedRows codes(*layout, Part::key, list, slot, head, first, count, work);
  codes.for_each_group(
      [&](const simd::CodeBlock& block) { simd::kernels().code_tile(block, tile, stride); });
  return true;
}

/// @brief Adds weights [rows, kLogitStride] times the packed values of rows [first, first + count)
/// of a list, count <= kBlockRows, to the accumulators of `state`. @return false, and nothing is
/// done, if the kernels cannot unpack them
template <class Quantizer>
bool add_coded_values(const PagedRows<Quantizer>& list, int slot, int head, const QueryRows& query,
                      std::int32_t first, int count, const float* weights, AttentionWorkspace& work,
                      const PartialState& state) {
  const CodeLayout* layout = detail::codes_of(list, head, Part::value);
  if (layout == nullptr) return false;
  CodedRows codes(*layout, Part::value, list, slot, head, first, count, work);
  codes.for_each_group([&](const simd::CodeBlock& block) {
    simd::kernels().code_sum(block, weights, kLogitStride, query.rows, state.accumulator,
                             state.stride);
  });
  return true;
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
