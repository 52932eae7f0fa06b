// SPDX-License-Identifier: Apache-2.0
// The compositions that presets name, by the method that tests ask for.
#pragma once

#include <memory>

#include "cuda/support/random_sequences.cuh"
#include "lowrankkv/cuda/presets.cuh"

namespace support {

using Codes = CompressedKVCache<Cuda, PerHead, Static, SinkRecent, TransformCode>;

/// A cache of the composition of settings.method.
inline std::unique_ptr<DeviceSide> make_device(const Settings& settings, const CacheConfig& config,
                                               const LayerBasis& basis) {
  const auto make =
      [&]<class Cache>(typename Cache::PolicySet policies) -> std::unique_ptr<DeviceSide> {
    return std::make_unique<Device<Cache>>(config, basis, configured(policies, settings));
  };
  switch (settings.method) {
    case Method::full:
      return make.operator()<FullKV<Cuda>>({});
    case Method::static_pca:
      return make.operator()<StaticPCA<Cuda>>({});
    case Method::hybrid:
      return make.operator()<StaticPCAHybrid<Cuda>>({});
    case Method::projector:
      return make.operator()<Dlrp<Cuda>>({});
    case Method::codes:
      return make.operator()<Codes>({});
    case Method::oja_int8:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, Int8>>({});
    case Method::subspace_a:
      return make.operator()<SubSpaceA<Cuda>>({});
    case Method::directions:
      return make.operator()<CompressedKVCache<Cuda, PerHead, FrequentDirections, SinkRecent,
                                               NoQuantizer, KeepEpochs<3>>>({});
    case Method::oja_outliers:
      return make.operator()<OjaKVv2<Cuda>>({});
    case Method::oja_snapkv:
      return make.operator()<OjaKVSnapKV<Cuda>>({});
    case Method::snapkv:
      return make.operator()<
          CompressedKVCache<Cuda, PerHead, Static, Compose<SinkRecent, SnapKV>, NoQuantizer>>({});
    case Method::oja_evicting:
    case Method::directions_outliers:
    case Method::directions_snapkv:
    case Method::directions_evicting:
    case Method::budgeted_evicting:
      break;  // token_policy/snapkv_and_outliers.cu
    case Method::oja_codes:
    case Method::oja_blocks:
    case Method::directions_codes:
      break;  // update/align_axes.cu
    case Method::snapkv_only:
      return make.operator()<SnapKVOnly<Cuda>>({});
    case Method::streaming:
      return make.operator()<StreamingLLM<Cuda>>({});
    case Method::int8:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Static, SinkRecent, Int8>>({});
    case Method::outliers:
      return make.operator()<CompressedKVCache<Cuda, PerHead, Static,
                                               Compose<SinkRecent, ResidualOutliers>, NoQuantizer>>(
          {});
    case Method::budgeted:
      return make.operator()<Budgeted<Cuda>>({});
    case Method::oja:
      return make.operator()<OjaKV<Cuda>>({});
    case Method::oja_merging:
      return make.
      operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, KeepEpochs<2>>>({});
    case Method::oja_rotating:
      return make.
      operator()<CompressedKVCache<Cuda, PerHead, Oja, SinkRecent, NoQuantizer, RotateNow>>({});
  }
  return nullptr;
}

}  // namespace support
