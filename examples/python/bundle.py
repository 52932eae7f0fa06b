#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads, checks, makes and writes calibration bundles of lowrankkv, as docs/bundle.md describes them.

usage: bundle.py show FILE     a table of what is in it, layer by layer
       bundle.py check FILE    says what docs/bundle.md does not allow, with both values; exits with 1 then

As a module: Bundle.read(path), Bundle.write(path), of_axes() for axes that were computed elsewhere, of_rows() for rows
and gradients. Packages: numpy, safetensors.

Shapes: L layers, H KV heads, D = head_dim. Rows are [1, D]; second moments are sums of x^T x.
"""
import argparse
import dataclasses
import pathlib
import sys

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

FORMAT = "lowrankkv.moments"
VERSIONS = ("5", "4")
TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
SAMPLE_ROWS, CODED_SAMPLE_ROWS, SINKS = 256, 512, 4
MOST_ROWS, MOST = 2.0**53, float(np.finfo(np.float32).max)

# Tensors of a layer: (names, type, shape, when). An extent of None is any number.
_MOMENTS = (("second_moment", ("H", "D", "D")), ("sum", ("H", "D")), ("count", ("H",)))


def _schema() -> list:
    rows = [(f"{part}.{name}", "F64", shape, "always") for part in ("query", "key", "value")
            for name, shape in _MOMENTS]
    rows += [(f"{part}.sample", "F32", ("H", None, "D"), "always") for part in ("key", "value")]
    rows += [("values.second_moment", "F64", ("H*D", "H*D"), "always"), ("values.sum", "F64", ("H*D",), "always"),
             ("values.count", "F64", (1,), "always")]
    for when, prefix in (("always", "coded_"), ("sinks", "sink_")):
        for part in ("key", "value"):
            rows += [(f"{prefix}{part}.{name}", "F64", shape, when) for name, shape in _MOMENTS]
            rows.append((f"{prefix}{part}.metric", "F64", ("H", "D", "D"), when))
    rows += [(f"coded_{part}.sample", "F32", ("H", None, "D"), "version 5") for part in ("key", "value")]
    return rows + [("coded_queries", "F64", (1,), "always"), ("stream_squares", "F32", (None,), "always")]


LAYER_TENSORS = _schema()
FREQUENCIES = ("rope.frequencies", "F64", (None,), "pre-RoPE keys")
COUNTS = ("num_layers", "num_qo_heads", "num_kv_heads", "head_dim")


class BundleError(ValueError):
    """A bundle that docs/bundle.md does not allow. The message names the field and both values."""


@dataclasses.dataclass
class Bundle:
    """A bundle in memory: `metadata`, strings by key, and `tensors`, numpy arrays by name."""

    metadata: dict
    tensors: dict

    @classmethod
    def read(cls, path) -> "Bundle":
        """Reads a file and checks it. Raises BundleError with everything that is wrong."""
        bundle = cls._read(path)
        bundle._refuse(path)
        return bundle

    @classmethod
    def _read(cls, path) -> "Bundle":
        try:
            with safe_open(str(path), framework="numpy") as file:
                tensors = {}
                for name in file.keys():
                    dtype = file.get_slice(name).get_dtype()
                    if dtype not in TYPES:  # numpy has no bfloat16
                        raise BundleError(f"{path}: tensor {name} has dtype {dtype}, expected one of "
                                          f"{', '.join(TYPES)}")
                    tensors[name] = file.get_tensor(name)
                return cls(dict(file.metadata() or {}), tensors)
        except (SafetensorError, OSError) as error:
            raise BundleError(f"{path}: {error}") from error

    def write(self, path) -> None:
        """Checks the bundle and writes it. Raises BundleError, and writes nothing, if something is wrong."""
        self._refuse(path)
        whole = {name: np.ascontiguousarray(values) for name, values in self.tensors.items()}
        save_file(whole, str(path), self.metadata)

    def _refuse(self, path) -> None:
        if faults := self.faults():
            raise BundleError(f"{path}: " + "; ".join(faults))

    @property
    def num_layers(self) -> int:
        return int(self.metadata["num_layers"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.metadata["num_kv_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.metadata["head_dim"])

    def faults(self) -> list:
        """What docs/bundle.md does not allow, a line each, with field and both values. Empty: nothing."""
        return self._metadata_faults() or self._tensor_faults()

    def _metadata_faults(self) -> list:
        faults = []

        def one_of(key: str, values: tuple) -> None:
            if self.metadata.get(key, "missing") not in values:
                faults.append(f"{key}: {self.metadata.get(key, 'missing')}, expected {' or '.join(values)}")

        one_of("format", (FORMAT,))
        one_of("version", VERSIONS)
        one_of("keys", ("post_rope", "pre_rope"))
        if self.metadata.get("version") != "4":
            one_of("coded_metric", ("output", "loss", "combined"))
        if self.metadata.get("keys") == "pre_rope":
            one_of("pairing", ("half_split", "interleaved"))
        for key in COUNTS:
            text = self.metadata.get(key, "missing")
            if not (text.isascii() and text.isdigit() and text == str(int(text)) and int(text) > 0):
                faults.append(f"{key}: {text}, expected a number of 1 or more")
        if not faults and int(self.metadata["num_qo_heads"]) % self.num_kv_heads != 0:
            faults.append(f"num_qo_heads: {self.metadata['num_qo_heads']}, expected a multiple of num_kv_heads, "
                          f"{self.num_kv_heads}")
        return faults

    def _tensor_faults(self) -> list:
        sinks = any(".sink_" in name for name in self.tensors)
        asked = {"always": True, "sinks": sinks, "version 5": self.metadata["version"] == "5",
                 "pre-RoPE keys": self.metadata["keys"] == "pre_rope"}
        expected = {f"layers.{i}.{name}": (shape, when) for i in range(self.num_layers)
                    for name, _, shape, when in LAYER_TENSORS}
        expected[FREQUENCIES[0]] = FREQUENCIES[2:]
        faults = [f"tensor {name}: of shape {list(values.shape)}, docs/bundle.md has none of that name"
                  for name, values in self.tensors.items() if name not in expected]
        for name, (shape, when) in expected.items():
            if name not in self.tensors:
                if asked[when]:
                    faults.append(f"tensor {name}: missing among {len(self.tensors)}, expected ({when})")
                continue
            faults += self._faults_of(name, shape)
        return faults

    def _faults_of(self, name: str, shape: tuple) -> list:
        values = self.tensors[name]
        sizes = {"H": self.num_kv_heads, "D": self.head_dim, "H*D": self.num_kv_heads * self.head_dim}
        wanted = [sizes.get(extent, extent) for extent in shape]
        if values.dtype not in TYPES.values():
            return [f"tensor {name}: dtype {values.dtype}, expected one of {', '.join(TYPES)}"]
        if len(wanted) != values.ndim or any(own is not None and own != is_ for own, is_ in zip(wanted, values.shape)):
            text = ", ".join("any" if extent is None else str(extent) for extent in wanted)
            return [f"tensor {name}: shape {list(values.shape)}, expected [{text}]"]
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values.ravel()))[0])
            return [f"tensor {name}: {values.ravel()[at]} at element {at}, finite expected"]
        most = {"second_moment": MOST**2, "sum": MOST}.get(kind := name.rsplit(".", 1)[1])
        if kind in ("count", "coded_queries") and values.size and not (0 <= values.min() <= values.max() <= MOST_ROWS):
            return [f"tensor {name}: from {values.min()} to {values.max()}, expected 0 to {MOST_ROWS:.0f}"]
        if most is not None and values.size:
            rows = max(1.0, float(np.max(self.tensors.get(name.rsplit(".", 1)[0] + ".count", np.ones(1)))))
            largest = float(np.abs(values).max())
            if largest > rows * most:
                return [f"tensor {name}: up to {largest:g}, those of {rows:.0f} rows in f32 are at most "
                        f"{rows * most:g}"]
        if kind == "metric" and np.abs(values - values.swapaxes(1, 2)).max() > 1e-6 * np.abs(values).max():
            return [f"tensor {name}: differs by {np.abs(values - values.swapaxes(1, 2)).max():g} from its transpose, "
                    "a symmetric one expected"]
        return []

    def moments(self, layer: int, part: str, head: int) -> tuple:
        """Mean [D], second moment E[x^T x] [D, D] and number of rows of a part of a head: "query", "key", "value",
        "coded_key", "coded_value", "sink_key" or "sink_value". Zeros without rows."""
        prefix = f"layers.{layer}.{part}."
        count = float(self.tensors[prefix + "count"][head])
        second = self.tensors[prefix + "second_moment"][head].astype(np.float64)
        total = self.tensors[prefix + "sum"][head].astype(np.float64)
        return total / max(count, 1.0), second / max(count, 1.0), count

    def axes(self, layer: int, part: str, head: int, rank: int, centred: bool = False) -> tuple:
        """Principal axes [D, rank] of a part's rows, their energies E[(x u)^2] [rank], and the mean [D] that was taken
        off. These are the columns that LayerMoments::basis() projects on, up to their signs, with keys fitted to keys
        alone in the plain metric. `centred`: a mean with at least a thousandth of the energy is taken off, else the
        mean is 0."""
        mean, second, _ = self.moments(layer, part, head)
        energy = float(np.trace(second))
        if not centred or mean @ mean < 1e-3 * energy:
            mean = np.zeros_like(mean)
        energies, vectors = np.linalg.eigh(second - np.outer(mean, mean))
        return vectors[:, ::-1][:, :rank], np.maximum(energies[::-1][:rank], 0.0), mean

    def error_metric(self, layer: int, part: str, head: int) -> np.ndarray:
        """A [D, D]: an error e [1, D] in a row costs e A e^T, in the unit that metadata["coded_metric"] has
        (docs/bundle.md). Part: "coded_key", "coded_value", "sink_key" or "sink_value"."""
        prefix = f"layers.{layer}."
        of_sinks = part.startswith("sink_")
        over = (self.tensors[prefix + part + ".count"][head] if of_sinks
                else self.tensors[prefix + "coded_queries"][0])
        return self.tensors[prefix + part + ".metric"][head].astype(np.float64) / max(float(over), 1.0)


def blank(num_layers: int, num_qo_heads: int, num_kv_heads: int, head_dim: int, coded_metric: str,
          rope: dict = None, source: str = None) -> Bundle:
    """Metadata, and the frequencies of pre-RoPE keys: rope = {"frequencies": [P], "pairing": ...}."""
    metadata = {"format": FORMAT, "version": "5", "num_layers": str(num_layers),
                "num_qo_heads": str(num_qo_heads), "num_kv_heads": str(num_kv_heads), "head_dim": str(head_dim),
                "coded_metric": coded_metric, "keys": "post_rope" if rope is None else "pre_rope"}
    if source is not None:
        metadata["source"] = source
    tensors = {}
    if rope is not None:
        metadata["pairing"] = rope.get("pairing", "half_split")
        tensors[FREQUENCIES[0]] = np.asarray(rope["frequencies"], np.float64)
    return Bundle(metadata, tensors)


def of_axes(key_axes, value_axes, num_qo_heads: int, key_energies=None, value_energies=None, key_means=None,
            value_means=None, rope: dict = None, source: str = "axes") -> Bundle:
    """A bundle of axes that were computed elsewhere.

    key_axes, value_axes: [L, H, D, r], orthonormal columns, the most important first; r <= D. At rank k <= r the
        library projects on the first k of them.
    key_energies, value_energies: [L, H, r], the mean of (x u)^2 over rows x, positive and descending; they decide ranks
        by energy and Budgeted's bits. Default: r, r - 1, ..., 1.
    key_means, value_means: [L, H, D], means of the rows, which are taken off; the energies are then those around them.
    rope: of pre-RoPE keys, {"frequencies": [P] radians per token, "pairing": "half_split" or "interleaved"}.

    Queries get the second moment I, errors the metric I. Raises BundleError, with both values, if axes are not
    orthonormal, energies not descending, or shapes differ."""
    key_axes, value_axes = np.asarray(key_axes, np.float64), np.asarray(value_axes, np.float64)
    if key_axes.ndim != 4 or value_axes.ndim != 4 or key_axes.shape[:3] != value_axes.shape[:3]:
        raise BundleError(f"axes: keys {list(key_axes.shape)}, values {list(value_axes.shape)}, expected [L, H, D, r] "
                          "with the same L, H and D")
    layers, heads, dim, _ = key_axes.shape
    bundle = blank(layers, num_qo_heads, heads, dim, "output", rope, source)
    for part, axes, energies, means in (("key", key_axes, key_energies, key_means),
                                        ("value", value_axes, value_energies, value_means)):
        second, mean = _moments_of_axes(part, axes, energies, means)
        for i in range(layers):
            for name in (f"layers.{i}.{part}", f"layers.{i}.coded_{part}"):
                _put_moments(bundle, name, second[i], mean[i], np.ones(heads))
                bundle.tensors[name + ".sample"] = np.zeros((heads, 0, dim), np.float32)
            bundle.tensors[f"layers.{i}.coded_{part}.metric"] = np.tile(np.eye(dim), (heads, 1, 1))
            if part == "value":
                stacked = np.outer(mean[i].ravel(), mean[i].ravel())
                for h in range(heads):
                    stacked[h * dim:(h + 1) * dim, h * dim:(h + 1) * dim] = second[i, h]
                _put_moments(bundle, f"layers.{i}.values", stacked, mean[i].ravel(), np.ones(1))
    for i in range(layers):
        _put_moments(bundle, f"layers.{i}.query", np.tile(np.eye(dim), (heads, 1, 1)), np.zeros((heads, dim)),
                     np.ones(heads))
        bundle.tensors[f"layers.{i}.coded_queries"] = np.ones(1)
        bundle.tensors[f"layers.{i}.stream_squares"] = np.zeros(0, np.float32)
    bundle._refuse("of_axes")
    return bundle


def _put_moments(bundle: Bundle, name: str, second, total, count) -> None:
    for tensor, values in (("second_moment", second), ("sum", total), ("count", count)):
        bundle.tensors[f"{name}.{tensor}"] = np.asarray(values, np.float64)


def _moments_of_axes(part: str, axes: np.ndarray, energies, means) -> tuple:
    """E[x^T x] and E[x] of rows that have these axes, energies and means."""
    layers, heads, dim, rank = axes.shape
    error = np.abs(axes.swapaxes(2, 3) @ axes - np.eye(rank)).max()
    if error > 1e-5:
        raise BundleError(f"{part}_axes: U^T U differs from I by {error:g}, at most 1e-05 expected: orthonormal "
                          "columns")
    if energies is None:
        energies = np.broadcast_to(np.arange(rank, 0.0, -1.0), (layers, heads, rank))
    means = np.zeros((layers, heads, dim)) if means is None else np.asarray(means, np.float64)
    energies = np.asarray(energies, np.float64)
    for name, own, wanted in (("energies", energies, (layers, heads, rank)), ("means", means, (layers, heads, dim))):
        if own.shape != wanted:
            raise BundleError(f"{part}_{name}: shape {list(own.shape)}, expected {list(wanted)}")
    if energies.min() < 0.0 or (np.diff(energies) > 0.0).any():
        raise BundleError(f"{part}_energies: from {energies[..., 0].min():g} to {energies[..., -1].min():g}, least "
                          f"{energies.min():g}, expected 0 or more, descending")
    second = (axes * energies[:, :, None, :]) @ axes.swapaxes(2, 3)
    return second + means[..., :, None] * means[..., None, :], means


def of_rows(layers: list, num_qo_heads: int, rope: dict = None, sinks: int = SINKS, keep_sinks: bool = False,
            source: str = "rows") -> Bundle:
    """A bundle of rows of one sequence, and of the loss's gradients with respect to them.

    layers: a dict a layer: "key" and "value" [n, H, D]; "query" [n, num_qo_heads, D] (with pre-RoPE keys rotated back
        by the position of a key); "key_gradient" and "value_gradient" [n, H, D], in all layers or in none.
    sinks: so many first rows are never compressed, and are left out of the coded moments and metrics; keep_sinks: their
        moments and gradients are kept apart, for which there must be gradients.
    rope: as in of_axes().

    With gradients g the metrics are sums of g^T g, and coded_metric is "loss"; without, they are I a row. Without
    queries, the moment of queries is I. Sums are in float64. Bundles of several sequences: add their tensors, but the
    samples. Raises BundleError, with both values, if shapes differ."""
    with_gradients = "key_gradient" in layers[0]
    if keep_sinks and not with_gradients:
        raise BundleError("keep_sinks: True, with 0 gradients, expected those of keys and values")
    count, heads, dim = np.shape(layers[0]["key"])
    bundle = blank(len(layers), num_qo_heads, heads, dim, "loss" if with_gradients else "output", rope, source)
    gradients = ("key_gradient", "value_gradient")
    for i, layer in enumerate(layers):
        for name in ("key", "value", *(gradients if with_gradients else ())):
            if np.shape(layer.get(name, ())) != (count, heads, dim):
                raise BundleError(f"layer {i}: {name} has shape {list(np.shape(layer.get(name, ())))}, expected "
                                  f"{[count, heads, dim]}")
        if "query" in layer and np.shape(layer["query"]) != (count, num_qo_heads, dim):
            raise BundleError(f"layer {i}: query has shape {list(np.shape(layer['query']))}, expected "
                              f"{[count, num_qo_heads, dim]}")
        _add_rows(bundle, i, layer, min(sinks, count), keep_sinks)
    bundle._refuse("of_rows")
    return bundle


def _square(rows: np.ndarray) -> np.ndarray:
    """[n, H, D] -> sums of x^T x, [H, D, D], in float64."""
    rows = np.asarray(rows, np.float64).swapaxes(0, 1)
    return rows.swapaxes(1, 2) @ rows


def _sample(rows: np.ndarray, most: int) -> np.ndarray:
    """Every 1st, 2nd, 4th, ... of rows [n, H, D], so that at most `most` are left: [H, n', D], as RowSample does."""
    stride = 1
    while len(rows[::stride]) > most:
        stride *= 2
    return np.ascontiguousarray(np.asarray(rows[::stride], np.float32).swapaxes(0, 1))


def _add_rows(bundle: Bundle, i: int, layer: dict, sinks: int, keep_sinks: bool) -> None:
    count, heads, dim = np.shape(layer["key"])
    prefix, tensors = f"layers.{i}.", bundle.tensors

    def put(name: str, rows: np.ndarray) -> None:
        rows = np.asarray(rows, np.float64)
        _put_moments(bundle, prefix + name, _square(rows), rows.sum(0), np.full(heads, float(len(rows))))

    def metric(name: str, gradients) -> None:
        tensors[prefix + name + ".metric"] = _square(gradients)

    if "query" in layer:  # the query heads of a KV head are rows of one
        queries = np.asarray(layer["query"])
        group = queries.shape[1] // heads
        put("query", queries.reshape(count, heads, group, dim).swapaxes(1, 2).reshape(count * group, heads, dim))
    else:
        _put_moments(bundle, prefix + "query", np.tile(np.eye(dim), (heads, 1, 1)), np.zeros((heads, dim)),
                     np.ones(heads))
    for part in ("key", "value"):
        rows = np.asarray(layer[part], np.float32)
        put(part, rows)
        put(f"coded_{part}", rows[sinks:])
        tensors[f"{prefix}{part}.sample"] = _sample(rows, SAMPLE_ROWS)
        tensors[f"{prefix}coded_{part}.sample"] = _sample(rows[sinks:], CODED_SAMPLE_ROWS)
        gradients = layer.get(part + "_gradient")
        if gradients is None:
            tensors[f"{prefix}coded_{part}.metric"] = np.tile((count - sinks) * np.eye(dim), (heads, 1, 1))
        else:
            metric(f"coded_{part}", gradients[sinks:])
        if keep_sinks:
            put(f"sink_{part}", rows[:sinks])
            metric(f"sink_{part}", gradients[:sinks])
    stacked = np.asarray(layer["value"], np.float64).reshape(count, heads * dim)
    _put_moments(bundle, prefix + "values", stacked.T @ stacked, stacked.sum(0), np.full(1, float(count)))
    tensors[prefix + "coded_queries"] = np.full(1, float(count - sinks))
    tensors[prefix + "stream_squares"] = np.zeros(0, np.float32)


def _rank_of(bundle: Bundle, layer: int, part: str, share: float) -> int:
    """The least rank that keeps a share of the energy, the largest among the heads; 0 without energy."""
    ranks = []
    for head in range(bundle.num_kv_heads):
        energies = bundle.axes(layer, part, head, bundle.head_dim)[1]
        kept = np.cumsum(energies)
        ranks.append(int(np.searchsorted(kept, share * kept[-1]) + 1) if kept[-1] > 0 else 0)
    return max(ranks)


def table(bundle: Bundle) -> str:
    """A readable table: metadata, and of each layer the rows, the ranks that keep 90 and 99 % of the energy, the mean
    over heads of the metrics' traces, and the median of |h|^2."""
    lines = [f"{key:14} {value}" for key, value in sorted(bundle.metadata.items())]
    size = sum(values.nbytes for values in bundle.tensors.values())
    sinks = "with sinks" if "layers.0.sink_key.count" in bundle.tensors else "without sinks"
    lines += [f"{len(bundle.tensors)} tensors, {size} bytes, {sinks}", "",
              f"{'layer':>5} {'rows':>9} {'key 90, 99 %':>13} {'value 90, 99 %':>15} {'coded rows':>11} "
              f"{'A of keys':>11} {'of values':>11} {'|h|^2':>11}"]
    for i in range(bundle.num_layers):
        ranks = [", ".join(str(_rank_of(bundle, i, part, share)) for share in (0.9, 0.99)) for part in ("key", "value")]
        traces = [np.mean([np.trace(bundle.error_metric(i, part, head)) for head in range(bundle.num_kv_heads)])
                  for part in ("coded_key", "coded_value")]
        squares = bundle.tensors[f"layers.{i}.stream_squares"]
        median = f"{np.median(squares):.4g}" if squares.size else "-"
        rows, coded = (int(bundle.tensors[f"layers.{i}.{part}.count"][0]) for part in ("key", "coded_key"))
        lines.append(f"{i:5} {rows:9} {ranks[0]:>13} {ranks[1]:>15} {coded:11} {traces[0]:11.4g} {traces[1]:11.4g} "
                     f"{median:>11}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("show", "check"))
    parser.add_argument("file", type=pathlib.Path)
    args = parser.parse_args()
    try:
        bundle = Bundle._read(args.file)
        faults = bundle.faults()
    except BundleError as error:
        print(error)
        return 1
    if faults:
        print("\n".join(f"{args.file}: {fault}" for fault in faults))
        return 1
    if args.command == "show":
        print(table(bundle))
    else:
        print(f"{args.file}: version {bundle.metadata['version']}, {bundle.num_layers} layers, "
              f"{len(bundle.tensors)} tensors: nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
