// SPDX-License-Identifier: Apache-2.0
/// @file cuda/decode/certify.cuh  Upper bounds on what compression changed in attention outputs
/// (diagnostics/certificate.hpp). The counterpart of certify_block() in cpu/residuals.hpp.
///
/// Keys are decoded to f32, 2048 rows at a time; pre-RoPE keys are rotated. Then they are
/// multiplied with the queries. Weights and sums are f64. Every sum has one order. Cost: a
/// reconstruction of the keys, and 8 head_dim bytes and 2 columns head_dim flops a row and KV head.
/// It is a check, not a part of every step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lowrankkv/core/views.hpp"
#include "lowrankkv/cuda/decode/residuals.cuh"
#include "lowrankkv/cuda/scores/attention_scores.cuh"
#include "lowrankkv/diagnostics/certificate.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// Queries that are multiplied with the rows in shared memory at a time.
inline constexpr int kCertifyColumns = 16;
inline constexpr int kCertifyThreads = 128;  ///< of a block of certify_kernel

/// @brief Sums over rows for one query, of which diagnostics/certificate.hpp makes bounds. With w a
/// row's softmax weight, and delta a bound on the change of its logit: largest delta, sum of w
/// (e^delta - 1), sum of w (1 - e^-delta), sum of w ||v - v^||.
struct CertificateSums {
  double largest = 0.0, growth = 0.0, decay = 0.0, value = 0.0;

  __device__ void add(const CertificateSums& other) {
    largest = fmax(largest, other.largest);
    growth += other.growth;
    decay += other.decay;
    value += other.value;
  }
};

/// @brief Shared memory of certify_rows_kernel in bytes.
inline std::size_t certify_bytes(int head_dim) {
  return sizeof(float) * static_cast<std::size_t>((kStoreRows + kCertifyColumns) * (head_dim + 4));
}

