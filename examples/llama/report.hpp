// SPDX-License-Identifier: Apache-2.0
// Rows as a table for people, and as JSON, CSV and a plot for everything else.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "evaluate.hpp"

namespace llama {

/// The mean over the texts of `row` of how much more bits per byte it takes than FullKV among
/// `rows`, relative to those; nothing if `rows` have no FullKV, or one without some of the texts.
std::optional<double> mean_relative_rise(const Row& row, const std::vector<Row>& rows);
/// A table of what the rows hold, on standard output.
void print_table(const std::vector<Row>& rows);
/// A table of divergences from FullKV: a line for each method and text, and behind them one of all
/// texts; on standard output.
void print_divergence(const std::vector<Row>& rows);
/// A line for every row whose bytes were more than 5 % above its ratio, with both values; and what
/// to do, if there is one.
std::vector<std::string> excess_warnings(const std::vector<Row>& rows);
/// An array with one object a row.
void write_json(const std::string& path, const std::vector<Row>& rows);
/// A line a row.
void write_csv(const std::string& path, const std::vector<Row>& rows);
/// Accuracy and bits per byte against measured bytes: PREFIX.svg, PREFIX.png and the gnuplot script
/// and data behind them. Returns false where gnuplot is missing; the script is written all the
/// same.
bool write_plot(const std::string& prefix, const std::string& title, const std::vector<Row>& rows);

}  // namespace llama
