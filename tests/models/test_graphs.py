"""Passes of fixed shape give the results of Runner: chains, trees and prompt chunks in one batch."""

import random
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from forerun.cache.paged import OutOfBlocks
from forerun.device import CPU, Placement
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.fixed import Inputs, Layout, Shape
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.loading import Blueprint
from forerun.models.runner import DeviceTokens, Read, Runner
from kit.checkpoints import TARGET
from kit.unchecked import unchecked

FIXED = Placement(torch.device("cpu"), fixed=True)
VOCAB = 512
TOLERANCE = 1e-4  # logits are of size 10: sums in another order


@pytest.fixture(scope="module")
def pair() -> tuple[Runner, GraphRunner]:
    plain, fixed = (Blueprint.of(str(TARGET), dtype="float32", device=place).load(64) for place in (CPU, FIXED))
    assert isinstance(fixed, GraphRunner)
    return plain, fixed


def fresh(pair: tuple[Runner, GraphRunner], num_tokens: int = 2048, block_size: int = 16) -> tuple[Runner, GraphRunner]:
    plain, fixed = (type(runner).of(runner.decoder, num_tokens, block_size) for runner in pair)
    assert isinstance(fixed, GraphRunner)
    return plain, fixed


def random_read(dice: random.Random, seq_id: int, kind: str) -> tuple[Read, list[int]]:
    """A read of a kind, all of it judged, and a path of it to keep."""
    count = {"chunk": dice.randint(20, 200), "chain": dice.randint(1, 9), "tree": dice.randint(2, 12)}[kind]
    tokens = [dice.randrange(3, VOCAB) for _ in range(count)]
    if kind != "tree":
        return Read(seq_id, tokens, judged=range(count)), list(range(dice.randint(1, count)))
    parents = [-1] + [dice.randrange(i) for i in range(1, count)]
    path = [dice.randrange(count)]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Read(seq_id, tokens, parents, range(count), scratch=max(depths) + 1), path[::-1]


@pytest.mark.short("0")
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_those_of_runner_for_any_batch_of_reads(pair: tuple[Runner, GraphRunner], seed: int) -> None:
    dice, (plain, fixed) = random.Random(seed), fresh(pair)
    for _ in range(4):
        ids = dice.sample(range(4), dice.randint(1, 4))
        reads, paths = zip(
            *(random_read(dice, i, dice.choice(["chain", "tree"] if plain.length(i) else ["chunk"])) for i in ids),
            strict=True,
        )
        taps = dice.choice([(), (2, 5, -1)])
        wanted, found = plain.read(reads, taps), fixed.read(reads, taps)
        assert (wanted.logits - found.logits).abs().max() <= TOLERANCE
        assert (wanted.hidden - found.hidden).abs().max() <= TOLERANCE
        assert (found.taps is None) == (not taps)
        if found.taps is not None and wanted.taps is not None:
            assert (wanted.taps - found.taps).abs().max() <= TOLERANCE
        for runner in (plain, fixed):
            runner.keep(ids, paths)
            runner.cache.check()
        if dice.random() < 0.3:
            for runner in (plain, fixed):
                runner.release(ids[:1])


def test_a_tail_grows_over_several_reads(pair: tuple[Runner, GraphRunner]) -> None:
    plain, fixed = fresh(pair)
    for runner in (plain, fixed):
        runner.read([Read(0, [5, 6, 7], scratch=6)])
    for tokens, parents in (([8, 9], [2, 2]), ([10, 11, 12], [3, 4, 4])):
        read = Read(0, tokens, parents, judged=range(len(tokens)))
        wanted, found = plain.read([read]).logits, fixed.read([read]).logits
        assert (wanted - found).abs().max() <= TOLERANCE


def test_tokens_that_only_the_device_knows_are_read_at_their_positions(pair: tuple[Runner, GraphRunner]) -> None:
    tokens = torch.tensor([[-1, 7, 8], [9, -1, 4]])
    drawn = DeviceTokens(tokens, source=[-1, 1, 2, 3, -1, 5])
    reads = [Read(0, [5, -1, -1], judged=range(3)), Read(1, [-1, 6, -1], judged=range(3))]
    known = [Read(0, [5, 7, 8], judged=range(3)), Read(1, [9, 6, 4], judged=range(3))]
    for runner, other in zip(fresh(pair), fresh(pair), strict=True):
        assert torch.equal(runner.read(reads, drawn=drawn).logits, other.read(known).logits)


def test_a_read_without_cache_space_changes_nothing(pair: tuple[Runner, GraphRunner]) -> None:
    _, fixed = fresh(pair, num_tokens=32)
    fixed.read([Read(0, [5, 6, 7])])
    with pytest.raises(OutOfBlocks):
        fixed.read([Read(0, [8] * 40)])
    assert fixed.cache.tail(0) == 3
    fixed.drop([0])
    assert fixed.cache.tail(0) == 0


def test_padding_rows_write_to_no_used_slot(pair: tuple[Runner, GraphRunner]) -> None:
    _, fixed = fresh(pair)
    fixed.read([Read(0, [5, 6, 7])])
    before = fixed.cache.keys.clone()
    fixed.read([Read(1, [5, 6, 7])])  # three rows in a pass of four
    differs = (fixed.cache.keys != before).any(-1).any(0).any(0).nonzero()[:, 0].tolist()
    start = fixed.cache.start(1)
    assert set(differs) <= {start, start + 1, start + 2, fixed.spare_slot}
    assert fixed.spare_slot >= fixed.cache.blocks.num_blocks * fixed.cache.blocks.block_size


