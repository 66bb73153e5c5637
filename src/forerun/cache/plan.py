"""The memory plan: how many tokens the target's cache and the drafters' caches hold.

Decides who gets memory at start-up. The target comes first: its cache is sized for `max_num_seqs` sequences of
`max_model_len` tokens, or for what fits. Drafters share what is left and may get nothing; then they do not draft, but
no sequence is turned away for their sake. What they remember besides has a small share set aside, unless the one
sequence that must fit needs it. Knows bytes and tokens only, neither models nor tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forerun.errors import NotEnoughMemory

BUDGET_SHARE = 0.8  # of what is available; activations, logits and the rest of the machine live on the other fifth
MEMORY_SHARE = 1 / 16  # of what the weights leave, at most, for each thing that a drafter remembers besides its cache
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes. Tokens are whole blocks; every cache holds `key_pad` further slots that are never full.

    `num_sequences_plain` sequences of `max_model_len` tokens fit into the target's cache. So many of them as
    `num_sequences_speculative` can at the same time have guesses in flight and a full row in every drafter's cache;
    the others are decoded all the same. `remembered_bytes` is how much each thing that a drafter remembers may grow to.
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

    @property
    def cache_bytes(self) -> int:
        """Memory of the target's cache."""
        return (self.cache_tokens + self.key_pad) * self.target_bytes_per_token

    @property
    def drafter_cache_bytes(self) -> Mapping[str, int]:
        """Memory of each drafter's cache; a cache without tokens is not built."""
        tokens = self.drafter_cache_tokens
        return {
            name: (tokens[name] + self.key_pad) * each if tokens[name] else 0
            for name, each in self.drafter_bytes_per_token.items()
        }

    @property
    def num_bytes(self) -> int:
        """All that is planned: weights, caches, and what may be remembered."""
        caches = self.cache_bytes + sum(self.drafter_cache_bytes.values())
        return self.weights_bytes + caches + sum(self.remembered_bytes.values())

    def lines(self) -> list[str]:
        """The plan for a reader: the budget, one line per cache, the sequences that fit."""
        lines = [
            f"memory: {size(self.num_bytes)} of {size(self.budget_bytes)}, weights {size(self.weights_bytes)}",
            f"target cache: {self._cache_line(self.cache_tokens, self.target_bytes_per_token, self.cache_bytes)}",
        ]
        for name, each in self.drafter_bytes_per_token.items():
            tokens = self.drafter_cache_tokens[name]
            line = self._cache_line(tokens, each, self.drafter_cache_bytes[name])
            lines.append(f"{name} cache: {line if tokens else 'no memory left, will not draft'}")
        for name, most in self.remembered_bytes.items():
            lines.append(f"{name}: {f'at most {size(most)}' if most else 'no memory left, none are kept'}")
        plural = "" if self.num_sequences_plain == 1 else "s"
        room = f"room for {self.num_sequences_plain} sequence{plural} of {self.max_model_len:,} tokens"
        return [*lines, f"{room}, {self.num_sequences_speculative} with speculation"]

    def _cache_line(self, tokens: int, each: int, num_bytes: int) -> str:
        return f"{size(num_bytes)}, {tokens:,} tokens at {size(each)}"


