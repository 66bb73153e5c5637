"""The measurement of servers: blocks of requests at several numbers of clients, with and without speculation by turns.

This file decides which contenders there are, what is sent to whom and in which order, and what is read beside it: the
server's counters of guesses, and, where it runs on this machine, what other programs took of its cores. These are
looked at while no request is under way, since the server itself is another program.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from ipaddress import ip_address
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
from forerun.traffic.client import ServedModel, ServerAddress, TrafficClient
from forerun.traffic.figures import TrafficBlock
from forerun.traffic.plan import OFF, ServerLoad, SpeculationMode, TrafficPlan, TrafficTurn
from forerun.traffic.run import Sender, asked_of

SPECULATING, PLAIN = "speculating", "plain"
REST_S = 1.25 * LEAST_S  # in which a server comes to rest, its counters too, and the machine is looked at
LEAST_BLOCK = 2  # requests of each client in a block: the first ones of all begin together


@dataclass(frozen=True, slots=True)
class RemoteServer:
    """A server as it presents itself, and the client that asks it."""

    client: TrafficClient
    model: ServedModel
    dialect: Dialect

    @classmethod
    async def reached(cls, client: TrafficClient) -> RemoteServer:
        """Ask who is there. Raises InvalidRequest, naming the option, where nobody is."""
        model, metrics = await client.served_model(), await client.metrics()
        return cls(client, model, dialect_of(model.owner, metrics))

    async def counts(self) -> SpeculationCounts:
        """The counters of guesses at this moment."""
        return counts_of(await self.client.metrics(), self.dialect.prefix)

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, as far as its address tells."""
        host = urlsplit(self.client.address.base).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


def same_model(server: RemoteServer, other: RemoteServer) -> None:
    """Raise InvalidRequest where the second server has another model than the first."""
    first, second = server.model, other.model
    address = other.client.address
    prints = first.fingerprint, second.fingerprint
    if all(prints) and prints[0] != prints[1]:
        raise InvalidRequest(
            address.url_option,
            f"{address.base} has another model or build, fingerprint {prints[1]} and not {prints[0]}: serve the same.",
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
    """One way to serve: a server, and what requests to it say about speculation."""

    name: str
    server: RemoteServer
    mode: SpeculationMode


@dataclass(frozen=True, slots=True)
class ServedBlock:
    """One block of requests as it ran, with the counts of its guesses and the cores that others kept busy before it."""

    contender: str
    block: TrafficBlock
    counts: SpeculationCounts
    num_busy: float | None

    @property
    def served(self) -> bool:
        """Whether it speculated as the server does unless told."""
        return self.contender == SPECULATING

    @property
    def asked_depth(self) -> int | None:
        """The depth that its requests asked for; None where they asked for none."""
        name = self.block.turn.mode.name
        return int(name) if name.isdecimal() else None

    @property
    def num_tokens(self) -> int:
        """Tokens behind the first of each answer: those that rounds wrote."""
        return sum(answer.num_tokens - 1 for answer in self.block.complete)

    @property
    def token_s(self) -> float | None:
        """Seconds from one token of an answer to the next, over all of them; None where nothing came."""
        taken_s = sum(answer.last_s - answer.first_s for answer in self.block.complete)
        return taken_s / self.num_tokens if self.num_tokens > 0 and taken_s > 0 else None


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What is sent: `num_requests` of `max_tokens` tokens in each block, two a client at least, `repeats` times.

    `depths` are measured besides what is served, where requests can choose theirs. No repetition but the first of a
    load is begun that may not end within `time_limit_s`, of which every load has an equal part.
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
            raise InvalidRequest("clients", f"{list(self.clients)} must be numbers of clients, each of them once.")

    def traffic(self, clients: int) -> TrafficPlan:
        """The plan of the load of so many clients."""
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
    """Sends all blocks of a plan to the contenders by turns."""

    contenders: Sequence[ServedContender]
    plan: ServerPlan
    passages: Sequence[Passage]
    extra: Mapping[str, Any] = field(default_factory=dict)

    async def run(self, report: ProgressCallback) -> list[ServedBlock]:
        """All blocks, in the order in which they ran. Raises InvalidRequest where a first request is refused."""
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
        """Some requests that do not count."""
        for answer in await self.sender(contender, traffic).warm_up(traffic.loads[0], contender.mode):
            if answer.error:
                address = contender.server.client.address
                raise InvalidRequest(address.url_option, f"{address.base} failed a first request: {answer.error}.")

    async def block(self, contender: ServedContender, traffic: TrafficPlan, repetition: int) -> ServedBlock:
        """One block, between two readings of the counters."""
        num_busy = await self.rest()
        before = await contender.server.counts()
        turn = TrafficTurn(traffic.loads[0], repetition, contender.mode)
        block = await self.sender(contender, traffic).block(turn)
        await asyncio.sleep(REST_S - LEAST_S)
        counts = (await contender.server.counts()).since(before)
        if not counts.known:
            counts = counts_of_answers(answer.speculation for answer in block.complete if answer.speculation)
        return ServedBlock(contender.name, block, counts, num_busy)

    async def rest(self) -> float | None:
        """Wait, and say how many cores other programs kept busy meanwhile; None where the servers are elsewhere."""
        neighbours = Neighbours()
        await asyncio.sleep(REST_S)
        local = all(contender.server.is_local for contender in self.contenders)
        return neighbours.num_busy() if local else None

    def sender(self, contender: ServedContender, traffic: TrafficPlan) -> Sender:
        """What sends the requests of a plan to a contender."""
        server = contender.server
        return Sender(server.client, server.model, traffic, self.passages, self.extra)


def contenders_of(
    server: RemoteServer, against: RemoteServer | None, depths: Sequence[int] = ()
) -> list[ServedContender]:
    """The ways to serve that can be compared: a server of forerun's has plain decoding and depths too, by request."""
    contenders = [ServedContender(SPECULATING, server, SpeculationMode())]
    if server.model.forerun:
        contenders += [ServedContender(f"depth {depth}", server, SpeculationMode(str(depth))) for depth in depths]
    plain = against or (server if server.model.forerun else None)
    if plain is not None:
        off = SpeculationMode(OFF) if plain.model.forerun else SpeculationMode()
        contenders.append(ServedContender(PLAIN, plain, off))
    return contenders


async def reach(
    stack: AsyncExitStack, address: ServerAddress, other: ServerAddress | None
) -> tuple[RemoteServer, RemoteServer | None]:
    """Both servers, which serve the same model. Raises InvalidRequest where they do not, or one does not answer."""
    server = await RemoteServer.reached(await stack.enter_async_context(TrafficClient(address)))
    if other is None:
        return server, None
    second = await RemoteServer.reached(await stack.enter_async_context(TrafficClient(other)))
    same_model(server, second)
    return server, second


async def measure_servers(
    address: ServerAddress,
    against: ServerAddress | None,
    plan: ServerPlan,
    passages: Sequence[Passage],
    report: ProgressCallback,
    extra: Mapping[str, Any] | None = None,
) -> tuple[list[ServedContender], list[ServedBlock]]:
    """Measure a server, against the one without speculation if there is one.

    Raises InvalidRequest where a server does not answer, has another model, or refuses the requests.
    """
    for passage in passages:
        asked_of(passage, address.chat)
    async with AsyncExitStack() as stack:
        contenders = contenders_of(*await reach(stack, address, against), plan.depths)
        measurement = ServerMeasurement(contenders, plan, passages, extra or {})
        return contenders, await measurement.run(report)
