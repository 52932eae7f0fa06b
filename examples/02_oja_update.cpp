// SPDX-License-Identifier: Apache-2.0
// One algorithm on a matrix of your own: an Oja step, and how much closer to the rows it brings a
// basis.
#include <Eigen/Dense>
#include <cstdio>

#include "lowrankkv/cpu/updater/oja.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"

int main() {
  const Eigen::MatrixXd keys = Eigen::MatrixXd::Random(400, 4) * Eigen::MatrixXd::Random(4, 64) +
                               0.1 * Eigen::MatrixXd::Random(400, 64);
  const Eigen::MatrixXd basis =
      lowrankkv::linalg::orthonormal_columns(Eigen::MatrixXd::Random(64, 16));
  const Eigen::MatrixXd moved = lowrankkv::cpu::oja_update(keys, basis, 0.1);
  std::printf("residual energy: %.3f before the step, %.3f after it\n",
              lowrankkv::diagnostics::residual_energy_ratio(keys, basis),
              lowrankkv::diagnostics::residual_energy_ratio(keys, moved));
}
