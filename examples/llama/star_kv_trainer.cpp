// SPDX-License-Identifier: Apache-2.0
#include "star_kv_trainer.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/train/star_kv_maps.hpp"
#include "lowrankkv/train/star_kv_state.hpp"

namespace llama {
namespace {

namespace train = lowrankkv::train;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using ConstRows = Eigen::Map<const RowMajor>;

std::vector<float> floats(const Eigen::MatrixXd& weight) {
  const RowMajor rows = weight.cast<float>();
  return {rows.data(), rows.data() + rows.size()};
}

std::vector<train::StarKvWeights> weights_of(const Model& model) {
  std::vector<train::StarKvWeights> weights;
  for (int i = 0; i < model.config().num_layers; ++i) {
    const auto view = [](const Linear& linear) {
      return lowrankkv::MatrixView{linear.weight.data(), linear.out_features, linear.in_features,
                                   linear.in_features};
    };
    weights.push_back({view(model.layer(i).key), view(model.layer(i).value)});
  }
  return weights;
}

/// Calls f(number of a, number of b, whether it is a threshold) for all numbers of two layers of
/// the same shapes: keys, then values, block by block: left, sigma, right, alpha.
template <class A, class B, class Function>
void for_each_number(A& a, B& b, Function&& f) {
  const auto blocks = [&](auto& own, auto& other) {
    for (std::size_t i = 0; i < own.blocks.size(); ++i) {
      auto& x = own.blocks[i];
      auto& y = other.blocks[i];
      for (Eigen::Index k = 0; k < x.left.size(); ++k) f(x.left.data()[k], y.left.data()[k], false);
      for (Eigen::Index k = 0; k < x.sigma.size(); ++k) f(x.sigma[k], y.sigma[k], false);
      for (Eigen::Index k = 0; k < x.right.size(); ++k)
        f(x.right.data()[k], y.right.data()[k], false);
      f(x.alpha, y.alpha, true);
    }
  };
  blocks(a.keys, b.keys);
  blocks(a.values, b.values);
}

std::size_t count_of(const train::StarKvLayer& layer) {
  std::size_t count = 0;
  for_each_number(layer, layer, [&](double, double, bool) { ++count; });
  return count;
}

/// log softmax of a row of logits, in place.
void log_softmax(Eigen::Map<Eigen::ArrayXf> row) {
  row -= row.maxCoeff();
  row -= std::log(row.exp().sum());
}

}  // namespace

StarKvTrainer::StarKvTrainer(const Model& teacher, Model& student, std::vector<std::int32_t> tokens,
                             const TrainOptions& options)
    : teacher_(teacher),
      student_(student),
      tokens_(std::move(tokens)),
      options_(options),
      training_(options.star, student.config().cache_shape(), weights_of(student)) {
  using lowrankkv::ValueError;
  using lowrankkv::detail::fail;
  if (student.config().head_norms)
    throw std::runtime_error("train: heads' keys have norms of their own, none expected");
  const auto check = [](const char* name, auto value, bool right, const char* expected) {
    if (!right) fail<ValueError>("train: ", name, " ", value, ", ", expected, " expected");
  };
  check("batch", options.batch, options.batch >= 1, "at least 1");
  check("window", options.window,
        options.window >= 2 && options.window <= student.config().max_positions,
        "2 to the model's positions");
  check("warmup", options.warmup, options.warmup >= 0, "at least 0");
  for (const auto& [name, value] :
       {std::pair{"rate", options.rate}, std::pair{"threshold_rate", options.threshold_rate},
        std::pair{"weight_decay", options.weight_decay}, std::pair{"last_rate", options.last_rate},
        std::pair{"clip", options.clip}})
    check(name, value, value >= 0.0 && std::isfinite(value), "0 or more and finite");
  if (static_cast<std::int64_t>(tokens_.size()) < options.window)
    throw std::runtime_error("train: the text has " + std::to_string(tokens_.size()) +
                             " tokens, a window " + std::to_string(options.window));
  for (int i = 0; i < training_.num_layers(); ++i) {
    const std::size_t count = training_.is_protected(i) ? 0 : count_of(training_.layer(i));
    moments_.push_back({std::vector<double>(count, 0.0), std::vector<double>(count, 0.0)});
  }
  job_ = job();
}

std::vector<std::int32_t> StarKvTrainer::window(int index) const {
  // A step's windows depend on nothing that came before it.
  std::seed_seq seed{options_.seed, static_cast<std::uint64_t>(training_.progress().step),
                     static_cast<std::uint64_t>(index)};
  std::mt19937_64 random(seed);
  const auto places =
      static_cast<std::uint64_t>(tokens_.size()) - static_cast<std::uint64_t>(options_.window) + 1;
  const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(random() % places);
  return {first, first + options_.window};
}

std::vector<train::StarKvLayer> StarKvTrainer::gradients(TrainStep& step) {
  const std::int64_t rows = options_.window * options_.batch;
  const int vocabulary = student_.config().vocabulary_size, hidden = student_.config().hidden_size;
  const std::int64_t channels =
      std::int64_t{student_.config().num_kv_heads} * student_.config().head_dim;
  std::vector<std::pair<Eigen::MatrixXd, Eigen::MatrixXd>> of_weights(moments_.size());
  for (int i = 0; i < training_.num_layers(); ++i) {
    if (training_.is_protected(i)) continue;
    student_.replace_key_value(i, floats(training_.key_weight(i)),
                               floats(training_.value_weight(i)));
    auto& [keys, values] = of_weights[static_cast<std::size_t>(i)];
    keys = values = Eigen::MatrixXd::Zero(channels, hidden);
  }
  const auto scale = 1.0F / static_cast<float>(rows);
  double divergence = 0.0;
  for (int index = 0; index < options_.batch; ++index) {
    const std::vector<std::int32_t> tokens = window(index);
    const std::vector<float> teacher_rows = teacher_.forward_text(tokens);
    constexpr std::int64_t kRows = 64;  // of the teacher's logits at a time
    std::vector<float> logits;
    std::int64_t begin = 0;
    const auto distil = [&](std::int64_t row, float* scores) {
      if (row % kRows == 0) {
        begin = row;
        logits = teacher_.logits(teacher_rows, row, std::min(kRows, options_.window - row));
      }
      Eigen::Map<Eigen::ArrayXf> expected(logits.data() + (row - begin) * vocabulary, vocabulary);
      log_softmax(expected);
      Eigen::Map<Eigen::ArrayXf> own(scores, vocabulary);
      // KL(p || q) = sum p (log p - log q); its gradient with respect to q's logits is q - p.
      const double of_row =
          (expected.exp() * (expected - own.max(1e-38F).log())).cast<double>().sum();
      own = scale * (own - expected.exp());
      return of_row;
    };
    divergence += student_.gradients_of(
        tokens, distil, [&](int layer, std::int64_t n, const RowGradients& of_rows) {
          if (training_.is_protected(layer)) return;
          auto& own = of_weights[static_cast<std::size_t>(layer)];
          const ConstRows input(of_rows.input, n, hidden);
          constexpr std::int64_t kBlock = 16;  // channels a task: whatever threads there are
          student_.threads()->run((channels + kBlock - 1) / kBlock, [&](std::int64_t task, int) {
            const std::int64_t first = task * kBlock, count = std::min(kBlock, channels - first);
            const auto add = [&](const float* gradient, Eigen::MatrixXd& sum) {
              const RowMajor product =
                  ConstRows(gradient, n, channels).middleCols(first, count).transpose() * input;
              sum.middleRows(first, count) += product.cast<double>();
            };
            add(of_rows.pre_rope_key, own.first);
            add(of_rows.value, own.second);
          });
        });
  }
  step.step = training_.progress().step + 1;
  step.divergence = divergence / static_cast<double>(rows);
  step.objective = training_.objective(step.divergence);
  std::vector<Layer> gradients(moments_.size());
  for (int i = 0; i < training_.num_layers(); ++i) {
    if (training_.is_protected(i)) continue;
    const auto& [keys, values] = of_weights[static_cast<std::size_t>(i)];
    gradients[static_cast<std::size_t>(i)] = training_.gradient(i, keys, values);
  }
  return gradients;
}

train::StarKvLayer StarKvTrainer::change(int layer, const Layer& gradient, double scale,
                                         Moments& moments) const {
  constexpr double kFirst = 0.9, kSecond = 0.999, kEpsilon = 1e-8;
  const auto step = static_cast<double>(training_.progress().step + 1);
  const double total =
      static_cast<double>(options_.star.compress_steps + options_.star.recover_steps);
  const double warm =
      options_.warmup > 0 ? std::min(1.0, step / static_cast<double>(options_.warmup)) : 1.0;
  const double falling = options_.last_rate + (1.0 - options_.last_rate) * 0.5 *
                                                  (1.0 + std::cos(std::numbers::pi * step / total));
  const double first_part = 1.0 - std::pow(kFirst, step),
               second_part = 1.0 - std::pow(kSecond, step);
  Layer result = training_.layer(layer);  // its numbers, then their change
  std::size_t at = 0;
  for_each_number(result, gradient, [&](double& number, double slope, bool threshold) {
    double &first = moments.first[at], &second = moments.second[at];
    ++at;
    const double own = scale * slope;
    first = kFirst * first + (1.0 - kFirst) * own;
    second = kSecond * second + (1.0 - kSecond) * own * own;
    const double direction = (first / first_part) / (std::sqrt(second / second_part) + kEpsilon);
    number = threshold
                 ? -warm * options_.threshold_rate * direction
                 : -warm * falling * options_.rate * (direction + options_.weight_decay * number);
  });
  return result;
}

TrainStep StarKvTrainer::step() {
  if (finished())
    lowrankkv::detail::fail<lowrankkv::StateError>("train: finished after ",
                                                   training_.progress().step, " steps");
  TrainStep step;
  const std::vector<Layer> all = gradients(step);
  double squares = 0.0;
  for (const Layer& layer : all)
    for_each_number(layer, layer, [&](double number, double, bool) { squares += number * number; });
  step.gradient_norm = std::sqrt(squares);
  const double scale = options_.clip > 0.0 && step.gradient_norm > options_.clip
                           ? options_.clip / step.gradient_norm
                           : 1.0;
  train::StarKvTraining training = training_;
  std::vector<Moments> moments = moments_;
  for (int i = 0; i < training.num_layers(); ++i) {
    if (training.is_protected(i)) continue;
    const auto layer = static_cast<std::size_t>(i);
    training.move(i, change(i, all[layer], scale, moments[layer]));
  }
  training.finish_step();
  training_ = std::move(training);
  moments_ = std::move(moments);
  step.kept_keys = training_.kept_keys();
  step.kept_values = training_.kept_values();
  return step;
}

std::map<std::string, std::string> StarKvTrainer::job() const {
  const auto text = [](auto value) { return lowrankkv::detail::text(value); };
  return {{"train.model", text(teacher_.fingerprint())},
          {"train.text", text(tokens_.size()) + " tokens, " +
                             text(lowrankkv::checksum(std::as_bytes(std::span(tokens_))))},
          {"train.window", text(options_.window)},
          {"train.batch", text(options_.batch)},
          {"train.rate", text(options_.rate)},
          {"train.threshold_rate", text(options_.threshold_rate)},
          {"train.weight_decay", text(options_.weight_decay)},
          {"train.warmup", text(options_.warmup)},
          {"train.last_rate", text(options_.last_rate)},
          {"train.clip", text(options_.clip)},
          {"train.seed", text(options_.seed)}};
}

lowrankkv::io::SafetensorsWriter StarKvTrainer::written() const {
  lowrankkv::io::SafetensorsWriter writer = train::write_star_kv(training_, job_);
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    if (moments_[i].first.empty()) continue;
    const auto count = static_cast<std::int64_t>(moments_[i].first.size());
    writer.add("optimiser.first." + std::to_string(i), {count}, moments_[i].first);
    writer.add("optimiser.second." + std::to_string(i), {count}, moments_[i].second);
  }
  return writer;
}

