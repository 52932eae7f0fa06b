// SPDX-License-Identifier: Apache-2.0
// A stream of CUDA, without its headers.
#pragma once

struct CUstream_st;

namespace llama {

using DeviceStream = CUstream_st*;

}  // namespace llama
