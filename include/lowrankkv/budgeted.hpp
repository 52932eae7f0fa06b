// SPDX-License-Identifier: Apache-2.0
/// @file budgeted.hpp  Builds the bases, bits, quantizer steps and policies of the Budgeted preset
/// for a byte budget.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/allocate_bits.hpp"
#include "lowrankkv/calibrate/allocate_units.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/core/device_tiles.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/presets.hpp"
#include "lowrankkv/quantizer/code_layout.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The byte budget of a sequence, and how it is spent.
struct BudgetOptions {
  /// Measured bytes of a sequence of `context` tokens over the bytes of f16 K and V.
  double ratio = 0.1;
  /// Length in tokens at which the budget is met. Longer sequences have a smaller ratio.
  std::int64_t context = 4096;
  /// First tokens, at full rank. In some texts one of the first 16 matters to all later tokens,
  /// and its code is not enough: Qwen2.5 loses the whole text then.
  int sinks = 16;
  int recent = 8;              ///< last tokens, at full rank, beside those that wait for a flush
  double outlier_share = 0.0;  ///< tokens with the largest error in the metric, at full rank
  /// So many of the first kEarlyTokens tokens at full rank, those with the largest error; of
  /// shorter sequences in proportion. Beside outlier_share, it must be 0.
  int early_outliers = 8;
  static constexpr int kEarlyTokens = 128;
  /// Bits that a channel may have besides 0. 8 is needed.
  std::vector<int> widths{1, 2, 3, 4, 5, 6, 8};
  /// On the Cuda backend: what a unit of codes counts besides its bits (UnitAllocation). Attention
  /// takes time for each unit, whatever its bits: a larger number makes units fewer, and errors
  /// larger. Negative: a quarter of head_dim with post-RoPE keys, 16 with pre-RoPE keys, whose
  /// up-projection takes most of the time, and that of four units of keys at a time.
  double unit_bits = -1.0;
  /// On the Cuda backend: the most units of a head's keys, or of its values, 1 to kMaxCodeUnits.
  /// Fewer where the caches' KernelSet has fewer.
  int max_code_units = kMaxCodeUnits;
  float step_scale = 1.0F;       ///< TransformCode::step_scale
  double metric_floor = 1e-3;    ///< smallest eigenvalue of a metric, relative to its mean
  DType full_type = DType::f16;  ///< of rows at full rank: CacheConfig::full_type
  /// CacheConfig::full_row_bits of all layers: 8, or 0 (full_type). kChooseBits: 0 in layers where
  /// 8 bits lose more than kMostLost of the variance of some head's keys or values in their metric,
  /// those that lose most first, as long as that takes no more than kMostForBits of the budget; 8
  /// in the others. A large constant (Qwen2's biases) makes the steps of 8 bits large.
  int full_row_bits = kChooseBits;
  static constexpr int kChooseBits = -1;
  static constexpr double kMostLost = 0.01, kMostForBits = 0.04;
  /// Page size of the pool in bytes. 0: on the CPU the multiple of 256, from 512 to 8192 (of wide
  /// rows, to two rows), at which the rows of this budget take the fewest bytes of pages. On the
  /// Cuda backend the one, from a tile of full rows on, at which the codes that fit lose least.
  /// Small pages leave little unused at the end of a list, large ones little beside their last row.
  std::size_t page_bytes = 0;
  /// Sample rows of a head's part at which codes are fitted to them; with fewer, to a Gaussian.
  static constexpr std::int64_t kFewestRows = 128;
  /// Bytes are those of the Cuda backend, with its tiles and pages. Else those of the CPU backend.
  bool on_device = false;
  /// Whether keys are stored before RoPE: on the Cuda backend tiles of full rows are larger then.
  /// budgeted() takes it from the moments.
  bool pre_rope = false;

  /// @brief Counts bytes as the Cuda backend has them, and gives codes bits that fill its units
  /// (UnitAllocation).
  BudgetOptions& for_cuda() {
    on_device = true;
    return *this;
  }
};

/// @brief Everything that a Budgeted cache of each layer is constructed from.
struct BudgetedModel {
  std::vector<LayerBasis> bases;  ///< one per layer
  /// Policies of Budgeted<Backend>, for either backend.
  Policies<PerHead, Static, Compose<SinkRecent, ResidualOutliers>, TransformCode> policies;
  BudgetOptions options;           ///< the options that it was made for
  CacheShape shape;                ///< of every layer
  std::vector<int> full_row_bits;  ///< CacheConfig::full_row_bits of every layer

  /// @brief The configurations of the layers, for LayerStack: `config` with the fields that the
  /// byte budget assumes, which are how full rows are stored, the page size, and f32 epochs. A
  /// model whose options are not for_cuda() needs page_bytes 0 in them on a GPU, where tiles have
  /// sizes of their own.
  ///
  /// The budget is met by a prompt of options.context tokens. ratio_at() says what other sequences
  /// take of such caches.
  std::vector<CacheConfig> configs(CacheConfig config) const {
    config.full_type = options.full_type;
    config.page_bytes = options.page_bytes;
    // All sequences share this epoch, and metrics with a wide spectrum need the precision.
    config.epoch_type = DType::f32;
    std::vector<CacheConfig> layers(full_row_bits.size(), config);
    for (std::size_t layer = 0; layer < layers.size(); ++layer)
      layers[layer].full_row_bits = full_row_bits[layer];
    return layers;
  }

