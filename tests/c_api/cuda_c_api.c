/* SPDX-License-Identifier: Apache-2.0
 * The C ABI over the caches on the GPU, called from C: what it computes against attention written
 * plainly, captured steps against called ones bit for bit, copies, edits, saved sequences, and what
 * is said of every mistake.
 *
 *     cuda_c_api BUNDLE    the bundle of example 08; exits with 77 where there is no GPU */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lowrankkv_c_cuda.h"

enum {
  LAYERS = 2,
  QO_HEADS = 4,
  KV_HEADS = 2,
  DIM = 64,
  PROMPT = 150,
  STEPS = 70,
  MOST = PROMPT + STEPS,
  QO = QO_HEADS * DIM, /* numbers of a token */
  KV = KV_HEADS * DIM
};

static int failed = 0;

static int failure(int line, const char* what) {
  printf("line %d: %s (last error: %s)\n", line, what, lowrankkv_cuda_last_error());
  return ++failed;
}
#define CHECK(condition) ((condition) ? 0 : failure(__LINE__, #condition))
#define OK(call) CHECK((call) == LOWRANKKV_OK)
#define CUDA(call) CHECK((call) == cudaSuccess)

/* A call that has to be refused, with what it says. */
static void says(int line, lowrankkv_status status, lowrankkv_status expected, const char* text) {
  if (status != expected || strcmp(lowrankkv_cuda_last_error(), text) != 0) {
    printf("line %d: status %d, expected %d \"%s\"; ", line, (int)status, (int)expected, text);
    failure(line, "another error");
  }
}
#define SAYS(call, expected, text) says(__LINE__, (call), (expected), (text))

static float keys[LAYERS][MOST][KV], values[LAYERS][MOST][KV], queries[MOST][QO];
static float *device_keys[LAYERS], *device_values[LAYERS], *device_queries, *device_out,
    *device_lse;

/* About normal, and smaller from channel to channel, as the bundle's rows are. */
static void fill(float* rows, int numbers, double size) {
  static uint32_t state = 1;
  for (int i = 0; i < numbers; ++i) {
    double sum = -6.0;
    for (int part = 0; part < 12; ++part) {
      state = state * 1664525u + 1013904223u;
      sum += (double)(state >> 8) / 16777216.0;
    }
    rows[i] = (float)(size * sum * exp(-0.15 * (i % DIM)));
  }
}

static float* on_device(const float* rows, size_t numbers) {
  float* memory = NULL;
  CUDA(cudaMalloc((void**)&memory, numbers * sizeof(float)));
  if (rows != NULL) CUDA(cudaMemcpy(memory, rows, numbers * sizeof(float), cudaMemcpyHostToDevice));
  return memory;
}

static lowrankkv_rows rows_of(const float* data, int tokens) {
  const lowrankkv_rows rows = {data, LOWRANKKV_F32, tokens, 0, 0, 0};
  return rows;
}

/* Appends token `token` to sequences and attends, on one layer. */
static void step(lowrankkv_cuda_cache* cache, int layer, const int64_t* seqs, size_t count,
                 const float* key, const float* value, const float* query, float* out, float* lse,
                 cudaStream_t stream) {
  const lowrankkv_rows k = rows_of(key, (int)count), v = rows_of(value, (int)count),
                       q = rows_of(query, (int)count);
  OK(lowrankkv_cuda_append(cache, layer, seqs, count, &k, &v, stream));
  OK(lowrankkv_cuda_attend(cache, layer, seqs, count, &q, out, lse, stream));
}

static void called_step(lowrankkv_cuda_cache* cache, int layer, int64_t seq, int token,
                        float* result, float* lse, cudaStream_t stream) {
  step(cache, layer, &seq, 1, device_keys[layer] + token * KV, device_values[layer] + token * KV,
       device_queries + token * QO, device_out, device_lse, stream);
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemcpy(result, device_out, QO * sizeof(float), cudaMemcpyDeviceToHost));
  CUDA(cudaMemcpy(lse, device_lse, QO_HEADS * sizeof(float), cudaMemcpyDeviceToHost));
}

