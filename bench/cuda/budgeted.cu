// SPDX-License-Identifier: Apache-2.0
// One decode step of Budgeted as it is allocated: the layers of `small` (8 layers, 2 KV heads),
// each with its bits, at shapes of Llama-3.1-8B's layer; heads take the layer's two allocations in
// turn. A model's layers differ: some keep nothing but a mean, some 7 bits a channel. What counts
// is the time of all, over as many steps of cuDNN's (peers.py, in the same run). Arguments: a file
// of allocations (bench/quality/allocation.cpp writes it; default
// bench/cuda/small_allocations.txt); "layers" to print every layer too. Build: nvcc -O3 -std=c++20
// -I include -gencode=arch=compute_90,code=sm_90 bench/cuda/budgeted.cu
//
// Floor: the stored bytes of the sequences, once, at the rate that reading reaches (measure.cuh).
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "decode_step.cuh"

using namespace lowrankkv;
using bench::kDim;
using bench::Shape;

namespace {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

/// Bits of the channels of a part, from "8x12.4x20": 12 channels of 8 bits, then 20 of 4. "0x1" is
/// a channel without bits: the mean is kept.
std::vector<std::uint8_t> bits_of(const std::string& counts) {
  std::vector<std::uint8_t> bits;
  std::istringstream all(counts);
  for (std::string one; std::getline(all, one, '.');)
    bits.insert(bits.end(), std::stoul(one.substr(one.find('x') + 1)),
                static_cast<std::uint8_t>(std::stoi(one)));
  return bits;
}

/// Maps of heads with these allocations, "keys/values" each, in turn.
LayerBasis layer_of(const std::vector<std::string>& heads, int kv_heads) {
  LayerBasis layer;
  for (int head = 0; head < kv_heads; ++head) {
    const std::string& own = heads[static_cast<std::size_t>(head) % heads.size()];
    const std::size_t slash = own.find('/');
    const auto keys = bits_of(own.substr(0, slash)), values = bits_of(own.substr(slash + 1));
    layer.heads.push_back(bench::basis(1, static_cast<int>(keys.size()),
                                       static_cast<int>(values.size()), keys, values)
                              .heads.front());
  }
  return layer;
}

}  // namespace

int main(int count, char** arguments) {
  std::ifstream file(count > 1 ? arguments[1] : "bench/cuda/small_allocations.txt");
  if (!file) {
    std::fprintf(stderr, "no file of allocations\n");
    return 1;
  }
  const bool every = count > 2 && std::strcmp(arguments[2], "layers") == 0;
  const std::vector<Shape> shapes{{8, 32, 8, 131072},
                                  {16, 32, 8, 32768},
                                  {16, 32, 32, 32768},
                                  {1, 32, 8, 131072},
                                  {1, 32, 8, 32768}};
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string ratio, lost, word;
    words >> ratio >> lost;
    std::vector<std::vector<std::string>> layers;
    while (words >> word) {
      if (word == "|")
        layers.emplace_back();
      else if (!layers.empty())
        layers.back().push_back(word);
    }
    for (const Shape& shape : shapes) {
      bench::StepTimes sum;
      for (const auto& heads : layers) {
        const bench::StepTimes step =
            bench::time_step<Codes>(shape, layer_of(heads, shape.kv_heads), {{}, {}, {4, 32}, {}});
        sum.replayed += step.replayed;
        sum.called += step.called;
        sum.bytes += step.bytes;
        sum.slack += step.slack;
        sum.plain_bytes += step.plain_bytes;
        if (!every) continue;
        std::printf(
            "  %-10s %-10s: %.4f ms in a graph, %.3f of f16, %3.0f %% of the floor's rate\n",
            heads.front().c_str(), heads.back().c_str(), step.replayed,
            step.bytes / step.plain_bytes, 100.0 * step.floor() / step.replayed);
      }
      const double number = static_cast<double>(layers.size());
      std::printf(
          "Budgeted, ratio %s   %2dq/%2dkv b %2d n %6lld: %.4f ms a layer in a graph, %.4f ms "
          "called; %.3f of f16 (%.3f with slack), %3.0f %% of the floor's rate\n",
          ratio.c_str(), shape.query_heads, shape.kv_heads, shape.batch,
          static_cast<long long>(shape.tokens), sum.replayed / number, sum.called / number,
          sum.bytes / sum.plain_bytes, (sum.bytes + sum.slack) / sum.plain_bytes,
          100.0 * sum.floor() / sum.replayed);
      std::fflush(stdout);
    }
  }
}
