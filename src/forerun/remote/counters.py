"""Counters: acceptance from a server's Prometheus metrics.

Acceptance is computed from the difference of two readings. forerun and llama.cpp use vLLM's names; SGLang has a counter
of verifications and gauges for the other values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from forerun.bench.figures import over
from forerun.shape import MOST_DEPTH
from forerun.traffic.client import count_of

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
POSITIONS = {str(position) for position in range(MOST_DEPTH)}
NAMES = {
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_drafted",
    "spec_decode_num_accepted_tokens": "num_accepted",
    "spec_verify_calls": "num_rounds",
    "spec_accept_length": "accept_length",
    "spec_num_steps": "depth",
}
GAUGES = {"accept_length", "depth"}


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """A server's speculation counts since its start, or between two readings; None for values that it does not report.

    `num_drafts`: rounds with a draft; `accepted_at_depth[j]`: accepted tokens at depth j + 1. Gauges (current values):
    `accept_length`, the tokens per verification, and `depth`.
    """

    num_drafts: float | None = None
    num_drafted: float | None = None
    num_accepted: float | None = None
    num_rounds: float | None = None
    accept_length: float | None = None
    depth: float | None = None
    accepted_at_depth: tuple[float, ...] = ()

    @property
    def known(self) -> bool:
        """Whether the server reports any speculation counts."""
        return self != SpeculationCounts()

    def since(self, before: SpeculationCounts) -> SpeculationCounts:
        """The difference to an earlier reading; gauges keep the later value.

        Unknown if a counter has decreased: the server has restarted, or a gateway has asked two servers.
        """
        known = {name: value for name in NAMES.values() if (value := getattr(self, name)) is not None}
        more = {name: value - (getattr(before, name) or 0.0) for name, value in known.items() if name not in GAUGES}
        earlier = (*before.accepted_at_depth, *[0.0] * len(self.accepted_at_depth))
        accepted = tuple(now - then for now, then in zip(self.accepted_at_depth, earlier, strict=False))
        decreased = any(each < 0 for each in (*more.values(), *accepted))
        return SpeculationCounts() if decreased else replace(self, **more, accepted_at_depth=accepted)


def counts_of(metrics: str | None, prefix: str) -> SpeculationCounts:
    """Parse a server's metrics whose names start with `prefix`, over all engines behind it.

    Counters are summed over the engines; a gauge is the mean of its values above 0.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values, at_depth = defaultdict[str, list[float]](list), defaultdict[int, float](float)
    try:
        samples = [sample for family in text_string_to_metric_families(metrics or "") for sample in family.samples]
    except (ValueError, IndexError):  # of the parser, for other texts
        return SpeculationCounts()
    for sample in samples:
        name = sample.name.removeprefix(prefix).removesuffix("_total")
        if not prefix or not sample.name.startswith(prefix) or count_of(sample.value) is None:
            continue
        position = sample.labels.get("position", "")
        if name == PER_POSITION and position in POSITIONS:
            at_depth[int(position)] += sample.value
        elif name in NAMES:
            values[NAMES[name]].append(sample.value)
    totals: dict[str, Any] = {name: sum(each) for name, each in values.items()}
    for name in GAUGES & totals.keys():
        totals[name] /= max(1, sum(value > 0 for value in values[name]))  # an engine without requests reports 0
    accepted = tuple(at_depth[position] for position in range(max(at_depth, default=-1) + 1))
    return SpeculationCounts(**totals, accepted_at_depth=accepted)


def counts_of_answers(answers: Iterable[Mapping[str, Any]]) -> SpeculationCounts:
    """The sum of the speculation counts in answers."""
    each, names = list(answers), ("num_drafted", "num_accepted", "num_rounds")
    sums: dict[str, Any] = {name: float(sum(usage.get(name) or 0 for usage in each)) for name in names}
    return SpeculationCounts(**sums) if each else SpeculationCounts()


@dataclass(frozen=True, slots=True)
class ServedAcceptance:
    """Acceptance of a server. `covered`: the share of rounds with a draft; `depth`: the mean length of drafts.

    `num_guesses`: the draft tokens. `reached[j]`: the share of drafts whose first j + 1 tokens were all accepted. None
    for values that the server does not report.
    """

    tokens_per_round: float
    num_guesses: float | None
    acceptance_rate: float | None
    covered: float | None
    depth: float | None
    reached: tuple[float, ...] | None

    @property
    def full_depth(self) -> int | None:
        """The length of full drafts: the longest accepted length, or the mean length if that is greater."""
        deepest = sum(each > 0 for each in self.reached or ())
        return max(deepest, round(self.depth or 0)) or None

    @property
    def at_depth(self) -> list[float]:
        """P(draft token accepted | the ones before it accepted), by depth; empty if unknown."""
        chain = (1.0, *(self.reached or ()))
        return [min(1.0, over(now, before) or 0.0) for before, now in pairwise(chain)]


def acceptance_of(counts: SpeculationCounts, num_tokens: int) -> ServedAcceptance | None:
    """The acceptance in rounds that emitted `num_tokens`; None if the counts do not determine it.

    A round emits the accepted tokens and one more, so that the number of rounds follows from the tokens if it is not
    reported. It is at least the number of drafts, since accepted tokens may be cut off at the end of an answer.
    """
    accepted = counts.num_accepted
    if num_tokens <= 0 or (counts.num_drafted == 0 and counts.num_rounds is None):
        return None
    if accepted is None and counts.num_rounds is None and counts.accept_length:
        accepted = num_tokens * (1 - 1 / counts.accept_length)
    rounds = counts.num_rounds if accepted is None else max(num_tokens - accepted, counts.num_drafts or 0.0)
    if not rounds or rounds < 0:
        return None
    drafts, depth = counts.num_drafts, counts.depth
    if drafts and counts.num_drafted:
        depth = counts.num_drafted / drafts
    share = over(drafts, rounds) if drafts is not None else (1.0 if counts.depth else None)
    reached = tuple(each / drafts for each in counts.accepted_at_depth) if drafts else None
    tokens = num_tokens / rounds
    if not reached and depth and share:
        reached = even_chain(1 + (tokens - 1) / share, round(depth))
    return ServedAcceptance(
        tokens_per_round=tokens,
        num_guesses=counts.num_drafted,
        acceptance_rate=over(counts.num_accepted, counts.num_drafted),
        covered=None if share is None else min(1.0, share),
        depth=depth,
        reached=reached or None,
    )


def even_chain(tokens: float, depth: int) -> tuple[float, ...]:
    """`reached` for the constant acceptance rate that yields this number of tokens per round."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        short = 1 + sum(middle ** (j + 1) for j in range(depth)) < tokens
        low, high = (middle, high) if short else (low, middle)
    return tuple(low ** (j + 1) for j in range(depth))
