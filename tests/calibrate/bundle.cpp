// SPDX-License-Identifier: Apache-2.0
// A calibration bundle gives back what was saved.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/calibrate/bundle.hpp"
#include "support/random_model.hpp"
#include "support/rope.hpp"

namespace bundle_tests {

using namespace lowrankkv;
using support::gaussian_rows;
using support::pre_rope;
using support::random_model;

TEST_CASE("a bundle gives back everything that calibration knows") {
  std::mt19937_64 random(5);
  const CacheShape shape{4, 2, 16};
  const auto model = random_model(random, shape, 2, 120);
  const std::string path = "coding_bundle.safetensors";
  calibrate::save_moments(path, model);
  const auto loaded = calibrate::load_moments(path, shape, 2);
  std::remove(path.c_str());
  for (std::size_t layer = 0; layer < 2; ++layer) {
    CHECK(loaded[layer].values().second == model[layer].values().second);
    CHECK(loaded[layer].coding().num_queries() == model[layer].coding().num_queries());
    CHECK(loaded[layer].coding().stream_squares().values() ==
          model[layer].coding().stream_squares().values());
    CHECK(loaded[layer].coding().error_scale() == model[layer].coding().error_scale());
    for (int head = 0; head < 2; ++head) {
      CHECK(loaded[layer].head(head).key.second == model[layer].head(head).key.second);
      CHECK(loaded[layer].head(head).value_sample.values() ==
            model[layer].head(head).value_sample.values());
      CHECK(loaded[layer].coding().head(head).key.second ==
            model[layer].coding().head(head).key.second);
      CHECK((loaded[layer].coding().head(head).key_metric -
             model[layer].coding().head(head).key_metric)
                .norm() <= 1e-12 * model[layer].coding().head(head).key_metric.norm());
      CHECK((loaded[layer].coding().head(head).value_metric -
             model[layer].coding().head(head).value_metric)
                .norm() <= 1e-12 * model[layer].coding().head(head).value_metric.norm());
    }
  }
}

TEST_CASE("a bundle knows what its metrics measure, and earlier ones are read") {
  std::mt19937_64 random(6);
  const CacheShape shape{4, 2, 16};
  auto model = random_model(random, shape, 2, 120);
  const std::string path = "coding_metric_bundle.safetensors";
  const auto reread = [&](const io::SafetensorsWriter& writer) {
    writer.write(path);
    auto loaded = calibrate::load_moments(path, shape, 2);
    std::remove(path.c_str());
    return loaded;
  };
  const auto same = reread(calibrate::write_moments(model));
  CHECK(same[0].coding().metric() == calibrate::CodingMetric::output);
  CHECK(same[1].coding().head(1).key_sample.values() ==
        model[1].coding().head(1).key_sample.values());
  CHECK(same[1].coding().head(1).key_sample.size() > 0);
  auto writer = calibrate::write_moments(model);
  writer.set_metadata("version", "4");
  const auto earlier = reread(writer);
  CHECK(earlier[1].coding().head(1).key_sample.size() == 0);
  CHECK(earlier[1].coding().error_scale() == model[1].coding().error_scale());
  model[0].coding().set_metric(calibrate::CodingMetric::loss);
  CHECK_THROWS_WITH_AS(calibrate::write_moments(model),
                       "calibration bundle: the metric of the first layer is of the loss, of "
                       "another of the output",
                       ShapeError);
  for (const auto metric : {calibrate::CodingMetric::loss, calibrate::CodingMetric::combined}) {
    for (auto& layer : model) layer.coding().set_metric(metric);
    writer = calibrate::write_moments(model);
    CHECK(reread(writer)[1].coding().metric() == metric);
  }
  writer.set_metadata("coded_metric", "other");
  CHECK_THROWS_WITH_AS(reread(writer),
                       "calibration bundle: coded_metric other, expected output, loss or "
                       "combined",
                       FormatError);
  std::remove(path.c_str());
}

TEST_CASE("a calibration bundle knows the form of its keys") {
  const CacheShape shape{2, 1, 8};
  std::mt19937_64 random(9);
  const auto q = gaussian_rows(random, 50 * 2 * 8), k = gaussian_rows(random, 50 * 8),
             v = gaussian_rows(random, 50 * 8);
  std::vector<calibrate::LayerMoments> layers(
      2, calibrate::LayerMoments(shape, pre_rope(RopePairing::interleaved, 50.0)));
  for (auto& layer : layers)
    layer.add({q.data(), 50, 2, 8}, {k.data(), 50, 1, 8}, {v.data(), 50, 1, 8});
  const char* path = "unrotated_test.safetensors";
  calibrate::save_moments(path, layers);
  const auto loaded = calibrate::load_moments(path, shape, 2);
  CHECK(loaded[1].rope().keys == Rope::pre);
  CHECK(loaded[1].rope().pairing == RopePairing::interleaved);
  CHECK(loaded[1].rope().frequencies == rope_frequencies(layers[0].rope(), 8));
  CHECK(loaded[1].head(0).key.second == layers[1].head(0).key.second);
  std::vector<std::byte> bytes = calibrate::write_moments(layers).bytes();
  const double wrong = std::nan("");  // in place of the first frequency
  for (std::size_t at = 0; at + 16 <= bytes.size(); ++at) {
    if (std::memcmp(bytes.data() + at, loaded[1].rope().frequencies.data(), 16) != 0) continue;
    std::memcpy(bytes.data() + at, &wrong, sizeof wrong);
  }
  CHECK_THROWS_WITH_AS(
      calibrate::read_moments(io::Safetensors(bytes), shape, 2),
      "calibration bundle: rope.frequencies holds nan at element 0, finite expected", FormatError);
  std::remove(path);
}

TEST_CASE("numbers that no rows have are refused") {
  const CacheShape shape{2, 1, 8};
  std::mt19937_64 random(9);
  const auto refused = [&](auto&& change, const char* expected) {
    auto layers = random_model(random, shape, 1, 60);
    change(layers[0]);
    const io::Safetensors file(calibrate::write_moments(layers).bytes());
    try {
      calibrate::read_moments(file, shape, 1);
    } catch (const FormatError& error) {
      INFO(error.what());
      CHECK(std::string(error.what()).find(expected) != std::string::npos);
      return;
    }
    FAIL_CHECK("nothing was raised");
  };
  const double nan = std::nan("");
  refused([](auto& layer) { layer.head(0).key.first[3] = 1e300; }, "sums up to 1e+300");
  refused([](auto& layer) { layer.head(0).query.second(1, 1) = 1e300; }, "products up to 1e+300");
  refused([&](auto& layer) { layer.values().second(0, 0) = nan; }, "products up to inf");
  refused([&](auto& layer) { layer.values().count = nan; }, "are of nan rows");
  refused([](auto& layer) { layer.head(0).value.count = 1e17; }, "are of 1e+17 rows");
  refused([](auto& layer) { layer.coding().set_num_queries(HUGE_VAL); }, "coded_queries is inf");
  // Samples are sorted, and NaN has no place in an order.
  const std::vector<float> row{0, 1, 2, 3, 4, std::nanf(""), 6, 7};
  refused([&](auto& layer) { layer.head(0).key_sample = calibrate::RowSample(8, row); },
          "layers.0.key.sample holds nan at element 5");
  refused([&](auto& layer) { layer.coding().set_stream_squares(calibrate::RowSample(1, row)); },
          "layers.0.stream_squares holds nan at element 5");
}

TEST_CASE("sinks are kept apart where they are asked for") {
  std::mt19937_64 random(12);
  const CacheShape shape{2, 1, 8};
  const auto k = gaussian_rows(random, 50 * 8), v = gaussian_rows(random, 50 * 8),
             dk = gaussian_rows(random, 50 * 8), dv = gaussian_rows(random, 50 * 8);
  std::vector<calibrate::LayerMoments> layers(2, calibrate::LayerMoments(shape));
  const auto add = [&](calibrate::CodingStatistics& coding, int rows) {
    coding.add_gradients({k.data(), rows, 1, 8}, {v.data(), rows, 1, 8}, {dk.data(), rows, 1, 8},
                         {dv.data(), rows, 1, 8});
  };
  for (auto& layer : layers) {
    layer.coding() = calibrate::CodingStatistics(shape, {}, 4);
    layer.coding().gather_sinks();
    add(layer.coding(), 50);
    add(layer.coding(), 3);  // a sequence of sinks alone
  }
  calibrate::CodingStatistics all(shape, {}, 0);
  add(all, 50);
  add(all, 3);
  const io::Safetensors file(calibrate::write_moments(layers).bytes());
  const auto loaded = calibrate::read_moments(file, shape, 2);
  for (const auto& layer : loaded) {
    const calibrate::SinkHead& sink = layer.coding().sink(0);
    const calibrate::CodingHead &head = layer.coding().head(0), &whole = all.head(0);
    CHECK(sink.key.count == 7.0);
    CHECK(head.key.count == 46.0);
    CHECK((sink.key.second + head.key.second - whole.key.second).norm() <= 1e-12 * 400);
    CHECK((sink.value.first + head.value.first - whole.value.first).norm() <= 1e-12 * 400);
    CHECK((sink.key_metric + head.key_metric - whole.key_metric).norm() <= 1e-3);
    CHECK((sink.value_metric + head.value_metric - whole.value_metric).norm() <= 1e-3);
    CHECK(sink.value_metric == layers[0].coding().sink(0).value_metric);
    CHECK(sink.value_metric.trace() > 1.0);
  }
  layers[1].coding() = calibrate::CodingStatistics(shape, {}, 4);
  layers[1].coding().set_metric(calibrate::CodingMetric::loss);
  CHECK_THROWS_WITH_AS(calibrate::write_moments(layers),
                       "calibration bundle: sinks of the first layer are gathered, of another left "
                       "out",
                       ShapeError);
}

/// A line of docs/bundle.md's tables: what the first column names, and the others.
struct PageLine {
  std::string name;
  std::vector<std::string> cells;
};

/// The lines of the first table behind a heading. `a.{b,c}.d` are two lines.
std::vector<PageLine> table_behind(const std::string& heading) {
  std::ifstream page(std::string(LOWRANKKV_EXAMPLE_DATA) + "/../../docs/bundle.md");
  REQUIRE(page);
  std::vector<PageLine> lines;
  bool inside = false;
  for (std::string line; std::getline(page, line);) {
    if (line.starts_with("## ")) inside = line == "## " + heading;
    if (!inside || !line.starts_with("| `")) continue;
    PageLine entry;
    std::istringstream cells(line.substr(2));
    for (std::string cell; std::getline(cells, cell, '|');) {
      cell = cell.substr(std::min(cell.find_first_not_of(' '), cell.size()));
      entry.cells.push_back(cell.substr(0, cell.find_last_not_of(' ') + 1));
    }
    const std::string name = entry.cells.at(0).substr(1, entry.cells.at(0).size() - 2);
    const std::size_t open = name.find('{'), shut = name.find('}');
    std::istringstream choices(open == std::string::npos ? ""
                                                         : name.substr(open + 1, shut - open - 1));
    if (open == std::string::npos) lines.push_back({name, entry.cells});
    for (std::string choice; std::getline(choices, choice, ',');)
      lines.push_back({name.substr(0, open) + choice + name.substr(shut + 1), entry.cells});
  }
  return lines;
}

TEST_CASE("docs/bundle.md has every tensor and every entry that is written, and no other") {
  std::mt19937_64 random(13);
  const CacheShape shape{4, 2, 16};
  const auto output = random_model(random, shape, 2, 60);
  auto loss = output;
  std::vector<calibrate::LayerMoments> pre(2, calibrate::LayerMoments(shape, pre_rope()));
  for (auto& layer : loss) {
    layer.coding().set_metric(calibrate::CodingMetric::loss);
    layer.coding().gather_sinks();
  }
  const auto tensors = table_behind("Tensors"), entries = table_behind("Metadata");
  CHECK(tensors.size() == 35);
  for (const std::vector<calibrate::LayerMoments>* model :
       {&output, &std::as_const(loss), &std::as_const(pre)}) {
    const io::Safetensors file(calibrate::write_moments(*model, {{"source", "test"}}).bytes());
    const std::set<std::string> kinds{"always", "version 5", model == &loss ? "sinks" : "",
                                      model == &pre ? "pre-RoPE keys" : ""};
    std::size_t expected = 0;
    for (const PageLine& line : tensors) {
      CAPTURE(line.name);
      if (!kinds.contains(line.cells.at(3))) continue;
      const bool of_layers = line.name.starts_with("layers.i.");
      expected += of_layers ? 2 : 1;
      for (const char* layer : {"layers.0.", "layers.1."}) {
        const std::string name = of_layers ? layer + line.name.substr(9) : line.name;
        REQUIRE(file.contains(name));
        const io::TensorInfo& info = file.info(name);
        CHECK(info.dtype == line.cells.at(1));
        std::string extents = line.cells.at(2);  // [H, n, D] as numbers, n as the file has it
        const std::pair<const char*, std::int64_t> letters[] = {
            {"H*D", 32},
            {"H", 2},
            {"D", 16},
            {"P", 8},
            {"n", info.shape.size() == 3 ? info.shape[1] : info.shape[0]}};
        for (const auto& [letter, value] : letters) {
          const std::string text = letter;
          for (std::size_t at; (at = extents.find(text)) != std::string::npos;)
            extents.replace(at, text.size(), std::to_string(value));
        }
        CHECK(io::Safetensors::shape_text(info.shape) == extents);
      }
    }
    const auto named = [](const std::vector<PageLine>& lines, const std::string& name) {
      return std::any_of(lines.begin(), lines.end(),
                         [&](const PageLine& line) { return line.name == name; });
    };
    for (const auto& tensor : file.tensors()) {
      CAPTURE(tensor.first);
      CHECK(named(tensors, tensor.first.starts_with("layers.") ? "layers.i" + tensor.first.substr(8)
                                                               : tensor.first));
    }
    CHECK(file.tensors().size() == expected);
    for (const PageLine& line : entries) {
      CAPTURE(line.name);
      const bool needed = kinds.contains(line.cells.at(2)) || line.cells.at(2) == "no";
      CHECK(file.metadata().contains(line.name) == needed);
    }
    for (const auto& entry : file.metadata()) {
      CAPTURE(entry.first);
      CHECK(named(entries, entry.first));
    }
  }
}

TEST_CASE("a residual stream with NaN has no median") {
  calibrate::CodingStatistics coding(CacheShape{2, 1, 8});
  const std::vector<float> rows{1, 2, std::nanf(""), 4};
  coding.add_residual_stream({rows.data(), 2, 2});
  CHECK_THROWS_WITH_AS(coding.stream_square(),
                       "residual stream: a row's |h|^2 is nan, a number expected", ValueError);
}

}  // namespace bundle_tests
