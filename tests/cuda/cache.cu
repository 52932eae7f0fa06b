// SPDX-License-Identifier: Apache-2.0
// CompressedKVCache<Cuda, ...> against the CPU backend and float64 attention over what it stores.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"
#include "random_layer.hpp"
#include "random_sequences.cuh"

namespace cache_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Device;
using support::DeviceSide;
using support::distance;
using support::effort;
using support::furthest;
using support::host;
using support::Method;
using support::poisoned;
using support::Random;
using support::Settings;
using support::Worst;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

std::unique_ptr<DeviceSide> make_device(const Settings& settings, const CacheConfig& config,
                                        const LayerBasis& basis) {
  const auto make =
      [&]<class Cache>(typename Cache::PolicySet policies) -> std::unique_ptr<DeviceSide> {
    return std::make_unique<Device<Cache>>(config, basis, support::configured(policies, settings));
  };
  switch (settings.method) {
    case Method::full:
      return make.operator()<FullKV<Cuda>>({});
    case Method::static_pca:
      return make.operator()<StaticPCA<Cuda>>({});
    case Method::hybrid:
      return make.operator()<StaticPCAHybrid<Cuda>>({});
    case Method::projector:
      return make.operator()<Dlrp<Cuda>>({});
    case Method::codes:
      return make.operator()<Codes>({});
    case Method::oja_int8:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, Int8>>({});
    case Method::subspace_a:
      return make.operator()<SubSpaceA<Cuda>>({});
    case Method::directions:
      return make.operator()<CompressedKVCache<Cuda, PerHead, FrequentDirections, SinkRecent,
                                               NoQuantizer, KeepEpochs<3>>>({});
    case Method::oja_outliers:
      return make.operator()<OjaKVv2<Cuda>>({});
    case Method::oja_snapkv:
      return make.operator()<OjaKVSnapKV<Cuda>>({});
    case Method::snapkv:
      return make.operator()<
          CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, SnapKV>, NoQuantizer>>({});
    case Method::oja_evicting:
    case Method::directions_outliers:
    case Method::directions_snapkv:
    case Method::directions_evicting:
    case Method::budgeted_evicting:
      break;  // chosen_rows.cu
    case Method::oja_codes:
    case Method::oja_blocks:
    case Method::directions_codes:
      break;  // moving_codes.cu
    case Method::snapkv_only:
      return make.operator()<SnapKVOnly<Cuda>>({});
    case Method::streaming:
      return make.operator()<StreamingLLM<Cuda>>({});
    case Method::int8:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Static, SinkRecent, Int8>>({});
    case Method::outliers:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Static,
                                               Compose<SinkRecent, ResidualOutliers>, NoQuantizer>>(
          {});
    case Method::budgeted:
      return make.operator()<Budgeted<Cuda>>({});
    case Method::oja:
      return make.operator()<OjaKV<Cuda>>({});
    case Method::oja_merging:
      return make.
      operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>>({});
    case Method::oja_rotating:
      return make.
      operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, RotateNow>>({});
  }
  return nullptr;
}

}  // namespace

TEST_CASE(
    "random sequences of every composition: rows as on the CPU, answers as in float64, the same in "
    "any batch") {
  struct Case {
    Settings settings;
    DType type;
    const char* name;
  };
  std::vector<Case> cases;
  for (std::size_t method = 0; method < std::size(support::kMethodNames); ++method) {
    if (support::aligns_axes(static_cast<Method>(method)) ||
        static_cast<Method>(method) == Method::directions_outliers ||
        static_cast<Method>(method) == Method::directions_snapkv ||
        (support::by_errors(static_cast<Method>(method)) &&
         support::by_scores(static_cast<Method>(method))))
      continue;  // chosen_rows.cu
    for (const DType type : {DType::f16, DType::bf16}) {
      Settings settings;
      settings.method = static_cast<Method>(method);
      settings.coefficients = type;
      cases.push_back({settings, type, support::kMethodNames[method]});
    }
  }
  for (std::size_t i = 0; i < cases.size(); ++i) {
    CAPTURE(std::string(cases[i].name));
    CAPTURE(std::string(name_of(cases[i].type)));
    const Worst worst = support::random_sequences(make_device, cases[i].settings, cases[i].type,
                                                  100 + i, std::max(1, 2 * effort()));
    MESSAGE(std::string(cases[i].name)
            << " " << std::string(name_of(cases[i].type)) << ": outputs " << worst.out << ", lse "
            << worst.lse << ", stored rows and the CPU's " << worst.rows << ", publications "
            << worst.publications << ", merges " << worst.merges << ", tokens removed "
            << worst.removed);
    CHECK(worst.removed > 0);
  }
}

TEST_CASE("the same of keys stored before their rotary embedding") {
  std::uint64_t seed = 300;
  for (const Method method :
       {Method::full, Method::static_pca, Method::hybrid, Method::projector, Method::outliers,
        Method::streaming, Method::codes, Method::int8, Method::budgeted, Method::snapkv,
        Method::snapkv_only, Method::oja, Method::oja_merging, Method::oja_rotating,
        Method::oja_int8, Method::subspace_a, Method::directions, Method::oja_outliers,
        Method::oja_snapkv}) {
    for (const DType type : {DType::f16, DType::bf16}) {
      // Scores see turned keys rounded to their type, here but not there: in bf16 too many of them
      // change places.
      if (support::by_scores(method) && type == DType::bf16) continue;
      Settings settings;
      settings.method = method;
      settings.coefficients = type;
      settings.unrotated = true;
      const std::string name = support::kMethodNames[static_cast<int>(method)];
      CAPTURE(name);
      CAPTURE(std::string(name_of(type)));
      const Worst worst =
          support::random_sequences(make_device, settings, type, ++seed, std::max(1, 3 * effort()));
      MESSAGE(name << " " << std::string(name_of(type)) << ", unrotated: outputs " << worst.out
                   << ", lse " << worst.lse << ", stored rows and the CPU's " << worst.rows);
    }
  }
}

