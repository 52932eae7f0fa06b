// SPDX-License-Identifier: Apache-2.0
#include "lowrankkv/presets.hpp"
#include "op_sequences.hpp"

namespace {
template <class Token, class Epochs>
using OjaCache = lowrankkv::CompressedKVCache<lowrankkv::Cpu, lowrankkv::PerHead, lowrankkv::Oja,
                                              Token, lowrankkv::NoQuantizer, Epochs>;
using lowrankkv::SinkRecent;
}  // namespace

TEST_CASE("OjaKV answers as the oracle") {
  properties::run_cases<lowrankkv::OjaKV<>>(11, 12, 60, false);
}
TEST_CASE("OjaKV with query-aware keys answers as the oracle") {
  properties::run_cases<lowrankkv::OjaKV<>>(16, 8, 60, true);
}
TEST_CASE("OjaKV with two epochs merges as the oracle does") {
  CHECK(properties::run_cases<OjaCache<SinkRecent, lowrankkv::KeepEpochs<2>>>(12, 12, 60, false) >
        20);
}
TEST_CASE("OjaKV with one epoch merges as the oracle does") {
  CHECK(properties::run_cases<OjaCache<SinkRecent, lowrankkv::KeepEpochs<1>>>(13, 8, 60, false) >
        20);
}
TEST_CASE("OjaKV that rotates everything answers as the oracle") {
  CHECK(properties::run_cases<OjaCache<SinkRecent, lowrankkv::RotateNow>>(14, 12, 60, false) > 20);
}
TEST_CASE("Oja without a full-rank window answers as the oracle") {
  properties::run_cases<OjaCache<lowrankkv::CompressAll, lowrankkv::KeepEpochs<3>>>(15, 8, 60,
                                                                                    false);
}
