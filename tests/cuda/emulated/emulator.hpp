// SPDX-License-Identifier: Apache-2.0
// A block of CUDA threads on the host, for kernels that are run where no GPU is: threads are fibers, what a warp does together (products of matrices, shuffles, votes)
// is done by its last lane to come, as the PTX manual defines it. Slow, in the order of the threads, and blind to races: it finds wrong arithmetic and wrong addresses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace emulated {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Warp {
  int arrived = 0;
  unsigned generation = 0;
  const char* what = nullptr;
  std::array<std::array<std::uint8_t, 64>, 32> in{}, out{};
};
struct Block {
  Index block, size, grid;
  int current = 0, alive = 0, at_barrier = 0;
  unsigned barrier = 0;
  std::vector<ucontext_t> threads;
  std::vector<bool> done;
  std::vector<Warp> warps;
  ucontext_t scheduler{};
  std::function<void()> kernel;
};
inline Block& block() {
  static Block one;
  return one;
}
inline Index thread() { return {static_cast<unsigned>(block().current), 0, 0}; }
inline void yield() { swapcontext(&block().threads[static_cast<std::size_t>(block().current)], &block().scheduler); }
inline void run_thread() {
  Block& own = block();
  own.kernel();
  own.done[static_cast<std::size_t>(own.current)] = true;
  --own.alive;
  yield();
}

inline void make_thread(ucontext_t& context, std::uint8_t* stack, std::size_t size) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  makecontext(&context, run_thread, 0);
}

/// Runs a kernel, block after block, threads of a block in turn.
template <class Kernel>
void launch(Index grid, int threads, Kernel&& kernel) {
  constexpr std::size_t stack = 256 * 1024;
  const std::unique_ptr<std::uint8_t[]> stacks(new std::uint8_t[stack * static_cast<std::size_t>(threads)]);
  Block& own = block();
  own.kernel = kernel;
  own.size = {static_cast<unsigned>(threads), 1, 1};
  own.grid = grid;
  for (unsigned item = 0; item < grid.x * grid.y * grid.z; ++item) {
    own.block = {item % grid.x, item / grid.x % grid.y, item / grid.x / grid.y};
    own.alive = threads;
    own.at_barrier = 0;
    own.threads.assign(static_cast<std::size_t>(threads), {});
    own.done.assign(static_cast<std::size_t>(threads), false);
    own.warps.assign(static_cast<std::size_t>(threads / 32), {});
    for (int i = 0; i < threads; ++i) make_thread(own.threads[static_cast<std::size_t>(i)], stacks.get() + stack * static_cast<std::size_t>(i), stack);
    while (own.alive > 0) {
      for (int i = 0; i < threads; ++i) {
        own.current = i;
        if (!own.done[static_cast<std::size_t>(i)]) swapcontext(&own.scheduler, &own.threads[static_cast<std::size_t>(i)]);
      }
    }
  }
}

inline void synchronise() {
  Block& own = block();
  const unsigned before = own.barrier;
  if (++own.at_barrier == own.alive) {
    own.at_barrier = 0;
    ++own.barrier;
  }
  while (own.barrier == before) yield();
}

/// What the 32 lanes of a warp do together: all(inputs, outputs) once every lane has come with its own. Lanes that come for different things end the program.
template <class Out, class In, class All>
Out together(const char* what, const In& mine, All&& all) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
  Block& own = block();
  Warp& warp = own.warps[static_cast<std::size_t>(own.current / 32)];
  const std::size_t lane = static_cast<std::size_t>(own.current % 32);
  if (warp.arrived == 0) warp.what = what;
  if (std::strcmp(warp.what, what) != 0) {
    std::fprintf(stderr, "lanes of a warp came for %s and for %s\n", warp.what, what);
    std::abort();
  }
  std::memcpy(warp.in[lane].data(), &mine, sizeof(In));
  const unsigned before = warp.generation;
  if (++warp.arrived == 32) {
    std::array<In, 32> in;
    std::array<Out, 32> out;
    for (std::size_t i = 0; i < 32; ++i) std::memcpy(&in[i], warp.in[i].data(), sizeof(In));
    all(in, out);
    for (std::size_t i = 0; i < 32; ++i) std::memcpy(warp.out[i].data(), &out[i], sizeof(Out));
    warp.arrived = 0;
    ++warp.generation;
  }
  while (warp.generation == before) yield();
  Out result;
  std::memcpy(&result, warp.out[lane].data(), sizeof(Out));
  return result;
}

