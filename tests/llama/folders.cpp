// SPDX-License-Identifier: Apache-2.0
// Folders of other shapes: several files, a separate head, biases, Llama-3 scaling, f16; and
// folders that are wrong.
#include <doctest/doctest.h>

#include <Eigen/Dense>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "evaluate.hpp"
#include "json_file.hpp"
#include "kv_store.hpp"
#include "lowrankkv/io/safetensors.hpp"
#include "model.hpp"
#include "tiny_model.hpp"
#include "tokenizer.hpp"

using namespace llama;
using namespace tiny;

namespace {

std::string error_of(const std::string& folder) {
  try {
    Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1));
  } catch (const std::exception& error) {
    return error.what();
  }
  return "loaded";
}

/// Checks the logits of 12 tokens against those of the plain forward pass, [12, 40].
void check_logits(const Model& model, const std::vector<std::int32_t>& ids,
                  const Matrix& expected) {
  const auto store = make_store({.method = "FullKV", .storage = lowrankkv::DType::f32},
                                model.config(), 64, {}, model.threads());
  store->create(0);
  const auto hidden = model.forward(ids, 0, [&](int layer, const Projected& rows, float* out) {
    store->prefill(layer, 0, 12, rows, out);
  });
  const auto logits = model.logits(hidden, 0, 12);
  for (int t = 0; t < 12; ++t) {
    for (int id = 0; id < 40; ++id)
      CHECK(std::abs(logits[static_cast<std::size_t>(t * 40 + id)] - expected(t, id)) <
            1e-4 * (1.0 + std::abs(expected(t, id))));
  }
}

}  // namespace

TEST_CASE(
    "several files, separate or tied head, biases and rope scaling give the architecture's "
    "logits") {
  for (const bool separate : {true, false}) {
    for (const bool scaled : {true, false}) {
      const TinyModel tiny(separate);
      const std::string folder = "tiny_model_test";
      tiny.write(
          folder,
          kConfig + (separate ? "" : R"(, "tie_word_embeddings": true)") +
              (scaled
                   ? R"(, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}})"
                   : "}"));
      std::vector<double> frequencies{1.0, std::pow(100.0, -1.0 / 3.0),
                                      std::pow(100.0, -2.0 / 3.0)};
      if (scaled) {
        for (double& f : frequencies) {  // wavelengths 6.3 (kept), 29 (blended), 135 (stretched)
          const double wavelength = 2.0 * 3.14159265358979 / f;
          const double blend = (32.0 / wavelength - 1.0) / 3.0;
          f = wavelength < 8.0    ? f
              : wavelength > 32.0 ? f / 8.0
                                  : (1.0 - blend) * f / 8.0 + blend * f;
        }
      }
      const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(2));
      const std::vector<std::int32_t> ids{3, 39, 0, 7, 7, 21, 5, 30, 11, 2, 17, 9};
      check_logits(model, ids, tiny.forward(ids, frequencies));
      std::filesystem::remove_all(folder);
    }
  }
}

TEST_CASE("the families differ in biases, norms of heads and layers without a rotation") {
  const std::vector<std::int32_t> ids{1, 17, 3, 3, 29, 8, 39, 0, 11, 21, 5, 14};
  struct Form {
    std::string family, members, removed;  // projections without biases, by their first letters
    std::vector<bool> rotary{true, true};
  };
  const std::vector<Form> forms = {
      {"llama", "", "qkvo"},
      {"mistral", R"(, "sliding_window": null, "layer_types": ["full_attention"])", "qkvo"},
      {"qwen2", R"(, "use_sliding_window": false, "sliding_window": 8)", "o"},
      {"qwen3", "", "qkvo"},
      {"qwen3", R"(, "attention_bias": true)", ""},
      {"smollm3", R"(, "tie_word_embeddings": false)", "qkvo"},
      {"smollm3",
       R"(, "tie_word_embeddings": false, "no_rope_layer_interval": 2)",
       "qkvo",
       {true, false}},
      {"smollm3",
       R"(, "attention_bias": true, "tie_word_embeddings": false, "no_rope_layers": [0, 1, 1])",
       "",
       {false, true}}};
  for (const Form& form : forms) {
    for (const int head_dim : {6, 8}) {
      CAPTURE(form.family);
      CAPTURE(form.members);
      CAPTURE(head_dim);
      std::vector<double> frequencies;
      for (int c = 0; c < head_dim / 2; ++c)
        frequencies.push_back(std::pow(100.0, -2.0 * c / head_dim));
      TinyModel tiny(true, head_dim);
      tiny.remove_biases(form.removed);
      tiny.rotary = form.rotary;
      if (form.family == "qwen3") tiny.add_head_norms();
      const std::string folder = "tiny_family_test";
      tiny.write(folder, config_of(form.family, head_dim) + form.members + "}");
      const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1));
      check_logits(model, ids, tiny.forward(ids, frequencies));
      std::filesystem::remove_all(folder);
    }
  }
}

