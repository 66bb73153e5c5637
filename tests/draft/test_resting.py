"""Drafters that read the target's states read nothing while paused, and later draft as if they had read all along."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun.cache.shared_prefix import MIN_SHARED
from forerun.draft.base import Budget, Drafter
from forerun.draft.model import follower, unread_states
from forerun.draft.model.follower import Follower
from forerun.drafters import plan_drafter
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.decoder import Outputs
from forerun.models.runner import Read, Runner
from kit.assertions import assert_same
from kit.texts import VOCAB, story
from law.drafters import context, spelled
from law.fuzz import bench_of

NAMES = ("eagle", "eagle-1", "p-eagle", "block", "block:heads", "mtp", "mtp-of-3", "early-exit:adapted")
MIXED = ("mix of eagle", "mix of block", "mix of mtp")


def with_target(name: str) -> DrafterWithTarget:
    """A drafter with a target, alone or after suffix trees in a mix."""
    runner, member = bench_of("float32").with_cache(bench_of("float32").runner, 4096), name.removeprefix("mix of ")
    plan = plan_drafter(f"mix[suffix,{spelled(member)}]" if member != name else spelled(name), context())
    drafter = plan.build(dict.fromkeys((*plan.models, *plan.remembered_bytes), 4096), None, runner)
    assert drafter is not None
    reader = reader_of(drafter)
    reader.runner = Runner.of(reader.runner.decoder, 4096, 16)
    if isinstance(reader, EarlyExitDrafter):
        reader.adapter = reader.runner
    return DrafterWithTarget(runner, drafter)


def reader_of(drafter: Drafter) -> Follower:
    """The drafter that reads states: itself, or the last member of a mix."""
    reader = getattr(drafter, "members", [drafter])[-1]
    assert isinstance(reader, Follower)
    return reader


def watched(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each pass of a runner appends its number of tokens."""
    read, counts = runner.read, list[int]()

    def counted(reads: Sequence[Read], **more: Any) -> Outputs:
        counts.append(sum(len(each.tokens) for each in reads))
        return read(reads, **more)

    monkeypatch.setattr(runner, "read", counted)
    return counts


def budget(name: str, rng: random.Random, most: int = 4) -> Budget:
    """A chain or a tree of the drafter that reads states."""
    depth, width = rng.randint(1, most), rng.choice([1, 1, 2])
    return Budget(depth, width, depth * width, drafter=int(name.startswith("mix")))


