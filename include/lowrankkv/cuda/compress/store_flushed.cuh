// SPDX-License-Identifier: Apache-2.0
/// @file cuda/compress/store_flushed.cuh  The launches that store flushed rows, full or compressed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/scores/snapkv_scores.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/state/row_source.cuh"
#include "lowrankkv/cuda/store/store_joint.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"
#include "lowrankkv/cuda/update/compress_scratch.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The arguments of a call of compress().
struct CompressCall {
  const RowSource& source;
  const CompressScratch& scratch;
  Phase phase;
  const ScoreQueries& queries;
  cudaStream_t stream;

  bool of_tails() const { return source.packed == nullptr; }
  /// Accumulated scores of a prompt's rows; null: use those of the tails.
  const float* accumulated_scores() const {
    return of_tails() ? nullptr : scratch.accumulated_scores;
  }
};

/// Stores flushed rows, at most `most` per sequence: at their list's end, or in staging tiles.
template <StoreForm form, RowPath path, class Layer>
void launch_store(const Layer& layer, const CompressCall& call, const FlushBatch& flushed,
                  const RowOrder& order, const StagingTiles& staging, std::int64_t most,
                  DType type) {
  constexpr int groups = form == StoreForm::codes ? Layer::scale_groups : 1;
  const int tile_bytes = form == StoreForm::codes ? layer.state.tiles().max_head_tile_bytes() : 0;
  const int dim = layer.config.shape.head_dim;
  const std::size_t bytes =
      store_bytes(form, path, dim, layer.state.most_rank(), tile_bytes, groups);
  // One piece more, since a list may end inside a tile.
  const dim3 grid(static_cast<unsigned>((most + kStoreRows - 1) / kStoreRows + 1),
                  static_cast<unsigned>(layer.config.shape.num_kv_heads),
                  static_cast<unsigned>(flushed.count));
  launch_kernel(store_rows_kernel<form, path, groups>, grid, kStoreThreads, bytes,
                "store_rows_kernel", call.stream, layer.state.tables(), call.source, flushed, order,
                staging, type);
}

/// Stores flushed rows at the ends of the full lists.
template <class Layer>
void store_full(const Layer& layer, const CompressCall& call, const FlushBatch& flushed,
                const RowOrder& order, std::int64_t most) {
  launch_store<StoreForm::full, RowPath::words>(layer, call, flushed, order, {}, most,
                                                layer.config.full_type);
}

/// Stores flushed rows, compressed, at the ends of the compressed lists or in staging tiles.
template <class Layer>
void store_compressed(const Layer& layer, const CompressCall& call, const FlushBatch& flushed,
                      const RowOrder& order, const StagingTiles& staging, std::int64_t most) {
  if constexpr (Layer::joins) {
    store_latents<Layer::coded_groups>(layer.state, flushed, call.source, most, order, staging,
                                       call.scratch.latents, call.stream);
  }
  const bool wide = layer.config.epoch_type != layer.config.full_type;
  const RowPath narrow = order.rows != nullptr ? RowPath::staged : RowPath::words;
  with_path(wide ? RowPath::wide : narrow, [&](auto path) {
    constexpr bool codes = Layer::Codec::form == CodedForm::codes;
    constexpr StoreForm form = codes ? StoreForm::codes : StoreForm::coefficients;
    launch_store<form, path()>(layer, call, flushed, order, staging, most,
                               layer.state.tiles().coded_type);
  });
}

}  // namespace detail
}  // namespace cuda
LOWRANKKV_NAMESPACE_END
