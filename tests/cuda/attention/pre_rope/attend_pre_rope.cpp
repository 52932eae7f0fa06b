// SPDX-License-Identifier: Apache-2.0
// The kernels that attend to pre-RoPE keys, run on the host
// (emulator.hpp): partial states against float64 over what tiles hold.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "emulator.hpp"
#include "lowrankkv/cuda/attention/pre_rope/attend_pre_rope_codes.cuh"

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;

namespace {

using Random = std::mt19937_64;
using Matrix = std::vector<std::vector<double>>;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// One sequence of one KV head: rows of the compressed list, and at full rank those of the full
/// list and of the tail.
struct Problem {
  int head_dim = 128, group = 4, m = 1, warps = 4, blocks = 1;
  DType type = DType::f16;
  RopeConfig rope;
  Matrix keys, values;  ///< of the list in question, up-projected from what tiles hold, before RoPE
  std::vector<int> positions;  ///< of its rows
  Matrix queries;              ///< [m group, head_dim], rotated
  Random random;

  explicit Problem(std::uint64_t seed) : random(seed) {}
  double normal() { return std::normal_distribution<double>()(random); }
  /// Maximum (in log2), sum, and values of every column over the rows that `sees` lets it see.
  template <class Sees>
  void expect(Sees&& sees, std::vector<double>& top, std::vector<double>& sum, Matrix& out) const {
    const std::vector<double> frequencies = rope_frequencies(rope, head_dim);
    const int pairs = static_cast<int>(frequencies.size());
    top.assign(queries.size(), -std::numeric_limits<double>::infinity());
    sum.assign(queries.size(), 0.0);
    out.assign(queries.size(), std::vector<double>(values.front().size(), 0.0));
    Matrix logits(queries.size(),
                  std::vector<double>(keys.size(), -std::numeric_limits<double>::infinity()));
    for (std::size_t row = 0; row < keys.size(); ++row) {
      std::vector<double> rotated = keys[row];
      for (int pair = 0; pair < pairs; ++pair) {
        const bool split = rope.pairing == RopePairing::half_split;
        const std::size_t a = at(split ? pair : 2 * pair),
                          b = at(split ? pair + pairs : 2 * pair + 1);
        const double angle = frequencies[at(pair)] * positions[row];
        rotated[a] = keys[row][a] * std::cos(angle) - keys[row][b] * std::sin(angle);
        rotated[b] = keys[row][b] * std::cos(angle) + keys[row][a] * std::sin(angle);
      }
      for (std::size_t column = 0; column < queries.size(); ++column) {
        if (!sees(static_cast<int>(column), static_cast<int>(row))) continue;
        double dot = 0.0;
        for (std::size_t i = 0; i < rotated.size(); ++i) dot += rotated[i] * queries[column][i];
        logits[column][row] = dot / std::sqrt(head_dim) * 1.4426950408889634;
        top[column] = std::max(top[column], logits[column][row]);
      }
    }
    for (std::size_t column = 0; column < queries.size(); ++column) {
      for (std::size_t row = 0; row < keys.size(); ++row) {
        const double weight = std::exp2(logits[column][row] - top[column]);
        if (!(weight > 0.0)) continue;
        sum[column] += weight;
        for (std::size_t i = 0; i < values[row].size(); ++i)
          out[column][i] += weight * values[row][i];
      }
    }
  }
};

/// Device memory as plain vectors, and the tables over them. Slot 1 of two, head 0 of one.
struct Layer {
  gpu::RotaryTables rotary;
  std::vector<gpu::DeviceLengths> lengths{2};
  std::vector<HeadRows> rows{2};
  std::vector<std::int32_t> pages[2], positions[2];
  std::vector<std::uint8_t> pool, tails;
  gpu::HeadTiles compressed;
  gpu::HeadMaps maps;
  gpu::HostKeyUp key_up;
  float2 key_up_scales;
  gpu::LayerEdit tables;

