// SPDX-License-Identifier: Apache-2.0
// Calibration on the host, for the program on the GPU (08_cuda_calibrated.cpp): 08_calibrate BUNDLE
#include <lowrankkv/calibrate/bundle.hpp>

#include <cstdio>
#include <exception>
#include <vector>

#include "08_rows.hpp"

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "08_calibrate BUNDLE: the file that is written\n");
    return 2;
  }
  const std::int64_t n = 2000, context = 1000;  // tokens of a text, and of a prompt
  //! [calibrate]
  std::vector<lowrankkv::calibrate::LayerMoments> layers;
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerRows text(layer, n, 1);  // your engine has real ones
    const lowrankkv::QueryView q{text.query.data(), n, kShape.num_qo_heads, kShape.head_dim};
    const lowrankkv::KeyView k{text.key.data(), n, kShape.num_kv_heads, kShape.head_dim};
    const lowrankkv::ValueView v{text.value.data(), n, kShape.num_kv_heads, kShape.head_dim};
    lowrankkv::calibrate::LayerMoments& moments = layers.emplace_back(kShape);
    moments.add(q, k, v);
    moments.coding().add(q, k, v, context);  // what an error costs: Budgeted asks for it
  }
  lowrankkv::calibrate::save_moments(argv[1], layers, {{"source", "example 08"}});
  //! [calibrate]
  std::printf("%s: %d layers, %lld tokens\n", argv[1], kLayers, static_cast<long long>(n));
} catch (const std::exception& error) {
  std::fprintf(stderr, "08_calibrate: %s\n", error.what());
  return 1;
}