@pytest.mark.full
def test_rounds_are_captured_in_few_sizes_for_any_number_of_rows(pair: tuple[Runner, GraphRunner]) -> None:
    """16 sequences at depth 8 are captured, and as they end and are drafted less far what was captured serves them."""
    _, fixed = fresh(pair, num_tokens=4096)
    fixed.graphs.enabled = True  # as on a GPU: tables are kept for the graphs that refer to them
    for seq_id in range(16):
        fixed.read([Read(seq_id, [1 + seq_id] * 5, judged=[4])])
        fixed.keep([seq_id], [range(5)])
    fixed.tables.clear()
    shrinking = [(16, 8), (15, 8), (12, 7), (8, 8), (8, 4), (4, 8), (4, 4), (3, 2), (2, 3), (1, 8), (1, 1), (1, 0)]
    for batch, depth in shrinking:
        fixed.read([Read(seq_id, [5] * (depth + 1), judged=range(depth + 1)) for seq_id in range(batch)])
        fixed.keep(range(batch), [[0]] * batch)
    assert {shape.rows for shape, _ in fixed.tables} == {192, 128, 32, 16}
    assert all(shape.captured for shape, _ in fixed.tables)
    before = set(fixed.tables)
    for batch, depth in ((16, 8), (16, 7), (7, 5), (1, 2), (1, 0)):
        fixed.read([Read(s, [5] * (depth + 1), judged=range(depth + 1)) for s in range(batch)])
        fixed.drop(range(batch))
    assert set(fixed.tables) == before


def test_long_prompts_are_not_captured(pair: tuple[Runner, GraphRunner]) -> None:
    _, fixed = fresh(pair)
    fixed.graphs.enabled = True
    fixed.read([Read(0, [5] * 200, judged=[199]), Read(1, [6], judged=[0])])
    assert not fixed.tables
    fixed.read([Read(0, [5] * 100, judged=[99]), Read(1, [6], judged=[0])])
    assert [shape.rows for shape, _ in fixed.tables] == [128]


def test_the_work_of_laying_out_a_prompt_is_linear_in_its_length() -> None:
    """A prompt's paths, written out, have as many nodes as the square of its length."""

    def num_lines(length: int) -> int:
        """Lines that are run, every turn of a loop for itself."""
        lines = 0

        def count(frame: FrameType, *_: object) -> Any:
            nonlocal lines
            lines += frame.f_code.co_filename.endswith("fixed.py")  # not those that check its arguments
            return count

        layout = Layout(8)
        sys.settrace(count)
        try:
            layout.add([1] * length, range(length), 0, 0)
        finally:
            sys.settrace(None)
        return lines

    assert num_lines(512) < 3 * num_lines(256)


def test_later_passes_of_chains_have_the_layout_of_fresh_ones(pair: tuple[Runner, GraphRunner]) -> None:
    """Chains of 5, 3, 3 and 1 tokens behind texts of other lengths, of which those that have ended are padding."""
    _, runner = fresh(pair)
    assert isinstance(runner, GraphRunner)
    depths, step = (5, 3, 3, 1), Inputs(Shape(8, 0, 8, 512), runner.device)
    for seq_id in range(4):
        runner.read([Read(seq_id, [7] * (3 + 20 * seq_id))])
        runner.keep([seq_id], [range(3 + 20 * seq_id)])
        runner.cache.reserve([seq_id], [depths[seq_id]])
    places = runner.cache.blocks.block_size, runner.spare_slot
    levels = [[s for s in range(4) if depths[s] > level] for level in range(5)]
    numbers = [step.numbers(*runner.lay_out([Read(s, [0], judged=[0]) for s in ids]), *places) for ids in levels]
    for level, ids in enumerate(levels):
        later = step.numbers_after(numbers[0], level, len(ids), runner.spare_slot)
        assert later.tolist() == numbers[level].tolist(), f"{level} steps later"


def test_what_runs_before_a_capture_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    count = torch.zeros(1)
    with unchecked():
        Graphs(torch.device("cuda"), counters=[count]).run(("key",), lambda: count.add_(1))
    assert count == 1, "the run that is captured, which computes nothing on a GPU"


def test_logits_are_copied_only_if_they_are_elsewhere() -> None:
    graphs = Graphs(torch.device("cpu"))
    kept, other = graphs.keep_logits(torch.rand(3, 8)), torch.rand(3, 8)
    copied, wanted = graphs.copy_logits(kept), graphs.logits(4, 8)
    wanted[0, 0] = 5.0
    graphs.put_logits(copied, wanted)
    assert wanted[0, 0] == 5.0
    for logits in (other, copied, copied.clone()):
        graphs.put_logits(logits, wanted)
        assert torch.equal(wanted[:3], logits)
    elsewhere = torch.zeros(4, 8)
    graphs.put_logits(graphs.copy_logits(kept), elsewhere)
    assert torch.equal(elsewhere[:3], kept)


def test_logits_of_a_pass_without_a_buffer_are_copied_even_if_their_memory_becomes_the_buffer() -> None:
    """A long prompt's pass is not captured; the memory of its logits may become the buffer of the first verdict."""
    graphs = Graphs(torch.device("cpu"))
    lay = torch.rand(1, 8)
    logits = graphs.copy_logits(lay)
    kept = lay.zero_()  # the same address
    graphs.kept_logits[8] = kept
    graphs.put_logits(logits, kept)
    assert torch.equal(kept, logits)
