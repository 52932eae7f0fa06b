# SPDX-License-Identifier: Apache-2.0
# cmake -D SOURCE=... -D CONSUMER=... -D BINARY=... -D ARGUMENTS=... [-D NVCC=...] -P without_eigen.cmake: as if there were no Eigen, the
# library installs, and CUDA sources are built with it; who needs Eigen is told so.
file(REMOVE_RECURSE ${BINARY})
list(APPEND ARGUMENTS -DCMAKE_DISABLE_FIND_PACKAGE_Eigen3=ON)
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BINARY}/tests ${ARGUMENTS} RESULT_VARIABLE refused OUTPUT_QUIET ERROR_VARIABLE said)
string(REGEX REPLACE "[ \n]+" " " said "${said}")
if(refused EQUAL 0 OR NOT said MATCHES "needs Eigen 3.4 or later, none was found.*LOWRANKKV_BUILD_TESTS=OFF")
  message(FATAL_ERROR "tests without Eigen: ${refused}, ${said}")
endif()
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BINARY}/library -DLOWRANKKV_BUILD_TESTS=OFF -DLOWRANKKV_BUILD_EXAMPLES=OFF ${ARGUMENTS} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BINARY}/library --prefix ${BINARY}/prefix COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
if(NVCC)
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${CONSUMER} -B ${BINARY}/consumer -DCMAKE_CUDA_COMPILER=${NVCC} -DCMAKE_PREFIX_PATH=${BINARY}/prefix ${ARGUMENTS} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${BINARY}/consumer COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${BINARY}/consumer/consumer COMMAND_ERROR_IS_FATAL ANY)
endif()
