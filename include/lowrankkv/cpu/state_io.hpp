// SPDX-License-Identifier: Apache-2.0
/// @file cpu/state_io.hpp  Serialisation of one sequence of a layer.
///
/// Contents (framed by cpu/saved_frame.hpp): lengths; position shifts; the current epoch; the
/// merge in progress; the segments of all heads; the sequence's own epochs in full. Then per head:
/// runs of positions, full rows, accumulated scores, residuals, the updater's working bases and
/// state. Then the compressed rows of each list; then the tail. Rows are in the order of their
/// lists, independent of page size. Codes are copied, never recoded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/cpu/layer_state.hpp"
#include "lowrankkv/cpu/sequence_ops.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

namespace detail {

inline void write_matrix(ByteWriter& out, const StoredMatrix& matrix) {
  out.value(static_cast<std::int32_t>(matrix.type));
  out.value(static_cast<std::int32_t>(matrix.rows));
  out.value(static_cast<std::int32_t>(matrix.cols));
  out.list(matrix.data);
}
inline StoredMatrix read_matrix(ByteReader& in) {
  StoredMatrix matrix;
  const auto type = in.value<std::int32_t>();
  matrix.rows = in.value<std::int32_t>();
  matrix.cols = in.value<std::int32_t>();
  matrix.data = in.list<std::byte>();
  if (type < 0 || type > static_cast<std::int32_t>(DType::bf16) || matrix.rows < 0 ||
      matrix.cols < 0 ||
      matrix.data.size() != static_cast<std::size_t>(matrix.rows) *
                                static_cast<std::size_t>(matrix.cols) *
                                size_of(static_cast<DType>(type))) {
    ::lowrankkv::detail::fail<FormatError>("saved state: a matrix of ", matrix.rows, " x ",
                                           matrix.cols, " in ", matrix.data.size(), " bytes");
  }
  matrix.type = static_cast<DType>(type);
  for (const float value : matrix.values()) {
    if (!std::isfinite(value))
      ::lowrankkv::detail::fail<FormatError>("saved state: a matrix of ", matrix.rows, " x ",
                                             matrix.cols, " holds ", value);
  }
  return matrix;
}

inline constexpr StoredMatrix EpochHead::*kEpochParts[] = {
    &EpochHead::key_down, &EpochHead::query_down, &EpochHead::value_down, &EpochHead::output_up,
    &EpochHead::key_mean, &EpochHead::value_mean, &EpochHead::key_scale,  &EpochHead::value_scale};

inline void write_epoch(ByteWriter& out, const std::vector<EpochHead>& heads) {
  for (const EpochHead& head : heads) {
    for (const auto part : kEpochParts) write_matrix(out, head.*part);
  }
}

/// Writes all rows of a list as one block.
template <class Rows, class Layout>
void write_rows(ByteWriter& out, const Rows& rows, const Layout& layout, int slot, int list) {
  const std::int32_t count = rows.size(slot, list);
  std::byte* block = out.reserve(layout.page_bytes(count));
  if (block != nullptr) rows.copy_out(slot, list, block);
}

template <class State>
constexpr bool saves_updater() {
  return requires(ByteWriter & out, ByteReader & in, const typename State::UpdaterImpl::State& from,
                  typename State::UpdaterImpl::State& to) {
    State::UpdaterImpl::write_state(out, from);
    State::UpdaterImpl::read_state(in, to);
  };
}

}  // namespace detail

