// SPDX-License-Identifier: Apache-2.0
// Certificates on the device, through every operation on a sequence: never violated, and no larger
// than float64 says. Joint values: certify_joint_values.cu.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cuda/support/certified_sequences.cuh"

namespace certify_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using support::DeviceCache;
using support::message_of;
using support::Random;

namespace {

using Plain = StaticPCAHybrid<Cuda>;
using TwoScales = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, BlockHadamard>;
using Merging = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
using Rotating =
    CompressedKVCache<Cuda, PerHead, Oja, Compose<SinkRecent, SnapKV>, Int8, RotateNow>;
using Sketched =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, SinkRecent, Int8, KeepEpochs<2>>;
using SketchedRotating =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Compose<SinkRecent, ResidualOutliers>,
                      NoQuantizer, RotateNow>;
using SketchedChosen = CompressedKVCache<Cuda, PerHead, FrequentDirections,
                                         Compose<SinkRecent, SnapKV>, Int8, KeepEpochs<2>>;
using Chosen = CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, SnapKV>, Int8>;

}  // namespace

TEST_CASE("certificates of Budgeted: never violated, and what float64 says they are") {
  support::certificates<Budgeted<Cuda>>(DType::f16, 1201);
  support::certificates<Budgeted<Cuda>>(DType::bf16, 1202, false, 8);
  support::certificates<Budgeted<Cuda>>(DType::f16, 1203, true, 8);
}

TEST_CASE("certificates of plain coefficients: never violated, and what float64 says they are") {
  support::certificates<Plain>(DType::f16, 1204);
  support::certificates<Plain>(DType::bf16, 1205, true);
}

TEST_CASE(
    "certificates of codes of two scales, of rows that scores chose, of full rows in 8 bits: never "
    "violated, and what float64 says they are") {
  support::certificates<TwoScales>(DType::f16, 1206);
  support::certificates<TwoScales>(DType::bf16, 1214, true);
  support::certificates<Chosen>(DType::bf16, 1207);
  support::certificates<FullKV<Cuda>>(DType::f16, 1208, false, 8);
}

TEST_CASE("certificates where bases move and rows go to other epochs: never violated") {
  CHECK(support::certificates<Merging>(DType::f16, 1215) > 0);
  CHECK(support::certificates<Rotating>(DType::bf16, 1216) > 0);
  CHECK(support::certificates<Merging>(DType::bf16, 1217, true) > 0);
  support::certificates<OjaKVv2<Cuda>>(DType::f16, 1218);
}

TEST_CASE("certificates where sketches say when rows go to other epochs: never violated") {
  const std::int64_t merges[] = {support::certificates<Sketched>(DType::f16, 1219),
                                 support::certificates<SketchedRotating>(DType::bf16, 1220),
                                 support::certificates<Sketched>(DType::bf16, 1223, true),
                                 support::certificates<SketchedChosen>(DType::f16, 1222)};
  CHECK(*std::min_element(merges, merges + 2) > 0);
  CHECK(merges[2] + merges[3] > 0);
}

