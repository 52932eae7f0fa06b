// SPDX-License-Identifier: Apache-2.0
/// @file cuda/maps/head_maps.cuh  Device maps of a layer's KV heads: encoders, decoders, and the
/// readers that attention applies to the channels of tiles.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/cuda/maps/key_up_projection.cuh"
#include "lowrankkv/cuda/maps/rope.cuh"
#include "lowrankkv/cuda/runtime/device.cuh"
#include "lowrankkv/cuda/runtime/forms.cuh"
#include "lowrankkv/cuda/tiles/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Index of element (channel, row channel) of a map, laid out as tensor-core operands
/// [channels / 16, head_dim / 8, 32 lanes, 4]. The four elements of a lane are row channels 2t and
/// 2t + 1 of channel g, then those of channel g + 8 (t = lane % 4, g = lane / 4): the order of
/// packed rows.
__host__ __device__ constexpr int place_in_map(int channel, int row, int head_dim) {
  return ((channel / 16 * (head_dim / 8) + row / 8) * 32 + channel % 8 * 4 + row % 8 / 2) * 4 +
         channel % 16 / 8 * 2 + row % 2;
}
/// @brief Number of elements of a map of so many channels.
__host__ __device__ constexpr int map_size(int channels, int head_dim) {
  return (channels + 15) / 16 * 16 * head_dim;
}

/// @brief Writes a number as `type`, in host memory.
inline void write_as(DType type, float value, std::uint8_t* target) {
  std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  if (type == DType::f16) word = to_half(value).bits;
  if (type == DType::bf16) word = to_bfloat16(value).bits;
  for (std::size_t byte = 0; byte < size_of(type); ++byte)
    target[byte] = static_cast<std::uint8_t>(word >> (8 * byte));
}

namespace detail {

/// Four adjacent elements of a map in f32, or in 16 bits.
template <bool wide>
using MapWords = std::conditional_t<wide, float4, uint2>;

}  // namespace detail

/// @brief The largest norm that a row of a decoder R^-1 U can have for any orthonormal U: the
/// largest row norm of R^-1; 1 in the plain metric.
/// @param inverse  R^-1 [head_dim, head_dim], or empty
inline float longest_decoder_row(const std::vector<float>& inverse, int head_dim) {
  double longest = inverse.empty() ? 1.0 : 0.0, square = 0.0;
  for (std::size_t i = 0; i < inverse.size(); ++i) {
    square = (i % static_cast<std::size_t>(head_dim) == 0 ? 0.0 : square) +
             static_cast<double>(inverse[i]) * static_cast<double>(inverse[i]);
    longest = (std::max)(longest, square);
  }
  return static_cast<float>(std::sqrt(longest));
}

/// @brief A map in device memory. Elements are at place_in_map().
struct MapElements {
  const void* data = nullptr;
  DType type = DType::f32;

  /// @brief Elements [4 index, 4 index + 4), as f32.
  __device__ __forceinline__ float4 quad(int index) const {
    if (type == DType::f32) return __ldg(static_cast<const float4*>(data) + index);
    return widened(__ldg(static_cast<const uint2*>(data) + index));
  }
  /// @brief Elements [4 index, 4 index + 4) as f32, of a map whose width is known at compile time.
  /// @tparam wide  f32, else 16 bits
  template <bool wide>
  __device__ __forceinline__ float4 quad_of(int index) const {
    if constexpr (wide)
      return __ldg(static_cast<const float4*>(data) + index);
    else
      return widened(__ldg(static_cast<const uint2*>(data) + index));
  }
  /// @brief Converts four adjacent elements of a 16-bit map to f32.
  __device__ __forceinline__ float4 widened(const uint2& words) const {
    if (type == DType::bf16)
      return {__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000U),
              __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000U)};
    const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&words.x)),
                 high = __half22float2(*reinterpret_cast<const __half2*>(&words.y));
    return {low.x, low.y, high.x, high.y};
  }
  /// @brief One element as f32.
  __device__ float element(int channel, int row, int head_dim) const {
    const int place = place_in_map(channel, row, head_dim);
    return type == DType::f32
               ? __ldg(static_cast<const float*>(data) + place)
               : from_bits(type, __ldg(static_cast<const std::uint16_t*>(data) + place));
  }
  /// @brief Writes one element of a sequence's own map. @return the element as it is stored
  __device__ float put(int channel, int row, int head_dim, float value) const {
    const int place = place_in_map(channel, row, head_dim);
    if (type == DType::f32) {
      static_cast<float*>(const_cast<void*>(data))[place] = value;
      return value;
    }
    const std::uint16_t bits = to_bits(type, value);
    static_cast<std::uint16_t*>(const_cast<void*>(data))[place] = bits;
    return from_bits(type, bits);
  }
};

