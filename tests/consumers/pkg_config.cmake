# SPDX-License-Identifier: Apache-2.0
# cmake -D COMPILER=... -D SOURCE=... -D BINARY=... -D PREFIX=... -P pkg_config.cmake: a consumer without CMake; with -D NVCC=... one on the GPU too.
set(ENV{PKG_CONFIG_PATH} ${PREFIX}/share/pkgconfig)
execute_process(COMMAND pkg-config --cflags --libs "lowrankkv >= 0.1" COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE)
separate_arguments(flags UNIX_COMMAND "${flags}")
file(MAKE_DIRECTORY ${BINARY})
execute_process(COMMAND ${COMPILER} -std=c++20 ${SOURCE}/main.cpp -o ${BINARY}/consumer ${flags} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${BINARY}/consumer COMMAND_ERROR_IS_FATAL ANY)

# Where no other package is, Eigen's neither, that of the CPU is refused and that of CUDA sources is not.
set(ENV{PKG_CONFIG_PATH} "")
set(ENV{PKG_CONFIG_LIBDIR} ${PREFIX}/share/pkgconfig)
execute_process(COMMAND pkg-config --cflags lowrankkv RESULT_VARIABLE refused OUTPUT_QUIET ERROR_VARIABLE said)
if(refused EQUAL 0 OR NOT said MATCHES "eigen3")
  message(FATAL_ERROR "lowrankkv without Eigen: ${refused}, ${said}")
endif()
execute_process(COMMAND pkg-config --cflags --libs "lowrankkv-cuda >= 0.1" COMMAND_ERROR_IS_FATAL ANY OUTPUT_VARIABLE includes OUTPUT_STRIP_TRAILING_WHITESPACE)
separate_arguments(includes UNIX_COMMAND "${includes}")
execute_process(COMMAND ${COMPILER} -std=c++20 -fsyntax-only ${SOURCE}/without_eigen/main.cpp ${includes} COMMAND_ERROR_IS_FATAL ANY)
if(NVCC)
  execute_process(COMMAND ${NVCC} -std=c++20 -arch=sm_90 ${SOURCE}/main.cu -o ${BINARY}/consumer_cuda ${includes} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${BINARY}/consumer_cuda COMMAND_ERROR_IS_FATAL ANY)
endif()
