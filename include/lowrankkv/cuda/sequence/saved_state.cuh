// SPDX-License-Identifier: Apache-2.0
/// @file cuda/sequence/saved_state.cuh  Saves a sequence to the caller's host memory, and loads it.
///
/// The frame (core/saved_frame.hpp) contains counts, how many fewer rows heads have than the most,
/// position shifts, segments, and one block of device memory. The block
/// (cuda/sequence/saved_block.cuh) is gathered in the pool's scratch memory and crosses the bus
/// once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "lowrankkv/core/saved_frame.hpp"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/sequence/saved_block.cuh"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

/// @brief The first bytes of a sequence saved by this backend. The last digit is the version.
inline constexpr std::string_view kSavedMagic = "LRKVGPU8";

/// @brief A saved sequence, opened and checked.
struct SavedSequence : SequenceRows {
  SavedCounts counts;
  PositionShifts shifts;
  std::int32_t merging = -1;  ///< as of HostEpochs
  std::vector<HostSegment> segments;
  std::span<const std::byte> block;
};

namespace detail {

inline LayerDescription describe_layer(const LayerState& layer) {
  LayerDescription all;
  const auto add = [&](const char* name, auto value) {
    all.emplace_back(name, static_cast<std::uint64_t>(value));
  };
  const LayerEdit& tables = layer.tables();
  add("num_kv_heads", tables.num_heads);
  add("num_qo_heads", layer.config().shape.num_qo_heads);
  add("head_dim", tables.head_dim);
  add("full_type", tables.full_type);
  add("full_row_bits", layer.config().full_row_bits);
  add("pre-RoPE keys", tables.rotary.pre_rope());
  if (tables.rotary.pre_rope()) {
    add("rope pairing", layer.config().rope.pairing);
    const std::vector<double> frequencies = rope_frequencies(layer.config().rope, tables.head_dim);
    add("rope frequencies", checksum(std::as_bytes(std::span(frequencies))));
  }
  add("rows of a tail", tables.tail_tiles * tables.full.rows);
  add("rows of a tile of full rows", tables.listed.rows);
  add("listed full rows", tables.positions[0] != nullptr);
  add("listed compressed rows", tables.positions[1] != nullptr);
  add("accumulated scores of rows", tables.tail_scores != nullptr);
  if (tables.largest_values != nullptr) add("keep_residuals", 1);
  add("segments", tables.max_segments);
  add("form of coefficients", layer.tiles().form);
  if (layer.tiles().form == CodedForm::none) return all;
  add("coefficient type", layer.tiles().coded_type);
  for (const HeadTiles& tiles : layer.tiles().compressed) {
    add("gains", tiles.gains);
    add("key_units", tiles.key_units);
    add("value_units", tiles.value_units);
    add("widths of keys", tiles.key_pattern);
    add("widths of values", tiles.value_pattern);
    if (tiles.scale_groups == 1) continue;
    add("scale groups", tiles.scale_groups);
    add("widths of the first group's keys", tiles.first_key_pattern);
    add("widths of the first group's values", tiles.first_value_pattern);
  }
  if (layer.tiles().joint_heads > 0) add("heads of joint values", layer.tiles().joint_heads);
  add("calibrated maps", layer.maps_checksum());
  if (layer.epochs().metrics().any())
    add("metrics that bases move in", layer.epochs().metric_store().checksum());
  return all;
}

}  // namespace detail

