"""The memory plan: the context length, and the KV cache sizes of the target and its drafters.

Memory is assigned in this order. First comes the target's cache for one sequence; without it the plan is refused. Then
every drafter gets a cache for that sequence; if the user set no context length, a long context is shortened until it
fits. After that all caches grow together, token for token, since a sequence is drafted only if it is in both caches. So
if memory is short, a drafter reduces the number of sequences, and the plan says by how many. The plan is a pure
function of numbers of bytes and tokens; no model is loaded for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from forerun.errors import NotEnoughMemory

REMEMBERED_SHARE = 16  # each store of a drafter gets at most one sixteenth of the memory that the weights leave
MIN_AUTO_LEN = 1024  # a context that the user did not set is never shorter, unless the model's is
USUAL_LEN = 4096  # a context that the user did not set is not shortened below this to make room for a drafter


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one model, in bytes: weights, each token in its KV cache, each position of its rotary tables, and
    activations of its passes (`scratch_bytes`; 0 if not counted).

    A drafter with another tokenizer needs `stretch` positions for each position of the target.
    """

    weights_bytes: int
    bytes_per_token: int
    bytes_per_position: int
    max_positions: int
    stretch: int = 1
    scratch_bytes: int = 0

    def positions(self, max_model_len: int) -> int:
        """Number of positions that the model is loaded with, for texts of that length."""
        return min(self.max_positions, self.stretch * max_model_len)

    def loaded_bytes(self, max_model_len: int) -> int:
        """Memory once loaded for texts of that length, without KV cache and passes."""
        return self.weights_bytes + self.positions(max_model_len) * self.bytes_per_position


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory plan. Caches have multiples of the block size of tokens, and `key_pad` further slots that stay empty.

    `num_sequences_plain` sequences of `max_model_len` tokens fit into the target's cache. `num_sequences_speculative`
    of them can be drafted at the same time, with draft tokens and a full row in every drafter's cache; the others are
    decoded plainly. `remembered_bytes` is the limit of each store of a drafter. `scratch_bytes` is for passes and
    verdicts; it is counted on GPUs only. `alone` is the plan without the drafters' caches, if the target gains by it.
    """

    budget_bytes: int
    weights_bytes: int
    target_bytes_per_token: int
    drafter_bytes_per_token: Mapping[str, int]
    cache_tokens: int
    drafter_cache_tokens: Mapping[str, int]
    max_model_len: int
    num_sequences_plain: int
    num_sequences_speculative: int
    key_pad: int
    remembered_bytes: Mapping[str, int] = field(default_factory=dict)
    alone: MemoryPlan | None = None
    scratch_bytes: int = 0

    @property
    def cache_bytes(self) -> int:
        """Memory of the target's KV cache."""
        return (self.cache_tokens + self.key_pad) * self.target_bytes_per_token

    @property
    def drafter_cache_bytes(self) -> Mapping[str, int]:
        """Memory of each drafter's KV cache; a cache without tokens is not built."""
        tokens = self.drafter_cache_tokens
        return {
            name: (tokens[name] + self.key_pad) * each if tokens[name] else 0
            for name, each in self.drafter_bytes_per_token.items()
        }

    @property
    def num_bytes(self) -> int:
        """All planned memory: weights, passes, caches and drafters' stores."""
        caches = self.cache_bytes + sum(self.drafter_cache_bytes.values())
        return self.weights_bytes + self.scratch_bytes + caches + sum(self.remembered_bytes.values())

    @property
    def silent_drafters(self) -> list[str]:
        """The drafters that can never draft, because their caches got no memory."""
        return [name for name, tokens in self.drafter_cache_tokens.items() if tokens == 0]

    def lines(self) -> list[str]:
        """The plan as lines of text: the budget, each cache, and the number of sequences with and without drafting."""
        lines = [
            f"memory: {size(self.num_bytes)} of {size(self.budget_bytes)}, weights {size(self.weights_bytes)}"
            + (f", passes {size(self.scratch_bytes)}" if self.scratch_bytes else ""),
            f"target cache: {self._cache_line(self.cache_tokens, self.target_bytes_per_token, self.cache_bytes)}",
        ]
        for name, each in self.drafter_bytes_per_token.items():
            tokens = self.drafter_cache_tokens[name]
            line = self._cache_line(tokens, each, self.drafter_cache_bytes[name])
            lines.append(f"{name} cache: {line if tokens else 'no memory left, will not draft'}")
        for name, most in self.remembered_bytes.items():
            lines.append(f"{name}: {f'at most {size(most)}' if most else 'no memory left, none are stored'}")
        drafted = self.num_sequences_speculative
        fewer = f", {drafted} with speculation" if drafted < self.num_sequences_plain else ""
        lines.append(f"room for {self._room_line()}{fewer}")
        if self.alone is not None:
            lines.append(f"without a drafter's cache there would be room for {self.alone._room_line()}")
        return lines

    def _cache_line(self, tokens: int, each: int, num_bytes: int) -> str:
        return f"{size(num_bytes)}, {tokens:,} tokens at {size(each)}"

    def _room_line(self) -> str:
        plural = "" if self.num_sequences_plain == 1 else "s"
        return f"{self.num_sequences_plain} sequence{plural} of {self.max_model_len:,} tokens"