void StarKvTrainer::restore(const lowrankkv::io::Safetensors& file) {
  using lowrankkv::detail::fail;
  const auto& entries = file.metadata();
  for (const auto& [name, value] : job_) {
    const auto entry = entries.find(name);
    const std::string found = entry == entries.end() ? "nothing" : entry->second;
    if (found != value)
      fail<lowrankkv::ValueError>("train: ", name, ": the file has ",
                                  lowrankkv::detail::printable(found), ", this run ", value);
  }
  train::StarKvTraining training =
      train::read_star_kv(file, training_.shape(), training_.num_layers());
  if (training.options() != options_.star)
    fail<lowrankkv::ValueError>(
        "train: the file's options of STAR-KV are others: gamma ", training.options().gamma,
        ", shares ", training.options().key_share, " and ", training.options().value_share,
        ", steps ", training.options().compress_steps, " and ", training.options().recover_steps,
        "; this run's gamma ", options_.star.gamma, ", shares ", options_.star.key_share, " and ",
        options_.star.value_share, ", steps ", options_.star.compress_steps, " and ",
        options_.star.recover_steps);
  std::vector<Moments> moments(moments_.size());
  for (std::size_t i = 0; i < moments.size(); ++i) {
    if (moments_[i].first.empty()) continue;
    const auto count = static_cast<std::int64_t>(moments_[i].first.size());
    moments[i].first = file.values<double>("optimiser.first." + std::to_string(i), {count});
    moments[i].second = file.values<double>("optimiser.second." + std::to_string(i), {count});
  }
  training_ = std::move(training);
  moments_ = std::move(moments);
}