/// @brief Writes everything about a sequence that is not in the layer's description.
/// save_sequence() frames it.
template <class State>
void write_sequence(const State& state, int slot, ByteWriter& out) {
  static_assert(!State::UpdaterImpl::adapts || detail::saves_updater<State>(),
                "lowrankkv: this Updater cannot be saved: Impl<Updater, Backend> needs 'static "
                "void write_state(ByteWriter&, const State&)' and 'static void "
                "read_state(ByteReader&, State&)'");
  const auto& sequence = state.sequence(slot);
  const SequenceLengths& lengths = state.table.lengths(slot);
  out.value(lengths);
  out.value(sequence.rows_since_publication);
  out.list(
      std::vector<PositionShift>(sequence.shifts.pieces().begin(), sequence.shifts.pieces().end()));
  // Epochs are numbered by first use. 0 is the calibrated epoch; the sequence's own epochs follow.
  std::vector<std::int32_t> epochs;
  const auto index_of = [&](std::int32_t epoch) {
    if (epoch == 0) return 0;
    auto entry = std::find(epochs.begin(), epochs.end(), epoch);
    if (entry == epochs.end()) entry = epochs.insert(epochs.end(), epoch);
    return static_cast<int>(entry - epochs.begin()) + 1;
  };
  std::vector<Segment> segments;
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    for (Segment segment : state.used_segments(slot, head)) {
      segment.epoch = index_of(segment.epoch);
      segments.push_back(segment);
    }
  }
  out.value(static_cast<std::int32_t>(State::TokenImpl::compresses ? index_of(sequence.epoch) : 0));
  out.value(sequence.merging);
  out.list(segments);
  out.value(static_cast<std::uint64_t>(epochs.size()));
  for (const std::int32_t epoch : epochs) {
    for (int head = 0; head < state.num_kv_heads(); ++head)
      detail::write_epoch(out, {state.epochs.head(epoch, head)});
  }
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    state.runs(slot, head).write(out);
    detail::write_rows(out, state.full, state.full.layout(head), slot, head);
    if (State::accumulates_scores) {
      const HeadScores& accumulated = sequence.accumulated[static_cast<std::size_t>(head)];
      for (const auto* values : {&accumulated.full, &accumulated.compressed, &accumulated.recent})
        out.list(*values);
    }
    if (state.config.keep_residuals) {
      const HeadResiduals& residuals = sequence.residuals[static_cast<std::size_t>(head)];
      for (const auto* norms : {&residuals.full.key, &residuals.full.value,
                                &residuals.compressed.key, &residuals.compressed.value})
        out.list(*norms);
      out.value(residuals.largest_value);
    }
    if constexpr (State::UpdaterImpl::adapts && State::TokenImpl::compresses) {
      const auto& adaptation = sequence.adaptation[static_cast<std::size_t>(head)];
      for (const auto* basis : {&adaptation.key_basis, &adaptation.value_basis})
        detail::write_matrix(out, *basis);
      for (const auto* of : {&adaptation.key_state, &adaptation.value_state})
        State::UpdaterImpl::write_state(out, *of);
    }
  }
  for (int list = 0; State::TokenImpl::compresses && list < state.num_lists(); ++list)
    detail::write_rows(out, state.compressed, state.compressed.layout(list), slot, list);
  std::vector<float> row(static_cast<std::size_t>(state.head_dim()));
  for (int head = 0; head < state.num_kv_heads(); ++head) {
    for (const Part part : {Part::key, Part::value}) {
      for (int index = 0; index < lengths.tail_length; ++index) {
        state.tail.read(slot, head, part, index, row.data());
        out.bytes(row.data(), row.size() * sizeof(float));
      }
    }
  }
}

/// @brief A saved sequence that was read and checked, but not stored yet.
template <class State>
struct SavedSequence {
  struct Head {
    RowRuns runs;
    std::span<const std::byte> full_rows;
    HeadScores accumulated;
    HeadResiduals residuals;
    StoredMatrix key_basis, value_basis;
    typename State::UpdaterImpl::State key_state, value_state;
  };
  SequenceLengths lengths;
  std::int64_t rows_since_publication = 0;
  PositionShifts shifts;
  std::int32_t epoch = 0;
  std::int32_t merging = -1;
  std::vector<Segment> segments;
  std::vector<std::vector<EpochHead>> epochs;
  std::vector<Head> heads;
  std::vector<std::span<const std::byte>> lists;
  std::span<const std::byte> tail;

  std::int32_t rows(int head, RowState kind) const {
    return heads[static_cast<std::size_t>(head)].runs.num_rows(kind);
  }
};

