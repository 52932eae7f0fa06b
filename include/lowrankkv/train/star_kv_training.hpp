// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_training.hpp  The training of STAR-KV's thresholds: objective, phases,
/// protected layers (STAR-KV section 4.2 and appendix A.3).
///
///     L_acmp = sum over layers and heads of e^-alpha_K + sum over layers of e^-alpha_V     eq. 11
///     L      = L_KD + gamma L_acmp                                                         eq. 5
///
/// The first phase minimises L for some steps (the paper: one epoch), the second L_KD alone (1000
/// steps). Protected layers keep their weights: no factors, no thresholds, no term in L_acmp.
///
/// L_KD = KL(p_teacher || p_student) (eq. 4) is the caller's: the teacher is the uncompressed
/// model, the student computes keys and values with key_weight() and value_weight(). What this
/// class needs of it is dL_KD/dW~ of each of these weights, [num_kv_heads head_dim, hidden], for
/// keys before their rotary embedding. So is the optimiser (the paper: AdamW, learning rate 2e-5,
/// and 1e-2 for the thresholds). One step of a training program:
///
///     for each layer that is not protected: forward with key_weight(i), value_weight(i)
///     backward from KL: G_K, G_V
///     for each such layer: gradient(i, G_K, G_V) -> optimiser -> move(i, change)
///     finish_step()
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/train/star_kv_factors.hpp"
#include "lowrankkv/train/star_kv_gradient.hpp"
#include "lowrankkv/train/star_kv_options.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief A layer's weights before training, [num_kv_heads head_dim, hidden] each.
struct StarKvWeights {
  MatrixView keys;
  MatrixView values;
};

/// @brief A layer's factors, or their gradients, or a step. No blocks: the layer is protected.
struct StarKvLayer {
  StarKvProjection keys;
  StarKvProjection values;
};

/// @brief Factors and thresholds of a model, and the objective that moves them (file comment).
class StarKvTraining {
 public:
  /// @brief Decomposes the weights of all layers that are not protected.
  /// @param shape    of every layer's attention
  /// @param weights  one a layer; those of protected layers are not read
  /// @throws ValueError if an option is out of its range, names no layer, or protects all of them;
  /// ShapeError if a weight has not num_kv_heads head_dim rows, or keys and values differ in
  /// hidden; as star_kv_projection()
  ///
  /// Cost: O(channels^2 hidden) a joint block, and a head of O(head_dim^2 hidden).
  template <class = void>
  StarKvTraining(const StarKvOptions& options, const CacheShape& shape,
                 std::span<const StarKvWeights> weights)
      : options_(options), shape_(shape) {
    ::lowrankkv::detail::check_star_kv_options(options, static_cast<int>(weights.size()));
    check_shape();
    for (std::size_t i = 0; i < weights.size(); ++i) {
      layers_.emplace_back();
      if (is_protected(static_cast<int>(i))) continue;
      const std::string layer = "layer " + std::to_string(i);
      check_rows(layer + " keys", weights[i].keys.rows);
      check_rows(layer + " values", weights[i].values.rows);
      ::lowrankkv::detail::check_equal("hidden", (layer + " keys").c_str(), weights[i].keys.cols,
                                       "values", weights[i].values.cols);
      const auto factors = [&](MatrixView weight, Decomposition decomposition) {
        return star_kv_projection(weight, shape.num_kv_heads, decomposition, options.first_alpha);
      };
      layers_.back() = {factors(weights[i].keys, options.keys),
                        factors(weights[i].values, options.values)};
    }
  }

  /// @brief Goes on where another training was: what train/star_kv_state.hpp reads.
  /// @param layers  one a layer, without blocks where it is protected
  /// @throws ValueError as above, on factors that are not finite, or a progress that training with
  /// these options cannot have made; ShapeError if blocks do not fit options and shape
  template <class = void>
  StarKvTraining(const StarKvOptions& options, const CacheShape& shape,
                 std::vector<StarKvLayer> layers, const StarKvProgress& progress)
      : options_(options), shape_(shape), layers_(std::move(layers)), progress_(progress) {
    ::lowrankkv::detail::check_star_kv_options(options, num_layers());
    ::lowrankkv::detail::check_star_kv_progress(options, progress);
    check_shape();
    for (int i = 0; i < num_layers(); ++i) {
      const std::string name = "layer " + std::to_string(i);
      check_blocks(name + " keys", layer(i).keys, options.keys, is_protected(i));
      check_blocks(name + " values", layer(i).values, options.values, is_protected(i));
      ::lowrankkv::detail::check_equal("hidden", (name + " keys").c_str(), layer(i).keys.hidden(),
                                       "values", layer(i).values.hidden());
    }
  }

  const StarKvOptions& options() const { return options_; }
  const CacheShape& shape() const { return shape_; }
  const StarKvProgress& progress() const { return progress_; }
  int num_layers() const { return static_cast<int>(layers_.size()); }