/* What a layer answers to the query of a token, which changes nothing. */
static void ask(lowrankkv_cuda_cache* cache, int layer, int64_t seq, int token, float* result,
                cudaStream_t stream) {
  const lowrankkv_rows q = rows_of(device_queries + token * QO, 1);
  OK(lowrankkv_cuda_attend(cache, layer, &seq, 1, &q, device_out, NULL, stream));
  CUDA(cudaStreamSynchronize(stream));
  CUDA(cudaMemcpy(result, device_out, QO * sizeof(float), cudaMemcpyDeviceToHost));
}

static int same_answers(lowrankkv_cuda_cache* cache, int64_t seq, lowrankkv_cuda_cache* other,
                        int64_t twin, int token, cudaStream_t stream) {
  int same = 1;
  for (int layer = 0; layer < LAYERS; ++layer) {
    float first[QO], second[QO];
    ask(cache, layer, seq, token, first, stream);
    ask(other, layer, twin, token, second, stream);
    same = same && memcmp(first, second, sizeof first) == 0;
  }
  return same;
}

/* Squares of softmax(q k / sqrt(DIM)) v over tokens of a layer, and of how far `out` is from it;
 * the largest difference of a logarithm of sums. A token of `without` or more is left out up to
 * `until`. */
static void compare(int layer, int tokens, int without, int until, const float* query,
                    const float* out, const float* lse, double* difference, double* exact,
                    double* worst_lse) {
  for (int head = 0; head < QO_HEADS; ++head) {
    const int kv = head / (QO_HEADS / KV_HEADS) * DIM;
    double sum = 0.0, total[DIM] = {0.0};
    for (int token = 0; token < tokens; ++token) {
      if (token >= without && token < until) continue;
      double logit = 0.0;
      for (int i = 0; i < DIM; ++i)
        logit += (double)query[head * DIM + i] * (double)keys[layer][token][kv + i];
      const double weight = exp(logit / sqrt((double)DIM));
      sum += weight;
      for (int i = 0; i < DIM; ++i) total[i] += weight * (double)values[layer][token][kv + i];
    }
    for (int i = 0; i < DIM; ++i) {
      *difference += pow(total[i] / sum - (double)out[head * DIM + i], 2.0);
      *exact += pow(total[i] / sum, 2.0);
    }
    if (lse != NULL) *worst_lse = fmax(*worst_lse, fabs(log(sum) - (double)lse[head]));
  }
}

static lowrankkv_cuda_config config_of(const char* method, const char* bundle) {
  lowrankkv_cuda_config config;
  memset(&config, 0, sizeof config);
  config.size = sizeof config;
  config.abi_version = LOWRANKKV_CUDA_ABI_VERSION;
  config.num_layers = LAYERS;
  config.num_qo_heads = QO_HEADS;
  config.num_kv_heads = KV_HEADS;
  config.head_dim = DIM;
  config.max_sequences = 3;
  config.max_tokens = 400;
  config.method = method;
  config.ratio = 0.5;
  config.bundle = bundle;
  return config;
}

static lowrankkv_cuda_cache* opened(const char* method, const char* bundle) {
  const lowrankkv_cuda_config config = config_of(method, bundle);
  lowrankkv_cuda_cache* cache = NULL;
  if (OK(lowrankkv_cuda_open(&config, &cache)) != 0) exit(1);
  return cache;
}

