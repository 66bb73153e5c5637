"""The plan of a load test: loads, modes of speculation, their order, and the arrival times of requests.

`run.py` sends the requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from forerun.bench.plan import rotated
from forerun.config import AUTO, require_whole
from forerun.errors import InvalidRequest
from forerun.limits import is_whole, real, shown

OFF = "off"
LoadKind = Literal["rate", "concurrency"]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server.

    "rate": an open loop; requests arrive at `value` per second on average, as a Poisson process. "concurrency": a
    closed loop; `value` requests are open at any time, and the next one is sent when one is answered.
    """

    kind: LoadKind
    value: float

    def __post_init__(self) -> None:
        if self.kind == "concurrency":
            if self.value != int(self.value) or self.value < 1:
                raise InvalidRequest("concurrency", f"{self.value:g} must be a whole number of at least 1.")
        elif not 0 < self.value < float("inf"):
            raise InvalidRequest("rate", f"{self.value:g} must be a number of requests per second above 0.")

    @property
    def name(self) -> str:
        """The load as a phrase."""
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:g} requests/s"


@dataclass(frozen=True, slots=True)
class SpeculationMode:
    """The `speculation` field of every request: "auto", "off", or a depth; "" sends no such field."""

    name: str = ""

    def __post_init__(self) -> None:
        if self.name not in ("", AUTO, OFF) and not is_whole(self.name):
            raise InvalidRequest("speculation", f"{shown(self.name)} must be auto, off, or a depth such as 4.")

    @property
    def field(self) -> dict[str, object]:
        """The fields of a body for this mode."""
        if not self.name:
            return {}
        return {"speculation": int(self.name) if self.name.isdecimal() else {AUTO: AUTO, OFF: False}[self.name]}

    @property
    def shown(self) -> str:
        """The mode as a phrase."""
        if not self.name:
            return "server's setting"
        return f"depth {self.name}" if self.name.isdecimal() else self.name


@dataclass(frozen=True, slots=True)
class TrafficTurn:
    """One block of requests: a load, a repetition and a mode."""

    load: ServerLoad
    repetition: int
    mode: SpeculationMode


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Every load in every mode, `repeats` times, with `num_requests` requests each time.

    Without modes, `for_server` chooses them. `max_tokens`, `temperature` and `ignore_eos` apply to every request;
    request i has the seed `seed` + i in every mode, so that answers can be compared.
    """

    loads: tuple[ServerLoad, ...]
    modes: tuple[SpeculationMode, ...] = ()
    num_requests: int = 32
    repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("repeats", 1), ("max_tokens", 2), ("seed", 0)):
            require_whole(name, getattr(self, name), least)
        real("temperature", self.temperature, "use a number from 0 on", 0.0)
        if not self.loads:
            raise InvalidRequest("rate", "there is no load: give --rate or --concurrency.")
        for name, values in (("rate", self.loads), ("speculation", self.modes)):
            if len(set(values)) < len(values):
                raise InvalidRequest(name, "a value is repeated: give each value once.")

    def for_server(self, forerun: bool) -> TrafficPlan:
        """The plan with default modes for the server. Raises InvalidRequest for modes if it is not a forerun server."""
        if self.modes and not forerun:
            raise InvalidRequest("speculation", "this is not a forerun server: leave it out, or use another server.")
        defaults = (SpeculationMode(OFF), SpeculationMode(AUTO)) if forerun else (SpeculationMode(),)
        return replace(self, modes=self.modes or defaults)

    @property
    def baseline(self) -> SpeculationMode:
        """The mode that others are compared with: plain decoding if included."""
        return next((mode for mode in self.modes if mode.name == OFF), self.modes[0])

    def turns(self) -> Iterator[TrafficTurn]:
        """All blocks in order; every repetition starts with another mode, so that drift of the speed favours none."""
        for load, repetition in product(self.loads, range(self.repeats)):
            for mode in rotated(self.modes, repetition):
                yield TrafficTurn(load, repetition, mode)

    def arrivals_s(self, load: ServerLoad, repetition: int) -> Sequence[float]:
        """The arrival times of a block's requests, in seconds from its start; the same in every mode.

        At a rate they are a Poisson process conditioned on `num_requests` arrivals (sorted uniform draws), so that even
        a short block has exactly the requested load.
        """
        if load.kind == "concurrency":
            return [0.0] * self.num_requests
        noise = random.Random(f"{self.seed} {load.value} {repetition}")
        return sorted(noise.uniform(0, self.span_s(load)) for _ in range(self.num_requests))

    def span_s(self, load: ServerLoad) -> float:
        """The seconds in which the requests of a block arrive."""
        return self.num_requests / load.value if load.kind == "rate" else 0.0
