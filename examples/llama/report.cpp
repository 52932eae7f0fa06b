// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

namespace llama {
namespace {

std::ofstream open(const std::string& path) {
  std::ofstream stream(path);
  if (!stream) throw std::runtime_error("cannot write " + path);
  return stream;
}

template <class Map>
std::set<std::string> names(const std::vector<Row>& rows, Map Row::*member) {
  std::set<std::string> all;
  for (const Row& row : rows) {
    for (const auto& [name, value] : row.*member) all.insert(name);
  }
  return all;
}

template <class Map>
std::string cell(const Map& map, const std::string& name, double scale, int digits) {
  const auto entry = map.find(name);
  if (entry == map.end()) return "";
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, scale * entry->second);
  return text;
}

/// "8": bytes were 8 % above the ratio; "-": not above; nothing without a ratio.
std::string excess_cell(const Row& row) {
  if (row.knob.empty() || row.largest_ratio_measured == 0.0) return "";
  char text[32];
  std::snprintf(text, sizeof text, "%.0f", 100.0 * row.excess());
  return std::string(text) == "0" ? "-" : text;
}

/// How much more bits per byte of a text a row takes than FullKV among `rows`, relative to those.
std::optional<double> relative_rise(const Row& row, const std::string& text,
                                    const std::vector<Row>& rows) {
  const auto full =
      std::find_if(rows.begin(), rows.end(), [](const Row& of) { return of.method == "FullKV"; });
  if (full == rows.end()) return {};
  const auto base = full->bits_per_byte.find(text), own = row.bits_per_byte.find(text);
  if (base == full->bits_per_byte.end() || own == row.bits_per_byte.end()) return {};
  return own->second / base->second - 1.0;
}

std::string rise_cell(std::optional<double> rise) {
  if (!rise) return "";
  char text[32];
  std::snprintf(text, sizeof text, "%+.2f", 100.0 * *rise);
  return text;
}

int width_of(const std::string& name, std::size_t least, std::size_t more) {
  return static_cast<int>(std::max(least, name.size() + more));
}

nlohmann::ordered_json json_of(const Divergence& divergence) {
  return {{"mean", divergence.mean},
          {"median", divergence.median},
          {"p999", divergence.p999},
          {"top1", divergence.top1},
          {"positions", divergence.positions}};
}

void print_divergence_line(const Row& row, const std::string& text, const Divergence& divergence,
                           const std::string& bits, std::optional<double> rise) {
  std::printf("%-16s %5.2f %7.3f %6s  %-12s %10.4g %10.4g %10.4g %7.2f %8s %7s\n",
              row.method.c_str(), row.ratio, row.text_ratio_measured, excess_cell(row).c_str(),
              text.c_str(), divergence.mean, divergence.median, divergence.p999,
              100.0 * divergence.top1, bits.c_str(), rise_cell(rise).c_str());
}

void write_divergence(std::ofstream& out, const std::map<std::string, Divergence>& map,
                      const std::string& name) {
  const auto entry = map.find(name);
  if (entry == map.end()) {
    out << ",,,,,";
    return;
  }
  const Divergence& own = entry->second;
  out << ',' << own.mean << ',' << own.median << ',' << own.p999 << ',' << own.top1 << ','
      << own.positions;
}

}  // namespace

std::optional<double> mean_relative_rise(const Row& row, const std::vector<Row>& rows) {
  double sum = 0.0;
  for (const auto& [text, bits] : row.bits_per_byte) {
    const auto rise = relative_rise(row, text, rows);
    if (!rise) return {};
    sum += *rise;
  }
  if (row.bits_per_byte.empty()) return {};
  return sum / static_cast<double>(row.bits_per_byte.size());
}

void print_divergence(const std::vector<Row>& rows) {
  std::printf("%-16s %5s %7s %6s  %-12s %10s %10s %10s %7s %8s %7s\n", "method", "ratio", "x f16",
              "over %", "text", "KL mean", "median", "99.9 %", "top-1 %", "bpb", "rise %");
  for (const Row& row : rows) {
    for (const auto& [text, divergence] : row.divergence)
      print_divergence_line(row, text, divergence, cell(row.bits_per_byte, text, 1.0, 4),
                            relative_rise(row, text, rows));
    if (row.divergence.size() > 1)
      print_divergence_line(row, "all", row.all_texts, "", mean_relative_rise(row, rows));
  }
}

std::vector<std::string> excess_warnings(const std::vector<Row>& rows) {
  std::vector<std::string> lines;
  for (const Row& row : rows) {
    if (row.excess() <= 0.05) continue;
    char numbers[160];
    std::snprintf(numbers, sizeof numbers,
                  "%g asked for, %.3f of the bytes of f16 used at %lld tokens, %.0f %% more",
                  row.ratio, row.largest_ratio_measured,
                  static_cast<long long>(row.largest_context), 100.0 * row.excess());
    lines.push_back("warning: " + row.method + " (ratio: " + row.knob + "): " + numbers);
  }
  if (!lines.empty())
    lines.emplace_back(
        "Rows at full rank, rows that wait for a flush and unfilled pages are a larger part of "
        "short contexts. --context says at how many tokens a ratio in bytes is met.");
  return lines;
}