/// @brief Writes a sequence to `buffer` as one frame. Waits for the stream.
/// @param count_only  writes nothing and only counts the bytes
/// @return bytes written or counted
template <class = void>
std::size_t save_sequence(const LayerState& layer, int slot, std::span<std::byte> buffer,
                          bool count_only, cudaStream_t stream) {
  const HostSequence& now = layer.sequence(slot);
  const HostEpochs epochs = layer.epochs_of(slot, stream);
  SavedCounts counts{now.num_tokens,
                     epochs.rows_since_publication,
                     epochs.decode_steps,
                     now.rows,
                     now.tail_length,
                     0,
                     0,
                     0,
                     epochs.moved ? 1 : 0,
                     epochs.unpublished ? 1 : 0};
  std::vector<std::int32_t> own;  // epochs, by first use
  const auto number_of = [&](std::int32_t epoch) {
    if (epoch == 0) return 0;
    if (std::find(own.begin(), own.end(), epoch) == own.end()) own.push_back(epoch);
    return static_cast<std::int32_t>(std::find(own.begin(), own.end(), epoch) - own.begin()) + 1;
  };
  std::vector<std::int32_t> segments;  // per segment: epoch, level, first rows of the heads
  for (const HostSegment& segment : epochs.segments) {
    segments.insert(segments.end(), {number_of(segment.epoch), segment.level});
    segments.insert(segments.end(), segment.first_rows.begin(), segment.first_rows.end());
  }
  counts.current_epoch = number_of(epochs.current);
  counts.own_epochs = static_cast<std::int32_t>(own.size());
  const SavedBlock block = detail::block_of(layer, now, counts);
  return save_framed(
      kSavedMagic, detail::describe_layer(layer), buffer, count_only, [&](ByteWriter& out) {
        if (!count_only) {
          DeviceLengths lengths;
          check(cudaMemcpyAsync(&lengths, layer.tables().lengths + slot, sizeof(lengths),
                                cudaMemcpyDeviceToHost, stream),
                "save");
          check(cudaStreamSynchronize(stream), "save");
          counts.tail_first = lengths.tail_first;
        }
        out.value(counts);
        out.value(epochs.merging);
        out.list(now.missing);
        out.list(
            std::vector<PositionShift>(now.shifts.pieces().begin(), now.shifts.pieces().end()));
        out.list(segments);
        std::byte* target = out.reserve(block.size);
        if (target == nullptr) return;
        std::uint8_t* memory = layer.pool().scratch(block.size);
        check(cudaMemsetAsync(memory, 0, block.size, stream), "save");
        detail::move_block<true>(layer, slot, now, counts, block, memory, stream);
        for (std::size_t i = 0; i < own.size(); ++i) {
          check(cudaMemcpyAsync(memory + block.epochs + i * layer.epochs().own_size(),
                                layer.epochs().own_epoch(own[i]), layer.epochs().own_size(),
                                cudaMemcpyDeviceToDevice, stream),
                "save");
        }
        check(cudaMemcpyAsync(target, memory, block.size, cudaMemcpyDeviceToHost, stream), "save");
        check(cudaStreamSynchronize(stream), "save");
      });
}

