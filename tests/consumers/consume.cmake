# SPDX-License-Identifier: Apache-2.0
# cmake -D SOURCE=... -D BINARY=... -D ARGUMENTS=... -P consume.cmake: configures, builds and runs a consumer from nothing.
file(REMOVE_RECURSE ${BINARY})
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${BINARY} ${ARGUMENTS} COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${CMAKE_COMMAND} --build ${BINARY} COMMAND_ERROR_IS_FATAL ANY)
if(EXISTS ${BINARY}/consumer)
  execute_process(COMMAND ${BINARY}/consumer COMMAND_ERROR_IS_FATAL ANY)
endif()
