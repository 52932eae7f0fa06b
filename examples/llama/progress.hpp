// SPDX-License-Identifier: Apache-2.0
// Says on stderr how far a long job is. On a terminal: one line that changes. Elsewhere: a line
// whenever 10 s and a twentieth of the job have passed since the last one, or a minute. One line at
// the end in any case.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace llama {

class Progress {
 public:
  /// @param pause  seconds between lines where `out` is no terminal
  Progress(std::string name, std::int64_t steps, std::FILE* out = stderr, double pause = 10.0)
      : name_(std::move(name)),
        steps_(steps),
        out_(out),
        pause_(pause),
        terminal_(isatty(fileno(out)) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (terminal_) std::fprintf(out_, "\r\033[K");
    std::fprintf(out_, "%s: %lld steps in %.1f s\n", name_.c_str(),
                 static_cast<long long>(done_ - before_), seconds());
  }
  /// So many steps were done before this job began.
  void resume(std::int64_t done) { done_ = before_ = shown_done_ = done; }
  void step(std::int64_t count = 1) {
    done_ += count;
    const double now = seconds();
    if (!due(now - shown_)) return;
    shown_ = now;
    shown_done_ = done_;
    const double rate = static_cast<double>(done_ - before_) / now;
    const double left = static_cast<double>(steps_ - done_) / rate;
    if (terminal_) {
      constexpr int kWidth = 30;
      const int filled = static_cast<int>(kWidth * done_ / steps_);
      const std::string bar = std::string(static_cast<std::size_t>(filled), '#') +
                              std::string(static_cast<std::size_t>(kWidth - filled), '.');
      std::fprintf(out_, "\r\033[K%s [%s] %lld/%lld, %.4g a second, %.0f s left", name_.c_str(),
                   bar.c_str(), static_cast<long long>(done_), static_cast<long long>(steps_), rate,
                   left);
    } else {
      std::fprintf(out_, "%s: %lld of %lld steps, %.4g a second, %.0f s left\n", name_.c_str(),
                   static_cast<long long>(done_), static_cast<long long>(steps_), rate, left);
    }
    std::fflush(out_);
  }

 private:
  /// Whether to say something `passed` seconds after the last time.
  bool due(double passed) const {
    if (terminal_) return passed >= 0.2;
    if (done_ >= steps_ || passed < pause_) return false;
    return 20 * (done_ - shown_done_) >= steps_ || passed >= 6.0 * pause_;
  }
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  std::string name_;
  std::int64_t steps_;
  std::int64_t done_ = 0;
  std::int64_t before_ = 0;
  std::FILE* out_;
  double pause_;
  bool terminal_;
  double shown_ = 0.0;
  std::int64_t shown_done_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace llama
