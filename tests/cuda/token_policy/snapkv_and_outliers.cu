// SPDX-License-Identifier: Apache-2.0
// Rows that SnapKV scores keep and errors exempt. Heads keep different numbers of them; tokens are
// removed from among them, and decoding goes on.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/support/device_cache.cuh"
#include "cuda/support/random_sequences.cuh"

namespace snapkv_and_outliers_tests {

using namespace lowrankkv;
using support::Answer;
using support::DeviceCache;
using support::message_of;
using support::part_of;
using support::Random;

namespace {

using ByErrors = Budgeted<Cuda>;
using Evicting = CompressedKVCache<Cuda, PerHead, Static,
                                   Compose<SinkRecent, SnapKV, ResidualOutliers>, TransformCode>;
using Sketched = CompressedKVCache<Cuda, PerHead, FrequentDirections,
                                   Compose<SinkRecent, ResidualOutliers>, Int8>;
using SketchedChosen =
    CompressedKVCache<Cuda, PerHead, FrequentDirections, Compose<SinkRecent, SnapKV>, Int8>;
using SketchedBoth = CompressedKVCache<Cuda, PerHead, FrequentDirections,
                                       Compose<SinkRecent, SnapKV, ResidualOutliers>, Int8>;
using Moving = CompressedKVCache<Cuda, PerHead, Oja, Compose<SinkRecent, SnapKV, ResidualOutliers>,
                                 NoQuantizer>;
template <class Updater, class Tokens>
using ThreeEpochs = CompressedKVCache<Cuda, PerHead, Updater, Tokens, Int8, KeepEpochs<3>>;

std::unique_ptr<support::DeviceSide> make_device(const support::Settings& settings,
                                                 const CacheConfig& config,
                                                 const LayerBasis& basis) {
  const auto make = [&]<class Cache>() -> std::unique_ptr<support::DeviceSide> {
    return std::make_unique<support::Device<Cache>>(
        config, basis, support::configured(typename Cache::PolicySet{}, settings));
  };
  if (settings.method == support::Method::oja_evicting) return make.operator()<Moving>();
  if (settings.method == support::Method::directions_outliers) return make.operator()<Sketched>();
  if (settings.method == support::Method::directions_snapkv)
    return make.operator()<SketchedChosen>();
  if (settings.method == support::Method::directions_evicting)
    return make.operator()<SketchedBoth>();
  return make.operator()<Evicting>();
}

/// What is stored of a sequence: rows [token, head, channel], and what has become of them.
struct Stored {
  std::vector<float> key, value;
  std::vector<std::vector<RowState>> states;  // of heads
  friend bool operator==(const Stored&, const Stored&) = default;

