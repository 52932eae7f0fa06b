// SPDX-License-Identifier: Apache-2.0
/// @file train/star_kv_state.hpp  The state of STAR-KV's training as one safetensors file; what is
/// read has the bits of what was saved.
///
/// Metadata: `format` = `lowrankkv.star_kv`, `version` = `1`, `num_layers`, `num_kv_heads`,
/// `head_dim`, `keys` and `values` (`head_wise` or `joint`), `protected_layers` (for example
/// `0 1 31`), `compress_steps`, `recover_steps`, `freeze_thresholds`, `phase` (`compress`,
/// `recover` or `finished`), `step`, `phase_steps`, `keys_stopped`, `values_stopped`; and entries
/// that the writer adds. Numbers are decimal, truths `0` or `1`.
///
/// Tensors, f64: `options` [5] (sharpness, first_alpha, gamma, key_share, value_share), and of each
/// layer i that is trained, for x in {keys, values}, B blocks of C channels and p singular values:
///
///     layers.i.x.left   [B, C, p]
///     layers.i.x.sigma  [B, p]
///     layers.i.x.right  [B, hidden, p]
///     layers.i.x.alpha  [B]
///
/// The state of the optimiser, and what else of the model is trained, is the caller's to save.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "lowrankkv/train/star_kv_training.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace detail {

/// Names of the phases in a file, in the order of StarKvPhase.
inline constexpr const char* kStarKvPhases[] = {"compress", "recover", "finished"};

/// Writes and reads the blocks of one projection, row-major.
template <class Real = double>
struct StarKvTensors {
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

  static void write(io::SafetensorsWriter& writer, const std::string& prefix,
                    const train::StarKvProjection& projection) {
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape, auto&& part) {
      std::vector<double> values;
      for (const train::StarKvFactors& block : projection.blocks) {
        const RowMajor rows = part(block);
        values.insert(values.end(), rows.data(), rows.data() + rows.size());
      }
      shape.insert(shape.begin(), static_cast<std::int64_t>(projection.blocks.size()));
      writer.add(prefix + name, shape, values);
    };
    const train::StarKvFactors& first = projection.blocks.front();
    using Factors = train::StarKvFactors;
    add("left", {first.left.rows(), first.left.cols()}, [](const Factors& f) { return f.left; });
    add("sigma", {first.sigma.size()}, [](const Factors& f) { return f.sigma; });
    add("right", {first.right.rows(), first.right.cols()},
        [](const Factors& f) { return f.right; });
    add("alpha", {}, [](const Factors& f) { return RowMajor::Constant(1, 1, f.alpha); });
  }

  static train::StarKvProjection read(const io::Safetensors& file, const std::string& prefix,
                                      std::int64_t blocks, std::int64_t channels) {
    const std::vector<std::int64_t>&left_shape = file.info(prefix + "left").shape,
          &right_shape = file.info(prefix + "right").shape;
    const std::int64_t rank = left_shape.size() == 3 ? left_shape[2] : -1,
                       hidden = right_shape.size() == 3 ? right_shape[1] : -1;
    const std::vector<double> left = file.values<double>(prefix + "left", {blocks, channels, rank}),
                              sigma = file.values<double>(prefix + "sigma", {blocks, rank}),
                              right = file.values<double>(prefix + "right", {blocks, hidden, rank}),
                              alpha = file.values<double>(prefix + "alpha", {blocks});
    train::StarKvProjection projection;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const auto part = [&](const std::vector<double>& values, std::int64_t rows,
                            std::int64_t cols) {
        return Eigen::MatrixX<Real>(
            Eigen::Map<const RowMajor>(values.data() + i * rows * cols, rows, cols));
      };
      projection.blocks.push_back({part(left, channels, rank), part(sigma, rank, 1),
                                   part(right, hidden, rank), alpha[static_cast<std::size_t>(i)]});
    }
    return projection;
  }
};

/// The metadata of a file, entry by entry; errors name the entry and its value.
class StarKvEntries {
 public:
  explicit StarKvEntries(const io::Safetensors& file) : entries_(file.metadata()) {}