namespace detail {

/// The segments of a saved sequence.
inline std::vector<HostSegment> read_segments(ByteReader& in, int heads) {
  const std::vector<std::int32_t> numbers = in.list<std::int32_t>();
  const std::size_t each = 2 + static_cast<std::size_t>(heads);
  if (numbers.size() % each != 0)
    ::lowrankkv::detail::fail<FormatError>("saved state: segments in ", numbers.size(),
                                           " numbers, ", each, " each");
  std::vector<HostSegment> segments;
  for (auto at = numbers.begin(); at != numbers.end(); at += static_cast<std::ptrdiff_t>(each))
    segments.push_back({at[0], at[1], {at + 2, at + static_cast<std::ptrdiff_t>(each)}});
  return segments;
}

/// Checks that the segments of every head are contiguous and begin at row 0, and that each has rows
/// in some head.
inline void check_segments(const SavedSequence& sequence, std::int32_t own_epochs, int heads) {
  for (std::size_t i = 0; i < sequence.segments.size(); ++i) {
    const HostSegment& segment = sequence.segments[i];
    bool fits = segment.epoch >= (i == 0 ? 0 : 1) && segment.epoch <= own_epochs &&
                segment.level >= 0 && segment.level < (1 << 20),
         empty = true;
    for (std::size_t head = 0; head < static_cast<std::size_t>(heads); ++head) {
      const std::int64_t first = segment.first_rows[head],
                         end = i + 1 < sequence.segments.size()
                                   ? sequence.segments[i + 1].first_rows[head]
                                   : sequence.num_rows(RowList::compressed, static_cast<int>(head));
      fits = fits && first >= 0 && first <= end && (i > 0 || first == 0);
      empty = empty && first == end;
    }
    if (!fits || empty)
      ::lowrankkv::detail::fail<FormatError>(
          "saved state: segment ", i, " of epoch ", segment.epoch, " and level ", segment.level,
          " from row ", segment.first_rows.front(), " on, of ", sequence.rows.num_compressed, ", ",
          own_epochs, " epochs");
  }
}

/// Checks that the positions of a list are below `tail` and ascend in every head. In a scored list
/// (any_order) they may be in any order, but each occurs once.
/// @param joint  heads of a group with joint values, whose positions must be equal; 0: no joint
/// values
inline void check_positions(const std::byte* data, int heads, const SequenceRows& all, RowList list,
                            std::int64_t tail, bool any_order, int joint) {
  const std::int64_t most = all.num_rows(list);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(heads * most));
  if (!positions.empty())
    std::memcpy(positions.data(), data, positions.size() * sizeof(std::int32_t));
  const auto rows_of = [&](int head) {
    return std::span(positions).subspan(static_cast<std::size_t>(head * most),
                                        static_cast<std::size_t>(all.num_rows(list, head)));
  };
  for (int head = 0; head < heads; ++head) {
    std::vector<std::int32_t> own(rows_of(head).begin(), rows_of(head).end());
    if (any_order) std::sort(own.begin(), own.end());
    std::int64_t before = -1;
    for (const std::int32_t position : own) {
      if (position <= before || position >= tail)
        ::lowrankkv::detail::fail<FormatError>("saved state: position ", position, " after ",
                                               before, ", the tail begins at ", tail);
      before = position;
    }
  }
  for (int head = 0; joint > 0 && head < heads; ++head) {
    const int leader = head / joint * joint;
    const auto own = rows_of(head), others = rows_of(leader);
    const std::size_t row = static_cast<std::size_t>(
        std::mismatch(own.begin(), own.end(), others.begin(), others.end()).first - own.begin());
    if (row < own.size())
      ::lowrankkv::detail::fail<FormatError>(
          "saved state: head ", head, " has position ", own[row], " where head ", leader,
          ", whose values are joint with its own, has ", row < others.size() ? others[row] : -1);
  }
}

/// Checks that no head has a position in both lists.
/// @param full, compressed  positions [heads, most rows]
inline void check_apart(const std::byte* full, const std::byte* compressed, int heads,
                        const SequenceRows& all) {
  const auto positions_of = [&](const std::byte* data, RowList list, int head) {
    std::vector<std::int32_t> own(static_cast<std::size_t>(all.num_rows(list, head)));
    if (!own.empty())
      std::memcpy(own.data(),
                  data + static_cast<std::size_t>(head * all.num_rows(list)) * sizeof(std::int32_t),
                  own.size() * sizeof(std::int32_t));
    return own;
  };
  for (int head = 0; head < heads; ++head) {
    std::vector<std::int32_t> own = positions_of(full, RowList::full, head);
    const std::vector<std::int32_t> others = positions_of(compressed, RowList::compressed, head);
    own.insert(own.end(), others.begin(), others.end());
    std::sort(own.begin(), own.end());
    const auto twice = std::adjacent_find(own.begin(), own.end());
    if (twice != own.end())
      ::lowrankkv::detail::fail<FormatError>("saved state: head ", head, " has position ", *twice,
                                             " at full rank and compressed, once expected");
  }
}

