// SPDX-License-Identifier: Apache-2.0
// STAR-KV of pre-RoPE keys: codes of two scale groups, joint values. Against the CPU backend,
// against float64 attention over what is stored at its positions, against itself.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_layer.hpp"
#include "cuda/support/star_kv.cuh"
#include "cuda/support/step_slots.cuh"

namespace star_kv_pre_rope_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;
using namespace star;
using support::distance;
using support::effort;
using support::furthest;
using support::joint_rows;
using support::message_of;

namespace {

/// Keys are rounded to f16 three to four times until they meet a query (docs/numerics.md).
constexpr double kLimit = 4e-3;

template <class Cache>
constexpr bool joint =
    std::is_same_v<decltype(std::declval<typename Cache::PolicySet>().basis), JointValues>;

StarSettings settings_for(Random& random, bool joint_values, bool coded, bool bytes) {
  StarSettings settings = random_settings(random);
  settings.joint = joint_values;
  settings.coded = coded;
  settings.bytes = bytes;
  return settings;
}

/// An answer of a sequence's last tokens against float64 attention over its stored rows, rotated to
/// their positions. Returns the error.
template <class Cache>
double off(const Side<Cache>& side, SequenceId seq, const std::vector<float>& query,
           const Answer& answer, bool drops = false) {
  std::vector<float> key, value;
  side.reconstruct(seq, key, value);
  std::vector<double> expected, lse;
  support::attend_f64(
      side.shape, side.cache.config().scale(),
      support::rotated(side.cache.config(), std::move(key),
                       [&](std::int64_t token) { return side.cache.position(seq, token); }),
      value, query, expected, lse, drops);
  return std::max(
      distance(answer.out, expected),
      furthest(answer.lse, lse) / std::max(1.0, furthest(lse, std::vector<double>(lse.size()))));
}

struct Case {
  CacheShape shape;
  int heads_per_group = 0, rank = 40, joint_rank = 60;
  DType type = DType::f16;
  std::vector<std::int64_t> lengths{70, 130, 200};  ///< of the first prompts
};

/// A few sequences through every operation of a cache.
template <class Cache>
void sequences(std::uint64_t seed, const Case& own, bool coded, bool bytes = false) {
  Random random(seed);
  StarSettings settings = settings_for(random, joint<Cache>, coded, bytes);
  settings.allocated = std::is_same_v<Cache, JointCodes>;
  settings.heads_per_group = own.heads_per_group;
  CacheConfig config;
  config.shape = own.shape;
  config.max_sequences = 4;
  config.max_tokens = 3000;
  config.max_query_tokens = 3;
  config.full_type = own.type;
  config.epoch_type = DType::f32;
  config.flush_interval = 16;
  config.rope = support::random_rope(random, config.shape.head_dim);
  const support::RandomLayer layer =
      joint<Cache> ? star::joint_layer(random, config.shape, settings, own.rank, own.joint_rank)
                   : layer_of(random, config.shape, settings, own.rank);
  const auto rows = [&](std::int64_t n, bool key) {
    return joint<Cache> ? joint_rows(random, layer, n, key) : layer.rows(random, n, key);
  };
  Side<Cache> side(config, layer.basis, settings), other(config, layer.basis, settings);
  CAPTURE(seed);
  const std::vector<SequenceId> seqs{1, 2, 3};
  std::vector<std::unique_ptr<support::CpuSide>> cpu;
  for (std::size_t i = 0; i < 3; ++i) {
    side.cache.create(seqs[i]);
    cpu.push_back(support::make_star_side(settings, config, layer.basis));
    const auto key = rows(own.lengths[i], true), value = rows(own.lengths[i], false);
    side.ingest(seqs[i], key, value);
    cpu[i]->ingest(key, value, {});
  }
  double worst = 0.0;
  const auto check = [&](int m, bool with_cpu) {
    const auto query = layer.queries(random, 3 * m);
    const Answer answer = side.attend(seqs, query);
    CHECK(answer == side.attend(seqs, query));  // bit for bit
    for (std::size_t i = 0; i < 3; ++i) {
      const Answer alone{third(answer.out, i), third(answer.lse, i)};
      CHECK(side.attend(std::span(&seqs[i], 1), third(query, i)) ==
            alone);  // the same in any batch
      worst = std::max(worst, off(side, seqs[i], third(query, i), alone));
      CHECK(off(side, seqs[i], third(query, i), alone) < kLimit);
      if (!with_cpu) continue;
      double unused = 0.0;
      compare(side, seqs[i], *cpu[i], third(query, i), alone, unused, kLimit);
      // The CPU's own answer: a code in a few hundred may be another.
      std::vector<float> out, lse;
      cpu[i]->attend(third(query, i), out, lse);
      CHECK(distance(alone.out, out) < 2e-2);
    }
  };
  for (const int m : {1, 3}) {
    for (int repeat = 0; repeat < (m == 3 ? 12 : 1); ++repeat) {  // enough to flush
      const auto key = rows(3 * m, true), value = rows(3 * m, false);
      side.append(seqs, key, value);
      for (std::size_t i = 0; i < 3; ++i) cpu[i]->append_maintained(third(key, i), third(value, i));
    }
    check(m, true);
  }
  // Other positions: tokens are shifted, several share one, some of the middle are removed.
  side.cache.shift_positions(1, side.cache.num_tokens(1) / 3, 5000);
  side.cache.shift_positions(2, 10, -700);
  side.cache.divide_positions(2, 20, side.cache.num_tokens(2) / 2, 3);
  const std::int64_t first = settings.tokens.sinks + std::int64_t{1},
                     count = side.cache.num_tokens(3) / 3 - first;
  if (count > 0) side.cache.remove(3, first, count);
  check(1, false);
  // Copies go on as the original.
  const SequenceId four = 4, one = 1;
  const auto query = layer.queries(random, 1);
  const Answer before = side.attend(std::span(&one, 1), query);
  side.cache.fork(1, 4);
  const std::vector<std::byte> saved = side.save(4);
  other.cache.load(1, saved);
  CHECK(other.save(1) == saved);
  CHECK(other.attend(std::span(&one, 1), query) == before);
  for (int step = 0; step < 40; ++step) {
    const auto key = rows(1, true), value = rows(1, false);
    side.append(std::span(&four, 1), key, value);
    other.append(std::span(&one, 1), key, value);
  }
  CHECK(side.attend(std::span(&one, 1), query) == before);  // the original is unchanged
  const Answer later = side.attend(std::span(&four, 1), query);
  CHECK(other.attend(std::span(&one, 1), query) == later);
  CHECK(off(side, 4, query, later) < kLimit);
  CHECK(side.save(4) == other.save(1));
  // Tokens at the end go: of the tail, and beyond it.
  side.cache.truncate(4, side.cache.rollback_limit(4) + 1);
  CHECK(off(side, 4, query, side.attend(std::span(&four, 1), query)) < kLimit);
  side.cache.truncate(4, side.cache.num_tokens(4) / 2);
  side.append(std::span(&four, 1), rows(1, true), rows(1, false));
  CHECK(off(side, 4, query, side.attend(std::span(&four, 1), query)) < kLimit);
  CHECK(side.cache.faults() == 0);
  for (const SequenceId seq : {1, 2, 3, 4}) side.cache.erase(seq);
  CHECK(side.cache.memory().total() == 0);
  MESSAGE("head_dim " << own.shape.head_dim << ", group " << own.shape.group_size() << ", "
                      << own.shape.num_kv_heads << " heads: " << worst);
}

/// A prompt's queries see its own rows exactly, those before it as they are stored.
template <class Cache>
void prompts(std::uint64_t seed, const Case& own, bool coded, std::int64_t n) {
  Random random(seed);
  StarSettings settings = settings_for(random, joint<Cache>, coded, false);
  settings.heads_per_group = own.heads_per_group;
  CacheConfig config;
  config.shape = own.shape;
  config.max_tokens = 3000;
  config.rope = support::random_rope(random, config.shape.head_dim);
  const support::RandomLayer layer =
      joint<Cache> ? star::joint_layer(random, config.shape, settings, own.rank, own.joint_rank)
                   : layer_of(random, config.shape, settings, own.rank);
  const auto rows = [&](std::int64_t count, bool key) {
    auto all =
        joint<Cache> ? joint_rows(random, layer, count, key) : layer.rows(random, count, key);
    for (float& x : all) x = round_to(DType::f16, x);
    return all;
  };
  Side<Cache> side(config, layer.basis, settings);
  side.cache.create(1);
  CAPTURE(seed);
  for (int part = 0; part < 2; ++part) {
    std::vector<float> key, value;
    side.reconstruct(1, key, value);
    const auto own_key = rows(n, true), own_value = rows(n, false),
               query = layer.queries(random, n);
    if (part == 1) side.cache.shift_positions(1, 0, 100);  // the new rows too
    const Answer answer = side.prefill(1, query, own_key, own_value);
    key.insert(key.end(), own_key.begin(), own_key.end());
    value.insert(value.end(), own_value.begin(), own_value.end());
    std::vector<double> expected, lse;
    support::attend_f64(
        config.shape, config.scale(),
        support::rotated(config, std::move(key),
                         [&](std::int64_t token) { return side.cache.position(1, token); }),
        value, query, expected, lse);
    CHECK(distance(answer.out, expected) < kLimit);
  }
}

}  // namespace