  /// @brief A layer's factors. @throws ShapeError if there is no such layer
  const StarKvLayer& layer(int index) const {
    if (index < 0 || index >= num_layers())
      ::lowrankkv::detail::fail<ShapeError>("layer: ", index, ", num_layers ", num_layers());
    return layers_[static_cast<std::size_t>(index)];
  }
  /// @brief Whether a layer keeps its weights.
  bool is_protected(int index) const {
    return std::find(options_.protected_layers.begin(), options_.protected_layers.end(), index) !=
           options_.protected_layers.end();
  }
  /// @brief Whether the thresholds of the keys move: gradient() is 0 for those that do not, and
  /// move() leaves them.
  bool key_thresholds_move() const { return thresholds_move(progress_.keys_stopped); }
  /// @brief Whether the thresholds of the values move.
  bool value_thresholds_move() const { return thresholds_move(progress_.values_stopped); }

  /// @brief W~_K of a layer, [num_kv_heads head_dim, hidden]: the student's keys before RoPE are
  /// W~_K x. @throws ShapeError if there is no such layer, ValueError if it is protected
  template <class = void>
  Eigen::MatrixXd key_weight(int index) const {
    return star_kv_weight(trained(index).keys, options_.sharpness);
  }
  /// @brief W~_V of a layer, as key_weight().
  template <class = void>
  Eigen::MatrixXd value_weight(int index) const {
    return star_kv_weight(trained(index).values, options_.sharpness);
  }

  /// @brief L_acmp over all thresholds (STAR-KV eq. 11; head-wise values and joint keys: a term a
  /// threshold).
  template <class = void>
  double compression_loss() const {
    std::vector<double> alphas;
    for (const StarKvLayer& layer : layers_) {
      for (const StarKvFactors& block : layer.keys.blocks) alphas.push_back(block.alpha);
      for (const StarKvFactors& block : layer.values.blocks) alphas.push_back(block.alpha);
    }
    return calibrate::compression_loss(alphas);
  }
  /// @brief What this phase minimises (STAR-KV eq. 5), from L_KD of the same batch.
  template <class = void>
  double objective(double distillation_loss) const {
    const bool compresses = progress_.phase == StarKvPhase::compress;
    return distillation_loss + (compresses ? options_.gamma * compression_loss() : 0.0);
  }

  /// @brief The gradients of the phase's objective with respect to a layer's factors.
  /// @param key_weight_gradient    dL_KD/dW~_K [num_kv_heads head_dim, hidden]
  /// @param value_weight_gradient  dL_KD/dW~_V, the same shape
  /// @return of the shapes of layer(index)
  /// @throws ShapeError, ValueError as key_weight() and star_kv_weight_gradient()
  ///
  /// Cost: O(channels hidden p) a block.
  template <class Real = double>
  StarKvLayer gradient(int index, const linalg::MatrixRef<Real>& key_weight_gradient,
                       const linalg::MatrixRef<Real>& value_weight_gradient) const {
    const StarKvLayer& own = trained(index);
    const double s = options_.sharpness;
    StarKvLayer gradient{star_kv_weight_gradient(own.keys, key_weight_gradient, s),
                         star_kv_weight_gradient(own.values, value_weight_gradient, s)};
    add_compression(own.keys, key_thresholds_move(), gradient.keys);
    add_compression(own.values, value_thresholds_move(), gradient.values);
    return gradient;
  }

  /// @brief Adds an optimiser's step to a layer's factors, and to those thresholds that move.
  /// @throws ShapeError if a shape differs, ValueError if the step or what it leads to is not
  /// finite or the layer is protected, StateError if training is finished
  template <class = void>
  void move(int index, const StarKvLayer& change) {
    check_not_finished();
    trained(index);
    StarKvLayer& own = layers_[static_cast<std::size_t>(index)];
    const std::string name = "layer " + std::to_string(index);
    ::lowrankkv::detail::check_star_kv_change(name + " keys", own.keys, change.keys);
    ::lowrankkv::detail::check_star_kv_change(name + " values", own.values, change.values);
    StarKvLayer moved = own;
    add(name + " keys", change.keys, key_thresholds_move(), moved.keys);
    add(name + " values", change.values, value_thresholds_move(), moved.values);
    own = std::move(moved);
  }

  /// @brief Ends an optimiser's step: counts it, stops thresholds whose share is reached, and goes
  /// on to the next phase when this one is over. @throws StateError if training is finished
  template <class = void>
  void finish_step() {
    check_not_finished();
    ++progress_.step;
    ++progress_.phase_steps;
    if (progress_.phase == StarKvPhase::compress) {
      progress_.keys_stopped |= options_.key_share > 0.0 && kept_keys() <= options_.key_share;
      progress_.values_stopped |=
          options_.value_share > 0.0 && kept_values() <= options_.value_share;
      if (progress_.phase_steps == options_.compress_steps ||
          (progress_.keys_stopped && progress_.values_stopped)) {
        progress_.phase = StarKvPhase::recover;
        progress_.phase_steps = 0;
      }
    }
    if (progress_.phase == StarKvPhase::recover &&
        progress_.phase_steps == options_.recover_steps) {
      progress_.phase = StarKvPhase::finished;
      progress_.phase_steps = 0;
    }
  }