  /// @brief Bytes of a sequence of all layers, as MemoryUsage::total() counts them.
  /// @param tokens   length of the sequence, at least 0
  /// @param waiting  tokens decoded since the last flush: they are at full rank. Up to
  /// CacheConfig::flush_interval between two calls of maintain()
  ///
  /// On the CPU exact but for the positions of rows that their errors keep at full rank: 16 bytes
  /// each and KV head at most, fewer where such tokens are neighbours; and but for a share of them
  /// (outlier_share) that a flush rounds down. On the Cuda backend exact but for the latter, of
  /// options that are for_cuda().
  std::int64_t bytes_at(std::int64_t tokens, std::int64_t waiting = 0) const;

  /// @brief bytes_at() over the bytes of f16 K and V of as many tokens. More than options.ratio
  /// where the sequence is shorter than options.context or tokens wait for a flush: there are then
  /// more rows at full rank for each token. 0 for 0 tokens.
  double ratio_at(std::int64_t tokens, std::int64_t waiting = 0) const {
    if (tokens <= 0) return 0.0;
    return static_cast<double>(bytes_at(tokens, waiting)) /
           (4.0 * shape.head_dim * shape.num_kv_heads * static_cast<double>(bases.size()) *
            static_cast<double>(tokens));
  }
};