void print_table(const std::vector<Row>& rows) {
  const auto texts = names(rows, &Row::bits_per_byte);
  const auto tasks = names(rows, &Row::exact_match);
  const auto matches = names(rows, &Row::string_match);
  bool speed = false, paired = false, rise = false;
  for (const Row& row : rows) {
    rise = rise || (row.method != "FullKV" && mean_relative_rise(row, rows));
    speed = speed || row.decode.tokens_per_second > 0.0;
    paired = paired || row.decode.times_full > 0.0;
  }
  std::printf("%-16s %5s %9s %7s %6s", "method", "ratio", "bytes/tok", "x f16", "over %");
  if (!texts.empty() && !tasks.empty()) std::printf(" %7s", "text x");
  for (const auto& name : texts) std::printf(" %*s", width_of(name, 7, 4), ("bpb " + name).c_str());
  if (rise) std::printf(" %7s", "rise %");
  for (const auto& name : tasks) std::printf(" %5s", name.c_str());
  if (!tasks.empty()) std::printf(" %6s", "mean %");
  for (const auto& name : matches) std::printf(" %*s", width_of(name, 5, 0), name.c_str());
  if (!matches.empty()) std::printf(" %6s", "mean %");
  const bool lengths = speed && texts.empty() && tasks.empty();  // else one that the caller names
  if (lengths) std::printf(" %7s", "prompt");
  if (speed) std::printf(" %10s %9s", "prefill/s", "decode/s");
  if (paired) std::printf(" %9s %8s", "prefill x", "decode x");
  std::printf("\n");
  for (const Row& row : rows) {
    std::printf("%-16s %5.2f %9.1f %7.3f %6s", row.method.c_str(), row.ratio, row.bytes_per_token,
                row.ratio_measured, excess_cell(row).c_str());
    if (!texts.empty() && !tasks.empty()) std::printf(" %7.3f", row.text_ratio_measured);
    for (const auto& name : texts)
      std::printf(" %*s", width_of(name, 7, 4), cell(row.bits_per_byte, name, 1.0, 4).c_str());
    if (rise) std::printf(" %7s", rise_cell(mean_relative_rise(row, rows)).c_str());
    for (const auto& name : tasks)
      std::printf(" %5s", cell(row.exact_match, name, 100.0, 0).c_str());
    if (!tasks.empty()) std::printf(" %6.1f", 100.0 * row.mean_exact_match());
    for (const auto& name : matches)
      std::printf(" %*s", width_of(name, 5, 0), cell(row.string_match, name, 100.0, 1).c_str());
    if (!matches.empty()) std::printf(" %6.1f", 100.0 * row.mean_string_match());
    if (lengths) std::printf(" %7lld", static_cast<long long>(row.prompt_tokens));
    if (speed)
      std::printf(" %10.0f %9.1f", row.prefill.tokens_per_second, row.decode.tokens_per_second);
    if (paired) std::printf(" %9.2f %8.2f", row.prefill.times_full, row.decode.times_full);
    std::printf("\n");
  }
}

void write_json(const std::string& path, const std::vector<Row>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    nlohmann::ordered_json object;
    object["method"] = row.method;
    object["ratio"] = row.ratio;
    object["bytes_per_token"] = row.bytes_per_token;
    object["ratio_measured"] = row.ratio_measured;
    object["context"] = row.context;
    if (!row.knob.empty() && row.largest_ratio_measured > 0.0) {
      object["largest_ratio_measured"] = row.largest_ratio_measured;
      object["largest_context"] = row.largest_context;
      object["over_ratio"] = row.excess();
    }
    if (!row.bits_per_byte.empty()) {
      object["bits_per_byte"] = row.bits_per_byte;
      object["text_ratio_measured"] = row.text_ratio_measured;
      object["window"] = {{"tokens", row.window.tokens}, {"decoded", row.window.decoded}};
      object["windows"] = row.windows;
      if (const auto rise = mean_relative_rise(row, rows)) object["mean_relative_rise"] = *rise;
    }
    if (!row.divergence.empty()) {
      for (const auto& [text, divergence] : row.divergence)
        object["kl"][text] = json_of(divergence);
      object["kl_all_texts"] = json_of(row.all_texts);
    }
    if (!row.exact_match.empty()) {
      object["set"] = row.retrieval_set;
      object["exact_match"] = row.exact_match;
      object["samples"] = row.samples;
      object["outcomes"] = row.outcomes;
    }
    if (!row.string_match.empty()) {
      object["set"] = row.retrieval_set;
      object["string_match"] = row.string_match;
      object["samples"] = row.samples;
      object["match_scores"] = row.match_scores;
    }
    if (row.decode.tokens_per_second > 0.0) {
      object["prompt_tokens"] = row.prompt_tokens;
      object["tokens_per_second"] = {{"prefill", row.prefill.tokens_per_second},
                                     {"decode", row.decode.tokens_per_second}};
      if (row.decode.times_full > 0.0)
        object["times_full"] = {{"prefill", row.prefill.times_full},
                                {"decode", row.decode.times_full}};
      object["seconds"] = {{"prefill", row.prefill.seconds}, {"decode", row.decode.seconds}};
    }
    list.push_back(std::move(object));
  }
  open(path) << list.dump(2) << '\n';
}

