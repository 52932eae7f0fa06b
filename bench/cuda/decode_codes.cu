// SPDX-License-Identifier: Apache-2.0
// Decode attention straight from transform-coded tiles on a Hopper GPU: the kernel and the layout that the CUDA backend starts from,
// with its check against float64 and its times. One query token a sequence, up to 4 query heads a KV head, head_dim 128.
// Build: nvcc -O3 -std=c++20 -gencode=arch=compute_90,code=sm_90 decode_codes.cu     docs/performance.md has the log.
//
// A tile holds 64 tokens of one KV head: 64 + 64 bytes of gains, the codes of the keys, the codes of the values, in the order in which
// the lanes of a warp want them as operands of mma.m16n8k32 (u8 x s8 -> s32). A warp takes tiles by bulk copies into a ring of its
// own in shared memory. Codes become operands by one AND for four of them, no shift and no conversion: a code that stands at bit p of
// its byte counts 2^p times, and which codes share p is chosen so that this is taken back for nothing:
//   keys    codes at p = 2 m belong to the m-th 16 tokens: the factor goes into the conversion of their logits
//   values  codes at p belong to every 8th channel: the factor goes into the output's channel at the very end
// Offsets (q - 2^(b-1) + 1/2) leave by one constant a head for the logits, and by the sum of weights for the output. Queries, with the
// quantizer's steps folded in, are 16-bit integers, high and low bytes in neighbouring columns of the mma; weights too, relative to
// the largest of their tile. So four heads fill the eight columns, integers are exact, and a lane owns whole logits of one head.
//
// Floor: stored bytes once at the memory's rate, 4.6 TB/s on an H200 (what the best attention kernel reaches).
// A third template of `run` leaves out the products of K (1), of V (2): what is left when arithmetic costs nothing.
#include <cuda_runtime.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define CHECK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); exit(1); } } while (0)

constexpr int D = 128, T = 64, HEADS = 4;  // tokens of a tile; query heads of a group, two columns of the mma each

// K: units of 32 channels; V: units of 16 (8, 4 bits) or 32 (2 bits).
template <int N8, int N4, int N2>
struct KeyWidths {
  static constexpr int n8 = N8, n4 = N4, n2 = N2, channels = 32 * (N8 + N4 + N2), units = N8 + N4 + N2;
  static constexpr int bytes = 2048 * N8 + 1024 * N4 + 512 * N2;
};
template <int N8, int N4, int N2>
struct ValueWidths {
  static constexpr int n8 = N8, n4 = N4, n2 = N2, channels = 16 * (N8 + N4) + 32 * N2;
  static constexpr int bytes = 1024 * N8 + 512 * N4 + 512 * N2;
};