/// @brief Maps of one head's keys, or of its values. Where tiles hold codes, the reader is f32,
/// since it includes the quantizer's steps. Other maps keep their storage type.
struct PartMaps {
  MapElements encoder;  ///< rows to coefficients
  MapElements reader;   ///< channels of tiles to rows; may be the decoder
  MapElements decoder;  ///< coefficients to rows; may be the encoder
  /// A power of two that brings the reader's largest number to about 2^8, so that the f16 parts it
  /// is split into are far from the smallest f16.
  const float* reader_scale = nullptr;
  const float* inverse_steps = nullptr;   ///< [rank]: 1 / the quantizer's steps; null: ones
  const float* offset = nullptr;          ///< [rank]: the encoded mean, in steps
  const float* mean = nullptr;            ///< [head_dim] or null
  const TileChannel* channels = nullptr;  ///< [width]; null for plain tiles
  const std::uint8_t* bits = nullptr;     ///< [rank]: of the codes; null for plain tiles
  std::int32_t rank = 0;
  std::int32_t width = 0;        ///< channels of tiles, padding included
  std::int32_t coded = 0;        ///< coefficients with bits
  std::int32_t first_coded = 0;  ///< coded coefficients of the first scale group
  ScaleKind gains = ScaleKind::norm_log8;
  float reference[2] = {1.0F, 1.0F};  ///< by scale group
  float norm_weights[9] = {};         ///< CodeLayout::norm_weights

  /// @brief Converts the encoder's result to a coefficient in steps: times x, plus y. Both are 0
  /// for channels beyond the rank.
  __device__ __forceinline__ float2 to_steps(int channel) const {
    if (channel >= rank) return {0.0F, 0.0F};
    return {inverse_steps == nullptr ? 1.0F : __ldg(inverse_steps + channel),
            offset == nullptr ? 0.0F : -__ldg(offset + channel)};
  }
};

/// @brief Maps of one KV head.
struct HeadMaps {
  PartMaps key, value;
  KeyUpMap key_up;  ///< of pre-RoPE keys; else empty
  __host__ __device__ const PartMaps& of(Part part) const {
    return part == Part::key ? key : value;
  }
};

