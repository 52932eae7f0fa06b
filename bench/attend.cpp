// SPDX-License-Identifier: Apache-2.0
// One decode step of one layer (32 query heads, 8 KV heads, head_dim 128): FullKV beside
// StaticPCAHybrid at rank 32 and 77, beside full rows in 8 bits and transform codes at 2.5 bits,
// and beside pre-RoPE keys: up-projected (groups of 4), folded (8 query heads). Layers of few KV
// heads (BM_*_heads) have 4 query heads for each; there a step's threads share the rows of a head.
//
// Floor of a step: stored bytes read once at the machine's streaming rate (measured here:
// BM_stream), or 2 products per stored coefficient and query head at its f32 FMA rate, whichever is
// longer. Counters: bytes of a step and bytes/s read; `of_stream`, their share of the streaming
// rate that one thread had in the same process, just before the steps; the measured size against
// f16. Times are those of Release builds: others say so.
#include <benchmark/benchmark.h>

#include <Eigen/Dense>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "lowrankkv/presets.hpp"

namespace {

using namespace lowrankkv;

std::vector<float> rows(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0F, 1.0F);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = uniform(random);
  return values;
}

LayerBasis basis(int rank, int kv_heads = 8) {
  LayerBasis layer;
  for (int h = 0; h < kv_heads; ++h) {
    HeadBasis head;
    head.key_rank = head.value_rank = rank;
    const auto values = rows(std::int64_t{128} * rank, static_cast<std::uint64_t>(h));
    const Eigen::MatrixXf random = Eigen::Map<const Eigen::MatrixXf>(values.data(), 128, rank);
    const Eigen::MatrixXf q = Eigen::HouseholderQR<Eigen::MatrixXf>(random).householderQ() *
                              Eigen::MatrixXf::Identity(128, rank);
    head.key_down.resize(static_cast<std::size_t>(128 * rank));
    Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>>(
        head.key_down.data(), 128, rank) = q;
    head.value_down = head.key_down;
    layer.heads.push_back(head);
  }
  return layer;
}

/// 256 MiB that no cache holds.
const std::vector<float>& far_memory() {
  static const std::vector<float> values = rows(std::int64_t{1} << 26, 1);
  return values;
}
float read_all(const std::vector<float>& values) {
  return Eigen::Map<const Eigen::ArrayXf>(values.data(), static_cast<Eigen::Index>(values.size()))
      .sum();
}
/// Bytes a second that one thread reads now: the best of five.
double stream_rate() {
  double best = 0.0;
  for (int run = 0; run < 5; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    benchmark::DoNotOptimize(read_all(far_memory()));
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    best = (std::max)(best, 4.0 * static_cast<double>(far_memory().size()) / time.count());
  }
  return best;
}

void BM_stream(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(read_all(far_memory()));
  const double bytes = 4.0 * static_cast<double>(far_memory().size());
  state.counters["bytes/s"] =
      benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_stream)->Unit(benchmark::kMillisecond)->UseRealTime();

