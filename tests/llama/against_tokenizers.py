#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the example engine's token ids with those of the package `tokenizers`.

usage: against_tokenizers.py ENCODE_TEXTS TEXT_FILE... [--texts 2000] [--folder MODEL]...

For every form of tokenizer that the engine reads, a vocabulary is trained on the text files, and 2000 texts are encoded
by both: pieces of the files, and random ones of letters of many scripts, combining marks, digits, spaces, line ends,
emoji and special tokens. With --folder a model's own tokenizer.json is compared. Exits with 77, which ctest counts as
skipped, where the package cannot be imported.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
except ImportError:
    print("The package tokenizers is not installed: ids are not compared.")
    sys.exit(77)

GPT2_DIGITS = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"""
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
         r"|\s+")
LLAMA3 = QWEN2.replace(r"\p{N}| ", r"\p{N}{1,3}| ")
ALPHABETS = ["abcdefghij", "ABCXYZ", "0123456789", "     ", "\n\r\t", "'sS'tT'reRE", ".,;:!?()[]{}<>/\\|@#$%^&*_+-=~`\"",
             "äöüßéèñçøåÅÉ", "a\u0301e\u0301o\u0302\u0323\u0327n\u0303", "привет", "γλώσσα", "שלום", "مرحبا", "नमस्ते",
             "你好世界漢字", "こんにちは", "한국어\u1100\u1161\u11a8", "🙂🚀👩‍👩‍👧🇩🇪", "\u00a0\u2003\u3000\u200b\u200d\ufeff",
             "½²③Ⅷ٣४", "İıſﬁÅΩ\u212b\u2126", "\x00\x01\x7f"]
SPECIAL = ["<|end|>", "<|im_start|>"]


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randint(1, 30)):
        if rng.random() < 0.03:
            parts.append(rng.choice(SPECIAL))
        else:
            parts.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 6))))
    return "".join(parts)


def make_texts(sources: list, count: int) -> list:
    rng = random.Random(7)
    texts = [random_text(rng) for _ in range(count // 2)]
    while len(texts) < count:
        source = rng.choice(sources)
        at = rng.randrange(max(1, len(source) - 400))
        texts.append(source[at:at + rng.randint(1, 400)])
    return texts


def forms() -> dict:
    def byte_level(regex: bool = True):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)

    def split(pattern: str):
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level(False)])

    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()])
    return {"ByteLevel": (None, byte_level(), False), "Digits, ByteLevel": (None, digits, False),
            "Split (digits apart), ByteLevel": (None, split(GPT2_DIGITS), False),
            "NFC, Split (Qwen2), ByteLevel": (normalizers.NFC(), split(QWEN2), False),
            "Split (Llama 3), ByteLevel, ignore_merges": (None, split(LLAMA3), True)}


def trained(form: tuple, sources: list) -> Tokenizer:
    normalizer, pre_tokenizer, ignore_merges = form
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(sources, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("ing", normalized=True)])
    return tokenizer


def compare(name: str, program: str, path: pathlib.Path, texts: list, scratch: pathlib.Path) -> bool:
    (scratch / "texts.json").write_text(json.dumps(texts))
    own = json.loads(subprocess.run([program, path, scratch / "texts.json"], check=True, capture_output=True).stdout)
    theirs = [encoding.ids for encoding in Tokenizer.from_file(str(path)).encode_batch(texts, add_special_tokens=False)]
    wrong = [i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1]]
    print(f"{name}: {len(texts) - len(wrong)} of {len(texts)} texts, {sum(map(len, own))} ids equal")
    for i in wrong[:3]:
        print(f"  {texts[i]!r}\n  own {own[i]}\n  expected {theirs[i]}")
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--folder", action="append", default=[], type=pathlib.Path)
    args = parser.parse_args()
    sources = [path.read_text() for path in args.files]
    texts = make_texts(sources, args.texts)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for name, form in forms().items():
            trained(form, sources).save(str(scratch / "tokenizer.json"))
            good = compare(name, args.program, scratch / "tokenizer.json", texts, scratch) and good
        for model in args.folder:
            good = compare(str(model), args.program, model / "tokenizer.json", texts, scratch) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
