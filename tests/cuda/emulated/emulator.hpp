// SPDX-License-Identifier: Apache-2.0
// CUDA kernels on the host, for machines without a GPU: threads of a block are fibers, blocks run one after the other, what a warp does together (products of matrices,
// shuffles, votes) is done by its last lane to come, as the PTX manual defines it. Slow, in the order of the threads, and blind to races: it finds wrong arithmetic, wrong
// layouts and indices, reads of shared memory that nobody wrote (it is filled with NaN) and writes behind it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
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
  int arrived = 0, lanes = 32;
  unsigned generation = 0;
  const char* what = nullptr;
  std::array<std::array<std::uint8_t, 64>, 32> in{}, out{};
};
/// Most shared memory of a block, and what must not be written behind what a kernel asked for.
inline constexpr std::size_t kShared = 227 * 1024, kGuard = 4096, kStack = 256 * 1024;
/// Shared memory of a block, at most: LOWRANKKV_EMULATED_SHARED bytes, of smaller devices.
inline int shared_limit() {
  const char* wish = std::getenv("LOWRANKKV_EMULATED_SHARED");
  return wish == nullptr ? static_cast<int>(kShared) : std::atoi(wish);
}

/// A thread of a block. It begins as a context; from then on jumps, which ask nothing of the system, lead to it and back.
struct Fiber {
  ucontext_t start{};
  std::jmp_buf now{};
  bool begun = false;
};

