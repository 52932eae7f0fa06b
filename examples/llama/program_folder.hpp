// SPDX-License-Identifier: Apache-2.0
// Files that the build puts beside a program: both may move together.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>

namespace llama {

/// Where the running program is; empty if the system does not say.
inline std::filesystem::path this_program() {
  std::error_code unknown;
  return std::filesystem::read_symlink("/proc/self/exe", unknown);
}

/// `name`, a file or a folder, in the folder of `program`.
/// @param purpose  what the error says needs it: "synthesize: no words"
/// @param instead  what the error says to do: the option that names another
/// @throws std::runtime_error if it is not there
inline std::string beside(const std::filesystem::path& program, const std::string& name,
                          const std::string& purpose, const std::string& instead) {
  const std::filesystem::path path = program.parent_path() / name;
  std::error_code unreadable;
  if (!program.empty() && std::filesystem::exists(path, unreadable)) return path.string();
  throw std::runtime_error(purpose + " at " + path.string() + "; " + instead);
}

}  // namespace llama
