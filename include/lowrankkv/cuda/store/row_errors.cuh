// SPDX-License-Identifier: Apache-2.0
/// @file cuda/store/row_errors.cuh  Reconstruction errors of flushed rows, under the maps that are
/// about to store them.
///
/// error = ||k - k^||^2 + ||v - v^||^2 in the metrics of the bases, each over ||x - mean||^2 if
/// errors are relative (token_policy/residual_outliers.hpp). Rows are encoded, quantised and
/// decoded as they would be when stored. Rows, and maps of their type, are exact operands; other
/// numbers are split into two 16-bit numbers. Floor: the rows' bytes once, 4 rank head_dim flops a
/// row and part (2 head_dim^2 more in a metric).
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/cuda/attention/post_rope/query_operands.cuh"
#include "lowrankkv/cuda/store/store_rows.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief Rows whose errors are computed, by sequence of the batch: [first, first + count) of its
/// source.
struct ErrorRows {
  std::int32_t slots[kMaxBatch];
  std::int32_t first[kMaxBatch];
  std::int32_t count[kMaxBatch];
};

/// Shared memory of a block, in bytes, up to which two blocks share a multiprocessor.
inline constexpr int kErrorBytes = 100 * 1024;

/// @brief Layout of the shared memory of row_errors_kernel: byte offsets.
struct ErrorMemory {
  /// [16 steps, plain_stride(rank)]: coefficients as they will be read, each split into two 16-bit
  /// numbers.
  int values = 0, rest = 0;
  int coefficients = 0;  ///< [16 steps, rank + 1] f32, where rows become codes
  /// [16 steps, row_stride(head_dim)] f32, where there is a metric: differences, and, where errors
  /// are relative too, rows.
  int lost = 0, rows = 0;
  int bytes = 0;

  /// @param steps  of 16 rows, that a block takes: 2 or 4
  __host__ __device__ ErrorMemory(int steps, StoreForm form, int head_dim, int max_rank,
                                  bool metric, bool keeps_rows) {
    const int count = kPlainRows * steps;
    const auto reserve = [&](int size) {
      const int begin = bytes;
      bytes += (size + 15) / 16 * 16;
      return begin;
    };
    values = reserve(2 * count * plain_stride(max_rank));
    rest = reserve(2 * count * plain_stride(max_rank));
    coefficients = reserve(form == StoreForm::codes ? 4 * count * (max_rank + 1) : 0);
    lost = reserve(metric ? 4 * count * detail::row_stride(head_dim) : 0);
    rows = reserve(keeps_rows ? 4 * count * detail::row_stride(head_dim) : 0);
  }
};

