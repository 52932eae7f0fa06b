// SPDX-License-Identifier: Apache-2.0
// What a program costs that reads a calibration and decodes with a stack of Budgeted caches
// (bench/compile_time.py).
#include <lowrankkv/budgeted.hpp>
#include <lowrankkv/calibrate/bundle.hpp>
#include <lowrankkv/layer_stack.hpp>
#include <lowrankkv/lowrankkv.hpp>
#include <vector>

using namespace lowrankkv;

int main(int, char** arguments) {
  const CacheShape shape{.num_qo_heads = 8, .num_kv_heads = 2, .head_dim = 64};
  constexpr int kLayers = 4;
  const auto layers = calibrate::load_moments(arguments[1], shape, kLayers);
  const calibrate::BudgetedModel model = calibrate::budgeted(layers, {.ratio = 0.2});
  const CacheConfig config{.shape = shape, .max_tokens = 4096};
  LayerStack<Budgeted<>> stack(model.configs(config), model.bases, model.policies);
  stack.create(0);
  std::vector<float> query(8 * 64), key(2 * 64), value(2 * 64), out(8 * 64);
  for (int layer = 0; layer < kLayers; ++layer) {
    auto& cache = stack.layer(layer);
    cache.prefill(0, {query.data(), 1, 8, 64}, {key.data(), 1, 2, 64}, {value.data(), 1, 2, 64},
                  {out.data(), 1, 8, 64});
    cache.append(0, {key.data(), 1, 2, 64}, {value.data(), 1, 2, 64});
    cache.attend(0, {query.data(), 1, 8, 64}, {out.data(), 1, 8, 64});
  }
  stack.maintain(0);
  return out[0] > 0.0F ? 0 : 1;
}
