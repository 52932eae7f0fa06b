// SPDX-License-Identifier: Apache-2.0
// A sequence whose tokens several GPUs share: each holds a part of every layer's K and V. In a step
// each GPU attends to its part, NCCL all-gathers the partial states, and every GPU merges them.
// Compares with one GPU that holds all of it: outputs, and the time of a step.
//
//   09_cuda_shards [--gpus N] [--tokens N] [--layers N] [--bits 16|8] [--steps N]
//
// One process, one thread a GPU. With several processes ncclCommInitRank() takes the place of
// ncclCommInitAll(); the rest stays.
#include <lowrankkv/cuda/presets.cuh>

#include <nccl.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <lowrankkv/cuda/attention/merge_states.cuh>

namespace {

using Cache = lowrankkv::FullKV<lowrankkv::Cuda>;
using Stack = lowrankkv::LayerStack<Cache>;
using lowrankkv::cuda::check;
template <class T>
using Device = lowrankkv::cuda::DeviceArray<T>;

constexpr int kHeads = 32, kKvHeads = 8, kDim = 128;  // Llama-3.1-8B
constexpr std::int64_t kChunk = 16384;                // rows that are made and stored together

struct Options {
  int gpus = 0;  // 0: all there are
  std::int64_t tokens = 1 << 17;
  int layers = 4;
  int bits = 16;
  int steps = 100;
};

void check_nccl(ncclResult_t result) {
  if (result != ncclSuccess)
    throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(result) + ": " +
                             ncclGetLastError(nullptr));
}

/// A number of [-1.7, 1.7) that depends on its place alone, so that every GPU can make any row.
__device__ float number_of(std::uint64_t place) {
  place = (place + 0x9e3779b97f4a7c15ULL) * 0xbf58476d1ce4e5b9ULL;
  place = (place ^ (place >> 27)) * 0x94d049bb133111ebULL;
  return (static_cast<float>(place >> 40) * 0x1p-24F - 0.5F) * 3.4F;
}
/// rows [count, width] of a tensor from token `first` on.
__global__ void make_rows(float* rows, std::int64_t first, std::int64_t count, int width,
                          std::uint64_t tensor, float scale) {
  const std::int64_t size = count * width;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x)
    rows[i] = scale * number_of((tensor << 44) + static_cast<std::uint64_t>(first * width + i));
}
void fill(const Device<float>& rows, std::int64_t first, std::int64_t count, int width, int tensor,
          float scale, cudaStream_t stream) {
  make_rows<<<1024, 256, 0, stream>>>(rows.data(), first, count, width,
                                      static_cast<std::uint64_t>(tensor), scale);
  check(cudaGetLastError(), "make_rows");
}

