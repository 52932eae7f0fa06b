# SPDX-License-Identifier: Apache-2.0
# lowrankkv_add_compiled(name): a static library of what needs no policy of the caller's: Eigen's solvers, calibration, the
# bases of updaters. Sources that link it only declare those (LOWRANKKV_COMPILED in config.hpp), and compile in half the
# time. It is built with the flags of the directory that calls this: Eigen's types want the same -march everywhere.
function(lowrankkv_add_compiled name)
  if(NOT TARGET lowrankkv::lowrankkv)
    message(FATAL_ERROR "lowrankkv_add_compiled(${name}): lowrankkv::lowrankkv is needed, and that needs Eigen 3.4 or later")
  endif()
  file(CONFIGURE OUTPUT ${name}.cpp CONTENT "#define LOWRANKKV_COMPILED 2
#include <lowrankkv/budgeted.hpp>
#include <lowrankkv/calibrate/bundle.hpp>
#include <lowrankkv/calibrate/joint_values.hpp>
#include <lowrankkv/calibrate/residual_thresholds.hpp>
#include <lowrankkv/diagnostics/spectra.hpp>
#include <lowrankkv/lowrankkv.hpp>
")
  add_library(${name} STATIC ${CMAKE_CURRENT_BINARY_DIR}/${name}.cpp)
  target_link_libraries(${name} PUBLIC lowrankkv::lowrankkv)
  target_compile_definitions(${name} INTERFACE LOWRANKKV_COMPILED=1)
endfunction()
