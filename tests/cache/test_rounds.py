"""After hundreds of rounds of ragged acceptance the cache equals one rebuilt from the committed tokens.

A toy layer stands in for a model: what it writes into a token's slot depends on all tokens before it, read back from
the cache. One wrong slot, once, and everything behind it differs to the end.
"""

import random

import pytest
import torch

from forerun.cache.blocks import OutOfBlocks
from forerun.cache.paged import PagedCache

MAX_LEN = 120


def make_cache(num_tokens: int) -> PagedCache:
    return PagedCache(
        layers=2, kv_heads=2, head_dim=4, num_tokens=num_tokens, dtype=torch.int64, block_size=8, key_pad=16
    )


def write(cache: PagedCache, slot: int, before: list[int], token: int) -> None:
    """Key and value of a token, a hash of it and of the keys at the slots `before`, its whole context in order."""
    context = cache.keys[:, :, before]  # [layers, kv_heads, context, head_dim]
    weight = torch.arange(1, len(before) + 1)[:, None]
    mixed = ((context * weight).sum(2) * 31 + token * torch.arange(1, 5) + len(before)) % 1_000_003
    cache.keys[:, :, slot] = mixed
    cache.values[:, :, slot] = mixed * 7 + 1


def read_chain(cache: PagedCache, seq_id: int, tokens: list[int]) -> None:
    """Prefill: reserve, write and keep."""
    cache.reserve([seq_id], [len(tokens)])
    first = cache.start(seq_id)
    length = cache.length(seq_id)
    for i, token in enumerate(tokens):
        write(cache, first + length + i, list(range(first, first + length + i)), token)
    cache.keep([seq_id], [range(len(tokens))])


def draw_parents(rng: random.Random, nodes: int) -> list[int]:
    """A chain or a random tree; node 0 hangs off the committed text."""
    if rng.random() < 0.5:
        return [i - 1 for i in range(nodes)]
    return [-1] + [rng.randrange(i) for i in range(1, nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


class Rounds:
    """Sequences that are drafted for, judged at random, finished and preempted, over one cache."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.cache = make_cache(num_tokens)
        self.texts: dict[int, list[int]] = {}
        self.next_id = 0
        self.num_moved = self.num_refused = 0

    def admit(self) -> None:
        """A new sequence with a prompt of 1 to 30 tokens, its last one unread."""
        prompt = [self.rng.randrange(1000) for _ in range(self.rng.randint(1, 30))]
        if self.cache.can_reserve([self.next_id], [len(prompt)]):
            read_chain(self.cache, self.next_id, prompt)
            self.texts[self.next_id] = prompt
            self.next_id += 1

    def reserve(self, counts: dict[int, int]) -> dict[int, int]:
        """Reserve for all; where memory is short, preempt the youngest until the rest fits."""
        while True:
            try:
                self.cache.reserve(list(counts), list(counts.values()))
                return counts
            except OutOfBlocks:
                self.num_refused += 1
                youngest = max(counts)
                self.cache.release([youngest])
                del self.texts[youngest]
                counts = {s: n for s, n in counts.items() if s != youngest}

    def play(self) -> None:
        """One round: reserve in one or two reads, write every node behind its ancestors, keep a path or nothing."""
        rng, cache = self.rng, self.cache
        before = {s: cache.start(s) for s in self.texts}
        counts = self.reserve({s: rng.randint(1, 12) for s in self.texts})
        self.num_moved += sum(cache.start(s) != before[s] for s in counts)
        paths: list[list[int]] = []
        for seq_id, nodes in counts.items():
            parents = draw_parents(rng, nodes)
            tokens = [rng.randrange(1000) for _ in range(nodes)]
            first, length = cache.start(seq_id), cache.length(seq_id)
            for node in range(nodes):
                above = [first + length + n for n in path_to(parents, node)[:-1]]
                write(cache, first + length + node, [*range(first, first + length), *above], tokens[node])
            kept = path_to(parents, rng.randrange(nodes))
            kept = rng.choice([kept, kept, path_to(parents, nodes - 1), []])  # partial, full and none
            paths.append(kept)
            self.texts[seq_id] += [tokens[n] for n in kept]
        cache.keep(list(counts), paths)
        for seq_id in [s for s in counts if len(self.texts[s]) > MAX_LEN or rng.random() < 0.01]:
            cache.release([seq_id])
            del self.texts[seq_id]

    def check(self) -> None:
        """Every row equals, bit for bit, a fresh prefill of its text."""
        self.cache.check()
        assert self.cache.num_rows == len(self.texts)
        for seq_id, text in self.texts.items():
            fresh = make_cache(len(text))
            read_chain(fresh, 0, text)
            assert self.cache.length(seq_id) == len(text)
            mine = slice(self.cache.start(seq_id), self.cache.start(seq_id) + len(text))
            assert torch.equal(self.cache.keys[:, :, mine], fresh.keys[:, :, : len(text)])
            assert torch.equal(self.cache.values[:, :, mine], fresh.values[:, :, : len(text)])


@pytest.mark.parametrize(("seed", "num_tokens"), [(0, 320), (1, 1000)], ids=["short of memory", "roomy"])
@pytest.mark.parametrize("num_rounds", [200, pytest.param(1000, marks=pytest.mark.full)])
def test_ragged_rounds_equal_a_fresh_prefill(seed: int, num_tokens: int, num_rounds: int) -> None:
    rounds = Rounds(seed, num_tokens)
    memory = rounds.cache.keys.data_ptr(), rounds.cache.values.data_ptr()
    for number in range(num_rounds):
        while len(rounds.texts) < 3 or (len(rounds.texts) < 6 and rounds.rng.random() < 0.3):
            known = rounds.next_id
            rounds.admit()
            if rounds.next_id == known:
                break
        rounds.play()
        rounds.cache.check()
        if number % 20 == 19:
            rounds.check()
    rounds.check()
    assert rounds.num_moved > 0
    assert (rounds.num_refused > 0) == (num_tokens == 320)
    assert memory == (rounds.cache.keys.data_ptr(), rounds.cache.values.data_ptr())
