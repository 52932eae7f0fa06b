// SPDX-License-Identifier: Apache-2.0
/// @file train/map_file.hpp  The maps of all layers for the basis policy Projector as one
/// safetensors file: what training exports, here or in other tools, and a cache takes.
///
/// Schema (version 1, docs/training.md). Metadata: `format` = `lowrankkv.maps`, `version`,
/// `num_layers`, `num_qo_heads`, `num_kv_heads`, `head_dim`, and `keys` (`post_rope` or
/// `pre_rope`), the form of the keys that key_down is applied to. Tensors of layer i and KV head g,
/// f32, row-major:
///
///     layers.i.heads.g.key_down    [head_dim, key_rank]     D_K
///     layers.i.heads.g.query_down  [head_dim, key_rank]     D_Q
///     layers.i.heads.g.value_down  [head_dim, value_rank]   D_V
///     layers.i.heads.g.output_up   [value_rank, head_dim]   D_O
///     layers.i.heads.g.key_mean    [head_dim]               only if keys are centred
///     layers.i.heads.g.value_mean  [head_dim]               only if values are centred
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/projector.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/io/safetensors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {
namespace detail {

/// The metadata's name of a form of keys.
inline const char* keys_name(Rope keys) { return keys == Rope::pre ? "pre_rope" : "post_rope"; }

inline std::string head_prefix(std::size_t layer, int head) {
  return ::lowrankkv::detail::text("layers.", layer, ".heads.", head, ".");
}

}  // namespace detail

/// @brief The maps of all layers as a file that is not written yet.
/// @param bases  one a layer, for the basis policy Projector
/// @param keys   the form of the keys that they are for
/// @param metadata  more entries, for example `source`
/// @throws ShapeError, ValueError unless there is a layer and every basis fits `shape`; ValueError
/// for a basis with bits, metrics or thresholds, which the file has no place for
inline io::SafetensorsWriter write_maps(const std::vector<LayerBasis>& bases,
                                        const CacheShape& shape, Rope keys = Rope::post,
                                        const std::map<std::string, std::string>& metadata = {}) {
  using ::lowrankkv::detail::fail;
  if (bases.empty()) fail<ShapeError>("maps: num_layers ", bases.size(), ", at least 1 needed");
  io::SafetensorsWriter writer;
  for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
  writer.set_metadata("format", "lowrankkv.maps");
  writer.set_metadata("version", "1");
  writer.set_metadata("num_layers", std::to_string(bases.size()));
  writer.set_metadata("num_qo_heads", std::to_string(shape.num_qo_heads));
  writer.set_metadata("num_kv_heads", std::to_string(shape.num_kv_heads));
  writer.set_metadata("head_dim", std::to_string(shape.head_dim));
  writer.set_metadata("keys", detail::keys_name(keys));
  for (std::size_t layer = 0; layer < bases.size(); ++layer) {
    validate(Projector{}, bases[layer], shape);
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const HeadBasis& basis = bases[layer].heads[static_cast<std::size_t>(head)];
      const std::size_t maps =
          4 * (basis.key_down.size() + basis.query_down.size() + basis.value_down.size() +
               basis.output_up.size() + basis.key_mean.size() + basis.value_mean.size());
      if (basis.bytes() != maps || !std::isnan(basis.key_threshold) ||
          !std::isnan(basis.value_threshold))
        fail<ValueError>("maps: layer ", layer, ", head ", head, " has ", basis.bytes(),
                         " bytes and thresholds ", basis.key_threshold, " and ",
                         basis.value_threshold, "; maps and means have ", maps,
                         " and no thresholds");
      const std::string prefix = detail::head_prefix(layer, head);
      const std::int64_t dim = shape.head_dim;
      writer.add(prefix + "key_down", {dim, basis.key_rank}, basis.key_down);
      writer.add(prefix + "query_down", {dim, basis.key_rank}, basis.query_down);
      writer.add(prefix + "value_down", {dim, basis.value_rank}, basis.value_down);
      writer.add(prefix + "output_up", {basis.value_rank, dim}, basis.output_up);
      if (!basis.key_mean.empty()) writer.add(prefix + "key_mean", {dim}, basis.key_mean);
      if (!basis.value_mean.empty()) writer.add(prefix + "value_mean", {dim}, basis.value_mean);
    }
  }
  return writer;
}

