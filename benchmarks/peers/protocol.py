"""The messages between a worker and the process that asks it: JSON, one object per line.

This file decides the messages and how time is counted: everything up to the first tokens that a worker gives belongs to
the prompt, what comes after them is decoding, and the first tokens are no part of its count. A worker that fails exits
with its reason on stderr. The file imports only the standard library, since it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

MIX = "mix"  # of the other two drafters: forerun alone has it
CHOSEN = "auto"  # the depth that forerun chooses by itself, round by round
MODE = re.compile(rf"(plain)|(model|ngram|{MIX})-([1-9][0-9]*)|(.+)@({CHOSEN}|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode: "plain", or guesses of "model", "ngram" or "mix" to a fixed depth.

    Or, where it is a `spec`, the drafter that forerun's `--draft` spells so, to this depth or, at 0, to the one that
    it chooses.
    """

    drafter: str = "plain"
    depth: int = 0
    spec: bool = False

    def __str__(self) -> str:
        if self.spec:
            return f"{self.drafter}@{self.depth or CHOSEN}"
        return f"{self.drafter}-{self.depth}" if self.depth else self.drafter

    @property
    def only_ours(self) -> bool:
        """Whether forerun alone has it."""
        return self.spec or self.drafter == MIX

    @classmethod
    def parse(cls, name: str) -> Mode:
        """The mode of a name such as "plain", "model-3" or "suffix@auto"; ValueError for any other."""
        found = MODE.fullmatch(name)
        if found is None:
            wanted = f"plain, model-DEPTH, ngram-DEPTH or {MIX}-DEPTH, or DRAFT@DEPTH or DRAFT@{CHOSEN}"
            raise ValueError(f"mode {name!r}: write {wanted}")
        if found[4]:
            return cls(found[4], 0 if found[5] == CHOSEN else int(found[5]), spec=True)
        return cls() if found[1] else cls(found[2], int(found[3]))


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is started with: two Hugging Face folders, the number format in the peer's own words, its place.

    The target may be a GGUF file, and `draft` may be empty: then there is no draft model.
    """

    target: str
    draft: str
    format: str
    threads: int
    place: str
    context_tokens: int = 2048
    temperature: float = 0.0  # of forerun's answers
    device: str = "cpu"  # of transformers' models


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation. `num_decoded` tokens took `decode_s` and `num_rounds` passes, where those are known; the tokens
    given first, and `prompt_s`, are not among them.
    """

    token_ids: Sequence[int]
    num_decoded: int
    prompt_s: float
    decode_s: float
    num_rounds: int | None = None


Generate = Callable[[Mode, Sequence[int], int], Answer]  # (mode, prompt_ids, num_tokens); loads what it needs first


@dataclass(frozen=True, slots=True)
class Service:
    """What a worker offers once it is ready, and the versions of all that computes in it."""

    versions: Mapping[str, str]
    generate: Generate


class Stopwatch:
    """Times one generation from its own making; told of tokens whenever some are given."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.started_s = self.last_s = clock()
        self.first_s: float | None = None
        self.num_first = 0
        self.num_rounds = -1  # the first is no decoding

    def emitted(self, num_tokens: int) -> None:
        """So many tokens are there now."""
        if num_tokens == 0:
            return
        self.num_rounds += 1
        self.last_s = self.clock()
        if self.first_s is None:
            self.first_s, self.num_first = self.last_s, num_tokens

    def answer(self, token_ids: Sequence[int]) -> Answer:
        """What it comes to."""
        assert self.first_s is not None, "an answer without a token"
        return Answer(
            token_ids=list(token_ids),
            num_decoded=len(token_ids) - self.num_first,
            prompt_s=self.first_s - self.started_s,
            decode_s=self.last_s - self.first_s,
            num_rounds=self.num_rounds,
        )


def serve(load: Callable[[Setup], Service]) -> None:
    """A worker's whole life: its Setup is the last argument of the command; it ends when stdin does."""
    channel = claim_stdout()
    service = load(Setup(**json.loads(sys.argv[-1])))
    say(channel, {"versions": dict(service.versions)})
    for line in sys.stdin:
        ask = json.loads(line)
        say(channel, asdict(service.generate(Mode.parse(ask["mode"]), ask["prompt_ids"], ask["num_tokens"])))


def claim_stdout() -> TextIO:
    """Keep stdout for the protocol: whatever libraries print, from C++ too, goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def say(channel: TextIO, message: Mapping[str, Any]) -> None:
    """One line, at once."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()