namespace detail {

/// Reads where the positions of a head are stored, `wanted` of them. Version 3 has a list of their
/// states, a byte each.
inline RowRuns read_runs(ByteReader& in, int version, int head, std::int64_t wanted) {
  using ::lowrankkv::detail::fail;
  const auto check_count = [&](std::int64_t found) {
    if (found != wanted)
      fail<FormatError>("saved state: head ", head, " has ", found, " stored positions, expected ",
                        wanted);
  };
  RowRuns runs;
  if (version == 3) {
    const std::vector<RowState> states = in.list<RowState>();
    check_count(static_cast<std::int64_t>(states.size()));
    for (const RowState kind : states) {
      if (kind > RowState::dropped)
        fail<FormatError>("saved state: row state ", static_cast<int>(kind), ", at most 2");
      runs.append(kind, 1);
    }
  } else {
    runs = RowRuns::read(in, wanted);
  }
  check_count(runs.num_positions());
  return runs;
}

}  // namespace detail

/// @brief Reads the output of write_sequence(), or of that of version 3. @throws FormatError if it
/// is inconsistent, CapacityError if it does not fit the cache
template <class State>
SavedSequence<State> read_sequence(const State& state, ByteReader& in, int version) {
  using ::lowrankkv::detail::fail;
  SavedSequence<State> saved;
  const int heads = state.num_kv_heads();
  saved.lengths = in.value<SequenceLengths>();
  const SequenceLengths& lengths = saved.lengths;
  if (lengths.num_tokens < 0 || lengths.num_tokens > state.config.max_tokens)
    fail<CapacityError>("max_tokens: ", state.config.max_tokens, ", saved sequence has ",
                        lengths.num_tokens);
  if (lengths.tail_length < 0 || lengths.tail_length > state.config.tail_capacity)
    fail<CapacityError>("tail_capacity: ", state.config.tail_capacity, ", saved tail has ",
                        lengths.tail_length);
  if (lengths.num_segments < 0 || lengths.num_segments > state.table.max_segments())
    fail<CapacityError>("epochs: room for ", state.table.max_segments(),
                        " segments, saved sequence has ", lengths.num_segments);
  if (lengths.tail_length > lengths.num_tokens)
    fail<FormatError>("saved state: a tail of ", lengths.tail_length, " in ", lengths.num_tokens,
                      " tokens");
  if (!State::TokenImpl::compresses && lengths.num_segments != 0)
    fail<FormatError>("saved state: ", lengths.num_segments,
                      " segments in a layer that compresses nothing, 0 expected");
  saved.rows_since_publication = in.value<std::int64_t>();
  if (saved.rows_since_publication < 0 ||
      saved.rows_since_publication >
          lengths.num_tokens + State::Epochs::max_epochs * (std::int64_t{1} << 31)) {
    fail<FormatError>("saved state: ", saved.rows_since_publication,
                      " rows since the last epoch, sequence has ", lengths.num_tokens, " tokens");
  }
  std::int64_t last = -1;
  for (const PositionShift& piece : in.list<PositionShift>()) {
    const std::int64_t limit = PositionShifts::kLimit;
    if (!::lowrankkv::detail::is_next_piece(piece, last, lengths.num_tokens) ||
        piece.offset < -limit || piece.offset > limit) {
      fail<FormatError>("saved state: positions move by ", piece.offset, " and are divided by ",
                        piece.divisor, " from token ", piece.first, " on, in a sequence of ",
                        lengths.num_tokens, " tokens");
    }
    saved.shifts.append(piece);
    last = piece.first;
  }
  ::lowrankkv::detail::check_saved(saved.shifts);
  saved.epoch = in.value<std::int32_t>();
  saved.merging = version == 3 ? -1 : in.value<std::int32_t>();
  if (saved.merging < -1 || (saved.merging >= 0 && (saved.merging > lengths.num_segments - 2 ||
                                                    !State::UpdaterImpl::adapts)))
    fail<FormatError>("saved state: a merge of segment ", saved.merging, " of ",
                      lengths.num_segments);
  saved.segments = in.list<Segment>();
  if (saved.segments.size() !=
      static_cast<std::size_t>(lengths.num_segments) * static_cast<std::size_t>(heads)) {
    fail<FormatError>("saved state: ", saved.segments.size(), " segments, expected ",
                      lengths.num_segments, " for each of ", heads, " heads");
  }
  const auto num_epochs = in.value<std::uint64_t>();
  if (num_epochs > saved.segments.size() + 1 || (num_epochs > 0 && !State::UpdaterImpl::adapts))
    fail<FormatError>("saved state: ", num_epochs, " epochs for ", saved.segments.size(),
                      " segments");
  for (std::uint64_t epoch = 0; epoch < num_epochs; ++epoch) {
    auto& maps = saved.epochs.emplace_back(static_cast<std::size_t>(heads));
    for (int head = 0; head < heads; ++head) {
      const EpochHead& calibrated = state.epochs.head(0, head);
      for (const auto part : detail::kEpochParts) {
        StoredMatrix& matrix = maps[static_cast<std::size_t>(head)].*part;
        matrix = detail::read_matrix(in);
        const StoredMatrix& like = calibrated.*part;
        if (matrix.rows != like.rows || matrix.cols != like.cols)
          fail<FormatError>("saved state: a map of ", matrix.rows, " x ", matrix.cols,
                            ", the calibrated one has ", like.rows, " x ", like.cols);
      }
    }
  }
  const auto known = [&](std::int32_t epoch) {
    return epoch >= 0 && epoch <= static_cast<std::int32_t>(num_epochs) &&
           (epoch > 0 || State::TokenImpl::compresses || lengths.num_segments == 0);
  };
  if (!known(saved.epoch))
    fail<FormatError>("saved state: epoch ", saved.epoch, " of ", num_epochs);
  const auto rows_in = [&](const auto& layout, std::int32_t rows) {
    return in.bytes(layout.page_bytes(rows));
  };
  // A full table has no room for one more segment: it needs a merge, and no new segment before it.
  if (lengths.num_segments == state.table.max_segments() &&
      (saved.merging < 0 ||
       saved.segments[static_cast<std::size_t>(lengths.num_segments - 1)].epoch != saved.epoch)) {
    fail<CapacityError>("epochs: room for ", state.table.max_segments() - 1,
                        " segments without a merge, saved sequence has ", lengths.num_segments);
  }
  for (int head = 0; head < heads; ++head) {
    auto& mine = saved.heads.emplace_back();
    mine.runs = detail::read_runs(in, version, head, lengths.num_tokens - lengths.tail_length);
    const int leader = head / state.heads_per_group() * state.heads_per_group();
    if (!(mine.runs == saved.heads[static_cast<std::size_t>(leader)].runs))
      fail<FormatError>("saved state: heads ", leader, " and ", head,
                        " share a latent and differ in their rows' states");
    const std::int32_t compressed = saved.rows(head, RowState::compressed);
    if (!State::TokenImpl::compresses && compressed != 0)
      fail<FormatError>("saved state: ", compressed,
                        " compressed rows in a layer that compresses nothing, 0 expected");
    std::int32_t next = 0;
    for (std::int32_t i = 0; i < lengths.num_segments; ++i) {
      const Segment& segment =
          saved.segments[static_cast<std::size_t>(head * lengths.num_segments + i)];
      if (!known(segment.epoch) || segment.first_row != next || segment.num_rows < 0 ||
          segment.num_rows > compressed - next) {
        fail<FormatError>("saved state: segment ", i, " of head ", head, " begins at row ",
                          segment.first_row, ", expected ", next);
      }
      // Epochs and levels are the same in all heads: compare with head 0.
      const Segment& first = saved.segments[static_cast<std::size_t>(i)];
      const bool follows =
          i == 0 ||
          (segment.epoch != 0 &&
           segment.epoch !=
               saved.segments[static_cast<std::size_t>(head * lengths.num_segments + i - 1)].epoch);
      if (segment.epoch != first.epoch || segment.level != first.level || segment.level < 0 ||
          segment.level > 1 << 20 || !follows) {
        fail<FormatError>("saved state: segment ", i, " of head ", head, " is under epoch ",
                          segment.epoch, " at level ", segment.level, ", head 0's under ",
                          first.epoch, " at ", first.level);
      }
      next += segment.num_rows;
    }
    if (next != compressed)
      fail<FormatError>("saved state: head ", head, " has ", compressed,
                        " compressed rows, its segments ", next);
    mine.full_rows = rows_in(state.full.layout(head), saved.rows(head, RowState::full));
    if (State::accumulates_scores) {
      for (auto* values :
           {&mine.accumulated.full, &mine.accumulated.compressed, &mine.accumulated.recent})
        *values = in.list<float>();
      if (mine.accumulated.full.size() !=
              static_cast<std::size_t>(saved.rows(head, RowState::full)) ||
          mine.accumulated.compressed.size() != static_cast<std::size_t>(compressed) ||
          mine.accumulated.recent.size() != static_cast<std::size_t>(lengths.tail_length)) {
        fail<FormatError>("saved state: head ", head, " has ", mine.accumulated.compressed.size(),
                          " accumulated scores for ", compressed, " compressed rows");
      }
      for (const auto* values :
           {&mine.accumulated.full, &mine.accumulated.compressed, &mine.accumulated.recent}) {
        // Rows are ordered by score, and NaN has no place in an order.
        for (const float accumulated : *values) {
          if (!(accumulated >= 0.0F && std::isfinite(accumulated)))
            fail<FormatError>("saved state: head ", head, " has an accumulated score of ",
                              accumulated, ", at least 0 and finite expected");
        }
      }
    }
    if (state.config.keep_residuals) {
      for (const RowState kind : {RowState::full, RowState::compressed}) {
        const std::int32_t wanted = state.keeps_residuals(kind) ? saved.rows(head, kind) : 0;
        for (const Part part : {Part::key, Part::value}) {
          std::vector<Half>& norms = mine.residuals.of(kind).of(part);
          norms = in.list<Half>();
          if (norms.size() != static_cast<std::size_t>(wanted))
            fail<FormatError>("saved state: head ", head, " has ", norms.size(), " residuals for ",
                              wanted, " rows");
          for (const Half norm : norms) {
            if (!(to_float(norm) >= 0.0F))
              fail<FormatError>("saved state: a residual of ", to_float(norm),
                                ", at least 0 expected");
          }
        }
      }
      mine.residuals.largest_value = in.value<float>();
      if (!(mine.residuals.largest_value >= 0.0F))
        fail<FormatError>("saved state: values of norm ", mine.residuals.largest_value,
                          ", at least 0 expected");
    }
    if constexpr (State::UpdaterImpl::adapts && State::TokenImpl::compresses) {
      mine.key_state = start_state(state, head, Part::key);
      mine.value_state = start_state(state, head, Part::value);
      for (auto* basis : {&mine.key_basis, &mine.value_basis}) *basis = detail::read_matrix(in);
      const EpochHead& calibrated = state.epochs.head(0, head);
      for (const auto& [basis, like] : {std::pair{&mine.key_basis, &calibrated.key_down},
                                        {&mine.value_basis, &calibrated.value_down}}) {
        if (!basis->empty() && (basis->rows != like->rows || basis->cols != like->cols))
          fail<FormatError>("saved state: a working basis of ", basis->rows, " x ", basis->cols,
                            ", expected ", like->rows, " x ", like->cols);
      }
      for (auto* of : {&mine.key_state, &mine.value_state}) State::UpdaterImpl::read_state(in, *of);
    }
  }
  for (int list = 0; State::TokenImpl::compresses && list < state.num_lists(); ++list) {
    const int head = list < heads ? list : (list - heads) * state.heads_per_group();
    saved.lists.push_back(
        rows_in(state.compressed.layout(list), saved.rows(head, RowState::compressed)));
  }
  saved.tail =
      in.bytes(2 * static_cast<std::size_t>(heads) * static_cast<std::size_t>(lengths.tail_length) *
               static_cast<std::size_t>(state.head_dim()) * sizeof(float));
  if (in.left() != 0) fail<FormatError>("saved state: ", in.left(), " bytes too many, 0 expected");
  for (std::size_t at = 0; state.config.check_finite && at < saved.tail.size();
       at += sizeof(float)) {
    float value = 0.0F;
    std::memcpy(&value, saved.tail.data() + at, sizeof value);
    if (!std::isfinite(value))
      fail<FormatError>("saved state: the tail holds ", value, " at element ", at / sizeof(float));
  }
  return saved;
}