TEST_CASE("what the families' files leave out is what transformers takes") {
  const std::string some =
      R"("hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9, "rms_norm_eps": 1e-6)";
  const nlohmann::json qwen = nlohmann::json::parse("{\"model_type\": \"qwen3\", " + some + "}");
  CHECK(Config(JsonValue("config.json", qwen)).head_dim == 128);
  CHECK_FALSE(Config(JsonValue("config.json", qwen)).tied_head);
  const nlohmann::json smol = nlohmann::json::parse("{\"model_type\": \"smollm3\", " + some + "}");
  const Config config(JsonValue("config.json", smol));
  CHECK(config.head_dim == 16);
  CHECK(config.tied_head);
  CHECK(config.rope_frequencies[1] == doctest::Approx(std::pow(2e6, -1.0 / 8.0)));
  CHECK(config.rotary_layers ==
        std::vector<bool>{true, true, true, false, true, true, true, false, true});
  CHECK_FALSE(config.rotates(3));
  CHECK(config.rope(lowrankkv::Rope::pre, 3).frequencies == std::vector<double>(8, 0.0));
  CHECK(config.rope(lowrankkv::Rope::pre, 4) == config.rope(lowrankkv::Rope::pre));
}

TEST_CASE("folders that cannot be used say why") {
  const TinyModel tiny(true);
  const std::string folder = "wrong_model_test";
  CHECK(error_of("no_such_folder").find("config.json: cannot open") == 0);
  const auto with = [&](const std::string& members) {
    tiny.write(folder, kConfig + ", " + members + "}");
    return error_of(folder);
  };
  CHECK(with(R"("hidden_act": "gelu")") == "config.json: hidden_act is \"gelu\", expected silu");
  CHECK(with(R"("rope_scaling": {"rope_type": "yarn"})") ==
        "config.json: rope type yarn is not supported, expected default, linear or llama3");
  CHECK(with(R"("architectures": ["Qwen3ForCausalLM"])") ==
        "config.json: architectures[0] is \"Qwen3ForCausalLM\", expected LlamaForCausalLM");
  CHECK(with(R"("layer_types": ["full_attention", "sliding_attention"])") ==
        "config.json: layer_types[1] is \"sliding_attention\", expected full_attention: attention "
        "to all tokens");
  CHECK(with(R"("partial_rotary_factor": 0.5)") ==
        "config.json: partial_rotary_factor is 0.5, expected 1");
  CHECK(with(R"("rope_parameters": {"full_attention": {"rope_type": "default"}})") ==
        "config.json: rope_parameters.full_attention is {\"rope_type\":\"default\"}, expected no "
        "object: one rotary embedding for all layers");
  CHECK(with(R"("quantization_config": {"bits": 4})").find("config.json: quantization_config is") ==
        0);
  CHECK(with(R"("bos_token_id": 40)") ==
        "config.json: bos_token_id is 40, expected an integer from 0 to 39");
  CHECK(with(R"("eos_token_id": [1, "x"])") ==
        "config.json: eos_token_id[1] is \"x\", expected an integer from 0 to 39");
  CHECK(with(R"("tie_word_embeddings": "yes")") ==
        "config.json: tie_word_embeddings is \"yes\", expected true or false");
  CHECK(with(R"("head_dim": 8)") ==
        "safetensors: tensor model.layers.0.self_attn.q_proj.weight has shape [24, 24], expected "
        "[32, 24]");
  CHECK(with(R"("head_dim": 5)") == "config.json: head_dim is 5, expected an even number");
  const auto whole = [&](const std::string& text) {
    tiny.write(folder, text);
    return error_of(folder);
  };
  CHECK(whole(R"({"model_type": "gpt2"})") ==
        "config.json: model_type is \"gpt2\", expected llama or mistral or qwen2 or qwen3 or "
        "smollm3");
  CHECK(whole(R"({"architectures": ["Qwen3MoeForCausalLM"]})") ==
        "config.json: architectures[0] is \"Qwen3MoeForCausalLM\", expected LlamaForCausalLM or "
        "MistralForCausalLM or Qwen2ForCausalLM or Qwen3ForCausalLM or SmolLM3ForCausalLM");
  CHECK(whole(R"({"model_type": "qwen2", "architectures": ["LlamaForCausalLM"]})") ==
        "config.json: architectures[0] is \"LlamaForCausalLM\", expected Qwen2ForCausalLM");
  CHECK(whole("{}") == "config.json: model_type is missing, it must be there");
  CHECK(whole("[]") == "config.json: the file is [], expected an object");
  CHECK(whole(R"({"model_type": "llama", )") ==
        "config.json: wrong_model_test/config.json is no JSON at byte 25, an object is expected");
  CHECK(whole("").find("config.json: wrong_model_test/config.json has 0 bytes") == 0);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = kConfig + "}";
    return whole(text.replace(text.find(from), from.size(), to));
  };
  CHECK(replaced(R"(, "rms_norm_eps": 1e-5)", "") ==
        "config.json: rms_norm_eps is missing, it must be there");
  CHECK(replaced(R"("rms_norm_eps": 1e-5)", R"("rms_norm_eps": 0)") ==
        "config.json: rms_norm_eps is 0, expected a number above 0");
  for (const char* epsilon : {"1e-60", "1e+60"})  // 0 and infinite as f32
    CHECK(replaced(R"("rms_norm_eps": 1e-5)", std::string(R"("rms_norm_eps": )") + epsilon) ==
          std::string("config.json: rms_norm_eps is ") + epsilon +
              ", expected a number above 0 that f32 can hold");
  CHECK(replaced(R"("hidden_size": 24)", R"("hidden_size": 16777216)") ==
        "config.json: hidden_size is 16777216, expected at most 16384 for each of 4 heads");
  CHECK(whole(R"({"hidden_size": )" + std::string(300000, '[')) ==
        "config.json: wrong_model_test/config.json has values 101 deep in each other at byte 115, "
        "at most 100 are expected");
  CHECK(replaced(R"("hidden_size": 24)", R"("hidden_size": 24.5)") ==
        "config.json: hidden_size is 24.5, expected an integer from 1 to 16777216");
  CHECK(replaced(R"("num_hidden_layers": 2)", R"("num_hidden_layers": 1)") ==
        "model: tensor model.layers.1.input_layernorm.weight in model-00002-of-00002.safetensors "
        "has no place in a Llama model of 1 layers");
  CHECK(replaced(R"("num_key_value_heads": 2)", R"("num_key_value_heads": 3)") ==
        "config.json: num_key_value_heads is 3, expected a divisor of num_attention_heads, 4");
  std::filesystem::remove_all(folder);
}

