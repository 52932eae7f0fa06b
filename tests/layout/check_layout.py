# SPDX-License-Identifier: Apache-2.0
"""Layout rules of include/: line budget, no include cycles, includes point down only, macro prefix, docstrings; folders of tests/; words."""
import pathlib
import re
import sys

base = pathlib.Path(sys.argv[1]).resolve()
root = base / "include"
headers = sorted([*root.rglob("*.hpp"), *root.rglob("*.cuh")])
faults = []

# Who may include whom: a header's layer may include its own layer and lower ones.
LAYERS = [
    {"version.hpp", "config.hpp"},
    {"core", "io"},
    {"fwd.hpp", "basis", "updater", "token_policy", "quantizer"},
    {"concepts", "layer_stack.hpp", "compressed_kv_cache.hpp"},
    {"linalg"},
    {"diagnostics"},
    {"cpu"},
    {"calibrate", "detail", "cuda"},
    {"train"},
    {"presets.hpp", "cuda.hpp"},
    {"budgeted.hpp"},
    {"lowrankkv.hpp"},
]


def layer(path):
    top = path.split("/")[1]
    return next((i for i, names in enumerate(LAYERS) if top in names), None)


# The folders of cuda/: a folder may include itself and those before it.
CUDA_FOLDERS = [
    "runtime", "tiles", "maps", "state", "epochs",
    "basis", "updater", "token_policy", "quantizer", "layer",
    "attention/post_rope", "attention/joint", "attention/pre_rope", "attention",
    "scores", "store", "store/compaction", "decode", "update", "compress", "sequence", "cache", "",
]
# Beside the policies, what several of them share on this backend.
CUDA_ONLY = {"basis/folded_basis", "token_policy/row_choice", "quantizer/code_planes", "quantizer/choose_tiles"}
MIRRORED = ["basis", "updater", "token_policy", "quantizer"]  # at the paths of the policies


def cuda_folder(path):
    return str(pathlib.PurePosixPath(path).relative_to("lowrankkv/cuda").parent).replace(".", "")


includes = {}
for header in headers:
    name = str(header.relative_to(root))
    text = header.read_text()
    lines = text.splitlines()
    if "#pragma once" not in text and name != "lowrankkv/version.hpp":
        faults.append(f"{name}: no #pragma once")
    if "/// @file" not in text:
        faults.append(f"{name}: no @file docstring")
    for macro in re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M):
        if not macro.startswith("LOWRANKKV_"):
            faults.append(f"{name}: macro {macro} lacks the prefix LOWRANKKV_")
    if re.search(r"^namespace\s*\{", text, re.M):
        faults.append(f"{name}: an anonymous namespace")
    if re.search(r"(?<![(\w:])std::(min|max)\(", text):
        faults.append(f"{name}: std::min or std::max without parentheses around the name")
    includes[name] = re.findall(r'#include "(lowrankkv/[^"]+)"', text)
    if layer(name) is None:
        faults.append(f"{name}: belongs to no layer; see LAYERS in this script")
    for target in includes[name]:
        if not (root / target).exists():
            faults.append(f"{name}: includes {target}, which does not exist")
        elif layer(name) is not None and layer(target) is not None and layer(target) > layer(name):
            faults.append(f"{name}: includes {target}, which is above it")
    if name.startswith("lowrankkv/cuda/"):
        folder = cuda_folder(name)
        if folder not in CUDA_FOLDERS:
            faults.append(f"{name}: folder {folder} is not one of CUDA_FOLDERS in this script")
            continue
        for target in includes[name]:
            if target.startswith("lowrankkv/cuda/") and CUDA_FOLDERS.index(cuda_folder(target)) > CUDA_FOLDERS.index(folder):
                faults.append(f"{name}: includes {target}, whose folder is above")
        if folder in MIRRORED and not (root / "lowrankkv" / folder / (header.stem + ".hpp")).exists() and folder + "/" + header.stem not in CUDA_ONLY:
            faults.append(f"{name}: there is no policy {folder}/{header.stem}.hpp")
    # A CUDA translation unit has no Eigen, and the CPU backend no CUDA.
    for target in includes[name]:
        if name != "lowrankkv/cuda.hpp" and ("lowrankkv/cuda/" in target) != name.startswith("lowrankkv/cuda/") and ("lowrankkv/cuda/" in target or layer(target) is not None and target.startswith("lowrankkv/cpu/")):
            faults.append(f"{name}: includes {target} of another backend")
    # Policy headers are shared with other backends and must not need Eigen.
    if layer(name) is not None and layer(name) <= 3 and "<Eigen" in text:
        faults.append(f"{name}: needs Eigen, but is shared by all backends")
    # Every class, struct, function and alias at namespace scope has a docstring.
    previous = ""
    depth_detail = False
    heads = re.sub(r"^(template <[^{};]*?)\n\s+", r"\1 ", text, flags=re.M)  # a head may take two lines
    # A member that is defined outside its class is documented where it is declared.
    heads = re.sub(r"^template <class Layer>\n(?=[^{};]*?\w+<Layer>::\w+\()", "", heads, flags=re.M)
    for line in heads.splitlines():
        if re.match(r"namespace (detail|io::detail)", line):
            depth_detail = True
        if re.match(r"}\s*// namespace (detail|io::detail)", line):
            depth_detail = False
        public = re.match(r"(struct|class|enum class|using|inline|constexpr|template)\b", line)
        forward = re.match(r"(struct|class) \w+;", line)
        if public and not forward and not depth_detail and not previous.startswith(("///", "template", "//")) and "///<" not in line:
            specialisation = line == "template <>"
            sibling = re.match(r"(using|inline|template|concept|constexpr)", line) and previous and not previous.startswith("}") and previous != ""
            concept = line.startswith("template <class") and "concepts/" in name
            if not (specialisation or sibling or concept):
                faults.append(f"{name}: no docstring before: {line[:70]}")
        previous = line

