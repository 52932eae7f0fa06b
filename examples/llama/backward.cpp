// SPDX-License-Identifier: Apache-2.0
// Back-propagation through a Llama block: RMSNorm, rotary attention with grouped heads that may
// have norms of their own, SwiGLU, and a head that may be the embedding. Gradients are with respect
// to keys and values; the weights are given. d_x is the gradient of the loss with respect to x,
// shaped like x.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "model.hpp"

namespace llama {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Rows = Eigen::Map<RowMajor>;
using ConstRows = Eigen::Map<const RowMajor>;

// y = x s w with s = 1 / sqrt(mean(x^2) + eps), so d_x = s (w d_y) - x s^3 mean(x w d_y). Adds it.
void add_rms_norm_gradient(const float* x, const float* d_y, std::int64_t rows, int width,
                           const std::vector<float>& weight, float epsilon, float* d_x) {
  const Eigen::Map<const Eigen::ArrayXf> w(weight.data(), width);
  Eigen::ArrayXf change(width);  // aligned: where the rows lie does not change a bit
  for (std::int64_t row = 0; row < rows; ++row) {
    const Eigen::Map<const Eigen::ArrayXf> in(x + row * width, width),
        out(d_y + row * width, width);
    const float scale = 1.0F / std::sqrt(in.square().mean() + epsilon);
    const float along = (in * w * out).mean() * scale * scale * scale;
    change = scale * (w * out) - along * in;
    Eigen::Map<Eigen::ArrayXf>(d_x + row * width, width) += change;
  }
}

// Rows of one head in [n, heads, head_dim].
using HeadRows = Eigen::Map<RowMajor, 0, Eigen::OuterStride<>>;
using ConstHeadRows = Eigen::Map<const RowMajor, 0, Eigen::OuterStride<>>;

// Causal attention of one query head over the rows of its KV head, a block of queries at a time.
class HeadAttention {
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(config_.head_dim)); }
  template <class Real>
  auto of_head(Real* rows, int head, int heads) const {
    using Matrix = std::conditional_t<std::is_const_v<Real>, const RowMajor, RowMajor>;
    const std::int64_t width = std::int64_t{heads} * config_.head_dim;
    return Eigen::Map<Matrix, 0, Eigen::OuterStride<>>(rows + std::int64_t{head} * config_.head_dim,
                                                       n_, config_.head_dim,
                                                       Eigen::OuterStride<>(width));
  }
  template <class Real>
  auto of_kv(Real* rows) const {
    const int group = config_.num_qo_heads / config_.num_kv_heads;
    return of_head(rows, head_ / group, config_.num_kv_heads);
  }
  template <class Real>
  auto of_query(Real* rows) const {
    return of_head(rows, head_, config_.num_qo_heads);
  }
  /// Calls f(first, count, seen) for blocks of queries [first, first + count), which see rows
  /// [0, seen).
  template <class Function>
  void for_each_block(Function&& f) const {
    constexpr std::int64_t kQueries = 128;
    for (std::int64_t first = 0; first < n_; first += kQueries) {
      const std::int64_t count = std::min(kQueries, n_ - first);
      f(first, count, first + count);
    }
  }
  RowMajor softmax(const ConstHeadRows& query, const ConstHeadRows& key, std::int64_t first,
                   std::int64_t count, std::int64_t seen) const {
    RowMajor weights = query.middleRows(first, count) * key.topRows(seen).transpose();
    for (std::int64_t i = 0; i < count; ++i) {
      auto own = weights.row(i).head(first + i + 1).array();
      own = ((own - own.maxCoeff()) * scale()).exp();
      own /= own.sum();
      weights.row(i).tail(seen - first - i - 1).setZero();
    }
    return weights;
  }

 public:
  HeadAttention(std::int64_t n, const Config& config, int head)
      : n_(n), config_(config), head_(head) {}

  void forward(const float* query, const float* key, const float* value, float* out) const {
    const ConstHeadRows q = of_query(query), k = of_kv(key), v = of_kv(value);
    for_each_block([&](std::int64_t first, std::int64_t count, std::int64_t seen) {
      const RowMajor weights = softmax(q, k, first, count, seen);
      of_query(out).middleRows(first, count).noalias() = weights * v.topRows(seen);
    });
  }

  /// d_query, and this head's share of d_key and d_value [n, num_qo_heads, head_dim], of d_out; out
  /// are the outputs. All three are set.
  void backward(const float* query, const float* key, const float* value, const float* out,
                const float* d_out, float* d_query, float* d_key, float* d_value) const {
    const ConstHeadRows queries = of_query(query), k = of_kv(key), v = of_kv(value);
    HeadRows d_k = of_query(d_key), d_v = of_query(d_value);
    d_k.setZero();
    d_v.setZero();
    for_each_block([&](std::int64_t first, std::int64_t count, std::int64_t seen) {
      const auto q = queries.middleRows(first, count);
      const auto o = of_query(out).middleRows(first, count);
      const auto d_o = of_query(d_out).middleRows(first, count);
      const RowMajor weights = softmax(queries, k, first, count, seen);
      d_v.topRows(seen).noalias() += weights.transpose() * d_o;
      // Softmax: d_logit = p (d_p - sum p d_p), and sum p d_p = o d_o.
      RowMajor d_logits = d_o * v.topRows(seen).transpose();
      d_logits.colwise() -= Eigen::VectorXf(o.cwiseProduct(d_o).rowwise().sum());
      d_logits.array() *= weights.array() * scale();
      of_query(d_query).middleRows(first, count).noalias() = d_logits * k.topRows(seen);
      d_k.topRows(seen).noalias() += d_logits.transpose() * q;
    });
  }

 private:
  std::int64_t n_;
  const Config& config_;
  int head_;
};

