// SPDX-License-Identifier: Apache-2.0
// A target without libFuzzer, for every compiler.
//
//   replay_TARGET FOLDER           reads every file of the folder. Files called accepted_... must
//   be
//                                  accepted, refused_... refused, others either of both. So must
//                                  the target's seeds, and what simple damage makes of them
//   replay_TARGET --write FOLDER   writes the target's seeds to the folder, as accepted_...
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz.hpp"

#ifndef LOWRANKKV_FUZZ_TRIALS
#define LOWRANKKV_FUZZ_TRIALS 2000  // damaged seeds
#endif

namespace {

fuzz::Bytes read(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)),
                         std::istreambuf_iterator<char>());
  if (!stream) fuzz::broken("cannot read " + path.string());
  return fuzz::bytes_of(text);
}

void write(const std::filesystem::path& path, const fuzz::Bytes& bytes) {
  std::ofstream stream(path, std::ios::binary);
  stream.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  stream.flush();
  if (!stream) fuzz::broken("cannot write " + path.string());
}

/// Inputs near the seeds, the same ones each time. Returns how many of them were accepted.
int try_damaged(const std::vector<fuzz::Seed>& seeds, int trials) {
  std::mt19937_64 random(1);
  int accepted = 0;
  for (int trial = 0; trial < trials; ++trial) {
    fuzz::Bytes bytes = seeds[random() % seeds.size()].bytes;
    for (std::uint64_t change = 0; change <= random() % 3; ++change)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    if (random() % 8 == 0) bytes.resize(random() % bytes.size());
    accepted += fuzz::accepts(bytes) ? 1 : 0;
  }
  return accepted;
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  const std::vector<fuzz::Seed> seeds = fuzz::seeds();
  if (words.size() == 2 && words[0] == "--write") {
    for (const fuzz::Seed& seed : seeds)
      write(std::filesystem::path(words[1]) / ("accepted_" + seed.name), seed.bytes);
    return 0;
  }
  if (words.size() != 1) fuzz::broken("usage: replay FOLDER, or replay --write FOLDER");
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(words[0]))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  int accepted = 0;
  for (const std::filesystem::path& path : paths) {
    const std::string name = path.filename().string();
    std::fprintf(stderr, "%s\n", name.c_str());  // the last line tells which input was fatal
    const bool accepts = fuzz::accepts(read(path));
    accepted += accepts ? 1 : 0;
    if (accepts ? name.starts_with("refused_") : name.starts_with("accepted_"))
      fuzz::broken(path.string() + (accepts ? " was accepted" : " was refused"));
  }
  if (accepted < static_cast<int>(seeds.size()))
    fuzz::broken(words[0] + " has " + std::to_string(accepted) + " inputs that are accepted, " +
                 std::to_string(seeds.size()) + " seeds expected");
  for (const fuzz::Seed& seed : seeds) {
    if (!fuzz::accepts(seed.bytes)) fuzz::broken("the seed " + seed.name + " was refused");
  }
  constexpr int kTrials = LOWRANKKV_FUZZ_TRIALS;
  const int damaged = try_damaged(seeds, kTrials);
  std::printf("%zu inputs, %d accepted; %d damaged seeds, %d accepted\n", paths.size(), accepted,
              kTrials, damaged);
  if (damaged == kTrials) fuzz::broken("no damaged seed was refused");
}