/// @brief The calibrated maps of a layer, owned: one block of device memory.
class LayerMaps {
 public:
  LayerMaps() = default;
  /// @brief Builds the maps on the host and uploads them. Allocates.
  /// @param tiles  [heads, 2]: keys, values
  /// @param scales  [heads, 2]: the quantizer's step of every coefficient; empty: ones
  /// @param type  to which maps are rounded
  /// @param rotary  with pre-RoPE keys, key up-projections are built too
  /// @param coded_type  of plain tiles
  /// @param moves  whether bases move
  LayerMaps(const LayerBasis& basis, const std::vector<PartTiles>& tiles,
            const std::vector<std::vector<float>>& scales, const std::vector<HeadTiles>& layouts,
            int head_dim, DType type, const Rotary& rotary, DType coded_type, bool moves) {
    std::vector<std::uint8_t> bytes;
    std::vector<TileChannel> channels;
    struct Offsets {
      std::size_t encoder, reader, decoder, steps, offset, mean, bits, channels;
      int width;
      DType reader_type;
    };
    std::vector<Offsets> offsets;
    // By part. Not in the checksum: where bases move, the scales follow from the metric.
    std::vector<float> reader_scales;
    constexpr std::size_t none = ~std::size_t{0};
    const auto append = [&](const std::vector<float>& values, DType as) {
      const std::size_t at = bytes.size();
      bytes.resize((at + values.size() * size_of(as) + 15) / 16 * 16);
      for (std::size_t i = 0; i < values.size(); ++i)
        write_as(as, values[i], bytes.data() + at + i * size_of(as));
      return at;
    };
    for (std::size_t part = 0; part < tiles.size(); ++part) {
      const HeadBasis& head = basis.heads[part / 2];
      const bool key = part % 2 == 0, coded = !tiles[part].channels.empty();
      const int rank = key ? head.key_rank : head.value_rank;
      const std::vector<TileChannel>& places =
          tiles[part].readers.empty() ? tiles[part].channels : tiles[part].readers;
      // Codes without bits have no channels.
      const int width = layouts[part / 2].codes ? static_cast<int>(places.size())
                                                : (rank + kPlainUnit - 1) / kPlainUnit * kPlainUnit;
      const std::vector<float>& down = key ? head.key_down : head.value_down;
      const std::vector<float>& mean = key ? head.key_mean : head.value_mean;
      const std::vector<float>& steps = scales[part];
      const auto step = [&](int channel) {
        return steps.empty() ? 1.0F : steps[static_cast<std::size_t>(channel)];
      };
      const auto encode = [&](int row, int channel) {
        return round_to(type, down[static_cast<std::size_t>(row * rank + channel)]);
      };
      std::vector<float> encoder(static_cast<std::size_t>(
          map_size(tiles[part].by_basis ? (std::max)(rank, width) : rank, head_dim))),
          decoder(encoder.size()), offset,
          reader(static_cast<std::size_t>(map_size(width, head_dim))), rounded_mean;
      for (int channel = 0; channel < rank; ++channel) {
        double sum = 0.0;
        for (int row = 0; row < head_dim; ++row) {
          encoder[static_cast<std::size_t>(place_in_map(channel, row, head_dim))] =
              encode(row, channel);
          decoder[static_cast<std::size_t>(place_in_map(channel, row, head_dim))] =
              round_to(type, decoded(head, key, channel, row, head_dim));
          if (!mean.empty())
            sum += static_cast<double>(round_to(type, mean[static_cast<std::size_t>(row)])) *
                   static_cast<double>(encode(row, channel));
        }
        offset.push_back(static_cast<float>(sum / static_cast<double>(step(channel))));
      }
      for (int channel = 0; channel < width; ++channel) {
        const TileChannel place =
            coded ? places[static_cast<std::size_t>(channel)]
                  : TileChannel{static_cast<std::int16_t>(channel < rank ? channel : -1), 0, 0, 0};
        const float weight = coded && !key && tiles[part].readers.empty()
                                 ? static_cast<float>(value_weight(place.width, channel))
                                 : 1.0F;
        for (int row = 0; place.source >= 0 && row < head_dim; ++row) {
          reader[static_cast<std::size_t>(place_in_map(channel, row, head_dim))] =
              round_to(type, decoded(head, key, place.source, row, head_dim)) * step(place.source) *
              static_cast<float>(1U << place.shift) / weight;
        }
      }
      for (const float value : mean) rounded_mean.push_back(round_to(type, value));
      Offsets at{};
      at.width = width;
      at.encoder = append(encoder, type);
      at.decoder = encoder == decoder ? at.encoder : append(decoder, type);
      // The reader of joint values without steps is the decoder in another order of channels.
      at.reader_type =
          !coded || tiles[part].by_basis || (steps.empty() && !tiles[part].readers.empty())
              ? type
              : DType::f32;
      at.reader = coded && !tiles[part].by_basis ? append(reader, at.reader_type) : at.decoder;
      std::vector<float> inverse_steps;
      for (const float own : steps) inverse_steps.push_back(1.0F / own);
      at.steps = steps.empty() ? none : append(inverse_steps, DType::f32);
      float largest = moves
                          ? longest_decoder_row(
                                key ? head.key_metric_inverse : head.value_metric_inverse, head_dim)
                          : 1e-30F;  // a bound for any basis
      for (const float value : reader) largest = (std::max)(largest, std::abs(value));
      reader_scales.push_back(std::exp2(8.0F - std::ceil(std::log2(largest))));
      at.bits = bytes.size();
      if (coded) {
        bytes.resize(at.bits + (static_cast<std::size_t>(rank) + 15) / 16 * 16);
        for (const TileChannel& place : tiles[part].channels) {
          if (place.source >= 0)
            bytes[at.bits + static_cast<std::size_t>(place.source)] = place.bits;
        }
      }
      at.offset = append(offset, DType::f32);
      at.mean = mean.empty() ? none : append(rounded_mean, DType::f32);
      at.channels = channels.size();
      channels.insert(channels.end(), tiles[part].channels.begin(), tiles[part].channels.end());
      offsets.push_back(at);
    }
    checksum_ = ::lowrankkv::checksum(std::as_bytes(std::span(bytes)));
    bytes_ = DeviceArray<std::uint8_t>(bytes);
    channels_ = DeviceArray<TileChannel>(channels);
    reader_scales_ = DeviceArray<float>(reader_scales);
    heads_.resize(tiles.size() / 2);
    for (std::size_t part = 0; part < tiles.size(); ++part) {
      PartMaps& maps = part % 2 == 0 ? heads_[part / 2].key : heads_[part / 2].value;
      maps.encoder = {bytes_.data() + offsets[part].encoder, type};
      maps.decoder = {bytes_.data() + offsets[part].decoder, type};
      maps.reader = {bytes_.data() + offsets[part].reader, offsets[part].reader_type};
      maps.inverse_steps =
          offsets[part].steps == none
              ? nullptr
              : reinterpret_cast<const float*>(bytes_.data() + offsets[part].steps);
      maps.reader_scale = reader_scales_.data() + part;
      maps.offset = reinterpret_cast<const float*>(bytes_.data() + offsets[part].offset);
      maps.mean = offsets[part].mean == none
                      ? nullptr
                      : reinterpret_cast<const float*>(bytes_.data() + offsets[part].mean);
      maps.channels =
          tiles[part].channels.empty() ? nullptr : channels_.data() + offsets[part].channels;
      maps.bits = tiles[part].channels.empty() ? nullptr : bytes_.data() + offsets[part].bits;
      maps.rank = part % 2 == 0 ? basis.heads[part / 2].key_rank : basis.heads[part / 2].value_rank;
      maps.width = offsets[part].width;
      maps.coded = tiles[part].coded;
      maps.first_coded = tiles[part].first_coded;
      maps.gains = tiles[part].gains;
      std::copy_n(tiles[part].reference, 2, maps.reference);
      std::copy_n(tiles[part].norm_weights.begin(), 9, maps.norm_weights);
    }
    if (rotary.pre_rope())
      make_key_ups(basis, tiles, scales, layouts, head_dim, type, rotary, coded_type, moves);
  }

