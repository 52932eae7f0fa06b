#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bundles between the library and examples/python/bundle.py, both ways.

usage: against_python.py BUNDLE_EXCHANGE SOURCES [LOWRANKKV_LLAMA]

BUNDLE_EXCHANGE is tests/calibrate/bundle_exchange.cpp, built; SOURCES the repository; with LOWRANKKV_LLAMA the engine
also reads a bundle from Python. Exits with 77, which ctest counts as skipped, without the packages numpy and
safetensors.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
    from safetensors.numpy import load_file, save_file
except ImportError:
    print("The packages numpy and safetensors are not installed: bundles are not exchanged with Python.")
    sys.exit(77)

EXCHANGE, SOURCES, ENGINE = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
SCRIPTS = SOURCES / "examples" / "python"
sys.path.insert(0, str(SCRIPTS))
sys.dont_write_bytecode = True
import bundle  # noqa: E402
import pca_bundle  # noqa: E402


def run(*arguments) -> tuple:
    done = subprocess.run([str(argument) for argument in arguments], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    return done.returncode, done.stdout + done.stderr


class Exchange(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        code, said = run(EXCHANGE, "write", cls.folder)
        assert code == 0, said
        cls.rows = load_file(cls.folder / "rows.safetensors")

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def rows_of(self, layer: int) -> dict:
        return {name: self.rows[f"layers.{layer}.{name}"]
                for name in ("query", "key", "value", "key_gradient", "value_gradient")}

    def test_what_the_library_writes_comes_back_the_same(self):
        for name in ("loss", "output", "pre_rope"):
            written, again, loaded = (self.folder / f"{name}{end}.safetensors" for end in ("", "_again", "_loaded"))
            read = bundle.Bundle.read(written)
            read.write(again)
            self.assertEqual(run(EXCHANGE, "same", written, again), (0, f"the same {len(read.tensors)} tensors\n"))
            self.assertEqual(run(EXCHANGE, "load", again, loaded), (0, "loaded\n"))
            self.assertEqual(run(EXCHANGE, "same", written, loaded)[0], 0)
            self.assertEqual(bundle.table(read).splitlines()[-1].split()[:2], ["1", "700"])
        code, said = run(sys.executable, SCRIPTS / "bundle.py", "check", written)
        self.assertEqual((code, said), (0, f"{written}: version 5, 2 layers, 53 tensors: nothing wrong\n"))
        code, said = run(sys.executable, SCRIPTS / "bundle.py", "show", written)
        self.assertEqual((code, said), (0, bundle.table(read) + "\n"))
        # Another number is not the same.
        read.tensors["layers.1.key.sum"][0, 0] += 1.0
        read.write(again)
        self.assertEqual(run(EXCHANGE, "same", written, again)[0], 1)

    def test_numpy_computes_of_the_rows_what_the_library_does(self):
        own = bundle.of_rows([self.rows_of(i) for i in range(2)], 4, keep_sinks=True)
        written = bundle.Bundle.read(self.folder / "loss.safetensors")
        self.assertEqual(own.metadata, written.metadata)
        self.assertEqual(set(own.tensors), set(written.tensors))
        for name, values in written.tensors.items():
            # Gradients are squared in f32 in the library, moments in f64; samples are the rows themselves.
            near = 0.0 if name.endswith("sample") else 1e-5 if name.endswith("metric") else 1e-12
            np.testing.assert_allclose(own.tensors[name], values, rtol=0, atol=near * np.abs(values).max(initial=0),
                                       err_msg=name)
        # Mean, axes and error metric, against the rows.
        key = self.rows["layers.1.key"][:, 1].astype(np.float64)
        mean, second, count = written.moments(1, "key", 1)
        np.testing.assert_allclose(mean, key.mean(0), rtol=0, atol=1e-12)
        self.assertEqual(count, 700)
        axes, energies, taken_off = written.axes(1, "key", 1, 5, centred=True)
        np.testing.assert_allclose(taken_off, mean)
        np.testing.assert_allclose(((key - mean) @ axes).var(0), energies, rtol=1e-9)
        gradients = self.rows["layers.0.value_gradient"][4:, 0].astype(np.float64)
        np.testing.assert_allclose(written.error_metric(0, "coded_value", 0), gradients.T @ gradients / 696, rtol=1e-4,
                                   atol=1e-6)

    def test_axes_from_numpy_attend_as_those_of_the_library(self):
        made = self.folder / "pca.safetensors"
        for how in ("uncentred", "centred"):
            flags = ["--centred"] if how == "centred" else []
            code, said = run(sys.executable, SCRIPTS / "pca_bundle.py", self.folder / "rows.safetensors", made,
                             "--num-qo-heads", 4, *flags)
            self.assertEqual(code, 0, said)
            code, said = run(EXCHANGE, "attend", self.folder / "rows.safetensors", made, how)
            self.assertEqual(code, 0, said)
            apart, lost = map(float, said.split())
            self.assertGreater(lost, 1e-3)  # half of the axes are not all
            self.assertLess(apart, 1e-5)
        # Other axes give other outputs.
        axes = np.broadcast_to(np.eye(16), (2, 2, 16, 16))
        bundle.of_axes(axes, axes, 4).write(made)
        self.assertGreater(float(run(EXCHANGE, "attend", self.folder / "rows.safetensors", made, how)[1].split()[0]),
                           1e-3)

    def test_malformed_bundles_are_refused_with_both_values(self):
        good = bundle.Bundle.read(self.folder / "pre_rope.safetensors")
        path, out = self.folder / "malformed.safetensors", self.folder / "never.safetensors"

        def refused(metadata: dict, tensors: dict, library: list, python: list, without: str = None) -> None:
            changed = dict(good.tensors) | tensors
            if without:
                del changed[without]
            save_file({name: np.ascontiguousarray(values) for name, values in changed.items()}, path,
                      good.metadata | metadata)
            code, said = run(EXCHANGE, "load", path, out)
            self.assertEqual(code, 1 if library else 0, said)
            for part in library:
                self.assertIn(part, said)
            with self.assertRaises(bundle.BundleError) as raised:
                bundle.Bundle.read(path)
            for part in python:
                self.assertIn(part, str(raised.exception))

        key = "layers.1.key.second_moment"
        refused({"version": "6"}, {}, ["version 6", "expected lowrankkv.moments version 4 or 5"],
                ["version: 6, expected 5 or 4"])
        refused({"format": "other"}, {}, ["format other"], ["format: other, expected lowrankkv.moments"])
        refused({"keys": "rotated"}, {}, ["keys rotated, expected post_rope or pre_rope"], ["keys: rotated, expected"])
        refused({"pairing": "none"}, {}, ["pairing none, expected half_split or interleaved"], ["pairing: none"])
        refused({"coded_metric": "l2"}, {}, ["coded_metric l2, expected output, loss or combined"], ["coded_metric: l2"])
        refused({"num_layers": "3"}, {}, ["num_layers: bundle 3, model 2"], ["tensor layers.2.key.count: missing"])
        refused({"head_dim": "16.0"}, {}, ["head_dim: bundle 16.0, model 16"], ["head_dim: 16.0, expected a number"])
        refused({"num_qo_heads": "5"}, {}, ["num_qo_heads: bundle 5, model 4"],
                ["num_qo_heads: 5, expected a multiple of num_kv_heads, 2"])
        refused({}, {key: np.zeros((2, 8, 16))}, [key, "[2, 8, 16], expected [2, 16, 16]"],
                [key, "[2, 8, 16], expected [2, 16, 16]"])
        refused({}, {key: np.zeros((2, 16, 16), np.int32)}, [key, "dtype I32, expected F32, F64, F16 or BF16"],
                [key, "dtype I32, expected one of F64, F32, F16"])
        refused({}, {}, [f"tensor {key} is missing among"], [f"tensor {key}: missing among"], without=key)
        refused({}, {"rope.frequencies": np.full(8, np.nan)}, ["rope.frequencies holds nan at element 0"],
                ["rope.frequencies: nan at element 0"])
        refused({}, {"layers.0.value.sample": np.full((2, 3, 16), np.inf, np.float32)},
                ["layers.0.value.sample holds inf at element 0"], ["layers.0.value.sample: inf at element 0"])
        refused({}, {"layers.0.key.count": np.full(2, 1e17)}, ["are of 1e+17 rows"], ["from 1e+17 to 1e+17, expected"])
        refused({}, {"layers.0.key.sum": np.full((2, 16), 1e300)}, ["sums up to 1e+300"], ["up to 1e+300"])
        refused({}, {"layers.0.coded_queries": np.full(1, -1.0)}, ["coded_queries is -1"], ["from -1.0 to -1.0"])
        code, said = run(sys.executable, SCRIPTS / "bundle.py", "check", path)
        self.assertEqual((code, said), (1, f"{path}: tensor layers.0.coded_queries: from -1.0 to -1.0, expected 0 to "
                                           "9007199254740992\n"))
        self.assertFalse(out.exists())
        # The library leaves out what it does not know.
        refused({}, {"layers.0.other": np.zeros(3)}, [], ["layers.0.other: of shape [3]"])
        path.write_bytes((self.folder / "loss.safetensors").read_bytes()[:5000])
        code, said = run(EXCHANGE, "load", path, out)
        self.assertEqual(code, 1, said)
        self.assertIn("file has 5000", said)
        with self.assertRaisesRegex(bundle.BundleError, "malformed.safetensors"):
            bundle.Bundle.read(path)

    def test_makers_refuse_what_no_bundle_can_say(self):
        axes = np.broadcast_to(np.eye(16), (2, 2, 16, 16))
        with self.assertRaisesRegex(bundle.BundleError, "U\\^T U differs from I by 3, at most 1e-05"):
            bundle.of_axes(2 * axes, axes, 4)
        with self.assertRaisesRegex(bundle.BundleError, "num_qo_heads: 3, expected a multiple of num_kv_heads, 2"):
            bundle.of_axes(axes, axes, 3)
        with self.assertRaisesRegex(bundle.BundleError, "value_energies: from 0 to 15"):
            bundle.of_axes(axes, axes, 4, value_energies=np.broadcast_to(np.arange(16.0), (2, 2, 16)))
        rows = self.rows_of(0)
        with self.assertRaisesRegex(bundle.BundleError, r"value has shape \[5, 2, 16\], expected \[700, 2, 16\]"):
            bundle.of_rows([rows | {"value": rows["value"][:5]}], 4)

    @unittest.skipUnless(ENGINE, "no lowrankkv-llama given")
    def test_what_the_engine_writes_is_read(self):
        data, written = SOURCES / "examples" / "data", self.folder / "calibrated.safetensors"
        code, said = run(ENGINE[0], "calibrate", "--model", data / "nano", "--text", data / "text" / "code.txt",
                         "--tokens", 300, "--window", 300, "--metric", "loss", "--sinks", "--out", written)
        self.assertEqual(code, 0, said)
        read = bundle.Bundle.read(written)
        self.assertEqual(read.metadata["coded_metric"], "loss")
        self.assertEqual(read.metadata["source"], "code")
        self.assertEqual(read.moments(3, "sink_key", 1)[2], 4)
        self.assertGreater(np.trace(read.error_metric(3, "sink_value", 1)), 0)

    @unittest.skipUnless(ENGINE, "no lowrankkv-llama given")
    def test_the_engine_runs_on_axes_from_python(self):
        made, random = self.folder / "nano.safetensors", np.random.default_rng(1)
        rows = {f"layers.{i}.{part}": random.standard_normal((128, 2, 64)).astype(np.float32)
                for i in range(4) for part in ("key", "value")}
        pca_bundle.pca_bundle(rows, 4).write(made)
        nano = SOURCES / "examples" / "data" / "nano"
        code, said = run(ENGINE[0], "generate", "--model", nano, "--bases", made, "--method", "StaticPCA", "--ratio", 1,
                         "--prompt", "The history of", "--max-tokens", 4)
        self.assertEqual(code, 0, said)
        self.assertTrue(said.startswith("The history of"), said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