namespace detail {

/// The principal axes of one head's keys or values in their metric.
struct CodedPart {
  MetricRoot metric;
  Spectrum spectrum;  ///< of the rows in the metric; values per row
  /// Mean eigenvalue of the metric: what one unit of the spectrum costs the output.
  double unit = 0.0;
  Eigen::VectorXd mean;
  /// Expected error of a row in 8 bits, over the variance of rows, both in the metric. Steps are of
  /// the row's largest channel: mean and two standard deviations are assumed.
  double lost_in_8_bits = 0.0;
};

/// Computes the principal axes of one head's keys or values in their metric.
/// @param scale  divisor that makes metrics of different heads and layers comparable: the number of
/// queries that the metric sums over, times |h|^2
template <class Real = double>
CodedPart coded_part(const Moments& rows, const linalg::MatrixIn<Real>& metric, double scale,
                     double floor) {
  CodedPart part;
  part.unit = metric.trace() / static_cast<double>(metric.rows()) / scale;
  // A head that no query reads has no metric. Its rows may get 0 bits.
  part.metric = part.unit > 0.0
                    ? metric_root(metric, floor)
                    : MetricRoot{Eigen::MatrixX<Real>::Identity(metric.rows(), metric.cols()),
                                 Eigen::MatrixX<Real>::Identity(metric.rows(), metric.cols())};
  const Eigen::MatrixX<Real> root = part.metric.root, centred = rows.centred();
  part.spectrum = principal_axes(root * centred * root / (std::max)(rows.count, 1.0));
  part.mean = rows.mean();
  const Eigen::VectorX<Real> deviations =
      (centred.diagonal() / (std::max)(rows.count, 1.0)).cwiseMax(0.0).cwiseSqrt();
  const double largest = (part.mean.cwiseAbs() + 2.0 * deviations).maxCoeff(),
               step = largest / 127.5, variance = part.spectrum.values.sum();
  if (part.unit > 0.0 && variance > 0.0)
    part.lost_in_8_bits = step * step / 12.0 * root.squaredNorm() / variance;
  return part;
}

/// What each width costs the channels of a part, measured on sample rows in its principal axes.
struct WidthErrors {
  /// [channels, widths + 1]: mean squared error without bits, then at each width, in the metric.
  Eigen::MatrixXd errors;
  /// [channels, widths + 1]: the step with the smallest error, relative to gaussian_step(width).
  Eigen::MatrixXf steps;
};

/// Coefficients of sample rows [n, head_dim] in a part's principal axes, [n, channels].
template <class Real = double>
Eigen::MatrixXf sample_coefficients(const CodedPart& part, const RowSample& rows) {
  using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const Rows> sample(rows.values().data(), rows.size(), part.mean.size());
  const Eigen::MatrixX<Real> root = part.metric.root, axes = root * part.spectrum.vectors;
  const Eigen::RowVectorX<Real> centre = part.mean.transpose() * axes;
  Eigen::MatrixXf coefficients = (sample.template cast<Real>() * axes).template cast<float>();
  coefficients.rowwise() -= centre.template cast<float>();
  return coefficients;
}

/// Measures the errors of uniform mid-rise levels on coefficients. Each row is coded with its gain,
/// as TransformCode has it, of the channels that have bits now. Rows count relative to their gains:
/// in absolute units a few large rows would decide, and what fits them does not fit others.
/// @param rms   the steps' unit: root of the spectrum
/// @param bits  of every channel, from an earlier allocation
/// @param own_steps  of every channel at those bits, relative to gaussian_step()
template <class Real = double>
WidthErrors measure_widths(const Eigen::MatrixXf& coefficients, const Eigen::VectorXf& rms,
                           std::span<const std::uint8_t> bits, std::span<const float> own_steps,
                           std::span<const int> widths) {
  constexpr float scales[] = {0.6F, 0.75F, 0.9F, 1.0F, 1.15F, 1.3F, 1.5F, 1.8F, 2.2F, 2.8F};
  const Eigen::Index channels = coefficients.cols();
  const Eigen::Index columns = static_cast<Eigen::Index>(widths.size()) + 1;
  WidthErrors result{Eigen::MatrixX<Real>(channels, columns),
                     Eigen::MatrixXf::Ones(channels, columns)};
  Eigen::ArrayXf gains = Eigen::ArrayXf::Zero(coefficients.rows());
  float coded = 0.0F;
  for (Eigen::Index channel = 0; channel < channels; ++channel) {
    if (bits[static_cast<std::size_t>(channel)] == 0) continue;
    const float unit = rms[channel] * own_steps[static_cast<std::size_t>(channel)];
    gains += (coefficients.col(channel).array() / unit).square();
    coded += 1.0F;
  }
  if (coded > 0.0F) {
    const Eigen::ArrayXf norms = (gains / coded).sqrt().max(1e-3F);
    Eigen::ArrayXf least =
        Eigen::ArrayXf::Constant(norms.size(), std::numeric_limits<float>::infinity());
    gains = norms;
    for (int i = 0; i < kTriedGains; ++i) {
      const Eigen::ArrayXf tried = norms * std::exp2(static_cast<float>(gain_offset(i)) / 16.0F);
      Eigen::ArrayXf errors = Eigen::ArrayXf::Zero(tried.size());
      for (Eigen::Index channel = 0; channel < channels; ++channel) {
        const int width = bits[static_cast<std::size_t>(channel)];
        if (width == 0) continue;
        const float top = std::ldexp(1.0F, width - 1) - 0.5F;
        const float step =
            rms[channel] * own_steps[static_cast<std::size_t>(channel)] * gaussian_step(width);
        const Eigen::ArrayXf own = coefficients.col(channel).array() / step;
        errors += (((own / tried).floor() + 0.5F).max(-top).min(top) * tried - own).square();
      }
      gains = (errors < least).select(tried, gains);
      least = least.min(errors);
    }
  } else {
    gains.setOnes();
  }
  for (Eigen::Index channel = 0; channel < channels; ++channel) {
    const Eigen::ArrayXf own = coefficients.col(channel).array() / (gains * rms[channel]);
    const double variance = std::pow(static_cast<double>(rms[channel]), 2);
    const double energy = (std::max)(static_cast<double>(own.square().mean()), 1e-30);
    result.errors(channel, 0) = variance;
    for (Eigen::Index column = 1; column < columns; ++column) {
      const int width = widths[static_cast<std::size_t>(column) - 1];
      const float top = std::ldexp(1.0F, width - 1) - 0.5F;
      double best = std::numeric_limits<double>::infinity();
      for (const float scale : scales) {
        const float step = gaussian_step(width) * scale;
        const double error = static_cast<double>(
            (((own / step).floor() + 0.5F).max(-top).min(top) * step - own).square().mean());
        if (error >= best) continue;
        best = error;
        result.steps(channel, column) = scale;
      }
      result.errors(channel, column) = variance * best / energy;
    }
  }
  return result;
}

/// The steps of every channel at its bits. A row's gain is relative to them, so that only their
/// ratios count: the mean of their inverse squares, over channels with bits, is made 1.
/// @param steps  WidthErrors::steps
template <class Real = double>
std::vector<float> steps_at(const Eigen::MatrixXf& steps, std::span<const std::uint8_t> bits,
                            std::span<const int> widths) {
  std::vector<float> own;
  Real inverse_squares = 0.0, coded = 0.0;
  for (std::size_t channel = 0; channel < bits.size(); ++channel) {
    const auto width = std::find(widths.begin(), widths.end(), static_cast<int>(bits[channel]));
    const Eigen::Index column = bits[channel] == 0 ? 0 : 1 + (width - widths.begin());
    own.push_back(steps(static_cast<Eigen::Index>(channel), column));
    if (bits[channel] == 0) continue;
    inverse_squares += 1.0 / (static_cast<double>(own.back()) * static_cast<double>(own.back()));
    coded += 1.0;
  }
  if (coded > 0.0) {
    for (float& step : own) step *= static_cast<float>(std::sqrt(inverse_squares / coded));
  }
  return own;
}

/// The root mean square of every channel of a part; never 0.
template <class Real = double>
Eigen::VectorXf channel_rms(const CodedPart& part) {
  const Eigen::VectorX<Real>& values = part.spectrum.values;
  const double least = 1e-12 * (values[0] > 0.0 ? values[0] : 1.0);
  return values.cwiseMax(least).cwiseSqrt().template cast<float>().cwiseMax(1e-20F);
}

/// The maps of one part for its bits: [down, up, metric, inverse, mean, rms]. Channels without bits
/// are left out, but at least one channel is kept.
struct CodedMaps {
  int rank = 1;
  std::vector<std::uint8_t> bits;
  std::vector<float> down, up, metric, inverse, mean, rms;
};

/// Number of channels kept: the channels that have bits, and at least one.
inline int coded_channels(const std::vector<std::uint8_t>& bits) {
  return static_cast<int>((std::max)(
      std::ptrdiff_t{1},
      std::count_if(bits.begin(), bits.end(), [](std::uint8_t width) { return width > 0; })));
}

/// @param steps  of every channel, relative to the step that the quantizer gives a Gaussian
template <class Real = double>
CodedMaps coded_maps(const CodedPart& part, const std::vector<std::uint8_t>& bits,
                     const std::vector<float>& steps) {
  CodedMaps maps;
  maps.rank = coded_channels(bits);
  // The quantizer's layout wants bits that do not increase.
  std::vector<std::size_t> order(bits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return bits[a] > bits[b]; });
  const Eigen::MatrixX<Real>& vectors = part.spectrum.vectors;
  const Eigen::VectorXf rms = channel_rms(part);
  Eigen::MatrixX<Real> axes(vectors.rows(), maps.rank);
  for (int channel = 0; channel < maps.rank; ++channel) {
    const std::size_t from = order[static_cast<std::size_t>(channel)];
    axes.col(channel) = vectors.col(static_cast<Eigen::Index>(from));
    maps.bits.push_back(bits[from]);
    maps.rms.push_back(rms[static_cast<Eigen::Index>(from)] * steps[from]);
  }
  const Eigen::MatrixX<Real>&root = part.metric.root, &inverse = part.metric.inverse;
  maps.down = linalg::to_row_major(root * axes);
  maps.up = linalg::to_row_major(inverse * axes);
  maps.metric = linalg::to_row_major(part.metric.root);
  maps.inverse = linalg::to_row_major(part.metric.inverse);
  maps.mean = linalg::to_row_major(part.mean);
  return maps;
}