// Calls f(HeadAttention) for every query head of a layer, on all threads.
template <class Function>
void for_each_head(lowrankkv::cpu::ThreadPool& threads, std::int64_t n, const Config& config,
                   Function&& f) {
  threads.run(config.num_qo_heads,
              [&](std::int64_t head, int) { f(HeadAttention(n, config, static_cast<int>(head))); });
}

// Rows of every query head [n, num_qo_heads, head_dim], summed over the heads of each group, in
// their order: [n, num_kv_heads, head_dim].
std::vector<float> sum_of_groups(lowrankkv::cpu::ThreadPool& threads, const Config& config,
                                 const std::vector<float>& rows, std::int64_t n) {
  const int dim = config.head_dim, group = config.num_qo_heads / config.num_kv_heads;
  std::vector<float> sums(rows.size() / static_cast<std::size_t>(group));
  threads.run(n, [&](std::int64_t row, int) {
    const Eigen::Map<const RowMajor> in(rows.data() + row * config.num_qo_heads * dim,
                                        config.num_qo_heads, dim);
    Eigen::Map<RowMajor> out(sums.data() + row * config.num_kv_heads * dim, config.num_kv_heads,
                             dim);
    for (int head = 0; head < config.num_kv_heads; ++head) {
      out.row(head) = in.row(head * group);
      for (int i = 1; i < group; ++i) out.row(head) += in.row(head * group + i);
    }
  });
  return sums;
}

// What the backward pass needs of a layer's forward pass.
struct Kept {
  std::vector<float> in, middle;  // residual stream before attention, and behind it
  std::vector<float> query, key, pre_rope_key, value, attended;

  void keep(const Projected& rows, std::int64_t n, const Config& config) {
    const std::int64_t query_size = n * config.num_qo_heads * config.head_dim;
    const std::int64_t key_size = n * config.num_kv_heads * config.head_dim;
    query.assign(rows.query, rows.query + query_size);
    key.assign(rows.key, rows.key + key_size);
    pre_rope_key.assign(rows.pre_rope_key, rows.pre_rope_key + key_size);
    value.assign(rows.value, rows.value + key_size);
  }
};

// Gate and up projections g, u: a = silu(g) u. d_a, g and u become d_g (in g) and d_u (in u).
void swiglu_gradient(const float* d_a, std::int64_t size, float* g, float* u) {
  for (std::int64_t i = 0; i < size; ++i) {
    const float sigmoid = 1.0F / (1.0F + std::exp(-g[i])), silu = g[i] * sigmoid;
    const float d_g = d_a[i] * u[i] * (sigmoid + silu * (1.0F - sigmoid));
    u[i] = d_a[i] * silu;
    g[i] = d_g;
  }
}

}  // namespace

void Model::apply_transposed(const Linear& linear, const float* in, std::int64_t rows, float* out,
                             bool add) const {
  const bool of_embedding = &linear == &head_ && tied_;
  const std::vector<float>& weight = of_embedding ? embedding_ : linear.weight;
  const int in_features = of_embedding ? config_.hidden_size : linear.in_features;
  const int out_features = of_embedding ? config_.vocabulary_size : linear.out_features;
  const ConstRows w(weight.data(), out_features, in_features);
  const ConstRows y(in, rows, out_features);
  Rows x(out, rows, in_features);
  // Many rows: blocks of rows. Few: blocks of columns, which read a part of the weights each.
  constexpr std::int64_t kRows = 64, kColumns = 64;
  const bool by_rows = rows >= 4 * kRows;
  const std::int64_t size = by_rows ? rows : in_features, step = by_rows ? kRows : kColumns;
  threads_->run((size + step - 1) / step, [&](std::int64_t task, int) {
    const std::int64_t first = task * step, count = std::min(step, size - first);
    auto block = by_rows ? x.block(first, 0, count, in_features) : x.block(0, first, rows, count);
    if (!add) block.setZero();
    if (by_rows)
      block.noalias() += y.middleRows(first, count) * w;
    else
      block.noalias() += y * w.middleCols(first, count);
  });
}

