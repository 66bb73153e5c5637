"""RequestChecker: checks a request against the engine's model, and turns it into sequences, one per sample.

A request that cannot be served is refused here, before it can affect another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from weakref import proxy

from forerun.accept.stop import StopChecker
from forerun.config import Speculation
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidGrammar, InvalidRequest, PromptTooLong
from forerun.limits import shown
from forerun.request import Request
from forerun.sampling.constraint import Constraint
from forerun.sampling.matcher import Matchers, SpelledTokens
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer


@dataclass(slots=True, weakref_slot=True)
class RequestChecker:
    """Checks the requests of one engine and gives them their ids.

    `max_length` is the context limit in tokens, `vocab_size` the width of the logits. Without a tokenizer prompts are
    token ids and stop strings are refused.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    eos_ids: tuple[int, ...]
    default: Speculation
    drafter_names: tuple[str, ...] = ()
    default_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    request_ids: Iterator[int] = field(default_factory=itertools.count)
    seq_ids: Iterator[int] = field(default_factory=itertools.count)
    matchers: Matchers = field(init=False)

    def __post_init__(self) -> None:
        weak = proxy(self)  # no reference cycle, which would outlive the engine
        self.matchers = Matchers(lambda: weak.spelled_tokens())

    @property
    def num_ids(self) -> int:
        """Number of real token ids; a padded vocabulary has more."""
        return self.vocab_size if self.tokenizer is None else min(self.vocab_size, self.tokenizer.num_ids)

    def sequences(self, request: Request) -> list[Sequence]:
        """The request's sequences, one per sample. Raises InvalidRequest, which names the field and the reason."""
        params = self.default_params if request.sampling_params is None else request.sampling_params
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("sampling_params", f"{shown(params)} must be SamplingParams.")
        if not isinstance(request.tenant, str):
            raise InvalidRequest("tenant", f"{shown(request.tenant)} must be a string, the name of a tenant.")
        tokens = self.prompt_tokens(request)
        params, bad_words = self.split_bad_words(copy(params))  # the caller may change its own while the request runs
        params.check_vocabulary(self.num_ids, self.eos_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop", "stop strings need a tokenizer, which this model lacks: use stop_token_ids.")
        matcher = None if params.grammar is None else self.matchers.matcher(params.grammar)
        speculation = Speculation.of(request.speculation, self.default)
        if speculation.drafter is not None and speculation.drafter not in self.drafter_names:
            known = ", ".join(self.drafter_names) or "none"
            raise InvalidRequest(
                "speculation.drafter", f"{shown(speculation.drafter)} is not a drafter of this engine; it has: {known}."
            )
        request_id = next(self.request_ids)
        seed = self.seed_of(params, request_id)
        sequences = [
            Sequence(
                id=next(self.seq_ids),
                request_id=request_id,
                sample=sample,
                tokens=list(tokens),
                num_prompt=len(tokens),
                params=params,
                seed=seed,
                eos_ids=self.eos_ids,
                max_length=self.max_length,
                speculation=speculation,
                stop=StopChecker(
                    params,
                    eos_ids=self.eos_ids,
                    limit=self.max_length - len(tokens),
                    tokenizer=self.tokenizer,
                    prompt=tokens,
                    shown=request.shown_special_ids,
                ),
                tenant=request.tenant,
                bad_words=bad_words,
                draft_details=request.draft_details,
            )
            for sample in range(params.n)
        ]
        if matcher is not None:
            for sequence in sequences:
                sequence.constraint = Constraint(matcher, sequence.id, len(tokens), sequence.stop.end_ids)
        return sequences

    def seed_of(self, params: SamplingParams, request_id: int) -> int:
        """The request's seed; without one, derived from the engine's seed and the request's id, or random."""
        if params.seed is not None or self.seed is None:
            return params.resolve_seed()
        digest = blake2b(f"{self.seed % 2**64} {request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def prompt_tokens(self, request: Request) -> list[int]:
        """The prompt's token ids: at least one, all in the vocabulary, and room for at least one more token."""
        if request.prompt_token_ids is not None:
            self.check_length(len(request.prompt_token_ids))
            tokens = list(request.prompt_token_ids)
        elif request.prompt is None:
            raise InvalidRequest("prompt", "it is missing: give text or token ids.")
        elif self.tokenizer is None:
            raise InvalidRequest("prompt", "this model has no tokenizer: give token ids instead of text.")
        else:
            tokens = self.tokenizer.encode_within(request.prompt, self.max_length)
        if not tokens:
            raise InvalidRequest("prompt", "it is empty, and the tokenizer adds no BOS token: give at least one token.")
        self.check_length(len(tokens))
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.num_ids:
                raise InvalidRequest("prompt", f"{shown(token)} is not a token id from 0 to {self.num_ids - 1}.")
        return tokens

    def split_bad_words(self, params: SamplingParams) -> tuple[SamplingParams, list[tuple[int, ...]]]:
        """The parameters with single-token bad words moved to `banned_tokens`; the longer bad words, as token ids."""
        if not params.bad_words:
            return params, []
        if self.tokenizer is None:
            raise InvalidRequest("bad_words", "this model has no tokenizer: use banned_tokens instead.")
        try:
            spelled = {ids: None for word in params.bad_words for ids in self.tokenizer.spellings(word)}
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("bad_words", f"a word is not valid Unicode text ({error}).") from error
        words = [ids for ids in spelled if ids and max(ids) < self.num_ids]
        single = [ids[0] for ids in words if len(ids) == 1]
        banned = replace(params, banned_tokens=(*params.banned_tokens, *single))
        return banned, [ids for ids in words if len(ids) > 1]

    def spelled_tokens(self) -> SpelledTokens:
        """The bytes of each token, for grammars. Raises InvalidGrammar if the tokenizer's tokens are not bytes."""
        table = None if self.tokenizer is None else self.tokenizer.byte_table()
        if self.tokenizer is None or table is None:
            lack = "has no tokenizer" if self.tokenizer is None else "has a tokenizer whose tokens are not byte strings"
            raise InvalidGrammar(f"a grammar needs text, but this model {lack}: leave the grammar out.")
        tokenizer, spelled = self.tokenizer, list(table.spelled[: self.num_ids])
        return SpelledTokens(spelled, tokenizer.special_ids, tokenizer.encode_inside, tokenizer.surface)

    def check_length(self, num_tokens: int) -> None:
        """Raise PromptTooLong if a prompt of `num_tokens` tokens leaves no room for a new token."""
        if num_tokens >= self.max_length:
            raise PromptTooLong(
                "prompt",
                f"the prompt is too long: this model's maximum context length is {self.max_length} tokens, and "
                f"{num_tokens} of the prompt leave no room for an answer: shorten it.",
            )
