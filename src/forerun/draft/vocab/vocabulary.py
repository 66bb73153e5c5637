"""Compares two vocabularies by the bytes of their tokens.

This module pairs the drafter's tokens with the target's, maps a drafter's logits to the target's ids, and estimates the
share of the target's output that shared tokens cover. Special tokens are equal if both tokenizers give them the same
name or the same role; the only special token that is drafted is the end of the text.
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

# If shared tokens are less than this share of the target's output, the drafter's text is encoded again instead. A token
# that is not shared is never drafted, so a share m keeps about m of the acceptance rate, at any temperature. Encoding
# again kept the acceptance rate at temperature 0 and lost a fifth of it at 1, where the draft does not use the target's
# noise (reference pair, depth 4, all tokens shared). But a round takes one pass more, and more if tokens are shorter.
LEAST_SHARED_WEIGHT = 0.6

Encode = Callable[[str], list[int]]
RAW = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as "surrogateescape" decodes them


class Vocabulary:
    """The tokens of one model, as bytes and as text.

    `token_bytes[id]` are the bytes of a token, None for special tokens. `ids` maps bytes to ids; of several tokens with
    the same bytes it has the plainest. `num_ids` is the number of ids that both tokenizer and model have. `lead` is the
    number of blanks that the tokenizer puts before a text, and `front` has the token that it puts there, if any. `end`
    is the token that ends a text, if tokenizer and model agree on it. Raises ValueError if the bytes of the tokenizer's
    tokens are unknown.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        table = tokenizer.byte_table()
        if table is None:
            raise ValueError("its decoder does not say which bytes a token stands for")
        self.tokenizer = tokenizer
        self.num_ids = min(vocab_size, len(table.spelled))
        special = tokenizer.special_ids
        self.token_bytes = [None if i in special else table.spelled[i] for i in range(self.num_ids)]
        self.lead = table.lead
        self.special = {i: str(tokenizer.surface(i)) for i in special if i < self.num_ids}
        self.begin = self.known(tokenizer.bos_token_id)
        self.end = self.known(tokenizer.eos_token_id) if tokenizer.eos_token_id in eos_ids else None
        shortest = sorted((i for i, spelled in enumerate(self.token_bytes) if spelled), key=self.surface_length)
        self.ids = {self.to_bytes([i]): i for i in reversed(shortest)}
        first = tokenizer.encode("a")[:1]
        self.front = first if first == [self.begin] else []

    def known(self, token_id: int | None) -> int | None:
        """The id if it is one of the special tokens, else None."""
        return token_id if token_id in self.special else None

    def surface_length(self, token_id: int) -> tuple[int, int]:
        """Sort key of ids with the same bytes: texts are encoded with "A" rather than "<0x41>", which is longer."""
        return len(str(self.tokenizer.surface(token_id))), token_id

    @cached_property
    def encode_start(self) -> Encode:
        """The function that encodes the start of a text."""
        return self.tokenizer.encoder(inside=False)

    def to_bytes(self, tokens: Sequence[int]) -> bytes:
        """The bytes of these tokens, joined; special tokens have none."""
        return b"".join(self.token_bytes[token] or b"" for token in tokens)

    def encode(self, text: str, *, starts: bool) -> list[int]:
        """The tokens of a piece of text, which may be the start of a text (`starts`); one per byte of invalid UTF-8."""
        tokens: list[int] = []
        for i, piece in enumerate(RAW.split(text)):
            if i % 2:
                tokens += self.byte_tokens(piece.encode("utf-8", "surrogateescape"))
            elif piece:
                encode = self.encode_start if starts and i == 0 else self.tokenizer.encode_inside
                tokens += [token for token in encode(piece) if token < self.num_ids]
        return tokens

    def byte_tokens(self, data: bytes) -> list[int]:
        """One token for each byte; bytes without a token of their own are left out."""
        return [self.ids[key] for key in (bytes([byte]) for byte in data) if key in self.ids]


class SharedTokens:
    """The tokens that two models share: the drafter's tokens are sampled as the target's ids (TLI, Timor et al. 2025).

    The drafter's distribution is that of its logits on shared tokens, renormalized; other tokens have probability 0.
    `own_ids[id]` is the drafter's id for the target's `id`; tokens that are not shared have distinct numbers below 0.
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
        """The shared tokens of two vocabularies, whose models' logits have `vocab` and `num_model_ids` columns."""
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
    """The drafter's id for each shared token of the target; the mapping is one-to-one."""
    shared = {token: own.ids[spelled] for spelled, token in target.ids.items() if spelled in own.ids}
    if target.end is not None and own.end is not None:
        shared[target.end] = own.end
    return shared


def shared_special(target: Vocabulary, own: Vocabulary) -> dict[int, int]:
    """The drafter's special token for each special token of the target that has a counterpart."""
    by_name = {name: token for token, name in own.special.items()}
    pairs = {token: by_name[name] for token, name in target.special.items() if name in by_name}
    by_role = ((target.begin, own.begin), (target.end, own.end))
    return pairs | {token: own_token for token, own_token in by_role if token is not None and own_token is not None}


def shared_weight(target: Vocabulary, shared: Mapping[int, int]) -> float:
    """The share of shared tokens in the target's output, estimated from the vocabulary alone.

    Ids are assigned in the order in which merges were learned, which is by frequency, and words follow Zipf's law. So
    the n-th token of several bytes has the weight 1/n. Single bytes are left out, since every vocabulary has them.
    """
    merged = [i for i, spelled in enumerate(target.token_bytes) if spelled is not None and len(spelled) > 1]
    weights = {token: 1 / rank for rank, token in enumerate(merged, 1)}
    return sum(weights[i] for i in shared if i in weights) / sum(weights.values()) if weights else 1.0