double Model::head_gradient(const std::vector<float>& hidden, std::int64_t n, const RowLoss& of_row,
                            float* d_hidden) const {
  // A few rows of logits at a time.
  constexpr std::int64_t kRows = 128;
  const std::int64_t hidden_size = config_.hidden_size, vocabulary = config_.vocabulary_size;
  std::vector<float> scores(static_cast<std::size_t>(std::min(n, kRows) * vocabulary));
  // Aligned memory for a row, so that where the scores lie does not change a bit.
  std::vector<Eigen::ArrayXf> aligned(static_cast<std::size_t>(threads_->num_threads()));
  double loss = 0.0;
  for (std::int64_t first = 0; first < n; first += kRows) {
    const std::int64_t count = std::min(kRows, n - first);
    apply(head_, hidden.data() + first * hidden_size, count, scores.data());
    threads_->run(count, [&](std::int64_t row, int thread) {
      Eigen::ArrayXf& p = aligned[static_cast<std::size_t>(thread)];
      Eigen::Map<Eigen::ArrayXf> line(scores.data() + row * vocabulary, vocabulary);
      p = (line - line.maxCoeff()).exp();
      line = p / p.sum();
    });
    Eigen::ArrayXf& p = aligned.front();
    for (std::int64_t row = 0; row < count; ++row) {
      Eigen::Map<Eigen::ArrayXf> line(scores.data() + row * vocabulary, vocabulary);
      p = line;
      loss += of_row(first + row, p.data());
      line = p;
    }
    apply_transposed(head_, scores.data(), count, d_hidden + first * hidden_size);
  }
  return loss;
}

void Model::add_mlp_gradient(const Layer& layer, const float* x, std::int64_t n, float* d_x) const {
  const int hidden = config_.hidden_size, inner = config_.intermediate_size;
  std::vector<float> normed(static_cast<std::size_t>(n * hidden)), d_normed(normed.size());
  std::vector<float> gate(static_cast<std::size_t>(n * inner)), up(gate.size()), d_a(gate.size());
  rms_norm(x, n, hidden, layer.mlp_norm, config_.rms_norm_eps, normed.data());
  apply(layer.gate, normed.data(), n, gate.data());
  apply(layer.up, normed.data(), n, up.data());
  apply_transposed(layer.down, d_x, n, d_a.data());
  threads_->run(n, [&](std::int64_t token, int) {
    swiglu_gradient(d_a.data() + token * inner, inner, gate.data() + token * inner,
                    up.data() + token * inner);
  });
  apply_transposed(layer.gate, gate.data(), n, d_normed.data());
  apply_transposed(layer.up, up.data(), n, d_normed.data(), true);
  add_rms_norm_gradient(x, d_normed.data(), n, hidden, layer.mlp_norm, config_.rms_norm_eps, d_x);
}

void Model::head_norm_gradient(const Linear& projection, const std::vector<float>& gain,
                               const float* normed, std::int64_t n, int heads,
                               std::vector<float>& gradient) const {
  std::vector<float> rows(gradient.size()), before(gradient.size(), 0.0F);
  apply(projection, normed, n, rows.data());
  add_rms_norm_gradient(rows.data(), gradient.data(), n * heads, config_.head_dim, gain,
                        config_.rms_norm_eps, before.data());
  gradient.swap(before);
}

double Model::loss_gradients(const std::vector<std::int32_t>& tokens, const Labels& labels,
                             const GradientObserver& observe) const {
  const int vocabulary = config_.vocabulary_size;
  if (tokens.empty()) throw std::runtime_error("loss_gradients: 0 tokens, at least 1 is expected");
  // Cross-entropy: d_logits = probabilities - label.
  const auto cross_entropy = [&](std::int64_t row, float* scores) {
    const std::int32_t label = labels(row, scores);
    if (label >= vocabulary)
      throw std::runtime_error("loss_gradients: label " + std::to_string(label) +
                               ", vocabulary has " + std::to_string(vocabulary));
    if (label < 0) {
      std::fill_n(scores, vocabulary, 0.0F);
      return 0.0;
    }
    const double loss = -std::log(std::max(1e-38, static_cast<double>(scores[label])));
    scores[label] -= 1.0F;
    return loss;
  };
  return gradients_of(tokens, cross_entropy, observe);
}

std::vector<float> Model::forward_text(const std::vector<std::int32_t>& tokens) const {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  return forward(tokens, 0, [&](int, const Projected& rows, float* out) {
    for_each_head(*threads_, n, config_, [&](const HeadAttention& head) {
      head.forward(rows.query, rows.key, rows.value, out);
    });
  });
}