/// Checks that accumulated scores are finite and not negative.
inline void check_scores(const std::byte* data, std::size_t count) {
  std::vector<float> accumulated_scores(count);
  if (count > 0) std::memcpy(accumulated_scores.data(), data, count * sizeof(float));
  for (std::size_t i = 0; i < count; ++i) {
    if (!(accumulated_scores[i] >= 0.0F && accumulated_scores[i] <= max_finite(DType::f32)))
      ::lowrankkv::detail::fail<FormatError>("saved state: accumulated score ", i, " is ",
                                             accumulated_scores[i],
                                             ", finite and at least 0 expected");
  }
}

/// Checks that residuals (f16) are not negative and not NaN. They may be infinite.
inline void check_residuals(const std::byte* data, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Half norm;
    std::memcpy(&norm, data + i * sizeof norm, sizeof norm);
    if (norm.bits > 0x7c00U)
      ::lowrankkv::detail::fail<FormatError>("saved state: residual ", i, " is ", to_float(norm),
                                             ", at least 0 expected");
  }
}
/// Checks that the norms of the heads' largest values are not negative and not NaN.
inline void check_largest(const std::byte* data, std::size_t heads) {
  for (std::size_t head = 0; head < heads; ++head) {
    float norm;
    std::memcpy(&norm, data + head * sizeof norm, sizeof norm);
    if (!(norm >= 0.0F))
      ::lowrankkv::detail::fail<FormatError>("saved state: head ", head,
                                             ": the largest value has norm ", norm,
                                             ", at least 0 expected");
  }
}

/// Checks that sketches are finite and hold no more rows than there is room for.
inline void check_sketches(const LayerState& layer, std::span<const std::byte> data,
                           const SavedBlock& block) {
  using ::lowrankkv::detail::fail;
  const std::size_t states = layer.device_epochs().state_bytes() / sizeof(SketchState);
  for (std::size_t i = 0; i < states; ++i) {
    SketchState state;
    std::memcpy(&state, data.data() + block.sketch_states + i * sizeof state, sizeof state);
    // Not max_tokens: a chunk also counts tokens that were removed.
    constexpr std::int64_t most_rows = std::int64_t{1} << 48;
    const bool fits = state.held >= 0 && state.held <= layer.device_epochs().sketches().capacity &&
                      state.chunk_rows >= 0 && state.chunk_rows <= most_rows;
    if (!fits)
      fail<FormatError>("saved state: sketch ", i, " holds ", state.held, " rows, of a chunk of ",
                        state.chunk_rows, "; at most ", layer.device_epochs().sketches().capacity,
                        " of ", most_rows);
  }
  for (std::size_t offset = 0; offset < layer.device_epochs().sketch_bytes();
       offset += sizeof(float)) {
    float number;
    std::memcpy(&number, data.data() + block.sketches + offset, sizeof number);
    if (!(std::abs(number) <= max_finite(DType::f32)))
      fail<FormatError>("saved state: number ", offset / sizeof(float), " of the sketches is ",
                        number, ", finite expected");
  }
}

}  // namespace detail

