# SPDX-License-Identifier: Apache-2.0
# cmake -D FILE=... -D "ARGUMENTS=..." -P call_cuda_caches.cmake: calls lowrankkv_add_cuda_caches(), which must refuse them.
cmake_minimum_required(VERSION 3.25)
include(${FILE})
lowrankkv_add_cuda_caches(kernels ${ARGUMENTS})
