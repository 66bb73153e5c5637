"""Ranks that are threads of this process: they compute the same as processes, without the time to start these."""

import threading
from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from forerun.models.shards.launch import LOOPBACK, connect_all
from forerun.models.shards.ranks import RankGroup
from forerun.models.shards.shard import Shard
from forerun.models.shards.worker import work

PATIENCE = timedelta(seconds=60)


def thread_ranks(world: int) -> RankGroup:
    """Rank 0 of so many; the others work in threads until it stops them."""
    store = TCPStore(LOOPBACK, 0, world, is_master=True, timeout=PATIENCE, wait_for_workers=False)

    def follow(rank: int) -> None:
        work(connect_all(Shard(rank, world), TCPStore(LOOPBACK, store.port, world, timeout=PATIENCE), LOOPBACK))

    for rank in range(1, world):
        threading.Thread(target=follow, args=[rank], daemon=True).start()
    return connect_all(Shard(0, world), store, LOOPBACK)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that ranks share are shared by threads."""

    def share(world: int, loading: Sequence[Sequence[int]], digits: str) -> RankGroup:
        ranks = thread_ranks(world)
        ranks.load(loading, digits)
        return ranks

    monkeypatch.setattr("forerun.models.loading.start_ranks", share)
