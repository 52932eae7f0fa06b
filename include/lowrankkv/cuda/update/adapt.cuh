// SPDX-License-Identifier: Apache-2.0
/// @file cuda/update/adapt.cuh  Flushed rows move bases: which rows are observed, when an epoch is
/// published, and under which segment rows are stored then.
///
/// All of it follows from counts, and the host decides it; kernels compute scores, moments, bases
/// and maps in the order of the stream.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "lowrankkv/concepts/impl.hpp"
#include "lowrankkv/core/statistics.hpp"
#include "lowrankkv/cuda/decode/moved_residuals.cuh"
#include "lowrankkv/cuda/layer/layer_state.cuh"
#include "lowrankkv/cuda/runtime/launch.cuh"
#include "lowrankkv/cuda/scores/rotate_rows.cuh"
#include "lowrankkv/cuda/scores/snapkv_scores.cuh"
#include "lowrankkv/cuda/scores/top_rows.cuh"
#include "lowrankkv/cuda/state/row_order.cuh"
#include "lowrankkv/cuda/store/latent_errors.cuh"
#include "lowrankkv/cuda/store/store_joint.cuh"
#include "lowrankkv/cuda/update/align_axes.cuh"
#include "lowrankkv/cuda/update/compress_scratch.cuh"
#include "lowrankkv/cuda/update/key_up_epochs.cuh"
#include "lowrankkv/cuda/update/oja.cuh"

LOWRANKKV_NAMESPACE_BEGIN