/// The rows that stay at full rank for their errors. @throws ValueError
inline ResidualOutliers budgeted_outliers(const BudgetOptions& options) {
  if (options.early_outliers < 0 || options.early_outliers > BudgetOptions::kEarlyTokens)
    ::lowrankkv::detail::fail<ValueError>("budget: early_outliers is in [0, ",
                                          BudgetOptions::kEarlyTokens, "], given ",
                                          options.early_outliers);
  if (options.early_outliers > 0 && options.outlier_share > 0.0)
    ::lowrankkv::detail::fail<ValueError>("budget: outlier_share ", options.outlier_share,
                                          " beside early_outliers ", options.early_outliers,
                                          "; one of them must be 0");
  if (options.early_outliers == 0)
    return {OutlierError::absolute, static_cast<float>(options.outlier_share)};
  const float share =
      static_cast<float>(options.early_outliers) / static_cast<float>(BudgetOptions::kEarlyTokens);
  return {OutlierError::absolute, share, 0.0F, BudgetOptions::kEarlyTokens};
}

/// Whether a list of full rows has at most kFewFullRows rows however long the sequence becomes:
/// with room for 64 rows more than twice as many as errors and sinks choose.
inline bool few_full_rows(const BudgetOptions& options) {
  return options.outlier_share == 0.0 &&
         2 * (options.sinks + options.early_outliers) + 64 <= kFewFullRows;
}

/// Rows at full rank of a page. 0: a page has no room for a tile of them.
/// @param bits  CacheConfig::full_row_bits of the layer
inline std::int64_t full_rows_per_page(const CacheShape& shape, const BudgetOptions& options,
                                       int bits) {
  if (options.on_device)
    return full_row_tile(shape.head_dim, bits, options.pre_rope, few_full_rows(options))
        .rows_per_page(options.page_bytes);
  const FullRows plain{options.full_type, bits};
  return cpu::make_row_layout(plain, shape.head_dim, shape.head_dim, {}, {}, options.page_bytes)
      .rows_per_page;
}
/// The same of rows of codes, of the channels that have bits.
inline std::int64_t coded_rows_per_page(std::span<const std::uint8_t> key,
                                        std::span<const std::uint8_t> value,
                                        const BudgetOptions& options) {
  if (options.on_device) return code_tile(key, value).rows_per_page(options.page_bytes);
  return cpu::make_row_layout(TransformCode{options.step_scale}, static_cast<int>(key.size()),
                              static_cast<int>(value.size()), key, value, options.page_bytes)
      .rows_per_page;
}

