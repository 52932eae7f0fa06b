// SPDX-License-Identifier: Apache-2.0
// The file is one of safetensors. Metadata: format, version, what the run is of (`job.NAME`), and
// its place. Tensors: for each form of the keys all sums (f64) and all sample rows (f32), in the
// order of each_part() below; of a combined metric, behind them those of Calibration::outputs().
#include "checkpoint.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lowrankkv/core/error.hpp"
#include "lowrankkv/io/safetensors.hpp"

namespace llama {
namespace {

namespace cal = lowrankkv::calibrate;
using lowrankkv::detail::fail;

constexpr const char* kFormat = "lowrankkv.calibration_checkpoint";
constexpr const char* kVersion = "1";

/// Everything that coding statistics have gathered, part by part. `Coding` is CodingStatistics,
/// constant or not.
template <class Archive, class Coding>
void each_part_of(Archive& archive, Coding& coding) {
  archive.metric(coding);
  archive.squares(coding);
  for (int index = 0; index < coding.shape().num_kv_heads; ++index) {
    auto& coded = coding.head(index);
    for (auto* moments : {&coded.key, &coded.value}) archive.moments(*moments);
    for (auto* sample : {&coded.key_sample, &coded.value_sample}) archive.sample(*sample);
    for (auto* metric : {&coded.key_metric, &coded.value_metric}) archive.matrix(*metric);
    if (!coding.gathers_sinks()) continue;
    auto& sink = coding.sink(index);
    for (auto* moments : {&sink.key, &sink.value}) archive.moments(*moments);
    for (auto* metric : {&sink.key_metric, &sink.value_metric}) archive.matrix(*metric);
  }
}

/// Everything that a layer has gathered. `Layer` is LayerMoments, constant or not.
template <class Archive, class Layer>
void each_part(Archive& archive, Layer& layer) {
  each_part_of(archive, layer.coding());
  archive.moments(layer.values());
  for (int index = 0; index < layer.shape().num_kv_heads; ++index) {
    auto& head = layer.head(index);
    for (auto* moments : {&head.query, &head.key, &head.value}) archive.moments(*moments);
    for (auto* sample : {&head.key_sample, &head.value_sample}) archive.sample(*sample);
  }
}

/// Writes parts behind each other.
struct PartWriter {
  std::vector<double> sums;
  std::vector<float> rows;

  void number(double value) { sums.push_back(value); }
  void matrix(const Eigen::MatrixXd& matrix) {
    sums.insert(sums.end(), matrix.data(), matrix.data() + matrix.size());
  }
  void moments(const cal::Moments& moments) {
    matrix(moments.second);
    sums.insert(sums.end(), moments.first.data(), moments.first.data() + moments.first.size());
    number(moments.count);
  }
  void sample(const cal::RowSample& sample) {
    number(static_cast<double>(sample.seen()));
    number(static_cast<double>(sample.values().size()));
    rows.insert(rows.end(), sample.values().begin(), sample.values().end());
  }
  void metric(const cal::CodingStatistics& coding) {
    number(coding.metric() == cal::CodingMetric::loss ? 1.0 : 0.0);
    number(coding.num_queries());
    number(coding.gathers_sinks() ? 1.0 : 0.0);
  }
  void squares(const cal::CodingStatistics& coding) { sample(coding.stream_squares()); }
};

/// More rows than any calibration has.
constexpr double kMostRows = 9007199254740992.0;

/// Reads them.
class PartReader {
 public:
  PartReader(std::string name, std::vector<double> sums, std::vector<float> rows)
      : name_(std::move(name)), sums_(std::move(sums)), rows_(std::move(rows)) {}

