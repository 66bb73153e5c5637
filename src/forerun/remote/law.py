"""A test of a server's output distribution at temperature 1, by counts of short texts.

The exact law follows from the log-probabilities in the plain server's texts, without its tokenizer, since the contexts
that matter occur often in them. The test of the plain server's counts against that law is the control. A server may
not sample exactly from the log-probabilities that it reports, so a deviation from the law alone is not a fault: then,
or without log-probabilities, as many texts again are drawn from both servers and their counts compared with each other.
So every reported fault comes from a test whose significance level does not depend on the reported values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.prove.cells import LEAST_EXPECTED, MOST_TOKENS, Cells, TokenIds, choose_cells
from forerun.prove.chi_square import LEVEL, POWER_Z, ChiSquare, chi_square, holm, smallest_bias, upper_tail
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AT_ONCE, UNREADABLE, AnswerClient, RemoteAnswer
from forerun.remote.time_limit import NO_LIMIT, TimeLimit

TEMPERATURE = 1.0  # to which the reported log-probabilities refer
EXTRA_TOKENS = 2  # tokens after the counted ones, so that the last counted one can be drafted too
PILOT_TEXTS, MOST_OPENINGS = 48, 8
BATCH_TEXTS = 64  # texts drawn from one server before the other server's turn
TEXTS_AT_ONCE = 64  # concurrent requests; AT_ONCE if the server does not speculate at this load
MOST_TEXTS = 2**20  # of both servers after one opening; each text has a different seed
PILOT_SHARE = 0.15  # share of the time for the choice of openings
TWICE_Z = 1.96  # power at which two tests both detect a bias in 95 of 100 runs
CHARACTERS = (24, 16, 12, 8, 4)  # lengths of the counted prefixes if tokens are unknown
ENOUGH_CELLS = 8
TOO_FEW = "fewer than two prefixes of texts occurred often enough: use more texts or other prompts"
UNNAMED = -1  # a token that cannot be identified


@dataclass(frozen=True, slots=True)
class ServedLaw:
    """One test: `num_texts` texts of each server after one opening, compared by their first `counted`.

    With `exact` the reference is the law from log-probabilities, otherwise the plain server's counts. `control_p` and
    `law_p` are the p-values of the plain and the other server's first counts against that law; None if unknown.
    `num_asked`: requested texts; more than `num_texts` if the time limit was reached. `adjusted_p` is corrected for the
    number of tests. Probabilities with a relative error of `smallest_bias` (root mean square) would be detected in 95
    of 100 runs. `problem`: why there was no test.
    """

    opening: str
    exact: bool = False
    num_texts: int = 0
    counted: str = ""
    statistic: float = 0.0
    freedom: int = 0
    p_value: float = 1.0
    adjusted_p: float = 1.0
    smallest_bias: float = 0.0
    control_p: float | None = None
    law_p: float | None = None
    num_asked: int = 0
    num_drafted: float | None = None
    problem: str = ""

    @property
    def doubtful(self) -> bool:
        """Whether the counts of at least one server do not fit the exact law."""
        return any(p is not None and p < LEVEL for p in (self.control_p, self.law_p))

    @property
    def unconfirmed(self) -> bool:
        """Whether only the speculating server does not fit the law, and there was no time for the second test."""
        fits = self.control_p is None or self.control_p >= LEVEL
        return self.doubtful and fits and self.holds and self.num_texts < 2 * self.num_asked

    @property
    def cut_short(self) -> bool:
        """Whether the time limit was reached before all texts were drawn."""
        return self.num_texts < self.num_asked

    @property
    def holds(self) -> bool:
        """Whether the law is not rejected."""
        return self.adjusted_p >= LEVEL


class TokenNumbers:
    """Numbers the names of tokens in order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The number of a token; UNNAMED if its name is ambiguous."""
        return UNNAMED if UNREADABLE in name else self.numbers.setdefault(name, len(self.numbers))

    def text(self, answer: RemoteAnswer) -> TokenIds:
        """The numbers of an answer's tokens."""
        return tuple(self.of(name) for name in answer.names)


