// SPDX-License-Identifier: Apache-2.0
// Heavy hitters that are compressed on the GPU: plain coefficients, codes, joint values, STAR-KV with H2O.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "heavy_cases.cuh"

using namespace lowrankkv;
using namespace heavy;
using support::message_of;

namespace {

using Tokens = Compose<SinkRecent, HeavyHitters>;
using Plain = CompressedKVCache<Cuda, PerHead, Static, Tokens, NoQuantizer>;
using Codes = CompressedKVCache<Cuda, PerHead, Static, Tokens, TransformCode>;
using Joint = CompressedKVCache<Cuda, JointValues, Static, Tokens, NoQuantizer>;
using JointCodes = CompressedKVCache<Cuda, JointValues, Static, Tokens, TransformCode>;
using Star = StarKVH2O<Cuda>;

}  // namespace

TEST_CASE("masses of compressed rows are those of float64 attention over what is stored; the same bits in any batch") {
  Random random(103);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    const double plain = check_masses<Plain>(random, type, trials), codes = check_masses<Codes>(random, type, trials), joint = check_masses<Joint>(random, type, trials),
                 star = check_masses<Star>(random, type, trials);
    MESSAGE("masses of a step, " << std::string(name_of(type)) << ": coefficients " << plain << ", codes " << codes << ", joint values " << joint << ", STAR-KV " << star);
  }
}

TEST_CASE("compressed rows that prompts and steps keep are those that float64 masses choose") {
  Random random(111);
  const int trials = effort() == 0 ? 1 : 6 * effort();
  check_kept<Plain>(random, trials);
  check_kept<Codes>(random, trials);
  check_kept<Joint>(random, trials);
  check_kept<JointCodes>(random, trials);
  check_kept<Star>(random, trials);
}

TEST_CASE("compressed rows whose keys are stored unrotated: masses of float64, and what they keep, stored in any order") {
  Random random(113);
  const int trials = effort() == 0 ? 1 : 4 * effort();
  for (const DType type : {DType::f16, DType::bf16}) {
    if (effort() == 0 && type == DType::bf16) continue;
    const double plain = check_masses<Plain>(random, type, trials, true), codes = check_masses<Codes>(random, type, trials, true), joint = check_masses<Joint>(random, type, trials, true),
                 star = check_masses<Star>(random, type, trials, true);
    MESSAGE("masses of a step, unrotated, " << std::string(name_of(type)) << ": coefficients " << plain << ", codes " << codes << ", joint values " << joint << ", STAR-KV " << star);
  }
  check_kept<Codes>(random, trials, true);
  check_kept<Star>(random, trials, true);
  if (effort() == 0) return;
  check_kept<Plain>(random, trials, true);
  check_kept<Joint>(random, trials, true);
  check_kept<JointCodes>(random, trials, true);
}

TEST_CASE("the same masses keep the same compressed rows as on the CPU, and what is stored of them is the same") {
  Random random(117);
  const int trials = effort() == 0 ? 1 : 8 * effort();
  check_parity<Plain>(random, trials);
  check_parity<Codes>(random, trials);
  check_parity<Joint>(random, trials);
  check_parity<JointCodes>(random, trials);
  check_parity<Star>(random, trials);
}

TEST_CASE("forks and loaded copies of compressed heavy hitters go on as the original, bit for bit") {
  Random random(123);
  check_copies<Codes>(random);
  check_copies<JointCodes>(random);
  check_copies<Star>(random);
  if (effort() == 0) return;
  check_copies<Plain>(random);
  check_copies<Joint>(random);
}

TEST_CASE("steps of compressed heavy hitters in a CUDA graph, maintain between its replays") {
  Random random(131);
  check_replays<Codes>(random);
  check_replays<Star>(random, true);
  if (effort() > 0) check_replays<Star>(random);
}