  double number() {
    if (at_ == sums_.size())
      fail<lowrankkv::FormatError>(name_, ": ", sums_.size(), " sums, more expected");
    if (!std::isfinite(sums_[at_]))
      fail<lowrankkv::FormatError>(name_, ": sum ", at_, " is ", sums_[at_], ", finite expected");
    return sums_[at_++];
  }
  /// A number of rows.
  double count() {
    const double rows = number();
    if (!(rows >= 0.0 && rows <= kMostRows))
      fail<lowrankkv::FormatError>(name_, ": sum ", at_ - 1, " is of ", rows, " rows, 0 to ",
                                   kMostRows, " expected");
    return rows;
  }
  bool flag() {
    const double value = number();
    if (value != 0.0 && value != 1.0)
      fail<lowrankkv::FormatError>(name_, ": sum ", at_ - 1, " is ", value, ", 0 or 1 expected");
    return value != 0.0;
  }
  template <class Matrix>
  void matrix(Matrix& matrix) {
    for (Eigen::Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = number();
  }
  void moments(cal::Moments& moments) {
    matrix(moments.second);
    matrix(moments.first);
    moments.count = count();
  }
  void sample(cal::RowSample& sample) {
    const double seen = number(), size = number();
    const double left = static_cast<double>(rows_.size() - at_row_);
    if (!(size >= 0.0 && size <= left && seen >= 0.0 && seen <= kMostRows))
      fail<lowrankkv::FormatError>(name_, ": a sample of ", size, " numbers of ", seen, " rows; ",
                                   left, " numbers are left, and 0 to ", kMostRows,
                                   " rows expected");
    const auto from = rows_.begin() + static_cast<std::ptrdiff_t>(at_row_);
    at_row_ += static_cast<std::size_t>(size);
    const std::vector<float> rows(from, rows_.begin() + static_cast<std::ptrdiff_t>(at_row_));
    for (const float value : rows) {
      if (!std::isfinite(value))
        fail<lowrankkv::FormatError>(name_, ": a row's number is ", value, ", finite expected");
    }
    sample =
        cal::RowSample(sample.head_dim(), sample.capacity(), rows, static_cast<std::int64_t>(seen));
  }
  void metric(cal::CodingStatistics& coding) {
    coding.set_metric(flag() ? cal::CodingMetric::loss : cal::CodingMetric::output);
    coding.set_num_queries(count());
    if (flag()) coding.gather_sinks();
  }
  void squares(cal::CodingStatistics& coding) {
    cal::RowSample squares = coding.stream_squares();
    sample(squares);
    coding.set_stream_squares(std::move(squares));
  }
  void end() const {
    if (at_ != sums_.size() || at_row_ != rows_.size())
      fail<lowrankkv::FormatError>(name_, ": ", sums_.size(), " sums and ", rows_.size(),
                                   " numbers of rows, ", at_, " and ", at_row_, " expected");
  }

 private:
  std::string name_;
  std::vector<double> sums_;
  std::vector<float> rows_;
  std::size_t at_ = 0, at_row_ = 0;
};

constexpr std::pair<lowrankkv::Rope, const char*> kForms[] = {{lowrankkv::Rope::post, "post_rope"},
                                                              {lowrankkv::Rope::pre, "pre_rope"}};

/// The state of random numbers.
std::string text_of(const std::mt19937_64& random) {
  std::ostringstream stream;
  stream << random;
  return stream.str();
}

}  // namespace

lowrankkv::io::SafetensorsWriter Checkpoint::written(const CalibrationPlace& place,
                                                     const Calibration& calibration) const {
  lowrankkv::io::SafetensorsWriter writer;
  writer.set_metadata("format", kFormat);
  writer.set_metadata("version", kVersion);
  for (const auto& [name, value] : job_) writer.set_metadata("job." + name, value);
  writer.set_metadata("pass", place.gradients ? "gradients" : "moments");
  writer.set_metadata("done", std::to_string(place.done));
  writer.set_metadata("half", place.half ? "1" : "0");
  writer.set_metadata("random", text_of(place.random));
  for (const auto& [form, name] : kForms) {
    if (calibration.of(form).empty()) continue;
    PartWriter parts;
    for (const cal::LayerMoments& layer : calibration.of(form)) each_part(parts, layer);
    for (const cal::CodingStatistics& coding : calibration.outputs(form))
      each_part_of(parts, coding);
    writer.add(std::string(name) + ".sums", {static_cast<std::int64_t>(parts.sums.size())},
               parts.sums);
    writer.add(std::string(name) + ".rows", {static_cast<std::int64_t>(parts.rows.size())},
               parts.rows);
  }
  return writer;
}

void write_whole(const lowrankkv::io::SafetensorsWriter& file, const std::string& path) {
  const std::string beside = path + ".part";
  file.write(beside);
  std::error_code error;
  std::filesystem::rename(beside, path, error);
  if (error)
    throw std::runtime_error("checkpoint: cannot rename " + beside + " to " + path + ": " +
                             error.message());
}

std::vector<std::byte> Checkpoint::bytes(const CalibrationPlace& place,
                                         const Calibration& calibration) const {
  return written(place, calibration).bytes();
}

void Checkpoint::save(const CalibrationPlace& place, const Calibration& calibration, bool always) {
  if (!always && std::chrono::duration<double>(Clock::now() - saved_).count() < pause_) return;
  write_whole(written(place, calibration), path_);
  saved_ = Clock::now();
  if (on_saved) on_saved();
}

bool Checkpoint::restore(CalibrationPlace& place, Calibration& calibration) const {
  return std::filesystem::exists(path_) &&
         read(lowrankkv::io::Safetensors::read(path_), place, calibration, false);
}

bool Checkpoint::restore_gradients(CalibrationPlace& place, Calibration& calibration) const {
  return std::filesystem::exists(path_) &&
         read(lowrankkv::io::Safetensors::read(path_), place, calibration, true);
}

bool Checkpoint::read(const lowrankkv::io::Safetensors& file, CalibrationPlace& place,
                      Calibration& calibration, bool of_gradients) const {
  const auto metadata = [&](const std::string& key) {
    const auto entry = file.metadata().find(key);
    return entry == file.metadata().end() ? std::string("missing") : entry->second;
  };
  if (metadata("format") != kFormat || metadata("version") != kVersion)
    fail<lowrankkv::FormatError>("checkpoint ", path_, ": format ", metadata("format"), " version ",
                                 metadata("version"), ", expected ", kFormat, " version ",
                                 kVersion);
  std::set<std::string> names;
  for (const auto& [name, value] : job_) names.insert(name);
  for (const auto& [key, value] : file.metadata()) {
    if (key.starts_with("job.")) names.insert(key.substr(4));
  }
  for (const std::string& name : names) {
    const auto own = job_.find(name);
    const std::string wanted = own == job_.end() ? "missing" : own->second;
    if (metadata("job." + name) != wanted)
      fail<lowrankkv::ValueError>("checkpoint ", path_, ": ", name, " ", metadata("job." + name),
                                  ", of this run ", wanted, "; remove the file to begin again");
  }
  const auto one_of = [&](const char* key, const char* no, const char* yes) {
    const std::string value = metadata(key);
    if (value != no && value != yes)
      fail<lowrankkv::FormatError>("checkpoint ", path_, ": ", key, " is ", value, ", ", no, " or ",
                                   yes, " expected");
    return value == yes;
  };
  CalibrationPlace stored;
  stored.gradients = one_of("pass", "moments", "gradients");
  stored.half = one_of("half", "0", "1");
  const std::string done = metadata("done"), random = metadata("random");
  const char* const end = done.data() + done.size();
  const auto number = std::from_chars(done.data(), end, stored.done);
  if (number.ec != std::errc() || number.ptr != end || stored.done < 0)
    fail<lowrankkv::FormatError>("checkpoint ", path_, ": done is ", done,
                                 ", a number of tokens or windows expected");
  std::istringstream(random) >> stored.random;
  if (text_of(stored.random) != random)
    fail<lowrankkv::FormatError>("checkpoint ", path_, ": random is '", random.substr(0, 40),
                                 "', a state of random numbers expected, which begins '",
                                 text_of(stored.random).substr(0, 40), "' when it is read");
  if (of_gradients && !stored.gradients) return false;
  for (const auto& [form, name] : kForms) {
    if (calibration.of(form).empty()) continue;
    const std::string sums = std::string(name) + ".sums", rows = std::string(name) + ".rows";
    PartReader parts("checkpoint " + path_ + ": " + name,
                     file.values<double>(sums, file.info(sums).shape),
                     file.values<float>(rows, file.info(rows).shape));
    for (cal::LayerMoments& layer : calibration.of(form)) each_part(parts, layer);
    for (cal::CodingStatistics& coding : calibration.outputs(form)) each_part_of(parts, coding);
    if (stored.gradients == of_gradients) parts.end();  // else what that pass has besides
  }
  place = stored;
  return true;
}

void Checkpoint::remove() const { std::filesystem::remove(path_); }

}  // namespace llama
