"""Matchers: what a compiled grammar allows after a text, by llguidance.

This file and `trial.py` alone import llguidance. This one decides how a tokenizer is described to it, which grammars
are refused and with which limits: every mask is computed within a fixed amount of work, so that no grammar can hold up
a batch.
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

KEPT_GRAMMARS = 64  # compiled ones that are kept: servers are asked with the same few again and again
HEAVY_S = 0.05  # a mask; such a grammar may have 100 MB
SHOWN_CHARACTERS = 300  # of what llguidance says
BLANKS = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}  # between parts of JSON; a model could go on with them for ever
DEAD_END = "NoExtension"  # what llguidance calls it where nothing can follow and the text is not whole
Mask = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(frozen=True, slots=True)
class SpelledTokens:
    """A vocabulary as grammars read it.

    `spelled` is what each id adds to a text, in bytes; None for ids that add nothing and may not be drawn. `special`
    ids are no text either, but a Lark grammar can name them. `encode` gives the ids of text inside other text.
    """

    spelled: Sequence[bytes | None]
    special: frozenset[int]
    encode: Callable[[str], Sequence[int]]
    names: Callable[[int], str | None]


class Matcher:
    """A grammar and the place of a text in it.

    The place is moved forward by `read` and back by `rewind`; whichever way a text was reached, the same is allowed
    behind it. Every method raises InvalidGrammar where the grammar needs more work there than its limits allow; after
    that the matcher is of no use.

    `heavy`: masks of the grammar take long, or more work than is allowed, for this matcher or one of its forks. Then it
    is not worth its memory: what was computed for masks stays with the grammar.
    """

    def __init__(self, inner: Any, end: int, origin: Matcher | None = None) -> None:
        self._inner, self._end, self._origin, self.heavy = inner, end, origin, False

    def fork(self) -> Matcher:
        """A matcher at the same place, independent of this one."""
        return Matcher(self._inner.deep_copy(), self._end, self._origin or self)

    def read(self, tokens: Sequence[int]) -> int:
        """Move behind as many of these tokens as the grammar allows there; how many that are."""
        count: int = self._inner.try_consume_tokens(list(tokens))
        self._check()
        return count

    def rewind(self, count: int) -> None:
        """Move back by so many tokens."""
        self._inner.rollback(count)
        self._check()

    def mask(self) -> Mask:
        """A bit for every id, the lowest first, set where the id may come next; a copy. No id ends the text."""
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
        """Whether the text so far is whole."""
        return bool(self._inner.is_accepting())

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice."""
        tokens: list[int] = self._inner.compute_ff_tokens()
        self._check()
        return tokens

    def _check(self) -> None:
        if self._inner.is_error():
            (self._origin or self).heavy = True
            raise InvalidGrammar(
                f"llguidance gives up on it behind this text: {brief(self._inner.get_error())} Use a simpler grammar."
            )


@dataclass(slots=True)
class KeptGrammar:
    """A grammar's matcher once it is compiled; whoever holds the lock compiles it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    matcher: Matcher | None = None


class Matchers:
    """Compiles grammars for one vocabulary, which `texts` gives when it is first needed, in any thread.

    Different grammars are compiled side by side, and equal ones once. The last ones are kept. Raises MissingPackage
    without llguidance.
    """

    def __init__(self, texts: Callable[[], SpelledTokens]) -> None:
        self._make_texts = texts
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, KeptGrammar] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text, to be forked and not moved, since others have it too.

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
        """Keep no grammar that has shown to be heavy.

        The errors of requests that it has failed refer to it, and to themselves, so the collector has to look for it:
        it does not know that so few objects have 100 MB.
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
            raise InvalidGrammar("it allows no text at all, or none but the empty one: allow at least one character.")
        return matcher

    def _sources(self, grammar: Grammar, name: str) -> list[dict[str, Any]]:
        """A grammar and its parts, as llguidance's own format writes them."""
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
            raise MissingPackage("grammar: it needs the package llguidance: pip install 'forerun[grammar]'") from error
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
    """An id's bit in its word of a mask."""
    return np.uint32(1 << (token % 32))


def brief(problem: str) -> str:
    """The first lines of a message, in one line."""
    text = " ".join(problem.split("<state>")[0].split("<non-verbose")[0].split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return text if text.endswith((".", "…")) else f"{text}."
