// SPDX-License-Identifier: Apache-2.0
// What a long job says where nobody watches a terminal.
#include "progress.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdio>
#include <string>

namespace {

/// What 100 steps write to a file if lines may follow each other after `pause` seconds; `before` of
/// them were done by an earlier job.
std::string written(double pause, int before = 0) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  {
    llama::Progress progress("calibrate", 100, file, pause);
    progress.resume(before);
    for (int step = before; step < 100; ++step) progress.step();
  }
  std::rewind(file);
  std::string text(8192, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

std::ptrdiff_t lines(const std::string& text) {
  std::ptrdiff_t count = 0;
  for (const char byte : text) count += byte == '\n' ? 1 : 0;
  return count;
}

}  // namespace

TEST_CASE("a job that takes long says how far it is, one that does not says only its end") {
  const std::string quick = written(1e6);
  CHECK(lines(quick) == 1);
  CHECK(quick.starts_with("calibrate: 100 steps in "));
  const std::string slow = written(1e-12);  // a minute, six times the pause, passes at each step
  CHECK(lines(slow) == 100);
  CHECK(slow.starts_with("calibrate: 1 of 100 steps, "));
  CHECK(slow.find("calibrate: 99 of 100 steps, ") != std::string::npos);
  CHECK(slow.find('\r') == std::string::npos);
}

TEST_CASE("every line has the rate and the time that is left, of this job's own steps") {
  double rate = 0.0, left = -1.0;
  int done = 0;
  for (const int before : {0, 90}) {
    const std::string text = written(1e-12, before);
    const std::string line = text.substr(text.find("calibrate: 99 of 100"));
    REQUIRE(std::sscanf(line.c_str(), "calibrate: %d of 100 steps, %lf a second, %lf s left", &done,
                        &rate, &left) == 3);
    CHECK(done == 99);
    CHECK(rate > 0.0);
    CHECK(left >= 0.0);
    CHECK(lines(text) == 100 - before);
  }
  CHECK(written(1e6, 90).starts_with("calibrate: 10 steps in "));
}