__device__ __forceinline__ uint32_t smem_of(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void mma(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t phase) {
  asm volatile("{\n.reg .pred p;\nL: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra E;\nbra L;\nE:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

struct Args {
  const uint8_t* tiles;   // [batch * kv_heads, tiles, tile_bytes]
  const uint2* queries;   // [batch * kv_heads, units, 32 lanes] B fragments of 16-bit integers, high and low bytes in neighbouring columns
  const float2* scales;   // [batch * kv_heads, HEADS] (unit of the integers, what offsets add to a logit)
  float* partial;         // [batch * kv_heads, splits, HEADS * (channels_v + 3)]
  int num_tiles, splits;
};

template <class K, class V, int WARPS, int STAGES, int SKIP>
__global__ void __launch_bounds__(WARPS * 32) decode(Args args) {
  constexpr int kBytes = 2 * T + K::bytes + V::bytes;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[WARPS][STAGES];
  __shared__ uint2 shared_query[K::units * 32];
  __shared__ float2 gains[WARPS][T];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = blockIdx.y, split = blockIdx.x;
  const int per_split = (args.num_tiles + args.splits - 1) / args.splits;
  const int first = split * per_split, last = min(args.num_tiles, first + per_split);
  const uint8_t* source = args.tiles + static_cast<size_t>(row) * args.num_tiles * kBytes;
  uint8_t* ring = memory + warp * STAGES * kBytes;
  for (int i = threadIdx.x; i < K::units * 32; i += WARPS * 32) shared_query[i] = args.queries[static_cast<size_t>(row) * K::units * 32 + i];
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_of(&barriers[warp][s])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const auto fetch = [&](int tile, int stage) {
    const uint32_t barrier = smem_of(&barriers[warp][stage]);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kBytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_of(ring + stage * kBytes)),
                 "l"(source + static_cast<size_t>(tile) * kBytes), "r"(kBytes), "r"(barrier) : "memory");
  };
  if (lane == 0) {
    for (int s = 0; s < STAGES; ++s) if (first + warp + s * WARPS < last) fetch(first + warp + s * WARPS, s);
  }
  constexpr int MB = V::channels / 16;
  float out[MB][2];
  #pragma unroll
  for (int i = 0; i < MB; ++i) out[i][0] = out[i][1] = 0.0f;
  float top = -INFINITY, sum = 0, weight = 0;  // head t; sum over this lane's rows
  const float2 scale = args.scales[row * HEADS + t];
  int stage = 0, phase = 0;
  for (int tile = first + warp; tile < last; tile += WARPS) {
    wait(smem_of(&barriers[warp][stage]), phase);
    const uint8_t* here = ring + stage * kBytes;
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = lane + 32 * i;
      gains[warp][token] = {ex2((static_cast<float>(here[token]) - 128.0f) * 0.0625f), ex2((static_cast<float>(here[T + token]) - 128.0f) * 0.0625f)};
    }
    __syncwarp();
    const uint4* words = reinterpret_cast<const uint4*>(here + 2 * T) + lane;
    const uint2* query = shared_query + lane;
    float s[4][2];
    #pragma unroll
    for (int m = 0; m < 4; ++m) s[m][0] = s[m][1] = scale.y;
    if constexpr (K::n8 > 0 && !(SKIP & 1)) {
      int c[4][4] = {};
      #pragma unroll
      for (int u = 0; u < K::n8; ++u) {
        const uint2 b = *query; query += 32;
        #pragma unroll
        for (int m = 0; m < 4; ++m) { const uint4 w = *words; words += 32; mma(c[m], w.x, w.y, w.z, w.w, b.x, b.y); }
      }
      #pragma unroll
      for (int m = 0; m < 4; ++m) for (int r = 0; r < 2; ++r) s[m][r] = fmaf(static_cast<float>(c[m][2 * r] * 256 + c[m][2 * r + 1]), scale.x, s[m][r]);
    }
    if constexpr (K::n4 > 0 && !(SKIP & 1)) {
      int c[4][4] = {};
      #pragma unroll
      for (int u = 0; u < K::n4; ++u) {
        const uint2 b = *query; query += 32;
        #pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const uint4 w = *words; words += 32;
          mma(c[2 * pair], w.x & 0x0f0f0f0fu, w.y & 0x0f0f0f0fu, w.z & 0x0f0f0f0fu, w.w & 0x0f0f0f0fu, b.x, b.y);
          mma(c[2 * pair + 1], w.x & 0xf0f0f0f0u, w.y & 0xf0f0f0f0u, w.z & 0xf0f0f0f0u, w.w & 0xf0f0f0f0u, b.x, b.y);
        }
      }
      #pragma unroll
      for (int m = 0; m < 4; ++m) for (int r = 0; r < 2; ++r) s[m][r] = fmaf(static_cast<float>(c[m][2 * r] * 256 + c[m][2 * r + 1]), m % 2 ? scale.x * 0.0625f : scale.x, s[m][r]);
    }
    if constexpr (K::n2 > 0 && !(SKIP & 1)) {
      int c[4][4] = {};
      #pragma unroll
      for (int u = 0; u < K::n2; ++u) {
        const uint2 b = *query; query += 32;
        const uint4 w = *words; words += 32;
        mma(c[0], w.x & 0x03030303u, w.y & 0x03030303u, w.z & 0x03030303u, w.w & 0x03030303u, b.x, b.y);
        mma(c[1], w.x & 0x0c0c0c0cu, w.y & 0x0c0c0c0cu, w.z & 0x0c0c0c0cu, w.w & 0x0c0c0c0cu, b.x, b.y);
        mma(c[2], w.x & 0x30303030u, w.y & 0x30303030u, w.z & 0x30303030u, w.w & 0x30303030u, b.x, b.y);
        mma(c[3], w.x & 0xc0c0c0c0u, w.y & 0xc0c0c0c0u, w.z & 0xc0c0c0c0u, w.w & 0xc0c0c0c0u, b.x, b.y);
      }
      #pragma unroll
      for (int m = 0; m < 4; ++m) for (int r = 0; r < 2; ++r) s[m][r] = fmaf(static_cast<float>(c[m][2 * r] * 256 + c[m][2 * r + 1]), scale.x * (1.0f / (1 << (2 * m))), s[m][r]);
    }
    words = reinterpret_cast<const uint4*>(here + 2 * T + K::bytes) + lane;
    // Logits in units of log2: rows g and g + 8 of four m-blocks, head t.
    float best = top;
    float value_gain[4][2];
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 gain = gains[warp][16 * m + 8 * r + g];
        s[m][r] *= gain.x;
        value_gain[m][r] = gain.y;
        best = fmaxf(best, s[m][r]);
      }
    }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 4));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 16));
    if (__any_sync(~0u, best > top)) {
      const float correction = ex2(top - best);
      sum *= correction; weight *= correction; top = best;
      #pragma unroll
      for (int i = 0; i < MB; ++i) { out[i][0] *= correction; out[i][1] *= correction; }
    }
    float largest = 0.0f;
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float e = ex2(s[m][r] - top);
        sum += e;
        s[m][r] = e * value_gain[m][r];
        largest = fmaxf(largest, s[m][r]);
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 4));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
    largest = fmaxf(largest, 1e-30f);
    const float to_integer = __fdividef(32512.0f, largest), from_integer = largest * (1.0f / 32512.0f);
    uint32_t p[4];
    #pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t y0 = __float_as_uint(fmaf(s[m][0], to_integer, 12582912.0f + 128.0f)), y1 = __float_as_uint(fmaf(s[m][1], to_integer, 12582912.0f + 128.0f));
      p[m] = transposed(__byte_perm(y0, y1, 0x4051) ^ 0x80800000u);
    }
    {
      int c[4] = {};
      #pragma unroll
      for (int k = 0; k < 2; ++k) mma(c, 0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u, p[2 * k], p[2 * k + 1]);
      weight = fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer, weight);
    }
    const auto add = [&](int i, const int (&c)[4]) {
      out[i][0] = fmaf(static_cast<float>(c[0] * 256 + c[1]), from_integer, out[i][0]);
      out[i][1] = fmaf(static_cast<float>(c[2] * 256 + c[3]), from_integer, out[i][1]);
    };
    if constexpr (!(SKIP & 2)) {
      int i = 0;
      #pragma unroll
      for (int u = 0; u < V::n8; ++u, ++i) {
        int c[4] = {};
        #pragma unroll
        for (int k = 0; k < 2; ++k) { const uint4 w = *words; words += 32; mma(c, w.x, w.y, w.z, w.w, p[2 * k], p[2 * k + 1]); }  // (half 0 rows g, g + 8; half 1)
        add(i, c);
      }
      #pragma unroll
      for (int u = 0; u < V::n4; ++u, ++i) {
        int c[4] = {};
        const uint4 w = *words; words += 32;
        mma(c, w.x & 0x0f0f0f0fu, w.x & 0xf0f0f0f0u, w.y & 0x0f0f0f0fu, w.y & 0xf0f0f0f0u, p[0], p[1]);
        mma(c, w.z & 0x0f0f0f0fu, w.z & 0xf0f0f0f0u, w.w & 0x0f0f0f0fu, w.w & 0xf0f0f0f0u, p[2], p[3]);
        add(i, c);
      }
      #pragma unroll
      for (int u = 0; u < V::n2; ++u, i += 2) {
        int c[4] = {}, d[4] = {};
        const uint4 w = *words; words += 32;
        mma(c, w.x & 0x03030303u, w.x & 0x0c0c0c0cu, w.y & 0x03030303u, w.y & 0x0c0c0c0cu, p[0], p[1]);
        mma(d, w.x & 0x30303030u, w.x & 0xc0c0c0c0u, w.y & 0x30303030u, w.y & 0xc0c0c0c0u, p[0], p[1]);
        mma(c, w.z & 0x03030303u, w.z & 0x0c0c0c0cu, w.w & 0x03030303u, w.w & 0x0c0c0c0cu, p[2], p[3]);
        mma(d, w.z & 0x30303030u, w.z & 0xc0c0c0c0u, w.w & 0x30303030u, w.w & 0xc0c0c0c0u, p[2], p[3]);
        add(i, c);
        add(i + 1, d);
      }
    }
    __syncwarp();
    if (lane == 0 && tile + STAGES * WARPS < last) fetch(tile + STAGES * WARPS, stage);
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  __syncthreads();
  constexpr int kState = HEADS * (V::channels + 3);  // per warp: max, sum, weight, then channels
  float* state = reinterpret_cast<float*>(memory) + warp * kState;
  for (int x = 4; x < 32; x *= 2) sum += __shfl_xor_sync(~0u, sum, x);
  if (g == 0) { state[t] = top; state[HEADS + t] = sum; state[2 * HEADS + t] = weight; }
  #pragma unroll
  for (int i = 0; i < MB; ++i) {
    for (int r = 0; r < 2; ++r) state[3 * HEADS + (16 * i + g + 8 * r) * HEADS + t] = out[i][r];
  }
  __syncthreads();
  float* target = args.partial + (static_cast<size_t>(row) * args.splits + split) * kState;
  const float* states = reinterpret_cast<const float*>(memory);
  for (int i = threadIdx.x; i < kState; i += WARPS * 32) {
    const int h = i % HEADS;
    float best = -INFINITY;
    for (int w = 0; w < WARPS; ++w) best = fmaxf(best, states[w * kState + h]);
    float total = 0.0f;
    for (int w = 0; w < WARPS; ++w) {
      const float m = states[w * kState + h];
      if (m > -INFINITY) total += states[w * kState + i] * ex2(m - best);
    }
    target[i] = i < HEADS ? best : total;
  }
}

