// SPDX-License-Identifier: Apache-2.0
// The float64 oracle: what a cache of one layer must answer, written as plainly as possible and
// sharing no code with it. Rows are kept decoded; a basis is a matrix; nothing is paged, blocked,
// or clever.
#pragma once

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

namespace reference {

using Matrix = Eigen::MatrixXd;
using Vector = Eigen::VectorXd;

/// The maps of one KV head: encode x as (x - mean) down, decode c as c up^T + mean.
struct Maps {
  Matrix key_down, key_up, value_down, value_up;
  Vector key_mean, value_mean;
  Matrix metric, metric_inverse;  // R and its inverse: key_down = R U, key_up = R^-1 U; empty: the
                                  // plain metric
};

struct Row {
  Vector key, value;  // as attention sees them
  bool compressed = false;
};

struct Segment {
  int epoch = 0;
  int level = 0;
  std::vector<int> positions;
};

struct Options {
  int num_qo_heads = 1, num_kv_heads = 1, head_dim = 1;
  int sinks = 0, recent = 0, interval = 32;
  bool compresses = true, adapts = false, rotate = false;
  int max_epochs = 8;
  long publish_interval = 0;
  long merge_rows = 512;
  long chunk = 0;
  double prefill_rate = 0.1, decode_rate = 0.05, share = 0.05;
  int window = 32;
  bool over_heads = false;  // a prompt's rows are chosen by the scores of all heads
  int row_elements = 0;     // coefficients of a compressed row over all heads: key and value ranks
  int epoch_elements = 0;   // numbers of an epoch over all heads
};

/// One sequence of one layer.
class Cache {
 public:
  Cache(const Options& options, std::vector<Maps> calibrated)
      : options_(options),
        calibrated_(std::move(calibrated)),
        rows_(static_cast<std::size_t>(options.num_kv_heads)) {
    epochs_.push_back(calibrated_);
    working_ = calibrated_;
    segments_.resize(rows_.size());
  }
  int size() const { return static_cast<int>(rows_[0].size()); }
  const Row& row(int head, int position) const {
    return rows_[static_cast<std::size_t>(head)][static_cast<std::size_t>(position)];
  }

