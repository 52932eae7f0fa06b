// SPDX-License-Identifier: Apache-2.0
/// @file budgeted.hpp  Builds the bases, bits, quantizer steps and policies of the Budgeted preset
/// for a byte budget.
#pragma once

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/allocate_bits.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/presets.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief The byte budget of a sequence, and how it is spent.
struct BudgetOptions {
  /// Measured bytes of a sequence of `context` tokens over the bytes of f16 K and V.
  double ratio = 0.1;
  /// Length in tokens at which the budget is met. Longer sequences have a smaller ratio.
  std::int64_t context = 4096;
  int sinks = 4;               ///< first tokens, at full rank; 0 to 16 serve equally well
  int recent = 32;             ///< last tokens, at full rank; fewer cost quality
  double outlier_share = 0.0;  ///< tokens with the largest error in the metric, at full rank
  /// Bits that a channel may have besides 0. 8 is needed; 1 brings nothing.
  std::vector<int> widths{2, 3, 4, 6, 8};
  /// Number of consecutive channels that get the same bits. 32 for the Cuda backend, whose tiles
  /// pad to 32 channels (for_cuda()).
  int channels_together = 1;
  float step_scale = 1.15F;      ///< TransformCode::step_scale
  double metric_floor = 1e-3;    ///< smallest eigenvalue of a metric, relative to its mean
  DType full_type = DType::f16;  ///< of rows at full rank: CacheConfig::full_type
  int full_row_bits = 8;         ///< CacheConfig::full_row_bits; 8 serves as well as 16
  /// Page size of the pool. Small enough that partly filled pages waste little, large enough for
  /// wide rows.
  std::size_t page_bytes = 4096;
  /// The cache chooses its page size: configure() leaves it 0. So the Cuda backend does, whose
  /// tiles have sizes of their own; page_bytes is then what the budget counts with.
  bool page_bytes_of_cache = false;

  /// @brief Sets the channels and widths that suit the Cuda backend's kernels: 32 channels share 2,
  /// 4 or 8 bits, which is one plane of codes. Pages are left to the cache.
  ///
  /// Codes of 3 and 6 bits would take two planes. At equal bytes they leave a fifth less error (as
  /// much as 5 % more bytes do), but attention takes a fifth longer
  /// (docs/log/2026-11-25-gpu-decode-step.md).
  BudgetOptions& for_cuda() {
    widths = {2, 4, 8};
    channels_together = 32;
    page_bytes_of_cache = true;
    return *this;
  }
};

/// @brief Everything that a Budgeted cache of each layer is constructed from.
struct BudgetedModel {
  std::vector<LayerBasis> bases;  ///< one per layer
  /// Policies of Budgeted<Backend>, for either backend.
  Policies<PerHead, Static, Compose<SinkRecent, ResidualOutliers>, TransformCode> policies;
  BudgetOptions options;  ///< the options that it was made for
  CacheShape shape;       ///< of every layer

  /// @brief Sets the fields that the byte budget assumes: how full rows are stored, the page size
  /// (0, the cache's own, if the options are for_cuda()), and f32 epochs. A model whose options are
  /// not for_cuda() needs page_bytes 0 afterwards on a GPU.
  ///
  /// The budget is met by a prompt of options.context tokens. ratio_at() says what other sequences
  /// take of such a cache.
  void configure(CacheConfig& config) const {
    config.full_type = options.full_type;
    config.full_row_bits = options.full_row_bits;
    config.page_bytes = options.page_bytes_of_cache ? 0 : options.page_bytes;
    // All sequences share this epoch, and metrics with a wide spectrum need the precision.
    config.epoch_type = DType::f32;
  }