  std::string text(const std::string& key) const {
    const auto entry = entries_.find(key);
    return entry == entries_.end() ? std::string("missing") : entry->second;
  }
  std::int64_t integer(const std::string& key) const { return integer_of(key, text(key)); }
  bool truth(const std::string& key) const { return choice(key, {"0", "1"}) == 1; }
  /// The index of an entry among the texts that it may be.
  std::size_t choice(const std::string& key, const std::vector<std::string>& expected) const {
    const std::string value = text(key);
    std::string all;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      if (value == expected[i]) return i;
      all += (i ? " or " : "") + expected[i];
    }
    fail<FormatError>("STAR-KV state: ", key, " ", printable(value), ", expected ", all);
  }
  std::vector<int> integers(const std::string& key) const {
    std::vector<int> values;
    const std::string all = text(key);
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t end = (std::min)(all.find(' ', at), all.size());
      const std::int64_t value = integer_of(key, all.substr(at, end - at));
      if (value < 0 || value > 1 << 30)
        fail<FormatError>("STAR-KV state: ", key, " ", value, ", expected 0 to ", 1 << 30);
      values.push_back(static_cast<int>(value));
      at = end + 1;
    }
    return values;
  }

 private:
  static std::int64_t integer_of(const std::string& key, const std::string& text) {
    std::int64_t value = 0;
    const char* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end)
      fail<FormatError>("STAR-KV state: ", key, " ", printable(text), ", expected an integer");
    return value;
  }

  const std::map<std::string, std::string>& entries_;
};

}  // namespace detail
namespace train {

/// @brief The state as a file that is not written yet. @param metadata  entries of the writer's
/// own, under keys that the file comment does not name
template <class Real = double>
io::SafetensorsWriter write_star_kv(const StarKvTraining& training,
                                    const std::map<std::string, std::string>& metadata = {}) {
  const StarKvOptions& options = training.options();
  const StarKvProgress& progress = training.progress();
  io::SafetensorsWriter writer;
  for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
  const auto entry = [&](const char* key, auto value) {
    writer.set_metadata(key, ::lowrankkv::detail::text(value));
  };
  entry("format", "lowrankkv.star_kv");
  entry("version", 1);
  entry("num_layers", training.num_layers());
  entry("num_kv_heads", training.shape().num_kv_heads);
  entry("head_dim", training.shape().head_dim);
  entry("keys", name_of(options.keys));
  entry("values", name_of(options.values));
  std::string protected_layers;
  for (const int layer : options.protected_layers)
    protected_layers += (protected_layers.empty() ? "" : " ") + std::to_string(layer);
  entry("protected_layers", protected_layers);
  entry("compress_steps", options.compress_steps);
  entry("recover_steps", options.recover_steps);
  entry("freeze_thresholds", options.freeze_thresholds);
  entry("phase", ::lowrankkv::detail::kStarKvPhases[static_cast<int>(progress.phase)]);
  entry("step", progress.step);
  entry("phase_steps", progress.phase_steps);
  entry("keys_stopped", progress.keys_stopped);
  entry("values_stopped", progress.values_stopped);
  writer.add("options", {5},
             std::vector<double>{options.sharpness, options.first_alpha, options.gamma,
                                 options.key_share, options.value_share});
  for (int i = 0; i < training.num_layers(); ++i) {
    if (training.is_protected(i)) continue;
    const std::string prefix = "layers." + std::to_string(i) + ".";
    using Tensors = ::lowrankkv::detail::StarKvTensors<Real>;
    Tensors::write(writer, prefix + "keys.", training.layer(i).keys);
    Tensors::write(writer, prefix + "values.", training.layer(i).values);
  }
  return writer;
}

/// @brief Training as it was when the file was written, for a model of `num_layers` layers of
/// `shape`: the same factors, thresholds, phase and step, to the last bit.
/// @throws FormatError if the file is damaged or of another kind, ShapeError if it belongs to
/// another model or its tensors do not fit each other, ValueError if its options or progress cannot
/// be
template <class Real = double>
StarKvTraining read_star_kv(const io::Safetensors& file, const CacheShape& shape, int num_layers) {
  const ::lowrankkv::detail::StarKvEntries entries(file);
  entries.choice("format", {"lowrankkv.star_kv"});
  entries.choice("version", {"1"});
  const auto same = [&](const char* key, int model) {
    if (entries.integer(key) != model)
      ::lowrankkv::detail::fail<ShapeError>(key, ": state ", entries.integer(key), ", model ",
                                            model);
  };
  same("num_layers", num_layers);
  same("num_kv_heads", shape.num_kv_heads);
  same("head_dim", shape.head_dim);
  const std::vector<std::string> decompositions{name_of(Decomposition::head_wise),
                                                name_of(Decomposition::joint)};
  const std::vector<double> numbers = file.values<double>("options", {5});
  StarKvOptions options;
  options.keys = static_cast<Decomposition>(entries.choice("keys", decompositions));
  options.values = static_cast<Decomposition>(entries.choice("values", decompositions));
  options.sharpness = numbers[0];
  options.first_alpha = numbers[1];
  options.gamma = numbers[2];
  options.key_share = numbers[3];
  options.value_share = numbers[4];
  options.compress_steps = entries.integer("compress_steps");
  options.recover_steps = entries.integer("recover_steps");
  options.freeze_thresholds = entries.truth("freeze_thresholds");
  options.protected_layers = entries.integers("protected_layers");
  StarKvProgress progress;
  const auto& phases = ::lowrankkv::detail::kStarKvPhases;
  progress.phase =
      static_cast<StarKvPhase>(entries.choice("phase", {std::begin(phases), std::end(phases)}));
  progress.step = entries.integer("step");
  progress.phase_steps = entries.integer("phase_steps");
  progress.keys_stopped = entries.truth("keys_stopped");
  progress.values_stopped = entries.truth("values_stopped");
  ::lowrankkv::detail::check_star_kv_options(options, num_layers);
  const std::set<int> kept(options.protected_layers.begin(), options.protected_layers.end());
  std::vector<StarKvLayer> layers(static_cast<std::size_t>(num_layers));
  for (int i = 0; i < num_layers; ++i) {
    if (kept.contains(i)) continue;
    const auto read = [&](const char* part, Decomposition decomposition) {
      const bool joint = decomposition == Decomposition::joint;
      return ::lowrankkv::detail::StarKvTensors<Real>::read(
          file, "layers." + std::to_string(i) + "." + part + ".", joint ? 1 : shape.num_kv_heads,
          std::int64_t{shape.head_dim} * (joint ? shape.num_kv_heads : 1));
    };
    layers[static_cast<std::size_t>(i)] = {read("keys", options.keys),
                                           read("values", options.values)};
  }
  return StarKvTraining(options, shape, std::move(layers), progress);
}

/// @brief Writes the state to a file. @param metadata  as write_star_kv()
/// @throws FormatError if the file cannot be written
template <class = void>
void save_star_kv(const std::string& path, const StarKvTraining& training,
                  const std::map<std::string, std::string>& metadata = {}) {
  write_star_kv(training, metadata).write(path);
}

/// @brief Reads the state from a file. @throws as read_star_kv(); FormatError if the file cannot be
/// read
template <class Real = double>
StarKvTraining load_star_kv(const std::string& path, const CacheShape& shape, int num_layers) {
  return read_star_kv<Real>(io::Safetensors::read(path), shape, num_layers);
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