/* The prompt of every layer, in two parts or at once, attended to or only stored. */
static void prompt(lowrankkv_cuda_cache* cache, int64_t seq, cudaStream_t stream) {
  OK(lowrankkv_cuda_create(cache, seq, stream));
  float* out = on_device(NULL, PROMPT * QO);
  const int first = 60;
  for (int layer = 0; layer < LAYERS; ++layer) {
    const lowrankkv_rows k = rows_of(device_keys[layer], layer == 0 ? PROMPT : first),
                         v = rows_of(device_values[layer], layer == 0 ? PROMPT : first),
                         q = rows_of(device_queries, PROMPT),
                         k2 = rows_of(device_keys[layer] + first * KV, PROMPT - first),
                         v2 = rows_of(device_values[layer] + first * KV, PROMPT - first);
    if (layer == 0) {
      OK(lowrankkv_cuda_prefill(cache, layer, seq, &q, &k, &v, out, NULL, 0, stream));
      CUDA(cudaStreamSynchronize(stream));
      float result[QO];
      CUDA(cudaMemcpy(result, out + (PROMPT - 1) * QO, sizeof result, cudaMemcpyDeviceToHost));
      double difference = 0.0, exact = 0.0;
      compare(layer, PROMPT, MOST, MOST, queries[PROMPT - 1], result, NULL, &difference, &exact,
              NULL);
      CHECK(sqrt(difference / exact) < 2e-3); /* a prompt is attended to exactly */
    } else {
      OK(lowrankkv_cuda_ingest(cache, layer, seq, &k, &v, 1, stream));
      CHECK(lowrankkv_cuda_maintain(cache, &seq, 1, stream) == LOWRANKKV_STATE_ERROR);
      OK(lowrankkv_cuda_ingest(cache, layer, seq, &k2, &v2, 0, stream));
    }
  }
  CUDA(cudaFree(out));
}