TEST_CASE("forks of compressed heavy hitters that are maintained together demand the pages that they take: with one less nothing changes") {
  Random random(129);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 3, 16);
  const HeavySettings settings{{0.25F, 200, 20}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  const auto policies = policies_of<Star>(settings);
  const std::int64_t pages = Star::num_pages(config, layer.basis, policies) / 3;  // of one sequence, which never has more than 200 rows a list
  REQUIRE(pages >= 3);
  const std::vector<SequenceId> seqs{1, 2, 3};
  for (const std::int64_t missing : {1, 0}) {
    const auto pool = std::make_shared<gpu::PagePool>(Star::page_bytes(config, layer.basis, policies), 3 * pages - missing);
    Side<Star> side(config, layer, settings, pool);
    side.cache.create(1);
    side.ingest(1, random_rows(random, 900, 2, 64, DType::f16), random_rows(random, 900, 2, 64, DType::f16), random_rows(random, 900, 2, 64, DType::f32));
    CHECK(pool->allocator().num_free() == 2 * pages - missing);
    side.cache.fork(1, 2);
    side.cache.fork(1, 3);
    side.append(seqs, random_rows(random, 3 * 20, 2, 64, DType::f16), random_rows(random, 3 * 20, 2, 64, DType::f16));
    std::vector<float> before[2], after[2];
    side.reconstruct(1, before[0], before[1]);
    if (missing > 0) {
      CHECK(message_of([&] { side.cache.maintain(seqs); }) == "page pool: " + std::to_string(2 * pages) + " pages needed, " + std::to_string(2 * pages - 1) + " free");
      side.reconstruct(1, after[0], after[1]);
      CHECK(after[0] == before[0]);
      CHECK(after[1] == before[1]);
      continue;
    }
    side.cache.maintain(seqs);
    CHECK(pool->allocator().num_free() == 0);
    for (const SequenceId seq : seqs) CHECK(side.cache.tail_length(seq) == 24);
  }
}

