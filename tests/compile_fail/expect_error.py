# SPDX-License-Identifier: Apache-2.0
"""Compiles a file that must not compile: exactly one error, and its text contains what the file's first
`// expected-error: text` (or nothing after the colon: any error) line says."""
import re
import subprocess
import sys

source, *compiler = sys.argv[1:]
expected = re.search(r"// expected-error:(.*)", open(source).read()).group(1).strip()
run = subprocess.run([*compiler, source], capture_output=True, text=True)
errors = [line for line in run.stderr.splitlines() if re.search(r"\berror:", line)]
if run.returncode == 0:
    sys.exit("it compiles")
if len(errors) != 1 or expected not in errors[0]:
    sys.exit(f"expected one error with '{expected}', got {len(errors)}:\n" + "\n".join(errors))
print(errors[0])
