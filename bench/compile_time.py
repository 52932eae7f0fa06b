#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What including this library costs: processor seconds of a compiler for a source that includes one header and nothing else.

    python3 bench/compile_time.py [--runs 5] [--csv FILE] [compiler ...]

Compilers: those of g++ and clang++ that are there, unless named. Each header is compiled with -O2 (medians of some runs, compilers in turn); `floor` includes the
standard and Eigen headers that the library includes, and nothing of it. The last lines are programs: one of a consumer, with FullKV, and an example that calibrates and uses OjaKV. The budget is 3 s for lowrankkv.hpp with g++.
"""
import argparse
import csv
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ["lowrankkv.hpp", "presets.hpp", "compressed_kv_cache.hpp", "layer_stack.hpp", "budgeted.hpp", "updater/oja.hpp", "cpu/updater/oja.hpp", "cpu/updater/frequent_directions.hpp",
           "cpu/quantizer/transform_code.hpp", "token_policy/snapkv.hpp", "io/safetensors.hpp", "calibrate/layer_moments.hpp", "core/views.hpp"]
PROGRAMS = ["tests/consumers/main.cpp", "examples/01_append_attend.cpp"]


def seconds(compiler, source):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([compiler, "-std=c++20", "-O2", "-I", ROOT / "include", "-isystem", "/usr/include/eigen3", "-c", source, "-o", "/dev/null"], check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("compilers", nargs="*")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--csv")
    options = parser.parse_args()
    compilers = options.compilers or [name for name in ("g++", "clang++") if shutil.which(name)]
    with tempfile.TemporaryDirectory() as folder:
        def write(name, lines):
            path = pathlib.Path(folder, name + ".cpp")
            path.write_text("".join(line + "\n" for line in lines))
            return path

        external = sorted({match for header in ROOT.glob("include/**/*.hpp") for match in re.findall(r"^#include <(?!lowrankkv).+>$", header.read_text(), re.M)})
        sources = {"floor": write("floor", external)}
        for header in HEADERS:
            sources[header] = write(header.replace("/", "_"), [f"#include <lowrankkv/{header}>"])
        for program in PROGRAMS:
            sources[program] = ROOT / program
        rows = []
        print(f"{'processor seconds':42}" + "".join(f"{compiler:>12}" for compiler in compilers))
        for done, (name, source) in enumerate(sources.items()):
            print(f"\r{done + 1} of {len(sources)}", end="", file=sys.stderr, flush=True)
            times = {compiler: [] for compiler in compilers}
            for _ in range(options.runs):
                for compiler in compilers:
                    times[compiler].append(seconds(compiler, source))
            rows.append([name] + [statistics.median(times[compiler]) for compiler in compilers])
            print("\r", end="", file=sys.stderr, flush=True)
            print(f"{name:42}" + "".join(f"{value:12.2f}" for value in rows[-1][1:]), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["source"] + compilers] + [[row[0]] + [f"{value:.3f}" for value in row[1:]] for row in rows])


if __name__ == "__main__":
    main()
