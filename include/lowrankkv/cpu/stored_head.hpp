// SPDX-License-Identifier: Apache-2.0
/// @file cpu/stored_head.hpp  What one (sequence, KV head) stores, and a reader of its keys in the
/// form in which queries are multiplied with them.
///
/// Rope::post: compressed keys stay coefficients, and queries are projected, q~ = q query_down.
///
/// Rope::pre: a tile of coefficients is up-projected to head_dim, k = c query_down^T + mean, and
/// rotated to its positions, once for all heads of the group.
///
/// Rope::pre in groups of one head while decoding: the rotation is applied in folded form, for one
/// query row at a time. With A_i = q_a W_a + q_b W_b and B_i = q_b W_a - q_a W_b for every pair
/// i = (a, b) of rows of W = query_down, logit_t = sum_i cos_i(t) (A_i c_t) + sin_i(t) (B_i c_t).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "lowrankkv/core/position_shifts.hpp"
#include "lowrankkv/core/row_runs.hpp"
#include "lowrankkv/cpu/attention_block.hpp"
#include "lowrankkv/cpu/coded_rows.hpp"
#include "lowrankkv/cpu/epoch_store.hpp"
#include "lowrankkv/cpu/paged_rows.hpp"
#include "lowrankkv/cpu/quantizer/full_rows.hpp"
#include "lowrankkv/cpu/rotary_table.hpp"
#include "lowrankkv/cpu/tail_rows.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Storage of one (sequence, KV head), as attention reads it.
template <class Quantizer>
struct StoredHead {
  const PagedRows<FullRows>* full = nullptr;
  const PagedRows<Quantizer>* compressed = nullptr;
  const EpochStore* epochs = nullptr;
  const TailRows* tail = nullptr;
  const PromptChunk* chunk = nullptr;  ///< null: no unfinished prompt chunk
  std::span<const Segment> segments;
  int slot = 0;
  int head = 0;
  int value_list = 0;  ///< list of compressed rows that holds the values
  int head_dim = 0;
  int tail_length = 0;
  std::int64_t first_tail_token = 0;    ///< index of the tail's first token
  const RotaryTable* rotary = nullptr;  ///< null: keys are stored post-RoPE
  bool folds = false;                   ///< rotate in folded form, one query row at a time
  const RowRuns* runs = nullptr;        ///< map from tokens to stored rows
  const PositionShifts* shifts = nullptr;
};

/// @brief Reads the keys of a StoredHead tile by tile into the scratch of a workspace. The rows of
/// each list must be read in order.
template <class Quantizer>
class KeyReader {
 public:
  KeyReader(const StoredHead<Quantizer>& stored, AttentionWorkspace& work)
      : stored_(stored), work_(work) {}

  /// @brief Keys of full rows [first, first + count), channel-major [head_dim, kTile], post-RoPE.
  const float* full(std::int32_t first, int count) {
    load_keys(*stored_.full, first, count, work_.keys.data());
    if (stored_.rotary != nullptr) rotate_listed(RowState::full, full_run_, first, count);
    return work_.keys.data();
  }
  /// @brief Keys of rows [first, first + count) of the tail, post-RoPE.
  const float* tail(int first, int count) {
    stored_.tail->load_keys(stored_.slot, stored_.head, first, count, work_.keys.data(), kTile,
                            work_.row.data());
    if (stored_.rotary != nullptr) rotate_tokens(stored_.first_tail_token + first, count);
    return work_.keys.data();
  }
  /// @brief Keys of rows [first, first + count) of the prompt chunk, post-RoPE; first is a multiple
  /// of kTile.
  const float* chunk(std::int64_t first, int count) {
    const float* tile = stored_.chunk->key_tile(stored_.head, first / kTile);
    if (stored_.rotary == nullptr) return tile;
    std::copy_n(tile, stored_.head_dim * kTile, work_.keys.data());
    rotate_tokens(stored_.first_tail_token + stored_.tail_length + first, count);
    return work_.keys.data();
  }

