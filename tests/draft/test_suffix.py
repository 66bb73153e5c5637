"""Suffix decoding compared with a quadratic oracle that counts occurrences for every query, over three letters."""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.rounds import Row, chunked, committed, draws_of
from forerun.config import AUTO_DEPTH
from forerun.draft.base import Budget, Draft
from forerun.draft.text.ngram_table import NgramTable, write_ngrams
from forerun.draft.text.suffix import CAUTION, LEAST_SURVIVAL, WEIGHTS, SuffixDrafter
from forerun.draft.text.suffix_past import PastAnswers
from forerun.draft.text.suffix_tree import LEAST_SHARE, Leaf, Node
from forerun.tree import survival_of
from kit.unchecked import unchecked

VOCAB = 16
LETTERS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
PAST = st.lists(LETTERS, max_size=3)
DEPTHS = st.integers(2, 9)
BUDGETS = st.builds(
    Budget,
    depth=st.integers(1, 6),
    width=st.integers(1, 3),
    nodes=st.integers(1, 9),
    min_survival=st.sampled_from([0.0, 0.0, 0.3]),
)
Path = tuple[int, ...]


def occurrences(texts: Sequence[Sequence[int]], context: Path) -> int:
    """How often a context occurs."""
    size = len(context)
    return sum(tuple(text[i : i + size]) == context for text in texts for i in range(len(text) - size + 1))


def chances(
    path: Path, text: Sequence[int], past: Sequence[Sequence[int]], depth: int, table: NgramTable | None
) -> dict[int, float]:
    """The probability of each continuation of text and path, by counting, the likeliest first."""
    whole = (*text, *path)
    contexts: list[tuple[int, int, Sequence[Sequence[int]]]] = []
    for source, (texts, least) in enumerate(((past, 1), ([text], 1 if path else 2))):
        lengths = [n for n in range(1, min(depth, len(whole) + 1)) if occurrences(texts, whole[-n:]) >= least]
        longest = max(lengths, default=0)
        contexts += [(n, source, texts) for n in {longest, longest // 2} if n]
    counts = []
    for n, source, texts in sorted(contexts, key=lambda context: context[:2]):
        times = Counter({w: occurrences(texts, (*whole[-n:], w)) for w in range(VOCAB)})
        counts.append((WEIGHTS[source][n - 1] * max(1, len(+times)), times))
    found = {w: 0.0 for _, times in counts for w in times if times[w] and times[w] / times.total() >= LEAST_SHARE}
    found |= {} if table is None else dict(table.continuations(whole))
    for weight, times in counts:
        found = {w: (weight * chance + times[w]) / (times.total() + weight) for w, chance in found.items()}
    return {w: chance**CAUTION for w, chance in sorted(found.items(), key=lambda one: (-one[1], one[0]))}


def oracle(
    text: Sequence[int], past: Sequence[Sequence[int]], budget: Budget, depth: int, table: NgramTable | None = None
) -> dict[Path, float]:
    """The likeliest of all paths, best first, with their probabilities."""
    best: dict[Path, float] = {(): 1.0}
    least = max(LEAST_SURVIVAL, budget.min_survival)
    while len(best) <= budget.nodes:
        further = [
            (best[path] * chance, -number, -token, path)
            for number, path in enumerate(best)
            for token, chance in list(chances(path, text, past, depth, table).items())[: budget.width]
            if len(path) < budget.depth and (*path, token) not in best and best[path] * chance >= least
        ]
        if not further:
            break
        survival, _, token, path = max(further)
        best[*path, -token] = survival
    del best[()]
    return best


def paths_of(draft: Draft) -> list[dict[Path, float]]:
    """A draft's nodes in order: their paths from the root with their survival, which the draft holds in float32."""
    trees = draft.tree.host()
    if draft.survival is not None:
        assert torch.equal(draft.survival, survival_of(trees))
    return [dict(zip(tree.paths()[1:], tree.survival[1:], strict=True)) for tree in trees]


def drafter_of(
    past: Sequence[Sequence[int]], depth: int, tenant: str = "", table: NgramTable | None = None
) -> SuffixDrafter:
    """A drafter that knows these past answers."""
    drafter = SuffixDrafter(PastAnswers(depth), table)
    for i, answer in enumerate(past):
        drafter.past.add(1000 + i, tenant, answer)
    return drafter


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NgramTable:
    """What may follow one and two of the three letters, and a fourth."""
    folder = tmp_path_factory.mktemp("ngrams")
    write_ngrams(folder, [([0, 1, 3, 0, 1, 2, 0, 2, 2, 1, 0, 1, 3], 1), ([1, 1, 0, 3], 0)], "v")
    return NgramTable.read(folder, "v")


@settings(max_examples=200, deadline=None)
@given(LETTERS, PAST, DEPTHS, BUDGETS, st.integers(0, 99), st.integers(0, 9), st.booleans())
def test_drafts_are_those_of_the_oracle(
    table: NgramTable,
    text: list[int],
    past: list[list[int]],
    depth: int,
    budget: Budget,
    seed: int,
    num_late: int,
    with_table: bool,
) -> None:
    """Chains and trees, with and without past answers and a table; text is observed in pieces, the last as a tail."""
    known = table if with_table else None
    drafter, row = drafter_of(past, depth, "a", known), Row(5, text, "a")
    drafter.past.add(1, "b", [0, 1, 2] * 5)
    early = max(1, len(text) - num_late)
    with unchecked():
        for piece in chunked([Row(5, text[:early], "a")], seed):
            drafter.observe(piece)
        tail = committed([row], [early - 1])
        found = drafter.propose(draws_of([row], VOCAB), [budget], tail)
        expected = oracle(text, past, budget, depth, known)
    (one,) = paths_of(found)
    assert list(one.items()) == list(expected.items())
    assert (found.survival is None) == (budget.min_survival == 0 or not one)
    assert (len(one) > 0) == (math.fsum(expected.values()) > 0)


@settings(max_examples=60, deadline=None)
@given(LETTERS, PAST, DEPTHS, BUDGETS, st.integers(0, 99), st.booleans(), st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.2]))
def test_the_estimate_is_the_survival_of_the_likeliest_chain(
    table: NgramTable, text: list[int], past: list[list[int]], depth: int, budget: Budget, seed: int, with_table: bool,
    least: float,
) -> None:  # fmt: skip
    known = table if with_table else None
    drafter, row = drafter_of(past, depth, "a", known), Row(5, text, "a")
    with unchecked():
        for piece in chunked([row], seed):
            drafter.observe(piece)
        expected = [s for s in oracle(text, past, Budget(AUTO_DEPTH), depth, known).values() if s >= min(1.0, least)]
        outlook = drafter.outlook([5, 6])
        assert outlook.estimate is not None
        assert [outlook.estimate(i, least) for i in range(2)] == [expected, ()]
        assert (outlook.unread, outlook.limit) == ([0, 0], [sys.maxsize, 0])
        (one,) = paths_of(drafter.propose(draws_of([row], VOCAB), [budget]))
        assert list(one.items()) == list(oracle(text, past, budget, depth, known).items())