@pytest.mark.short("block", "mix of eagle")
@pytest.mark.parametrize("name", [*NAMES, *MIXED])
def test_a_paused_drafter_makes_no_pass_and_later_drafts_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For over 100 rounds, in which the other member of a mix may draft; then it reads them all, and drafts the same as
    a drafter whose drafts were rejected in every round."""
    ours, theirs, text = with_target(name), with_target(name), story(240, 1)
    counts, rng = watched(reader_of(ours.drafter).runner, monkeypatch), random.Random(1)
    for end in range(40, len(text)):
        start, rows = end - 2 if end > 40 else 0, [Row(3, text[:end])]
        for drafter in (ours, theirs):
            drafter.observe(committed(rows, [start]))
        assert ours.outlook([3]).unread[0] == end - 1
        theirs.propose(draws_of(rows, VOCAB), [budget(name, rng)])
        if name in MIXED:
            ours.propose(draws_of(rows, VOCAB), [Budget(2)])
    assert counts == []
    draws, asked = draws_of(rows, VOCAB, temperature=1.0), budget(name, rng)
    assert_same(ours.propose(draws, [asked]), theirs.propose(draws, [asked]))
    assert sum(counts) >= len(rows[0].text) - 2
    assert ours.outlook([3]).unread[0] <= 1
    assert ours.outlook([3]).limit == theirs.outlook([3]).limit


@dataclass
class Histories:
    """Texts with common prefixes and one salt, and two drafters with their own targets.

    One drafts in every step; the other is mostly paused, and adopts as much of new texts as it can.
    """

    name: str
    rng: random.Random
    ours: DrafterWithTarget
    theirs: DrafterWithTarget
    texts: dict[int, list[int]] = field(default_factory=dict)
    num_committed: dict[int, int] = field(default_factory=dict)
    past: list[list[int]] = field(default_factory=lambda: [story(150, 0)])
    num_adopted: int = 0
    num_compared: int = 0

    def commit(self, seq_ids: list[int], ends: list[int], adopted: bool = False) -> None:
        """Let both drafters observe these texts up to `ends`, the positions of their roots."""
        rows = [Row(s, self.texts[s][: end + 1]) for s, end in zip(seq_ids, ends, strict=True)]
        news = committed(rows, [self.num_committed.get(s, 0) for s in seq_ids])
        self.theirs.observe(news)
        self.ours.observe(replace(news, salts=["us"] * len(rows), adopted=adopted))
        self.num_committed.update(zip(seq_ids, ends, strict=True))

    def begin(self, seq_id: int) -> None:
        """Begin a text that goes on from an earlier one."""
        begun = self.rng.choice([*self.past, *self.texts.values()])
        self.texts[seq_id] = begun[: self.rng.randint(1, len(begun))][:220] + story(200, seq_id)[1:]
        most = self.ours.adoptable(self.texts[seq_id], self.rng.randint(1, 240), "us")
        if most >= MIN_SHARED:
            self.commit([seq_id], [most], adopted=True)
            self.num_adopted += 1
        self.commit([seq_id], [self.num_committed.get(seq_id, 0) + self.rng.randint(1, 90)])

    def draft(self) -> None:
        """One drafter drafts all texts, the other sometimes some of them: the drafts are the same."""
        rows = [Row(s, self.texts[s][: count + 1]) for s, count in self.num_committed.items()]
        budgets = [budget(self.name, self.rng) for _ in rows]
        found = self.theirs.propose(draws_of(rows, VOCAB, temperature=1.0), budgets).tree.fetched()
        if self.rng.random() < 0.15:
            chosen = sorted(self.rng.sample(range(len(rows)), self.rng.randint(1, len(rows))))
            draws = draws_of([rows[i] for i in chosen], VOCAB, temperature=1.0)
            alike = self.ours.propose(draws, [budgets[i] for i in chosen]).tree.fetched()
            for i, tree in zip(chosen, alike, strict=True):
                assert (tree.tokens, tree.parents) == (found[i].tokens, found[i].parents)
                self.num_compared += len(tree.tokens) > 1

    def step(self, number: int) -> None:
        """Begin, forget or extend texts at random, then draft."""
        chance = self.rng.random()
        if len(self.texts) < 2 or (chance < 0.15 and len(self.texts) < 5):
            self.begin(number)
        elif chance < 0.25:
            seq_id = self.rng.choice(list(self.texts))
            for drafter in (self.ours, self.theirs):
                drafter.forget([seq_id])
            self.past.append(self.texts.pop(seq_id)[: self.num_committed.pop(seq_id)])
        else:
            chosen = self.rng.sample(list(self.texts), self.rng.randint(1, len(self.texts)))
            self.commit(
                chosen, [min(len(self.texts[s]) - 1, self.num_committed[s] + self.rng.randint(0, 9)) for s in chosen]
            )
        if self.texts:
            self.draft()


@pytest.mark.short("mtp-roomy", "eagle-short of room")
@pytest.mark.parametrize("room", ["roomy", "short of room"])
@pytest.mark.parametrize("name", [*NAMES, *MIXED])
def test_the_time_at_which_a_text_is_read_changes_no_draft(
    name: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read in one pass, in pieces, because unread states take too much memory, or adopted from another text."""
    if room == "short of room":
        monkeypatch.setattr(unread_states, "UNREAD_BYTES", 30_000)
        monkeypatch.setattr(follower, "CHUNK_TOKENS", 24)
        monkeypatch.setattr(follower, "LEAST_WAITED", 8)
    histories = Histories(name, random.Random(name), with_target(name), with_target(name))
    for number in range(150):
        histories.step(number)
    assert histories.num_compared > 12
    assert histories.num_adopted > 3 or name == "mtp-of-3"
