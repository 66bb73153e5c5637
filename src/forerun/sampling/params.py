"""SamplingParams: the sampling options of a request, checked whenever a field is set and trusted afterwards.

This file decides the range of every field and which fields contradict each other; `check_vocabulary` checks what
depends on the vocabulary. `transforms.py` and `draws.py` apply the parameters to logits.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, no_type_check

from torch import Tensor

from forerun.did_you_mean import nearest
from forerun.errors import InvalidRequest, UnknownKeyword
from forerun.limits import FLOAT32, FLOAT32_LEAST, INT64, real, refusal, shown, whole
from forerun.sampling.grammar import Grammar

LogitsProcessor = Callable[[Sequence[int], Tensor], Tensor]
"""(tokens so far, logits [vocab]) -> logits [vocab]. Must be a pure function: it is called for draft tokens, too."""

GREEDY_BELOW = 1e-5  # dividing float32 logits by less than this overflows; vLLM has the same limit
ABOVE_0 = math.ulp(0.0)
MOST_SAMPLES = 1024  # each stores the prompt's tokens
MOST_LOGPROBS = 128  # for a prompt of 100,000 tokens these take 1 GB
MOST_STOPS = 64  # the text is searched for all of them after every token
MOST_WORDS = 1024  # of `bad_words`: every text is compared with all of them
MOST_CHARACTERS = 1024  # of a stop string or a bad word
COUNT = "a whole number of tokens below 2**63"
LAST_FIELD = "skip_special_tokens"  # the constructor's last assignment
NO_LISTS = (str, bytes, bytearray, memoryview)  # sequences in Python, but not lists of values


ALTERNATIVES = {  # to fields of vLLM's SamplingParams that do not exist here
    "allowed_token_ids": "use logits_processors with a function that sets all other ids to -inf",
    "best_of": "use n and choose by cumulative_logprob",
    "detokenize": "leave it out; results hold both text and token_ids",
    "extra_args": "leave it out",
    "guided_decoding": "use grammar, such as Grammar.json(schema)",
    "output_kind": "use llm.stream for the text as it comes",
    "spaces_between_special_tokens": "leave it out",
    "structured_outputs": "use grammar, such as Grammar.json(schema)",
    "truncate_prompt_tokens": "cut the token ids and give them as the prompt",
    "use_beam_search": "forerun samples; use n",
}


@no_type_check  # so that tests with run-time type checks reach the checks below, which users see
@dataclass(slots=True, unsafe_hash=True)
class SamplingParams:
    """How one request's tokens are sampled and when its text ends; checked at construction.

    A field may be assigned later; it is checked again, and an invalid value changes nothing. A request uses the values
    at the time when it is made.

    `temperature` below 1e-5 counts as 0, the point mass at the largest logit. `top_k` 0 or -1, `top_p` 1 and
    `min_p` 0 are off. With `max_tokens` None the text may fill the context. `seed` is taken modulo 2**64; None means a
    random seed per request. Lists are stored as tuples, None as an empty one, and a single `stop` string as a tuple.

    Integers fit int64. `temperature` and `repetition_penalty` are at most 3.4e38, `repetition_penalty` is at least
    1.18e-38, and biases lie between -3.4e38 and 3.4e38, or are -inf to ban a token: these are the limits of float32,
    within which every finite logit stays finite. `n` is at most 1024; `logprobs` and `prompt_logprobs` are at most
    128; there are at most 64 `stop` strings and 1024 `bad_words`, of at most 1024 characters each.

    `bad_words` are banned as sequences of tokens: each word as it is tokenized inside a text, with and without a blank
    before it. Its last token is banned if the answer ends with the others; other tokens may still spell the word.

    The entire text of an answer matches `grammar`, and ends only where it does, unless `max_tokens`, a stop string or a
    stop id ends it earlier. It ends at once when no token may follow, whatever `min_tokens` is.

    Raises InvalidRequest naming the field, UnknownKeyword for a field that does not exist.
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
    bad_words: str | Sequence[str] = ()
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
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    def __new__(cls, *_: object, **given: object) -> SamplingParams:
        for name in given:
            if name in ALTERNATIVES:
                raise InvalidRequest(name, f"it is not supported: {ALTERNATIVES[name]}.")
            if name not in cls.__slots__:
                raise UnknownKeyword(cls.__name__, name, nearest(name, cls.__slots__))
        return object.__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(self, LAST_FIELD):  # the object is complete, so the assignment is not the constructor's
            value = getattr(replace(self, **{name: value}), name)  # type: ignore[arg-type]
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        self._check_law()
        self._check_ids()
        self._check_limits()
        self._check_texts("stop", MOST_STOPS, "an empty string would stop every answer at once")
        self._check_texts("bad_words", MOST_WORDS, "an empty string is not a word")
        self._check_switches()

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy: the point mass at the largest logit."""
        return self.temperature < GREEDY_BELOW

    def resolve_seed(self) -> int:
        """The given seed, or a random one of 64 bits, which results report so that the answer can be repeated."""
        return secrets.randbits(64) if self.seed is None else self.seed % 2**64

    def check_vocabulary(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Raise InvalidRequest if a field does not fit a tokenizer of `vocab_size` ids, or excludes all of them."""
        for name in ("logit_bias", "banned_tokens", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise _invalid(name, token, f"use token ids below the vocabulary size, {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise _invalid(name, count, f"use at most the vocabulary size, {vocab_size}")
        bias = self.logit_bias or {}
        impossible = set(self.banned_tokens) | {token for token, value in bias.items() if value == -math.inf}
        if len(impossible) >= vocab_size:
            raise _invalid("banned_tokens", impossible, f"all {vocab_size} are banned: allow at least one")
        if self.min_tokens > 0 and len(impossible | set(self.stop_token_ids) | set(eos_ids)) >= vocab_size:
            raise _invalid("min_tokens", self.min_tokens, "every token is banned or ends the text: set it to 0")

    def _check_law(self) -> None:
        penalty = f"use 1 to switch it off, or a number from {FLOAT32_LEAST:.3g} to {FLOAT32:.3g} (float32)"
        self._real("temperature", f"use 0 for greedy, or a number above 0, at most {FLOAT32:.3g}", 0.0)
        self._real("top_p", "use 1 to switch it off, or a share in (0, 1]", ABOVE_0, 1.0)
        self._real("min_p", "use 0 to switch it off, or a share in [0, 1]", 0.0, 1.0)
        self._real("repetition_penalty", penalty, FLOAT32_LEAST)
        self._real("presence_penalty", "use a number in [-2, 2]", -2.0, 2.0)
        self._real("frequency_penalty", "use a number in [-2, 2]", -2.0, 2.0)
        self._whole("top_k", f"use 0 or -1 to switch it off, or {COUNT}", -1)

    def _check_ids(self) -> None:
        for name in ("banned_tokens", "stop_token_ids"):
            self._list(name, "token ids: integers, 0 or above", _is_id)
            self._set(name, tuple(int(token) for token in getattr(self, name)))
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _invalid("logit_bias", self.logit_bias, "use a mapping from token id to the number to add")
        # A plain dict and not a read-only proxy, since requests are pickled.
        self._set("logit_bias", dict(_bias(token, value) for token, value in self.logit_bias.items()))

    def _check_limits(self) -> None:
        self._whole("min_tokens", f"use 0 or {COUNT}")
        least = f"use at least 1 token, at most 2**63 - 1, or {shown(None)}: until the context is full"
        self._whole("max_tokens", least, 1, none=True)
        self._whole("seed", f"use {shown(None)} or an integer of 64 bits", -(2**63), 2**64 - 1, none=True)
        self._whole("n", f"use 1 or more answers per prompt, at most {MOST_SAMPLES}", 1, MOST_SAMPLES)
        for name in ("logprobs", "prompt_logprobs"):
            fix = f"use {shown(None)}, or how many alternatives to report, at most {MOST_LOGPROBS}"
            self._whole(name, fix, 0, MOST_LOGPROBS, none=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"use at most max_tokens, {self.max_tokens}")

    def _check_texts(self, name: str, most: int, empty: str) -> None:
        if isinstance(getattr(self, name), str):
            self._set(name, (getattr(self, name),))
        self._list(name, "strings, or one string", lambda text: isinstance(text, str))
        texts = getattr(self, name)
        if len(texts) > most:
            raise _invalid(name, texts, f"these are {len(texts)} strings: use at most {most}")
        for text in texts:
            if not text:
                raise _invalid(name, text, f"{empty}: leave it out")
            if len(text) > MOST_CHARACTERS:
                raise _invalid(name, text, f"it has {len(text)} characters: use at most {MOST_CHARACTERS}")

    def _check_switches(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), f"use {shown(True)} or {shown(False)}")
        self._list("logits_processors", "callables", callable)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _invalid("grammar", self.grammar, "use a Grammar, such as Grammar.json(schema)")

    def _real(self, name: str, fix: str, least: float, most: float = FLOAT32) -> None:
        self._set(name, real(name, getattr(self, name), fix, least, most))

    def _whole(self, name: str, fix: str, least: int = 0, most: int = INT64, *, none: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not none:
            self._set(name, whole(name, value, fix, least, most))

    def _list(self, name: str, what: str, fits: Callable[[Any], bool]) -> None:
        values = () if getattr(self, name) is None else getattr(self, name)
        if not isinstance(values, Sequence) or isinstance(values, NO_LISTS) or not all(map(fits, values)):
            raise _invalid(name, values, f"use a list of {what}")
        self._set(name, tuple(values))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _bias(token: Any, value: Any) -> tuple[int, float]:
    """One entry of `logit_bias` as plain numbers."""
    if not _is_id(token):
        raise _invalid("logit_bias", token, "use token ids as keys: integers, 0 or above")
    if isinstance(value, Real) and value == -math.inf:
        return int(token), -math.inf
    fix = f"use numbers from -{FLOAT32:.3g} to {FLOAT32:.3g} (float32), or -inf to ban token {shown(token)}"
    return int(token), real("logit_bias", value, fix)


def _invalid(name: str, value: object, fix: str) -> InvalidRequest:
    assert name in {field.name for field in fields(SamplingParams)}, f"{name} is not a sampling parameter"
    return refusal(name, value, fix)