/// @brief Opens a frame and checks that its sequence fits this layer and the pool.
/// @throws FormatError, ShapeError, CapacityError
inline SavedSequence read_sequence(const LayerState& layer, std::span<const std::byte> saved) {
  using ::lowrankkv::detail::fail;
  ByteReader in = open_framed(kSavedMagic, detail::describe_layer(layer), saved);
  SavedSequence sequence;
  sequence.counts = in.value<SavedCounts>();
  sequence.merging = in.value<std::int32_t>();
  const SavedCounts& counts = sequence.counts;
  const LayerEdit& tables = layer.tables();
  sequence.rows = counts.rows;
  sequence.missing = in.list<HeadRows>();
  const std::size_t may_differ =
      tables.positions[0] != nullptr ? static_cast<std::size_t>(tables.num_heads) : 0;
  if (!sequence.missing.empty() && sequence.missing.size() != may_differ)
    fail<FormatError>("saved state: rows of ", sequence.missing.size(),
                      " heads differ, here those of ", may_differ, " may");
  sequence.joint_heads = tables.joint_heads;
  std::int64_t last_piece = -1;
  for (const PositionShift& piece : in.list<PositionShift>()) {
    if (!::lowrankkv::detail::is_next_piece(piece, last_piece, counts.num_tokens)) {
      fail<FormatError>("saved state: positions move by ", piece.offset, " and are divided by ",
                        piece.divisor, " from token ", piece.first, " on, in a sequence of ",
                        counts.num_tokens, " tokens");
    }
    const bool pre_rope = tables.rotary.pre_rope();
    const std::int64_t farthest =
        pre_rope ? farthest_shift(layer.config().max_tokens) : PositionShifts::kLimit;
    if (piece.offset < -farthest || piece.offset > farthest)
      fail<CapacityError>("positions: moved by ", piece.offset, ", at most ", farthest,
                          " expected");
    if (pre_rope && sequence.shifts.pieces().size() == kMaxShifts)
      fail<CapacityError>("positions: in more pieces than ", kMaxShifts, ", from token ",
                          piece.first, " on");
    sequence.shifts.append(piece);
    last_piece = piece.first;
  }
  ::lowrankkv::detail::check_saved(sequence.shifts);
  sequence.segments = detail::read_segments(in, tables.num_heads);
  const std::int64_t ring = std::int64_t{tables.tail_tiles} * tables.full.rows;
  if (counts.num_tokens > layer.config().max_tokens)
    fail<CapacityError>("max_tokens: ", layer.config().max_tokens, ", saved ", counts.num_tokens);
  const bool drops = tables.positions[0] != nullptr;
  const auto leader_of = [&](int head) {
    return tables.joint_heads == 0 ? head : head - head % tables.joint_heads;
  };
  for (int head = 0; head < tables.num_heads; ++head) {
    const std::int64_t full = sequence.num_rows(RowList::full, head),
                       compressed = sequence.num_rows(RowList::compressed, head),
                       rows = full + compressed + counts.tail_length;
    const bool fits = full >= 0 && compressed >= 0 && counts.tail_length >= 0 &&
                      full <= counts.rows.num_full && compressed <= counts.rows.num_compressed &&
                      compressed == sequence.num_rows(RowList::compressed, leader_of(head)) &&
                      (drops ? rows <= counts.num_tokens : rows == counts.num_tokens);
    if (!fits)
      fail<FormatError>("saved state: head ", head, ": ", full, " full rows, ", compressed,
                        " compressed, ", counts.tail_length, " in the tail, of ", counts.num_tokens,
                        " tokens");
  }
  if (counts.tail_length > layer.config().tail_capacity || counts.tail_first < 0 ||
      counts.tail_first >= (std::max)(ring, std::int64_t{1})) {
    fail<FormatError>("saved state: a tail of ", counts.tail_length, " rows from ",
                      counts.tail_first, ", tail_capacity ", layer.config().tail_capacity);
  }
  if (counts.rows.num_full > layer.max_rows(RowList::full))
    fail<CapacityError>("full rows: at most ", layer.max_rows(RowList::full), ", saved ",
                        counts.rows.num_full);
  if (counts.rows.num_compressed > layer.max_rows(RowList::compressed))
    fail<CapacityError>("compressed rows: at most ", layer.max_rows(RowList::compressed),
                        ", saved ", counts.rows.num_compressed);
  // A sequence uses at most this many epochs of its own, plus one that is published and has no
  // rows yet. Besides, it may have rows under the calibrated epoch.
  const int most_own = layer.epochs().adapts() ? layer.epochs().max_segments() - 2 : 0;
  constexpr std::int64_t most_steps = std::int64_t{1} << 48;
  const auto within = [](std::int64_t value, std::int64_t most) {
    return value >= 0 && value <= most;
  };
  const bool epochs_fit = within(counts.own_epochs, most_own == 0 ? 0 : most_own + 1) &&
                          within(counts.current_epoch, counts.own_epochs) &&
                          (counts.moved == 0 || layer.epochs().adapts());
  const bool steps_fit =
      within(counts.rows_since_publication, most_steps) && within(counts.decode_steps, most_steps);
  if (!steps_fit)
    fail<FormatError>("saved state: ", counts.rows_since_publication, " rows since a publication, ",
                      counts.decode_steps, " steps; 0 to ", most_steps);
  if (counts.unpublished != 0 && counts.moved == 0)
    fail<FormatError>("saved state: bases moved since they were published: ", counts.unpublished,
                      ", moved at all: ", counts.moved);
  if (!epochs_fit)
    fail<FormatError>("saved state: ", counts.own_epochs, " own epochs, the current one is ",
                      counts.current_epoch, "; at most ", most_own);
  // With device-managed epochs, bases are always a sequence's own, and there are at most as many
  // segments as batches.
  if (layer.device_epochs().used()) {
    const std::int64_t segments = static_cast<std::int64_t>(sequence.segments.size());
    if (counts.moved == 0 || counts.decode_steps < segments)
      fail<FormatError>("saved state: bases of its own: ", counts.moved, ", ", segments,
                        " segments of ", counts.decode_steps, " batches");
  }
  const bool calibrated_first = !sequence.segments.empty() && sequence.segments.front().epoch == 0;
  const std::size_t most_segments =
      most_own == 0 ? 0 : static_cast<std::size_t>(most_own + (calibrated_first ? 1 : 0));
  const std::int32_t merging = sequence.merging,
                     last = static_cast<std::int32_t>(sequence.segments.size()) - 1;
  if (merging < -1 || (merging >= 0 && merging >= last))
    fail<FormatError>("saved state: a merge of segment ", merging, " of ", last + 1);
  // A sequence that merges has one segment more, and opens no other before the merge is done.
  const bool one_more = merging >= 0 && sequence.segments.back().epoch == counts.current_epoch;
  if (sequence.segments.size() > most_segments + (one_more ? 1 : 0))
    fail<FormatError>("saved state: ", sequence.segments.size(), " segments, at most ",
                      most_segments);
  detail::check_segments(sequence, counts.own_epochs, tables.num_heads);
  if (layer.epochs().adapts() && sequence.segments.empty() != (counts.rows.num_compressed == 0))
    fail<FormatError>("saved state: ", sequence.segments.size(), " segments, ",
                      counts.rows.num_compressed, " compressed rows");
  const SavedBlock block = detail::block_of(layer, sequence, counts);
  sequence.block = in.bytes(block.size);
  if (in.left() != 0) fail<FormatError>("saved state: ", in.left(), " bytes after the end");
  const std::size_t heads = static_cast<std::size_t>(tables.num_heads);
  for (int list = 0; list < 2; ++list) {
    if (tables.positions[list] != nullptr)
      detail::check_positions(sequence.block.data() + block.positions[list], tables.num_heads,
                              sequence, static_cast<RowList>(list),
                              counts.num_tokens - counts.tail_length, tables.tail_scores != nullptr,
                              tables.joint_heads);
  }
  for (int list = 0; list < 2; ++list) {
    if (tables.residuals[list] != nullptr)
      detail::check_residuals(
          sequence.block.data() + block.residuals[list],
          2 * heads * static_cast<std::size_t>(sequence.num_rows(static_cast<RowList>(list))));
  }
  if (tables.scores_both())
    detail::check_apart(sequence.block.data() + block.positions[0],
                        sequence.block.data() + block.positions[1], tables.num_heads, sequence);
  if (tables.largest_values != nullptr)
    detail::check_largest(sequence.block.data() + block.largest_values, heads);
  if (tables.tail_scores != nullptr) {
    for (const RowList list : {RowList::full, RowList::compressed}) {
      if (layer.is_scored(list))
        detail::check_scores(
            sequence.block.data() + block.accumulated_scores[static_cast<int>(list)],
            heads * static_cast<std::size_t>(sequence.num_rows(list)));
    }
    detail::check_scores(sequence.block.data() + block.tail_scores,
                         heads * static_cast<std::size_t>(tables.ring_rows()));
  }
  if (layer.device_epochs().used()) detail::check_sketches(layer, sequence.block, block);
  layer.pool().allocator().require(layer.pages_of(sequence));
  return sequence;
}

