// SPDX-License-Identifier: Apache-2.0
// Rows as a table for people, and as JSON, CSV and a plot for everything else.
#pragma once

#include <string>
#include <vector>

#include "evaluate.hpp"

namespace llama {

/// A table of what the rows hold, on standard output.
void print_table(const std::vector<Row>& rows);
/// A line for every row whose bytes were more than 5 % above its ratio, with both values; and what
/// to do, if there is one.
std::vector<std::string> excess_warnings(const std::vector<Row>& rows);
/// An array with one object a row.
void write_json(const std::string& path, const std::vector<Row>& rows);
void write_csv(const std::string& path, const std::vector<Row>& rows);
/// Accuracy and bits per byte against measured bytes: PREFIX.svg, PREFIX.png and the gnuplot script
/// and data behind them. Returns false where gnuplot is missing; the script is written all the
/// same.
bool write_plot(const std::string& prefix, const std::string& title, const std::vector<Row>& rows);

}  // namespace llama
