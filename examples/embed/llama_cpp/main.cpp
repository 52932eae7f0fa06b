// SPDX-License-Identifier: Apache-2.0
// llama.cpp generates a text twice: over its own KV cache, and over one of lowrankkv's, which its
// callback puts in the place of every layer's attention.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention_swap.hpp"
#include "evaluate.hpp"
#include "kv_store.hpp"
#include "llama.h"
#include "progress.hpp"
#include "report.hpp"

namespace {

using Tokens = std::vector<llama_token>;
constexpr lowrankkv::SequenceId kSequence = 0;

struct Release {
  void operator()(llama_model* model) const { llama_model_free(model); }
  void operator()(llama_context* context) const { llama_free(context); }
};
using ModelPtr = std::unique_ptr<llama_model, Release>;

std::string meta(const llama_model& model, const std::string& key) {
  char text[64] = {};
  return llama_model_meta_val_str(&model, key.c_str(), text, sizeof text) < 0 ? std::string()
                                                                              : std::string(text);
}

/// What a cache must know of the engine's model.
llama::Config shape_of(const llama_model& model) {
  llama::Config config;
  config.num_layers = llama_model_n_layer(&model);
  config.num_qo_heads = llama_model_n_head(&model);
  config.num_kv_heads = llama_model_n_head_kv(&model);
  config.hidden_size = llama_model_n_embd(&model);
  const std::string length =
      meta(model, meta(model, "general.architecture") + ".attention.key_length");
  config.head_dim = length.empty() ? config.hidden_size / config.num_qo_heads : std::stoi(length);
  return config;
}

Tokens tokenize(const llama_model& model, const std::string& text) {
  const llama_vocab* vocabulary = llama_model_get_vocab(&model);
  Tokens tokens(text.size() + 2);
  const int count = llama_tokenize(vocabulary, text.data(), static_cast<int>(text.size()),
                                   tokens.data(), static_cast<int>(tokens.size()), true, false);
  if (count <= 0) throw std::runtime_error("the prompt has no tokens");
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

std::string text_of(const llama_model& model, const Tokens& tokens) {
  std::string text(tokens.size() * 32 + 32, ' ');
  const int count = llama_detokenize(llama_model_get_vocab(&model), tokens.data(),
                                     static_cast<int>(tokens.size()), text.data(),
                                     static_cast<int>(text.size()), false, true);
  text.resize(static_cast<std::size_t>(std::max(0, count)));
  return text;
}

/// One context of the engine; with a swap, its attention is somebody else's.
class Session {
 public:
  /// @param type  of its own cache
  Session(llama_model& model, int context, int threads, ggml_type type, AttentionSwap* swap)
      : model_(model), swap_(swap) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch =
        static_cast<std::uint32_t>(context);  // a prompt is one batch
    params.n_threads = params.n_threads_batch = threads;
    params.type_k = params.type_v = type;
    if (type == GGML_TYPE_F32)
      params.flash_attn_type =
          LLAMA_FLASH_ATTN_TYPE_DISABLED;  // it rounds queries, keys and values to f16
    if (swap != nullptr) {
      params.cb_eval = AttentionSwap::eval;
      params.cb_eval_user_data = swap;
    }
    context_.reset(llama_init_from_model(&model, params));
    if (!context_)
      throw std::runtime_error("the engine made no context of " + std::to_string(context) +
                               " tokens");
  }
  void clear() { llama_memory_clear(llama_get_memory(context_.get()), true); }
  /// Runs tokens through the model; the logits of the last.
  std::vector<float> step(Tokens tokens) {
    const int status = llama_decode(
        context_.get(), llama_batch_get_one(tokens.data(), static_cast<int>(tokens.size())));
    if (swap_ != nullptr) swap_->rethrow();
    if (status != 0)
      throw std::runtime_error("the engine refused " + std::to_string(tokens.size()) +
                               " tokens with status " + std::to_string(status));
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    return {logits, logits + llama_vocab_n_tokens(llama_model_get_vocab(&model_))};
  }

 private:
  llama_model& model_;
  AttentionSwap* swap_;
  std::unique_ptr<llama_context, Release> context_;
};

struct Run {
  Tokens tokens;
  std::vector<std::vector<float>> logits;  // that each token was taken from
};

/// Greedy. `after_step` is called between two steps.
template <class AfterStep>
Run generate(Session& session, const Tokens& prompt, int count, const AfterStep& after_step) {
  Run run;
  std::vector<float> logits = session.step(prompt);
  while (true) {
    after_step();
    run.tokens.push_back(
        static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    run.logits.push_back(std::move(logits));
    if (static_cast<int>(run.tokens.size()) == count) return run;
    logits = session.step({run.tokens.back()});
  }
}

/// Moments of what the engine itself computes of a text, in windows of its context.
llama::Calibration calibrate(llama_model& model, const llama::Config& config,
                             const std::string& text, int window, int threads) {
  llama::Calibration calibration;
  calibration.post_rope.assign(
      static_cast<std::size_t>(config.num_layers),
      lowrankkv::calibrate::LayerMoments(config.cache_shape(), config.rope(lowrankkv::Rope::post)));
  AttentionSwap watch(
      config,
      [&](int layer, std::int64_t n, const llama::Projected& rows, float*) {
        const lowrankkv::QueryView query(rows.query, n, config.num_qo_heads, config.head_dim);
        const lowrankkv::KeyView key(rows.key, n, config.num_kv_heads, config.head_dim);
        const lowrankkv::ValueView value(rows.value, n, config.num_kv_heads, config.head_dim);
        auto& moments = calibration.post_rope[static_cast<std::size_t>(layer)];
        moments.add(query, key, value);
        moments.coding().add(query, key, value, std::max<std::int64_t>(1, n / 2), 1,
                             [](int parts, auto&& part) {
                               for (int i = 0; i < parts; ++i) part(i);
                             });
        return false;  // the engine's own attention stands
      },
      [&](int layer, std::int64_t n, const float* rows) {
        calibration.post_rope[static_cast<std::size_t>(layer)].coding().add_residual_stream(
            {rows, n, config.hidden_size});
      });
  Session session(model, window, threads, GGML_TYPE_F16, &watch);
  const Tokens tokens = tokenize(model, text);
  llama::Progress progress("calibrate", static_cast<std::int64_t>(tokens.size()));
  for (std::size_t at = 0; at < tokens.size();) {
    const std::size_t count = std::min(tokens.size() - at, static_cast<std::size_t>(window));
    session.step({tokens.begin() + static_cast<std::ptrdiff_t>(at),
                  tokens.begin() + static_cast<std::ptrdiff_t>(at + count)});
    session.clear();
    at += count;
    progress.step(static_cast<std::int64_t>(count));
  }
  return calibration;
}

/// Largest difference of two steps' logits, while both have generated the same.
double largest_difference(const Run& a, const Run& b, std::size_t steps) {
  double most = 0.0;
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < a.logits[step].size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(a.logits[step][i]) -
                                     static_cast<double>(b.logits[step][i])));
  }
  return most;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app{"llama.cpp over lowrankkv's KV cache, beside itself over its own"};
  llama::MethodOptions options{.method = "FullKV"};
  std::string path, prompt, prompt_file, calibration_text;
  int count = 64, context = 2048, threads = 2;
  bool require_same_text = false, wide = false;
  app.add_option("--model", path, "GGUF file")->required()->check(CLI::ExistingFile);
  CLI::Option* text = app.add_option("--prompt", prompt, "text");
  app.add_option("--prompt-file", prompt_file, "the same in a file")
      ->check(CLI::ExistingFile)
      ->excludes(text);
  app.add_option("--method", options.method,
                 "how the cache compresses; lowrankkv-llama methods lists them")
      ->capture_default_str();
  app.add_option("--ratio", options.ratio, "the method's knob")->capture_default_str();
  app.add_option("--calibration", calibration_text,
                 "text file that bases are fitted to, by what the engine computes of it")
      ->check(CLI::ExistingFile);
  app.add_option("--tokens", count, "tokens to generate")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--context", context, "tokens that the engine has room for")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--threads", threads, "of the engine and of the cache")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--f32", wide, "both caches in f32 instead of f16");
  app.add_flag("--require-same-text", require_same_text, "fail unless both texts are the same");
  CLI11_PARSE(app, argc, argv);
  if (llama::find_method(options.method).pre_rope)
    throw std::runtime_error(
        options.method +
        " stores keys before their rotary embedding; this program hands over rotated ones");

  llama_log_set(
      [](ggml_log_level level, const char* line, void*) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(line, stderr);
      },
      nullptr);
  llama_backend_init();
  const ModelPtr model(llama_model_load_from_file(path.c_str(), llama_model_default_params()));
  if (!model) throw std::runtime_error(path + ": the engine cannot load it");
  const llama::Config config = shape_of(*model);
  const Tokens tokens =
      tokenize(*model, prompt_file.empty() ? prompt : llama::read_text(prompt_file));
  if (static_cast<int>(tokens.size()) + count > context)
    throw std::runtime_error("--context: " + std::to_string(context) + ", prompt and text have " +
                             std::to_string(tokens.size() + static_cast<std::size_t>(count)));

  const ggml_type type = wide ? GGML_TYPE_F32 : GGML_TYPE_F16;
  if (wide) options.storage = lowrankkv::DType::f32;

  const Run own = [&] {
    Session session(*model, context, threads, type, nullptr);
    return generate(session, tokens, count, [] {});
  }();

  const llama::Calibration calibration =
      calibration_text.empty()
          ? llama::Calibration()
          : calibrate(*model, config, llama::read_text(calibration_text), context, threads);
  const auto store = llama::make_store(options, config, context, calibration,
                                       std::make_shared<lowrankkv::cpu::ThreadPool>(threads));
  store->create(kSequence);
  bool is_prompt = true;
  AttentionSwap swap(config,
                     [&](int layer, std::int64_t n, const llama::Projected& rows, float* out) {
                       is_prompt ? store->prefill(layer, kSequence, n, rows, out)
                                 : store->decode(layer, kSequence, n, rows, out);
                       return true;
                     });
  Session session(*model, context, threads, type, &swap);
  const Run swapped = generate(session, tokens, count, [&] {
    is_prompt = false;
    store->maintain(kSequence);
  });

  const auto [a, b] = std::mismatch(own.tokens.begin(), own.tokens.end(), swapped.tokens.begin());
  const std::size_t same = static_cast<std::size_t>(a - own.tokens.begin());
  const double f16_bytes = 2.0 * 2.0 * config.num_layers * config.num_kv_heads * config.head_dim;
  const double engine_bytes = wide ? 2.0 * f16_bytes : f16_bytes;
  const std::int64_t cached = store->num_tokens(kSequence);
  const double bytes =
      static_cast<double>(store->memory(kSequence).total()) / static_cast<double>(cached);
  llama::Row row;
  row.method = options.method;
  row.ratio = options.ratio;
  row.knob = llama::find_method(options.method).ratio;
  row.largest_ratio_measured = bytes / f16_bytes;
  row.largest_context = cached;
  char name[64];
  std::snprintf(name, sizeof name, row.knob.empty() ? "%s" : "%s %g", options.method.c_str(),
                options.ratio);
  std::printf(
      "prompt of %zu tokens, %d layers of %d query and %d KV heads of %d\n\n--- %s\n%s\n\n--- "
      "%s\n%s\n\n",
      tokens.size(), config.num_layers, config.num_qo_heads, config.num_kv_heads, config.head_dim,
      "the engine's own cache", text_of(*model, own.tokens).c_str(), name,
      text_of(*model, swapped.tokens).c_str());
  std::printf("%-24s %12s %12s %20s\n%-24s %12.0f %12d %20s\n%-24s %12.0f %12zu %20.2g\n", "cache",
              "bytes/token", "same tokens", "largest difference",
              wide ? "the engine's own (f32)" : "the engine's own (f16)", engine_bytes, count, "",
              name, bytes, same,
              largest_difference(own, swapped, std::min(same + 1, own.logits.size())));
  std::printf(
      "\nThe difference is of logits, up to the first token that differs. %lld attention results "
      "of %lld were written by lowrankkv.\n",
      static_cast<long long>(swap.replaced()), static_cast<long long>(config.num_layers) * count);
  std::fflush(stdout);  // before warnings, where both go to one file
  for (const std::string& line : llama::excess_warnings({row}))
    std::fprintf(stderr, "%s\n", line.c_str());
  if (require_same_text && same != own.tokens.size()) {
    std::fprintf(stderr, "The texts differ at token %zu\n", same);
    return 1;
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