TEST_CASE("pre-RoPE keys in codes of two scale groups") {
  sequences<Blocks>(101, {{4, 1, 64}, 0, 33}, true);
  sequences<Blocks>(102, {{4, 2, 128}, 0, 100, 0, DType::bf16, {70, 90, 300}}, true);
  if (effort() == 0) return;
  sequences<Blocks>(103, {{6, 6, 96}, 0, 50}, true);
  sequences<Blocks>(104, {{16, 1, 80}, 0, 1}, true);
  sequences<Blocks>(105, {{8, 2, 128}, 0, 128, 0, DType::f16, {2100, 64, 2600}},
                    true);  // several splits
  prompts<Blocks>(106, {{8, 2, 128}, 0, 90}, true, 300);
}

TEST_CASE("STAR-KV of pre-RoPE keys") {
  sequences<StarKV<Cuda>>(111, {{4, 4, 64}, 2, 40, 77}, true);
  sequences<StarKV<Cuda>>(112, {{8, 2, 128}, 0, 100, 100, DType::bf16, {40, 70, 300}}, true);
  prompts<StarKV<Cuda>>(116, {{4, 2, 64}, 0, 40, 70}, true, effort() == 0 ? 90 : 700);
  if (effort() == 0) return;
  sequences<StarKV<Cuda>>(113, {{6, 6, 96}, 3, 50, 200}, true);
  sequences<StarKV<Cuda>>(114, {{16, 1, 80}, 0, 1, 1}, true);
  sequences<StarKV<Cuda>>(115, {{32, 8, 128}, 0, 64, 512, DType::f16, {2100, 64, 2600}}, true);
}

