// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/layer_calls.cuh  LayerCalls: makes and destroys a cache and its sequences, and
/// counts bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/compress/flushed_rows.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/layer/layer_memory.cuh"
#include "lowrankkv/cuda/layer/row_states.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"
#include "lowrankkv/cuda/sequence/fork.cuh"
#include "lowrankkv/cuda/tiles/page_size.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

template <class Layer>
Layer* LayerCalls<Layer>::make(const CacheConfig& config, LayerBasis&& basis,
                               const PolicySet& policies, std::shared_ptr<PagePool>&& pool,
                               LentMemory&& workspace) {
  const int device = current_device();
  if (pool != nullptr) check_lent_memory("page pool", pool->memory(), device);
  check_lent_memory("workspace", workspace.data, device);
  auto layer = std::make_unique<Layer>(config, basis, policies, std::move(pool), workspace);
  // Makes scratch memory for a flush of all sequences at once, so that flushes do not allocate.
  const std::int64_t scored = layer->state.max_rows(layer->state.tables().scored);
  flush_scratch(*layer, static_cast<std::size_t>(layer->config.max_sequences), scored);
  return layer.release();
}
template <class Layer>
void LayerCalls<Layer>::destroy(Layer* layer) {
  delete layer;
}
template <class Layer>
void LayerCalls<Layer>::check(const CacheConfig& config, const LayerBasis& basis,
                              const PolicySet& policies) {
  const CacheConfig checked = Layer::checked(config, basis, policies, nullptr);
  static_cast<void>(Layer::tiles_of(checked, basis, policies));
}
template <class Layer>
PoolSize LayerCalls<Layer>::pool_size(Configs configs, Bases bases, const PolicySet& policies) {
  ::lowrankkv::detail::check_layer_configs(configs, bases.size());
  std::vector<LayerTiles> layers;
  for (std::size_t layer = 0; layer < bases.size(); ++layer) {
    const CacheConfig& config = ::lowrankkv::detail::config_of(configs, layer);
    layers.push_back(Layer::tiles_of(Layer::checked(config, bases[layer], policies, nullptr),
                                     bases[layer], policies));
  }
  return pool_of(configs.front(), std::move(layers), Layer::most_rows(configs.front(), policies));
}
template <class Layer>
LentMemory LayerCalls<Layer>::make_shared(Configs configs, Bases bases, const PolicySet& policies) {
  ::lowrankkv::detail::check_layer_configs(configs, bases.size());
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < bases.size(); ++layer) {
    const CacheConfig& config = ::lowrankkv::detail::config_of(configs, layer);
    bytes = (std::max)(bytes, workspace_bytes(config, bases[layer], policies));
  }
  const auto memory = std::make_shared<DeviceArray<std::uint8_t>>(bytes);
  return {memory->data(), bytes, memory};
}
template <class Layer>
std::size_t LayerCalls<Layer>::workspace_bytes(const CacheConfig& config, const LayerBasis& basis,
                                               const PolicySet& policies) {
  return Layer::decode_bytes(Layer::checked(config, basis, policies, nullptr), basis, policies);
}
template <class Layer>
std::size_t LayerCalls<Layer>::workspace_bytes(const Layer& layer) {
  return layer.state.workspace().decode_bytes();
}
template <class Layer>
::lowrankkv::detail::SequenceTable& LayerCalls<Layer>::sequences(Layer& layer) {
  return layer.sequences;
}
template <class Layer>
const ::lowrankkv::detail::SequenceTable& LayerCalls<Layer>::sequences(const Layer& layer) {
  return layer.sequences;
}
template <class Layer>
const CacheConfig& LayerCalls<Layer>::config(const Layer& layer) {
  return layer.config;
}
template <class Layer>
const PagePool& LayerCalls<Layer>::pool(const Layer& layer) {
  return layer.state.pool();
}
template <class Layer>
CacheStatistics LayerCalls<Layer>::statistics(const Layer& layer) {
  CacheStatistics all = layer.statistics;
  if constexpr (Layer::device_epochs) {
    const DeviceScope on(layer.state.device());
    count_device_epochs(layer.state, all);
  }
  return all;
}
template <class Layer>
std::uint32_t LayerCalls<Layer>::faults(const Layer& layer) {
  const DeviceScope on(layer.state.device());
  std::uint32_t count = 0;
  ::lowrankkv::cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  ::lowrankkv::cuda::check(
      cudaMemcpy(&count, layer.state.tables().faults, sizeof(count), cudaMemcpyDeviceToHost),
      "cudaMemcpy");
  return count;
}

template <class Layer>
void LayerCalls<Layer>::create(Layer& layer, SequenceId seq, cudaStream_t stream) {
  const DeviceScope on("create", layer.state.device(), stream);
  refuse_capture("create", stream);
  AddedSlot<Layer> added(layer, seq);
  layer.state.clear(added.slot(), stream);
  added.keep();
}
template <class Layer>
void LayerCalls<Layer>::fork(Layer& layer, SequenceId source, SequenceId target,
                             cudaStream_t stream) {
  const DeviceScope on("fork", layer.state.device(), stream);
  refuse_capture("fork", stream);
  const int from = idle_slot(layer, source);
  AddedSlot<Layer> added(layer, from, target);
  fork_sequence(layer.state, from, added.slot(), stream);
  added.keep();
}
template <class Layer>
void LayerCalls<Layer>::erase(Layer& layer, SequenceId seq, cudaStream_t stream) {
  const DeviceScope on("erase", layer.state.device(), stream);
  refuse_capture("erase", stream);
  const int slot = layer.sequences.find_any(seq);
  ::lowrankkv::detail::ChangedSequences changed(layer.sequences, {&seq, 1});
  layer.prompts.end(slot);
  layer.state.clear(slot, stream);
  changed.done();
  layer.sequences.remove(seq);
}
template <class Layer>
std::int64_t LayerCalls<Layer>::num_tokens(const Layer& layer, SequenceId seq) {
  return layer.tokens_of(layer.sequences.find(seq));
}
template <class Layer>
int LayerCalls<Layer>::tail_length(const Layer& layer, SequenceId seq) {
  return layer.state.sequence(layer.sequences.find(seq)).tail_length;
}
template <class Layer>
MemoryUsage LayerCalls<Layer>::memory(const Layer& layer, SequenceId seq) {
  const DeviceScope on(layer.state.device());
  const int slot = layer.sequences.find_any(seq);
  return sequence_memory(layer.state, slot, Layer::listed(), layer.prompts.of(slot).bytes());
}
template <class Layer>
MemoryUsage LayerCalls<Layer>::memory(const Layer& layer) {
  MemoryUsage usage;
  layer.sequences.for_each([&](SequenceId seq, int) { usage += memory(layer, seq); });
  usage.shared_bytes = layer.state.shared_map_bytes();
  const std::size_t in_use = usage.pending_bytes + usage.tail_bytes + usage.epoch_bytes +
                             usage.updater_bytes + usage.residual_bytes;
  usage.reserved_bytes = layer.state.reserved_bytes() + layer.prompts.bytes() - in_use +
                         layer.state.pool().idle_bytes();
  return usage;
}
template <class Layer>
int LayerCalls<Layer>::tokens_per_page(const Layer& layer, int kv_head) {
  return ::lowrankkv::cuda::tokens_per_page(layer.state, kv_head);
}
template <class Layer>
std::size_t LayerCalls<Layer>::bytes_for(const Layer& layer, std::int64_t tokens) {
  return ::lowrankkv::cuda::bytes_for(layer.state, tokens);
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
