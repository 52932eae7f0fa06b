// SPDX-License-Identifier: Apache-2.0
// What both C ABIs are written with: exceptions become statuses, structs become views and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <span>
#include <string>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/memory_usage.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv_c_types.h"

#if defined(LOWRANKKV_NO_EXCEPTIONS)
#error \
    "the C ABIs turn exceptions into statuses: compile them with exceptions; what calls them may be compiled without"
#endif

namespace lowrankkv_c {

using namespace lowrankkv;  // the names of the library are what this file is about

/// Of the calling thread.
inline thread_local std::string last_error;

/// The status of an error that is not one of the library's core.
using StatusOf = lowrankkv_status (*)(const std::exception& error) noexcept;
inline lowrankkv_status other_error(const std::exception&) noexcept {
  return LOWRANKKV_OTHER_ERROR;
}

/// Runs a call: what it raises becomes a status and the thread's last error.
template <class Call>
lowrankkv_status guarded(Call&& call, StatusOf status_of = other_error) noexcept {
  const auto noted = [](lowrankkv_status status, const char* message) noexcept {
    try {
      last_error = message;
    } catch (...) {
      last_error.clear();
    }
    return status;
  };
  try {
    call();
    return LOWRANKKV_OK;
  } catch (const ShapeError& error) {
    return noted(LOWRANKKV_SHAPE_ERROR, error.what());
  } catch (const ValueError& error) {
    return noted(LOWRANKKV_VALUE_ERROR, error.what());
  } catch (const CapacityError& error) {
    return noted(LOWRANKKV_CAPACITY_ERROR, error.what());
  } catch (const SequenceError& error) {
    return noted(LOWRANKKV_SEQUENCE_ERROR, error.what());
  } catch (const StateError& error) {
    return noted(LOWRANKKV_STATE_ERROR, error.what());
  } catch (const FormatError& error) {
    return noted(LOWRANKKV_FORMAT_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return noted(LOWRANKKV_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return noted(status_of(error), error.what());
  } catch (...) {
    return noted(LOWRANKKV_OTHER_ERROR, "unknown error");
  }
}

inline void need(bool there, const char* what) {
  if (!there) throw ValueError(std::string(what) + ": null, an address expected");
}

/// A view of the caller's rows; dense where no strides are given.
template <class View>
View view_of(const lowrankkv_rows* rows, const char* name, int heads, int head_dim) {
  need(rows != nullptr && (rows->data != nullptr || rows->num_tokens == 0), name);
  if (rows->type < 0 || rows->type > 2)
    throw ValueError(std::string(name) + ": type " + std::to_string(rows->type) +
                     ", 0 to 2 expected");
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  const bool dense = rows->token_stride == 0;
  return View(rows->data, types[rows->type], rows->num_tokens, heads, head_dim,
              dense ? std::int64_t{heads} * head_dim : rows->token_stride,
              dense ? head_dim : rows->head_stride, dense ? 1 : rows->element_stride);
}

/// What the caches of both ABIs begin with: views of the caller's rows, as their shape wants them.
struct CacheViews {
  explicit CacheViews(const CacheShape& of) : shape(of) {}

  KeyView keys(const lowrankkv_rows* rows) const {
    return view_of<KeyView>(rows, "keys", shape.num_kv_heads, shape.head_dim);
  }
  ValueView values(const lowrankkv_rows* rows) const {
    return view_of<ValueView>(rows, "values", shape.num_kv_heads, shape.head_dim);
  }
  QueryView queries(const lowrankkv_rows* rows) const {
    return view_of<QueryView>(rows, "queries", shape.num_qo_heads, shape.head_dim);
  }
  OutputView outputs(float* out, std::int64_t tokens) const {
    need(out != nullptr || tokens == 0, "out");
    return {out, tokens, shape.num_qo_heads, shape.head_dim};
  }
  LseView sums(float* lse, std::int64_t tokens) const {
    return lse == nullptr ? LseView{} : LseView{lse, tokens, shape.num_qo_heads};
  }

  const CacheShape shape;
};

using Sequences = std::span<const SequenceId>;

/// The sequences of a call.
inline Sequences sequences(const std::int64_t* seqs, std::size_t count) {
  need(seqs != nullptr || count == 0, "seqs");
  return {seqs, count};
}

/// The cache that a call is about.
template <class Stack>
Stack& live(Stack* cache) {
  need(cache != nullptr, "cache");
  return *cache;
}

/// Raises ShapeError unless a stack has this layer.
template <class Stack>
void check_layer(const Stack& stack, int layer) {
  if (layer < 0 || layer >= stack.num_layers())
    throw ShapeError("layer: " + std::to_string(layer) + ", num_layers " +
                     std::to_string(stack.num_layers()));
}

/// Raises ShapeError if a caller's struct is shorter than what must be there.
inline void check_size(const char* name, std::size_t given, std::size_t least,
                       std::size_t expected) {
  if (given < least)
    throw ShapeError(std::string(name) + ": " + std::to_string(given) + " bytes, " +
                     std::to_string(expected) + " expected");
}

/// Copies as much of a struct as its caller knows of.
template <class Struct>
void give(const Struct& from, Struct* to) {
  const std::size_t size = (std::min)(to->size, sizeof(Struct));
  std::memcpy(reinterpret_cast<char*>(to) + sizeof to->size,
              reinterpret_cast<const char*>(&from) + sizeof from.size, size - sizeof from.size);
}

/// Byte counts as the caller's struct has them.
inline lowrankkv_memory memory_of(const MemoryUsage& usage) {
  return {sizeof(lowrankkv_memory),
          usage.coefficient_bytes,
          usage.full_row_bytes,
          usage.tail_bytes,
          usage.position_bytes,
          usage.epoch_bytes,
          usage.updater_bytes,
          usage.slack_bytes,
          usage.shared_bytes,
          usage.reserved_bytes,
          usage.residual_bytes + usage.pending_bytes,
          usage.total()};
}

}  // namespace lowrankkv_c
