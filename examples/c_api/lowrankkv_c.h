/* SPDX-License-Identifier: Apache-2.0
 * The CPU caches of a model behind a C ABI: for engines in C, in other languages, or compiled
 * without exceptions. One source (lowrankkv_c.cpp) implements it; nothing of C++ crosses.
 *
 * Every function that can fail returns a status and changes nothing then; lowrankkv_last_error()
 * names both values, of the calling thread. What a call does, needs and raises is said where
 * CompressedKVCache and LayerStack declare it. One thread calls a cache at a time. lowrankkv_config
 * and lowrankkv_memory begin with their size, so that later versions can add to their ends. */
#ifndef LOWRANKKV_C_H
#define LOWRANKKV_C_H

#include "lowrankkv_c_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LOWRANKKV_ABI_VERSION 1

/* How keys come: rotated, or before their rotary embedding, whose pairs are channels i and i +
 * head_dim / 2, or 2 i and 2 i + 1. Only those before it can move to other positions. */
typedef enum lowrankkv_keys {
  LOWRANKKV_ROTATED = 0,
  LOWRANKKV_UNROTATED_HALVES = 1,
  LOWRANKKV_UNROTATED_PAIRS = 2
} lowrankkv_keys;

/* The caches of all layers of one model. */
typedef struct lowrankkv_cache lowrankkv_cache;

typedef struct lowrankkv_config {
  size_t size; /* sizeof(lowrankkv_config) */
  int32_t num_layers, num_qo_heads, num_kv_heads, head_dim;
  int32_t max_sequences;
  int64_t max_tokens; /* of a sequence */
  int32_t threads;
  const char* method; /* "FullKV", "OjaKV", "Budgeted" */
  double ratio;       /* of the bytes of f16; not of FullKV */
  const char* bases;  /* a calibration bundle; NULL for FullKV */
  int32_t keys;       /* lowrankkv_keys: that of the bundle, where there is one */
  double rope_theta;  /* of keys before RoPE, without a bundle */
} lowrankkv_config;

uint32_t lowrankkv_abi_version(void);
/* The calling thread's last error; empty, if there was none. Valid until its next call. */
const char* lowrankkv_last_error(void);

lowrankkv_status lowrankkv_open(const lowrankkv_config* config, lowrankkv_cache** cache);
void lowrankkv_close(lowrankkv_cache* cache);

lowrankkv_status lowrankkv_create(lowrankkv_cache* cache, int64_t seq);
lowrankkv_status lowrankkv_erase(lowrankkv_cache* cache, int64_t seq);
lowrankkv_status lowrankkv_fork(lowrankkv_cache* cache, int64_t source, int64_t target);
/* Forgets the tokens from `length` on; exact: whether what is left is as if they had never been.
 * NULL: not wanted. */
lowrankkv_status lowrankkv_truncate(lowrankkv_cache* cache, int64_t seq, int64_t length,
                                    int32_t* exact);
/* Removes tokens [first, first + count); those behind keep their positions. */
lowrankkv_status lowrankkv_remove(lowrankkv_cache* cache, int64_t seq, int64_t first,
                                  int64_t count);
/* Moves the tokens from `first` on by `delta` positions: of caches whose keys are stored before
 * their rotary embedding.
 */
lowrankkv_status lowrankkv_shift(lowrankkv_cache* cache, int64_t seq, int64_t first, int64_t delta);
/* Positions of `count` tokens are divided, rounded down. */
lowrankkv_status lowrankkv_divide(lowrankkv_cache* cache, int64_t seq, int64_t first, int64_t count,
                                  int64_t divisor);
/* Rotary position of a token, or of the next one. */
lowrankkv_status lowrankkv_position(const lowrankkv_cache* cache, int64_t seq, int64_t token,
                                    int64_t* position);
lowrankkv_status lowrankkv_num_tokens(const lowrankkv_cache* cache, int64_t seq, int64_t* tokens);

/* Prompts and steps of one layer. `queries` of a prompt are those of its last tokens (OjaKV: 32;
 * NULL: none). */
lowrankkv_status lowrankkv_ingest(lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                  const lowrankkv_rows* keys, const lowrankkv_rows* values,
                                  const lowrankkv_rows* queries);
/* out: f32 [num_tokens, num_qo_heads, head_dim]; lse: f32 [num_tokens, num_qo_heads], or NULL. */
lowrankkv_status lowrankkv_prefill(lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                   const lowrankkv_rows* queries, const lowrankkv_rows* keys,
                                   const lowrankkv_rows* values, float* out, float* lse);
lowrankkv_status lowrankkv_append(lowrankkv_cache* cache, int32_t layer, const int64_t* seqs,
                                  size_t count, const lowrankkv_rows* keys,
                                  const lowrankkv_rows* values);
lowrankkv_status lowrankkv_attend(lowrankkv_cache* cache, int32_t layer, const int64_t* seqs,
                                  size_t count, const lowrankkv_rows* queries, float* out,
                                  float* lse);
/* Between steps, all layers. */
lowrankkv_status lowrankkv_maintain(lowrankkv_cache* cache, const int64_t* seqs, size_t count);
/* Stored tokens [first, first + count) of a layer, f32 [count, num_kv_heads, head_dim]. */
lowrankkv_status lowrankkv_reconstruct(const lowrankkv_cache* cache, int32_t layer, int64_t seq,
                                       int64_t first, int64_t count, float* keys, float* values);

/* A sequence of all layers to the caller's buffer and back. With a NULL buffer, `bytes` becomes the
 * size that is needed. */
lowrankkv_status lowrankkv_save(const lowrankkv_cache* cache, int64_t seq, void* buffer,
                                size_t* bytes);
lowrankkv_status lowrankkv_load(lowrankkv_cache* cache, int64_t seq, const void* buffer,
                                size_t bytes);

/* Bytes of one sequence, or, with seq NULL, of all and of what they share. */
lowrankkv_status lowrankkv_memory_of(const lowrankkv_cache* cache, const int64_t* seq,
                                     lowrankkv_memory* memory);

#ifdef __cplusplus
}
#endif
#endif
