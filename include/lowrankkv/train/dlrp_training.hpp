// SPDX-License-Identifier: Apache-2.0
/// @file train/dlrp_training.hpp  The two trainings of DLRP, driven by the caller's model and
/// optimiser (DLRP algorithms 1 and 2). Algorithm 3, deployment: train/dlrp_fold.hpp.
///
///     DlrpTraining training = begin_training(shape, num_layers, options);
///     train_until_converged(training, callbacks);       // algorithm 1, lines 3 to 9
///     begin_fine_tuning(training, energy);               // algorithm 2, lines 1 to 6
///     train_until_converged(training, callbacks);       // algorithm 2, lines 8 to 12
///
/// A DlrpTraining is all there is to know but the optimiser's state and the place in the data,
/// which are the caller's. It can be saved after any step (train/dlrp_file.hpp). Nothing is drawn
/// at random here, and all sums have one order: the same callbacks give the same bits.
#pragma once

#include <Eigen/Core>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/train/deep_projectors.hpp"
#include "lowrankkv/train/dlrp_objective.hpp"
#include "lowrankkv/train/dlrp_ranks.hpp"
#include "lowrankkv/train/low_rank_projectors.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace train {

/// @brief Which of the two trainings is under way.
enum class DlrpStage : std::uint8_t {
  regularised,  ///< algorithm 1: full rank, L_CE + alpha L_Reg
  fine_tuning   ///< algorithm 2: low rank, L_CE
};

/// @brief Where a training stands.
struct DlrpTraining {
  DeepProjectors projectors;
  DlrpStage stage = DlrpStage::regularised;
  std::int64_t step = 0;  ///< steps of this stage that are done
  double energy = 0.0;    ///< e that chose the ranks; 0: not chosen by energy
  Objective last;         ///< of the last step of this stage; zeros before it
};

/// @brief What the caller does in a training.
struct DlrpCallbacks {
  /// The task's loss of the next mini-batch, with the maps `products` applied (algorithm 1, lines 4
  /// and 5), and its gradient with respect to each. Both are in the order of
  /// DeepProjectors::chain_index(); gradients arrive as zeros of the products' shapes. The
  /// mini-batch should follow from training.step and the stage, or what it follows from be saved
  /// too.
  std::function<double(const DlrpTraining& training, const std::vector<Eigen::MatrixXd>& products,
                       std::vector<Eigen::MatrixXd>& gradients)>
      task;
  /// Moves the factors against their gradients (algorithm 1, line 8): an optimiser's step. Both in
  /// the order of DeepProjectors::factors; `step` counts from 0 in each stage.
  std::function<void(std::int64_t step, const std::vector<Eigen::MatrixXd>& gradients,
                     std::vector<Eigen::MatrixXd>& factors)>
      update;
  /// Whether the stage is over, asked before each step (algorithm 1, line 3). The place to
  /// evaluate, to report training.last and to save.
  std::function<bool(const DlrpTraining& training)> converged;
};

/// @brief A training of projectors that start as identities (DLRP algorithm 1, lines 1 and 2).
/// @throws as identity_projectors()
template <class Real = double>
DlrpTraining begin_training(const CacheShape& shape, int num_layers,
                            const DlrpOptions& options = {}) {
  return {
      identity_projectors<Real>(shape, num_layers, options), DlrpStage::regularised, 0, 0.0, {}};
}

/// @brief One pass through the loop of algorithm 1 (lines 4 to 8), or of algorithm 2 (lines 9 to
/// 11), whose objective has no regulariser. Uses callbacks.task and callbacks.update.
/// @return the objective before the update, also kept as training.last
/// @throws StateError if one of the two callbacks is missing; ValueError or ShapeError for a loss
/// or a gradient that is not finite or does not fit: `training` is then as it was. The same for
/// factors that do not fit or are not finite after `update`: they are then what it made of them,
/// and the step does not count
///
/// Cost, besides the callbacks: O(N) products of head_dim x hidden a chain. Memory: the factors
/// once more.
template <class Real = double>
Objective training_step(DlrpTraining& training, const DlrpCallbacks& callbacks) {
  if (!callbacks.task || !callbacks.update)
    ::lowrankkv::detail::fail<StateError>("training: task ", callbacks.task ? "given" : "missing",
                                          ", update ", callbacks.update ? "given" : "missing",
                                          "; both are needed");
  DeepProjectors& projectors = training.projectors;
  const std::vector<Eigen::MatrixX<Real>> products = fold_chains<Real>(projectors);
  std::vector<Eigen::MatrixX<Real>> of_products;
  of_products.reserve(products.size());
  for (const Eigen::MatrixX<Real>& product : products)
    of_products.push_back(Eigen::MatrixX<Real>::Zero(product.rows(), product.cols()));
  const double task = callbacks.task(training, products, of_products);
  const double alpha = training.stage == DlrpStage::regularised ? projectors.options.alpha : 0.0;
  std::vector<Eigen::MatrixX<Real>> gradients;
  const Objective objective = dlrp_objective<Real>(projectors, task, of_products, alpha, gradients);
  callbacks.update(training.step, gradients, projectors.factors);
  check_projectors<Real>(projectors);
  ++training.step;
  return training.last = objective;
}

/// @brief Steps until callbacks.converged says so (DLRP algorithm 1, lines 3 to 9; algorithm 2,
/// lines 8 to 12). Goes on where a training stands, so a restored one is continued by the same
/// call. @throws StateError if `converged` is missing; as training_step()
template <class Real = double>
void train_until_converged(DlrpTraining& training, const DlrpCallbacks& callbacks) {
  if (!callbacks.converged)
    ::lowrankkv::detail::fail<StateError>("training: converged missing, task ",
                                          callbacks.task ? "given" : "missing",
                                          "; both are needed");
  while (!callbacks.converged(training)) training_step<Real>(training, callbacks);
}

/// @brief From the first stage to the second: ranks by energy, then low-rank projectors (DLRP
/// algorithm 2, lines 1 to 6). The count of steps begins again.
/// @param energy  e in (0, 1]; energy_for_compression() finds one for a compression rate. The paper
/// has no default: each rate has its own
/// @throws StateError if the stage is fine-tuning already, ValueError unless 0 < energy <= 1; as
/// low_rank_projectors(). `training` is then as it was
template <class Real = double>
void begin_fine_tuning(DlrpTraining& training, double energy, RankScope scope = RankScope::layer,
                       LowRankStart start = LowRankStart::truncated) {
  if (training.stage == DlrpStage::fine_tuning)
    ::lowrankkv::detail::fail<StateError>("training: fine-tuning for ", training.step,
                                          " steps, with energy ", training.energy,
                                          "; ranks are chosen once");
  DeepProjectors low_rank = low_rank_projectors<Real>(
      training.projectors,
      select_ranks<Real>(training.projectors, chain_spectra<Real>(training.projectors), energy,
                         scope),
      start);
  training = {std::move(low_rank), DlrpStage::fine_tuning, 0, energy, {}};
}

}  // namespace train
LOWRANKKV_NAMESPACE_END
