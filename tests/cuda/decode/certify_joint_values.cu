// SPDX-License-Identifier: Apache-2.0
// Certificates on the device where values are joint, and where rows take the places of others.
#include <doctest/doctest.h>

#include "cuda/support/certified_sequences.cuh"

namespace certify_joint_values_tests {

using namespace lowrankkv;

TEST_CASE("certificates of joint values: never violated, and what float64 says they are") {
  support::certificates<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>>(
      DType::f16, 1211);
  support::certificates<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, TransformCode>>(
      DType::f16, 1217);
  support::certificates<CompressedKVCache<Cuda, JointValues, Static,
                                          Compose<SinkRecent, ResidualOutliers>, BlockHadamard>>(
      DType::bf16, 1218);
  support::certificates<CompressedKVCache<
      Cuda, JointValues, Static, Compose<SinkRecent, SnapKV, ResidualOutliers>, TransformCode>>(
      DType::f16, 1219);
}

TEST_CASE(
    "certificates of joint values of pre-RoPE keys: never violated, and what float64 says they "
    "are") {
  support::certificates<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>>(
      DType::f16, 1215, true);
  support::certificates<StarKV<Cuda>>(DType::f16, 1216, true);
}

TEST_CASE(
    "certificates of heavy hitters with joint values in codes: never violated, and what float64 "
    "says they are") {
  support::certificates<StarKVH2O<Cuda>>(DType::f16, 1212);
  support::certificates<StarKVH2O<Cuda>>(DType::bf16, 1213);
}

}  // namespace certify_joint_values_tests
