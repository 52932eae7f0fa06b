#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loss against bytes of one model: reads what `lowrankkv-llama kl --json` and `bpb --json` wrote (several files:
other methods, ratios or texts), and prints a table: for each method and ratio the mean over the texts of the relative
rise of bits per byte over FullKV, the mean over the texts of the mean of KL(FullKV || method), and the largest text's
99.9th percentile of it. Draws the first two against bytes, a line for each method (gnuplot): PREFIX.svg, and PREFIX.csv
beside it.

Bytes are those at the end of the texts' windows, or, with --bytes, the ratio_measured of the same methods and ratios in
another file, of `retrieve --json` for example. Axes are logarithmic: what is below 0.01 % (or 10^-5 nats) is drawn
there.

usage: loss_plot.py [--title TITLE] [--bytes FILE.json] PREFIX FILE.json...
"""
import argparse
import json
import math
import pathlib
import subprocess
import sys

LEAST_RISE, LEAST_KL = 0.01, 1e-5  # %, nats: the lowest that is drawn


def load(files):
    """{(method, ratio): {"bits": {text: ...}, "kl": {text: {...}}, "bytes": ...}}, and {text: (tokens of a window, of
    them decoded, windows)}. A text in two files is one set of windows; a method's figures of it are equal in both."""
    rows, sets = {}, {}
    for name in files:
        entries = json.loads(pathlib.Path(name).read_text())
        for entry in entries:
            if "bits_per_byte" not in entry:
                raise SystemExit(f"{name}: {entry['method']} has no bits_per_byte; files of kl and bpb are expected")
            row = rows.setdefault((entry["method"], entry["ratio"]), {"bits": {}, "kl": {}})
            row["bytes"] = entry["text_ratio_measured"]
            for text, bits in entry["bits_per_byte"].items():
                shape = (entry["window"]["tokens"], entry["window"]["decoded"], entry["windows"][text])
                if sets.setdefault(text, shape) != shape:
                    raise SystemExit(f"{name}: text {text} in windows (tokens, decoded, number) {shape}, "
                                     f"before {sets[text]}")
                if not math.isclose(row["bits"].setdefault(text, bits), bits, rel_tol=1e-4):
                    raise SystemExit(f"{name}: {entry['method']} {entry['ratio']} has {bits} bits per byte of {text}, "
                                     f"before {row['bits'][text]}")
            row["kl"].update(entry.get("kl", {}))
    return rows, sets


def use_bytes(rows, name):
    """Takes every row's bytes from another file."""
    entries = json.loads(pathlib.Path(name).read_text())
    measured = {(entry["method"], entry["ratio"]): entry["ratio_measured"] for entry in entries}
    for key, row in rows.items():
        if key not in measured:
            raise SystemExit(f"{name}: {key[0]} at ratio {key[1]} is none of {len(measured)} rows")
        row["bytes"] = measured[key]


def losses(rows, sets):
    """[(method, ratio, bytes, rise of bits per byte in %, KL mean, KL 99.9th percentile)], by method, most bytes first.
    A row must have bits per byte of every text, and KL of every text or of none."""
    full = next((row for (method, _), row in rows.items() if method == "FullKV"), None)
    if full is None:
        raise SystemExit(f"FullKV is none of {len(rows)} rows; losses are relative to it")
    for (method, ratio), row in rows.items():
        for what in ("bits", "kl"):
            missing = sorted(set(sets) - set(row[what]))
            if missing and (what == "bits" or row["kl"]):
                raise SystemExit(f"{method} {ratio}: no {what} of {', '.join(missing)}, which other rows have")
    table = []
    for (method, ratio), row in rows.items():
        rise = sum(row["bits"][text] / full["bits"][text] - 1.0 for text in sets) / len(sets)
        mean = sum(kl["mean"] for kl in row["kl"].values()) / len(sets) if row["kl"] else None
        worst = max(kl["p999"] for kl in row["kl"].values()) if row["kl"] else None
        table.append((method, ratio, row["bytes"], 100.0 * rise, mean, worst))
    return sorted(table, key=lambda row: (row[0] != "FullKV", row[0], -row[2]))


