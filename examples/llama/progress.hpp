// SPDX-License-Identifier: Apache-2.0
// A line on stderr that says how far a long job is; silent for short ones, one line at the end
// where it is no terminal.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace llama {

class Progress {
 public:
  Progress(std::string name, std::int64_t steps)
      : name_(std::move(name)), steps_(steps), terminal_(isatty(2) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (terminal_) std::fprintf(stderr, "\r\033[K");
    std::fprintf(stderr, "%s: %lld steps in %.1f s\n", name_.c_str(), static_cast<long long>(done_),
                 seconds());
  }
  void step(std::int64_t count = 1) {
    done_ += count;
    const double now = seconds();
    if (!terminal_ || now - shown_ < 0.2) return;
    shown_ = now;
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(kWidth * done_ / steps_);
    const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                            std::string(static_cast<std::size_t>(kWidth - filled), '.');
    const double left = now / static_cast<double>(done_) * static_cast<double>(steps_ - done_);
    std::fprintf(stderr, "\r\033[K%s [%s] %lld/%lld, %.0f s left", name_.c_str(), bar.c_str(),
                 static_cast<long long>(done_), static_cast<long long>(steps_), left);
    std::fflush(stderr);
  }

 private:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  std::string name_;
  std::int64_t steps_;
  std::int64_t done_ = 0;
  bool terminal_;
  double shown_ = 0.0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace llama
