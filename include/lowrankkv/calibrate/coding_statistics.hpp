// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/coding_statistics.hpp  Metrics for coding: the effect of an error in a stored
/// key or value on a layer's output.
///
/// Notation: softmax weights p_ij, outputs o_i = sum_j p_ij v_j, and N_g = W_g W_g^T, where W_g
/// [head_dim, hidden] is the part of the output projection for query head g. To first order, an
/// error dk_j changes logit ij by q_i dk_j, and the layer's output by p_ij (q_i dk_j) (v_j - o_i)
/// W_g. An error dv_j changes the output by p_ij dv_j W_g. If errors are independent from token to
/// token, the expected squared change of the output is E[dk A_K dk^T] + E[dv A_V dv^T], per KV
/// head:
///
///     A_K = sum_{g,i} ( sum_j p_ij^2 (v_j - o_i) N_g (v_j - o_i)^T ) q_i^T q_i
///     A_V = sum_g N_g sum_{i,j} p_ij^2
///
/// q is scaled by 1/sqrt(head_dim); j runs over the rows that will be compressed, i over later
/// queries. Both metrics have the unit of the layer's residual stream, so one water-filling serves
/// keys, values and heads.
///
/// To compare layers, an error counts relative to the stream that it is added to, because the norms
/// behind it divide by the stream's size. The metrics of a layer count as A / median |h|^2, where h
/// are the rows of the residual stream right behind its attention. The median is used because a few
/// tokens (often the first) are thousands of times larger than all others. In absolute units the
/// last layers would take all the bits: |h|^2 grows 50 000-fold over the layers of SmolLM2-135M.
///
/// An engine that can compute gradients has a better metric: what an error costs the model's loss
/// (CodingMetric::loss, add_gradients()). It sees how later layers use what this one gives, and
/// needs no assumption on the stream. On SmolLM2-135M the mean of both loses least (combine()). The
/// metrics above need forward passes only. Continuations
/// should contain retrieval as well as text: let the model read spans of the context a second time.
///
/// Pre-RoPE keys: with respect to them, each query is rotated back by the key's position. q_i
/// becomes q_i R_j in A_K, and the sum over j no longer factors out. It is sampled: for each query,
/// kDraws rows j are drawn in proportion to their share, evenly spaced.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/calibrate/row_sample.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/convert.hpp"
#include "lowrankkv/cpu/rotary_table.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Moments of the rows that will be compressed, and the metrics A_K and A_V, of one KV head.
struct CodingHead {
  Moments key, value;
  /// Samples of the rows that the moments are of, by which codes are fitted. None in bundles of
  /// earlier versions: codes are then fitted to a Gaussian.
  RowSample key_sample, value_sample;
  Eigen::MatrixXd key_metric, value_metric;  ///< A_K, A_V summed over queries, [head_dim, head_dim]

  /// @brief Adds rows [n, head_dim] to the moments and the sample.
  void add_keys(MatrixView rows) {
    key.add(rows);
    key_sample.add(rows);
  }
  void add_values(MatrixView rows) {
    value.add(rows);
    value_sample.add(rows);
  }
};

/// @brief Moments of the rows that are never compressed (sinks) of one KV head, and the sums of
/// g^T g over them, g [1, head_dim] the loss's gradient: apart from all other rows.
struct SinkHead {
  Moments key, value;
  Eigen::MatrixXd key_metric, value_metric;
};

/// @brief What the metrics of CodingStatistics measure an error by.
enum class CodingMetric {
  output,   ///< the change of a layer's output: forward passes alone (CodingStatistics::add)
  loss,     ///< the change of the model's loss: gradients (CodingStatistics::add_gradients)
  combined  ///< the mean of both (CodingStatistics::combine)
};

/// @brief The name of a metric in bundles and errors: output, loss, combined.
inline const char* name_of(CodingMetric metric) {
  return metric == CodingMetric::output ? "output"
         : metric == CodingMetric::loss ? "loss"
                                        : "combined";
}

