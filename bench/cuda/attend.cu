// SPDX-License-Identifier: Apache-2.0
// One decode step of one layer through CompressedKVCache<Cuda, ...>: queries projected, lists
// attended to, outputs expanded. For every shape of one of Llama-3.1-8B's layers (head_dim 128) and
// every method: time of a replayed CUDA graph and of plain calls, bytes read, what that is of the
// memory's rate; and the time that storing the prompt took. peers.py gives cuDNN's times on the
// same machine. Arguments: the number of a shape, the beginning of a method's name; without, all.
// Build: nvcc -O3 -std=c++20 -I include -gencode=arch=compute_90,code=sm_90 bench/cuda/attend.cu
//
// Floor: the stored bytes of the sequences, once, at the rate that reading reaches (measure.cuh).
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "decode_step.cuh"

using namespace lowrankkv;
using bench::kDim;
using bench::Shape;

namespace {

std::string only;  // the beginning of the names of the methods that are measured

template <class Cache>
void measure(const char* name, const Shape& shape, const LayerBasis& maps,
             const typename Cache::PolicySet& policies, Rope keys = Rope::post,
             int full_row_bits = 0) {
  if (std::string(name).rfind(only, 0) != 0) return;
  bench::StepTimes step;
  try {
    step = bench::time_step<Cache>(shape, maps, policies, keys, full_row_bits);
  } catch (const CapacityError& refused) {
    std::printf("%-20s %2dq/%2dkv b %2d n %6lld: %s\n", name, shape.query_heads, shape.kv_heads,
                shape.batch, static_cast<long long>(shape.tokens), refused.what());
    return;
  }
  std::printf(
      "%-20s %2dq/%2dkv b %2d n %6lld: %.4f ms in a graph, %.4f ms called; %.3f of f16 (%.3f with "
      "slack), %.2f TB/s, %3.0f %% of the floor's rate; prompt %.2f ms a sequence\n",
      name, shape.query_heads, shape.kv_heads, shape.batch, static_cast<long long>(shape.tokens),
      step.replayed, step.called, step.bytes / step.plain_bytes,
      (step.bytes + step.slack) / step.plain_bytes, step.bytes / step.replayed / 1e9,
      100.0 * step.floor() / step.replayed, step.prompt);
  std::fflush(stdout);
}

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

/// Bits of 32 channels each, of keys and of values; without the latter, the same.
void codes(const char* name, const Shape& shape, const std::vector<int>& key_blocks,
           const std::vector<int>& value_blocks = {}, Rope keys = Rope::post) {
  const std::vector<std::uint8_t> key_bits = bench::bits_of(key_blocks),
                                  value_bits = bench::bits_of(value_blocks.empty() ? key_blocks
                                                                                   : value_blocks);
  const LayerBasis maps = bench::basis(shape.kv_heads, static_cast<int>(key_bits.size()),
                                       static_cast<int>(value_bits.size()), key_bits, value_bits);
  measure<Codes>(name, shape, maps, {{}, {}, {4, 32}, {}}, keys);
}
/// Codes of 2 bits, and two rows of a hundred, those of the largest errors, at full rank.
void outliers(const char* name, const Shape& shape, int full_row_bits, Rope keys = Rope::post) {
  const std::vector<std::uint8_t> bits = bench::bits_of({2, 2, 2, 2});
  Budgeted<Cuda>::PolicySet policies;
  policies.token_policy.get<SinkRecent>() = {4, 32};
  policies.token_policy.get<ResidualOutliers>().share = 0.02F;
  measure<Budgeted<Cuda>>(name, shape, bench::basis(shape.kv_heads, kDim, kDim, bits, bits),
                          policies, keys, full_row_bits);
}
void plain(const char* name, const Shape& shape, int rank, Rope keys = Rope::post) {
  measure<StaticPCAHybrid<Cuda>>(name, shape, bench::basis(shape.kv_heads, rank, rank),
                                 {{}, {}, {4, 32}, {}}, keys);
}
/// Bases that move: a prompt of 32768 tokens after the other, each with an epoch of its own.
void moving(const char* name, const Shape& shape, int rank, Rope keys) {
  OjaKV<Cuda>::PolicySet policies;
  policies.token_policy = {4, 32};
  policies.updater.prefill_share = 1.0F;
  measure<OjaKV<Cuda>>(name, shape, bench::basis(shape.kv_heads, rank, rank), policies, keys);
}

}  // namespace

