// SPDX-License-Identifier: Apache-2.0
// Files of trainings and files of maps: an input is either, maps for a model of kShape. What is
// accepted can be saved, and gives ranks and maps, or errors that say why not.
#include <cmath>

#include "fuzz.hpp"
#include "lowrankkv/train/dlrp_file.hpp"
#include "lowrankkv/train/dlrp_fold.hpp"
#include "lowrankkv/train/map_file.hpp"

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

constexpr CacheShape kShape{2, 1, 2};
constexpr int kLayers = 1;

// What a program makes of a training; errors are those of the library.
void use(train::DlrpTraining training) {
  try {
    if (training.stage == train::DlrpStage::regularised) train::begin_fine_tuning(training, 0.7);
    for (int layer = 0; layer < training.projectors.num_layers; ++layer) {
      const bool before = training.projectors.options.geometry == train::DlrpGeometry::before_rope;
      const LayerBasis basis = before ? train::padded_basis(training.projectors, layer)
                                      : train::projector_basis(training.projectors, layer);
      for (const HeadBasis& head : basis.heads) {
        for (const auto* map :
             {&head.key_down, &head.query_down, &head.value_down, &head.output_up}) {
          for (const float value : *map) require(std::isfinite(value), "maps are finite");
        }
      }
    }
  } catch (const Error&) {
  }
}

bool accepts_maps(const io::Safetensors& file) {
  const auto copy_of = [](const io::Safetensors& from) {
    return train::write_maps(train::read_maps(from, kShape, kLayers), kShape).bytes();
  };
  Bytes copy;
  try {
    copy = copy_of(file);
  } catch (const Error&) {
    return false;
  }
  require(copy_of(io::Safetensors(copy)) == copy, "a copy of a copy is the copy");
  return true;
}

}  // namespace

bool accepts(Input input) {
  train::DlrpTraining training;
  try {
    const io::Safetensors file(Bytes(input.begin(), input.end()));
    const auto format = file.metadata().find("format");
    if (format != file.metadata().end() && format->second == "lowrankkv.maps")
      return accepts_maps(file);
    training = train::read_training(file);
  } catch (const FormatError&) {
    return false;
  } catch (const ShapeError&) {
    return false;
  } catch (const ValueError&) {
    return false;
  }
  try {
    const Bytes copy = train::write_training(training).bytes();
    const auto again = train::read_training(io::Safetensors(copy));
    require(train::write_training(again).bytes() == copy, "a copy of a copy is the copy");
  } catch (const Error& error) {
    broken(std::string("what was written is refused: ") + error.what());
  }
  use(std::move(training));
  return true;
}

std::vector<Seed> seeds() {
  const auto training = [](train::DlrpGeometry geometry, int num_factors, bool low_rank) {
    train::DlrpOptions options;
    options.num_factors = num_factors;
    options.hidden = 3;
    options.geometry = geometry;
    if (low_rank) options.pairing = RopePairing::interleaved;
    train::DlrpTraining begun = train::begin_training(kShape, kLayers, options);
    // Numbers of which every sum is exact: all compilers write the same bytes.
    for (auto& factor : begun.projectors.factors) factor(0, 1) = 0.5;
    begun.step = 12;
    begun.last = {1.0, 2.0, 1.5};
    if (low_rank)
      train::begin_fine_tuning(begun, 0.5, train::RankScope::layer, train::LowRankStart::identity);
    return begun;
  };
  const auto before = training(train::DlrpGeometry::before_rope, 1, false);
  const auto after = training(train::DlrpGeometry::after_rope, 2, true);
  return {{"before_rope", train::write_training(before).bytes()},
          {"after_rope", train::write_training(after).bytes()},
          {"maps", train::write_maps({train::projector_basis(after.projectors, 0)}, kShape,
                                     Rope::post, {{"source", "seed"}})
                       .bytes()}};
}

}  // namespace fuzz