  Layer(const Problem& problem, const gpu::HeadTiles& full)
      : rotary(problem.rope, problem.head_dim, 2) {
    lengths.resize(2);
    rows.resize(2);
    tables.num_heads = tables.num_lists = 1;
    tables.head_dim = problem.head_dim;
    tables.full_type = problem.type;
    tables.full = tables.listed = full;
    tables.rotary = rotary.get();
    tables.tail_tiles = 2;
    tails.resize(2 * 2 * at(full.bytes));
  }
  /// Pages of a list in an order of their own; returns the tile's memory, and lays out as many as
  /// there are rows.
  void make_pages(RowList list, const gpu::HeadTiles& tiles, int count) {
    const int tile_count = (count + tiles.rows - 1) / tiles.rows,
              num_pages = (tile_count + tiles.tiles_per_page - 1) / tiles.tiles_per_page,
              which = static_cast<int>(list);
    tables.page_bytes =
        static_cast<std::uint64_t>(tiles.tiles_per_page) * static_cast<std::uint64_t>(tiles.bytes);
    pool.assign(at(num_pages + 1) * tables.page_bytes, 0);
    tables.max_pages[which] = num_pages;
    pages[which].assign(at(2 * num_pages), -1);
    for (int page = 0; page < num_pages; ++page)
      pages[which][at(num_pages + page)] = num_pages - page;
    (list == RowList::full ? rows[1].num_full : rows[1].num_compressed) = count;
  }
  std::uint8_t* tile_of(RowList list, const gpu::HeadTiles& tiles, int row) {
    const int tile = row / tiles.rows, which = static_cast<int>(list);
    const std::int32_t page =
        pages[which][at(tables.max_pages[which] + tile / tiles.tiles_per_page)];
    return pool.data() + static_cast<std::size_t>(page) * tables.page_bytes +
           at(tile % tiles.tiles_per_page) * at(tiles.bytes);
  }
  void finish() {
    tables.lengths = lengths.data();
    tables.rows = rows.data();
    tables.pool = pool.data();
    tables.tails = tails.data();
    tables.compressed = &compressed;
    key_up_scales = {key_up.scale, key_up.factor};
    maps.key_up = {key_up.operands.data(), key_up.means.data(), &key_up_scales};
    tables.maps = &maps;
    for (int list = 0; list < 2; ++list) {
      tables.pages[list] = pages[list].data();
      tables.positions[list] = positions[list].empty() ? nullptr : positions[list].data();
    }
  }
};

gpu::HeadTiles plain_tiles(int key_units, int value_units) {
  gpu::HeadTiles tiles;
  tiles.rows = 16 * gpu::rotated_steps(std::max(key_units, value_units));
  tiles.key_units = key_units;
  tiles.value_units = value_units;
  tiles.value_offset = tiles.rows / 16 * key_units * gpu::kPlainUnitBytes;
  tiles.bytes = tiles.value_offset + tiles.rows / 16 * value_units * gpu::kPlainUnitBytes;
  tiles.tiles_per_page = 3;
  return tiles;
}
void put_plain(const gpu::HeadTiles& tiles, std::uint8_t* tile, DType type, Part part, int row,
               int channel, double value) {
  const std::uint16_t bits = type == DType::f16 ? to_half(static_cast<float>(value)).bits
                                                : to_bfloat16(static_cast<float>(value)).bits;
  std::memcpy(tile + tiles.plain_byte(part, row % tiles.rows, channel), &bits, 2);
}

/// Runs a kernel and merges the states of its entries; compares them with what is expected.
template <class Kernel, class Sees>
void compare(Problem& problem, Layer& layer, const gpu::HeadTiles& tiles, gpu::AttentionStep step,
             int entries, int key_up_units, Kernel kernel, Sees&& sees, double limit) {
  layer.finish();
  std::vector<float> q(problem.queries.size() * at(problem.head_dim));
  // [token, group, channel]: a column is a query head of a token.
  for (std::size_t column = 0; column < problem.queries.size(); ++column) {
    for (int i = 0; i < problem.head_dim; ++i)
      q[column * at(problem.head_dim) + at(i)] = static_cast<float>(problem.queries[column][at(i)]);
  }
  gpu::StepQueries queries;
  queries.rows = {q.data(), DType::f32, std::int64_t{problem.group} * problem.head_dim,
                  problem.head_dim, 1};
  queries.factor = 1.4426950408889634F / std::sqrt(static_cast<float>(problem.head_dim));
  step.group = problem.group;
  step.set_tokens(problem.m);
  step.width = std::max(tiles.state_lines(), 1);
  std::vector<float> partial(at(step.entries() * step.blocks) * step.state_floats(),
                             std::numeric_limits<float>::quiet_NaN());
  step.partial = partial.data();
  gpu::Batch batch;
  batch.count = 1;
  batch.slots[0] = 1;
  const int stage = std::max(tiles.value_offset, tiles.bytes - tiles.value_offset),
            ring = problem.warps * gpu::kPreRopeStages * stage;
  const int state = (3 + tiles.channels(Part::value)) * gpu::kBlockColumns * 4;
  const int bytes = ring + gpu::rope_block_bytes(problem.head_dim, key_up_units) +
                    problem.warps * std::max(gpu::rope_warp_bytes(problem.head_dim), state);
  emulated::run(static_cast<unsigned>(problem.blocks * step.blocks),
                static_cast<unsigned>(problem.warps * 32), static_cast<std::size_t>(bytes), kernel,
                layer.tables, step, batch, queries, 0, problem.blocks, stage, ring, key_up_units);
  std::vector<double> top, sum;
  Matrix out;
  problem.expect(sees, top, sum, out);
  double worst_lse = 0.0, error = 0.0, norm = 0.0;
  for (int column = 0; column < step.columns(); ++column) {
    double all_top = -std::numeric_limits<double>::infinity(), all_sum = 0.0;
    std::vector<double> all(out.front().size(), 0.0);
    const auto number = [&](int entry, int line) {
      return static_cast<double>(
          partial[(at(entry) * at(step.blocks) + at(column / 4)) * step.state_floats() +
                  at(line * 4 + column % 4)]);
    };
    for (int entry = 0; entry < entries; ++entry) all_top = std::max(all_top, number(entry, 0));
    for (int entry = 0; entry < entries; ++entry) {
      const double factor = number(entry, 0) > -1e30 ? std::exp2(number(entry, 0) - all_top) : 0.0;
      all_sum += factor * number(entry, 1);
      for (std::size_t i = 0; i < all.size(); ++i)
        all[i] += factor > 0.0 ? factor * number(entry, 3 + static_cast<int>(i)) : 0.0;
    }
    worst_lse = std::max(worst_lse, std::abs(all_top + std::log2(all_sum) - top[at(column)] -
                                             std::log2(sum[at(column)])));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const double expected = out[at(column)][i] / sum[at(column)], d = all[i] / all_sum - expected;
      error += d * d;
      norm += expected * expected;
    }
  }
  error = std::sqrt(error / norm);
  MESSAGE("lse off by " << worst_lse << " of log2, outputs by " << error);
  CHECK(worst_lse < 10 * limit);
  CHECK(error < limit);
}