namespace cuda {

namespace detail {

/// Calls f with the units of channels that a scoring kernel is compiled for, 8 or 16, as a
/// compile-time constant.
template <class Set, class Function>
void with_score_units(int units, Function&& function) {
  if constexpr (kLeastFullUnits<Set> <= 8) {
    if (units <= 8) return function(std::integral_constant<int, 8>{});
  }
  constexpr int most = kMostFullUnits<Set>;
  if constexpr (most > 8) function(std::integral_constant<int, 16>{});
}

}  // namespace detail

/// @brief Of the flushed rows of a packed prompt, keeps those that have the highest scores; the
/// others are dropped.
/// @param with_pinned  the order has the pinned rows too, since all rows go to one list
/// @return the order of the rows that are kept
template <class = void>
RowOrder choose_kept(const LayerState& layer, const FlushBatch& flushed,
                     const CompressScratch& scratch, const float* scores, bool with_pinned,
                     cudaStream_t stream) {
  Candidates candidates{scores, scratch.rows, with_pinned, {}, {}, {}};
  candidates.first[0] = flushed.pinned[0];
  candidates.end[0] = flushed.rows[0];
  candidates.wanted[0] = flushed.candidates(0);
  top_rows_kernel<><<<static_cast<unsigned>(layer.tables().num_heads), kSelectThreads, 0, stream>>>(
      candidates, scratch.kept, nullptr);
  check(cudaGetLastError(), "top_rows_kernel");
  return {scratch.kept, scratch.rows};
}

/// @brief Enqueues the scores of a packed prompt's rows under its last queries, pooled over the
/// flushed rows, and summed over heads whose values are joint, or over all heads of the layer.
/// @return [heads, rows]
template <class State>
const float* enqueue_scores(const State& layer, const CompressScratch& scratch,
                            const ScoreQueries& queries, const AttentionScores& wanted,
                            ScoreScope scope, const FlushBatch& flushed, cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  RowSource source{scratch.packed, layer.packed_tiles(scratch.rows)};
  if (tables.rotary.pre_rope())
    source = enqueue_rotation(tables, source, flushed.slots[0], flushed.position[0],
                              scratch.rotated, stream);
  const unsigned heads = static_cast<unsigned>(tables.num_heads);
  const std::size_t bytes = score_bytes(tables.head_dim);
  const unsigned groups = static_cast<unsigned>(queries.groups());
  detail::with_type<typename State::Kernels>(tables.full_type, [&](auto type) {
    detail::launch_kernel(score_operands_kernel<type()>, dim3(groups, heads, 4), kStoreThreads, 0,
                          "score_operands_kernel", stream, queries, tables.head_dim,
                          scratch.operands);
    detail::with_score_units<typename State::Kernels>(
        tables.head_dim / kPlainUnit, [&](auto units) {
          const dim3 pieces(groups, static_cast<unsigned>(queries.pieces()), heads),
              rows(static_cast<unsigned>((queries.total - 1) / score_rows(units()) + 1), heads);
          const uint2* operands = scratch.operands;
          detail::launch_kernel(score_sums_kernel<type(), units()>, pieces, kStoreThreads, bytes,
                                "score_sums_kernel", stream, tables, source, queries, operands,
                                scratch.sums);
          const float2* sums = scratch.sums;
          detail::launch_kernel(
              score_lse_kernel<>, dim3(groups * kScoreColumns / (kStoreThreads / 32), heads),
              kStoreThreads, 0, "score_lse_kernel", stream, queries, sums, scratch.lse);
          const float* lse = scratch.lse;
          detail::launch_kernel(score_rows_kernel<type(), units()>, rows, kStoreThreads, bytes,
                                "score_rows_kernel", stream, tables, source, queries, operands, lse,
                                scratch.scores);
        });
  });
  const unsigned pieces = static_cast<unsigned>((flushed.rows[0] + 255) / 256);
  float* scores = scratch.scores;
  if (wanted.kernel > 1) {
    scores = scratch.second_scores(tables.num_heads);
    pool_scores_kernel<><<<dim3(pieces, heads), 256, 0, stream>>>(
        scratch.scores, scratch.rows, flushed.rows[0], wanted.kernel,
        wanted.pooling == Pooling::maximum, scores);
    check(cudaGetLastError(), "pool_scores_kernel");
  }
  const int together = scope == ScoreScope::layer ? tables.num_heads : tables.joint_heads;
  if (together > 1) {
    group_scores_kernel<>
        <<<dim3(pieces, heads / static_cast<unsigned>(together)), 256, 0, stream>>>(
            scores, scratch.rows, flushed.rows[0], together);
    check(cudaGetLastError(), "group_scores_kernel");
  }
  return scores;
}

/// @brief Copies the scores, or accumulated scores, of the rows in an order of a prompt; other rows
/// get scores lower than any. The copy is in the half of scratch.scores that `scores` are not in.
template <class = void>
const float* mask_scores(const LayerState& layer, const CompressScratch& scratch,
                         const float* scores, const RowOrder& kept, int num_kept,
                         std::int64_t flushed, cudaStream_t stream) {
  const int heads = layer.tables().num_heads;
  float* target = scores == scratch.scores ? scratch.second_scores(heads) : scratch.scores;
  mask_scores_kernel<><<<static_cast<unsigned>(heads), kSelectThreads, 0, stream>>>(
      scores, scratch.rows, static_cast<int>(flushed), kept, num_kept, target);
  check(cudaGetLastError(), "mask_scores_kernel");
  return target;
}

/// @brief Enqueues the merges of `count` sequences.
/// @tparam coded_groups  scale groups of tiles of codes; 0: plain tiles
/// @param pieces  64-row pieces of a merge, at most
template <int coded_groups>
void enqueue_merges(const LayerState& layer, const MergePlans& plans, int count, int pieces,
                    const CompressScratch& scratch, cudaStream_t stream) {
  const int most = layer.epochs().most(), heads = layer.tables().num_heads;
  transition_kernel<>
      <<<dim3(static_cast<unsigned>((most + kTransitionColumns - 1) / kTransitionColumns),
              static_cast<unsigned>(heads), static_cast<unsigned>(2 * count)),
         kStoreThreads, 0, stream>>>(layer.tables(), plans, most, scratch.transitions);
  check(cudaGetLastError(), "transition_kernel");
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(heads),
                  static_cast<unsigned>(count));
  detail::launch_kernel(merge_kernel<coded_groups>, grid, kStoreThreads,
                        merge_bytes(coded_groups, most, layer.tiles().max_head_tile_bytes()),
                        "merge_kernel", stream, layer.tables(), plans, most,
                        static_cast<const float*>(scratch.transitions), layer.tiles().coded_type);
}

