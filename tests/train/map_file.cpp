// SPDX-License-Identifier: Apache-2.0
// Files of maps: what goes out comes in, and another model's maps do not.
#include "lowrankkv/train/map_file.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "lowrankkv/train/dlrp_fold.hpp"
#include "support/random_projectors.hpp"

namespace map_file_tests {

using namespace lowrankkv;
using support::Random;

void check_same(const std::vector<LayerBasis>& left, const std::vector<LayerBasis>& right) {
  REQUIRE(left.size() == right.size());
  for (std::size_t layer = 0; layer < left.size(); ++layer) {
    REQUIRE(left[layer].heads.size() == right[layer].heads.size());
    for (std::size_t head = 0; head < left[layer].heads.size(); ++head) {
      const HeadBasis &a = left[layer].heads[head], &b = right[layer].heads[head];
      CHECK(a.key_rank == b.key_rank);
      CHECK(a.value_rank == b.value_rank);
      CHECK(a.key_down == b.key_down);
      CHECK(a.query_down == b.query_down);
      CHECK(a.value_down == b.value_down);
      CHECK(a.output_up == b.output_up);
      CHECK(a.key_mean == b.key_mean);
      CHECK(a.value_mean == b.value_mean);
    }
  }
}

TEST_CASE("folded maps that were exported are the same, with means and without") {
  Random random(500);
  const std::string path = "maps.safetensors";
  for (int round = 0; round < 30; ++round) {
    const auto geometry =
        round % 2 == 0 ? train::DlrpGeometry::before_rope : train::DlrpGeometry::after_rope;
    auto projectors = support::random_projectors(random, geometry);
    projectors = train::low_rank_projectors(projectors, support::random_ranks(random, projectors));
    const CacheShape& shape = projectors.shape;
    std::vector<LayerBasis> bases;
    for (int layer = 0; layer < projectors.num_layers; ++layer)
      bases.push_back(geometry == train::DlrpGeometry::before_rope
                          ? train::padded_basis(projectors, layer)
                          : train::projector_basis(projectors, layer));
    if (round % 3 == 0)
      bases[0].heads[0].key_mean = support::row_major(support::gaussian(random, 1, shape.head_dim));
    if (round % 5 == 0)
      bases[0].heads[0].value_mean =
          support::row_major(support::gaussian(random, 1, shape.head_dim));
    const Rope keys = round % 4 == 0 ? Rope::pre : Rope::post;
    train::save_maps(path, bases, shape, keys, {{"source", "a test"}});
    check_same(train::load_maps(path, shape, projectors.num_layers, keys), bases);
    CHECK(io::Safetensors::read(path).metadata().at("source") == "a test");
  }
  std::remove(path.c_str());
}

TEST_CASE("maps of another model, or none that could be, are refused with both values") {
  const CacheShape shape{4, 2, 3};
  HeadBasis head;
  head.key_rank = 2;
  head.value_rank = 1;
  head.key_down = head.query_down = {1, 2, 3, 4, 5, 6};
  head.value_down = head.output_up = {7, 8, 9};
  const std::vector<LayerBasis> bases(2, LayerBasis{{head, head}});
  const auto written = train::write_maps(bases, shape);
  check_same(train::read_maps(io::Safetensors(written.bytes()), shape, 2), bases);
  const auto read_as = [&](const CacheShape& model, int layers, Rope keys) {
    train::read_maps(io::Safetensors(written.bytes()), model, layers, keys);
  };
  CHECK_THROWS_WITH_AS(read_as({2, 2, 3}, 2, Rope::post), "num_qo_heads: maps 4, model 2",
                       ShapeError);
  CHECK_THROWS_WITH_AS(read_as({4, 1, 3}, 2, Rope::post), "num_kv_heads: maps 2, model 1",
                       ShapeError);
  CHECK_THROWS_WITH_AS(read_as({4, 2, 4}, 2, Rope::post), "head_dim: maps 3, model 4", ShapeError);
  CHECK_THROWS_WITH_AS(read_as(shape, 3, Rope::post), "num_layers: maps 2, model 3", ShapeError);
  CHECK_THROWS_WITH_AS(read_as(shape, 2, Rope::pre), "keys: maps post_rope, model pre_rope",
                       ShapeError);
  const auto with = [&](const std::string& name, std::vector<std::int64_t> extents,
                        std::vector<double> values) {
    const io::Safetensors file(written.bytes());
    io::SafetensorsWriter writer;
    for (const auto& [key, entry] : file.metadata()) writer.set_metadata(key, entry);
    for (const auto& [own, info] : file.tensors())
      if (own != name) writer.add(own, info.shape, file.values<float>(own, info.shape));
    writer.add(name, extents, values);
    check_same(train::read_maps(io::Safetensors(writer.bytes()), shape, 2), bases);
  };
  with("layers.1.heads.0.value_down", {3, 1}, {7, 8, 9});  // in f64
  with("other", {1}, {1});
  CHECK_THROWS_WITH_AS(with("layers.1.heads.0.value_down", {3, 1}, {7, 1e200, 9}),
                       "maps: layers.1.heads.0.value_down holds inf, finite in f32 expected",
                       FormatError);
  CHECK_THROWS_WITH_AS(
      with("layers.0.heads.1.key_down", {1, 4}, {1, 2, 3, 4}),
      "maps: layers.0.heads.1.key_down has shape [1, 4], a rank of 1 to head_dim 3 "
      "expected",
      ShapeError);
  CHECK_THROWS_WITH_AS(with("layers.0.heads.1.key_down", {3}, {1, 2, 3}),
                       "maps: layers.0.heads.1.key_down has shape [3], a rank of 1 to head_dim 3 "
                       "expected",
                       ShapeError);
  CHECK_THROWS_WITH_AS(with("layers.0.heads.1.query_down", {3, 1}, {1, 2, 3}),
                       "safetensors: tensor layers.0.heads.1.query_down has shape [3, 1], expected "
                       "[3, 2]",
                       FormatError);
  io::SafetensorsWriter other;
  other.set_metadata("format", "lowrankkv.dlrp");
  CHECK_THROWS_WITH_AS(
      train::read_maps(io::Safetensors(other.bytes()), shape, 2),
      "maps: format lowrankkv.dlrp version missing, expected lowrankkv.maps version 1",
      FormatError);
  CHECK_THROWS_WITH_AS(train::write_maps({}, shape), "maps: num_layers 0, at least 1 needed",
                       ShapeError);
  const auto refused = [&](auto&& change) {
    auto own = bases;
    change(own[1].heads[0]);
    train::write_maps(own, shape);
  };
  CHECK_THROWS_AS(refused([](auto& own) { own.key_down.pop_back(); }), ShapeError);
  CHECK_THROWS_WITH_AS(refused([](auto& own) { own.key_threshold = 0.5F; }),
                       "maps: layer 1, head 0 has 72 bytes and thresholds 0.5 and nan; maps and "
                       "means have 72 and no thresholds",
                       ValueError);
  CHECK_THROWS_AS(refused([](auto& own) {
                    own.key_bits = {8, 8};
                    own.key_rms = {1.0F, 1.0F};
                  }),
                  ValueError);
}

}  // namespace map_file_tests