RopeConfig rope_of(int head_dim, bool interleaved, int rotary_dim = 0) {
  RopeConfig rope;
  rope.keys = Rope::pre;
  rope.pairing = interleaved ? RopePairing::interleaved : RopePairing::half_split;
  rope.rotary_dim = rotary_dim > 0 ? rotary_dim : head_dim;
  return rope;
}
void draw_queries(Problem& problem) {
  problem.queries.assign(at(problem.m * problem.group), std::vector<double>(at(problem.head_dim)));
  for (auto& row : problem.queries)
    for (double& x : row) x = static_cast<double>(static_cast<float>(problem.normal()));
}
/// A map [coefficients, head_dim] and a mean, which up-project keys.
void draw_map(Problem& problem, int coefficients, Matrix& map, std::vector<float>& mean,
              bool with_mean) {
  map.assign(at(coefficients), std::vector<double>(at(problem.head_dim)));
  for (auto& row : map)
    for (double& x : row)
      x = static_cast<double>(static_cast<float>(problem.normal() / std::sqrt(problem.head_dim)));
  mean.assign(with_mean ? at(problem.head_dim) : 0, 0.0F);
  for (float& x : mean) x = static_cast<float>(problem.normal());
}
/// Channels in the order in which they are rotated, as maps are made.
int channel_of(const Layer& layer, int place, int head_dim) {
  return layer.tables.rotary.channel(place, head_dim);
}

