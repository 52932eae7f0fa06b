// SPDX-License-Identifier: Apache-2.0
/// @file config.hpp  The library's macros: its versioned inline namespace, the qualifier of
/// functions that kernels call, the exceptions switch.
#pragma once

#include "lowrankkv/version.hpp"

// version.hpp refuses two versions in one translation unit. In two translation units of one program
// they have different symbols: they share nothing by accident, and passing an object of one version
// to the other does not link.
#define LOWRANKKV_NAMESPACE_BEGIN \
  namespace lowrankkv {           \
  inline namespace v0_1_0 {
#define LOWRANKKV_NAMESPACE_END \
  }                             \
  }

// Qualifier of functions that kernels call too.
#if defined(__CUDACC__)
#define LOWRANKKV_HOST_DEVICE __host__ __device__
#else
#define LOWRANKKV_HOST_DEVICE
#endif

// With LOWRANKKV_NO_EXCEPTIONS (set by the user, or here if the compiler has exceptions off),
// errors call the handler of core/error.hpp instead of throwing.
#if !defined(LOWRANKKV_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define LOWRANKKV_NO_EXCEPTIONS 1
#endif

// LOWRANKKV_COMPILED: code that depends on no policy of the caller, above all Eigen's solvers, can
// be compiled once for many sources. 1: the templates are declared here and linked (CMake:
// lowrankkv_add_compiled()). 2: this source instantiates them. Not defined: every source that calls
// them compiles them.
#if !defined(LOWRANKKV_COMPILED)
#define LOWRANKKV_COMPILED_TEMPLATE(...)
#elif LOWRANKKV_COMPILED == 1
#define LOWRANKKV_COMPILED_TEMPLATE(...) extern template __VA_ARGS__;
#else
#define LOWRANKKV_COMPILED_TEMPLATE(...) template __VA_ARGS__;
#endif
