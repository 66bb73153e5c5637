"""Which graphs there are: few sizes, no more than a bound, and none that is much wider than what it serves."""

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.accept.outcome import Outcome, Stats
from forerun.control.measured import MeasuredDepth
from forerun.device import CPU, Placement
from forerun.draft.model.model import ModelDrafter
from forerun.models.backends.gpu import capture
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.verdicts import MOST_ROWS, VerdictGraph, VerdictShape
from forerun.models.rows import few_rows, half_step
from forerun.sampling.draws import Draws
from forerun.sampling.tables import RowSampling
from forerun.verify.verify import follow_packed, verify
from kit.assertions import tokens_of
from kit.checkpoints import SMALL, TARGET
from kit.replays import imagine_captures
from models.random_rounds import VOCAB, round_of

FIXED = Placement(torch.device("cpu"), fixed=True)
PROMPTS = ["Once upon a time", "The little dog", "One day, Tim", "Lily and her mom"]
PARAMS = [
    SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=17, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_k=20, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
]


def graphs_of(llm: LLM) -> list[GraphRunner]:
    """The runners of an engine with a draft model."""
    assert isinstance(llm.drafter, ModelDrafter)
    runners = [llm.engine.runner, llm.drafter.runner]
    return [runner for runner in runners if isinstance(runner, GraphRunner)]


def shapes_of(runner: GraphRunner) -> Iterator[Sequence[Hashable]]:
    """The shapes of each kind of graphs that a runner keeps."""
    yield [*runner.tables]
    yield [*runner.verdicts.tables]
    for graph in runner.chain_graphs.values():
        yield [*graph.buffers]


@pytest.mark.short("1")
@pytest.mark.parametrize("most", [1, 2])
def test_graphs_that_were_dropped_are_captured_again_and_give_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Rounds of any sizes, in an engine that keeps hardly any graph."""
    plain = tokens_of(LLM(str(TARGET), dtype="float32", device=CPU, max_model_len=128).generate(PROMPTS, PARAMS))
    keys = imagine_captures(monkeypatch)
    monkeypatch.setattr(capture, "MOST_SHAPES", most)
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", device=FIXED, max_model_len=128, speculation=3)
    for order in (1, -1, 1):
        assert tokens_of(llm.generate(PROMPTS[::order], PARAMS[::order]))[::order] == plain
        for runner in graphs_of(llm):
            assert all(len(shapes) <= most for shapes in shapes_of(runner))
            there = {shape for shapes in shapes_of(runner) for shape in shapes}
            assert {key[0] for key in runner.graphs.captured} <= there, "a graph goes with its tables"
    assert max(Counter(keys).values()) > 1, "something was captured again"
    assert llm.stats.num_accepted > 0


def test_rounds_in_which_something_was_captured_teach_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = imagine_captures(monkeypatch)
    noted: list[tuple[bool, int, int]] = []
    times = 0
    time, record = MeasuredDepth.time, Stats.record

    def timed(controller: MeasuredDepth, *words: Any) -> bool:
        nonlocal times
        times += 1
        return time(controller, *words)

    def recorded(stats: Stats, outcome: Outcome) -> None:
        noted.append((outcome.captured, len(keys), times))
        record(stats, outcome)

    monkeypatch.setattr(MeasuredDepth, "time", timed)
    monkeypatch.setattr(Stats, "record", recorded)
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", device=FIXED, max_model_len=128)
    assert isinstance(llm.engine.controller, MeasuredDepth)
    for params in (PARAMS[0], PARAMS):
        llm.generate(PROMPTS, params)
    before = (False, 0, 0)
    for each in noted:
        assert each[0] == (each[1] > before[1]), "what was captured is noticed in its own round"
        assert not each[0] or each[2] == before[2]
        before = each
    assert len(keys) > 3
    assert times > 3


def storages(tables: Iterator[Tensor]) -> int:
    """Bytes of all memory that these lie in."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tables}
    return sum(found.values())


