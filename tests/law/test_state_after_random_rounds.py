"""After any number of random rounds all state equals state that is rebuilt from the committed tokens.

Sequences join, finish, are cancelled and preempted; draft tokens are accepted at random. Caches, indexes, counters and
texts are compared with rebuilt ones, bit for bit, and memory does not grow.
"""

import ctypes
import gc
from array import array
from collections.abc import Sequence
from statistics import median

import psutil
import pytest
import torch
from typing_extensions import override

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun.accept.outcome import Stats
from forerun.cache.paged import PagedCache
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Budget, Committed, Drafter
from forerun.draft.text.ngram import NgramDrafter
from forerun.engine.sequence import Status
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.edits import TextEdits
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_same
from kit.oracles import Oracle
from kit.texts import story
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, DTYPES, built
from law.faulty import Faulty
from law.fuzz import Bench, read_again, rows_of
from law.random_traffic import NO_SHARING, Traffic
from law.rebuilt import reachable, size_of, without_past

NUM_REQUESTS = 24
ROOM = 4096  # tokens in a drafter's cache: enough for all sequences
CROWDS = (12, 5, 12, 2)  # numbers of unfinished sequences: with 12 the cache has no space for draft tokens


@pytest.fixture(
    scope="module", params=[DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.full) for dtype in DTYPES[1:])]
)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench.of(dtype=request.param)


