// SPDX-License-Identifier: Apache-2.0
/// @file config.hpp  The library's macros: its versioned inline namespace the exceptions switch, functions of both sides.
#pragma once

#include "lowrankkv/version.hpp"

// Two versions in one program get different symbol names instead of silently sharing one.
#define LOWRANKKV_NAMESPACE_BEGIN \
  namespace lowrankkv {           \
  inline namespace v0_1 {
#define LOWRANKKV_NAMESPACE_END \
  }                             \
  }

// Functions that kernels call too.
#if defined(__CUDACC__)
#define LOWRANKKV_HOST_DEVICE __host__ __device__
#else
#define LOWRANKKV_HOST_DEVICE
#endif

// Defined by the user (or found out from the compiler): errors call the handler of core/error.hpp instead of throwing.
#if !defined(LOWRANKKV_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define LOWRANKKV_NO_EXCEPTIONS 1
#endif