TEST_CASE("what keys stored before their rotary embedding do not go with is refused") {
  Random random(47);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.rope.keys = Rope::pre;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  const auto message = [&](Method method) {
    Settings settings;
    settings.method = method;
    try {
      make_device(settings, config, layer.basis);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message(Method::hybrid).empty());
  CHECK(message(Method::oja).empty());
  CHECK(message(Method::snapkv_only).empty());
  config.rope.rotary_dim = 24;
  CHECK(message(Method::hybrid).find("rotary_dim 24, a multiple of 16") != std::string::npos);
}

TEST_CASE("a fork and a loaded copy go on as the original, bit for bit, and leave it alone") {
  Random random(23);
  for (const Method method :
       {Method::full, Method::hybrid, Method::codes, Method::int8, Method::oja_merging,
        Method::oja_rotating, Method::oja_int8, Method::subspace_a, Method::directions,
        Method::oja_outliers, Method::oja_snapkv, Method::budgeted, Method::snapkv_only,
        Method::streaming}) {
    if (effort() == 0 && method != Method::codes && method != Method::subspace_a &&
        method != Method::oja_merging && method != Method::oja_snapkv)
      continue;
    for (const bool unrotated :
         {false,
          true}) {  // what lifts keys is copied with bases that move, elsewhere it is everybody's
      if (unrotated && !support::adapts(method)) continue;
      CAPTURE(std::string(support::kMethodNames[static_cast<int>(method)]));
      CAPTURE(unrotated);
      Settings settings;
      settings.method = method;
      settings.outliers.share = 0.05F;
      settings.sinks = 4;
      settings.recent = 40;
      CacheConfig config;
      config.shape = {8, 2, 64};
      config.max_sequences = 4;
      config.max_tokens = 2000;
      config.flush_interval = 16;
      config.publish_interval = 40;
      settings.directions.chunk_length = 60;
      if (unrotated) config.rope.keys = Rope::pre;
      const auto layer = support::random_layer(random, config.shape, settings, 24);
      const auto device = make_device(settings, config, layer.basis);
      device->create(1);
      const auto prompt_key = layer.rows(random, 700, true),
                 prompt_value = layer.rows(random, 700, false);
      auto window = layer.queries(random, 32);
      device->ingest(1, prompt_key, prompt_value, window);
      const auto grow = [&](SequenceId seq, const std::vector<std::vector<float>>& rows) {
        for (std::size_t i = 0; i + 1 < rows.size(); i += 2)
          device->append_maintained(std::span(&seq, 1), rows[i], rows[i + 1]);
      };
      const auto steps = [&](int count) {
        std::vector<std::vector<float>> rows;
        for (int i = 0; i < count; ++i) {
          rows.push_back(layer.rows(random, 2, true));
          rows.push_back(layer.rows(random, 2, false));
        }
        return rows;
      };
      struct Answer {
        std::vector<float> key, value, out, lse;
      };
      const auto query = layer.queries(random, 1);
      const auto answer = [&](SequenceId seq) {
        Answer all;
        device->reconstruct(seq, all.key, all.value);
        device->attend(std::span(&seq, 1), query, all.out, all.lse);
        return all;
      };
      const auto same = [](const Answer& a, const Answer& b) {
        CHECK(a.key == b.key);
        CHECK(a.value == b.value);
        CHECK(a.out == b.out);
        CHECK(a.lse == b.lse);
      };
      grow(1, steps(effort() == 0 ? 12 : 50));
      const Answer before = answer(1);
      const std::int64_t free = device->free_pages();
      device->fork(1, 2);
      CHECK(device->free_pages() == free);  // nothing is copied yet
      const std::vector<std::byte> saved = device->save(1);
      device->load(3, saved);
      CHECK(device->save(3) == saved);
      same(answer(2), before);
      same(answer(3), before);
      const auto more = steps(effort() == 0 ? 10 : 60);
      grow(2, more);  // writes to pages that 1 reads
      same(answer(1), before);
      device->fork(2, 4);
      grow(1, more);
      grow(3, more);
      const Answer after = answer(1);
      for (const SequenceId seq : {2, 3, 4}) same(answer(seq), after);
      grow(4, steps(effort() == 0 ? 2 : 40));
      device->truncate(2, device->num_tokens(2) - 3);
      device->erase(4);
      same(answer(1), after);
      grow(2, steps(effort() == 0 ? 2 : 30));
      same(answer(3), after);
      for (const SequenceId seq : {1, 2, 3}) device->erase(seq);
      CHECK(device->memory().total() == 0);
    }
  }
}

namespace {

/// Three caches hold parts of two sequences; attention over the merged states against float64 over
/// everything.
template <class Cache>
void shards_merge(Random& random, const Settings& settings,
                  const typename Cache::PolicySet& policies, double limit) {
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 3000;
  config.max_query_tokens = 3;
  config.epoch_type = DType::f32;
  const auto layer = support::random_layer(random, config.shape, settings, 30);
  std::vector<std::unique_ptr<Cache>> shards;
  std::vector<float> keys[2], values[2];
  const int lengths[2][3] = {{2100, 5, 70}, {40, 0, 300}};  // a shard may hold nothing
  for (int shard = 0; shard < 3; ++shard) {
    shards.push_back(std::make_unique<Cache>(config, layer.basis, policies));
    for (const SequenceId seq : {0, 1}) {
      shards.back()->create(seq);
      const int n = lengths[seq][shard];
      const auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
      const gpu::DeviceArray<float> k(key), v(value);
      if (n > 0) shards.back()->ingest(seq, {k.data(), n, 2, 64}, {v.data(), n, 2, 64});
      const auto own_key = poisoned(key.size()), own_value = poisoned(key.size());
      shards.back()->reconstruct(seq, 0, {own_key.data(), n, 2, 64}, {own_value.data(), n, 2, 64});
      for (auto [all, own] :
           {std::pair{&keys[seq], &own_key}, std::pair{&values[seq], &own_value}}) {
        const auto rows = host(*own);
        all->insert(all->end(), rows.begin(), rows.end());
      }
    }
  }
  const int m = 3, tokens = 2 * m;
  const auto query = layer.queries(random, tokens);
  const gpu::DeviceArray<float> q(query);
  const std::vector<SequenceId> seqs{0, 1};
  std::vector<gpu::DeviceArray<float>> memory;
  std::vector<gpu::StateView> states;
  for (int shard = 0; shard < 3; ++shard) {
    for (const int size : {tokens * 8 * 64, tokens * 8, tokens * 8})
      memory.push_back(poisoned(static_cast<std::size_t>(size)));
    states.push_back({memory[memory.size() - 3].data(), memory[memory.size() - 2].data(),
                      memory.back().data(), tokens, 8, 64});
    shards[static_cast<std::size_t>(shard)]->attend_partial(
        seqs, {q.data(), tokens, 8, 64}, states.back(),
        shard == 2 ? gpu::QueryTokens::own : gpu::QueryTokens::elsewhere);
  }
  const auto out = poisoned(query.size()), lse = poisoned(static_cast<std::size_t>(tokens * 8));
  gpu::merge_states(states, {out.data(), tokens, 8, 64}, {lse.data(), tokens, 8});
  const auto found = host(out), found_lse = host(lse);
  for (const SequenceId seq : {0, 1}) {
    const auto part = [&](const std::vector<float>& all) {
      return std::vector<float>(
          all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(seq) * all.size() / 2),
          all.begin() +
              static_cast<std::ptrdiff_t>((static_cast<std::size_t>(seq) + 1) * all.size() / 2));
    };
    std::vector<double> expected, expected_lse;
    support::attend_f64(config.shape, config.scale(), keys[seq], values[seq], part(query), expected,
                        expected_lse);
    CHECK(distance(part(found), expected) < limit);
    CHECK(furthest(part(found_lse), expected_lse) <
          limit * std::max(1.0, furthest(expected_lse, std::vector<double>(expected_lse.size()))));
  }
}

}  // namespace

