# SPDX-License-Identifier: Apache-2.0
# Overlay port of the checkout it is in: vcpkg install lowrankkv --overlay-ports=cmake/vcpkg
set(VCPKG_BUILD_TYPE release)  # headers only
get_filename_component(SOURCE_PATH "${CURRENT_PORT_DIR}/../../.." ABSOLUTE)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}" OPTIONS -DLOWRANKKV_BUILD_TESTS=OFF -DLOWRANKKV_BUILD_EXAMPLES=OFF -DLOWRANKKV_BUILD_BENCHMARKS=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH share/cmake/lowrankkv)
if(NOT "cpu" IN_LIST FEATURES)  # it requires eigen3, which nobody installed
  file(REMOVE "${CURRENT_PACKAGES_DIR}/share/pkgconfig/lowrankkv.pc")
endif()
vcpkg_fixup_pkgconfig()
file(REMOVE "${CURRENT_PACKAGES_DIR}/share/lowrankkv/LICENSE")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
file(INSTALL "${CMAKE_CURRENT_LIST_DIR}/usage" DESTINATION "${CURRENT_PACKAGES_DIR}/share/${PORT}")
