// SPDX-License-Identifier: Apache-2.0
// A calibration that is stopped and goes on gives what one gives that was never stopped.
#include "checkpoint.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "loss_metric.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "nano_engine.hpp"

namespace {

using namespace llama;
using lowrankkv::Rope;
using lowrankkv::calibrate::CodingMetric;

const std::string kPath = "calibration_checkpoint_test.safetensors";

struct Stopped : std::runtime_error {
  Stopped() : std::runtime_error("stopped") {}
};

/// The two bundles of a run. With a checkpoint it stops behind the `stop`-th file that it writes.
std::array<std::vector<std::byte>, 2> bundles(const Engine& engine, CodingMetric metric,
                                              Checkpoint* checkpoint = nullptr, int stop = 0) {
  const auto tokens =
      calibration_tokens(engine, {read_text(kData + "/text/calibration_prose.txt")}, 1000);
  if (checkpoint != nullptr) {
    checkpoint->on_saved = [stop]() mutable {
      if (--stop == 0) throw Stopped();
    };
  }
  Calibration calibration =
      calibrate(engine, tokens, 300, {Rope::post, Rope::pre},
                metric == CodingMetric::loss ? metric : CodingMetric::output, checkpoint);
  if (metric != CodingMetric::output)
    use_loss_metric(engine, tokens, {600, 200, true, metric == CodingMetric::combined}, calibration,
                    checkpoint);
  return {lowrankkv::calibrate::write_moments(calibration.post_rope).bytes(),
          lowrankkv::calibrate::write_moments(calibration.pre_rope).bytes()};
}

}  // namespace

TEST_CASE("a stopped calibration goes on and gives the same bundles, byte for byte") {
  for (const CodingMetric metric :
       {CodingMetric::loss, CodingMetric::output, CodingMetric::combined}) {
    std::filesystem::remove(kPath);
    const auto whole = bundles(nano(), metric);
    // Memory elsewhere, and another number of threads, are no reasons for other sums.
    const std::vector<float> elsewhere(12345);
    const auto other = std::make_unique<Engine>(kData + "/nano", 3);
    CHECK(bundles(*other, metric) == whole);
    int runs = 0;
    for (bool done = false; !done; ++runs) {
      // Every run writes one file and stops: the last has nothing left to do.
      Checkpoint checkpoint(kPath, {{"text", "prose"}}, 0.0);
      try {
        const auto resumed = bundles(runs % 2 == 0 ? nano() : *other, metric, &checkpoint, 1);
        CHECK(resumed == whole);
        done = true;
        checkpoint.remove();
      } catch (const Stopped&) {
        CHECK(std::filesystem::exists(kPath));
        CHECK(!std::filesystem::exists(kPath + ".part"));
      }
      REQUIRE(runs < 20);
    }
    // 4 windows of moments, or 5 that are whole and half in turn; 3 of gradients.
    CHECK(runs == (metric == CodingMetric::loss ? 8 : metric == CodingMetric::output ? 6 : 9));
    CHECK(!std::filesystem::exists(kPath));
  }
}

TEST_CASE("a checkpoint of another run is refused, and both values are named") {
  std::filesystem::remove(kPath);
  Checkpoint checkpoint(kPath, {{"tokens", "1000"}, {"metric", "loss"}}, 0.0);
  CHECK_THROWS_AS(bundles(nano(), CodingMetric::loss, &checkpoint, 2), Stopped);
  const auto run_of = [&](Checkpoint::Job job) {
    Checkpoint other(kPath, std::move(job));
    bundles(nano(), CodingMetric::loss, &other);
  };
  CHECK_THROWS_WITH_AS(
      run_of({{"tokens", "2000"}, {"metric", "loss"}}),
      ("checkpoint " + kPath + ": tokens 1000, of this run 2000; remove the file to begin again")
          .c_str(),
      lowrankkv::ValueError);
  CHECK_THROWS_WITH(run_of({{"tokens", "1000"}}),
                    doctest::Contains("metric loss, of this run missing"));
  CHECK_THROWS_WITH(run_of({{"tokens", "1000"}, {"metric", "loss"}, {"sinks", "yes"}}),
                    doctest::Contains("sinks missing, of this run yes"));
  // A file that was cut off, one of another kind, and a calibration of other extents.
  const auto refused = [&](const std::string& expected) {
    Checkpoint again(kPath, {{"tokens", "1000"}, {"metric", "loss"}});
    CalibrationPlace place;
    Calibration calibration;
    calibration.post_rope.assign(1, lowrankkv::calibrate::LayerMoments({2, 1, 8}));
    CHECK_THROWS_WITH_AS(again.restore(place, calibration), doctest::Contains(expected.c_str()),
                         lowrankkv::Error);
    CHECK(place.done == 0);
  };
  refused("numbers of rows, 579 and 0 expected");
  const auto size = std::filesystem::file_size(kPath);
  std::filesystem::resize_file(kPath, size - 1);
  refused("data has");
  lowrankkv::calibrate::save_moments(kPath, std::vector<lowrankkv::calibrate::LayerMoments>(
                                                1, lowrankkv::calibrate::LayerMoments({2, 1, 8})));
  refused(
      "format lowrankkv.moments version 5, expected lowrankkv.calibration_checkpoint version 1");
  std::filesystem::remove(kPath);
}

