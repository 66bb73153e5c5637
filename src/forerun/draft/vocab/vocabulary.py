"""Compares two vocabularies by the bytes of their tokens.

This module decides which token of a drafter equals which of the target's, maps a drafter's logits to the target's ids,
and estimates the share of the target's output that shared tokens cover. Special tokens are equal if both tokenizers
give them the same name or the same role; the only one that is drafted is the end of the text. `transcript.py` handles
texts that grow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.text.tokenizer import Tokenizer

# Where shared tokens make up less than this of what the target says, text is encoded again instead. A guess is lost
# wherever the target says a token that is not shared, so a share m keeps about m of the acceptance, at any temperature.
# Encoding again lost nothing at temperature 0 and a fifth at 1, where its guesses do not share the target's noise (the
# reference pair, depth 4, all tokens shared), but a round takes one pass more, and more where its tokens are shorter.
ENOUGH = 0.6

Encode = Callable[[str], list[int]]
RAW = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as "surrogateescape" writes them


class Vocabulary:
    """The tokens of one model, as bytes and as text.

    `spelled[id]` is what an id adds to a text, None for special tokens and for ids that the model cannot read; `ids` is
    the other way round, one id for each string of bytes. `end` ends a text, for the tokenizer and the model; `front` is
    what the tokenizer puts in front of one. Raises ValueError for a tokenizer whose tokens are no bytes.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        table = tokenizer.byte_table()
        if table is None:
            raise ValueError("its decoder does not say which bytes a token stands for")
        self.tokenizer = tokenizer
        self.num_ids = min(vocab_size, len(table.spelled))
        special = tokenizer.special_ids
        self.spelled = [None if i in special else table.spelled[i] for i in range(self.num_ids)]
        self.lead = table.lead
        self.special = {i: str(tokenizer.surface(i)) for i in special if i < self.num_ids}
        self.begin = self.known(tokenizer.bos_token_id)
        self.end = self.known(tokenizer.eos_token_id) if tokenizer.eos_token_id in eos_ids else None
        shortest = sorted((i for i, spelled in enumerate(self.spelled) if spelled), key=self.plainness)
        self.ids = {self.spell([i]): i for i in reversed(shortest)}
        first = tokenizer.encode("a")[:1]
        self.front = first if first == [self.begin] else []

    def known(self, token_id: int | None) -> int | None:
        """The id if it is a special token of the model's, else None."""
        return token_id if token_id in self.special else None

    def plainness(self, token_id: int) -> tuple[int, int]:
        """What to sort ids by that spell the same: "A" is written shorter than "<0x41>", and is what texts hold."""
        return len(str(self.tokenizer.surface(token_id))), token_id

    @cached_property
    def encode_start(self) -> Encode:
        """Cuts the beginning of a text into ids."""
        return self.tokenizer.encoder(inside=False)

    def spell(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens one after the other; special ones have none."""
        return b"".join(self.spelled[token] or b"" for token in tokens)

    def cut(self, text: str, *, starts: bool) -> list[int]:
        """The tokens of a piece of text, which `starts` the whole or lies inside; bytes that are no text one by one."""
        tokens: list[int] = []
        for i, piece in enumerate(RAW.split(text)):
            if i % 2:
                tokens += self.raw(piece.encode("utf-8", "surrogateescape"))
            elif piece:
                encode = self.encode_start if starts and i == 0 else self.tokenizer.encode_inside
                tokens += [token for token in encode(piece) if token < self.num_ids]
        return tokens

    def raw(self, data: bytes) -> list[int]:
        """One token for each byte, as far as there are such tokens."""
        return [self.ids[key] for key in (bytes([byte]) for byte in data) if key in self.ids]


class SharedTokens:
    """The tokens that two models share: guesses of the one are drawn as ids of the other (TLI of Timor et al. 2025).

    The drafter's law is that of its own logits on shared tokens alone, renormalised; what is not shared is impossible.
    `own_ids[id]` is the drafter's id of the target's, below 0 and different for each where there is none.
    """

    same_ids = False
    head_ids: Int[Tensor, " head_vocab"] | None = None

    def __init__(self, own_ids: Int[Tensor, " vocab"], num_model_ids: int) -> None:
        self.vocab_size = len(own_ids)
        self.num_model_ids = num_model_ids
        self.own_ids = own_ids
        self.known: list[int] = own_ids.tolist()
        self.columns = torch.where(own_ids < 0, num_model_ids, own_ids)

    @classmethod
    def of(
        cls, target: Vocabulary, own: Vocabulary, vocab: int, num_model_ids: int, device: torch.device
    ) -> SharedTokens:
        """Those of two vocabularies, whose models' logits have `vocab` and `num_model_ids` columns."""
        own_ids = -1 - torch.arange(vocab)
        for token, own_token in shared_ids(target, own).items():
            own_ids[token] = own_token
        return cls(own_ids.to(device), num_model_ids)

    def target_logits(self, logits: Float[Tensor, "rows model_vocab"]) -> Float[Tensor, "rows vocab"]:
        return functional.pad(logits, (0, 1), value=-math.inf)[:, self.columns]

    def model_ids(self, tokens: Int[Tensor, " ..."]) -> Int[Tensor, " ..."]:
        return torch.where(tokens < 0, -1, self.own_ids[tokens.clamp_min(0)])

    def model_id_list(self, tokens: Sequence[int]) -> Sequence[int]:
        return [self.known[token] for token in tokens]


def shared_ids(target: Vocabulary, own: Vocabulary) -> dict[int, int]:
    """The drafter's id of each of the target's tokens that both have; no two have the same."""
    shared = {token: own.ids[spelled] for spelled, token in target.ids.items() if spelled in own.ids}
    if target.end is not None and own.end is not None:
        shared[target.end] = own.end
    return shared


def shared_marks(target: Vocabulary, own: Vocabulary) -> dict[int, int]:
    """The drafter's special token for each of the target's that has a counterpart."""
    by_name = {name: token for token, name in own.special.items()}
    marks = {token: by_name[name] for token, name in target.special.items() if name in by_name}
    offices = ((target.begin, own.begin), (target.end, own.end))
    return marks | {token: mark for token, mark in offices if token is not None and mark is not None}


def shared_weight(target: Vocabulary, shared: Mapping[int, int]) -> float:
    """The share of what the target says that shared tokens make up, estimated from the vocabulary alone.

    Merges are learned in the order of their frequency and ids given in that order, and words follow Zipf's law: so
    the n-th token of several bytes counts 1/n. Single bytes are left out, since every vocabulary has them.
    """
    merged = [i for i, spelled in enumerate(target.spelled) if spelled is not None and len(spelled) > 1]
    weights = {token: 1 / rank for rank, token in enumerate(merged, 1)}
    return sum(weights[i] for i in shared if i in weights) / sum(weights.values()) if weights else 1.0
