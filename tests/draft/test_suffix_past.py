"""Past answers are stored by tenant, up to a size; the oldest are removed first, and lookups are fast."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.test_suffix_tree import counted, stored
from forerun.draft.many.cascade import CascadeDrafter
from forerun.draft.text.suffix_past import PastAnswers, PastCursor
from forerun.llm import LLM
from kit.checkpoints import SMALL, TARGET
from kit.unchecked import unchecked

DEPTH = 5
LETTERS = st.lists(st.integers(0, 2), max_size=30)


def check(past: PastAnswers) -> None:
    """Assert that each tenant's tree holds the stored answers, and that the size is right."""
    assert past.num_bytes <= past.max_bytes
    assert past.num_bytes == sum(tree.num_bytes for tree in past.trees.values())
    assert set(past.trees) == {kept.tenant for kept in past.answers.values()}
    for tenant, tree in past.trees.items():
        texts = [kept.tokens for kept in past.answers.values() if kept.tenant == tenant]
        assert stored(tree, sum(map(len, texts))) == (counted(texts, DEPTH), tree.num_bytes)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abc"), LETTERS), min_size=1, max_size=30),
    st.integers(0, 12_000),
    st.randoms(use_true_random=False),
)
def test_the_oldest_answers_are_removed_when_the_size_limit_is_reached(
    operations: list[tuple[int, str, list[int]]], max_bytes: int, dice: random.Random
) -> None:
    """After any operations the newest of the added answers are left, unchanged."""
    past = PastAnswers(DEPTH, max_bytes)
    added: dict[str, tuple[str, list[int]]] = {}
    with unchecked():
        for seq_id, tenant, answer in operations:
            name = past.name(seq_id)
            order = [other for other in past.answers if other != name]
            if dice.random() < 0.2:
                past.reopen(seq_id)
            else:
                past.add(seq_id, tenant, answer)
                added[name] = (tenant, answer)
                order += [name] if answer else []
            left = order[len(order) - len(past.answers) :]
            assert list(past.answers) == left
            assert {n: (kept.tenant, kept.tokens) for n, kept in past.answers.items()} == {n: added[n] for n in left}
            check(past)
    past.clear()
    assert not past.answers
    assert not past.trees
    assert past.num_bytes == 0


def test_no_answer_is_removed_below_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    dice, past, sizes = random.Random(3), PastAnswers(DEPTH, 40_000), []
    drop = past.drop

    def watched(name: str) -> None:
        if name in past.answers:
            sizes.append(past.num_bytes)
        drop(name)

    monkeypatch.setattr(past, "drop", watched)
    for seq_id in range(200):
        past.add(seq_id, dice.choice("ab"), [dice.randrange(99) for _ in range(dice.randrange(40))])
    check(past)
    assert len(sizes) > 50
    assert min(sizes) > past.max_bytes


@settings(max_examples=100, deadline=None)
@given(LETTERS, st.lists(LETTERS, max_size=4), st.randoms(use_true_random=False))
def test_a_reader_finds_the_same_as_a_fresh_one(text: list[int], answers: list[list[int]], dice: random.Random) -> None:
    """However far the text has grown, and whatever answers were added or removed meanwhile."""
    past, reader, length = PastAnswers(DEPTH), PastCursor(), 0
    with unchecked():
        while length < len(text):
            length = min(len(text), length + dice.randrange(1, 9))
            if dice.random() < 0.4:
                past.add(dice.randrange(3), "a", dice.choice([[], *answers]))
            if dice.random() < 0.1:
                past.clear()
            tree = past.trees.get("a")
            found = reader.read(tree, text[:length])
            counts: Counter[tuple[int, ...]] = counted([k.tokens for k in past.answers.values()], DEPTH)
            ends = [tuple(text[max(0, length - n) : length]) for n in range(1, min(DEPTH, length) + 1)]
            assert [place.count for place in found] == [counts[end] for end in ends if counts[end]]


@pytest.mark.parametrize("spec", ["suffix", "cascade[suffix,model:{}]"])
def test_past_answers_stay_within_their_share_of_a_small_memory_budget(spec: str) -> None:
    """Past answers are part of the memory plan: they take a share of a small budget, however many there are."""
    llm = LLM(
        str(TARGET), spec.format(SMALL), dtype="float32", max_model_len=64, max_num_seqs=2, memory_bytes=9_000_000
    )
    drafter = llm.drafter.lower if isinstance(llm.drafter, CascadeDrafter) else llm.drafter
    past = drafter.past
    assert 0 < past.max_bytes == llm.plan.remembered_bytes["past answers"] < 9_000_000 // 16
    assert llm.plan.num_bytes <= 9_000_000
    rng, most_bytes = random.Random(0), 0
    for seq_id in range(60):
        past.add(seq_id, "", [rng.randrange(512) for _ in range(64)])
        most_bytes = max(most_bytes, past.num_bytes)
    assert past.max_bytes // 2 < most_bytes <= past.max_bytes
    assert len(past.answers) < 60
