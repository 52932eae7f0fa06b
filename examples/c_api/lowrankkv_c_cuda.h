/* SPDX-License-Identifier: Apache-2.0
 * The caches of a model in GPU memory behind a C ABI: the kernels and one source
 * (lowrankkv_c_cuda.cpp) are compiled once, to a static or shared library, and an engine of any
 * language and compiler links it. Nothing of C++ and no exception crosses.
 *
 * Every function that can fail returns a status, and lowrankkv_cuda_last_error() names both values,
 * of the calling thread. What a call does, needs and raises is said where CompressedKVCache and
 * LayerStack declare it, and in docs/embedding.md. A call that fails changes nothing; where the
 * device itself fails (LOWRANKKV_DEVICE_ERROR), or the host runs out of memory behind the checks,
 * the sequences of the call can only be erased, in every layer.
 *
 * `stream` is a cudaStream_t; NULL: the default stream. Rows, out and lse are device memory, which
 * is read and written by what a call enqueues. Structs, lists of sequences and saved bytes are host
 * memory, which is read and written by the call. The device that was current in
 * lowrankkv_cuda_open() is current in every call.
 *
 * One thread calls a cache at a time, on one stream or on streams that wait for each other.
 *
 * In a CUDA graph: lowrankkv_cuda_append and lowrankkv_cuda_attend may be captured; before each
 * replay lowrankkv_cuda_advance counts the tokens on the host. While the stream is being captured,
 * all other calls with a stream return LOWRANKKV_STATE_ERROR. A graph is good until one of its
 * sequences is erased.
 *
 * lowrankkv_cuda_config and lowrankkv_memory begin with their size, so that later versions can add
 * to their ends. */
#ifndef LOWRANKKV_C_CUDA_H
#define LOWRANKKV_C_CUDA_H

#include "lowrankkv_c_types.h"

#if defined(__GNUC__)
#define LOWRANKKV_CUDA_API __attribute__((visibility("default")))
#else
#define LOWRANKKV_CUDA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define LOWRANKKV_CUDA_ABI_VERSION 1

/* The caches of all layers of one model. */
typedef struct lowrankkv_cuda_cache lowrankkv_cuda_cache;

typedef struct lowrankkv_cuda_config {
  size_t size;          /* sizeof(lowrankkv_cuda_config) */
  uint32_t abi_version; /* LOWRANKKV_CUDA_ABI_VERSION */
  int32_t num_layers, num_qo_heads, num_kv_heads, head_dim;
  int32_t max_sequences;
  int64_t max_tokens;       /* of a sequence */
  int32_t max_query_tokens; /* of a sequence in a call of attend; 0: 1 */
  int64_t prefill_chunk;    /* tokens that are compressed at a time; 0: a whole prompt */
  int64_t num_pages;        /* of all layers; 0: what the sequences can ever need */
  const char* method;       /* "FullKV", "Budgeted" */
  double ratio;             /* of the bytes of f16, at max_tokens; Budgeted only */
  const char* bundle;       /* file of calibrate::save_moments(); Budgeted only */
} lowrankkv_cuda_config;

/* Of the library that is linked: an engine compares it with LOWRANKKV_CUDA_ABI_VERSION. */
LOWRANKKV_CUDA_API uint32_t lowrankkv_cuda_abi_version(void);
/* The calling thread's last error; empty, if there was none. Valid until its next call. */
LOWRANKKV_CUDA_API const char* lowrankkv_cuda_last_error(void);

/* Allocates all device memory but buffers of prompts. Waits. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_open(const lowrankkv_cuda_config* config,
                                                        lowrankkv_cuda_cache** cache);
/* Frees it. Waits. NULL: does nothing. */
LOWRANKKV_CUDA_API void lowrankkv_cuda_close(lowrankkv_cuda_cache* cache);