TEST_CASE("what certificates are asked for and cannot be") {
  Random random(1209);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 500;
  config.max_query_tokens = 4;
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 24);
  const SequenceId one = 1;
  const auto query = layer.queries(random, 1);
  const gpu::DeviceArray<float> q(query);
  const auto lse = support::poisoned(4), found = support::poisoned(12);
  Certificate* const out = reinterpret_cast<Certificate*>(found.data());
  const auto filled = [&](DeviceCache<Plain>& device) {
    device.cache.create(1);
    device.ingest(1, layer.rows(random, 100, true), layer.rows(random, 100, false));
    device.append(std::span(&one, 1), layer.rows(random, 1, true), layer.rows(random, 1, false));
  };
  DeviceCache<Plain> without(config, layer.basis, {});
  filled(without);
  CHECK(message_of([&] {
          without.cache.certify(1, without.queries(q, 1), {lse.data(), 1, 4}, {out, 1, 4});
        }).find("certify: keep_residuals is 0, 1 is needed") != std::string::npos);
  CHECK(without.cache.memory(1).residual_bytes == 0);
  config.keep_residuals = true;
  DeviceCache<Plain> device(config, layer.basis, {});
  filled(device);
  std::vector<RowState> states(101);
  device.cache.row_states(1, 0, 0, states);
  const std::size_t compressed =
      static_cast<std::size_t>(std::count(states.begin(), states.end(), RowState::compressed));
  CHECK(compressed > 0);
  CHECK(device.cache.memory(1).residual_bytes == 2 * (4 * compressed + 4));
  const auto message = [&](const QueryView& queries, const LseView& sums,
                           const CertificateView& target) {
    return message_of([&] { device.cache.certify(1, queries, sums, target); });
  };
  CHECK(message(device.queries(q, 1), {nullptr, 1, 4}, {out, 1, 4}) ==
        "lse: null pointer with num_tokens 1");
  CHECK(message(device.queries(q, 1), {lse.data(), 1, 3}, {out, 1, 4}).find("num_heads") == 0);
  CHECK(message(device.queries(q, 1), {lse.data(), 1, 4}, {nullptr, 1, 4}).find("num_tokens") == 0);
  CHECK(message(device.queries(q, 1), {lse.data(), 1, 4}, {out, 1, 2}).find("num_heads") == 0);
  const gpu::DeviceArray<float> many(layer.queries(random, 60));
  const auto sums = support::poisoned(240), targets = support::poisoned(720);
  const auto asked = [&](int tokens) {
    return message(device.queries(many, tokens), {sums.data(), tokens, 4},
                   {reinterpret_cast<Certificate*>(targets.data()), tokens, 4});
  };
  CHECK(asked(60) == "certify: 60 query tokens a sequence, max_query_tokens 4");
  device.cache.truncate(1, device.cache.rollback_limit(1) + 2);
  CHECK(asked(3) == "certify: 3 query tokens, sequence 1 has 2 tokens in its tail");
  // A log-sum-exp, or a query, that is not finite has no bound.
  device.cache.certify(1, device.queries(q, 1), {lse.data(), 1, 4}, {out, 1, 4});
  for (int i = 0; i < 4; ++i) {
    const auto numbers = support::host(found);
    CHECK(numbers[static_cast<std::size_t>(3 * i)] == std::numeric_limits<float>::infinity());
    CHECK(numbers[static_cast<std::size_t>(3 * i + 1)] == 2.0F);
  }
  auto odd = query;
  odd[64 + 3] = std::numeric_limits<float>::quiet_NaN();
  const support::Certified partly = support::certified(device, std::span(&one, 1), odd);
  CHECK(partly.certificates[1].output == std::numeric_limits<float>::infinity());
  CHECK(partly.certificates[2].output < 1e3F);
  // States say whether they have residuals; numbers that are no norms are refused.
  CHECK(message_of([&] { without.cache.load(2, device.save(1)); }) != "nothing was raised");
  CHECK(message_of([&] { device.cache.load(2, without.save(1)); }) != "nothing was raised");
  CHECK(!device.cache.contains(2));
  auto saved = device.save(1);
  std::fill(saved.end() - 16, saved.end(),
            std::byte{0xff});  // the largest values are the last of the block
  CHECK(message_of([&] {
          device.cache.load(2, support::with_checksum(saved));
        }).find("saved state: head 0: the largest value has norm") == 0);
  std::fill(saved.end() - 32, saved.end() - 16, std::byte{0xff});  // residuals before them
  CHECK(message_of([&] {
          device.cache.load(2, support::with_checksum(saved));
        }).find("saved state: residual ") == 0);
  std::string said;
  const support::CapturedStep step([&](cudaStream_t stream) {
    said = message_of([&] {
      device.cache.certify(1, device.queries(q, 1), {lse.data(), 1, 4}, {out, 1, 4},
                           kUnboundedCertificate, nullptr, stream);
    });
  });
  CHECK(said ==
        "certify: the stream is capturing a graph; only append, attend, attend_partial and "
        "accumulate can be captured");
}

}  // namespace certify_tests
