// SPDX-License-Identifier: Apache-2.0
/// @file cpu/executor.hpp  Executor: the threads that a cache's work runs on. An engine derives
/// from it to lend its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

#include "lowrankkv/config.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Runs tasks on several threads. Results of the library never depend on their number.
///
/// An engine that has threads already derives from this class and passes a
/// `std::shared_ptr<Executor>` to its caches. There are two implementations: cpu::ThreadPool
/// (std::thread) and cpu::OpenMP (cpu/openmp.hpp). Caches may share an executor, and be called from
/// several threads then: tasks of one call run at a time, those of the others wait.
class Executor {
 public:
  /// @brief The tasks of one call of run().
  class Tasks {
   public:
    /// @brief Does task `task`. Never throws.
    void operator()(std::int64_t task, int thread) const noexcept { call_(context_, task, thread); }

   private:
    friend class Executor;
    void* context_ = nullptr;
    void (*call_)(void*, std::int64_t, int) noexcept = nullptr;
  };

  virtual ~Executor() = default;
  /// @brief Number of threads, at least 1. Constant: a cache has memory for each of them.
  virtual int num_threads() const = 0;

  /// @brief Calls function(task, thread) for every task in [0, num_tasks), with thread in
  /// [0, num_threads()). If a task throws, rethrows one of the exceptions after all tasks have
  /// ended. Allocates nothing. Several threads may call it: they wait for each other, unless there
  /// is one task or one thread, which the caller is. Not reentrant: a task must not call it.
  template <class Function>
  void run(std::int64_t num_tasks, Function&& function) {
    if (num_tasks <= 1 || num_threads() == 1) {
      for (std::int64_t task = 0; task < num_tasks; ++task) function(task, 0);
      return;
    }
    Job<std::remove_reference_t<Function>> job{&function};
    Tasks tasks;
    tasks.context_ = &job;
    tasks.call_ = [](void* context, std::int64_t task, int thread) noexcept {
      static_cast<decltype(job)*>(context)->run(task, thread);
    };
    {
      const std::lock_guard one_caller(mutex_);
      run_tasks(num_tasks, tasks);
    }
#if !defined(LOWRANKKV_NO_EXCEPTIONS)
    if (job.error) std::rethrow_exception(job.error);
#endif
  }

 protected:
  /// @brief Calls tasks(task, thread) once for every task in [0, num_tasks), and returns when all
  /// calls have returned. Calls with the same `thread` never overlap. Called by one thread at a
  /// time.
  virtual void run_tasks(std::int64_t num_tasks, const Tasks& tasks) = 0;

 private:
  template <class Function>
  struct Job {
    Function* function;
#if defined(LOWRANKKV_NO_EXCEPTIONS)
    void run(std::int64_t task, int thread) { (*function)(task, thread); }
#else
    std::atomic_flag failed{};
    std::exception_ptr error{};
    void run(std::int64_t task, int thread) noexcept {
      try {
        (*function)(task, thread);
      } catch (...) {
        if (!failed.test_and_set()) error = std::current_exception();
      }
    }
#endif
  };
  std::mutex mutex_;  ///< one caller's tasks at a time
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