  /// @brief The share of a key's channels that is stored after hard truncation: the sum of the
  /// ranks over that of the channels, of all trained layers (STAR-KV eq. 17 is one entry of it).
  template <class = void>
  double kept_keys() const {
    return kept_share(&StarKvLayer::keys);
  }
  /// @brief The same of values.
  template <class = void>
  double kept_values() const {
    return kept_share(&StarKvLayer::values);
  }

 private:
  void check_shape() const {
    if (shape_.num_kv_heads < 1 || shape_.head_dim < 1)
      ::lowrankkv::detail::fail<ShapeError>("STAR-KV: num_kv_heads ", shape_.num_kv_heads,
                                            ", head_dim ", shape_.head_dim,
                                            ", at least 1 expected");
  }

  void check_rows(const std::string& what, std::int64_t rows) const {
    if (rows != std::int64_t{shape_.num_kv_heads} * shape_.head_dim)
      ::lowrankkv::detail::fail<ShapeError>(what, ": rows ", rows, ", num_kv_heads * head_dim ",
                                            std::int64_t{shape_.num_kv_heads} * shape_.head_dim);
  }

  void check_blocks(const std::string& what, const StarKvProjection& projection,
                    Decomposition decomposition, bool is_protected) const {
    const bool joint = decomposition == Decomposition::joint;
    const int blocks = is_protected ? 0 : joint ? 1 : shape_.num_kv_heads;
    ::lowrankkv::detail::check_equal("blocks", name_of(decomposition), blocks, what.c_str(),
                                     static_cast<int>(projection.blocks.size()));
    if (is_protected) return;
    check_rows(what, projection.channels());
    for (const StarKvFactors& block : projection.blocks) {
      ::lowrankkv::detail::check_equal("channels", what.c_str(),
                                       projection.channels() / Eigen::Index{blocks}, "a block",
                                       block.left.rows());
      ::lowrankkv::detail::check_equal("hidden", what.c_str(), projection.hidden(), "a block",
                                       block.right.rows());
      ::lowrankkv::detail::check_star_kv_factors(what, block);
    }
  }

  void check_not_finished() const {
    if (progress_.phase == StarKvPhase::finished)
      ::lowrankkv::detail::fail<StateError>("STAR-KV: training is finished after ", progress_.step,
                                            " steps, of at most ",
                                            options_.compress_steps + options_.recover_steps);
  }

  const StarKvLayer& trained(int index) const {
    const StarKvLayer& own = layer(index);
    if (is_protected(index))
      ::lowrankkv::detail::fail<ValueError>("layer: ", index, " is protected and has 0 blocks, ",
                                            "one that is trained expected");
    return own;
  }

  bool thresholds_move(bool stopped) const {
    if (progress_.phase == StarKvPhase::compress) return !stopped;
    return progress_.phase == StarKvPhase::recover && !options_.freeze_thresholds;
  }

  void add_compression(const StarKvProjection& own, bool moves, StarKvProjection& gradient) const {
    const bool compresses = progress_.phase == StarKvPhase::compress;
    for (std::size_t i = 0; i < own.blocks.size(); ++i) {
      double& alpha = gradient.blocks[i].alpha;
      if (compresses) alpha -= options_.gamma * std::exp(-own.blocks[i].alpha);
      if (!moves) alpha = 0.0;
    }
  }

  template <class = void>
  static void add(const std::string& name, const StarKvProjection& change, bool thresholds,
                  StarKvProjection& own) {
    for (std::size_t i = 0; i < own.blocks.size(); ++i) {
      own.blocks[i].left += change.blocks[i].left;
      own.blocks[i].sigma += change.blocks[i].sigma;
      own.blocks[i].right += change.blocks[i].right;
      if (thresholds) own.blocks[i].alpha += change.blocks[i].alpha;
      ::lowrankkv::detail::check_star_kv_factors(name + " after the step", own.blocks[i]);
    }
  }

  template <class = void>
  double kept_share(StarKvProjection StarKvLayer::*part) const {
    double rank = 0.0, channels = 0.0;
    for (const StarKvLayer& layer : layers_) {
      rank += (layer.*part).rank();
      channels += static_cast<double>((layer.*part).channels());
    }
    return rank / channels;
  }

  StarKvOptions options_;
  CacheShape shape_;
  std::vector<StarKvLayer> layers_;
  StarKvProgress progress_;
};

}  // namespace train
LOWRANKKV_NAMESPACE_END
