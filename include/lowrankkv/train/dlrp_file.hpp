// SPDX-License-Identifier: Apache-2.0
/// @file train/dlrp_file.hpp  A training of DLRP as one safetensors file: saved after any step, it
/// goes on to the same bits.
///
/// Schema (version 1, docs/training.md). Metadata: `format` = `lowrankkv.dlrp`, `version`,
/// `num_layers`, `num_qo_heads`, `num_kv_heads`, `head_dim`, `num_factors`, `hidden`, `geometry`
/// (`before_rope` or `after_rope`), `pairing` (`half_split` or `interleaved`), `stage`
/// (`regularised` or `fine_tuning`), `step`. Tensors, f64, row-major; i is a layer, x one of query,
/// key, value and output, h one of its maps, n from 0 to num_factors - 1:
///
///     training.alpha                [1]
///     training.energy               [1]
///     training.last                 [3]                task, regulariser, total
///     layers.i.ranks                [num_kv_heads, 2]  r_qk, r_vo
///     layers.i.pairs.g              [r_qk / 2]         of KV head g; before_rope
///     layers.i.x.h.factors.n        D^(n+1), as [in, out]: applied to rows from the right
///
/// Other tensors and entries may be there: an optimiser's state, a place in the data.
#pragma once

#include <Eigen/Core>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "lowrankkv/train/deep_projectors.hpp"
#include "lowrankkv/train/dlrp_training.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {
namespace detail {

/// The name of a factor's tensor.
inline std::string factor_name(const ChainPlace& place, std::size_t n) {
  return ::lowrankkv::detail::text("layers.", place.layer, ".", name_of(place.projection), ".",
                                   place.head, ".factors.", n);
}

/// An entry of a file's metadata; FormatError if it is missing.
inline const std::string& metadata_entry(const io::Safetensors& file, const std::string& key) {
  const auto entry = file.metadata().find(key);
  if (entry == file.metadata().end())
    ::lowrankkv::detail::fail<FormatError>("metadata: ", key, " is missing among ",
                                           file.metadata().size(), " entries");
  return entry->second;
}

/// The same, as a count from `least` to `most`.
inline std::int64_t metadata_count(const io::Safetensors& file, const std::string& key,
                                   std::int64_t least, std::int64_t most) {
  const std::string& text = metadata_entry(file, key);
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stopped != end || value < least || value > most)
    ::lowrankkv::detail::fail<FormatError>("metadata: ", key, " is ",
                                           ::lowrankkv::detail::printable(text), ", ", least,
                                           " to ", most, " expected");
  return value;
}

/// The same, as one of two names: whether it is the second.
inline bool metadata_choice(const io::Safetensors& file, const std::string& key, const char* first,
                            const char* second) {
  const std::string& text = metadata_entry(file, key);
  if (text != first && text != second)
    ::lowrankkv::detail::fail<FormatError>("metadata: ", key, " is ",
                                           ::lowrankkv::detail::printable(text), ", ", first,
                                           " or ", second, " expected");
  return text == second;
}

/// Numbers of a tensor as counts from 0 to `most`.
inline std::vector<int> tensor_counts(const io::Safetensors& file, const std::string& name,
                                      const std::vector<std::int64_t>& shape, int most) {
  std::vector<int> counts;
  for (const double value : file.values<double>(name, shape)) {
    if (!(value >= 0.0 && value <= most) || value != std::floor(value))
      ::lowrankkv::detail::fail<FormatError>("tensor ", name, ": ", value, ", a count up to ", most,
                                             " expected");
    counts.push_back(static_cast<int>(value));
  }
  return counts;
}