template <class T>
T from_lane(const char* what, T value, const std::function<int(int)>& source) {
  return together<T>(what, value, [&](const auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane) out[static_cast<std::size_t>(lane)] = in[static_cast<std::size_t>(source(lane))];
  });
}

/// Elements of words.
inline float half_of(std::uint32_t word, int place) {
  const std::uint16_t bits = static_cast<std::uint16_t>(word >> (16 * place));
  __half value;
  std::memcpy(static_cast<void*>(&value), &bits, 2);
  return __half2float(value);
}
inline float bfloat_of(std::uint32_t word, int place) {
  const std::uint32_t bits = (word >> (16 * place) & 0xffffU) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline std::uint32_t half_bits(double value) {  // to f16 once: f32 holds what products of f16 and their sums of two come to
  const __half rounded = __double2half(value);
  std::uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
template <class Operation>
__half2 both(const __half2& a, Operation&& operation) {
  std::uint32_t word;
  std::memcpy(&word, &a, 4);
  word = half_bits(operation(static_cast<double>(half_of(word, 0)), 0)) | half_bits(operation(static_cast<double>(half_of(word, 1)), 1)) << 16;
  __half2 result;
  std::memcpy(static_cast<void*>(&result), &word, 4);
  return result;
}
inline double element(const __half2& a, int place) {
  std::uint32_t word;
  std::memcpy(&word, &a, 4);
  return static_cast<double>(half_of(word, place));
}

/// mma.m16n8k16: four words of a, two of b; d(lane, row half, column, sum).
struct Operands {
  std::uint32_t a[4], b[2];
};
template <class Element, class Use>
void products(const std::array<Operands, 32>& in, Element&& number, Use&& use) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t a = in[static_cast<std::size_t>(row % 8 * 4 + k % 8 / 2)].a[row / 8 + 2 * (k / 8)], b = in[static_cast<std::size_t>(column * 4 + k % 8 / 2)].b[k / 8];
        sum += static_cast<double>(number(a, k % 2)) * static_cast<double>(number(b, k % 2));
      }
      use(row % 8 * 4 + column / 2, row / 8, column % 2, sum);
    }
  }
}

}  // namespace emulated

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#define threadIdx (::emulated::thread())
#define blockIdx (::emulated::block().block)
#define blockDim (::emulated::block().size)
#define gridDim (::emulated::block().grid)

inline void __syncthreads() { emulated::synchronise(); }
inline void __syncwarp() { emulated::together<int>("syncwarp", 0, [](const auto&, auto&) {}); }
template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return emulated::from_lane("shfl_xor", value, [mask](int lane) { return lane ^ mask; }); }
template <class T>
T __shfl_sync(unsigned, T value, int source) { return emulated::from_lane("shfl", value, [source](int) { return source; }); }
// Declared for headers that other kernels share; nothing here calls them.
int __syncthreads_or(int);
int __shfl_up_sync(unsigned, int, int);
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulated::together<unsigned>("ballot", static_cast<int>(vote), [](const auto& in, auto& out) {
    unsigned votes = 0;
    for (std::size_t lane = 0; lane < 32; ++lane) votes |= in[lane] != 0 ? 1U << lane : 0U;
    out.fill(votes);
  });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __reduce_min_sync(unsigned, int value) {
  return emulated::together<int>("reduce_min", value, [](const auto& in, auto& out) { out.fill(*std::min_element(in.begin(), in.end())); });
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7U)) & 0xffU) << (8 * i);
  return result;
}
template <class To, class From>
To emulated_cast(From value) {
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
inline float __uint_as_float(unsigned value) { return emulated_cast<float>(value); }
inline unsigned __float_as_uint(float value) { return emulated_cast<unsigned>(value); }
inline float __int_as_float(int value) { return emulated_cast<float>(value); }
inline int __float_as_int(float value) { return emulated_cast<int>(value); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int atomicMax(int* place, int value) { return std::exchange(*place, std::max(*place, value)); }
template <class T>
T atomicAdd(T* place, T value) { return std::exchange(*place, *place + value); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return emulated::both(a, [&](double x, int i) { return x * emulated::element(b, i) + emulated::element(c, i); }); }
using std::max;
using std::min;
