// SPDX-License-Identifier: Apache-2.0
// Every task runs once, and an exception of one reaches the caller.
#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "lowrankkv/cpu/thread_pool.hpp"

namespace thread_pool_tests {

using namespace lowrankkv;

TEST_CASE("the thread pool runs every task once, whatever the number of threads") {
  for (const int threads : {1, 2, 5}) {
    cpu::ThreadPool pool(threads);
    for (const int tasks : {0, 1, 3, 1000}) {
      std::vector<int> count(static_cast<std::size_t>(tasks), 0);
      pool.run(tasks, [&](std::int64_t task, int thread) {
        CHECK(thread < threads);
        ++count[static_cast<std::size_t>(task)];
      });
      for (const int n : count) CHECK(n == 1);
      if (tasks == 1000) {
        std::atomic<int> ran{0};
        CHECK_THROWS_AS(pool.run(tasks,
                                 [&](std::int64_t task, int) {
                                   ++ran;
                                   if (task == 500) throw std::runtime_error("a task");
                                 }),
                        std::runtime_error);
        CHECK((threads == 1 || ran == tasks));
      }
    }
  }
}

}  // namespace thread_pool_tests
