# SPDX-License-Identifier: Apache-2.0
# The examples on the GPU. lowrankkv_c_cuda, a static library, and lowrankkv_c_cuda_shared are the C ABI for an engine.
set(LOWRANKKV_EXAMPLE_HEAD_DIM 0 CACHE STRING "head_dim of the models that the kernels of example 08 and of the C ABI are compiled for; 0: any")

# The kernels of both, once; what calls them is compiled by the host's compiler.
lowrankkv_add_cuda_caches(lowrankkv_example_caches LIBRARY OBJECT HEADER cuda_caches.hpp CACHES FullOnGpu BudgetedOnGpu CALLS layer prompt step flush edit save)
add_library(lowrankkv_c_cuda_calls OBJECT c_api/lowrankkv_c_cuda.cpp)  # with calibration: of no library but the archive itself
target_link_libraries(lowrankkv_c_cuda_calls PRIVATE lowrankkv_program)
add_library(example_08_calls OBJECT 08_cuda_calibrated.cpp)
target_link_libraries(example_08_calls PRIVATE lowrankkv_shared_program)
foreach(target lowrankkv_c_cuda_calls example_08_calls)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
endforeach()
target_include_directories(lowrankkv_example_caches PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(lowrankkv_example_caches PRIVATE lowrankkv_cuda_program)
foreach(target lowrankkv_example_caches lowrankkv_c_cuda_calls example_08_calls)
  target_compile_definitions(${target} PRIVATE LOWRANKKV_EXAMPLE_HEAD_DIM=${LOWRANKKV_EXAMPLE_HEAD_DIM})
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endforeach()

if(LOWRANKKV_CUDA_PTX_ONLY)  # compiled to be checked: there is nothing to link
  add_library(example_07_cuda_decode OBJECT 07_cuda_decode.cu)
  set(kernels example_07_cuda_decode lowrankkv_example_caches)
  set_target_properties(${kernels} PROPERTIES CUDA_ARCHITECTURES 90-virtual CUDA_PTX_COMPILATION ON)
else()
  add_executable(example_07_cuda_decode 07_cuda_decode.cu)
  set_target_properties(example_07_cuda_decode PROPERTIES OUTPUT_NAME 07_cuda_decode)
  set(kernels example_07_cuda_decode lowrankkv_example_caches)
  if(NOT DEFINED LOWRANKKV_EXAMPLE_ARCHITECTURES AND DEFINED LOWRANKKV_PROGRAM_ARCHITECTURES)
    set(LOWRANKKV_EXAMPLE_ARCHITECTURES "${LOWRANKKV_PROGRAM_ARCHITECTURES}")
  endif()
  if(DEFINED LOWRANKKV_EXAMPLE_ARCHITECTURES)
    set_target_properties(${kernels} PROPERTIES CUDA_ARCHITECTURES "${LOWRANKKV_EXAMPLE_ARCHITECTURES}")
  endif()

  add_executable(example_08_cuda_calibrated $<TARGET_OBJECTS:example_08_calls> $<TARGET_OBJECTS:lowrankkv_example_caches>)
  target_link_libraries(example_08_cuda_calibrated PRIVATE lowrankkv_shared_program CUDA::cudart_static)
  set_target_properties(example_08_cuda_calibrated PROPERTIES OUTPUT_NAME 08_cuda_calibrated LINKER_LANGUAGE CXX)

  add_library(lowrankkv_c_cuda STATIC $<TARGET_OBJECTS:lowrankkv_c_cuda_calls> $<TARGET_OBJECTS:lowrankkv_example_caches>)
  add_library(lowrankkv_c_cuda_shared SHARED $<TARGET_OBJECTS:lowrankkv_c_cuda_calls> $<TARGET_OBJECTS:lowrankkv_example_caches>)
  foreach(target lowrankkv_c_cuda lowrankkv_c_cuda_shared)
    target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/c_api>)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static Threads::Threads)
    set_target_properties(${target} PROPERTIES OUTPUT_NAME lowrankkv_c_cuda LINKER_LANGUAGE CXX)
  endforeach()
  target_link_options(lowrankkv_c_cuda_shared PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/c_api/lowrankkv_c_cuda.map)
  set_target_properties(lowrankkv_c_cuda_shared PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/c_api/lowrankkv_c_cuda.map)
  if(LOWRANKKV_INSTALL)  # cmake --install BUILD --component c_api
    include(GNUInstallDirs)
    install(TARGETS lowrankkv_c_cuda lowrankkv_c_cuda_shared COMPONENT c_api EXCLUDE_FROM_ALL
            ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    install(FILES c_api/lowrankkv_c_cuda.h c_api/lowrankkv_c_types.h COMPONENT c_api EXCLUDE_FROM_ALL DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  endif()
endif()
target_link_libraries(example_07_cuda_decode PRIVATE lowrankkv_cuda_program)