std::vector<lowrankkv::LayerBasis> use_trained_weights(const std::string& path, Model& model) {
  const Config& config = model.config();
  const lowrankkv::CacheShape shape = config.cache_shape();
  const auto file = lowrankkv::io::Safetensors::read(path);
  const train::StarKvTraining training = train::read_star_kv(file, shape, config.num_layers);
  const auto of = file.metadata().find("train.model");
  const std::string own = lowrankkv::detail::text(model.fingerprint());
  if (of != file.metadata().end() && of->second != own)
    lowrankkv::detail::fail<lowrankkv::ValueError>("train.model: the file has ",
                                                   lowrankkv::detail::printable(of->second),
                                                   ", this model ", own);
  const auto all_channels = [&](int blocks) {
    const int channels = shape.head_dim * shape.num_kv_heads / blocks;
    const Eigen::MatrixXd identity = Eigen::MatrixXd::Identity(channels, channels);
    return std::vector<train::FactorisedWeight>(static_cast<std::size_t>(blocks),
                                                {identity, Eigen::MatrixXd::Zero(channels, 1)});
  };
  std::vector<lowrankkv::LayerBasis> bases;
  std::vector<std::pair<std::vector<float>, std::vector<float>>> weights;
  for (int i = 0; i < config.num_layers; ++i) {
    std::vector<train::FactorisedWeight> keys = all_channels(shape.num_kv_heads),
                                         values = all_channels(1);
    auto& [key, value] = weights.emplace_back();
    if (!training.is_protected(i)) {
      keys = train::truncated(training.layer(i).keys);
      values = train::truncated(training.layer(i).values);
      key = floats(train::truncated_weight(keys));
      value = floats(train::truncated_weight(values));
    }
    bases.push_back(train::star_kv_basis(keys, values, shape, model.layer(i).key.bias,
                                         model.layer(i).value.bias));
  }
  for (int i = 0; i < config.num_layers; ++i) {
    auto& [key, value] = weights[static_cast<std::size_t>(i)];
    if (!key.empty()) model.replace_key_value(i, std::move(key), std::move(value));
  }
  return bases;
}

}  // namespace llama
