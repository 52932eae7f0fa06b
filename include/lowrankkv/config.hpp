// SPDX-License-Identifier: Apache-2.0
/// @file config.hpp  The library's macros: its versioned inline namespace, functions that kernels
/// call too, the exceptions switch.
#pragma once

#include "lowrankkv/version.hpp"

// Two versions in one translation unit are refused (version.hpp). In two of one program they have
// different symbols: nothing is shared by chance, and handing an object of one to the other does
// not link.
#define LOWRANKKV_NAMESPACE_BEGIN \
  namespace lowrankkv {           \
  inline namespace v0_1_0 {
#define LOWRANKKV_NAMESPACE_END \
  }                             \
  }

// Functions that kernels call too.
#if defined(__CUDACC__)
#define LOWRANKKV_HOST_DEVICE __host__ __device__
#else
#define LOWRANKKV_HOST_DEVICE
#endif

// Defined by the user (or found out from the compiler): errors call the handler of core/error.hpp
// instead of throwing.
#if !defined(LOWRANKKV_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define LOWRANKKV_NO_EXCEPTIONS 1
#endif

// LOWRANKKV_COMPILED: what needs no policy of the caller's, Eigen's solvers above all, can be
// compiled once for many sources. 1: it is declared here and linked (CMake:
// lowrankkv_add_compiled()); 2: this source is the one that has it. Not defined: every source that
// calls it compiles it.
#if !defined(LOWRANKKV_COMPILED)
#define LOWRANKKV_COMPILED_TEMPLATE(...)
#elif LOWRANKKV_COMPILED == 1
#define LOWRANKKV_COMPILED_TEMPLATE(...) extern template __VA_ARGS__;
#else
#define LOWRANKKV_COMPILED_TEMPLATE(...) template __VA_ARGS__;
#endif