  /// Without tokens [first, first + count).
  Stored without(std::int64_t first, std::int64_t count) const {
    Stored rest = *this;
    const auto tokens = static_cast<std::ptrdiff_t>(states.front().size());
    const auto cut = [&](auto& all) {
      const auto size = static_cast<std::ptrdiff_t>(all.size()) / tokens;
      all.erase(all.begin() + first * size, all.begin() + (first + count) * size);
    };
    cut(rest.key);
    cut(rest.value);
    for (auto& head : rest.states) cut(head);
    return rest;
  }
};

template <class Cache>
Stored stored(const DeviceCache<Cache>& device, SequenceId seq) {
  Stored all;
  device.reconstruct(seq, all.key, all.value);
  for (int head = 0; head < device.shape.num_kv_heads; ++head) {
    all.states.emplace_back(static_cast<std::size_t>(device.cache.num_tokens(seq)));
    device.cache.row_states(seq, head, 0, all.states.back());
  }
  return all;
}

/// How far attention is from float64 over what is stored.
template <class Cache>
double off(DeviceCache<Cache>& device, SequenceId seq, const std::vector<float>& query) {
  const Stored now = stored(device, seq);
  std::vector<double> out, lse;
  support::attend_f64(device.shape, device.cache.config().scale(), now.key, now.value, query, out,
                      lse, true);
  return support::distance(device.attend(std::span(&seq, 1), query).out, out);
}

template <class Cache>
void append_maintained(DeviceCache<Cache>& device, SequenceId seq,
                       const support::RandomLayer& layer, Random& random, int tokens) {
  for (int i = 0; i < tokens; ++i) {
    device.append(std::span(&seq, 1), layer.rows(random, 1, true), layer.rows(random, 1, false));
    device.cache.maintain(std::span(&seq, 1));
  }
}

CacheConfig config_of(std::int64_t max_tokens) {
  CacheConfig config;
  config.shape = {6, 3, 64};
  config.max_sequences = 3;
  config.max_tokens = max_tokens;
  config.flush_interval = 16;
  config.full_row_bits = 0;
  return config;
}

template <class Cache>
void check_tokens_go(const typename Cache::PolicySet& policies, int full_row_bits) {
  Random random(41);
  CacheConfig config = config_of(1200);
  config.full_row_bits = full_row_bits;
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 48);
  DeviceCache<Cache> device(config, layer.basis, policies), other(config, layer.basis, policies);
  const SequenceId one = 1, two = 2, three = 3;
  const std::int64_t free_pages = device.cache.pool().allocator().num_free();
  device.cache.create(1);
  const std::vector<float> key = layer.rows(random, 500, true),
                           value = layer.rows(random, 500, false);
  device.ingest(1, key, value, layer.queries(random, 32));
  append_maintained(device, 1, layer, random, 60);
  device.cache.fork(1, 2);
  const std::vector<float> query = layer.queries(random, 1);
  const support::gpu::DeviceArray<float> device_query(query);
  const auto captured_out = support::poisoned(query.size());
  const support::CapturedStep step([&](cudaStream_t stream) {
    device.cache.attend(std::span(&two, 1), device.queries(device_query, 1),
                        {captured_out.data(), 1, 6, 64}, {}, stream);
  });
  const Stored before = stored(device, 1);
  const Answer answer = device.attend(std::span(&one, 1), query);

  // The first tokens of a sequence that shares pages with another one.
  CHECK(device.cache.truncate(2, 333) == TruncateResult::inexact);
  CHECK(device.cache.num_tokens(2) == 333);
  CHECK(stored(device, 2) == before.without(333, 560 - 333));
  bool differ = false;
  for (const auto& head : before.states)
    differ =
        differ ||
        std::count(head.begin(), head.begin() + 333, RowState::full) !=
            std::count(before.states[0].begin(), before.states[0].begin() + 333, RowState::full) ||
        std::count(head.begin(), head.begin() + 333, RowState::dropped) !=
            std::count(before.states[0].begin(), before.states[0].begin() + 333, RowState::dropped);
  CHECK(differ);  // else this would test little
  append_maintained(device, 2, layer, random, 100);
  CHECK(off(device, 2, query) < 1e-3);
  const Stored longer = stored(device, 2);
  CHECK(std::equal(longer.states[0].begin(), longer.states[0].begin() + 333,
                   before.states[0].begin()));

  // Removal from the middle, twice: from among listed rows, and from what is left of them.
  device.cache.remove(2, 20, 100);
  CHECK(stored(device, 2) == longer.without(20, 100));
  device.cache.remove(2, 2, 1);
  device.cache.remove(2, 150, 120);
  const Stored shorter = longer.without(20, 100).without(2, 1).without(150, 120);
  CHECK(stored(device, 2) == shorter);
  CHECK(off(device, 2, query) < 1e-3);
  CHECK(cudaGraphLaunch(step.replay(), step.stream) == cudaSuccess);
  CHECK(cudaStreamSynchronize(step.stream) == cudaSuccess);
  CHECK(support::host(captured_out) == device.attend(std::span(&two, 1), query).out);
  CHECK(stored(device, 1) == before);
  CHECK(device.attend(std::span(&one, 1), query) == answer);

  // Bytes are those of the heads' own rows.
  const std::int64_t tail = device.cache.tail_length(2),
                     row_bytes = full_row_bits == 8 ? 128 + 4 : 256;  // codes and two steps
  std::int64_t full = 0;
  for (const auto& head : shorter.states)
    full += std::count(head.begin(), head.end() - tail, RowState::full);
  CHECK(device.cache.memory(2).full_row_bytes == static_cast<std::size_t>(full * row_bytes));