/// @brief Rewrites the last rows of segment `merged` of a sequence under the epoch of the next
/// segment, which may have no rows yet: those from row `from_row` of the lists on. The device has
/// both segments.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups>
void merge_segment(LayerState& layer, int slot, int merged, std::int32_t from_row,
                   const CompressScratch& scratch, CacheStatistics& statistics,
                   cudaStream_t stream) {
  const HostSequence& now = layer.sequence(slot);
  const HostSegment &from = now.epochs.segments[static_cast<std::size_t>(merged)],
                    &into = now.epochs.segments[static_cast<std::size_t>(merged) + 1];
  constexpr std::int32_t none = std::numeric_limits<std::int32_t>::max();
  std::int32_t first = none, end = 0, first_page_row = none, last_page_row = 0, pieces = 0;
  for (int head = 0; head < layer.tables().num_heads; ++head) {
    const std::int32_t begin =
                           (std::max)(from.first_rows[static_cast<std::size_t>(head)], from_row),
                       until = into.first_rows[static_cast<std::size_t>(head)],
                       missing =
                           static_cast<std::int32_t>(now.missing_in(RowList::compressed, head));
    if (begin >= until) continue;
    first = (std::min)(first, begin);
    end = (std::max)(end, until);
    first_page_row = (std::min)(first_page_row, begin + missing);
    last_page_row = (std::max)(last_page_row, until + missing);
    pieces = (std::max)(pieces, (until - 1) / kStoreRows - begin / kStoreRows + 1);
    const HeadTiles& tiles = layer.layout(RowList::compressed, head);
    statistics.rows_reprojected += until - begin;
    statistics.bytes_reprojected += 2 * std::int64_t{until - begin} * tiles.bytes / tiles.rows;
  }
  if (first >= end) return;
  layer.own_pages(slot, RowList::compressed, first_page_row, last_page_row, stream);
  MergePlans plans{{slot, from.epoch, into.epoch, merged}};
  plans.begin = first;
  const auto merge = [&](const MergePlans& some) {
    enqueue_merges<scale_groups>(layer, some, 1, pieces, scratch, stream);
  };
  if (layer.config().keep_residuals)
    merge_noting_moves<scale_groups>(layer, slot, plans, first, end, scratch.decoded, stream,
                                     merge);
  else
    merge(plans);
}

/// @brief Goes on with the merge in progress, if there is one, as cpu/segments.hpp does: moves the
/// last rows of its older segment to the next segment, those within `most` rows of the last one of
/// any head. When no head has a row left in the older one, the next one takes its place. The device
/// has both segments.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups>
void advance_merge(LayerState& layer, int slot, std::int64_t most, const CompressScratch& scratch,
                   CacheStatistics& statistics, cudaStream_t stream) {
  HostEpochs& own = layer.sequence(slot).epochs;
  if (own.merging < 0) return;
  HostSegment &from = own.segments[static_cast<std::size_t>(own.merging)],
              &into = own.segments[static_cast<std::size_t>(own.merging) + 1];
  std::int64_t end = 0;
  for (std::size_t head = 0; head < into.first_rows.size(); ++head) {
    if (from.first_rows[head] < into.first_rows[head])
      end = (std::max)(end, std::int64_t{into.first_rows[head]});
  }
  const auto from_row = static_cast<std::int32_t>((std::max)(std::int64_t{0}, end - most));
  merge_segment<scale_groups>(layer, slot, own.merging, from_row, scratch, statistics, stream);
  for (std::size_t head = 0; head < into.first_rows.size(); ++head) {
    std::int32_t& border = into.first_rows[head];
    border = (std::min)(border, (std::max)(from.first_rows[head], from_row));
  }
  if (into.first_rows == from.first_rows) {
    into.level = (std::max)(into.level, from.level) + 1;
    own.segments.erase(own.segments.begin() + own.merging);
    own.merging = -1;
    ++statistics.merges;
  }
  layer.epochs().free_unused(slot, own);
  layer.write_lengths(slot, own.segments, false, stream);
}

