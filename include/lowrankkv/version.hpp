// SPDX-License-Identifier: Apache-2.0
/// @file version.hpp  The library's version. It is defined only here; CMake reads it from this
/// file.
#pragma once

#if defined(LOWRANKKV_VERSION_MAJOR) && \
    (LOWRANKKV_VERSION_MAJOR != 0 || LOWRANKKV_VERSION_MINOR != 1 || LOWRANKKV_VERSION_PATCH != 0)
#error "lowrankkv: a different version of the library was already included in this translation unit"
#endif

#define LOWRANKKV_VERSION_MAJOR 0
#define LOWRANKKV_VERSION_MINOR 1
#define LOWRANKKV_VERSION_PATCH 0
