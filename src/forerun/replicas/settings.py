"""ReplicaSettings: the number of replicas, their cluster, and the resources of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from forerun.errors import InvalidRequest, MissingPackage


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """From `least` to `most` replicas, scaled by load.

    `address`: of a Ray cluster; "auto" is the one running on this machine, and without one a local cluster is started.
    Raises InvalidRequest naming the field.
    """

    least: int
    most: int
    address: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            problem = f"{self.least}:{self.most} is not possible: use at least 1, and a maximum not below the minimum."
            raise InvalidRequest("replicas", problem)

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"

    @classmethod
    def of(cls, replicas: str, address: str = "") -> ReplicaSettings:
        """Parse N or MIN:MAX. Raises InvalidRequest."""
        least, _, most = replicas.partition(":")
        if not (least.isdecimal() and (most or least).isdecimal()) or replicas.endswith(":"):
            raise InvalidRequest(
                "replicas", f"{replicas!r} must be a number such as 2, or a minimum and a maximum such as 1:4."
            )
        return cls(int(least), int(most or least), address)

    def resources(self, arguments: Mapping[str, Any], cluster: Mapping[str, float]) -> dict[str, Any]:
        """The Ray resources of one replica of LLM(**arguments): its threads, or an even share of the cluster's CPUs.

        On a GPU it takes one GPU.
        """
        threads = arguments.get("threads")
        share = max(0.1, cluster.get("CPU", 1.0) / self.most)
        takes: dict[str, Any] = {"num_cpus": threads or (int(share) if share >= 1 else round(share - 0.05, 1))}
        if str(getattr(arguments.get("model"), "device", arguments.get("device")) or "").startswith("cuda"):
            takes["num_gpus"] = 1
        return takes

    def require_room(self, arguments: Mapping[str, Any], cluster: Mapping[str, float]) -> None:
        """Raise InvalidRequest if a fixed cluster has no room for `least` replicas.

        Ray would wait for room forever.
        """
        for name, what in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            takes, there = self.resources(arguments, cluster).get(name, 0), cluster.get(what, 0.0)
            if self.least * takes > there:
                problem = f"{self.least} replicas take {takes:g} {what}s each, and this machine has {there:g}"
                fix = "fewer --threads or replicas" if name == "num_cpus" else "fewer replicas"
                raise InvalidRequest("replicas", f"{problem}: use {fix}, or a cluster, by --ray.")


def require_ray() -> None:
    """Raise MissingPackage if Ray Serve is not installed; set the variables that Ray reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # calls after the end of a cluster must not start a new one
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise MissingPackage("replicas need Ray Serve, which is not installed: pip install 'forerun[ray]'")
