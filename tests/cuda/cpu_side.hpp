// SPDX-License-Identifier: Apache-2.0
// The CPU backend as the CUDA tests see it: no Eigen in a CUDA translation unit.
#pragma once

#include <memory>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/core/cache_config.hpp"

namespace support {

/// The compositions that both sides know.
enum class Method { full, static_pca, hybrid, projector, codes };

struct Settings {
  Method method = Method::full;
  lowrankkv::PerHead basis;
  int sinks = 4, recent = 32;
  lowrankkv::DType coefficients = lowrankkv::DType::f16;
};

/// One sequence in a CPU cache.
class CpuSide {
 public:
  virtual ~CpuSide() = default;
  virtual void ingest(const std::vector<float>& key, const std::vector<float>& value) = 0;
  virtual void append_maintained(const std::vector<float>& key, const std::vector<float>& value) = 0;
  virtual void truncate(std::int64_t length) = 0;
  virtual int tail_length() const = 0;
  virtual void reconstruct(std::vector<float>& key, std::vector<float>& value) const = 0;
  virtual void attend(const std::vector<float>& query, std::vector<float>& out, std::vector<float>& lse) = 0;
};
std::unique_ptr<CpuSide> make_cpu_side(const Settings& settings, const lowrankkv::CacheConfig& config, const lowrankkv::LayerBasis& basis);

}  // namespace support