/// @brief Opens a segment under the sequence's current epoch, if its last segment is under another,
/// and begins a merge of old segments if there are now too many. Then goes on with the merge in
/// progress: with a prompt, and under RotateNow, to its end.
/// @tparam scale_groups  of tiles of codes; 0: plain tiles
template <int scale_groups>
void open_segment(LayerState& layer, int slot, Phase phase, const CompressScratch& scratch,
                  CacheStatistics& statistics, cudaStream_t stream) {
  HostSequence& now = layer.sequence(slot);
  HostEpochs& own = now.epochs;
  const bool at_once = layer.epochs().merges_at_once(phase);
  const std::int64_t most =
      at_once ? std::numeric_limits<std::int32_t>::max() : layer.config().most_merge_rows();
  if (own.segments.empty() || own.segments.back().epoch != own.current) {
    if (at_once) advance_merge<scale_groups>(layer, slot, most, scratch, statistics, stream);
    // With a merge in progress, this segment takes the place of one that lost its last row.
    if (own.merging < 0) own.merging = layer.epochs().merge_for_new_segment(own);
    HostSegment& opened = own.segments.emplace_back(HostSegment{own.current, 0, {}});
    for (int head = 0; head < layer.tables().num_heads; ++head)
      opened.first_rows.push_back(
          static_cast<std::int32_t>(now.num_rows(RowList::compressed, head)));
    layer.epochs().free_unused(slot, own);
    layer.write_lengths(slot, own.segments, false, stream);
  }
  advance_merge<scale_groups>(layer, slot, most, scratch, statistics, stream);
}

/// @brief Moments of rows, in the metric, as kernels take them: the first of `splits` matrices has
/// the sum.
struct Moments {
  const float* sums = nullptr;
  int splits = 1;
};

/// @brief Enqueues the moments of rows of `count` sequences.
/// @param splits  shares in which a sequence's rows are summed
template <class = void>
Moments enqueue_moments(const LayerState& layer, const RowSource& source,
                        const ObservedRows& observed, int count, int splits,
                        const CompressScratch& scratch, cudaStream_t stream) {
  const int dim = layer.tables().head_dim, heads = layer.tables().num_heads;
  const dim3 shares(static_cast<unsigned>(splits * moment_blocks(dim)),
                    static_cast<unsigned>(2 * heads), static_cast<unsigned>(count));
  detail::launch_kernel(moment_kernel<>, shares, kStoreThreads, moment_bytes(dim), "moment_kernel",
                        stream, layer.tables(), source, observed, splits, scratch.moments);
  if (splits > 1) {
    const dim3 numbers(static_cast<unsigned>((dim * dim / 4 - 1) / kStoreThreads + 1),
                       static_cast<unsigned>(2 * heads * count));
    detail::launch_kernel(sum_moments_kernel<>, numbers, kStoreThreads, 0, "sum_moments_kernel",
                          stream, scratch.moments, splits, dim * dim);
  }
  if (!layer.epochs().metrics().any()) return {scratch.moments, splits};
  const dim3 columns(static_cast<unsigned>(dim / detail::kMetricColumns),
                     static_cast<unsigned>(2 * heads), static_cast<unsigned>(count));
  detail::launch_kernel(metric_moments_kernel<>, columns, detail::kMetricThreads, metric_bytes(dim),
                        "metric_moments_kernel", stream, layer.epochs().metrics(), dim,
                        static_cast<const float*>(scratch.moments), splits, scratch.metric_moments);
  return {scratch.metric_moments, 1};
}

/// @brief Bytes of so many compressed rows of every head, over all heads.
inline std::size_t compressed_bytes(const LayerState& layer, std::int64_t rows) {
  std::size_t bytes = 0;
  for (int head = 0; head < layer.tables().num_heads; ++head)
    bytes += static_cast<std::size_t>(rows * layer.layout(RowList::compressed, head).bytes /
                                      layer.layout(RowList::compressed, head).rows);
  return bytes;
}

