// SPDX-License-Identifier: Apache-2.0
// The same program, compiled by the host's compiler.
#define CONSUMER_CACHES "caches.hpp"
#include "main.cu"