/// @brief Collects one layer's statistics for transform coding, one sequence at a time.
class CodingStatistics {
 public:
  CodingStatistics() = default;
  /// @param exempt  rows at the beginning of a sequence that are never compressed (sinks). They are
  /// extreme, and are left out
  /// @param rope    with Rope::pre, keys arrive pre-RoPE, and statistics are of pre-RoPE keys
  template <class Real = double>
  explicit CodingStatistics(const CacheShape& shape, const RopeConfig& rope = {}, int exempt = 32)
      : shape_(shape), exempt_(exempt) {
    if (rope.keys == Rope::pre) rotary_ = cpu::RotaryTable(rope, shape.head_dim);
    const Eigen::MatrixX<Real> zero = Eigen::MatrixX<Real>::Zero(shape.head_dim, shape.head_dim);
    heads_.resize(
        static_cast<std::size_t>(shape.num_kv_heads),
        {Moments(shape.head_dim), Moments(shape.head_dim), RowSample(shape.head_dim, kSampleRows),
         RowSample(shape.head_dim, kSampleRows), zero, zero});
    grams_.resize(static_cast<std::size_t>(shape.num_qo_heads),
                  Eigen::MatrixX<Real>::Identity(shape.head_dim, shape.head_dim));
  }
  /// @brief Sets N_g = W_g W_g^T of every query head, [head_dim, head_dim]. Default: the identity.
  template <class = void>
  void set_output_grams(std::vector<Eigen::MatrixXd> grams) {
    ::lowrankkv::detail::check_equal("num_qo_heads", "cache",
                                     static_cast<std::size_t>(shape_.num_qo_heads), "output_grams",
                                     grams.size());
    for (const Eigen::MatrixXd& gram : grams)
      ::lowrankkv::detail::check_equal("head_dim", "cache", Eigen::Index{shape_.head_dim},
                                       "output_gram", gram.rows());
    grams_ = std::move(grams);
  }
  const CacheShape& shape() const { return shape_; }
  /// @brief The rotary embedding of pre-RoPE keys; empty if keys are post-RoPE.
  const cpu::RotaryTable& rotary() const { return rotary_; }
  /// Sample rows of each head's keys and values, at most.
  static constexpr std::int64_t kSampleRows = 512;
  /// @brief What the metrics measure. Rows of the other kind cannot be added.
  CodingMetric metric() const { return metric_; }
  void set_metric(CodingMetric metric) { metric_ = metric; }
  CodingHead& head(int index) { return heads_[static_cast<std::size_t>(index)]; }
  const CodingHead& head(int index) const { return heads_[static_cast<std::size_t>(index)]; }
  /// @brief From now on add_gradients() gathers the sinks too, in sink(). Nothing in the library
  /// needs them; they are for other tools. Memory: 32 head_dim^2 bytes a KV head.
  template <class Real = double>
  void gather_sinks() {
    const Eigen::MatrixX<Real> zero = Eigen::MatrixX<Real>::Zero(shape_.head_dim, shape_.head_dim);
    sinks_.assign(heads_.size(), {Moments(shape_.head_dim), Moments(shape_.head_dim), zero, zero});
  }
  bool gathers_sinks() const { return !sinks_.empty(); }
  SinkHead& sink(int index) { return sinks_[static_cast<std::size_t>(index)]; }
  const SinkHead& sink(int index) const { return sinks_[static_cast<std::size_t>(index)]; }
  /// @brief Number of queries that the metrics sum over.
  double num_queries() const { return num_queries_; }
  void set_num_queries(double queries) { num_queries_ = queries; }