/// What one GPU holds: tokens [first, first + count) of the sequence, in all layers.
class Shard {
 public:
  /// @param comm  of all shards; null: there is one
  /// @param last  the shard to which new tokens are appended
  Shard(const Options& options, std::int64_t first, std::int64_t count, int shards, bool last,
        ncclComm_t comm)
      : options_(options),
        shards_(shards),
        last_(last),
        comm_(comm),
        query_(kHeads * kDim),
        key_(kKvHeads * kDim),
        value_(kKvHeads * kDim),
        own_(kStateSize),
        states_(kStateSize * static_cast<std::size_t>(shards)),
        out_(static_cast<std::size_t>(options.layers) * kHeads * kDim) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    lowrankkv::CacheConfig config{.shape = {kHeads, kKvHeads, kDim}};
    config.max_tokens = count + 4096;
    config.max_sequences = 1;
    config.prefill_chunk = kChunk;
    config.full_row_bits = options.bits == 8 ? 8 : 0;
    const std::vector<lowrankkv::LayerBasis> bases(static_cast<std::size_t>(options.layers));
    stack_ = std::make_unique<Stack>(config, bases);
    stack_->create(0, stream_);
    const Device<float> keys(kChunk * kKvHeads * kDim), values(kChunk * kKvHeads * kDim);
    for (int layer = 0; layer < options.layers; ++layer) {
      for (std::int64_t done = 0; done < count; done += kChunk) {
        const std::int64_t rows = std::min(kChunk, count - done);
        fill(keys, first + done, rows, kKvHeads * kDim, 2 * layer, 1.0F, stream_);
        fill(values, first + done, rows, kKvHeads * kDim, 2 * layer + 1, 1.0F, stream_);
        const auto more =
            done + rows < count ? lowrankkv::Prompt::continues : lowrankkv::Prompt::complete;
        stack_->layer(layer).ingest(0, {keys.data(), rows, kKvHeads, kDim},
                                    {values.data(), rows, kKvHeads, kDim}, {}, more, stream_);
      }
    }
    fill(query_, 0, 1, kHeads * kDim, 1000, 1.0F, stream_);
    fill(key_, 0, 1, kKvHeads * kDim, 1001, 1.0F, stream_);
    fill(value_, 0, 1, kKvHeads * kDim, 1002, 1.0F, stream_);
    check(cudaStreamSynchronize(stream_), "prompt");
    capture();
  }
  ~Shard() {
    cudaGraphExecDestroy(step_);
    cudaStreamDestroy(stream_);
  }
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  void step() {
    if (last_) stack_->advance(seqs_, 1);
    check(cudaGraphLaunch(step_, stream_), "cudaGraphLaunch");
    if (last_) stack_->maintain(seqs_, stream_);
  }
  void wait() { check(cudaStreamSynchronize(stream_), "step"); }
  /// The outputs of all layers, [layers, heads, head_dim].
  std::vector<float> outputs() const {
    std::vector<float> result(out_.size());
    check(cudaMemcpy(result.data(), out_.data(), out_.bytes(), cudaMemcpyDeviceToHost), "copy");
    return result;
  }

 private:
  // A state: A [heads, head_dim], then M [heads], then L [heads].
  static constexpr std::size_t kStateSize = kHeads * (kDim + 2);
  static lowrankkv::StateView view(float* state) {
    return {state, state + kHeads * kDim, state + kHeads * kDim + kHeads, 1, kHeads, kDim};
  }

  //! [shards]
  /// Attention of a step, of all layers. Between these calls comes the rest of the layer.
  void enqueue() {
    for (int i = 0; i < options_.layers; ++i) {
      Cache& cache = stack_->layer(i);
      if (last_)
        cache.append(seqs_, {key_.data(), 1, kKvHeads, kDim}, {value_.data(), 1, kKvHeads, kDim},
                     stream_);
      cache.attend_partial(seqs_, {query_.data(), 1, kHeads, kDim}, view(own_.data()),
                           last_ ? lowrankkv::QueryTokens::own : lowrankkv::QueryTokens::elsewhere,
                           stream_);
      float* all = own_.data();
      if (comm_ != nullptr) {
        all = states_.data();
        check_nccl(ncclAllGather(own_.data(), all, kStateSize, ncclFloat, comm_, stream_));
      }
      std::vector<lowrankkv::StateView> views;
      for (int shard = 0; shard < shards_; ++shard)
        views.push_back(view(all + static_cast<std::size_t>(shard) * kStateSize));
      lowrankkv::cuda::merge_states(views, {out_.data() + i * kHeads * kDim, 1, kHeads, kDim}, {},
                                    stream_);
    }
  }
  void capture() {
    enqueue();  // NCCL connects the GPUs in its first call, which is not captured
    check(cudaStreamSynchronize(stream_), "first step");
    cudaGraph_t graph;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&step_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  //! [shards]

  Options options_;
  int shards_;
  bool last_;
  ncclComm_t comm_;
  std::vector<lowrankkv::SequenceId> seqs_{0};
  Device<float> query_, key_, value_, own_, states_, out_;
  std::unique_ptr<Stack> stack_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t step_ = nullptr;
};

struct Measured {
  double milliseconds = 0.0;  // a step
  std::vector<float> outputs;
};