/// The counts of the metadata, and the options, but alpha.
inline DeepProjectors read_layout(const io::Safetensors& file) {
  constexpr std::int64_t most = 1 << 20;
  const auto count = [&](const char* key) {
    return static_cast<int>(metadata_count(file, key, 1, most));
  };
  DeepProjectors projectors;
  projectors.num_layers = count("num_layers");
  projectors.shape = {count("num_qo_heads"), count("num_kv_heads"), count("head_dim")};
  projectors.options.num_factors = count("num_factors");
  projectors.options.hidden = count("hidden");
  projectors.options.geometry = metadata_choice(file, "geometry", "before_rope", "after_rope")
                                    ? DlrpGeometry::after_rope
                                    : DlrpGeometry::before_rope;
  projectors.options.pairing = metadata_choice(file, "pairing", "half_split", "interleaved")
                                   ? RopePairing::interleaved
                                   : RopePairing::half_split;
  // The file must have as many tensors before anything of that size is made; each product fits.
  const std::int64_t heads =
      2 * (std::int64_t{projectors.num_maps(Projection::query)} + projectors.shape.num_kv_heads);
  const std::int64_t tensors = static_cast<std::int64_t>(file.tensors().size());
  const std::int64_t chains = projectors.num_layers * heads;
  if (chains > tensors || chains * projectors.options.num_factors > tensors)
    ::lowrankkv::detail::fail<FormatError>("projectors: ", chains, " chains of ",
                                           projectors.options.num_factors, " factors, file has ",
                                           tensors, " tensors");
  return projectors;
}

}  // namespace detail

/// @brief A training as a file that is not written yet; the caller may add tensors of its own.
/// @throws ShapeError, ValueError as check_projectors(). Bytes: 8 a number of the factors.
template <class Real = double>
io::SafetensorsWriter write_training(const DlrpTraining& training) {
  const DeepProjectors& projectors = training.projectors;
  check_projectors<Real>(projectors);
  io::SafetensorsWriter writer;
  const auto set = [&](const char* key, std::int64_t value) {
    writer.set_metadata(key, std::to_string(value));
  };
  writer.set_metadata("format", "lowrankkv.dlrp");
  set("version", 1);
  set("num_layers", projectors.num_layers);
  set("num_qo_heads", projectors.shape.num_qo_heads);
  set("num_kv_heads", projectors.shape.num_kv_heads);
  set("head_dim", projectors.shape.head_dim);
  set("num_factors", projectors.options.num_factors);
  set("hidden", projectors.options.hidden);
  set("step", training.step);
  const bool before_rope = projectors.options.geometry == DlrpGeometry::before_rope;
  writer.set_metadata("geometry", before_rope ? "before_rope" : "after_rope");
  writer.set_metadata("pairing", projectors.options.pairing == RopePairing::interleaved
                                     ? "interleaved"
                                     : "half_split");
  writer.set_metadata("stage",
                      training.stage == DlrpStage::regularised ? "regularised" : "fine_tuning");
  const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape,
                       const std::vector<double>& values) { writer.add(name, shape, values); };
  add("training.alpha", {1}, {projectors.options.alpha});
  add("training.energy", {1}, {training.energy});
  add("training.last", {3}, {training.last.task, training.last.regulariser, training.last.total});
  for (int layer = 0; layer < projectors.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    std::vector<double> ranks;
    for (int head = 0; head < projectors.shape.num_kv_heads; ++head) {
      const HeadRanks& own = projectors.head_ranks(layer, head);
      ranks.push_back(own.qk);
      ranks.push_back(own.vo);
      if (before_rope)
        add(prefix + "pairs." + std::to_string(head), {own.qk / 2},
            std::vector<double>(own.pairs.begin(), own.pairs.end()));
    }
    add(prefix + "ranks", {projectors.shape.num_kv_heads, 2}, ranks);
  }
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const std::span<const Eigen::MatrixX<Real>> chain = projectors.chain(index);
    for (std::size_t n = 0; n < chain.size(); ++n) {
      std::vector<double> values(static_cast<std::size_t>(chain[n].size()));
      Eigen::Map<RowMajor>(values.data(), chain[n].rows(), chain[n].cols()) = chain[n];
      add(detail::factor_name(projectors.place_of(index), n), {chain[n].rows(), chain[n].cols()},
          values);
    }
  }
  return writer;
}

