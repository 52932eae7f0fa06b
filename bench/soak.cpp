// SPDX-License-Identifier: Apache-2.0
// Long lives: one sequence of 10^6 tokens under every preset, a token at a time. For every tenth of
// it: what the sequence takes in memory and saved, what maintain() takes on average and at most,
// and how many rows one maintain() re-projects at most.
//
//   bench_soak [--tokens 1000000] [--preset NAME] [--csv FILE] [--rank 8]
//
// One layer of 4 query heads, 2 KV heads of 32 channels, one thread. A prompt of 2048 tokens comes
// first, for policies that choose among its rows. Channels take turns at being large, 8192 tokens
// each, so that bases move. Times are CPU time of the thread: other programs do not count. They are
// of those calls of maintain() that flush. Attention is computed once a part, because it reads what
// is stored, so that its time must grow with that.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "lowrankkv/presets.hpp"

namespace {

using namespace lowrankkv;

constexpr CacheShape kShape{4, 2, 32};
constexpr int kPrompt = 2048;
constexpr int kParts = 10;

struct Options {
  std::int64_t tokens = 1000000;
  std::string preset;
  std::string csv = "soak.csv";
  int rank = 8;
};

/// Seconds of CPU time of this thread.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The stream: normal rows, of which every channel in turn has the largest standard deviation.
class Stream {
 public:
  Stream() : normal_(std::size_t{kPool} * kWidth), row_(std::size_t{kPrompt} * kWidth) {
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    for (float& value : normal_) value = normal(random);
  }
  /// Rows [first, first + count) of the KV heads, valid until the next call; count <= kPrompt.
  const float* rows(std::int64_t first, int count, int salt) {
    for (int token = 0; token < count; ++token) {
      const std::int64_t now = first + token;
      const float* from = normal_.data() + (now * 7 + salt) % kPool * kWidth;
      float* to = row_.data() + std::ptrdiff_t{token} * kWidth;
      const int turn = static_cast<int>(now / 8192 % kShape.head_dim);
      for (int i = 0; i < kWidth; ++i) {
        const int place = (i + turn) % kShape.head_dim;
        to[i] = from[i] * std::exp2(-0.25F * static_cast<float>(place));
      }
    }
    return row_.data();
  }