  /// @brief Bytes of a sequence of all layers, as MemoryUsage::total() counts them.
  /// @param tokens   length of the sequence, at least 0
  /// @param waiting  tokens decoded since the last flush: they are at full rank. Up to
  /// CacheConfig::flush_interval between two calls of maintain()
  ///
  /// Exact on the CPU if options.outlier_share is 0, else outliers count with their share. On the
  /// Cuda backend tiles have sizes of their own, and bytes are a little higher.
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
  return part;
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

template <class Real = double>
CodedMaps coded_maps(const CodedPart& part, const std::vector<std::uint8_t>& bits) {
  CodedMaps maps;
  maps.rank = coded_channels(bits);
  maps.bits.assign(bits.begin(), bits.begin() + maps.rank);
  const Eigen::MatrixX<Real>& vectors = part.spectrum.vectors;
  const Eigen::MatrixX<Real> axes = vectors.leftCols(maps.rank);
  const Eigen::MatrixX<Real>&root = part.metric.root, &inverse = part.metric.inverse;
  maps.down = linalg::to_row_major(root * axes);
  maps.up = linalg::to_row_major(inverse * axes);
  maps.metric = linalg::to_row_major(part.metric.root);
  maps.inverse = linalg::to_row_major(part.metric.inverse);
  maps.mean = linalg::to_row_major(part.mean);
  const double least = 1e-12 * (part.spectrum.values[0] > 0.0 ? part.spectrum.values[0] : 1.0);
  for (int channel = 0; channel < maps.rank; ++channel)
    maps.rms.push_back((std::max)(
        1e-20F, static_cast<float>(std::sqrt((std::max)(part.spectrum.values[channel], least)))));
  return maps;
}

}  // namespace detail

/// @brief Bytes of a sequence of options.context tokens right after its prompt, as
/// MemoryUsage::total() counts them: pages of codes and of full rows with their slack, the recent
/// window, and positions.
/// @param bits  for each layer and head: the bits of its keys, then the bits of its values
inline std::int64_t budgeted_bytes(const CacheShape& shape,
                                   std::span<const std::vector<std::uint8_t>> bits,
                                   const BudgetOptions& options) {
  const TransformCode quantizer{options.step_scale};
  const FullRows plain{options.full_type, options.full_row_bits};
  const auto rows_of = [&](double share) {
    return static_cast<std::int64_t>(share * static_cast<double>(options.context));
  };
  const std::int64_t recent = (std::min)(std::int64_t{options.recent}, options.context);
  const std::int64_t sinks = (std::min)(std::int64_t{options.sinks}, options.context - recent);
  const std::int64_t outliers =
      (std::min)(rows_of(options.outlier_share), options.context - recent - sinks);
  const std::int64_t compressed = options.context - recent - sinks - outliers;
  const auto pages = [&](std::int64_t rows, int per_page) {
    return (rows + per_page - 1) / per_page * static_cast<std::int64_t>(options.page_bytes);
  };
  const auto full =
      cpu::make_row_layout(plain, shape.head_dim, shape.head_dim, {}, {}, options.page_bytes);
  std::int64_t bytes = 0;
  for (std::size_t part = 0; part + 1 < bits.size(); part += 2) {
    const auto coded = [](const std::vector<std::uint8_t>& all) {
      return std::span(all).first(static_cast<std::size_t>(detail::coded_channels(all)));
    };
    const auto key = coded(bits[part]), value = coded(bits[part + 1]);
    const auto codes =
        cpu::make_row_layout(quantizer, static_cast<int>(key.size()),
                             static_cast<int>(value.size()), key, value, options.page_bytes);
    // One run of positions for sinks and one for compressed rows; two more for each outlier.
    const auto positions = static_cast<std::int64_t>(RowRuns::kRunBytes) *
                           ((sinks > 0 ? 1 : 0) + (compressed > 0 ? 1 : 0) + 2 * outliers);
    bytes += pages(sinks + outliers, full.rows_per_page) + pages(compressed, codes.rows_per_page) +
             recent * 2 * shape.head_dim * static_cast<std::int64_t>(size_of(options.full_type)) +
             positions;
  }
  return bytes;
}

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
  return budgeted_bytes(shape, bits, at);
}

