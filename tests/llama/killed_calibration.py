#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A `calibrate` that is killed and started again writes the bundles of one that was not.

usage: killed_calibration.py LOWRANKKV_LLAMA EXAMPLE_DATA
"""
import pathlib
import subprocess
import sys
import tempfile
import time

PROGRAM, DATA = sys.argv[1], pathlib.Path(sys.argv[2])


def command(folder: pathlib.Path, name: str, tokens: int = 3000) -> list:
    return [PROGRAM, "calibrate", "--model", DATA / "nano", "--text",
            f"{DATA / 'text' / 'calibration_prose.txt'},{DATA / 'text' / 'code.txt'}", "--tokens", str(tokens),
            "--window", "512", "--metric", "loss", "--sinks", "--gradient-tokens", "3000",
            "--out", folder / f"{name}.safetensors", "--pre-rope-out", folder / f"{name}_pre.safetensors"]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        subprocess.run(command(folder, "whole"), check=True, capture_output=True)
        checkpoint = folder / "checkpoint"
        more = ["--checkpoint", checkpoint, "--checkpoint-pause", "0"]
        killed = 0
        for files in (2, 5):  # in the pass of moments, and in that of gradients
            process = subprocess.Popen(command(folder, "resumed") + more, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            seen = set()
            while process.poll() is None and len(seen) < files:
                if checkpoint.exists():
                    seen.add(checkpoint.stat().st_mtime_ns)
                time.sleep(0.002)
            if process.poll() is None:
                process.kill()
                killed += 1
            process.wait()
        assert killed > 0, "no run was killed before its end"
        assert checkpoint.exists(), "a killed run left no file"
        other = subprocess.run(command(folder, "resumed", 2999) + more, capture_output=True, text=True, check=False)
        assert other.returncode == 1 and "tokens 3000, of this run 2999" in other.stderr, other.stderr
        last = subprocess.run(command(folder, "resumed") + more, capture_output=True, text=True, check=True)
        for end in ("", "_pre"):
            whole, resumed = ((folder / f"{name}{end}.safetensors").read_bytes() for name in ("whole", "resumed"))
            assert whole == resumed, f"bundle{end} of {len(resumed)} bytes differs from that of {len(whole)}"
        assert not checkpoint.exists(), "the file of a run that is done was left"
        print(f"killed {killed} times, the bundles are the same\n{last.stderr}")


if __name__ == "__main__":
    main()
