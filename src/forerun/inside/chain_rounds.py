"""Chain rounds: drafts chains for another engine, which verifies them and owns the caches.

The drafter and the controller only see the calls of the other engine: accepted tokens follow from the growth of the
rows' texts, and the time of a round from the time between two calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import Speculation
from forerun.control.controller import Controller, Load
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Drafter
from forerun.guard import attempt
from forerun.inside.row_texts import EngineRow, KnownText, RowTexts, extend
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RowSampling
from forerun.tree import HostTree

PLENTY = 1 << 30  # the other engine manages its own cache
UNKNOWN = -2  # the drafter's number in the outcome of a row whose acceptance is unknown
GREEDY = SamplingParams(temperature=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """The draft tokens of a row in the last call, and the number of the drafter in a mix that drafted them."""

    tokens: Sequence[int]
    drafter: int

    def outcome(self, seq_id: int, gained: Sequence[int] | None) -> RowOutcome:
        """The outcome of a row whose text gained these tokens; None if unknown."""
        if gained is None:
            return RowOutcome(seq_id, 0, 0, 0, 0, UNKNOWN)
        drafted, accepted = len(self.tokens), min(len(self.tokens), len(gained) - 1)
        return RowOutcome(seq_id, drafted, min(drafted, accepted + 1), accepted, len(gained), self.drafter)


@dataclass(slots=True)
class ChainRounds:
    """The drafts for one engine. `depth`: maximum chain length; `max_length`: maximum length of a text in tokens.

    `tenant`: the tenant of all texts, for drafters that use past answers; None forbids that.
    """

    drafter: Drafter
    depth: int
    vocab_size: int
    max_length: int
    max_num_rows: int
    speculation: Speculation = field(default_factory=Speculation)
    tenant: str | None = None
    controller: Controller = field(default_factory=MeasuredDepth)
    texts: RowTexts = field(init=False)
    drafted: dict[int, DraftedChain] = field(default_factory=dict)  # the drafts of the last call, by text id
    draft_s: float = 0.0  # duration of the last call
    drafter_s: Sequence[float] = ()
    ended_s: float = 0.0
    broken: bool = False

    def __post_init__(self) -> None:
        self.texts = RowTexts(most_absent=self.max_num_rows)

    def propose(self, rows: Mapping[int, EngineRow], prefill: bool) -> dict[int, list[int]]:
        """Drafts for these rows, by number; `prefill`: whether the last round included prefill.

        If the drafter raises, a warning is logged and drafting is switched off permanently.
        """
        drafts: dict[int, list[int]] = {}
        if not self.broken and (error := attempt(lambda: drafts.update(self.round(rows, prefill)))) is not None:
            self.broken = True
            log.warning("Drafting is switched off: the drafter %s failed.", self.drafter.names[0], exc_info=error)
            drafts = {}
        return drafts

    def round(self, rows: Mapping[int, EngineRow], prefill: bool) -> dict[int, list[int]]:
        """Record the outcome of the last round, and draft for the next one."""
        began_s = time.perf_counter()
        texts, forgotten = self.texts.follow(rows)
        known = [len(text.ids) for text in texts]
        gained = [extend(text, row.ids) for text, row in zip(texts, rows.values(), strict=True)]
        self.record(texts, gained, began_s - self.ended_s, prefill)
        self.drafter.observe(self.news(texts, known))
        if forgotten:
            self.drafter.forget(forgotten)
        budgets = self.budgets(texts)
        chains: Sequence[list[int]] = [[]] * len(texts)
        self.drafter_s = ()
        if any(budget.depth for budget in budgets):
            draft = Draft.of(self.drafter, self.drafter.propose(self.draws(texts), budgets))
            chains = [self.chain(tree, budget) for tree, budget in zip(draft.tree.host(), budgets, strict=True)]
            self.drafter_s = draft.drafter_s
        self.drafted = {
            text.id: DraftedChain(chain, budget.drafter if budget.depth else -1)
            for text, chain, budget in zip(texts, chains, budgets, strict=True)
        }
        self.ended_s = time.perf_counter()
        self.draft_s = self.ended_s - began_s
        return dict(zip(rows, chains, strict=True))

    def record(self, texts: Sequence[KnownText], gained: Sequence[Sequence[int]], pass_s: float, prefill: bool) -> None:
        """Record the last round in the controller; acceptance follows from the tokens that texts gained.

        The acceptance of a finished text is unknown. The time of a round is used only if the rows have not changed
        since, and there was no prefill.
        """
        gains = {text.id: tokens for text, tokens in zip(texts, gained, strict=True)}
        rows = [chain.outcome(seq_id, gains.get(seq_id)) for seq_id, chain in self.drafted.items()]
        comparable = not prefill and list(gains) == list(self.drafted)
        if rows:
            outcome = Outcome(rows, 0, self.draft_s, pass_s, drafter_s=self.drafter_s, captured=not comparable)
            self.controller.record(outcome)

    def news(self, texts: Sequence[KnownText], known: Sequence[int]) -> Committed:
        """The newly committed tokens. The last token of a text is the root, which is committed in the next round."""
        tokens: list[int] = []
        offsets = [0]
        for text, length in zip(texts, known, strict=True):
            tokens += text.tokens[max(0, length - 1) : -1]
            offsets.append(len(tokens))
        return Committed(
            seq_ids=[text.id for text in texts],
            tokens=tokens,
            offsets=offsets,
            roots=[text.tokens[-1] for text in texts],
            tenants=[self.tenant] * len(texts),
            num_prompts=[text.num_prompt for text in texts],
        )

    def budgets(self, texts: Sequence[KnownText]) -> Sequence[Budget]:
        """The draft budget of each text."""
        ids = [text.id for text in texts]
        load = Load(
            seq_ids=ids,
            speculations=[self.speculation] * len(texts),
            rooms=[max(0, min(self.depth, self.max_length - len(text.tokens) - 1)) for text in texts],
            num_prompt_tokens=0,
            num_context=sum(len(text.tokens) for text in texts),
        )
        if not texts or self.controller.skips(load):
            return [NO_DRAFT] * len(texts)
        spare = Spare(own=dict.fromkeys(ids, 0), num_blocks=PLENTY, block_size=PLENTY)
        return self.controller.budgets(load, self.drafter.outlook(ids), spare)

    def draws(self, texts: Sequence[KnownText]) -> Draws:
        """Draws for the texts; drafters that copy text do not sample."""
        return Draws([RowSampling(t.id, GREEDY, 0, 0, t.tokens, t.num_prompt) for t in texts], self.vocab_size)

    def chain(self, tree: HostTree, budget: Budget) -> list[int]:
        """The path of first (most likely) children, within the budget and up to the first invalid token id."""
        path: list[int] = []
        node = 0
        for child, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            if child and parent == node:
                if len(path) == min(budget.depth, self.depth) or not 0 <= token < self.vocab_size:
                    break
                path.append(token)
                node = child
        return path
