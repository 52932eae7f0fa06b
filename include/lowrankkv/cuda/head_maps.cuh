// SPDX-License-Identifier: Apache-2.0
/// @file cuda/head_maps.cuh  The maps of a layer's KV heads on the device, over the channels that tiles hold.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "lowrankkv/basis/layer_basis.hpp"
#include "lowrankkv/cuda/device.cuh"
#include "lowrankkv/cuda/tile_layout.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief What a channel of a tile of codes holds: bits [shift, shift + width) of the code, of `bits` bits, of coefficient `source`.
/// A code wider than one unit's width stands in several channels. source < 0: padding.
struct TileChannel {
  std::int16_t source = -1;
  std::uint8_t bits = 0;
  std::uint8_t shift = 0;
  std::uint8_t width = 0;
};

/// @brief How keys, or values, of one head become channels of tiles, and back.
struct PartTiles {
  std::vector<TileChannel> channels;   ///< tiles of codes: one entry a channel; plain tiles: empty
  std::vector<std::uint8_t> widths;    ///< of the units of codes
  float reference_norm = 1.0F;         ///< of a row's coefficients, in steps: what a gain of 1 stands for
  int padding_bits = 0;                ///< of a row: what rounding to whole units costs
  int coded = 0;                       ///< coefficients that have bits: the first so many; a gain is their norm
};

/// @brief Where element (channel of tiles, channel of rows) of a key's reader stands: operands of mma.m16n8k8, [channels / 16, head_dim / 8,
/// 32 lanes, 4].
__host__ __device__ constexpr int key_place_in_map(int channel, int row, int head_dim) {
  return ((channel / 16 * (head_dim / 8) + row / 8) * 32 + channel % 8 * 4 + row % 4) * 4 + channel % 16 / 8 + 2 * (row % 8 / 4);
}

/// @brief Maps of keys, or of values, of one head; f32 in device memory.
struct PartMaps {
  const float4* encoder = nullptr;       ///< rows to coefficients, in steps: operands of mma.m16n8k8, [head_dim / 8, blocks of 8 coefficients, 32 lanes], as a sum of two tf32
  const float* offset = nullptr;         ///< [rank]: what the encoder makes of the mean
  const float* reader = nullptr;         ///< channels of tiles to rows: keys at key_place_in_map(), values [channels, head_dim]
  const float* mean = nullptr;           ///< [head_dim] or null
  const TileChannel* channels = nullptr; ///< [channels]; null for plain tiles
  std::int32_t rank = 0;
  std::int32_t width = 0;                ///< channels of tiles, padding included
  std::int32_t coded = 0;                ///< of them, those with bits
  float reference_norm = 1.0F;
};

/// @brief Maps of one KV head.
struct HeadMaps {
  PartMaps key, value;
  __host__ __device__ const PartMaps& of(Part part) const { return part == Part::key ? key : value; }
};

