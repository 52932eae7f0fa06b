// SPDX-License-Identifier: Apache-2.0
// Decoding on a GPU as an engine does it: pages of its own, a stream, a CUDA graph of all layers.
#include <lowrankkv/cuda/presets.cuh>

#include <cstdio>
#include <memory>
#include <random>
#include <vector>

using Stack = lowrankkv::LayerStack<lowrankkv::FullKV<lowrankkv::Cuda>>;
using lowrankkv::cuda::check;
template <class T>
using Device = lowrankkv::cuda::DeviceArray<T>;

//! [page source]
/// The engine's block manager. It is asked on the host, by calls that are not captured.
class Blocks final : public lowrankkv::PageSource {
 public:
  explicit Blocks(std::int64_t pages) {
    while (pages > 0) free_.push_back(static_cast<std::int32_t>(--pages));
  }
  std::int64_t num_free() const override { return static_cast<std::int64_t>(free_.size()); }
  std::int32_t take() override {
    const std::int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void release(std::int32_t page) noexcept override { free_.push_back(page); }

 private:
  std::vector<std::int32_t> free_;  // never longer than at first
};
//! [page source]

int main() {
  const int layers = 2, prompt = 1000, steps = 100;
  const lowrankkv::CacheConfig config{.shape = {8, 2, 64}};  // query heads, KV heads, head_dim
  const lowrankkv::SequenceId seqs[] = {0};
  std::vector<float> rows(prompt * 8 * 64);  // your engine has real ones
  std::mt19937 random(1);
  for (float& x : rows) x = std::normal_distribution<float>()(random);
  const Device<float> q(rows), k(rows), v(rows), out(rows.size());

  //! [stack]
  const std::vector<lowrankkv::LayerBasis> bases(layers);  // FullKV needs no calibration
  const lowrankkv::PoolSize size = Stack::pool_size(config, bases);
  const Device<std::uint8_t> memory(size.page_bytes * static_cast<std::size_t>(size.num_pages));
  const auto pool = std::make_shared<Stack::Pool>(memory.data(), size.page_bytes, size.num_pages,
                                                  std::make_shared<Blocks>(size.num_pages));
  Stack stack(config, bases, {}, {}, pool);
  //! [stack]

  //! [decode]
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  stack.create(0, stream);
  for (int i = 0; i < layers; ++i) {
    stack.layer(i).prefill(0, {q.data(), prompt, 8, 64}, {k.data(), prompt, 2, 64},
                           {v.data(), prompt, 2, 64}, {out.data(), prompt, 8, 64}, {}, stream);
  }

  cudaGraph_t graph;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < layers; ++i) {  // between these calls: the rest of the layer
    stack.layer(i).append(seqs, {k.data(), 1, 2, 64}, {v.data(), 1, 2, 64}, stream);
    stack.layer(i).attend(seqs, {q.data(), 1, 8, 64}, {out.data(), 1, 8, 64}, {}, stream);
  }
  check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t step;
  check(cudaGraphInstantiate(&step, graph, 0), "cudaGraphInstantiate");

  for (int token = 0; token < steps; ++token) {
    stack.advance(seqs, 1);  // the host counts the token, or raises, before the device adds it
    check(cudaGraphLaunch(step, stream), "cudaGraphLaunch");
    stack.maintain(seqs, stream);  // rows leave full tails; takes pages
  }
  check(cudaStreamSynchronize(stream), "decode");
  //! [decode]

  float result[8 * 64], sum = 0.0F;
  check(cudaMemcpy(result, out.data(), sizeof result, cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (const float x : result) sum += x;
  std::printf("%lld tokens, outputs add up to %.4f, %u rows refused\n",
              static_cast<long long>(stack.num_tokens(0)), static_cast<double>(sum),
              stack.layer(0).faults() + stack.layer(1).faults());
  cudaGraphExecDestroy(step);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}
