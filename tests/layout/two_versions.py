# SPDX-License-Identifier: Apache-2.0
"""two_versions.py INCLUDE WORK COMPILER...: what becomes of two versions of the library in one program. In one translation unit
they are refused; in two they share nothing, and an object of one cannot be handed to the other."""
import re
import shutil
import subprocess
import sys
from pathlib import Path

include, work, compiler = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
shutil.rmtree(work, ignore_errors=True)
shutil.copytree(include, work / "other")
version = "_".join(re.findall(r"#define LOWRANKKV_VERSION_\w+ (\d+)", (include / "lowrankkv/version.hpp").read_text()))
other_header, other_config = work / "other/lowrankkv/version.hpp", work / "other/lowrankkv/config.hpp"
other_header.write_text(re.sub(r"(MAJOR|MINOR|PATCH) \d+$", r"\1 9", re.sub(r"(MAJOR|MINOR|PATCH) != \d+", r"\1 != 9", other_header.read_text()), flags=re.M))
text = other_config.read_text()
if f"namespace v{version} {{" not in text:
    sys.exit(f"config.hpp: the inline namespace is not v{version}")
other_config.write_text(text.replace(f"namespace v{version} {{", "namespace v9_9_9 {"))

(work / "both.cpp").write_text(f'#include "{include}/lowrankkv/version.hpp"\n#include "{work}/other/lowrankkv/version.hpp"\n')
(work / "mine.cpp").write_text(
    '#include "lowrankkv/core/cache_config.hpp"\nint theirs();\nint mine() { return static_cast<int>(sizeof(lowrankkv::CacheShape)) + LOWRANKKV_VERSION_MAJOR; }\nint main() { return mine() == theirs(); }\n'
)
(work / "theirs.cpp").write_text('#include "lowrankkv/core/cache_config.hpp"\nint theirs() { return static_cast<int>(sizeof(lowrankkv::CacheShape)) + LOWRANKKV_VERSION_MAJOR; }\n')
(work / "gives.cpp").write_text('#include "lowrankkv/core/cache_config.hpp"\nint take(const lowrankkv::CacheShape&);\nint main() { return take({}); }\n')
(work / "takes.cpp").write_text('#include "lowrankkv/core/cache_config.hpp"\nint take(const lowrankkv::CacheShape&) { return 0; }\n')


def run(*arguments):
    return subprocess.run([*compiler, "-std=c++20", *map(str, arguments)], capture_output=True, text=True)


def must(condition, said, result):
    if not condition:
        sys.exit(f"{said}\n{result.stdout}{result.stderr}")


def program(first, second):
    for source, headers in ((first, include), (second, work / "other")):
        result = run("-c", work / f"{source}.cpp", "-I", headers, "-o", work / f"{source}.o")
        must(result.returncode == 0, f"{source}.cpp does not compile", result)
    return run(work / f"{first}.o", work / f"{second}.o", "-o", work / "program")


result = run("-fsyntax-only", work / "both.cpp")
must(result.returncode != 0 and "a different version of the library" in result.stderr, "two versions in one translation unit were not refused", result)
result = program("mine", "theirs")
must(result.returncode == 0, "two versions that know nothing of each other do not link", result)
must(subprocess.run([work / "program"]).returncode == 0, "the two are one", result)
result = program("gives", "takes")
must(result.returncode != 0 and "take" in result.stderr, "an object of one version was handed to the other", result)
print(f"{version} and 9_9_9: refused in one translation unit, strangers in one program")
