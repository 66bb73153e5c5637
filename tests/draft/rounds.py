"""Hand-made rounds for tests of drafters: rows of text, committed in any chunks, and the draws of a round."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook, adoptable
from forerun.kernels.sampling import find_sampling_kernels
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams


@dataclass(frozen=True)
class Row:
    """A sequence with its entire text, the root last, its tenant and the length of its prompt."""

    seq_id: int
    text: Sequence[int]
    tenant: str = ""
    num_prompt: int = 1


def committed(rows: Sequence[Row], starts: Sequence[int] | None = None) -> Committed:
    """The `Committed` of each row's text from `starts` on: the number of tokens committed before, without roots."""
    tokens: list[int] = []
    offsets = [0]
    for row, start in zip(rows, starts or [0] * len(rows), strict=True):
        tokens += row.text[start:-1]
        offsets.append(len(tokens))
    return Committed(
        [r.seq_id for r in rows],
        tokens,
        offsets,
        [r.text[-1] for r in rows],
        tenants=[r.tenant for r in rows],
        num_prompts=[r.num_prompt for r in rows],
    )


def chunked(rows: Sequence[Row], seed: int) -> list[Committed]:
    """The rows' texts as several `Committed` of random pieces, some of which have no new tokens of a row."""
    rng = random.Random(seed)
    done = dict.fromkeys(range(len(rows)), 0)  # committed tokens by row, without the root
    pieces = []
    while any(done[i] < len(row.text) - 1 for i, row in enumerate(rows)) or not pieces:
        chosen = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))), key=lambda _: rng.random())
        if not pieces:
            chosen = list(range(len(rows)))
        ends = {i: min(len(rows[i].text) - 1, done[i] + rng.randint(0, 6)) for i in chosen}
        pieces.append(
            committed([replace(rows[i], text=rows[i].text[: ends[i] + 1]) for i in chosen], [done[i] for i in chosen])
        )
        done |= ends
    return pieces


def draws_of(
    rows: Sequence[Row], vocab: int, *, temperature: float = 0.0, seed: int = 7, rejection: bool = False
) -> Draws:
    """The draws of a round in which these rows are drafted."""
    params = SamplingParams(temperature=temperature)
    samplings = [RowSampling(r.seq_id, params, seed + r.seq_id, 0, list(r.text), r.num_prompt) for r in rows]
    return Draws(samplings, vocab, rejection=rejection, kernels=find_sampling_kernels())


@dataclass(slots=True)
class DrafterWithTarget:
    """A drafter and the target that it drafts for, which reads committed text: some drafters use the target's cache.

    The drafter receives the features that this target computes, whatever the `Committed` has.
    """

    target: Runner
    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    @property
    def names(self) -> tuple[str, ...]:
        return self.drafter.names

    def observe(self, news: Committed) -> None:
        features = []
        for seq_id, tokens, _ in news.rows():
            if tokens:
                features.append(self.target.read([Read(seq_id, tokens)], self.taps).taps)
                self.target.keep([seq_id], [range(len(tokens))])
        shown = [taps for taps in features if taps is not None]
        self.drafter.observe(replace(news, features=torch.cat(shown) if shown else None))

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        return adoptable(self.drafter, text, most, salt)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        draft = self.drafter.propose(draws, budgets, tail)
        self.target.drop(draws.seq_ids)  # the round ends here
        return draft

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return self.drafter.outlook(seq_ids)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.target.release(seq_ids)
        self.drafter.forget(seq_ids)