/// Positions of `count` compressed rows among `full` full ones that are sinks, or spread between
/// them, or listed.
void place_rows(Problem& problem, Layer& layer, int count, int full, int kind) {
  problem.positions.clear();
  layer.rows[1].num_full = full;
  if (kind == 0) {
    for (int row = 0; row < count; ++row) problem.positions.push_back(full + row);
    return;
  }
  std::vector<bool> taken(at(count + full), false);
  for (int i = 0; i < full; ++i) taken[problem.random() % taken.size()] = true;
  std::vector<std::int32_t> others, own;
  for (std::size_t token = 0; token < taken.size(); ++token)
    (taken[token] ? others : own).push_back(static_cast<std::int32_t>(token));
  while (static_cast<int>(own.size()) > count) others.push_back(own.back()), own.pop_back();
  layer.rows[1].num_full = static_cast<std::int32_t>(others.size());
  std::sort(others.begin(), others.end());
  if (kind == 1) {
    layer.positions[0].assign(others.size(), 0);
    layer.positions[0].insert(layer.positions[0].end(), others.begin(), others.end());
    layer.tables.max_rows[0] = static_cast<std::int32_t>(others.size());
  } else {
    for (std::size_t i = 0; i < own.size(); ++i)
      own[i] = static_cast<std::int32_t>(i * 7 + i / 50 * 300);  // listed, far apart
    layer.positions[1].assign(own.size(), 0);
    layer.positions[1].insert(layer.positions[1].end(), own.begin(), own.end());
    layer.tables.max_rows[1] = static_cast<std::int32_t>(own.size());
  }
  problem.positions.assign(own.begin(), own.end());
}

