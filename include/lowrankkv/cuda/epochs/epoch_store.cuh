// SPDX-License-Identifier: Apache-2.0
/// @file cuda/epochs/epoch_store.cuh  Device memory of the sequences' epochs: their maps, their
/// working bases, and which epochs are in use.
///
/// From counts of rows, the host decides when an epoch is published, which segments merge, and
/// which memory maps get. Kernels write the maps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "lowrankkv/core/cache_config.hpp"
#include "lowrankkv/cuda/epochs/axis_scales.cuh"
#include "lowrankkv/cuda/epochs/host_epochs.cuh"
#include "lowrankkv/cuda/epochs/metric_bases.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The maps of all epochs of a layer, and the working bases that updaters move.
class EpochStore {
 public:
  EpochStore() = default;
  EpochStore(const CacheConfig& config, const LayerBasis& basis, const LayerMaps& calibrated,
             const LayerTiles& tiles, EpochLimits limits)
      : limits_(limits),
        slots_per_sequence_(limits.own == 0 ? 0 : limits.own + 2),
        heads_(config.shape.num_kv_heads),
        head_dim_(config.shape.head_dim),
        type_(config.epoch_type) {
    std::vector<HeadMaps> table = calibrated.heads();
    if (limits.own > 0) {
      std::size_t bytes = 0;
      for (std::size_t head = 0; head < table.size(); ++head) {
        const HeadMaps& maps = table[head];
        for (const Part which : {Part::key, Part::value}) {
          const PartMaps* part = &maps.of(which);
          const bool two = MetricStore::has_metric(basis.heads[head], which);
          most_ = (std::max)(most_, static_cast<int>(part->rank));
          bytes += own_bytes(*part, two);
          code_bytes_ += code_bytes(*part);
          most_reader_ = (std::max)(most_reader_, map_size(part->width, head_dim_));
          if (part->mean != nullptr)
            mean_bytes_ += static_cast<std::size_t>(head_dim_) * size_of(type_);
          const std::size_t basis_bytes = static_cast<std::size_t>(part->rank) *
                                          static_cast<std::size_t>(head_dim_) * size_of(type_);
          basis_bytes_ += basis_bytes;
          map_bytes_ += (two ? 2 : 1) * basis_bytes;
        }
        if (maps.key_up.operands != nullptr)
          key_up_bytes_ += key_up_bytes(maps.key_up, tiles.orders);
        most_key_up_units_ = (std::max)(most_key_up_units_, static_cast<int>(maps.key_up.units));
      }
      own_size_ = bytes + key_up_bytes_;
      const std::size_t epochs = static_cast<std::size_t>(config.max_sequences) *
                                 static_cast<std::size_t>(slots_per_sequence_);
      own_ = DeviceArray<std::uint8_t>(epochs * own_size_);
      std::uint8_t* next = own_.data();
      for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
        for (int head = 0; head < heads_; ++head) {
          HeadMaps maps = table[static_cast<std::size_t>(head)];
          for (const Part which : {Part::key, Part::value}) {
            PartMaps* part = which == Part::key ? &maps.key : &maps.value;
            const bool two =
                MetricStore::has_metric(basis.heads[static_cast<std::size_t>(head)], which);
            const bool coded = has_reader(*part);
            const std::size_t size = own_bytes(*part, two), codes = code_bytes(*part);
            part->encoder = {next, type_};
            part->decoder = {two ? next + map_bytes(*part) : next, type_};
            part->offset = reinterpret_cast<const float*>(next + (two ? 2 : 1) * map_bytes(*part));
            if (!coded) {
              part->reader = part->decoder;
            } else {
              std::uint8_t* at = next + size - codes;
              if (part->inverse_steps != nullptr)
                part->inverse_steps = reinterpret_cast<const float*>(at);
              part->reader_scale = reinterpret_cast<const float*>(at + rank_bytes(*part));
              part->reader = {at + rank_bytes(*part) + 16, part->reader.type};
            }
            next += size;
          }
          if (maps.key_up.operands != nullptr) {
            const std::size_t size = key_up_bytes(maps.key_up, tiles.orders);
            maps.key_up.operands = reinterpret_cast<const uint4*>(next);
            next += size;
            if (tiles.orders) {  // else all epochs share scale and means
              maps.key_up.means = reinterpret_cast<const uint2*>(next - mean_words());
              maps.key_up.scales = reinterpret_cast<const float2*>(next - mean_words() - 16);
            }
          }
          table.push_back(maps);
        }
      }
      used_.resize(epochs, false);
      make_bases(config, basis);
      metrics_ = MetricStore(basis);
      axes_ = AxisStore(basis, tiles, most_, head_dim_);
    }
    maps_ = DeviceArray<HeadMaps>(table);
  }

  const HeadMaps* maps() const { return maps_.data(); }
  bool adapts() const { return limits_.own > 0; }
  /// @brief Whether a merge is done in the call that begins it: with a prompt, and under RotateNow.
  /// Otherwise flushes do a part of it each.
  bool merges_at_once(Phase phase) const {
    return phase == Phase::prefill || limits_.rotates_calibrated_rows;
  }
  /// @brief Most segments of a sequence.
  int max_segments() const { return limits_.segments(); }
  const WorkingBases& bases() const { return bases_; }
  /// @brief The metrics in which bases move.
  BasisMetrics metrics() const { return metrics_.get(); }
  const MetricStore& metric_store() const { return metrics_; }
  /// @brief Data for codes whose channels must be principal axes of moving bases; any(): whether
  /// there are such codes.
  const AxisStore& axis_store() const { return axes_; }
  const AxisScales& axes() const { return axes_.get(); }
  int most() const { return most_; }
  /// @brief Most units of 16 of a head's key up-projection.
  int most_key_up_units() const { return most_key_up_units_; }
  /// @brief Most elements of a reader of codes.
  int most_reader() const { return most_reader_; }
  /// @brief Bytes of one epoch's maps over all heads: compressed rows must outweigh them before it
  /// is published. Counted as on the CPU, which needs no further maps to up-project keys.
  std::size_t epoch_bytes() const { return map_bytes_ + mean_bytes_; }
  /// @brief Bytes of a sequence's own epochs, with the readers of codes and the up-projections of
  /// pre-RoPE keys.
  std::size_t epoch_bytes(const HostEpochs& epochs) const {
    return (map_bytes_ + code_bytes_ + key_up_bytes_) * static_cast<std::size_t>(count_own(epochs));
  }
  /// @brief Bytes of a sequence's working bases; 0 until they move.
  std::size_t updater_bytes(const HostEpochs& epochs) const {
    return epochs.moved ? basis_bytes_ : 0;
  }
  std::size_t reserved_bytes() const {
    return axes_.bytes() + own_.bytes() + moved_.bytes() + start_.bytes() + maps_.bytes();
  }

  bool device_epochs() const { return limits_.device_epochs; }
  int slots_per_sequence() const { return slots_per_sequence_; }
  /// @brief Index in LayerView::maps of a slot's i-th own epoch.
  std::int32_t epoch_of(int slot, int i) const { return slot * slots_per_sequence_ + i + 1; }
  /// @brief Device memory of all own epochs of a slot, all_own_size() bytes.
  std::uint8_t* all_own(int slot) const { return own_epoch(epoch_of(slot, 0)); }
  std::size_t all_own_size() const {
    return own_size_ * static_cast<std::size_t>(slots_per_sequence_);
  }
  /// @brief Enqueues a copy that makes the calibrated bases a slot's working bases.
  void begin_bases(int slot, cudaStream_t stream) const {
    check(cudaMemcpyAsync(bases_of(slot), start_.data(), bases_size(), cudaMemcpyDeviceToDevice,
                          stream),
          "bases");
  }

  /// @brief Reserves a free epoch of a slot. @return its index in LayerView::maps
  /// @throws CapacityError if all are in use
  std::int32_t take(int slot) {
    for (int i = 0; i < slots_per_sequence_; ++i) {
      const std::size_t index = static_cast<std::size_t>(slot * slots_per_sequence_ + i);
      if (used_[index]) continue;
      used_[index] = true;
      return static_cast<std::int32_t>(index) + 1;
    }
    ::lowrankkv::detail::fail<CapacityError>("epochs: a sequence has ", slots_per_sequence_,
                                             ", all in use");
    return 0;
  }
  /// @brief Frees the epochs of a slot that no segment uses, except the one under which rows are
  /// written.
  void free_unused(int slot, const HostEpochs& epochs) {
    for (int i = 0; i < slots_per_sequence_; ++i) {
      const std::int32_t epoch = slot * slots_per_sequence_ + i + 1;
      const bool needed =
          epoch == epochs.current ||
          std::any_of(epochs.segments.begin(), epochs.segments.end(),
                      [&](const HostSegment& segment) { return segment.epoch == epoch; });
      if (!needed) used_[static_cast<std::size_t>(epoch - 1)] = false;
    }
  }
  /// @brief Enqueues copies of a sequence's own epochs and working bases for a fork, and makes
  /// `epochs` refer to the copies of slot `target`. Does nothing if bases never move, or epochs are
  /// device-managed.
  /// @throws CapacityError if `target` has no free epoch
  void fork(HostEpochs& epochs, int source, int target, cudaStream_t stream) {
    if (!adapts() || device_epochs()) return;
    std::vector<std::pair<std::int32_t, std::int32_t>> copies{{0, 0}};
    const auto copy_of = [&](std::int32_t epoch) {
      for (const auto& [from, to] : copies) {
        if (from == epoch) return to;
      }
      const std::int32_t copy = take(target);
      check(cudaMemcpyAsync(own_epoch(copy), own_epoch(epoch), own_size_, cudaMemcpyDeviceToDevice,
                            stream),
            "fork");
      copies.emplace_back(epoch, copy);
      return copy;
    };
    for (HostSegment& segment : epochs.segments) segment.epoch = copy_of(segment.epoch);
    epochs.current = copy_of(epochs.current);
    if (epochs.moved)
      check(cudaMemcpyAsync(bases_of(target), bases_of(source), bases_size(),
                            cudaMemcpyDeviceToDevice, stream),
            "fork");
  }
  /// @brief Device memory of one own epoch of a sequence, own_size() bytes.
  std::uint8_t* own_epoch(std::int32_t epoch) const {
    return own_.data() + static_cast<std::size_t>(epoch - 1) * own_size_;
  }
  std::size_t own_size() const { return own_size_; }
  /// @brief Device memory of a slot's working bases, bases_size() bytes.
  std::uint8_t* bases_of(int slot) const {
    return moved_.data() + static_cast<std::size_t>(slot) * bases_size();
  }
  std::size_t bases_size() const { return start_.bytes(); }
  /// @brief The segment that must merge to make room for a new one, as
  /// cuda::merge_for_new_segment() chooses it; -1: none.
  int merge_for_new_segment(const HostEpochs& epochs) const {
    return cuda::merge_for_new_segment(static_cast<int>(epochs.segments.size()), limits_.own,
                                       limits_.rotates_calibrated_rows,
                                       [&](int index) -> const HostSegment& {
                                         return epochs.segments[static_cast<std::size_t>(index)];
                                       });
  }

 private:
  /// Bytes of one map of a basis. It encodes rows and reads tiles, whose channels are its columns.
  /// In a metric, there are two such maps.
  std::size_t map_bytes(const PartMaps& part) const {
    return (static_cast<std::size_t>(map_size((std::max)(part.rank, part.width), head_dim_)) *
                size_of(type_) +
            15) /
           16 * 16;
  }
  std::size_t own_bytes(const PartMaps& part, bool two) const {
    return (two ? 2 : 1) * map_bytes(part) + rank_bytes(part) + code_bytes(part);
  }
  static std::size_t rank_bytes(const PartMaps& part) {
    return (static_cast<std::size_t>(part.rank) * sizeof(float) + 15) / 16 * 16;
  }
  /// Whether codes have a reader apart from the decoder.
  static bool has_reader(const PartMaps& part) {
    return part.channels != nullptr && part.reader.data != part.decoder.data;
  }
  /// Bytes of the steps, the reader and its scale.
  std::size_t code_bytes(const PartMaps& part) const {
    return !has_reader(part)
               ? 0
               : rank_bytes(part) + 16 +
                     static_cast<std::size_t>(map_size(part.width, head_dim_)) * sizeof(float);
  }
  std::size_t mean_words() const {
    return (static_cast<std::size_t>(head_dim_ / 4) * sizeof(uint2) + 15) / 16 * 16;
  }
  std::size_t key_up_bytes(const KeyUpMap& key_up, bool orders) const {
    return static_cast<std::size_t>(key_up.units * (head_dim_ / 16) * 32) * sizeof(uint4) +
           (orders ? 16 + mean_words() : 0);
  }
  int count_own(const HostEpochs& epochs) const {
    std::vector<std::int32_t> own;
    for (const HostSegment& segment : epochs.segments) own.push_back(segment.epoch);
    own.push_back(epochs.current);
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    return static_cast<int>(own.size()) - (own.front() == 0 ? 1 : 0);
  }
  void make_bases(const CacheConfig& config, const LayerBasis& basis) {
    const std::size_t part_size =
                          static_cast<std::size_t>(most_) * static_cast<std::size_t>(head_dim_),
                      layer_size = 2 * static_cast<std::size_t>(heads_) * part_size;
    std::vector<std::uint8_t> start(layer_size * size_of(type_));
    for (int head = 0; head < heads_; ++head) {
      const HeadBasis& maps = basis.heads[static_cast<std::size_t>(head)];
      for (const bool key : {true, false}) {
        const int rank = key ? maps.key_rank : maps.value_rank;
        const std::vector<float> own =
            MetricStore::working_basis(maps, key ? Part::key : Part::value, head_dim_);
        for (int channel = 0; channel < rank; ++channel) {
          for (int row = 0; row < head_dim_; ++row) {
            const float value = own[static_cast<std::size_t>(row * rank + channel)];
            const std::size_t index =
                static_cast<std::size_t>(head * 2 + (key ? 0 : 1)) * part_size +
                static_cast<std::size_t>(channel * head_dim_ + row);
            write_as(type_, value, start.data() + index * size_of(type_));
          }
        }
      }
    }
    start_ = DeviceArray<std::uint8_t>(start);
    moved_ =
        DeviceArray<std::uint8_t>(static_cast<std::size_t>(config.max_sequences) * start.size());
    bases_ = {moved_.data(), start_.data(), most_, type_};
  }

  EpochLimits limits_;
  int slots_per_sequence_ = 0, heads_ = 0, head_dim_ = 0, most_ = 1, most_key_up_units_ = 0,
      most_reader_ = 1;
  DType type_ = DType::f16;
  std::size_t own_size_ = 0, basis_bytes_ = 0, map_bytes_ = 0, mean_bytes_ = 0, key_up_bytes_ = 0,
              code_bytes_ = 0;
  DeviceArray<std::uint8_t> own_, moved_, start_;
  DeviceArray<HeadMaps> maps_;
  std::vector<bool> used_;
  WorkingBases bases_;
  MetricStore metrics_;
  AxisStore axes_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
