# SPDX-License-Identifier: Apache-2.0
"""check_tidy.py ROOT [CLANG_TIDY] [--since REV | --all] [--most N] [--jobs N] [--eigen FOLDER]: what .clang-tidy asks for, of
the headers (.hpp) and sources of include/ and examples/ that changed since REV, in commits and in the working tree. REV is the merge
base with origin/main, or HEAD~1 where there is no such branch or nothing is ahead of it.

Headers are checked as one source, a line for each: most of the time goes to what they all include. Of more than N changed
sources, N are checked, evenly spaced in their order, and the others are named: each takes about 20 s, since it instantiates
the library. A changed .clang-tidy counts as a change of every file; --all checks every file. CUDA is left out: clang 14
cannot read CUDA 13. Findings are listed once each, in whichever file of this repository they are."""
import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

FOLDERS = ("include/", "examples/")
DEVICE = ("include/lowrankkv/cuda", "examples/llama/device_caches.cpp", "examples/cuda_caches.hpp", "examples/08_cuda_calibrated.cpp", "examples/c_api/lowrankkv_c_cuda.cpp")  # these include the CUDA runtime
NEEDS = {"examples/embed/llama_cpp/": "llama.cpp"}  # sources that are not here
ROW = "{:<60} {:>8} {:>9}"
HEADERS = "headers"  # of the unit that they are together

parser = argparse.ArgumentParser()
parser.add_argument("root", type=lambda text: pathlib.Path(text).resolve())
parser.add_argument("clang_tidy", nargs="?")
parser.add_argument("--since", metavar="REV")
parser.add_argument("--all", action="store_true")
parser.add_argument("--most", type=int, default=4)
parser.add_argument("--jobs", type=int, default=os.cpu_count())
parser.add_argument("--eigen", default="/usr/include/eigen3")
options = parser.parse_args()
root = options.root


def nothing(why):
    print(f"{why}: nothing is checked")
    sys.exit(0)


def git(*arguments):
    """What git prints, without the last line's end; None if it fails."""
    try:
        run = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.rstrip("\n") if run.returncode == 0 else None


def lines(text):
    return set((text or "").split("\n")) - {""}


if not options.clang_tidy:
    nothing("No clang-tidy-14")
version = subprocess.run([options.clang_tidy, "--version"], capture_output=True, text=True).stdout
if not re.search(r"\bversion 14\.", version):
    sys.exit(f"clang-tidy: {' '.join(version.split())}, version 14 expected: others find other things")
if git("rev-parse", "--show-toplevel") != str(root):
    nothing("No checkout of git")

# What changed.
known = lines(git("ls-files")) | lines(git("ls-files", "--others", "--exclude-standard"))
if options.all:
    changed, since = known, None
else:
    since = options.since
    if since is None:
        since = git("merge-base", "HEAD", "origin/main")
        if since is None or since == git("rev-parse", "HEAD"):
            since = "HEAD~1"
        if git("rev-parse", "--verify", "--quiet", since + "^{commit}") is None:
            since = "HEAD"  # one commit is all there is
    changed = git("diff", "--name-only", since)
    if changed is None:
        sys.exit(f"check_tidy.py: git knows no revision {since}")
    changed = known & (lines(changed) | lines(git("ls-files", "--others", "--exclude-standard")))
    if ".clang-tidy" in changed:
        changed = known
changed = sorted(name for name in changed if name.startswith(FOLDERS) and (root / name).exists())
headers, sources, left_out = [], [], []
for name in changed:
    suffix = pathlib.PurePosixPath(name).suffix
    needed = "CUDA" if suffix in (".cuh", ".cu") or name.startswith(DEVICE) else next((what for folder, what in NEEDS.items() if name.startswith(folder)), None)
    if suffix in (".hpp", ".cuh"):
        (left_out if needed else headers).append(needed or name)
    elif suffix in (".cpp", ".c", ".cu"):
        (left_out if needed else sources).append(needed or name)
print(f"{len(headers)} headers, {len(sources)} sources" + ("" if options.all else f" changed since {git('rev-parse', '--short', since)}")
      + "".join(f", {left_out.count(needed)} of {needed} left out" for needed in sorted(set(left_out))))
if not options.all and len(sources) > options.most:
    chosen = sources[:: -(-len(sources) // options.most)] if options.most > 0 else []
    print(f"{len(chosen)} of the sources are checked, not (--all does): {' '.join(sorted(set(sources) - set(chosen)))}")
    sources = chosen


def check(name):
    """(name, seconds, findings {file: lines}, what went wrong). Findings are of any file of this repository."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = root / name
        if name == HEADERS:
            path = pathlib.Path(folder) / "headers.cpp"
            path.write_text("".join(f'#include "{root / header}"\n' for header in headers))
        run = subprocess.run(
            [options.clang_tidy, "--quiet", f"--config-file={root / '.clang-tidy'}", path, "--",
             *(["-std=c11"] if name.endswith(".c") else ["-std=c++20", "-DLOWRANKKV_COMPILED=1"]),
             "-Wall", "-Wextra", "-Wconversion", "-Wshadow",  # clang++'s own warnings, as in the builds
             '-DLOWRANKKV_EXAMPLE_DATA=""', *(f"-I{root / one}" for one in ("include", "examples/llama", "examples/c_api")),
             "-isystem", options.eigen], capture_output=True, text=True)
    findings = {}
    for where, rest in re.findall(r"^(/[^:]*)(:\d+:\d+: (?:warning|error): .*)$", run.stdout, re.M):
        where = os.path.relpath(where, root)
        findings.setdefault(where, set()).add(where + rest)
    return name, time.monotonic() - begin, findings, run.stdout + run.stderr if run.returncode != 0 and not findings else ""


findings, faults = {}, []
with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    results = list(pool.map(check, [HEADERS] * bool(headers) + sources))
for name, _, found, broken in results:
    for where, texts in found.items():
        findings.setdefault(where, set()).update(texts)
    if broken:
        faults.append(f"{name}: clang-tidy failed\n{broken}")
if results:
    print(ROW.format("file", "seconds", "findings"))
for name, seconds, _, _ in results:
    if name == HEADERS:
        print(ROW.format(f"{len(headers)} headers, as one source", f"{seconds:.1f}", sum(len(findings.get(header, ())) for header in headers)))
    else:
        print(ROW.format(name, f"{seconds:.1f}", len(findings.get(name, ()))))
for where in sorted(set(findings) - set(sources)):
    print(ROW.format(where, "", len(findings[where])))
for where in sorted(findings):
    print("\n".join(sorted(findings[where])))
print("\n".join(faults), end="")
sys.exit(bool(findings or faults))