template <DType type, int max_units>
void compressed_rows(std::uint64_t seed, int head_dim, int rank, int value_rank, int count,
                     int kind, bool interleaved, bool copied, int shifts = 0) {
  Problem problem(seed);
  problem.head_dim = head_dim;
  problem.type = type;
  problem.rope = rope_of(head_dim, interleaved);
  const int units = (rank + 15) / 16, value_units = (value_rank + 15) / 16;
  const gpu::HeadTiles tiles = plain_tiles(units, value_units);
  Layer layer(problem, plain_tiles(head_dim / 16, head_dim / 16));
  layer.compressed = tiles;
  draw_queries(problem);
  Matrix map;
  std::vector<float> mean;
  draw_map(problem, rank, map, mean, seed % 2 == 0);
  layer.make_pages(RowList::compressed, tiles, count);
  place_rows(problem, layer, count, kind == 0 ? 4 : 60, kind);
  if (shifts > 0) {
    const_cast<gpu::DeviceShift*>(layer.tables.rotary.shifts)[gpu::kMaxShifts] = {count / 3,
                                                                                  1000000, 1};
    const_cast<gpu::DeviceShift*>(layer.tables.rotary.shifts)[gpu::kMaxShifts + 1] = {count / 2,
                                                                                      -77, 3};
    layer.tables.rotary.num_shifts[1] = 2;
    for (int& position : problem.positions)
      position = position >= count / 2   ? (position - 77) / 3
                 : position >= count / 3 ? position + 1000000
                                         : position;
  }
  for (int row = 0; row < count; ++row) {
    std::uint8_t* tile = layer.tile_of(RowList::compressed, tiles, row);
    std::vector<double> key(at(head_dim), 0.0), value;
    for (int i = 0; i < head_dim && !mean.empty(); ++i)
      key[at(i)] = static_cast<double>(mean[at(i)]);
    for (int i = 0; i < rank; ++i) {
      const double c =
          static_cast<double>(round_to(type, static_cast<float>(3.0 * problem.normal())));
      put_plain(tiles, tile, type, Part::key, row, i, c);
      for (int channel = 0; channel < head_dim; ++channel)
        key[at(channel)] += c * map[at(i)][at(channel)];
    }
    for (int i = 0; i < value_rank; ++i)
      value.push_back(static_cast<double>(round_to(type, static_cast<float>(problem.normal()))));
    for (int i = 0; i < value_rank; ++i)
      put_plain(tiles, tile, type, Part::value, row, i, value[at(i)]);
    problem.keys.push_back(key);
    problem.values.push_back(value);
  }
  std::vector<float> rotary_dim;
  for (int place = 0; place < head_dim && !mean.empty(); ++place)
    rotary_dim.push_back(mean[at(channel_of(layer, place, head_dim))]);
  layer.key_up =
      gpu::up_project_plain(type, units, head_dim, rotary_dim, 0.0F, [&](int i, int place) {
        return i < rank ? static_cast<float>(map[at(i)][at(channel_of(layer, place, head_dim))])
                        : 0.0F;
      });
  gpu::AttentionStep step;
  step.compressed_splits = gpu::splits_of(count);
  compare(
      problem, layer, tiles, step, step.compressed_splits,
      copied ? gpu::key_up_units(false, units) : 0,
      kind == 2 ? gpu::attend_pre_rope_kernel<type, gpu::PlainRows::compressed, max_units, false,
                                              false, true>
                : gpu::attend_pre_rope_kernel<type, gpu::PlainRows::compressed, max_units, false,
                                              false, false>,
      [](int, int) { return true; }, 2e-3);
}

