// SPDX-License-Identifier: Apache-2.0
// The CPU backend as the CUDA tests see it: no Eigen in a CUDA translation unit.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/token_policy/residual_outliers.hpp"

namespace support {

/// The compositions that both sides know.
enum class Method { full, static_pca, hybrid, projector, codes, oja, oja_merging, oja_rotating, oja_outliers, outliers, budgeted };

/// Whether bases move.
inline bool adapts(Method method) { return method >= Method::oja && method <= Method::oja_outliers; }
/// Whether rows of large errors stay full.
inline bool by_errors(Method method) { return method >= Method::oja_outliers; }
/// Whether coefficients are codes.
inline bool coded(Method method) { return method == Method::codes || method == Method::budgeted; }

struct Settings {
  Method method = Method::full;
  lowrankkv::PerHead basis;
  int sinks = 4, recent = 32;
  lowrankkv::ResidualOutliers outliers;
  float share = 1.0F;  ///< of a prompt, what an updater observes
  lowrankkv::DType coefficients = lowrankkv::DType::f16;
};

/// One sequence in a CPU cache.
class CpuSide {
 public:
  virtual ~CpuSide() = default;
  /// @param window  queries of the last tokens; may be empty
  virtual void ingest(const std::vector<float>& key, const std::vector<float>& value, const std::vector<float>& window) = 0;
  virtual void append_maintained(const std::vector<float>& key, const std::vector<float>& value) = 0;
  virtual void truncate(std::int64_t length) = 0;
  virtual int tail_length() const = 0;
  virtual void reconstruct(std::vector<float>& key, std::vector<float>& value) const = 0;
  virtual std::int64_t publications() const = 0;
  virtual std::int64_t merges() const = 0;
  virtual void attend(const std::vector<float>& query, std::vector<float>& out, std::vector<float>& lse) = 0;
};
std::unique_ptr<CpuSide> make_cpu_side(const Settings& settings, const lowrankkv::CacheConfig& config, const lowrankkv::LayerBasis& basis);

}  // namespace support
