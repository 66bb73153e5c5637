"""The law of a server with speculation at temperature 1, by counts of short texts.

Texts of the plain server bring the log-probabilities from which the exact law follows, without a word of tokenizers:
the contexts that matter are those that it writes often. Its own counts against that law are the control: where they
do not fit, or where no log-probabilities are told, counts of both servers are compared with each other instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.prove.cells import LEAST_EXPECTED, MOST_TOKENS, Cells, TokenIds, choose_cells
from forerun.prove.chi_square import LEVEL, ChiSquare, chi_square, holm, smallest_bias, upper_tail
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AT_ONCE, UNREADABLE, Questioner, RemoteAnswer

TEMPERATURE = 1.0  # the only one whose law log-probabilities tell
FURTHER = 2  # tokens behind those that are counted, so that guesses are drafted at the last of these too
PILOT_TEXTS, MOST_OPENINGS = 48, 8
LETTERS = (24, 16, 12, 8, 4)  # beginnings of texts that are counted where tokens are not named
ENOUGH_CELLS = 8
UNNAMED = -1  # stands for a token that cannot be told from others


@dataclass(frozen=True, slots=True)
class ServedLaw:
    """One test: `num_texts` texts of each server after one opening, their first `counted`.

    With `exact` they were compared with the law by log-probabilities, otherwise with the plain server's own counts.
    `control_p` is the p-value of the plain server's counts against the law; None where that is not known. `adjusted_p`
    is corrected for the number of tests. Chances off by the share `smallest_bias` (root mean square) would have been
    found in 95 of 100 runs. `problem` says why there was no test.
    """

    opening: str
    exact: bool
    num_texts: int
    counted: str
    statistic: float
    freedom: int
    p_value: float
    adjusted_p: float
    smallest_bias: float
    control_p: float | None
    num_drafted: float | None
    problem: str = ""

    @property
    def holds(self) -> bool:
        """Whether the law is not rejected."""
        return self.adjusted_p >= LEVEL


class TokenNumbers:
    """Numbers for the names of tokens, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The number of a token; of one whose name others share it is not known which it was."""
        return UNNAMED if UNREADABLE in name else self.numbers.setdefault(name, len(self.numbers))

    def text(self, answer: RemoteAnswer) -> TokenIds:
        """The tokens of an answer."""
        return tuple(self.of(name) for name in answer.names)


def cells_of(texts: Sequence[RemoteAnswer], num_texts: int, numbers: TokenNumbers) -> Cells:
    """The cells for so many texts, by the log-probabilities that these texts came with.

    Where a text ended without a token that says so, the token that ends texts has no name. Of what is likely there,
    only tokens that did follow in another text get cells: none of them is that one.
    """
    laws: dict[TokenIds, dict[int, float]] = {}
    ended, following = set[TokenIds](), dict[TokenIds, set[int]]()
    for answer in texts:
        ids = numbers.text(answer)
        if answer.stopped:
            ended.add(ids)
        for place in range(len(ids)):
            following.setdefault(ids[:place], set()).add(ids[place])
        for place, token in enumerate(answer.tokens[:MOST_TOKENS]):
            if token.likely and UNNAMED not in ids[:place] and ids[:place] not in laws:
                named = {numbers.of(name): math.exp(value) for name, value in token.likely.items()}
                laws[ids[:place]] = {number: chance for number, chance in named.items() if number != UNNAMED}

    for beginning in ended & laws.keys():
        seen = following.get(beginning, set())
        laws[beginning] = {number: chance for number, chance in laws[beginning].items() if number in seen}

    def next_laws(beginnings: Sequence[TokenIds]) -> Tensor:
        table = torch.zeros(len(beginnings), len(numbers.numbers) or 1, dtype=torch.float64)
        for row, beginning in enumerate(beginnings):
            for number, chance in laws.get(beginning, {}).items():
                table[row, number] = chance
        return table

    return choose_cells(next_laws, num_texts)


def law_test(opening: str, plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]) -> ServedLaw:
    """Test the texts of the second server, by the law of the first one if it is known, or else by its counts."""
    numbers = TokenNumbers()
    cells = cells_of(plain, len(speculating), numbers)
    control = None
    if cells.enough and any(answer.tokens for answer in speculating):
        control = cells.test([numbers.text(answer) for answer in plain]).p_value
        if control >= LEVEL:
            exact = cells.test([numbers.text(answer) for answer in speculating])
            return served_law(opening, True, speculating, f"{cells.num_tokens} tokens", exact, control)
    beginnings = beginnings_of(plain, speculating)
    if beginnings is None:
        problem = "hardly two beginnings of texts came often enough: ask for more texts, or give other prompts"
        return ServedLaw(opening, False, len(speculating), "", 0.0, 0, 1.0, 1.0, 0.0, control, None, problem)
    counted, one, other = beginnings
    result = two_samples(one, other)
    assert result is not None, "these beginnings have cells"
    return served_law(opening, False, speculating, counted, result, control)


def served_law(
    opening: str,
    exact: bool,
    texts: Sequence[RemoteAnswer],
    counted: str,
    result: ChiSquare,
    control: float | None,
) -> ServedLaw:
    """A test's result, which is not corrected yet."""
    return ServedLaw(
        opening, exact, len(texts), counted, result.statistic, result.freedom, result.p_value, 1.0, 0.0, control, None
    )


Beginnings = tuple[str, list[Hashable], list[Hashable]]