/// @param first_units  of the keys' units, those of the first scale group; less than all: there are
/// two, and values have a unit of each
template <int scale_groups = 1>
void coded_rows(std::uint64_t seed, int head_dim, const std::vector<int>& widths, int count,
                int kind, ScaleKind gains, int first_units = 0) {
  Problem problem(seed);
  problem.head_dim = head_dim;
  problem.rope = rope_of(head_dim, seed % 3 == 0);
  gpu::HeadTiles tiles;
  tiles.codes = true;
  tiles.gains = gains;
  tiles.rows = gpu::kCodeRows;
  tiles.tiles_per_page = 2;
  tiles.key_units = static_cast<std::int32_t>(widths.size());
  tiles.scale_groups = scale_groups;
  tiles.key_offset = 2 * scale_groups * gpu::kCodeRows * tiles.gain_bytes();
  tiles.value_units = scale_groups;
  tiles.first_value_units = 1;
  tiles.value_widths[0] = tiles.value_widths[1] = 8;
  tiles.first_key_units = scale_groups == 1 ? tiles.key_units : first_units;
  std::int32_t bytes = tiles.key_offset;
  std::vector<std::int32_t> begins;
  for (std::size_t unit = 0; unit < widths.size(); ++unit) {
    tiles.key_widths[unit] = static_cast<std::uint8_t>(widths[unit]);
    begins.push_back(bytes);
    bytes += gpu::code_unit_bytes(widths[unit]);
  }
  tiles.value_offset = bytes;
  tiles.bytes = bytes + scale_groups * gpu::code_unit_bytes(8);
  Layer layer(problem, plain_tiles(head_dim / 16, head_dim / 16));
  layer.compressed = tiles;
  draw_queries(problem);
  Matrix map;
  std::vector<float> mean;
  const int places = 32 * tiles.key_units;
  draw_map(problem, places, map, mean, seed % 2 == 0);
  for (int place = 0; place < places; ++place)
    for (double& x : map[at(place)])
      x = static_cast<double>(static_cast<float>(x * 4.0 / (1 << widths[at(place / 32)])));
  layer.make_pages(RowList::compressed, tiles, count);
  place_rows(problem, layer, count, kind == 0 ? 4 : 60, kind);
  for (int row = 0; row < count; ++row) {
    std::uint8_t* tile = layer.tile_of(RowList::compressed, tiles, row);
    const auto gain = [&](Part part, int group) {
      std::uint8_t* place = tile + tiles.gain_place(part, row % 64, group);
      if (gains == ScaleKind::norm_log8) {
        *place = static_cast<std::uint8_t>(120 + problem.random() % 30);
        return std::exp2((*place) / 16.0 - 8.0);
      }
      const Half rounded =
          to_half(static_cast<float>(0.5 + 0.1 * static_cast<double>(problem.random() % 10)));
      std::memcpy(place, &rounded, 2);
      return static_cast<double>(to_float(rounded));
    };
    double key_gains[scale_groups], value_gains[scale_groups];
    for (int group = 0; group < scale_groups; ++group) {
      key_gains[group] = gain(Part::key, group);
      value_gains[group] = gain(Part::value, group);
    }
    std::vector<double> key(at(head_dim), 0.0), value;
    for (int place = 0; place < places; ++place) {
      const int bits = widths[at(place / 32)],
                code = static_cast<int>(problem.random() % (1U << bits));
      const double key_gain = key_gains[scale_groups == 2 && place / 32 >= first_units ? 1 : 0];
      const gpu::CodePlace where = gpu::key_place(bits, row % 64, place % 32);
      std::uint32_t word;
      std::memcpy(&word, tile + begins[at(place / 32)] + where.word, 4);
      word |= static_cast<std::uint32_t>(code) << where.shift;
      std::memcpy(tile + begins[at(place / 32)] + where.word, &word, 4);
      for (int channel = 0; channel < head_dim; ++channel)
        key[at(channel)] +=
            key_gain * (code - 0.5 * ((1 << bits) - 1)) * map[at(place)][at(channel)];
    }
    for (int channel = 0; channel < head_dim && !mean.empty(); ++channel)
      key[at(channel)] += static_cast<double>(mean[at(channel)]);
    for (int i = 0; i < 32 * scale_groups; ++i) {
      const int code = static_cast<int>(problem.random() % 256);
      const gpu::CodePlace where = gpu::value_place(8, row % 64, i % 32);
      std::uint8_t* unit =
          tile + tiles.value_offset + i / 32 * gpu::code_unit_bytes(8) + where.word;
      std::uint32_t word;
      std::memcpy(&word, unit, 4);
      word |= static_cast<std::uint32_t>(code) << where.shift;
      std::memcpy(unit, &word, 4);
      value.push_back(value_gains[i / 32] * code);
    }
    if (scale_groups == 2)
      value.push_back(
          value_gains[scale_groups - 1]);  // a state has its sum of weights behind the values
    problem.keys.push_back(key);
    problem.values.push_back(value);
  }
  std::vector<float> rotary_dim;
  for (int place = 0; place < head_dim && !mean.empty(); ++place)
    rotary_dim.push_back(mean[at(channel_of(layer, place, head_dim))]);
  std::vector<std::uint8_t> bits(widths.begin(), widths.end());
  layer.key_up = gpu::up_project_codes(bits, head_dim, rotary_dim, 0.0F, [&](int code, int place) {
    return static_cast<float>(map[at(code)][at(channel_of(layer, place, head_dim))]);
  });
  gpu::AttentionStep step;
  step.compressed_splits = gpu::splits_of(count);
  compare(
      problem, layer, tiles, step, step.compressed_splits, gpu::key_up_units(true, tiles.key_units),
      kind == 2 ? gpu::attend_pre_rope_codes_kernel<scale_groups, true, false, true, scale_groups>
                : gpu::attend_pre_rope_codes_kernel<scale_groups, true, false, false, scale_groups>,
      [](int, int) { return true; }, 3e-3);
}