  /// @brief Computes logits [rows, kLogitStride] of full rows [first, first + count), count <=
  /// kBlockRows: read in place where possible, or through tiles of f32.
  void full_logits(const QueryRows& query, std::int32_t first, int count, float* logits) {
    if (in_place(*stored_.full, query, first, count, logits)) return;
    tiles(count, [&](int done, int rows) {
      tile_logits(query, full(first + done, rows), rows, logits + done, kLogitStride);
    });
  }
  /// @brief Computes logits [rows, kLogitStride] of rows [first, first + count) of the tail.
  void tail_logits(const QueryRows& query, int first, int count, float* logits) {
    tiles(count, [&](int done, int rows) {
      tile_logits(query, tail(first + done, rows), rows, logits + done, kLogitStride);
    });
  }
  /// @brief Computes logits [rows, kLogitStride] of rows [first, first + count) of the prompt
  /// chunk; first is a multiple of kTile.
  void chunk_logits(const QueryRows& query, std::int64_t first, int count, float* logits) {
    tiles(count, [&](int done, int rows) {
      tile_logits(query, chunk(first + done, rows), rows, logits + done, kLogitStride);
    });
  }
  /// @brief Computes logits [rows, kLogitStride] of compressed rows [first, first + count), count
  /// <= kBlockRows, for the queries that open() returned.
  void block_logits(const QueryRows& query, std::int32_t first, int count, float* logits) {
    if (in_place(*stored_.compressed, query, first, count, logits)) return;
    tiles(count, [&](int done, int rows) {
      this->logits(query, first + done, rows, logits + done, kLogitStride);
    });
  }

  /// @brief Prepares to read compressed keys under `maps`. @return the queries in the form in which
  /// these keys are multiplied with them. `query` holds the block's own rows.
  QueryRows open(const EpochHead& maps, const QueryRows& query, int value_width) {
    maps_ = &maps;
    rank_ = maps.rank(Part::key);
    stride_ = padded(rank_);
    maps.load_query_map(work_.map.data(), stride_);
    if (!maps.key_mean.empty()) maps.key_mean.load(work_.row.data(), padded(stored_.head_dim));
    if (stored_.rotary == nullptr) return project(query, value_width);
    QueryRows opened = query;
    opened.value_width = value_width;
    if (stored_.folds) fold(query.data);
    return opened;
  }
  /// @brief Computes logits [rows, stride] of compressed rows [first, first + count), count <=
  /// kTile, for the queries that open() returned.
  void logits(const QueryRows& query, std::int32_t first, int count, float* logits,
              int stride = kTile) {
    if (stored_.rotary == nullptr) {
      load_keys(*stored_.compressed, first, count, work_.keys.data());
      tile_logits(query, work_.keys.data(), count, logits, stride);
      return;
    }
    float* coefficients = work_.coefficients.data();
    load_keys(*stored_.compressed, first, count, coefficients);
    if (stored_.folds) {
      folded_logits(coefficients, first, count, logits);
      return;
    }
    float* keys = work_.keys.data();
    for (int channel = 0; channel < stored_.head_dim; ++channel) {
      std::fill_n(keys + channel * kTile, padded(count),
                  maps_->key_mean.empty() ? 0.0F : work_.row[static_cast<std::size_t>(channel)]);
    }
    add_product(stored_.head_dim, padded(count), rank_, work_.map.data(), stride_, coefficients,
                kTile, keys, kTile);
    rotate_listed(RowState::compressed, compressed_run_, first, count);
    tile_logits(query, keys, count, logits, stride);
  }