/// @brief sums[piece, head, column] over rows [first, first + count) of a list, whose keys are
/// decoded in keys [count, heads, head_dim]. Grid: pieces of 64 rows x KV heads.
/// @param first_piece  where the pieces of this launch begin in `sums`
template <class = void>
__global__ void __launch_bounds__(kStoreThreads)
    certify_rows_kernel(LayerView tables, int slot, RowList list, int first, int count,
                        const float* keys, MeasuredQueries queries, CertificateSums* sums,
                        int first_piece) {
  extern __shared__ __align__(128) std::uint8_t shared_memory[];
  constexpr int kWarps = kStoreThreads / 32, kOwn = kCertifyColumns / 4;
  __shared__ CertificateSums warp_sums[kWarps][kCertifyColumns];
  __shared__ double norms[kCertifyColumns], shifts[kCertifyColumns];
  const int head = static_cast<int>(blockIdx.y), heads = tables.num_heads, dim = tables.head_dim,
            stride = dim + 4, columns = queries.columns();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32,
            t = thread % 4, own_row = thread / 4;
  float* rows = reinterpret_cast<float*>(shared_memory);
  float* query_rows = rows + kStoreRows * stride;
  const HeadRows lists = tables.rows[tables.index(slot, head)];
  const int begin = first + static_cast<int>(blockIdx.x) * kStoreRows,
            used =
                min(kStoreRows, min(first + count, static_cast<int>(rows_in(lists, list))) - begin);
  for (int item = thread; item < kStoreRows * dim; item += kStoreThreads) {
    const int row = item / dim, channel = item % dim;
    rows[row * stride + channel] = row < used
                                       ? keys[(static_cast<std::size_t>(begin - first + row) *
                                                   static_cast<std::size_t>(heads) +
                                               static_cast<std::size_t>(head)) *
                                                  static_cast<std::size_t>(dim) +
                                              static_cast<std::size_t>(channel)]
                                       : 0.0F;
  }
  __syncthreads();
  if (tables.rotary.pre_rope()) {
    for (int item = thread; item < used * (dim / 4); item += kStoreThreads) {
      const int row = item / (dim / 4), two = item % (dim / 4);
      const float4 phase = tables.rotary.phases(
          tables.rotary.position(slot,
                                 detail::position_of(tables, list, slot, head, lists, begin + row)),
          two, dim);
      const auto rotate = [&](int place, float cosine, float sine) {
        float &x = rows[row * stride + tables.rotary.channel(place, dim)],
              &y = rows[row * stride + tables.rotary.channel(place + dim / 2, dim)];
        const float was = x;
        x = was * cosine - y * sine;
        y = y * cosine + was * sine;
      };
      rotate(2 * two, phase.x, phase.y);
      rotate(2 * two + 1, phase.z, phase.w);
    }
  }
  const bool counts = own_row < used;
  const std::uint32_t lost = counts ? tables.row_residuals(list, slot, head)[begin + own_row] : 0U;
  const double lost_key =
                   static_cast<double>(from_bits(DType::f16, static_cast<std::uint16_t>(lost))),
               lost_value = static_cast<double>(
                   from_bits(DType::f16, static_cast<std::uint16_t>(lost >> 16)));
  const double scale = static_cast<double>(queries.factor) / 1.4426950408889634;
  // The lse comes from keys and queries of some 16 bits, which may have made weights smaller. The
  // slack makes them larger by as much.
  const double slack = tables.rotary.pre_rope() ? 4e-3 : 1e-3;
  for (int base = 0; base < columns; base += kCertifyColumns) {
    __syncthreads();  // the queries before these are no longer read
    for (int column = warp; column < kCertifyColumns; column += kWarps) {
      const detail::MeasuredColumn own = detail::measured_column(queries, 0, head, base + column);
      float energy = 0.0F;
      for (int channel = lane; channel < dim; channel += 32) {
        const float x = base + column < columns
                            ? queries.rows.at(queries.first_row + own.token, own.head, channel)
                            : 0.0F;
        query_rows[column * stride + channel] = x;
        energy = fmaf(x, x, energy);
      }
      energy = detail::warp_sum(energy);
      if (lane != 0) continue;
      const double lse =
          base + column < columns
              ? static_cast<double>(
                    queries.lse[(queries.first_row + own.token) * queries.lse_stride + own.head])
              : 0.0;
      norms[column] = 1.00001 * sqrt(static_cast<double>(energy)) * fabs(scale);
      shifts[column] = slack * fmax(1.0, fabs(lse)) - lse;
    }
    __syncthreads();
    float logits[kOwn] = {};
    for (int channel = 0; channel < dim; channel += 4) {
      const float4 k = *reinterpret_cast<const float4*>(rows + own_row * stride + channel);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float4 q =
            *reinterpret_cast<const float4*>(query_rows + (t + 4 * i) * stride + channel);
        logits[i] = fmaf(k.x, q.x, fmaf(k.y, q.y, fmaf(k.z, q.z, fmaf(k.w, q.w, logits[i]))));
      }
    }
    for (int i = 0; i < kOwn; ++i) {
      const int column = t + 4 * i;
      CertificateSums own;
      if (counts) {
        const double exponent = static_cast<double>(logits[i]) * scale + shifts[column],
                     weight = exp(exponent),
                     delta = ::lowrankkv::detail::bound_product(norms[column], lost_key);
        own.largest = delta;
        // A weight that underflows may grow to one that does not.
        own.growth = weight > 1e-290 ? ::lowrankkv::detail::bound_product(weight, expm1(delta))
                                     : exp(exponent + delta);
        own.decay = weight * -expm1(-delta);
        own.value = ::lowrankkv::detail::bound_product(weight, lost_value);
      }
      for (int distance = 4; distance < 32; distance *= 2) {
        own.add({__shfl_xor_sync(~0U, own.largest, distance),
                 __shfl_xor_sync(~0U, own.growth, distance),
                 __shfl_xor_sync(~0U, own.decay, distance),
                 __shfl_xor_sync(~0U, own.value, distance)});
      }
      if (lane < 4) warp_sums[warp][column] = own;
    }
    __syncthreads();
    if (thread < kCertifyColumns && base + thread < columns) {
      CertificateSums all = warp_sums[0][thread];
      for (int i = 1; i < kWarps; ++i) all.add(warp_sums[i][thread]);
      sums[(static_cast<std::size_t>(first_piece + static_cast<int>(blockIdx.x)) *
                static_cast<std::size_t>(heads) +
            static_cast<std::size_t>(head)) *
               static_cast<std::size_t>(columns) +
           static_cast<std::size_t>(base + thread)] = all;
    }
  }
}