__global__ void combine(const float* partial, int splits, int channels, const float* factors, const float* offsets, float* out) {
  const int row = blockIdx.x, h = blockIdx.y, c = threadIdx.x, state = HEADS * (channels + 3);
  const float* mine = partial + static_cast<size_t>(row) * splits * state;
  float best = -INFINITY, sum = 0, weight = 0, value = 0;
  for (int s = 0; s < splits; ++s) best = fmaxf(best, mine[s * state + h]);
  for (int s = 0; s < splits; ++s) {
    const float e = ex2(mine[s * state + h] - best);
    sum += e * mine[s * state + HEADS + h];
    weight += e * mine[s * state + 2 * HEADS + h];
    value += e * mine[s * state + 3 * HEADS + c * HEADS + h];
  }
  out[(static_cast<size_t>(row) * HEADS + h) * channels + c] = (value * factors[c] - offsets[c] * weight) / sum;
}

// ---- host: layout. (byte of a word, shift) of the code of (channel, token)
template <class W>
int bits_of_key(int c) { return c < 32 * W::n8 ? 8 : c < 32 * (W::n8 + W::n4) ? 4 : 2; }
template <class W>
void place_key(int c, int token, size_t& at, int& shift) {
  const int m = token / 16, r = token % 16, bits = bits_of_key<W>(c), unit = c / 32, k = c % 32;
  const int lane = (r % 8) * 4 + (k % 16) / 4, reg = r / 8 + 2 * (k / 16), byte = k % 4;
  if (bits == 8) { at = 2048ull * unit + 512ull * m; shift = 8 * byte; }
  else if (bits == 4) { at = 2048ull * W::n8 + 1024ull * (unit - W::n8) + 512ull * (m / 2); shift = 8 * byte + 4 * (m % 2); }
  else { at = 2048ull * W::n8 + 1024ull * W::n4 + 512ull * (unit - W::n8 - W::n4); shift = 8 * byte + 2 * m; }
  at += 16ull * lane + 4 * reg;
}
template <class W>
int bits_of_value(int c) { return c < 16 * W::n8 ? 8 : c < 16 * (W::n8 + W::n4) ? 4 : 2; }
template <class W>
int position_of_value(int c) {
  const int bits = bits_of_value<W>(c);
  return bits == 8 ? 0 : bits == 4 ? 4 * (c % 16 / 8) : 2 * ((c - 16 * (W::n8 + W::n4)) % 32 / 8);
}
template <class W>
void place_value(int c, int token, size_t& at, int& shift) {
  const int bits = bits_of_value<W>(c), kstep = token / 32, half = token / 16 % 2, r = token % 16;
  const int tt = r % 8 / 2, byte = 2 * (r % 2) + r / 8;  // k = 4 t + i: tokens 2t, 2t + 8, 2t + 1, 2t + 9
  int lane, word;
  if (bits == 8) { const int u = c / 16, ch = c % 16; lane = ch % 8 * 4 + tt; word = 2 * half + ch / 8; at = 1024ull * u + 512ull * kstep; shift = 8 * byte; }
  else if (bits == 4) { const int u = c / 16 - W::n8, ch = c % 16; lane = ch % 8 * 4 + tt; word = 2 * kstep + half; at = 1024ull * W::n8 + 512ull * u; shift = 8 * byte + 4 * (ch / 8); }
  else { const int x = c - 16 * (W::n8 + W::n4), u = x / 32, ch = x % 32; lane = ch % 8 * 4 + tt; word = 2 * kstep + half; at = 1024ull * W::n8 + 512ull * W::n4 + 512ull * u; shift = 8 * byte + 2 * (ch / 8); }
  at += 16ull * lane + 4 * word;
}

