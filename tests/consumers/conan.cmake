# SPDX-License-Identifier: Apache-2.0
# cmake -D CONAN=... -D RECIPE=... -D HOME=... -D EIGEN=... -P conan.cmake: makes the package and builds a program against it, with the Eigen that is installed and nothing from elsewhere; without the option cpu, with no Eigen.
file(REMOVE_RECURSE ${HOME})
set(ENV{CONAN_HOME} ${HOME})
execute_process(COMMAND ${CONAN} profile detect COMMAND_ERROR_IS_FATAL ANY)
file(APPEND ${HOME}/profiles/default "\n[conf]\ntools.cmake.cmake_layout:test_folder=${HOME}/test_package\ntools.cmake.cmaketoolchain:user_presets=\n")  # nothing is built beside the recipe
# No Eigen is known yet: cpu, the default, asks for it, and cpu=False does not.
execute_process(COMMAND ${CONAN} create ${RECIPE} --no-remote -s compiler.cppstd=20 RESULT_VARIABLE refused OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(refused EQUAL 0 OR NOT said MATCHES "Package 'eigen/")
  message(FATAL_ERROR "with cpu and no Eigen: ${refused}, ${said}")
endif()
execute_process(COMMAND ${CONAN} create ${RECIPE} --no-remote -s compiler.cppstd=20 -o &:cpu=False COMMAND_ERROR_IS_FATAL ANY)
file(APPEND ${HOME}/profiles/default "\n[platform_requires]\neigen/${EIGEN}\n")
# A profile of an older standard, as most compilers' detected ones are, is refused with what to do.
execute_process(COMMAND ${CONAN} create ${RECIPE} --no-remote -s compiler.cppstd=gnu17 RESULT_VARIABLE refused OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(refused EQUAL 0 OR NOT said MATCHES "add -s compiler.cppstd=20 to the command")
  message(FATAL_ERROR "with C++17: ${refused}, ${said}")
endif()
execute_process(COMMAND ${CONAN} create ${RECIPE} --no-remote -s compiler.cppstd=20 COMMAND_ERROR_IS_FATAL ANY)
