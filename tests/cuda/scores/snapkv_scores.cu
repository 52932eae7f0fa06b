// SPDX-License-Identifier: Apache-2.0
// SnapKV scores of a prompt, against float64.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/support/random_layer.hpp"
#include "lowrankkv/cuda/presets.cuh"

namespace snapkv_scores_tests {

using namespace lowrankkv;
namespace gpu = lowrankkv::cuda;  // CUDA's own libraries have a namespace cuda too

TEST_CASE(
    "SnapKV scores of a packed prompt are those of float64, whether its keys come rotated or not") {
  support::Random random(5);
  std::normal_distribution<float> normal;
  for (const DType type : {DType::f16, DType::bf16}) {
    for (int trial = 0; trial < 16; ++trial) {
      const int dims[] = {64, 80, 128, 256}, groups[] = {1, 4, 7},
                lengths[] = {1, 20, 130, 700, 1600};
      CacheConfig config;
      const int group = groups[random() % 3], heads = 2;
      config.shape = {group * heads, heads, dims[trial % 4]};
      config.full_type = type;
      config.max_sequences = 2;
      const bool pre_rope = trial >= 8;
      if (pre_rope) config.rope = support::random_rope(random, config.shape.head_dim);
      config.max_tokens = 4000;
      const int dim = config.shape.head_dim, n = lengths[random() % 5],
                w = std::min(n, 1 + static_cast<int>(random() % 40));
      gpu::LayerTiles tiles;
      tiles.full = gpu::plain_tiles(dim, dim, gpu::plain_units(dim), pre_rope);
      tiles.listed = tiles.full;
      tiles.listed.tiles_per_page = 1;
      tiles.page_bytes = static_cast<std::size_t>(tiles.full.bytes);
      const int slot = 1, position = pre_rope ? static_cast<int>(random() % 3000)
                                              : 0;  // of the first row's token
      PositionShifts shifts;
      if (trial % 4 == 3) {
        shifts.add(position + n / 3, -77);
        shifts.divide(0, position + n / 2, 3);
      }
      gpu::LayerState layer(config, tiles, {}, {100, 0}, {}, {}, nullptr);
      if (pre_rope) layer.rotary().write_shifts(slot, shifts, nullptr);
      std::vector<float> key(static_cast<std::size_t>(n * heads * dim)),
          query(static_cast<std::size_t>(w * heads * group * dim));
      for (float& x : key) x = round_to(type, normal(random));
      for (float& x : query) x = 2.0F * normal(random);
      const gpu::DeviceArray<float> k(key), q(query);
      const gpu::ScoreQueries queries{{q.data(), DType::f32, heads * group * dim, dim, 1},
                                      w,
                                      group,
                                      n,
                                      config.scale() * 1.44269504F};
      const gpu::CompressScratch scratch =
          gpu::compress_scratch(layer, n, queries.columns(), heads, n, 0, 0);
      const gpu::DeviceRows rows{k.data(), DType::f32, heads * dim, dim, 1};
      gpu::detail::launch_kernel(gpu::pack_rows_kernel<gpu::DeviceRows>,
                                 dim3(static_cast<unsigned>((n + 63) / 64), heads),
                                 gpu::kStoreThreads, gpu::pack_rows_bytes(dim), "pack", nullptr,
                                 layer.tables(), slot, rows, rows, 0, std::int64_t{n},
                                 scratch.packed, static_cast<int>(layer.packed_tiles(n)), 1e30F);
      const int flushed = std::max(1, n - 3);
      const AttentionScores wanted{w, trial % 2 == 0 ? 1 : 5,
                                   trial % 4 == 1 ? Pooling::maximum : Pooling::average};
      gpu::FlushBatch all{};
      all.count = 1;
      all.slots[0] = slot;
      all.rows[0] = flushed;
      all.position[0] = position;
      std::vector<float> found(static_cast<std::size_t>(heads * n)), together(found.size());
      const auto enqueue = [&](ScoreScope scope, std::vector<float>& out) {
        const float* scores =
            gpu::enqueue_scores(layer, scratch, queries, wanted, scope, all, nullptr);
        gpu::check(
            cudaMemcpy(out.data(), scores, out.size() * sizeof(float), cudaMemcpyDeviceToHost),
            "scores");
      };
      enqueue(ScoreScope::kv_head, found);
      enqueue(ScoreScope::layer, together);
      bool sums = true;  // every head has the sum over heads, in their order
      for (int row = 0; row < flushed; ++row) {
        float sum = found[static_cast<std::size_t>(row)];
        for (int head = 1; head < heads; ++head)
          sum += found[static_cast<std::size_t>(head * n + row)];
        for (int head = 0; head < heads; ++head)
          sums = sums && together[static_cast<std::size_t>(head * n + row)] == sum;
      }
      CHECK(sums);
      const std::vector<float> met = support::rotated(
          config, key, [&](std::int64_t row) { return shifts.position(position + row); });
      for (int head = 0; head < heads; ++head) {
        std::vector<double> plain(static_cast<std::size_t>(n), 0.0);
        for (int column = 0; column < w * group; ++column) {
          const int i = column / group, seen = n - w + i + 1;
          std::vector<double> logits(static_cast<std::size_t>(seen));
          double top = -1e300, sum = 0.0;
          for (int row = 0; row < seen; ++row) {
            double dot = 0.0;
            for (int d = 0; d < dim; ++d)
              dot += static_cast<double>(query[static_cast<std::size_t>(
                         (i * heads * group + head * group + column % group) * dim + d)]) *
                     met[static_cast<std::size_t>((row * heads + head) * dim + d)];
            logits[static_cast<std::size_t>(row)] = dot * config.scale();
            top = std::max(top, logits[static_cast<std::size_t>(row)]);
          }
          for (double& logit : logits) sum += logit = std::exp(logit - top);
          for (int row = 0; row < seen; ++row)
            plain[static_cast<std::size_t>(row)] += logits[static_cast<std::size_t>(row)] / sum;
        }
        double error = 0.0, norm = 0.0;
        for (int row = 0; row < flushed; ++row) {
          double expected = wanted.pooling == Pooling::maximum && wanted.kernel > 1 ? -1.0 : 0.0;
          for (int other = std::max(0, row - wanted.kernel / 2);
               other < std::min(flushed, row + wanted.kernel / 2 + 1); ++other) {
            if (wanted.pooling == Pooling::maximum && wanted.kernel > 1)
              expected = std::max(expected, plain[static_cast<std::size_t>(other)]);
            else
              expected += plain[static_cast<std::size_t>(other)] / wanted.kernel;
          }
          const double difference = found[static_cast<std::size_t>(head * n + row)] - expected;
          error += difference * difference;
          norm += expected * expected;
        }
        CAPTURE(n);
        CAPTURE(w);
        CAPTURE(dim);
        CAPTURE(pre_rope);
        // Queries are rounded to the rows' type, and so are keys once they are rotated: logits of
        // size 2 sqrt(head_dim) / 8 change by its last place.
        CHECK(std::sqrt(error / norm) < (type == DType::f16 ? 3e-3 : 3e-2));
      }
    }
  }
}

}  // namespace snapkv_scores_tests
