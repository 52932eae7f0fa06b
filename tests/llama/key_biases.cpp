// SPDX-License-Identifier: Apache-2.0
// A model whose keys have large biases, as Qwen2's: nano with a constant in the channels that RoPE
// hardly rotates. Attention is that of nano, since softmax does not see what all logits share.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "evaluate.hpp"
#include "lowrankkv/io/safetensors.hpp"

using namespace llama;

namespace {

const std::string kData = LOWRANKKV_EXAMPLE_DATA;

/// Writes nano with `bias` in the channels of each key head that rotate slowest: the first of each
/// of four pairs.
void write_biased_nano(const std::filesystem::path& folder, float bias) {
  std::filesystem::create_directories(folder);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    std::filesystem::copy_file(kData + "/nano/" + name, folder / name,
                               std::filesystem::copy_options::overwrite_existing);
  auto config = nlohmann::json::parse(std::ifstream(kData + "/nano/config.json"));
  config["attention_bias"] = true;
  std::ofstream(folder / "config.json") << config.dump();

  const auto weights = lowrankkv::io::Safetensors::read(kData + "/nano/model.safetensors");
  lowrankkv::io::SafetensorsWriter writer;
  for (const auto& [name, info] : weights.tensors())
    writer.add(name, info.shape, weights.values<float>(name, info.shape));
  const std::int64_t hidden = config.at("hidden_size"), dim = config.at("head_dim"),
                     query = config.at("num_attention_heads").get<std::int64_t>() * dim,
                     kv = config.at("num_key_value_heads").get<std::int64_t>() * dim;
  for (int layer = 0; layer < config.at("num_hidden_layers").get<int>(); ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
    const auto zeros = [](std::int64_t count) {
      return std::vector<float>(static_cast<std::size_t>(count), 0.0F);
    };
    std::vector<float> keys = zeros(kv);
    for (std::int64_t head = 0; head < kv; head += dim) {
      for (std::int64_t i = 1; i <= 4; ++i)
        keys[static_cast<std::size_t>(head + dim / 2 - i)] = i % 2 == 0 ? bias : -bias;
    }
    writer.add(prefix + "q_proj.bias", {query}, zeros(query));
    writer.add(prefix + "k_proj.bias", {kv}, keys);
    writer.add(prefix + "v_proj.bias", {kv}, zeros(kv));
    writer.add(prefix + "o_proj.bias", {hidden}, zeros(hidden));
  }
  writer.write((folder / "model.safetensors").string());
}

/// Bits per byte of prose: FullKV, StarKVStatic, SubSpaceG.
std::vector<double> bits_per_byte(const std::string& folder, bool centred) {
  const Engine engine(folder, 2);
  const Calibration calibration =
      calibrate(engine, read_text(kData + "/text/calibration_prose.txt"), 8192, 2048);
  auto contenders = make_contenders(engine, {"FullKV", "StarKVStatic", "SubSpaceG"}, {0.4},
                                    {.context = 1024, .centred = centred}, 1100, calibration);
  measure_bits_per_byte(engine, contenders, "prose", read_text(kData + "/text/prose.txt"), 2);
  std::vector<double> bits;
  for (const Contender& contender : contenders)
    bits.push_back(contender.row.bits_per_byte.at("prose"));
  return bits;
}

}  // namespace

TEST_CASE("large biases of keys cost codes nothing once means are subtracted") {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / "lowrankkv_biased_nano";
  write_biased_nano(folder, 100.0F);
  const std::vector<double> plain = bits_per_byte(kData + "/nano", true),
                            biased = bits_per_byte(folder.string(), true),
                            paper = bits_per_byte(folder.string(), false);
  std::filesystem::remove_all(folder);
  // Biased channels rotate a little, and f16 rounds keys of 100 to 1/32.
  CHECK(biased[0] == doctest::Approx(plain[0]).epsilon(5e-3));
  CHECK(biased[1] - biased[0] < plain[1] - plain[0] + 0.01);
  CHECK(biased[2] - biased[0] < plain[2] - plain[0] + 0.01);
  CHECK(paper[1] > biased[1] + 0.1);
  CHECK(paper[2] > biased[2] + 0.01);
}