 private:
  template <class Each>
  static void tiles(int count, Each&& each) {
    for (int done = 0; done < count; done += kTile) each(done, (std::min)(kTile, count - done));
  }
  /// Keys of rows [first, first + count) of a list: tile [key_rank, kTile].
  template <class Rows>
  void load_keys(const Rows& list, std::int32_t first, int count, float* tile) {
    if (!load_coded_keys(list, stored_.slot, stored_.head, first, count, work_, tile, kTile))
      list.load_keys(stored_.slot, stored_.head, first, count, tile, kTile);
  }
  /// Computes the logits of rows of a list, if keys need no rotation and kernels can read them, or
  /// their codes, where they are.
  template <class Rows>
  bool in_place(const Rows& list, const QueryRows& query, std::int32_t first, int count,
                float* logits) {
    if (stored_.rotary != nullptr) return false;
    if (coded_logits(list, stored_.slot, stored_.head, query, first, count, work_, logits))
      return true;
    const simd::KeyBlock block =
        list.key_block(stored_.slot, stored_.head, first, count, work_.key_pieces.data());
    if (block.num_pieces == 0) return false;
    simd::kernels().logits[static_cast<std::size_t>(block.type)](block, query.data, query.stride,
                                                                 query.rows, logits, kLogitStride);
    return true;
  }
  /// Rope::post: q~ = q query_down. The term of centred keys becomes a bias.
  QueryRows project(const QueryRows& query, int value_width) {
    product(query.rows, stride_, stored_.head_dim, query.data, query.stride, work_.map.data(),
            stride_, work_.projected.data(), stride_);
    QueryRows projected{work_.projected.data(), stride_, query.rows, rank_, value_width, nullptr};
    if (maps_->key_mean.empty()) return projected;
    for (int row = 0; row < query.rows; ++row) {
      float product = 0.0F;
      for (int channel = 0; channel < stored_.head_dim; ++channel)
        product +=
            query.data[row * query.stride + channel] * work_.row[static_cast<std::size_t>(channel)];
      work_.bias[static_cast<std::size_t>(row)] = product;
    }
    projected.bias = work_.bias.data();
    return projected;
  }

  /// Computes the rows of the folded map, over coefficients [.., stride]: the A_i, then the B_i,
  /// then one row for the channels that are not rotated. folded_mean receives the mean's term of
  /// each.
  void fold(const float* query) {
    const RotaryTable& rotary = *stored_.rotary;
    const int pairs = rotary.num_pairs();
    const float* map = work_.map.data();
    float* folded = work_.folded.data();
    const auto mean = [&](int channel) {
      return maps_->key_mean.empty() ? 0.0F : work_.row[static_cast<std::size_t>(channel)];
    };
    for (int pair = 0; pair < pairs; ++pair) {
      const int a = rotary.first(pair), b = rotary.second(pair);
      float* cosine_row = folded + pair * stride_;
      float* sine_row = folded + (pairs + pair) * stride_;
      for (int channel = 0; channel < stride_; ++channel) {
        cosine_row[channel] =
            query[a] * map[a * stride_ + channel] + query[b] * map[b * stride_ + channel];
        sine_row[channel] =
            query[b] * map[a * stride_ + channel] - query[a] * map[b * stride_ + channel];
      }
      work_.folded_mean[static_cast<std::size_t>(pair)] = query[a] * mean(a) + query[b] * mean(b);
      work_.folded_mean[static_cast<std::size_t>(pairs + pair)] =
          query[b] * mean(a) - query[a] * mean(b);
    }
    float* rest = folded + 2 * pairs * stride_;
    std::fill_n(rest, stride_, 0.0F);
    float& rest_mean = work_.folded_mean[static_cast<std::size_t>(2 * pairs)];
    rest_mean = 0.0F;
    for (int a = rotary.rotary_dim(); a < stored_.head_dim; ++a) {
      for (int channel = 0; channel < stride_; ++channel)
        rest[channel] += query[a] * map[a * stride_ + channel];
      rest_mean += query[a] * mean(a);
    }
  }
  void folded_logits(const float* coefficients, std::int32_t first, int count, float* logits) {
    const int pairs = stored_.rotary->num_pairs();
    const int rows = 2 * pairs + 1;
    float* products = work_.keys.data();  // [rows, kTile]
    for (int row = 0; row < rows; ++row)
      std::fill_n(products + row * kTile, padded(count),
                  work_.folded_mean[static_cast<std::size_t>(row)]);
    add_product(rows, padded(count), rank_, work_.folded.data(), stride_, coefficients, kTile,
                products, kTile);
    for_each_listed_position(RowState::compressed, compressed_run_, first, count,
                             [&](std::int64_t position, int length, int column) {
                               stored_.rotary->angles(position, length,
                                                      work_.cosines.data() + column,
                                                      work_.sines.data() + column, kTile);
                             });
    std::copy_n(products + 2 * pairs * kTile, padded(count), logits);
    for (int pair = 0; pair < pairs; ++pair) {
      const float* cosine = work_.cosines.data() + pair * kTile;
      const float* sine = work_.sines.data() + pair * kTile;
      const float* a = products + pair * kTile;
      const float* b = products + (pairs + pair) * kTile;
      for (int token = 0; token < count; ++token)
        logits[token] += cosine[token] * a[token] + sine[token] * b[token];
    }
  }

