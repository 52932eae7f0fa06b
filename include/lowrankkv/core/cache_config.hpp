// SPDX-License-Identifier: Apache-2.0
/// @file core/cache_config.hpp  The shape of one attention layer, and the capacities of its cache
/// with their validation.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/core/scalar.hpp"

LOWRANKKV_NAMESPACE_BEGIN

/// @brief Identifies a sequence. The engine chooses it; all layers of a model use the same one.
using SequenceId = std::int64_t;

/// @brief The shape of one attention layer.
struct CacheShape {
  int num_qo_heads = 0;  ///< query heads, a multiple of num_kv_heads
  int num_kv_heads = 0;  ///< heads of keys and values
  int head_dim = 0;      ///< channels of a head

  /// @brief Query heads that read one KV head: 1 is MHA, num_qo_heads is MQA.
  int group_size() const { return num_qo_heads / num_kv_heads; }
  friend bool operator==(const CacheShape&, const CacheShape&) = default;
};

/// @brief Capacities and storage of a cache. A value of 0 selects the default that the comment
/// names.
struct CacheConfig {
  CacheShape shape;                ///< of the layer
  int max_sequences = 1;           ///< that may exist at a time
  std::int64_t max_tokens = 4096;  ///< per sequence
  std::size_t page_bytes = 0;    ///< one size for all layers of a pool; default: 16 full-rank rows
  std::int64_t num_pages = 0;    ///< default: what max_sequences of max_tokens can ever need
  DType full_type = DType::f16;  ///< type of the rows kept at full rank (sinks, tail)
  /// 8: full rows outside the tail are stored in 8-bit codes (quantizer/full_rows.hpp); 0: as
  /// full_type.
  int full_row_bits = 0;
  DType epoch_type = DType::f16;  ///< type of the stored projection maps
  int flush_interval = 32;  ///< T: rows that leave the tail at a time; also the updater's period
  /// Rows. Default: recent + 2 T, so that T appends fit between two calls of maintain().
  int tail_capacity = 0;
  std::int64_t prefill_chunk = 0;     ///< tokens; default: the whole prompt is one chunk
  float softmax_scale = 0.0F;         ///< default: 1 / sqrt(head_dim)
  std::int64_t publish_interval = 0;  ///< rows between two epochs of a sequence; default: 4 x rank
  /// KeepEpochs: most rows per KV head that a flush of decoded rows re-projects to merge two
  /// epochs. The next epoch is published when the merge is done. Default: 16 flush_interval, at
  /// least 512.
  std::int64_t merge_rows = 0;
  /// Raise ValueError for NaN, Inf and values that full_type cannot hold. If false, such a V row
  /// may also reach earlier queries of its call. Coefficients of rows with a very large norm
  /// saturate in f16 either way; a coefficient is at most the row's norm.
  bool check_finite = true;
  /// Store, for certify(), what compression lost of each row as it arrived (rounded to full_type):
  /// 4 bytes per row and KV head.
  bool keep_residuals = false;
  RopeConfig rope{};  ///< Rope::pre: keys arrive pre-RoPE, see core/rope.hpp
  /// Cuda backend: most query tokens of a sequence per attend(). The workspace is sized for it.
  int max_query_tokens = 1;
  int num_threads = 1;  ///< Cpu backend: threads of the cache's own pool, unless one is passed in

  /// @brief The merge_rows that are used: no more than a list can have.
  std::int64_t most_merge_rows() const {
    const std::int64_t most = merge_rows > 0 ? merge_rows : 16 * std::int64_t{flush_interval};
    if (most > std::int64_t{1} << 31) return std::int64_t{1} << 31;
    return merge_rows == 0 && most < 512 ? 512 : most;
  }
  /// @brief The softmax scale that is used.
  float scale() const {
    return softmax_scale != 0.0F ? softmax_scale
                                 : 1.0F / std::sqrt(static_cast<float>(shape.head_dim));
  }
};