/// @brief The maps of a layer, owned: one block of device memory.
class LayerMaps {
 public:
  LayerMaps() = default;
  /// @param tiles  per head: keys, values
  /// @param scales per head: keys, values: the quantizer's step of every coefficient; empty: ones
  LayerMaps(const LayerBasis& basis, const std::vector<PartTiles>& tiles, const std::vector<std::vector<float>>& scales, const std::vector<HeadTiles>& layouts, int head_dim, DType type) {
    std::vector<float> values;
    std::vector<TileChannel> channels;
    struct Offsets {
      std::size_t encoder, offset, reader, mean, channels;
      bool has_mean;
    };
    std::vector<Offsets> offsets;
    for (std::size_t part = 0; part < tiles.size(); ++part) {
      const HeadBasis& head = basis.heads[part / 2];
      const bool key = part % 2 == 0;
      const int rank = key ? head.key_rank : head.value_rank;
      const std::vector<float>& down = key ? head.key_down : head.value_down;
      const std::vector<float>& mean = key ? head.key_mean : head.value_mean;
      const std::vector<float>& steps = scales[part];
      const auto step = [&](int channel) { return steps.empty() ? 1.0F : steps[static_cast<std::size_t>(channel)]; };
      while (values.size() % 4 != 0) values.push_back(0.0F);
      Offsets at{values.size(), 0, 0, 0, channels.size(), !mean.empty()};
      const auto encode = [&](int row, int channel) { return channel < rank ? round_to(type, down[static_cast<std::size_t>(row * rank + channel)]) / step(channel) : 0.0F; };
      for (int rows = 0; rows < head_dim; rows += 8) {
        for (int block = 0; block < (rank + 7) / 8; ++block) {
          for (int lane = 0; lane < 32; ++lane) {  // rows t and t + 4 of column g
            const float low = encode(rows + lane % 4, 8 * block + lane / 4), high = encode(rows + lane % 4 + 4, 8 * block + lane / 4);
            values.insert(values.end(), {to_tf32(low), to_tf32(high), to_tf32(low - to_tf32(low)), to_tf32(high - to_tf32(high))});
          }
        }
      }
      at.offset = values.size();
      for (int channel = 0; channel < rank; ++channel) {
        double sum = 0.0;
        for (int row = 0; row < head_dim && !mean.empty(); ++row) sum += static_cast<double>(round_to(type, mean[static_cast<std::size_t>(row)])) * static_cast<double>(encode(row, channel));
        values.push_back(static_cast<float>(sum));
      }
      while (values.size() % 4 != 0) values.push_back(0.0F);
      at.reader = values.size();
      const int width = layouts[part / 2].channels(key ? Part::key : Part::value);
      values.resize(at.reader + static_cast<std::size_t>(width) * static_cast<std::size_t>(head_dim));
      for (int channel = 0; channel < width; ++channel) {
        const bool coded = !tiles[part].channels.empty();
        const TileChannel place = coded ? tiles[part].channels[static_cast<std::size_t>(channel)] : TileChannel{static_cast<std::int16_t>(channel < rank ? channel : -1), 0, 0, 0};
        const float weight = coded && !key ? static_cast<float>(value_weight(place.width, channel)) : 1.0F;
        for (int row = 0; place.source >= 0 && row < head_dim; ++row) {
          values[at.reader + static_cast<std::size_t>(key ? key_place_in_map(channel, row, head_dim) : channel * head_dim + row)] =
              round_to(type, decoder(head, key, place.source, row, head_dim)) * step(place.source) * static_cast<float>(1U << place.shift) / weight;
        }
      }
      at.mean = values.size();
      for (const float value : mean) values.push_back(round_to(type, value));
      channels.insert(channels.end(), tiles[part].channels.begin(), tiles[part].channels.end());
      offsets.push_back(at);
    }
    values_ = DeviceArray<float>(values);
    channels_ = DeviceArray<TileChannel>(channels);
    std::vector<HeadMaps> heads(tiles.size() / 2);
    for (std::size_t part = 0; part < tiles.size(); ++part) {
      PartMaps& maps = part % 2 == 0 ? heads[part / 2].key : heads[part / 2].value;
      maps.encoder = reinterpret_cast<const float4*>(values_.data() + offsets[part].encoder);
      maps.offset = values_.data() + offsets[part].offset;
      maps.reader = values_.data() + offsets[part].reader;
      maps.mean = offsets[part].has_mean ? values_.data() + offsets[part].mean : nullptr;
      maps.channels = tiles[part].channels.empty() ? nullptr : channels_.data() + offsets[part].channels;
      maps.rank = part % 2 == 0 ? basis.heads[part / 2].key_rank : basis.heads[part / 2].value_rank;
      maps.width = layouts[part / 2].channels(part % 2 == 0 ? Part::key : Part::value);
      maps.coded = tiles[part].coded;
      maps.reference_norm = tiles[part].reference_norm;
    }
    heads_ = DeviceArray<HeadMaps>(heads);
  }

  const HeadMaps* heads() const { return heads_.data(); }
  /// @brief Device memory of the maps.
  std::size_t bytes() const { return values_.bytes() + channels_.bytes() + heads_.bytes(); }

 private:
  /// The nearest number of ten bits: what tensor cores read of an f32.
  static float to_tf32(float value) { return std::bit_cast<float>((std::bit_cast<std::uint32_t>(value) + 0x1000U) & ~0x1fffU); }
  /// Element (coefficient, row channel) of what turns coefficients into rows.
  static float decoder(const HeadBasis& head, bool key, int coefficient, int row, int head_dim) {
    const int rank = key ? head.key_rank : head.value_rank;
    const auto column = [&](const std::vector<float>& map) { return map[static_cast<std::size_t>(row * rank + coefficient)]; };
    if (key) return column(head.query_down.empty() ? head.key_down : head.query_down);
    if (head.output_up.empty()) return column(head.value_down);
    return head.output_up[static_cast<std::size_t>(coefficient * head_dim + row)];
  }
  DeviceArray<float> values_;
  DeviceArray<TileChannel> channels_;
  DeviceArray<HeadMaps> heads_;
};

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