def chain_of(drafter: SuffixDrafter, row: Row) -> list[int]:
    """The draft of a sequence whose text is observed at once."""
    drafter.observe(committed([row]))
    tokens: list[int] = drafter.propose(draws_of([row], VOCAB), [Budget(3)]).tree.tokens[0, 1:].tolist()
    return tokens


def test_a_text_without_a_tenant_is_not_stored() -> None:
    drafter = SuffixDrafter()
    drafter.observe(replace(committed([Row(0, [1, 2, 3, 4, 1, 2])]), tenants=(), num_prompts=()))
    assert drafter.estimate(0)  # its own text is used
    drafter.forget([0])
    assert not drafter.past.answers


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), LETTERS, st.integers(0, 3)), min_size=2, max_size=12))
def test_drafts_do_not_depend_on_other_tenants(traffic: list[tuple[str, list[int], int]]) -> None:
    """Every draft and every estimate is the same in mixed traffic and in the tenant's own traffic."""
    mixed = SuffixDrafter(PastAnswers(8))
    alone = {"a": SuffixDrafter(PastAnswers(8)), "b": SuffixDrafter(PastAnswers(8))}
    with unchecked():
        for seq_id, (tenant, text, num_prompt) in enumerate(traffic):
            row = Row(seq_id, text, tenant, num_prompt)
            both = mixed, alone[tenant]
            for drafter in both:
                drafter.observe(committed([row]))
            assert mixed.estimate(seq_id) == alone[tenant].estimate(seq_id)
            here, there = (paths_of(d.propose(draws_of([row], VOCAB), [Budget(4, 2, 6)])) for d in both)
            assert here == there
            if seq_id % 3:
                for drafter in both:
                    drafter.forget([seq_id])


def test_a_preempted_and_resumed_answer_is_stored_once() -> None:
    whole, once = Row(0, [9, 1, 2, 3, 4, 5], "a"), SuffixDrafter()
    often = SuffixDrafter()
    once.observe(committed([whole]))
    for length in (3, 4, 6):
        often.forget([0])
        assert len(often.past.answers) == (length > 3)  # until it resumes, its answer serves other requests
        often.observe(committed([replace(whole, text=whole.text[:length])]))
        assert not often.past.answers
    for drafter in (once, often):
        drafter.forget([0, 77])
    assert often.past.trees["a"].root == once.past.trees["a"].root
    assert [kept.tokens for kept in often.past.answers.values()] == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("letters", [2, 4000])
@pytest.mark.parametrize("length", [300, 6000])
def test_the_work_of_a_round_does_not_grow_with_the_text_and_past_answers(
    length: int, letters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts operations on trees: looking up a continuation, and listing likely ones. Depths bound their number."""
    dice, counts = random.Random(length), Counter[str]()

    def counting(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def counted(place: Node | Leaf, *args: int) -> object:
            counts[name] += 1
            return method(place, *args)

        return counted

    drafter = SuffixDrafter()
    depth, text = drafter.past.depth, [dice.randrange(letters) for _ in range(length)]
    with unchecked():
        for i, start in enumerate(range(0, length, 100)):
            drafter.past.add(1000 + i, "a", text[start : start + 100])
        text += text[-100:]
        drafter.observe(committed([Row(0, text, "a")]))
        drafter.estimate(0)
        for kind in (Node, Leaf):
            for name in ("after", "followed"):
                monkeypatch.setattr(kind, name, counting(name, getattr(kind, name)))
        for budget in (Budget(8), Budget(4, 3, 8)):
            for _ in range(20):
                text.append(text[-100])
                row = Row(0, text, "a")
                counts.clear()
                drafter.observe(committed([row], [len(text) - 2]))
                assert counts["after"] <= depth
                assert not counts["followed"]
                counts.clear()
                drafter.estimate(0)
                each = 2 * depth + 4 * 40  # the next contexts of text and past; of each of four ten offers
                assert counts["after"] <= depth + AUTO_DEPTH * each
                counts.clear()
                drafter.propose(draws_of([row], VOCAB), [budget])
                assert counts["after"] <= budget.nodes * each * (budget.width > 1)  # a chain is the estimated one
