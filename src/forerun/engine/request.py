"""Request: a prompt and its parameters, checked against one model before anything runs.

Decides whether a request can be served and turns it into sequences, one per sample. Knows nothing of rounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.accept.stop import StopChecker
from forerun.config import Speculation
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest, PromptTooLong
from forerun.sampling.params import SamplingParams
from forerun.text import Tokenizer


@dataclass(slots=True)
class Requests:
    """Checks and numbers the requests of one engine.

    `max_length` is the context limit in tokens, `vocab_size` the width of the logits. Without a tokenizer prompts
    are token ids and stop strings are refused.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    eos_ids: tuple[int, ...]
    default: Speculation
    arms: tuple[str, ...] = ()
    request_ids: Iterator[int] = field(default_factory=itertools.count)
    seq_ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_ids(self) -> int:
        """Real token ids; a padded vocabulary has more."""
        return self.vocab_size if self.tokenizer is None else min(self.vocab_size, self.tokenizer.num_ids)

    def sequences(
        self,
        prompt: str | Seq[int],
        params: SamplingParams,
        wish: bool | int | Speculation | None = None,
        tenant: str = "",
    ) -> list[Sequence]:
        """The request's samples, or InvalidRequest saying which field cannot be served and why."""
        tokens = self.prompt_tokens(prompt)
        if not isinstance(params, SamplingParams):
            raise InvalidRequest("sampling_params", f"{params!r} must be SamplingParams.")
        if not isinstance(tenant, str):
            raise InvalidRequest("tenant", f"{tenant!r} must be a string that names whose request it is.")
        params.check_vocabulary(self.num_ids, self.eos_ids)
        if params.stop and self.tokenizer is None:
            raise InvalidRequest("stop", "stop strings need a tokenizer; use stop_token_ids.")
        speculation = Speculation.of(wish, self.default)
        if speculation.drafter is not None and speculation.drafter not in self.arms:
            known = ", ".join(self.arms) or "none"
            raise InvalidRequest(
                "speculation.drafter", f"{speculation.drafter!r} is not drafting here; known: {known}."
            )
        seed, request_id = params.resolve_seed(), next(self.request_ids)
        return [
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
                ),
                tenant=tenant,
            )
            for sample in range(params.n)
        ]

    def prompt_tokens(self, prompt: str | Seq[int]) -> list[int]:
        """The prompt's token ids: at least one, all known, with room behind them."""
        if isinstance(prompt, bytes) or not isinstance(prompt, Seq):
            raise InvalidRequest("prompt", f"{prompt!r} must be text or a list of token ids.")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "text needs a tokenizer; give token ids.")
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = list(prompt)
        if not tokens:
            raise InvalidRequest("prompt", "it is empty, and the tokenizer adds no first token: give at least one.")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.num_ids:
                raise InvalidRequest("prompt", f"{token!r} is not a token id from 0 to {self.num_ids - 1}.")
        if len(tokens) >= self.max_length:
            raise PromptTooLong(
                "prompt", f"{len(tokens)} tokens leave no room in a context of {self.max_length}: shorten it."
            )
        return tokens
