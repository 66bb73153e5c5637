"""Starts and connects the ranks of tensor parallelism.

By default rank 0 starts the others on its own machine, and restarts all of them if one ends. If another program, such
as torchrun, has started all ranks, on one machine or several, the environment has RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, and that program decides what happens when a rank ends.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from forerun.errors import InvalidRequest, RankLost
from forerun.kernels.threads import free_cores
from forerun.limits import is_whole
from forerun.models.shards.ranks import ANSWER_S, MEMORY, RankGroup, shared_file
from forerun.models.shards.shard import Shard

IDLE = timedelta(days=365)  # how long other ranks wait for an order; they notice when rank 0 ends
START_S = 120.0  # timeout from the start of a process until it connects; it imports torch meanwhile
CONNECTED = "here"  # prefix of the store's keys for connected ranks
LOOPBACK = "127.0.0.1"
WORKER = "forerun.models.shards.worker"
log = logging.getLogger(__name__)


def started_rank() -> int | None:
    """The rank of this process if another program started all ranks; else None."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and os.environ.get("WORLD_SIZE", "").isdigit() else None


def num_local_ranks(world: int) -> int:
    """The number of the `world` ranks that run on this machine."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(world, int(here)) if started_rank() is not None and here.isdigit() else world


def join(environment: Mapping[str, str] = os.environ) -> RankGroup:
    """Connect to the other ranks by the variables that torchrun sets.

    Raises InvalidRequest without a valid address of rank 0, RankLost if rank 0 cannot be reached.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has it there

    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, digits = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host or not is_whole(digits) or int(digits) >= 1 << 16:
        problem = f"RANK is {rank}, but MASTER_ADDR and MASTER_PORT, {host!r} and {digits!r}, are no address of rank 0"
        raise InvalidRequest("tensor_parallel_size", f"{problem}: start all ranks with torchrun, or unset RANK.")
    port = int(digits)
    is_master = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, world, is_master, timedelta(seconds=START_S), wait_for_workers=False)
        return connect_all(Shard(rank, world), store, address_towards(host, port))
    except RuntimeError as error:
        raise RankLost(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}") from error


def address_towards(host: str, port: int) -> str:
    """This machine's address on the network of `host`. Raises RankLost for an unknown host."""
    try:
        family, kind, *_, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RankLost(f"MASTER_ADDR {host} cannot be reached from this machine: {error}") from error


def connect_all(shard: Shard, store: Any, address: str) -> RankGroup:
    """Connect to all ranks of the store; this one listens at `address`, or on the interface GLOO_SOCKET_IFNAME."""
    from torch.distributed import ProcessGroupGloo

    store.set(f"{CONNECTED}{shard.rank}", "yes")
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    place = {"interface": interface} if interface and address != LOOPBACK else {"hostname": address}
    options._devices = [ProcessGroupGloo.create_device(**place)]
    options._timeout = timedelta(seconds=ANSWER_S) if shard.rank == 0 else IDLE
    return RankGroup(shard, ProcessGroupGloo(store, shard.rank, shard.world, options), store)


class LocalRanks:
    """The processes of the other ranks on this machine, whose rank 0 is this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.processes: list[subprocess.Popen[bytes]] = []
        self.file = shared_file(world)
        self.num_threads = max(1, torch.get_num_threads() // world)
        torch.set_num_threads(self.num_threads)

    def start(self) -> RankGroup:
        """End earlier processes, and start new ones. Raises RankLost if one ends before it connects."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has it there

        stop_all(self.processes)
        patience, place = timedelta(seconds=START_S), socket.create_server((LOOPBACK, 0))
        port, file = place.getsockname()[1], place.detach()  # a socket of TCPStore would listen on all networks
        store = TCPStore(
            LOOPBACK, port, self.world, is_master=True, timeout=patience, wait_for_workers=False, master_listen_fd=file
        )
        if self.file is not None:
            store.set(MEMORY, f"/proc/{os.getpid()}/fd/{self.file}")
        world = {"WORLD_SIZE": str(self.world), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
        for rank in range(1, self.world):
            environment = {**os.environ, **world, "RANK": str(rank), "OMP_NUM_THREADS": str(self.num_threads)}
            command = [sys.executable, "-m", WORKER]
            self.processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            free_cores().helpers.add(self.processes[-1].pid)
        names, end_s = [f"{CONNECTED}{rank}" for rank in range(1, self.world)], time.monotonic() + START_S
        while not store.check(names):
            ended = [process.returncode for process in self.processes if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                stop_all(self.processes)
                problem = f"ended with status {ended[0]}" if ended else f"did not connect within {START_S:.0f} s"
                raise RankLost(f"a rank of the model {problem}: see its output.")
            time.sleep(0.02)
        return connect_all(Shard(0, self.world), store, LOOPBACK)

    def stop(self) -> None:
        stop_all(self.processes)
        if self.file is not None:
            os.close(self.file)
            self.file = None


def stop_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill these processes; they have no state to save."""
    for process in processes:
        with suppress(OSError):
            process.kill()
    for process in processes:
        process.wait()
        free_cores().helpers.discard(process.pid)
    processes.clear()


def start_ranks(world: int, loading: Sequence[Sequence[int]], fingerprint: str) -> RankGroup:
    """Connect rank 0 to the ranks that another program started, or to new local processes, and order them to load.

    `loading` are the arguments of the LOAD order. All ranks must have the same `fingerprint`. Local processes are
    restarted if one of them ends. Raises InvalidRequest if another number of ranks was started, and RankLost.
    """
    if started_rank() is not None:
        if os.environ["WORLD_SIZE"] != str(world):
            problem = f"{world} does not equal WORLD_SIZE, the {os.environ['WORLD_SIZE']} ranks that were started"
            raise InvalidRequest("tensor_parallel_size", f"{problem}: make both equal.")
        ranks = join()
        ranks.load(loading, fingerprint)
        return ranks
    local = LocalRanks(world)

    def restart() -> None:
        log.warning("A rank has ended: all ranks are started again.")
        ranks.replace(local.start())
        ranks.load(loading, fingerprint)
        ranks.wait_until_loaded()

    try:
        ranks = local.start()
        weakref.finalize(ranks, local.stop)
        ranks.restart, ranks.end = restart, local.stop
        ranks.load(loading, fingerprint)
    except BaseException:
        local.stop()
        raise
    return ranks
