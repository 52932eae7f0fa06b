# SPDX-License-Identifier: Apache-2.0
# lowrankkv_add_cuda_caches(name HEADER header CACHES type... [CALLS group...] [LIBRARY kind]): a library with the kernels of
# some caches. Sources that link it include <lowrankkv/cuda.hpp>, which any C++20 compiler reads, instead of compiling kernels.
#
#   HEADER  as in an #include: declares the types. It includes <lowrankkv/cuda.hpp>, and the Impl of policies of your own.
#   CACHES  types of that header: CompressedKVCache<...>, or an alias like Budgeted<Gpu>. Without spaces, or quoted.
#   CALLS   which calls of the caches: layer prompt step score flush edit stored certify save (cuda/cache/calls.hpp says what
#           is in a group). Default: all. Calls outside these do not link. prompt needs flush; flush and score need step.
#   LIBRARY STATIC (default), SHARED or OBJECT.
#
# Each group of calls is a source of its own, so that they compile in parallel; caches share most of their kernels, so all
# caches are in it. The project has enabled CUDA, and lowrankkv::cuda is there.
function(lowrankkv_add_cuda_caches name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "HEADER;LIBRARY" "CACHES;CALLS")
  if(arg_UNPARSED_ARGUMENTS OR NOT arg_HEADER OR NOT arg_CACHES)
    message(FATAL_ERROR "lowrankkv_add_cuda_caches(name HEADER header CACHES type... [CALLS group...] [LIBRARY kind]): given '${ARGV}'")
  endif()
  # Group, the template that is instantiated, and the header that defines it.
  set(groups layer prompt step score flush edit stored certify save)
  set(layer LayerCalls layer_calls)
  set(prompt PromptCalls prefill)
  set(step StepCalls decode_step)
  set(score ScoreCalls scored_step)
  set(flush FlushCalls flush)
  set(edit EditCalls token_edits)
  set(stored StoredCalls stored_rows)
  set(certify CertifyCalls certified_step)
  set(save SaveCalls saved_rows)
  if(NOT arg_CALLS)
    set(arg_CALLS ${groups})
  endif()
  if(NOT arg_LIBRARY)
    set(arg_LIBRARY STATIC)
  endif()

  foreach(group IN LISTS arg_CALLS)
    if(NOT group IN_LIST groups)
      message(FATAL_ERROR "lowrankkv_add_cuda_caches: CALLS '${group}' is none of ${groups}")
    endif()
  endforeach()
  # Calls of one group make calls of another.
  foreach(needs prompt=flush flush=step score=step)
    string(REPLACE "=" ";" needs ${needs})
    list(GET needs 0 group)
    list(GET needs 1 other)
    if(group IN_LIST arg_CALLS AND NOT other IN_LIST arg_CALLS)
      message(FATAL_ERROR "lowrankkv_add_cuda_caches: CALLS has ${group} without ${other}, which it calls")
    endif()
  endforeach()

  set(sources "")
  foreach(group IN LISTS arg_CALLS)
    list(GET ${group} 0 template)
    list(GET ${group} 1 header)
    set(text "// Written by lowrankkv_add_cuda_caches(): ${group}.\n")
    string(APPEND text "#include <${arg_HEADER}>\n#include <lowrankkv/cuda/backend.cuh>\n#include <lowrankkv/cuda/cache/${header}.cuh>\n")
    set(number 0)
    foreach(cache IN LISTS arg_CACHES)
      math(EXPR number "${number} + 1")
      set(layer_type "lowrankkv_layer_${number}")
      string(APPEND text "\nusing ${layer_type} = typename ${cache}::Layer;\n")
      if(group STREQUAL "prompt")  # what stores rows is in the source of flushes
        string(APPEND text "extern template struct lowrankkv::cuda::Compression<${layer_type}>;\n")
      elseif(group STREQUAL "flush")
        string(APPEND text "template struct lowrankkv::cuda::Compression<${layer_type}>;\n")
      endif()
      string(APPEND text "template struct lowrankkv::cuda::${template}<${layer_type}>;\n")
    endforeach()
    set(source "${CMAKE_CURRENT_BINARY_DIR}/${name}/${group}.cu")
    file(CONFIGURE OUTPUT "${source}" CONTENT "${text}" @ONLY)
    list(APPEND sources "${source}")
  endforeach()
  add_library(${name} ${arg_LIBRARY} ${sources})
  target_link_libraries(${name} PUBLIC lowrankkv::cuda)
endfunction()
