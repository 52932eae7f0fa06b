// SPDX-License-Identifier: Apache-2.0
// Workspaces that the caller lends.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/support/compositions.cuh"

namespace workspace_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too
using support::host;
using support::poisoned;
using support::Random;

TEST_CASE("layers work in memory that the caller lends, one after the other, as in their own") {
  Random random(53);
  CacheConfig config;
  config.shape = {8, 2, 64};
  config.max_tokens = 3000;
  config.max_sequences = 2;
  config.max_query_tokens = 3;
  const auto layer = support::random_layer(random, config.shape, {}, 20);
  OjaKV<Cuda>::PolicySet policies;
  policies.token_policy = {4, 32};
  const std::size_t bytes = OjaKV<Cuda>::workspace_bytes(config, layer.basis, policies);
  const gpu::DeviceArray<std::uint8_t> memory(bytes + 128);
  const auto message = [&](std::uint8_t* data, std::size_t size) {
    try {
      OjaKV<Cuda> cache(config, layer.basis, policies, nullptr, {data, size});
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message(memory.data(), bytes - 1)
            .find(std::to_string(bytes - 1) + " bytes lent, " + std::to_string(bytes) +
                  " needed") != std::string::npos);
  CHECK(message(memory.data() + 8, bytes).find("8 bytes off") != std::string::npos);
  OjaKV<Cuda> own(config, layer.basis, policies),
      first(config, layer.basis, policies, nullptr, {memory.data(), bytes}),
      second(config, layer.basis, policies, nullptr, {memory.data(), bytes});
  CHECK(own.workspace_bytes() == bytes);
  CHECK(first.memory().reserved_bytes + bytes == own.memory().reserved_bytes);
  const auto key = layer.rows(random, 2500, true), value = layer.rows(random, 2500, false),
             query = layer.queries(random, 32);
  const gpu::DeviceArray<float> k(key), v(value), q(query);
  std::vector<std::vector<float>> outputs;
  for (OjaKV<Cuda>* cache : {&own, &first, &second}) {
    cache->create(7);
    cache->ingest(7, {k.data(), 2500, 2, 64}, {v.data(), 2500, 2, 64}, {q.data(), 32, 8, 64});
    const auto out = poisoned(3 * 8 * 64);
    cache->attend(7, {q.data(), 3, 8, 64}, {out.data(), 3, 8, 64});
    outputs.push_back(host(out));
  }
  CHECK(outputs[1] == outputs[0]);
  CHECK(outputs[2] == outputs[0]);
}

}  // namespace workspace_tests