/// @brief The updater observes the rows that will be compressed, and moves the bases of at most
/// kAdaptBatch sequences. Sequences that are due publish their bases, unless the layer has
/// device-managed epochs (cuda/update/publish_on_device.cuh).
/// @param kept    the rows of these sequences that are neither pinned nor dropped; null: all rows
/// behind the pinned ones
/// @param scores  of a packed prompt; null: all rows are observed
/// @param share   share of the prompt's rows that is observed: the rows with the highest scores
template <class Updater, class State>
void adapt(State& layer, const Updater& updater, const FlushBatch& flushed, int first_sequence,
           int count, const RowSource& source, const CompressScratch& scratch, Phase phase,
           const RowOrder& kept, const float* scores, float share, CacheStatistics& statistics,
           cudaStream_t stream) {
  using Rule = Impl<Updater, Cuda>;
  const LayerEdit& tables = layer.tables();
  const int heads = tables.num_heads, dim = tables.head_dim,
            splits = phase == Phase::prefill ? kMomentSplits : 1;
  ObservedRows observed{};
  const bool device_epochs = layer.device_epochs().used();
  OjaSteps steps{};
  steps.form = Rule::form(updater);
  steps.of_steps = Rule::rate(updater, phase);
  if (device_epochs && phase == Phase::decode)
    steps.states = layer.device_epochs().sketches().states;
  observed.order = kept;
  for (int i = 0; i < count; ++i) {
    const int from = first_sequence + i, slot = flushed.slots[from];
    HostEpochs& own = layer.sequence(slot).epochs;
    const std::int64_t rows = flushed.candidates(from);
    observed.slots[i] = steps.slots[i] = slot;
    observed.first[i] = kept.rows != nullptr ? 0 : flushed.pinned[from];
    observed.count[i] = flushed.candidates(from);
    steps.moved[i] = device_epochs || own.moved;  // device-managed bases begin there
    steps.epoch[i] = -1;
    steps.rate[i] = -1.0F;
    if (rows == 0) continue;
    if (scores != nullptr) {  // a prompt is the only sequence
      const std::int64_t wanted = static_cast<std::int64_t>(
          std::ceil(static_cast<double>(share) * static_cast<double>(scratch.rows)));
      Candidates candidates{scores,
                            scratch.rows,
                            false,
                            {},
                            {},
                            {},
                            kept.ends == nullptr ? RowOrder{} : kept,
                            false,
                            kept.ends == nullptr ? nullptr : scratch.observed};
      candidates.first[0] = flushed.pinned[from];
      candidates.end[0] = flushed.rows[from];
      candidates.wanted[0] = static_cast<std::int32_t>((std::min)(wanted, rows));
      std::int32_t* chosen = kept.rows == scratch.chosen ? scratch.kept : scratch.chosen;
      top_rows_kernel<><<<static_cast<unsigned>(heads), kSelectThreads, 0, stream>>>(
          candidates, chosen, nullptr);
      check(cudaGetLastError(), "top_rows_kernel");
      observed.order = {chosen, scratch.rows, candidates.counts, 1};
      observed.first[i] = 0;
      observed.count[i] = candidates.wanted[0];
    }
    if (observed.count[i] > 0) steps.rate[i] = steps.of_steps.after(own.decode_steps);
    if (device_epochs) continue;
    if (observed.count[i] > 0) {
      if (phase == Phase::decode) ++own.decode_steps;
      own.moved = own.unpublished = true;
    }
    const std::int64_t since = own.rows_since_publication + rows;
    const bool waits = own.merging >= 0 && !layer.epochs().merges_at_once(phase);
    const bool due =
        own.unpublished && !waits &&
        (since >= layer.publish_interval() ||
         (phase == Phase::prefill && compressed_bytes(layer, rows) > layer.epochs().epoch_bytes()));
    own.rows_since_publication = due ? 0 : since;
    if (!due) continue;
    own.unpublished = false;
    steps.epoch[i] = layer.epochs().take(slot);
    own.current = steps.epoch[i];
    ++statistics.publications;
  }
  Moments moments = enqueue_moments(layer, source, observed, count, splits, scratch, stream);
  const auto move = [&](auto* kernel) {
    const dim3 matrices(2, static_cast<unsigned>(heads), static_cast<unsigned>(count));
    detail::launch_kernel(kernel, matrices, kOjaThreads, oja_bytes(dim), "oja_kernel", stream,
                          tables, steps, layer.epochs().bases(), moments.sums, moments.splits);
  };
  constexpr int set_dim = State::Kernels::head_dim;
  detail::with_bool(steps.form != OjaForm::power, [&](auto printed) {
    if constexpr (set_dim == 0 || set_dim <= kOjaKept) {
      if (dim <= kOjaKept) move(oja_kernel<8, 4, printed()>);
    }
    if constexpr (set_dim == 0 || set_dim > kOjaKept) {
      if (dim > kOjaKept) move(oja_kernel<16, 8, printed()>);
    }
  });
  if (std::none_of(steps.epoch, steps.epoch + count, [](std::int32_t epoch) { return epoch >= 0; }))
    return;
  PublishedEpochs published{};
  std::copy_n(steps.slots, count, published.slots);
  std::copy_n(steps.epoch, count, published.taken);
  if (layer.epochs().axis_store().any()) {
    AxisRows rows{};
    for (int i = 0; i < count; ++i) {
      rows.count[i] = observed.count[i];
      if (scores == nullptr) continue;  // all rows were observed
      const int from = first_sequence + i;
      observed.order = kept;
      observed.first[i] = kept.rows != nullptr ? 0 : flushed.pinned[from];
      observed.count[i] = rows.count[i] = flushed.candidates(from);
    }
    if (scores != nullptr)
      moments = enqueue_moments(layer, source, observed, count, splits, scratch, stream);
    align_axes(layer, published, count, moments.sums, moments.splits, rows, scratch.axes, stream);
  }
  finish_epochs(tables, layer.epochs(), published, count, scratch.axes.steps, stream);
}

