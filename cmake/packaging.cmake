# SPDX-License-Identifier: Apache-2.0
# What `cmake --install` puts into a prefix: headers, targets for find_package, files for pkg-config. The prefix can be moved.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/lowrankkv")
install(DIRECTORY include/lowrankkv DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATADIR}/lowrankkv")

# Two files: a consumer without CUDA never reads the second.
install(TARGETS lowrankkv EXPORT lowrankkvTargets)
install(TARGETS lowrankkv_cuda EXPORT lowrankkvCudaTargets)
install(EXPORT lowrankkvTargets NAMESPACE lowrankkv:: DESTINATION "${package_dir}")
install(EXPORT lowrankkvCudaTargets NAMESPACE lowrankkv:: DESTINATION "${package_dir}")

configure_package_config_file(cmake/lowrankkvConfig.cmake.in "${PROJECT_BINARY_DIR}/lowrankkvConfig.cmake" INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/lowrankkvConfigVersion.cmake" COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/lowrankkvConfig.cmake" "${PROJECT_BINARY_DIR}/lowrankkvConfigVersion.cmake" cmake/lowrankkv_compiled.cmake cmake/lowrankkv_cuda_caches.cmake DESTINATION "${package_dir}")

foreach(file lowrankkv.pc lowrankkv-cuda.pc)  # a CUDA program without Eigen could not read the first
  configure_file(cmake/${file}.in ${file} @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${file}" DESTINATION "${CMAKE_INSTALL_DATADIR}/pkgconfig")
endforeach()
