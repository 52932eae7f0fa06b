// SPDX-License-Identifier: Apache-2.0
// Takes the place of CUB's where kernels run on the host.
#pragma once

#include "emulator.hpp"

namespace cub {

template <class T, int threads>
class BlockScan {
 public:
  struct TempStorage {
    T values[threads];
  };
  explicit BlockScan(TempStorage& storage) : storage_(storage) {}
  void ExclusiveSum(T mine, T& before, T& all) {
    __syncthreads();
    storage_.values[threadIdx.x] = mine;
    __syncthreads();
    before = all = T{};
    for (unsigned i = 0; i < static_cast<unsigned>(threads); ++i) {
      if (i < threadIdx.x) before += storage_.values[i];
      all += storage_.values[i];
    }
    __syncthreads();
  }
  void ExclusiveSum(T mine, T& before) {
    T all;
    ExclusiveSum(mine, before, all);
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub
