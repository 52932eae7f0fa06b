# SPDX-License-Identifier: Apache-2.0
# What every consumer builds: the CPU's program, and, given a CUDA compiler, the GPU's. CUDA must be enabled before the library is looked for.
function(build_consumer)
  if(CMAKE_CUDA_COMPILER)
    add_executable(consumer ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/main.cu)
    target_link_libraries(consumer PRIVATE lowrankkv::cuda)
  else()
    add_executable(consumer ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/main.cpp)
    target_link_libraries(consumer PRIVATE lowrankkv::lowrankkv)
  endif()
endfunction()

if(CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_ARCHITECTURES 90)
  enable_language(CUDA)
endif()
