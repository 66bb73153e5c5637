"""An adapter above an exit: it reads the states of the target's lower layers, and the target's head gives its logits.

This module decides what an adapter reads and when. Final text is read when it is observed, from the target's states at
the exit. Guesses go through the target's lower layers first, in the target's cache, and then through the adapter, in
the adapter's own cache; accepted guesses are not read again. The states of final text are shown once and not kept, so a
sequence that finds no room is not drafted until it is observed from the start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from forerun.cache.blocks import OutOfBlocks
from forerun.draft.base import Committed
from forerun.errors import WrongTarget
from forerun.models.runner import DeviceTokens, Read, Runner, States, Tail


class AdaptedRunner:
    """The layers below an exit and the adapter above them, read as one: their tails have the same nodes."""

    def __init__(self, lower: Runner, adapter: Runner) -> None:
        self.lower = lower
        self.adapter = adapter
        self.decoder = adapter.decoder
        self.guesses: dict[int, list[int]] = {}  # the tokens of the adapter's tails, by node
        self.lost: set[int] = set()  # sequences whose text found no room

    @property
    def tails(self) -> dict[int, Tail]:
        """The nodes read behind each sequence's committed text."""
        return self.lower.tails

    def read(self, reads: Sequence[Read], taps: Sequence[int] = (), drawn: DeviceTokens | None = None) -> States:
        """One pass through both: the adapter's logits, and the states at the exit.

        Raises OutOfBlocks, with nothing changed, where either cache has no room.
        """
        assert not taps, "the states at the exit are the only ones there are"
        assert drawn is None, "an adapter's guesses are known to the host"
        cache = self.adapter.cache
        counts = [len(r.tokens) + (0 if r.seq_id in self.adapter.tails else r.scratch) for r in reads]
        spare = cache.spare([r.seq_id for r in reads], counts)
        if spare.num_blocks < 0:
            raise OutOfBlocks(cache.blocks.num_free - spare.num_blocks, cache.blocks.num_free)
        states = self.lower.read([replace(read, judged=()) for read in reads]).hidden
        above = self.adapter.read(reads, inputs=states)
        for read in reads:
            self.guesses.setdefault(read.seq_id, []).extend(read.tokens)
        return States(above.logits, states, None)

    def draw_chains(self, *_: object) -> None:
        """None: there is no call for whole chains through two caches."""

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forget the tails of these sequences, in both caches."""
        self.lower.drop(seq_ids)
        self.adapter.drop(seq_ids)
        for seq_id in seq_ids:
            self.guesses.pop(seq_id, None)

    def learn(self, news: Committed) -> None:
        """Read what became final; accepted guesses are read already, and the others are dropped.

        Where there is no room the youngest sequences are no longer drafted. Raises WrongTarget for text without its
        states.
        """
        self.lost.update(s for s, tokens, _ in news.rows() if self.adapter.length(s) + len(tokens) > self.window)
        confirmed = self.confirm(news)
        self.adapter.release([seq_id for seq_id in news.seq_ids if seq_id in self.lost])
        late = []
        for (seq_id, tokens, _), num_read, first in zip(news.rows(), confirmed, news.offsets, strict=False):
            if seq_id not in self.lost and num_read < len(tokens):
                late.append((Read(seq_id, tokens[num_read:]), range(first + num_read, first + len(tokens))))
        while late:
            if news.features is None:
                raise WrongTarget(
                    "an adapter reads the target's states, and is told text without them: build its drafter for the "
                    "engine that runs it, which shows them, as LLM(model, draft='early-exit:E:DIR') does"
                )
            inputs = torch.cat([news.features[rows.start : rows.stop, 0] for _, rows in late])
            reads = [read for read, _ in late]
            try:
                self.adapter.read(reads, inputs=inputs)
            except OutOfBlocks:
                youngest = max(read.seq_id for read in reads)  # ids grow with arrival
                self.give_up(youngest)
                late = [(read, rows) for read, rows in late if read.seq_id != youngest]
                continue
            self.adapter.keep([read.seq_id for read in reads], [range(len(read.tokens)) for read in reads])
            break

    def confirm(self, news: Committed) -> list[int]:
        """Keep the part of the tails that became final; returns its number of tokens for each row."""
        paths = []
        for seq_id, tokens, _ in news.rows():
            path: list[int] = []
            guesses = self.guesses.pop(seq_id, [])
            parents = self.adapter.tails[seq_id].parents if guesses else []
            places = {place: node for node, place in enumerate(zip(parents, guesses, strict=True))}
            for token in tokens:
                node = places.get((path[-1] if path else -1, token))
                if node is None:
                    break
                path.append(node)
            paths.append(path)
        kept = [(s, path) for s, path in zip(news.seq_ids, paths, strict=True) if s in self.adapter.tails]
        self.adapter.keep([seq_id for seq_id, _ in kept], [path for _, path in kept])
        return [len(path) for path in paths]

    @property
    def window(self) -> int:
        """The longest text that the adapter can read, alone in its cache."""
        blocks = self.adapter.cache.blocks
        return min(self.decoder.config.max_positions, blocks.num_blocks * blocks.block_size)

    def room(self, seq_id: int, num_late: int) -> int:
        """The deepest draft behind a sequence's text and so many more tokens; its last guess need not be read."""
        return 0 if seq_id in self.lost else max(0, self.window + 1 - self.adapter.length(seq_id) - num_late)

    def give_up(self, seq_id: int) -> None:
        """Stop drafting this sequence until it is forgotten and observed again from its start."""
        self.lost.add(seq_id)
        self.adapter.release([seq_id])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop all state of these sequences; unknown ones are ignored."""
        self.adapter.release(seq_ids)
        for seq_id in seq_ids:
            self.guesses.pop(seq_id, None)
            self.lost.discard(seq_id)