/// The tokens of a sequence of options.context tokens right after its prompt.
struct BudgetRows {
  std::int64_t recent = 0, sinks = 0, outliers = 0, compressed = 0;
};
inline BudgetRows budget_rows(const BudgetOptions& options) {
  BudgetRows rows;
  rows.recent = (std::min)(std::int64_t{options.recent}, options.context);
  rows.sinks = (std::min)(std::int64_t{options.sinks}, options.context - rows.recent);
  const std::int64_t tail = options.context - rows.recent;
  const ResidualOutliers chosen = budgeted_outliers(options);
  rows.outliers =
      (std::min)(outlier_rows(chosen, 0, tail),
                 (std::max)(std::int64_t{0}, outlier_candidates(chosen, 0, tail) - rows.sinks));
  rows.compressed = options.context - rows.recent - rows.sinks - rows.outliers;
  return rows;
}

/// Bytes of the pages of so many rows.
inline std::int64_t bytes_of_pages(std::int64_t rows, std::int64_t rows_per_page,
                                   const BudgetOptions& options) {
  return (rows + rows_per_page - 1) / rows_per_page * static_cast<std::int64_t>(options.page_bytes);
}

}  // namespace detail

/// @brief Bytes of a sequence of options.context tokens right after its prompt, as
/// MemoryUsage::total() counts them: pages of codes and of full rows with their slack, the recent
/// window, and positions.
/// @param bits           for each layer and head: the bits of its keys, then the bits of its values
/// @param full_row_bits  CacheConfig::full_row_bits of every layer
inline std::int64_t budgeted_bytes(const CacheShape& shape,
                                   std::span<const std::vector<std::uint8_t>> bits,
                                   const BudgetOptions& options,
                                   std::span<const int> full_row_bits) {
  const auto [recent, sinks, outliers, compressed] = detail::budget_rows(options);
  constexpr std::int64_t never = std::int64_t{1} << 60;
  const std::size_t parts_per_layer = 2 * static_cast<std::size_t>(shape.num_kv_heads);
  std::int64_t full_per_page = 0, bytes = 0;
  for (std::size_t part = 0; part + 1 < bits.size(); part += 2) {
    if (part % parts_per_layer == 0)
      full_per_page =
          detail::full_rows_per_page(shape, options, full_row_bits[part / parts_per_layer]);
    if (full_per_page == 0) return never;
    const auto coded = [](const std::vector<std::uint8_t>& all) {
      return std::span(all).first(static_cast<std::size_t>(detail::coded_channels(all)));
    };
    const auto key = coded(bits[part]), value = coded(bits[part + 1]);
    const std::int64_t codes_per_page = detail::coded_rows_per_page(key, value, options);
    if (codes_per_page == 0) return never;
    // One run of positions for sinks and one for compressed rows; two more for each outlier.
    const std::int64_t runs = (sinks > 0 ? 1 : 0) + (compressed > 0 ? 1 : 0) + 2 * outliers,
                       positions = options.on_device
                                       ? 4 * (sinks + outliers)
                                       : static_cast<std::int64_t>(RowRuns::kRunBytes) * runs;
    bytes += detail::bytes_of_pages(sinks + outliers, full_per_page, options) +
             detail::bytes_of_pages(compressed, codes_per_page, options) +
             recent * 2 * shape.head_dim * static_cast<std::int64_t>(size_of(options.full_type)) +
             positions;
  }
  return bytes;
}

