// SPDX-License-Identifier: Apache-2.0
// Long lives on CompressedKVCache<Cuda, ...>: one sequence grows to 400 000 tokens. For every
// eighth of it, what a flush of 32 rows takes, on average and at most, beside one decode step,
// which reads everything that is stored. Bases move: channels take turns at being large, 8192
// tokens each. One layer of 32 query and 8 KV heads of 128 channels, rank 32. Arguments: the
// beginning of a method's name; without, all. Build: nvcc -O3 -std=c++20 -I include
// -gencode=arch=compute_90,code=sm_90 bench/cuda/soak.cu
//
// A flush re-projects at most merge_rows rows of a merge: the default, and all of them at once. The
// device manages the epochs of SubSpaceA. The floor of a merge at once is to read and write the
// rows that are stored, once, at the rate that copying reaches (measure.cuh).
#include <algorithm>
#include <cstdio>
#include <string>

#include "measure.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using bench::kDim;

namespace {

constexpr int kHeads = 8, kQueryHeads = 32, kRank = 32, kRows = 32, kParts = 8;
constexpr std::int64_t kTokens = 400000, kPrompt = 2048;
std::string only;  // the beginning of the names of the methods that are measured

/// Rows of which every channel in turn has the largest standard deviation.
__global__ void turn(const __half* normal, int turns, std::int64_t size, __half* out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= size) return;
  const int place = (static_cast<int>(i % kDim) + turns) % kDim;
  out[i] = __float2half(__half2float(normal[i]) * exp2f(-0.1F * static_cast<float>(place)));
}

class Events {
 public:
  Events() {
    gpu::check(cudaEventCreate(&begin_), "event");
    gpu::check(cudaEventCreate(&end_), "event");
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  ~Events() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  /// Milliseconds of what the call enqueues.
  template <class Call>
  double time(cudaStream_t stream, const Call& call) {
    gpu::check(cudaEventRecord(begin_, stream), "event");
    call();
    gpu::check(cudaEventRecord(end_, stream), "event");
    gpu::check(cudaEventSynchronize(end_), "call");
    float ms = 0.0F;
    gpu::check(cudaEventElapsedTime(&ms, begin_, end_), "event");
    return static_cast<double>(ms);
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

template <class Cache>
void live(const char* name, std::int64_t merge_rows, const typename Cache::PolicySet& policies) {
  if (std::string(name).rfind(only, 0) != 0) return;
  const LayerBasis maps = [] {
    LayerBasis basis = bench::basis(kHeads, kRank, kRank);
    for (HeadBasis& head : basis.heads) head.key_threshold = head.value_threshold = 1.0F;
    return basis;
  }();
  CacheConfig config;
  config.shape = {kQueryHeads, kHeads, kDim};
  config.max_sequences = 1;
  config.max_tokens = kTokens + kRows;
  config.page_bytes = 65536;
  config.merge_rows = merge_rows;
  Cache cache(config, maps, policies);
  const std::size_t size = static_cast<std::size_t>(kPrompt * kHeads * kDim);
  const gpu::DeviceArray<__half> normal(bench::random_halves(size)), keys(size), values(size);
  const gpu::DeviceArray<float> out(static_cast<std::size_t>(kQueryHeads * kDim));
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  gpu::check(cudaDeviceSynchronize(), "inputs");
  // Rows of the tokens from `first` on, n of them, in keys and values.
  const auto prepare = [&](std::int64_t first, std::int64_t n) {
    const std::int64_t count = n * kHeads * kDim;
    const std::int64_t from = first * 7 % (kPrompt - n + 1) * kHeads * kDim;
    const auto blocks = static_cast<unsigned>((count + 255) / 256);
    const int turns = static_cast<int>(first / 8192 % kDim);
    turn<<<blocks, 256, 0, stream>>>(normal.data() + from, turns, count, keys.data());
    turn<<<blocks, 256, 0, stream>>>(normal.data() + from, turns + 3, count, values.data());
    gpu::check(cudaGetLastError(), "turn");
  };
  const auto key = [&](std::int64_t n) {
    return KeyView(keys.data(), DType::f16, n, kHeads, kDim, kHeads * kDim, kDim);
  };
  const auto value = [&](std::int64_t n) {
    return ValueView(values.data(), DType::f16, n, kHeads, kDim, kHeads * kDim, kDim);
  };
  const QueryView query(normal.data(), DType::f16, 1, kQueryHeads, kDim, kQueryHeads * kDim, kDim);
  const QueryView prompt_queries(normal.data(), DType::f16, 32, kQueryHeads, kDim,
                                 kQueryHeads * kDim, kDim);
  const OutputView output(out.data(), 1, kQueryHeads, kDim);
  const SequenceId seqs[] = {0};
  cache.create(0, stream);
  prepare(0, kPrompt);
  cache.ingest(0, key(kPrompt), value(kPrompt), prompt_queries, stream);
  std::printf("%s\n%10s %14s %12s %14s %12s\n", name, "tokens", "flush, mean ms", "at most",
              "step ms", "stored MB");
  Events events;
  double sum = 0.0, most = 0.0;
  int flushes = 0, part = 1;
  for (std::int64_t now = kPrompt; now + kRows <= kTokens; now += kRows) {
    prepare(now, kRows);
    for (int i = 0; i < kRows; ++i) {
      const KeyView k = key(kRows).tokens(i, 1);
      cache.append(seqs, k, value(kRows).tokens(i, 1), stream);
    }
    const double took = events.time(stream, [&] { cache.maintain(seqs, stream); });
    sum += took;
    most = std::max(most, took);
    ++flushes;
    if (now + kRows < part * kTokens / kParts) continue;
    ++part;
    const double step = events.time(stream, [&] { cache.attend(seqs, query, output, {}, stream); });
    const MemoryUsage usage = cache.memory(0);
    std::printf("%10lld %14.4f %12.4f %14.4f %12.1f\n", static_cast<long long>(now + kRows),
                sum / flushes, most, step,
                static_cast<double>(usage.total() - usage.slack_bytes) / 1e6);
    std::fflush(stdout);
    sum = most = 0.0;
    flushes = 0;
  }
  cudaStreamDestroy(stream);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) only = arguments[1];
  live<OjaKV<Cuda>>("OjaKV", 0, {{}, {}, {4, 32}, {}});
  live<OjaKV<Cuda>>("OjaKV, merges at once", kTokens, {{}, {}, {4, 32}, {}});
  live<SubSpaceA<Cuda>>("SubSpaceA", 0, {});
  live<SubSpaceA<Cuda>>("SubSpaceA, merges at once", kTokens, {});
}
