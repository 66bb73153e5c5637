"""Replicas on Ray Serve: deployment, routing, and an application for clusters. Only this file imports Ray.

`forerun serve --replicas` starts replicas and answers HTTP in its own process; `forerun generate` sends the lines of a
file to replicas. For clusters whose Serve applications are configured by a file, such as a RayService of Kubernetes,
`application` also builds the ingress.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import AsyncGenerator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ray
from prometheus_client.core import Metric
from ray import serve
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from forerun.config import require_whole
from forerun.did_you_mean import nearest
from forerun.ecosystem import WORDS
from forerun.errors import EngineClosed, ForerunError, InvalidRequest, ReplicaLost, UnknownKeyword
from forerun.fields import short
from forerun.llm import LLM
from forerun.replicas.front import ReplicaService
from forerun.replicas.replica import Call, RemoteLLM, Replica, ReplicaNews
from forerun.replicas.routes import Route, RouteTable
from forerun.replicas.settings import ReplicaSettings
from forerun.serve.app import application as http_application
from forerun.serve.settings import ServeSettings

log = logging.getLogger(__name__)
NAME = "replica"  # the deployment's name
CONNECT_S = 5.0  # to connect to a cluster's address
READING_S = 5.0  # for replicas to return their metrics
MOST_OPEN = 10_000  # requests of the ingress; its gate has the actual limit
LOSSES = (  # Ray's errors for a lost replica, node or object, or if no replica accepts the request
    EngineClosed, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayServeException,
    WorkerCrashedError,
)  # fmt: skip
LOST = "the replica that ran the request was lost ({}); see Ray's log. Ray starts another one."


class RayReplica:
    """A replica in a Ray actor. If the model cannot be loaded, `description` returns the reason."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.problem: str | None = None
        self.was_called = False
        try:
            llm = LLM(**arguments)
        except ForerunError as error:
            self.problem = f"{type(error).__name__}: {error}"
            return
        self.replica = Replica(llm, serve.get_replica_context().replica_id.unique_id)

    async def description(self) -> dict[str, Any] | str:
        """The description for RemoteLLM, or the reason why the model cannot be loaded."""
        self.was_called = True
        return self.problem or self.replica.description()

    async def reading(self) -> tuple[str, list[Metric]]:
        """The replica's name and its current metrics."""
        return self.replica.reading()

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        """The replica's answer to a call."""
        self.was_called = True
        self.check_health()
        async with aclosing(self.replica.answer(call)) as news:
            async for each in news:
                yield each

    def check_health(self) -> None:
        """Raise if the engine has stopped; Ray then starts another replica."""
        if self.problem is None:
            self.replica.check_health()
        elif self.was_called:  # if it raised before the first call, Ray would retry loading forever
            raise EngineClosed(self.problem)


