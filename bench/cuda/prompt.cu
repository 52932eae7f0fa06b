// SPDX-License-Identifier: Apache-2.0
// Storing one layer's prompt, and moving decoded rows out of full rank, on CompressedKVCache<Cuda,
// ...>: one layer of Llama-3.1-8B's shape (32 query heads, 8 KV heads, head_dim 128). For every
// method: ingest() of a prompt whose K and V lie in device memory in f16, and maintain() of 16
// sequences whose tails are full, a token of each. Where rows are kept by the attention they
// receive, a prompt's queries all attend to it first, and a step's attention is timed with scores
// and without. Also in chunks of 4096, and those in calls of 512, which wait for each other at full
// rank. Medians of 15. Arguments: the beginning of a method's name; without, all. Build: nvcc -O3
// -std=c++20 -I include -gencode=arch=compute_90,code=sm_90 bench/cuda/prompt.cu
//
// Floor of a prompt: its K and V read once and the result written, at the rate that copying reaches
// (4.2 TB/s on an H200: 0.032 ms for the reading at 32768 tokens).
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "measure.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using bench::kDim;

namespace {

constexpr int kHeads = 8, kQueryHeads = 32;
std::string only;  // the beginning of the names of the methods that are measured

template <class Cache>
void measure(const char* name, const LayerBasis& maps, const typename Cache::PolicySet& policies,
             Rope keys = Rope::post) {
  if (std::string(name).rfind(only, 0) != 0) return;
  for (const std::int64_t tokens : {32768, 8192}) {
    CacheConfig config;
    config.shape = {kQueryHeads, kHeads, kDim};
    config.max_sequences = 16;
    config.max_tokens = tokens + 2048;
    config.page_bytes = 65536;
    config.rope.keys = keys;
    CacheConfig one = config, short_one = config;
    one.max_sequences = short_one.max_sequences = 1;
    short_one.max_tokens = 2048;
    config.num_pages =
        16 * Cache::num_pages(short_one, maps, policies) + Cache::num_pages(one, maps, policies);
    Cache cache(config, maps, policies);
    constexpr bool has_scores = requires(const ScoreView& accumulated) {
      cache.accumulate(0, accumulated);
    };
    const std::int64_t query_tokens = has_scores ? tokens : 32;
    const std::vector<__half> rows = bench::random_halves(
                                  static_cast<std::size_t>(tokens * kHeads * kDim)),
                              queries = bench::random_halves(
                                  static_cast<std::size_t>(query_tokens * kQueryHeads * kDim));
    const gpu::DeviceArray<__half> key_rows(rows), value_rows(rows), query_rows(queries);
    const KeyView key(key_rows.data(), DType::f16, tokens, kHeads, kDim, kHeads * kDim, kDim);
    const ValueView value(value_rows.data(), DType::f16, tokens, kHeads, kDim, kHeads * kDim, kDim);
    const QueryView query(query_rows.data(), DType::f16, query_tokens, kQueryHeads, kDim,
                          kQueryHeads * kDim, kDim);
    const auto renew = [](Cache& which) {
      if (which.contains(0)) which.erase(0);
      which.create(0);
    };
    const float prompt = bench::milliseconds(
        nullptr, 15, [&] { renew(cache); }, [&] { cache.ingest(0, key, value, query); });
    [[maybe_unused]] float with_scores = 0.0F, without = 0.0F;
    if constexpr (has_scores) {
      const gpu::DeviceArray<float> out(static_cast<std::size_t>(kQueryHeads * kDim)),
          accumulated(static_cast<std::size_t>(kHeads * tokens));
      const OutputView target{out.data(), 1, kQueryHeads, kDim};
      with_scores = bench::milliseconds(
          nullptr, 15, [] {},
          [&] {
            cache.attend(0, query.tokens(0, 1), target, {},
                         ScoreView{accumulated.data(), 1, kHeads, tokens});
          });
      without = bench::milliseconds(
          nullptr, 15, [] {}, [&] { cache.attend(0, query.tokens(0, 1), target); });
    }
    float maintenance = 0.0F;
    if (tokens == 8192) {
      std::vector<SequenceId> seqs;
      for (int i = 1; i <= 15; ++i) seqs.push_back(i);
      for (const SequenceId seq : seqs) {
        cache.create(seq);
        cache.ingest(seq, key.tokens(0, 512), value.tokens(0, 512),
                     query.tokens(0, has_scores ? 512 : 32));
      }
      const int interval = cache.config().flush_interval, room = cache.config().tail_capacity;
      maintenance = bench::milliseconds(
          nullptr, 15,
          [&] {
            while (cache.tail_length(1) < room)
              cache.append(seqs, key.tokens(0, 15), value.tokens(0, 15));
          },
          [&] { cache.maintain(seqs); });
      maintenance /= static_cast<float>(interval);
    }
    float chunks = 0.0F, calls = 0.0F;
    if (tokens == 32768 && !has_scores) {
      config.prefill_chunk = 4096;
      Cache chunked(config, maps, policies);
      const QueryView all(query_rows.data(), DType::f16, tokens, kQueryHeads, kDim, 0,
                          kDim);  // one query, over and over
      const auto begin = [&] { renew(chunked); };
      chunks = bench::milliseconds(nullptr, 15, begin, [&] { chunked.ingest(0, key, value, all); });
      calls = bench::milliseconds(nullptr, 15, begin, [&] {
        for (std::int64_t first = 0; first < tokens; first += 512)
          chunked.ingest(0, key.tokens(first, 512), value.tokens(first, 512),
                         all.tokens(first, 512),
                         first + 512 < tokens ? Prompt::continues : Prompt::complete);
      });
    }
    std::printf("%-22s prompt of %5lld: %.3f ms", name, static_cast<long long>(tokens),
                static_cast<double>(prompt));
    if (tokens == 8192)
      std::printf("; maintain(), 15 sequences: %.4f ms a token", static_cast<double>(maintenance));
    if (chunks > 0.0F)
      std::printf("; in chunks of 4096 %.3f, which come in calls of 512 %.3f",
                  static_cast<double>(chunks), static_cast<double>(calls));
    if (has_scores)
      std::printf("; a step of one sequence %.4f ms, with accumulated scores %.4f",
                  static_cast<double>(without), static_cast<double>(with_scores));
    std::printf("\n");
    std::fflush(stdout);
  }
}

/// The same maps, of metrics that are ones: what a metric costs does not depend on its numbers.
LayerBasis in_metric(LayerBasis basis) {
  for (HeadBasis& head : basis.heads) {
    head.query_down = head.key_down;
    head.output_up = std::vector<float>(head.value_down.size());
    for (std::size_t i = 0; i < head.value_down.size(); ++i)
      head.output_up[i % static_cast<std::size_t>(head.value_rank) * kDim +
                     i / static_cast<std::size_t>(head.value_rank)] = head.value_down[i];
    for (std::vector<float>* matrix : {&head.key_metric, &head.key_metric_inverse,
                                       &head.value_metric, &head.value_metric_inverse}) {
      matrix->assign(kDim * kDim, 0.0F);
      for (int i = 0; i < kDim; ++i) (*matrix)[static_cast<std::size_t>(i * kDim + i)] = 1.0F;
    }
  }
  return basis;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) only = arguments[1];
  const std::vector<std::uint8_t> two(kDim, 2);
  measure<FullKV<Cuda>>("FullKV", {}, {});
  measure<StaticPCAHybrid<Cuda>>("StaticPCAHybrid, 32", bench::basis(kHeads, 32, 32),
                                 {{}, {}, {4, 32}, {}});
  measure<StaticPCAHybrid<Cuda>>("StaticPCAHybrid, 80", bench::basis(kHeads, 80, 80),
                                 {{}, {}, {4, 32}, {}});
  measure<OjaKV<Cuda>>("OjaKV, rank 32", bench::basis(kHeads, 32, 32), {{}, {}, {4, 32}, {}});
  measure<OjaKV<Cuda>>("OjaKV, rank 80", bench::basis(kHeads, 80, 80), {{}, {}, {4, 32}, {}});
  measure<OjaKV<Cuda>>("OjaKV, rank 32, unrotated", bench::basis(kHeads, 32, 32),
                       {{}, {}, {4, 32}, {}}, Rope::pre);
  measure<OjaKV<Cuda>>("OjaKV, rank 32, metric", in_metric(bench::basis(kHeads, 32, 32)),
                       {{KeyMetric::query_aware, ValueMetric::output_aware}, {}, {4, 32}, {}});
  measure<SubSpaceA<Cuda>>("SubSpaceA, rank 32, metric", in_metric(bench::basis(kHeads, 32, 32)),
                           {{KeyMetric::query_aware, ValueMetric::output_aware}, {}, {4, 32}, {}});
  measure<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, Int8>>(
      "OjaKV in 8 bits, 32", bench::basis(kHeads, 32, 32), {{}, {}, {4, 32}, {}});
  // Bases aligned to the axes of the prompt's rows (cuda/update/align_axes.cuh): ranks of 80 in 4
  // bits, of 128 in 2.
  const std::vector<std::uint8_t> four(80, 4);
  measure<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, TransformCode>>(
      "Oja in 4 bits, 80", bench::basis(kHeads, 80, 80, four, four), {{}, {}, {4, 32}, {}});
  measure<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, TransformCode>>(
      "Oja in 2 bits, 128", bench::basis(kHeads, kDim, kDim, two, two), {{}, {}, {4, 32}, {}});
  measure<SubSpaceA<Cuda>>("SubSpaceA, rank 32", bench::basis(kHeads, 32, 32),
                           {{}, {}, {4, 32}, {}});
  measure<SubSpaceA<Cuda>>("SubSpaceA, rank 64", bench::basis(kHeads, 64, 64),
                           {{}, {}, {4, 32}, {}});
  using Scored = CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, SnapKV>, NoQuantizer>;
  Scored::PolicySet scored;
  scored.token_policy.get<SinkRecent>() = {4, 32};
  measure<Scored>("SnapKV, rank 80", bench::basis(kHeads, 80, 80), scored);
  measure<Scored>("SnapKV, rank 80, unrotated", bench::basis(kHeads, 80, 80), scored, Rope::pre);
  H2O<Cuda>::PolicySet heavy;
  heavy.token_policy.get<KeepFull>().recent = 0;
  measure<H2O<Cuda>>("H2O, 25 %", {}, heavy);
  measure<H2O<Cuda>>("H2O unrotated, 25 %", {}, heavy, Rope::pre);
  CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>,
                    TransformCode>::PolicySet heavy_codes;
  heavy_codes.token_policy.get<SinkRecent>() = {4, 32};
  measure<
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>, TransformCode>>(
      "H2O in 2 bits, 25 %", bench::basis(kHeads, kDim, kDim, two, two), heavy_codes);
  measure<
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>, TransformCode>>(
      "H2O in 2 bits unrotated, 25 %", bench::basis(kHeads, kDim, kDim, two, two), heavy_codes,
      Rope::pre);
  using HeavyOutliers =
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, ResidualOutliers, HeavyHitters>,
                        TransformCode>;
  HeavyOutliers::PolicySet heavy_outliers;
  heavy_outliers.token_policy.get<SinkRecent>() = {4, 32};
  measure<HeavyOutliers>("H2O in 2 bits and outliers, 25 %",
                         bench::basis(kHeads, kDim, kDim, two, two), heavy_outliers);
  using MovingHeavy =
      CompressedKVCache<Cuda, PerHead, Oja, Compose<SinkRecent, HeavyHitters>, NoQuantizer>;
  MovingHeavy::PolicySet moving_heavy;
  moving_heavy.token_policy.get<SinkRecent>() = {4, 32};
  moving_heavy.updater.prefill_share = 1.0F;
  measure<MovingHeavy>("H2O under Oja's bases, rank 80, 25 %", bench::basis(kHeads, 80, 80),
                       moving_heavy);
  using ScoredChunks =
      CompressedKVCache<Cuda, PerHead, FrequentDirections, Compose<SinkRecent, SnapKV>, Int8>;
  ScoredChunks::PolicySet scored_chunks;
  scored_chunks.token_policy.get<SinkRecent>() = {4, 32};
  measure<ScoredChunks>("SubSpaceA and SnapKV, rank 32", bench::basis(kHeads, 32, 32),
                        scored_chunks);
  OjaKVv2<Cuda>::PolicySet outliers;
  outliers.token_policy.get<SinkRecent>() = {4, 32};
  measure<OjaKVv2<Cuda>>("OjaKVv2, rank 80", bench::basis(kHeads, 80, 80), outliers);
  const LayerBasis joint = bench::joint_basis(kHeads, 32, 32 * kHeads);
  measure<StarKV<Cuda>>("STAR-KV", joint, {{}, {}, {4, 32}, {}});
  CompressedKVCache<Cuda, JointValues, Static, Compose<SinkRecent, ResidualOutliers>,
                    BlockHadamard>::PolicySet joint_outliers;
  joint_outliers.token_policy.get<SinkRecent>() = {4, 32};
  measure<CompressedKVCache<Cuda, JointValues, Static, Compose<SinkRecent, ResidualOutliers>,
                            BlockHadamard>>("STAR-KV and outliers", joint, joint_outliers);
  measure<CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>>(
      "2 bits", bench::basis(kHeads, kDim, kDim, two, two), {{}, {}, {4, 32}, {}});
  Budgeted<Cuda>::PolicySet budgeted;
  budgeted.token_policy.get<SinkRecent>() = {4, 32};
  measure<Budgeted<Cuda>>("2 bits and outliers", bench::basis(kHeads, kDim, kDim, two, two),
                          budgeted);
  budgeted.token_policy.get<ResidualOutliers>().threshold = 0.3F;
  measure<Budgeted<Cuda>>("2 bits and outliers over a threshold",
                          bench::basis(kHeads, kDim, kDim, two, two), budgeted);
}
