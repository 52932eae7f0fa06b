// SPDX-License-Identifier: Apache-2.0
// The model's KV cache behind one interface, whatever the method: lowrankkv's caches are templates,
// a command line is not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device_stream.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"
#include "model.hpp"

namespace llama {

class DeviceCaches;

/// One LayerStack of some method.
class KvStore {
 public:
  virtual ~KvStore() = default;
  virtual void create(lowrankkv::SequenceId seq) = 0;
  virtual void erase(lowrankkv::SequenceId seq) = 0;
  virtual void prefill(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
                       float* out) = 0;
  /// Stores a prompt that another store attended to.
  virtual void ingest(int layer, lowrankkv::SequenceId seq, std::int64_t n,
                      const Projected& rows) = 0;
  /// Appends n tokens and attends to everything up to each of them.
  virtual void decode(int layer, lowrankkv::SequenceId seq, std::int64_t n, const Projected& rows,
                      float* out) = 0;
  virtual void maintain(lowrankkv::SequenceId seq) = 0;
  virtual lowrankkv::MemoryUsage memory(lowrankkv::SequenceId seq) const = 0;
  virtual lowrankkv::MemoryUsage memory() const = 0;
  virtual std::int64_t num_tokens(lowrankkv::SequenceId seq) const = 0;
  /// The caches, where they are in device memory; null: they are not.
  virtual DeviceCaches* on_device() { return nullptr; }
};

/// How the rows that a key basis is fitted to are chosen.
enum class KeyBasis { method_default, keys, queries_and_keys, query_aware };

struct MethodOptions {
  std::string method = "OjaKV";
  double ratio = 0.6;        // the method's knob, see MethodInfo; FullKV has none
  std::int64_t context = 0;  // tokens at which a method that thinks in bytes or windows meets its
                             // ratio; 0: the capacity
  lowrankkv::DType storage = lowrankkv::DType::f16;  // coefficients, full rows and maps
  KeyBasis key_basis = KeyBasis::method_default;
  bool centred = true;         // low-rank and coded methods: the calibrated means are subtracted
  float prefill_rate = -1.0F;  // Oja; negative: the library's default
  float decode_rate = -1.0F;
  int sinks = -1,
      recent = -1;  // first and last tokens at full rank; negative: the method's default
  float outlier_share = -1.0F;  // OjaKVv2 and Budgeted; negative: the method's default
  int early_outliers = -1;      // Budgeted: BudgetOptions::early_outliers; negative: its default
  static constexpr int kChooseRowBits = -1;  // BudgetOptions::kChooseBits
  int full_row_bits = kChooseRowBits;        // Budgeted: BudgetOptions::full_row_bits
  bool pre_rope =
      false;  // keys are stored before their rotary embedding, and rotated when they are read
  bool on_gpu = false;           // cache and attention on the GPU
  std::vector<int> widths = {};  // Budgeted: BudgetOptions::widths; empty: its default
  double unit_bits = -1.0;       // Budgeted: BudgetOptions::unit_bits; negative: its default
  bool cpu_codes = false;  // Budgeted on the GPU: the codes of the CPU's budget, in more bytes
  std::int64_t prefill_chunk = 0;     // 0: the whole prompt
  std::int64_t publish_interval = 0;  // rows between two epochs; 0: the library's default
  int sequences = 1;                  // that there may be at a time
  // On the GPU:
  int query_tokens = 64;          // most tokens of a decode step
  std::size_t pool_bytes = 0;     // of pages; 0: what the sequences can ever need
  DeviceStream stream = nullptr;  // of all work; null: the default stream
};

/// Tokens at which generation spends a budget if nobody says: `tokens`, those of prompt and answer,
/// but no fewer than 2048. A short prompt alone has no room for full rows and pages within a ratio.
/// At most what the model takes.
inline std::int64_t generation_context(std::int64_t tokens, std::int64_t max_positions) {
  return std::min(std::max<std::int64_t>(tokens, 2048), max_positions);
}

/// What can be named.
struct MethodInfo {
  std::string name;
  std::string ratio;  // what --ratio means: empty if it means nothing
  std::string description;
  std::vector<double> ratios;  // where the demonstrations measure it
  bool pre_rope = false;       // always stores keys before their rotary embedding
  bool trained = false;        // needs what train-projector wrote
};

const std::vector<MethodInfo>& methods();
const MethodInfo& find_method(const std::string& name);
/// `options` for every method at every ratio (methods without a ratio once); no ratios: each method
/// at those of its MethodInfo.
std::vector<MethodOptions> at_ratios(const std::vector<std::string>& names,
                                     const std::vector<double>& ratios, MethodOptions options);

/// What a model was calibrated to, per layer, by the form of the keys; a form that was not is
/// empty.
struct Calibration {
  std::vector<lowrankkv::calibrate::LayerMoments> post_rope, pre_rope;
  std::vector<lowrankkv::LayerBasis> star_kv{};  ///< use_trained_weights(), if it was trained
  /// By layer, while gradients are gathered for a combined metric: the statistics of outputs.
  std::vector<lowrankkv::calibrate::CodingStatistics> post_rope_outputs{}, pre_rope_outputs{};

  auto& of(lowrankkv::Rope keys) { return keys == lowrankkv::Rope::pre ? pre_rope : post_rope; }
  const auto& of(lowrankkv::Rope keys) const {
    return keys == lowrankkv::Rope::pre ? pre_rope : post_rope;
  }
  auto& outputs(lowrankkv::Rope keys) {
    return keys == lowrankkv::Rope::pre ? pre_rope_outputs : post_rope_outputs;
  }
  const auto& outputs(lowrankkv::Rope keys) const {
    return keys == lowrankkv::Rope::pre ? pre_rope_outputs : post_rope_outputs;
  }
};

/// Builds the store of a model. `calibration` may be empty for methods without a basis.
std::unique_ptr<KvStore> make_store(const MethodOptions& options, const Config& model,
                                    std::int64_t max_tokens, const Calibration& calibration,
                                    const std::shared_ptr<lowrankkv::cpu::ThreadPool>& threads);

}  // namespace llama