  /// Calls function(position, length, column) for runs of consecutive positions of tokens [token,
  /// token + count), which stand from column `column` of a tile on.
  template <class Function>
  void for_each_position(std::int64_t token, int count, int column, Function&& function) {
    stored_.shifts->for_each(
        token, count, [&](std::int64_t begin, std::int64_t length, std::int64_t position) {
          function(position, static_cast<int>(length), column + static_cast<int>(begin - token));
        });
  }
  /// The same for rows [first, first + count) of a list. `run` remembers the run of the last rows,
  /// because lists are read in order.
  template <class Function>
  void for_each_listed_position(RowState list, std::size_t& run, std::int32_t first, int count,
                                Function&& function) {
    const std::span<const RowRun> runs = stored_.runs->runs();
    for (int done = 0; done < count;) {
      const auto holds = [&](std::size_t index) {
        return runs[index].state == list &&
               first + done - runs[index].first_row <
                   stored_.runs->end_of(index) - runs[index].first_position;
      };
      while (!holds(run)) ++run;
      const std::int32_t token = runs[run].first_position + first + done - runs[run].first_row;
      const int length = (std::min)(count - done, stored_.runs->end_of(run) - token);
      for_each_position(token, length, done, function);
      done += length;
    }
  }
  auto rotate_columns() {
    return [&](std::int64_t position, int length, int column) {
      stored_.rotary->rotate(position, length, work_.keys.data() + column, kTile);
    };
  }
  void rotate_tokens(std::int64_t token, int count) {
    for_each_position(token, count, 0, rotate_columns());
  }
  void rotate_listed(RowState list, std::size_t& run, std::int32_t first, int count) {
    for_each_listed_position(list, run, first, count, rotate_columns());
  }

  const StoredHead<Quantizer>& stored_;
  AttentionWorkspace& work_;
  const EpochHead* maps_ = nullptr;
  int rank_ = 0, stride_ = 0;
  std::size_t full_run_ = 0, compressed_run_ = 0;
};

/// @brief Adds weights [rows, kLogitStride] times the values of rows [first, first + count) of a
/// list, count <= kBlockRows, to the accumulators of `state`: read or unpacked in place where
/// possible, or through tiles of f32.
template <class Rows>
void add_values(const Rows& list, int slot, int head, const QueryRows& query, std::int32_t first,
                int count, const float* weights, AttentionWorkspace& work,
                const PartialState& state) {
  if (add_coded_values(list, slot, head, query, first, count, weights, work, state)) return;
  const int width = query.value_width;
  float* tile = work.values.data();
  for (int done = 0; done < count;) {
    const simd::ValueBlock block = list.value_block(slot, head, first + done, count - done, width,
                                                    work.value_runs.data(), tile, kTile);
    if (block.count > 0) {
      simd::kernels().weighted_sum[static_cast<std::size_t>(block.type)](
          block, weights + done, kLogitStride, query.rows, state.accumulator, state.stride);
      done += block.count;
      continue;
    }
    const int rows = (std::min)(kTile, count - done);
    list.load_values(slot, head, first + done, rows, tile, width);
    absorb_values(query, tile, rows, width, weights + done, state);
    done += rows;
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