template <class K, class V, int WARPS, int STAGES, int SKIP = 0>
void run(const char* name, int batch, int kv, int n, bool check, int splits) {
  constexpr int kBytes = 2 * T + K::bytes + V::bytes;
  const int rows = batch * kv, tiles = n / T;
  const size_t bytes = static_cast<size_t>(rows) * tiles * kBytes;
  std::mt19937_64 random(1);
  std::vector<uint8_t> host(check ? bytes : std::min<size_t>(bytes, 64 << 20));
  for (size_t i = 0; i + 8 <= host.size(); i += 8) { uint64_t x = random(); memcpy(&host[i], &x, 8); }
  for (size_t tile = 0; tile * kBytes + 2 * T <= host.size(); ++tile) for (int i = 0; i < 2 * T; ++i) host[tile * kBytes + i] = 112 + random() % 32;
  uint8_t* device; CHECK(cudaMalloc(&device, bytes));
  for (size_t at = 0; at < bytes; at += host.size() / kBytes * kBytes) CHECK(cudaMemcpy(device + at, host.data(), std::min(host.size() / kBytes * kBytes, bytes - at), cudaMemcpyHostToDevice));
  std::normal_distribution<float> normal;
  std::vector<double> q(static_cast<size_t>(rows) * HEADS * K::channels);
  std::vector<float2> scales(rows * HEADS);
  std::vector<uint8_t> frag(static_cast<size_t>(rows) * K::units * 32 * 8);
  for (int r = 0; r < rows; ++r) for (int h = 0; h < HEADS; ++h) {
    float raw[K::channels], largest = 0;
    for (int c = 0; c < K::channels; ++c) {
      const int b = bits_of_key<K>(c);
      raw[c] = normal(random) * (b == 8 ? 0.02f : b == 4 ? 0.1f : 0.2f);
      largest = std::max(largest, std::abs(raw[c]));
    }
    const float unit = largest / 32512.0f;
    double constant = 0;
    for (int c = 0; c < K::channels; ++c) {
      const int x = static_cast<int>(std::lrint(raw[c] / unit));
      const int hi = (x + 128) >> 8, lo = x - 256 * hi;
      q[(static_cast<size_t>(r) * HEADS + h) * K::channels + c] = raw[c];
      constant -= static_cast<double>(x) * unit * ((1 << (bits_of_key<K>(c) - 1)) - 0.5);
      const int u = c / 32, k = c % 32, reg = k / 16, tt = k % 16 / 4, byte = k % 4;
      for (int part = 0; part < 2; ++part) {
        const int lane = (2 * h + part) * 4 + tt;
        frag[((static_cast<size_t>(r) * K::units + u) * 32 + lane) * 8 + 4 * reg + byte] = static_cast<uint8_t>(part == 0 ? hi : lo);
      }
    }
    scales[r * HEADS + h] = {unit, static_cast<float>(constant)};
  }
  std::vector<float> factors(V::channels), offsets(V::channels);
  for (int c = 0; c < V::channels; ++c) { factors[c] = exp2f(-position_of_value<V>(c)); offsets[c] = (1 << (bits_of_value<V>(c) - 1)) - 0.5f; }
  uint8_t* dq; float2* dc; float *dp, *df, *doff, *dout;
  CHECK(cudaMalloc(&dq, frag.size())); CHECK(cudaMemcpy(dq, frag.data(), frag.size(), cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&dc, scales.size() * 8)); CHECK(cudaMemcpy(dc, scales.data(), scales.size() * 8, cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&dp, static_cast<size_t>(rows) * splits * HEADS * (V::channels + 3) * 4));
  CHECK(cudaMalloc(&df, V::channels * 4)); CHECK(cudaMemcpy(df, factors.data(), V::channels * 4, cudaMemcpyHostToDevice));
  CHECK(cudaMalloc(&doff, V::channels * 4)); CHECK(cudaMemcpy(doff, offsets.data(), V::channels * 4, cudaMemcpyHostToDevice));
  const size_t out_size = static_cast<size_t>(rows) * HEADS * V::channels;
  CHECK(cudaMalloc(&dout, out_size * 4)); CHECK(cudaMemset(dout, 0xff, out_size * 4));
  const int smem = std::max(WARPS * STAGES * kBytes, WARPS * HEADS * (V::channels + 3) * 4);
  auto kernel = decode<K, V, WARPS, STAGES, SKIP>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  const Args args{device, reinterpret_cast<const uint2*>(dq), dc, dp, tiles, splits};
  const auto launch = [&] {
    kernel<<<dim3(splits, rows), WARPS * 32, smem>>>(args);
    combine<<<dim3(rows, HEADS), V::channels>>>(dp, splits, V::channels, df, doff, dout);
  };
  launch(); CHECK(cudaGetLastError()); CHECK(cudaDeviceSynchronize());
  if (check) {
    std::vector<float> out(out_size); CHECK(cudaMemcpy(out.data(), dout, out_size * 4, cudaMemcpyDeviceToHost));
    double worst = 0, scale = 0;
    for (int r = 0; r < rows; ++r) {
      std::vector<double> logits(n);
      const auto code = [&](int token, int c, bool key) {
        size_t at; int shift;
        key ? place_key<K>(c, token % T, at, shift) : place_value<V>(c, token % T, at, shift);
        uint32_t w; memcpy(&w, &host[(static_cast<size_t>(r) * tiles + token / T) * kBytes + 2 * T + (key ? 0 : K::bytes) + at], 4);
        const int b = key ? bits_of_key<K>(c) : bits_of_value<V>(c);
        return static_cast<int>(w >> shift & ((1u << b) - 1)) - (1 << (b - 1)) + 0.5;
      };
      const auto gain = [&](int token, bool key) { return exp2((host[(static_cast<size_t>(r) * tiles + token / T) * kBytes + (key ? 0 : T) + token % T] - 128.0) / 16); };
      for (int h = 0; h < HEADS; ++h) {
        double top = -1e300;
        for (int i = 0; i < n; ++i) {
          double dot = 0;
          for (int c = 0; c < K::channels; ++c) dot += q[(static_cast<size_t>(r) * HEADS + h) * K::channels + c] * code(i, c, true);
          logits[i] = dot * gain(i, true);
          top = std::max(top, logits[i]);
        }
        std::vector<double> o(V::channels, 0.0); double sum = 0;
        for (int i = 0; i < n; ++i) {
          const double e = exp2(logits[i] - top); sum += e;
          const double w = e * gain(i, false);
          for (int c = 0; c < V::channels; ++c) o[c] += w * code(i, c, false);
        }
        for (int c = 0; c < V::channels; ++c) {
          const double d = out[(static_cast<size_t>(r) * HEADS + h) * V::channels + c] - o[c] / sum;
          worst += d * d; scale += o[c] / sum * o[c] / sum;
          if (!(d == d)) { printf("NaN\n"); exit(1); }
        }
      }
    }
    printf("%-28s check: relative error %.2e\n", name, sqrt(worst / scale));
  } else {
    cudaEvent_t a, b; CHECK(cudaEventCreate(&a)); CHECK(cudaEventCreate(&b));
    std::vector<float> times;
    for (int i = 0; i < 30; ++i) { CHECK(cudaEventRecord(a)); launch(); CHECK(cudaEventRecord(b)); CHECK(cudaEventSynchronize(b)); float ms; CHECK(cudaEventElapsedTime(&ms, a, b)); if (i >= 5) times.push_back(ms); }
    std::sort(times.begin(), times.end());
    const double ms = times[times.size() / 2];
    int blocks; CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, WARPS * 32, smem));
    cudaFuncAttributes attributes; CHECK(cudaFuncGetAttributes(&attributes, kernel));
    printf("%-20s b=%d kv=%d n=%d warps %d stages %d splits %3d: %.4f ms, %.3f of f16, %.2f TB/s [regs %d, blocks/SM %d]\n", name, batch, kv, n, WARPS, STAGES, splits, ms, double(kBytes) / (T * 4.0 * D), bytes / ms / 1e9, attributes.numRegs, blocks);
  }
  cudaFree(device); cudaFree(dq); cudaFree(dc); cudaFree(dp); cudaFree(df); cudaFree(doff); cudaFree(dout);
}

