# SPDX-License-Identifier: Apache-2.0
"""Recipe of the checkout it is in: conan create cmake/conan -s compiler.cppstd=20. What is packaged is what `cmake --install` writes, its CMake and pkg-config files included."""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, load, rmdir

required_conan_version = ">=2.0"


class LowrankkvConan(ConanFile):
    name = "lowrankkv"
    description = "A transformer's KV cache in low-rank, quantised form, and attention straight from it, on CPU and NVIDIA GPUs"
    license = "Apache-2.0"
    topics = ("llm", "kv-cache", "attention", "quantization", "low-rank", "header-only", "cuda")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"cpu": [True, False]}  # the CPU backend and calibration, which need Eigen; CUDA sources do not
    default_options = {"cpu": True}
    no_copy_source = True

    @property
    def _checkout(self):
        return os.path.join(self.recipe_folder, "..", "..")

    def set_version(self):
        text = load(self, os.path.join(self._checkout, "include", "lowrankkv", "version.hpp"))
        self.version = ".".join(re.search(rf"#define LOWRANKKV_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))

    def export_sources(self):
        for pattern in ("include/*", "cmake/*", "CMakeLists.txt", "LICENSE"):
            copy(self, pattern, self._checkout, self.export_sources_folder)

    def requirements(self):
        if self.options.cpu:
            self.requires("eigen/[>=3.4 <6]", transitive_headers=True)

    def validate(self):
        try:
            check_min_cppstd(self, 20)
        except ConanInvalidConfiguration as error:
            raise ConanInvalidConfiguration(f"lowrankkv needs C++20: add -s compiler.cppstd=20 to the command, or cppstd=20 to the profile. {error}") from None

    def generate(self):
        toolchain = CMakeToolchain(self)
        for option in ("TESTS", "EXAMPLES", "BENCHMARKS"):
            toolchain.cache_variables[f"LOWRANKKV_BUILD_{option}"] = False
        if not self.options.cpu:  # not even one that the machine has
            toolchain.cache_variables["CMAKE_DISABLE_FIND_PACKAGE_Eigen3"] = True
        toolchain.generate()
        CMakeDeps(self).generate()

    def package(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share", "lowrankkv"))

    def package_id(self):
        self.info.clear()

    def package_info(self):
        # find_package() finds the library's own files, which know the component cuda.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "lowrankkv")]
        self.cpp_info.set_property("pkg_config_name", "lowrankkv")
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.settings.get_safe("os") in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