namespace detail {

/// Splits a number, and the next one, into two 16-bit numbers each; returns the high parts of both
/// in a word, or the low parts if `low`. Numbers beyond the type's range stay at its end: the error
/// is large then, not undefined.
template <DType type>
__device__ __forceinline__ std::uint32_t half_of(float first, float second, bool low) {
  if constexpr (type == DType::f16) {
    first = fminf(fmaxf(first, -65504.0F), 65504.0F);
    second = fminf(fmaxf(second, -65504.0F), 65504.0F);
  }
  return pair_of<type>(first, second, low);
}

/// project_steps() for one part and maps of another type than the rows; maps are split into two
/// numbers. put(row, channel, first, second).
template <DType type, class Words, class Put>
__device__ __forceinline__ void project_words(const PartMaps& maps, Part part, int steps,
                                              int head_dim, Words&& words, Put&& put) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4, units = head_dim / kPlainUnit,
            blocks = (maps.rank + 15) / 16;
  for (int item = warp; item < steps * blocks; item += kStoreThreads / 32) {
    const int step = item / blocks, block = item % blocks;
    const auto own_words = words(part, step);
    float sums[2][4] = {};
    for (int unit = 0; unit < units; ++unit) {
      const uint4 a = part == Part::key ? own_words(unit) : values_as_rows(own_words(unit));
      const float4 low = maps.encoder.quad((block * 2 * units + 2 * unit) * 32 + lane),
                   high = maps.encoder.quad((block * 2 * units + 2 * unit + 1) * 32 + lane);
      for (const bool rest : {true, false}) {
        mma_plain<type>(sums[0], a, half_of<type>(low.x, low.y, rest),
                        half_of<type>(high.x, high.y, rest));
        mma_plain<type>(sums[1], a, half_of<type>(low.z, low.w, rest),
                        half_of<type>(high.z, high.w, rest));
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int channel = 16 * block + 8 * n + 2 * t;
      const float2 one = maps.to_steps(channel), two = maps.to_steps(channel + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        put(16 * step + g + 8 * half, channel, fmaf(sums[n][2 * half], one.x, one.y),
            fmaf(sums[n][2 * half + 1], two.x, two.y));
    }
  }
}

/// Quantises the coefficients of a warp's rows [first, end), which are in steps. Writes them as
/// they will be read, in the unit of the maps, split into `values` and `rest`.
template <DType type, int scale_groups>
__device__ __forceinline__ void quantise_rows(const PartMaps& maps, const float* coefficients,
                                              int stride, std::uint16_t* values,
                                              std::uint16_t* rest, int values_stride, int first,
                                              int end) {
  const int lane = static_cast<int>(threadIdx.x) % 32, channels = (maps.rank + 15) / 16 * 16;
  float gains[scale_groups];
#pragma unroll
  for (int group = 0; group < scale_groups; ++group) {
    const int from = group == 0 ? 0 : maps.first_coded,
              until = scale_groups == 2 && group == 0 ? maps.first_coded : maps.coded;
    gains[group] =
        gains_of_rows(maps, coefficients + first * stride, stride, end - first, from, until, group)
            .value;
  }
  for (int base = 0; 2 * base < channels; base += 32) {
    const int pair = base + lane;
    float half_range[2], step[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool coded = 2 * pair + i < maps.coded;
      half_range[i] = coded ? static_cast<float>(1 << maps.bits[2 * pair + i]) * 0.5F : 0.0F;
      step[i] = !coded                          ? 0.0F
                : maps.inverse_steps == nullptr ? 1.0F
                                                : 1.0F / __ldg(maps.inverse_steps + 2 * pair + i);
    }
    for (int row = first; row < end; ++row) {
      float gain = __shfl_sync(~0U, gains[0], row - first),
            inverse = gain > 0.0F ? __fdividef(1.0F, gain) : 0.0F;
      float second = 0.0F;
      if constexpr (scale_groups == 2) second = __shfl_sync(~0U, gains[1], row - first);
      float x[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (scale_groups == 2 && 2 * pair + i >= maps.first_coded) {
          gain = second;
          inverse = gain > 0.0F ? __fdividef(1.0F, gain) : 0.0F;
        }
        const float level =
            fminf(fmaxf(floorf(coefficients[row * stride + min(2 * pair + i, maps.rank)] * inverse),
                        -half_range[i]),
                  half_range[i] - 1.0F) +
            0.5F;
        x[i] = level * gain * step[i];
      }
      if (2 * pair >= channels) continue;
      *reinterpret_cast<std::uint32_t*>(values + row * values_stride + 2 * pair) =
          half_of<type>(x[0], x[1], false);
      *reinterpret_cast<std::uint32_t*>(rest + row * values_stride + 2 * pair) =
          half_of<type>(x[0], x[1], true);
    }
  }
}

/// sums += coefficients [32 rows, 16 of block `block`] x decoder [16, 16 channels of unit `unit`].
/// @param exact   the decoder is of the type
/// @param values, rest  coefficients split into two numbers, from the first row and the block's
/// first coefficient on; rest null: values are exact
/// @param steps   of 16 rows, 1 or 2
template <DType type>
__device__ __forceinline__ void add_decoded(const MapElements& decoder, bool exact, int block,
                                            int unit, int units, const std::uint16_t* values,
                                            const std::uint16_t* rest, int stride, int steps,
                                            float (&sums)[2][2][4]) {
  const int place = (block * 2 * units + 2 * unit) * 32 + static_cast<int>(threadIdx.x) % 32;
  const auto multiply = [&](const std::uint16_t* rows, const std::uint32_t(&map)[2][2]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (s >= steps) continue;
      const uint4 a = plain_words(Part::key, rows + s * kPlainRows * stride, stride, 0);
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_plain<type>(sums[s][n], a, map[n][0], map[n][1]);
    }
  };
  const auto transposed_pair = [](std::uint32_t first, std::uint32_t second,
                                  std::uint32_t(&map)[2]) {
    map[0] = transposed(first);
    map[1] = transposed(second);
  };
  std::uint32_t map[2][2];  // [eight channels of rows, eight coefficients]
  if (exact) {
    const uint2* own = static_cast<const uint2*>(decoder.data) + place;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint2 both = __ldg(own + 32 * n);
      transposed_pair(both.x, both.y, map[n]);
    }
  } else {
    // Low parts first: `map` has the high parts after the loop.
    for (const bool low : {true, false}) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float4 four = decoder.quad(place + 32 * n);
        transposed_pair(half_of<type>(four.x, four.y, low), half_of<type>(four.z, four.w, low),
                        map[n]);
      }
      if (low) multiply(values, map);
    }
  }
  multiply(values, map);
  if (rest != nullptr) multiply(rest, map);
}

}  // namespace detail