/// Splits that fill the GPU `waves` times with the blocks it can hold.
template <class K, class V, int WARPS, int STAGES>
int splits_for(int rows, int waves) {
  constexpr int kBytes = 2 * T + K::bytes + V::bytes;
  const int smem = std::max(WARPS * STAGES * kBytes, WARPS * HEADS * (V::channels + 3) * 4);
  auto kernel = decode<K, V, WARPS, STAGES, 0>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  int blocks, processors;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, WARPS * 32, smem));
  CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  return std::max(1, waves * blocks * processors / rows);
}

template <class K, class V>
void shapes(const char* name) {
  run<K, V, 8, 2>(name, 8, 8, 131072, false, splits_for<K, V, 8, 2>(64, 1));
  run<K, V, 8, 2>(name, 8, 8, 131072, false, splits_for<K, V, 8, 2>(64, 2));
  run<K, V, 8, 2>(name, 16, 8, 32768, false, splits_for<K, V, 8, 2>(128, 1));
  run<K, V, 8, 2>(name, 16, 32, 8192, false, splits_for<K, V, 8, 2>(512, 2));
  run<K, V, 8, 2>(name, 1, 8, 131072, false, splits_for<K, V, 8, 2>(8, 1));
  run<K, V, 8, 2>(name, 1, 8, 32768, false, splits_for<K, V, 8, 2>(8, 1));
}

