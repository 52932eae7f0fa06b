// SPDX-License-Identifier: Apache-2.0
#include "lowrankkv/lowrankkv.hpp"

std::int64_t other_unit();

int main() {
  lowrankkv::FullKV<> cache({.shape = {2, 1, 8}});
  cache.create(1);
  return cache.num_tokens(1) == other_unit() ? 0 : 1;
}
