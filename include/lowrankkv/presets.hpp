// SPDX-License-Identifier: Apache-2.0
/// @file presets.hpp  The presets (detail/preset_aliases.hpp: the papers' systems and the library's
/// own) for the CPU, with the cache that they are aliases of.
#pragma once

#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/cpu/backend.hpp"
#include "lowrankkv/detail/preset_aliases.hpp"
