"""What stands between Ray and the front, without a cluster: losses as Ray tells them, its router's count, arguments."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.errors import EngineClosed, ForerunError
from forerun.replicas.replica import Call, ReplicaNews
from forerun.replicas.routes import Route
from kit.servers import OK, library_answer
from kit.unchecked import unchecked
from replicas.local import LocalReplicas, replicated

pytest.importorskip("ray", reason="Ray is not installed: pip install 'forerun[ray]'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray warns of its own use of pydantic
    from ray import exceptions
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    from forerun.replicas.on_ray import PrefixRouter, RayReplicas, application

LONG = OK | {"max_tokens": 40, "ignore_eos": True}
LOSSES: list[Callable[[], Exception]] = [
    exceptions.ActorDiedError,
    lambda: exceptions.ActorUnavailableError("away", None),
    lambda: exceptions.NodeDiedError("its node died"),
    lambda: exceptions.ObjectLostError("ab" * 28, None, ""),
    lambda: exceptions.OwnerDiedError("ab" * 28, None, ""),
    lambda: exceptions.ObjectFetchTimedOutError("ab" * 28, None, ""),
    lambda: exceptions.OutOfMemoryError("its node had too little memory"),
    exceptions.WorkerCrashedError,
    lambda: exceptions.RayTaskError("answer", "", EngineClosed("it ends")).as_instanceof_cause(),
    lambda: exceptions.RayTaskError("answer", "", exceptions.OwnerDiedError("ab" * 28, None, "")).as_instanceof_cause(),
    lambda: DeploymentUnavailableError(SimpleNamespace(name="replica", app_name="app")),
]


@dataclass
class Handle:
    """A deployment's handle whose replicas are here. Its answers end with `losses`, one behind each number of news."""

    replicas: LocalReplicas
    losses: list[tuple[int, Exception]] = field(default_factory=list)

    @property
    def answer(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda call: Response(self.news(call)))

    async def news(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        number, loss = self.losses.pop(0) if self.losses else (-1, None)
        async for news in self.replicas.answer(call):
            if not number:
                break
            number -= 1
            yield news
        if loss is not None:
            raise loss


class Response:
    """What Ray gives for an answer in pieces."""

    def __init__(self, news: AsyncGenerator[ReplicaNews, None]) -> None:
        self.news = news

    def __aiter__(self) -> AsyncGenerator[ReplicaNews, None]:
        return self.news

    def cancel(self) -> None: ...


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Any, Handle]]:
    with replicated() as (running, replicas):
        handle = Handle(replicas)
        with unchecked():
            made = RayReplicas(handle, "app")
        vars(made)["streaming"] = handle
        running.server.service.replica_front.replicas = made
        yield running, handle


@pytest.mark.parametrize("loss", LOSSES, ids=lambda made: type(made()).__name__)
@pytest.mark.parametrize("num_news", [0, 2])
def test_whatever_ray_calls_a_loss_costs_no_token(
    served: tuple[Any, Handle], loss: Callable[[], Exception], num_news: int
) -> None:
    running, handle = served
    handle.losses = [(num_news, loss()), (num_news + 1, loss())]
    answer = running.post("/v1/completions", **LONG, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == list(library_answer(LONG).outputs[0].token_ids)
    assert not handle.losses


def test_an_error_of_the_replicas_code_is_reported_and_not_retried(served: tuple[Any, Handle]) -> None:
    running, handle = served
    fault = exceptions.RayTaskError("answer", "", ValueError("a fault")).as_instanceof_cause()
    handle.losses = [(0, fault), (0, fault)]
    assert running.post("/v1/completions", **LONG).status_code == 500
    assert len(handle.losses) == 1


def pending(key: str, route: Route = Route(num_samples=2)) -> Any:  # noqa: B008 - it is frozen
    """A request as Ray's router has it."""
    return SimpleNamespace(
        args=(SimpleNamespace(route=route),),
        metadata=SimpleNamespace(internal_request_id=key),
        routing_context=SimpleNamespace(should_backoff=False),
        future=asyncio.get_running_loop().create_future(),
    )


def router() -> Any:
    """A router without Ray's part of it."""
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state(4)
    return made


REPLICAS = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]


def test_requests_that_end_in_any_way_are_counted_no_longer() -> None:
    async def all_ways() -> None:
        made = router()
        ways = [
            lambda request: request.future.cancel(),
            lambda request: request.future.set_exception(BackPressureError(1, 1)),
            lambda request: made.on_request_completed(None, request.metadata.internal_request_id),
        ]
        for number, end in enumerate(ways):
            request = pending(str(number))
            await made.choose_replicas(REPLICAS, request)
            assert made.open_requests == {str(number): ("a" if number % 2 == 0 else "b", 2)}
            end(request)
            await asyncio.sleep(0)
            assert made.open_requests == {}

    with unchecked():  # stand-ins for what is Ray's
        asyncio.run(all_ways())


def test_a_request_that_ends_before_it_is_reported_as_routed_is_not_counted() -> None:
    async def too_short() -> None:
        made, request = router(), pending("short")
        await made.choose_replicas(REPLICAS, request)
        request.future.set_result(REPLICAS[1])
        made.on_request_completed(REPLICAS[1].replica_id, "short")
        made.on_request_routed(request, REPLICAS[1].replica_id, None)
        assert made.open_requests == {}

    with unchecked():
        asyncio.run(too_short())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model: .*under args"),
        ({"model": "stdlib", "max_num_seq": 4}, "'max_num_seq'.*did you mean 'max_num_seqs'"),
        ({"model": "stdlib", "alowed_hosts": ["*"]}, "'alowed_hosts'.*did you mean 'allowed_hosts'"),
        ({"model": "stdlib", "replica": 2}, "'replica'.*did you mean 'replicas'"),
        ({"model": "stdlib", "max_num_seqs": "many"}, "max_num_seqs"),
        ({"model": "stdlib", "replicas": "2:1"}, "replicas: 2:1"),
    ],
)
def test_arguments_of_an_application_are_checked_where_it_is_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        application(arguments)