/// @brief Reads a training back: the same bits. Factors in F32, F16 or BF16 are taken too.
/// @throws FormatError, ShapeError or ValueError, naming both values, if the file is damaged, of
/// another kind, or does not fit together
template <class Real = double>
DlrpTraining read_training(const io::Safetensors& file) {
  using ::lowrankkv::detail::fail;
  if (detail::metadata_entry(file, "format") != "lowrankkv.dlrp" ||
      detail::metadata_entry(file, "version") != "1") {
    fail<FormatError>("projectors: format ",
                      ::lowrankkv::detail::printable(detail::metadata_entry(file, "format")),
                      " version ",
                      ::lowrankkv::detail::printable(detail::metadata_entry(file, "version")),
                      ", expected lowrankkv.dlrp version 1");
  }
  const auto finite = [&](const char* name, std::int64_t count) {
    std::vector<double> values = file.values<double>(name, {count});
    for (const double value : values) {
      if (!std::isfinite(value))
        fail<FormatError>("tensor ", name, ": ", value, ", finite expected");
    }
    return values;
  };
  DlrpTraining training;
  DeepProjectors& projectors = training.projectors;
  projectors = detail::read_layout(file);
  projectors.options.alpha = finite("training.alpha", 1).front();
  detail::check_options(projectors.shape, projectors.num_layers, projectors.options);
  training.stage = detail::metadata_choice(file, "stage", "regularised", "fine_tuning")
                       ? DlrpStage::fine_tuning
                       : DlrpStage::regularised;
  training.step = detail::metadata_count(file, "step", 0, std::int64_t{1} << 53);
  training.energy = finite("training.energy", 1).front();
  if (!(training.energy >= 0.0 && training.energy <= 1.0))
    fail<FormatError>("tensor training.energy: ", training.energy, ", 0 to 1 expected");
  const std::vector<double> last = finite("training.last", 3);
  training.last = {last[0], last[1], last[2]};
  const int dim = projectors.shape.head_dim, heads = projectors.shape.num_kv_heads;
  for (int layer = 0; layer < projectors.num_layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    const std::vector<int> ranks = detail::tensor_counts(file, prefix + "ranks", {heads, 2}, dim);
    for (int head = 0; head < heads; ++head) {
      HeadRanks own{ranks[static_cast<std::size_t>(2 * head)],
                    ranks[static_cast<std::size_t>(2 * head + 1)],
                    {}};
      if (projectors.options.geometry == DlrpGeometry::before_rope)
        own.pairs = detail::tensor_counts(file, prefix + "pairs." + std::to_string(head),
                                          {own.qk / 2}, dim);
      detail::check_ranks(projectors, own);
      if (training.stage == DlrpStage::regularised && (own.qk != dim || own.vo != dim))
        fail<FormatError>("tensor ", prefix, "ranks: r_qk ", own.qk, ", r_vo ", own.vo,
                          "; in the regularised stage head_dim ", dim, " expected");
      projectors.ranks.push_back(own);
    }
  }
  using RowMajor = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int depth = projectors.options.num_factors;
  for (int index = 0; index < projectors.num_chains(); ++index) {
    const ChainPlace place = projectors.place_of(index);
    const auto [rows, cols] = projectors.chain_extents(place);
    for (int n = 0; n < depth; ++n) {
      const int own_rows = n == 0 ? rows : projectors.options.hidden;
      const int own_cols = n + 1 == depth ? cols : projectors.options.hidden;
      const std::vector<double> values = file.values<double>(
          detail::factor_name(place, static_cast<std::size_t>(n)), {own_rows, own_cols});
      projectors.factors.emplace_back(
          Eigen::Map<const RowMajor>(values.data(), own_rows, own_cols));
    }
  }
  check_projectors<Real>(projectors);
  return training;
}

/// @brief Writes a training to a file. @throws as write_training(); FormatError if that fails
template <class Real = double>
void save_training(const std::string& path, const DlrpTraining& training) {
  write_training<Real>(training).write(path);
}

/// @brief Reads a training from a file. @throws as read_training(); FormatError if it cannot be
/// read
template <class Real = double>
DlrpTraining load_training(const std::string& path) {
  return read_training<Real>(io::Safetensors::read(path));
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
