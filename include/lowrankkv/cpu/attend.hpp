// SPDX-License-Identifier: Apache-2.0
/// @file cpu/attend.hpp  Attention of query rows over everything a sequence stores: full rows,
/// segments, tail, prompt chunk.
///
/// out = softmax(scale q [K_full; decode(C)]^T) [V_full; decode(C)], computed in coefficient space
/// (OjaKV A.3): each query is projected once per segment, q~ = q query_down; logits are q~ c_k; and
/// output_up expands sum p c_v once. With centred maps a segment adds q mean_k to its logits and
/// (sum p) mean_v to its output. Pre-RoPE keys are up-projected and rotated instead
/// (cpu/stored_head.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/stored_head.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Queries of one call and what they see. Token t sees all stored rows and, of the tail (or
/// of the chunk during prefill), the rows up to and including its own row.
struct QueryBlock {
  QueryView query;  ///< [num_tokens, num_qo_heads, head_dim]
  OutputView out;
  LseView lse;
  int group_size = 1;
  float scale = 1.0F;
  std::int64_t own_row = 0;  ///< row of the first query token in the tail (or chunk)
};

namespace detail {

/// The rows of a block's queries, multiplied by the softmax scale.
inline QueryRows load_queries(const QueryBlock& block, int head, int head_dim,
                              std::int64_t first_token, int num_tokens, AttentionWorkspace& work) {
  const int group = block.group_size;
  const int width = padded(head_dim);
  for (int row = 0; row < num_tokens * group; ++row) {
    float* target = work.query.data() + row * width;
    load_row(block.query, first_token + row / group, head * group + row % group, target);
    for (int channel = 0; channel < head_dim; ++channel) target[channel] *= block.scale;
  }
  return {work.query.data(), width, num_tokens * group, head_dim, width, nullptr};
}

}  // namespace detail

/// @brief Stored rows of a split, at least.
inline constexpr std::int64_t kSplitRows = 2048;
/// @brief Splits of a head's stored rows, at most.
inline constexpr int kMaxSplits = 16;

/// @brief Full and compressed rows of a head, without the tail.
template <class Quantizer>
std::int64_t stored_rows(const StoredHead<Quantizer>& stored) {
  std::int64_t rows = stored.full->size(stored.slot, stored.head);
  for (const Segment& segment : stored.segments) rows += segment.num_rows;
  return rows;
}
/// @brief Into how many splits `rows` stored rows are divided.
constexpr int splits_of(std::int64_t rows) {
  return static_cast<int>(std::clamp<std::int64_t>(rows / kSplitRows, 1, kMaxSplits));
}
/// @brief Into how many splits the stored rows of a head are divided. Depends on what is stored
/// alone, so that results depend neither on threads nor on the batch. While a prompt is read there
/// is one.
template <class Quantizer>
int num_splits(const StoredHead<Quantizer>& stored) {
  return stored.chunk != nullptr ? 1 : splits_of(stored_rows(stored));
}

/// @brief Attention of one KV head's queries, tokens [first_token, first_token + num_tokens) of a
/// block, in parts. A part is what one split has of one list. Lists are the full rows (0), then the
/// segments, then the recent rows (recent()): the tail and, during prefill, the prompt's chunk,
/// which are in no split.
///
/// Each part has a softmax state. The states of a list are merged in order, for a segment in
/// coefficients, which are then expanded once; then the lists are merged, in order. So results have
/// the same bits wherever parts were computed. With one split there is nothing to merge, and recent
/// rows have no state of their own.
///
/// Allocates nothing. num_tokens times the group size must be at most work.max_rows(). Cost: 2
/// (head_dim or rank) products per stored row, query row and K or V.
template <class Quantizer>
class HeadAttention {
 public:
  HeadAttention(const StoredHead<Quantizer>& stored, const QueryBlock& block,
                std::int64_t first_token, int num_tokens, AttentionWorkspace& work)
      : stored_(stored),
        block_(block),
        first_token_(first_token),
        work_(work),
        query_(detail::load_queries(block, stored.head, stored.head_dim, first_token, num_tokens,
                                    work)),
        keys_(stored, work),
        num_rows_(stored_rows(stored)),
        splits_(num_splits(stored)) {}

  /// @brief The list of the recent rows.
  int recent() const { return 1 + static_cast<int>(stored_.segments.size()); }
  /// @brief Channels of the states of a list, padded.
  int width_of(int list) const {
    return padded(list == 0 || list == recent() ? stored_.head_dim
                                                : maps_of(list).rank(Part::value));
  }

