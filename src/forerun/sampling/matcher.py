"""Matchers: compiles grammars with llguidance, and computes the tokens that they allow after a text.

Only this file and `trial.py` import llguidance. This file decides how a tokenizer is described to it, which grammars
are refused and with which limits: every mask is computed within a fixed amount of work, so that no grammar can block a
batch.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from forerun.errors import InvalidGrammar, MissingPackage
from forerun.sampling.grammar import Grammar
from forerun.sampling.trial import UNTRIED_CHARACTERS, TokenTable, problem_of_trial

KEPT_GRAMMARS = 64  # compiled grammars that are cached: requests of a server often have the same few grammars
HEAVY_S = 0.05  # a grammar whose mask takes longer may have 100 MB, and is not cached
SHOWN_CHARACTERS = 300  # of a message of llguidance
BLANKS = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}  # between parts of JSON; without a limit they may never end
DEAD_END = "NoExtension"  # llguidance's name of a state where no token can follow and the text is not complete
Mask = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, slots=True)
class SpelledTokens:
    """A vocabulary as llguidance needs it.

    `spelled` has the bytes that each id adds to a text; None for ids without text, which are never allowed. `special`
    ids have no text either, but a Lark grammar can name them (`names`). `encode` tokenizes text inside other text.
    """

    spelled: Sequence[bytes | None]
    special: frozenset[int]
    encode: Callable[[str], Sequence[int]]
    names: Callable[[int], str | None]


class Matcher:
    """A compiled grammar and the state of a text in it.

    `read` and `rewind` move it forward and back; the state depends on the text alone. Every method raises
    InvalidGrammar if the grammar needs more work than its limits allow; after that the matcher cannot be used.

    `heavy`: masks of this matcher or one of its forks took long, or more work than is allowed. Such a grammar is not
    worth its memory, since everything that was computed for masks is stored with it.
    """

    def __init__(self, inner: Any, end: int, origin: Matcher | None = None) -> None:
        self._inner, self._end, self._origin, self.heavy = inner, end, origin, False

    def fork(self) -> Matcher:
        """An independent matcher in the same state."""
        return Matcher(self._inner.deep_copy(), self._end, self._origin or self)

    def read(self, tokens: Sequence[int]) -> int:
        """Move over these tokens, up to the first one that the grammar does not allow; returns how many were read."""
        count: int = self._inner.try_consume_tokens(list(tokens))
        self._check()
        return count

    def rewind(self, count: int) -> None:
        """Move back by `count` tokens."""
        self._inner.rollback(count)
        self._check()

    def mask(self) -> Mask:
        """A new array with a bit for every id, the lowest first, set if the id may come next. End ids are not set."""
        start_s = time.monotonic()
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint32).copy()
        if time.monotonic() - start_s > HEAVY_S:
            (self._origin or self).heavy = True
        if not self._inner.get_error().startswith(DEAD_END):
            self._check()
        bits[self._end // 32] &= ~bit(self._end)
        return bits

    @property
    def accepts(self) -> bool:
        """Whether the text so far matches the grammar, so that it may end here."""
        return bool(self._inner.is_accepting())

    def forced(self) -> list[int]:
        """The next tokens for which the grammar leaves no choice."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        self._check()
        return tokens

    def _check(self) -> None:
        if self._inner.is_error():
            (self._origin or self).heavy = True
            raise InvalidGrammar(
                f"llguidance fails after this text: {brief(self._inner.get_error())} Use a simpler grammar."
            )


