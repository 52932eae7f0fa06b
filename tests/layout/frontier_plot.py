# SPDX-License-Identifier: Apache-2.0
"""bench/quality/frontier_plot.py on the table of the README's picture, and on tables that are wrong.

usage: frontier_plot.py ROOT
"""
import pathlib
import subprocess
import sys
import tempfile

root = pathlib.Path(sys.argv[1])
sys.dont_write_bytecode = True
sys.path.insert(0, str(root / "bench/quality"))
import frontier_plot  # noqa: E402

table = root / "bench/results/real_models_frontier.csv"
models = frontier_plot.load(table)
assert len(models) == 2, models
for methods in models.values():
    points = methods["Budgeted+PreRoPE, CPU codes"]
    assert len(points) == 4 and all(windows == 32 for _, _, windows in points), points
    # More bytes lose less.
    assert [rise for _, rise, _ in points] == sorted((rise for _, rise, _ in points), reverse=True), points
script = frontier_plot.script_of(models, "out.svg", 32)
assert "0.25 0.01\n" in script  # no loss, at the axis' end
assert "0.15 0.19\n" in script and "'TurboQuant (1)'" in script, script

with tempfile.TemporaryDirectory() as folder:
    wrong = pathlib.Path(folder) / "wrong.csv"
    for text, message in (("model,bytes\n", "columns model,bytes, expected model,method,bytes,rise,windows"),
                          ("model,method,bytes,rise,windows\n", "no rows"),
                          ("model,method,bytes,rise,windows\na,b,0,1,2\n", ":2: bytes 0.0, more than 0 expected"),
                          ("model,method,bytes,rise,windows\na,b,x,1,2\n", ":2: bytes, rise and windows are numbers")):
        wrong.write_text(text)
        run = subprocess.run([sys.executable, root / "bench/quality/frontier_plot.py", wrong, wrong], text=True,
                             capture_output=True)
        assert run.returncode != 0 and message in run.stderr, (text, run.stderr)
print("frontier_plot.py: 2 models, and 4 tables that are refused")
