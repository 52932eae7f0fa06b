// SPDX-License-Identifier: Apache-2.0
#include "lowrankkv/presets.hpp"
#include "op_sequences.hpp"

TEST_CASE("FullKV answers as plain attention does, whatever is done to its sequences") {
  properties::run_cases<lowrankkv::FullKV<>>(1, 12, 60, false);
}
TEST_CASE("StaticPCA answers as the oracle") {
  properties::run_cases<lowrankkv::StaticPCA<>>(2, 12, 60, false);
}
TEST_CASE("StaticPCAHybrid answers as the oracle") {
  properties::run_cases<lowrankkv::StaticPCAHybrid<>>(3, 12, 60, false);
}
TEST_CASE("StaticPCAHybrid with query-aware keys answers as the oracle") {
  properties::run_cases<lowrankkv::StaticPCAHybrid<>>(4, 12, 60, true);
}
