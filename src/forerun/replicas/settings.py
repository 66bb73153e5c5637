"""ReplicaSettings: the number of replicas, their cluster, and the resources of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from forerun.errors import InvalidRequest, MissingPackage
from forerun.limits import is_whole, shown


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """From `least` to `most` replicas, scaled with the load.

    `address`: that of a Ray cluster; "auto" is the cluster running on this machine; "" starts a local cluster. Raises
    InvalidRequest naming the field.
    """

    least: int
    most: int
    address: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            problem = f"{self.least}:{self.most} is not a valid range: use 1 or more, the minimum first."
            raise InvalidRequest("replicas", problem)

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least} to {self.most}"

    @classmethod
    def of(cls, replicas: str, address: str = "") -> ReplicaSettings:
        """Parse N or MIN:MAX. Raises InvalidRequest."""
        least, _, most = replicas.partition(":")
        if not (is_whole(least) and is_whole(most or least)) or replicas.endswith(":"):
            raise InvalidRequest(
                "replicas", f"{shown(replicas)} must be a number such as 2, or a minimum and a maximum such as 1:4."
            )
        return cls(int(least), int(most or least), address)

    def resources(self, arguments: Mapping[str, Any], cluster: Mapping[str, float]) -> dict[str, Any]:
        """The Ray resources of one replica of LLM(**arguments): its threads, or an even share of the cluster's CPUs.

        A replica on a GPU also needs one GPU.
        """
        threads = arguments.get("threads")
        share = max(0.1, cluster.get("CPU", 1.0) / self.most)
        needed: dict[str, Any] = {"num_cpus": threads or (int(share) if share >= 1 else round(share - 0.05, 1))}
        if str(getattr(arguments.get("model"), "device", arguments.get("device")) or "").startswith("cuda"):
            needed["num_gpus"] = 1
        return needed

    def require_resources(self, arguments: Mapping[str, Any], cluster: Mapping[str, float]) -> None:
        """Raise InvalidRequest if a fixed cluster lacks the resources for `least` replicas.

        Without this check, Ray would wait for them forever.
        """
        for name, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            needed, available = self.resources(arguments, cluster).get(name, 0), cluster.get(kind, 0.0)
            if self.least * needed > available:
                problem = f"{self.least} replicas need {needed:g} {kind}s each, and this machine has {available:g}"
                fix = "fewer --threads or replicas" if name == "num_cpus" else "fewer replicas"
                raise InvalidRequest("replicas", f"{problem}: use {fix}, or a cluster with --ray.")


def require_ray() -> None:
    """Raise MissingPackage if Ray Serve is not installed; set the variables that Ray reads when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # calls after a cluster's end must not start another one
    if find_spec("ray") is None or find_spec("ray.serve") is None:
        raise MissingPackage("replicas need Ray Serve, which is not installed: pip install 'forerun[ray]'")
