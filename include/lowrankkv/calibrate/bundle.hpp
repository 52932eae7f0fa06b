// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/bundle.hpp  A model's calibration as one safetensors file.
///
/// Schema (version 5; version 4 is read too). Metadata: `format` = `lowrankkv.moments`, `version`,
/// `num_layers`, `num_qo_heads`, `num_kv_heads`, `head_dim`, `keys`, and entries that the writer
/// adds (`source`). `keys` is the form of the keys, and of the queries in moments: `post_rope` for
/// post-RoPE, `pre_rope` for pre-RoPE.
///
/// Tensors of layer i, f64, for x in {query, key, value}:
///
///     layers.i.x.second_moment  [num_kv_heads, head_dim, head_dim]  sum of x x^T
///     layers.i.x.sum            [num_kv_heads, head_dim]            sum of x
///     layers.i.x.count          [num_kv_heads]                      rows
///
/// f32, for x in {key, value}, rows spread over the stream:
///
///     layers.i.x.sample  [num_kv_heads, rows, head_dim]
///
/// f64, of the values of all heads of a token, stacked:
///
///     layers.i.values.second_moment  [num_kv_heads head_dim, num_kv_heads head_dim]
///     layers.i.values.sum            [num_kv_heads head_dim]
///     layers.i.values.count          [1]
///
/// For transform coding, of the rows that will be compressed (CodingStatistics), f64, for x in
/// {key, value}; stream_squares is f32:
///
///     layers.i.coded_x.second_moment, .sum, .count  as above
///     layers.i.coded_x.metric   [num_kv_heads, head_dim, head_dim]
///     layers.i.coded_x.sample   [num_kv_heads, rows, head_dim]  f32; from version 5 on
///     layers.i.coded_queries    [1]  queries that the metrics sum over; of the loss: rows
///     layers.i.stream_squares   [rows]
///
/// For other tools, of the rows that are never compressed (SinkHead), only if they were gathered:
///
///     layers.i.sink_x.second_moment, .sum, .count, .metric  as above
///
/// docs/bundle.md describes every tensor. The metadata `coded_metric`, from version 5 on, is
/// `output`, `loss` or `combined` (CodingMetric): what an error in a row costs. stream_squares
/// holds |h|^2 of rows of the residual stream behind the layer's attention; no rows if the writer
/// saw none. For pre-RoPE keys there are also the metadata `pairing` (`half_split` or
/// `interleaved`) and the tensor rope.frequencies [pairs], radians per token.
///
/// Moments are sufficient: every kind of basis at every rank follows from them
/// (LayerMoments::basis). The moments of two runs can be added.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/io/safetensors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {
namespace detail {

inline constexpr CodingMetric kMetrics[] = {CodingMetric::output, CodingMetric::loss,
                                            CodingMetric::combined};

/// Raises FormatError unless `moments` can be those of rows in f32, of which there are 2^53 at
/// most.
template <class Real = double>
void check_moments(const std::string& name, const Moments& moments) {
  constexpr double most_rows = 9007199254740992.0;
  constexpr double largest = (std::numeric_limits<float>::max)();
  const double rows = (std::max)(moments.count, 1.0);
  const Eigen::VectorX<Real>& sum = moments.first;
  const Eigen::MatrixX<Real>& second = moments.second;
  const bool finite = sum.allFinite() && second.allFinite();
  const double most_sum = finite ? sum.cwiseAbs().maxCoeff() : HUGE_VAL;
  const double most_square = finite ? second.cwiseAbs().maxCoeff() : HUGE_VAL;
  if (!(moments.count >= 0.0 && moments.count <= most_rows) || !(most_sum <= rows * largest) ||
      !(most_square <= rows * largest * largest)) {
    ::lowrankkv::detail::fail<FormatError>(
        "calibration bundle: ", name, " are of ", moments.count, " rows, with sums up to ",
        most_sum, " and sums of products up to ", most_square, "; those of rows in f32 expected");
  }
}

/// Raises FormatError unless the numbers of a tensor are finite. Samples are sorted, in which NaN
/// has no place.
template <class T>
void check_finite(const std::string& name, const std::vector<T>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]))
      ::lowrankkv::detail::fail<FormatError>("calibration bundle: ", name, " holds ", values[i],
                                             " at element ", i, ", finite expected");
  }
}

}  // namespace detail