@dataclass(frozen=True, slots=True)
class MemoryShares:
    """What shares the memory budget: weights, KV caches and drafters' stores.

    `drafters` are the draft models, by the names of their caches; drafters without a model have no entry. `tail_tokens`
    is the number of slots for a sequence's draft tokens beyond the context length. `remembered_bytes` is the requested
    size of each drafter's store, by name.
    """

    target: ModelMemory
    drafters: Mapping[str, ModelMemory] = field(default_factory=dict)
    _: KW_ONLY
    budget_bytes: int
    max_num_seqs: int
    tail_tokens: int = 0
    remembered_bytes: Mapping[str, int] = field(default_factory=dict)
    block_size: int = 64
    key_pad: int = 512

    def plan(self, max_model_len: int | None = None) -> MemoryPlan:
        """The plan for texts of this length; if None, for the longest that `context` allows.

        Raises NotEnoughMemory if not even one sequence fits.
        """
        length = self.context() if max_model_len is None else max_model_len
        if not self.serves(length):
            raise NotEnoughMemory(self.refusal(length))
        plan = self.plan_for(length)
        without = replace(self, drafters={name: replace(m, bytes_per_token=0) for name, m in self.drafters.items()})
        alone = without.plan_for(without.context() if max_model_len is None else length)
        more = (alone.max_model_len, alone.num_sequences_plain) != (plan.max_model_len, plan.num_sequences_plain)
        return replace(plan, alone=alone if more else None)

    def context(self) -> int:
        """The longest of the model's context, a half of it, a quarter and so on with which a drafted sequence fits.

        From USUAL_LEN down an undrafted sequence is enough. More memory never gives a shorter context.
        """
        lengths = [self.target.max_positions]
        while lengths[-1] >= 2 * MIN_AUTO_LEN:
            lengths.append(lengths[-1] // 2)
        usual = min((length for length in lengths if length >= USUAL_LEN), default=lengths[0])
        fitting = (length for length in lengths if (self.drafts if length > usual else self.serves)(length))
        return next(fitting, lengths[-1])

    def serves(self, length: int) -> bool:
        """Whether one sequence of this length fits."""
        return self.caches_bytes(self.blocks_of(length), 0, length) <= self.left(length)

    def drafts(self, length: int) -> bool:
        """Whether one sequence of this length fits, in the target's cache and in every drafter's."""
        cached = [model for model in self.drafters.values() if model.bytes_per_token]
        read = max((min(length, model.max_positions) for model in cached), default=0)
        needed = self.caches_bytes(self.blocks_of(length), self.blocks_of(read), length)
        return self.serves(length) and needed <= self.caches_left(length)

    def plan_for(self, length: int) -> MemoryPlan:
        """The plan for texts of this length; one of them must fit."""
        rest, size, one = self.caches_left(length), self.block_size, self.blocks_of(length)
        drafted = self.blocks_of(length + self.tail_tokens)
        counts = range(1, self.max_num_seqs * drafted + 1)
        # The most blocks for which all caches fit; at least those of one sequence in the target's cache.
        blocks = of_drafters = bisect_right(counts, rest, key=lambda n: self.caches_bytes(n, n, length))
        if blocks < one:
            blocks = one
            of_drafters = bisect_right(range(1, one + 1), rest, key=lambda n: self.caches_bytes(one, n, length))
        rows = {name: self.row_blocks(name, length) for name in self.drafters}
        drafter_blocks = {name: min(of_drafters, self.max_num_seqs * row) for name, row in rows.items()}
        num_plain = min(self.max_num_seqs, blocks // one)
        aside, remembered = self.aside_bytes(length), max(1, sum(self.remembered_bytes.values()))
        cached = {name: model for name, model in self.drafters.items() if model.bytes_per_token}
        full_rows = [drafter_blocks[name] // rows[name] for name in cached]
        return MemoryPlan(
            budget_bytes=self.budget_bytes,
            weights_bytes=self.weights_bytes(length),
            scratch_bytes=self.scratch_bytes,
            target_bytes_per_token=self.target.bytes_per_token,
            drafter_bytes_per_token={name: model.bytes_per_token for name, model in cached.items()},
            cache_tokens=blocks * size,
            drafter_cache_tokens={name: drafter_blocks[name] * size for name in cached},
            max_model_len=length,
            num_sequences_plain=num_plain,
            num_sequences_speculative=min(num_plain, blocks // drafted, *full_rows),
            key_pad=self.key_pad,
            remembered_bytes={name: aside * most // remembered for name, most in self.remembered_bytes.items()},
        )

    def left(self, length: int) -> int:
        """Bytes that weights and passes leave of the budget; negative if they exceed it."""
        return self.budget_bytes - self.weights_bytes(length) - self.scratch_bytes

    def weights_bytes(self, length: int) -> int:
        """Memory of all models once loaded."""
        return sum(model.loaded_bytes(length) for model in (self.target, *self.drafters.values()))

    @property
    def scratch_bytes(self) -> int:
        """Memory of all models' passes."""
        return sum(model.scratch_bytes for model in (self.target, *self.drafters.values()))

    def aside_bytes(self, length: int) -> int:
        """Memory for drafters' stores: a small share, less if one sequence needs the memory."""
        left, remembered = self.left(length), sum(self.remembered_bytes.values())
        spare = left - self.caches_bytes(self.blocks_of(length), 0, length)
        return max(0, min(remembered, left * len(self.remembered_bytes) // REMEMBERED_SHARE, spare))

    def caches_left(self, length: int) -> int:
        """Memory left for all caches."""
        return self.left(length) - self.aside_bytes(length)

    def caches_bytes(self, blocks: int, of_drafters: int, length: int) -> int:
        """Memory of the target's cache with `blocks` blocks and of each drafter's with up to `of_drafters`.

        A drafter's cache is no larger than it can use; without blocks for drafters they have no caches.
        """
        total = (blocks * self.block_size + self.key_pad) * self.target.bytes_per_token
        for name, model in self.drafters.items() if of_drafters else ():
            num_blocks = min(of_drafters, self.max_num_seqs * self.row_blocks(name, length))
            total += (num_blocks * self.block_size + self.key_pad) * model.bytes_per_token
        return total

    def row_blocks(self, name: str, length: int) -> int:
        """Blocks of one sequence in a drafter's cache, up to the drafter's own context length."""
        return self.blocks_of(min(length, self.drafters[name].max_positions) + self.tail_tokens)

    def blocks_of(self, tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-tokens // self.block_size)

    def refusal(self, length: int) -> str:
        """The error message: what one sequence needs, the budget, and what to change."""
        slots, each = self.blocks_of(length) * self.block_size + self.key_pad, self.target.bytes_per_token
        weights, passes = self.weights_bytes(length), self.scratch_bytes
        parts = f"{size(weights)} weights, " + (f"{size(passes)} passes, " if passes else "")
        needed = f"{size(weights + passes + slots * each)} ({parts}{slots:,} cache slots at {size(each)})"
        blocks = range(1, self.blocks_of(length) + 1)
        fitting = bisect_left(blocks, True, key=lambda n: not self.serves(n * self.block_size)) * self.block_size
        shorter = f"lower max_model_len to {fitting:,} at most" if fitting else "no max_model_len is small enough"
        return (
            f"one sequence of max_model_len {length:,} needs {needed}, but the memory budget is "
            f"{size(self.budget_bytes)}; {shorter}, use a smaller dtype, or raise memory_bytes"
        )


def size(num_bytes: int) -> str:
    """A size in decimal units, three digits: 1.09 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            number = num_bytes / scale
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return f"{num_bytes} B"
