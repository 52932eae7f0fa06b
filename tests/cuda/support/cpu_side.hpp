// SPDX-License-Identifier: Apache-2.0
// The CPU backend as the CUDA tests see it: no Eigen in a CUDA translation unit.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/basis/per_head.hpp"
#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/core/calls.hpp"
#include "lowrankkv/core/descriptors.hpp"
#include "lowrankkv/quantizer/block_hadamard.hpp"
#include "lowrankkv/token_policy/compose.hpp"
#include "lowrankkv/token_policy/heavy_hitters.hpp"
#include "lowrankkv/token_policy/residual_outliers.hpp"
#include "lowrankkv/token_policy/sink_recent.hpp"
#include "lowrankkv/token_policy/snapkv.hpp"
#include "lowrankkv/updater/frequent_directions.hpp"
#include "lowrankkv/updater/oja.hpp"

namespace support {

/// The compositions that both sides know.
enum class Method {
  full,
  static_pca,
  hybrid,
  projector,
  codes,
  oja,
  oja_merging,
  oja_rotating,
  oja_int8,
  subspace_a,
  directions,
  oja_snapkv,
  directions_snapkv,
  oja_codes,
  oja_blocks,
  directions_codes,
  directions_outliers,
  directions_evicting,
  oja_outliers,
  oja_evicting,
  outliers,
  budgeted,
  budgeted_evicting,
  snapkv,
  snapkv_only,
  streaming,
  int8
};
inline constexpr const char* kMethodNames[] = {"full",
                                               "static_pca",
                                               "hybrid",
                                               "projector",
                                               "codes",
                                               "oja",
                                               "oja_merging",
                                               "oja_rotating",
                                               "oja_int8",
                                               "subspace_a",
                                               "directions",
                                               "oja_snapkv",
                                               "directions_snapkv",
                                               "oja_codes",
                                               "oja_blocks",
                                               "directions_codes",
                                               "directions_outliers",
                                               "directions_evicting",
                                               "oja_outliers",
                                               "oja_evicting",
                                               "outliers",
                                               "budgeted",
                                               "budgeted_evicting",
                                               "snapkv",
                                               "snapkv_only",
                                               "streaming",
                                               "int8"};

/// Whether bases move.
inline bool adapts(Method method) {
  return method >= Method::oja && method <= Method::oja_evicting;
}
/// Whether epochs begin when values say so.
inline bool device_epochs(Method method) {
  return method == Method::subspace_a || method == Method::directions ||
         method == Method::directions_codes || method == Method::directions_snapkv ||
         method == Method::directions_outliers || method == Method::directions_evicting;
}
/// Whether codes are of principal axes that bases are aligned to: both sides find the same axes as
/// far as energies differ (update/align_axes.cu).
inline bool aligns_axes(Method method) {
  return method == Method::oja_codes || method == Method::oja_blocks ||
         method == Method::directions_codes;
}
/// Whether rows of large errors stay full.
inline bool by_errors(Method method) {
  return method >= Method::directions_outliers && method <= Method::budgeted_evicting;
}
/// Whether rows are dropped, and whether it is their scores that decide.
inline bool by_scores(Method method) {
  return method == Method::oja_snapkv || method == Method::directions_snapkv ||
         method == Method::directions_evicting || method == Method::oja_evicting ||
         method == Method::budgeted_evicting || method == Method::snapkv ||
         method == Method::snapkv_only;
}
inline bool drops(Method method) { return by_scores(method) || method == Method::streaming; }
/// Whether coefficients are codes.
inline bool coded(Method method) {
  return method == Method::codes || method == Method::budgeted ||
         method == Method::budgeted_evicting || method == Method::int8 ||
         method == Method::oja_int8 || method == Method::oja_codes ||
         method == Method::oja_blocks || method == Method::directions_codes ||
         method == Method::subspace_a || method == Method::directions_snapkv ||
         method == Method::directions_outliers || method == Method::directions_evicting;
}

struct Settings {
  Method method = Method::full;
  lowrankkv::PerHead basis{.centred = false};
  int sinks = 4, recent = 32;
  lowrankkv::ResidualOutliers outliers;
  lowrankkv::SnapKV snapkv;
  float share = 1.0F;  ///< of a prompt, what an updater observes
  lowrankkv::ScoreScope scope = lowrankkv::ScoreScope::kv_head;  ///< whose scores choose it
  lowrankkv::FrequentDirections directions;
  lowrankkv::OjaForm form = lowrankkv::OjaForm::power;
  lowrankkv::DType coefficients = lowrankkv::DType::f16;
  bool pre_rope = false;  ///< keys are stored before RoPE
  int full_row_bits = 0;  ///< CacheConfig::full_row_bits
};

template <class Policy, class Member>
inline constexpr bool has_member = false;
template <class... Members, class Member>
inline constexpr bool has_member<lowrankkv::Compose<Members...>, Member> =
    (std::is_same_v<Members, Member> || ...);

/// Gives a cache's policies what the settings say of them.
template <class PolicySet>
PolicySet configured(PolicySet policies, const Settings& settings) {
  using Tokens = decltype(policies.token_policy);
  if constexpr (requires { policies.basis.centred; }) policies.basis = settings.basis;
  if constexpr (requires { policies.token_policy.sinks; })
    policies.token_policy = {settings.sinks, settings.recent};
  if constexpr (has_member<Tokens, lowrankkv::SinkRecent>)
    policies.token_policy.template get<lowrankkv::SinkRecent>() = {settings.sinks, settings.recent};
  if constexpr (has_member<Tokens, lowrankkv::ResidualOutliers>)
    policies.token_policy.template get<lowrankkv::ResidualOutliers>() = settings.outliers;
  if constexpr (has_member<Tokens, lowrankkv::SnapKV>)
    policies.token_policy.template get<lowrankkv::SnapKV>() = settings.snapkv;
  if constexpr (requires { policies.updater.chunk_length; }) policies.updater = settings.directions;
  if constexpr (requires { policies.updater.prefill_share; }) {
    policies.updater.prefill_share = settings.share;
    policies.updater.importance_scope = settings.scope;
    policies.updater.form = settings.form;
    if (settings.form == lowrankkv::OjaForm::printed_raw)
      policies.updater.prefill_rate = policies.updater.decode_rate = 1e-5F;  // of sums of squares
  }
  if constexpr (requires { policies.quantizer.type; })
    policies.quantizer.type = settings.coefficients;
  return policies;
}

/// One sequence in a CPU cache.
class CpuSide {
 public:
  virtual ~CpuSide() = default;
  /// @param window  queries of the last tokens; may be empty
  virtual void ingest(const std::vector<float>& key, const std::vector<float>& value,
                      const std::vector<float>& window,
                      lowrankkv::Prompt prompt = lowrankkv::Prompt::complete) = 0;
  virtual void append_maintained(const std::vector<float>& key,
                                 const std::vector<float>& value) = 0;
  virtual void truncate(std::int64_t length) = 0;
  /// Removes tokens; with pre-RoPE keys those behind move up.
  virtual void remove(std::int64_t first, std::int64_t count) = 0;
  virtual int tail_length() const = 0;
  virtual void reconstruct(std::vector<float>& key, std::vector<float>& value) const = 0;
  virtual std::int64_t publications() const = 0;
  virtual std::int64_t merges() const = 0;
  virtual std::int64_t rows_reprojected() const = 0;
  virtual void attend(const std::vector<float>& query, std::vector<float>& out,
                      std::vector<float>& lse) = 0;
};
std::unique_ptr<CpuSide> make_cpu_side(const Settings& settings,
                                       const lowrankkv::CacheConfig& config,
                                       const lowrankkv::LayerBasis& basis);

/// STAR-KV's parts in the compositions that both sides know.
struct StarSettings {
  bool outliers = false;   ///< rows of large errors stay full
  bool scored = false;     ///< joint codes, of the rows that scores keep
  bool joint = false;      ///< one latent for the values of heads_per_group heads
  bool coded = true;       ///< else coefficients are in f16
  bool bytes = false;      ///< joint codes of 8 bits
  bool allocated = false;  ///< joint codes whose channels have their own bits
  int heads_per_group = 0;
  lowrankkv::BlockHadamard quantizer;
  lowrankkv::PerHead basis{.centred = false};
  lowrankkv::SinkRecent tokens{4, 32};
  lowrankkv::ResidualOutliers errors;
  lowrankkv::SnapKV scores;
};
std::unique_ptr<CpuSide> make_star_side(const StarSettings& settings,
                                        const lowrankkv::CacheConfig& config,
                                        const lowrankkv::LayerBasis& basis);

/// How heavy hitters are stored: full rank; coefficients, or codes of their principal axes; the
/// same with joint values and codes of two blocks; coefficients, or codes, under bases that they
/// move.
enum class HeavyForm { full, plain, codes, joint, joint_codes, star, oja, oja_codes, directions };
struct HeavySettings {
  lowrankkv::HeavyHitters heavy;
  lowrankkv::SinkRecent sinks{0, 0};
  HeavyForm form = HeavyForm::full;
  int heads_per_group = 0;  ///< of joint values
  lowrankkv::DType coefficients = lowrankkv::DType::f16;
  bool scored = false;  ///< scores choose among the rows of prompts first
  lowrankkv::SnapKV scores{};
  float share = 1.0F;      ///< of a prompt's heavy hitters, what an updater observes
  int chunk_length = 150;  ///< of sketches
  bool exempts = false;    ///< errors say which rows are full
  lowrankkv::ResidualOutliers outliers{};
};

/// One sequence in a CPU cache that keeps heavy hitters, and sinks.
class HeavySide {
 public:
  virtual ~HeavySide() = default;
  virtual void ingest(const std::vector<float>& query, const std::vector<float>& key,
                      const std::vector<float>& value) = 0;
  virtual void append(const std::vector<float>& key, const std::vector<float>& value) = 0;
  virtual void maintain() = 0;
  virtual void accumulate(std::vector<float>& accumulated) = 0;  ///< [heads, tokens]
  virtual void truncate(std::int64_t length) = 0;
  virtual void remove(std::int64_t first, std::int64_t count) = 0;
  virtual int tail_length() const = 0;
  virtual void reconstruct(std::vector<float>& key, std::vector<float>& value) const = 0;
  virtual std::vector<lowrankkv::RowState> states(int head) const = 0;
  virtual std::size_t updater_bytes() const = 0;
  virtual std::int64_t publications() const = 0;
  virtual std::int64_t merges() const = 0;
};
/// Gives an updater what the settings say of it.
template <class Updater>
void configure(Updater& updater, const HeavySettings& settings) {
  if constexpr (requires { updater.prefill_share; }) updater.prefill_share = settings.share;
  if constexpr (requires { updater.chunk_length; }) updater.chunk_length = settings.chunk_length;
}
std::unique_ptr<HeavySide> make_heavy_side(const HeavySettings& settings,
                                           const lowrankkv::CacheConfig& config,
                                           const lowrankkv::LayerBasis& basis);

}  // namespace support
