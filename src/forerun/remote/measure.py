"""Measurement of servers: blocks of requests at several numbers of clients, alternating with and without speculation.

This file decides the contenders and the order of blocks. It reads the server's speculation counters before and after
each block and, if the server runs on this machine, the load of other programs. That load is measured while no request
is open, since the server is another program, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.bench.plan import rotated
from forerun.config import require_whole
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.machine import LEAST_S, Neighbours
from forerun.remote.counters import SpeculationCounts, counts_of, counts_of_answers
from forerun.remote.dialects import Dialect, dialect_of
from forerun.remote.time_limit import NO_LIMIT, TimeLimit
from forerun.serve.access import is_loopback
from forerun.traffic.client import ServedModel, ServerAddress, TrafficClient
from forerun.traffic.figures import TrafficBlock
from forerun.traffic.plan import OFF, ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn
from forerun.traffic.run import Sender, prompt_fields

SPECULATING, PLAIN = "speculating", "plain"
REST_S = 1.25 * LEAST_S  # pause before a block, in which counters settle and the machine's load is measured
LEAST_BLOCK = 2  # minimum requests per client and block, since the first ones of all clients start together


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server's model and dialect, and a client for it."""

    client: TrafficClient
    model: ServedModel
    dialect: Dialect

    @classmethod
    async def reached(cls, client: TrafficClient) -> RemoteServer:
        """Query the server for its model and dialect. Raises InvalidRequest with the option if it does not answer."""
        model, metrics = await client.served_model(), await client.metrics()
        return cls(client, model, dialect_of(model.owner, metrics))

    async def counts(self) -> SpeculationCounts:
        """Read the speculation counters."""
        return counts_of(await self.client.metrics(), self.dialect.prefix)

    @property
    def is_local(self) -> bool:
        """Whether its address is a loopback one."""
        return is_loopback(urlsplit(self.client.address.base).hostname or "")


def same_model(server: RemoteServer, other: RemoteServer) -> None:
    """Raise InvalidRequest if the servers have different models."""
    first, second = server.model, other.model
    address = other.client.address
    fingerprints = first.fingerprint, second.fingerprint
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        raise InvalidRequest(
            address.url_option,
            f"{address.base} has another model or build ({fingerprints[1]}, not {fingerprints[0]}): serve the same.",
        )
    if first.name != second.name and not address.model:
        option = f"--{address.model_option.replace('_', '-')}"
        raise InvalidRequest(
            address.url_option,
            f"{address.base} serves {shown(second.name)}, not {shown(first.name)}: serve the same model there, or name "
            f"it with {option} if only the names differ.",
        )


@dataclass(frozen=True, slots=True)
class ServedContender:
    """A server with a mode of speculation."""

    name: str
    server: RemoteServer
    mode: SpeculationMode