/// @brief Computes bases, bits and policies for one byte budget over a whole model.
///
/// The bases are the principal axes of the centred rows in the metrics of CodingStatistics. Bits
/// come from reverse water-filling over all layers, heads, keys and values at once. An error in a
/// layer counts as its share of the residual stream there (CodingStatistics::stream_square()).
/// @param layers  calibration of every layer, of which LayerMoments::coding() is used. Without
///   residual streams (an engine that provides only queries, keys and values), errors count in
///   absolute units. Where the stream grows from layer to layer, as in most models, the first
///   layers then get too few bits
/// @throws ValueError if the budget is smaller than the rows at full rank and the pages alone, if a
/// layer has no coding statistics, or if only some layers have their residual stream; ShapeError if
/// there is no layer
///
/// Cost: four eigendecompositions of head_dim per layer and head.
template <class Real = double>
BudgetedModel budgeted(std::span<const LayerMoments> layers, const BudgetOptions& options) {
  if (layers.empty())
    ::lowrankkv::detail::fail<ShapeError>("budgeted: num_layers 0, at least 1 needed");
  const CacheShape& shape = layers.front().shape();
  std::vector<detail::CodedPart> parts;  // by layer, then head: keys, values
  std::vector<Eigen::VectorX<Real>> energies;
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
  const auto streams = std::count_if(layers.begin(), layers.end(), [](const LayerMoments& moments) {
    return moments.coding().stream_squares().size() > 0;
  });
  if (streams > 0 && streams < static_cast<std::ptrdiff_t>(layers.size())) {
    ::lowrankkv::detail::fail<ValueError>("budgeted: ", streams, " of ", layers.size(),
                                          " layers know their residual stream, all or none "
                                          "expected (CodingStatistics::add_residual_stream)");
  }
  for (const detail::CodedPart& part : parts) {
    const Eigen::VectorX<Real>& values = part.spectrum.values;
    energies.push_back(part.unit * values);
  }
  // Bytes are a step function of the bits because of pages, slack and full rows. Bisect for the
  // largest budget of bits whose bytes fit.
  const double plain = 2.0 * 2.0 * shape.head_dim * shape.num_kv_heads *
                       static_cast<double>(layers.size());  // f16 K and V of a token
  const double limit = options.ratio * plain * static_cast<double>(options.context);
  std::vector<std::vector<std::uint8_t>> bits =
      allocate_bits(energies, 0.0, options.widths, options.channels_together);
  const double least = static_cast<double>(budgeted_bytes(shape, bits, options));
  if (least > limit)
    ::lowrankkv::detail::fail<ValueError>("budget: ratio ", options.ratio, " at ", options.context,
                                          " tokens, rows at full rank and pages alone need ",
                                          least / plain / static_cast<double>(options.context));
  double low = 0.0, high = 8.0 * 2.0 * shape.head_dim * shape.num_kv_heads *
                           static_cast<double>(layers.size());
  for (int step = 0; step < 24; ++step) {
    const double middle = 0.5 * (low + high);
    std::vector<std::vector<std::uint8_t>> trial =
        allocate_bits(energies, middle, options.widths, options.channels_together);
    if (static_cast<double>(budgeted_bytes(shape, trial, options)) <= limit) {
      low = middle;
      bits = std::move(trial);
    } else {
      high = middle;
    }
  }

  BudgetedModel model;
  model.options = options;
  model.shape = shape;
  std::size_t part = 0;
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    LayerBasis& basis = model.bases.emplace_back();
    for (int index = 0; index < shape.num_kv_heads; ++index, part += 2) {
      detail::CodedMaps key = detail::coded_maps(parts[part], bits[part]);
      detail::CodedMaps value = detail::coded_maps(parts[part + 1], bits[part + 1]);
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
  model.policies.token_policy.get<ResidualOutliers>() = {OutlierError::absolute,
                                                         static_cast<float>(options.outlier_share)};
  model.policies.quantizer.step_scale = options.step_scale;
  return model;
}

LOWRANKKV_COMPILED_TEMPLATE(BudgetedModel budgeted<double>(std::span<const LayerMoments>,
                                                           const BudgetOptions&))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
