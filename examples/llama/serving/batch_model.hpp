// SPDX-License-Identifier: Apache-2.0
// A model on a GPU that decodes many sequences at a time: no Eigen here, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device_caches.hpp"

namespace llama {

class Model;
struct Config;

/// The type of weights and of what products read. Sums, the residual stream and logits are in f32.
enum class WeightType { f32, f16, bf16 };

/// A place of a step: the token that its sequence gets, and where it stands.
struct StepPlace {
  std::int32_t slot = -1;  ///< DeviceCaches::slot(); -1: nobody
  std::int32_t token = 0;
  std::int32_t position = 0;
};

/// Weights on the GPU that was the current one, and one CUDA graph of a decode step for each number
/// of places. A graph serves whatever sequences the places name. All work is on one stream, which
/// the caches must have been made with.
class BatchModel {
 public:
  virtual ~BatchModel() = default;
  /// The stream of all work.
  virtual DeviceStream stream() const = 0;
  virtual std::size_t weight_bytes() const = 0;
  /// Free bytes of the GPU's memory.
  virtual std::size_t free_bytes() const = 0;

  /// Runs a part of a prompt, `tokens` at positions [first, first + tokens.size()), through the
  /// layers, and stores it. Device memory grows to that of the longest part so far.
  /// @param complete  the part is the prompt's last
  /// @return the most likely token behind it, if complete; waits for it then
  virtual std::int32_t prompt(DeviceCaches& caches, lowrankkv::SequenceId seq,
                              std::span<const std::int32_t> tokens, std::int64_t first,
                              bool complete) = 0;
  /// Stores a prompt of n random rows in every layer, instead of running one: the cache of a
  /// sequence whose text does not matter. @param spectrum  size of the rows by channel [head_dim]
  virtual void store_random(DeviceCaches& caches, lowrankkv::SequenceId seq, std::int64_t n,
                            const std::vector<float>& spectrum) = 0;
  /// Makes the graphs: one for each of `sizes` places. Waits.
  /// @param max_positions  positions that tokens may have
  virtual void capture(DeviceCaches& caches, const std::vector<int>& sizes,
                       std::int64_t max_positions) = 0;
  /// Enqueues a step of places.size() places, a size that was captured.
  /// @throws std::runtime_error if it was not
  virtual void begin_step(std::span<const StepPlace> places) = 0;
  /// Waits for the step: the most likely token behind that of each place; of places with nobody,
  /// anything. Valid until the next begin_step().
  virtual std::span<const std::int32_t> end_step() = 0;
  /// Logits [places, vocabulary_size] of the step that ended last. Waits.
  virtual std::vector<float> step_logits() const = 0;
};

/// @throws lowrankkv::DeviceError where CUDA or cuBLAS reports an error; std::runtime_error in a
///         program built without CUDA
std::unique_ptr<BatchModel> make_batch_model(const Model& model, WeightType type);
/// A model of this shape with random weights, drawn on the device.
std::unique_ptr<BatchModel> make_batch_model(const Config& config, std::uint64_t seed,
                                             WeightType type);

}  // namespace llama
