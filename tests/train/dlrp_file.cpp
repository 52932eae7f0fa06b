// SPDX-License-Identifier: Apache-2.0
// Files of trainings: the same bits, other tools' types, and what is refused.
#include "lowrankkv/train/dlrp_file.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "support/random_projectors.hpp"

namespace dlrp_file_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using train::DlrpGeometry;

train::DlrpTraining random_training(Random& random) {
  const auto geometry =
      support::uniform(random, 0, 1) == 0 ? DlrpGeometry::before_rope : DlrpGeometry::after_rope;
  train::DlrpTraining training;
  training.projectors = support::random_projectors(random, geometry);
  training.projectors.options.alpha = std::exp(support::gaussian(random, 1, 1)(0, 0));
  training.step = support::uniform(random, 0, 1000000);
  training.last = {0.1, 1.0 / 3.0, std::numeric_limits<double>::denorm_min()};
  if (support::uniform(random, 0, 1) == 0) {
    training.projectors = train::low_rank_projectors(
        training.projectors, support::random_ranks(random, training.projectors));
    training.stage = train::DlrpStage::fine_tuning;
    training.energy = std::uniform_real_distribution<double>(0.1, 1.0)(random);
  }
  return training;
}

TEST_CASE("a training that was saved is the same to the last bit") {
  Random random(490);
  const std::string path = "dlrp_training.safetensors";
  for (int round = 0; round < 40; ++round) {
    train::DlrpTraining training = random_training(random);
    training.projectors.factors[0](0, 0) = -0.0;
    train::save_training(path, training);
    const auto loaded = train::load_training(path);
    CHECK(loaded.projectors.shape == training.projectors.shape);
    CHECK(loaded.projectors.num_layers == training.projectors.num_layers);
    CHECK(loaded.projectors.options == training.projectors.options);
    CHECK(loaded.projectors.ranks == training.projectors.ranks);
    CHECK(loaded.projectors.factors == training.projectors.factors);
    CHECK(std::signbit(loaded.projectors.factors[0](0, 0)));
    CHECK(loaded.stage == training.stage);
    CHECK(loaded.step == training.step);
    CHECK(loaded.energy == training.energy);
    CHECK(loaded.last == training.last);
    CHECK(train::write_training(loaded).bytes() == train::write_training(training).bytes());
  }
  std::remove(path.c_str());
  CHECK_THROWS_AS(train::load_training(path), FormatError);
}

/// A file like that of a training, with a tensor or an entry changed. Values are f64.
struct Changed {
  std::string tensor;               ///< to be replaced
  std::vector<std::int64_t> shape;  ///< of the new one; empty: it is left out
  double value = 0.0;               ///< of all its numbers
  std::string key, entry;           ///< of the metadata
};