def plan_memory(
    *,
    weights_bytes: int,
    target_bytes_per_token: int,
    drafter_bytes_per_token: Mapping[str, int] | None = None,
    remembered_bytes: Mapping[str, int] | None = None,
    max_model_len: int,
    max_num_seqs: int,
    tail_tokens: int = 0,
    budget_bytes: int | None = None,
    block_size: int = 64,
    key_pad: int = 512,
) -> MemoryPlan:
    """Share out the budget: weights, then the target's cache, then the drafters' caches, all of one length.

    `weights_bytes` are those of the target and of all drafters; they count against the budget whether they are
    loaded yet or not (see `default_budget`, which is used where none is given). `tail_tokens` are the guesses of a
    sequence in flight. Drafters without keys and values have no entry, or 0 bytes. `remembered_bytes` is what drafters
    would like to remember at most, by name. Raises NotEnoughMemory where not one sequence of that length fits.
    """
    drafters = {name: each for name, each in (drafter_bytes_per_token or {}).items() if each}
    budget = default_budget() if budget_bytes is None else budget_bytes
    left = budget - weights_bytes
    plain, speculative = round_up(max_model_len, block_size), round_up(max_model_len + tail_tokens, block_size)
    share = int(max(0, left) * MEMORY_SHARE)
    for part in (share, 0):
        remembered = {name: min(most, part) for name, most in (remembered_bytes or {}).items()}
        rest = left - sum(remembered.values())
        cache_tokens = fitting_tokens(rest, target_bytes_per_token, max_num_seqs * speculative, block_size, key_pad)
        if cache_tokens >= plain:
            break
    else:
        raise NotEnoughMemory(
            _refusal(budget, weights_bytes, target_bytes_per_token, max_model_len, cache_tokens, plain + key_pad)
        )
    rest -= (cache_tokens + key_pad) * target_bytes_per_token
    drafter_tokens = fitting_tokens(rest, sum(drafters.values()), cache_tokens, block_size, key_pad)
    num_plain = min(max_num_seqs, cache_tokens // plain)
    shortest = drafter_tokens if drafters else cache_tokens
    return MemoryPlan(
        budget_bytes=budget,
        weights_bytes=weights_bytes,
        target_bytes_per_token=target_bytes_per_token,
        drafter_bytes_per_token=drafters,
        cache_tokens=cache_tokens,
        drafter_cache_tokens=dict.fromkeys(drafters, drafter_tokens),
        max_model_len=max_model_len,
        num_sequences_plain=num_plain,
        num_sequences_speculative=min(num_plain, shortest // speculative),
        key_pad=key_pad,
        remembered_bytes=remembered,
    )


def fitting_tokens(num_bytes: int, each: int, wanted: int, block_size: int, key_pad: int) -> int:
    """The most tokens, whole blocks and at most `wanted`, of a cache within `num_bytes`; 0 if not even its padding."""
    if each == 0:
        return wanted
    return max(0, min(wanted, (num_bytes // each - key_pad) // block_size * block_size))


def default_budget(loaded_bytes: int = 0) -> int:
    """80 % of the memory available, what is `loaded_bytes` of weights already counted as available."""
    return int((available_bytes() + loaded_bytes) * BUDGET_SHARE)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """What can be allocated without swapping, on this machine and within this container's limit.

    Where the system does not tell (macOS), half of the physical memory.
    """
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    available = _table(meminfo)["MemAvailable:"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        # Pages of files that were read once are given back when needed: they count as used, but are not.
        reclaimable = _table(cgroup / "memory.stat")["inactive_file"]
        used = int((cgroup / "memory.current").read_text()) - reclaimable
        available = min(available, max(0, int(most) - used))
    return available


def size(num_bytes: int) -> str:
    """A size in decimal units, three digits: 1.09 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= scale:
            number = num_bytes / scale
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return f"{num_bytes} B"


def round_up(tokens: int, block_size: int) -> int:
    """Whole blocks that hold this many tokens, in tokens."""
    return -(-tokens // block_size) * block_size


def _table(path: Path) -> dict[str, int]:
    """First and second column of a file of the kernel's."""
    return {words[0]: int(words[1]) for words in (line.split() for line in path.read_text().splitlines())}


def _refusal(budget: int, weights: int, each: int, max_model_len: int, fitting: int, slots: int) -> str:
    """What one sequence needs, what there is, and what to change."""
    needed = f"{size(weights + slots * each)} ({size(weights)} weights, {slots:,} cache slots at {size(each)})"
    shorter = f"lower max_model_len to {fitting:,} at most" if fitting else "no max_model_len is small enough"
    return (
        f"one sequence of max_model_len {max_model_len:,} needs {needed}, but the memory budget is {size(budget)}; "
        f"{shorter}, use a smaller dtype, or raise the budget"
    )