class Rounds(Traffic):
    """Traffic in a cache too small for it, drafted by an oracle, by all drafters in turn, and by rule-breakers."""

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__(bench, 400, seed, EngineOptions(max_num_seqs=8, chunk_tokens=48))
        runner, self.dtype = self.engine.runner, str(bench.runner.decoder.dtype).removeprefix("torch.")
        self.oracle = Oracle(errs=lambda _: self.rng.random() < 0.2)
        self.members = (NgramDrafter(), bench.model_drafter(num_tokens=768))
        self.exit = EarlyExitDrafter(runner, 2)
        names = [name for name in DRAFTERS if not name.startswith("early-exit")]  # the target's cache is too small
        if self.dtype == "float32":
            names = [name for name in names if name not in NO_SHARING]  # with these drafters no prefixes are shared
        self.all = {name: built(name, runner, self.dtype, ROOM) for name in names}
        for cache in [part for part in reachable([self.engine, *self.all.values()]) if isinstance(part, PagedCache)]:
            for tensor in (cache.keys, cache.values):
                tensor.zero_()  # so that the system allocates its pages now
        self.sizes = {name: size_of(drafter) for name, drafter in self.all.items()}
        drafters: list[Drafter] = [self.oracle, *self.members, self.exit, *self.all.values()]
        weights = [len(drafters)] + [1] * len(drafters[1:])
        self.engine.drafter = Faulty(drafters, self.rng, self.answers, weights)
        self.num_rounds, self.pool = 0, list[Request]()

    @override
    def prompt(self, tenant: str) -> list[int]:
        return super().prompt(tenant)[:120]

    @override
    def request(self) -> Request:
        """One of NUM_REQUESTS requests, so that stored past answers do not grow for ever."""
        if len(self.pool) < NUM_REQUESTS:
            self.pool.append(super().request())
        return self.rng.choice(self.pool)

    def answers(self) -> list[list[int]]:
        return [text.alone.tokens for text in self.live.values()]

    @override
    def ask(self) -> None:
        super().ask()
        self.oracle.answers.clear()
        for text in self.live.values():
            prompt, answer = text.alone.tokens[: text.alone.num_prompt], text.alone.tokens[text.alone.num_prompt :]
            known = self.oracle.answers.setdefault((tuple(prompt), text.alone.sample), [])
            known.append((text.alone.params, answer))

    @override
    def round(self) -> None:
        """One round; its number decides how many sequences there are and whether one is cancelled."""
        while len(self.live) < CROWDS[self.num_rounds // 30 % len(CROWDS)]:
            self.ask()
        self.num_rounds += 1
        if self.num_rounds % 40 == 0:
            self.cancel()
        super().round()


def check_texts(traffic: Rounds) -> None:
    """Unfinished texts are beginnings of the plain answers; `num_read` tokens of each are in the cache."""
    engine = traffic.engine
    assert set(engine.sequences) == set(traffic.live)
    for live in traffic.live.values():
        text = live.sample
        assert text.tokens == live.alone.tokens[: len(text.tokens)]
        running = text.status is Status.RUNNING
        assert (text.id in engine.runner.cache) == (running and text.num_read > 0)
        assert engine.runner.length(text.id) == text.num_read
        assert len(text.origins) == text.num_output
        if text.edits is not None:
            known = text.params, text.tokens, text.num_prompt, text.eos_ids, text.bad_words
            assert text.edits.at(text.tokens) == TextEdits.of(*known)
    assert not engine.runner.tails
    engine.runner.cache.check()


def check_caches(traffic: Rounds) -> None:
    """Keys and values of the target and of the draft model are those of the text read in one pass."""
    bench, engine, (_, model) = traffic.bench, traffic.engine, traffic.members
    for text in engine.sequences.values():
        if text.id in engine.runner.cache:
            reread = read_again(bench, engine.runner, text.tokens[: text.num_read])
            assert torch.equal(rows_of(engine.runner, text.id), reread)
        known = model.sequences.get(text.id)
        if known is not None:
            assert known.text == text.tokens[: text.num_read]
            num_kept = model.runner.length(text.id)
            if num_kept:
                reread = read_again(bench, model.runner, text.tokens[:num_kept])
                assert torch.equal(rows_of(model.runner, text.id), reread)
    assert set(model.sequences) <= set(traffic.live)
    model.runner.cache.check()


def assert_kept_blocks_are_right(traffic: Rounds) -> None:
    """Cached prefix blocks of finished texts hold the keys and values of their tokens."""
    bench, (_, model) = traffic.bench, traffic.members
    for runner in (traffic.engine.runner, model.runner):
        cache, size = runner.cache, runner.cache.blocks.block_size
        for kept in cache.prefix_store.order:
            chain = [kept]
            while chain[0].parent is not None and chain[0].parent.parent is not None:
                chain.insert(0, chain[0].parent)
            keys = [each.key for each in chain if isinstance(each.key, bytes)]
            assert len(keys) == len(chain)
            tokens = [token for key in keys for token in array("i", key)]
            slots = slice(kept.block * size, kept.block * size + size)
            reread = read_again(bench, runner, tokens)
            kept_rows = torch.stack([cache.keys[:, :, slots], cache.values[:, :, slots]])
            assert torch.equal(kept_rows, reread[:, :, :, -size:])


def check_index(traffic: Rounds) -> None:
    """The n-gram index is that of the committed tokens."""
    ngram = traffic.members[0]
    read = {text.id: text for text in traffic.engine.sequences.values() if text.num_read}
    assert set(ngram.texts) == set(read)
    fresh = NgramDrafter()
    for text in read.values():
        tokens = text.tokens[: text.num_read]
        fresh.observe(Committed([text.id], tokens, [0, len(tokens)], [text.tokens[text.num_read]]))
    assert fresh.texts == ngram.texts
    followed = {seq_id: following.text for seq_id, following in traffic.exit.sequences.items()}
    assert followed == {seq_id: text.tokens[: text.num_read] for seq_id, text in read.items()}


def check_drafters(traffic: Rounds) -> None:
    """Every drafter drafts what a fresh one drafts that observes the committed tokens at once."""
    read = [text for text in traffic.engine.sequences.values() if text.num_read]
    rows = [Row(text.id, text.tokens[: text.num_read + 1], text.tenant or "", text.num_prompt) for text in read]
    budgets = [Budget(4, 1 + text.id % 2, 7) for text in read]
    for name, drafter in traffic.all.items():
        target = Runner.of(traffic.engine.runner.decoder, ROOM)
        fresh = DrafterWithTarget(target, built(name, target, traffic.dtype, ROOM))
        fresh.observe(committed(rows))
        draws = draws_of(rows, 512, temperature=1.0)
        assert_same(without_past(drafter).propose(draws, budgets), fresh.propose(draws, budgets))


def resident(process: psutil.Process) -> int:
    """The resident bytes of the process, without free memory that malloc keeps."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(process.memory_info().rss)


@pytest.mark.parametrize("num_rounds", [80, pytest.param(1000, marks=pytest.mark.full)])
def test_state_after_random_rounds_equals_state_rebuilt_from_the_tokens(
    bench: Bench, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.draft.model.unread_states.UNREAD_BYTES", 1 << 20)  # full early, well before half-time
    traffic, counted = Rounds(bench, seed=11), Stats()
    monkeypatch.setattr(traffic.engine.controller, "record", counted.record)
    tensors = (traffic.engine.runner.cache.keys, traffic.members[1].runner.cache.keys)
    places, process = [t.data_ptr() for t in tensors], psutil.Process()
    readings: dict[int, list[int]] = {4: [], 7: []}  # of memory, in these eighths of the rounds
    for number in range(num_rounds):
        with unchecked():
            traffic.round()
        check_texts(traffic)
        if number % 50 in (0, 49):
            traffic.engine.notify_drafter()  # which waits while nothing is drafted
        if number % 50 == 0:
            check_caches(traffic)
            check_index(traffic)
        if number % 100 == 99:
            check_drafters(traffic)
            assert_kept_blocks_are_right(traffic)
        if number % (num_rounds // 40) == 1 and 8 * number // num_rounds in readings:
            readings[8 * number // num_rounds].append(resident(process))
        if number == num_rounds // 2:
            check_drafters(traffic)  # so that memory for the comparison is allocated before the second half
            assert_kept_blocks_are_right(traffic)
    traffic.engine.notify_drafter()
    check_caches(traffic)
    check_index(traffic)
    assert counted == traffic.engine.stats  # the sums of the rounds
    assert traffic.counts["finished"] > num_rounds // 20
    assert traffic.counts["cancelled"] == num_rounds // 40
    num_preempted = traffic.counts["preempted"] + sum(text.sample.num_preempted for text in traffic.live.values())
    assert num_preempted > num_rounds // 200
    assert traffic.engine.stats.num_accepted > num_rounds * 3 // 10
    assert (traffic.engine.stats.num_prefix_hits > 0) == (traffic.dtype == "float32")
    assert median(readings[7]) - median(readings[4]) < 16 << 20
    assert [t.data_ptr() for t in tensors] == places
    while traffic.live:
        traffic.cancel()
    assert_empty(traffic)


def assert_empty(traffic: Rounds) -> None:
    """Nothing is held for a finished or cancelled sequence."""
    engine, (ngram, model) = traffic.engine, traffic.members
    assert not engine.has_work
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert not ngram.texts
    assert not model.sequences
    assert not traffic.exit.sequences
    assert not traffic.exit.runner.tails
    assert not traffic.oracle.known
    for name, drafter in traffic.all.items():
        assert size_of(without_past(drafter)) == traffic.sizes[name]
    for runner in (engine.runner, model.runner):
        assert not runner.tails
        assert runner.cache.num_rows == 0
        assert runner.cache.num_free_tokens == runner.cache.blocks.num_blocks * runner.cache.blocks.block_size


def test_a_failed_proposal_leaves_no_trace_in_the_drafters_cache() -> None:
    """A logits processor raises while a block is drafted: the drafter's cache is as if it had not been called."""
    bench = Bench.of(dtype="float32")
    found = []
    for raises in (True, False):
        raised: list[int] = []

        def processor(
            text: Sequence[int], logits: torch.Tensor, raises: bool = raises, raised: list[int] = raised
        ) -> torch.Tensor:
            if raises and len(text) > 42 and not raised:
                raised.append(len(text))
                raise ValueError("on purpose")
            return logits

        engine = bench.engine()
        engine.drafter = drafter = built("block", engine.runner)
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, logits_processors=[processor])
        (sequence,) = bench.requests().sequences(Request.of(story(40, 1), params, Speculation(4)))
        engine.submit(sequence)
        while sequence.num_output < 3:
            engine.step()
        assert bool(raised) == raises
        found.append(rows_of(drafter.runner, sequence.id))  # type: ignore[attr-defined]
    num_read = min(rows.shape[3] for rows in found)  # the last tokens are read in the next proposal
    assert num_read >= 40
    assert torch.equal(found[0][:, :, :, :num_read], found[1][:, :, :, :num_read])