/// @brief The bundle of all layers' moments, a file that is not written yet. @param metadata  more
/// entries for the file's metadata, for example `source`
/// @throws ShapeError if there is no layer, or if layers differ in shape or rotary embedding
template <class = void>
io::SafetensorsWriter write_moments(const std::vector<LayerMoments>& layers,
                                    const std::map<std::string, std::string>& metadata = {}) {
  if (layers.empty())
    ::lowrankkv::detail::fail<ShapeError>("calibration bundle: num_layers 0, at least 1 needed");
  io::SafetensorsWriter writer;
  const CacheShape& shape = layers.front().shape();
  for (const LayerMoments& layer : layers) {
    if (!(layer.rope() == layers.front().rope()))
      ::lowrankkv::detail::fail<ShapeError>("calibration bundle: keys of the first layer ",
                                            static_cast<int>(layers.front().rope().keys),
                                            ", of another ", static_cast<int>(layer.rope().keys),
                                            ": layers differ in their rotary embedding");
    if (!(layer.shape() == shape))
      ::lowrankkv::detail::fail<ShapeError>("calibration bundle: head_dim ", shape.head_dim,
                                            " and ", layer.shape().head_dim,
                                            ": layers differ in shape");
    if (layer.coding().gathers_sinks() != layers.front().coding().gathers_sinks())
      ::lowrankkv::detail::fail<ShapeError>(
          "calibration bundle: sinks of the first layer are ",
          layers.front().coding().gathers_sinks() ? "gathered" : "left out", ", of another ",
          layer.coding().gathers_sinks() ? "gathered" : "left out");
    if (layer.coding().metric() != layers.front().coding().metric())
      ::lowrankkv::detail::fail<ShapeError>(
          "calibration bundle: the metric of the first layer is of the ",
          name_of(layers.front().coding().metric()), ", of another of the ",
          name_of(layer.coding().metric()));
  }
  for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
  writer.set_metadata("format", "lowrankkv.moments");
  writer.set_metadata("version", "5");
  writer.set_metadata("coded_metric", name_of(layers.front().coding().metric()));
  writer.set_metadata("keys", layers.front().rope().keys == Rope::pre ? "pre_rope" : "post_rope");
  writer.set_metadata("num_layers", std::to_string(layers.size()));
  writer.set_metadata("num_qo_heads", std::to_string(shape.num_qo_heads));
  writer.set_metadata("num_kv_heads", std::to_string(shape.num_kv_heads));
  writer.set_metadata("head_dim", std::to_string(shape.head_dim));
  const RopeConfig& rope = layers.front().rope();
  if (rope.keys == Rope::pre) {
    const std::vector<double> frequencies = rope_frequencies(rope, shape.head_dim);
    writer.set_metadata("pairing",
                        rope.pairing == RopePairing::interleaved ? "interleaved" : "half_split");
    writer.add("rope.frequencies", {static_cast<std::int64_t>(frequencies.size())}, frequencies);
  }
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t dim = shape.head_dim;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto write = [&](const std::string& name, auto&& moments_of) {
      std::vector<double> second, sum, count;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const Moments& moments = moments_of(head);
        second.insert(second.end(), moments.second.data(),
                      moments.second.data() + moments.second.size());  // symmetric
        sum.insert(sum.end(), moments.first.data(), moments.first.data() + moments.first.size());
        count.push_back(moments.count);
      }
      const std::string prefix = "layers." + std::to_string(i) + "." + name + ".";
      writer.add(prefix + "second_moment", {heads, dim, dim}, second);
      writer.add(prefix + "sum", {heads, dim}, sum);
      writer.add(prefix + "count", {heads}, count);
    };
    write("query", [&](int head) -> const Moments& { return layers[i].head(head).query; });
    write("key", [&](int head) -> const Moments& { return layers[i].head(head).key; });
    write("value", [&](int head) -> const Moments& { return layers[i].head(head).value; });
    const auto write_sample = [&](const std::string& name, auto&& sample_of) {
      std::vector<float> rows;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const std::vector<float>& sample = sample_of(head).values();
        rows.insert(rows.end(), sample.begin(), sample.end());
      }
      const std::int64_t count = static_cast<std::int64_t>(rows.size()) / (heads * dim);
      writer.add("layers." + std::to_string(i) + "." + name + ".sample", {heads, count, dim}, rows);
    };
    const auto write_metric = [&](const std::string& name, auto&& metric_of) {
      std::vector<double> values;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const Eigen::MatrixXd& matrix = metric_of(head);
        values.insert(values.end(), matrix.data(), matrix.data() + matrix.size());  // symmetric
      }
      writer.add("layers." + std::to_string(i) + "." + name + ".metric", {heads, dim, dim}, values);
    };
    const CodingStatistics& coding = layers[i].coding();
    const auto write_coding = [&](const std::string& name, Moments CodingHead::*moments,
                                  RowSample CodingHead::*sample,
                                  Eigen::MatrixXd CodingHead::*metric) {
      write_sample("coded_" + name,
                   [&](int head) -> const RowSample& { return coding.head(head).*sample; });
      write("coded_" + name,
            [&](int head) -> const Moments& { return coding.head(head).*moments; });
      write_metric("coded_" + name,
                   [&](int head) -> const Eigen::MatrixXd& { return coding.head(head).*metric; });
    };
    write_coding("key", &CodingHead::key, &CodingHead::key_sample, &CodingHead::key_metric);
    write_coding("value", &CodingHead::value, &CodingHead::value_sample, &CodingHead::value_metric);
    const auto write_sinks = [&](const std::string& name, Moments SinkHead::*moments,
                                 Eigen::MatrixXd SinkHead::*metric) {
      write("sink_" + name, [&](int head) -> const Moments& { return coding.sink(head).*moments; });
      write_metric("sink_" + name,
                   [&](int head) -> const Eigen::MatrixXd& { return coding.sink(head).*metric; });
    };
    if (coding.gathers_sinks()) {
      write_sinks("key", &SinkHead::key, &SinkHead::key_metric);
      write_sinks("value", &SinkHead::value, &SinkHead::value_metric);
    }
    writer.add("layers." + std::to_string(i) + ".coded_queries", {1},
               std::vector<double>{coding.num_queries()});
    writer.add("layers." + std::to_string(i) + ".stream_squares", {coding.stream_squares().size()},
               coding.stream_squares().values());
    write_sample("key",
                 [&](int head) -> const RowSample& { return layers[i].head(head).key_sample; });
    write_sample("value",
                 [&](int head) -> const RowSample& { return layers[i].head(head).value_sample; });
    const Moments& values = layers[i].values();
    const std::string prefix = "layers." + std::to_string(i) + ".values.";
    writer.add(
        prefix + "second_moment", {heads * dim, heads * dim},
        std::vector<double>(values.second.data(), values.second.data() + values.second.size()));
    writer.add(prefix + "sum", {heads * dim},
               std::vector<double>(values.first.data(), values.first.data() + values.first.size()));
    writer.add(prefix + "count", {1}, std::vector<double>{values.count});
  }
  return writer;
}