# Private words that the field has terms for (docs/glossary.md).
BANNED = re.compile(r"\b(unrotated|turned|weigh|weighs|weighed|weighing|mass|masses|lift|lifts|lifted|lifting|rolls|"
                    r"close_up|loose tiles|settle|settled|meant|parked|unseated|ever_pinned)\b", re.I)
SUFFIXES = {".hpp", ".cuh", ".cpp", ".cu", ".h", ".c", ".py"}
sources = [path for folder in ("tests", "bench", "examples") for path in sorted((base / folder).rglob("*")) if path.suffix in SUFFIXES and path != pathlib.Path(__file__).resolve()]
for path in [*headers, *sources, *sorted((base / "docs").glob("*.md")), base / "README.md", base / "CONTRIBUTING.md"]:
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if path in sources:
            line = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line)  # labels that recorded results have
        if path.name != "glossary.md" and (word := BANNED.search(line)):
            faults.append(f"{path.relative_to(base)}:{number}: {word.group(0)}; the field has another term (docs/glossary.md)")

# A folder can be read as a whole.
for folder in sorted({path.parent for path in headers}):
    count, most = sum(path.parent == folder for path in headers), 3 if folder.name == "cuda" else 20
    if folder.is_relative_to(root / "lowrankkv/cuda") and count > most:
        faults.append(f"{folder.relative_to(root)}: {count} headers, at most {most}")

# Tests mirror the paths of what they test: a test of include/lowrankkv/PATH/subject lies in tests/PATH/. Besides, whatever is under these:
TEST_FOLDERS = {"support", "properties", "compressed_kv_cache", "cuda/support", "cuda/emulated", "compile_fail", "layout", "consumers", "llama", "c_api", "fuzz"}
tests = base / "tests"
for folder in sorted({path.parent for path in tests.rglob("*") if path.is_file() and "__pycache__" not in path.parts} - {tests}):
    name = folder.relative_to(tests)
    special = any(str(part) in TEST_FOLDERS for part in [name, *name.parents])
    if not special and not (root / "lowrankkv" / name).is_dir():
        faults.append(f"tests/{name}: there is no include/lowrankkv/{name} that its tests could be of; move them to the path of their subject, or add the folder to TEST_FOLDERS in this script")

# Nor does what a CUDA header includes need Eigen.
for name in includes:
    if name.startswith("lowrankkv/cuda/"):
        via = {target: name for target in includes[name]}
        for target in (queue := list(via)):
            for further in includes.get(target, ()):
                if further not in via:
                    via[further] = target
                    queue.append(further)
            if target in includes and "<Eigen" in (root / target).read_text():
                faults.append(f"{name}: needs Eigen, by {target}, which {via[target]} includes")

WHITE, GREY, BLACK = 0, 1, 2
colour = dict.fromkeys(includes, WHITE)

def visit(name, path):
    colour[name] = GREY
    for target in includes.get(name, ()):
        if colour.get(target) == GREY:
            faults.append("include cycle: " + " -> ".join(path + [name, target]))
        elif colour.get(target) == WHITE:
            visit(target, path + [name])
    colour[name] = BLACK


for name in includes:
    if colour[name] == WHITE:
        visit(name, [])

for fault in faults:
    print(fault)
print(f"{len(headers)} headers, longest {max(len(h.read_text().splitlines()) for h in headers)} lines, {len(faults)} faults")
sys.exit(1 if faults else 0)
