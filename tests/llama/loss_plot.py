#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench/quality/loss_plot.py on results written here, and on what `lowrankkv-llama kl` wrote.

usage: loss_plot.py SCRIPT KL.json
"""
import csv
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

script, of_engine = sys.argv[1:3]


def row(method, ratio, stored, bits, kl=None, windows=3):
    entry = {"method": method, "ratio": ratio, "ratio_measured": 2 * stored, "text_ratio_measured": stored,
             "bits_per_byte": bits, "window": {"tokens": 1024, "decoded": 768},
             "windows": {text: windows for text in bits}}
    if kl is not None:
        of_text = {"mean": kl, "median": kl / 2, "p999": 10 * kl, "top1": 0.5, "positions": 9}
        entry["kl"] = {text: of_text for text in bits}
    return entry


FULL = row("FullKV", 1.0, 1.0, {"wiki": 1.0, "code": 0.5}, 0.0)
STAR = [row("StarKV", 0.2, 0.3, {"wiki": 1.01, "code": 0.515}, 0.02),
        row("StarKV", 0.1, 0.17, {"wiki": 1.1, "code": 0.6}, 0.25)]
BUDGETED = row("Budgeted", 0.2, 0.25, {"wiki": 1.0, "code": 0.5})  # of bpb: without KL; no loss, on a logarithmic axis


def run(folder, files, *options):
    names = []
    for index, rows in enumerate(files):
        names.append(str(folder / f"{index}.json"))
        pathlib.Path(names[-1]).write_text(json.dumps(rows))
    command = [sys.executable, script, *options, str(folder / "plot"), *names]
    return subprocess.run(command, text=True, capture_output=True)


def refused(folder, expected, files, *options):
    done = run(folder, files, *options)
    assert done.returncode != 0 and expected in done.stderr, (expected, done)


def drawn(folder, methods):
    """The picture names its methods; without gnuplot there is none, and that is said."""
    if shutil.which("gnuplot") is None:
        print("no gnuplot: pictures were not tested")
        return
    picture = (folder / "plot.svg").read_text()
    assert picture.rstrip().endswith("</svg>")
    for method in methods:
        assert f">{method}<" in picture, method


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    done = run(folder, [[FULL, *STAR], [FULL, BUDGETED]], "--title", "a model's losses")
    assert done.returncode == 0, done.stderr
    assert "wiki: 3 windows of 1024 tokens, 768 decoded" in done.stdout
    table = list(csv.DictReader((folder / "plot.csv").open()))
    assert [line["method"] for line in table] == ["FullKV", "Budgeted", "StarKV", "StarKV"]
    assert [line["ratio"] for line in table] == ["1.0", "0.2", "0.2", "0.1"]
    assert [float(line["relative_rise"]) for line in table] == [0.0, 0.0, 0.02, 0.15]
    assert [line["ratio_measured"] for line in table] == ["1.0000", "0.2500", "0.3000", "0.1700"]
    assert [line["kl_mean"] for line in table] == ["0", "", "0.02", "0.25"]
    assert [line["kl_p999"] for line in table] == ["0", "", "0.2", "2.5"]
    drawn(folder, ["Budgeted", "StarKV"])

    needles = folder / "needles.json"
    needles.write_text(json.dumps([FULL, *STAR]))
    done = run(folder, [[FULL, *STAR]], "--bytes", str(needles))
    table = list(csv.DictReader((folder / "plot.csv").open()))
    assert [line["ratio_measured"] for line in table] == ["2.0000", "0.6000", "0.3400"], done
    refused(folder, "Budgeted at ratio 0.2 is none of 3 rows", [[FULL, BUDGETED]], "--bytes", str(needles))

    refused(folder, "FullKV is none of 2 rows", [STAR])
    refused(folder, "FullKV alone in 1 files", [[FULL]])
    refused(folder, "text wiki in windows (tokens, decoded, number) (1024, 768, 4), before (1024, 768, 3)",
            [[FULL], [row("StarKV", 0.2, 0.3, {"wiki": 1.0}, windows=4)]])
    refused(folder, "StarKV 0.2: no bits of code", [[FULL], [row("StarKV", 0.2, 0.3, {"wiki": 1.0})]])
    refused(folder, "StarKV 0.2 has 1.02 bits per byte of wiki, before 1.01",
            [[FULL, STAR[0]], [row("StarKV", 0.2, 0.3, {"wiki": 1.02})]])
    refused(folder, "FullKV has no bits_per_byte", [[{"method": "FullKV", "ratio": 1.0}]])

    # The engine's own rows: losses are those that it printed.
    own = json.loads(pathlib.Path(of_engine).read_text())
    done = run(folder, [own])
    assert done.returncode == 0, done.stderr
    table = list(csv.DictReader((folder / "plot.csv").open()))
    for line, entry in zip(table, own):
        assert abs(float(line["relative_rise"]) - entry["mean_relative_rise"]) < 1e-6
        assert abs(float(line["kl_mean"]) - entry["kl_all_texts"]["mean"]) <= 0.02 * entry["kl_all_texts"]["mean"]
    drawn(folder, ["StreamingLLM"])
print("passed")
