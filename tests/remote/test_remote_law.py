"""The distribution of a server by counts: exact servers are rejected at the stated level only, wrong ones are found."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from forerun.bench.material import Passage
from forerun.prove.cells import MOST_TOKENS
from forerun.prove.chi_square import LEVEL, smallest_bias
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AnswerClient, RemoteAnswer, TokenChance
from forerun.remote.counters import SpeculationCounts
from forerun.remote.dialects import dialect_of
from forerun.remote.equality import Meaning, TextDifference, TextEquality
from forerun.remote.law import (
    BATCH_TEXTS,
    EXTRA_TOKENS,
    TWICE_Z,
    PairSampler,
    ServedLaw,
    TokenNumbers,
    cells_of,
    compare_laws,
    corrected,
    law_test,
    two_samples,
)
from forerun.remote.proof import ServerProof
from forerun.remote.time_limit import TimeLimit
from kit.toy_model import WORDS, Rule, ToyModel, draw, softmax, speculate

MODEL, FIRST, DEPTH = ToyModel.random(3), 0, 3


def texts(
    rule: Rule | None, num_texts: int, seed: int, named: bool = True, model: ToyModel = MODEL
) -> list[RemoteAnswer]:
    """Texts of a server that speculates by a rule, or of a plain one, which reports log-probabilities."""
    noise, answers = random.Random(f"{rule} {seed}"), []
    for _ in range(num_texts):
        words = [draw(model.law(FIRST, 1.0), noise)]
        while len(words) < MOST_TOKENS + EXTRA_TOKENS:
            if rule is None:
                words.append(draw(model.law(words[-1], 1.0), noise))
            else:
                words += speculate(model, words[-1], 1.0, DEPTH, rule, noise).words
        answers.append(answer(words[: MOST_TOKENS + EXTRA_TOKENS], rule is None, named, model))
    return answers


def answer(words: list[int], likely: bool, named: bool, model: ToyModel) -> RemoteAnswer:
    """An answer of these words."""
    before = [FIRST, *words]
    chances = [
        dict(zip(WORDS, np.log(model.law(last, 1.0)).tolist(), strict=True)) if likely else {} for last in before
    ]
    tokens = [TokenChance(WORDS[word], likely) for word, likely in zip(words, chances, strict=False)]
    return RemoteAnswer("".join(WORDS[word] for word in words), tuple(tokens) if named else (), False)


@pytest.mark.parametrize("named", [True, False], ids=["by-log-probabilities", "by-counts-of-both"])
@pytest.mark.full
def test_exact_servers_are_rejected_at_the_stated_level(named: bool) -> None:
    """p-values of exact servers are uniform: so many of 200 below 5 %, give or take what chance allows."""
    plain = texts(None, 400, 0, named)
    values = []
    for seed in range(200):
        plain = texts(None, 400, seed, named) if not named else plain
        found = law_test("x", plain, texts("exact", 400, seed, named))
        assert found.exact is named
        values.append(found.p_value)
    for share in (0.05, 0.2, 0.5):
        below = sum(value < share for value in values)
        assert abs(below - 200 * share) < 4 * math.sqrt(200 * share * (1 - share)), (share, below)
    assert sum(value < LEVEL for value in values) <= 2


@pytest.mark.parametrize(("rule", "num_texts"), [("greedy", 400), ("careless", 3000)])
def test_a_wrong_rule_is_found(rule: Rule, num_texts: int) -> None:
    found = law_test("x", texts(None, num_texts, 1), texts(rule, num_texts, 1))
    assert found.law_p is not None
    assert found.law_p < LEVEL
    assert found.doubtful
    assert not found.exact
    assert found.p_value < LEVEL
    assert found.control_p is not None
    assert found.control_p >= LEVEL
    right = law_test("x", texts(None, num_texts, 1), texts("exact", num_texts, 1))
    assert right.exact
    assert right.p_value >= LEVEL


def test_without_log_probabilities_counts_of_both_servers_find_it() -> None:
    plain = texts(None, 1500, 2, named=False)
    wrong = law_test("x", plain, texts("greedy", 1500, 2, named=False))
    right = law_test("x", plain, texts("exact", 1500, 2, named=False))
    assert not wrong.exact
    assert "characters" in wrong.counted
    assert wrong.p_value < LEVEL <= right.p_value


def test_a_plain_server_that_contradicts_its_log_probabilities_is_no_reference() -> None:
    """It draws from its likeliest words only, as the other server does, and reports probabilities of all."""
    filtered = ToyModel(np.where(MODEL.logits >= np.sort(MODEL.logits)[:, -3:-2], MODEL.logits, -50.0), MODEL.drafts)
    plain = [
        RemoteAnswer(each.text, answer([WORDS.index(n) for n in each.names], True, True, MODEL).tokens, False)
        for each in texts(None, 800, 1, model=filtered)
    ]
    found = law_test("x", plain, texts("exact", 800, 1, model=filtered))
    assert found.control_p is not None
    assert found.control_p < LEVEL
    assert not found.exact
    assert found.p_value >= LEVEL
    wrong = law_test("x", plain, texts("greedy", 800, 1, model=filtered))
    assert wrong.p_value < LEVEL


def test_the_end_of_texts_needs_no_name() -> None:
    """Texts end at a word that the server does not name; its probability is among those that it reports."""
    end = int(MODEL.law(FIRST, 1.0).argsort()[-2])

    def cut(answers: list[RemoteAnswer]) -> list[RemoteAnswer]:
        kept = []
        for each in answers:
            names = each.names
            length = names.index(WORDS[end]) if WORDS[end] in names else len(names)
            kept.append(RemoteAnswer("".join(names[:length]), each.tokens[:length], length < len(names)))
        return kept

    plain, same = cut(texts(None, 1500, 5)), cut(texts("exact", 1500, 5))
    cells, numbers = cells_of(plain, 1500, TokenNumbers()), TokenNumbers()
    assert cells.enough
    assert all(numbers.of(WORDS[end]) not in text for text in cells_of(plain, 1500, numbers).chances)
    found = law_test("x", plain, same)
    assert found.exact
    assert found.p_value >= LEVEL


def test_cells_have_the_probabilities_and_unreadable_tokens_have_none() -> None:
    numbers = TokenNumbers()
    cells = cells_of(texts(None, 1500, 7), 1500, numbers)
    text, chance = next(iter(cells.chances.items()))
    words = [next(w for w, n in numbers.numbers.items() if n == number) for number in text]
    places = [FIRST, *(WORDS.index(word) for word in words)]
    expected = math.prod(softmax(MODEL.logits[a])[b] for a, b in pairwise(places))
    assert chance == pytest.approx(expected)
    likely = {"\ufffd": math.log(0.7), " a": math.log(0.3)}
    strange = RemoteAnswer(" a?", (TokenChance(" a", likely), TokenChance("\ufffd", likely)), False)
    assert cells_of([strange], 1500, TokenNumbers()).chances == {(0, 0): pytest.approx(0.09)}


def test_two_samples_of_one_law_and_of_two() -> None:
    noise = random.Random(0)
    one, same = (noise.choices("abc", [5, 3, 2], k=2000) for _ in range(2))
    other = noise.choices("abc", [4, 4, 2], k=2000)
    apart, alike = two_samples(one, other), two_samples(one, same)
    assert apart is not None
    assert alike is not None
    assert apart.p_value < 1e-6 < alike.p_value
    assert alike.freedom == 2
    assert two_samples(["a"] * 50, ["a"] * 50) is None
    assert two_samples([str(i) for i in range(50)], [str(i) for i in range(50)]) is None


@pytest.mark.parametrize(("num_each", "freedom"), [(9, 2), (10, 22)])
def test_cells_of_two_samples_are_those_expected_often_enough_in_each(num_each: int, freedom: int) -> None:
    """Twenty rare texts have a cell each, beside two frequent ones and the rest, or all of them share one."""
    sample = (
        ["a"] * 500 + ["b"] * 300 + [f"rare {i % 20}" for i in range(20 * num_each)] + [f"once {i}" for i in range(12)]
    )
    test = two_samples(sample, sample)
    assert test is not None
    assert test.freedom == freedom


def test_an_empty_count_is_reported() -> None:
    alike = [RemoteAnswer("same", (), False)] * 100
    found = law_test("x", alike, alike)
    assert "use more texts" in found.problem
    assert found.holds


def test_results_are_corrected_for_the_number_of_tests() -> None:
    found = law_test("x", texts(None, 800, 1), texts("exact", 800, 2))
    one, ten = corrected(found, 0.5, 1), corrected(found, 0.5, 10)
    assert 0 < one.smallest_bias < ten.smallest_bias < 1
    assert one.smallest_bias == smallest_bias(found.freedom, found.num_texts, 1, TWICE_Z)
    counted = corrected(replace(found, exact=False), 0.5, 1)
    assert counted.smallest_bias == pytest.approx(math.sqrt(2) * smallest_bias(found.freedom, found.num_texts, 1))


class DrawnAnswers(AnswerClient):
    """Draws texts quickly: `law` is their distribution, `reported` the one of the log-probabilities."""

    def __init__(self, law: np.ndarray, reported: np.ndarray | None, noise: np.random.Generator) -> None:
        server: Any = SimpleNamespace(dialect=dialect_of("", None), counts=self.counts)
        self.server, self.most_likely = server, 0 if reported is None else len(law)
        self.law, self.noise, self.seeds = law, noise, list[int]()
        self.reported = {} if reported is None else dict(zip(WORDS, np.log(reported).tolist(), strict=True))

    async def counts(self) -> SpeculationCounts:
        return SpeculationCounts()

    @override
    async def ask(
        self, prompts: Sequence[Passage], seeds: Sequence[int], *_: object, **__: object
    ) -> list[RemoteAnswer]:
        self.seeds.extend(seeds)
        drawn = self.noise.choice(len(self.law), (len(prompts), MOST_TOKENS + EXTRA_TOKENS), p=self.law)
        names = np.array(WORDS)[drawn]
        return [
            RemoteAnswer("".join(row), tuple(TokenChance(str(n), self.reported) for n in row), False) for row in names
        ]


def proven_law(plain: np.ndarray, reported: np.ndarray, drafted: np.ndarray, seed: int, num_texts: int) -> ServedLaw:
    """The test of servers whose words are drawn with these probabilities."""
    noise = np.random.default_rng(seed)
    one, other = DrawnAnswers(plain, reported, noise), DrawnAnswers(drafted, reported, noise)
    workload = ProofWorkload(num_texts=num_texts)
    (found,) = asyncio.run(compare_laws(other, one, [Passage("x", "")], workload, lambda *_: None))
    return found


def tilted(by: float) -> np.ndarray:
    """Chances of a dozen words; some of them a little more likely, others less."""
    return softmax(np.linspace(0, 5, len(WORDS)) + by * np.cos(np.arange(len(WORDS))))


def test_servers_that_differ_slightly_from_their_log_probabilities_are_not_rejected() -> None:
    """Counts fit the reported distribution or not by chance: one server's may fit where the other's do not."""
    found = [proven_law(tilted(0.42), tilted(0.0), tilted(0.42), seed, 400) for seed in range(25)]
    split = sum(each.control_p >= LEVEL > each.law_p for each in found if each.control_p and each.law_p)
    assert split > 1  # those that a test against the reported distribution would reject
    assert all(each.holds for each in found)


def test_a_rejection_needs_counts_of_twice_as_many_texts() -> None:
    wrong = proven_law(tilted(0.0), tilted(0.0), tilted(1.0), 1, 400)
    assert not wrong.holds
    assert (wrong.exact, wrong.num_texts, wrong.num_asked) == (False, 800, 400)
    right = proven_law(tilted(0.0), tilted(0.0), tilted(0.0), 1, 400)
    assert (right.exact, right.num_texts) == (True, 400)


def test_no_two_texts_are_drawn_with_one_seed() -> None:
    """Servers that draw alike by a seed would otherwise give both samples the same texts."""
    noise = np.random.default_rng(0)
    asked = DrawnAnswers(tilted(0.0), None, noise)
    openings = [Passage(text, "") for text in "ab"]
    asyncio.run(
        compare_laws(asked, asked, openings, ProofWorkload(num_texts=50, num_openings=2, seed=7), lambda *_: None)
    )
    assert len(asked.seeds) == len(set(asked.seeds)) == 200


def test_an_incomplete_batch_is_discarded_on_both_sides() -> None:
    """The texts that a server finishes first are shorter on average."""

    class Late(DrawnAnswers):
        @override
        async def ask(self, prompts: Sequence[Passage], *more: Any, **by: Any) -> list[RemoteAnswer]:
            texts = await super().ask(prompts, *more, **by)
            return texts if len(self.seeds) <= BATCH_TEXTS else texts[:-1]

    plain, late = (kind(tilted(0.0), None, np.random.default_rng(0)) for kind in (DrawnAnswers, Late))
    sampler = PairSampler(plain, late, Passage("x", ""), 0, lambda _: None)
    drawn = asyncio.run(sampler.draw(3 * BATCH_TEXTS, TimeLimit.of(60.0)))
    assert [len(texts) for texts in drawn] == [BATCH_TEXTS] * 2


LAW = ServedLaw("x", num_texts=100, num_asked=100, num_drafted=9.0, smallest_bias=0.1)
EQUAL = TextEquality(8, 8, 16, 0, None, 0.25, 9.0, ())


def proof_of(*laws: ServedLaw, differences: Sequence[Meaning] = ()) -> ServerProof:
    """A proof with these results."""
    found = tuple(TextDifference(0, 1, 0, "", "a", "b", 1.0, False, meaning) for meaning in differences)
    return ServerProof("s", "p", "m", "e", 20, 300.0, replace(EQUAL, differences=found), laws)


def test_only_what_was_tested_with_drafts_and_without_open_ends_is_proven() -> None:
    assert proof_of(LAW).holds
    assert len(proof_of(LAW).proven) == 2
    assert "by 30% or more" in proof_of(LAW, replace(LAW, smallest_bias=0.3)).proven[1]
    assert len(proof_of(LAW, replace(LAW, num_drafted=0.0)).proven) == 1
    assert len(proof_of(LAW, differences=["near tie", "unsteady"]).proven) == 2
    for meaning in ("undecided", "fault"):
        found = proof_of(LAW, differences=["near tie", meaning])
        assert (found.holds, len(found.proven)) == (False, 1)


@pytest.mark.parametrize(
    ("control_p", "num_texts", "unconfirmed"),
    [(None, 100, True), (0.5, 100, True), (1e-9, 100, False), (0.5, 200, False)],
)
def test_a_rejection_by_reported_probabilities_alone_leaves_the_law_open_until_it_was_repeated(
    control_p: float | None, num_texts: int, unconfirmed: bool
) -> None:
    law = replace(LAW, control_p=control_p, law_p=1e-9, num_texts=num_texts)
    found = proof_of(law)
    assert law.doubtful
    assert (law.unconfirmed, bool(found.parts_without_time), found.holds) == (unconfirmed, unconfirmed, not unconfirmed)
    assert not replace(law, adjusted_p=1e-9).unconfirmed, "the counts of both servers have rejected it too"
