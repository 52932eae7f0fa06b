#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CUDA sources as C++ that runs on the host (emulator.hpp): launches become calls, dynamic shared memory a pointer, copies in the background copies.

    convert.py SOURCE_FOLDER TARGET_FOLDER

Every .cuh and .cu (as .cpp) below a folder, at the same relative path; a file at that path beside this script takes its place.
Files that would not change stay as they are.
"""
import pathlib
import re
import sys


def closing(text, at, opening, ending):
    """Index behind the bracket that closes the one at `at`."""
    depth = 0
    while True:
        depth += (text[at] == opening) - (text[at] == ending)
        at += 1
        if depth == 0:
            return at


def pieces(text):
    """A list of arguments, cut at the commas between them."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def convert(text):
    text = text.replace("extern __shared__ __align__(128) std::uint8_t shared_memory[];", "std::uint8_t* const shared_memory = ::emulated::dynamic_shared();")
    text = re.sub(r'asm volatile\("cp\.async\.ca\.shared\.global[^;]*;"[^;]*;', "if (used) std::memcpy(target, source, 4); else std::memset(target, 0, 4);", text)
    text = re.sub(r'asm volatile\("cp\.async\.wait_all;"[^;]*;', "", text)
    text = re.sub(r">\s+<<<", "><<<", text)
    while "<<<" in text:
        at = text.index("<<<")
        end = text.index(">>>", at)
        begin = at
        if text[begin - 1] == ">":  # template arguments
            depth = 0
            while True:
                begin -= 1
                depth += (text[begin] == ">") - (text[begin] == "<")
                if depth == 0:
                    break
        while re.match(r"[\w:]", text[begin - 1]):
            begin -= 1
        callee, launch = text[begin:at], (pieces(text[at + 3:end]) + ["0"])[:3]
        after = closing(text, end + 3, "(", ")")
        arguments = text[end + 4:after - 1].strip()
        text = text[:begin] + f"::emulated::run({', '.join(launch)}, [](auto... all) {{ {callee}(all...); }}{', ' if arguments else ''}{arguments})" + text[after:]
    return text


def main():
    source, target = map(pathlib.Path, sys.argv[1:3])
    emulated = pathlib.Path(__file__).resolve().parent
    for path in sorted(source.rglob("*.cu*")):
        if emulated in path.resolve().parents:
            continue
        relative = path.relative_to(source)
        own = emulated / relative
        text = own.read_text() if own.exists() else convert(path.read_text())
        copy = target / (relative if path.suffix == ".cuh" else relative.with_suffix(".cpp"))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)


if __name__ == "__main__":
    main()
