// SPDX-License-Identifier: Apache-2.0
/// @file calibrate/bundle.hpp  A model's calibration as one safetensors file.
///
/// Schema (version 1). Metadata: `format` = `lowrankkv.moments`, `version`, `num_layers`, `num_qo_heads`, `num_kv_heads`,
/// `head_dim`, and what the writer adds (`source`). Tensors, f64, for layer i and x in {query, key, value}:
///   layers.i.x.second_moment  [num_kv_heads, head_dim, head_dim]  sum of x x^T
///   layers.i.x.sum            [num_kv_heads, head_dim]            sum of x
///   layers.i.x.count          [num_kv_heads]                      rows
/// These are sufficient: every kind of basis at every rank follows from them (LayerMoments::basis), and the moments of
/// two runs can be added.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/io/safetensors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace calibrate {

/// @brief Writes the moments of all layers. @param metadata more entries for the file's metadata, for example `source`.
inline void save_moments(const std::string& path, const std::vector<LayerMoments>& layers, const std::map<std::string, std::string>& metadata = {}) {
  if (layers.empty()) ::lowrankkv::detail::fail<ShapeError>("calibration bundle: num_layers 0, at least 1 needed");
  io::SafetensorsWriter writer;
  const CacheShape& shape = layers.front().shape();
  for (const LayerMoments& layer : layers) {
    if (!(layer.shape() == shape)) ::lowrankkv::detail::fail<ShapeError>("calibration bundle: head_dim ", shape.head_dim, " and ", layer.shape().head_dim, ": layers differ in shape");
  }
  for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
  writer.set_metadata("format", "lowrankkv.moments");
  writer.set_metadata("version", "1");
  writer.set_metadata("num_layers", std::to_string(layers.size()));
  writer.set_metadata("num_qo_heads", std::to_string(shape.num_qo_heads));
  writer.set_metadata("num_kv_heads", std::to_string(shape.num_kv_heads));
  writer.set_metadata("head_dim", std::to_string(shape.head_dim));
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t dim = shape.head_dim;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto write = [&](const char* name, Moments HeadMoments::* member) {
      std::vector<double> second, sum, count;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const Moments& moments = layers[i].head(head).*member;
        second.insert(second.end(), moments.second.data(), moments.second.data() + moments.second.size());  // symmetric
        sum.insert(sum.end(), moments.first.data(), moments.first.data() + moments.first.size());
        count.push_back(moments.count);
      }
      const std::string prefix = "layers." + std::to_string(i) + "." + name + ".";
      writer.add(prefix + "second_moment", {heads, dim, dim}, second);
      writer.add(prefix + "sum", {heads, dim}, sum);
      writer.add(prefix + "count", {heads}, count);
    };
    write("query", &HeadMoments::query);
    write("key", &HeadMoments::key);
    write("value", &HeadMoments::value);
  }
  writer.write(path);
}

/// @brief Reads a bundle for a model of `num_layers` layers of `shape`.
/// @throws FormatError if the file is damaged or of another kind, ShapeError if it belongs to another model
inline std::vector<LayerMoments> load_moments(const std::string& path, const CacheShape& shape, int num_layers) {
  const io::Safetensors file = io::Safetensors::read(path);
  const auto metadata = [&](const std::string& key) {
    const auto entry = file.metadata().find(key);
    return entry == file.metadata().end() ? std::string("missing") : entry->second;
  };
  if (metadata("format") != "lowrankkv.moments" || metadata("version") != "1") {
    ::lowrankkv::detail::fail<FormatError>("calibration bundle: format ", metadata("format"), " version ", metadata("version"), ", expected lowrankkv.moments version 1");
  }
  const auto same = [&](const std::string& key, int model) {
    if (metadata(key) != std::to_string(model)) ::lowrankkv::detail::fail<ShapeError>(key, ": bundle ", metadata(key), ", model ", model);
  };
  same("num_layers", num_layers);
  same("num_qo_heads", shape.num_qo_heads);
  same("num_kv_heads", shape.num_kv_heads);
  same("head_dim", shape.head_dim);
  const std::int64_t heads = shape.num_kv_heads;
  const std::int64_t dim = shape.head_dim;
  std::vector<LayerMoments> layers(static_cast<std::size_t>(num_layers), LayerMoments(shape));
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto read = [&](const char* name, Moments HeadMoments::* member) {
      const std::string prefix = "layers." + std::to_string(i) + "." + name + ".";
      const std::vector<double> second = file.values<double>(prefix + "second_moment", {heads, dim, dim});
      const std::vector<double> sum = file.values<double>(prefix + "sum", {heads, dim});
      const std::vector<double> count = file.values<double>(prefix + "count", {heads});
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        Moments& moments = layers[i].head(head).*member;
        moments.second = Eigen::Map<const Eigen::MatrixXd>(second.data() + head * dim * dim, dim, dim);
        moments.first = Eigen::Map<const Eigen::VectorXd>(sum.data() + head * dim, dim);
        moments.count = count[static_cast<std::size_t>(head)];
        if (!moments.second.allFinite() || !moments.first.allFinite() || !(moments.count >= 0.0)) {
          ::lowrankkv::detail::fail<FormatError>("calibration bundle: ", prefix, "* of head ", head, " is not finite, or counts ", moments.count, " rows");
        }
      }
    };
    read("query", &HeadMoments::query);
    read("key", &HeadMoments::key);
    read("value", &HeadMoments::value);
  }
  return layers;
}

}  // namespace calibrate
LOWRANKKV_NAMESPACE_END
