// SPDX-License-Identifier: Apache-2.0
// Tokens per second of decode attention through the layers of a small model, alone and beside a
// process that keeps one core busy. The executors that the library offers.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "lowrankkv/cpu/openmp.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"

using namespace lowrankkv;

namespace {

constexpr CacheShape kShape{8, 4, 64};
constexpr int kLayers = 8;
constexpr std::int64_t kPrompt = 2000;

LayerBasis basis() {
  LayerBasis maps;
  for (int head = 0; head < kShape.num_kv_heads; ++head) {
    HeadBasis own;
    own.key_rank = own.value_rank = 32;
    own.key_down.assign(static_cast<std::size_t>(kShape.head_dim * own.key_rank), 0.0F);
    for (int i = 0; i < own.key_rank; ++i)
      own.key_down[static_cast<std::size_t>(i * own.key_rank + i)] = 1.0F;
    own.value_down = own.key_down;
    maps.heads.push_back(std::move(own));
  }
  return maps;
}

class Decode {
 public:
  explicit Decode(std::shared_ptr<cpu::Executor> threads)
      : stack_({.shape = kShape, .max_sequences = 1, .max_tokens = 1 << 20},
               std::vector<LayerBasis>(kLayers, basis()), {}, std::move(threads)) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    q_.resize(static_cast<std::size_t>(kShape.num_qo_heads * kShape.head_dim));
    rows_.resize(static_cast<std::size_t>(kPrompt * kShape.num_kv_heads * kShape.head_dim));
    for (float& value : q_) value = normal(random);
    for (float& value : rows_) value = normal(random);
    out_.resize(q_.size());
    stack_.create(0);
    for (int layer = 0; layer < kLayers; ++layer)
      stack_.layer(layer).append_maintained(0, key(kPrompt), value(kPrompt));
  }
  /// Tokens per second over `seconds`. Tokens are truncated again, so that every one costs the
  /// same.
  double rate(double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    int tokens = 0;
    for (;; ++tokens) {
      const std::chrono::duration<double> passed = Clock::now() - begin;
      if (passed.count() >= seconds) return tokens / passed.count();
      const std::int64_t before = stack_.num_tokens(0);
      for (int layer = 0; layer < kLayers; ++layer) {
        stack_.layer(layer).append(0, key(1), value(1));
        stack_.layer(layer).attend(0, {q_.data(), 1, kShape.num_qo_heads, kShape.head_dim},
                                   {out_.data(), 1, kShape.num_qo_heads, kShape.head_dim});
      }
      stack_.truncate(0, before);
    }
  }

 private:
  KeyView key(std::int64_t n) const {
    return {rows_.data(), n, kShape.num_kv_heads, kShape.head_dim};
  }
  ValueView value(std::int64_t n) const {
    return {rows_.data(), n, kShape.num_kv_heads, kShape.head_dim};
  }
  LayerStack<StaticPCA<>> stack_;
  std::vector<float> q_, rows_, out_;
};

void measure(const char* name, std::shared_ptr<cpu::Executor> threads) {
  Decode decode(std::move(threads));
  decode.rate(0.5);
  const double alone = decode.rate(3.0);
  const pid_t neighbour = fork();
  if (neighbour == 0) {
    std::atomic<unsigned> spins{0};
    for (;;) ++spins;
  }
  const double beside = decode.rate(6.0);
  kill(neighbour, SIGKILL);
  waitpid(neighbour, nullptr, 0);
  std::printf("%-28s %10.0f %14.0f %8.2f\n", name, alone, beside, beside / alone);
}

}  // namespace

int main() {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  std::printf("%d layers of %d KV heads, %d tokens, %d cores. Tokens/s:\n", kLayers,
              kShape.num_kv_heads, static_cast<int>(kPrompt), cores);
  std::printf("%-28s %10s %14s %8s\n", "executor", "alone", "beside a busy", "ratio");
  measure("one thread", std::make_shared<cpu::ThreadPool>(1));
  measure("ThreadPool, all cores", std::make_shared<cpu::ThreadPool>(cores));
#if defined(_OPENMP)
  measure("OpenMP, all cores", std::make_shared<cpu::OpenMP>(cores));
#endif
}