  /// @brief Adds rows h [n, hidden] of the residual stream behind this layer's attention (its
  /// output added). Errors count relative to them. Cost: n hidden products.
  void add_residual_stream(MatrixView rows) {
    std::vector<float> squares;
    for (std::int64_t row = 0; row < rows.rows; ++row) {
      double sum = 0.0;
      for (std::int64_t i = 0; i < rows.cols; ++i)
        sum += static_cast<double>(rows.row(row)[i]) * static_cast<double>(rows.row(row)[i]);
      squares.push_back(static_cast<float>(sum));
    }
    stream_squares_.add({squares.data(), rows.rows, 1});
  }
  /// @brief A sample of |h|^2 over the stream's rows: [rows, 1].
  const RowSample& stream_squares() const { return stream_squares_; }
  void set_stream_squares(RowSample squares) { stream_squares_ = std::move(squares); }
  /// @brief The median of |h|^2. @throws ValueError if no rows were added, or if the median is not
  /// a positive number
  double stream_square() const {
    std::vector<float> squares = stream_squares_.values();
    if (squares.empty())
      ::lowrankkv::detail::fail<ValueError>(
          "residual stream: 0 rows were added, at least 1 needed "
          "(CodingStatistics::add_residual_stream)");
    // NaN has no place in an order.
    for (const float square : squares) {
      if (std::isnan(square))
        ::lowrankkv::detail::fail<ValueError>("residual stream: a row's |h|^2 is ", square,
                                              ", a number expected");
    }
    const auto middle = squares.begin() + static_cast<std::ptrdiff_t>(squares.size() / 2);
    std::nth_element(squares.begin(), middle, squares.end());
    if (!(*middle > 0.0F) || !std::isfinite(*middle))
      ::lowrankkv::detail::fail<ValueError>("residual stream: median of |h|^2 is ", *middle,
                                            ", a positive number expected");
    return static_cast<double>(*middle);
  }
  /// @brief Divisor of the metrics for comparing layers: the number of queries that they sum over,
  /// times the median |h|^2, or times 1 if no rows of the residual stream were added. For metrics
  /// of the loss, and combined ones, the number of rows.
  double error_scale() const {
    const bool relative = metric_ == CodingMetric::output && stream_squares_.size() > 0;
    return num_queries_ * (relative ? stream_square() : 1.0);
  }

