"""How ranks start: their environment variables, the addresses they listen on, and that they leave nothing behind."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from forerun.errors import InvalidRequest, RankLost
from forerun.models.shards import launch
from forerun.models.shards.launch import LOOPBACK, LocalRanks, join, start_ranks

STARTED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Ranks divide the threads of this process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "lacks", [{"MASTER_ADDR": ""}, {"MASTER_PORT": ""}, {"MASTER_PORT": "x"}, {"MASTER_PORT": "70000"}]
)
def test_an_environment_without_the_address_of_rank_0_is_refused(lacks: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=r"MASTER_PORT, .* are no address of rank 0.*or unset RANK"):
        join({name: value for name, value in (STARTED | lacks).items() if value})


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system does not list what a process has open")
def test_ranks_that_cannot_start_leave_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def memories() -> list[str]:
        files = list[str]()
        for each in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # another thread has closed it
                files.append(os.readlink(each))
        return [name for name in files if "forerun-ranks" in name]

    monkeypatch.setattr(launch, "WORKER", "forerun.no_such_module")
    before = memories()
    with pytest.raises(RankLost, match="ended with status 1"):
        start_ranks(2, [[0]], "00")
    assert memories() == before


def test_ranks_of_this_machine_are_not_reached_from_others() -> None:
    def listening() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("tcp")
        return {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}

    before, ranks = listening(), LocalRanks(2)
    try:
        group = ranks.start()
        opened = listening() - before
        assert opened
        assert {address for address, _ in opened} <= {LOOPBACK, f"::ffff:{LOOPBACK}"}
        assert group.lost is None
    finally:
        ranks.stop()