/// Runs the sequence on `gpus` GPUs, and takes the outputs of the first captured step.
Measured run(const Options& options, int gpus) {
  std::vector<ncclComm_t> comms(static_cast<std::size_t>(gpus), nullptr);
  if (gpus > 1) check_nccl(ncclCommInitAll(comms.data(), gpus, nullptr));
  Measured result;
  std::barrier together(gpus);
  const auto rank = [&](int gpu) {
    check(cudaSetDevice(gpu), "cudaSetDevice");
    const std::int64_t first = options.tokens * gpu / gpus, end = options.tokens * (gpu + 1) / gpus;
    Shard shard(options, first, end - first, gpus, gpu == gpus - 1,
                comms[static_cast<std::size_t>(gpu)]);
    together.arrive_and_wait();
    shard.step();
    shard.wait();
    if (gpu == 0) result.outputs = shard.outputs();
    for (int i = 0; i < 10; ++i) shard.step();
    shard.wait();
    together.arrive_and_wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < options.steps; ++i) shard.step();
    shard.wait();
    together.arrive_and_wait();
    const std::chrono::duration<double, std::milli> passed =
        std::chrono::steady_clock::now() - begin;
    if (gpu == 0) result.milliseconds = passed.count() / options.steps;
  };
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    threads.emplace_back([&, gpu] {
      try {
        rank(gpu);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "GPU %d: %s\n", gpu, error.what());
        std::exit(1);  // the others wait for this one in a collective call
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const ncclComm_t comm : comms) {
    if (comm != nullptr) ncclCommDestroy(comm);
  }
  return result;
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    const auto fail = [&](const std::string& why) {
      throw std::runtime_error("09_cuda_shards: " + why);
    };
    if (i + 1 == argc) fail(name + " without a number");
    const long long number = std::atoll(argv[i + 1]);
    if (number < 1) fail(name + " " + argv[i + 1] + ", at least 1 expected");
    if (name == "--gpus")
      options.gpus = static_cast<int>(number);
    else if (name == "--tokens")
      options.tokens = number;
    else if (name == "--layers")
      options.layers = static_cast<int>(number);
    else if (name == "--steps")
      options.steps = static_cast<int>(number);
    else if (name == "--bits" && (number == 8 || number == 16))
      options.bits = static_cast<int>(number);
    else
      fail(name + " " + argv[i + 1] +
           ": --gpus, --tokens, --layers, --steps or --bits 8 or 16 expected");
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Options options = parse(argc, argv);
    int there = 0;
    check(cudaGetDeviceCount(&there), "cudaGetDeviceCount");
    if (options.gpus == 0) options.gpus = there;
    if (options.gpus > there)
      throw std::runtime_error("09_cuda_shards: --gpus " + std::to_string(options.gpus) + ", " +
                               std::to_string(there) + " are there");
    std::printf("%lld tokens, %d layers, rows in %d bits\n", static_cast<long long>(options.tokens),
                options.layers, options.bits);
    std::printf("GPUs  ms a step  efficiency  largest difference of an output\n");
    const Measured one = run(options, 1);
    std::printf("%4d  %9.3f\n", 1, one.milliseconds);
    double largest = 0.0;
    for (int gpus = 1; gpus < options.gpus;) {
      gpus = std::min(2 * gpus, options.gpus);
      const Measured shared = run(options, gpus);
      double furthest = 0.0, size = 0.0;
      for (std::size_t i = 0; i < one.outputs.size(); ++i) {
        furthest = std::max(furthest, std::abs(double{one.outputs[i]} - double{shared.outputs[i]}));
        size = std::max(size, std::abs(double{one.outputs[i]}));
      }
      largest = std::max(largest, furthest / size);
      std::printf("%4d  %9.3f  %8.1f %%  %.2e of the largest output\n", gpus, shared.milliseconds,
                  100.0 * one.milliseconds / (gpus * shared.milliseconds), furthest / size);
    }
    return largest < 1e-3 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