  /// @brief Adds one sequence as an attention layer saw it. The first `context` tokens are the rows
  /// that would be compressed; the later tokens read them.
  /// @param query         [n, num_qo_heads, head_dim], post-RoPE
  /// @param key, value    [n, num_kv_heads, head_dim]; keys post-RoPE, or with Rope::pre pre-RoPE
  /// @param query_stride  use every query_stride-th later token
  /// @param run  run(count, f) calls f(0), ..., f(count - 1), possibly in parallel: one call per KV
  /// head
  /// @throws ShapeError if extents differ or context is not in [1, n]
  ///
  /// Cost: 6 n head_dim products per query used and head. Memory: 64 n floats.
  template <class Run>
  void add(const QueryView& query, const KeyView& key, const ValueView& value, std::int64_t context,
           int query_stride, Run&& run) {
    add_rows(query, key, value, context, query_stride, run, nullptr, key);
  }
  /// @brief add() to these statistics, which are of post-RoPE keys, and to those of pre-RoPE keys
  /// of the same sequence. Attention weights, which are most of the cost, are computed once.
  /// @param pre_rope      statistics of pre-RoPE keys, of the same shape, exempt rows and output
  /// grams
  /// @param key           [n, num_kv_heads, head_dim], post-RoPE
  /// @param pre_rope_key  the same keys before their rotary embedding
  /// @throws ValueError if the two are not of these forms, or differ in exempt rows or output
  /// grams; ShapeError as add()
  template <class Run>
  void add_both(CodingStatistics& pre_rope, const QueryView& query, const KeyView& key,
                const KeyView& pre_rope_key, const ValueView& value, std::int64_t context,
                int query_stride, Run&& run) {
    if (rotates() || !pre_rope.rotates())
      ::lowrankkv::detail::fail<ValueError>("coding statistics: of ", rotates() ? "pre" : "post",
                                            "-RoPE and of ", pre_rope.rotates() ? "pre" : "post",
                                            "-RoPE keys, post and pre expected");
    if (!(pre_rope.shape_ == shape_))
      ::lowrankkv::detail::fail<ShapeError>("head_dim: coding statistics ", shape_.head_dim,
                                            ", those of pre-RoPE keys ", pre_rope.shape_.head_dim,
                                            ": shapes differ");
    if (pre_rope.exempt_ != exempt_)
      ::lowrankkv::detail::fail<ValueError>("exempt: coding statistics ", exempt_,
                                            ", those of pre-RoPE keys ", pre_rope.exempt_);
    if (pre_rope.grams_ != grams_)
      ::lowrankkv::detail::fail<ValueError>(
          "output grams: coding statistics and those of pre-RoPE keys have others, the same "
          "expected");
    ::lowrankkv::detail::check_rows("pre_rope_key", pre_rope_key, key.num_tokens,
                                    shape_.num_kv_heads, shape_.head_dim);
    add_rows(query, key, value, context, query_stride, run, &pre_rope, pre_rope_key);
  }
  /// @brief Adds the rows of one sequence and the gradient of a loss with respect to them. The
  /// metrics become A = E[g^T g], g [1, head_dim] the gradient of a row: if the labels are drawn
  /// from the model itself, the expected loss rises by dk A_K dk^T / 2 + dv A_V dv^T / 2 for small
  /// errors (Fisher information). All layers, heads, keys and values then count in the same unit,
  /// nats, so that no residual stream is needed.
  /// @param key, value  [n, num_kv_heads, head_dim], keys in the form that the constructor names
  /// @param key_gradient, value_gradient  the same shapes; with Rope::pre, of pre-RoPE keys
  /// @throws ShapeError if extents differ, ValueError if rows were added by add()
  ///
  /// Cost: 2 n head_dim^2 products a head, in f32.
  template <class Real = float>
  void add_gradients(const KeyView& key, const ValueView& value, const KeyView& key_gradient,
                     const ValueView& value_gradient) {
    using Rows = RowsOf<Real>;
    const std::int64_t n = key.num_tokens;
    for (const auto& [name, view] : {std::pair{"key", &key}, {"key_gradient", &key_gradient}})
      ::lowrankkv::detail::check_rows(name, *view, n, shape_.num_kv_heads, shape_.head_dim);
    for (const auto& [name, view] :
         {std::pair{"value", &value}, {"value_gradient", &value_gradient}})
      ::lowrankkv::detail::check_rows(name, *view, n, shape_.num_kv_heads, shape_.head_dim);
    become(CodingMetric::loss);
    const std::int64_t first = (std::min)(std::int64_t{exempt_}, n);
    for (int index = 0; index < shape_.num_kv_heads; ++index) {
      CodingHead& own = heads_[static_cast<std::size_t>(index)];
      const auto add_square = [](const Rows& g, Eigen::MatrixXd& metric) {
        const Eigen::MatrixX<Real> square = g.transpose() * g;
        metric += square.template cast<double>();
      };
      const Rows keys = load<Rows>(key, index), values = load<Rows>(value, index);
      own.add_keys({keys.data() + first * shape_.head_dim, n - first, shape_.head_dim});
      own.add_values({values.data() + first * shape_.head_dim, n - first, shape_.head_dim});
      const Rows of_keys = load<Rows>(key_gradient, index),
                 of_values = load<Rows>(value_gradient, index);
      add_square(of_keys.bottomRows(n - first), own.key_metric);
      add_square(of_values.bottomRows(n - first), own.value_metric);
      if (!gathers_sinks()) continue;
      SinkHead& sink = sinks_[static_cast<std::size_t>(index)];
      sink.key.add({keys.data(), first, shape_.head_dim});
      sink.value.add({values.data(), first, shape_.head_dim});
      add_square(of_keys.topRows(first), sink.key_metric);
      add_square(of_values.topRows(first), sink.value_metric);
    }
    num_queries_ += static_cast<double>(n - first);
  }
  /// @brief Makes these metrics, which are of the loss, the mean of both kinds. Per head and part,
  /// with F = A / rows of the loss, and O = A / error_scale() of the output:
  ///
  ///     A = (F / tr F + O / tr O) / 2 * sqrt(tr F tr O)
  ///
  /// Both estimate what an error costs, with errors of their own. Gradients see what later layers
  /// make of a row, but a few tokens decide their sums; outputs are smooth, and see one layer.
  /// Sizes are averaged in their logarithms, because they range over several powers of ten.
  /// Moments and samples stay those of the rows with gradients.
  /// @param outputs  statistics of the same layer and form of keys, from add()
  /// @throws ValueError if these are not of the loss, `outputs` not of the output, or one has no
  /// rows; ShapeError if shapes differ
  template <class Real = double>
  void combine(const CodingStatistics& outputs) {
    if (!(outputs.shape_ == shape_))
      ::lowrankkv::detail::fail<ShapeError>("head_dim: metrics of the loss ", shape_.head_dim,
                                            ", of the output ", outputs.shape_.head_dim,
                                            ": shapes differ");
    if (metric_ != CodingMetric::loss || outputs.metric_ != CodingMetric::output)
      ::lowrankkv::detail::fail<ValueError>("coding statistics: metrics of the ", name_of(metric_),
                                            " and of the ", name_of(outputs.metric_),
                                            ", loss and output expected");
    if (outputs.rotates() != rotates())
      ::lowrankkv::detail::fail<ValueError>("coding statistics: of ", rotates() ? "pre" : "post",
                                            "-RoPE and of ", outputs.rotates() ? "pre" : "post",
                                            "-RoPE keys, the same expected");
    for (const CodingStatistics* own : {static_cast<const CodingStatistics*>(this), &outputs}) {
      if (!(own->num_queries_ > 0.0))
        ::lowrankkv::detail::fail<ValueError>("coding statistics: the metric of the ",
                                              name_of(own->metric_), " is of ", own->num_queries_,
                                              " rows, at least 1 needed");
    }
    const double scale = outputs.error_scale();
    for (int index = 0; index < shape_.num_kv_heads; ++index) {
      const auto mean = [&](Eigen::MatrixX<Real>& loss, const Eigen::MatrixX<Real>& output) {
        const double of_loss = loss.trace(), of_output = output.trace();
        if (!(of_loss > 0.0) || !(of_output > 0.0)) {  // one says that errors cost nothing
          loss.setZero();
          return;
        }
        const double size = std::sqrt(of_loss / num_queries_ * of_output / scale);
        const Eigen::MatrixX<Real> shape = loss / of_loss + output / of_output;
        loss = 0.5 * size * num_queries_ * shape;
      };
      mean(head(index).key_metric, outputs.head(index).key_metric);
      mean(head(index).value_metric, outputs.head(index).value_metric);
    }
    metric_ = CodingMetric::combined;
  }
  /// @brief add() on the calling thread.
  template <class = void>
  void add(const QueryView& query, const KeyView& key, const ValueView& value, std::int64_t context,
           int query_stride = 1) {
    add(query, key, value, context, query_stride, [](int count, auto&& function) {
      for (int index = 0; index < count; ++index) function(index);
    });
  }