  void append(const std::vector<Vector>& keys, const std::vector<Vector>& values) {
    for (std::size_t head = 0; head < rows_.size(); ++head)
      rows_[head].push_back({keys[head], values[head], false});
  }
  void maintain() {
    while (size() - flushed_ > options_.recent + options_.interval)
      leave(flushed_ + options_.interval, {}, false);
  }
  /// Prompt tokens one by one: queries[t][qo head]. Returns nothing; attention is asked for per
  /// token by the caller.
  void prefill_token(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                     const std::vector<Vector>& queries) {
    append(keys, values);
    chunk_queries_.push_back(queries);
    ++in_chunk_;
  }
  bool chunk_full() const { return options_.chunk > 0 && in_chunk_ == options_.chunk; }
  void end_chunk() {
    if (in_chunk_ == 0) return;
    const int first = std::max(0, static_cast<int>(chunk_queries_.size()) - options_.window);
    const std::vector<std::vector<Vector>> window(chunk_queries_.begin() + first,
                                                  chunk_queries_.end());
    in_chunk_ = 0;
    chunk_queries_.clear();
    leave(std::max(flushed_, size() - options_.recent), window, true);
  }
  void truncate(int length) {
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      rows_[head].resize(static_cast<std::size_t>(length));
      for (Segment& segment : segments_[head])
        std::erase_if(segment.positions, [&](int position) { return position >= length; });
    }
    while (!segments_[0].empty()) {
      bool empty = true;
      for (const auto& list : segments_) empty = empty && list.back().positions.empty();
      if (!empty) break;
      for (auto& list : segments_) list.pop_back();
    }
    if (merging_ + 1 >= static_cast<int>(segments_[0].size())) merging_ = -1;
    flushed_ = std::min(flushed_, length);
  }
  /// Tokens [first, first + count) go; those behind them take their places.
  void remove(int first, int count) {
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      rows_[head].erase(rows_[head].begin() + first, rows_[head].begin() + first + count);
      for (Segment& segment : segments_[head]) {
        std::erase_if(segment.positions,
                      [&](int position) { return position >= first && position < first + count; });
        for (int& position : segment.positions) position -= position >= first ? count : 0;
      }
    }
    for (std::size_t i = segments_[0].size(); i-- > 0;) {
      bool empty = true;
      for (const auto& list : segments_) empty = empty && list[i].positions.empty();
      for (auto& list : segments_)
        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i),
                   list.begin() + static_cast<std::ptrdiff_t>(i + (empty ? 1 : 0)));
      const int index = static_cast<int>(i);
      if (empty && (index == merging_ || index == merging_ + 1))
        merging_ = -1;
      else if (empty && index < merging_)
        --merging_;
    }
    flushed_ -= std::clamp(flushed_ - first, 0, count);
  }
  int flushed() const { return flushed_; }
  /// Whether two rows of a prompt were equally important but for rounding, and only one of them was
  /// to be chosen: a cache in f32 may choose the other one.
  bool undecided() const { return undecided_; }

  /// Softmax attention of one query over the first `visible` tokens; also the log of the sum of
  /// exponentials.
  std::pair<Vector, double> attend(int qo_head, const Vector& query, int visible) const {
    const int head = qo_head / (options_.num_qo_heads / options_.num_kv_heads);
    const double scale = 1.0 / std::sqrt(static_cast<double>(options_.head_dim));
    double top = -1e300;
    for (int i = 0; i < visible; ++i) top = std::max(top, scale * query.dot(row(head, i).key));
    double sum = 0.0;
    Vector out = Vector::Zero(options_.head_dim);
    for (int i = 0; i < visible; ++i) {
      const double weight = std::exp(scale * query.dot(row(head, i).key) - top);
      sum += weight;
      out += weight * row(head, i).value;
    }
    return {out / sum, top + std::log(sum)};
  }

 private:
  static Matrix orthonormal(const Matrix& matrix) {
    return Eigen::HouseholderQR<Matrix>(matrix).householderQ() *
           Matrix::Identity(matrix.rows(), matrix.cols());
  }
  static Matrix power_step(const Matrix& rows, const Matrix& basis, double rate) {
    const Matrix moment = rows.transpose() * rows;
    return orthonormal(basis + rate * static_cast<double>(rows.cols()) / rows.squaredNorm() *
                                   (moment * basis));
  }
  /// Positions [flushed, end) leave full rank.
  void leave(int end, const std::vector<std::vector<Vector>>& window, bool prompt) {
    const int begin = flushed_;
    int flushed = 0;
    for (int position = begin; position < end; ++position)
      flushed += position >= options_.sinks ? 1 : 0;
    if (!options_.compresses) flushed = 0;
    if (options_.adapts && flushed > 0) adapt(begin, end, window, prompt);
    if (options_.adapts && flushed > 0) {
      const bool due =
          since_ + flushed >= options_.publish_interval ||
          (prompt && static_cast<long>(flushed) * options_.row_elements > options_.epoch_elements);
      const bool waits = merging_ >= 0 && !prompt && !options_.rotate;
      if (due && moved_ && !waits) {
        epochs_.push_back(working_);
        current_ = static_cast<int>(epochs_.size()) - 1;
        since_ = -flushed;  // the rows that an epoch is published for do not count towards the next
        moved_ = false;
      }
    }
    since_ += flushed;
    if (flushed > 0) open_segment(prompt || options_.rotate);
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      for (int position = begin; position < end && options_.compresses; ++position) {
        if (position < options_.sinks) continue;
        project(rows_[head][static_cast<std::size_t>(position)],
                epochs_[static_cast<std::size_t>(current_)][head]);
        segments_[head].back().positions.push_back(position);
      }
    }
    flushed_ = end;
  }
  static void project(Row& row, const Maps& maps) {
    row.key = maps.key_up * (maps.key_down.transpose() * (row.key - maps.key_mean)) + maps.key_mean;
    row.value = maps.value_up * (maps.value_down.transpose() * (row.value - maps.value_mean)) +
                maps.value_mean;
    row.compressed = true;
  }
  // Attention that the rows from `begin` on get from the query heads of a KV head.
  Vector scores(std::size_t head, int begin, const std::vector<std::vector<Vector>>& window) const {
    const std::size_t group =
        static_cast<std::size_t>(options_.num_qo_heads / options_.num_kv_heads);
    const int total = size() - begin;
    Vector score = Vector::Zero(total);
    for (std::size_t w = 0; w < window.size(); ++w) {
      const int visible = total - static_cast<int>(window.size()) + static_cast<int>(w) + 1;
      for (std::size_t member = 0; member < group; ++member) {
        const Vector& query = window[w][head * group + member];
        Vector logits(visible);
        for (int i = 0; i < visible; ++i)
          logits[i] = query.dot(rows_[head][static_cast<std::size_t>(begin + i)].key) /
                      std::sqrt(static_cast<double>(options_.head_dim));
        const Vector weights = (logits.array() - logits.maxCoeff()).exp();
        score.head(visible) += weights / weights.sum();
      }
    }
    return score;
  }
  void adapt(int begin, int end, const std::vector<std::vector<Vector>>& window, bool prompt) {
    std::vector<Vector> of_heads(rows_.size());
    if (prompt && options_.share < 1.0) {
      for (std::size_t head = 0; head < rows_.size(); ++head)
        of_heads[head] = scores(head, begin, window);
      if (options_.over_heads) {
        Vector sum = of_heads[0];
        for (std::size_t head = 1; head < rows_.size(); ++head) sum += of_heads[head];
        std::fill(of_heads.begin(), of_heads.end(), sum);
      }
    }
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      std::vector<int> chosen;
      for (int position = std::max(begin, options_.sinks); position < end; ++position)
        chosen.push_back(position);
      const int total = size() - begin;
      if (prompt && options_.share < 1.0) {
        const Vector& score = of_heads[head];
        std::stable_sort(chosen.begin(), chosen.end(),
                         [&](int a, int b) { return score[a - begin] > score[b - begin]; });
        const std::size_t wanted =
            std::min(chosen.size(), static_cast<std::size_t>(std::ceil(options_.share * total)));
        if (wanted > 0 && wanted < chosen.size()) {
          const double last = score[chosen[wanted - 1] - begin];
          const double next = score[chosen[wanted] - begin];
          undecided_ = undecided_ || last - next < 1e-6 * last;
        }
        chosen.resize(wanted);
      }
      if (chosen.empty()) continue;
      Matrix keys(chosen.size(), options_.head_dim), values(chosen.size(), options_.head_dim);
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        keys.row(static_cast<Eigen::Index>(i)) =
            rows_[head][static_cast<std::size_t>(chosen[i])].key - calibrated_[head].key_mean;
        values.row(static_cast<Eigen::Index>(i)) =
            rows_[head][static_cast<std::size_t>(chosen[i])].value - calibrated_[head].value_mean;
      }
      const double rate = prompt ? options_.prefill_rate : options_.decode_rate;
      Maps& maps = working_[head];
      if (maps.metric.size() == 0) {
        maps.key_down = maps.key_up = power_step(keys, maps.key_down, rate);
      } else {
        const Matrix moved =
            power_step(keys * maps.metric, maps.metric_inverse * maps.key_down, rate);
        maps.key_down = maps.metric * moved;
        maps.key_up = maps.metric_inverse * moved;
      }
      maps.value_down = maps.value_up = power_step(values, maps.value_down, rate);
      moved_ = true;
    }
  }
  void open_segment(bool at_once) {
    const long most = at_once ? 1L << 40 : options_.merge_rows;
    if (segments_[0].empty() || segments_[0].back().epoch != current_) {
      if (at_once) advance_merge(most);
      begin_segment();
    }
    advance_merge(most);
  }
  void begin_segment() {
    int first = 0;
    while (!options_.rotate && first < static_cast<int>(segments_[0].size()) &&
           segments_[0][static_cast<std::size_t>(first)].epoch == 0)
      ++first;
    const int count = static_cast<int>(segments_[0].size());
    int merge = merging_;
    if (merge < 0 && count - first + 1 > options_.max_epochs) {
      merge = count - first >= 2 ? count - 2 : count - 1;
      for (int i = first; i + 1 < count; ++i) {
        if (segments_[0][static_cast<std::size_t>(i)].level ==
            segments_[0][static_cast<std::size_t>(i + 1)].level)
          merge = i;
      }
    }
    for (auto& list : segments_) list.push_back({current_, 0, {}});
    merging_ = merge;
  }
  /// The last rows of the older segment, `most` a head, go to the front of the newer one.
  void advance_merge(long most) {
    if (merging_ < 0) return;
    bool done = true;
    for (std::size_t head = 0; head < rows_.size(); ++head) {
      Segment& older = segments_[head][static_cast<std::size_t>(merging_)];
      Segment& newer = segments_[head][static_cast<std::size_t>(merging_ + 1)];
      for (long moved = 0; moved < most && !older.positions.empty(); ++moved) {
        project(rows_[head][static_cast<std::size_t>(older.positions.back())],
                epochs_[static_cast<std::size_t>(newer.epoch)][head]);
        newer.positions.insert(newer.positions.begin(), older.positions.back());
        older.positions.pop_back();
      }
      done = done && older.positions.empty();
    }
    if (!done) return;
    for (auto& list : segments_) {
      Segment& newer = list[static_cast<std::size_t>(merging_ + 1)];
      newer.level = std::max(newer.level, list[static_cast<std::size_t>(merging_)].level) + 1;
      list.erase(list.begin() + merging_);
    }
    merging_ = -1;
  }

  Options options_;
  std::vector<Maps> calibrated_, working_;
  std::vector<std::vector<Maps>> epochs_;
  std::vector<std::vector<Row>> rows_;          // per head, by position
  std::vector<std::vector<Segment>> segments_;  // per head
  std::vector<std::vector<Vector>> chunk_queries_;
  long in_chunk_ = 0;
  int flushed_ = 0;
  int current_ = 0;
  int merging_ = -1;  // the segment whose rows move to the next one
  long since_ = 0;
  bool moved_ = false;
  bool undecided_ = false;
};

}  // namespace reference