/* A prompt, steps as calls and as replays of one graph, edits, copies, and a saved sequence. */
static size_t attends(const char* method, const char* bundle, double most, double least) {
  lowrankkv_cuda_cache* cache = opened(method, bundle);
  cudaStream_t stream;
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const int64_t called = 7, replayed = 8, loaded = 9;
  prompt(cache, called, stream);
  OK(lowrankkv_cuda_fork(cache, called, replayed, stream));

  /* The graph reads and writes memory of its own. */
  float *k[LAYERS], *v[LAYERS], *q = on_device(NULL, QO), *out[LAYERS];
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  for (int layer = 0; layer < LAYERS; ++layer) {
    k[layer] = on_device(NULL, KV);
    v[layer] = on_device(NULL, KV);
    out[layer] = on_device(NULL, QO);
  }
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int layer = 0; layer < LAYERS; ++layer)
    step(cache, layer, &replayed, 1, k[layer], v[layer], q, out[layer], NULL, stream);
  CHECK(lowrankkv_cuda_maintain(cache, &called, 1, stream) == LOWRANKKV_STATE_ERROR);
  CHECK(strstr(lowrankkv_cuda_last_error(), "captur") != NULL);
  CHECK(lowrankkv_cuda_create(cache, loaded, stream) == LOWRANKKV_STATE_ERROR);
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&replay, graph, 0));

  double difference = 0.0, exact = 0.0, worst_lse = 0.0;
  for (int token = PROMPT; token < MOST; ++token) {
    float results[LAYERS][QO], again[QO], lse[QO_HEADS];
    CUDA(cudaMemcpy(q, queries[token], QO * sizeof(float), cudaMemcpyHostToDevice));
    for (int layer = 0; layer < LAYERS; ++layer) {
      called_step(cache, layer, called, token, results[layer], lse, stream);
      compare(layer, token + 1, MOST, MOST, queries[token], results[layer], lse, &difference,
              &exact, &worst_lse);
      CUDA(cudaMemcpy(k[layer], keys[layer][token], KV * sizeof(float), cudaMemcpyHostToDevice));
      CUDA(cudaMemcpy(v[layer], values[layer][token], KV * sizeof(float), cudaMemcpyHostToDevice));
    }
    OK(lowrankkv_cuda_advance(cache, &replayed, 1, 1));
    CUDA(cudaGraphLaunch(replay, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int layer = 0; layer < LAYERS; ++layer) {
      CUDA(cudaMemcpy(again, out[layer], sizeof again, cudaMemcpyDeviceToHost));
      CHECK(memcmp(again, results[layer], sizeof again) == 0);
    }
    const int64_t both[] = {called, replayed};
    OK(lowrankkv_cuda_maintain(cache, both, 2, stream));
  }
  const double relative = sqrt(difference / exact);
  printf("%s: %.5f from attention at full rank, lse %.5f\n", method, relative, worst_lse);
  CHECK(relative < most && relative > least);
  CHECK(worst_lse < 4.0 * most);
  int64_t tokens = 0;
  OK(lowrankkv_cuda_num_tokens(cache, replayed, &tokens));
  CHECK(tokens == MOST);
  lowrankkv_memory memory;
  memset(&memory, 0, sizeof memory);
  memory.size = sizeof memory;
  OK(lowrankkv_cuda_memory_of(cache, &called, &memory));
  CHECK(memory.total > 0);
  CHECK(memory.total == memory.coefficients + memory.full_rows + memory.tail + memory.positions +
                            memory.epochs + memory.updater + memory.slack + memory.other);
  const size_t bytes_of_sequence = memory.total;

  /* To host memory, and back under another name. */
  size_t bytes = 0;
  OK(lowrankkv_cuda_save(cache, called, NULL, &bytes, stream));
  void* saved = malloc(bytes);
  if (saved == NULL) exit(1);
  const size_t needed = bytes;
  bytes = 10;
  CHECK(lowrankkv_cuda_save(cache, called, saved, &bytes, stream) == LOWRANKKV_CAPACITY_ERROR);
  CHECK(bytes == 10);
  bytes = needed;
  OK(lowrankkv_cuda_save(cache, called, saved, &bytes, stream));
  CHECK(bytes == needed);
  lowrankkv_cuda_cache* other = opened(method, bundle);
  OK(lowrankkv_cuda_load(other, loaded, saved, bytes, stream));
  CHECK(same_answers(cache, called, other, loaded, MOST - 1, stream));
  ((char*)saved)[bytes / 2] ^= 1;
  CHECK(lowrankkv_cuda_load(other, 10, saved, bytes, stream) == LOWRANKKV_FORMAT_ERROR);
  CHECK(lowrankkv_cuda_num_tokens(other, 10, &tokens) == LOWRANKKV_SEQUENCE_ERROR);
  free(saved);

  /* The same tokens many at a time, in the place of a sequence that has ended elsewhere in the ring
   * of its tail: the same sequence, bit for bit. */
  OK(lowrankkv_cuda_fork(other, loaded, 10, stream));
  OK(lowrankkv_cuda_erase(other, 10, stream));
  prompt(other, 10, stream);
  for (int layer = 0; layer < LAYERS; ++layer) {
    const lowrankkv_rows ks = rows_of(device_keys[layer] + PROMPT * KV, STEPS),
                         vs = rows_of(device_values[layer] + PROMPT * KV, STEPS);
    const int64_t seq = 10;
    OK(lowrankkv_cuda_append_maintained(other, layer, &seq, 1, &ks, &vs, stream));
  }
  CHECK(same_answers(other, loaded, other, 10, MOST - 1, stream));

  /* Copies part from the original when one of both loses tokens. */
  int32_t exactly = -1;
  OK(lowrankkv_cuda_fork(other, loaded, 11, stream));
  OK(lowrankkv_cuda_remove(other, 11, 40, 30, stream));
  OK(lowrankkv_cuda_num_tokens(other, 11, &tokens));
  CHECK(tokens == MOST - 30);
  CHECK(same_answers(cache, called, other, loaded, MOST - 1, stream));
  CHECK(!same_answers(other, 11, other, loaded, MOST - 1, stream));
  difference = exact = 0.0;
  for (int layer = 0; layer < LAYERS; ++layer) {
    float result[QO];
    ask(other, layer, 11, MOST - 1, result, stream);
    compare(layer, MOST, 40, 70, queries[MOST - 1], result, NULL, &difference, &exact, NULL);
  }
  CHECK(sqrt(difference / exact) < 2.0 * most);
  OK(lowrankkv_cuda_truncate(other, 10, MOST - 3, &exactly, stream));
  CHECK(exactly == 1);
  OK(lowrankkv_cuda_truncate(other, 10, 100, &exactly, stream));
  CHECK(exactly == 0); /* stored rows were removed */
  OK(lowrankkv_cuda_num_tokens(other, 10, &tokens));
  CHECK(tokens == 100);
  SAYS(lowrankkv_cuda_truncate(other, 10, 101, NULL, stream), LOWRANKKV_SHAPE_ERROR,
       "truncate: length 101, sequence has 100 tokens");
  const int64_t all[] = {loaded, 10, 11};
  for (int i = 0; i < 3; ++i) OK(lowrankkv_cuda_erase(other, all[i], stream));
  memory.size = offsetof(lowrankkv_memory, tail); /* of an older version */
  memory.tail = 77;
  OK(lowrankkv_cuda_memory_of(other, NULL, &memory));
  CHECK(memory.coefficients == 0 && memory.tail == 77);
  uint32_t faults = 1;
  OK(lowrankkv_cuda_faults(cache, &faults));
  CHECK(faults == 0);

  CUDA(cudaGraphExecDestroy(replay));
  CUDA(cudaGraphDestroy(graph));
  lowrankkv_cuda_close(cache);
  lowrankkv_cuda_close(other);
  for (int layer = 0; layer < LAYERS; ++layer) {
    CUDA(cudaFree(k[layer]));
    CUDA(cudaFree(v[layer]));
    CUDA(cudaFree(out[layer]));
  }
  CUDA(cudaFree(q));
  CUDA(cudaStreamDestroy(stream));
  return bytes_of_sequence;
}