std::string error_of(const train::DlrpTraining& training, const Changed& change) {
  const io::Safetensors file(train::write_training(training).bytes());
  io::SafetensorsWriter writer;
  for (const auto& [key, entry] : file.metadata())
    if (key != change.key || !change.entry.empty())
      writer.set_metadata(key, key == change.key ? change.entry : entry);
  for (const auto& [name, info] : file.tensors()) {
    if (name != change.tensor)
      writer.add(name, info.shape, file.values<double>(name, info.shape));
    else if (!change.shape.empty()) {
      std::size_t count = 1;
      for (const auto extent : change.shape) count *= static_cast<std::size_t>(extent);
      writer.add(name, change.shape, std::vector<double>(count, change.value));
    }
  }
  try {
    train::read_training(io::Safetensors(writer.bytes()));
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST_CASE("damaged files are refused with both values, other tensors are left alone") {
  train::DlrpOptions options;
  options.hidden = 5;
  const auto training = train::begin_training({4, 2, 4}, 2, options);
  CHECK(error_of(training, {}) == "accepted");
  const auto entry = [&](const char* key, const char* value) {
    return error_of(training, {"", {}, 0.0, key, value});
  };
  const auto tensor = [&](const char* name, std::vector<std::int64_t> shape, double value) {
    return error_of(training, {name, std::move(shape), value, "", ""});
  };
  CHECK(entry("format", "lowrankkv.moments") ==
        "projectors: format lowrankkv.moments version 1, expected lowrankkv.dlrp version 1");
  CHECK(entry("version", "2") ==
        "projectors: format lowrankkv.dlrp version 2, expected lowrankkv.dlrp version 1");
  CHECK(entry("head_dim", "") == "metadata: head_dim is missing among 11 entries");
  CHECK(entry("head_dim", "4x") == "metadata: head_dim is 4x, 1 to 1048576 expected");
  CHECK(entry("num_layers", "0") == "metadata: num_layers is 0, 1 to 1048576 expected");
  CHECK(entry("step", "-1") == "metadata: step is -1, 0 to 9007199254740992 expected");
  CHECK(entry("num_layers", "1000000") ==
        "projectors: 12000000 chains of 2 factors, file has 57 tensors");
  CHECK(entry("num_factors", "3") == "projectors: 24 chains of 3 factors, file has 57 tensors");
  CHECK(entry("geometry", "behind") ==
        "metadata: geometry is behind, before_rope or after_rope expected");
  CHECK(entry("pairing", "no\n") ==
        "metadata: pairing is no\\x0a, half_split or interleaved expected");
  CHECK(entry("stage", "done") == "metadata: stage is done, regularised or fine_tuning expected");
  CHECK(entry("hidden", "3") ==
        "hidden: 3, below head_dim 4: a chain could not start as the identity");
  CHECK(entry("hidden", "6") ==
        "safetensors: tensor layers.0.query.0.factors.0 has shape [4, 5], expected [4, 6]");
  CHECK(entry("num_kv_heads", "3") == "num_qo_heads 4 is not a multiple of num_kv_heads 3");
  CHECK(tensor("training.alpha", {1}, -1.0) == "alpha: finite and at least 0, given -1");
  CHECK(tensor("training.alpha", {1}, HUGE_VAL) == "tensor training.alpha: inf, finite expected");
  CHECK(tensor("training.energy", {1}, 1.5) == "tensor training.energy: 1.5, 0 to 1 expected");
  CHECK(tensor("layers.1.ranks", {2, 2}, 3.5) ==
        "tensor layers.1.ranks: 3.5, a count up to 4 expected");
  CHECK(tensor("layers.1.ranks", {2, 2}, 2.0) ==
        "safetensors: tensor layers.1.pairs.0 has shape [2], expected [1]");
  CHECK(tensor("layers.1.pairs.1", {2}, 1.0) == "pairs: entry 1 is 1, ascending below 2 expected");
  CHECK(tensor("layers.0.key.1.factors.0", {}, 0.0) ==
        "safetensors: tensor layers.0.key.1.factors.0 is missing among 56");
  CHECK(tensor("layers.0.output.3.factors.1", {5, 4}, HUGE_VAL) ==
        "factor 1 of layer 0, output 3: its norm is inf, finite expected");
  // In the first stage, all ranks are full.
  auto cut = training;
  cut.projectors =
      train::low_rank_projectors(training.projectors, std::vector<train::HeadRanks>(4, {2, 3, {}}));
  CHECK(error_of(cut, {}) ==
        "tensor layers.0.ranks: r_qk 2, r_vo 3; in the regularised stage head_dim 4 expected");
  // An optimiser's own tensors, and factors in f32.
  auto writer = train::write_training(training);
  writer.add("optimiser.velocity", {2}, std::vector<float>{1, 2});
  CHECK(train::read_training(io::Safetensors(writer.bytes())).projectors.factors ==
        training.projectors.factors);
  auto broken = training;
  broken.projectors.factors.pop_back();
  CHECK_THROWS_WITH_AS(train::write_training(broken), "factors: chains have 48, given 47",
                       ShapeError);
}

}  // namespace dlrp_file_tests
