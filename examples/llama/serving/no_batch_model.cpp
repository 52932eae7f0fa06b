// SPDX-License-Identifier: Apache-2.0
// Instead of batch_model.cu, in a build without CUDA.
#include <stdexcept>

#include "serving/batch_model.hpp"

namespace llama {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("serve-bench: this program was built without LOWRANKKV_CUDA");
}

}  // namespace

std::unique_ptr<BatchModel> make_batch_model(const Model&, WeightType) { refuse(); }
std::unique_ptr<BatchModel> make_batch_model(const Config&, std::uint64_t, WeightType) { refuse(); }

}  // namespace llama