template <class Cache>
void attend(benchmark::State& state, const LayerBasis& maps, Rope form = Rope::post,
            int query_heads = 32, int full_row_bits = 0, int heads = 8) {
  const std::int64_t n = state.range(0);
  CacheConfig config{.shape = {query_heads, heads, 128},
                     .max_tokens = n + 1,
                     .num_threads = static_cast<int>(state.range(1))};
  config.rope.keys = form;
  config.full_row_bits = full_row_bits;
  Cache cache(config, maps);
  cache.create(0);
  const auto k = rows(1024 * heads * 128, 2);
  for (std::int64_t done = 0; done < n; done += 1024)
    cache.ingest(0, {k.data(), 1024, heads, 128}, {k.data(), 1024, heads, 128}, {},
                 Prompt::complete);
  cache.append(0, {k.data(), 1, heads, 128}, {k.data(), 1, heads, 128});
  const auto q = rows(query_heads * 128, 3);
  std::vector<float> out(q.size());
  const double stream = stream_rate();
  for (auto _ : state)
    cache.attend(0, {q.data(), 1, query_heads, 128}, {out.data(), 1, query_heads, 128});
  const MemoryUsage usage = cache.memory(0);
  const double bytes = static_cast<double>(usage.total());
  state.counters["bytes"] = bytes;
  state.counters["of_stream"] =
      benchmark::Counter(bytes / stream, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["x_f16"] = bytes / (static_cast<double>(n) * heads * 128 * 4);
  state.counters["bytes/s"] =
      benchmark::Counter(bytes, benchmark::Counter::kIsIterationInvariantRate);
}
void BM_full(benchmark::State& state) { attend<FullKV<>>(state, {}); }
void BM_full_8_bits(benchmark::State& state) { attend<FullKV<>>(state, {}, Rope::post, 32, 8); }
void BM_rank_32(benchmark::State& state) { attend<StaticPCAHybrid<>>(state, basis(32)); }
void BM_rank_77(benchmark::State& state) { attend<StaticPCAHybrid<>>(state, basis(77)); }
/// 32 channels at 4 bits and 96 at 2, of keys and of values.
LayerBasis coded_basis(int kv_heads = 8) {
  LayerBasis layer = basis(128, kv_heads);
  for (HeadBasis& head : layer.heads) {
    head.key_bits.assign(128, 2);
    std::fill_n(head.key_bits.begin(), 32, std::uint8_t{4});
    head.key_rms.assign(128, 0.5F);
    head.value_bits = head.key_bits;
    head.value_rms = head.key_rms;
  }
  return layer;
}
using Coded = CompressedKVCache<Cpu, PerHead, Static, SinkRecent, TransformCode>;
void BM_codes(benchmark::State& state) { attend<Coded>(state, coded_basis()); }
void BM_codes_unrotated(benchmark::State& state) { attend<Coded>(state, coded_basis(), Rope::pre); }
void BM_rank_32_unrotated(benchmark::State& state) {
  attend<StaticPCAHybrid<>>(state, basis(32), Rope::pre);
}
void BM_rank_32_one_head_groups(benchmark::State& state) {
  attend<StaticPCAHybrid<>>(state, basis(32), Rope::post, 8);
}
void BM_rank_32_one_head_groups_unrotated(benchmark::State& state) {
  attend<StaticPCAHybrid<>>(state, basis(32), Rope::pre, 8);
}
/// 4 query heads a KV head, as many of these as the third argument says.
template <class Cache>
void few_heads(benchmark::State& state, const LayerBasis& maps, Rope form = Rope::post) {
  const int heads = static_cast<int>(state.range(2));
  attend<Cache>(state, maps, form, 4 * heads, 0, heads);
}
void BM_full_heads(benchmark::State& state) { few_heads<FullKV<>>(state, {}); }
void BM_rank_32_heads(benchmark::State& state) {
  few_heads<StaticPCAHybrid<>>(state, basis(32, static_cast<int>(state.range(2))));
}
void BM_codes_heads(benchmark::State& state) {
  few_heads<Coded>(state, coded_basis(static_cast<int>(state.range(2))));
}
void BM_codes_unrotated_heads(benchmark::State& state) {
  few_heads<Coded>(state, coded_basis(static_cast<int>(state.range(2))), Rope::pre);
}
#define LOWRANKKV_SHAPES              \
  ->ArgNames({"n", "threads"})        \
      ->Args({4096, 1})               \
      ->Args({16384, 1})              \
      ->Args({32768, 1})              \
      ->Args({32768, 2})              \
      ->Unit(benchmark::kMillisecond) \
      ->UseRealTime()                 \
      ->MinTime(1.0)
BENCHMARK(BM_full) LOWRANKKV_SHAPES;
BENCHMARK(BM_rank_32) LOWRANKKV_SHAPES;
BENCHMARK(BM_rank_77) LOWRANKKV_SHAPES;
#define LOWRANKKV_SHAPE               \
  ->ArgNames({"n", "threads"})        \
      ->Args({16384, 1})              \
      ->Unit(benchmark::kMillisecond) \
      ->UseRealTime()                 \
      ->MinTime(1.0)
BENCHMARK(BM_full_8_bits) LOWRANKKV_SHAPE;
BENCHMARK(BM_codes) LOWRANKKV_SHAPE;
BENCHMARK(BM_codes_unrotated) LOWRANKKV_SHAPE;
BENCHMARK(BM_rank_32_unrotated) LOWRANKKV_SHAPE;
BENCHMARK(BM_rank_32_one_head_groups) LOWRANKKV_SHAPE;
BENCHMARK(BM_rank_32_one_head_groups_unrotated) LOWRANKKV_SHAPE;
#define LOWRANKKV_HEADS                 \
  ->ArgNames({"n", "threads", "heads"}) \
      ->Args({16384, 1, 1})             \
      ->Args({16384, 2, 1})             \
      ->Args({131072, 1, 1})            \
      ->Args({131072, 2, 1})            \
      ->Args({65536, 1, 2})             \
      ->Args({65536, 2, 2})             \
      ->Args({16384, 1, 8})             \
      ->Args({16384, 2, 8})             \
      ->Unit(benchmark::kMillisecond)   \
      ->UseRealTime()                   \
      ->MinTime(0.5)
BENCHMARK(BM_full_heads) LOWRANKKV_HEADS;
BENCHMARK(BM_rank_32_heads) LOWRANKKV_HEADS;
BENCHMARK(BM_codes_heads) LOWRANKKV_HEADS;
BENCHMARK(BM_codes_unrotated_heads) LOWRANKKV_HEADS;

}  // namespace

int main(int argc, char** argv) {
#if !defined(NDEBUG)
  std::fputs("bench_attend: not a Release build, its times say nothing\n", stderr);
#endif
  benchmark::AddCustomContext("kernels", lowrankkv::cpu::simd::kernels().name);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