 private:
  template <class Real>
  using RowsOf = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  static constexpr std::size_t kBlock = 64;

  /// The first rows decide what the metrics are of.
  void become(CodingMetric metric) {
    if (num_queries_ > 0.0 && metric != metric_)
      ::lowrankkv::detail::fail<ValueError>("coding statistics: rows with a metric of the ",
                                            name_of(metric), " added to those of the ",
                                            name_of(metric_));
    metric_ = metric;
  }

  /// add(), and of the same sequence to `both` with `both_key`, unless that is null.
  template <class Run, class Real = float>
  void add_rows(const QueryView& query, const KeyView& key, const ValueView& value,
                std::int64_t context, int query_stride, Run&& run, CodingStatistics* both,
                const KeyView& both_key) {
    using Rows = RowsOf<Real>;
    const std::int64_t n = key.num_tokens;
    ::lowrankkv::detail::check_rows("query", query, n, shape_.num_qo_heads, shape_.head_dim);
    ::lowrankkv::detail::check_rows("key", key, n, shape_.num_kv_heads, shape_.head_dim);
    ::lowrankkv::detail::check_rows("value", value, n, shape_.num_kv_heads, shape_.head_dim);
    if (context < 1 || context > n)
      ::lowrankkv::detail::fail<ShapeError>("context: 1 to ", n, " tokens, given ", context);
    become(CodingMetric::output);
    if (both != nullptr) both->become(CodingMetric::output);
    std::vector<std::int64_t> readers;
    for (std::int64_t token = context; token < n; token += (std::max)(1, query_stride))
      readers.push_back(token);
    const std::int64_t first = (std::min)(std::int64_t{exempt_}, context);
    run(shape_.num_kv_heads, [&](int index) {
      CodingHead& head = heads_[static_cast<std::size_t>(index)];
      const auto compressed = [&](const Rows& rows) {
        return MatrixView(rows.data() + first * shape_.head_dim, context - first, shape_.head_dim);
      };
      Rows keys = load<Rows>(key, index);
      const Rows values = load<Rows>(value, index);
      head.add_keys(compressed(keys));
      head.add_values(compressed(values));
      if (both != nullptr) {
        both->head(index).add_keys(compressed(load<Rows>(both_key, index)));
        both->head(index).add_values(compressed(values));
      }
      if (rotates()) rotary_.rotate_rows({}, 0, n, keys.data(), shape_.head_dim);
      for (int member = 0; member < shape_.group_size(); ++member) {
        const int which = index * shape_.group_size() + member;
        // v N v^T of every stored row, which is the same for all readers.
        const Eigen::MatrixX<Real> gram =
            grams_[static_cast<std::size_t>(which)].template cast<Real>();
        const auto stored = values.middleRows(first, context - first);
        const Eigen::VectorX<Real> energies = (stored * gram).cwiseProduct(stored).rowwise().sum();
        for (std::size_t begin = 0; begin < readers.size(); begin += kBlock) {
          const auto from = readers.begin() + static_cast<std::ptrdiff_t>(begin);
          const auto to = readers.begin() +
                          static_cast<std::ptrdiff_t>((std::min)(begin + kBlock, readers.size()));
          add_block(query, which, {from, to}, keys, values, gram, energies, first, context, head,
                    both);
        }
      }
    });
    num_queries_ += static_cast<double>(readers.size());
    if (both != nullptr) both->num_queries_ += static_cast<double>(readers.size());
  }

