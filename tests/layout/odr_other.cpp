// SPDX-License-Identifier: Apache-2.0
#include "lowrankkv/lowrankkv.hpp"

std::int64_t other_unit() {
  lowrankkv::FullKV<> cache({.shape = {2, 1, 8}});
  cache.create(3);
  return cache.num_tokens(3);
}
