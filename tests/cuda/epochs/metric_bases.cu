// SPDX-License-Identifier: Apache-2.0
// Bases that move in a metric of the queries.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "cuda/support/attention_error.cuh"

namespace metric_bases_tests {

using namespace lowrankkv;
using support::attention_error;
using support::DeviceCache;
using support::message_of;
using support::Random;

namespace {

using Moving = CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>;

}  // namespace

TEST_CASE(
    "bases move in a metric of any spread: what they decode is not clipped, and states of another "
    "metric are not theirs") {
  Random random(962);
  constexpr int dim = 64, rank = 24, tokens = 400, strong = 40;
  // R U and R^-1 U are the same axes whatever `rest` is, until the basis moves.
  const auto basis_of = [](float rest) {
    HeadBasis head;
    head.key_rank = head.value_rank = rank;
    for (std::vector<float>* map : {&head.key_down, &head.query_down, &head.value_down}) {
      map->assign(dim * rank, 0.0F);
      for (int i = 0; i < rank; ++i) (*map)[static_cast<std::size_t>(i * rank + i)] = 1.0F;
    }
    for (const auto& [matrix, value] :
         {std::pair{&head.key_metric, rest}, std::pair{&head.key_metric_inverse, 1.0F / rest}}) {
      matrix->assign(dim * dim, 0.0F);
      for (int i = 0; i < dim; ++i)
        (*matrix)[static_cast<std::size_t>(i * dim + i)] = i < 32 ? 1.0F : value;
    }
    LayerBasis basis;
    basis.heads.push_back(head);
    return basis;
  };
  for (const Rope keys : {Rope::post, Rope::pre}) {
    CacheConfig config;
    config.shape = {2, 1, dim};
    config.max_sequences = 2;
    config.max_tokens = 600;
    config.rope.keys = keys;
    Moving::PolicySet policies;
    policies.basis.key_metric = KeyMetric::query_aware;
    policies.token_policy = {4, 20};
    policies.updater.prefill_share = 1.0F;
    policies.updater.prefill_rate =
        1e6F;  // all that is left of the first basis is where the new one begins
    DeviceCache<Moving> device(config, basis_of(0.0005F), policies),
        other(config, basis_of(1.0F), policies);
    std::normal_distribution<float> normal;
    std::vector<float> key, value, query;
    for (int i = 0; i < (tokens + 1) * dim; ++i) {
      key.push_back(0.1F * normal(random));
      value.push_back(normal(random));
    }
    for (int i = 0; i < 2 * dim; ++i)
      query.push_back(i % dim == strong ? 1e-4F * normal(random) : normal(random));
    for (int token = 0; token <= tokens; ++token) {
      const float along = normal(random);
      key[static_cast<std::size_t>(token * dim)] += along;
      key[static_cast<std::size_t>(token * dim + strong)] += 1e4F * along;
    }
    device.cache.create(1);
    device.ingest(1, {key.begin(), key.end() - dim}, {value.begin(), value.end() - dim});
    const SequenceId one = 1;
    device.append(std::span(&one, 1), {key.end() - dim, key.end()},
                  {value.end() - dim, value.end()});
    CHECK(device.cache.statistics().publications == 1);
    std::vector<float> own_key, own_value;
    device.reconstruct(1, own_key, own_value);
    double error = 0.0, energy = 0.0;
    for (std::size_t i = strong; i < own_key.size(); i += dim) {
      error += std::pow(static_cast<double>(own_key[i]) - static_cast<double>(key[i]), 2);
      energy += std::pow(static_cast<double>(key[i]), 2);
    }
    CHECK(std::sqrt(error / energy) < 5e-3);
    CHECK(attention_error(config, device, 1, query, device.attend(std::span(&one, 1), query)) <
          4e-3);
    CHECK(message_of([&] {
            other.cache.load(1, device.save(1));
          }).find("metrics that bases move in") != std::string::npos);
    CHECK(!other.cache.contains(1));
  }
}

}  // namespace metric_bases_tests
