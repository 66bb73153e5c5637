"""NgramTable: the probability of each token after the last one or two tokens, counted in answers of the target.

This module computes the probabilities, prunes them, and stores them in a folder as `ngrams.safetensors`, which is
memory-mapped. They are interpolated n-grams with absolute discounting (Ney, Essen and Kneser, 1994): the probability
mass of unseen continuations is distributed as after the context that is one token shorter. A context is identified by a
hash of 32 bits. A collision only makes a draft token worse.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forerun.errors import PastFileError, VocabularyMismatch
from forerun.fields import short
from forerun.store import replace_file

FILE = "ngrams.safetensors"
FORMAT = "1"  # version of the file's format
ORDER = 2  # tokens of the longest context
DISCOUNT = 0.75  # taken from every count, for unseen continuations
MOST_CONTINUATIONS = 8  # stored per context
LEAST_CHANCE = 0.02  # of a stored continuation
SCALE = 255  # chances are stored in one byte
BASIS, PRIME, BITS = 0x811C9DC5, 0x9E3779B1, 0xFFFFFFFF  # constants of the hash
KINDS = {"hashes": ("uint32",), "firsts": ("uint32",), "tokens": ("uint16", "uint32"), "chances": ("uint8",)}
Context = tuple[int, ...]
Continuations = Sequence[tuple[int, float]]  # tokens and their chances


@dataclass(frozen=True, slots=True)
class NgramTable:
    """The hashes of all contexts, ascending. The i-th has the continuations from `firsts[i]` to `firsts[i + 1]`."""

    hashes: memoryview
    firsts: memoryview
    tokens: memoryview
    chances: memoryview

    @classmethod
    def read(cls, folder: Path, vocabulary: str) -> NgramTable:
        """The table in a folder, whose token ids are those of the tokenizer with the fingerprint `vocabulary`.

        Raises PastFileError if there is no such file or it is damaged, VocabularyMismatch for another tokenizer's ids.
        """
        path = folder / FILE
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in KINDS} if metadata.get("form") == FORMAT else {}
        except (OSError, SafetensorError, TypeError) as error:  # numpy has no bfloat16
            problem = f"has no readable n-grams ({short(error)}): name a folder with such a file"
            raise PastFileError(f"{path} {problem}") from error
        if not arrays or not is_valid(arrays):
            raise PastFileError(f"{path} has no n-grams in format {FORMAT}: name a folder with such a file")
        if metadata.get("vocabulary") != vocabulary:
            raise VocabularyMismatch(f"{path} has another tokenizer's ids: name a folder made for the target's")
        return cls(**{name: memoryview(array) for name, array in arrays.items()})

    def continuations(self, context: Sequence[int]) -> dict[int, float]:
        """The continuations of the longest suffix of `context` in the table, with their chances, likeliest first."""
        for number in reversed([*hashes_of(context)]):
            place = bisect_left(self.hashes, number)
            if place < len(self.hashes) and self.hashes[place] == number:
                return {self.tokens[i]: self.chances[i] / SCALE for i in range(*self.firsts[place : place + 2])}
        return {}


def is_valid(arrays: Mapping[str, NDArray[Any]]) -> bool:
    """Whether arrays have the types and sizes of a table, and all continuations of its contexts."""
    if not all(array.ndim == 1 and array.dtype.name in KINDS[name] for name, array in arrays.items()):
        return False
    hashes, firsts, tokens, chances = arrays.values()
    is_whole = len(firsts) == len(hashes) + 1 and len(tokens) == len(chances) == firsts[-1]
    return bool(is_whole and (firsts[:-1] <= firsts[1:]).all())


def hashes_of(context: Sequence[int]) -> Iterator[int]:
    """The hashes of a text's last 0, 1, ... ORDER tokens."""
    number = BASIS
    yield number
    for token in context[: -ORDER - 1 : -1]:
        number = ((number ^ token) * PRIME) & BITS
        number ^= number >> 15
        yield number


def write_ngrams(folder: Path, answers: Iterable[tuple[Sequence[int], int]], vocabulary: str) -> None:
    """Count n-grams in texts, each given with the index where its answer begins, and write the table to a folder."""
    by_hash: dict[int, Continuations] = {}
    by_context: dict[Context, Continuations] = {}
    for context, counts in sorted(count_continuations(answers).items(), key=lambda item: len(item[0])):
        best = best_continuations(counts, by_context.get(context[1:], ()))
        by_context[context] = by_hash[[*hashes_of(context)][-1]] = best
    rows = sorted((number, best) for number, best in by_hash.items() if best)
    tokens = [token for _, best in rows for token, _ in best]
    chances = [round(SCALE * chance) for _, best in rows for _, chance in best]
    arrays = {
        "hashes": np.array([number for number, _ in rows], np.uint32),
        "firsts": np.cumsum([0, *(len(best) for _, best in rows)], dtype=np.uint32),
        "tokens": np.array(tokens, np.uint16 if max(tokens) < 1 << 16 else np.uint32),
        "chances": np.array(chances, np.uint8),
    }
    replace_file(folder / FILE, [save(arrays, {"form": FORMAT, "vocabulary": vocabulary})])


def count_continuations(answers: Iterable[tuple[Sequence[int], int]]) -> dict[Context, Counter[int]]:
    """How often each token of an answer followed each context of up to ORDER tokens."""
    counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
    for text, first in answers:
        for place in range(first, len(text)):
            for length in range(min(ORDER, place) + 1):
                counts[tuple(text[place - length : place])][text[place]] += 1
    return counts


def best_continuations(counts: Counter[int], shorter: Continuations) -> Continuations:
    """The likeliest continuations of a context, from its counts and those of the context that is one token shorter."""
    total, discounted = counts.total(), DISCOUNT * len(counts) / counts.total()
    chances = {token: discounted * chance for token, chance in shorter}
    for token, count in counts.items():
        chances[token] = chances.get(token, 0.0) + (count - DISCOUNT) / total
    likely = sorted(((chance, -token) for token, chance in chances.items() if chance >= LEAST_CHANCE), reverse=True)
    return [(-token, chance) for chance, token in likely[:MOST_CONTINUATIONS]]
