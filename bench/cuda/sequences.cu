// SPDX-License-Identifier: Apache-2.0
// What an engine does with sequences besides attending, on CompressedKVCache<Cuda, ...>:
// reconstruct() of a whole sequence into f16 tensors, fork(), save() and load() through pinned host
// memory, remove() of 512 tokens behind the first 1024, truncate() to 20000, append() of a token to
// 16 sequences, ingest() of rows side by side and in pages of 16 tokens in random order. One layer
// of Llama-3.1-8B's shape, 32768 tokens in a sequence. Medians of 15. Arguments: the beginning of a
// method's name; without, all. Build: nvcc -O3 -std=c++20 -I include
// -gencode=arch=compute_90,code=sm_90 bench/cuda/sequences.cu
//
// Floor of reconstruct(): the stored bytes read and the rows written once at the rate that copying
// reaches (measure.cuh); of save() and load(): the bytes at the bus's rate; of remove(): the stored
// rows behind read and written once.
#include <cstdio>
#include <string>

#include "measure.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using bench::kDim;

namespace {

constexpr int kHeads = 8, kQueryHeads = 32, kSequences = 16;
constexpr std::int64_t kTokens = 32768;
constexpr int kPageTokens = 16;  // of an engine's own pages
std::string only;                // the beginning of the names of the methods that are measured

template <class Cache>
void measure(const char* name, const LayerBasis& maps, const typename Cache::PolicySet& policies) {
  if (std::string(name).rfind(only, 0) != 0) return;
  CacheConfig config;
  config.shape = {kQueryHeads, kHeads, kDim};
  config.max_sequences = kSequences + 3;
  config.max_tokens = kTokens + 2048;
  config.page_bytes = 65536;
  config.num_pages = 4 * Cache::num_pages({.shape = config.shape,
                                           .max_tokens = config.max_tokens,
                                           .page_bytes = config.page_bytes},
                                          maps, policies);
  Cache cache(config, maps, policies);
  const std::vector<__half> rows =
      bench::random_halves(static_cast<std::size_t>(kTokens * kHeads * kDim));
  const gpu::DeviceArray<__half> key_rows(rows), value_rows(rows), key_out(rows.size()),
      value_out(rows.size());
  const KeyView key(key_rows.data(), DType::f16, kTokens, kHeads, kDim, kHeads * kDim, kDim);
  const ValueView value(value_rows.data(), DType::f16, kTokens, kHeads, kDim, kHeads * kDim, kDim);
  constexpr bool has_scores = gpu::TokenRules<decltype(policies.token_policy)>::
      accumulates_scores;  // then every query counts: one, over and over
  const QueryView query(key_rows.data(), DType::f16, has_scores ? kTokens : 32, kQueryHeads, kDim,
                        has_scores ? 0 : kQueryHeads * kDim, kDim);
  cudaStream_t stream;
  gpu::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  gpu::check(cudaDeviceSynchronize(), "inputs");
  cache.create(0, stream);
  cache.ingest(0, key, value, query, stream);
  const MemoryUsage usage = cache.memory(0);
  const double stored = static_cast<double>(usage.total() - usage.slack_bytes),
               written = 4.0 * kDim * kHeads * static_cast<double>(kTokens);
  const auto nothing = [] {};
  const double decode = static_cast<double>(bench::milliseconds(stream, 15, nothing, [&] {
    cache.reconstruct(
        0, 0, KeyTargetView(key_out.data(), DType::f16, kTokens, kHeads, kDim, kHeads * kDim, kDim),
        ValueTargetView(value_out.data(), DType::f16, kTokens, kHeads, kDim, kHeads * kDim, kDim),
        stream);
  }));
  const auto without = [&](SequenceId seq) {
    if (cache.contains(seq)) cache.erase(seq, stream);
  };
  const float fork = bench::milliseconds(
      stream, 15, [&] { without(1); }, [&] { cache.fork(0, 1, stream); });
  std::byte* host = nullptr;
  const std::size_t size = cache.save_bytes(0);
  gpu::check(cudaMallocHost(&host, size), "cudaMallocHost");
  const float save = bench::milliseconds(stream, 5, nothing, [&] {
    cache.save(0, {host, size}, stream);
  });
  const float load = bench::milliseconds(
      stream, 5, [&] { without(2); },
      [&] {
        cache.load(2, {host, size}, stream);
      });
  // Where bases move, tokens cannot go from among rows that errors chose.
  char removal[24] = "refused", truncation[24] = "refused";
  try {
    const float time = bench::milliseconds(
        stream, 5,
        [&] {
          without(2);
          cache.load(2, {host, size}, stream);
        },
        [&] { cache.remove(2, 1024, 512, stream); });
    std::snprintf(removal, sizeof removal, "%.3f ms", static_cast<double>(time));
    const float cut = bench::milliseconds(
        stream, 15,
        [&] {
          without(1);
          cache.fork(0, 1, stream);
        },
        [&] { cache.truncate(1, 20000, stream); });
    std::snprintf(truncation, sizeof truncation, "%.3f ms", static_cast<double>(cut));
  } catch (const StateError&) {
  }
  without(2);
  cudaFreeHost(host);
  std::vector<std::int32_t> numbers(kTokens / kPageTokens);
  for (std::size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = static_cast<std::int32_t>(
        i * 1103 % numbers.size());  // all of them: 1103 is odd, their number a power of two
  const gpu::DeviceArray<std::int32_t> table(numbers);
  const EnginePages pages =
      EnginePages::nhd(key_rows.data(), value_rows.data(), DType::f16, kPageTokens, kHeads, kDim);
  const auto renew = [&] {
    without(2);
    cache.create(2, stream);
  };
  const float side_by_side =
      bench::milliseconds(stream, 15, renew, [&] { cache.ingest(2, key, value, query, stream); });
  const float in_pages = bench::milliseconds(stream, 15, renew, [&] {
    cache.ingest(2, pages.keys(table.data(), 0, kTokens), pages.values(table.data(), 0, kTokens),
                 query, stream);
  });
  without(2);
  std::vector<SequenceId> seqs;
  for (SequenceId seq = 3; seq < kSequences + 3; ++seq) {
    cache.create(seq, stream);
    seqs.push_back(seq);
  }
  const auto room = [&] {
    if (cache.tail_length(3) < cache.config().tail_capacity) return;
    for (const SequenceId seq : seqs) cache.truncate(seq, 0, stream);
  };
  const float append = bench::milliseconds(stream, 31, room, [&] {
    cache.append(seqs, key.tokens(0, kSequences), value.tokens(0, kSequences), stream);
  });
  std::printf(
      "%-20s reconstruct %.3f ms (%.2f TB/s of what is read and written, %3.0f %% of the floor's "
      "rate); fork %.3f ms; save %.1f ms and load %.1f ms of %.1f MB; remove %s, truncate %s; "
      "append to %d sequences %.4f ms; ingest %.3f ms, from pages %.3f\n",
      name, decode, (stored + written) / decode / 1e9,
      100.0 * (stored + written) / bench::copy_rate() / (decode / 1e3), static_cast<double>(fork),
      static_cast<double>(save), static_cast<double>(load), static_cast<double>(size) / 1e6,
      removal, truncation, kSequences, static_cast<double>(append),
      static_cast<double>(side_by_side), static_cast<double>(in_pages));
  std::fflush(stdout);
  cudaStreamDestroy(stream);
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) only = arguments[1];
  using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;
  const auto codes = [](const std::vector<int>& blocks) {
    const std::vector<std::uint8_t> bits = bench::bits_of(blocks);
    return bench::basis(kHeads, static_cast<int>(bits.size()), static_cast<int>(bits.size()), bits,
                        bits);
  };
  measure<FullKV<Cuda>>("FullKV", {}, {});
  measure<StaticPCAHybrid<Cuda>>("f16 rank 32", bench::basis(kHeads, 32, 32),
                                 {{}, {}, {4, 32}, {}});
  measure<StaticPCAHybrid<Cuda>>("f16 rank 80", bench::basis(kHeads, 80, 80),
                                 {{}, {}, {4, 32}, {}});
  measure<Codes>("2.5 bits", codes({4, 2, 2, 2}), {{}, {}, {4, 32}, {}});
  measure<Codes>("1.5 bits", codes({2, 2, 2}), {{}, {}, {4, 32}, {}});
  Budgeted<Cuda>::PolicySet exempting;
  exempting.token_policy.get<SinkRecent>() = {4, 32};
  exempting.token_policy.get<ResidualOutliers>().share = 0.02F;
  measure<Budgeted<Cuda>>("2 bits, outliers", codes({2, 2, 2, 2}), exempting);
  H2O<Cuda>::PolicySet heavy;
  heavy.token_policy.get<KeepFull>().recent = 0;
  measure<H2O<Cuda>>("H2O, 25 %", {}, heavy);
  CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>,
                    TransformCode>::PolicySet heavy_codes;
  heavy_codes.token_policy.get<SinkRecent>() = {4, 32};
  measure<
      CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, HeavyHitters>, TransformCode>>(
      "H2O in 2.5 bits, 25 %", codes({4, 2, 2, 2}), heavy_codes);
  measure<SubSpaceG<Cuda>>("SubSpaceG, rank 64", bench::basis(kHeads, 64, 64), {});
  OjaKVv2<Cuda>::PolicySet outliers;
  outliers.token_policy.get<SinkRecent>() = {4, 32};
  measure<OjaKVv2<Cuda>>("OjaKVv2, rank 80", bench::basis(kHeads, 80, 80), outliers);
  const LayerBasis joint = bench::joint_basis(kHeads, 32, 32 * kHeads);
  measure<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>>(
      "joint, rank 32", joint, {{}, {}, {4, 32}, {}});
  measure<StarKV<Cuda>>("STAR-KV", joint, {{}, {}, {4, 32}, {}});
}