def quoted(text):
    """A string of gnuplot's without escapes."""
    return "'" + text.replace("'", "''") + "'"


def points_of(table, method, column, least):
    """[(bytes, loss)] of a method where the loss was measured, the fewest bytes first."""
    return sorted((row[2], max(row[column], least)) for row in table if row[0] == method and row[column] is not None)


def script_of(prefix, title, table):
    """The gnuplot script: rise, and KL where it was measured, over bytes."""
    methods = list(dict.fromkeys(row[0] for row in table if row[0] != "FullKV"))
    panels = [("rise of bits per byte over FullKV, mean of texts, %", 3, LEAST_RISE)]
    if any(row[4] is not None for row in table if row[0] != "FullKV"):
        panels.append(("mean KL(FullKV || method), nats", 4, LEAST_KL))
    lines = [f"set terminal svg size {560 * len(panels) + 160},480 background 'white'",
             f"set output {quoted(prefix + '.svg')}", "set logscale xy", "set grid",
             "set xtics (0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1)",
             "set xlabel 'measured bytes / f16 K and V'", "set format y '%g'", "set key off"]
    plots = []
    for panel, (_, column, least) in enumerate(panels):
        curves = []
        for index, method in enumerate(methods):
            if not (points := points_of(table, method, column, least)):
                continue
            lines += [f"$d{panel}_{index} << EOD"] + [f"{x} {y}" for x, y in points] + ["EOD"]
            curves.append(f"$d{panel}_{index} with linespoints lc {1 + index} pt {1 + index} "
                          f"lw {3 if method.startswith('Budgeted') else 1} title {quoted(method)} noenhanced")
        plots.append("plot " + ", ".join(curves))
    lines.append(f"set multiplot layout 1,{len(panels)} title {quoted(title)} noenhanced")
    for (label, _, _), plot in zip(panels, plots):
        if plot is plots[-1]:
            lines.append("set key outside right")  # one key for all panels
        lines += [f"set ylabel {quoted(label)}", plot]
    return "\n".join(lines + ["unset multiplot", "set output", ""])


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--title", default="loss against measured bytes")
    arguments.add_argument("--bytes", help="file whose ratio_measured are the bytes")
    arguments.add_argument("prefix")
    arguments.add_argument("files", nargs="+")
    given = arguments.parse_args()
    rows, sets = load(given.files)
    if given.bytes:
        use_bytes(rows, given.bytes)
    table = losses(rows, sets)
    if all(row[0] == "FullKV" for row in table):
        raise SystemExit(f"FullKV alone in {len(given.files)} files; there is no loss to draw")
    for text, (tokens, decoded, count) in sorted(sets.items()):
        print(f"{text}: {count} windows of {tokens} tokens, {decoded} decoded")
    print(f"{'method':16} {'ratio':>6} {'x f16':>7} {'rise %':>8} {'KL mean':>10} {'KL 99.9 %':>10}")
    with open(given.prefix + ".csv", "w") as csv:
        csv.write("method,ratio,ratio_measured,relative_rise,kl_mean,kl_p999\n")
        for method, ratio, stored, rise, mean, worst in table:
            cells = ["" if value is None else f"{value:.4g}" for value in (mean, worst)]
            print(f"{method:16} {ratio:6.3f} {stored:7.3f} {rise:+8.2f} {cells[0]:>10} {cells[1]:>10}")
            csv.write(f"{method},{ratio},{stored:.4f},{rise / 100.0:.6f},{cells[0]},{cells[1]}\n")
    try:
        subprocess.run(["gnuplot"], input=script_of(given.prefix, given.title, table), text=True, check=True)
    except FileNotFoundError:
        print("no gnuplot: no plot", file=sys.stderr)


if __name__ == "__main__":
    main()
