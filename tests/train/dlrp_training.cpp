// SPDX-License-Identifier: Apache-2.0
// Algorithms 1 and 2: what a step does, that training lowers its objective, and that two runs, and
// a run that was stopped, give the same bits.
#include "lowrankkv/train/dlrp_training.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "lowrankkv/train/dlrp_file.hpp"
#include "lowrankkv/train/dlrp_fold.hpp"
#include "lowrankkv/train/map_file.hpp"
#include "support/random_projectors.hpp"

namespace dlrp_training_tests {

using namespace lowrankkv;
using Eigen::MatrixXd;
using support::Random;
using train::DlrpGeometry;
using train::DlrpStage;
using train::DlrpTraining;

/// A task with an answer of low rank: every product P should act on rows x as a target T does.
/// Batches follow from the stage and the step. The optimiser is momentum; its state is its own.
struct Run {
  std::vector<MatrixXd> targets, velocity;
  std::int64_t stop = 0;
  double rate = 0.02;

  Run(const CacheShape& shape, int chains, int rank) {
    Random random(470);
    for (int i = 0; i < chains; ++i)
      targets.emplace_back(support::gaussian(random, shape.head_dim, rank) *
                           support::gaussian(random, rank, shape.head_dim) /
                           static_cast<double>(shape.head_dim));
  }
  train::DlrpCallbacks callbacks() {
    train::DlrpCallbacks calls;
    calls.task = [this](const DlrpTraining& training, const std::vector<MatrixXd>& products,
                        std::vector<MatrixXd>& gradients) {
      Random random(1000 * static_cast<unsigned>(training.stage) +
                    static_cast<unsigned>(training.step));
      double loss = 0.0;
      for (std::size_t i = 0; i < products.size(); ++i) {
        // At low rank the products' extents differ; what they have in common is compared.
        const auto rows = products[i].rows(), cols = products[i].cols();
        const MatrixXd x = support::gaussian(random, 16, rows);
        const MatrixXd error = x * (products[i] - targets[i].topLeftCorner(rows, cols));
        loss += 0.5 * error.squaredNorm() / 16.0;
        gradients[i] += x.transpose() * error / 16.0;
      }
      return loss;
    };
    calls.update = [this](std::int64_t step, const std::vector<MatrixXd>& gradients,
                          std::vector<MatrixXd>& factors) {
      if (step == 0) velocity.clear();
      for (std::size_t i = 0; i < factors.size(); ++i) {
        if (velocity.size() == i)
          velocity.emplace_back(MatrixXd::Zero(factors[i].rows(), factors[i].cols()));
        velocity[i] = 0.8 * velocity[i] - rate * gradients[i];
        factors[i] += velocity[i];
      }
    };
    calls.converged = [this](const DlrpTraining& training) { return training.step >= stop; };
    return calls;
  }
};

train::DlrpOptions options_of(DlrpGeometry geometry, double alpha) {
  train::DlrpOptions options;
  options.hidden = 7;
  options.alpha = alpha;
  options.geometry = geometry;
  return options;
}

TEST_CASE("training lowers its objective, and the regulariser gathers energy in few directions") {
  const CacheShape shape{2, 1, 6};
  for (const auto geometry : {DlrpGeometry::before_rope, DlrpGeometry::after_rope}) {
    std::vector<double> energy_of_two;  // the share of sigma^2 in two directions, per alpha
    for (const double alpha : {0.0, 0.03}) {
      DlrpTraining training = train::begin_training(shape, 2, options_of(geometry, alpha));
      Run run(shape, training.projectors.num_chains(), 2);
      const auto calls = run.callbacks();
      const double first = train::training_step(training, calls).total;
      CHECK(training.step == 1);
      run.stop = 150;
      train::train_until_converged(training, calls);
      CHECK(training.step == 150);
      CHECK(training.last.total < 0.3 * first);
      CHECK((training.last.regulariser > 0.0) == (alpha > 0.0));
      double share = 0.0;
      const auto spectra = train::chain_spectra(training.projectors);
      for (const auto& spectrum : spectra) share += spectrum.head(2).sum() / spectrum.sum();
      energy_of_two.push_back(share / static_cast<double>(spectra.size()));
      if (alpha == 0.0) continue;
      train::begin_fine_tuning(training, 0.9);
      CHECK(training.stage == DlrpStage::fine_tuning);
      CHECK(training.step == 0);
      CHECK(training.energy == 0.9);
      CHECK(training.last == train::Objective{});
      for (const auto& own : training.projectors.ranks) {
        CHECK(own.qk < shape.head_dim);
        CHECK(own.vo < shape.head_dim);
      }
      const auto begun = train::training_step(training, calls);
      CHECK(begun.regulariser == 0.0);
      CHECK(begun.total == begun.task);
      train::train_until_converged(training, calls);
      CHECK(training.last.task < begun.task);
      CHECK_THROWS_WITH_AS(train::begin_fine_tuning(training, 0.5),
                           "training: fine-tuning for 150 steps, with energy 0.9; ranks are chosen "
                           "once",
                           StateError);
    }
    MESSAGE("energy in two directions, without and with the regulariser: ", energy_of_two[0], ", ",
            energy_of_two[1]);
    CHECK(energy_of_two[1] > energy_of_two[0]);
  }
}

TEST_CASE("two runs, and one that was saved and went on, give the same bits") {
  const CacheShape shape{4, 2, 4};
  const auto bytes_after = [&](std::int64_t pause) {
    DlrpTraining training =
        train::begin_training(shape, 2, options_of(DlrpGeometry::before_rope, 0.01));
    Run run(shape, training.projectors.num_chains(), 2);
    const auto go = [&](std::int64_t steps) {
      run.stop = steps;
      train::train_until_converged(training, run.callbacks());
    };
    const auto reread = [&] {
      const io::Safetensors file(train::write_training(training).bytes());
      training = train::read_training(file);
    };
    if (pause > 0) go(pause), reread();
    go(9);
    train::begin_fine_tuning(training, 0.9, train::RankScope::kv_head);
    if (pause > 0) reread(), go(pause), reread();
    go(7);
    return train::write_training(training).bytes();
  };
  const auto whole = bytes_after(0);
  CHECK(bytes_after(0) == whole);
  CHECK(bytes_after(4) == whole);
}

TEST_CASE("from identities to maps that a cache takes") {
  const CacheShape shape{4, 2, 6};
  const int num_layers = 2;
  train::DlrpOptions options = options_of(DlrpGeometry::after_rope, 0.01);
  Run run(shape, num_layers * 8, 2);
  run.stop = 20;
  const train::DlrpCallbacks callbacks = run.callbacks();
  const std::string path = "trained_maps.safetensors";
  //! [train]
  train::DlrpTraining training = train::begin_training(shape, num_layers, options);
  train::train_until_converged(training, callbacks);  // algorithm 1

  const auto spectra = train::chain_spectra(training.projectors);
  const double energy = train::energy_for_compression(training.projectors, spectra, 0.25);
  train::begin_fine_tuning(training, energy);
  train::train_until_converged(training, callbacks);  // algorithm 2

  std::vector<LayerBasis> bases;  // algorithm 3
  for (int layer = 0; layer < num_layers; ++layer)
    bases.push_back(train::projector_basis(training.projectors, layer));
  train::save_maps(path, bases, shape);
  //! [train]
  CHECK(train::compression_rate(training.projectors.ranks, shape.head_dim) >= 0.25);
  const auto loaded = train::load_maps(path, shape, num_layers);
  std::remove(path.c_str());
  CHECK(loaded[1].heads[1].output_up == bases[1].heads[1].output_up);
}

TEST_CASE("a step that fails before the update leaves the training as it was") {
  const CacheShape shape{2, 1, 4};
  DlrpTraining training =
      train::begin_training(shape, 1, options_of(DlrpGeometry::before_rope, 0.1));
  const auto before = train::write_training(training).bytes();
  Run run(shape, training.projectors.num_chains(), 2);
  const auto with = [&](auto&& change) {
    auto calls = run.callbacks();
    change(calls);
    train::training_step(training, calls);
  };
  CHECK_THROWS_WITH_AS(with([](auto& calls) { calls.task = {}; }),
                       "training: task missing, update given; both are needed", StateError);
  CHECK_THROWS_WITH_AS(with([](auto& calls) {
                         calls.task = [](const auto&, const auto&, auto&) { return HUGE_VAL; };
                       }),
                       "task loss: inf, finite expected", ValueError);
  CHECK_THROWS_WITH_AS(with([](auto& calls) {
                         calls.task = [](const auto&, const auto&, auto& gradients) {
                           gradients[1].resize(4, 3);
                           gradients[1].setZero();
                           return 1.0;
                         };
                       }),
                       "cols: chain 4, gradient 3", ShapeError);
  CHECK_THROWS_WITH_AS(train::begin_fine_tuning(training, 0.0), "energy share: in (0, 1], given 0",
                       ValueError);
  CHECK_THROWS_WITH_AS(train::train_until_converged(training, {}),
                       "training: converged missing, task missing; both are needed", StateError);
  CHECK(train::write_training(training).bytes() == before);
  // What an optimiser breaks is said, and the step does not count.
  CHECK_THROWS_WITH_AS(with([](auto& calls) {
                         calls.update = [](std::int64_t, const auto&, auto& factors) {
                           factors[3](0, 0) = std::nan("");
                         };
                       }),
                       "factor 1 of layer 0, query 1: its norm is nan, finite expected",
                       ValueError);
  CHECK(training.step == 0);
}

}  // namespace dlrp_training_tests
