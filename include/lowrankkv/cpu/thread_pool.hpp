// SPDX-License-Identifier: Apache-2.0
/// @file cpu/thread_pool.hpp  ThreadPool: an executor on threads of its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "lowrankkv/cpu/executor.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief The calling thread and num_threads - 1 workers.
///
/// run() waits only for workers that have taken a task: one that is slow to wake, because other
/// processes keep the cores busy, delays nothing. A worker that loses its core within a task delays
/// all. If that happens, run() does with a worker less for a while.
class ThreadPool final : public Executor {
  using Clock = std::chrono::steady_clock;

 public:
  explicit ThreadPool(int num_threads) : most_workers_((std::max)(0, num_threads - 1)) {
    for (int thread = 1; thread < num_threads; ++thread)
      workers_.emplace_back([this, thread] { work(thread); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() override {
    stop_.store(true, std::memory_order_relaxed);
    announce();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const override { return static_cast<int>(workers_.size()) + 1; }

 protected:
  void run_tasks(std::int64_t num_tasks, const Tasks& tasks) override {
    const Clock::time_point begin = Clock::now();
    adjust(begin);
    tasks_ = tasks;
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    if (most_workers_.load(std::memory_order_relaxed) == 0) return drain(0);
    joined_.store(0, std::memory_order_release);  // open: workers may join
    announce();
    drain(0);
    // No task is left. Nobody joins any more; those who have joined end their last task.
    std::uint32_t joined = joined_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    if (joined == kClosed) return;
    const Clock::time_point drained = Clock::now();
    // Sleeping frees this core for a worker that has lost its own.
    spin_until([&] { return (joined = joined_.load(std::memory_order_acquire)) == kClosed; });
    while (joined != kClosed) {
      joined_.wait(joined, std::memory_order_acquire);
      joined = joined_.load(std::memory_order_acquire);
    }
    const Clock::duration waited = Clock::now() - drained;
    if (waited > kStall && waited > drained - begin) note_stall(drained + waited);
  }

 private:
  /// joined_ is this bit, set while no tasks are handed out, and the number of workers that have
  /// joined.
  static constexpr std::uint32_t kClosed = std::uint32_t{1} << 31;
  static constexpr std::chrono::microseconds kSpin{200};   ///< before a thread sleeps
  static constexpr std::chrono::microseconds kStall{500};  ///< a longer wait means an interruption
  static constexpr std::chrono::milliseconds kShortestPause{20}, kLongestPause{200};

  /// Polls until done() or for kSpin.
  template <class Done>
  static void spin_until(Done&& done) {
    const Clock::time_point end = Clock::now() + kSpin;
    for (int polls = 1; !done(); ++polls) {
      if (polls % 64 == 0 && Clock::now() > end) return;
      relax();
    }
  }
  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  /// A worker was interrupted: one less from now on.
  void note_stall(Clock::time_point now) {
    most_workers_.fetch_sub(1, std::memory_order_relaxed);
    pause_ = std::clamp<Clock::duration>(2 * pause_, kShortestPause, kLongestPause);
    next_change_ = now + pause_;
  }
  /// One more worker, when it has gone well for long enough.
  void adjust(Clock::time_point now) {
    if (pause_ == Clock::duration::zero() || now < next_change_) return;
    const bool all = most_workers_.load(std::memory_order_relaxed) == num_threads() - 1;
    if (all)
      pause_ = Clock::duration::zero();
    else
      most_workers_.fetch_add(1, std::memory_order_relaxed);
    next_change_ = now + pause_;
  }
  void announce() {
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
  }
  void drain(int thread) {
    for (std::int64_t task = next_.fetch_add(1); task < num_tasks_; task = next_.fetch_add(1))
      tasks_(task, thread);
  }
  /// Whether this worker may take tasks. It then has to leave().
  bool join() {
    std::uint32_t joined = joined_.load(std::memory_order_relaxed);
    while ((joined & kClosed) == 0 &&
           static_cast<int>(joined) < most_workers_.load(std::memory_order_relaxed)) {
      if (joined_.compare_exchange_weak(joined, joined + 1, std::memory_order_acq_rel,
                                        std::memory_order_relaxed))
        return true;
    }
    return false;
  }
  void leave() {
    if (joined_.fetch_sub(1, std::memory_order_acq_rel) == kClosed + 1) joined_.notify_one();
  }
  void work(int thread) {
    std::uint32_t seen = 0;
    for (;;) {
      // A decode step calls run() every few microseconds.
      spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; });
      generation_.wait(seen, std::memory_order_acquire);
      seen = generation_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      if (!join()) continue;
      drain(thread);
      leave();
    }
  }

  std::atomic<int> most_workers_{0};  ///< that may join
  Clock::duration pause_{};           ///< until the next change of most_workers_, after a stall
  Clock::time_point next_change_{};
  std::atomic<std::uint32_t> generation_{0}, joined_{kClosed};
  std::atomic<std::int64_t> next_{0};
  std::atomic<bool> stop_{false};
  std::int64_t num_tasks_ = 0;
  Tasks tasks_;
  std::vector<std::thread> workers_;  // last: they use what is above
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
