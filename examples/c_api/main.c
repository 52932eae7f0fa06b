/* SPDX-License-Identifier: Apache-2.0
 * A decode loop in C over lowrankkv_c.h, checked against attention written plainly: what an engine
 * in C would call, and what it is told when it errs.
 *
 *     05_c_api                             full rank
 *     05_c_api OjaKV 0.6 bases.safetensors  a method, its ratio, a bundle of the nano model's shape
 * (quickstart writes one) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "lowrankkv_c.h"

enum {
  LAYERS = 4,
  QO_HEADS = 4,
  KV_HEADS = 2,
  DIM = 64,
  PROMPT = 200,
  STEPS = 100,
  MOST = PROMPT + STEPS
};

static void must(lowrankkv_status status, const char* call) {
  if (status == LOWRANKKV_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", call, (int)status, lowrankkv_last_error());
  exit(1);
}

/* Numbers between -1 and 1. */
static float next_number(void) {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static float keys[LAYERS][MOST][KV_HEADS][DIM], values[LAYERS][MOST][KV_HEADS][DIM],
    queries[MOST][QO_HEADS][DIM];

/* How far an output is from softmax(q k / sqrt(DIM)) v over `tokens` tokens of a layer. */
static double distance(int layer, int tokens, float (*query)[DIM], float (*out)[DIM]) {
  double worst = 0.0;
  for (int head = 0; head < QO_HEADS; ++head) {
    const int kv = head / (QO_HEADS / KV_HEADS);
    double sum = 0.0, total[DIM] = {0.0};
    for (int token = 0; token < tokens; ++token) {
      double logit = 0.0;
      for (int i = 0; i < DIM; ++i)
        logit += (double)query[head][i] * (double)keys[layer][token][kv][i];
      const double weight = exp(logit / sqrt((double)DIM));
      sum += weight;
      for (int i = 0; i < DIM; ++i) total[i] += weight * (double)values[layer][token][kv][i];
    }
    for (int i = 0; i < DIM; ++i) worst = fmax(worst, fabs(total[i] / sum - (double)out[head][i]));
  }
  return worst;
}

int main(int argc, char** argv) {
  lowrankkv_config config = {sizeof config, LAYERS, QO_HEADS, KV_HEADS,          DIM, 2, MOST, 2,
                             "FullKV",      1.0,    NULL,     LOWRANKKV_ROTATED, 0.0};
  if (argc == 4) {
    config.method = argv[1];
    config.ratio = atof(argv[2]);
    config.bases = argv[3];
  }
  lowrankkv_cache* cache = NULL;
  must(lowrankkv_open(&config, &cache), "open");
  for (int layer = 0; layer < LAYERS; ++layer) {
    for (float* x = &keys[layer][0][0][0]; x < &keys[layer][0][0][0] + MOST * KV_HEADS * DIM; ++x)
      *x = next_number();
    for (float* x = &values[layer][0][0][0]; x < &values[layer][0][0][0] + MOST * KV_HEADS * DIM;
         ++x)
      *x = next_number();
  }
  for (float* x = &queries[0][0][0]; x < &queries[0][0][0] + MOST * QO_HEADS * DIM; ++x)
    *x = next_number();

  const int64_t seq = 7;
  must(lowrankkv_create(cache, seq), "create");
  const lowrankkv_rows prompt_queries = {queries, LOWRANKKV_F32, PROMPT, 0, 0, 0};
  for (int layer = 0; layer < LAYERS; ++layer) {
    const lowrankkv_rows k = {keys[layer], LOWRANKKV_F32, PROMPT, 0, 0, 0},
                         v = {values[layer], LOWRANKKV_F32, PROMPT, 0, 0, 0};
    must(lowrankkv_ingest(cache, layer, seq, &k, &v, &prompt_queries), "ingest");
  }
  double worst = 0.0;
  for (int token = PROMPT; token < MOST; ++token) {
    for (int layer = 0; layer < LAYERS; ++layer) {
      float out[QO_HEADS][DIM];
      const lowrankkv_rows k = {keys[layer][token], LOWRANKKV_F32, 1, 0, 0, 0},
                           v = {values[layer][token], LOWRANKKV_F32, 1, 0, 0, 0},
                           q = {queries[token], LOWRANKKV_F32, 1, 0, 0, 0};
      must(lowrankkv_append(cache, layer, &seq, 1, &k, &v), "append");
      must(lowrankkv_attend(cache, layer, &seq, 1, &q, &out[0][0], NULL), "attend");
      worst = fmax(worst, distance(layer, token + 1, queries[token], out));
    }
    must(lowrankkv_maintain(cache, &seq, 1), "maintain");
  }

  /* To a buffer and back, a copy without some tokens, and what errors look like. */
  size_t bytes = 0;
  must(lowrankkv_save(cache, seq, NULL, &bytes), "save");
  void* saved = malloc(bytes);
  if (saved == NULL) return 1;
  must(lowrankkv_save(cache, seq, saved, &bytes), "save");
  must(lowrankkv_erase(cache, seq), "erase");
  must(lowrankkv_load(cache, seq, saved, bytes), "load");
  free(saved);
  must(lowrankkv_fork(cache, seq, 8), "fork");
  must(lowrankkv_remove(cache, 8, 50, 20), "remove");
  int64_t tokens = 0, left = 0;
  int32_t exact = 0;
  must(lowrankkv_num_tokens(cache, seq, &tokens), "num_tokens");
  must(lowrankkv_truncate(cache, 8, MOST - 21, &exact), "truncate");
  must(lowrankkv_num_tokens(cache, 8, &left), "num_tokens");
  const lowrankkv_status refused = lowrankkv_create(cache, 9);
  lowrankkv_memory memory = {.size = sizeof memory};
  must(lowrankkv_memory_of(cache, &seq, &memory), "memory");
  printf("%s: %lld tokens in %zu bytes, %.3f of f16; the largest error of an output %.1e\n",
         config.method, (long long)tokens, memory.total,
         (double)memory.total / (4.0 * LAYERS * KV_HEADS * DIM * (double)tokens), worst);
  printf("a copy lost 21 tokens and has %lld; a third sequence: status %d, \"%s\"\n",
         (long long)left, (int)refused, lowrankkv_last_error());
  lowrankkv_close(cache);
  const int good = tokens == MOST && left == MOST - 21 && exact == 1 &&
                   refused == LOWRANKKV_CAPACITY_ERROR && (argc == 4 || worst < 2e-3);
  return good ? 0 : 1;
}