namespace detail {

/// Raises ShapeError, ValueError or CapacityError for a configuration that no cache can have.
inline void validate(const CacheConfig& config) {
  const CacheShape& shape = config.shape;
  if (shape.num_qo_heads < 1 || shape.num_kv_heads < 1 || shape.head_dim < 1) {
    fail<ShapeError>("shape: num_qo_heads ", shape.num_qo_heads, ", num_kv_heads ",
                     shape.num_kv_heads, ", head_dim ", shape.head_dim, "; all must be at least 1");
  }
  if (shape.num_qo_heads % shape.num_kv_heads != 0) {
    fail<ShapeError>("num_qo_heads ", shape.num_qo_heads, " is not a multiple of num_kv_heads ",
                     shape.num_kv_heads);
  }
  if (config.max_sequences < 1)
    fail<CapacityError>("max_sequences: at least 1, given ", config.max_sequences);
  if (config.max_tokens < 1 || config.max_tokens > (std::int64_t{1} << 31) - 1) {
    fail<CapacityError>("max_tokens: 1 to 2147483647, given ", config.max_tokens);
  }
  if (config.flush_interval < 1)
    fail<CapacityError>("flush_interval: at least 1, given ", config.flush_interval);
  if (config.max_query_tokens < 1)
    fail<CapacityError>("max_query_tokens: at least 1, given ", config.max_query_tokens);
  if (config.num_threads < 1)
    fail<CapacityError>("num_threads: at least 1, given ", config.num_threads);
  if (config.prefill_chunk < 0)
    fail<CapacityError>("prefill_chunk: at least 0, given ", config.prefill_chunk);
  if (config.publish_interval < 0)
    fail<CapacityError>("publish_interval: at least 0, given ", config.publish_interval);
  if (config.merge_rows < 0)
    fail<CapacityError>("merge_rows: at least 0, given ", config.merge_rows);
  if (!(std::isfinite(config.softmax_scale) && config.softmax_scale >= 0.0F)) {
    fail<ValueError>("softmax_scale: finite and at least 0, given ", config.softmax_scale);
  }
  if (config.rope.keys == Rope::pre)
    static_cast<void>(rope_frequencies(config.rope, shape.head_dim));
  if (config.full_row_bits != 0 && config.full_row_bits != 8)
    fail<ValueError>("full_row_bits: 0 or 8, given ", config.full_row_bits);
  constexpr std::int64_t limit = (std::int64_t{1} << 31) - 1;
  if (config.num_pages < 0 || config.num_pages > limit)
    fail<CapacityError>("num_pages: 0 to ", limit, ", given ", config.num_pages);
  if (config.page_bytes > static_cast<std::size_t>(limit))
    fail<CapacityError>("page_bytes: 0 to ", limit, ", given ", config.page_bytes);
}

/// Fills in the default tail_capacity for a token policy's recent window. Raises CapacityError if
/// the capacity is too small or a number is out of range.
inline void complete_tail(CacheConfig& config, int recent) {
  constexpr int limit = 1 << 24;
  if (recent < 0 || recent > limit) fail<CapacityError>("recent: 0 to ", limit, ", given ", recent);
  if (config.flush_interval > limit)
    fail<CapacityError>("flush_interval: 1 to ", limit, ", given ", config.flush_interval);
  if (config.tail_capacity == 0) config.tail_capacity = recent + 2 * config.flush_interval;
  if (config.tail_capacity <= recent + config.flush_interval) {
    fail<CapacityError>("tail_capacity: ", config.tail_capacity,
                        ", must exceed recent + flush_interval = ", recent + config.flush_interval);
  }
}

/// The configuration of a layer, of one for all layers or one a layer.
inline const CacheConfig& config_of(std::span<const CacheConfig> configs, std::size_t layer) {
  return configs[configs.size() == 1 ? 0 : layer];
}

/// Raises ShapeError unless there is one configuration, or one a layer; ShapeError or ValueError,
/// naming both values, if layers differ in what their sequences or their pool have in common.
inline void check_layer_configs(std::span<const CacheConfig> configs, std::size_t num_layers) {
  if (configs.size() != 1 && configs.size() != num_layers)
    fail<ShapeError>("configs: ", configs.size(), ", one for all layers or num_layers ", num_layers,
                     " expected");
  for (std::size_t layer = 1; layer < configs.size(); ++layer) {
    const CacheConfig &first = configs[0], &own = configs[layer];
    if (own.shape != first.shape) {
      fail<ShapeError>("shape: layer 0 has ", first.shape.num_qo_heads, " and ",
                       first.shape.num_kv_heads, " heads of ", first.shape.head_dim, ", layer ",
                       layer, " has ", own.shape.num_qo_heads, " and ", own.shape.num_kv_heads,
                       " of ", own.shape.head_dim, "; the same expected");
    }
    const auto same = [&](const char* name, auto value, auto of_layer) {
      if (value == of_layer) return;
      fail<ValueError>(name, ": layer 0 has ", value, ", layer ", layer, " has ", of_layer,
                       "; the same expected");
    };
    same("max_sequences", first.max_sequences, own.max_sequences);
    same("max_tokens", first.max_tokens, own.max_tokens);
    same("page_bytes", first.page_bytes, own.page_bytes);
    same("num_pages", first.num_pages, own.num_pages);
    same("flush_interval", first.flush_interval, own.flush_interval);
    same("tail_capacity", first.tail_capacity, own.tail_capacity);
    same("prefill_chunk", first.prefill_chunk, own.prefill_chunk);
    same("max_query_tokens", first.max_query_tokens, own.max_query_tokens);
    same("num_threads", first.num_threads, own.num_threads);
  }
}

/// Takes over the page size of a shared pool; raises ShapeError if the config asks for another one.
/// Without a pool, does nothing.
template <class Pool>
void adopt_page_bytes(CacheConfig& config, const Pool* pool) {
  if (pool == nullptr) return;
  if (config.page_bytes != 0 && config.page_bytes != pool->page_bytes())
    fail<ShapeError>("page_bytes: cache ", config.page_bytes, ", pool ", pool->page_bytes());
  config.page_bytes = pool->page_bytes();
}

}  // namespace detail
LOWRANKKV_NAMESPACE_END