  /// @brief The descriptors, on the host; what they point to is on the device.
  const std::vector<HeadMaps>& heads() const { return heads_; }
  /// @brief Checksum of the maps.
  std::uint64_t checksum() const { return checksum_; }
  /// @brief Device memory of the maps in bytes.
  std::size_t bytes() const {
    return bytes_.bytes() + channels_.bytes() + reader_scales_.bytes() + key_ups_.bytes() +
           key_up_means_.bytes() + key_up_scales_.bytes() + heads_.size() * sizeof(HeadMaps);
  }

 private:
  /// Element (coefficient, row channel) of the decoder.
  static float decoded(const HeadBasis& head, bool key, int coefficient, int row, int head_dim) {
    const int rank = key ? head.key_rank : head.value_rank;
    const auto column = [&](const std::vector<float>& map) {
      return map[static_cast<std::size_t>(row * rank + coefficient)];
    };
    if (key) return column(head.query_down.empty() ? head.key_down : head.query_down);
    if (head.output_up.empty()) return column(head.value_down);
    return head.output_up[static_cast<std::size_t>(coefficient * head_dim + row)];
  }
  void make_key_ups(const LayerBasis& basis, const std::vector<PartTiles>& tiles,
                    const std::vector<std::vector<float>>& scales,
                    const std::vector<HeadTiles>& layouts, int head_dim, DType type,
                    const Rotary& rotary, DType coded_type, bool moves) {
    std::vector<uint4> operands;
    std::vector<uint2> means;
    std::vector<float2> factors;
    std::vector<std::size_t> first;
    for (std::size_t head = 0; head < heads_.size(); ++head) {
      const HeadBasis& own = basis.heads[head];
      const PartTiles& keys = tiles[2 * head];
      std::vector<float> mean;
      for (int place = 0; place < head_dim && !own.key_mean.empty(); ++place)
        mean.push_back(round_to(
            type, own.key_mean[static_cast<std::size_t>(rotary.channel(place, head_dim))]));
      const auto element = [&](int coefficient, int place) {
        return round_to(type,
                        decoded(own, true, coefficient, rotary.channel(place, head_dim), head_dim));
      };
      // Whether all epochs share one scale.
      const bool shared = moves && (!layouts[head].codes || keys.by_basis);
      const float longest = shared ? longest_decoder_row(own.key_metric_inverse, head_dim) : 0.0F;
      HostKeyUp key_up;
      if (layouts[head].codes) {
        key_up = up_project_codes(
            keys.widths, head_dim, mean,
            127.5F * std::sqrt(static_cast<float>(own.key_rank)) * longest,
            [&](int code, int place) {
              const TileChannel& at = keys.channels[static_cast<std::size_t>(code)];
              const std::vector<float>& steps = scales[2 * head];
              return at.source < 0
                         ? 0.0F
                         : element(at.source, place) *
                               (steps.empty() ? 1.0F : steps[static_cast<std::size_t>(at.source)]) *
                               static_cast<float>(1U << at.shift);
            });
      } else {
        key_up = up_project_plain(coded_type, layouts[head].key_units, head_dim, mean, longest,
                                  [&](int coefficient, int place) {
                                    return coefficient < own.key_rank ? element(coefficient, place)
                                                                      : 0.0F;
                                  });
      }
      first.push_back(operands.size());
      operands.insert(operands.end(), key_up.operands.begin(), key_up.operands.end());
      means.insert(means.end(), key_up.means.begin(), key_up.means.end());
      factors.push_back({key_up.scale, key_up.factor});
      heads_[head].key_up.units = key_up_units(layouts[head].codes, layouts[head].key_units);
    }
    key_ups_ = DeviceArray<uint4>(operands);
    key_up_means_ = DeviceArray<uint2>(means);
    key_up_scales_ = DeviceArray<float2>(factors);
    for (std::size_t head = 0; head < heads_.size(); ++head) {
      KeyUpMap& key_up = heads_[head].key_up;
      key_up.operands = key_ups_.data() + first[head];
      key_up.scales = key_up_scales_.data() + head;
      key_up.means = key_up_means_.data() + head * static_cast<std::size_t>(head_dim / 4);
    }
  }