TEST_CASE("texts end as generation_config.json says, else as config.json does") {
  const TinyModel tiny(true);
  const std::string folder = "ends_test";
  const std::string generation = folder + "/generation_config.json";
  tiny.write(folder, kConfig + R"(, "eos_token_id": 5})");
  const auto ends = [&](const std::string& text) {
    std::ofstream(generation) << text;
    return Model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1)).config().eos;
  };
  using Ids = std::vector<std::int32_t>;
  CHECK(Model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1)).config().eos == Ids{5});
  CHECK(ends(R"({"eos_token_id": 7, "bos_token_id": 1})") == Ids{7});
  CHECK(ends(R"({"eos_token_id": [7, 39, 5]})") == Ids{7, 39, 5});
  CHECK(ends(R"({"eos_token_id": null})").empty());
  CHECK(ends("{}").empty());  // as transformers: config.json's is not asked then
  const auto refused = [&](const std::string& text) {
    std::ofstream(generation) << text;
    return error_of(folder);
  };
  const std::string field = "generation_config.json: eos_token_id";
  CHECK(refused(R"({"eos_token_id": "</s>"})") ==
        field + R"( is "</s>", expected an integer from 0 to 39)");
  CHECK(refused(R"({"eos_token_id": true})") ==
        field + " is true, expected an integer from 0 to 39");
  CHECK(refused(R"({"eos_token_id": 2.5})") == field + " is 2.5, expected an integer from 0 to 39");
  CHECK(refused(R"({"eos_token_id": -1})") == field + " is -1, expected an integer from 0 to 39");
  CHECK(refused(R"({"eos_token_id": [3, 40]})") ==
        field + "[1] is 40, expected an integer from 0 to 39");
  CHECK(refused(R"({"eos_token_id": [[3]]})") ==
        field + "[0] is [3], expected an integer from 0 to 39");
  CHECK(refused(R"({"eos_token_id": {"id": 3}})") ==
        field + R"( is {"id":3}, expected an integer from 0 to 39)");
  CHECK(refused("[]") == "generation_config.json: the file is [], expected an object");
  CHECK(refused("{") ==
        "generation_config.json: ends_test/generation_config.json is no JSON at byte 2, an object "
        "is expected");
  std::filesystem::remove_all(folder);
}

