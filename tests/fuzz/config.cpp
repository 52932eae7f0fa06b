// SPDX-License-Identifier: Apache-2.0
// config.json: an input is its text.
#include <cmath>

#include "json_file.hpp"
#include "json_target.hpp"
#include "model.hpp"

namespace fuzz {

bool accepts(Input input) {
  return read_engine_file([&] {
    const llama::Config config(
        llama::JsonValue("config.json", llama::parse_json(text_of(input), "config.json", "input")));
    for (const int count :
         {config.hidden_size, config.intermediate_size, config.num_layers, config.num_qo_heads,
          config.num_kv_heads, config.head_dim, config.vocabulary_size, config.max_positions})
      require(count > 0, "counts are positive");
    require(config.num_qo_heads % config.num_kv_heads == 0, "groups of heads are even");
    require(config.rms_norm_eps > 0.0F && std::isfinite(config.rms_norm_eps),
            "rms_norm_eps is a number above 0 as f32");
    require(config.bos >= -1 && config.bos < config.vocabulary_size, "bos is in the vocabulary");
    for (const std::int32_t eos : config.eos)
      require(eos >= 0 && eos < config.vocabulary_size, "eos is in the vocabulary");
    require(2 * config.rope_frequencies.size() == static_cast<std::size_t>(config.head_dim),
            "a frequency for every two channels");
    require(config.rotary_layers.empty() ||
                config.rotary_layers.size() == static_cast<std::size_t>(config.num_layers),
            "every layer rotates or does not");
    // What a cache with pre-RoPE keys checks of them must hold.
    const lowrankkv::RopeConfig rope = config.rope(lowrankkv::Rope::pre);
    static_cast<void>(lowrankkv::rope_frequencies(rope, config.head_dim));
  });
}

std::vector<Seed> seeds() {
  constexpr const char* kCounts =
      R"("hidden_size":8,"intermediate_size":16,"num_hidden_layers":2,"num_attention_heads":2,"vocab_size":32,"rms_norm_eps":1e-5)";
  const auto with = [&](const char* more) {
    return bytes_of("{" + std::string(kCounts) + more + "}");
  };
  return {
      {"plain", with(R"(,"model_type":"llama")")},
      {"llama3",
       with(
           R"(,"architectures":["LlamaForCausalLM"],"num_key_value_heads":1,"head_dim":4,"max_position_embeddings":4096,"rope_theta":500000.0,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192})")},
      {"both_ropes",
       with(
           R"(,"model_type":"llama","hidden_act":"silu","tie_word_embeddings":true,"attention_bias":true,"mlp_bias":true,"bos_token_id":1,"eos_token_id":[2,3],"rope_parameters":{"rope_type":"linear","factor":2.0,"rope_theta":10000,"partial_rotary_factor":1},"rope_scaling":{"type":"linear","factor":2.0})")},
      {"qwen3",
       with(
           R"(,"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","num_key_value_heads":1,"head_dim":16,"attention_bias":false,"use_sliding_window":false,"sliding_window":null,"max_window_layers":2,"layer_types":["full_attention","full_attention"],"rope_theta":1000000,"rope_scaling":null)")},
      {"smollm3",
       with(
           R"(,"model_type":"smollm3","num_key_value_heads":2,"no_rope_layers":[1,0],"no_rope_layer_interval":2)")},
      {"mistral", with(R"(,"model_type":"mistral","sliding_window":null)")},
      {"nulls",
       with(
           R"(,"model_type":"llama","quantization_config":null,"rope_scaling":null,"bos_token_id":null,"eos_token_id":0)")},
  };
}

}  // namespace fuzz