namespace detail {

/// Bytes of the Cuda backend's largest tile of full rows.
inline std::int64_t largest_full_row_tile(const CacheShape& shape, const BudgetOptions& options,
                                          std::span<const int> full_row_bits) {
  std::int64_t largest = 0;
  for (const int bits : full_row_bits)
    largest = (std::max)(
        largest,
        full_row_tile(shape.head_dim, bits, options.pre_rope, few_full_rows(options)).bytes);
  return largest;
}

/// The page sizes that are tried. A page can hold at least one row of 8 bits a channel, and one at
/// full rank; on the Cuda backend a tile of full rows.
struct PageSizes {
  std::size_t least = 512, most = 8192;
  static constexpr std::size_t kStep = 256;
};
inline PageSizes page_sizes(const CacheShape& shape, const BudgetOptions& options,
                            std::span<const int> full_row_bits) {
  const std::size_t dim = static_cast<std::size_t>(shape.head_dim),
                    widest = options.on_device
                                 ? static_cast<std::size_t>(
                                       largest_full_row_tile(shape, options, full_row_bits))
                                 : 2 * dim * (std::max)(size_of(options.full_type), std::size_t{2});
  PageSizes sizes;
  while (sizes.least < widest) sizes.least += PageSizes::kStep;
  sizes.most = (std::max)(sizes.most, 2 * widest);
  if (options.on_device)  // room for a tile of 8 bits a channel
    sizes.most = (std::max)(sizes.most,
                            static_cast<std::size_t>(code_tile(16 * shape.head_dim).bytes) + 256);
  return sizes;
}

/// The page size at which rows of these bits take the fewest bytes; the larger of two that are
/// equal.
/// @param bits, full_row_bits  as budgeted_bytes() has them
inline std::size_t best_page_bytes(const CacheShape& shape,
                                   std::span<const std::vector<std::uint8_t>> bits,
                                   BudgetOptions options, std::span<const int> full_row_bits) {
  const PageSizes sizes = page_sizes(shape, options, full_row_bits);
  std::size_t best = 0;
  std::int64_t fewest = (std::numeric_limits<std::int64_t>::max)();
  for (std::size_t size = sizes.least; size <= sizes.most; size += PageSizes::kStep) {
    options.page_bytes = size;
    const std::int64_t bytes = budgeted_bytes(shape, bits, options, full_row_bits);
    if (bytes > fewest) continue;
    fewest = bytes;
    best = size;
  }
  return best;
}

/// The bits of the Cuda backend's codes that lose least in at most `limit` bytes, and the page size
/// at which they do: options.page_bytes, where it is 0 the best one.
/// @param no_bits, full_row_bits  as budgeted_bytes() has them
/// @return without bits, if no page size has room for any
template <class Real = double>
std::vector<std::vector<std::uint8_t>> allocate_on_device(
    const CacheShape& shape, std::span<const Eigen::MatrixX<Real>> errors,
    std::span<const std::vector<std::uint8_t>> no_bits, double limit, std::size_t page_bytes,
    BudgetOptions& options, std::span<const int> full_row_bits) {
  const UnitAllocation units(errors, options.widths, options.pre_rope ? 4 : 1,
                             options.max_code_units);
  const double unit_bits = options.unit_bits >= 0.0 ? options.unit_bits
                           : options.pre_rope       ? 16.0
                                                    : 0.25 * shape.head_dim;
  const std::int64_t rows = budget_rows(options).compressed;
  PageSizes sizes = page_sizes(shape, options, full_row_bits);
  if (page_bytes != 0) sizes = {page_bytes, page_bytes};
  AllocatedBits best{{no_bits.begin(), no_bits.end()}, std::numeric_limits<double>::infinity()};
  BudgetOptions at = options;
  for (at.page_bytes = sizes.least; at.page_bytes <= sizes.most;
       at.page_bytes += PageSizes::kStep) {
    const auto list_bytes = [&](std::int64_t row_bits) {
      const std::int64_t per_page = code_tile(row_bits).rows_per_page(at.page_bytes);
      return per_page == 0 ? UnitAllocation::infinity()
                           : static_cast<double>(bytes_of_pages(rows, per_page, at));
    };
    // Of full rows and positions.
    const double others = static_cast<double>(budgeted_bytes(shape, no_bits, at, full_row_bits)) -
                          static_cast<double>(errors.size() / 2) * list_bytes(0);
    AllocatedBits own =
        units.within(limit - others, list_bytes, unit_bits / 8.0 * static_cast<double>(rows));
    if (own.error >= best.error) continue;
    best = std::move(own);
    options.page_bytes = at.page_bytes;
  }
  return best.bits;
}

}  // namespace detail

/// @brief See the declaration: budgeted_bytes() of the bits that the bases have.
inline std::int64_t BudgetedModel::bytes_at(std::int64_t tokens, std::int64_t waiting) const {
  std::vector<std::vector<std::uint8_t>> bits;
  for (const LayerBasis& layer : bases) {
    for (const HeadBasis& head : layer.heads) {
      bits.push_back(head.key_bits);
      bits.push_back(head.value_bits);
    }
  }
  BudgetOptions at = options;
  at.context = (std::max)(std::int64_t{0}, tokens);
  at.recent += static_cast<int>(waiting);
  return budgeted_bytes(shape, bits, at, full_row_bits);
}

namespace detail {

/// BudgetOptions::full_row_bits of every layer; of kChooseBits, what it stands for.
/// @param parts    of all layers and heads: keys, values
/// @param no_bits  as budgeted_bytes() has them, without any
/// @param limit    bytes of the budget
inline std::vector<int> choose_full_row_bits(const CacheShape& shape,
                                             std::span<const CodedPart> parts,
                                             std::span<const std::vector<std::uint8_t>> no_bits,
                                             double limit, const BudgetOptions& options) {
  const std::size_t per_layer = 2 * static_cast<std::size_t>(shape.num_kv_heads);
  std::vector<int> chosen(parts.size() / per_layer, options.full_row_bits);
  if (options.full_row_bits != BudgetOptions::kChooseBits) return chosen;
  std::fill(chosen.begin(), chosen.end(), 8);
  const auto bytes_of = [&] {
    BudgetOptions own = options;
    if (own.page_bytes == 0) own.page_bytes = best_page_bytes(shape, no_bits, own, chosen);
    return static_cast<double>(budgeted_bytes(shape, no_bits, own, chosen));
  };
  const double most = bytes_of() + BudgetOptions::kMostForBits * limit;
  std::vector<std::pair<double, std::size_t>> lossy;  // most first
  for (std::size_t layer = 0; layer < chosen.size(); ++layer) {
    double lost = 0.0;
    for (const CodedPart& part : parts.subspan(layer * per_layer, per_layer))
      lost = (std::max)(lost, part.lost_in_8_bits);
    if (lost > BudgetOptions::kMostLost) lossy.emplace_back(-lost, layer);
  }
  std::sort(lossy.begin(), lossy.end());
  for (const auto& [lost, layer] : lossy) {
    chosen[layer] = 0;
    if (bytes_of() <= most) continue;
    chosen[layer] = 8;
    break;
  }
  return chosen;
}

}  // namespace detail