/// @brief Restores a saved sequence in an empty slot. Waits for the stream.
template <class = void>
void load_sequence(LayerState& layer, int slot, const SavedSequence& saved, cudaStream_t stream) {
  const SavedCounts& counts = saved.counts;
  const SavedBlock block = detail::block_of(layer, saved, counts);
  std::uint8_t* memory = layer.pool().scratch(block.size);
  check(cudaMemcpyAsync(memory, saved.block.data(), block.size, cudaMemcpyHostToDevice, stream),
        "load");
  HostSequence& now = layer.sequence(slot);
  layer.add_pages(slot, saved, stream);
  std::vector<std::int32_t> own{0};
  for (int i = 0; i < counts.own_epochs; ++i) {
    own.push_back(layer.device_epochs().used() ? layer.epochs().epoch_of(slot, i)
                                               : layer.epochs().take(slot));
    check(cudaMemcpyAsync(
              layer.epochs().own_epoch(own.back()),
              memory + block.epochs + static_cast<std::size_t>(i) * layer.epochs().own_size(),
              layer.epochs().own_size(), cudaMemcpyDeviceToDevice, stream),
          "load");
  }
  detail::move_block<false>(layer, slot, saved, counts, block, memory, stream);
  now.num_tokens = counts.num_tokens;
  now.tail_length = counts.tail_length;
  now.rows = saved.rows;
  now.missing = saved.missing;
  now.shifts = saved.shifts;
  layer.rotary().write_shifts(slot, now.shifts, stream);
  now.epochs = {saved.segments,
                own[static_cast<std::size_t>(counts.current_epoch)],
                counts.rows_since_publication,
                counts.decode_steps,
                counts.moved != 0,
                counts.unpublished != 0,
                saved.merging};
  for (HostSegment& segment : now.epochs.segments)
    segment.epoch = own[static_cast<std::size_t>(segment.epoch)];
  const std::vector<HostSegment> segments = now.epochs.segments;
  if (layer.device_epochs().used()) {
    DeviceEpochState state;
    state.current = now.epochs.current;
    state.rows_since_publication = counts.rows_since_publication;
    state.unpublished = now.epochs.unpublished ? 1 : 0;
    state.merging = now.epochs.merging;
    const auto use = [&](std::int32_t epoch) { state.used |= epoch == 0 ? 0U : 1U << (epoch - 1); };
    use(counts.current_epoch);
    for (const HostSegment& segment : saved.segments) use(segment.epoch);
    for (std::size_t i = 0; i < segments.size(); ++i) state.levels[i] = segments[i].level;
    check(cudaMemcpyAsync(layer.device_epochs().states() + slot, &state, sizeof state,
                          cudaMemcpyHostToDevice, stream),
          "load");
    check(cudaStreamSynchronize(stream), "load");
    now.epochs = {{}, 0, 0, counts.decode_steps, false, false};
  }
  const DeviceLengths lengths{counts.tail_first, counts.tail_length, 0};
  check(cudaMemcpyAsync(layer.tables().lengths + slot, &lengths, sizeof(lengths),
                        cudaMemcpyHostToDevice, stream),
        "load");
  layer.write_lengths(slot, segments, false, stream);
  check(cudaStreamSynchronize(stream), "load");  // the caller may reuse its buffer
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