struct Block {
  Index block, size, grid;
  int current = 0, alive = 0, at_barrier = 0, sum = 0;
  unsigned barrier = 0;
  std::vector<Fiber> threads;
  std::vector<char> done, waits;
  std::vector<Warp> warps;
  std::jmp_buf scheduler{};
  const std::function<void()>* kernel = nullptr;
  std::unique_ptr<std::uint8_t[]> stacks{new std::uint8_t[kStack * 1024]};
  alignas(128) std::uint8_t shared[kShared + kGuard];
};
inline Block& block() {
  static Block one;
  return one;
}
inline std::uint8_t* dynamic_shared() { return block().shared; }
inline Index& thread() {
  static Index one;
  return one;
}
[[noreturn]] inline void fail(const char* what, const char* more = "") {
  std::fprintf(stderr, "emulated kernel: %s%s, block %u %u %u, thread %d\n", what, more, block().block.x, block().block.y, block().block.z, block().current);
  std::abort();
}
/// To the scheduler, until it comes back.
[[gnu::noinline]] inline void leave() {
  if (_setjmp(block().threads[static_cast<std::size_t>(block().current)].now) == 0) _longjmp(block().scheduler, 1);
}
/// To the current thread, until it leaves.
[[gnu::noinline]] inline void enter() {
  if (_setjmp(block().scheduler) != 0) return;
  Fiber& fiber = block().threads[static_cast<std::size_t>(block().current)];
  if (fiber.begun) _longjmp(fiber.now, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}
/// This thread waits until somebody lets it go on.
inline void wait() {
  Block& own = block();
  own.waits[static_cast<std::size_t>(own.current)] = 1;
  leave();
}
inline void run_thread() {
  Block& own = block();
  (*own.kernel)();
  own.done[static_cast<std::size_t>(own.current)] = 1;
  --own.alive;
  Warp& warp = own.warps[static_cast<std::size_t>(own.current / 32)];
  if (warp.arrived > 0) fail("a lane ends while others wait for it: ", warp.what);
  --warp.lanes;
  if (own.at_barrier > 0) fail("a thread ends while others wait at a barrier");
  leave();
}
inline void make_thread(Fiber& fiber, std::uint8_t* stack) {
  fiber.begun = false;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stack;
  fiber.start.uc_stack.ss_size = kStack;
  makecontext(&fiber.start, run_thread, 0);
}
inline void run_block(int threads) {
  Block& own = block();
  own.alive = threads;
  own.at_barrier = own.sum = 0;
  own.done.assign(static_cast<std::size_t>(threads), 0);
  own.waits.assign(static_cast<std::size_t>(threads), 0);
  own.warps.resize(static_cast<std::size_t>((threads + 31) / 32));
  for (std::size_t warp = 0; warp < own.warps.size(); ++warp) {
    own.warps[warp].arrived = 0;
    own.warps[warp].lanes = std::min(32, threads - 32 * static_cast<int>(warp));
  }
  if (own.threads.size() < static_cast<std::size_t>(threads)) own.threads.resize(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) make_thread(own.threads[static_cast<std::size_t>(i)], own.stacks.get() + kStack * static_cast<std::size_t>(i));
  while (own.alive > 0) {
    bool moved = false;
    for (int i = 0; i < threads; ++i) {
      if (own.done[static_cast<std::size_t>(i)] != 0 || own.waits[static_cast<std::size_t>(i)] != 0) continue;
      own.current = i;
      thread() = {static_cast<unsigned>(i), 0, 0};
      moved = true;
      enter();
    }
    if (!moved) fail("all threads wait");
  }
}
inline void execute(dim3 grid, dim3 size, std::size_t shared, const std::function<void()>& kernel) {
  Block& own = block();
  if (shared > kShared) fail("more shared memory than there is");
  own.kernel = &kernel;
  own.size = {size.x, size.y, size.z};
  own.grid = {grid.x, grid.y, grid.z};
  for (unsigned item = 0; item < grid.x * grid.y * grid.z; ++item) {
    own.block = {item % grid.x, item / grid.x % grid.y, item / grid.x / grid.y};
    std::memset(own.shared, 0xff, shared + kGuard);
    run_block(static_cast<int>(size.x));
    if (std::any_of(own.shared + shared, own.shared + shared + kGuard, [](std::uint8_t byte) { return byte != 0xff; })) fail("shared memory was written behind its end");
  }
}

/// What is enqueued: done at once, or kept in the graph that is being captured.
using Graph = std::vector<std::function<void()>>;
inline Graph*& captured() {
  static Graph* graph = nullptr;
  return graph;
}
template <class Work>
void enqueue(Work&& work) {
  if (captured() != nullptr) captured()->push_back(work);
  else work();
}
/// A launch: kernel(arguments...) for every thread.
template <class Kernel, class... Arguments>
void run(dim3 grid, dim3 size, std::size_t shared, Kernel kernel, Arguments... arguments) {
  enqueue([=] { execute(grid, size, shared, [&] { kernel(arguments...); }); });
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  run(config->gridDim, config->blockDim, config->dynamicSmemBytes, kernel, Parameters(arguments)...);
  return cudaSuccess;
}

inline void synchronise() {
  Block& own = block();
  if (++own.at_barrier < own.alive) return wait();
  own.at_barrier = 0;
  ++own.barrier;
  std::fill(own.waits.begin(), own.waits.end(), char{0});
}
/// The sum of a number over the threads.
inline int sum_of_threads(int number) {
  Block& own = block();
  synchronise();
  own.sum = 0;
  synchronise();
  own.sum += number;
  synchronise();
  return own.sum;
}

/// What the lanes of a warp do together: all(inputs, outputs) once every lane has come with its own. Lanes that come for different things end the program.
template <class Out, class In, class All>
Out together(const char* what, const In& mine, All&& all) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
  Block& own = block();
  const std::size_t lane = static_cast<std::size_t>(own.current % 32), first = static_cast<std::size_t>(own.current / 32 * 32);
  Warp& warp = own.warps[first / 32];
  if (warp.arrived == 0) warp.what = what;
  if (std::strcmp(warp.what, what) != 0) fail("a lane comes for another instruction than ", warp.what);
  std::memcpy(warp.in[lane].data(), &mine, sizeof(In));
  if (++warp.arrived == warp.lanes) {
    std::array<In, 32> in{};
    std::array<Out, 32> out{};
    for (std::size_t i = 0; i < 32; ++i) std::memcpy(&in[i], warp.in[i].data(), sizeof(In));
    all(in, out);
    for (std::size_t i = 0; i < 32; ++i) std::memcpy(warp.out[i].data(), &out[i], sizeof(Out));
    warp.arrived = 0;
    for (std::size_t i = first; i < std::min(first + 32, own.waits.size()); ++i) own.waits[i] = 0;
  } else {
    wait();
  }
  Out result;
  std::memcpy(&result, warp.out[lane].data(), sizeof(Out));
  return result;
}