/// Rows at full rank: a full list and a tail whose ring has begun anew; m query tokens see up to
/// their own.
template <DType type>
void recent_rows(std::uint64_t seed, int head_dim, int full, int tail, int m, bool interleaved,
                 int rotary_dim) {
  Problem problem(seed);
  problem.head_dim = head_dim;
  problem.type = type;
  problem.m = m;
  problem.rope = rope_of(head_dim, interleaved, rotary_dim);
  const gpu::HeadTiles tiles = plain_tiles(head_dim / 16, head_dim / 16);
  Layer layer(problem, tiles);
  draw_queries(problem);
  layer.make_pages(RowList::full, tiles, full);
  const int ring = layer.tables.ring_rows(), first = 11, compressed = 100;
  layer.lengths[1] = {first, tail, 0, full + compressed};
  layer.tails.assign(2 * at(layer.tables.tail_tiles) * at(tiles.bytes), 0);
  for (int row = 0; row < full + tail; ++row) {
    const int place = row < full ? row : (first + row - full) % ring;
    std::uint8_t* tile =
        row < full ? layer.tile_of(RowList::full, tiles, row)
                   : layer.tails.data() +
                         at(layer.tables.tail_tiles + place / tiles.rows) * at(tiles.bytes);
    std::vector<double> key, value;
    for (int i = 0; i < head_dim; ++i) {
      key.push_back(static_cast<double>(round_to(type, static_cast<float>(problem.normal()))));
      value.push_back(static_cast<double>(round_to(type, static_cast<float>(problem.normal()))));
      put_plain(tiles, tile, type, Part::key, place, i, key.back());
      put_plain(tiles, tile, type, Part::value, place, i, value.back());
    }
    problem.keys.push_back(key);
    problem.values.push_back(value);
    problem.positions.push_back(row < full ? row : compressed + row);
  }
  gpu::AttentionStep step;
  step.full_splits = gpu::splits_of(full);
  // Entries: those of the full list, then the tail's.
  compare(
      problem, layer, tiles, step, step.full_splits + 1, 0,
      gpu::attend_pre_rope_kernel<type, gpu::PlainRows::recent, 8, false, false, false>,
      [&](int column, int row) {
        return row < full || row - full <= tail - m + column / problem.group;
      },
      1e-3);
}

/// A prompt's own rows, behind `stored` tokens; m query tokens from row `first` on see up to their
/// own.
template <DType type>
void prompt_rows(std::uint64_t seed, int head_dim, int count, int first, int m, int group) {
  Problem problem(seed);
  problem.head_dim = head_dim;
  problem.type = type;
  problem.m = m;
  problem.group = group;
  problem.rope = rope_of(head_dim, false);
  const gpu::HeadTiles tiles = plain_tiles(head_dim / 16, head_dim / 16);
  Layer layer(problem, tiles);
  draw_queries(problem);
  const int stored = 321;
  layer.lengths[1] = {0, 0, 0, stored};
  std::vector<std::uint8_t> packed(at((count + tiles.rows - 1) / tiles.rows) * at(tiles.bytes), 0);
  for (int row = 0; row < count; ++row) {
    std::uint8_t* tile = packed.data() + at(row / tiles.rows) * at(tiles.bytes);
    std::vector<double> key, value;
    for (int i = 0; i < head_dim; ++i) {
      key.push_back(static_cast<double>(round_to(type, static_cast<float>(problem.normal()))));
      value.push_back(static_cast<double>(round_to(type, static_cast<float>(problem.normal()))));
      put_plain(tiles, tile, type, Part::key, row, i, key.back());
      put_plain(tiles, tile, type, Part::value, row, i, value.back());
    }
    problem.keys.push_back(key);
    problem.values.push_back(value);
    problem.positions.push_back(stored + row);
  }
  gpu::AttentionStep step;
  step.prompt = packed.data();
  step.prompt_tiles = (count + tiles.rows - 1) / tiles.rows;
  step.prompt_first = first;
  // Of the entries, the prompt's is the last: the tail's, which no kernel writes here, is left out.
  step.full_splits = -1;
  compare(
      problem, layer, tiles, step, 1, 0,
      gpu::attend_pre_rope_kernel<type, gpu::PlainRows::prompt, 8, false, false, false>,
      [&](int column, int row) { return row <= first + column / group; }, 1e-3);
}

}  // namespace

