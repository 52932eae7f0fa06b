// SPDX-License-Identifier: Apache-2.0
// States of STAR-KV's training: an input is one for a model of kShape. What is accepted can be
// saved, takes a step, and gives a cache's maps, or errors that say why not.
#include <cmath>

#include "fuzz.hpp"
#include "lowrankkv/train/star_kv_maps.hpp"
#include "lowrankkv/train/star_kv_state.hpp"

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
using Eigen::MatrixXd;
using train::Decomposition;
using train::StarKvTraining;

constexpr CacheShape kShape{2, 2, 2};
constexpr int kLayers = 2;

StarKvTraining read(const Bytes& bytes) {
  return train::read_star_kv(io::Safetensors(bytes), kShape, kLayers);
}

Bytes write(const StarKvTraining& training) { return train::write_star_kv(training).bytes(); }

/// What a program makes of a state; errors are those of the library.
void use(StarKvTraining& training) {
  for (int i = 0; i < kLayers; ++i) {
    try {
      const MatrixXd keys = training.key_weight(i), values = training.value_weight(i);
      training.move(i, training.gradient(i, keys, values));
      const train::StarKvLayer& layer = training.layer(i);
      const auto up = train::truncated(layer.keys), joint = train::truncated(layer.values);
      for (const HeadBasis& head : train::star_kv_basis(up, joint, kShape).heads) {
        for (const auto* map : {&head.key_down, &head.value_down}) {
          for (const float value : *map) require(std::isfinite(value), "maps are finite");
        }
      }
    } catch (const Error&) {
    }
  }
  try {
    training.finish_step();
  } catch (const Error&) {
  }
}

}  // namespace

bool accepts(Input input) {
  const auto accepted = [&]() -> bool {
    try {
      static_cast<void>(read(Bytes(input.begin(), input.end())));
    } catch (const FormatError&) {
      return false;
    } catch (const ShapeError&) {
      return false;
    } catch (const ValueError&) {
      return false;
    }
    return true;
  };
  if (!accepted()) return false;
  StarKvTraining training = read(Bytes(input.begin(), input.end()));
  try {
    const Bytes copy = write(training);
    require(write(read(copy)) == copy, "a copy of a copy is the copy");
    use(training);
    static_cast<void>(read(write(training)));
  } catch (const Error& error) {
    broken(std::string("what was written is refused: ") + error.what());
  }
  return true;
}

std::vector<Seed> seeds() {
  const auto state = [](Decomposition keys, Decomposition values,
                        const train::StarKvProgress& progress) {
    train::StarKvOptions options;
    options.keys = keys;
    options.values = values;
    options.compress_steps = 3;
    options.recover_steps = 2;
    options.key_share = 0.5;
    options.protected_layers = {0};
    // Numbers that no compiler rounds.
    const auto projection = [](Decomposition decomposition) {
      const bool joint = decomposition == Decomposition::joint;
      train::StarKvProjection all;
      for (int block = 0; block < (joint ? 1 : kShape.num_kv_heads); ++block) {
        train::StarKvFactors factors;
        factors.left = MatrixXd::Identity(joint ? 4 : 2, 2);
        factors.sigma = Eigen::Vector2d(2.0, 0.5);
        factors.right = MatrixXd::Identity(3, 2);
        factors.alpha = 1.0;
        all.blocks.push_back(factors);
      }
      return all;
    };
    std::vector<train::StarKvLayer> layers(kLayers);
    layers[1] = {projection(keys), projection(values)};
    return write(StarKvTraining(options, kShape, layers, progress));
  };
  using enum train::StarKvPhase;
  return {{"first_phase", state(Decomposition::head_wise, Decomposition::joint,
                                {.step = 1, .phase_steps = 1, .keys_stopped = true})},
          {"second_phase", state(Decomposition::joint, Decomposition::head_wise,
                                 {.phase = recover, .step = 4, .phase_steps = 1})},
          {"finished", state(Decomposition::head_wise, Decomposition::head_wise,
                             {.phase = finished, .step = 5})}};
}

}  // namespace fuzz