  /// @brief Computes the parts of split `split`; split num_splits() is the recent rows, where they
  /// are a part. state_of(list, split) is where the state of a part goes, with stride
  /// width_of(list); the recent rows are the last split's.
  template <class StateOf>
  void compute_split(int split, StateOf&& state_of) {
    if (split > splits_) return;
    if (split == splits_) {
      if (splits_ > 1) compute(recent(), splits_ - 1, state_of(recent(), splits_ - 1));
      return;
    }
    for (int list = 0; list < recent(); ++list) {
      if (rows_in(list, split).count > 0) compute(list, split, state_of(list, split));
    }
  }
  /// @brief Merges all parts and writes out and, if wanted, lse (natural logarithm).
  /// @param part_of  part_of(list, split, scratch) is the state of a part, in `scratch` or
  ///                 elsewhere; it is changed. The recent rows belong to the last split.
  template <class PartOf>
  void merge(PartOf&& part_of) {
    const int width = padded(stored_.head_dim);
    const PartialState state = merged(0, work_.state(0, width), part_of);
    for (int list = 1; list < recent(); ++list) {
      if (stored_.segments[static_cast<std::size_t>(list - 1)].num_rows == 0) continue;
      expand(list, merged(list, work_.state(1, width_of(list)), part_of), state);
    }
    if (splits_ == 1)
      absorb_recent(state);
    else
      merge_states(query_.rows, width, state,
                   part_of(recent(), splits_ - 1, work_.state(2, width)));
    write(state);
  }
  /// @brief Computes all parts in order, merges them, and writes out and lse.
  void run() {
    merge([&](int list, int split, const PartialState& scratch) {
      compute(list, split, scratch);
      return scratch;
    });
  }

 private:
  struct Rows {
    std::int32_t first, count;
  };
  const EpochHead& maps_of(int list) const {
    const Segment& segment = stored_.segments[static_cast<std::size_t>(list - 1)];
    return stored_.epochs->head(segment.epoch, stored_.head);
  }
  /// The rows that a split has of the full rows or of a segment: it begins at a whole block.
  Rows rows_in(int list, int split) const {
    std::int64_t before = 0;
    Rows all{0, stored_.full->size(stored_.slot, stored_.head)};
    for (int i = 0; i < list; ++i) {
      const Segment& segment = stored_.segments[static_cast<std::size_t>(i)];
      before += all.count;
      all = {segment.first_row, segment.num_rows};
    }
    const auto begin = [&](int index) {
      if (index == splits_) return all.count;
      const std::int64_t row = num_rows_ * index / splits_ - before;
      return static_cast<std::int32_t>(
          std::clamp<std::int64_t>(row / simd::kBlockRows * simd::kBlockRows, 0, all.count));
    };
    return {all.first + begin(split), begin(split + 1) - begin(split)};
  }

