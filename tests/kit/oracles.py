"""A drafter that knows the answers in advance, and the parts of an answer that must not depend on drafting.

With it a test decides in which round, and at which position of a draft, a token is emitted: right draft tokens are
accepted, and wrong ones end the accepted run where the test wants it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.output import RequestOutput
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RowSampling
from forerun.tree import DraftTree

Known = tuple[SamplingParams, Sequence[int]]  # a request's parameters, and the tokens of one of its samples
FILLER = 300  # drafted past the known part of an answer
VOCAB = 512


def never(place: int) -> bool:
    """The `errs` of an oracle that never drafts a wrong token."""
    return False


@dataclass
class Oracle:
    """Drafts the known answers of samples.

    `errs(i)` says whether a wrong token is drafted for the i-th token of an answer. Past the known part it drafts
    FILLER. In trees wrong siblings precede the right token, as many as the budget allows.
    """

    answers: dict[tuple[tuple[int, ...], int], list[Known]] = field(default_factory=dict)  # by prompt and sample
    errs: Callable[[int], bool] = never
    known: set[int] = field(default_factory=set)
    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("oracle",)

    def learn(self, results: Sequence[RequestOutput], params: Sequence[SamplingParams]) -> None:
        """Remember these as the answers to requests with these parameters."""
        for result, asked in zip(results, params, strict=True):
            for sample in result.outputs:
                self.answers.setdefault((result.prompt_token_ids, sample.index), []).append((asked, sample.token_ids))

    def observe(self, committed: Committed) -> None:
        self.known.update(committed.seq_ids)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        grown = [self.grow(row, budget) for row, budget in zip(draws.rows, budgets, strict=True)]
        nodes = max(len(tokens) for tokens, _ in grown)
        tokens = torch.tensor([t + [-1] * (nodes - len(t)) for t, _ in grown])
        parents = torch.tensor([p + [-1] * (nodes - len(p)) for _, p in grown])
        depth, width = max(b.depth for b in budgets), max(b.width for b in budgets)
        return Draft(DraftTree(tokens, parents, depth, width))

    def grow(self, row: RowSampling, budget: Budget) -> tuple[list[int], list[int]]:
        """One row's tree (tokens, parents): the answer as its spine, with wrong siblings while nodes are left."""
        tokens, parents, spine = [row.tokens[-1]], [-1], 0
        prompt, output = tuple(row.tokens[: row.num_prompt]), row.tokens[row.num_prompt :]
        known = self.answers.get((prompt, row.sample), [])
        answer = next((tokens for params, tokens in reversed(known) if has_params(row.params, params)), ())
        assert tuple(answer[: len(output)]) == tuple(output[: len(answer)]), "the oracle knows another answer"
        for level in range(budget.depth):
            place = len(output) + level
            right = answer[place] if place < len(answer) else FILLER
            wrong = [(right + 7 + i) % VOCAB for i in range(budget.width)]
            spare = budget.nodes - (len(tokens) - 1) - (budget.depth - level)
            siblings = wrong[: min(budget.width - 1, spare)]
            children = [*siblings, wrong[-1] if self.errs(place) else right]
            tokens += children
            parents += [spine] * len(children)
            spine = len(tokens) - 1
        return tokens, parents

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [10**6] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.known -= set(seq_ids)


def has_params(params: SamplingParams, asked: SamplingParams) -> bool:
    """Whether a sequence's parameters are those of the request; bad words of one token become banned tokens in it."""
    changed = bool(asked.bad_words) and replace(params, banned_tokens=asked.banned_tokens) == asked
    return changed or params == asked


def exact_parts(result: RequestOutput) -> Mapping[str, Any]:
    """The parts of an answer that plain and drafted decoding must share to the bit: all but the tokens' origins."""
    return {
        "prompt": result.prompt_token_ids,
        "prompt_logprobs": result.prompt_logprobs,
        "seed": result.seed,
        "fingerprint": result.fingerprint,
        "samples": [
            (c.index, c.token_ids, c.text, c.logprobs, c.finish_reason, c.stop_reason, len(c.origins))
            for c in result.outputs
        ],
    }