 private:
  static constexpr int kPool = 65521, kWidth = kShape.num_kv_heads * kShape.head_dim;
  std::vector<float> normal_, row_;
};

/// Each KV head keeps its first `rank` channels. Joint values: `rank` channels of each head, one
/// latent.
LayerBasis first_channels(int rank, bool joint) {
  LayerBasis maps;
  const int dim = kShape.head_dim;
  for (int head = 0; head < kShape.num_kv_heads; ++head) {
    HeadBasis own;
    own.key_rank = rank;
    own.value_rank = joint ? rank * kShape.num_kv_heads : rank;
    own.key_down.assign(static_cast<std::size_t>(dim * rank), 0.0F);
    own.value_down.assign(static_cast<std::size_t>(dim * own.value_rank), 0.0F);
    for (int i = 0; i < rank; ++i) {
      own.key_down[static_cast<std::size_t>(i * rank + i)] = 1.0F;
      own.value_down[static_cast<std::size_t>(i * own.value_rank + (joint ? head * rank : 0) + i)] =
          1.0F;
    }
    own.key_threshold = own.value_threshold = 1.0F;
    maps.heads.push_back(std::move(own));
  }
  return maps;
}
/// The four maps of a projector.
LayerBasis projector(int rank) {
  LayerBasis maps = first_channels(rank, false);
  for (HeadBasis& head : maps.heads) {
    head.query_down = head.key_down;
    head.output_up.assign(head.value_down.size(), 0.0F);
    for (int i = 0; i < rank; ++i)
      head.output_up[static_cast<std::size_t>(i * kShape.head_dim + i)] = 1.0F;
  }
  return maps;
}
/// All channels, in 4 and 2 bits.
LayerBasis coded() {
  LayerBasis maps = first_channels(kShape.head_dim, false);
  for (HeadBasis& head : maps.heads) {
    head.key_bits.assign(static_cast<std::size_t>(kShape.head_dim), 2);
    std::fill_n(head.key_bits.begin(), 8, std::uint8_t{4});
    head.value_bits = head.key_bits;
    head.key_rms.assign(static_cast<std::size_t>(kShape.head_dim), 0.5F);
    head.value_rms = head.key_rms;
  }
  return maps;
}

/// What happened in a part of a life.
struct Part {
  std::int64_t flushes = 0, most_rows = 0;
  double sum = 0.0, worst = 0.0;
};

/// Attends once. @return its CPU time. If rows are kept by score, accumulates the scores.
template <class Cache, bool scores>
double attend(Cache& cache, Stream& stream, std::int64_t now) {
  const float* rows = stream.rows(now, 2, 11);
  std::vector<float> out(static_cast<std::size_t>(kShape.num_qo_heads * kShape.head_dim));
  const QueryView query(rows, 1, kShape.num_qo_heads, kShape.head_dim);
  const OutputView output(out.data(), 1, kShape.num_qo_heads, kShape.head_dim);
  const double begin = cpu_seconds();
  if constexpr (scores) {
    const std::int64_t positions = cache.num_tokens(0);
    std::vector<float> received(static_cast<std::size_t>(kShape.num_kv_heads * positions));
    const ScoreView view(received.data(), 1, kShape.num_kv_heads, positions);
    const SequenceId seq = 0;
    cache.attend(std::span(&seq, 1), query, output, {}, view);
    cache.accumulate(0, view);
  } else {
    cache.attend(0, query, output);
  }
  return cpu_seconds() - begin;
}

template <class Cache, bool scores = false>
void live(const char* name, const Options& options, std::FILE* csv, const LayerBasis& basis,
          const typename Cache::PolicySet& policies = {}) {
  if (!options.preset.empty() && options.preset != name) return;
  Cache cache({.shape = kShape, .max_tokens = options.tokens, .page_bytes = 4096}, basis, policies);
  Stream keys, values;
  cache.create(0);
  const auto prompt_queries = [&] {
    std::vector<float> all;
    const float* rows = keys.rows(0, kPrompt, 5);
    for (int half = 0; half < 2; ++half) all.insert(all.end(), rows, rows + kPrompt * 64);
    return all;
  }();
  cache.ingest(0, {keys.rows(0, kPrompt, 0), kPrompt, 2, 32},
               {values.rows(0, kPrompt, 3), kPrompt, 2, 32},
               {prompt_queries.data(), kPrompt, 4, 32});
  std::printf("\n%s\n%10s %10s %10s %10s %10s %11s %11s %9s %10s\n", name, "tokens", "memory kB",
              "places B", "epochs kB", "saved kB", "maintain us", "at most us", "rows most",
              "attend us");
  Part part;
  CacheStatistics before = cache.statistics();
  for (std::int64_t now = kPrompt; now < options.tokens; ++now) {
    cache.append(0, {keys.rows(now, 1, 0), 1, 2, 32}, {values.rows(now, 1, 3), 1, 2, 32});
    const double begin = cpu_seconds();
    cache.maintain(0);
    const double took = cpu_seconds() - begin;
    const CacheStatistics after = cache.statistics();
    if (after.flushes > before.flushes) {
      ++part.flushes;
      part.sum += took;
      part.worst = (std::max)(part.worst, took);
      part.most_rows = (std::max)(part.most_rows, after.rows_reprojected - before.rows_reprojected);
    }
    before = after;
    if constexpr (scores) {
      if (now % 1000 == 0) attend<Cache, scores>(cache, keys, now);
    }
    if ((now + 1) % (options.tokens / kParts) != 0) continue;
    const MemoryUsage memory = cache.memory(0);
    const std::size_t saved = cache.save_bytes(0);
    const double reads = attend<Cache, scores>(cache, keys, now);
    const double mean = part.sum / static_cast<double>((std::max)(part.flushes, std::int64_t{1}));
    std::printf("%10lld %10.1f %10zu %10.1f %10.1f %11.1f %11.1f %9lld %10.1f\n",
                static_cast<long long>(now + 1), static_cast<double>(memory.total()) / 1e3,
                memory.position_bytes, static_cast<double>(memory.epoch_bytes) / 1e3,
                static_cast<double>(saved) / 1e3, mean * 1e6, part.worst * 1e6,
                static_cast<long long>(part.most_rows), reads * 1e6);
    std::fflush(stdout);
    std::fprintf(csv, "%s,%lld,%zu,%zu,%zu,%zu,%.2f,%.2f,%lld,%lld,%lld,%.2f\n", name,
                 static_cast<long long>(now + 1), memory.total(), memory.position_bytes,
                 memory.epoch_bytes, saved, mean * 1e6, part.worst * 1e6,
                 static_cast<long long>(part.most_rows), static_cast<long long>(after.publications),
                 static_cast<long long>(after.merges), reads * 1e6);
    std::fflush(csv);
    part = {};
  }
}

void all_presets(const Options& options, std::FILE* csv) {
  const LayerBasis plain = first_channels(options.rank, false),
                   joint = first_channels(options.rank, true);
  live<FullKV<>>("FullKV", options, csv, {});
  live<StaticPCA<>>("StaticPCA", options, csv, plain);
  live<StaticPCAHybrid<>>("StaticPCAHybrid", options, csv, plain);
  live<OjaKV<>>("OjaKV", options, csv, plain);
  live<OjaKVv2<>>("OjaKVv2", options, csv, plain);
  live<OjaKVSnapKV<>>("OjaKVSnapKV", options, csv, plain);
  live<SubSpaceG<>>("SubSpaceG", options, csv, plain);
  live<SubSpaceA<>>("SubSpaceA", options, csv, plain);
  live<StarKV<>>("StarKV", options, csv, joint);
  StarKVH2O<>::PolicySet star;
  star.token_policy.get<HeavyHitters>() = {0.0F, 1024, 32};
  live<StarKVH2O<>, true>("StarKVH2O", options, csv, joint, star);
  live<Dlrp<>>("Dlrp", options, csv, projector(options.rank));
  live<SnapKVOnly<>>("SnapKVOnly", options, csv, {});
  live<StreamingLLM<>>("StreamingLLM", options, csv, {});
  H2O<>::PolicySet heavy;
  heavy.token_policy.get<HeavyHitters>() = {0.0F, 1024, 32};
  live<H2O<>, true>("H2O", options, csv, {}, heavy);
  live<Budgeted<>>("Budgeted", options, csv, coded());
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string_view name = words[i];
    const std::string value = words[i + 1];
    if (name == "--tokens") {
      options.tokens = std::stoll(value);
    } else if (name == "--preset") {
      options.preset = value;
    } else if (name == "--csv") {
      options.csv = value;
    } else if (name == "--rank") {
      options.rank = std::stoi(value);
    } else {
      std::fprintf(stderr, "bench_soak: %s is no option\n", words[i]);
      std::exit(2);
    }
  }
  if (count % 2 == 0 || options.tokens < kPrompt * kParts || options.tokens % kParts != 0 ||
      options.rank < 1 || options.rank > kShape.head_dim) {
    std::fprintf(stderr,
                 "bench_soak: [--tokens N, a multiple of %d, at least %d] [--preset NAME] "
                 "[--csv FILE] [--rank 1 to %d]\n",
                 kParts, kPrompt * kParts, kShape.head_dim);
    std::exit(2);
  }
  return options;
}

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  std::FILE* csv = std::fopen(options.csv.c_str(), "w");
  if (csv == nullptr) {
    std::fprintf(stderr, "bench_soak: cannot write %s\n", options.csv.c_str());
    return 1;
  }
  std::fprintf(csv,
               "preset,tokens,memory_bytes,position_bytes,epoch_bytes,saved_bytes,"
               "maintain_mean_us,maintain_most_us,rows_reprojected_most,publications,merges,"
               "attend_us\n");
  all_presets(options, csv);
  std::fclose(csv);
}
