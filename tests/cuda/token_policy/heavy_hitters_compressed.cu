// SPDX-License-Identifier: Apache-2.0
// Heavy hitters that are compressed on the GPU head by head: plain coefficients, codes.
#include <doctest/doctest.h>

#include <string>

#include "cuda/support/heavy_hitter_cases.cuh"

namespace heavy_hitters_compressed_tests {

using namespace lowrankkv;
using namespace heavy;

namespace {

using Tokens = Compose<SinkRecent, HeavyHitters>;
using Plain = CompressedKVCache<Cuda, PerHead, Static, Tokens, NoQuantizer>;
using Codes = CompressedKVCache<Cuda, PerHead, Static, Tokens, TransformCode>;

}  // namespace

TEST_CASE(
    "accumulated scores of compressed rows are those of float64 attention over what is stored; the "
    "same bits in any batch") {
  Random random(103);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    const double plain = check_scores<Plain>(random, type, trials),
                 codes = check_scores<Codes>(random, type, trials);
    MESSAGE("accumulated scores of a step, " << std::string(name_of(type)) << ": coefficients "
                                             << plain << ", codes " << codes);
  }
}

TEST_CASE(
    "compressed rows that prompts and steps keep are those that float64 accumulated scores "
    "choose") {
  Random random(111);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  check_kept<Plain>(random, trials);
  check_kept<Codes>(random, trials);
}

TEST_CASE(
    "compressed rows whose keys are stored before RoPE: accumulated scores of float64, and what "
    "they "
    "keep, stored in any order") {
  Random random(113);
  const int trials = effort() == 0 ? 1 : 4 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    if (effort() == 0 && type == DType::bf16) continue;
    const double plain = check_scores<Plain>(random, type, trials, true),
                 codes = check_scores<Codes>(random, type, trials, true);
    MESSAGE("accumulated scores of a step, unrotated, "
            << std::string(name_of(type)) << ": coefficients " << plain << ", codes " << codes);
  }
  check_kept<Codes>(random, trials, true);
  if (effort() > 0) check_kept<Plain>(random, trials, true);
}

TEST_CASE(
    "the same accumulated scores keep the same compressed rows as on the CPU, and what is stored "
    "of them is the same") {
  Random random(117);
  const int trials = effort() == 0 ? 1 : 8 * effort();
  check_parity<Plain>(random, trials);
  check_parity<Codes>(random, trials);
}

TEST_CASE(
    "forks and loaded copies of compressed heavy hitters go on as the original, bit for bit; steps "
    "in a CUDA graph, maintain between its replays") {
  Random random(123);
  check_copies<Codes>(random);
  check_replays<Codes>(random);
  if (effort() > 0) check_copies<Plain>(random);
}

}  // namespace heavy_hitters_compressed_tests