@dataclass(frozen=True, slots=True)
class ServedBlock:
    """One finished block of requests, with its speculation counts.

    `num_busy`: the cores that other programs used before it; None for remote servers.
    """

    contender: str
    block: TrafficBlock
    counts: SpeculationCounts
    num_busy: float | None

    @property
    def served(self) -> bool:
        """Whether it used the server's own speculation setting."""
        return self.contender == SPECULATING

    @property
    def requested_depth(self) -> int | None:
        """The depth in its requests; None if they have none."""
        name = self.block.turn.mode.name
        return int(name) if name.isdecimal() else None

    @property
    def num_tokens(self) -> int:
        """Tokens after the first of each answer, which decoding rounds emitted."""
        return sum(answer.num_tokens - 1 for answer in self.block.complete)

    @property
    def token_s(self) -> float | None:
        """Mean seconds between tokens of an answer; None without tokens."""
        total_s = sum(answer.last_s - answer.first_s for answer in self.block.complete)
        return total_s / self.num_tokens if self.num_tokens > 0 and total_s > 0 else None


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The blocks: `num_requests` of `max_tokens` tokens in each, at least two per client, `repeats` times per load.

    `depths` are measured in addition to the server's setting, if requests can choose the depth. After the first
    repetition of a load, none is started that may exceed the load's equal share of `time_limit_s`.
    """

    clients: tuple[int, ...] = (1, 4, 16)
    num_requests: int = 16
    repeats: int = 3
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    depths: tuple[int, ...] = (1, 4)
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        self.traffic(1)
        for depth in self.depths:
            require_whole("depths", depth, 1)
        for number in self.clients:
            ServerLoad("concurrency", float(number))
        if not self.clients or len(set(self.clients)) < len(self.clients):
            raise InvalidRequest("clients", f"{list(self.clients)} must be different numbers of clients, at least one.")

    def traffic(self, clients: int) -> TrafficPlan:
        """The traffic plan for this number of clients."""
        load = ServerLoad("concurrency", float(clients))
        number = max(self.num_requests, LEAST_BLOCK * clients)
        return TrafficPlan(
            (load,),
            (),
            num_requests=number,
            repeats=self.repeats,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass(slots=True)
class ServerMeasurement:
    """Sends all blocks of a plan to the contenders, alternating."""

    contenders: Sequence[ServedContender]
    plan: ServerPlan
    passages: Sequence[Passage]
    extra: Mapping[str, Any] = field(default_factory=dict)

    async def run(self, report: ProgressCallback) -> list[ServedBlock]:
        """Run all blocks, in order. Raises InvalidRequest if a first request is refused."""
        blocks: list[ServedBlock] = []
        num_steps = len(self.plan.clients) * self.plan.repeats * len(self.contenders)
        limit = TimeLimit.of(self.plan.time_limit_s) if self.plan.time_limit_s else NO_LIMIT
        for load, clients in enumerate(self.plan.clients):
            traffic, longest_s = self.plan.traffic(clients), 0.0
            within = limit.part(1 / (len(self.plan.clients) - load))
            for contender in self.contenders:
                await self.warm_up(contender, traffic)
            for repetition in range(self.plan.repeats):
                if repetition and within.left_s < longest_s:
                    break
                started_s = time.monotonic()
                for contender in rotated(self.contenders, repetition):
                    report(f"{clients} at once, {contender.name}", len(blocks) / num_steps)
                    blocks.append(await self.block(contender, traffic, repetition))
                longest_s = max(longest_s, time.monotonic() - started_s)
        return blocks

    async def warm_up(self, contender: ServedContender, traffic: TrafficPlan) -> None:
        """Send some requests that are not counted."""
        for answer in await self.sender(contender, traffic).warm_up(traffic.loads[0], contender.mode):
            if answer.error:
                address = contender.server.client.address
                raise InvalidRequest(address.url_option, f"{address.base} failed the first request: {answer.error}.")

    async def block(self, contender: ServedContender, traffic: TrafficPlan, repetition: int) -> ServedBlock:
        """Run one block between two readings of the counters, after a pause in which the machine's load is measured."""
        neighbours = Neighbours()
        await asyncio.sleep(REST_S)
        num_busy = neighbours.num_busy() if all(each.server.is_local for each in self.contenders) else None
        before = await contender.server.counts()
        turn = TrafficTurn(traffic.loads[0], repetition, contender.mode)
        block = await self.sender(contender, traffic).block(turn)
        await asyncio.sleep(REST_S - LEAST_S)
        counts = (await contender.server.counts()).since(before)
        if not counts.known:
            counts = counts_of_answers(answer.speculation for answer in block.complete if answer.speculation)
        return ServedBlock(contender.name, block, counts, num_busy)

    def sender(self, contender: ServedContender, traffic: TrafficPlan) -> Sender:
        """A sender of the plan's requests to a contender."""
        server = contender.server
        return Sender(server.client, server.model, traffic, self.passages, self.extra)


@asynccontextmanager
async def contenders_at(
    address: ServerAddress, against: ServerAddress | None, prompts: Sequence[Passage], depths: Sequence[int] = ()
) -> AsyncIterator[list[ServedContender]]:
    """Context with the contenders. Requests to a forerun server can also choose plain decoding and the depth.

    Raises InvalidRequest if a prompt has the wrong kind for the address, a server does not answer, or models differ.
    """
    for prompt in prompts:
        prompt_fields(prompt, address.chat)
    async with AsyncExitStack() as stack:
        addresses = [address] if against is None else [address, against]
        servers = [await RemoteServer.reached(await stack.enter_async_context(TrafficClient(a))) for a in addresses]
        server, plain = servers[0], servers[-1]
        same_model(server, plain)
        contenders = [ServedContender(SPECULATING, server, SpeculationMode())]
        if server.model.forerun:
            contenders += [ServedContender(f"depth {depth}", server, SpeculationMode(str(depth))) for depth in depths]
        if plain is not server or plain.model.forerun:
            off = SpeculationMode(OFF) if plain.model.forerun else SpeculationMode()
            contenders.append(ServedContender(PLAIN, plain, off))
        yield contenders


async def measure_servers(
    address: ServerAddress,
    against: ServerAddress | None,
    plan: ServerPlan,
    passages: Sequence[Passage],
    report: ProgressCallback,
    extra: Mapping[str, Any] | None = None,
) -> tuple[list[ServedContender], list[ServedBlock]]:
    """Measure a server, against a plain one if available.

    Raises InvalidRequest if a server does not answer, has another model, or refuses the requests.
    """
    async with contenders_at(address, against, passages, plan.depths) as contenders:
        return contenders, await ServerMeasurement(contenders, plan, passages, extra or {}).run(report)
