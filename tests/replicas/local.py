"""Replicas in the tests' own process: messages are pickled as between processes, and replicas are lost as planned."""

import pickle
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from forerun.errors import ReplicaLost
from forerun.llm import LLM
from forerun.replicas.front import ReplicaService
from forerun.replicas.replica import Call, RemoteLLM, Replica, ReplicaNews
from forerun.replicas.routes import RouteTable
from kit.servers import Running, drafting, running


def copied(value: Any) -> Any:
    """What another process gets."""
    return pickle.loads(pickle.dumps(value))


@dataclass
class LocalReplicas:
    """Replicas here. `losses` says, call by call, behind how many news its replica is lost; later ones are not."""

    there: dict[str, Replica]
    losses: list[int] = field(default_factory=list)
    took: list[str] = field(default_factory=list)  # the replica of each call
    under_way: Counter[str] = field(default_factory=Counter)
    table: RouteTable = field(default_factory=lambda: RouteTable(4))

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        call, loss = copied(call), self.losses.pop(0) if self.losses else None
        name = self.table.ranked(call.route, {each: self.under_way[each] for each in self.there})[0]
        self.table.record(call.route, name)
        self.took.append(name)
        self.under_way[name] += 1
        try:
            async with aclosing(self.there[name].answer(call)) as answer:
                number = 0
                async for news in answer:
                    if number == loss:
                        raise ReplicaLost("it was planned so.")
                    yield copied(news)
                    number += 1
                if loss is not None:
                    raise ReplicaLost("it was planned so.")
        finally:
            self.under_way[name] -= 1

    async def readings(self) -> Mapping[str, Sequence[Metric]]:
        return copied({name: replica.reading()[1] for name, replica in self.there.items()})

    async def num_running(self) -> int:
        return len(self.there)


@contextmanager
def replicated(
    made: Callable[[], LLM] = drafting, number: int = 2, **settings: Any
) -> Iterator[tuple[Running, LocalReplicas]]:
    """A server over so many replicas of a model."""
    with ExitStack() as stack:
        engines = [stack.enter_context(made()) for _ in range(number)]
        table = RouteTable(engines[0].options.max_num_seqs)
        replicas = LocalReplicas({f"r{i}": Replica(llm, f"r{i}") for i, llm in enumerate(engines)}, table=table)
        for replica in replicas.there.values():
            stack.callback(replica.front.close)
        llm = RemoteLLM(copied(replicas.there["r0"].description()), number)
        service_of = partial(ReplicaService, replicas=replicas)
        served = stack.enter_context(running(llm, service_of, engines, **settings))
        yield served, replicas