class PrefixRouter(RequestRouter):
    """Chooses a replica by a RouteTable, counting open requests itself."""

    def initialize_state(self, places: int) -> None:
        """Initialise the router; `places`: samples that a replica runs at the same time."""
        self.table = RouteTable(places)
        self.open_requests: dict[str, tuple[str, int]] = {}  # replica and number of samples, by request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, in the order of preference."""
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        route, key = pending_request.args[0].route, pending_request.metadata.internal_request_id
        self.open_requests.pop(key, None)
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = dict.fromkeys(by_name, 0)
        for name, num_samples in self.open_requests.values():
            if name in loads:
                loads[name] += num_samples
        ranked = self.table.ranked(route, loads)
        self.count_request(pending_request, ranked[0], route)
        pending_request.routing_context.should_backoff = True
        pending_request.future.add_done_callback(partial(self.forget_failed, key))
        return [[by_name[name]] for name in ranked]

    def count_request(self, request: PendingRequest, replica: str, route: Route) -> None:
        """Count a request in the load of a replica, and record its route."""
        self.open_requests[request.metadata.internal_request_id] = replica, route.num_samples
        self.table.record(route, replica)

    def forget_failed(self, key: str, future: asyncio.Future[RunningReplica]) -> None:
        """Stop counting a request for which no replica was found."""
        if future.cancelled() or future.exception() is not None:
            self.open_requests.pop(key, None)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Record a request's replica, unless the request has already ended."""
        if pending_request.metadata.internal_request_id in self.open_requests:
            self.count_request(pending_request, replica_id.unique_id, pending_request.args[0].route)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a finished request."""
        self.open_requests.pop(internal_request_id, None)


@dataclass(frozen=True)
class RayReplicas:
    """The replicas of a Ray Serve application, through its handle."""

    handle: DeploymentHandle[Any]
    app: str

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        """One replica's answer to a call. Raises ReplicaLost if the replica fails before it is complete."""
        answer = self.streaming.answer.remote(call)
        try:
            async for news in answer:
                yield news
        except LOSSES as error:
            raise ReplicaLost(LOST.format(type(error).__name__)) from error
        except BaseException:
            answer.cancel()
            raise

    @cached_property
    def streaming(self) -> DeploymentHandle[Any]:
        """The handle for streamed answers."""
        return self.handle.options(stream=True)

    async def readings(self) -> dict[str, Seq[Metric]]:
        """The metrics of all reachable replicas, by their names."""
        with suppress(TimeoutError):
            results = await self.handle.broadcast("reading").results_async(timeout_s=READING_S, return_exceptions=True)
            return dict(each for each in results if not isinstance(each, BaseException))
        return {}

    async def num_running(self) -> int:
        """The number of running replicas; 0 if unknown, for example while Ray's controller restarts."""
        with suppress(RayActorError, RayServeException, GetTimeoutError, KeyError):
            status = await asyncio.to_thread(serve.status)
            return int(status.applications[self.app].deployments[NAME].replica_states.get("RUNNING", 0))
        return 0


def deployment(arguments: Mapping[str, Any], settings: ReplicaSettings, drain_s: float) -> Any:
    """The Ray Serve deployment of replicas of LLM(**arguments)."""
    places = arguments.get("max_num_seqs", 16)
    require_whole("max_num_seqs", places, 1)
    if arguments.get("threads") is not None:
        require_whole("threads", arguments["threads"], 1)
    resources, scaling = settings.resources(arguments, ray.cluster_resources()), None
    if settings.least != settings.most:
        scaling = AutoscalingConfig(
            min_replicas=settings.least, max_replicas=settings.most, target_ongoing_requests=places
        )
    return (
        serve.deployment(RayReplica)
        .options(
            name=NAME,
            logging_config={"log_level": "WARNING"},
            num_replicas=settings.least if scaling is None else None,
            autoscaling_config=scaling,
            max_ongoing_requests=2 * places,  # the gate admits fewer
            ray_actor_options=resources,
            request_router_config=RequestRouterConfig(
                request_router_class="forerun.replicas.on_ray.PrefixRouter", request_router_kwargs={"places": places}
            ),
            graceful_shutdown_timeout_s=drain_s,
            health_check_period_s=2.0,
            health_check_timeout_s=30.0,
        )
        .bind({**arguments, "threads": max(1, int(resources["num_cpus"]))})
    )


