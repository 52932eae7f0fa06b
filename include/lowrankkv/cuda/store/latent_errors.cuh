// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/latent_errors.cuh  Reconstruction errors of the joint values of flushed rows,
/// and the errors of rows that all heads of a group keep or compress together.
///
/// error of a row = the sum over the heads of a group of ||k - k^||^2 + ||v - v^||^2, each over ||x
/// - mean||^2 if errors are relative (token_policy/residual_outliers.hpp). All heads of the group
/// get this error. Latents are quantised as they would be when stored, and decoded head by head;
/// products are those of cuda/store/row_errors.cuh. Floor: 4 rank head_dim flops a row and head.
#pragma once

#include <cstdint>

#include "lowrankkv/cuda/store/row_errors.cuh"
#include "lowrankkv/cuda/store/store_joint.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Channels of latents that latent_errors_kernel has as operands at a time. A latent that has no
/// more is quantised once for all heads.
inline constexpr int kErrorChannels = 256;

/// @brief Shared memory of latent_errors_kernel in bytes: rows, and latents split into two 16-bit
/// numbers.
inline std::size_t latent_error_bytes(int head_dim) {
  return static_cast<std::size_t>(2 * kStoreRows *
                                  (plain_stride(head_dim) + 2 * plain_stride(kErrorChannels)));
}

/// @brief Adds the errors of joint values to errors [sequence of the batch, head, stride], by row
/// of the source. In: each head's errors of keys. Out, in all heads of a group: the sum of the
/// errors of the group's keys and values. Grid: pieces x groups of heads x sequences.
/// @tparam type  of full rows
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param coded_type  of plain coefficients
template <DType type, int scale_groups>
__global__ void __launch_bounds__(kStoreThreads)
    latent_errors_kernel(LayerEdit tables, RowSource source, FlushBatch flushed,
                         LatentPortion portion, bool relative, DType coded_type, float* errors,
                         int stride) {
  constexpr int kWarps = kStoreThreads / 32, kWarpRows = kStoreRows / kWarps,
                kMaxDimUnits = kMaxHeadDim / kPlainUnit, kItems = 2 * kMaxDimUnits / kWarps,
                kGroups = scale_groups == 2 ? 2 : 1;
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  __shared__ float gains[kGroups][kStoreRows], loss[kMaxDimUnits][kStoreRows],
      whole[kMaxDimUnits][kStoreRows];  // by unit of channels
  const int piece = static_cast<int>(blockIdx.x), group = static_cast<int>(blockIdx.y),
            index = portion.first_sequence + static_cast<int>(blockIdx.z),
            slot = flushed.slots[index];
  const int leader = group * tables.joint_heads, dim = tables.head_dim, units = dim / kPlainUnit,
            rows_stride = plain_stride(dim);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            g = lane / 4, t = lane % 4;
  const ListPiece range(tables, flushed, portion.order, portion.staging, RowList::compressed, index,
                        tables.num_heads + group, leader, portion.first_piece + piece);
  if (range.begin >= range.end) return;
  constexpr int values_stride = plain_stride(kErrorChannels);
  std::uint16_t* rows = reinterpret_cast<std::uint16_t*>(shared_memory);
  std::uint16_t* values = rows + kStoreRows * rows_stride;
  std::uint16_t* rest = values + kStoreRows * values_stride;
  const PartMaps& first_maps = tables.maps[leader].value;  // bases of joint values do not move
  const int rank = first_maps.rank, row_stride = rank + 1,
            channels = (rank + kPlainUnit - 1) / kPlainUnit * kPlainUnit;
  const float* latents = portion.of(piece);
  if constexpr (scale_groups > 0) {
    const int own_first = max(range.begin, warp * kWarpRows),
              own_rows = min(range.end, (warp + 1) * kWarpRows) - own_first;
#pragma unroll
    for (int own = 0; own < kGroups; ++own) {
      const int from = own == 0 ? 0 : first_maps.first_coded,
                until = kGroups == 2 && own == 0 ? first_maps.first_coded : first_maps.coded;
      const detail::StoredGain gain = detail::gains_of_rows(
          first_maps, latents + own_first * row_stride, row_stride, own_rows, from, until, own);
      if (lane < own_rows) gains[own][own_first + lane] = gain.value;
    }
  }
  // A coefficient as it will be read, in the unit of the maps.
  const auto read = [&](int row, int channel) {
    if (row < range.begin || row >= range.end || channel >= rank) return 0.0F;
    const float coefficient = latents[row * row_stride + channel];
    if constexpr (scale_groups == 0) return from_bits(coded_type, to_bits(coded_type, coefficient));
    if (channel >= first_maps.coded) return 0.0F;
    const float gain =
                    gains[kGroups == 2 && channel >= first_maps.first_coded ? kGroups - 1 : 0][row],
                half_range = static_cast<float>(1 << first_maps.bits[channel]) * 0.5F;
    const float level =
        fminf(fmaxf(floorf(coefficient * (gain > 0.0F ? 1.0F / gain : 0.0F)), -half_range),
              half_range - 1.0F) +
        0.5F;
    return level * gain *
           (first_maps.inverse_steps == nullptr ? 1.0F
                                                : 1.0F / __ldg(first_maps.inverse_steps + channel));
  };
  const bool exact = scale_groups == 0 && coded_type == type;
  float total = 0.0F;  // of the values of row `thread`
  for (int head = leader; head < leader + tables.joint_heads; ++head) {
    const PartMaps& maps = tables.maps[head].value;
    __syncthreads();
    SourceRows(tables, source, slot, head)
        .load(Part::value, nullptr, range.from, range.begin, range.end, dim, rows, rows_stride);
    float sums[kItems][2][2][4] = {};  // a warp decodes 16 channels of 32 rows at a time
    for (int base = 0; base < channels; base += kErrorChannels) {
      const int count = min(kErrorChannels, channels - base);
      __syncthreads();
      for (int item = thread;
           item < kStoreRows * count / 2 && (head == leader || channels > kErrorChannels);
           item += kStoreThreads) {
        const int row = item / (count / 2), channel = item % (count / 2) * 2;
        const float first = read(row, base + channel), second = read(row, base + channel + 1);
        *reinterpret_cast<std::uint32_t*>(values + row * values_stride + channel) =
            detail::half_of<type>(first, second, false);
        *reinterpret_cast<std::uint32_t*>(rest + row * values_stride + channel) =
            detail::half_of<type>(first, second, true);
      }
      __syncthreads();
      const MapElements decoder = maps.decoder;
      const bool exact_map = decoder.type == type;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int item = warp + kWarps * i, unit = item / 2, half = item % 2;
        if (unit >= units) break;
        for (int channel = 0; channel < count; channel += kPlainUnit) {
          const int at = half * 2 * kPlainRows * values_stride + channel;
          detail::add_decoded<type>(decoder, exact_map, (base + channel) / kPlainUnit, unit, units,
                                    values + at, exact ? nullptr : rest + at, values_stride, 2,
                                    sums[i]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int item = warp + kWarps * i, unit = item / 2, half = item % 2;
      if (unit >= units) break;
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int row = (2 * half + h / 2) * kPlainRows + h % 2 * 8 + g;
        float away = 0.0F, energy = 0.0F;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int channel = unit * kPlainUnit + 8 * (j / 2) + 2 * t + j % 2;
          const float x = from_bits(type, rows[row * rows_stride + channel]) -
                          (maps.mean == nullptr ? 0.0F : __ldg(maps.mean + channel)),
                      difference = x - sums[i][h / 2][j / 2][2 * (h % 2) + j % 2];
          away = fmaf(difference, difference, away);
          energy = fmaf(x, x, energy);
        }
        for (int distance = 1; distance < 4; distance *= 2) {
          away += __shfl_xor_sync(~0U, away, distance);
          energy += __shfl_xor_sync(~0U, energy, distance);
        }
        if (t == 0) {
          loss[unit][row] = away;
          whole[unit][row] = energy;
        }
      }
    }
    __syncthreads();
    if (thread < kStoreRows) {
      float away = 0.0F, energy = 0.0F;
      for (int unit = 0; unit < units; ++unit) {
        away += loss[unit][thread];
        energy += whole[unit][thread];
      }
      total += !relative       ? away
               : energy > 0.0F ? away / energy
                               : 0.0F;  // a row without energy has no relative error
    }
  }
  if (thread < range.begin || thread >= range.end) return;
  float* own = errors +
               static_cast<std::size_t>(index * tables.num_heads + leader) *
                   static_cast<std::size_t>(stride) +
               static_cast<std::size_t>(range.from + thread);
  float sum = 0.0F;
  for (int head = 0; head < tables.joint_heads; ++head)
    sum += own[static_cast<std::size_t>(head) * static_cast<std::size_t>(stride)];
  for (int head = 0; head < tables.joint_heads; ++head)
    own[static_cast<std::size_t>(head) * static_cast<std::size_t>(stride)] = sum + total;
}

