// SPDX-License-Identifier: Apache-2.0
// Every task runs once, and an exception of one reaches the caller, on every executor; an engine's
// own executor gives the same answers.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "lowrankkv/cpu/openmp.hpp"
#include "lowrankkv/cpu/thread_pool.hpp"
#include "lowrankkv/presets.hpp"

namespace thread_pool_tests {

using namespace lowrankkv;

/// An engine's threads: here one that does everything, last task first, under another number.
class Backwards final : public cpu::Executor {
 public:
  int num_threads() const override { return 3; }

 protected:
  void run_tasks(std::int64_t num_tasks, const Tasks& tasks) override {
    while (num_tasks-- > 0) tasks(num_tasks, 2);
  }
};

std::vector<std::shared_ptr<cpu::Executor>> executors() {
  std::vector<std::shared_ptr<cpu::Executor>> all = {
      std::make_shared<cpu::ThreadPool>(1), std::make_shared<cpu::ThreadPool>(2),
      std::make_shared<cpu::ThreadPool>(5), std::make_shared<Backwards>()};
#if defined(_OPENMP)
  all.push_back(std::make_shared<cpu::OpenMP>(3));
#endif
  return all;
}

TEST_CASE("executors run every task once, and rethrow after all have ended") {
  for (const auto& executor : executors()) {
    for (const int tasks : {0, 1, 3, 1000}) {
      std::vector<int> count(static_cast<std::size_t>(tasks), 0);
      std::atomic<bool> in_range{true};
      executor->run(tasks, [&](std::int64_t task, int thread) {
        if (thread < 0 || thread >= executor->num_threads()) in_range = false;
        ++count[static_cast<std::size_t>(task)];
      });
      CHECK(in_range);
      for (const int n : count) CHECK(n == 1);
      if (tasks == 1000) {
        std::atomic<int> ran{0};
        CHECK_THROWS_AS(executor->run(tasks,
                                      [&](std::int64_t task, int) {
                                        ++ran;
                                        if (task == 500) throw std::runtime_error("a task");
                                      }),
                        std::runtime_error);
        CHECK((executor->num_threads() == 1 || ran == tasks));
      }
    }
  }
}

TEST_CASE("calls one after the other, short and long: no task is lost, none runs twice") {
  cpu::ThreadPool pool(4);
  std::atomic<std::int64_t> sum{0};
  std::int64_t expected = 0;
  for (int call = 0; call < 20000; ++call) {
    const int tasks = 2 + call % 7;
    pool.run(tasks, [&](std::int64_t task, int) {
      sum.fetch_add(task + 1, std::memory_order_relaxed);
      // Now and then a worker is late, as if another process had taken its core.
      if (call % 2000 == 0 && task == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    });
    expected += tasks * (tasks + 1) / 2;
    REQUIRE(sum == expected);
  }
}

TEST_CASE("a cache gives the same bits on every executor") {
  const CacheShape shape{4, 2, 32};
  std::vector<float> rows(60 * 64), q(128), first;
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = 0.01F * static_cast<float>(i * 37 % 199) - 1.0F;
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = rows[i + 100];
  for (const auto& executor : executors()) {
    FullKV<> cache({.shape = shape, .max_tokens = 100}, {}, {}, nullptr, executor);
    cache.create(0);
    cache.append_maintained(0, {rows.data(), 60, 2, 32}, {rows.data(), 60, 2, 32});
    std::vector<float> out(q.size());
    cache.attend(0, {q.data(), 1, 4, 32}, {out.data(), 1, 4, 32});
    if (first.empty()) first = out;
    CHECK(out == first);
  }
}

}  // namespace thread_pool_tests