TEST_CASE("tokens that go from among heavy hitters that a fork reads: without pages for a copy nothing changes") {
  Random random(131);
  const CacheConfig config = config_of({2, 2, 64}, 1000, 2, 16);
  const HeavySettings settings{{0.25F, 200, 20}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  const auto policies = policies_of<Star>(settings);
  const std::int64_t pages = Star::num_pages(config, layer.basis, policies) / 2;
  const auto pool = std::make_shared<gpu::PagePool>(Star::page_bytes(config, layer.basis, policies), pages);
  Side<Star> side(config, layer, settings, pool);
  side.cache.create(1);
  side.ingest(1, random_rows(random, 900, 2, 64, DType::f16), random_rows(random, 900, 2, 64, DType::f16), random_rows(random, 900, 2, 64, DType::f32));
  REQUIRE(pool->allocator().num_free() == 0);
  side.cache.fork(1, 2);
  const std::vector<std::byte> before = side.save(2);
  CHECK(message_of([&] { side.cache.truncate(2, 500); }).find(" pages needed, 0 free") != std::string::npos);
  CHECK(message_of([&] { side.cache.check_truncate(2, 500); }).find(" pages needed, 0 free") != std::string::npos);
  CHECK(message_of([&] { side.cache.remove(2, 100, 300); }).find(" pages needed, 0 free") != std::string::npos);
  CHECK(side.save(2) == before);
  CHECK(side.save(1) == before);
  side.cache.erase(1);
  CHECK(side.cache.truncate(2, 500) == TruncateResult::inexact);
  CHECK(side.cache.num_tokens(2) == 500);
}

TEST_CASE("saved compressed heavy hitters: hostile masses, positions and counts under a right checksum are refused, or do no harm") {
  Random random(141);
  const CacheConfig config = config_of({4, 2, 64}, 600, 2, 16);
  const HeavySettings settings{{0.25F, 0, 20}, {3, 0}};
  const RandomLayer layer = layer_of<Star>(random, config.shape, settings);
  Side<Star> side(config, layer, settings);
  side.cache.create(1);
  side.prefill(1, random_rows(random, 300, 4, 64, DType::f32), random_rows(random, 300, 2, 64, DType::f16), random_rows(random, 300, 2, 64, DType::f16));
  Growth(random, config.shape, 20).grow(side, 1);
  const std::vector<std::byte> saved = side.save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) { return message_of([&] { side.cache.load(2, support::with_checksum(bytes)); }); };
  // From the end: masses of the ring [head, place], of the compressed rows [head, row], their positions.
  const std::size_t ring = static_cast<std::size_t>((side.cache.config().tail_capacity + 31) / 32 * 32), rows = side.cache.memory(1).position_bytes / 8 - 3, padded = (2 * rows * 4 + 15) / 16 * 16;
  const std::size_t tail_masses = saved.size() - 2 * ring * 4, masses = tail_masses - padded, positions = masses - padded;
  for (const std::size_t place : {tail_masses + 4, masses + 8}) {
    for (const float value : {std::nanf(""), -1.0F}) {
      auto hostile = saved;
      std::memcpy(hostile.data() + place, &value, sizeof value);
      CHECK(load(hostile).find("finite and at least 0 expected") != std::string::npos);
    }
  }
  std::vector<std::int32_t> listed(2 * rows);
  std::memcpy(listed.data(), saved.data() + positions, listed.size() * 4);
  CHECK(!std::is_sorted(listed.begin(), listed.begin() + static_cast<std::ptrdiff_t>(rows)));  // rows have taken others' places
  for (const std::int32_t position : {listed[0], -1, 340}) {
    auto hostile = saved;
    std::memcpy(hostile.data() + positions + 4, &position, sizeof position);
    CHECK(load(hostile).find("the tail begins at") != std::string::npos);
  }
  CHECK(load_hostile(random, side, saved, positions, effort() == 0 ? 40 : 400) > 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

namespace {

/// Masses on request, of a cache that keeps no rows by them, against float64 over what is stored.
template <class Cache>
double masses_on_request(Random& random, const RandomLayer& layer, const typename Cache::PolicySet& policies, double limit, bool unrotated = false) {
  CacheConfig config = config_of(layer.shape, 3000, 2, 16);
  config.publish_interval = 40;
  if (unrotated) config.rope = support::random_rope(random, layer.shape.head_dim);
  support::DeviceCache<Cache> side(config, layer.basis, policies);
  const int heads = layer.shape.num_kv_heads, dim = layer.shape.head_dim, queries = layer.shape.num_qo_heads;
  const std::vector<SequenceId> seqs{1, 2};
  for (const SequenceId seq : seqs) {
    side.cache.create(seq);
    const int n = seq == 2 ? 77 : effort() == 0 ? 300 : 900;
    side.ingest(seq, random_rows(random, n, heads, dim, DType::f16), random_rows(random, n, heads, dim, DType::f16), random_rows(random, std::min(n, 64), queries, dim, DType::f16));
  }
  for (int step = 0; step < 30; ++step) {
    side.append(seqs, random_rows(random, 2 * 4, heads, dim, DType::f16), random_rows(random, 2 * 4, heads, dim, DType::f16));
    side.cache.maintain(seqs);
  }
  const auto query = random_rows(random, 2 * 3, queries, dim, DType::f32, 1.5F);
  const gpu::DeviceArray<float> q(query);
  const std::int64_t positions = side.cache.num_tokens(1) + 5;
  const auto out = poisoned(query.size()), mass = poisoned(static_cast<std::size_t>(2 * heads * positions));
  side.cache.attend(seqs, side.queries(q, 6), {out.data(), 6, queries, dim}, {}, MassView{mass.data(), 2, heads, positions});
  CHECK(host(out) == side.attend(seqs, query).out);
  double worst = 0.0;
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<float> key, value, found;
    side.reconstruct(seqs[i], key, value);
    const std::vector<bool> there = kept_rows_of(layer.shape, key);
    const std::vector<float> own = part_of(host(mass), i, 2);
    bool zeros = true;
    for (int head = 0; head < heads; ++head) {
      for (std::int64_t position = 0; position < positions; ++position) {
        const float received = own[static_cast<std::size_t>(head * positions + position)];
        if (position < side.cache.num_tokens(seqs[i])) found.push_back(received);
        else zeros = zeros && received == 0.0F;
      }
    }
    CHECK(zeros);
    worst = std::max(worst, distance(found, masses_f64(layer.shape, config.scale(), support::turned(config, key), there, part_of(query, i, 2))));
  }
  CHECK(worst < limit);
  return worst;
}

}  // namespace

TEST_CASE("any cache says how much attention its rows received: rows of several epochs, listed or not, full, compressed, in the tail") {
  Random random(151);
  const CacheShape shape{8, 2, 64};
  const RandomLayer layer = support::random_layer(random, shape, {}, 24), joint = support::joint_layer(random, shape, {}, 0, 24, 60);
  const double full = masses_on_request<FullKV<Cuda>>(random, {{}, shape}, {}, 2e-5);
  const double hybrid = masses_on_request<StaticPCAHybrid<Cuda>>(random, layer, {{}, {}, {4, 20}, {}}, 2e-5);
  OjaKVv2<Cuda>::PolicySet outliers;
  outliers.token_policy.get<SinkRecent>() = {4, 20};
  const double oja = masses_on_request<OjaKVv2<Cuda>>(random, layer, outliers, 2e-5);
  SubSpaceA<Cuda>::PolicySet chunks;
  chunks.token_policy = {4, 20};
  chunks.updater.chunk_length = 50;
  const double directions = masses_on_request<SubSpaceA<Cuda>>(random, layer, chunks, 1e-3);
  SnapKVOnly<Cuda>::PolicySet chosen;
  chosen.token_policy.get<KeepFull>().recent = 0;
  const double snapkv = masses_on_request<SnapKVOnly<Cuda>>(random, {{}, shape}, chosen, 2e-5);
  const double star = masses_on_request<StarKV<Cuda>>(random, joint, {{0, {}}, {}, {4, 20}, {}}, 1e-3);
  MESSAGE("masses on request: FullKV " << full << ", hybrid " << hybrid << ", OjaKVv2 " << oja << ", SubSpaceA " << directions << ", SnapKV " << snapkv << ", StarKV " << star);
  const double moving = masses_on_request<OjaKVv2<Cuda>>(random, layer, outliers, 4e-3, true), rolling = masses_on_request<SubSpaceA<Cuda>>(random, layer, chunks, 4e-3, true);
  // Keys of few channels and values of many: it is both that say how many rows a tile has.
  RandomLayer longer = support::random_layer(random, {4, 1, 256}, {}, 160);
  HeadBasis& head = longer.basis.heads.front();
  std::vector<float> fewer;
  for (int i = 0; i < 256; ++i) fewer.insert(fewer.end(), head.key_down.begin() + i * head.key_rank, head.key_down.begin() + i * head.key_rank + 96);
  head.key_down = fewer;
  head.key_rank = 96;
  head.key_rms.resize(96);
  head.key_bits.resize(96);
  const double values = masses_on_request<StaticPCAHybrid<Cuda>>(random, longer, {{}, {}, {4, 20}, {}}, 4e-3, true);
  MESSAGE("of keys that are stored unrotated: OjaKVv2 " << moving << ", SubSpaceA " << rolling << ", values of more channels than keys " << values);
  if (effort() == 0) return;
  const double whole = masses_on_request<FullKV<Cuda>>(random, {{}, shape}, {}, 4e-3, true), still = masses_on_request<StaticPCAHybrid<Cuda>>(random, layer, {{}, {}, {4, 20}, {}}, 4e-3, true),
               latent = masses_on_request<StarKV<Cuda>>(random, joint, {{0, {}}, {}, {4, 20}, {}}, 4e-3, true);
  MESSAGE("and of FullKV " << whole << ", hybrid " << still << ", StarKV " << latent);
}