/// @brief Number of pages that store_sequence() takes. @throws CapacityError if a page table is too
/// short for the saved rows
template <class State>
std::int64_t pages_of(const State& state, const SavedSequence<State>& saved) {
  std::int64_t pages = 0;
  const auto add = [&](RowList list, std::int32_t count) {
    if (count > state.table.max_pages(list))
      ::lowrankkv::detail::fail<CapacityError>("page table: room for ", state.table.max_pages(list),
                                               " pages, saved rows need ", count);
    pages += count;
  };
  for (int head = 0; head < state.num_kv_heads(); ++head)
    add(RowList::full, state.full.pages_for(head, saved.rows(head, RowState::full)));
  for (int list = 0; State::TokenImpl::compresses && list < state.num_lists(); ++list) {
    const int head = list < state.num_kv_heads()
                         ? list
                         : (list - state.num_kv_heads()) * state.heads_per_group();
    add(RowList::compressed,
        state.compressed.pages_for(list, saved.rows(head, RowState::compressed)));
  }
  return pages;
}

/// @brief Stores a saved sequence in an empty, open slot, within an Operation of pages_of() pages.
template <class State>
void store_sequence(State& state, int slot, SavedSequence<State>&& saved) {
  auto& sequence = state.sequence(slot);
  const int heads = state.num_kv_heads();
  std::vector<std::int32_t> ids{0};
  for (auto& maps : saved.epochs) ids.push_back(state.epochs.adopt(std::move(maps)));
  state.table.lengths(slot) = saved.lengths;
  sequence.rows_since_publication = saved.rows_since_publication;
  sequence.merging = saved.merging;
  sequence.shifts = std::move(saved.shifts);
  for (int head = 0; head < heads; ++head) {
    auto segments = state.used_segments(slot, head);
    for (std::size_t i = 0; i < segments.size(); ++i) {
      segments[i] = saved.segments[static_cast<std::size_t>(head) * segments.size() + i];
      segments[i].epoch = ids[static_cast<std::size_t>(segments[i].epoch)];
    }
    auto& mine = saved.heads[static_cast<std::size_t>(head)];
    state.runs(slot, head) = mine.runs;
    state.full.extend(slot, head, saved.rows(head, RowState::full));
    state.full.copy_in(slot, head, mine.full_rows.data());
    if (State::accumulates_scores) {
      state.accumulated(slot, head) = std::move(mine.accumulated);
      reserve_scores(state, sequence);
    }
    if (state.config.keep_residuals) state.residuals(slot, head) = std::move(mine.residuals);
    if constexpr (State::UpdaterImpl::adapts && State::TokenImpl::compresses) {
      auto& adaptation = sequence.adaptation[static_cast<std::size_t>(head)];
      adaptation = {std::move(mine.key_state), std::move(mine.value_state),
                    std::move(mine.key_basis), std::move(mine.value_basis)};
    }
  }
  if (State::TokenImpl::compresses) {
    for (const Segment& segment : state.used_segments(slot, 0)) state.epochs.share(segment.epoch);
    state.epochs.release(sequence.epoch);
    sequence.epoch = ids[static_cast<std::size_t>(saved.epoch)];
    state.epochs.share(sequence.epoch);
    // Drop adopt()'s own references.
    for (std::size_t id = 1; id < ids.size(); ++id) state.epochs.release(ids[id]);
    for (int list = 0; list < state.num_lists(); ++list) {
      const int head = list < heads ? list : (list - heads) * state.heads_per_group();
      state.compressed.extend(slot, list, saved.rows(head, RowState::compressed));
      state.compressed.copy_in(slot, list, saved.lists[static_cast<std::size_t>(list)].data());
    }
  }
  std::vector<float> row(static_cast<std::size_t>(state.head_dim()));
  const std::byte* at = saved.tail.data();
  for (int head = 0; head < heads; ++head) {
    for (const Part part : {Part::key, Part::value}) {
      for (int index = 0; index < saved.lengths.tail_length;
           ++index, at += row.size() * sizeof(float)) {
        std::memcpy(row.data(), at, row.size() * sizeof(float));
        state.tail.write(slot, head, part, index, row.data());
      }
    }
  }
}

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
