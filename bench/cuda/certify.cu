// SPDX-License-Identifier: Apache-2.0
// What certificates cost on CompressedKVCache<Cuda, ...>: certify() of one query token after
// attend(), and what CacheConfig::keep_residuals adds to ingest() of a prompt and to the flush of a
// tail. One layer of Llama-3.1-8B's shape. Medians of 15; both caches of a pair in one run. "Oja,
// all rows move": RotateNow, an epoch every flush, so that every flush moves all stored rows to it.
// Build: nvcc -O3 -std=c++20 -I include -gencode=arch=compute_90,code=sm_90 bench/cuda/certify.cu
//
// Floor of certify(): the stored keys and the norms read once at the rate that reading reaches.
// Keys go through memory as f32 here (written and read, 8 bytes a channel), so what it can reach is
// the floor given beside it.
#include <cstdio>

#include "measure.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using bench::kDim;

namespace {

constexpr int kHeads = 8, kQueryHeads = 32;

template <class Cache>
void measure(const char* name, const LayerBasis& maps, const typename Cache::PolicySet& policies,
             std::int64_t tokens) {
  const std::vector<__half> rows =
      bench::random_halves(static_cast<std::size_t>(tokens * kHeads * kDim));
  const gpu::DeviceArray<__half> key_rows(rows), value_rows(rows);
  const KeyView key(key_rows.data(), DType::f16, tokens, kHeads, kDim, kHeads * kDim, kDim);
  const ValueView value(value_rows.data(), DType::f16, tokens, kHeads, kDim, kHeads * kDim, kDim);
  const QueryView query(key_rows.data(), DType::f16, 1, kQueryHeads, kDim, kQueryHeads * kDim,
                        kDim),
      window(key_rows.data(), DType::f16, 32, kQueryHeads, kDim, kQueryHeads * kDim, kDim);
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  gpu::check(cudaDeviceSynchronize(), "inputs");
  float ingest[2], flush[2], attend = 0.0F, certify = 0.0F;
  std::size_t bytes[2];
  for (const bool keeps : {false, true}) {
    CacheConfig config;
    config.shape = {kQueryHeads, kHeads, kDim};
    config.max_sequences = 1;
    config.max_tokens = tokens + 4096;
    config.keep_residuals = keeps;
    config.publish_interval = 1;
    Cache cache(config, maps, policies);
    const auto renew = [&] {
      if (cache.contains(0)) cache.erase(0, stream);
      cache.create(0, stream);
    };
    ingest[keeps] = bench::milliseconds(stream, 15, renew,
                                        [&] { cache.ingest(0, key, value, window, stream); });
    const int interval = cache.config().flush_interval;
    flush[keeps] = bench::milliseconds(
        stream, 15,
        [&] { cache.append(0, key.tokens(0, interval), value.tokens(0, interval), stream); },
        [&] { cache.maintain(0, stream); });
    bytes[keeps] = cache.memory(0).total();
    if (!keeps) continue;
    cache.append(0, key.tokens(0, 1), value.tokens(0, 1), stream);
    const gpu::DeviceArray<float> out(kQueryHeads * kDim), lse(kQueryHeads), found(3 * kQueryHeads);
    const LseView sums{lse.data(), 1, kQueryHeads};
    attend = bench::milliseconds(
        stream, 15, [] {},
        [&] {
          cache.attend(0, query, {out.data(), 1, kQueryHeads, kDim}, sums, stream);
        });
    certify = bench::milliseconds(
        stream, 15, [] {},
        [&] {
          cache.certify(0, query, sums,
                        {reinterpret_cast<Certificate*>(found.data()), 1, kQueryHeads},
                        kUnboundedCertificate, nullptr, stream);
        });
  }
  const double numbers = static_cast<double>(tokens) * kHeads,
               floor =
                   (static_cast<double>(bytes[0]) / 2.0 + 4.0 * numbers) / bench::read_rate() * 1e3,
               through_memory = floor + 8.0 * kDim * numbers / bench::read_rate() * 1e3;
  std::printf(
      "%-20s n %6lld: certify %.3f ms (floor %.3f, %.3f with keys through memory), attend called "
      "%.3f; ingest %.3f to %.3f ms, a flush %.4f to %.4f; bytes %.1f to %.1f MB\n",
      name, static_cast<long long>(tokens), static_cast<double>(certify), floor, through_memory,
      static_cast<double>(attend), static_cast<double>(ingest[0]), static_cast<double>(ingest[1]),
      static_cast<double>(flush[0]), static_cast<double>(flush[1]),
      static_cast<double>(bytes[0]) / 1e6, static_cast<double>(bytes[1]) / 1e6);
  std::fflush(stdout);
  cudaStreamDestroy(stream);
}

}  // namespace

int main() {
  const auto codes = [](const std::vector<int>& blocks) {
    const std::vector<std::uint8_t> bits = bench::bits_of(blocks);
    return bench::basis(kHeads, static_cast<int>(bits.size()), static_cast<int>(bits.size()), bits,
                        bits);
  };
  Budgeted<Cuda>::PolicySet exempting;
  exempting.token_policy.get<SinkRecent>() = {4, 32};
  exempting.token_policy.get<ResidualOutliers>().share = 0.02F;
  for (const std::int64_t tokens : {std::int64_t{32768}, std::int64_t{131072}}) {
    measure<StaticPCAHybrid<Cuda>>("f16 rank 32", bench::basis(kHeads, 32, 32),
                                   {{}, {}, {4, 32}, {}}, tokens);
    measure<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, RotateNow>>(
        "Oja, all rows move", bench::basis(kHeads, 32, 32), {{}, {}, {4, 32}, {}}, tokens);
    measure<Budgeted<Cuda>>("2.5 bits, outliers", codes({4, 2, 2, 2}), exempting, tokens);
    if (tokens == 32768)
      measure<SubSpaceA<Cuda>>("SubSpaceA, rank 32", bench::basis(kHeads, 32, 32),
                               {{}, {}, {4, 32}, {}}, tokens);  // sketches decide what moves
  }
}
