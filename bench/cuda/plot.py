#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed against bytes: reads the file that attend.cu or budgeted.cu, and peers.py, wrote and plots, for every shape, how many times as fast
as cuDNN a decode step is over the share of f16's bytes that it reads (gnuplot). Writes PREFIX.svg beside PREFIX.txt.

usage: plot.py PREFIX
"""
import collections
import re
import subprocess
import sys

COLOURS = ("'#00806a'", "'#2060b0'", "'#c05000'", "'#803090'")
SHAPES = {("8", "8", "131072"): "8 sequences of 131072", ("16", "8", "32768"): "16 of 32768", ("16", "32", "32768"): "16 of 32768, 32 KV heads", ("1", "8", "32768"): "1 of 32768"}

prefix = sys.argv[1]
peers = collections.defaultdict(list)
points = []
for line in open(prefix + ".txt"):
    if peer := re.match(r"cuDNN f16 b=(\d+) kv=(\d+) n=(\d+): ([\d.]+) ms", line):
        peers[peer.groups()[:3]].append(float(peer[4]))
    elif own := re.match(r"(.+?) +\d+q/ *(\d+)kv b *(\d+) n *(\d+): ([\d.]+) ms (?:a layer )?in a graph.*?; ([\d.]+) of f16", line):
        name, kv, batch, tokens, time, share = own.groups()
        points.append((name, (batch, kv, tokens), float(time), float(share)))

script = ["set terminal svg size 760,480 background 'white'", f"set output '{prefix}.svg'", "set logscale xy", "set xrange [0.08:1.1]", "set yrange [0.8:14]", "set key top right",
          "set xlabel 'bytes, of f16 K and V'", "set ylabel 'times as fast as cuDNN on f16'", "set grid", "set xtics (0.1, 0.125, 0.16, 0.25, 0.5, 0.625, 1)", "set ytics (1, 1.5, 2, 3, 4, 5, 6, 8, 10)"]
plots, data = ["1/x with lines dashtype 2 lc rgb 'gray' title 'as the bytes'"], []
for number, (shape, title) in enumerate(SHAPES.items()):
    peer = sum(peers[shape]) / len(peers[shape])
    rows = [(share, peer / time, name) for name, at, time, share in points if at == shape and not re.match("unrotated|joint|4 3 2 1|4/3|OjaKV|.*outliers", name)]
    plots.append(f"'-' using 1:2 with points pt {number + 5} ps 0.8 lc rgb {COLOURS[number]} title '{title}'")
    data.append("\n".join(f"{share} {ratio:.3f}" for share, ratio, _ in rows) + "\ne")
    if number == 0:
        named = []  # those of nearly the same bytes share a line
        for share, ratio, name in sorted(rows):
            if named and share < 1.05 * named[-1][0]:
                named[-1] = (named[-1][0], max(ratio, named[-1][1]), named[-1][2] + ", " + name)
            else:
                named.append((share, ratio, name))
        labels = "\n".join(f'{share} {ratio * 1.09:.3f} "{name}"' for share, ratio, name in named) + "\ne"
plots.append("'-' using 1:2:3 with labels font ',9' notitle")
data.append(labels)
subprocess.run(["gnuplot"], input="\n".join([*script, "plot " + ", ".join(plots), *data]) + "\n", text=True, check=True)