void Model::replace_key_value(int layer, std::vector<float> key, std::vector<float> value) {
  Layer& own = layers_.at(static_cast<std::size_t>(layer));
  if (device_ != nullptr)
    throw std::runtime_error("replace_key_value: the weights of layer " + std::to_string(layer) +
                             " are on a GPU, on the CPU expected");
  const auto check = [](const char* what, const Linear& linear, const std::vector<float>& given) {
    if (given.size() != linear.weight.size())
      throw std::runtime_error("replace_key_value: " + std::to_string(given.size()) +
                               " weights of " + what + ", the layer has " +
                               std::to_string(linear.weight.size()));
  };
  check("keys", own.key, key);
  check("values", own.value, value);
  own.key.weight = std::move(key);
  own.value.weight = std::move(value);
}

double Model::gradients_of(const std::vector<std::int32_t>& tokens, const RowLoss& of_row,
                           const GradientObserver& observe) const {
  const std::int64_t n = static_cast<std::int64_t>(tokens.size());
  const int hidden = config_.hidden_size;
  const float epsilon = config_.rms_norm_eps;
  const std::size_t width = static_cast<std::size_t>(n * hidden);
  if (n == 0) throw std::runtime_error("gradients_of: 0 tokens, at least 1 is expected");
  std::vector<Kept> kept(layers_.size());
  std::vector<float> last;  // the stream that leaves the last layer

  const std::vector<float> hidden_rows = forward(
      tokens, 0,
      [&](int layer, const Projected& rows, float* out) {
        Kept& own = kept[static_cast<std::size_t>(layer)];
        own.keep(rows, n, config_);
        for_each_head(*threads_, n, config_, [&](const HeadAttention& head) {
          head.forward(rows.query, rows.key, rows.value, out);
        });
        own.attended.assign(out, out + own.query.size());
      },
      [&](int layer, std::int64_t, const float* rows) {
        kept[static_cast<std::size_t>(layer)].middle.assign(rows, rows + width);
      },
      [&](int layer, std::int64_t, const float* rows) {
        std::vector<float>& in =
            layer < config_.num_layers ? kept[static_cast<std::size_t>(layer)].in : last;
        in.assign(rows, rows + width);
      });

  std::vector<float> d_x(width), d_normed(width), normed(width);
  const double loss = head_gradient(hidden_rows, n, of_row, d_normed.data());
  add_rms_norm_gradient(last.data(), d_normed.data(), n, hidden, final_norm_, epsilon, d_x.data());

  auto [cosines, sines] = angles(0, n);
  for (float& sine : sines) sine = -sine;  // gradients are rotated back
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Layer& layer = layers_[i];
    Kept& own = kept[i];
    add_mlp_gradient(layer, own.middle.data(), n, d_x.data());
    std::vector<float> d_attended(own.query.size()), d_query(d_attended.size());
    std::vector<float> d_keys(own.query.size()), d_values(own.query.size());
    apply_transposed(layer.output, d_x.data(), n, d_attended.data());
    for_each_head(*threads_, n, config_, [&](const HeadAttention& head) {
      head.backward(own.query.data(), own.key.data(), own.value.data(), own.attended.data(),
                    d_attended.data(), d_query.data(), d_keys.data(), d_values.data());
    });
    const std::vector<float> d_key = sum_of_groups(*threads_, config_, d_keys, n);
    const std::vector<float> d_value = sum_of_groups(*threads_, config_, d_values, n);
    std::vector<float> d_pre_rope_key = d_key;
    if (config_.rotates(static_cast<int>(i))) {
      rotate(d_query.data(), n, config_.num_qo_heads, cosines, sines);
      rotate(d_pre_rope_key.data(), n, config_.num_kv_heads, cosines, sines);
    }
    rms_norm(own.in.data(), n, hidden, layer.attention_norm, epsilon, normed.data());
    observe(static_cast<int>(i), n,
            {{own.query.data(), own.key.data(), own.value.data(), own.pre_rope_key.data()},
             normed.data(),
             d_key.data(),
             d_pre_rope_key.data(),
             d_value.data()});
    if (i > 0) {
      if (config_.head_norms) {
        head_norm_gradient(layer.query, layer.query_norm, normed.data(), n, config_.num_qo_heads,
                           d_query);
        head_norm_gradient(layer.key, layer.key_norm, normed.data(), n, config_.num_kv_heads,
                           d_pre_rope_key);
      }
      apply_transposed(layer.query, d_query.data(), n, d_normed.data());
      apply_transposed(layer.key, d_pre_rope_key.data(), n, d_normed.data(), true);
      apply_transposed(layer.value, d_value.data(), n, d_normed.data(), true);
      add_rms_norm_gradient(own.in.data(), d_normed.data(), n, hidden, layer.attention_norm,
                            epsilon, d_x.data());
    }
    own = {};
  }
  return loss;
}

}  // namespace llama
