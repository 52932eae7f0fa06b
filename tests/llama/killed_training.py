#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A `train-projector` that is killed and started again writes the file and the log of one that was not; what it wrote
is measured by `bpb --trained`.

usage: killed_training.py LOWRANKKV_LLAMA EXAMPLE_DATA TRAINING_PLOT
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

PROGRAM, DATA, PLOT = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]


def command(folder: pathlib.Path, name: str, steps: int = 4) -> list:
    return [PROGRAM, "train-projector", "--model", DATA / "nano", "--text", DATA / "text" / "calibration_prose.txt",
            "--steps", str(steps), "--recover-steps", "2", "--window", "48", "--batch", "1", "--threshold-rate", "0.5",
            "--out", folder / f"{name}.safetensors", "--log", folder / f"{name}.csv", "--ranks", folder / f"{name}_ranks.csv"]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        whole = subprocess.run(command(folder, "whole"), check=True, capture_output=True, text=True)
        assert "protected" in whole.stdout and "of the keys' rank" in whole.stdout, whole.stdout
        checkpoint = folder / "checkpoint"
        more = ["--checkpoint", checkpoint, "--checkpoint-pause", "0"]
        process = subprocess.Popen(command(folder, "resumed") + more, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        seen = set()
        while process.poll() is None and len(seen) < 3:
            if checkpoint.exists():
                seen.add(checkpoint.stat().st_mtime_ns)
            time.sleep(0.002)
        assert process.poll() is None, "the run ended before it was killed"
        process.kill()
        process.wait()
        other = subprocess.run(command(folder, "resumed", 5) + more, capture_output=True, text=True, check=False)
        assert other.returncode == 1 and "steps 4 and 2; this run's" in other.stderr, other.stderr
        subprocess.run(command(folder, "resumed") + more, check=True, capture_output=True)
        assert not checkpoint.exists(), "the file of a run that is done was left"
        for end in (".safetensors", ".csv", "_ranks.csv"):
            first, second = ((folder / f"{name}{end}").read_bytes() for name in ("whole", "resumed"))
            assert first == second, f"{end} of {len(second)} bytes differs from that of {len(first)}"
        steps = [line.split(",")[0] for line in (folder / "whole.csv").read_text().splitlines()]
        assert steps == ["step", "1", "2", "3", "4", "5", "6"], steps
        plot = subprocess.run([sys.executable, PLOT, folder / "plot", folder / "whole.csv", folder / "whole_ranks.csv"],
                              check=True, capture_output=True, text=True)
        # nano has 4 layers, of which the first two and the last are protected.
        assert "6 steps" in plot.stdout and "3 blocks" in plot.stdout, plot.stdout
        table = folder / "table.json"
        subprocess.run([PROGRAM, "bpb", "--model", DATA / "nano", "--text", DATA / "text" / "prose.txt", "--windows",
                        "1", "--window", "256", "--method", "FullKV,StarKV", "--trained",
                        folder / "whole.safetensors", "--json", table], check=True, capture_output=True)
        full, trained = json.loads(table.read_text())
        assert trained["method"] == "StarKV" and trained["bits_per_byte"]["prose"] > 0.0, trained
        assert trained["text_ratio_measured"] != full["text_ratio_measured"], (trained, full)
        print(f"killed after {len(seen)} files; the same file and log")


if __name__ == "__main__":
    main()