TEST_CASE("a checkpoint whose place or numbers cannot be is refused, and they are named") {
  using lowrankkv::calibrate::LayerMoments;
  const auto layers = [] {
    Calibration calibration;
    calibration.post_rope.assign(1, LayerMoments({1, 1, 2}));
    return calibration;
  };
  const Checkpoint checkpoint("file", {});
  const Calibration written = layers();
  const std::vector<std::byte> good = checkpoint.bytes({}, written);
  const auto message = [&](const std::vector<std::byte>& bytes) {
    Calibration calibration = layers();
    CalibrationPlace place;
    place.done = 7;
    try {
      const bool read =
          checkpoint.read(lowrankkv::io::Safetensors(bytes), place, calibration, false);
      CHECK(read);
      CHECK(place.done == 0);
    } catch (const lowrankkv::FormatError& error) {
      CHECK(place.done == 7);
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(message(good) == "nothing was raised");
  // The same length: the header's stays right.
  const auto with = [&](const std::string& text, const std::string& other) {
    REQUIRE(text.size() == other.size());
    std::vector<std::byte> bytes = good;
    const auto wanted = std::as_bytes(std::span(text));
    const auto at = std::search(bytes.begin(), bytes.end(), wanted.begin(), wanted.end());
    REQUIRE(at != bytes.end());
    std::ranges::copy(std::as_bytes(std::span(other)), at);
    return message(bytes);
  };
  CHECK(with("\"moments\"", "\"momemts\"") ==
        "checkpoint file: pass is momemts, moments or gradients expected");
  CHECK(with("\"half\":\"0\"", "\"half\":\"2\"") == "checkpoint file: half is 2, 0 or 1 expected");
  CHECK(with("\"done\":\"0\"", "\"done\":\"x\"") ==
        "checkpoint file: done is x, a number of tokens or windows expected");
  CHECK(with("\"random\":\"1 ", "\"random\":\"x ").starts_with("checkpoint file: random is 'x "));
  // The first sum says whether the metric is that of the loss, the second counts queries.
  const auto with_sum = [&](std::size_t place, double value) {
    std::vector<std::byte> bytes = good;
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    std::memcpy(bytes.data() + 8 + header + 8 * place, &value, sizeof value);
    return message(bytes);
  };
  CHECK(with_sum(0, 2.0) == "checkpoint file: post_rope: sum 0 is 2, 0 or 1 expected");
  CHECK(with_sum(1, -1.0) ==
        "checkpoint file: post_rope: sum 1 is of -1 rows, 0 to 9.0072e+15 expected");
  CHECK(with_sum(5, HUGE_VAL) == "checkpoint file: post_rope: sum 5 is inf, finite expected");
}

TEST_CASE("a checkpoint that has done more than there is to do is refused with both numbers") {
  const std::vector<std::int32_t> tokens(300, 7);
  std::filesystem::remove(kPath);
  Checkpoint checkpoint(kPath, {}, 0.0);
  CalibrationPlace place;
  Calibration calibration =
      calibrate(nano(), tokens, 300, {Rope::post}, CodingMetric::loss, nullptr);
  place.done = 301;
  checkpoint.save(place, calibration);
  CHECK_THROWS_WITH(calibrate(nano(), tokens, 300, {Rope::post}, CodingMetric::loss, &checkpoint),
                    "calibration: the checkpoint has done 301 tokens, the text has 300");
  place.gradients = true;
  place.done = 3;
  checkpoint.save(place, calibration);
  CHECK_THROWS_WITH(use_loss_metric(nano(), tokens, {300, 200}, calibration, &checkpoint),
                    "calibration: the checkpoint has done 3 windows of gradients, there are 1");
  checkpoint.remove();
}

TEST_CASE("files are written when the pause has passed, and where they cannot be, it says so") {
  std::filesystem::remove(kPath);
  Checkpoint rare(kPath, {}, 1e6);
  Calibration calibration;
  rare.save({}, calibration);
  CHECK(!std::filesystem::exists(kPath));
  rare.save({}, calibration, true);
  CHECK(std::filesystem::exists(kPath));
  rare.remove();
  Checkpoint nowhere("no_such_folder/file", {}, 0.0);
  CHECK_THROWS_WITH(nowhere.save({}, calibration), doctest::Contains("no_such_folder/file.part"));
}

TEST_CASE("the tokens of a calibration are the same share of each text") {
  const std::string long_text = read_text(kData + "/text/calibration_prose.txt").substr(0, 6000);
  const std::string short_text = read_text(kData + "/text/code.txt").substr(0, 2000);
  const auto all = calibration_tokens(nano(), {long_text, short_text}, 1 << 20);
  const auto first = encode_documents(nano(), long_text),
             second = encode_documents(nano(), short_text);
  REQUIRE(all.size() == first.size() + second.size() + 1);
  CHECK(all[first.size()] == nano().model.config().bos);
  const auto half = calibration_tokens(nano(), {long_text, short_text},
                                       static_cast<std::int64_t>(all.size() / 2));
  CHECK(half.size() == all.size() / 2);
  const std::size_t of_first = first.size() / 2;  // rounded down, or one less
  std::size_t same = 0;
  while (same < half.size() && half[same] == first[same]) ++same;
  CHECK(same + 1 >= of_first);
  CHECK(same <= of_first + 1);
  CHECK(half[same] == nano().model.config().bos);
  CHECK(calibration_tokens(nano(), {long_text}, 10) ==
        std::vector<std::int32_t>(first.begin(), first.begin() + 10));
}

TEST_CASE("a fingerprint is that of the weights") {
  const auto thread = std::make_shared<lowrankkv::cpu::ThreadPool>(1);
  const Model again(kData + "/nano", thread);
  CHECK(again.fingerprint() != 0);
  Model other(kData + "/nano", thread);
  CHECK(other.fingerprint() == again.fingerprint());
  other.begin_with(again.config().bos == 5 ? 6 : 5);
  CHECK(other.fingerprint() != again.fingerprint());
}
