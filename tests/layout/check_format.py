# SPDX-License-Identifier: Apache-2.0
"""check_format.py ROOT [CLANG_FORMAT]: every source is as .clang-format has it (100 columns), and no function is long without
a reason: those over 80 lines are listed in long_functions.txt beside this script, `path name: reason`, and no others."""
import pathlib
import re
import subprocess
import sys

root = pathlib.Path(sys.argv[1])
MOST_LINES = 80
SUFFIXES = {".hpp", ".cuh", ".cpp", ".cu", ".h", ".c"}
files = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True).stdout.split("\n")
if files == [""]:  # not a checkout: an archive of the sources
    files = [str(path.relative_to(root)) for folder in ("include", "tests", "bench", "examples", "cmake")
             for path in (root / folder).rglob("*")]
sources = sorted(name for name in files if pathlib.PurePosixPath(name).suffix in SUFFIXES and (root / name).exists())
faults = []


def functions(lines):
    """Blocks at the indentation of functions of namespaces and of classes: (name, lines)."""
    for end, line in enumerate(lines):
        closing = re.fullmatch(r"( {0,4})\};?", line)
        if not closing:
            continue
        indent = closing.group(1)
        begin = end - 1
        while begin >= 0 and not re.match(indent + r"(?=[^\s#])", lines[begin]):
            begin -= 1
        # The declaration may take several lines, whose last one opens the block.
        head = begin
        while head > 0 and not re.search(r"[{};]\s*(//.*)?$", lines[head - 1]) and lines[head - 1].strip() and not lines[head - 1].lstrip().startswith(("//", "#")):
            head -= 1
        text = " ".join(part.strip() for part in lines[head:end] if True)
        text = text[: text.find("{") if "{" in text else None]
        if re.match(r"(template <.*> )?(namespace|class|struct|union|enum|extern|requires)\b", re.sub(r"template <[^{]*?> (?=class|struct)", "", text)):
            continue
        name = re.search(r"(~?\w+|operator\S+)\s*\(", re.sub(r"__launch_bounds__\([^)]*\)+", "", text))
        if "(" in text and name and name.group(1) not in ("for", "if", "while", "switch", "catch"):
            yield name.group(1), end - head + 1


long = {}
for name in sources:
    for function, count in functions((root / name).read_text().split("\n")):
        if count > MOST_LINES:
            long[f"{name} {function}"] = max(count, long.get(f"{name} {function}", 0))

reasons = {}
for line in (pathlib.Path(__file__).parent / "long_functions.txt").read_text().split("\n"):
    if line and not line.startswith("#"):
        key, _, reason = line.partition(": ")
        reasons[key] = reason
        if not reason:
            faults.append(f"long_functions.txt: no reason for {key}")
for key, count in long.items():
    if key not in reasons:
        faults.append(f"{key}: {count} lines, at most {MOST_LINES} without a reason in long_functions.txt")
for key in reasons:
    if key not in long:
        faults.append(f"long_functions.txt: {key} is not over {MOST_LINES} lines")

if len(sys.argv) > 2:
    version = subprocess.run([sys.argv[2], "--version"], capture_output=True, text=True).stdout
    if " version 14." not in version:
        faults.append(f"clang-format: {version.strip()}, version 14 expected: others format otherwise")
    else:
        for first in range(0, len(sources), 40):
            run = subprocess.run([sys.argv[2], "--dry-run", "-Werror", *(root / name for name in sources[first : first + 40])], capture_output=True, text=True)
            faults += sorted({line.split(": error")[0] + ": not as .clang-format has it" for line in run.stderr.split("\n") if ": error" in line})
for name in sources:
    for number, line in enumerate((root / name).read_text().split("\n"), 1):
        if len(line) > 100 and not re.search(r'R"\(|^#error|^\s*"', line):
            faults.append(f"{name}:{number}: {len(line)} columns, at most 100")

print("\n".join(faults) or f"{len(sources)} sources formatted, {len(long)} functions over {MOST_LINES} lines, each with a reason")
sys.exit(bool(faults))
