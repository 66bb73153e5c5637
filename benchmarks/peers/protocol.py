"""The messages between the benchmark and its workers: JSON, one object per line.

This file decides the messages and how time is counted. The time until the first tokens of an answer is prefill, and the
rest is decoding; the first tokens are not counted as decoded. A worker that fails exits with the reason on stderr. The
file imports only the standard library, since it runs in every peer's environment.
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

from typing_extensions import override

MIX = "mix"  # of the draft model and n-grams; only forerun has it
CHOSEN = "auto"  # forerun chooses the depth of each round
MODE = re.compile(rf"(plain)|(model|ngram|{MIX})-([1-9][0-9]*)|(.+)@({CHOSEN}|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode: "plain", or drafts of "model", "ngram" or "mix" with a fixed depth.

    A `spec` names a drafter as forerun's `--draft` does; its depth 0 means that forerun chooses the depth.
    """

    drafter: str = "plain"
    depth: int = 0
    spec: bool = False

    @override
    def __str__(self) -> str:
        if self.spec:
            return f"{self.drafter}@{self.depth or CHOSEN}"
        return f"{self.drafter}-{self.depth}" if self.depth else self.drafter

    @property
    def only_ours(self) -> bool:
        """Whether only forerun has this mode."""
        return self.spec or self.drafter == MIX

    @classmethod
    def parse(cls, name: str) -> Mode:
        """The mode of a name such as "plain", "model-3" or "suffix@auto". Raises ValueError for other names."""
        match = MODE.fullmatch(name)
        if match is None:
            forms = f"plain, model-DEPTH, ngram-DEPTH or {MIX}-DEPTH, or DRAFT@DEPTH or DRAFT@{CHOSEN}"
            raise ValueError(f"mode {name!r}: write {forms}")
        if match[4]:
            return cls(match[4], 0 if match[5] == CHOSEN else int(match[5]), spec=True)
        return cls() if match[1] else cls(match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to start: two Hugging Face folders, the peer's name of the number format, its place.

    The target may be a GGUF file. An empty `draft` means that there is no draft model.
    """

    target: str
    draft: str
    format: str
    threads: int
    place: str
    context_tokens: int = 2048
    temperature: float = 0.0  # used by forerun's worker only
    device: str = "cpu"  # used by the worker of transformers only


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `num_decoded` tokens took `decode_s` seconds and, if known, `num_rounds` passes.

    These exclude the tokens that were returned first, which took `prompt_s` seconds.
    """

    token_ids: Sequence[int]
    num_decoded: int
    prompt_s: float
    decode_s: float
    num_rounds: int | None = None


Generate = Callable[[Mode, Sequence[int], int], Answer]  # (mode, prompt_ids, num_tokens); loads what it needs first


@dataclass(frozen=True, slots=True)
class Service:
    """The function that generates answers in a loaded worker, and the versions of its libraries."""

    versions: Mapping[str, str]
    generate: Generate


class Stopwatch:
    """Times one answer, from the creation of this object on; `emitted` is called whenever tokens arrive."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.started_s = self.last_s = clock()
        self.first_s: float | None = None
        self.num_first = 0
        self.num_rounds = -1  # the first tokens come from the prefill

    def emitted(self, num_tokens: int) -> None:
        """Record that `num_tokens` tokens have just arrived."""
        if num_tokens == 0:
            return
        self.num_rounds += 1
        self.last_s = self.clock()
        if self.first_s is None:
            self.first_s, self.num_first = self.last_s, num_tokens

    def answer(self, token_ids: Sequence[int]) -> Answer:
        """The answer with these tokens and the recorded times."""
        assert self.first_s is not None, "an answer without a token"
        return Answer(
            token_ids=list(token_ids),
            num_decoded=len(token_ids) - self.num_first,
            prompt_s=self.first_s - self.started_s,
            decode_s=self.last_s - self.first_s,
            num_rounds=self.num_rounds,
        )


def serve(load: Callable[[Setup], Service]) -> None:
    """Run a worker until stdin ends; its Setup, as JSON, is the last argument of the command."""
    channel = claim_stdout()
    service = load(Setup(**json.loads(sys.argv[-1])))
    say(channel, {"versions": dict(service.versions)})
    for line in sys.stdin:
        question = json.loads(line)
        mode, prompt_ids = Mode.parse(question["mode"]), question["prompt_ids"]
        say(channel, asdict(service.generate(mode, prompt_ids, question["num_tokens"])))


def claim_stdout() -> TextIO:
    """Reserve stdout for the messages, and redirect what libraries print, from C++ too, to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def say(channel: TextIO, message: Mapping[str, Any]) -> None:
    """Write one message at once."""
    channel.write(json.dumps(message) + "\n")
    channel.flush()
