#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a training: reads what `lowrankkv-llama train-projector --log --ranks` wrote. Left: KL of teacher and student
over steps, a running mean over 20 of them, and the shares of the ranks that are left. Right: the ranks of every layer
and block over their channels (gnuplot): PREFIX.svg.

usage: training_plot.py PREFIX LOG.csv RANKS.csv
"""
import csv
import subprocess
import sys


def smoothed(values, count=20):
    """The mean of each value and of those before it, `count` in all."""
    return [sum(values[max(0, i + 1 - count):i + 1]) / len(values[max(0, i + 1 - count):i + 1])
            for i in range(len(values))]


def block(name, rows):
    return [f"${name} << EOD"] + [" ".join(str(cell) for cell in row) for row in rows] + ["EOD"]


def script_of(prefix, steps, ranks):
    """The gnuplot script."""
    losses = smoothed([max(float(row["divergence"]), 0.0) for row in steps])
    lines = block("steps", [(row["step"], max(loss, 1e-6), row["kept_keys"], row["kept_values"])
                            for row, loss in zip(steps, losses)])
    panels = []
    for index, part in enumerate(("keys", "values")):
        own = [row for row in ranks if row["part"] == part]
        blocks = 1 + max((int(row["block"]) for row in own), default=0)
        lines += block(part, [(int(row["layer"]) + (int(row["block"]) + 0.5) / blocks - 0.5,
                               int(row["rank"]) / int(row["channels"])) for row in own])
        panels.append(f"${part} with points pt {7 - 2 * index} lc {2 + index} title '{part}'")
    return "\n".join(lines + [
        "set terminal svg size 1100,420 background 'white'", f"set output '{prefix}.svg'",
        "set multiplot layout 1,2", "set grid", "set xlabel 'step'", "set ylabel 'KL, nats a token'",
        "set y2label 'share of the rank'", "set y2range [0:1]", "set y2tics", "set ytics nomirror", "set key bottom left",
        "plot $steps using 1:2 with lines lc 1 title 'KL', $steps using 1:3 axes x1y2 with lines lc 2 title 'keys',"
        " $steps using 1:4 axes x1y2 with lines lc 3 title 'values'",
        "unset y2label", "unset y2tics", "set yrange [0:1]", "set xlabel 'layer, and head within it'",
        "set ylabel 'rank / channels'", "plot " + ", ".join(panels), "unset multiplot", "set output", ""])


def main():
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    prefix, log, of_ranks = sys.argv[1:]
    with open(log, newline="") as file:
        steps = list(csv.DictReader(file))
    with open(of_ranks, newline="") as file:
        ranks = list(csv.DictReader(file))
    if not steps or not ranks:
        raise SystemExit(f"{log}: {len(steps)} steps, {of_ranks}: {len(ranks)} blocks; at least 1 of each expected")
    print(f"{len(steps)} steps, {len(ranks)} blocks: {prefix}.svg")
    try:
        subprocess.run(["gnuplot"], input=script_of(prefix, steps, ranks), text=True, check=True)
    except FileNotFoundError:
        print("no gnuplot: no plot", file=sys.stderr)


if __name__ == "__main__":
    main()
