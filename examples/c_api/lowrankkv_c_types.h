/* SPDX-License-Identifier: Apache-2.0
 * What both C ABIs have in common: statuses, rows, byte counts. */
#ifndef LOWRANKKV_C_TYPES_H
#define LOWRANKKV_C_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What went wrong: the library's error types, and what is not its own. Values never change. */
typedef enum lowrankkv_status {
  LOWRANKKV_OK = 0,
  LOWRANKKV_SHAPE_ERROR = 1,    /* extents or strides do not fit together */
  LOWRANKKV_VALUE_ERROR = 2,    /* a value is not usable */
  LOWRANKKV_CAPACITY_ERROR = 3, /* tokens, sequences, pages or a tail are full */
  LOWRANKKV_SEQUENCE_ERROR = 4, /* an unknown sequence, or one that exists */
  LOWRANKKV_STATE_ERROR = 5,    /* the call does not fit the sequence's state */
  LOWRANKKV_FORMAT_ERROR = 6,   /* a file or buffer is damaged or of another kind */
  LOWRANKKV_OUT_OF_MEMORY = 7,
  LOWRANKKV_OTHER_ERROR = 8,
  LOWRANKKV_DEVICE_ERROR = 9 /* the CUDA runtime reported an error; CUDA only */
} lowrankkv_status;

typedef enum lowrankkv_type {
  LOWRANKKV_F32 = 0,
  LOWRANKKV_F16 = 1,
  LOWRANKKV_BF16 = 2
} lowrankkv_type;

/* Rows [num_tokens, heads, head_dim] of the caller's; strides in elements. token_stride 0: they are
 * dense. */
typedef struct lowrankkv_rows {
  const void* data;
  int32_t type; /* lowrankkv_type */
  int64_t num_tokens;
  int64_t token_stride, head_stride, element_stride;
} lowrankkv_rows;

/* Bytes by what they hold. */
typedef struct lowrankkv_memory {
  size_t size; /* sizeof(lowrankkv_memory) */
  size_t coefficients, full_rows, tail, positions, epochs, updater, slack, shared, reserved, other,
      total;
} lowrankkv_memory;

#ifdef __cplusplus
}
#endif
#endif
