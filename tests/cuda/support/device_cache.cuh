// SPDX-License-Identifier: Apache-2.0
// A cache on the device as the tests use it: rows of host memory in and out.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/support/device_tools.cuh"
#include "lowrankkv/cuda/presets.cuh"

namespace support {

using lowrankkv::SequenceId;

/// What attention gave.
struct Answer {
  std::vector<float> out, lse;
  friend bool operator==(const Answer&, const Answer&) = default;
};

/// @tparam Cache  a reference: of a layer that somebody else owns
template <class Cache>
class DeviceCache {
 public:
  using PolicySet = typename std::remove_reference_t<Cache>::PolicySet;
  DeviceCache(const lowrankkv::CacheConfig& config, const lowrankkv::LayerBasis& basis,
              const PolicySet& policies, std::shared_ptr<gpu::PagePool> pool = nullptr)
      : cache(config, basis, policies, std::move(pool)), shape(config.shape) {}
  explicit DeviceCache(std::remove_reference_t<Cache>& layer)
      : cache(layer), shape(layer.config().shape) {}

  Answer prefill(SequenceId seq, const std::vector<float>& query, const std::vector<float>& key,
                 const std::vector<float>& value,
                 lowrankkv::Prompt prompt = lowrankkv::Prompt::complete) {
    const gpu::DeviceArray<float> q(query), k(key), v(value);
    const std::int64_t n = tokens_of(key);
    const auto out = poisoned(query.size()),
               lse = poisoned(static_cast<std::size_t>(n * shape.num_qo_heads));
    cache.prefill(seq, queries(q, n), keys(k, n), values(v, n),
                  {out.data(), n, shape.num_qo_heads, shape.head_dim},
                  {lse.data(), n, shape.num_qo_heads}, prompt);
    return {host(out), host(lse)};
  }
  /// @param window  queries of the last tokens; may be empty
  void ingest(SequenceId seq, const std::vector<float>& key, const std::vector<float>& value,
              const std::vector<float>& window = {},
              lowrankkv::Prompt prompt = lowrankkv::Prompt::complete) {
    const gpu::DeviceArray<float> q(window), k(key), v(value);
    cache.ingest(seq, keys(k, tokens_of(key)), values(v, tokens_of(key)),
                 window.empty() ? lowrankkv::QueryView{} : queries(q, query_tokens(window)),
                 prompt);
    gpu::check(cudaDeviceSynchronize(), "ingest");
  }
  void append(std::span<const SequenceId> seqs, const std::vector<float>& key,
              const std::vector<float>& value) {
    const gpu::DeviceArray<float> k(key), v(value);
    cache.append(seqs, keys(k, tokens_of(key)), values(v, tokens_of(key)));
    gpu::check(cudaDeviceSynchronize(), "append");
  }
  Answer attend(std::span<const SequenceId> seqs, const std::vector<float>& query) {
    const std::int64_t m = query_tokens(query);
    const gpu::DeviceArray<float> q(query);
    const auto out = poisoned(query.size()),
               lse = poisoned(static_cast<std::size_t>(m * shape.num_qo_heads));
    cache.attend(seqs, queries(q, m), {out.data(), m, shape.num_qo_heads, shape.head_dim},
                 {lse.data(), m, shape.num_qo_heads});
    return {host(out), host(lse)};
  }
  void reconstruct(SequenceId seq, std::vector<float>& key, std::vector<float>& value) const {
    const std::int64_t tokens = cache.num_tokens(seq);
    const auto k = poisoned(static_cast<std::size_t>(tokens * shape.num_kv_heads * shape.head_dim)),
               v = poisoned(k.size());
    cache.reconstruct(seq, 0, {k.data(), tokens, shape.num_kv_heads, shape.head_dim},
                      {v.data(), tokens, shape.num_kv_heads, shape.head_dim});
    key = host(k);
    value = host(v);
  }
  std::vector<std::byte> save(SequenceId seq) const {
    std::vector<std::byte> bytes(cache.save_bytes(seq));
    CHECK(cache.save(seq, bytes) == bytes.size());
    return bytes;
  }
  std::int64_t tokens_of(const std::vector<float>& rows) const {
    return static_cast<std::int64_t>(rows.size()) / (shape.num_kv_heads * shape.head_dim);
  }
  std::int64_t query_tokens(const std::vector<float>& query) const {
    return static_cast<std::int64_t>(query.size()) / (shape.num_qo_heads * shape.head_dim);
  }
  lowrankkv::QueryView queries(const gpu::DeviceArray<float>& rows, std::int64_t n) const {
    return {rows.data(), n, shape.num_qo_heads, shape.head_dim};
  }
  lowrankkv::KeyView keys(const gpu::DeviceArray<float>& rows, std::int64_t n) const {
    return {rows.data(), n, shape.num_kv_heads, shape.head_dim};
  }
  lowrankkv::ValueView values(const gpu::DeviceArray<float>& rows, std::int64_t n) const {
    return {rows.data(), n, shape.num_kv_heads, shape.head_dim};
  }

  Cache cache;
  lowrankkv::CacheShape shape;
};

/// A captured step of a stream of its own, for replays.
class CapturedStep {
 public:
  template <class Calls>
  explicit CapturedStep(Calls&& calls) {
    gpu::check(cudaDeviceSynchronize(), "prompt");
    gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cudaGraph_t graph;
    gpu::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    calls(stream);
    gpu::check(cudaStreamEndCapture(stream, &graph), "capture");
    gpu::check(cudaGraphInstantiate(&replay_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;
  ~CapturedStep() {
    cudaGraphExecDestroy(replay_);
    cudaStreamDestroy(stream);
  }
  /// A token more for each sequence: the host's counts, the step, what maintenance is due.
  template <class Cache>
  void replay(Cache& cache, std::span<const SequenceId> seqs) const {
    cache.advance(seqs, 1);
    gpu::check(cudaGraphLaunch(replay_, stream), "cudaGraphLaunch");
    cache.maintain(seqs, stream);
    gpu::check(cudaStreamSynchronize(stream), "step");
  }

  cudaGraphExec_t replay() const { return replay_; }

  cudaStream_t stream = nullptr;

 private:
  cudaGraphExec_t replay_ = nullptr;
};

/// Rows of host memory to where a captured step reads them.
inline void upload(const std::vector<float>& rows, gpu::DeviceArray<float>& target) {
  REQUIRE(rows.size() == target.size());
  gpu::check(cudaMemcpy(target.data(), rows.data(), target.bytes(), cudaMemcpyHostToDevice),
             "cudaMemcpy");
}

/// The i-th of `parts` equal parts.
inline std::vector<float> part_of(const std::vector<float>& all, std::size_t i, std::size_t parts) {
  const std::size_t size = all.size() / parts;
  return {all.begin() + static_cast<std::ptrdiff_t>(i * size),
          all.begin() + static_cast<std::ptrdiff_t>((i + 1) * size)};
}

}  // namespace support