  void compute(int list, int split, const PartialState& state) {
    state.reset(query_.rows);
    if (list == recent()) return absorb_recent(state);
    const Rows rows = rows_in(list, split);
    if (list == 0) {
      absorb(*stored_.full, stored_.head, query_, rows, state,
             [&](std::int32_t first, int count, float* logits) {
               keys_.full_logits(query_, first, count, logits);
             });
      return;
    }
    if (open_ != list) {
      opened_ = keys_.open(maps_of(list), query_, width_of(list));
      open_ = list;
    }
    absorb(*stored_.compressed, stored_.value_list, opened_, rows, state,
           [&](std::int32_t first, int count, float* logits) {
             keys_.block_logits(opened_, first, count, logits);
           });
  }
  /// Rows of a list, a block at a time.
  template <class List, class Logits>
  void absorb(const List& list, int value_list, const QueryRows& query, Rows rows,
              const PartialState& state, Logits&& logits_of) {
    float* logits = work_.logits.data();
    for (std::int32_t done = 0; done < rows.count; done += simd::kBlockRows) {
      const int count = (std::min)(simd::kBlockRows, rows.count - done);
      logits_of(rows.first + done, count, logits);
      absorb_logits(
          query, count, [count](int) { return count; }, logits, state);
      add_values(list, stored_.slot, value_list, query, rows.first + done, count, logits, work_,
                 state);
    }
  }
  void absorb_recent(const PartialState& state) {
    const bool prompt = stored_.chunk != nullptr;
    const int width = padded(stored_.head_dim);
    float* logits = work_.logits.data();
    const auto own_row = [&](int row) {
      return block_.own_row + first_token_ + row / block_.group_size;
    };
    const auto seen = [&](int row, std::int64_t done, int count) {
      return static_cast<int>((std::min)(own_row(row) + 1 - done, std::int64_t{count}));
    };
    const int last_row = query_.rows - 1;  // it sees most
    for (int done = 0; done < stored_.tail_length; done += simd::kBlockRows) {
      const int count = (std::min)(simd::kBlockRows, stored_.tail_length - done);
      if (!prompt && seen(last_row, done, count) <= 0) break;
      keys_.tail_logits(query_, done, count, logits);
      absorb_logits(
          query_, count, [&](int row) { return prompt ? count : seen(row, done, count); }, logits,
          state);
      for (int tile = 0; tile < count; tile += kTile) {
        const int length = (std::min)(kTile, count - tile);
        stored_.tail->load_values(stored_.slot, stored_.head, done + tile, length,
                                  work_.values.data(), width);
        absorb_values(query_, work_.values.data(), length, width, logits + tile, state);
      }
    }
    if (!prompt) return;
    const std::int64_t last = own_row(last_row);
    for (std::int64_t done = 0; done <= last; done += simd::kBlockRows) {
      const int count =
          static_cast<int>((std::min)(std::int64_t{simd::kBlockRows}, last + 1 - done));
      keys_.chunk_logits(query_, done, count, logits);
      absorb_logits(
          query_, count, [&](int row) { return seen(row, done, count); }, logits, state);
      absorb_values(query_, stored_.chunk->values(stored_.head, done), count,
                    stored_.chunk->value_stride(), logits, state);
    }
  }

  /// The states of a list's parts, merged: into the first one's.
  template <class PartOf>
  PartialState merged(int list, PartialState state, PartOf&& part_of) {
    bool first = true;
    const int width = state.stride;
    for (int split = 0; split < splits_; ++split) {
      if (rows_in(list, split).count == 0) continue;
      const PartialState one = part_of(list, split, first ? state : work_.state(2, width));
      if (first)
        state = one;
      else
        merge_states(query_.rows, width, state, one);
      first = false;
    }
    if (first) state.reset(query_.rows);
    return state;
  }
  /// Expands the state of a segment to head_dim channels and merges it into `state`.
  void expand(int list, PartialState part, const PartialState& state) {
    const EpochHead& maps = maps_of(list);
    const int width = padded(stored_.head_dim);
    maps.load_decoder(Part::value, work_.map.data(), width, work_.row.data());
    product(query_.rows, width, maps.rank(Part::value), part.accumulator, part.stride,
            work_.map.data(), width, work_.expanded.data(), width);
    if (!maps.value_mean.empty()) {
      maps.value_mean.load(work_.row.data(), width);
      for (int row = 0; row < query_.rows; ++row) {
        for (int channel = 0; channel < stored_.head_dim; ++channel) {
          work_.expanded[static_cast<std::size_t>(row * width + channel)] +=
              part.sum[row] * work_.row[static_cast<std::size_t>(channel)];
        }
      }
    }
    part.accumulator = work_.expanded.data();
    part.stride = width;
    merge_states(query_.rows, width, state, part);
  }
  void write(const PartialState& state) const {
    const int group = block_.group_size;
    for (int row = 0; row < query_.rows; ++row) {
      const std::int64_t token = first_token_ + row / group;
      const int head = stored_.head * group + row % group;
      float* target = block_.out.row(token, head);
      for (int channel = 0; channel < stored_.head_dim; ++channel)
        target[channel] = state.accumulator[row * state.stride + channel] / state.sum[row];
      if (block_.lse.data != nullptr)
        block_.lse.at(token, head) = state.max[row] + std::log(state.sum[row]);
    }
  }

  const StoredHead<Quantizer>& stored_;
  const QueryBlock& block_;
  std::int64_t first_token_;
  AttentionWorkspace& work_;
  QueryRows query_, opened_;
  KeyReader<Quantizer> keys_;
  std::int64_t num_rows_;
  int splits_;
  int open_ = 0;  // the segment that keys_ has opened
};

/// @brief Attention of one KV head's queries, all parts: HeadAttention::run().
template <class Quantizer>
void attend_block(const StoredHead<Quantizer>& stored, const QueryBlock& block,
                  std::int64_t first_token, int num_tokens, AttentionWorkspace& work) {
  HeadAttention<Quantizer>(stored, block, first_token, num_tokens, work).run();
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
