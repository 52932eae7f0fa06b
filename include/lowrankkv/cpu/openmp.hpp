// SPDX-License-Identifier: Apache-2.0
/// @file cpu/openmp.hpp  OpenMP: an executor on the threads of OpenMP. Only where the compiler has
/// OpenMP enabled (-fopenmp).
#pragma once

#include <cstdint>

#include "lowrankkv/cpu/executor.hpp"

#if defined(_OPENMP)
#include <omp.h>

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief Runs a cache's work on the threads of OpenMP, for engines whose own loops run there.
class OpenMP final : public Executor {
 public:
  /// @param num_threads  0: as many as OpenMP would use now
  explicit OpenMP(int num_threads = 0)
      : num_threads_(num_threads > 0 ? num_threads : omp_get_max_threads()) {}
  int num_threads() const override { return num_threads_; }

 protected:
  void run_tasks(std::int64_t num_tasks, const Tasks& tasks) override {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads_)
    for (std::int64_t task = 0; task < num_tasks; ++task) tasks(task, omp_get_thread_num());
  }

 private:
  int num_threads_;
};

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
#endif