/// @brief Computes bases, bits and policies for one byte budget over a whole model.
///
/// The bases are the principal axes of the centred rows in the metrics of CodingStatistics. Bits
/// come from reverse water-filling over all layers, heads, keys and values at once. Where
/// calibration has sample rows, the error of each width is measured on them, channel by channel,
/// and steps are fitted; else channels count as Gaussian. An error in a layer counts by its change
/// of the loss, if the statistics have that (CodingMetric::loss and combined), else as its share of
/// the residual stream there (CodingStatistics::stream_square()).
/// @param layers  calibration of every layer, of which LayerMoments::coding() is used. Without
///   residual streams (an engine that provides only queries, keys and values), errors count in
///   absolute units. Where the stream grows from layer to layer, as in most models, the first
///   layers then get too few bits
/// @throws ValueError if the budget is smaller than the rows at full rank and the pages alone, if a
/// layer has no coding statistics, if layers have metrics of different kinds, or if only some have
/// their residual stream; ShapeError if there is no layer
///
/// Cost: four eigendecompositions of head_dim per layer and head, and (30 x widths + 27) x head_dim
/// levels a sample row of keys, and of values.
template <class Real = double>
BudgetedModel budgeted(std::span<const LayerMoments> layers, const BudgetOptions& asked) {
  BudgetOptions options = asked;  // with the page size that is chosen
  if (layers.empty())
    ::lowrankkv::detail::fail<ShapeError>("budgeted: num_layers 0, at least 1 needed");
  const CacheShape& shape = layers.front().shape();
  options.pre_rope = layers.front().rope().keys == Rope::pre;
  std::vector<detail::CodedPart> parts;  // by layer, then head: keys, values
  for (const LayerMoments& moments : layers) {
    const CodingStatistics& layer = moments.coding();
    if (!(layer.num_queries() > 0.0)) {
      ::lowrankkv::detail::fail<ValueError>("budgeted: layer ", &moments - layers.data(),
                                            " has coding statistics of ", layer.num_queries(),
                                            " queries, at least 1 needed (CodingStatistics::add)");
    }
    for (int index = 0; index < shape.num_kv_heads; ++index) {
      const CodingHead& head = layer.head(index);
      parts.push_back(
          detail::coded_part(head.key, head.key_metric, layer.error_scale(), options.metric_floor));
      parts.push_back(detail::coded_part(head.value, head.value_metric, layer.error_scale(),
                                         options.metric_floor));
    }
  }
  const CodingMetric first_metric = layers.front().coding().metric();
  for (const LayerMoments& moments : layers) {
    if (moments.coding().metric() == first_metric) continue;
    ::lowrankkv::detail::fail<ValueError>(
        "budgeted: layer 0 has a metric of the ", name_of(first_metric), ", layer ",
        &moments - layers.data(), " of the ", name_of(moments.coding().metric()),
        ", the same expected (CodingStatistics::metric)");
  }
  const auto streams = std::count_if(layers.begin(), layers.end(), [](const LayerMoments& moments) {
    return moments.coding().stream_squares().size() > 0;
  });
  if (streams > 0 && streams < static_cast<std::ptrdiff_t>(layers.size())) {
    ::lowrankkv::detail::fail<ValueError>("budgeted: ", streams, " of ", layers.size(),
                                          " layers know their residual stream, all or none "
                                          "expected (CodingStatistics::add_residual_stream)");
  }
  std::vector<Eigen::MatrixX<Real>> errors;  // by width; first those of Gaussian channels
  for (const detail::CodedPart& part : parts) {
    const Eigen::VectorX<Real>& values = part.spectrum.values;
    errors.push_back(gaussian_errors<Real>(part.unit * values, options.widths));
  }
  // Bytes are a step function of the bits because of pages, slack and full rows. Bisect for the
  // largest budget of bits whose bytes fit.
  const double plain = 2.0 * 2.0 * shape.head_dim * shape.num_kv_heads *
                       static_cast<double>(layers.size());  // f16 K and V of a token
  const double limit = options.ratio * plain * static_cast<double>(options.context);
  // Bits as rows are stored: not increasing.
  const auto stored = [](std::vector<std::vector<std::uint8_t>> bits) {
    for (std::vector<std::uint8_t>& own : bits) std::sort(own.begin(), own.end(), std::greater<>());
    return bits;
  };
  const std::vector<std::vector<std::uint8_t>> no_bits =
      allocate_by_errors(errors, 0.0, options.widths);
  const std::vector<int> full_row_bits =
      detail::choose_full_row_bits(shape, parts, no_bits, limit, options);
  if (const std::int64_t tile = detail::largest_full_row_tile(shape, options, full_row_bits);
      options.on_device && asked.page_bytes != 0 &&
      tile > static_cast<std::int64_t>(asked.page_bytes))
    ::lowrankkv::detail::fail<CapacityError>("budget: page_bytes: a tile of full rows needs ", tile,
                                             ", a page has ", asked.page_bytes);
  const auto bytes_of = [&](const std::vector<std::vector<std::uint8_t>>& bits) {
    return static_cast<double>(budgeted_bytes(shape, stored(bits), options, full_row_bits));
  };
  const auto choose_pages = [&](const std::vector<std::vector<std::uint8_t>>& bits) {
    if (asked.page_bytes != 0) return;
    options.page_bytes = detail::best_page_bytes(shape, stored(bits), options, full_row_bits);
  };
  choose_pages(no_bits);
  const double least = bytes_of(no_bits);
  if (least > limit)
    ::lowrankkv::detail::fail<ValueError>("budget: ratio ", options.ratio, " at ", options.context,
                                          " tokens, rows at full rank and pages alone need ",
                                          least / plain / static_cast<double>(options.context));
  const auto allocate = [&] {
    if (options.on_device)
      return detail::allocate_on_device<Real>(shape, errors, no_bits, limit, asked.page_bytes,
                                              options, full_row_bits);
    double low = 0.0, high = 8.0 * 2.0 * shape.head_dim * shape.num_kv_heads *
                             static_cast<double>(layers.size());
    for (int step = 0; step < 24; ++step) {
      const double middle = 0.5 * (low + high);
      const bool fits = bytes_of(allocate_by_errors(errors, middle, options.widths)) <= limit;
      (fits ? low : high) = middle;
    }
    return allocate_by_errors(errors, low, options.widths);
  };
  std::vector<std::vector<std::uint8_t>> bits = allocate();
  // Then by the errors that each width leaves in sample rows. Gains depend on bits and steps, so
  // that a second and a third round fit better.
  std::vector<Eigen::MatrixXf> samples(parts.size());  // coefficients; none: Gaussian channels
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const std::size_t layer = part / 2 / static_cast<std::size_t>(shape.num_kv_heads);
    const CodingHead& head =
        layers[layer].coding().head(static_cast<int>(part / 2) % shape.num_kv_heads);
    const RowSample& rows = part % 2 == 0 ? head.key_sample : head.value_sample;
    if (rows.size() >= BudgetOptions::kFewestRows)
      samples[part] = detail::sample_coefficients(parts[part], rows);
  }
  std::vector<std::vector<float>> steps(
      parts.size(), std::vector<float>(static_cast<std::size_t>(shape.head_dim), 1.0F));
  std::vector<Eigen::MatrixXf> steps_of_widths(parts.size());
  for (int round = 0; round < 3; ++round) {
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (samples[part].size() == 0) continue;
      detail::WidthErrors measured = detail::measure_widths(
          samples[part], detail::channel_rms(parts[part]), bits[part], steps[part], options.widths);
      errors[part] = parts[part].unit * measured.errors;
      steps_of_widths[part] = std::move(measured.steps);
    }
    if (!options.on_device) choose_pages(bits);
    bits = allocate();
    for (std::size_t part = 0; part < parts.size(); ++part) {
      if (samples[part].size() > 0)
        steps[part] = detail::steps_at(steps_of_widths[part], bits[part], options.widths);
    }
  }

  BudgetedModel model;
  model.options = options;
  model.shape = shape;
  model.full_row_bits = full_row_bits;
  std::size_t part = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    LayerBasis& basis = model.bases.emplace_back();
    for (int index = 0; index < shape.num_kv_heads; ++index, part += 2) {
      detail::CodedMaps key = detail::coded_maps(parts[part], bits[part], steps[part]);
      detail::CodedMaps value =
          detail::coded_maps(parts[part + 1], bits[part + 1], steps[part + 1]);
      HeadBasis head;
      head.key_rank = key.rank;
      head.key_down = std::move(key.down);
      head.query_down = std::move(key.up);
      head.key_metric = std::move(key.metric);
      head.key_metric_inverse = std::move(key.inverse);
      head.key_mean = std::move(key.mean);
      head.key_bits = std::move(key.bits);
      head.key_rms = std::move(key.rms);
      head.value_rank = value.rank;
      head.value_down = std::move(value.down);
      // [head_dim, rank] to [rank, head_dim]
      const Eigen::MatrixX<Real> up =
          linalg::to_matrix({value.up.data(), shape.head_dim, value.rank});
      head.output_up = linalg::to_row_major(up.transpose());
      head.value_metric = std::move(value.metric);
      head.value_metric_inverse = std::move(value.inverse);
      head.value_mean = std::move(value.mean);
      head.value_bits = std::move(value.bits);
      head.value_rms = std::move(value.rms);
      basis.heads.push_back(std::move(head));
    }
  }
  model.policies.basis = {KeyMetric::query_aware, ValueMetric::output_aware, true};
  model.policies.token_policy.get<SinkRecent>() = {options.sinks, options.recent};
  model.policies.token_policy.get<ResidualOutliers>() = detail::budgeted_outliers(options);
  model.policies.quantizer.step_scale = options.step_scale;
  return model;
}

LOWRANKKV_COMPILED_TEMPLATE(BudgetedModel budgeted<double>(std::span<const LayerMoments>,
                                                           const BudgetOptions&))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
