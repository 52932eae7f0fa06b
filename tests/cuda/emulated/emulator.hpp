// SPDX-License-Identifier: Apache-2.0
// CUDA kernels on the host, for machines without a GPU: threads of a block are fibers, blocks run
// one after the other, what a warp does together (products of matrices, shuffles, votes) is done by
// its last lane to come, as the PTX manual defines it. Slow, in the order of the threads, and blind
// to races: it finds wrong arithmetic, wrong layouts and indices, reads of shared memory that
// nobody wrote (it is filled with NaN) and writes behind it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
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

#define LOWRANKKV_TESTS_EMULATED 1

namespace emulated {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Warp {
  int arrived = 0, lanes = 32;
  unsigned generation = 0;
  const char* what = nullptr;
  alignas(64) std::array<std::uint8_t, 64 * 32> in{},
      out{};  ///< as many of a type as there are lanes
};
/// Most shared memory of a block, and what must not be written behind what a kernel asked for.
inline constexpr std::size_t kShared = 227 * 1024, kGuard = 4096, kStack = 256 * 1024 + 5 * 64,
                             kThreads = 1024;
/// Shared memory of a block, at most: LOWRANKKV_EMULATED_SHARED bytes, of smaller devices.
inline int shared_limit() {
  const char* wish = std::getenv("LOWRANKKV_EMULATED_SHARED");
  return wish == nullptr ? static_cast<int>(kShared) : std::atoi(wish);
}

/// A thread of a block. It begins as a context, once: it does the blocks' work one after the other.
/// From then on jumps, which ask nothing of the system, lead to it and back.
struct Fiber {
  ucontext_t start{};
  void* now[5] = {};  ///< of __builtin_setjmp
  bool begun = false;
};

struct Block {
  Index block, size, grid;
  int current = 0, alive = 0, at_barrier = 0, sum = 0;
  unsigned barrier = 0;
  std::unique_ptr<Fiber[]> threads{new Fiber[kThreads]};
  int made = 0;                    ///< of them
  std::vector<char> ended, waits;  ///< who ended waits
  std::vector<Warp> warps;
  void* scheduler[5] = {};
  const std::function<void()>* kernel = nullptr;
  std::unique_ptr<std::uint8_t[]> stacks{new std::uint8_t[kStack * kThreads]};
  alignas(128) std::uint8_t shared[kShared + kGuard];
};
inline Block running;
inline Index thread;
inline std::uint8_t* dynamic_shared() { return running.shared; }
[[noreturn]] inline void fail(const char* what, const char* more = "") {
  std::fprintf(stderr, "emulated kernel: %s%s, block %u %u %u, thread %d\n", what, more,
               running.block.x, running.block.y, running.block.z, running.current);
  std::abort();
}
inline void run_thread();
/// On with the next thread that need not wait, or with the scheduler, if there is none. Never in a
/// function that such a jump leads to.
[[gnu::noinline, noreturn]] inline void go_on() {
  Block& own = running;
  const int threads = static_cast<int>(own.waits.size());
  int next = own.current;
  do {
    if (++next >= threads) next = 0;
  } while (own.waits[static_cast<std::size_t>(next)] != 0 && next != own.current);
  if (own.waits[static_cast<std::size_t>(next)] != 0) __builtin_longjmp(own.scheduler, 1);
  own.current = next;
  thread.x = static_cast<unsigned>(next);
  Fiber& fiber = own.threads[static_cast<std::size_t>(next)];
  if (fiber.begun) __builtin_longjmp(fiber.now, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
  std::abort();
}
/// This thread waits until somebody lets it go on.
[[gnu::noinline]] inline void wait() {
  Block& own = running;
  own.waits[static_cast<std::size_t>(own.current)] = 1;
  if (__builtin_setjmp(own.threads[static_cast<std::size_t>(own.current)].now) == 0) go_on();
}
inline void run_thread() {
  while (true) {  // a block each time
    Block& own = running;
    (*own.kernel)();
    --own.alive;
    Warp& warp = own.warps[static_cast<std::size_t>(own.current / 32)];
    if (warp.arrived > 0) fail("a lane ends while others wait for it: ", warp.what);
    --warp.lanes;
    if (own.at_barrier > 0) fail("a thread ends while others wait at a barrier");
    own.ended[static_cast<std::size_t>(own.current)] = 1;
    wait();
  }
}
[[gnu::noinline]] inline void run_block(int threads) {
  Block& own = running;
  own.alive = threads;
  own.at_barrier = own.sum = 0;
  own.ended.assign(static_cast<std::size_t>(threads), 0);
  own.waits.assign(static_cast<std::size_t>(threads), 0);
  own.warps.resize(static_cast<std::size_t>((threads + 31) / 32));
  for (std::size_t warp = 0; warp < own.warps.size(); ++warp) {
    own.warps[warp].arrived = 0;
    own.warps[warp].lanes = std::min(32, threads - 32 * static_cast<int>(warp));
  }
  for (; own.made < threads; ++own.made) {
    ucontext_t& start = own.threads[static_cast<std::size_t>(own.made)].start;
    getcontext(&start);
    start.uc_stack.ss_sp = own.stacks.get() + kStack * static_cast<std::size_t>(own.made);
    start.uc_stack.ss_size = kStack;
    makecontext(&start, run_thread, 0);
  }
  own.current = threads - 1;  // the next one is the first
  if (__builtin_setjmp(own.scheduler) == 0) go_on();
  if (running.alive > 0) fail("all threads wait");
}
inline void execute(dim3 grid, dim3 size, std::size_t shared, const std::function<void()>& kernel) {
  Block& own = running;
  if (shared > kShared) fail("more shared memory than there is");
  if (grid.x * grid.y * grid.z == 0) fail("a grid without blocks");
  own.kernel = &kernel;
  own.size = {size.x, size.y, size.z};
  own.grid = {grid.x, grid.y, grid.z};
  for (unsigned item = 0; item < grid.x * grid.y * grid.z; ++item) {
    own.block = {item % grid.x, item / grid.x % grid.y, item / grid.x / grid.y};
    std::memset(own.shared, 0xff, shared + kGuard);
    run_block(static_cast<int>(size.x));
    if (std::any_of(own.shared + shared, own.shared + shared + kGuard,
                    [](std::uint8_t byte) { return byte != 0xff; }))
      fail("shared memory was written behind its end");
  }
}

/// What is enqueued: done at once, or kept in the graph that is being captured.
using Graph = std::vector<std::function<void()>>;
inline Graph*& captured() {
  static Graph* graph = nullptr;
  return graph;
}
/// Whether the launch that was just made is to be reported as failed; null: none is.
inline bool (*launch_fails)() = nullptr;
/// Whether the emulation itself is at work: what it allocates is not the library's.
inline int at_work = 0;
template <class Work>
void enqueue(Work&& work) {
  struct AtWork {
    AtWork() { ++at_work; }
    ~AtWork() { --at_work; }
  } guard;
  if (captured() != nullptr)
    captured()->push_back(work);
  else
    work();
}
/// Whether kernels can be launched on the stream (runtime.cpp).
bool of_current_device(cudaStream_t stream);
/// A launch: kernel(arguments...) for every thread.
template <class Kernel, class... Arguments>
void run(dim3 grid, dim3 size, std::size_t shared, Kernel kernel, Arguments... arguments) {
  enqueue([=] { execute(grid, size, shared, [&] { kernel(arguments...); }); });
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                   Arguments&&... arguments) {
  if (!of_current_device(config->stream)) return cudaErrorInvalidResourceHandle;
  run(config->gridDim, config->blockDim, config->dynamicSmemBytes, kernel,
      Parameters(arguments)...);
  return cudaSuccess;
}

inline void synchronise() {
  Block& own = running;
  if (++own.at_barrier < own.alive) return wait();
  own.at_barrier = 0;
  ++own.barrier;
  own.waits = own.ended;
}
/// The sum of a number over the threads.
inline int sum_of_threads(int number) {
  Block& own = running;
  synchronise();
  own.sum = 0;
  synchronise();
  own.sum += number;
  synchronise();
  return own.sum;
}

/// What the lanes of a warp do together: all(inputs, outputs) once every lane has come with its
/// own. Lanes that come for different things end the program.
template <class Out, class In, class All>
Out together(const char* what, const In& mine, All&& all) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
  Block& own = running;
  const std::size_t lane = static_cast<std::size_t>(own.current % 32),
                    first = static_cast<std::size_t>(own.current / 32 * 32);
  Warp& warp = own.warps[first / 32];
  if (warp.arrived == 0) warp.what = what;
  if (warp.what != what && std::strcmp(warp.what, what) != 0)
    fail("a lane comes for another instruction than ", warp.what);
  using Inputs = std::array<In, 32>;
  using Outputs = std::array<Out, 32>;
  Outputs& results = *reinterpret_cast<Outputs*>(
      warp.out.data());  // everybody has read the last ones who comes for these
  std::memcpy(warp.in.data() + sizeof(In) * lane, &mine, sizeof(In));
  if (++warp.arrived == warp.lanes) {
    all(*reinterpret_cast<const Inputs*>(warp.in.data()), results);
    warp.arrived = 0;
    for (std::size_t i = first; i < std::min(first + 32, own.waits.size()); ++i)
      own.waits[i] = own.ended[i];
  } else {
    wait();
  }
  return results[lane];
}

template <class T, class Source>
T from_lane(const char* what, T value, Source&& source) {
  return together<T>(what, value, [&](const auto& in, auto& out) {
    for (int lane = 0; lane < 32; ++lane)
      out[static_cast<std::size_t>(lane)] = in[static_cast<std::size_t>(source(lane))];
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
  return cast<__half2>(half_bits(operation(static_cast<double>(half_of(word, 0)), 0)) |
                       half_bits(operation(static_cast<double>(half_of(word, 1)), 1)) << 16);
}
inline double element(const __half2& a, int place) {
  return static_cast<double>(half_of(cast<std::uint32_t>(a), place));
}

/// Words of a lane of mma: up to four of a, two of b.
struct Operands {
  std::uint32_t a[4], b[2];
};
/// Sums of products, as many as `depth` at a time in this order. Compiled with all optimisation,
/// whatever the tests are.
template <class Sum, int depth>
void sum_products(const Sum (&a)[16][depth], const Sum (&b)[depth][8], Sum (&sums)[16][8]);
extern template void sum_products(const double (&)[16][8], const double (&)[8][8],
                                  double (&)[16][8]);
extern template void sum_products(const double (&)[16][16], const double (&)[16][8],
                                  double (&)[16][8]);
extern template void sum_products(const int (&)[16][32], const int (&)[32][8], int (&)[16][8]);
/// mma.m16n8kN: use(lane, half of the rows, column of two, sum), of sums of left(row, k) right(k,
/// column).
template <int depth, class Sum, class Left, class Right, class Use>
void multiply(Left&& left, Right&& right, Use&& use) {
  Sum a[16][depth], b[depth][8], sums[16][8];
  for (int k = 0; k < depth; ++k) {
    for (int row = 0; row < 16; ++row) a[row][k] = left(row, k);
    for (int column = 0; column < 8; ++column) b[k][column] = right(k, column);
  }
  sum_products(a, b, sums);
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column)
      use(row % 8 * 4 + column / 2, row / 8, column % 2, sums[row][column]);
  }
}
/// mma.m16n8k16 of 16-bit numbers.
template <class Number, class Use>
void products(const std::array<Operands, 32>& in, Number&& number, Use&& use) {
  multiply<16, double>(
      [&](int row, int k) {
        return number(
            in[static_cast<std::size_t>(row % 8 * 4 + k % 8 / 2)].a[row / 8 + 2 * (k / 8)], k % 2);
      },
      [&](int k, int column) {
        return number(in[static_cast<std::size_t>(column * 4 + k % 8 / 2)].b[k / 8], k % 2);
      },
      use);
}

}  // namespace emulated

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __shared__
#define __shared__ static
#define cudaLaunchKernelEx ::emulated::launch

