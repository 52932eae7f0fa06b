#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss against bytes of several models side by side, of figures that were measured in several runs: a table with the
columns model, method, bytes (over those of f16 keys and values), rise (of bits per byte over FullKV, in %, mean of
the texts) and windows (of each text). Draws a panel for each model, a line for each method, both axes logarithmic; a
rise below 0.01 % is drawn there. Methods that were measured on fewer than --windows windows have broken lines.

usage: frontier_plot.py [--windows N] TABLE.csv OUT.svg     (needs gnuplot)
"""
import argparse
import csv
import subprocess
import sys

from loss_plot import LEAST_RISE, quoted

COLUMNS = ["model", "method", "bytes", "rise", "windows"]


def load(name):
    """{model: {method: [(bytes, rise, windows)]}}, in the order of the table, the fewest bytes first."""
    models = {}
    with open(name, newline="") as table:
        reader = csv.DictReader(table)
        if reader.fieldnames != COLUMNS:
            raise SystemExit(f"{name}: columns {','.join(reader.fieldnames or [])}, expected {','.join(COLUMNS)}")
        for line, row in enumerate(reader, 2):
            try:
                point = (float(row["bytes"]), float(row["rise"]), int(row["windows"]))
            except (TypeError, ValueError):
                raise SystemExit(f"{name}:{line}: bytes, rise and windows are numbers, given {list(row.values())}")
            if point[0] <= 0:
                raise SystemExit(f"{name}:{line}: bytes {point[0]}, more than 0 expected")
            models.setdefault(row["model"], {}).setdefault(row["method"], []).append(point)
    if not models:
        raise SystemExit(f"{name}: no rows")
    for methods in models.values():
        for points in methods.values():
            points.sort()
    return models


def script_of(models, out, windows):
    """The gnuplot script: a panel for each model, a key below each."""
    styles = list(dict.fromkeys(method for methods in models.values() for method in methods))
    lines = [f"set terminal svg size {520 * len(models)},520 background 'white'", f"set output {quoted(out)}",
             "set logscale xy", "set grid", "set xtics (0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5)",
             "set xrange [0.05:0.6]", f"set yrange [{LEAST_RISE * 0.8}:20]", "set format y '%g'",
             "set xlabel 'measured bytes / f16 K and V'", "set ylabel 'rise of bits per byte over FullKV, %'",
             "set key below", f"set bmargin {5 + max(len(methods) for methods in models.values())}"]
    plots = []
    for panel, (model, methods) in enumerate(models.items()):
        curves = []
        for method, points in methods.items():
            style = styles.index(method)
            few = min(count for _, _, count in points)
            lines += [f"$d{panel}_{style} << EOD"] + [f"{x} {max(y, LEAST_RISE)}" for x, y, _ in points] + ["EOD"]
            curves.append(f"$d{panel}_{style} with linespoints lc {style + 1} pt {style + 4} "
                          f"lw {2 if few >= windows else 1} dt {1 if few >= windows else 2} "
                          f"title {quoted(f'{method} ({few})')} noenhanced")
        plots.append([f"set title {quoted(model)} noenhanced", "plot " + ", ".join(curves)])
    lines.append(f"set multiplot layout 1,{len(models)}")
    for plot in plots:
        lines += plot
    return "\n".join(lines + ["unset multiplot", "set output", ""])


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--windows", type=int, default=32)
    arguments.add_argument("table")
    arguments.add_argument("out")
    given = arguments.parse_args()
    models = load(given.table)
    try:
        subprocess.run(["gnuplot"], input=script_of(models, given.out, given.windows), text=True, check=True)
    except FileNotFoundError:
        sys.exit("frontier_plot.py: no gnuplot")


if __name__ == "__main__":
    main()