/* What is refused, and that nothing changes then. */
static void refuses(const char* bundle) {
  lowrankkv_cuda_cache* cache = NULL;
  lowrankkv_cuda_config config = config_of("Nothing", bundle);
  char text[200];
  SAYS(lowrankkv_cuda_open(&config, &cache), LOWRANKKV_VALUE_ERROR,
       "method: Nothing, one of FullKV, Budgeted expected");
  config = config_of("Budgeted", NULL);
  SAYS(lowrankkv_cuda_open(&config, &cache), LOWRANKKV_VALUE_ERROR,
       "bundle: null, an address expected");
  config = config_of("Budgeted", "/nowhere");
  CHECK(lowrankkv_cuda_open(&config, &cache) == LOWRANKKV_FORMAT_ERROR);
  config = config_of("Budgeted", bundle);
  config.num_layers = 3;
  SAYS(lowrankkv_cuda_open(&config, &cache), LOWRANKKV_SHAPE_ERROR,
       "num_layers: bundle 2, model 3");
  config = config_of("Budgeted", bundle);
  config.ratio = 0.01;
  CHECK(lowrankkv_cuda_open(&config, &cache) == LOWRANKKV_VALUE_ERROR);
  config = config_of("FullKV", NULL);
  config.size = 8;
  snprintf(text, sizeof text, "config: 8 bytes, %zu expected", sizeof config);
  SAYS(lowrankkv_cuda_open(&config, &cache), LOWRANKKV_SHAPE_ERROR, text);
  config.size = sizeof config;
  config.abi_version = 99;
  SAYS(lowrankkv_cuda_open(&config, &cache), LOWRANKKV_VALUE_ERROR,
       "abi_version: caller 99, library 1");
  SAYS(lowrankkv_cuda_open(NULL, &cache), LOWRANKKV_VALUE_ERROR,
       "config: null, an address expected");
  SAYS(lowrankkv_cuda_create(NULL, 1, NULL), LOWRANKKV_VALUE_ERROR,
       "cache: null, an address expected");
  CHECK(cache == NULL);
  CHECK(lowrankkv_cuda_abi_version() == LOWRANKKV_CUDA_ABI_VERSION);

  cache = opened("FullKV", NULL);
  const int64_t seq = 1, unknown = 5;
  OK(lowrankkv_cuda_create(cache, seq, NULL));
  CHECK(lowrankkv_cuda_create(cache, seq, NULL) == LOWRANKKV_SEQUENCE_ERROR);
  lowrankkv_rows k = rows_of(device_keys[0], 1);
  const lowrankkv_rows v = rows_of(device_values[0], 1), none = rows_of(NULL, 1);
  CHECK(lowrankkv_cuda_append(cache, 0, &unknown, 1, &k, &v, NULL) == LOWRANKKV_SEQUENCE_ERROR);
  SAYS(lowrankkv_cuda_append(cache, 2, &seq, 1, &k, &v, NULL), LOWRANKKV_SHAPE_ERROR,
       "layer: 2, num_layers 2");
  SAYS(lowrankkv_cuda_append(cache, 0, &seq, 1, &none, &v, NULL), LOWRANKKV_VALUE_ERROR,
       "keys: null, an address expected");
  SAYS(lowrankkv_cuda_append(cache, 0, NULL, 1, &k, &v, NULL), LOWRANKKV_VALUE_ERROR,
       "seqs: null, an address expected");
  k.type = 7;
  SAYS(lowrankkv_cuda_append(cache, 0, &seq, 1, &k, &v, NULL), LOWRANKKV_VALUE_ERROR,
       "keys: type 7, 0 to 2 expected");
  k.type = LOWRANKKV_F32;
  SAYS(lowrankkv_cuda_attend(cache, 0, &seq, 1, &none, device_out, NULL, NULL),
       LOWRANKKV_VALUE_ERROR, "queries: null, an address expected");
  SAYS(lowrankkv_cuda_ingest(cache, 0, seq, &k, &v, 2, NULL), LOWRANKKV_VALUE_ERROR,
       "more: 2, 0 or 1 expected");
  int64_t tokens = -1;
  OK(lowrankkv_cuda_num_tokens(cache, seq, &tokens));
  CHECK(tokens == 0);
  OK(lowrankkv_cuda_append(cache, 0, &seq, 1, &k, &v, NULL));
  OK(lowrankkv_cuda_num_tokens(cache, seq, &tokens));
  CHECK(tokens == 1);
  lowrankkv_cuda_close(cache);
  lowrankkv_cuda_close(NULL);
}