/* Sequences, in all layers. None of these waits, but truncate and remove before the tail, of
 * Budgeted. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_create(lowrankkv_cuda_cache* cache, int64_t seq,
                                                          void* stream);
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_erase(lowrankkv_cuda_cache* cache, int64_t seq,
                                                         void* stream);
/* A copy that shares pages until one of both writes to them. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_fork(lowrankkv_cuda_cache* cache, int64_t source,
                                                        int64_t target, void* stream);
/* Forgets the tokens from `length` on; exact: whether what is left is as if they had never been.
 * NULL: not wanted. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_truncate(lowrankkv_cuda_cache* cache,
                                                            int64_t seq, int64_t length,
                                                            int32_t* exact, void* stream);
/* Removes tokens [first, first + count); those behind keep their positions. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_remove(lowrankkv_cuda_cache* cache, int64_t seq,
                                                          int64_t first, int64_t count,
                                                          void* stream);
/* Host only. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_num_tokens(const lowrankkv_cuda_cache* cache,
                                                              int64_t seq, int64_t* tokens);

/* Prompts, of one layer. more: 0, or 1 if more of this prompt follows in a later call. Buffers grow
 * to the longest prompt so far, which waits. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_ingest(lowrankkv_cuda_cache* cache,
                                                          int32_t layer, int64_t seq,
                                                          const lowrankkv_rows* keys,
                                                          const lowrankkv_rows* values,
                                                          int32_t more, void* stream);
/* out: f32 [num_tokens, num_qo_heads, head_dim]; lse: f32 [num_tokens, num_qo_heads], natural
 * logarithm, or NULL. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_prefill(lowrankkv_cuda_cache* cache,
                                                           int32_t layer, int64_t seq,
                                                           const lowrankkv_rows* queries,
                                                           const lowrankkv_rows* keys,
                                                           const lowrankkv_rows* values, float* out,
                                                           float* lse, int32_t more, void* stream);

/* Steps, of one layer. Rows [i m, (i + 1) m) are tokens of seqs[i]. Captured or not, append and
 * attend wait for nothing and allocate nothing. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_append(lowrankkv_cuda_cache* cache,
                                                          int32_t layer, const int64_t* seqs,
                                                          size_t count, const lowrankkv_rows* keys,
                                                          const lowrankkv_rows* values,
                                                          void* stream);
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_attend(lowrankkv_cuda_cache* cache,
                                                          int32_t layer, const int64_t* seqs,
                                                          size_t count,
                                                          const lowrankkv_rows* queries, float* out,
                                                          float* lse, void* stream);
/* append of any number of tokens, with maintain of this layer whenever a tail is full, and at the
 * end. Not capturable. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_append_maintained(
    lowrankkv_cuda_cache* cache, int32_t layer, const int64_t* seqs, size_t count,
    const lowrankkv_rows* keys, const lowrankkv_rows* values, void* stream);

/* All layers. Before the replay of a graph that appends m tokens to each sequence; host only. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_advance(lowrankkv_cuda_cache* cache,
                                                           const int64_t* seqs, size_t count,
                                                           int32_t m);
/* Between steps. Rows leave full tails; takes pages. Waits for nothing. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_maintain(lowrankkv_cuda_cache* cache,
                                                            const int64_t* seqs, size_t count,
                                                            void* stream);

/* A sequence of all layers to the caller's host memory and back. Both wait. With a NULL buffer,
 * `bytes` becomes the size that is needed, at once; otherwise it is the buffer's size, and becomes
 * what was written. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_save(const lowrankkv_cuda_cache* cache,
                                                        int64_t seq, void* buffer, size_t* bytes,
                                                        void* stream);
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_load(lowrankkv_cuda_cache* cache, int64_t seq,
                                                        const void* buffer, size_t bytes,
                                                        void* stream);

/* Bytes of one sequence, or, with seq NULL, of all and of what they share. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_memory_of(const lowrankkv_cuda_cache* cache,
                                                             const int64_t* seq,
                                                             lowrankkv_memory* memory);
/* Rows with a number that their type cannot hold, stored as zeros since the cache was opened. Waits
 * for the device. */
LOWRANKKV_CUDA_API lowrankkv_status lowrankkv_cuda_faults(const lowrankkv_cuda_cache* cache,
                                                          uint32_t* rows);

#ifdef __cplusplus
}
#endif
#endif