TEST_CASE("joint values of pre-RoPE keys, coefficients in f16") {
  sequences<Joint>(121, {{4, 4, 64}, 0, 30, 50}, false);
  sequences<Joint>(122, {{8, 2, 128}, 0, 100, 200, DType::bf16, {64, 65, 200}}, false);
  prompts<Joint>(126, {{4, 2, 64}, 1, 40, 50}, false, effort() == 0 ? 90 : 700);
  if (effort() == 0) return;
  sequences<Joint>(123, {{10, 10, 96}, 5, 96, 300}, false);
  sequences<Joint>(124, {{16, 1, 80}, 0, 1, 1}, false);
  sequences<Joint>(125, {{32, 8, 128}, 0, 128, 1000, DType::f16, {2100, 64, 2600}}, false);
  sequences<Joint>(127, {{2, 1, 256}, 0, 200, 150}, false);  // tiles of 32 rows
  sequences<Joint>(128, {{32, 32, 64}, 0, 32, 900}, false);
}

TEST_CASE("joint values of pre-RoPE keys, codes of 8 bits") {
  sequences<JointBytes>(131, {{4, 2, 64}, 0, 33, 50}, true, true);
  if (effort() == 0) return;
  sequences<JointBytes>(132, {{8, 4, 128}, 2, 128, 240}, true, true);
}

TEST_CASE("joint values of pre-RoPE keys, codes whose channels have their own bits") {
  sequences<JointCodes>(135, {{4, 2, 64}, 0, 33, 50}, true);
  if (effort() == 0) return;
  sequences<JointCodes>(136, {{8, 4, 128}, 2, 128, 240}, true);
}

TEST_CASE("joint values: a captured step serves the sequences whose slots are in device memory") {
  Random random(137);
  const auto serve = [&]<class Cache>(Rope keys, bool coded) {
    const StarSettings settings = settings_for(random, true, coded, false);
    CacheConfig config;
    config.shape = {4, 2, 64};
    config.epoch_type = DType::f32;
    config.flush_interval = 16;
    if (keys == Rope::pre) config.rope = support::random_rope(random, config.shape.head_dim);
    const support::RandomLayer layer = star::joint_layer(random, config.shape, settings, 40, 50);
    support::serve_slots<Cache>(
        layer, config, policies_of<Cache>(settings), random,
        [&](std::int64_t n, bool key) { return joint_rows(random, layer, n, key); });
  };
  serve.operator()<StarKV<Cuda>>(Rope::pre, true);
  if (effort() == 0) return;
  serve.operator()<StarKV<Cuda>>(Rope::post, true);
  serve.operator()<Joint>(Rope::pre, false);
  serve.operator()<Joint>(Rope::post, false);
}

