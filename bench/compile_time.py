#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What this library costs compilers: user seconds and the most memory of one source.

    python3 bench/compile_time.py [--runs 3] [--only headers|programs|cuda] [--csv FILE] [compiler ...]

`headers`: sources that include one header and nothing else, with -O2; `floor` includes the standard and Eigen headers
that the library includes, and nothing of it. `programs`: sources of bench/compile/, examples and tests, with -O2; those
marked `compiled part` link what cmake/lowrankkv_compiled.cmake builds. `cuda`: bench/compile/*.cu with nvcc for sm_90,
where nvcc is, with every kernel and with a KernelSet for one shape (f16, head_dim 128, post-RoPE
keys, rank up to 64). Compilers: those of g++ and clang++ that are there, unless named. Medians of some runs, compilers in turn.
"""
import argparse
import csv
import os
import pathlib
import re
import shutil
import statistics
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADERS = ["lowrankkv.hpp", "presets.hpp", "cpu/backend.hpp", "layer_stack.hpp", "budgeted.hpp",
           "updater/oja.hpp", "cpu/updater/oja.hpp", "cpu/updater/frequent_directions.hpp",
           "cpu/quantizer/transform_code.hpp", "token_policy/snapkv.hpp", "io/safetensors.hpp",
           "calibrate/layer_moments.hpp", "core/views.hpp"]
PROGRAMS = ["tests/consumers/main.cpp", "examples/01_append_attend.cpp", "bench/compile/budgeted_stack.cpp"]
CUDA_PROGRAMS = ["bench/compile/full_kv.cu", "bench/compile/budgeted.cu", "bench/compile/three_caches.cu"]


def cost(command):
    """User seconds of a command and all it starts, and the most memory that one of those processes had, in MB."""
    process = os.spawnvp(os.P_NOWAIT, command[0], [str(word) for word in command])
    _, status, usage = os.wait4(process, 0)
    if status != 0:
        sys.exit("failed: " + " ".join(map(str, command)))
    return usage.ru_utime, usage.ru_maxrss / 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("compilers", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["headers", "programs", "cuda"])
    parser.add_argument("--csv")
    options = parser.parse_args()
    compilers = options.compilers or [name for name in ("g++", "clang++") if shutil.which(name)]
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    wanted = lambda kind: options.only in (None, kind)
    jobs = []  # name, compiler, command
    with tempfile.TemporaryDirectory() as folder:
        def write(name, lines):
            path = pathlib.Path(folder, name + ".cpp")
            path.write_text("".join(line + "\n" for line in lines))
            return path

        def host(name, source, *flags):
            for compiler in compilers:
                jobs.append((name, compiler, [compiler, "-std=c++20", "-O2", *flags, "-I", ROOT / "include", "-isystem",
                                              "/usr/include/eigen3", "-c", source, "-o", "/dev/null"]))

        if wanted("headers"):
            external = sorted({match for header in ROOT.glob("include/**/*.hpp") if "cuda" not in header.name + str(header.parent.relative_to(ROOT))
                               for match in re.findall(r"^#include <(?!lowrankkv).+>$", header.read_text(), re.M)})
            host("floor", write("floor", external))
            for header in HEADERS:
                host(header, write(header.replace("/", "_"), [f"#include <lowrankkv/{header}>"]))
        if wanted("programs"):
            for program in PROGRAMS:
                host(program, ROOT / program)
                if program != "tests/consumers/main.cpp":
                    host(program + ", compiled part", ROOT / program, "-DLOWRANKKV_COMPILED=1")
        if wanted("cuda") and nvcc:
            cuda_include = ["-isystem", pathlib.Path(nvcc).resolve().parent.parent / "include"]
            host("cuda.hpp", write("cuda_hpp", ["#include <lowrankkv/cuda.hpp>"]), *cuda_include)
            host("bench/compile/light.cpp", ROOT / "bench/compile/light.cpp", *cuda_include)
            umbrella = pathlib.Path(folder, "umbrella.cu")
            umbrella.write_text("#include <lowrankkv/cuda/presets.cuh>\n")
            jobs.append(("cuda/presets.cuh", "nvcc", [nvcc, "-std=c++20", "-O3", "-arch=sm_90", "-I", ROOT / "include", "-c",
                                                      umbrella, "-o", pathlib.Path(folder, "object.o")]))
            for program in CUDA_PROGRAMS:
                for name, flags in [(program, []), (program + ", one shape", ["-DLOWRANKKV_ONE_SHAPE"])]:
                    jobs.append((name, "nvcc", [nvcc, "-std=c++20", "-O3", "-arch=sm_90", *flags, "-I", ROOT / "include",
                                                "-c", ROOT / program, "-o", pathlib.Path(folder, "object.o")]))
        rows = []
        print(f"{'source':56}{'compiler':>10}{'user s':>10}{'MB':>8}")
        costs = {}
        for _ in range(options.runs):
            for index, (name, compiler, command) in enumerate(jobs):
                print(f"\r{sum(map(len, costs.values())) + 1} of {options.runs * len(jobs)}: {name}", end="\033[K",
                      file=sys.stderr, flush=True)
                costs.setdefault(index, []).append(cost(command))
        print("\r", end="\033[K", file=sys.stderr, flush=True)
        for index, (name, compiler, _) in enumerate(jobs):
            row = [name, compiler, statistics.median(c[0] for c in costs[index]), max(c[1] for c in costs[index])]
            rows.append(row)
            print(f"{row[0]:56}{row[1]:>10}{row[2]:10.2f}{row[3]:8.0f}")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [["source", "compiler", "user_s", "mb"]] + [[n, c, f"{s:.3f}", f"{m:.0f}"] for n, c, s, m in rows])


if __name__ == "__main__":
    main()
