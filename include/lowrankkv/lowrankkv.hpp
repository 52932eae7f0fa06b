// SPDX-License-Identifier: Apache-2.0
/// @file lowrankkv.hpp  The whole library for the CPU.
#pragma once

#include "lowrankkv/budgeted.hpp"
#include "lowrankkv/calibrate/bundle.hpp"
#include "lowrankkv/calibrate/choose_rank.hpp"
#include "lowrankkv/calibrate/joint_values.hpp"
#include "lowrankkv/calibrate/layer_moments.hpp"
#include "lowrankkv/calibrate/projector.hpp"
#include "lowrankkv/calibrate/residual_thresholds.hpp"
#include "lowrankkv/calibrate/soft_threshold.hpp"
#include "lowrankkv/calibrate/weights.hpp"
#include "lowrankkv/compressed_kv_cache.hpp"
#include "lowrankkv/core/online_softmax.hpp"
#include "lowrankkv/core/rope.hpp"
#include "lowrankkv/diagnostics/certificate.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "lowrankkv/diagnostics/subspace_overlap.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "lowrankkv/layer_stack.hpp"
#include "lowrankkv/presets.hpp"
