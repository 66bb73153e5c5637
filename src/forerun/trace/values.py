"""The contents of a trace, as frozen values, and as the JSON object that `forerun trace --json` prints.

`Trace.as_object` gives this shape, with null where a value does not exist:

    prompt, prompt_token_ids, text, token_ids, seed, temperature, verification,
    finish_reason, same_as_plain
    rounds: one per target pass that drew a token
        number, num_prompt_tokens, rule, text, choice
        guesses: node, parent (0 is the root), depth, token_id, text, q, p, verdict, reason, drawn_id, coin, chance
        emitted: token_id, text, origin, p
        segments: text, origin, special

`record.py` fills these values in, `show.py` draws them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forerun.accept.commit import Origin
from forerun.accept.delta import Segment
from forerun.config import Verification

Fate = Literal["accepted", "rejected", "not judged"]
Rule = Literal["follow", "token", "block"]


@dataclass(frozen=True, slots=True)
class Guess:
    """One guess. `node` counts from 1 within the round; `parent` is the guess it follows, 0 the root.

    `q` is what the drafter gave the token after all transforms (None: no law is known, as with n-grams), `p` what the
    target gives it there. Under `follow` `drawn_id` is what the target drew in its place. Under `token` and `block`
    `coin` decides against `chance`: by `token` P(accepted | reached), by `block` the coin's own success, h.
    """

    node: int
    parent: int
    depth: int
    token_id: int
    text: str
    q: float | None
    p: float
    verdict: Fate
    reason: str
    drawn_id: int | None = None
    coin: float | None = None
    chance: float | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that the round made final, and what the target gave it."""

    token_id: int
    text: str
    origin: Origin
    p: float


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One target pass: it read `num_prompt_tokens` of prompt (its root not counted) and the guesses side by side.

    `rule` is the one that judged: guesses without a law are judged by `follow` in every mode. `emitted` ends before
    the next token where the text ends within the accepted guesses. `segments` is the text that the round made certain
    (it may lag behind tokens), `text` all of it so far, the prompt not counted. `choice` says how far the controller
    chose to draft, and why; it is empty where the depth was fixed.
    """

    number: int
    num_prompt_tokens: int
    rule: Rule
    guesses: Sequence[Guess]
    emitted: Sequence[Emitted]
    segments: Sequence[Segment]
    text: str
    choice: str = ""

    @property
    def num_accepted(self) -> int:
        """Guesses accepted."""
        return sum(guess.verdict == "accepted" for guess in self.guesses)

    @property
    def branches(self) -> bool:
        """Whether the guesses are more than a chain."""
        return any(guess.parent != guess.node - 1 for guess in self.guesses)

    def children(self, node: int) -> list[Guess]:
        """The guesses that follow a node, in draw order."""
        return [guess for guess in self.guesses if guess.parent == node]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole answer. `same_as_plain`: whether plain decoding gave the same tokens; None where it need not."""

    prompt: str
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    seed: int
    temperature: float
    verification: Verification
    finish_reason: str
    same_as_plain: bool | None
    rounds: Sequence[TracedRound]

    def as_object(self) -> dict[str, Any]:
        """The trace as what JSON can hold."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=lambda origin: origin.value))
        return values
