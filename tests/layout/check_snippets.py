# SPDX-License-Identifier: Apache-2.0
"""Every block of C or C++ in the pages is text of a source that is compiled by the tests: the line above a block names the
source and the marker around the lines there, `<!-- snippet: PATH MARKER -->` and `//! [MARKER]`. Indentation may differ as a
whole; a line `...` in a block stands for any lines of the source. Lines of the pages have at most 120 columns, but for the
tables of the log, which is not changed."""
import re
import sys
import textwrap
from pathlib import Path

root = Path(sys.argv[1])
faults, blocks = [], 0


def source_lines(path, marker):
    lines = (root / path).read_text().splitlines()
    marks = [i for i, line in enumerate(lines) if re.fullmatch(rf"\s*(//|#)! \[{re.escape(marker)}\]", line)]
    if len(marks) != 2:
        return None
    inside = [line for line in lines[marks[0] + 1 : marks[1]] if not re.fullmatch(r"\s*(//|#)! \[.+\]", line)]
    return textwrap.dedent("\n".join(inside)).splitlines()


def matches(block, source):
    """The pieces between `...` stand in the source in their order, the first at its beginning, the last at its end."""
    pieces, piece = [], []
    for line in block:
        if line.strip() == "...":
            pieces.append(piece)
            piece = []
        else:
            piece.append(line)
    pieces.append(piece)
    at = 0
    for number, piece in enumerate(pieces):
        starts = [0] if number == 0 else range(at, len(source) + 1)
        if number == len(pieces) - 1 and number > 0:
            starts = [len(source) - len(piece)]
        for start in starts:
            if start >= at and source[start : start + len(piece)] == piece:
                at = start + len(piece)
                break
        else:
            return False
    return at == len(source)


for page in [root / "README.md", root / "CONTRIBUTING.md", root / "bench/results/README.md", *sorted((root / "docs").rglob("*.md"))]:
    lines = page.read_text().splitlines()
    for i, line in enumerate(lines):
        if len(line) > 120 and not (page.is_relative_to(root / "docs/log") and line.startswith("|")):
            faults.append(f"{page.relative_to(root)}:{i + 1}: {len(line)} columns, at most 120")
        if line not in ("```cpp", "```c", "```cuda", "```c++"):
            continue
        blocks += 1
        where = f"{page.relative_to(root)}:{i + 1}"
        named = re.fullmatch(r"<!-- snippet: (\S+) (.+) -->", lines[i - 1])
        if not named:
            faults.append(f"{where}: a block that names no source")
            continue
        path, marker = named.groups()
        source = source_lines(path, marker)
        block = textwrap.dedent("\n".join(lines[i + 1 : lines.index("```", i + 1)])).splitlines()
        if source is None:
            faults.append(f"{where}: {path} has no two lines [{marker}]")
        elif not matches(block, source):
            faults.append(f"{where}: differs from {path} [{marker}]")

print("\n".join(faults) or f"{blocks} blocks are text of their sources, lines are at most 120 columns")
sys.exit(bool(faults))