def test_verdicts_of_any_rounds_keep_few_graphs_and_share_the_memory_of_their_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imagine_captures(monkeypatch)
    monkeypatch.setattr(capture, "MOST_SHAPES", 6)
    dice, graph = random.Random(0), VerdictGraph(Graphs(CPU.device), CPU.device, VOCAB)
    largest = 0
    for _ in range(150):
        draws, tree, logits = round_of(dice, dice.choice([1, 3]), dice.randint(1, 6), filtered=dice.random() < 0.7)
        found = graph.judge(draws, tree, logits, follow_packed)
        assert found is not None
        assert torch.equal(found.packed, verify(tree, logits, draws, "coupled").packed)
        assert len(graph.tables) <= 6
        largest = max([largest, *(len(tables.packed.flat) for tables in graph.tables.values())])
    assert graph.graphs.num_replays == 150
    assert len(graph.graphs.captured) <= len(graph.tables)
    assert storages(tables.packed.flat for tables in graph.tables.values()) <= 4 * largest


def test_a_wide_request_does_not_widen_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of many ids take time to fill: few ids are looked up in narrow ones while those of many are there."""
    keys = imagine_captures(monkeypatch)
    dice, vocab = random.Random(1), 4096
    graph = VerdictGraph(Graphs(CPU.device), CPU.device, vocab)
    _, tree, _ = round_of(dice, 1, 1)
    logits, widths = torch.randn(len(tree.host()[0].tokens), vocab), []
    for num_biased in (1000, 3, 40, 3, 1000):
        params = SamplingParams(logit_bias=dict.fromkeys(range(num_biased), 1.0))
        draws = Draws([RowSampling(0, params, 0, 0, [1, 2, 3], 1, (0,))], vocab)
        assert graph.judge(draws, tree, logits, follow_packed) is not None
        widths.append(next(reversed(graph.tables)).steps.fixed)
    assert widths == [1024, 16, 64, 16, 1024]
    assert len(keys) == 3


def random_verdicts(dice: random.Random) -> Iterator[VerdictShape]:
    """The sizes of rounds of a batch of 32 that ends one by one, drafted any far."""
    for batch in [*range(32, 0, -1)] * 3:
        usual = dice.choice([0, 1, 2, 3, 4, 6, 8])
        depths = [max(0, min(8, usual + dice.randint(-1, 1))) if usual else 0 for _ in range(batch)]
        rows = sum(1 + depth for depth in depths)
        if rows <= MOST_ROWS:
            yield VerdictShape(rows, batch, 1 + max(depths), max(depths))


@pytest.mark.parametrize("seed", range(3))
def test_rounds_of_a_batch_that_empties_have_few_shapes(seed: int) -> None:
    dice, graph = random.Random(seed), VerdictGraph(Graphs(CPU.device), CPU.device, VOCAB)
    for _ in range(5):
        for needed in random_verdicts(dice):
            shape = graph.shape_of(needed)
            assert shape is not None
            assert all(mine >= need for mine, need in zip(shape[:4], needed[:4], strict=True))
            graph.tables_of(shape)
    assert len(graph.tables) <= 10


def test_what_larger_graphs_serve_gets_its_own_when_it_was_missed_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what rounds take for good is not what padding takes, and short runs capture little."""
    monkeypatch.setattr(capture, "OFTEN", 20)
    graph = VerdictGraph(Graphs(CPU.device), CPU.device, VOCAB)
    sizes = []
    for rows in (40, *[8] * 22, 40):
        shape = graph.shape_of(VerdictShape(rows, 8, 5, 4))
        assert shape is not None
        graph.tables_of(shape)
        sizes.append(shape.rows)
    assert sizes == [64] * 21 + [8] * 2 + [64]


def test_sizes_of_passes_are_few() -> None:
    sizes = {few_rows(rows) for rows in range(129, 2049)}
    assert len(sizes) == 14
    assert all(rows <= few_rows(rows) <= 1.5 * rows for rows in range(129, 2049))
    assert [half_step(size) for size in range(1, 13)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12]
