"""A drafter that knows the answers beforehand, and what of an answer must not depend on drafting.

With it a test decides in which round, and at which place of a draft, a token is said: right guesses are accepted,
wrong ones end the run where the test wants it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.output import RequestOutput
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.tables import RowSampling
from forerun.tree import DraftTree

Known = tuple[SamplingParams, Sequence[int]]  # a request's parameters, and what a sample of it says
FILLER = 300  # guessed where the answer is not known any more
VOCAB = 512


def never(place: int) -> bool:
    """For an oracle that does not err."""
    return False


@dataclass
class Oracle:
    """Guesses the known answers of samples, in full.

    `errs(i)` says whether the i-th token of an answer is to be guessed wrong. Behind the known part, and below a
    wrong guess, it goes on with tokens of its own. Trees offer wrong siblings first, as many as the budget allows.
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
        """One row's tree: the answer as a spine, wrong guesses beside it while there are nodes to spare."""
        tokens, parents, spine = [row.tokens[-1]], [-1], 0
        prompt, said = tuple(row.tokens[: row.num_prompt]), row.tokens[row.num_prompt :]
        known = self.answers.get((prompt, row.sample), [])
        answer = next((tokens for params, tokens in reversed(known) if is_of(row.params, params)), ())
        assert tuple(answer[: len(said)]) == tuple(said[: len(answer)]), "the oracle knows another answer"
        for level in range(budget.depth):
            place = len(said) + level
            right = answer[place] if place < len(answer) else FILLER
            wrong = [(right + 7 + i) % VOCAB for i in range(budget.width)]
            spare = budget.nodes - (len(tokens) - 1) - (budget.depth - level)
            beside = wrong[: min(budget.width - 1, spare)]
            children = [*beside, wrong[-1] if self.errs(place) else right]
            tokens += children
            parents += [spine] * len(children)
            spine = len(tokens) - 1
        return tokens, parents

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [10**6] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.known -= set(seq_ids)


def is_of(params: SamplingParams, asked: SamplingParams) -> bool:
    """Whether a sequence's parameters are those that were asked for: bad words of one token are banned tokens there."""
    changed = bool(asked.bad_words) and replace(params, banned_tokens=asked.banned_tokens) == asked
    return changed or params == asked


def seen(result: RequestOutput) -> Mapping[str, object]:
    """All of an answer that plain and drafted decoding must share, to the bit: everything but who guessed what."""
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
