// SPDX-License-Identifier: Apache-2.0
// A calibration that was stopped goes on where it was: its sums, its samples and its place, in a
// file that is written between two windows.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kv_store.hpp"
#include "lowrankkv/io/safetensors.hpp"

namespace llama {

/// Where a calibration stands between two windows.
struct CalibrationPlace {
  bool gradients = false;  ///< the pass: of gradients, or of moments before it
  std::int64_t done = 0;   ///< tokens of the pass of moments, or windows of that of gradients
  bool half = false;       ///< of the pass of moments: its next window is half as long
  std::mt19937_64 random{1};
};

/// Writes a file beside its name and renames it, so that there is a whole one at any time. Throws
/// lowrankkv::FormatError or std::runtime_error if that fails.
void write_whole(const lowrankkv::io::SafetensorsWriter& file, const std::string& path);

/// The file of a calibration. It is written beside its name and renamed, so that there is a whole
/// one at any time.
class Checkpoint {
 public:
  /// What a run is of, by name: a file of another run is refused.
  using Job = std::map<std::string, std::string>;

  /// @param pause  seconds between two files at least
  Checkpoint(std::string path, Job job, double pause = 30.0)
      : path_(std::move(path)), job_(std::move(job)), pause_(pause) {}

  /// Reads the file into a calibration of the same shape and forms, without anything in it yet.
  /// False, and nothing changed, if there is no file. Throws lowrankkv::ValueError, which names
  /// both values, if it is of another run, and lowrankkv::FormatError or ShapeError if it is no
  /// such file; what the calibration holds is then undefined.
  bool restore(CalibrationPlace& place, Calibration& calibration) const;
  /// The same, but a file of the pass of moments counts as none.
  bool restore_gradients(CalibrationPlace& place, Calibration& calibration) const;
  /// What restore() does with a file that is in memory, restore_gradients() if `of_gradients`.
  /// False, and nothing changed, if it counts as none. Throws as they do.
  bool read(const lowrankkv::io::Safetensors& file, CalibrationPlace& place,
            Calibration& calibration, bool of_gradients) const;
  /// The file that save() writes.
  std::vector<std::byte> bytes(const CalibrationPlace& place, const Calibration& calibration) const;
  /// Writes the file, but only if the pause since the last one has passed, unless `always`. Throws
  /// std::runtime_error if it cannot be written. Bytes: those of the bundles, and a few thousand.
  void save(const CalibrationPlace& place, const Calibration& calibration, bool always = false);
  /// Removes the file: the run is done.
  void remove() const;

  /// Called when a file has been written.
  std::function<void()> on_saved;

 private:
  lowrankkv::io::SafetensorsWriter written(const CalibrationPlace& place,
                                           const Calibration& calibration) const;

  using Clock = std::chrono::steady_clock;
  std::string path_;
  Job job_;
  double pause_;
  Clock::time_point saved_ = Clock::now();
};

}  // namespace llama