int main(int argc, char** argv) {
  int devices = 0;
  if (argc != 2) {
    fprintf(stderr, "cuda_c_api BUNDLE: a file of 08_calibrate\n");
    return 2;
  }
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    puts("no CUDA device: skipped");
    return getenv("LOWRANKKV_REQUIRE_GPU") != NULL ? 1 : 77;
  }
  fill(&queries[0][0], MOST * QO, 4.0);
  device_queries = on_device(&queries[0][0], MOST * QO);
  device_out = on_device(NULL, QO);
  device_lse = on_device(NULL, QO_HEADS);
  for (int layer = 0; layer < LAYERS; ++layer) {
    fill(&keys[layer][0][0], MOST * KV, 2.0);
    fill(&values[layer][0][0], MOST * KV, 1.0);
    device_keys[layer] = on_device(&keys[layer][0][0], MOST * KV);
    device_values[layer] = on_device(&values[layer][0][0], MOST * KV);
  }
  refuses(argv[1]);
  const size_t full = attends("FullKV", NULL, 2e-3, 0.0);
  const size_t coded = attends("Budgeted", argv[1], 0.05, 1e-3);
  printf("a sequence of %d tokens takes %zu bytes in codes, %zu at full rank\n", MOST, coded, full);
  CHECK(coded < full * 3 / 4);
  printf(failed == 0 ? "all right\n" : "%d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
