# SPDX-License-Identifier: Apache-2.0
"""bench/serving_plot.py on the figures of docs/serving.md, and on a file that is none of serve-bench.

usage: serving_plot.py ROOT
"""
import pathlib
import subprocess
import sys
import tempfile

root = pathlib.Path(sys.argv[1])
sys.dont_write_bytecode = True
sys.path.insert(0, str(root / "bench"))
import serving_plot  # noqa: E402

panels = serving_plot.load([root / "bench/results/serving_h200.json"])
assert list(panels) == [8, 32, 127], panels
assert panels[127]["FullKV"][0][0] == 1 and panels[127]["FullKV"][1][0] == 7, panels[127]
for tokens in (32, 127):  # where memory is full, compression serves more, and faster
    few, many = panels[tokens]["FullKV"][-1], panels[tokens]["Budgeted 0.1"][-1]
    assert many[0] > 6 * few[0] and many[1] > 4 * few[1], (few, many)
script = serving_plot.script_of(panels, "out.svg")
assert "set title 'sequences of 32K tokens'" in script and "284 5481" in script, script
with tempfile.TemporaryDirectory() as folder:
    wrong = pathlib.Path(folder) / "wrong.json"
    for text, message in (('[{"method": "FullKV"}]', "row 0 has no ratio, most_sequences"), ("[]", "no rows")):
        wrong.write_text(text)
        run = subprocess.run([sys.executable, root / "bench/serving_plot.py", wrong, wrong], text=True, capture_output=True)
        assert run.returncode != 0 and message in run.stderr, (text, run.stderr)
print("serving_plot.py: 3 lengths, and 2 files that are refused")