TEST_CASE(
    "caches that hold parts of a sequence give states that merge to attention over all of it") {
  Random random(31);
  Settings settings;
  shards_merge<FullKV<Cuda>>(random, settings, {}, 2e-5);
  shards_merge<StaticPCAHybrid<Cuda>>(random, settings, {{}, {}, {4, 32}, {}}, 2e-5);
  settings.method = Method::codes;
  shards_merge<Codes>(random, settings, {{}, {}, {4, 32}, {}}, 1e-3);
}

TEST_CASE(
    "saved sequences whose epochs begin when values say so: hostile ones under a right checksum "
    "are refused, or do no harm") {
  Random random(53);
  Settings settings;
  settings.method = Method::subspace_a;
  settings.directions.chunk_length = 40;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 900;
  config.max_sequences = 2;
  const auto layer = support::random_layer(random, config.shape, settings, 16);
  const auto device = make_device(settings, config, layer.basis);
  device->create(1);
  device->ingest(1, layer.rows(random, 700, true), layer.rows(random, 700, false));
  const std::vector<std::byte> saved = device->save(1);
  const auto load = [&](const std::vector<std::byte>& bytes) {
    return support::message_of([&] { device->load(2, support::with_checksum(bytes)); });
  };
  // From the end: states of the sketches, their rows.
  const std::size_t states = saved.size() - 4 * 16, rows = states - 4 * 32 * 64 * 4;
  const auto with = [&](std::size_t place, auto value) {
    auto hostile = saved;
    std::memcpy(hostile.data() + place, &value, sizeof value);
    return load(hostile);
  };
  CHECK(with(states + 8, std::int32_t{33}).find("sketch 0 holds 33 rows") != std::string::npos);
  CHECK(with(states + 8, std::int32_t{-1}).find("sketch 0 holds -1 rows") != std::string::npos);
  CHECK(with(states + 16, std::int64_t{1} << 50).find("sketch 1 holds") != std::string::npos);
  CHECK(with(rows + 4, std::nanf("")).find("number 1 of the sketches is nan") != std::string::npos);
  // Rows that are cut off leave the chunk that they were of: what is saved then can be loaded.
  device->truncate(1, 100);
  CHECK(load(device->save(1)) == "nothing was raised");
  device->erase(2);
  int loaded = 0;
  for (int trial = 0; trial < (effort() == 0 ? 60 : 400); ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place =
        trial % 2 == 0 ? 24 + random() % 600 : saved.size() - 1 - random() % (saved.size() - rows);
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    if (load(hostile) != "nothing was raised") continue;
    ++loaded;
    const SequenceId seq = 2;
    std::vector<float> key, value, out, lse;
    device->reconstruct(seq, key, value);
    try {
      for (int step = 0; step < 40; ++step)
        device->append_maintained(std::span(&seq, 1), layer.rows(random, 2, true),
                                  layer.rows(random, 2, false));
    } catch (const CapacityError&) {  // its tail may be full
    }
    if (device->tail_length(seq) > 0)
      device->attend(std::span(&seq, 1), layer.queries(random, 1), out, lse);
    device->erase(seq);
  }
  CHECK(loaded > 0);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE(
    "saved bytes that are damaged or belong elsewhere are refused, hostile ones under a right "
    "checksum do no harm") {
  Random random(29);
  Settings settings;
  settings.method = Method::oja_snapkv;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.max_sequences = 2;
  config.publish_interval = 40;
  const auto layer = support::random_layer(random, config.shape, settings, 16);
  const auto device = make_device(settings, config, layer.basis);
  device->create(1);
  device->ingest(1, layer.rows(random, 300, true), layer.rows(random, 300, false),
                 layer.queries(random, 32));
  const std::vector<std::byte> saved = device->save(1);
  const auto message = [&](DeviceSide& side, const std::vector<std::byte>& bytes) {
    try {
      side.load(2, bytes);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    side.erase(2);
    return std::string("nothing was raised");
  };
  std::vector<std::byte> damaged = saved;
  damaged[saved.size() / 2] ^= std::byte{1};
  CHECK(message(*device, damaged).find("checksum") != std::string::npos);
  CHECK(message(*device, {saved.begin(), saved.end() - 1}).find("bytes were saved") !=
        std::string::npos);
  Settings other = settings;
  other.method = Method::codes;
  CHECK(message(*make_device(other, config, layer.basis), saved)
            .find("listed full rows: cache 0, saved 1") != std::string::npos);
  const auto stranger = support::random_layer(random, config.shape, settings, 16);
  CHECK(message(*make_device(settings, config, stranger.basis), saved).find("calibrated maps") !=
        std::string::npos);
  config.max_tokens = 200;
  CHECK(message(*make_device(settings, config, layer.basis), saved) ==
        "max_tokens: 200, saved 300");
  int loaded = 0;
  for (int trial = 0; trial < 600; ++trial) {
    std::vector<std::byte> hostile = saved;
    const std::size_t place =
        trial % 2 == 0 ? 24 + random() % 400
                       : saved.size() - 1 - random() % 2000;  // counts and segments; positions
    hostile[place] ^= static_cast<std::byte>(1U << random() % 8);
    try {
      device->load(2, support::with_checksum(hostile));
    } catch (const Error&) {
      continue;
    }
    ++loaded;
    const SequenceId seq = 2;
    std::vector<float> key, value, out, lse;
    device->reconstruct(seq, key, value);
    if (device->tail_length(seq) > 0)
      device->attend(std::span(&seq, 1), layer.queries(random, 1), out, lse);
    try {
      device->append_maintained(std::span(&seq, 1), layer.rows(random, 1, true),
                                layer.rows(random, 1, false));
    } catch (const CapacityError&) {  // its tail may be full
    }
    device->erase(seq);
  }
  CHECK(loaded < 600);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

TEST_CASE(
    "prefill is exact attention over the prompt's own rows and what is stored, and stores as "
    "ingest") {
  Random random(11);
  for (int trial = 0; trial < 18; ++trial) {
    Settings settings;
    const Method methods[] = {Method::full, Method::hybrid, Method::codes};
    settings.method = methods[trial % 3];
    settings.unrotated = trial >= 12;
    CacheConfig config;
    const int groups[] = {1, 2, 4, 7}, dims[] = {64, 128, 256};
    config.shape.num_kv_heads = 2;
    config.shape.num_qo_heads = 2 * groups[random() % 4];
    config.shape.head_dim = dims[random() % 3];
    config.max_tokens = 2000;
    config.max_sequences = 2;
    config.epoch_type = DType::f32;
    settings.recent = 20;
    if (settings.unrotated) config.rope = support::random_rope(random, config.shape.head_dim);
    const auto layer = support::random_layer(random, config.shape, settings, 40);
    const auto device = make_device(settings, config, layer.basis);
    device->create(1);
    device->create(2);
    const int lengths[] = {1, 15, 16, 100, 257, 600};
    for (int part = 0; part < 2; ++part) {
      std::vector<float> before_key, before_value, out, lse;
      device->reconstruct(1, before_key, before_value);
      const int n = lengths[random() % 6];
      auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
      for (auto* rows : {&key, &value}) {
        for (float& x : *rows) x = round_to(DType::f16, x);
      }
      const auto query = layer.queries(random, n);
      device->prefill(1, query, key, value, out, lse);
      device->ingest(2, key, value);
      before_key.insert(before_key.end(), key.begin(), key.end());
      before_value.insert(before_value.end(), value.begin(), value.end());
      std::vector<double> expected, expected_lse;
      support::attend_f64(config.shape, config.scale(), support::rotated(config, before_key),
                          before_value, query, expected, expected_lse);
      CAPTURE(trial);
      CAPTURE(n);
      const double limit = settings.unrotated                              ? 4e-3
                           : settings.method == Method::codes && part == 1 ? 1e-3
                                                                           : 2e-5;
      CHECK(distance(out, expected) < limit);
      CHECK(furthest(lse, expected_lse) <
            limit *
                std::max(1.0, furthest(expected_lse, std::vector<double>(expected_lse.size()))));
      std::vector<float> keys[2], values[2];
      for (const SequenceId seq : {1, 2}) device->reconstruct(seq, keys[seq - 1], values[seq - 1]);
      CHECK(keys[0] == keys[1]);
      CHECK(values[0] == values[1]);
    }
  }
}

TEST_CASE("layers work in memory that the caller lends, one after the other, as in their own") {
  Random random(53);
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_tokens = 3000;
  config.max_sequences = 2;
  config.max_query_tokens = 3;
  const auto layer = support::random_layer(random, config.shape, {}, 20);
  OjaKV<Cuda>::PolicySet policies;
  policies.token_policy = {4, 32};
  const std::size_t bytes = OjaKV<Cuda>::workspace_bytes(config, layer.basis, policies);
  const gpu::DeviceArray<std::uint8_t> memory(bytes + 128);
  const auto message = [&](std::uint8_t* data, std::size_t size) {
    try {
      OjaKV<Cuda> cache(config, layer.basis, policies, nullptr, {data, size});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message(memory.data(), bytes - 1)
            .find(std::to_string(bytes - 1) + " bytes lent, " + std::to_string(bytes) +
                  " needed") != std::string::npos);
  CHECK(message(memory.data() + 8, bytes).find("8 bytes off") != std::string::npos);
  OjaKV<Cuda> own(config, layer.basis, policies),
      first(config, layer.basis, policies, nullptr, {memory.data(), bytes}),
      second(config, layer.basis, policies, nullptr, {memory.data(), bytes});
  CHECK(own.workspace_bytes() == bytes);
  CHECK(first.memory().reserved_bytes + bytes == own.memory().reserved_bytes);
  const auto key = layer.rows(random, 2500, true), value = layer.rows(random, 2500, false),
             query = layer.queries(random, 32);
  const gpu::DeviceArray<float> k(key), v(value), q(query);
  std::vector<std::vector<float>> outputs;
  for (OjaKV<Cuda>* cache : {&own, &first, &second}) {
    cache->create(7);
    cache->ingest(7, {k.data(), 2500, 2, 64}, {v.data(), 2500, 2, 64}, {q.data(), 32, 8, 64});
    const auto out = poisoned(3 * 8 * 64);
    cache->attend(7, {q.data(), 3, 8, 64}, {out.data(), 3, 8, 64});
    outputs.push_back(host(out));
  }
  CHECK(outputs[1] == outputs[0]);
  CHECK(outputs[2] == outputs[0]);
}

TEST_CASE("rows give the same whatever their type and strides") {
  Random random(17);
  Settings settings;
  settings.method = Method::codes;
  CacheConfig config;
  config.shape = {4, 2, 96};
  config.max_tokens = 1000;
  config.max_sequences = 3;
  config.epoch_type = DType::f32;
  const auto layer = support::random_layer(random, config.shape, settings, 60);
  Codes::PolicySet policies;
  policies.token_policy = {4, 32};
  Codes cache(config, layer.basis, policies);
  const int n = 333;
  auto key = layer.rows(random, n, true), value = layer.rows(random, n, false);
  for (auto* rows : {&key, &value}) {
    for (float& x : *rows) x = round_to(DType::f16, x);
  }
  // As f32; as f16, aligned for wide loads; as f16 with the heads outside, which starts at an odd
  // element.
  const gpu::DeviceArray<float> key32(key), value32(value);
  std::vector<__half> halves[2], strided[2];
  for (int part = 0; part < 2; ++part) {
    const std::vector<float>& rows = part == 0 ? key : value;
    for (const float x : rows) halves[part].push_back(__float2half(x));
    strided[part].assign(rows.size() + 1, __half{});
    for (int token = 0; token < n; ++token) {
      for (int head = 0; head < 2; ++head) {
        for (int i = 0; i < 96; ++i)
          strided[part][static_cast<std::size_t>(1 + (head * n + token) * 96 + i)] =
              halves[part][static_cast<std::size_t>((token * 2 + head) * 96 + i)];
      }
    }
  }
  const gpu::DeviceArray<__half> key16(halves[0]), value16(halves[1]), key_out(strided[0]),
      value_out(strided[1]);
  for (const SequenceId seq : {1, 2, 3}) cache.create(seq);
  cache.ingest(1, {key32.data(), n, 2, 96}, {value32.data(), n, 2, 96});
  cache.ingest(2, KeyView(key16.data(), DType::f16, n, 2, 96, 2 * 96, 96),
               ValueView(value16.data(), DType::f16, n, 2, 96, 2 * 96, 96));
  cache.ingest(3, KeyView(key_out.data() + 1, DType::f16, n, 2, 96, 96, n * 96),
               ValueView(value_out.data() + 1, DType::f16, n, 2, 96, 96, n * 96));
  std::vector<float> keys[3], values[3];
  for (const SequenceId seq : {1, 2, 3}) {
    const gpu::DeviceArray<float> k(key.size()), v(key.size());
    cache.reconstruct(seq, 0, {k.data(), n, 2, 96}, {v.data(), n, 2, 96});
    keys[seq - 1] = host(k);
    values[seq - 1] = host(v);
  }
  for (int i = 1; i < 3; ++i) {
    CHECK(keys[0] == keys[i]);
    CHECK(values[0] == values[i]);
  }
}

TEST_CASE("a state may hold no more full rows than the policies that load it would have kept") {
  Random random(37);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_sequences = 2;
  config.max_tokens = 2000;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  const auto policies = [](float share) {
    OjaKVv2<Cuda>::PolicySet result;
    result.token_policy.get<ResidualOutliers>().share = share;
    return result;
  };
  Device<OjaKVv2<Cuda>> many(config, layer.basis, policies(0.45F)),
      few(config, layer.basis, policies(0.02F));
  many.create(1);
  many.ingest(1, layer.rows(random, 400, true), layer.rows(random, 400, false),
              layer.queries(random, 32));
  const std::vector<std::byte> saved = many.save(1);
  const std::int64_t free = few.free_pages();
  std::string message;
  try {
    few.load(5, saved);
  } catch (const FormatError& error) {
    message = error.what();
  }
  // 32 sinks, and of 368 rows behind which a window of 32 stays nearly a half, where a fiftieth is
  // allowed, and as many again as heads may differ by.
  CHECK(message.find("this cache's token policy keeps at most") != std::string::npos);
  CHECK(!few.cache().contains(5));
  CHECK(few.free_pages() == free);
  many.load(5, saved);
  CHECK(many.num_tokens(5) == 400);
}

TEST_CASE("maintain() demands the pages that it takes: with one less it changes nothing") {
  Random random(41);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.flush_interval = 16;
  config.tail_capacity = 256;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  using Cache =
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, ResidualOutliers>, NoQuantizer>;
  Cache::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {20, 32};
  policies.token_policy.get<ResidualOutliers>().share = 0.3F;
  const auto key = layer.rows(random, 250, true), value = layer.rows(random, 250, false);
  const gpu::DeviceArray<float> k(key), v(value);
  std::int64_t taken = 0;
  for (const std::int64_t missing :
       {std::int64_t{-1000}, std::int64_t{1},
        std::int64_t{0}}) {  // first with plenty, to learn how many it takes
    const auto pool = std::make_shared<gpu::PagePool>(
        Cache::page_bytes(config, layer.basis, policies), missing < 0 ? 1000 : taken - missing);
    Cache cache(config, layer.basis, policies, pool);
    cache.create(1);
    cache.append(1, {k.data(), 250, 2, 64}, {v.data(), 250, 2, 64});
    if (missing == 1) {
      CHECK_THROWS_AS(cache.maintain(1), CapacityError);
      CHECK(cache.tail_length(1) == 250);
      CHECK(pool->allocator().num_free() == taken - 1);
      continue;
    }
    cache.maintain(1);
    CHECK(cache.tail_length(1) <= 48);
    if (missing < 0)
      taken = 1000 - pool->allocator().num_free();
    else
      CHECK(pool->allocator().num_free() == 0);
  }
  CHECK(taken > 2);
}

TEST_CASE(
    "bases move in a batch as they do alone, even where all flushed rows of a sequence stay full") {
  Random random(43);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 600;
  config.max_sequences = 4;
  config.flush_interval =
      1;  // every other row is an outlier, here of one sequence, there of the other
  config.publish_interval = 8;
  const auto layer = support::random_layer(random, config.shape, {}, 16);
  OjaKVv2<Cuda>::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {0, 4};
  policies.token_policy.get<ResidualOutliers>().share = 0.5F;
  Device<OjaKVv2<Cuda>> together(config, layer.basis, policies),
      apart(config, layer.basis, policies);
  const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
  const std::vector<SequenceId> seqs{1, 2};
  for (DeviceSide* side : {static_cast<DeviceSide*>(&together), static_cast<DeviceSide*>(&apart)}) {
    for (const SequenceId seq : seqs) side->create(seq);
    side->append_maintained(std::span(seqs).first(1), key, value);
  }
  for (int step = 0; step < 40; ++step) {
    const auto keys = layer.rows(random, 2, true), values = layer.rows(random, 2, false);
    together.append_maintained(seqs, keys, values);
    for (std::size_t i = 0; i < 2; ++i) {
      const std::ptrdiff_t from = static_cast<std::ptrdiff_t>(i * keys.size() / 2),
                           to = from + static_cast<std::ptrdiff_t>(keys.size() / 2);
      apart.append_maintained(std::span(seqs).subspan(i, 1),
                              {keys.begin() + from, keys.begin() + to},
                              {values.begin() + from, values.begin() + to});
    }
  }
  CHECK(together.publications() > 2);
  CHECK(together.publications() == apart.publications());
  for (const SequenceId seq : seqs) CHECK(together.save(seq) == apart.save(seq));
}

TEST_CASE("a sequence named twice is maintained once; a layer that ends gives its pages back") {
  Random random(19);
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 1000;
  const auto pool = std::make_shared<gpu::PagePool>(FullKV<Cuda>::page_bytes(config, {}, {}), 100);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 8);
  {
    FullKV<Cuda> twice(config, {}, {}, pool), once(config, {}, {}, pool);
    const auto key = layer.rows(random, 90, true), value = layer.rows(random, 90, false);
    const gpu::DeviceArray<float> k(key), v(value);
    std::vector<float> found, expected;
    for (auto [cache, rows] : {std::pair{&twice, &found}, std::pair{&once, &expected}}) {
      cache->create(7);
      cache->append(7, {k.data(), 90, 2, 64}, {v.data(), 90, 2, 64});
      const std::vector<SequenceId> seqs(cache == &twice ? 2 : 1, 7);
      cache->maintain(seqs);
      const gpu::DeviceArray<float> key_out(key.size()), value_out(value.size());
      cache->reconstruct(7, 0, {key_out.data(), 90, 2, 64}, {value_out.data(), 90, 2, 64});
      *rows = host(key_out);
    }
    CHECK(twice.tail_length(7) == once.tail_length(7));
    CHECK(found == expected);
    CHECK(pool->allocator().num_free() < 100);
  }
  CHECK(pool->allocator().num_free() == 100);
}

TEST_CASE("heads whose keys, or values, or both have no bits at all") {
  Random random(13);
  Settings settings;
  settings.method = Method::codes;
  settings.basis.centred = true;
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.epoch_type = DType::f32;
  config.max_tokens = 6000;
  config.max_query_tokens = 3;
  const auto without = [](std::vector<std::uint8_t>& bits) {
    std::fill(bits.begin(), bits.end(), std::uint8_t{0});
  };
  for (const int which : {0, 1, 2}) {  // keys of one head and values of the other; both of one;
                                       // both of both, of which nothing is read
    auto layer = support::random_layer(random, config.shape, settings, 20);
    without(layer.basis.heads[0].key_bits);
    without(layer.basis.heads[which == 0 ? 1 : 0].value_bits);
    if (which == 2) {
      without(layer.basis.heads[1].key_bits);
      without(layer.basis.heads[1].value_bits);
    }
    for (const int rows : {300, 5000}) {  // one split, and three
      CAPTURE(which);
      CAPTURE(rows);
      const auto device = make_device(settings, config, layer.basis);
      const auto cpu = support::make_cpu_side(settings, config, layer.basis);
      device->create(1);
      const auto key = layer.rows(random, rows, true), value = layer.rows(random, rows, false);
      device->ingest(1, key, value);
      cpu->ingest(key, value, {});
      const SequenceId seq = 1;
      for (const int m : {1, 3}) {
        const auto query = layer.queries(random, m);
        std::vector<float> out, lse;
        device->attend(std::span(&seq, 1), query, out, lse);
        Worst worst;
        compare(settings, config, *device, 1, *cpu, query, out, lse, worst);
      }
    }
  }
}

namespace {

/// A graph of append and attend, replayed, against plain calls: bit for bit, whatever maintain does
/// in between.
template <class Cache>
void replay_graph(const support::RandomLayer& layer, CacheConfig config,
                  const typename Cache::PolicySet& policies, Random& random,
                  std::int64_t& publications, std::int64_t& merges) {
  config.shape = layer.shape;
  config.max_tokens = 3000;
  config.max_sequences = 2;
  Cache cache(config, layer.basis, policies), plain(config, layer.basis, policies);
  const std::vector<SequenceId> seqs{5, 6};
  const auto prompt_key = layer.rows(random, 700, true),
             prompt_value = layer.rows(random, 700, false), window = layer.queries(random, 32);
  const gpu::DeviceArray<float> pk(prompt_key), pv(prompt_value), pq(window);
  for (const SequenceId seq : seqs) {
    for (Cache* each : {&cache, &plain}) {
      each->create(seq);
      each->ingest(seq, {pk.data(), 700, 2, 128}, {pv.data(), 700, 2, 128},
                   {pq.data(), 32, 8, 128});
    }
  }
  const std::size_t row = 2 * 2 * 128, heads = 2 * 8 * 128;
  gpu::DeviceArray<float> key(row), value(row), query(heads), out(heads), expected(heads);
  cudaStream_t stream;
  gpu::check(cudaDeviceSynchronize(), "prompt");
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  cache.append(seqs, {key.data(), 2, 2, 128}, {value.data(), 2, 2, 128}, stream);
  cache.attend(seqs, {query.data(), 2, 8, 128}, {out.data(), 2, 8, 128}, {}, stream);
  gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
  gpu::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  for (int step = 0; step < (effort() == 0 ? 60 : 200); ++step) {
    const auto k = layer.rows(random, 2, true), v = layer.rows(random, 2, false),
               q = layer.queries(random, 2);
    gpu::check(cudaMemcpy(key.data(), k.data(), key.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    gpu::check(cudaMemcpy(value.data(), v.data(), value.bytes(), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    gpu::check(cudaMemcpy(query.data(), q.data(), query.bytes(), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    cache.advance(seqs, 1);
    gpu::check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    cache.maintain(seqs, stream);
    plain.append(seqs, {key.data(), 2, 2, 128}, {value.data(), 2, 2, 128}, stream);
    plain.attend(seqs, {query.data(), 2, 8, 128}, {expected.data(), 2, 8, 128}, {}, stream);
    plain.maintain(seqs, stream);
    gpu::check(cudaStreamSynchronize(stream), "step");
    CHECK(host(out) == host(expected));
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  publications = cache.statistics().publications;
  merges = cache.statistics().merges;
}

}  // namespace

TEST_CASE("append and attend in a CUDA graph, maintain between its replays") {
  Random random(7);
  Settings settings;
  settings.method = Method::codes;
  CacheConfig config;
  config.epoch_type = DType::f32;
  std::int64_t publications = 0, merges = 0;
  const auto layer = support::random_layer(random, {8, 2, 128}, settings, 128);
  replay_graph<Codes>(layer, config, {{}, {}, {4, 32}, {}}, random, publications, merges);
  // Bases that move: the graph knows how many segments there may be, not how many there are.
  config.epoch_type = DType::f16;
  config.publish_interval = 40;
  using Merging = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;
  const auto narrow = support::random_layer(random, {8, 2, 128}, settings, 40);
  replay_graph<Merging>(narrow, config, {{}, {}, {4, 32}, {}}, random, publications, merges);
  if (effort() > 0) {  // enough steps
    CHECK(publications > 6);
    CHECK(merges > 2);
  }
  SubSpaceA<Cuda>::PolicySet chunks;
  chunks.updater.chunk_length = 40;
  chunks.token_policy = {4, 32};
  replay_graph<SubSpaceA<Cuda>>(narrow, config, chunks, random, publications, merges);
  if (effort() > 0) CHECK(merges > 2);
  OjaKVv2<Cuda>::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {4, 32};
  policies.token_policy.get<ResidualOutliers>().share = 0.05F;
  replay_graph<OjaKVv2<Cuda>>(narrow, config, policies, random, publications, merges);
}

TEST_CASE(
    "bad input is refused with both values, and values that are not finite never reach the store") {
  CacheConfig config;
  config.shape = {4, 2, 64};
  config.max_tokens = 100;
  FullKV<Cuda> cache(config);
  cache.create(1);
  gpu::DeviceArray<float> rows(200 * 2 * 64), out(200 * 4 * 64);
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(message([&] {
          cache.ingest(1, {rows.data(), 10, 2, 32}, {rows.data(), 10, 2, 32});
        }) == "head_dim: cache 64, key 32");
  CHECK(message([&] {
          cache.ingest(1, {rows.data(), 101, 2, 64}, {rows.data(), 101, 2, 64});
        }) == "max_tokens: 100, sequence has 0, given 101");
  CHECK(message([&] {
          cache.ingest(2, {rows.data(), 1, 2, 64}, {rows.data(), 1, 2, 64});
        }) == "unknown sequence 2; 1 sequences exist");
  CHECK(message([&] {
          cache.attend(1, {rows.data(), 1, 4, 64}, {out.data(), 1, 4, 64});
        }) == "attend: 1 query tokens, sequence 1 has 0 tokens in its tail");
  CHECK(message([&] {
          cache.append(1, {rows.data(), 97, 2, 64}, {rows.data(), 97, 2, 64});
        }) == "tail_capacity: 96, sequence 1 has 0 rows in its tail, given 97; call maintain");
  CHECK(message([&] {
          FullKV<Cuda> other({.shape = {4, 2, 40}});
        }) == "head_dim: 40, a multiple of 16 up to 256 expected on this backend");
  CHECK(cache.num_tokens(1) == 0);
  cudaStream_t stream;
  cudaGraph_t graph;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  CHECK(message([&] { cache.maintain(1, stream); }) ==
        "maintain: the stream is capturing a graph; only append, attend and accumulate can be "
        "captured");
  CHECK(message([&] { cache.create(3, stream); }) ==
        "create: the stream is capturing a graph; only append, attend and accumulate can be "
        "captured");
  CHECK(message([&] {
          cache.reconstruct(1, 0, {rows.data(), 0, 2, 64}, {rows.data(), 0, 2, 64}, stream);
        }) ==
        "reconstruct: the stream is capturing a graph; only append, attend and accumulate can be "
        "captured");
  gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  CHECK(!cache.contains(3));
  std::vector<float> bad(3 * 2 * 64, 1.0F);
  bad[2 * 64 + 5] = std::nanf("");
  bad[2 * 2 * 64 + 7] = 70000.0F;
  const gpu::DeviceArray<float> device(bad);
  cache.append(1, {device.data(), 3, 2, 64}, {device.data(), 3, 2, 64});
  CHECK(cache.faults() == 2);
  gpu::DeviceArray<float> k(bad.size()), v(bad.size());
  cache.reconstruct(1, 0, {k.data(), 3, 2, 64}, {v.data(), 3, 2, 64});
  const auto stored = host(k);
  CHECK(stored[0] == 1.0F);
  for (std::size_t i = 2 * 64; i < stored.size(); ++i) CHECK(stored[i] == 0.0F);
}

namespace {

/// Rows whose element (token, head, channel) is marked where the token is `special`, else nothing
/// or a saw tooth over tokens.
__global__ void fill_rows(__half* rows, std::int64_t tokens, int heads, int dim, bool saw,
                          std::int64_t special, float mark) {
  for (std::int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    for (int i = static_cast<int>(threadIdx.x); i < heads * dim;
         i += static_cast<int>(blockDim.x)) {
      const float plain = saw ? static_cast<float>(token % 8) - 3.5F : 0.0F;
      rows[token * heads * dim + i] =
          __float2half(token == special && (saw || i % dim == 0) ? mark : plain);
    }
  }
}

}  // namespace

TEST_CASE("tokens leave the middle of a long sequence: rows behind them move up in several steps") {
  const int heads = 8, dim = 256;
  const std::int64_t tokens = 9000;  // 73 MB: more than kShiftBytes
  CacheConfig config;
  config.shape = {heads, heads, dim};
  config.max_tokens = tokens + 64;
  FullKV<Cuda> cache(config);
  cache.create(1);
  Random random(91);
  std::vector<__half> keys, values;
  for (std::int64_t i = 0; i < tokens * heads * dim; ++i) {
    keys.push_back(__float2half(static_cast<float>(random() % 2048) / 64.0F));
    values.push_back(__float2half(static_cast<float>(random() % 2048) / 64.0F));
  }
  const gpu::DeviceArray<__half> key(keys), value(values);
  cache.ingest(1, KeyView(key.data(), DType::f16, tokens, heads, dim, heads * dim, dim),
               ValueView(value.data(), DType::f16, tokens, heads, dim, heads * dim, dim));
  REQUIRE(static_cast<std::size_t>(tokens * heads * dim) * 4 > 2 * gpu::kShiftBytes);
  for (const auto& [first, count] : {std::pair<std::int64_t, std::int64_t>{256, 512},
                                     {101, 333},
                                     {7000, 1}}) {  // whole tiles, and others
    cache.remove(1, first, count);
    for (std::vector<__half>* rows : {&keys, &values})
      rows->erase(rows->begin() + first * heads * dim,
                  rows->begin() + (first + count) * heads * dim);
    const std::int64_t left = cache.num_tokens(1);
    REQUIRE(left * heads * dim == static_cast<std::int64_t>(keys.size()));
    const gpu::DeviceArray<__half> key_out(keys.size()), value_out(keys.size());
    for (const auto* out : {&key_out, &value_out})
      gpu::check(cudaMemset(out->data(), 0xff, out->bytes()), "cudaMemset");
    cache.reconstruct(
        1, 0, KeyTargetView(key_out.data(), DType::f16, left, heads, dim, heads * dim, dim),
        ValueTargetView(value_out.data(), DType::f16, left, heads, dim, heads * dim, dim));
    std::vector<__half> found(keys.size());
    for (const auto& [expected, stored] : {std::pair{&keys, &key_out}, {&values, &value_out}}) {
      gpu::check(cudaMemcpy(found.data(), stored->data(), found.size() * sizeof(__half),
                            cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
      CHECK(std::memcmp(found.data(), expected->data(), found.size() * sizeof(__half)) == 0);
    }
  }
}

TEST_CASE("tensors and lists of more than 2^31 elements") {
  std::size_t free = 0, total = 0;
  gpu::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  const int heads = 16, dim = 128;
  const std::int64_t tokens = (std::int64_t{1} << 20) + 4096;
  if (free < (std::size_t{48} << 30)) {
    MESSAGE("skipped: 48 GiB of device memory are needed, " << (free >> 30) << " are free");
    return;
  }
  REQUIRE(tokens * heads * dim > std::int64_t{1} << 31);
  CacheConfig config;
  config.shape = {heads, heads, dim};
  config.max_tokens = tokens + 64;
  FullKV<Cuda> cache(config);
  cache.create(1);
  const std::int64_t special = tokens - 2000;
  const gpu::DeviceArray<__half> key(static_cast<std::size_t>(tokens * heads * dim)),
      value(key.size());
  fill_rows<<<4096, 256>>>(key.data(), tokens, heads, dim, false, special, 8.0F);
  fill_rows<<<4096, 256>>>(value.data(), tokens, heads, dim, true, special, 100.0F);
  cache.ingest(1, KeyView(key.data(), DType::f16, tokens, heads, dim, heads * dim, dim),
               ValueView(value.data(), DType::f16, tokens, heads, dim, heads * dim, dim));
  std::vector<float> queries(static_cast<std::size_t>(heads * dim), 0.0F);
  for (int head = 1; head < heads; head += 2)
    queries[static_cast<std::size_t>(head * dim)] =
        50.0F;  // odd heads look for the special key: a logit of 35
  const gpu::DeviceArray<float> query(queries), out(queries.size());
  cache.attend(1, {query.data(), 1, heads, dim}, {out.data(), 1, heads, dim});
  const auto found = host(out);
  for (int head = 0; head < heads; ++head) {
    for (int i = 0; i < dim; ++i) {
      const float x = found[static_cast<std::size_t>(head * dim + i)];
      if (head % 2 == 1)
        CHECK(std::abs(x - 100.0F) < 0.01F);
      else
        CHECK(std::abs(x) < 1e-3F);  // the mean of whole teeth, and one in a million
    }
  }
  gpu::check(cudaMemset(key.data(), 0xff, key.bytes()), "cudaMemset");
  gpu::check(cudaMemset(value.data(), 0xff, value.bytes()), "cudaMemset");
  cache.reconstruct(
      1, 0, KeyTargetView(key.data(), DType::f16, tokens, heads, dim, heads * dim, dim),
      ValueTargetView(value.data(), DType::f16, tokens, heads, dim, heads * dim, dim));
  for (const std::int64_t token :
       {std::int64_t{0}, std::int64_t{12345}, special - 1, special, tokens - 1}) {
    std::vector<__half> k(static_cast<std::size_t>(heads * dim)), v(k.size());
    gpu::check(cudaMemcpy(k.data(), key.data() + token * heads * dim, k.size() * sizeof(__half),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    gpu::check(cudaMemcpy(v.data(), value.data() + token * heads * dim, v.size() * sizeof(__half),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    for (int i = 0; i < heads * dim; ++i) {
      CHECK(__half2float(k[static_cast<std::size_t>(i)]) ==
            (token == special && i % dim == 0 ? 8.0F : 0.0F));
      CHECK(__half2float(v[static_cast<std::size_t>(i)]) ==
            (token == special ? 100.0F : static_cast<float>(token % 8) - 3.5F));
    }
  }
}

}  // namespace cache_tests