TEST_CASE("more columns than logits have room for at a time: several launches, and the same bits") {
  Random random(141);
  StarSettings settings;
  settings.joint = true;
  settings.tokens = {2, 20};
  CacheConfig config;
  config.shape = {
      21, 3, 64};  // of three tokens 63 columns: pairs of a head and a block belong to two launches
  config.max_sequences = 1;
  config.max_tokens = 400;
  config.max_query_tokens = 3;
  config.rope.keys = Rope::pre;
  const support::RandomLayer layer = star::joint_layer(random, config.shape, settings, 30, 60);
  Side<StarKV<Cuda>> all(config, layer.basis, settings);
  CacheConfig many = config;
  many.max_sequences = 700;
  many.max_tokens = 1000;
  many.num_pages = all.cache.pool().allocator().num_free();
  many.page_bytes = all.cache.pool().page_bytes();
  Side<StarKV<Cuda>> few(many, layer.basis, settings);
  const SequenceId one = 1;
  const auto key = joint_rows(random, layer, 150, true),
             value = joint_rows(random, layer, 150, false),
             new_key = joint_rows(random, layer, 3, true),
             new_value = joint_rows(random, layer, 3, false);
  const auto query = layer.queries(random, 3);
  for (auto* side : {&all, &few}) {
    side->cache.create(1);
    side->ingest(1, key, value);
    side->append(std::span(&one, 1), new_key, new_value);
  }
  const Answer answer = all.attend(std::span(&one, 1), query);
  CHECK(few.attend(std::span(&one, 1), query) == answer);
  CHECK(off(all, 1, query, answer) < kLimit);
  // Logits take 4 bytes a row and column, of no more than 32 columns where there are many rows.
  const std::size_t logits = 32 * 4 * 700 * 1024,
                    bytes = StarKV<Cuda>::workspace_bytes(many, layer.basis,
                                                          policies_of<StarKV<Cuda>>(settings));
  CacheConfig rotated = many;
  rotated.rope = {};
  rotated.page_bytes = 0;  // its tiles of full rows are larger
  const std::size_t without =
      StarKV<Cuda>::workspace_bytes(rotated, layer.basis, policies_of<StarKV<Cuda>>(settings));
  CHECK(bytes > logits);
  CHECK(bytes < without + logits);
  CHECK(few.cache.workspace_bytes() == bytes);
}

TEST_CASE(
    "a captured step of pre-RoPE keys and joint values is what the same calls make; lent "
    "workspace too") {
  Random random(151);
  StarSettings settings;
  settings.joint = true;
  settings.tokens = {2, 20};
  CacheConfig config;
  config.shape = {6, 3, 64};
  config.max_sequences = 2;
  config.max_tokens = 1500;
  config.flush_interval = 16;
  config.rope.keys = Rope::pre;
  const support::RandomLayer layer = star::joint_layer(random, config.shape, settings, 30, 60);
  const gpu::DeviceArray<std::uint8_t> memory(
      StarKV<Cuda>::workspace_bytes(config, layer.basis, policies_of<StarKV<Cuda>>(settings)));
  Side<StarKV<Cuda>> side(config, layer.basis, settings);
  StarKV<Cuda> lent(config, layer.basis, policies_of<StarKV<Cuda>>(settings), nullptr,
                    {memory.data(), memory.bytes()});
  support::DeviceCache<StarKV<Cuda>&> plain(lent);
  const std::vector<SequenceId> seqs{1, 2};
  for (const SequenceId seq : seqs) {
    const auto key = joint_rows(random, layer, 90 * seq, true),
               value = joint_rows(random, layer, 90 * seq, false);
    side.cache.create(seq);
    lent.create(seq);
    side.ingest(seq, key, value);
    plain.ingest(seq, key, value);
  }
  star::check_captured_steps(random, layer, side, plain, seqs, support::effort() == 0 ? 12 : 100);
}

