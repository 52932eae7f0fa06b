// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a calibration: an input is a byte, and then the file. Bits of the byte: 1 the pass
// of gradients reads it, 2 pre-RoPE keys are calibrated too, 4 a combined metric is gathered. A tab
// in the header stands for a state of random numbers, which takes 6 kB.
//
// What is accepted can be written and read again, and the calibration goes on.
#include "checkpoint.hpp"

#include <cstring>
#include <random>
#include <sstream>

#include "fuzz.hpp"
#include "lowrankkv/calibrate/bundle.hpp"

#if defined(LOWRANKKV_LIBFUZZER)
#include "safetensors_mutator.hpp"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t most, unsigned seed) {
  if (size < 2 || most < 2) return LLVMFuzzerMutate(data, size, most);
  if (seed % 32 == 0) data[0] = static_cast<std::uint8_t>(seed / 32 % 8);
  return 1 + fuzz::mutate_safetensors(data + 1, size - 1, most - 1, seed / 32);
}
#endif

namespace fuzz {
namespace {

using namespace lowrankkv;
using calibrate::CodingStatistics;
using calibrate::LayerMoments;

constexpr CacheShape kShape{1, 1, 2};
constexpr int kSinks = 4;

RopeConfig rope(Rope keys) {
  RopeConfig all;
  all.keys = keys;
  if (keys == Rope::pre) all.frequencies = {1.0};
  return all;
}

/// A calibration that nothing was added to.
llama::Calibration empty(int form) {
  llama::Calibration calibration;
  for (const Rope keys : {Rope::post, Rope::pre}) {
    if (keys == Rope::pre && (form & 2) == 0) continue;
    calibration.of(keys).assign(1, LayerMoments(kShape, rope(keys)));
    if ((form & 4) != 0)
      calibration.outputs(keys).assign(1, CodingStatistics(kShape, rope(keys), kSinks));
  }
  return calibration;
}

const std::string& random_state() {
  static const std::string state = [] {
    std::ostringstream stream;
    stream << std::mt19937_64(1);
    return stream.str();
  }();
  return state;
}

/// The file that an input stands for.
Bytes expanded(Input input) {
  std::uint64_t length = 0;
  if (input.size() < sizeof length) return {input.begin(), input.end()};
  std::memcpy(&length, input.data(), sizeof length);
  std::string text(text_of(input.subspan(sizeof length)));
  const std::size_t tab = text.find('\t');
  if (tab < length) {
    text.replace(tab, 1, random_state());
    length += random_state().size() - 1;
  }
  Bytes bytes(sizeof length);
  std::memcpy(bytes.data(), &length, sizeof length);
  const Bytes rest = bytes_of(text);
  bytes.insert(bytes.end(), rest.begin(), rest.end());
  return bytes;
}

/// Adds rows, whose sums are exact.
void add_rows(llama::Calibration& calibration) {
  const std::vector<float> keys{1, 0, 0.5F, -1, 2, 1, -1, 0.25F}, values{0, 1, 1, 1, -2, 0, 1, 3},
      queries{1, 1, -1, 0.5F, 0, 2, 1, 0};
  for (const Rope keys_form : {Rope::post, Rope::pre}) {
    for (LayerMoments& layer : calibration.of(keys_form)) {
      layer.add({queries.data(), 4, 1, 2}, {keys.data(), 4, 1, 2}, {values.data(), 4, 1, 2});
      layer.coding().add_residual_stream({values.data(), 4, 2});
    }
    for (CodingStatistics& coding : calibration.outputs(keys_form))
      coding.add_residual_stream({keys.data(), 4, 2});
  }
}

const llama::Checkpoint& checkpoint() {
  static const llama::Checkpoint job("file", {{"text", "prose"}});
  return job;
}

}  // namespace

bool accepts(Input input) {
  if (input.empty()) return false;
  const int form = std::to_integer<int>(input[0]);
  const bool of_gradients = (form & 1) != 0;
  llama::Calibration calibration = empty(form);
  llama::CalibrationPlace place;
  place.done = 7;
  try {
    if (!checkpoint().read(io::Safetensors(expanded(input.subspan(1))), place, calibration,
                           of_gradients)) {
      require(place.done == 7, "a file of the other pass leaves the place");
      return true;
    }
  } catch (const Error& error) {
    require(*error.what() != '\0', "an error has a text");
    require(place.done == 7, "a file that is refused leaves the place");
    return false;
  }
  require(place.done >= 0, "what is done is not negative");
  try {
    const Bytes copy = checkpoint().bytes(place, calibration);
    llama::Calibration again = empty(form);
    llama::CalibrationPlace other;
    checkpoint().read(io::Safetensors(copy), other, again, place.gradients);
    require(checkpoint().bytes(other, again) == copy, "a copy of a copy is the copy");
  } catch (const Error& error) {
    broken(std::string("what was written is refused: ") + error.what());
  }
  add_rows(calibration);
  for (const Rope keys : {Rope::post, Rope::pre}) {
    if (calibration.of(keys).empty()) continue;
    try {
      const Bytes bundle = calibrate::write_moments(calibration.of(keys)).bytes();
      static_cast<void>(calibrate::read_moments(io::Safetensors(bundle), kShape, 1));
    } catch (const Error& error) {  // sums that rows in f32 cannot have
    }
  }
  return true;
}

std::vector<Seed> seeds() {
  const auto file = [](int form, bool gradients) {
    llama::Calibration calibration = empty(form);
    add_rows(calibration);
    if (gradients) {
      for (LayerMoments& layer : calibration.post_rope) {
        layer.coding().set_metric(calibrate::CodingMetric::loss);
        layer.coding().gather_sinks();
      }
    }
    llama::CalibrationPlace place;
    place.gradients = gradients;
    place.done = 3;
    const Bytes bytes = checkpoint().bytes(place, calibration);
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    std::string text(text_of(Input(bytes).subspan(sizeof length)));
    text.replace(text.find(random_state()), random_state().size(), "\t");
    length -= random_state().size() - 1;
    Bytes input(1 + sizeof length, static_cast<std::byte>(form));
    std::memcpy(input.data() + 1, &length, sizeof length);
    const Bytes rest = bytes_of(text);
    input.insert(input.end(), rest.begin(), rest.end());
    return input;
  };
  return {{"moments", file(0, false)},
          {"both_forms", file(2, false)},
          {"gradients", file(1, true)},
          {"combined", file(5, true)}};
}

}  // namespace fuzz
