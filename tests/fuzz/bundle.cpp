// SPDX-License-Identifier: Apache-2.0
// Calibration bundles: an input is one for a model of kShape. What is accepted can be saved, and
// gives bases and bits, or errors that say why not.
#include "lowrankkv/calibrate/bundle.hpp"

#include <array>
#include <cmath>

#include "fuzz.hpp"
#include "lowrankkv/budgeted.hpp"

#if defined(LOWRANKKV_LIBFUZZER)
#include "safetensors_mutator.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t most, unsigned seed) {
  return fuzz::mutate_safetensors(data, size, most, seed);
}
#endif

namespace fuzz {
namespace {

using namespace lowrankkv;
using calibrate::LayerMoments;

constexpr CacheShape kShape{1, 1, 2};
constexpr int kLayers = 1;

void check_basis(const LayerBasis& basis) {
  for (const HeadBasis& head : basis.heads) {
    for (const auto* map :
         {&head.key_down, &head.query_down, &head.value_down, &head.output_up, &head.key_mean,
          &head.value_mean, &head.key_metric, &head.key_metric_inverse}) {
      for (const float value : *map) require(std::isfinite(value), "maps are finite");
    }
  }
}

// What a program makes of a bundle; errors are those of the library.
void use(const std::vector<LayerMoments>& layers) {
  for (const bool query_aware : {false, true}) {
    try {
      calibrate::BasisOptions options;
      options.key_energy = 0.9;
      options.policy.centred = query_aware;
      if (query_aware) options.policy.key_metric = KeyMetric::query_aware;
      for (const LayerMoments& layer : layers) check_basis(layer.basis(options));
    } catch (const Error&) {
    }
  }
  try {
    calibrate::BudgetOptions options;
    options.ratio = 0.5;
    options.context = 512;
    for (const LayerBasis& basis : calibrate::budgeted(layers, options).bases) check_basis(basis);
  } catch (const Error&) {
  }
}

std::vector<LayerMoments> read(const Bytes& bytes) {
  return calibrate::read_moments(io::Safetensors(bytes), kShape, kLayers);
}

}  // namespace

bool accepts(Input input) {
  std::vector<LayerMoments> layers;
  try {
    layers = read(Bytes(input.begin(), input.end()));
  } catch (const FormatError&) {
    return false;
  } catch (const ShapeError&) {
    return false;
  }
  try {
    const Bytes copy = calibrate::write_moments(layers).bytes();
    require(calibrate::write_moments(read(copy)).bytes() == copy, "a copy of a copy is the copy");
  } catch (const Error& error) {
    broken(std::string("what was written is refused: ") + error.what());
  }
#if defined(LOWRANKKV_LIBFUZZER)
  if (checksum(input) % 8 != 0) return true;  // takes ten times as long as the rest
#endif
  use(layers);
  return true;
}

std::vector<Seed> seeds() {
  const auto bundle = [](const RopeConfig& rope, bool coded) {
    LayerMoments layer(kShape, rope);
    // Numbers of which every sum is exact: all compilers write the same bytes.
    const std::array<float, 8> keys{1, 0, 0.5F, -1, 2, 1, -1, 0.25F},
        values{0, 1, 1, 1, -2, 0, 1, 3}, queries{1, 1, -1, 0.5F, 0, 2, 1, 0};
    layer.add({queries.data(), 4, 1, 2}, {keys.data(), 4, 1, 2}, {values.data(), 4, 1, 2});
    if (coded) {
      auto& head = layer.coding().head(0);
      head.key = layer.head(0).key;
      head.value = layer.head(0).value;
      head.key_metric = head.value_metric = layer.head(0).query.second;
      layer.coding().set_num_queries(4.0);
      layer.coding().add_residual_stream({values.data(), 4, 2});
    }
    return calibrate::write_moments({layer}, {{"source", "seed"}}).bytes();
  };
  RopeConfig pre;
  pre.keys = Rope::pre;
  pre.pairing = RopePairing::interleaved;
  pre.frequencies = {1.0};
  return {{"post_rope", bundle({}, true)},
          {"pre_rope", bundle(pre, true)},
          {"not_coded", bundle({}, false)}};
}

}  // namespace fuzz
