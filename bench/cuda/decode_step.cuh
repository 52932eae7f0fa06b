// SPDX-License-Identifier: Apache-2.0
// Times of one decode step of one layer through CompressedKVCache<Cuda, ...>, and what it stores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "measure.cuh"

namespace bench {

struct Shape {
  int batch, query_heads, kv_heads;
  std::int64_t tokens;
};

/// Milliseconds, medians of 51; bytes of all sequences.
struct StepTimes {
  double replayed = 0.0, called = 0.0;  ///< in a CUDA graph; as calls
  double prompt = 0.0;                  ///< of storing one sequence's
  double bytes = 0.0, slack = 0.0;      ///< stored; parts of pages besides, that are not used
  double plain_bytes = 0.0;             ///< of K and V in f16

  /// What reading the stored bytes takes, in ms.
  double floor() const { return bytes / read_rate() * 1e3; }
};

/// Every sequence has a prompt of shape.tokens random rows; one query token each.
template <class Cache>
StepTimes time_step(const Shape& shape, const lowrankkv::LayerBasis& maps,
                    const typename Cache::PolicySet& policies,
                    lowrankkv::Rope keys = lowrankkv::Rope::post, int full_row_bits = 0) {
  namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
  lowrankkv::CacheConfig config;
  config.shape = {shape.query_heads, shape.kv_heads, kDim};
  config.max_sequences = shape.batch;
  config.max_tokens = shape.tokens + 64;
  config.page_bytes = 65536;
  config.rope.keys = keys;
  config.full_row_bits = full_row_bits;
  Cache cache(config, maps, policies);
  const std::size_t piece = static_cast<std::size_t>((std::min)(shape.tokens, std::int64_t{32768})),
                    row = static_cast<std::size_t>(shape.kv_heads * kDim);
  const gpu::DeviceArray<__half> device(random_halves(piece * row));
  const lowrankkv::KeyView key(device.data(), lowrankkv::DType::f16,
                               static_cast<std::int64_t>(piece), shape.kv_heads, kDim,
                               shape.kv_heads * kDim, kDim);
  const lowrankkv::ValueView value(device.data(), lowrankkv::DType::f16,
                                   static_cast<std::int64_t>(piece), shape.kv_heads, kDim,
                                   shape.kv_heads * kDim, kDim);
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  gpu::check(cudaDeviceSynchronize(), "inputs");
  std::vector<lowrankkv::SequenceId> seqs;
  for (int i = 0; i < shape.batch; ++i) {
    seqs.push_back(i);
    cache.create(i, stream);
  }
  const auto nothing = [] {};
  StepTimes step;
  step.prompt =
      static_cast<double>(milliseconds(stream, 1, nothing,
                                       [&] {
                                         for (const lowrankkv::SequenceId seq : seqs) {
                                           for (std::int64_t done = 0; done < shape.tokens;
                                                done += static_cast<std::int64_t>(piece))
                                             cache.ingest(seq, key, value, stream);
                                         }
                                       })) /
      shape.batch;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<std::size_t>(shape.batch * shape.query_heads * kDim));
  for (float& x : q) x = 0.3F * normal(random);
  const gpu::DeviceArray<float> query(q);
  gpu::DeviceArray<float> out(q.size());
  const auto call = [&] {
    cache.attend(seqs, {query.data(), shape.batch, shape.query_heads, kDim},
                 {out.data(), shape.batch, shape.query_heads, kDim}, {}, stream);
  };
  call();
  gpu::check(cudaStreamSynchronize(stream), "attend");
  step.called = static_cast<double>(milliseconds(stream, 51, nothing, call));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  call();
  gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
  gpu::check(cudaGraphInstantiate(&replay, graph, 0), "graph");
  step.replayed = static_cast<double>(milliseconds(
      stream, 51, nothing, [&] { gpu::check(cudaGraphLaunch(replay, stream), "graph"); }));
  const lowrankkv::MemoryUsage usage = cache.memory();
  step.slack = static_cast<double>(usage.slack_bytes);
  step.bytes = static_cast<double>(usage.total()) - step.slack;
  step.plain_bytes = 4.0 * kDim * shape.kv_heads * static_cast<double>(shape.tokens) * shape.batch;
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  return step;
}

}  // namespace bench
