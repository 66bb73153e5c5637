"""NgramTable: the probability of each token after the last one or two, by counts of texts that the target generated.

This module computes probabilities from such counts, prunes them, and stores them in a folder with `ngrams.safetensors`,
which is memory-mapped. They are interpolated n-grams with absolute discounting (Ney, Essen and Kneser, 1994): the
probability mass of unseen continuations is distributed as by the shorter context. A context is identified by a hash of
32 bits; that two have the same one in a million cases does no harm, since draft tokens may be wrong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forerun.errors import PastFileError, VocabularyMismatch
from forerun.store import replace_file

FILE = "ngrams.safetensors"
FORM = "1"
ORDER = 2  # tokens of the longest context
DISCOUNT = 0.75  # of every count, which goes to what was not seen
MOST_OFFERS = 8  # continuations of a context that are kept
LEAST_CHANCE = 0.02  # of those
SCALE = 255  # chances are stored in one byte
BASIS, PRIME, BITS = 0x811C9DC5, 0x9E3779B1, 0xFFFFFFFF  # of the hash
Context = tuple[int, ...]
Offers = Sequence[tuple[int, float]]  # tokens and their chances


@dataclass(frozen=True, slots=True)
class NgramTable:
    """Contexts by hash, ascending, and the continuations of each: the i-th has those from `firsts[i]` on."""

    hashes: memoryview
    firsts: memoryview
    tokens: memoryview
    chances: memoryview

    @classmethod
    def read(cls, folder: Path, vocabulary: str) -> NgramTable:
        """The table in a folder, in the ids of the tokenizer with the fingerprint `vocabulary`.

        Raises PastFileError where there is none or it is damaged, VocabularyMismatch for another tokenizer's.
        """
        path = folder / FILE
        try:
            with safe_open(path, framework="np") as file:
                about = file.metadata() or {}
                names = ("hashes", "firsts", "tokens", "chances")
                arrays = [file.get_tensor(name) for name in names] if about.get("form") == FORM else []
        except (OSError, SafetensorError) as error:
            raise PastFileError(f"{path} holds no n-grams ({error}): name a folder with such a file") from error
        if not arrays or len(arrays[1]) != len(arrays[0]) + 1 or arrays[1][-1] != len(arrays[2]):
            raise PastFileError(f"{path} holds no n-grams of form {FORM}: name a folder with such a file")
        if about.get("vocabulary") != vocabulary:
            raise VocabularyMismatch(f"{path} holds another tokenizer's ids: name a folder that was made for this one")
        return cls(*(memoryview(array) for array in arrays))

    def offers(self, context: Sequence[int]) -> dict[int, float]:
        """The continuations of the longest known context at a text's end, with probabilities, likeliest first."""
        for number in reversed([*hashes_of(context)]):
            place = bisect_left(self.hashes, number)
            if place < len(self.hashes) and self.hashes[place] == number:
                return {self.tokens[i]: self.chances[i] / SCALE for i in range(*self.firsts[place : place + 2])}
        return {}


def hashes_of(context: Sequence[int]) -> Iterator[int]:
    """The hashes of a text's last 0, 1, ... tokens, as many as a table may know."""
    number = BASIS
    yield number
    for token in context[: -ORDER - 1 : -1]:
        number = ((number ^ token) * PRIME) & BITS
        number ^= number >> 15
        yield number


def write_ngrams(folder: Path, answers: Iterable[tuple[Sequence[int], int]], vocabulary: str) -> None:
    """Count texts, each with the place where its answer begins, and put the table into a folder."""
    rows: dict[int, Offers] = {}
    offers: dict[Context, Offers] = {}
    for context, times in sorted(counted(answers).items(), key=lambda item: len(item[0])):
        offers[context] = rows[[*hashes_of(context)][-1]] = best_of(times, offers.get(context[1:], ()))
    kept = sorted((number, offers) for number, offers in rows.items() if offers)
    tokens = [token for _, offers in kept for token, _ in offers]
    chances = [round(SCALE * chance) for _, offers in kept for _, chance in offers]
    arrays = {
        "hashes": np.array([number for number, _ in kept], np.uint32),
        "firsts": np.cumsum([0, *(len(offers) for _, offers in kept)], dtype=np.uint32),
        "tokens": np.array(tokens, np.uint16 if max(tokens) < 1 << 16 else np.uint32),
        "chances": np.array(chances, np.uint8),
    }
    replace_file(folder / FILE, [save(arrays, {"form": FORM, "vocabulary": vocabulary})])


def counted(answers: Iterable[tuple[Sequence[int], int]]) -> dict[Context, Counter[int]]:
    """How often each token followed each context within answers."""
    counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
    for text, first in answers:
        for place in range(first, len(text)):
            for length in range(min(ORDER, place) + 1):
                counts[tuple(text[place - length : place])][text[place]] += 1
    return counts


def best_of(times: Counter[int], shorter: Offers) -> Offers:
    """The likeliest continuations of a context, by how often each followed and by those of the context one shorter."""
    total, rest = times.total(), DISCOUNT * len(times) / times.total()
    chances = {token: rest * chance for token, chance in shorter}
    for token, count in times.items():
        chances[token] = chances.get(token, 0.0) + (count - DISCOUNT) / total
    likely = sorted(((chance, -token) for token, chance in chances.items() if chance >= LEAST_CHANCE), reverse=True)
    return [(-token, chance) for chance, token in likely[:MOST_OFFERS]]
