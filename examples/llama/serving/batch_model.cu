// SPDX-License-Identifier: Apache-2.0
#include "serving/batch_model.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

#include "device_layers.cuh"

namespace llama {
namespace {

using namespace device_layers;

constexpr int kArgmaxThreads = 512;

/// A block a row of logits [rows, width]: best = the index of the largest, of equal ones the least.
__global__ void argmax(const float* logits, int width, std::int32_t* best) {
  __shared__ float values[kArgmaxThreads];
  __shared__ int places[kArgmaxThreads];
  const float* row = logits + std::int64_t{blockIdx.x} * width;
  const int thread = static_cast<int>(threadIdx.x);
  float top = -INFINITY;
  int place = 0;
  for (int i = thread; i < width; i += kArgmaxThreads) {
    if (row[i] > top) top = row[i], place = i;
  }
  values[thread] = top;
  places[thread] = place;
  for (int step = kArgmaxThreads / 2; step > 0; step /= 2) {
    __syncthreads();
    if (thread >= step) continue;
    const float other = values[thread + step];
    if (other < values[thread] ||
        (other == values[thread] && places[thread + step] > places[thread]))
      continue;
    values[thread] = other;
    places[thread] = places[thread + step];
  }
  if (thread == 0) best[blockIdx.x] = places[0];
}

/// rows [n, heads, dim] = spectrum[channel] times numbers of variance 1.
__global__ void draw_rows(std::int64_t count, int dim, std::uint64_t seed, const float* spectrum,
                          float* rows) {
  const std::int64_t index = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (index >= count) return;
  rows[index] = spectrum[index % dim] * drawn(seed, index) * 1.7320508F;
}

/// Page-locked memory of the host, which copies of a graph read and write.
template <class T>
class HostArray {
 public:
  explicit HostArray(std::size_t size) : size_(size) {
    gpu::check(cudaMallocHost(reinterpret_cast<void**>(&data_), size * sizeof(T)),
               "cudaMallocHost");
  }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;
  ~HostArray() { cudaFreeHost(data_); }
  T* data() const { return data_; }
  std::size_t bytes() const { return size_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// A stream that does not wait for the default one.
class OwnStream {
 public:
  OwnStream() {
    gpu::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A graph of a step, and the memory that it reads and writes: slots, tokens and positions of its
/// places, and the tokens behind them.
struct StepGraph {
  explicit StepGraph(int size)
      : places(size),
        in(3 * static_cast<std::size_t>(size)),
        next(static_cast<std::size_t>(size)),
        host_in(3 * static_cast<std::size_t>(size)),
        host_next(static_cast<std::size_t>(size)) {}
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  ~StepGraph() {
    if (replay != nullptr) cudaGraphExecDestroy(replay);
  }
  const std::int32_t* slots() const { return in.data(); }
  const std::int32_t* ids() const { return in.data() + places; }
  const std::int32_t* positions() const { return in.data() + 2 * places; }

  int places;
  gpu::DeviceArray<std::int32_t> in, next;
  HostArray<std::int32_t> host_in, host_next;
  cudaGraphExec_t replay = nullptr;
};

template <class Real>
class GpuBatchModel final : public BatchModel {
 public:
  explicit GpuBatchModel(const Model& model) : layers_(model, stream_.get()) {}
  GpuBatchModel(const Config& config, std::uint64_t seed) : layers_(config, seed, stream_.get()) {}

  DeviceStream stream() const override { return stream_.get(); }
  std::size_t weight_bytes() const override { return layers_.weight_bytes(); }
  std::size_t free_bytes() const override {
    std::size_t free = 0, all = 0;
    gpu::check(cudaMemGetInfo(&free, &all), "cudaMemGetInfo");
    return free;
  }

  std::int32_t prompt(DeviceCaches& caches, lowrankkv::SequenceId seq,
                      std::span<const std::int32_t> tokens, std::int64_t first,
                      bool complete) override {
    const auto n = static_cast<std::int64_t>(tokens.size());
    check_positions(first + n);
    of_prompt_.make_room(layers_.config(), n);
    layers_.rotate_up_to(first + n);
    std::vector<std::int32_t> in(tokens.begin(), tokens.end());
    for (std::int64_t i = 0; i < n; ++i) in.push_back(static_cast<std::int32_t>(first + i));
    grow(prompt_in_, in.size());
    // From pageable memory: the call returns when the numbers are read.
    gpu::check(cudaMemcpyAsync(prompt_in_.data(), in.data(), in.size() * sizeof(std::int32_t),
                               cudaMemcpyHostToDevice, stream_.get()),
               "cudaMemcpyAsync");
    const auto prompt = complete ? lowrankkv::Prompt::complete : lowrankkv::Prompt::continues;
    layers_.forward(of_prompt_, n, prompt_in_.data(), prompt_in_.data() + n,
                    [&](int layer, const Projected& rows, float* out) {
                      caches.prefill(layer, seq, n, rows, prompt, out);
                    });
    if (!complete) return -1;
    const Config& config = layers_.config();
    grow(prompt_logits_, static_cast<std::size_t>(config.vocabulary_size));
    layers_.logits(of_prompt_.normed.data() + (n - 1) * config.hidden_size, 1,
                   prompt_logits_.data());
    argmax<<<1, kArgmaxThreads, 0, stream_.get()>>>(prompt_logits_.data(), config.vocabulary_size,
                                                    prompt_in_.data());
    std::int32_t next = 0;
    gpu::check(cudaMemcpyAsync(&next, prompt_in_.data(), sizeof next, cudaMemcpyDeviceToHost,
                               stream_.get()),
               "cudaMemcpyAsync");
    gpu::check(cudaStreamSynchronize(stream_.get()), "prompt");
    return next;
  }

  void store_random(DeviceCaches& caches, lowrankkv::SequenceId seq, std::int64_t n,
                    const std::vector<float>& spectrum) override {
    constexpr std::int64_t kQueries = 64;  // what methods that score a prompt's rows look at
    const Config& config = layers_.config();
    const std::int64_t queries = std::min(n, kQueries), kv = config.num_kv_heads * config.head_dim;
    const Floats sizes = uploaded(spectrum);
    std::uint64_t seed = 1;
    const auto rows_of = [&](Floats& rows, std::int64_t count) {
      ++seed;
      if (rows.size() >= static_cast<std::size_t>(count)) return;
      grow(rows, static_cast<std::size_t>(count));
      draw_rows<<<blocks_of(count), kBlock, 0, stream_.get()>>>(count, config.head_dim, seed,
                                                                sizes.data(), rows.data());
      gpu::check(cudaStreamSynchronize(stream_.get()), "draw_rows");
    };
    rows_of(random_key_, n * kv);
    rows_of(random_value_, n * kv);
    rows_of(random_query_, queries * config.num_qo_heads * config.head_dim);
    for (int layer = 0; layer < config.num_layers; ++layer)
      caches.ingest(
          layer, seq, n,
          {random_query_.data(), random_key_.data(), random_value_.data(), random_key_.data()},
          queries);
  }

  void capture(DeviceCaches& caches, const std::vector<int>& sizes,
               std::int64_t max_positions) override {
    const int most = *std::max_element(sizes.begin(), sizes.end());
    const Config& config = layers_.config();
    graphs_.clear();
    positions_ = max_positions;
    of_step_.make_room(config, most);
    layers_.rotate_up_to(max_positions);
    grow(logits_,
         static_cast<std::size_t>(most) * static_cast<std::size_t>(config.vocabulary_size));
    for (const int size : sizes) {
      StepGraph& graph = graphs_.try_emplace(size, size).first->second;
      std::fill_n(graph.host_in.data(), size, -1);  // nobody
      std::fill_n(graph.host_in.data() + size, 2 * size, 0);
      enqueue_step(caches, graph);  // cuBLAS chooses and loads its kernels
      gpu::check(cudaStreamSynchronize(stream_.get()), "step");
      cudaGraph_t captured = nullptr;
      gpu::check(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal),
                 "capture");
      enqueue_step(caches, graph);
      gpu::check(cudaStreamEndCapture(stream_.get(), &captured), "capture");
      gpu::check(cudaGraphInstantiate(&graph.replay, captured, 0), "cudaGraphInstantiate");
      cudaGraphDestroy(captured);
      gpu::check(cudaGraphUpload(graph.replay, stream_.get()), "cudaGraphUpload");
    }
    gpu::check(cudaStreamSynchronize(stream_.get()), "capture");
  }

  void begin_step(std::span<const StepPlace> places) override {
    const auto size = static_cast<int>(places.size());
    const auto found = graphs_.find(size);
    if (found == graphs_.end()) {
      std::string captured;
      for (const auto& [of, graph] : graphs_) captured += " " + std::to_string(of);
      throw std::runtime_error("a step of " + std::to_string(size) +
                               " places, captured were steps of" + captured);
    }
    current_ = &found->second;
    std::int32_t* in = current_->host_in.data();
    for (const StepPlace& place : places) {
      in[0] = place.slot;
      in[size] = place.token;
      in[2 * size] = place.position;
      ++in;
    }
    gpu::check(cudaGraphLaunch(current_->replay, stream_.get()), "cudaGraphLaunch");
    gpu::check(cudaEventRecord(stepped_.get(), stream_.get()), "cudaEventRecord");
  }
  std::span<const std::int32_t> end_step() override {
    gpu::check(cudaEventSynchronize(stepped_.get()), "step");
    return {current_->host_next.data(), static_cast<std::size_t>(current_->places)};
  }

  std::vector<float> step_logits() const override {
    const auto width = static_cast<std::size_t>(layers_.config().vocabulary_size);
    std::vector<float> values(static_cast<std::size_t>(current_->places) * width);
    gpu::check(cudaStreamSynchronize(stream_.get()), "step");
    gpu::check(cudaMemcpy(values.data(), logits_.data(), values.size() * sizeof(float),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    return values;
  }

 private:
  /// When a step is done, whatever is enqueued behind it.
  class Event {
   public:
    Event() {
      gpu::check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() { cudaEventDestroy(event_); }
    cudaEvent_t get() const { return event_; }

   private:
    cudaEvent_t event_ = nullptr;
  };

  /// Graphs hold the table of rotations, which must not grow then.
  void check_positions(std::int64_t positions) const {
    if (!graphs_.empty() && positions > positions_)
      throw std::runtime_error("a prompt to position " + std::to_string(positions) +
                               ", steps were captured for " + std::to_string(positions_));
  }

  void enqueue_step(DeviceCaches& caches, StepGraph& graph) {
    const Config& config = layers_.config();
    gpu::check(cudaMemcpyAsync(graph.in.data(), graph.host_in.data(), graph.host_in.bytes(),
                               cudaMemcpyHostToDevice, stream_.get()),
               "cudaMemcpyAsync");
    const lowrankkv::SlotView slots{graph.slots(), graph.places};
    layers_.forward(of_step_, graph.places, graph.ids(), graph.positions(),
                    [&](int layer, const Projected& rows, float* out) {
                      caches.decode(layer, slots, rows, out);
                    });
    layers_.logits(of_step_.normed.data(), graph.places, logits_.data());
    argmax<<<static_cast<unsigned>(graph.places), kArgmaxThreads, 0, stream_.get()>>>(
        logits_.data(), config.vocabulary_size, graph.next.data());
    gpu::check(cudaMemcpyAsync(graph.host_next.data(), graph.next.data(), graph.next.bytes(),
                               cudaMemcpyDeviceToHost, stream_.get()),
               "cudaMemcpyAsync");
  }

  OwnStream stream_;
  Event stepped_;
  DeviceLayers<Real> layers_;
  Activations<Real> of_prompt_, of_step_;  // graphs hold the latter
  std::int64_t positions_ = 0;             // for which graphs were captured
  gpu::DeviceArray<std::int32_t> prompt_in_;
  Floats prompt_logits_, logits_, random_query_, random_key_, random_value_;
  std::map<int, StepGraph> graphs_;
  StepGraph* current_ = nullptr;
};

/// The model of a type of weights.
template <class... Arguments>
std::unique_ptr<BatchModel> make(WeightType type, const Arguments&... arguments) {
  switch (type) {
    case WeightType::f32:
      return std::make_unique<GpuBatchModel<float>>(arguments...);
    case WeightType::f16:
      return std::make_unique<GpuBatchModel<__half>>(arguments...);
    case WeightType::bf16:
      break;
  }
  return std::make_unique<GpuBatchModel<__nv_bfloat16>>(arguments...);
}

}  // namespace

std::unique_ptr<BatchModel> make_batch_model(const Model& model, WeightType type) {
  return make(type, model);
}
std::unique_ptr<BatchModel> make_batch_model(const Config& config, std::uint64_t seed,
                                             WeightType type) {
  return make(type, config, seed);
}

}  // namespace llama