template <class T, class Source>
T from_lane(const char* what, T value, Source&& source) {
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
inline std::uint32_t half_bits(double value) {  // rounded once
  const __half rounded = __double2half(value);
  std::uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
template <class To, class From>
To cast(From value) {
  To result;
  static_assert(sizeof(To) == sizeof(From));
  std::memcpy(static_cast<void*>(&result), &value, sizeof(To));
  return result;
}
/// Both numbers of a word of f16: operation(number, which).
template <class Operation>
__half2 both(const __half2& a, Operation&& operation) {
  const std::uint32_t word = cast<std::uint32_t>(a);
  return cast<__half2>(half_bits(operation(static_cast<double>(half_of(word, 0)), 0)) | half_bits(operation(static_cast<double>(half_of(word, 1)), 1)) << 16);
}
inline double element(const __half2& a, int place) { return static_cast<double>(half_of(cast<std::uint32_t>(a), place)); }

/// Words of a lane of mma: up to four of a, two of b.
struct Operands {
  std::uint32_t a[4], b[2];
};
/// mma.m16n8k16 of 16-bit numbers: use(lane, half of the rows, column of two, sum).
template <class Number, class Use>
void products(const std::array<Operands, 32>& in, Number&& number, Use&& use) {
  float a[16][16], b[8][16];
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) a[row][k] = number(in[static_cast<std::size_t>(row % 8 * 4 + k % 8 / 2)].a[row / 8 + 2 * (k / 8)], k % 2);
  }
  for (int column = 0; column < 8; ++column) {
    for (int k = 0; k < 16; ++k) b[column][k] = number(in[static_cast<std::size_t>(column * 4 + k % 8 / 2)].b[k / 8], k % 2);
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[column][k]);
      use(row % 8 * 4 + column / 2, row / 8, column % 2, sum);
    }
  }
}

}  // namespace emulated

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#define cudaLaunchKernelEx ::emulated::launch

inline ::emulated::Index& threadIdx = ::emulated::thread();
inline ::emulated::Index& blockIdx = ::emulated::block().block;
inline ::emulated::Index& blockDim = ::emulated::block().size;
inline ::emulated::Index& gridDim = ::emulated::block().grid;

inline void __syncthreads() { emulated::synchronise(); }
inline int __syncthreads_or(int vote) { return emulated::sum_of_threads(vote != 0 ? 1 : 0) > 0; }
inline int __syncthreads_and(int vote) { return emulated::sum_of_threads(vote == 0 ? 1 : 0) == 0; }
inline void __syncwarp(unsigned = ~0U) { emulated::together<int>("syncwarp", 0, [](const auto&, auto&) {}); }
template <class T>
T __ldg(const T* address) { return *address; }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) { return emulated::from_lane("shfl.xor", value, [mask](int lane) { return lane ^ mask; }); }
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) { return emulated::from_lane("shfl.up", value, [delta](int lane) { return lane < delta ? lane : lane - delta; }); }
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  struct Ask {
    T value;
    int source;
  };
  return emulated::together<T>("shfl", Ask{value, source}, [](const auto& in, auto& out) {
    for (std::size_t lane = 0; lane < 32; ++lane) out[lane] = in[static_cast<std::size_t>(in[lane].source) % 32].value;
  });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulated::together<unsigned>("vote", static_cast<int>(vote), [](const auto& in, auto& out) {
    unsigned votes = 0;
    for (std::size_t lane = 0; lane < 32; ++lane) votes |= in[lane] != 0 ? 1U << lane : 0U;
    out.fill(votes);
  });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }
inline int __reduce_min_sync(unsigned, int value) {
  return emulated::together<int>("redux.min", value, [](const auto& in, auto& out) { out.fill(*std::min_element(in.begin(), in.end())); });
}
inline int __reduce_max_sync(unsigned, int value) {
  return emulated::together<int>("redux.max", value, [](const auto& in, auto& out) { out.fill(*std::max_element(in.begin(), in.end())); });
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7U)) & 0xffU) << (8 * i);
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return std::max(a & 0xffffU, b & 0xffffU) | std::max(a >> 16, b >> 16) << 16; }
inline float __uint_as_float(unsigned value) { return emulated::cast<float>(value); }
inline unsigned __float_as_uint(float value) { return emulated::cast<unsigned>(value); }
inline float __int_as_float(int value) { return emulated::cast<float>(value); }
inline int __float_as_int(float value) { return emulated::cast<int>(value); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
template <class T>
T atomicMax(T* place, T value) { return std::exchange(*place, std::max(*place, value)); }
template <class T>
T atomicXor(T* place, T value) { return std::exchange(*place, *place ^ value); }
template <class T>
T atomicOr(T* place, T value) { return std::exchange(*place, *place | value); }
template <class T>
T atomicExch(T* place, T value) { return std::exchange(*place, value); }
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
template <class T>
T atomicAdd(T* place, T value) { return std::exchange(*place, *place + value); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return emulated::both(a, [&](double x, int i) { return x * emulated::element(b, i) + emulated::element(c, i); }); }
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) { return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel)); }
using std::max;
using std::min;