/// @brief errors [sequence of the batch, head, stride], by row of the source; where values are
/// joint, those of keys alone. Grid: groups of `steps` steps of 16 rows x heads x sequences.
/// @tparam type  of full rows
/// @tparam scale_groups  of tiles of codes
/// @param coded_type  of plain coefficients
/// @param metric  whether there are metrics
template <StoreForm form, RowPath path, DType type, int scale_groups>
__global__ void __launch_bounds__(kStoreThreads, 2)
    row_errors_kernel(LayerView tables, RowSource source, ErrorRows wanted, bool relative,
                      DType coded_type, int steps, bool metric, float* errors, int stride) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr int kMaxRows = 4 * kPlainRows, kShares = 16;
  const int head = static_cast<int>(blockIdx.y), index = static_cast<int>(blockIdx.z),
            slot = wanted.slots[index], dim = tables.head_dim, units = dim / kPlainUnit,
            width = detail::row_stride(dim);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32,
            g = lane / 4, t = lane % 4;
  const SourceRows from(tables, source, slot, head);
  // Blocks take steps of 16 rows as they lie in the source.
  const int begin = wanted.first[index], end = begin + wanted.count[index];
  if (begin == end) return;
  const int first_step = from.step_of(begin) + static_cast<int>(blockIdx.x) * steps,
            used = min(steps, from.step_of(end - 1) - first_step + 1),
            first_row = first_step * kPlainRows - from.offset();
  if (used <= 0) return;
  const HeadMaps& maps_now = tables.current_maps(slot, head);
  const bool joint = tables.joint_heads > 0;
  const int max_rank = joint ? maps_now.key.rank : max(maps_now.key.rank, maps_now.value.rank),
            values_stride = plain_stride(max_rank);
  const ErrorMemory memory(steps, form, dim, max_rank, metric, metric && relative);
  std::uint16_t* values = reinterpret_cast<std::uint16_t*>(shared_memory + memory.values);
  std::uint16_t* rest = reinterpret_cast<std::uint16_t*>(shared_memory + memory.rest);
  float* coefficients = reinterpret_cast<float*>(shared_memory + memory.coefficients);
  float* lost_rows = reinterpret_cast<float*>(shared_memory + memory.lost);
  float* own_rows = reinterpret_cast<float*>(shared_memory + memory.rows);
  // By unit of channels or, in a metric, by warp.
  __shared__ float loss[kShares][kMaxRows], whole[kShares][kMaxRows];
  __shared__ float total[kMaxRows];
  if (threadIdx.x < kMaxRows) total[threadIdx.x] = 0.0F;
  for (const Part part : {Part::key, Part::value}) {
    if (joint && part == Part::value) break;  // latent_errors_kernel adds their errors
    const PartMaps& maps = maps_now.of(part);
    const PartMaps* own_metric = metric && tables.metrics[head].of(part).encoder.data != nullptr
                                     ? &tables.metrics[head].of(part)
                                     : nullptr;
    const auto words = [&](Part, int step) {
      return [own = from.words(part, first_step + step)](int unit) { return own[32 * unit]; };
    };
    const auto put = [&](int row, int channel, float one, float two) {
      if constexpr (form == StoreForm::codes) {
        if (channel < maps.rank) coefficients[row * (max_rank + 1) + channel] = one;
        if (channel + 1 < maps.rank) coefficients[row * (max_rank + 1) + channel + 1] = two;
      } else {
        const float a = from_bits(coded_type, to_bits(coded_type, one)),
                    b = from_bits(coded_type, to_bits(coded_type, two));
        *reinterpret_cast<std::uint32_t*>(values + row * values_stride + channel) =
            detail::half_of<type>(a, b, false);
        *reinterpret_cast<std::uint32_t*>(rest + row * values_stride + channel) =
            detail::half_of<type>(a, b, true);
      }
    };
    if constexpr (path == RowPath::words) {
      detail::project_steps<type, true>(
          maps_now, static_cast<int>(part), 1, used, dim, words,
          [&](Part, int row, int channel, float one, float two) { put(row, channel, one, two); });
    } else {
      detail::project_words<type>(maps, part, used, dim, words, put);
    }
    for (int item = static_cast<int>(threadIdx.x); item < kShares * kMaxRows; item += kStoreThreads)
      loss[item / kMaxRows][item % kMaxRows] = whole[item / kMaxRows][item % kMaxRows] = 0.0F;
    __syncthreads();
    if constexpr (form == StoreForm::codes) {
      const int rows_of_warp = 2 * used;  // 16 used rows over eight warps
      detail::quantise_rows<type, scale_groups>(maps, coefficients, max_rank + 1, values, rest,
                                                values_stride, warp * rows_of_warp,
                                                (warp + 1) * rows_of_warp);
      __syncthreads();
    }
    // A warp decodes 16 channels of up to 32 rows.
    const int halves = (used + 1) / 2;
    const bool exact_values = form == StoreForm::coefficients && coded_type == type,
               exact_map = maps.decoder.type == type;
    const MapElements decoder = maps.decoder;
    for (int item = warp; item < units * halves; item += kStoreThreads / 32) {
      const int unit = item / halves, half = item % halves;
      float sums[2][2][4] = {};
      uint4 own_words[2];  // the rows themselves, in flight meanwhile
#pragma unroll
      for (int s = 0; s < 2; ++s) own_words[s] = words(part, min(2 * half + s, used - 1))(unit);
      for (int block = 0; block < (maps.rank + 15) / 16; ++block) {
        const int at = 2 * half * kPlainRows * values_stride + block * kPlainUnit;
        detail::add_decoded<type>(decoder, exact_map, block, unit, units, values + at,
                                  exact_values ? nullptr : rest + at, values_stride,
                                  used - 2 * half, sums);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int step = 2 * half + s;
        if (step >= used) continue;
        const uint4 all = part == Part::key ? own_words[s] : detail::values_as_rows(own_words[s]);
        const std::uint32_t own[2][2] = {{all.x, all.z},
                                         {all.y, all.w}};  // [eight rows, eight channels]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = step * kPlainRows + 8 * h + g;
          float away = 0.0F, energy = 0.0F;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int channel = unit * kPlainUnit + 8 * n + 2 * t + i;
              const float x = from_bits(type, static_cast<std::uint16_t>(own[h][n] >> (16 * i))) -
                              (maps.mean == nullptr ? 0.0F : __ldg(maps.mean + channel)),
                          difference = x - sums[s][n][2 * h + i];
              away = fmaf(difference, difference, away);
              energy = fmaf(x, x, energy);
              if (own_metric == nullptr) continue;
              lost_rows[row * width + channel] = difference;
              if (relative) own_rows[row * width + channel] = x;
            }
          }
          for (int distance = 1; distance < 4; distance *= 2) {
            away += __shfl_xor_sync(~0U, away, distance);
            energy += __shfl_xor_sync(~0U, energy, distance);
          }
          if (t == 0 && own_metric == nullptr) {
            loss[unit][row] = away;
            whole[unit][row] = energy;
          }
        }
      }
    }
    __syncthreads();
    if (own_metric != nullptr) {
      const auto energies = [&](const float* rows, float(&target)[kShares][kMaxRows]) {
        for (int first = 0; first < used * kPlainRows;
             first += 2 * kPlainRows) {  // 32 rows at a time
          float own[4] = {};
          detail::project_rows<2, false>(rows + first * width, dim, *own_metric,
                                         [&](int row, int, float one, float two) {
                                           own[(row - g) / 8] += one * one + two * two;
                                         });
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            own[i] += __shfl_xor_sync(~0U, own[i], 1);
            own[i] += __shfl_xor_sync(~0U, own[i], 2);
            if (t == 0) target[warp][first + 8 * i + g] = own[i];
          }
        }
      };
      energies(lost_rows, loss);
      if (relative) energies(own_rows, whole);
      __syncthreads();
    }
    if (static_cast<int>(threadIdx.x) < used * kPlainRows) {
      float away = 0.0F, energy = 0.0F;
      for (int share = 0; share < kShares; ++share) {
        away += loss[share][threadIdx.x];
        energy += whole[share][threadIdx.x];
      }
      total[threadIdx.x] += !relative       ? away
                            : energy > 0.0F ? away / energy
                                            : 0.0F;  // a row without energy has no relative error
    }
    __syncthreads();
  }
  const int row = first_row + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) < used * kPlainRows && row >= begin && row < end) {
    errors[(static_cast<std::size_t>(index) * gridDim.y + static_cast<std::size_t>(head)) *
               static_cast<std::size_t>(stride) +
           static_cast<std::size_t>(row)] = total[threadIdx.x];
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