/// @brief Enqueues the errors of rows under the maps that would store them, to scratch.scores.
/// @tparam coded_groups  scale groups of tiles of codes; 0: plain tiles
/// @tparam joint  whether values are joint
template <int coded_groups, bool joint, class State>
void enqueue_errors(const State& layer, const FlushBatch& flushed, const ErrorRows& wanted,
                    bool relative, const RowSource& source, const CompressScratch& scratch,
                    cudaStream_t stream) {
  const LayerEdit& tables = layer.tables();
  const int most_rows =
      static_cast<int>(*std::max_element(wanted.count, wanted.count + flushed.count));
  constexpr StoreForm form = coded_groups > 0 ? StoreForm::codes : StoreForm::coefficients;
  constexpr int scale_groups = coded_groups > 0 ? coded_groups : 1;
  const bool metric = tables.metrics != nullptr;
  const auto memory_of = [&](int steps) {
    return ErrorMemory(steps, form, tables.head_dim, layer.most_rank(), metric, metric && relative)
        .bytes;
  };
  const int steps = memory_of(4) <= kErrorBytes ? 4 : 2;
  // Two more, since rows may begin and end inside steps of 16 rows.
  const dim3 pieces(static_cast<unsigned>(most_rows / (steps * kPlainRows) + 2),
                    static_cast<unsigned>(tables.num_heads), static_cast<unsigned>(flushed.count));
  detail::with_type<typename State::Kernels>(tables.full_type, [&](auto type) {
    const auto start = [&](auto* kernel) {
      detail::launch_kernel(kernel, pieces, kStoreThreads,
                            static_cast<std::size_t>(memory_of(steps)), "row_errors_kernel", stream,
                            tables, source, wanted, relative, layer.tiles().coded_type, steps,
                            metric, scratch.scores, static_cast<int>(scratch.rows));
    };
    if (layer.config().epoch_type == tables.full_type)
      start(row_errors_kernel<form, RowPath::words, type(), scale_groups>);
    else
      start(row_errors_kernel<form, RowPath::wide, type(), scale_groups>);
  });
  if constexpr (joint)
    add_latent_errors<coded_groups>(layer, flushed, wanted, relative, source, most_rows,
                                    scratch.latents, scratch.scores, scratch.rows, stream);
}

/// @brief Enqueues that rows [first, end) of a sequence of a batch have no error: they sort behind
/// all others.
inline void clear_errors(const CompressScratch& scratch, int heads, int sequence,
                         std::int32_t first, std::int32_t end, cudaStream_t stream) {
  if (first >= end) return;
  const std::size_t pitch = static_cast<std::size_t>(scratch.rows) * sizeof(float);
  check(cudaMemset2DAsync(scratch.scores +
                              static_cast<std::size_t>(sequence * heads) *
                                  static_cast<std::size_t>(scratch.rows) +
                              first,
                          pitch, 0xff,  // NaN
                          static_cast<std::size_t>(end - first) * sizeof(float),
                          static_cast<std::size_t>(heads), stream),
        "clear_errors");
}

