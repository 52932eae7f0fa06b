// SPDX-License-Identifier: Apache-2.0
/// @file presets.hpp  The papers' systems, and the library's own (detail/preset_aliases.hpp), with
/// the cache they are aliases of.
#pragma once

#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/detail/preset_aliases.hpp"