def beginnings_of(plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]) -> Beginnings | None:
    """What is counted of both servers' texts: as much as leaves enough cells, by counts of both together."""
    best: tuple[int, Beginnings] | None = None
    for counted, one, other in candidates(plain, speculating):
        result = two_samples(one, other)
        num_cells = 0 if result is None else result.freedom + 1
        if num_cells > (best[0] if best else 1):
            best = num_cells, (counted, one, other)
        if num_cells >= ENOUGH_CELLS:
            break
    return best[1] if best else None


def candidates(plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]) -> Iterator[Beginnings]:
    """What could be counted, the longest first."""
    if all(any(answer.tokens for answer in side) for side in (plain, speculating)):
        for length in range(MOST_TOKENS, 1, -1):
            yield f"{length} tokens", *([answer.names[:length] for answer in side] for side in (plain, speculating))  # type: ignore[misc]
    else:
        for length in LETTERS:
            yield f"{length} letters", *([answer.text[:length] for answer in side] for side in (plain, speculating))  # type: ignore[misc]


def two_samples(one: Sequence[Hashable], other: Sequence[Hashable]) -> ChiSquare | None:
    """Pearson's test that two samples come from one law; None where there are not two cells.

    Cells are chosen by the counts of both together, given which the split is as chance makes it.
    """
    counts = Counter(one), Counter(other)
    together, total = counts[0] + counts[1], len(one) + len(other)
    least = LEAST_EXPECTED * total / min(len(one), len(other))
    frequent = [key for key, count in together.most_common() if count >= least]
    rest = total - sum(together[key] for key in frequent)
    sizes = [together[key] for key in frequent]
    seen = [[count[key] for key in frequent] for count in counts]
    if rest >= least:
        sizes.append(rest)
        for row, sample in zip(seen, (one, other), strict=True):
            row.append(len(sample) - sum(row))
    elif rest and frequent:
        sizes[-1] += rest
        for row, sample in zip(seen, (one, other), strict=True):
            row[-1] += len(sample) - sum(row)
    if len(sizes) < 2:
        return None
    expected = [[size * len(sample) / total for size in sizes] for sample in (one, other)]
    statistic = sum(chi_square(row, share).statistic for row, share in zip(seen, expected, strict=True))
    return ChiSquare(statistic, len(sizes) - 1, upper_tail(statistic, len(sizes) - 1))


async def compare_laws(
    speculating: Questioner,
    plain: Questioner,
    prompts: Sequence[Passage],
    workload: ProofWorkload,
    report: ProgressCallback,
) -> tuple[ServedLaw, ...]:
    """One test for each opening, corrected for their number."""
    openings = await choose_openings(plain, prompts, workload)
    results = []
    for number, opening in enumerate(openings):
        texts: list[list[RemoteAnswer]] = []
        drafted = None
        for side, who in enumerate((plain, speculating)):

            def told(detail: str, done: float, step: int = 2 * number + side) -> None:
                report(detail, (step + done) / (2 * len(openings)))

            before = await who.server.counts()
            seed = workload.seed + (2 * number + side + 1) * workload.num_texts
            likely = min(who.most_likely or 0, 1) if side else who.most_likely or 0
            texts.append(await sample(who, opening, workload.num_texts, seed, likely, told))
            drafted = (await who.server.counts()).since(before).num_drafted
        result = law_test(shown_opening(opening), *texts)
        results.append(replace(result, num_drafted=drafted))
    tested = [result for result in results if not result.problem]
    adjusted = iter(holm([result.p_value for result in tested]))
    return tuple(result if result.problem else corrected(result, next(adjusted), len(tested)) for result in results)


def corrected(result: ServedLaw, adjusted_p: float, num_tests: int) -> ServedLaw:
    """A result with what follows from the number of tests; counts of two samples are worth half as many."""
    num_texts = result.num_texts if result.exact else result.num_texts // 2
    bias = smallest_bias(result.freedom, num_texts, num_tests)
    return replace(result, adjusted_p=adjusted_p, smallest_bias=bias)


async def choose_openings(plain: Questioner, prompts: Sequence[Passage], workload: ProofWorkload) -> list[Passage]:
    """The prompts whose continuations have the most cells, by a few texts of the plain server."""
    few = prompts[:MOST_OPENINGS]
    if not plain.most_likely or len(few) <= workload.num_openings:
        return list(few[: workload.num_openings])

    async def num_cells(prompt: Passage) -> int:
        number = min(PILOT_TEXTS, workload.num_texts)
        texts = await sample(plain, prompt, number, workload.seed, plain.most_likely or 0, lambda *_: None)
        return len(cells_of(texts, workload.num_texts, TokenNumbers()).chances)

    sizes = [await num_cells(prompt) for prompt in few]
    ranked = sorted(range(len(few)), key=lambda index: -sizes[index])
    return [few[index] for index in ranked[: workload.num_openings]]


async def sample(
    who: Questioner, opening: Passage, num_texts: int, seed: int, likely: int, report: ProgressCallback
) -> list[RemoteAnswer]:
    """So many texts after one opening, each with a seed of its own; with `likely` tokens at each place, if any."""
    seeds = range(seed, seed + num_texts)
    extra = who.server.dialect.exact_tokens if likely else {}
    return await who.ask(
        [opening] * num_texts, seeds, TEMPERATURE, MOST_TOKENS + FURTHER, AT_ONCE, likely, report, extra
    )


def shown_opening(opening: Passage) -> str:
    """An opening for a reader: its end."""
    talk = opening.conversation
    return str(talk[-1].get("content", "") if talk else opening.prompt)[-40:]