@dataclass(slots=True)
class KeptGrammar:
    """A cached grammar; the thread that holds the lock compiles it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    matcher: Matcher | None = None


class Matchers:
    """Compiles grammars for one vocabulary, and caches the last ones. Thread-safe.

    Different grammars are compiled in parallel, and equal ones once. `texts` returns the vocabulary; it is called at
    first use. Raises MissingPackage without llguidance.
    """

    def __init__(self, texts: Callable[[], SpelledTokens]) -> None:
        self._make_texts = texts
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, KeptGrammar] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of a text. It is shared: fork it, and move the fork.

        Raises InvalidGrammar, with the reason, for a grammar that cannot be served.
        """
        with self._lock:
            self._drop_heavy()
            kept = self._kept.setdefault(grammar, KeptGrammar())
            self._kept.move_to_end(grammar)
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        with kept.lock:
            kept.matcher = kept.matcher or self._compiled(grammar)
            return kept.matcher

    def _drop_heavy(self) -> None:
        """Remove heavy grammars from the cache.

        The errors of requests that such a grammar has failed refer to it and to themselves, so only the garbage
        collector frees it, and that does not run soon for a few objects, even if they have 100 MB.
        """
        heavy = [grammar for grammar, kept in self._kept.items() if kept.matcher is not None and kept.matcher.heavy]
        for grammar in heavy:
            del self._kept[grammar]
        if heavy:
            gc.collect()

    def _compiled(self, grammar: Grammar) -> Matcher:
        with self._lock:
            guidance, tokenizer = self._guidance, self._tokenizer
        try:
            source = json.dumps({"grammars": self._sources(grammar, "start")})
        except ValueError as error:
            raise InvalidGrammar(f"llguidance refuses it: {brief(str(error))}") from error
        if grammar.num_characters > UNTRIED_CHARACTERS:
            names = {token: self._texts.names(token) or "" for token in self._texts.special}
            problem = problem_of_trial(source, len(self._texts.spelled), names)
            if problem is not None:
                raise InvalidGrammar(f"llguidance refuses it: {brief(problem)}")
        limits = guidance.LLParserLimits(verbose_errors=False)
        inner = guidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if inner.is_error():
            raise InvalidGrammar(f"llguidance refuses it: {brief(inner.get_error())}")
        matcher = Matcher(inner, len(self._texts.spelled))
        if not matcher.fork().mask().any():
            raise InvalidGrammar("it allows no text at all, or only the empty one: allow at least one character.")
        return matcher

    def _sources(self, grammar: Grammar, name: str) -> list[dict[str, Any]]:
        """A grammar and its parts in llguidance's own format."""
        if grammar.kind == "lark":
            parts = [source for part_name, part in grammar.parts for source in self._sources(part, part_name)]
            return [{"name": name, "lark_grammar": grammar.text}, *parts]
        if grammar.kind == "regex":
            written = self._guidance.LLMatcher.grammar_from_regex(grammar.text)
        else:
            blanks = BLANKS if grammar.whitespace else {"whitespace_flexible": False}
            written = self._guidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=blanks)
        return [json.loads(written)["grammars"][0] | {"name": name}]

    @cached_property
    def _texts(self) -> SpelledTokens:
        return self._make_texts()

    @cached_property
    def _guidance(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            reason = "structured output needs the package llguidance: pip install 'forerun[grammar]'"
            raise MissingPackage(reason) from error
        return llguidance

    @cached_property
    def _tokenizer(self) -> Any:
        """The vocabulary for llguidance."""
        texts = self._texts
        nothing = {i for i, spelled in enumerate(texts.spelled) if not spelled}
        tokens = [
            (texts.names(i) or "").encode() if i in texts.special else spelled or b""
            for i, spelled in enumerate(texts.spelled)
        ]
        vocabulary = TokenTable(tokens, texts.special | nothing, texts.encode)
        return self._guidance.LLTokenizer(self._guidance.TokenizerWrapper(vocabulary))


def bit(token: int) -> np.uint32:
    """The bit of an id within its 32-bit word of a mask."""
    return np.uint32(1 << (token % 32))


def brief(problem: str) -> str:
    """The start of a message, in one line."""
    text = " ".join(problem.split("<state>")[0].split("<non-verbose")[0].split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return text if text.endswith((".", "…")) else f"{text}."