def cells_of(texts: Sequence[RemoteAnswer], num_texts: int, numbers: TokenNumbers) -> Cells:
    """The cells for `num_texts` texts, from the log-probabilities of these texts.

    If a text ended without an end token, the name of that token is unknown. Then only tokens that follow the same
    prefix in another text get cells, since none of them is the end token.
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
                laws[ids[:place]] = {number: p for number, p in named.items() if p > 0 and number != UNNAMED}

    for beginning in ended & laws.keys():
        seen = following.get(beginning, set())
        laws[beginning] = {number: chance for number, chance in laws[beginning].items() if number in seen}

    return choose_cells(lambda beginnings: [laws.get(beginning, {}) for beginning in beginnings], num_texts)


def law_test(opening: str, plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]) -> ServedLaw:
    """Test a server's texts against the plain server's exact law or, if one of them does not fit it, its counts."""
    numbers = TokenNumbers()
    cells = cells_of(plain, len(speculating), numbers) if speculating else None
    if cells is None or not cells.enough or not any(answer.tokens for answer in speculating):
        return counts_test(ServedLaw(opening), plain, speculating)
    control, tested = (cells.test([numbers.text(answer) for answer in side]) for side in (plain, speculating))
    counted, law_p = f"{cells.num_tokens} tokens", tested.p_value
    result = ServedLaw(opening, True, len(speculating), counted, control_p=control.p_value, law_p=law_p)
    result = replace(result, **asdict(tested))
    return counts_test(result, plain, speculating) if result.doubtful else result


def counts_test(first: ServedLaw, plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]) -> ServedLaw:
    """Test the texts of both servers against each other, with the longest prefixes that have enough cells.

    `first`: the result of the test against the exact law, or an empty one.
    """
    best, counted = ChiSquare(0.0, 0, 1.0), ""
    for prefix, one, other in countable_prefixes(plain, speculating) if speculating else ():
        test = two_samples(one, other)
        if test is not None and test.freedom > best.freedom:
            best, counted = test, prefix
        if best.freedom + 1 >= ENOUGH_CELLS:
            break
    counts = {"exact": False, "num_texts": len(speculating), "counted": counted, **asdict(best)}
    return replace(first, **counts, problem="" if counted else TOO_FEW)


def countable_prefixes(
    plain: Sequence[RemoteAnswer], speculating: Sequence[RemoteAnswer]
) -> Iterator[tuple[str, Sequence[Hashable], Sequence[Hashable]]]:
    """(description, prefixes of the plain texts, of the others) for each length that can be counted, longest first."""
    has_tokens = all(any(answer.tokens for answer in side) for side in (plain, speculating))
    for length in range(MOST_TOKENS, 1, -1) if has_tokens else CHARACTERS:
        one, other = (
            [(answer.names if has_tokens else answer.text)[:length] for answer in side] for side in (plain, speculating)
        )
        yield f"{length} {'tokens' if has_tokens else 'characters'}", one, other


def two_samples(one: Sequence[Hashable], other: Sequence[Hashable]) -> ChiSquare | None:
    """Pearson's test that two samples have the same distribution; None with fewer than two cells.

    Cells are chosen from the pooled counts, so that the choice does not bias the test.
    """
    counts = Counter(one), Counter(other)
    together, total = counts[0] + counts[1], len(one) + len(other)
    least = LEAST_EXPECTED * total / min(len(one), len(other))
    frequent = [key for key, count in together.most_common() if count >= least]
    seen = [[count[key] for key in frequent] for count in counts]
    rests = [count.total() - sum(row) for count, row in zip(counts, seen, strict=True)]
    for row, rest in zip(seen, rests, strict=True):
        if sum(rests) >= least:
            row.append(rest)
        elif frequent:
            row[-1] += rest
    sizes = [sum(column) for column in zip(*seen, strict=True)]
    if len(sizes) < 2:
        return None
    expected = [[size * len(sample) / total for size in sizes] for sample in (one, other)]
    statistic = sum(chi_square(row, share).statistic for row, share in zip(seen, expected, strict=True))
    return ChiSquare(statistic, len(sizes) - 1, upper_tail(statistic, len(sizes) - 1))


async def compare_laws(
    speculating: AnswerClient,
    plain: AnswerClient,
    prompts: Sequence[Passage],
    workload: ProofWorkload,
    report: ProgressCallback,
    limit: TimeLimit = NO_LIMIT,
) -> tuple[ServedLaw, ...]:
    """One test for each opening, corrected for their number; with fewer texts if the time limit is reached."""
    openings = await choose_openings(plain, prompts, workload, limit.part(PILOT_SHARE))
    results = []
    for number, opening in enumerate(openings):

        def progress(done: int, number: int = number) -> None:
            drawn = done / workload.num_texts
            report(f"{done} of {workload.num_texts} texts", min(1.0, (number + drawn) / len(openings)))

        within = limit.part(1 / (len(openings) - number))
        sampler = PairSampler(plain, speculating, opening, workload.seed + (number + 1) * MOST_TEXTS, progress)
        plain_texts, texts = await sampler.draw(workload.num_texts, within)
        messages = opening.conversation
        end = str(messages[-1].get("content", "") if messages else opening.prompt)[-40:]
        result = law_test(end, plain_texts, texts)
        if result.doubtful:
            more = await sampler.draw(workload.num_texts, within)
            result = counts_test(result, [*plain_texts, *more[0]], [*texts, *more[1]])
        results.append(replace(result, num_asked=workload.num_texts, num_drafted=sampler.num_drafted))
    tested = [result for result in results if not result.problem]
    adjusted = iter(holm([result.p_value for result in tested]))
    return tuple(result if result.problem else corrected(result, next(adjusted), len(tested)) for result in results)


def corrected(result: ServedLaw, adjusted_p: float, num_tests: int) -> ServedLaw:
    """A result with corrected p-value and smallest bias; a two-sample test needs twice the texts for the same power.

    With the exact law a fault must be found twice, the second time with twice the texts.
    """
    num_texts = result.num_texts if result.exact else result.num_texts // 2
    bias = smallest_bias(result.freedom, num_texts, num_tests, TWICE_Z if result.exact else POWER_Z)
    return replace(result, adjusted_p=adjusted_p, smallest_bias=bias)


async def choose_openings(
    plain: AnswerClient, prompts: Sequence[Passage], workload: ProofWorkload, limit: TimeLimit = NO_LIMIT
) -> list[Passage]:
    """The prompts whose continuations have the most cells, according to a few texts of the plain server."""
    few = prompts[:MOST_OPENINGS]
    if not plain.most_likely or len(few) <= workload.num_openings:
        return list(few[: workload.num_openings])
    number, sizes = min(PILOT_TEXTS, workload.num_texts), []
    for prompt in few:
        texts = await sample(plain, prompt, range(workload.seed, workload.seed + number), plain.most_likely, limit)
        complete = len(texts) == number
        sizes.append(len(cells_of(texts, workload.num_texts, TokenNumbers()).chances) if complete else 0)
    ranked = sorted(range(len(few)), key=lambda index: -sizes[index])
    return [few[index] for index in ranked[: workload.num_openings]]


async def sample(
    client: AnswerClient,
    opening: Passage,
    seeds: Sequence[int],
    likely: int,
    limit: TimeLimit,
    at_once: int = TEXTS_AT_ONCE,
) -> list[RemoteAnswer]:
    """A text after one opening for each seed, with `likely` top log-probabilities."""
    extra = client.server.dialect.exact_tokens if likely else {}
    length, silent = MOST_TOKENS + EXTRA_TOKENS, lambda *_: None
    return await client.ask([opening] * len(seeds), seeds, TEMPERATURE, length, at_once, likely, silent, extra, limit)


@dataclass(slots=True)
class PairSampler:
    """Draws texts of both servers after one opening, in alternating batches, each text with a different seed.

    A batch that is not complete in time is discarded, since the texts that finish first are shorter on average.
    """

    plain: AnswerClient
    speculating: AnswerClient
    opening: Passage
    next_seed: int
    report: Callable[[int], None]
    num_drawn: int = 0
    num_drafted: float | None = 0.0
    at_once: int = TEXTS_AT_ONCE

    async def draw(self, num_texts: int, limit: TimeLimit) -> tuple[list[RemoteAnswer], list[RemoteAnswer]]:
        """Draw `num_texts` texts from each server, fewer at the time limit."""
        drawn: tuple[list[RemoteAnswer], list[RemoteAnswer]] = [], []
        sides = (self.plain, self.plain.most_likely or 0), (self.speculating, min(self.speculating.most_likely or 0, 1))
        while len(drawn[0]) < num_texts and limit.left_s:
            number = min(BATCH_TEXTS, num_texts - len(drawn[0]))
            batch, before = [], await self.speculating.server.counts()
            for client, likely in sides:
                seeds = range(self.next_seed, self.next_seed + number)
                self.next_seed += number
                batch.append(await sample(client, self.opening, seeds, likely, limit, self.at_once))
            self.count((await self.speculating.server.counts()).since(before).num_drafted)
            if min(map(len, batch)) < number:
                break
            for texts, more in zip(drawn, batch, strict=True):
                texts.extend(more)
            self.num_drawn += number
            self.report(self.num_drawn)
        return drawn

    def count(self, num_drafted: float | None) -> None:
        """Count the draft tokens of a batch; if there were none, reduce the concurrency."""
        both = self.num_drafted, num_drafted
        self.num_drafted = None if None in both else sum(each or 0.0 for each in both)
        if num_drafted == 0:
            self.at_once = AT_ONCE