  // How many rows a head has fewer than others is saved; hostile numbers of it under a valid
  // checksum are refused.
  std::vector<HeadRows> missing;
  HeadRows most;
  for (const auto& head : shorter.states) {
    const auto rows_in = [&](RowState state) {
      return static_cast<std::int32_t>(std::count(head.begin(), head.end() - tail, state));
    };
    missing.push_back({rows_in(RowState::full), rows_in(RowState::compressed)});
    most = {std::max(most.num_full, missing.back().num_full),
            std::max(most.num_compressed, missing.back().num_compressed)};
  }
  for (HeadRows& head : missing)
    head = {most.num_full - head.num_full, most.num_compressed - head.num_compressed};
  const std::vector<std::byte> saved = device.save(2);
  const auto pattern = std::as_bytes(std::span(missing));
  const auto found = std::search(saved.begin(), saved.end(), pattern.begin(), pattern.end());
  REQUIRE(found != saved.end());
  for (const std::int32_t number : {-1, most.num_full + 1, std::numeric_limits<std::int32_t>::max(),
                                    std::numeric_limits<std::int32_t>::min()}) {
    std::vector<std::byte> hostile = saved;
    std::memcpy(hostile.data() + (found - saved.begin()), &number, sizeof number);
    CHECK_THROWS_AS(other.cache.load(3, support::with_checksum(hostile)), FormatError);
    CHECK(!other.cache.contains(3));
  }

  // A copy goes on as the original.
  other.cache.load(3, saved);
  CHECK(stored(other, 3) == shorter);
  CHECK(other.save(3) == device.save(2));
  for (DeviceCache<Cache>* side : {&device, &other}) {
    Random same(5);
    append_maintained(*side, side == &device ? two : three, layer, same, 50);
  }
  CHECK(stored(other, 3) == stored(device, 2));
  CHECK(other.attend(std::span(&three, 1), query) == device.attend(std::span(&two, 1), query));
  CHECK(other.save(3) == device.save(2));
  device.cache.truncate(2, 0);
  device.ingest(2, key, value, layer.queries(random, 32));
  CHECK(off(device, 2, query) < 1e-3);
  device.cache.erase(1);
  device.cache.erase(2);
  CHECK(device.cache.pool().allocator().num_free() == free_pages);
}

ByErrors::PolicySet by_errors(float share) {
  ByErrors::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {5, 20};
  policies.token_policy.get<ResidualOutliers>().share = share;
  return policies;
}

}  // namespace

TEST_CASE(
    "random sequences of rows that scores keep, or errors exempt, or both: rows as on the CPU, "
    "answers as in float64, the same in any batch") {
  std::uint64_t seed = 45;
  using support::Method;
  struct Case {
    Method method;
    DType type;
    bool pre_rope = false;
  };
  for (const auto& [method, type, pre_rope] : {Case{Method::budgeted_evicting, DType::f16},
                                               {Method::budgeted_evicting, DType::bf16},
                                               {Method::budgeted_evicting, DType::f16, true},
                                               {Method::oja_evicting, DType::f16},
                                               {Method::oja_evicting, DType::bf16},
                                               {Method::oja_evicting, DType::f16, true},
                                               {Method::directions_outliers, DType::f16},
                                               {Method::directions_outliers, DType::bf16, true},
                                               {Method::directions_evicting, DType::f16},
                                               {Method::directions_evicting, DType::bf16, true},
                                               {Method::directions_snapkv, DType::f16},
                                               {Method::directions_snapkv, DType::bf16, true}}) {
    if (support::effort() == 0 &&
        (support::device_epochs(method)
             ? pre_rope || method == Method::directions_snapkv
             : !pre_rope && (type == DType::bf16) != (method == Method::oja_evicting)))
      continue;
    support::Settings settings;
    settings.method = method;
    settings.coefficients = type;
    settings.pre_rope = pre_rope;
    const std::string name = support::kMethodNames[static_cast<int>(method)];
    CAPTURE(name);
    CAPTURE(std::string(name_of(type)));
    CAPTURE(pre_rope);
    const support::Worst worst = support::random_sequences(make_device, settings, type, ++seed,
                                                           std::max(1, 4 * support::effort()));
    MESSAGE(name << " " << std::string(name_of(type)) << std::string(pre_rope ? ", unrotated" : "")
                 << ": outputs " << worst.out << ", lse " << worst.lse
                 << ", stored rows and the CPU's " << worst.rows << ", removed " << worst.removed);
  }
}