/// @brief Reads the maps of a model of `num_layers` layers of `shape`, whose cache stores keys in
/// the form `keys`. Tensors in F64, F16 or BF16 are taken too, rounded to f32.
/// @throws FormatError if the file is damaged, of another kind or not finite in f32; ShapeError,
/// naming both values, if it belongs to another model or ranks do not fit
inline std::vector<LayerBasis> read_maps(const io::Safetensors& file, const CacheShape& shape,
                                         int num_layers, Rope keys = Rope::post) {
  using ::lowrankkv::detail::fail;
  const auto metadata = [&](const std::string& key) {
    const auto entry = file.metadata().find(key);
    return entry == file.metadata().end() ? std::string("missing")
                                          : ::lowrankkv::detail::printable(entry->second);
  };
  if (metadata("format") != "lowrankkv.maps" || metadata("version") != "1")
    fail<FormatError>("maps: format ", metadata("format"), " version ", metadata("version"),
                      ", expected lowrankkv.maps version 1");
  const auto same = [&](const std::string& key, const std::string& model) {
    if (metadata(key) != model) fail<ShapeError>(key, ": maps ", metadata(key), ", model ", model);
  };
  same("num_layers", std::to_string(num_layers));
  same("num_qo_heads", std::to_string(shape.num_qo_heads));
  same("num_kv_heads", std::to_string(shape.num_kv_heads));
  same("head_dim", std::to_string(shape.head_dim));
  same("keys", detail::keys_name(keys));
  const std::int64_t dim = shape.head_dim;
  const auto values = [&](const std::string& name, const std::vector<std::int64_t>& extents) {
    std::vector<float> map = file.values<float>(name, extents);
    for (const float value : map) {
      if (!std::isfinite(value))
        fail<FormatError>("maps: ", name, " holds ", value, ", finite in f32 expected");
    }
    return map;
  };
  // A rank is the extent `axis` of a map [., .], from 1 to head_dim.
  const auto rank = [&](const std::string& name, std::size_t axis) {
    const std::vector<std::int64_t>& extents = file.info(name).shape;
    const std::int64_t extent = extents.size() == 2 ? extents[axis] : 0;
    if (extent < 1 || extent > dim)
      fail<ShapeError>("maps: ", name, " has shape ", io::Safetensors::shape_text(extents),
                       ", a rank of 1 to head_dim ", dim, " expected");
    return static_cast<int>(extent);
  };
  std::vector<LayerBasis> bases(static_cast<std::size_t>(num_layers));
  for (std::size_t layer = 0; layer < bases.size(); ++layer) {
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const std::string prefix = detail::head_prefix(layer, head);
      HeadBasis basis;
      basis.key_rank = rank(prefix + "key_down", 1);
      basis.value_rank = rank(prefix + "value_down", 1);
      basis.key_down = values(prefix + "key_down", {dim, basis.key_rank});
      basis.query_down = values(prefix + "query_down", {dim, basis.key_rank});
      basis.value_down = values(prefix + "value_down", {dim, basis.value_rank});
      basis.output_up = values(prefix + "output_up", {basis.value_rank, dim});
      if (file.contains(prefix + "key_mean")) basis.key_mean = values(prefix + "key_mean", {dim});
      if (file.contains(prefix + "value_mean"))
        basis.value_mean = values(prefix + "value_mean", {dim});
      bases[layer].heads.push_back(std::move(basis));
    }
    validate(Projector{}, bases[layer], shape);
  }
  return bases;
}

/// @brief Writes the maps of all layers to a file. @throws as write_maps(); FormatError if that
/// fails
inline void save_maps(const std::string& path, const std::vector<LayerBasis>& bases,
                      const CacheShape& shape, Rope keys = Rope::post,
                      const std::map<std::string, std::string>& metadata = {}) {
  write_maps(bases, shape, keys, metadata).write(path);
}

/// @brief Reads maps from a file. @throws as read_maps(); FormatError if it cannot be read
inline std::vector<LayerBasis> load_maps(const std::string& path, const CacheShape& shape,
                                         int num_layers, Rope keys = Rope::post) {
  return read_maps(io::Safetensors::read(path), shape, num_layers, keys);
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