/// @brief Writes the moments of all layers to a file. @param metadata  as write_moments()
/// @throws ShapeError as write_moments(), FormatError if the file cannot be written
template <class = void>
void save_moments(const std::string& path, const std::vector<LayerMoments>& layers,
                  const std::map<std::string, std::string>& metadata = {}) {
  write_moments(layers, metadata).write(path);
}

/// @brief Reads a bundle, as a file in memory, for a model of `num_layers` layers of `shape`.
/// @throws FormatError if the file is damaged or of another kind, ShapeError if it belongs to
/// another model
template <class Real = double>
std::vector<LayerMoments> read_moments(const io::Safetensors& file, const CacheShape& shape,
                                       int num_layers) {
  const auto metadata = [&](const std::string& key) {
    const auto entry = file.metadata().find(key);
    return entry == file.metadata().end() ? std::string("missing") : entry->second;
  };
  const bool earlier = metadata("version") == "4";
  if (metadata("format") != "lowrankkv.moments" || (!earlier && metadata("version") != "5")) {
    ::lowrankkv::detail::fail<FormatError>(
        "calibration bundle: format ", metadata("format"), " version ", metadata("version"),
        ", expected lowrankkv.moments version 4 or 5 (calibrate again)");
  }
  const std::string measured_by = earlier ? "output" : metadata("coded_metric");
  const auto known_metric =
      std::find_if(std::begin(detail::kMetrics), std::end(detail::kMetrics),
                   [&](CodingMetric known) { return measured_by == name_of(known); });
  if (known_metric == std::end(detail::kMetrics))
    ::lowrankkv::detail::fail<FormatError>("calibration bundle: coded_metric ", measured_by,
                                           ", expected output, loss or combined");
  const auto same = [&](const std::string& key, int model) {
    if (metadata(key) != std::to_string(model))
      ::lowrankkv::detail::fail<ShapeError>(key, ": bundle ", metadata(key), ", model ", model);
  };
  same("num_layers", num_layers);
  same("num_qo_heads", shape.num_qo_heads);
  same("num_kv_heads", shape.num_kv_heads);
  same("head_dim", shape.head_dim);
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t dim = shape.head_dim;
  if (metadata("keys") != "post_rope" && metadata("keys") != "pre_rope")
    ::lowrankkv::detail::fail<FormatError>("calibration bundle: keys ", metadata("keys"),
                                           ", expected post_rope or pre_rope");
  RopeConfig rope;
  if (metadata("keys") == "pre_rope") {
    rope.keys = Rope::pre;
    if (metadata("pairing") != "half_split" && metadata("pairing") != "interleaved")
      ::lowrankkv::detail::fail<FormatError>("calibration bundle: pairing ", metadata("pairing"),
                                             ", expected half_split or interleaved");
    rope.pairing =
        metadata("pairing") == "interleaved" ? RopePairing::interleaved : RopePairing::half_split;
    rope.frequencies = file.values<double>("rope.frequencies", file.info("rope.frequencies").shape);
    detail::check_finite("rope.frequencies", rope.frequencies);
    static_cast<void>(rope_frequencies(rope, shape.head_dim));
  }
  std::vector<LayerMoments> layers(static_cast<std::size_t>(num_layers), LayerMoments(shape, rope));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto read = [&](const std::string& name, auto&& moments_of) {
      const std::string prefix = "layers." + std::to_string(i) + "." + name + ".";
      const std::vector<double> second =
          file.values<double>(prefix + "second_moment", {heads, dim, dim});
      const std::vector<double> sum = file.values<double>(prefix + "sum", {heads, dim});
      const std::vector<double> count = file.values<double>(prefix + "count", {heads});
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        Moments& moments = moments_of(head);
        moments.second =
            Eigen::Map<const Eigen::MatrixX<Real>>(second.data() + head * dim * dim, dim, dim);
        moments.first = Eigen::Map<const Eigen::VectorX<Real>>(sum.data() + head * dim, dim);
        moments.count = count[static_cast<std::size_t>(head)];
        detail::check_moments(prefix + "* of head " + std::to_string(head), moments);
      }
    };
    read("query", [&](int head) -> Moments& { return layers[i].head(head).query; });
    read("key", [&](int head) -> Moments& { return layers[i].head(head).key; });
    read("value", [&](int head) -> Moments& { return layers[i].head(head).value; });
    const auto read_sample = [&](const std::string& name, auto&& sample_of) {
      const std::string tensor = "layers." + std::to_string(i) + "." + name + ".sample";
      const std::vector<std::int64_t>& extents = file.info(tensor).shape;
      const std::int64_t rows = extents.size() == 3 ? extents[1] : -1;
      const std::vector<float> all = file.values<float>(tensor, {heads, rows, dim});
      detail::check_finite(tensor, all);
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        sample_of(head) =
            RowSample(shape.head_dim, std::vector<float>(all.begin() + head * rows * dim,
                                                         all.begin() + (head + 1) * rows * dim));
      }
    };
    CodingStatistics& coding = layers[i].coding();
    coding.set_metric(*known_metric);
    const auto read_metric = [&](const std::string& name, auto&& metric_of) {
      const std::string tensor = "layers." + std::to_string(i) + "." + name + ".metric";
      const std::vector<double> all = file.values<double>(tensor, {heads, dim, dim});
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        metric_of(head) =
            Eigen::Map<const Eigen::MatrixX<Real>>(all.data() + head * dim * dim, dim, dim);
        if (!metric_of(head).allFinite())
          ::lowrankkv::detail::fail<FormatError>("calibration bundle: ", tensor, " of head ", head,
                                                 " is not finite");
      }
    };
    const auto read_coding = [&](const std::string& name, Moments CodingHead::*moments,
                                 RowSample CodingHead::*sample,
                                 Eigen::MatrixXd CodingHead::*metric) {
      if (!earlier)
        read_sample("coded_" + name,
                    [&](int head) -> RowSample& { return coding.head(head).*sample; });
      read("coded_" + name, [&](int head) -> Moments& { return coding.head(head).*moments; });
      read_metric("coded_" + name,
                  [&](int head) -> Eigen::MatrixXd& { return coding.head(head).*metric; });
    };
    read_coding("key", &CodingHead::key, &CodingHead::key_sample, &CodingHead::key_metric);
    read_coding("value", &CodingHead::value, &CodingHead::value_sample, &CodingHead::value_metric);
    const auto read_sinks = [&](const std::string& name, Moments SinkHead::*moments,
                                Eigen::MatrixXd SinkHead::*metric) {
      read("sink_" + name, [&](int head) -> Moments& { return coding.sink(head).*moments; });
      read_metric("sink_" + name,
                  [&](int head) -> Eigen::MatrixXd& { return coding.sink(head).*metric; });
    };
    if (file.contains("layers.0.sink_key.count")) {
      coding.gather_sinks();
      read_sinks("key", &SinkHead::key, &SinkHead::key_metric);
      read_sinks("value", &SinkHead::value, &SinkHead::value_metric);
    }
    const std::string queries = "layers." + std::to_string(i) + ".coded_queries";
    coding.set_num_queries(file.values<double>(queries, {1}).front());
    if (!(coding.num_queries() >= 0.0 && std::isfinite(coding.num_queries())))
      ::lowrankkv::detail::fail<FormatError>("calibration bundle: ", queries, " is ",
                                             coding.num_queries(),
                                             ", at least 0 and finite expected");
    const std::string squares = "layers." + std::to_string(i) + ".stream_squares";
    std::vector<float> all = file.values<float>(
        squares, {file.info(squares).shape.empty() ? -1 : file.info(squares).shape[0]});
    detail::check_finite(squares, all);
    coding.set_stream_squares(RowSample(1, std::move(all)));
    read_sample("key", [&](int head) -> RowSample& { return layers[i].head(head).key_sample; });
    read_sample("value", [&](int head) -> RowSample& { return layers[i].head(head).value_sample; });
    Moments& values = layers[i].values();
    const std::string prefix = "layers." + std::to_string(i) + ".values.";
    const std::vector<double> second =
        file.values<double>(prefix + "second_moment", {heads * dim, heads * dim});
    const std::vector<double> sum = file.values<double>(prefix + "sum", {heads * dim});
    values.second = Eigen::Map<const Eigen::MatrixX<Real>>(second.data(), heads * dim, heads * dim);
    values.first = Eigen::Map<const Eigen::VectorX<Real>>(sum.data(), heads * dim);
    values.count = file.values<double>(prefix + "count", {1}).front();
    detail::check_moments(prefix + "*", values);
  }
  return layers;
}

/// @brief Reads a bundle from a file, for a model of `num_layers` layers of `shape`.
/// @throws as read_moments(); FormatError if the file cannot be read
template <class Real = double>
std::vector<LayerMoments> load_moments(const std::string& path, const CacheShape& shape,
                                       int num_layers) {
  return read_moments<Real>(io::Safetensors::read(path), shape, num_layers);
}

LOWRANKKV_COMPILED_TEMPLATE(io::SafetensorsWriter write_moments<void>(
    const std::vector<LayerMoments>&, const std::map<std::string, std::string>&))
LOWRANKKV_COMPILED_TEMPLATE(std::vector<LayerMoments> read_moments<double>(const io::Safetensors&,
                                                                           const CacheShape&, int))
LOWRANKKV_COMPILED_TEMPLATE(void save_moments<void>(const std::string&,
                                                    const std::vector<LayerMoments>&,
                                                    const std::map<std::string, std::string>&))
LOWRANKKV_COMPILED_TEMPLATE(std::vector<LayerMoments> load_moments<double>(const std::string&,
                                                                           const CacheShape&, int))

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