inline constexpr const ::emulated::Index& threadIdx = ::emulated::thread;
inline constexpr const ::emulated::Index& blockIdx = ::emulated::running.block;
inline constexpr const ::emulated::Index& blockDim = ::emulated::running.size;
inline constexpr const ::emulated::Index& gridDim = ::emulated::running.grid;

inline void __syncthreads() { emulated::synchronise(); }
inline int __syncthreads_count(int vote) { return emulated::sum_of_threads(vote != 0 ? 1 : 0); }
inline int __syncthreads_or(int vote) { return emulated::sum_of_threads(vote != 0 ? 1 : 0) > 0; }
inline int __syncthreads_and(int vote) { return emulated::sum_of_threads(vote == 0 ? 1 : 0) == 0; }
inline void __syncwarp(unsigned = ~0U) {
  emulated::together<int>("syncwarp", 0, [](const auto&, auto&) {});
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::from_lane("shfl.xor", value, [mask](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta) {
  return emulated::from_lane("shfl.up", value,
                             [delta](int lane) { return lane < delta ? lane : lane - delta; });
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  struct Ask {
    T value;
    int source;
  };
  return emulated::together<T>("shfl", Ask{value, source}, [](const auto& in, auto& out) {
    for (std::size_t lane = 0; lane < 32; ++lane)
      out[lane] = in[static_cast<std::size_t>(in[lane].source) % 32].value;
  });
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return emulated::together<unsigned>("vote", static_cast<int>(vote),
                                      [](const auto& in, auto& out) {
                                        unsigned votes = 0;
                                        for (std::size_t lane = 0; lane < 32; ++lane)
                                          votes |= in[lane] != 0 ? 1U << lane : 0U;
                                        out.fill(votes);
                                      });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }
inline int __reduce_min_sync(unsigned, int value) {
  return emulated::together<int>("redux.min", value, [](const auto& in, auto& out) {
    out.fill(*std::min_element(in.begin(), in.end()));
  });
}
inline int __reduce_max_sync(unsigned, int value) {
  return emulated::together<int>("redux.max", value, [](const auto& in, auto& out) {
    out.fill(*std::max_element(in.begin(), in.end()));
  });
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7U)) & 0xffU) << (8 * i);
  return result;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffffU, b & 0xffffU) | std::max(a >> 16, b >> 16) << 16;
}
inline float __uint_as_float(unsigned value) { return emulated::cast<float>(value); }
inline unsigned __float_as_uint(float value) { return emulated::cast<unsigned>(value); }
inline float __int_as_float(int value) { return emulated::cast<float>(value); }
inline int __float_as_int(float value) { return emulated::cast<int>(value); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
template <class T>
T atomicMax(T* place, T value) {
  return std::exchange(*place, std::max(*place, value));
}
template <class T>
T atomicXor(T* place, T value) {
  return std::exchange(*place, *place ^ value);
}
template <class T>
T atomicOr(T* place, T value) {
  return std::exchange(*place, *place | value);
}
template <class T>
T atomicExch(T* place, T value) {
  return std::exchange(*place, value);
}
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
template <class T>
T atomicAdd(T* place, T value) {
  return std::exchange(*place, *place + value);
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return emulated::both(
      a, [&](double x, int i) { return x * emulated::element(b, i) + emulated::element(c, i); });
}
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}
using std::max;
using std::min;
