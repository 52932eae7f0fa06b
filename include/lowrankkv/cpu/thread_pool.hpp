// SPDX-License-Identifier: Apache-2.0
/// @file cpu/thread_pool.hpp  A small fork-join pool: run(n, f) calls f(task, thread) for every
/// task, and returns when all have ended.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Threads that an engine and its caches can share. The library's results never depend on
/// the number of threads. run() is not reentrant, and only one thread at a time may call it. If
/// tasks throw, run() rethrows one of their exceptions after all tasks have ended.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread)
      workers_.emplace_back([this, thread] { work(thread); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// @brief Calls function(task, thread) for task in [0, num_tasks), thread in [0, num_threads()).
  /// No allocation.
  template <class Function>
  void run(std::int64_t num_tasks, Function&& function) {
    if (workers_.empty() || num_tasks <= 1) {
      for (std::int64_t task = 0; task < num_tasks; ++task) function(task, 0);
      return;
    }
    context_ = &function;
    call_ = [](void* context, std::int64_t task, int thread) {
      (*static_cast<std::remove_reference_t<Function>*>(context))(task, thread);
    };
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    drain(0);
    while (busy_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
#if !defined(LOWRANKKV_NO_EXCEPTIONS)
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
#endif
  }

 private:
  void drain(int thread) {
    for (std::int64_t task = next_.fetch_add(1); task < num_tasks_; task = next_.fetch_add(1)) {
#if defined(LOWRANKKV_NO_EXCEPTIONS)
      call_(context_, task, thread);
#else
      try {
        call_(context_, task, thread);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        failure_ = std::current_exception();
      }
#endif
    }
  }
  void work(int thread) {
    std::uint64_t seen = 0;
    for (;;) {
      // A decode step forks every few microseconds: spin briefly before sleeping.
      for (int spin = 0; spin < 2000 && generation_.load(std::memory_order_acquire) == seen;
           ++spin) {
        if (spin > 200) std::this_thread::yield();
      }
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        seen = generation_.load(std::memory_order_acquire);
        if (stop_) return;
      }
      drain(thread);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::int64_t num_tasks_ = 0;
  void* context_ = nullptr;
  void (*call_)(void*, std::int64_t, int) = nullptr;
  std::exception_ptr failure_;
  bool stop_ = false;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