int main(int count, char** arguments) {
  const int wanted = count > 1 ? std::atoi(arguments[1]) : -1;
  if (count > 2) only = arguments[2];
  const std::vector<Shape> shapes{{8, 32, 8, 131072}, {16, 32, 8, 32768}, {1, 32, 8, 131072},
                                  {1, 32, 8, 32768},  {16, 32, 32, 8192}, {16, 32, 32, 32768}};
  for (const Shape& shape : shapes) {
    if (wanted >= 0 && &shape != &shapes[static_cast<std::size_t>(wanted) % shapes.size()])
      continue;
    codes("2.5 bits", shape, {4, 2, 2, 2});
    codes("2 bits", shape, {2, 2, 2, 2});
    codes("1.75 bits", shape, {2, 2, 2, 2}, {2, 2, 2});
    codes("4 3 2 1 bits", shape, {4, 3, 2, 1});
    codes("1.5 bits", shape, {2, 2, 2});
    codes("4 bits", shape, {4, 4, 4, 4});
    codes("4/3 bits", shape, {4, 4, 4, 4}, {3, 3, 3, 3});
    codes("4/3 bits, rank 32", shape, {4}, {3});
    outliers("2 bits, outliers f16", shape, 0);
    outliers("2 bits, outliers 8", shape, 8);
    plain("f16 rank 32", shape, 32);
    plain("f16 rank 80", shape, 80);
    // Values joint over all heads: per head as many channels as keys have, together; in codes of 4
    // and 3 bits (STAR-KV).
    const LayerBasis joint = bench::joint_basis(shape.kv_heads, 32, 32 * shape.kv_heads);
    measure<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>>(
        "joint, rank 32", shape, joint, {{}, {}, {4, 32}, {}});
    measure<StarKV<Cuda>>("joint, STAR-KV", shape, joint, {{}, {}, {4, 32}, {}});
    // The same bytes as an allocation that falls along the latent might have it: 4, 3, 2 bits of as
    // many blocks.
    measure<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, TransformCode>>(
        "joint, 4 3 2 bits", shape,
        bench::joint_basis(shape.kv_heads, 32, 32 * shape.kv_heads, {4, 3, 2}),
        {{}, {}, {4, 32}, {}});
    // Pre-RoPE keys: up-projected to head_dim and rotated, tile by tile.
    codes("unrotated, 2.5 bits", shape, {4, 2, 2, 2}, {}, Rope::pre);
    codes("unrotated, 2 bits", shape, {2, 2, 2, 2}, {}, Rope::pre);
    codes("unrotated, 1.5 bits", shape, {2, 2, 2}, {}, Rope::pre);
    outliers("unrotated, 2 bits, outliers f16", shape, 0, Rope::pre);
    outliers("unrotated, 2 bits, outliers 8", shape, 8, Rope::pre);
    plain("unrotated, rank 32", shape, 32, Rope::pre);
    plain("unrotated, rank 80", shape, 80, Rope::pre);
    measure<CompressedKVCache<Cuda, JointValues, Static, SinkRecent, NoQuantizer>>(
        "unrotated, joint, rank 32", shape, joint, {{}, {}, {4, 32}, {}}, Rope::pre);
    measure<StarKV<Cuda>>("unrotated, STAR-KV", shape, joint, {{}, {}, {4, 32}, {}}, Rope::pre);
    moving("unrotated, OjaKV, rank 32", shape, 32, Rope::pre);
    moving("OjaKV, rank 32", shape, 32, Rope::post);
    if (shape.batch * shape.tokens * shape.kv_heads > 8LL * 131072 * 8) continue;
    measure<FullKV<Cuda>>("FullKV", shape, {}, {});
    measure<FullKV<Cuda>>("8 bits, FullKV", shape, {}, {}, Rope::post, 8);
    measure<FullKV<Cuda>>("unrotated, FullKV", shape, {}, {}, Rope::pre);
    measure<FullKV<Cuda>>("unrotated, 8 bits, FullKV", shape, {}, {}, Rope::pre, 8);
  }
}