/// @brief Chooses the rows that stay full, among the rows that are about to be compressed: those
/// with the largest errors under the maps that would store them. So many stay that each sequence's
/// count of full rows is reached. Fewer stay, if no more errors exceed `least` or a head has no
/// more rows; then scratch.exempt holds how many.
/// @tparam coded_groups  scale groups of tiles of codes; 0: plain tiles
/// @tparam joint  whether values are joint
/// @param policy  the token policy
/// @param kept  the rows that are neither pinned nor dropped; null: all rows behind the pinned ones
/// @return the orders of the two lists, full and compressed
template <int coded_groups, bool joint, class State, class Policy>
std::pair<RowOrder, RowOrder> exempt_outliers(const State& layer, const FlushBatch& flushed,
                                              const Policy& policy, const RowOrder& kept,
                                              const RowSource& source,
                                              const CompressScratch& scratch, cudaStream_t stream) {
  const float least = least_error(policy);
  const LayerEdit& tables = layer.tables();
  const unsigned heads = static_cast<unsigned>(tables.num_heads),
                 sequences = static_cast<unsigned>(flushed.count);
  ErrorRows wanted{};
  Candidates candidates{scratch.scores, scratch.rows, true, {}, {}, {}};
  for (int i = 0; i < flushed.count; ++i) {
    wanted.slots[i] = flushed.slots[i];
    wanted.first[i] = candidates.first[i] = flushed.pinned[i];
    wanted.count[i] =
        kept.rows != nullptr ? flushed.rows[i] - flushed.pinned[i] : flushed.candidates(i);
    const std::int32_t end = candidates.end[i] = flushed.pinned[i] + wanted.count[i];
    candidates.wanted[i] = flushed.full[i] - flushed.pinned[i];
    const auto last = static_cast<std::int32_t>(error_candidates(policy, flushed.position[i], end));
    wanted.count[i] = (std::max)(0, last - wanted.first[i]);
    clear_errors(scratch, tables.num_heads, i, (std::max)(last, wanted.first[i]), end, stream);
  }
  enqueue_errors<coded_groups, joint>(layer, flushed, wanted, relative_errors(policy), source,
                                      scratch, stream);
  // Whether values decide how many rows the lists get.
  const bool counted = least > 0.0F || kept.ends != nullptr;
  // The kept rows are numbered anew, chosen among, and then named again (rows_of_indices_kernel).
  if (kept.rows != nullptr) {
    float* own_errors = scratch.second_scores(static_cast<int>(heads * sequences));
    gather_scores_kernel<><<<dim3(heads, sequences), kSelectThreads, 0, stream>>>(
        scratch.scores, scratch.rows, kept, flushed, own_errors);
    check(cudaGetLastError(), "gather_scores_kernel");
    candidates.scores = own_errors;
    candidates.keeps_earlier = false;
    for (int i = 0; i < flushed.count; ++i) {
      candidates.first[i] = 0;
      candidates.end[i] = flushed.candidates(i);
    }
    candidates.numbers = kept.ends != nullptr;
    if (candidates.numbers) candidates.among = kept;
  }
  candidates.above = least;
  candidates.counts = counted ? scratch.exempt : nullptr;
  top_rows_kernel<><<<dim3(heads, sequences), kSelectThreads, 0, stream>>>(
      candidates, scratch.chosen, scratch.rest);
  check(cudaGetLastError(), "top_rows_kernel");
  if (kept.rows != nullptr) {
    rows_of_indices_kernel<><<<dim3(heads, sequences), kSelectThreads, 0, stream>>>(
        kept, flushed, candidates.counts, scratch.chosen, scratch.rest, scratch.rows);
    check(cudaGetLastError(), "rows_of_indices_kernel");
  }
  if (!counted) return {{scratch.chosen, scratch.rows}, {scratch.rest, scratch.rows}};
  return {{scratch.chosen, scratch.rows, candidates.counts, 1, 0},
          {scratch.rest, scratch.rows, candidates.counts + heads * sequences, 1, 0}};
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