TEST_CASE(
    "tokens go from among rows that errors chose: each head keeps its own, copies go on as the "
    "original") {
  for (const int bits : {0, 8}) check_tokens_go<ByErrors>(by_errors(0.2F), bits);
}

TEST_CASE(
    "tokens go from among rows that scores kept and errors exempted: each head keeps its own, "
    "copies go on as the original") {
  for (const int bits : {0, 8})
    check_tokens_go<Evicting>(
        {{},
         {},
         Compose(SinkRecent{5, 20}, SnapKV{.keep = 0.4F}, ResidualOutliers{.share = 0.1F}),
         {}},
        bits);
}

namespace {

/// A relative error that a share of the rows of check_tokens_go() exceeds, of those that are
/// compressed without exemptions.
template <class Cache>
float error_exceeded_by(double share, typename Cache::PolicySet policies) {
  policies.token_policy.template get<ResidualOutliers>().share = 0.0F;
  Random random(41);
  const CacheConfig config = config_of(1200);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 48);
  DeviceCache<Cache> device(config, layer.basis, policies);
  device.cache.create(1);
  std::vector<float> key = layer.rows(random, 500, true), value = layer.rows(random, 500, false);
  device.ingest(1, key, value, layer.queries(random, 32));
  for (std::vector<float>* rows : {&key, &value}) {
    for (float& x : *rows) x = round_to(config.full_type, x);
  }
  const Stored now = stored(device, 1);
  std::vector<double> errors;
  for (std::size_t row = 0; row < 500 * 3; ++row) {
    if (now.states[row % 3][row / 3] != RowState::compressed) continue;
    const HeadBasis& basis = layer.basis.heads[row % 3];
    errors.push_back(support::row_error(basis.key_mean, key.data() + row * 64,
                                        now.key.data() + row * 64, 64, true) +
                     support::row_error(basis.value_mean, value.data() + row * 64,
                                        now.value.data() + row * 64, 64, true));
  }
  std::sort(errors.begin(), errors.end());
  return static_cast<float>(
      errors[static_cast<std::size_t>((1.0 - share) * static_cast<double>(errors.size()))]);
}

template <class Cache>
void check_threshold(typename Cache::PolicySet policies, int full_row_bits) {
  ResidualOutliers& outliers = policies.token_policy.template get<ResidualOutliers>();
  outliers.error = OutlierError::relative;
  outliers.share = 0.5F;
  outliers.threshold = error_exceeded_by<Cache>(0.2, policies);
  check_tokens_go<Cache>(policies, full_row_bits);
}

}  // namespace

TEST_CASE(
    "rows stay full where errors exceed a threshold: each head keeps its own number of them, "
    "tokens go from among them, copies go on as the original") {
  for (const int bits : {0, 8}) check_threshold<ByErrors>(by_errors(0.5F), bits);
  check_threshold<Evicting>(
      {{}, {}, Compose(SinkRecent{5, 20}, SnapKV{.keep = 0.6F}, ResidualOutliers{}), {}}, 0);
  if (support::effort() == 0)
    return;  // on the host sketches take minutes; random sequences have them too
  check_threshold<Sketched>({{}, {}, Compose(SinkRecent{5, 20}, ResidualOutliers{}), {}}, 0);
  check_threshold<SketchedBoth>(
      {{}, {}, Compose(SinkRecent{5, 20}, SnapKV{.keep = 0.6F}, ResidualOutliers{}), {}}, 0);
}