TEST_CASE(
    "layers of a stack share the memory of logits: as layers alone; prompts in calls as at once") {
  Random random(171);
  StarSettings settings;
  settings.joint = true;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 700;
  config.prefill_chunk = 100;
  config.rope.keys = Rope::pre;
  const support::RandomLayer layers[] = {star::joint_layer(random, config.shape, settings, 20, 40),
                                         star::joint_layer(random, config.shape, settings, 50, 90)};
  const auto policies = policies_of<StarKV<Cuda>>(settings);
  LayerStack<StarKV<Cuda>> stack(config, {layers[0].basis, layers[1].basis}, policies);
  config.page_bytes = stack.pool().page_bytes();
  stack.create(1);
  const SequenceId one = 1;
  for (int i = 0; i < 2; ++i) {
    const support::RandomLayer& layer = layers[i];
    support::DeviceCache<StarKV<Cuda>&> stacked(stack.layer(i));
    Side<StarKV<Cuda>> alone(config, layer.basis, settings);
    alone.cache.create(1);
    const auto key = joint_rows(random, layer, 230, true),
               value = joint_rows(random, layer, 230, false), query = layer.queries(random, 230);
    const Answer whole = alone.prefill(1, query, key, value);
    Answer pieces;
    for (int part = 0; part < 5; ++part) {  // of 46 tokens
      const Answer own =
          stacked.prefill(1, support::part_of(query, static_cast<std::size_t>(part), 5),
                          support::part_of(key, static_cast<std::size_t>(part), 5),
                          support::part_of(value, static_cast<std::size_t>(part), 5),
                          part < 4 ? Prompt::continues : Prompt::complete);
      pieces.out.insert(pieces.out.end(), own.out.begin(), own.out.end());
      pieces.lse.insert(pieces.lse.end(), own.lse.begin(), own.lse.end());
    }
    CHECK(distance(pieces.out, std::vector<double>(whole.out.begin(), whole.out.end())) < 1e-5);
    const auto last_key = joint_rows(random, layer, 1, true),
               last_value = joint_rows(random, layer, 1, false),
               last_query = layer.queries(random, 1);
    stacked.append(std::span(&one, 1), last_key, last_value);
    alone.append(std::span(&one, 1), last_key, last_value);
    const Answer answer = alone.attend(std::span(&one, 1), last_query);
    CHECK(stacked.attend(std::span(&one, 1), last_query) == answer);
    CHECK(off(alone, 1, last_query, answer) < kLimit);
  }
}

TEST_CASE(
    "joint values of pre-RoPE keys of the rows that scores keep; what pre-RoPE keys do not go "
    "with") {
  Random random(161);
  StarSettings settings;
  settings.joint = settings.scored = true;
  settings.tokens = {3, 20};
  settings.scores.window = 8;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 900;
  config.flush_interval = 16;
  config.rope.keys = Rope::pre;
  const support::RandomLayer layer = star::joint_layer(random, config.shape, settings, 40, 60);
  Side<Scored> side(config, layer.basis, settings), other(config, layer.basis, settings);
  const std::unique_ptr<support::CpuSide> cpu =
      support::make_star_side(settings, config, layer.basis);
  const SequenceId one = 1;
  const auto key = joint_rows(random, layer, 300, true),
             value = joint_rows(random, layer, 300, false), window = layer.queries(random, 8);
  side.cache.create(1);
  side.ingest(1, key, value, window);
  cpu->ingest(key, value, window);
  for (int step = 0; step < 45; ++step) {
    const auto own_key = joint_rows(random, layer, 1, true),
               own_value = joint_rows(random, layer, 1, false);
    side.append(std::span(&one, 1), own_key, own_value);
    cpu->append_maintained(own_key, own_value);
  }
  const auto query = layer.queries(random, 1);
  const Answer answer = side.attend(std::span(&one, 1), query);
  CHECK(off(side, 1, query, answer, true) < kLimit);
  std::vector<float> stored_key, stored_value, cpu_key, cpu_value;
  side.reconstruct(1, stored_key, stored_value);
  cpu->reconstruct(cpu_key, cpu_value);
  CHECK(support::different_rows(stored_key, cpu_key, 64) <=
        12);  // a score at the edge may fall the other way: two heads' rows
  CHECK(support::different_rows(stored_value, cpu_value, 64) <= 18);
  other.cache.load(1, side.save(1));
  CHECK(other.attend(std::span(&one, 1), query) == answer);
  // A state of post-RoPE keys is another, and so is one of another rotary embedding.
  CacheConfig rotated = config;
  rotated.rope = {};
  Side<Scored> apart(rotated, layer.basis, settings);
  CHECK(message_of([&] {
          apart.cache.load(1, side.save(1));
        }).find("pre-RoPE keys: cache 0, saved 1") != std::string::npos);
  CHECK_FALSE(apart.cache.contains(1));
}

}  // namespace star_kv_pre_rope_tests
