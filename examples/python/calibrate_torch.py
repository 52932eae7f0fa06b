#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Calibrates a model of the package transformers with PyTorch, on a GPU where there is one, and writes bundles as
`lowrankkv-llama calibrate --metric combined` does (docs/bundle.md): of post-RoPE keys, of pre-RoPE keys, or of both.

usage: calibrate_torch.py --model DIR --text FILE [FILE ...] --out POST [--pre-rope-out PRE]

A window is text, then spans of it once more, so that queries look for rows further back. One forward and one backward
pass of a window give all of its statistics:

  moments          of the text's queries, keys and values
  metric loss      A = sum g^T g, g the gradient of the loss with respect to a row, labels drawn from the model
  metric output    A_K, A_V of include/lowrankkv/calibrate/coding_statistics.hpp: the change of a layer's output
  metric combined  the mean of both, by the formula of CodingStatistics::combine()

Products are f32, sums f64. Packages: numpy, safetensors, torch, tqdm, transformers.

Shapes: n tokens, H KV heads, G query heads a KV head, D = head_dim.
"""
import argparse
import math
import pathlib
import sys

import torch
import tqdm
import transformers

from bundle import CODED_SAMPLE_ROWS, SAMPLE_ROWS, SINKS, Bundle, blank

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
OUTPUT_SINKS = 32  # first rows that metrics of the output leave out
DRAWS = 64  # keys that a query is rotated back by, in metrics of pre-RoPE keys


class Rotary:
    """The rotary embedding of a model, channel i with channel i + D / 2."""

    def __init__(self, model):
        embedding = model.model.rotary_emb
        if getattr(embedding, "attention_scaling", 1.0) != 1.0:
            raise SystemExit(f"rotary embedding: attention scaling {embedding.attention_scaling}, 1 expected")
        self.frequencies = embedding.inv_freq.double()
        if embedding.rope_type == "default":  # as they are before their rounding to f32
            parameters = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
            exponents = torch.arange(len(self.frequencies), dtype=torch.float64) / len(self.frequencies)
            self.frequencies = (parameters["rope_theta"] ** -exponents).to(self.frequencies.device)

    def __call__(self, rows, positions):
        """Rotates rows [..., D] by positions, which broadcast with [...]."""
        angles = positions[..., None].double() * self.frequencies
        cosines, sines = angles.cos().float(), angles.sin().float()
        first, second = rows.chunk(2, dim=-1)
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Moments:
    """Sums of x^T x and of x over rows [n, H, D], and a sample of them, one of every `stride` rows."""

    def __init__(self, stride: int = 0):
        self.second, self.first, self.count = 0.0, 0.0, 0.0
        self.stride, self.rows = stride, []

    def add(self, rows):
        wide = rows.double()
        self.second = self.second + torch.einsum("nhd,nhe->hde", wide, wide)
        self.first = self.first + wide.sum(0)
        if self.stride:
            self.rows.append(rows[int(-self.count) % self.stride::self.stride].cpu())
        self.count += len(rows)

    def put(self, tensors: dict, name: str, most: int = 0):
        tensors[f"{name}.second_moment"] = self.second.cpu().numpy()
        tensors[f"{name}.sum"] = self.first.cpu().numpy()
        tensors[f"{name}.count"] = torch.full((len(self.first),), self.count, dtype=torch.float64).numpy()
        if most:
            rows = torch.cat(self.rows)[:most]
            tensors[f"{name}.sample"] = rows.transpose(0, 1).contiguous().float().numpy()


def gram(gradients):
    """Gradients [n, H, D] -> sums of g^T g, [H, D, D]."""
    return torch.einsum("nhd,nhe->hde", gradients, gradients).double()


def mean_of(loss, loss_rows: float, output, scale: float):
    """The mean of both metrics [H, D, D], times loss_rows: CodingStatistics::combine()."""
    of_loss = loss.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    of_output = output.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    size = (of_loss / loss_rows * of_output / scale).sqrt()
    mean = 0.5 * size * loss_rows * (loss / of_loss + output / of_output)
    return torch.where((of_loss > 0) & (of_output > 0), mean, 0.0)


class Weights:
    """What the queries of a window read of a layer's rows: softmax weights of rows [first, context) in outputs of
    queries [context, n), and what an error in a row changes of them. [H, G, queries, rows] and less."""

    def __init__(self, query, key, value, grams, context: int):
        n, heads, dim = key.shape
        self.query = query[context:].reshape(n - context, heads, -1, dim).permute(1, 2, 0, 3) / math.sqrt(dim)
        logits = self.query @ key.permute(1, 2, 0)[:, None]
        later = torch.arange(n, device=key.device) > torch.arange(context, n, device=key.device)[:, None]
        weights = logits.masked_fill(later, -math.inf).softmax(-1)
        values = value.transpose(0, 1)[:, None]  # [H, 1, n, D]
        outputs = weights @ values
        self.first = min(OUTPUT_SINKS, context)
        stored = values[:, :, self.first:context]
        self.squares = weights[..., self.first:context] ** 2
        energies = ((stored @ grams) * stored).sum(-1)[..., None, :]  # v N v^T
        seen = outputs @ grams
        of_output = (seen * outputs).sum(-1, keepdim=True)
        # (v - o) N (v - o)^T of every row and query
        self.spread = (energies - 2 * seen @ stored.transpose(-1, -2) + of_output).clamp_min(0)

    def of_values(self, grams):
        """A_V = sum_g N_g sum_ij p_ij^2."""
        return (grams.double() * self.squares.double().sum((-1, -2))[..., None, None]).sum(1)

    def of_keys(self, rotate):
        """A_K = sum_gi (sum_j p_ij^2 (v_j - o_i) N_g (v_j - o_i)^T) q_i^T q_i, queries as `rotate` returns them."""
        scaled = rotate(self.query) * (self.squares * self.spread).sum(-1, keepdim=True).sqrt()
        return torch.einsum("hgnd,hgne->hde", scaled, scaled).double()

    def of_pre_rope_keys(self, rotary):
        """The same with each q_i rotated back by the position of key j, of DRAWS keys in proportion to their share."""
        result = 0.0
        for member in range(self.query.shape[1]):  # what is drawn takes DRAWS times the queries' memory
            shares = (self.squares[:, member] * self.spread[:, member]).double().cumsum(-1)
            total = shares[..., -1:]
            place = (torch.arange(DRAWS, device=shares.device) + 0.5) / DRAWS
            drawn = torch.searchsorted(shares, (place * total).contiguous()).clamp_max(shares.shape[-1] - 1)
            rows = rotary(self.query[:, member, :, None], -(drawn + self.first))
            rows = (rows * (total / DRAWS).sqrt().float()[..., None]).flatten(1, 2)
            result = result + (rows.transpose(1, 2) @ rows).double()
        return result


class Layer:
    """The statistics of one layer in one form of its keys."""

    def __init__(self, sample: dict):
        self.moments = {name: Moments(sample.get(name, 0)) for name in
                        ("query", "key", "value", "values", "coded_key", "coded_value")}
        self.loss, self.output = {"key": 0.0, "value": 0.0}, {"key": 0.0, "value": 0.0}
        self.loss_rows = self.output_queries = 0.0
        self.squares = []

    def put(self, tensors: dict, prefix: str):
        for name, moments in self.moments.items():
            most = {"key": SAMPLE_ROWS, "value": SAMPLE_ROWS}.get(name, CODED_SAMPLE_ROWS if "coded" in name else 0)
            moments.put(tensors, prefix + name, most)
        for name in ("second_moment", "sum"):  # one row of all heads
            tensors[f"{prefix}values.{name}"] = tensors[f"{prefix}values.{name}"][0]
        squares = torch.cat(self.squares)
        scale = self.output_queries * squares.double().median().item()
        for part in ("key", "value"):
            metric = mean_of(self.loss[part], self.loss_rows, self.output[part], scale)
            tensors[f"{prefix}coded_{part}.metric"] = metric.cpu().numpy()
        tensors[f"{prefix}coded_queries"] = torch.tensor([self.loss_rows], dtype=torch.float64).numpy()
        # Metrics of the output are in the combined ones, in units of the loss: no stream is needed.
        tensors[f"{prefix}stream_squares"] = torch.zeros(0).numpy()


class Calibration:
    """Statistics of a model, window by window."""

    def __init__(self, model, forms: list, windows: int, text: int, positions: int, seed: int):
        self.model, self.forms, self.positions = model, forms, positions
        config = model.config
        if config.model_type not in MODEL_TYPES:
            raise SystemExit(f"model_type: {config.model_type}, expected one of {', '.join(MODEL_TYPES)}")
        self.heads, self.query_heads = config.num_key_value_heads, config.num_attention_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.query_heads
        self.rotary = Rotary(model)
        self.generator = torch.Generator(model.device).manual_seed(seed)
        strides = {name: max(1, -(-windows * rows // most)) for name, rows, most in
                   (("key", text, SAMPLE_ROWS), ("value", text, SAMPLE_ROWS),
                    ("coded_key", text - SINKS, CODED_SAMPLE_ROWS), ("coded_value", text - SINKS, CODED_SAMPLE_ROWS))}
        self.layers = {form: [Layer(strides) for _ in model.model.layers] for form in forms}
        self.done = 0
        self.grams = []
        for layer in model.model.layers:  # N_g = W_g W_g^T, [H, G, D, D]
            weight = layer.self_attn.o_proj.weight.float().reshape(config.hidden_size, self.query_heads, self.dim)
            self.grams.append(torch.einsum("chd,che->hde", weight, weight)
                              .reshape(self.heads, -1, self.dim, self.dim))
        self.records = [{} for _ in model.model.layers]
        for layer, record in zip(model.model.layers, self.records):
            self._observe(layer, record)

    def _observe(self, layer, record: dict):
        """Keeps a layer's pre-RoPE rows, and the residual stream behind its attention, of every forward pass."""
        attention = layer.self_attn

        def keep(name):
            def hook(_module, _inputs, output):
                record[name] = output
                if name != "query":
                    output.retain_grad()
            return hook
        for name, norm, projection in (("query", "q_norm", "q_proj"), ("key", "k_norm", "k_proj"),
                                       ("value", "", "v_proj")):
            getattr(attention, norm if hasattr(attention, norm) else projection).register_forward_hook(keep(name))
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _module, inputs: record.update(stream=inputs[0].detach()[0]))
        record["rotates"] = bool(getattr(attention, "use_rope", True))

    def add(self, tokens, context: int, copies: int):
        """Adds a window: tokens [n], the first `context` of which are text, `copies` of it once more."""
        tokens = tokens.to(self.model.device)
        embedded = self.model.get_input_embeddings()(tokens[None]).requires_grad_()
        logits = self.model(inputs_embeds=embedded).logits[0, :-1].float()
        with torch.no_grad():
            labels = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        golden = self.done * 0.6180339887498949
        begins = int((golden - math.floor(golden)) * (max(0, self.positions - len(tokens)) + 1))
        with torch.no_grad():
            for index, record in enumerate(self.records):
                self._add_layer(index, record, context, context - copies // 2, begins)
        self.done += 1

    def _add_layer(self, index: int, record: dict, context: int, readers: int, begins: int):
        def rows(name, values):
            return values[0].detach().float().reshape(-1, self.query_heads if name == "query" else self.heads, self.dim)
        query, key, value = (rows(name, record[name]) for name in ("query", "key", "value"))
        key_gradient, value_gradient = (rows(name, record[name].grad) for name in ("key", "value"))
        for name in ("query", "key", "value"):
            record[name] = None
        place = torch.arange(len(key), device=key.device)[:, None]

        def rotate(values, positions):
            return self.rotary(values, positions) if record["rotates"] else values
        rotated_query, rotated_key = rotate(query, place), rotate(key, place)
        grams = self.grams[index]
        weights = Weights(rotated_query, rotated_key, value, grams, readers)
        of_values = weights.of_values(grams)
        spans = place[:context, 0].double() + 1
        spread = (spans * 0.6180339887498949).frac() * spans  # a position at or before each query's
        further = torch.full_like(place, begins)
        for form in self.forms:
            own = self.layers[form][index]
            if form == "pre_rope":
                own_query = rotate(rotated_query[:context], -spread.floor()[:, None])
                own_key, coded, gradient = key, key, key_gradient
                of_keys = weights.of_pre_rope_keys(rotate)
            else:
                own_query, own_key = rotated_query[:context], rotated_key
                coded, gradient = rotate(rotated_key, further), rotate(key_gradient, place + begins)
                of_keys = weights.of_keys(lambda values: rotate(values, further[0]))
            moments = own.moments
            moments["query"].add(own_query.reshape(context, self.heads, -1, self.dim).transpose(1, 2).flatten(0, 1))
            moments["key"].add(own_key[:context])
            moments["value"].add(value[:context])
            moments["values"].add(value[:context].reshape(context, 1, -1))
            moments["coded_key"].add(coded[SINKS:context])
            moments["coded_value"].add(value[SINKS:context])
            own.loss["key"] = own.loss["key"] + gram(gradient[SINKS:context])
            own.loss["value"] = own.loss["value"] + gram(value_gradient[SINKS:context])
            own.loss_rows += context - SINKS
            own.output["key"] = own.output["key"] + of_keys
            own.output["value"] = own.output["value"] + of_values
            own.output_queries += len(key) - readers
            own.squares.append(record["stream"].float().square().sum(-1)[self.done % 8::8].cpu())

    def bundle(self, form: str, source: str) -> Bundle:
        """The bundle of one form of the keys."""
        rope = {"frequencies": self.rotary.frequencies.cpu().numpy()} if form == "pre_rope" else None
        result = blank(len(self.records), self.query_heads, self.heads, self.dim, "combined", rope, source)
        for index, layer in enumerate(self.layers[form]):
            layer.put(result.tensors, f"layers.{index}.")
        return result


def windows_of(texts: list, count: int, length: int) -> list:
    """So many windows of texts [tokens], as many of each text as its length asks for, spread evenly over it."""
    total = sum(len(text) for text in texts)
    result, before = [], 0
    for text in texts:
        share = round(count * (before + len(text)) / total) - round(count * before / total)
        before += len(text)
        if len(text) < length:
            continue
        for index in range(share):
            begin = index * (len(text) - length) // max(1, share - 1)
            result.append(text[begin:begin + length])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a folder that transformers can load")
    parser.add_argument("--text", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--out", type=pathlib.Path, help="bundle of post-RoPE keys")
    parser.add_argument("--pre-rope-out", type=pathlib.Path, help="bundle of pre-RoPE keys")
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens of text, at most")
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window, a quarter of them read again")
    parser.add_argument("--positions", type=int, default=0,
                        help="rotated keys are seen at positions of [0, this); default: those of a window")
    parser.add_argument("--seed", type=int, default=1, help="of labels, and of spans that are read again")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    outs = {"post_rope": args.out, "pre_rope": args.pre_rope_out}
    forms = [form for form, path in outs.items() if path is not None]
    if not forms:
        parser.error("neither --out nor --pre-rope-out is given: at least 1 bundle expected")
    copies = args.window // 4
    context = args.window - copies
    if args.window < 4 * OUTPUT_SINKS:
        parser.error(f"--window: {args.window} tokens, at least {4 * OUTPUT_SINKS} expected")

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    model.requires_grad_(False)
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    texts = [tokenizer(path.read_text(), add_special_tokens=False)["input_ids"] for path in args.text]
    length = context - len(begin)
    windows = windows_of(texts, max(1, args.tokens // length), length)
    if not windows:
        raise SystemExit(f"--text: the longest has {max(map(len, texts))} tokens, at least {length} expected")
    calibration = Calibration(model, forms, len(windows), context, args.positions, args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    for window in tqdm.tqdm(windows, desc="calibrate", unit="window"):
        tokens = torch.tensor(begin + window)
        span = copies // 8
        starts = torch.randint(context - span + 1, (8,), generator=generator).tolist()
        again = [tokens[start:start + span] for start in starts]
        calibration.add(torch.cat([tokens, *again]), context, copies)
    source = ", ".join(path.name for path in args.text)
    for form in forms:
        calibration.bundle(form, source).write(outs[form])
        print(f"{outs[form]}: {len(windows)} windows of {args.window} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