  DeviceArray<std::uint8_t> bytes_;
  DeviceArray<TileChannel> channels_;
  DeviceArray<float> reader_scales_;
  DeviceArray<uint4> key_ups_;
  DeviceArray<uint2> key_up_means_;
  DeviceArray<float2> key_up_scales_;
  std::vector<HeadMaps> heads_;
  std::uint64_t checksum_ = 0;
};

/// @brief The metrics in which errors of rows are measured, as maps [head_dim, head_dim]; owned.
class LayerMetrics {
 public:
  LayerMetrics() = default;
  LayerMetrics(const LayerBasis& basis, int head_dim) {
    std::vector<float> values;
    const std::size_t size = static_cast<std::size_t>(map_size(head_dim, head_dim));
    std::vector<std::size_t> offsets;
    for (const HeadBasis& head : basis.heads) {
      for (const std::vector<float>* metric : {&head.key_metric, &head.value_metric}) {
        offsets.push_back(values.size());
        if (metric->empty()) continue;
        values.resize(values.size() + size);
        for (int row = 0; row < head_dim; ++row) {
          for (int channel = 0; channel < head_dim; ++channel) {
            values[offsets.back() +
                   static_cast<std::size_t>(place_in_map(channel, row, head_dim))] =
                (*metric)[static_cast<std::size_t>(row * head_dim + channel)];
          }
        }
      }
    }
    values_ = DeviceArray<float>(values);
    std::vector<HeadMaps> heads(basis.heads.size());
    for (std::size_t part = 0; part < offsets.size(); ++part) {
      PartMaps& maps = part % 2 == 0 ? heads[part / 2].key : heads[part / 2].value;
      const HeadBasis& head = basis.heads[part / 2];
      if (!(part % 2 == 0 ? head.key_metric : head.value_metric).empty())
        maps.encoder = {values_.data() + offsets[part], DType::f32};
      maps.rank = head_dim;
    }
    heads_ = DeviceArray<HeadMaps>(heads);
  }
  const HeadMaps* heads() const { return heads_.data(); }
  std::size_t bytes() const { return values_.bytes() + heads_.bytes(); }

 private:
  DeviceArray<float> values_;
  DeviceArray<HeadMaps> heads_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