TEST_CASE(
    "full rows that were all early, and are kept when later ones go, have room for as many again; "
    "beyond that truncate() says so and changes nothing") {
  Random random(42);
  const CacheConfig config = config_of(800);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 20);
  DeviceCache<ByErrors> device(config, layer.basis, by_errors(0.25F));
  const SequenceId one = 1;
  device.cache.create(1);
  std::string refused;
  std::int64_t length = 0;
  while (refused.empty()) {
    const std::int64_t tokens = 780 - length, early = tokens / 4 + 30;
    REQUIRE(early < tokens);
    // Rows that no map holds come first, and are all that a head can keep.
    std::vector<float> key = layer.rows(random, tokens, true),
                       value = layer.rows(random, tokens, false);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < static_cast<std::size_t>(early * 3 * 64); ++i)
      key[i] = 30.0F * normal(random);
    device.ingest(1, key, value);
    const Stored before = stored(device, 1);
    const std::int64_t kept = length + tokens / 4 + 30;
    try {
      device.cache.truncate(1, kept);
    } catch (const CapacityError& error) {
      refused = error.what();
    }
    CHECK(device.cache.num_tokens(1) == (refused.empty() ? kept : 780));
    CHECK(stored(device, 1) == (refused.empty() ? before.without(kept, 780 - kept) : before));
    length = kept;
    REQUIRE(length < 700);
  }
  CHECK(length > 500);  // room was there before
  CHECK(refused.find("may come: at most") != std::string::npos);
  CHECK(message_of([&] { device.cache.remove(1, 500, 250); }).find("may come: at most") !=
        std::string::npos);
  device.cache.remove(1, 0, 400);  // most of those rows
  append_maintained(device, one, layer, random, 100);
  CHECK(off(device, 1, layer.queries(random, 1)) < 1e-3);
}

/// Tokens are removed from among chosen rows and others appended, in forks and loaded copies, so
/// that heads have different numbers of rows under every epoch. Returns whether they had.
template <class Cache>
bool tokens_go(DeviceCache<Cache>& device, const support::RandomLayer& layer, Random& random) {
  const Stored before = stored(device, 1);
  const auto compressed = [](const Stored& all, std::size_t head) {
    return std::count(all.states[head].begin(), all.states[head].end(), RowState::compressed);
  };
  const auto differ = [&](const Stored& all) {
    for (std::size_t head = 1; head < all.states.size(); ++head) {
      if (compressed(all, head) != compressed(all, 0)) return true;
    }
    return false;
  };
  const auto go_on = [&](SequenceId seq, int steps) {
    append_maintained(device, seq, layer, random, steps);
    CHECK(off(device, seq, layer.queries(random, 1)) < 1e-3);
  };
  device.cache.fork(1, 2);
  device.cache.remove(2, 70, 31);
  CHECK(stored(device, 2) == before.without(70, 31));
  CHECK(off(device, 2, layer.queries(random, 1)) < 1e-3);
  device.cache.fork(2, 3);
  device.cache.truncate(3, 180);
  const Stored rest = stored(device, 3);
  CHECK(rest == before.without(70, 31).without(180, device.cache.num_tokens(2) - 180));
  // A loaded copy continues as its sequence does.
  const std::vector<std::byte> saved = device.save(3);
  go_on(3, 50);
  const Stored late = stored(device, 3);
  CHECK(late.without(180, 50).states == rest.states);
  CHECK(stored(device, 2) == before.without(70, 31));
  device.cache.erase(3);
  device.cache.load(3, saved);
  CHECK(stored(device, 3) == rest);
  CHECK(device.save(3) == saved);
  device.cache.remove(3, 1, device.cache.num_tokens(3) - 5);  // epochs without a row go
  go_on(3, 40);
  go_on(2, 20);
  CHECK(stored(device, 1) == before);
  const bool apart = differ(rest);
  for (const SequenceId seq : {2, 3}) device.cache.erase(seq);
  device.cache.truncate(1, 0);
  CHECK(device.cache.memory(1).full_row_bytes == 0);
  CHECK(device.cache.memory(1).coefficient_bytes == 0);
  go_on(1, 20);
  return apart;
}