TEST_CASE(
    "compressed rows in f16 and bf16: the map in shared memory or not, contiguous positions, "
    "with others between, listed, moved and divided") {
  compressed_rows<DType::f16, 2>(1, 128, 32, 32, 2500, 0, false, true);
  compressed_rows<DType::f16, 2>(2, 64, 20, 32, 300, 0, true, true);
  compressed_rows<DType::f16, 2>(3, 128, 32, 16, 700, 1, false, true);
  compressed_rows<DType::f16, 2>(4, 80, 32, 32, 500, 2, true, false);
  compressed_rows<DType::f16, 2>(5, 128, 16, 32, 400, 0, false, true, 2);
  compressed_rows<DType::bf16, 2>(6, 96, 24, 32, 130, 1, false, true);
  compressed_rows<DType::f16, 8>(7, 128, 80, 80, 400, 0, false, true);
  compressed_rows<DType::bf16, 8>(8, 128, 72, 80, 200, 1, true, false);
}

TEST_CASE("codes of every width, more of them than are up-projected at once") {
  coded_rows(11, 128, {4, 2, 2, 2}, 400, 0, ScaleKind::norm_log8);
  coded_rows(12, 128, {2, 2, 2}, 300, 1, ScaleKind::norm_log8);
  coded_rows(13, 64, {8, 1}, 200, 2, ScaleKind::norm_log8);
  coded_rows(14, 80, {8, 4, 4, 2, 2, 1}, 2200, 0, ScaleKind::norm_log8);
}

TEST_CASE("codes without bits are their mean, at every position") {
  coded_rows(16, 64, {}, 150, 0, ScaleKind::norm_log8);
}

TEST_CASE(
    "codes of two scale groups, each with gains of its own; one of them may have no channels") {
  coded_rows<2>(31, 128, {4, 2, 2, 2, 2, 1, 1, 1, 1}, 300, 0, ScaleKind::largest_f16, 1);
  coded_rows<2>(32, 64, {8, 4, 4, 4, 4, 2}, 200, 1, ScaleKind::largest_f16, 5);
  coded_rows<2>(33, 96, {2, 1}, 130, 2, ScaleKind::largest_f16, 0);
  coded_rows<2>(34, 80, {4, 1}, 70, 0, ScaleKind::largest_f16, 2);
}

TEST_CASE("rows at full rank, and a tail whose ring has begun anew") {
  recent_rows<DType::f16>(21, 128, 130, 70, 1, false, 0);
  recent_rows<DType::bf16>(22, 128, 30, 50, 2, true, 0);
  recent_rows<DType::f16>(23, 64, 5, 100, 3, true, 32);
  recent_rows<DType::f16>(24, 96, 2100, 10, 1, false, 64);
}

TEST_CASE("a prompt's own rows") {
  prompt_rows<DType::f16>(31, 128, 300, 293, 7, 4);
  prompt_rows<DType::bf16>(32, 64, 100, 20, 5, 1);
}
