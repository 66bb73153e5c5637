"""Where blocks place runs, and how seldom they move them. test_paged checks that no content is lost."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.cache.blocks import Blocks, Move


class Memory:
    """Blocks with labels as content, moved as Blocks says."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = Blocks(num_blocks, block_size=4)
        self.labels = [0] * num_blocks
        self.written = 0
        self.rows: dict[int, list[int]] = {}  # what each row should hold

    def grow(self, num_blocks: dict[int, int]) -> list[Move]:
        moves = self.blocks.grow(num_blocks)
        for piece in [piece for move in moves for piece in move.pieces()]:
            assert abs(piece.source - piece.target) >= piece.count > 0, f"{piece} overlaps itself"
            for i in range(piece.count):
                self.labels[piece.target + i] = self.labels[piece.source + i]
        for row, count in num_blocks.items():
            held = self.rows.setdefault(row, [])
            while len(held) < count:
                self.written += 1
                self.labels[self.blocks.run(row).start + len(held)] = self.written
                held.append(self.written)
        return moves

    def check(self) -> None:
        self.blocks.check()
        for row, held in self.rows.items():
            run = self.blocks.run(row)
            assert run.count == len(held)
            assert self.labels[run.start : run.end] == held
            assert (row in self.blocks) == bool(held)


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 20))
def test_pieces_of_a_move_equal_the_move(source, target, count):
    if source == target:
        target += 1
    labels = list(range(60))
    expected = labels.copy()
    expected[target : target + count] = labels[source : source + count]
    for piece in Move(source, target, count).pieces():
        labels[piece.target : piece.target + piece.count] = labels[piece.source : piece.source + piece.count]
    assert labels == expected


def test_a_run_with_room_behind_it_grows_in_place():
    memory = Memory(16)
    memory.grow({1: 2})
    assert memory.grow({1: 16}) == []
    memory.check()


def test_new_runs_leave_free_blocks_after_earlier_ones():
    memory = Memory(64)
    for row in range(4):
        memory.grow({row: 1})
    assert memory.grow(dict.fromkeys(range(4), 12)) == []  # an even division would give 16


def test_a_run_without_free_neighbours_moves_to_a_gap_once():
    memory = Memory(16)
    memory.grow({1: 4, 2: 4, 3: 8})
    memory.blocks.free(3)
    del memory.rows[3]
    hemmed, free = sorted((1, 2), key=lambda row: memory.blocks.run(row).start)
    assert memory.blocks.run(hemmed).end == memory.blocks.run(free).start
    assert [move.count for move in memory.grow({hemmed: 6})] == [4]
    memory.check()


def test_a_run_slides_into_the_gap_before_it_and_leaves_the_others_alone():
    memory = Memory(12)
    memory.grow({1: 4, 2: 4, 3: 4})
    memory.blocks.free(1)
    del memory.rows[1]
    assert memory.grow({2: 6}) == [Move(4, 0, 4)]
    memory.check()


def fragmented() -> Memory:
    """Six runs of 2 in 16 blocks, every second of which is freed: 10 blocks are free, in gaps of 2 and at the end."""
    memory = Memory(16)
    memory.grow(dict.fromkeys(range(8), 2))
    for row in (0, 2, 5, 7):
        memory.blocks.free(row)
        del memory.rows[row]
    return memory


def test_rows_that_grow_unevenly_are_seldom_moved():
    """Rows grow a block at a time, some four times as fast as others, until memory is full to the last block.

    A few blocks moved per block written cost little: attention reads the row's blocks once per token.
    """
    rng = random.Random(1)
    memory = Memory(256)
    moved = 0
    while memory.blocks.num_free:
        row = rng.choices(range(8), weights=[1, 1, 2, 2, 3, 3, 4, 4])[0]
        moved += sum(move.count for move in memory.grow({row: memory.blocks.run(row).count + 1}))
    memory.check()
    assert 0 < moved <= 6 * 256


def test_a_lost_block_is_noticed():
    memory = fragmented()
    memory.blocks.num_free += 1
    with pytest.raises(AssertionError, match="9 free"):
        memory.blocks.check()


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["_extend", "_room", "_put"])
def test_an_interrupt_while_rows_grow_loses_no_block(name, monkeypatch):
    blocks = Blocks(8, 4)
    blocks.grow({0: 2, 1: 1})
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            blocks.grow({0: 3, 2: 2})
    blocks.free(1)
    blocks.check()
    for row in (0, 1, 2):
        blocks.free(row)
    blocks.check()
    assert blocks.num_free == 8