/// @brief Enqueues latent_errors_kernel for rows [first, first + count) of each sequence's source,
/// as `wanted` has them.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param flushed  the rows that are flushed
/// @param most     rows of a sequence in `wanted`, at most
/// @param scratch  latent_floats() numbers
template <int scale_groups>
void add_latent_errors(const LayerState& layer, const FlushBatch& flushed, const ErrorRows& wanted,
                       bool relative, const RowSource& source, std::int64_t most, float* scratch,
                       float* errors, std::int64_t stride, cudaStream_t stream) {
  FlushBatch all = flushed;  // as if all wanted rows were compressed
  for (int i = 0; i < flushed.count; ++i) {
    all.full[i] = wanted.first[i];
    all.compressed[i] = wanted.count[i];
    all.limit[i] = -1;  // the limit of a scored list does not matter
  }
  detail::for_each_portion(
      layer, all, source, most, {}, {}, scratch, stream,
      [&](const LatentPortion& portion, const dim3& pieces) {
        detail::with_type(layer.tables().full_type, [&](auto type) {
          detail::launch_kernel(latent_errors_kernel<type(), scale_groups>, pieces, kStoreThreads,
                                latent_error_bytes(layer.tables().head_dim), "latent_errors_kernel",
                                stream, layer.tables(), source, all, portion, relative,
                                layer.tiles().coded_type, errors, static_cast<int>(stride));
        });
      });
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
