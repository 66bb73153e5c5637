"""Draft models of other vocabularies, made for tests: the reference drafter in byte-level tokens, with other ids."""

import json
import random
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import rewritten

SPECIAL = ["<s>", "</s>"]
PROSE = [
    "Once upon a time, there was a naïve café by the lake. 你好世界, 今日は! Привет 👩‍👩‍👧‍👦 🎉🇩🇪 e\u0301 a\u0308",
    'Lily said: "It\'s 3 € — no, 12345.67!"\n\n    def f(x):\n        return x\n\n    def g(x):\n\treturn x ** 2',
    "# ∑ ≥ 2\r\n  The end.",
]


def byte_level(size: int, corpus: Collection[str] = PROSE, blank_first: bool = False) -> Tokenizer:
    """A byte-level BPE of a corpus, as GPT-2 has it; `blank_first` puts a blank in front of every text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank_first)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return Tokenizer(backend, named={"bos_token": "<s>", "eos_token": "</s>"})


def sentence_piece(size: int, corpus: Collection[str] = PROSE, metaspace: bool = False) -> Tokenizer:
    """A BPE with byte fallback, as Llama 2 has it; `metaspace` writes its leading blank as newer conversions do."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL, *fallback], show_progress=False)
    backend.train_from_iterator(["".join(c for c in text if ord(c) < 0x400) for text in corpus], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:2]  # fallback tokens are not special
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    if not metaspace:
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, named={"bos_token": "<s>", "eos_token": "</s>"})


def two_letters(tokens: Collection[str]) -> Tokenizer:
    """A byte-level BPE over a and b with these merges, each of a token that is listed before and one more letter."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"a", "b"})
    vocab = {token: i for i, token in enumerate([*SPECIAL, *tokens, *alphabet])}
    merges = []
    for token in tokens:
        cut = next((i for i in range(len(token) - 1, 0, -1) if token[:i] in vocab and token[i:] in vocab), None)
        merges += [] if cut is None else [(token[:cut], token[cut:])]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, named={"bos_token": "<s>", "eos_token": "</s>"})


def stand_ins() -> list[str]:
    """GPT-2's printable character of every byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def in_bytes(surface: str) -> str:
    """A SentencePiece token as a byte-level vocabulary writes it."""
    if surface.startswith("<0x"):
        return stand_ins()[int(surface[3:5], 16)]
    return "".join(stand_ins()[byte] for byte in surface.replace("▁", " ").encode())


def without(merges: list[tuple[str, str]], dropped: Collection[str]) -> list[tuple[str, str]]:
    """The merges that neither make nor need a dropped token."""
    gone, left = set(dropped), []
    for one, other in merges:
        if {one, other, one + other} & gone:
            gone.add(one + other)
        else:
            left.append((one, other))
    return left


def byte_level_copy(source: Path, folder: Path, dropped: Collection[str] = ()) -> Path:
    """A checkpoint whose tokenizer is byte-level and gives every token another id; the weights are the source's.

    What the source writes as one of `dropped` it has to write in pieces.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    written: dict[str, Any] = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]
    rows = {in_bytes(surface): i for surface, i in reversed(written["vocab"].items()) if surface not in SPECIAL}
    rows |= {in_bytes(surface): i for surface, i in written["vocab"].items() if len(surface) == 1}
    merges = without([(in_bytes(one), in_bytes(other)) for one, other in written["merges"]], dropped)
    surfaces = [*dict.fromkeys([*stand_ins(), *(one + other for one, other in merges), *SPECIAL])]
    random.Random(0).shuffle(surfaces)
    vocab = {surface: i for i, surface in enumerate(surfaces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    rows |= {name: written["vocab"][name] for name in SPECIAL}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensors[name] = tensor[[rows[surface] for surface in surfaces]]
    ids = {"bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return rewritten(folder, tensors, ids | {"vocab_size": len(vocab)})