  template <class Rows, class View>
  Rows load(const View& view, int head) const {
    Rows rows(view.num_tokens, shape_.head_dim);
    for (std::int64_t token = 0; token < view.num_tokens; ++token)
      cpu::load_row(view, token, head, rows.data() + token * shape_.head_dim);
    return rows;
  }

  template <class Rows, class Matrix, class Vector>
  void add_block(const QueryView& query, int which, const std::vector<std::int64_t>& readers,
                 const Rows& keys, const Rows& values, const Matrix& gram, const Vector& energies,
                 std::int64_t first, std::int64_t context, CodingHead& head,
                 CodingStatistics* both) const {
    const Eigen::Index count = static_cast<Eigen::Index>(readers.size());
    Rows queries(count, shape_.head_dim);
    for (Eigen::Index i = 0; i < count; ++i)
      cpu::load_row(query, readers[static_cast<std::size_t>(i)], which,
                    queries.data() + i * shape_.head_dim);
    queries /= std::sqrt(static_cast<float>(shape_.head_dim));
    const Eigen::Index seen = readers.back() + 1;
    // [seen, count]; column i holds the logits of query i.
    Matrix weights = keys.topRows(seen) * queries.transpose();
    for (Eigen::Index i = 0; i < count; ++i) {
      auto column = weights.col(i).array();
      const Eigen::Index own = readers[static_cast<std::size_t>(i)] + 1;
      column.head(own) = (column.head(own) - column.head(own).maxCoeff()).exp();
      column.tail(seen - own) = 0.0F;
      column /= column.sum();
    }
    const Matrix outputs = values.topRows(seen).transpose() * weights;  // [head_dim, count]
    const auto stored = values.middleRows(first, context - first);
    const Matrix squares = weights.middleRows(first, context - first).cwiseAbs2();
    // sum_j w (v - o) N (v - o) = sum_j w v N v - 2 o N (sum_j w v) + (sum_j w) o N o
    const Matrix means = stored.transpose() * squares;
    const Vector sums = squares.colwise().sum();
    const Matrix seen_by = gram * outputs;                   // o N of every query
    using Real = decltype(1.0 * typename Matrix::Scalar());  // double
    Eigen::VectorX<Real> spread(count);
    for (Eigen::Index i = 0; i < count; ++i) {
      spread[i] =
          static_cast<double>(energies.dot(squares.col(i))) -
          2.0 * static_cast<double>(seen_by.col(i).dot(means.col(i))) +
          static_cast<double>(sums[i]) * static_cast<double>(seen_by.col(i).dot(outputs.col(i)));
      spread[i] = (std::max)(spread[i], 0.0);
    }
    const auto add_pre_rope = [&](const CodingStatistics& own, Eigen::MatrixX<Real>& metric) {
      const Matrix cross = stored * seen_by;
      for (Eigen::Index i = 0; i < count; ++i) {
        const float of_output = seen_by.col(i).dot(outputs.col(i));
        const Vector shares =
            squares.col(i)
                .cwiseProduct(((energies - 2.0F * cross.col(i)).array() + of_output).matrix())
                .cwiseMax(0.0F);
        own.add_rotated(queries.row(i), shares, first, metric);
      }
    };
    const Eigen::MatrixX<Real> of_values =
        grams_[static_cast<std::size_t>(which)] * static_cast<double>(sums.sum());
    head.value_metric += of_values;
    if (rotates()) {
      add_pre_rope(*this, head.key_metric);
    } else {
      const Eigen::MatrixX<Real> wide = queries.template cast<double>();
      head.key_metric.noalias() += wide.transpose() * spread.asDiagonal() * wide;
    }
    if (both != nullptr) {
      CodingHead& other = both->head(which / shape_.group_size());
      other.value_metric += of_values;
      add_pre_rope(*both, other.key_metric);
    }
  }