def require_loaded(answer: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return a replica's description. Raises ForerunError if the replica could not load the model."""
    if isinstance(answer, str):
        raise ForerunError(f"the replicas cannot load the model. {answer}")
    return answer


@contextmanager
def ray_replicas(
    arguments: Mapping[str, Any], settings: ReplicaSettings, drain_s: float, owner: str
) -> Iterator[tuple[RemoteLLM, RayReplicas]]:
    """Context with replicas of LLM(**arguments), and their model.

    They run in the cluster of the settings, or in a new one on this machine that ends with the context. `owner` is part
    of their application's name; replicas that a killed process with the same owner left behind are replaced. Raises
    ForerunError if the cluster is not reachable or the model cannot be loaded.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with in_cluster(settings.address):
        app = f"forerun-{ray.get_runtime_context().get_node_id()[:16]}-{owner}"
        if not settings.address:
            settings.require_resources(arguments, ray.cluster_resources())
        try:
            handle = serve.run(deployment(arguments, settings, drain_s), name=app, route_prefix=None)
            model = RemoteLLM(require_loaded(handle.description.remote().result()), settings.most)
            yield model, RayReplicas(handle, app)
        finally:
            if settings.address:  # a local cluster ends with all its applications
                with suppress(RayServeException, RayActorError):
                    serve.delete(app)


def require_listening(address: str) -> None:
    """Raise InvalidRequest if nothing listens at HOST:PORT; Ray would wait for several minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        fix = "start a cluster with ray start --head, or give the address of one"
        raise InvalidRequest("ray", f"{address}: nothing listens there ({short(error)}): {fix}.") from error


@contextmanager
def in_cluster(address: str) -> Iterator[None]:
    """Context in which this process is connected to a Ray cluster with Serve; without an address, a new local one."""
    quiet: dict[str, Any] = {"namespace": "forerun", "logging_level": logging.WARNING}
    require_listening(address)
    try:
        if address:
            ray.init(address, **quiet)
        else:
            ray.init("local", include_dashboard=False, **quiet)
    except (ConnectionError, ValueError) as error:
        fix = "start one with ray start --head, or set RAY_AUTH_MODE=token if it has a token"
        raise InvalidRequest("ray", f"{address}: no Ray cluster answers there ({short(error)}): {fix}.") from error
    try:
        serve.start(proxy_location="Disabled")
        yield
    finally:
        ray.shutdown()


def ingress() -> Any:
    """The HTTP application of this process's Ingress; Ray calls this function after creating the Ingress."""
    return Ingress.http


class Ingress:
    """The HTTP server behind Ray's proxies; one per process."""

    http: Any = None

    async def __init__(self, handle: DeploymentHandle[Any], settings: ServeSettings, most: int) -> None:  # type: ignore[misc]
        model = require_loaded(await handle.description.remote())
        replicas = RayReplicas(handle, serve.get_replica_context().app_name)
        Ingress.http = http_application(ReplicaService(RemoteLLM(model, most), settings, replicas))


def application(arguments: Mapping[str, Any]) -> Any:
    """A Serve application, for `import_path: forerun.replicas.on_ray:application`.

    The arguments are those of LLM, such as `model`, those of ServeSettings, such as `allowed_hosts`, and `replicas`, as
    in --replicas. Raises ForerunError for any other argument, or without a model: Ray reports errors raised here at
    once, but those of replicas only after many attempts.
    """
    of_server = {each.name for each in fields(ServeSettings)}
    of_model = {each.name for each in inspect.signature(LLM).parameters.values() if each.kind is not each.VAR_KEYWORD}
    for name in arguments:
        if name not in (known := of_server | of_model | WORDS.keys() | {"replicas"}):
            raise UnknownKeyword("application", name, nearest(name, sorted(known)))
    if not arguments.get("model"):
        raise InvalidRequest("model", "it is missing: name a folder or a hub id in the application's args.")
    server = {name: value for name, value in arguments.items() if name in of_server}
    rest = {name: value for name, value in arguments.items() if name not in of_server and name != "replicas"}
    names = server.get("allowed_hosts", "")
    server["allowed_hosts"] = names if isinstance(names, str) else ",".join(names)
    server |= {"api_keys": Path(server["api_keys"])} if server.get("api_keys") else {}
    settings, bounds = (
        ServeSettings(**server).named(str(rest["model"])),
        ReplicaSettings.of(str(arguments.get("replicas", 1))),
    )
    front = serve.deployment(serve.ingress(ingress)(Ingress)).options(name="ingress", max_ongoing_requests=MOST_OPEN)
    return front.bind(deployment(rest, bounds, settings.drain_s), settings, bounds.most)
