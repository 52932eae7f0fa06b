// SPDX-License-Identifier: Apache-2.0
// Steps of append and attend in a CUDA graph.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace decode_step_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::Codes;
using support::effort;
using support::host;
using support::Method;
using support::Random;
using support::Settings;

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
    CHECK(merges > 1);
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

}  // namespace decode_step_tests