TEST_CASE("attention or rotations that the engine does not compute are refused by name") {
  const std::string folder = "windows_test";
  const TinyModel tiny(true);
  const auto whole = [&](const std::string& text) {
    tiny.write(folder, text);
    return error_of(folder);
  };
  for (const std::string family : {"qwen2", "qwen3", "smollm3"})
    CHECK(whole(R"({"use_sliding_window": true, "model_type": ")" + family + "\"}") ==
          "config.json: use_sliding_window is true, expected false: attention to all tokens");
  CHECK(whole(R"({"model_type": "mistral", "max_position_embeddings": 4097})") ==
        "config.json: max_position_embeddings is 4097, expected at most 4096, the window of a "
        "Mistral model whose file has no sliding_window: null");
  const auto smollm3 = [&](const std::string& members) {
    return whole(config_of("smollm3") + ", " + members + "}");
  };
  CHECK(smollm3(R"("no_rope_layers": [1])") ==
        "config.json: no_rope_layers is [1], expected an entry for each of 2 layers");
  CHECK(smollm3(R"("no_rope_layers": [1, 2])") ==
        "config.json: no_rope_layers[1] is 2, expected an integer from 0 to 1");
  CHECK(smollm3(R"("no_rope_layer_interval": 0)") ==
        "config.json: no_rope_layer_interval is 0, expected an integer from 1 to 16777216");
  CHECK(whole(R"({"model_type": "mistral", "sliding_window": 4096})") ==
        "config.json: sliding_window is 4096, expected null: attention to all tokens");
  std::filesystem::remove_all(folder);
}

TEST_CASE("the weights are those of model.safetensors, else of the index, and all must be there") {
  const TinyModel tiny(true);
  const std::string folder = "weights_test";
  tiny.write(folder, kConfig + "}");
  CHECK(error_of(folder) == "loaded");
  std::filesystem::resize_file(folder + "/" + kSecond, 300);
  CHECK(error_of(folder).find("safetensors: header of ") == 0);
  std::filesystem::remove(folder + "/" + kSecond);
  // A whole file beside an index that is not: the file is read, as by transformers.
  tiny.write_single(folder + "/model.safetensors");
  CHECK(error_of(folder) == "loaded");
  std::filesystem::remove(folder + "/model.safetensors");
  CHECK(error_of(folder).find(kIndex + ": weight_map.") == 0);
  CHECK(error_of(folder).find(" is \"" + kSecond + "\", expected a file that is in weights_test") !=
        std::string::npos);
  // Without an index: model.safetensors, whatever else is there.
  std::filesystem::remove(folder + "/" + kIndex);
  CHECK(error_of(folder) ==
        "model: neither model.safetensors nor model.safetensors.index.json in weights_test; weight "
        "files there: " +
            kFirst);
  TinyModel stale = tiny;
  for (float& value : stale.weights.at("lm_head.weight").second) value = 7.0F;
  stale.write_single(folder + "/model-00001-of-00001.safetensors");
  tiny.write_single(folder + "/model.safetensors");
  const Model model(folder, std::make_shared<lowrankkv::cpu::ThreadPool>(1));
  const std::vector<float> hidden(24, 1.0F);
  CHECK(model.logits(hidden, 0, 1).front() ==
        doctest::Approx(tiny.matrix("lm_head.weight").row(0).sum()).epsilon(1e-5));
  for (const char* name : {"model.safetensors.incomplete", "x.part"}) {
    std::ofstream(folder + "/" + name) << "x";
    CHECK(error_of(folder) == "model: weights_test/" + std::string(name) +
                                  " is an unfinished download, expected complete files alone");
    std::filesystem::remove(folder + "/" + name);
  }
  std::ofstream(folder + "/adapter_config.json") << "{}";
  CHECK(error_of(folder) ==
        "model: weights_test/adapter_config.json says that this is an adapter, expected a whole "
        "model");
  std::filesystem::remove_all(folder);
}