void write_csv(const std::string& path, const std::vector<Row>& rows) {
  const auto texts = names(rows, &Row::bits_per_byte);
  const auto tasks = names(rows, &Row::exact_match);
  const auto matches = names(rows, &Row::string_match);
  const auto divergent = names(rows, &Row::divergence);
  std::ofstream out = open(path);
  out << "method,ratio,bytes_per_token,ratio_measured,context,text_ratio_measured,over_ratio";
  for (const auto& name : texts) out << ",bits_per_byte_" << name;
  if (!texts.empty()) out << ",mean_relative_rise";
  for (const auto& name : divergent)
    for (const char* what : {"mean", "median", "p999", "top1", "positions"})
      out << ",kl_" << what << '_' << name;
  for (const auto& name : tasks) out << ",exact_match_" << name;
  for (const auto& name : matches) out << ",string_match_" << name;
  if (!matches.empty()) out << ",string_match_mean";
  out << ",exact_match_mean,prefill_tokens_per_second,decode_tokens_per_second\n";
  for (const Row& row : rows) {
    out << row.method << ',' << row.ratio << ',' << row.bytes_per_token << ',' << row.ratio_measured
        << ',' << row.context << ',' << row.text_ratio_measured << ',' << row.excess();
    for (const auto& name : texts) out << ',' << cell(row.bits_per_byte, name, 1.0, 6);
    if (!texts.empty()) {
      const auto rise = mean_relative_rise(row, rows);
      out << ',' << (rise ? std::to_string(*rise) : "");
    }
    for (const auto& name : divergent) write_divergence(out, row.divergence, name);
    for (const auto& name : tasks) out << ',' << cell(row.exact_match, name, 1.0, 4);
    for (const auto& name : matches) out << ',' << cell(row.string_match, name, 1.0, 4);
    if (!matches.empty()) out << ',' << row.mean_string_match();
    out << ',' << row.mean_exact_match() << ',' << row.prefill.tokens_per_second << ','
        << row.decode.tokens_per_second << '\n';
  }
}

bool write_plot(const std::string& prefix, const std::string& title, const std::vector<Row>& rows) {
  std::vector<std::string> order;
  for (const Row& row : rows) {
    if (std::find(order.begin(), order.end(), row.method) == order.end())
      order.push_back(row.method);
  }
  const auto texts = names(rows, &Row::bits_per_byte);
  {
    std::ofstream data = open(prefix + ".dat");
    data << "# ratio_measured  mean exact match %  text_ratio_measured";
    for (const auto& name : texts) data << "  bits per byte of " << name;
    data << '\n';
    for (const std::string& method : order) {
      for (const Row& row : rows) {
        if (row.method != method) continue;
        data << row.ratio_measured << ' ' << 100.0 * row.mean_exact_match() << ' '
             << row.text_ratio_measured;
        for (const auto& name : texts) data << ' ' << cell(row.bits_per_byte, name, 1.0, 6);
        data << '\n';
      }
      data << "\n\n";
    }
  }
  std::ofstream script = open(prefix + ".gp");
  const auto draw = [&](int x, int column) {
    script << "plot ";
    for (std::size_t i = 0; i < order.size(); ++i) {
      script << (i ? ", " : "") << '\'' << prefix << ".dat' index " << i << " using " << x << ':'
             << column << " with linespoints lw 2 pt " << 5 + 2 * i << " ps 1.2 title '" << order[i]
             << '\'';
    }
    script << '\n';
  };
  for (const char* terminal : {"svg", "png"}) {
    const int panels = 1 + static_cast<int>(texts.size());
    script << "set terminal " << terminal << " size " << 480 * panels + 180 << ",420"
           << (std::string(terminal) == "svg" ? " background 'white'" : "") << "\nset output '"
           << prefix << '.' << terminal << "'\n"
           << "set grid\nset xrange [0:1.08]\nset xlabel 'measured bytes per token / f16 K and V'\n"
           << "set multiplot layout 1," << panels << " title '" << title << "'\n"
           << "set key off\nset ylabel 'retrieval exact match, mean of tasks, %'\nset yrange "
              "[0:105]\n";
    draw(1, 2);
    script << "set yrange [*:*]\n";
    int column = 4;
    for (const auto& name : texts) {
      if (column + 1 == 4 + static_cast<int>(texts.size()))
        script << "set key outside right\n";  // one key for all panels
      script << "set ylabel 'bits per byte, " << name << "'\n";
      draw(3, column++);
    }
    script << "unset multiplot\nset output\n";
  }
  script.close();
  return std::system(("gnuplot '" + prefix + ".gp' > /dev/null 2>&1").c_str()) == 0;
}

}  // namespace llama
