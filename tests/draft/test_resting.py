"""Drafters that read the target's states rest: they read nothing until they are asked, and guess as if they had."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from draft.rounds import Beside, Row, committed, draws_of
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
from law.fuzz import Bench

NAMES = ("eagle", "eagle-1", "p-eagle", "block", "block:heads", "mtp", "mtp-of-3", "early-exit:adapted")
MIXED = ("mix of eagle", "mix of block", "mix of mtp")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench.of(dtype="float32")


def beside(bench: Bench, name: str) -> Beside:
    """A drafter beside a target, alone or behind suffix trees in a mix."""
    runner, member = bench.with_cache(bench.runner, 4096), name.removeprefix("mix of ")
    plan = plan_drafter(f"mix[suffix,{spelled(member)}]" if member != name else spelled(name), context())
    drafter = plan.build(dict.fromkeys((*plan.models, *plan.remembered_bytes), 4096), None, runner)
    assert drafter is not None
    reader = reader_of(drafter)
    reader.runner = Runner.of(reader.runner.decoder, 4096, 16)
    if isinstance(reader, EarlyExitDrafter):
        reader.adapter = reader.runner
    return Beside(runner, drafter)


def reader_of(drafter: Drafter) -> Follower:
    """The drafter that reads states: itself, or the last member of a mix."""
    reader = getattr(drafter, "members", [drafter])[-1]
    assert isinstance(reader, Follower)
    return reader


def watched(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass of a runner will have read."""
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


@pytest.mark.short("mtp", "block", "mix of eagle")
@pytest.mark.parametrize("name", [*NAMES, *MIXED])
def test_a_drafter_that_rests_makes_no_pass(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 100 rounds, in which the other member of a mix may draft; then it reads them all, and guesses the same as
    one that was refuted in every round."""
    ours, theirs, text = beside(bench, name), beside(bench, name), story(240, 1)
    counts, rng = watched(reader_of(ours.drafter).runner, monkeypatch), random.Random(1)
    for end in range(40, len(text)):
        told, rows = end - 2 if end > 40 else 0, [Row(3, text[:end])]
        for drafter in (ours, theirs):
            drafter.observe(committed(rows, [told]))
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
    """Texts of one salt that begin alike, and two drafters beside targets of their own.

    One is shown all states and drafts always; the other mostly rests, and takes over as much of new texts as it can.
    """

    name: str
    rng: random.Random
    ours: Beside
    theirs: Beside
    texts: dict[int, list[int]] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    past: list[list[int]] = field(default_factory=lambda: [story(150, 0)])
    num_adopted: int = 0
    num_compared: int = 0

    def tell(self, seq_ids: list[int], ends: list[int], adopted: bool = False) -> None:
        """News of these texts up to such places, where their roots are."""
        rows = [Row(s, self.texts[s][: end + 1]) for s, end in zip(seq_ids, ends, strict=True)]
        news = committed(rows, [self.told.get(s, 0) for s in seq_ids])
        self.theirs.observe(news)
        self.ours.observe(replace(news, salts=["us"] * len(rows), adopted=adopted))
        self.told.update(zip(seq_ids, ends, strict=True))

    def begin(self, seq_id: int) -> None:
        """A text that goes on from an earlier one."""
        begun = self.rng.choice([*self.past, *self.texts.values()])
        self.texts[seq_id] = begun[: self.rng.randint(1, len(begun))][:220] + story(200, seq_id)[1:]
        most = self.ours.adoptable(self.texts[seq_id], self.rng.randint(1, 240), "us")
        if most >= MIN_SHARED:
            self.tell([seq_id], [most], adopted=True)
            self.num_adopted += 1
        self.tell([seq_id], [self.told.get(seq_id, 0) + self.rng.randint(1, 90)])

    def draft(self) -> None:
        """One drafts all, the other now and then some of them: the same guesses."""
        rows = [Row(s, self.texts[s][: told + 1]) for s, told in self.told.items()]
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
        """Something happens."""
        chance = self.rng.random()
        if len(self.texts) < 2 or (chance < 0.15 and len(self.texts) < 5):
            self.begin(number)
        elif chance < 0.25:
            seq_id = self.rng.choice(list(self.texts))
            for drafter in (self.ours, self.theirs):
                drafter.forget([seq_id])
            self.past.append(self.texts.pop(seq_id)[: self.told.pop(seq_id)])
        else:
            chosen = self.rng.sample(list(self.texts), self.rng.randint(1, len(self.texts)))
            self.tell(chosen, [min(len(self.texts[s]) - 1, self.told[s] + self.rng.randint(0, 9)) for s in chosen])
        if self.texts:
            self.draft()


@pytest.mark.short("mtp-roomy", "eagle-short of room")
@pytest.mark.parametrize("room", ["roomy", "short of room"])
@pytest.mark.parametrize("name", [*NAMES, *MIXED])
def test_when_a_text_is_read_changes_no_guess(
    bench: Bench, name: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read at once, in pieces, where the states of unread text take too much, or by another text that begins alike."""
    if room == "short of room":
        monkeypatch.setattr(unread_states, "UNREAD_BYTES", 30_000)
        monkeypatch.setattr(follower, "CHUNK_TOKENS", 24)
        monkeypatch.setattr(follower, "LEAST_WAITED", 8)
    histories = Histories(name, random.Random(name), beside(bench, name), beside(bench, name))
    for number in range(150):
        histories.step(number)
    assert histories.num_compared > 12
    assert histories.num_adopted > 3 or name == "mtp-of-3"