TEST_CASE("heads and biases are as the configuration says") {
  const std::string folder = "heads_test";
  TinyModel tiny(false);
  tiny.write(folder, kConfig + "}");
  CHECK(error_of(folder) ==
        "model: tensor lm_head.weight is in no file, but config.json: tie_word_embeddings is not "
        "true");
  TinyModel separate(true);
  separate.write(folder, kConfig + R"(, "tie_word_embeddings": true})");
  CHECK(error_of(folder) ==
        "model: tensor lm_head.weight differs from model.embed_tokens.weight, but config.json: "
        "tie_word_embeddings is true");
  separate.write(folder, kConfig + R"(, "mlp_bias": true})");
  CHECK(error_of(folder) ==
        "model: tensor model.layers.0.mlp.gate_proj.bias is in no file, but config.json: mlp_bias "
        "is true");
  separate.write(folder, kConfig + R"(, "attention_bias": false})");
  CHECK(error_of(folder) ==
        "model: tensor model.layers.0.self_attn.q_proj.bias is there, but config.json: "
        "attention_bias is not true");
  TinyModel normed = separate;
  normed.remove_biases("qkvo");
  normed.write(folder, config_of("qwen3") + "}");
  CHECK(error_of(folder) ==
        "model: tensor model.layers.0.self_attn.q_norm.weight is in none of 2 files");
  normed.add_head_norms();
  normed.write(folder, config_of("llama") + "}");
  CHECK(error_of(folder).find("model: tensor model.layers.0.self_attn.k_norm.weight in ") == 0);
  separate.weights["lm_head.bias"] = {{40}, std::vector<float>(40, 1.0F)};
  separate.write(folder, kConfig + "}");
  CHECK(error_of(folder).find("model: tensor lm_head.bias in ") == 0);
  std::filesystem::remove_all(folder);
}

TEST_CASE("rope_parameters and rope_scaling may stand together where they say the same") {
  const std::string file = "rope_test.json";
  const auto read = [&](const std::string& members) {
    std::ofstream(file) << kConfig + ", " + members + "}";
    return Config(file).rope_frequencies.back();
  };
  const double last = std::pow(100.0, -2.0 / 3.0);
  CHECK(read(R"("rope_parameters": {"rope_theta": 100.0, "rope_type": "default"})") ==
        doctest::Approx(last));
  CHECK(read(R"("rope_scaling": {"type": "linear", "factor": 2.0})") == doctest::Approx(last / 2));
  CHECK(read(R"("rope_scaling": {"type": "linear", "factor": 2},
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100})") ==
        doctest::Approx(last / 2));
  CHECK_THROWS_WITH(read(R"("rope_scaling": {"type": "linear", "factor": 2.0},
                            "rope_parameters": {"rope_type": "default"})"),
                    "config.json: rope_scaling is of type linear, rope_parameters of type default, "
                    "the same is expected");
  CHECK_THROWS_WITH(read(R"("rope_scaling": {"type": "linear", "factor": 2.0},
                            "rope_parameters": {"rope_type": "linear", "factor": 4.0})"),
                    "config.json: rope_scaling.factor is 2.0, expected 4.0 as in rope_parameters");
  CHECK_THROWS_WITH(read(R"("rope_parameters": {"rope_theta": 5.0})"),
                    "config.json: rope_parameters.rope_theta is 5.0, expected 100.0 as in "
                    "rope_theta");
  CHECK_THROWS_WITH(read(R"("rope_scaling": {"type": "linear"})"),
                    "config.json: rope_scaling.factor is missing, it must be there");
  CHECK_THROWS_WITH(read(R"("rope_scaling": {"type": "linear", "factor": 1e-310})"),
                    "config.json: rope type linear with rope_theta 100.000000 gives a frequency of "
                    "inf, finite is expected");
  std::filesystem::remove(file);
}

