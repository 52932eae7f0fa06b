#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens a second over sequences, of what `lowrankkv-llama serve-bench --json` wrote: a panel for each length of sequences,
a point for each method, ratio and number of places. Steps with the most sequences count; both axes are logarithmic.

usage: serving_plot.py RESULTS.json... OUT.svg     (needs gnuplot)
"""
import json
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "quality"))
from loss_plot import quoted  # noqa: E402


def load(names):
    """{1024 tokens of a sequence: {method and ratio: [(sequences, tokens a second)]}}, short and few ones first."""
    panels = {}
    for name in names:
        with open(name) as file:
            rows = json.load(file)
        for number, row in enumerate(rows):
            missing = [key for key in ("method", "ratio", "most_sequences", "prompt_tokens", "output_tokens",
                                    "step_tokens_per_second") if key not in row]
            if missing:
                raise SystemExit(f"{name}: row {number} has no {', '.join(missing)}: written by serve-bench expected")
            tokens = round((row["prompt_tokens"][-1] + row["output_tokens"][-1]) / 1024)
            label = row["method"] if row["method"] == "FullKV" else f"{row['method']} {row['ratio']:g}"
            point = (row["most_sequences"], row["step_tokens_per_second"])
            panels.setdefault(tokens, {}).setdefault(label, []).append(point)
    if not panels:
        raise SystemExit(f"{', '.join(names)}: no rows")
    for methods in panels.values():
        for points in methods.values():
            points.sort()
    return dict(sorted(panels.items()))


def script_of(panels, out):
    """The gnuplot script: panels side by side, a key below each."""
    styles = list(dict.fromkeys(method for methods in panels.values() for method in methods))
    points = [point for methods in panels.values() for list_of in methods.values() for point in list_of]
    most = max(rate for _, rate in points) * 2
    least = min(rate for _, rate in points) / 2
    lines = [f"set terminal svg size {380 * len(panels)},440 background 'white'", f"set output {quoted(out)}", "set logscale xy",
             "set grid", f"set xrange [0.7:{max(count for count, _ in points) * 1.5}]", f"set yrange [{least:.4g}:{most:.4g}]",
             "set xlabel 'sequences at a time'", "set ylabel 'tokens/s'", "set key below",
             f"set bmargin {5 + max(len(methods) for methods in panels.values())}"]
    plots = []
    for panel, (tokens, methods) in enumerate(panels.items()):
        curves = []
        for method, list_of in methods.items():
            style = styles.index(method)
            lines += [f"$d{panel}_{style} << EOD"] + [f"{x} {y:.6g}" for x, y in list_of] + ["EOD"]
            curves.append(f"$d{panel}_{style} with linespoints lc {style + 1} pt {style + 5} ps 1.2 title {quoted(method)} noenhanced")
        plots.append([f"set title 'sequences of {tokens}K tokens'", "plot " + ", ".join(curves)])
    lines.append(f"set multiplot layout 1,{len(panels)}")
    for plot in plots:
        lines += plot
    return "\n".join(lines + ["unset multiplot", "set output", ""])


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__.rsplit("\n\n", maxsplit=1)[1].strip())
    panels = load(sys.argv[1:-1])
    try:
        subprocess.run(["gnuplot"], input=script_of(panels, sys.argv[-1]), text=True, check=True)
    except FileNotFoundError:
        sys.exit("serving_plot.py: no gnuplot")


if __name__ == "__main__":
    main()