TEST_CASE("where bases move, tokens go from among rows that scores or errors chose") {
  Random random(43);
  CacheConfig config = config_of(1200);
  config.publish_interval = 32;
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 24);
  const auto fill = [&](auto& device) {
    device.cache.create(1);
    device.ingest(1, layer.rows(random, 200, true), layer.rows(random, 200, false),
                  layer.queries(random, 32));
    append_maintained(device, 1, layer, random, 130);
    CHECK(device.cache.statistics().publications > 2);
  };
  int apart = 0;
  const auto check = [&]<class Cache>(typename Cache::PolicySet policies) {
    policies.token_policy.template get<SinkRecent>() = {5, 20};
    if constexpr (requires { policies.updater.chunk_length; }) policies.updater.chunk_length = 24;
    DeviceCache<Cache> device(config, layer.basis, policies);
    fill(device);
    apart += tokens_go(device, layer, random) ? 1 : 0;
    CHECK(device.cache.statistics().merges > 0);
  };
  const SnapKV scores{0.4F, 0, 32, 7, Pooling::average};
  const ResidualOutliers errors{.share = 0.1F};
  check.operator()<ThreeEpochs<Oja, Compose<SinkRecent, SnapKV, ResidualOutliers>>>(
      {{}, {}, Compose(SinkRecent{}, scores, errors), {}});
  check.operator()<ThreeEpochs<FrequentDirections, Compose<SinkRecent, SnapKV, ResidualOutliers>>>(
      {{}, {}, Compose(SinkRecent{}, scores, errors), {}});
  CHECK(apart == 2);
  if (support::effort() == 0) return;
  check.operator()<ThreeEpochs<Oja, Compose<SinkRecent, SnapKV>>>(
      {{}, {}, Compose(SinkRecent{}, scores), {}});
  check.operator()<ThreeEpochs<FrequentDirections, Compose<SinkRecent, SnapKV>>>(
      {{}, {}, Compose(SinkRecent{}, scores), {}});
  CHECK(apart >= 3);
}

TEST_CASE("where the segments of many heads begin, a loaded copy knows too") {
  Random random(46);
  CacheConfig config = config_of(200);
  config.shape = {34, 34, 64};  // more than one launch tells the device
  config.publish_interval = 16;
  using Cache = ThreeEpochs<Oja, Compose<SinkRecent, SnapKV>>;
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 8);
  DeviceCache<Cache> device(
      config, layer.basis,
      {{}, {}, Compose(SinkRecent{2, 8}, SnapKV{0.5F, 0, 16, 3, Pooling::average}), {}});
  device.cache.create(1);
  device.ingest(1, layer.rows(random, 60, true), layer.rows(random, 60, false),
                layer.queries(random, 32));
  append_maintained(device, 1, layer, random, 40);
  device.cache.remove(1, 10, 21);
  device.cache.load(2, device.save(1));
  CHECK(device.save(2) == device.save(1));
  CHECK(stored(device, 2) == stored(device, 1));
  const auto query = layer.queries(random, 1);
  CHECK(off(device, 2, query) < 1e-3);
  const SequenceId one = 1, two = 2;
  CHECK(device.attend(std::span(&two, 1), query).out ==
        device.attend(std::span(&one, 1), query).out);
  // Invalid boundaries are refused: somewhere in the first bytes a number is one.
  const std::vector<std::byte> saved = device.save(1);
  int refused = 0;
  for (std::size_t at = 0; at < 6000 && refused < 20; at += 4) {
    std::vector<std::byte> hostile = saved;
    std::fill_n(hostile.begin() + static_cast<std::ptrdiff_t>(at), 4, std::byte{0xff});
    refused += message_of([&] {
                 device.cache.load(3, support::with_checksum(hostile));
               }).find("saved state: segment ") == 0
                   ? 1
                   : 0;
    if (device.cache.contains(3)) device.cache.erase(3);
  }
  CHECK(refused == 20);
}

TEST_CASE("sketches and outliers: a batch may leave nothing to compress") {
  Random random(44);
  CacheConfig config = config_of(1200);
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 24);
  Sketched::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {5, 20};
  policies.token_policy.get<ResidualOutliers>().share = 1.0F;
  policies.updater.chunk_length = 40;
  DeviceCache<Sketched> device(config, layer.basis, policies);
  device.cache.create(1);
  std::vector<float> key = layer.rows(random, 150, true), value = layer.rows(random, 150, false);
  device.ingest(1, key, value);
  const Stored all = stored(device, 1);
  for (float& x : key) x = round_to(config.full_type, x);
  CHECK(all.key == key);
  append_maintained(device, 1, layer, random, 60);
  CHECK(off(device, 1, layer.queries(random, 1)) < 1e-3);
  CHECK(device.cache.memory(1).coefficient_bytes == 0);
}