int main(int argc, char**) {
  using KA = KeyWidths<0, 1, 3>; using VA = ValueWidths<0, 2, 3>;   // 32 channels at 4 bits, 96 at 2
  using KB = KeyWidths<0, 0, 3>; using VB = ValueWidths<0, 0, 3>;   // 96 at 2
  using KC = KeyWidths<1, 1, 2>; using VC = ValueWidths<1, 3, 2>;   // all widths
  using KD = KeyWidths<0, 0, 4>; using VD = ValueWidths<0, 0, 4>;   // 128 at 2
  using KE = KeyWidths<0, 4, 0>; using VE = ValueWidths<0, 8, 0>;   // 128 at 4
  run<KA, VA, 8, 2>("2.5 bits", 1, 2, 512, true, 3);
  run<KB, VB, 8, 2>("1.5 bits", 1, 2, 512, true, 2);
  run<KC, VC, 8, 2>("8, 4 and 2 bits", 1, 2, 1024, true, 5);
  run<KE, VE, 8, 2>("4 bits", 1, 3, 4096, true, 7);
  if (argc > 1) return 0;  // the checks alone
  shapes<KA, VA>("2.5 bits");
  shapes<KD, VD>("2 bits");
  shapes<KB, VB>("1.5 bits");
  shapes<KE, VE>("4 bits");
  run<KA, VA, 8, 2, 1>("2.5 bits, no K", 8, 8, 131072, false, splits_for<KA, VA, 8, 2>(64, 1));
  run<KA, VA, 8, 2, 2>("2.5 bits, no V", 8, 8, 131072, false, splits_for<KA, VA, 8, 2>(64, 1));
  run<KA, VA, 8, 2, 3>("2.5 bits, neither", 8, 8, 131072, false, splits_for<KA, VA, 8, 2>(64, 1));
}