TEST_CASE("prompts without a token, and samples that cannot be scored, are errors") {
  const std::string folder = "prompts_test";
  const TinyModel tiny(true);
  tiny.write(folder, kConfig + R"(, "bos_token_id": null})");
  const auto tokenizer = [&](const std::string& processor) {
    std::ofstream(folder + "/tokenizer.json")
        << R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
               "added_tokens": [{"id": 1, "content": "<s>", "special": true}],
               "post_processor": )" +
               processor + R"(, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})";
  };
  tokenizer("null");
  const Engine engine(folder, 1);
  CHECK(encode_prompt(engine, "aa") == std::vector<std::int32_t>{0, 0});
  CHECK_THROWS_WITH(encode_prompt(engine, ""),
                    "prompt: 0 tokens, and the model has no bos; at least 1 is needed");
  auto contenders = make_contenders(engine, {"FullKV"}, {}, {}, 64, {});
  CHECK_THROWS_WITH(generate(engine, *contenders[0].store, {}, 1, {}, {}),
                    "generate: a prompt of 0 tokens, at least 1 is needed");
  CHECK_THROWS_WITH(engine.model.forward({}, 0, {}), "forward: 0 tokens, at least 1 is expected");
  // BOS as the post-processor says, and once.
  const std::string single =
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}},
          {"Sequence": {"id": "A"}}], "special_tokens": {"<s>": {"ids": [1]}}})";
  tokenizer(single);
  const Engine begun(folder, 1);
  CHECK(encode_prompt(begun, "a") == std::vector<std::int32_t>{1, 0});
  CHECK(encode_prompt(begun, "<s>a") == std::vector<std::int32_t>{1, 0});
  CHECK(encode_prompt(begun, "") == std::vector<std::int32_t>{1});
  tiny.write(folder, kConfig + R"(, "bos_token_id": 5})");
  CHECK_THROWS_WITH(Engine(folder, 1),
                    "tokenizer.json: post_processor puts id 1 before a text, config.json: "
                    "bos_token_id is 5");

  const std::string prefix = folder + "/set";
  const auto load = [&](const std::string& row) {
    std::ofstream(prefix + ".bin", std::ios::binary) << std::string(200, '\1');
    std::ofstream(prefix + ".json") << "[{\"task\": \"s1\", " + row + "}]";
    return load_samples(prefix, {}, 1);
  };
  CHECK(load(R"("offset": 98, "num_tokens": 2, "answer_ids": [5])")[0].prompt[1] == 257);
  CHECK_THROWS_WITH(load(R"("offset": 0, "num_tokens": 1, "answer_ids": [7, 8, 9])"),
                    "set.json: [0].num_tokens is 1, expected an integer from 2 to 2147483647");
  CHECK_THROWS_WITH(load(R"("offset": 0, "num_tokens": 0, "answer_ids": [5])"),
                    "set.json: [0].num_tokens is 0, expected an integer from 2 to 2147483647");
  CHECK_THROWS_WITH(load(R"("offset": 0, "num_tokens": 50, "answer_ids": [])"),
                    "set.json: [0].answer_ids is [], expected one id at least");
  CHECK_THROWS_WITH(load(R"("offset": 0, "num_tokens": 50, "answer_ids": [3, -4])"),
                    "set.json: [0].answer_ids[1] is -4, expected an integer from 0 to 2147483647");
  CHECK_THROWS_WITH(load(R"("offset": 99, "num_tokens": 2, "answer_ids": [3])"),
                    "evaluation set: a sample lies at tokens 99 to 101, the file has 100");
  CHECK_THROWS_WITH(load(R"("offset": -1, "num_tokens": 2, "answer_ids": [3])"),
                    "set.json: [0].offset is -1, expected an integer from 0 to 100");
  CHECK_THROWS_WITH(load_samples(prefix, {"s2"}, 1),
                    "evaluation set: set.json has 0 samples of task s2 among 1");
  const auto measure = [&](const Sample& sample) {
    measure_retrieval(engine, contenders, "set", {sample}, 32);
  };
  CHECK_THROWS_WITH(measure({"s1", {1, 2}, {999999}}),
                    "evaluation set: sample 0 of task s1: answer has id 999999, vocabulary has 40");
  CHECK_THROWS_WITH(measure({"s1", {1}, {3}}),
                    "evaluation set: sample 0 of task s1: a prompt of 1 tokens, at least 2 "
                    "expected");
  CHECK_THROWS_WITH(measure({"s1", {1, 2}, {}}),
                    "evaluation set: sample 0 of task s1: an answer of 0 tokens, at least 1 "
                    "expected");
  std::filesystem::remove_all(folder);
}