TEST_CASE(
    "sketches, scores and errors: epochs all of whose rows errors exempt have no segment, as on "
    "the CPU") {
  Random random(48);
  support::Settings settings;
  settings.method = support::Method::directions_evicting;
  settings.sinks = 0;
  settings.recent = 8;
  settings.outliers.share = 0.1F;
  std::int64_t merges = 0;
  for (int trial = 0; trial < 3 * std::max(1, support::effort()); ++trial) {
    CacheConfig config = config_of(1200);
    config.shape = {1 + trial % 2, 1 + trial % 2, 64};
    config.epoch_type = DType::f32;
    config.flush_interval = 32;
    const int rank = 4 + trial % 3;
    settings.snapkv = {0.08F + 0.02F * static_cast<float>(trial % 3), 0, 16, 1,
                       Pooling::average};  // about as many rows of a part as stay full
    settings.directions = {2.0F, rank + 2 * (trial % 4), 1.0F};
    const support::RandomLayer layer = support::random_layer(random, config.shape, settings, rank);
    const auto device = make_device(settings, config, layer.basis);
    const auto cpu = support::make_cpu_side(settings, config, layer.basis);
    device->create(1);
    const SequenceId one = 1;
    CAPTURE(trial);
    for (const int tokens : {600, 330}) {
      const auto key = layer.rows(random, tokens, true), value = layer.rows(random, tokens, false);
      auto window = layer.queries(random, 16);
      for (float& x : window) x = round_to(config.full_type, x);
      device->ingest(1, key, value, window);
      cpu->ingest(key, value, window);
      CHECK(device->publications() == cpu->publications());
      CHECK(device->merges() == cpu->merges());
    }
    for (int step = 0; step < 100; ++step) {
      const auto key = layer.rows(random, 1, true), value = layer.rows(random, 1, false);
      device->append_maintained(std::span(&one, 1), key, value);
      cpu->append_maintained(key, value);
    }
    CHECK(device->publications() == cpu->publications());
    CHECK(device->merges() == cpu->merges());
    std::vector<float> key, value, cpu_key, cpu_value;
    device->reconstruct(1, key, value);
    cpu->reconstruct(cpu_key, cpu_value);
    const std::size_t few = 2 + key.size() / 64 / 200;
    CHECK(std::max(support::distance_of_most(key, cpu_key, 64, few),
                   support::distance_of_most(value, cpu_value, 64, few)) < 0.03);
    merges += cpu->merges();
  }
  CHECK(merges > 0);
}

TEST_CASE("a prompt that enters sketches batch by batch demands the pages that its batches take") {
  Random random(45);
  CacheConfig config = config_of(800);
  config.shape = {1, 1, 64};
  config.flush_interval = 32;
  const support::RandomLayer layer = support::random_layer(random, config.shape, {}, 24);
  Sketched::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {30, 8};
  policies.token_policy.get<ResidualOutliers>().share = 0.1F;
  int apart = 0;
  for (std::int64_t n = 90; n < 130; n += support::effort() == 0 ? 7 : 1) {
    const std::vector<float> key = layer.rows(random, n, true),
                             value = layer.rows(random, n, false);
    config.num_pages = 0;
    DeviceCache<Sketched> roomy(config, layer.basis, policies);
    const std::int64_t all = roomy.cache.pool().allocator().num_free();
    roomy.cache.create(1);
    roomy.ingest(1, key, value);
    config.num_pages = all - roomy.cache.pool().allocator().num_free();
    DeviceCache<Sketched> enough(config, layer.basis, policies);
    enough.cache.create(1);
    enough.ingest(1, key, value);
    CHECK(enough.cache.num_tokens(1) == n);
    if (--config.num_pages == 0) continue;
    DeviceCache<Sketched> tight(config, layer.basis, policies);
    tight.cache.create(1);
    CHECK(message_of([&] { tight.ingest(1, key, value); }).find("pages needed") !=
          std::string::npos);
    CHECK(tight.cache.num_tokens(1) == 0);
    CHECK(tight.cache.pool().allocator().num_free() == config.num_pages);
    ++apart;
  }
  CHECK(apart > 0);
}

}  // namespace snapkv_and_outliers_tests
