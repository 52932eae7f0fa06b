// SPDX-License-Identifier: Apache-2.0
/// @file cuda/cache/certified_step.cuh  CertifyCalls: certify().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lowrankkv/cuda/cache/calls.hpp"
#include "lowrankkv/cuda/cache/checks.cuh"
#include "lowrankkv/cuda/decode/certify.cuh"
#include "lowrankkv/cuda/layer/layer.cuh"
#include "lowrankkv/cuda/runtime/device_scope.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cuda {

template <class Layer>
void CertifyCalls<Layer>::certify(Layer& layer, std::span<const SequenceId> seqs,
                                  const QueryView& query, const LseView& lse,
                                  const CertificateView& out, const Certificate& allowed,
                                  std::uint32_t* exceeding, cudaStream_t stream) {
  const DeviceScope on("certify", layer.state.device(), stream);
  refuse_capture("certify", stream);
  const int m = check_certify(layer, seqs, query, lse, out);
  for (std::size_t i = 0; i < seqs.size(); ++i) {
    const std::int64_t first = static_cast<std::int64_t>(i) * m;
    const MeasuredQueries queries =
        measured_queries(layer.state, query, lse.data, lse.token_stride, m, first);
    certify_sequence<Layer::coded_groups>(layer.state, layer.sequences.find(seqs[i]), queries, out,
                                          allowed, exceeding, stream);
  }
}

}  // namespace cuda
LOWRANKKV_NAMESPACE_END