/// @brief Certificates [tokens, query heads] of a sequence's queries, from the sums of all pieces.
/// Grid: columns x KV heads.
/// @param exceeding  incremented for every certificate that exceeds `allowed` in some bound; null:
/// not counted
template <class = void>
__global__ void __launch_bounds__(kCertifyThreads)
    certify_kernel(LayerView tables, int slot, MeasuredQueries queries, const CertificateSums* sums,
                   int pieces, CertificateView out, Certificate allowed, std::uint32_t* exceeding) {
  __shared__ CertificateSums parts[kCertifyThreads];
  __shared__ int largest;
  const int column = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y),
            thread = static_cast<int>(threadIdx.x), lane = thread % 32, columns = queries.columns();
  if (thread == 0) largest = __float_as_int(tables.largest_values[tables.index(slot, head)]);
  CertificateSums all;
  for (int piece = thread; piece < pieces; piece += kCertifyThreads)
    all.add(sums[(static_cast<std::size_t>(piece) * static_cast<std::size_t>(tables.num_heads) +
                  static_cast<std::size_t>(head)) *
                     static_cast<std::size_t>(columns) +
                 static_cast<std::size_t>(column)]);
  parts[thread] = all;
  __syncthreads();
  const SourceRows tail(tables, {}, slot, head);
  for (int row = thread / 32; row < tables.lengths[slot].tail_length; row += kCertifyThreads / 32) {
    const float norm = detail::value_norm(tail, row, tables.head_dim);
    if (lane == 0) atomicMax(&largest, __float_as_int(norm));
  }
  const detail::MeasuredColumn own = detail::measured_column(queries, 0, head, column);
  bool bad = !(own.lse < INFINITY);
  for (int channel = thread; channel < tables.head_dim; channel += kCertifyThreads)
    bad = bad ||
          !(fabsf(queries.rows.at(queries.first_row + own.token, own.head, channel)) < INFINITY);
  bad = __syncthreads_or(bad) != 0;
  for (int distance = kCertifyThreads / 2; distance > 0; distance /= 2) {
    if (thread < distance) parts[thread].add(parts[thread + distance]);
    __syncthreads();
  }
  if (thread != 0) return;
  all = parts[0];
  // Rows or queries that are not finite: anything may have changed.
  Certificate found{INFINITY, 2.0F, INFINITY};
  if (const double any = all.growth + all.decay + all.value; !bad && any == any) {
    const double softmax = fmin(::lowrankkv::detail::weighted_bound(all.growth, all.decay),
                                ::lowrankkv::detail::plain_bound(all.largest));
    found = {static_cast<float>(all.largest), static_cast<float>(softmax),
             static_cast<float>(::lowrankkv::detail::bound_product(
                                    softmax, static_cast<double>(__int_as_float(largest))) +
                                all.value)};
  }
  out.data[(queries.first_row + own.token) * out.num_heads + own.head] = found;
  if (exceeding != nullptr && !(found.logit <= allowed.logit && found.softmax <= allowed.softmax &&
                                found.output <= allowed.output))
    atomicAdd(exceeding, 1U);
}

/// @brief Enqueues the certificates of a sequence's queries. The pool's scratch may grow, which
/// waits for the device.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
/// @param exceeding  as of certify_kernel
template <int scale_groups>
void certify_sequence(const LayerState& layer, int slot, const MeasuredQueries& queries,
                      const CertificateView& out, const Certificate& allowed,
                      std::uint32_t* exceeding, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const HostSequence& now = layer.sequence(slot);
  const std::int64_t most =
      (std::max)({std::int64_t{1}, now.num_rows(RowList::compressed),
                  tables.residuals[0] == nullptr ? 0 : now.num_rows(RowList::full)});
  const std::size_t width = static_cast<std::size_t>(tables.num_heads * tables.head_dim),
                    decoded = static_cast<std::size_t>((std::min)(most, kDecodedRows)) * width *
                              sizeof(float);
  const std::size_t all_pieces = static_cast<std::size_t>(
      (now.num_rows(RowList::full) + now.num_rows(RowList::compressed)) / kStoreRows + 2);
  // The sums are aligned: decoded rows are a multiple of 64 bytes.
  std::uint8_t* const scratch = layer.pool().scratch(
      decoded + all_pieces * static_cast<std::size_t>(tables.num_heads * queries.columns()) *
                    sizeof(CertificateSums));
  float* const keys = reinterpret_cast<float*>(scratch);
  CertificateSums* const sums = reinterpret_cast<CertificateSums*>(scratch + decoded);
  const DeviceTarget target = detail::decoded_target(tables, keys);
  int pieces = 0;
  for (const RowList list : {RowList::full, RowList::compressed}) {
    if (tables.residuals[static_cast<int>(list)] == nullptr) continue;
    for (std::int64_t first = 0; first < now.num_rows(list); first += kDecodedRows) {
      const TokenRange range =
          row_range(list, first, (std::min)(kDecodedRows, now.num_rows(list) - first));
      if (list == RowList::full)
        copy_rows(layer, slot, range, target, {}, stream);
      else
        decode_rows<scale_groups>(layer, slot, range, target, {}, stream);
      const int own = range.pieces(list);
      const dim3 grid(static_cast<unsigned>(own), static_cast<unsigned>(tables.num_heads));
      detail::launch_kernel(certify_rows_kernel<>, grid, kStoreThreads,
                            certify_bytes(tables.head_dim), "certify_rows_kernel", stream, tables,
                            slot, list, static_cast<int>(first), static_cast<int>(range.count),
                            keys, queries, sums, pieces);
      pieces += own;
    }
  }
  certify_kernel<>
      <<<dim3(static_cast<unsigned>(queries.columns()), static_cast<unsigned>(tables.num_heads)),
         kCertifyThreads, 0, stream>>>(tables, slot, queries, sums, pieces, out, allowed,
                                       exceeding);
  check(cudaGetLastError(), "certify_kernel");
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