  /// Keys arrive pre-RoPE.
  bool rotates() const { return rotary_.num_pairs() > 0; }

  /// metric += sum_j share_j (q R_j)^T (q R_j), sampled. Share 0 belongs to position `first`.
  template <class Query, class Vector>
  void add_rotated(const Query& query, const Vector& shares, std::int64_t first,
                   Eigen::MatrixXd& metric) const {
    constexpr int kDraws = 64;
    const double total = shares.template cast<double>().sum();
    if (!(total > 0.0)) return;
    RowsOf<typename Vector::Scalar> drawn(kDraws, shape_.head_dim);
    Eigen::Index rows = 0;
    int draws = 0;
    double passed = 0.0;
    for (Eigen::Index j = 0; j < shares.size() && draws < kDraws; ++j) {
      passed += static_cast<double>(shares[j]);
      int hits = 0;  // draw k is at (k + 1/2) / kDraws of the total
      while (draws + hits < kDraws && (draws + hits + 0.5) * total <= passed * kDraws) ++hits;
      if (hits == 0) continue;
      drawn.row(rows) = query * static_cast<float>(std::sqrt(hits * total / kDraws));
      rotary_.rotate_row(-(first + j), drawn.row(rows).data());
      draws += hits;
      ++rows;
    }
    const Eigen::MatrixX<typename Vector::Scalar> product =
        drawn.topRows(rows).transpose() * drawn.topRows(rows);
    metric += product.template cast<double>();
  }

  CacheShape shape_;
  cpu::RotaryTable rotary_;  // empty: keys are post-RoPE
  int exempt_ = 0;
  double num_queries_ = 0.0;
  CodingMetric metric_ = CodingMetric::output;
  RowSample stream_squares_{1, 4096};
  std::vector<CodingHead> heads_;
  std::vector<SinkHead> sinks_;  // none: sinks are left out
  std::vector<Eigen::MatrixXd> grams_;
};

LOWRANKKV_COMPILED_TEMPLATE(CodingStatistics::CodingStatistics(const CacheShape&, const RopeConfig&,
                                                               int))
LOWRANKKV_COMPILED_TEMPLATE(void CodingStatistics::add<void>(const QueryView&, const KeyView&,
                                                             const ValueView&, std::int64_t, int))
LOWRANKKV_COMPILED_TEMPLATE(void CodingStatistics::add_block<CodingStatistics::RowsOf<float>,
                                                             Eigen::MatrixXf, Eigen::VectorXf>(
    const QueryView&, int, const std::vector<std::int64_t>&, const RowsOf<float>&,
    const RowsOf<float>&, const Eigen::MatrixXf&, const Eigen::VectorXf&, std::int64_t,
    std::int64_t, CodingHead&, CodingStatistics*) const)

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
