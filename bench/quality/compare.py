#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Methods at equal bytes: reads what `lowrankkv-llama retrieve --json` wrote (several files: the same samples, or other
context lengths), pairs every method with FullKV sample by sample, and prints a table: score, score relative to FullKV with
its one-sided 95 % lower bound. Writes a plot beside it (gnuplot): PREFIX.svg, PREFIX.csv.

usage: compare.py PREFIX FILE.json...
"""
import json
import math
import subprocess
import sys


def load(files):
    """{(method, ratio): {"bytes": {set: ...}, "outcomes": {(set, task): "1101..."}}}. Outcomes begin with the first sample of a
    task, so those of a method on fewer samples pair with the beginning of FullKV's."""
    rows = {}
    for name in files:
        for entry in json.load(open(name)):
            row = rows.setdefault((entry["method"], entry["ratio"]), {"bytes": {}, "outcomes": {}})
            row["bytes"][entry["set"]] = entry["ratio_measured"]
            for task, outcomes in entry["outcomes"].items():
                known = row["outcomes"].get((entry["set"], task), "")
                common = min(len(known), len(outcomes))
                if known[:common] != outcomes[:common]:
                    raise SystemExit(f"{entry['method']} {entry['ratio']}: two files disagree on {entry['set']} {task}")
                row["outcomes"][(entry["set"], task)] = max(known, outcomes, key=len)
    return rows


def compare(row, full):
    """Mean over (context, task) cells of exact match; its ratio to FullKV's on the same samples and the lower bound of it:
    delta method on paired differences, cells as strata. Where all pairs agree, no more than 3 in n differ at that confidence."""
    cells = sorted(row["outcomes"])
    score = base = variance = 0.0
    pairs = []
    for cell in cells:
        mine, theirs = row["outcomes"][cell], full["outcomes"].get(cell, "")
        count = min(len(mine), len(theirs))
        if count == 0:
            raise SystemExit(f"{cell}: {len(mine)} samples, FullKV has {len(theirs)}")
        pairs.append([(int(a), int(b)) for a, b in zip(mine[:count], theirs[:count])])
        score += sum(a for a, _ in pairs[-1]) / count / len(cells)
        base += sum(b for _, b in pairs[-1]) / count / len(cells)
    if base == 0.0:
        raise SystemExit("FullKV has no hit on these samples: nothing to relate to")
    relative = score / base
    for cell in pairs:
        differences = [a - relative * b for a, b in cell]
        mean = sum(differences) / len(differences)
        spread = sum((d - mean) ** 2 for d in differences) / max(1, len(differences) - 1)
        variance += spread / len(differences) / len(pairs) ** 2
    samples = sum(len(cell) for cell in pairs)
    margin = max(1.645 * math.sqrt(variance), 3.0 / samples)
    return score, relative, max(0.0, relative - margin / base), samples


def main():
    prefix, files = sys.argv[1], sys.argv[2:]
    rows = load(files)
    full = next(row for (method, _), row in rows.items() if method == "FullKV")
    print(f"{'method':16} {'ratio':>6} {'x f16':>7} {'score %':>8} {'of FullKV %':>12} {'at least %':>11} {'samples':>8}")
    curves = {}
    with open(prefix + ".csv", "w") as csv:
        csv.write("method,ratio,ratio_measured,score,of_full,of_full_lower_95,samples\n")
        for (method, ratio), row in sorted(rows.items(), key=lambda item: (item[0][0] != "FullKV", item[0][0], -item[0][1])):
            score, relative, bound, samples = compare(row, full)
            stored = sum(row["bytes"].values()) / len(row["bytes"])
            print(f"{method:16} {ratio:6.3f} {stored:7.3f} {100 * score:8.1f} {100 * relative:12.1f} {100 * bound:11.1f} {samples:8}")
            csv.write(f"{method},{ratio},{stored:.4f},{score:.4f},{relative:.4f},{bound:.4f},{samples}\n")
            curves.setdefault(method, []).append((stored, 100 * relative))
    script = ["set terminal svg size 760,480 background 'white'", f"set output '{prefix}.svg'", "set logscale x", "set xrange [0.04:1.2]",
              "set xtics (0.05, 0.1, 0.2, 0.4, 1)", "set grid", "set key outside right", "set yrange [0:110]",
              "set xlabel 'measured bytes / f16 K and V'", "set ylabel 'retrieval exact match, % of FullKV on the same samples'"]
    for index, points in enumerate(curves.values()):
        script += [f"$d{index} << EOD"] + [f"{x} {y}" for x, y in sorted(points)] + ["EOD"]
    script.append("plot " + ", ".join(f"$d{index} with linespoints lw {3 if method == 'Budgeted' else 1} pt {1 + index} title '{method}'" for index, method in enumerate(curves)))
    subprocess.run(["gnuplot"], input="\n".join(script) + "\n", text=True, check=True)


if __name__ == "__main__":
    main()
