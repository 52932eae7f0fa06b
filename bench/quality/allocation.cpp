// SPDX-License-Identifier: Apache-2.0
// What a byte budget buys: bits of every layer's heads, keys/values, as calibrate::budgeted() gives
// them for the GPU; "8x12.4x20" are 12 channels of 8 bits and 20 of 4. One line a ratio: the ratio,
// what is lost (the squared error of a layer's output that is expected of a token, relative to its
// residual stream's square, summed over layers, relative to the first line's), then the layers.
// That error is of Gaussian channels whose bits fall along their variances; budgeted() measures
// errors on sample rows, so that some of its channels have bits in another order.
// Arguments: a bundle of calibrate, query heads, KV heads, head_dim, layers, then ratios.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/bundle.hpp"

using namespace lowrankkv;

namespace {

/// What quantising the channels of a part costs the output.
double loss(const calibrate::Moments& rows, const Eigen::MatrixXd& metric, double scale,
            double floor, const std::vector<std::uint8_t>& bits) {
  const auto part = calibrate::detail::coded_part(rows, metric, scale, floor);
  double sum = 0.0;
  for (Eigen::Index channel = 0; channel < part.spectrum.values.size(); ++channel) {
    const int width = channel < static_cast<Eigen::Index>(bits.size())
                          ? bits[static_cast<std::size_t>(channel)]
                          : 0;
    sum += part.unit * part.spectrum.values[channel] * calibrate::gaussian_distortion(width);
  }
  return sum;
}

void print(const std::vector<std::uint8_t>& bits) {
  for (std::size_t channel = 0, next = 0; channel < bits.size(); channel = next) {
    while (next < bits.size() && bits[next] == bits[channel]) ++next;
    std::printf("%s%dx%d", channel == 0 ? "" : ".", bits[channel],
                static_cast<int>(next - channel));
  }
}

}  // namespace

int main(int count, char** arguments) try {
  if (count < 7) {
    std::fprintf(stderr, "usage: %s bundle query_heads kv_heads head_dim layers ratio...\n",
                 arguments[0]);
    return 2;
  }
  const CacheShape shape{std::atoi(arguments[2]), std::atoi(arguments[3]), std::atoi(arguments[4])};
  const auto layers = calibrate::load_moments(arguments[1], shape, std::atoi(arguments[5]));
  double first = 0.0;
  for (int i = 6; i < count; ++i) {
    calibrate::BudgetOptions options;
    options.ratio = std::atof(arguments[i]);
    options.context = 32768;
    options.for_cuda();
    const calibrate::BudgetedModel model = calibrate::budgeted(layers, options);
    double lost = 0.0;
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      const auto& coding = layers[layer].coding();
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const HeadBasis& basis = model.bases[layer].heads[static_cast<std::size_t>(head)];
        lost += loss(coding.head(head).key, coding.head(head).key_metric, coding.error_scale(),
                     options.metric_floor, basis.key_bits) +
                loss(coding.head(head).value, coding.head(head).value_metric, coding.error_scale(),
                     options.metric_floor, basis.value_bits);
      }
    }
    first = first == 0.0 ? lost : first;
    std::printf("%s %.3f", arguments[i], lost / first);
    for (const LayerBasis& layer : model.bases) {
      std::printf(" |");
      for (const HeadBasis& head : layer.heads) {
        std::printf(" ");
        print(head.key_bits);
        std::printf("/");
        print(head.value_bits);
      }
    }
    std::printf("\n");
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
