"""SamplingParams: what a request may ask of sampling, checked once and then trusted.

Decides the range of every field and which fields contradict each other; everything that needs the vocabulary is
checked by `check_vocabulary`. Knows nothing of tensors' values, of noise, or of how a law is computed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, no_type_check

from torch import Tensor

from forerun.errors import InvalidRequest

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens so far, logits [vocab]) -> logits [vocab]. Must be a pure function: guessed continuations are asked too."""

GREEDY_BELOW = 1e-5  # dividing float32 logits by less than this overflows; vLLM draws the same line


@no_type_check  # run-time type checks in tests would forestall its own, which users meet
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw one request's tokens and when to stop; valid from construction on.

    `temperature` below 1e-5 counts as 0, the point mass at the largest logit. `top_k` 0 or -1, `top_p` 1 and
    `min_p` 0 are off. `max_tokens` None runs until the context is full. `seed` is taken modulo 2**64; None draws
    one per request. Sequences are stored as tuples and a lone `stop` string as a tuple of one.
    Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    banned_tokens: Sequence[int] = ()
    min_tokens: int = 0
    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_law()
        self._check_ids()
        self._check_limits()
        self._check_switches()

    @property
    def greedy(self) -> bool:
        """Whether the law is the point mass at the largest logit."""
        return self.temperature < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether temperature is all that there is to do to logits. `min_tokens` aside, which a text outgrows."""
        edited = self.banned_tokens or self.logit_bias or self.logits_processors
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        filtered = not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)
        return not (edited or penalised or filtered)

    def resolve_seed(self) -> int:
        """64 bits: the seed asked for, else fresh ones (report them, so that the answer can be had again)."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64

    def check_vocabulary(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Raise InvalidRequest where a field does not fit a tokenizer of `vocab_size` ids, or leaves none to draw."""
        for name in ("logit_bias", "banned_tokens", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise _invalid(name, f"token id {token}", f"use ids below the vocabulary size, {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise _invalid(name, count, f"use at most the vocabulary size, {vocab_size}")
        bias = self.logit_bias or {}
        impossible = set(self.banned_tokens) | {token for token, value in bias.items() if value == -math.inf}
        if len(impossible) >= vocab_size:
            raise _invalid(
                "banned_tokens", f"{len(impossible)} ids", f"all {vocab_size} are banned: allow at least one"
            )
        if self.min_tokens > 0 and len(impossible | set(self.stop_token_ids) | set(eos_ids)) >= vocab_size:
            raise _invalid("min_tokens", self.min_tokens, "every token is banned or ends the text: set it to 0")

    def _check_law(self) -> None:
        self._real("temperature", low=0.0, fix="use 0 for greedy, or a finite number above 0")
        self._real("top_p", low=0.0, high=1.0, open_low=True, fix="use 1 to switch it off, or a share in (0, 1]")
        self._real("min_p", low=0.0, high=1.0, fix="use 0 to switch it off, or a share in [0, 1]")
        self._real("repetition_penalty", low=0.0, open_low=True, fix="use 1 to switch it off, or a number above 0")
        self._real("presence_penalty", low=-2.0, high=2.0, fix="use a number in [-2, 2]")
        self._real("frequency_penalty", low=-2.0, high=2.0, fix="use a number in [-2, 2]")
        self._whole("top_k", low=-1, fix="use 0 or -1 to switch it off, or a count of tokens")

    def _check_ids(self) -> None:
        self._tuple_of_ids("banned_tokens")
        self._tuple_of_ids("stop_token_ids")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _invalid("logit_bias", self.logit_bias, "use a mapping from token id to the number to add")
        for token, value in self.logit_bias.items():
            if not _is_id(token):
                raise _invalid("logit_bias", f"key {token!r}", "use token ids: integers, 0 or above")
            if not _is_real(value) or math.isnan(value) or value == math.inf:
                raise _invalid("logit_bias", f"{value!r} for token {token}", "use a finite number (or -inf to ban)")
        # A plain dict, not a read-only proxy: requests are pickled on their way to a worker.
        object.__setattr__(self, "logit_bias", {token: float(v) for token, v in self.logit_bias.items()})

    def _check_limits(self) -> None:
        self._whole("min_tokens", low=0, fix="use 0 or a count of tokens")
        self._whole("max_tokens", low=1, none=True, fix="use a count of tokens, or None until the context is full")
        self._whole("seed", low=-(2**63), high=2**64 - 1, none=True, fix="use None or an integer of 64 bits")
        self._whole("n", low=1, fix="use 1 or more answers per prompt")
        self._whole("logprobs", low=0, none=True, fix="use None, or how many alternatives to report")
        self._whole("prompt_logprobs", low=0, none=True, fix="use None, or how many alternatives to report")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"use at most max_tokens, {self.max_tokens}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise _invalid("stop", self.stop, "use a string or a list of strings")
        if "" in stop:
            raise _invalid("stop", "''", "an empty string would stop every answer at once: leave it out")
        object.__setattr__(self, "stop", tuple(stop))

    def _check_switches(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "use True or False")
        if not isinstance(self.logits_processors, Sequence) or not all(map(callable, self.logits_processors)):
            raise _invalid("logits_processors", self.logits_processors, "use a list of callables")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))

    def _real(self, name: str, *, low: float, fix: str, high: float = math.inf, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not math.isfinite(value):
            raise _invalid(name, value, fix)
        if not low <= value <= high or (open_low and value == low):
            raise _invalid(name, value, fix)

    def _whole(self, name: str, *, low: int, fix: str, high: int | None = None, none: bool = False) -> None:
        value = getattr(self, name)
        if value is None and none:
            return
        if not isinstance(value, int) or isinstance(value, bool):
            raise _invalid(name, value, fix)
        if value < low or (high is not None and value > high):
            raise _invalid(name, value, fix)

    def _tuple_of_ids(self, name: str) -> None:
        ids = getattr(self, name)
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(map(_is_id, ids)):
            raise _invalid(name, ids, "use a list of token ids: integers, 0 or above")
        object.__setattr__(self, name, tuple(ids))


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(name: str, value: object, fix: str) -> InvalidRequest:
    assert name in {field.name for field in fields(SamplingParams)}, f"{name} is no sampling parameter"
    shown = value if isinstance(value, str) else repr(value)
    return InvalidRequest(name, f"{shown} cannot be served; {fix}")
