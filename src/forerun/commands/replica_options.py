"""Options of commands whose requests several engines share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from forerun.errors import InvalidRequest
from forerun.replicas.settings import ReplicaSettings, require_ray


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options that say how many engines answer, and where they run."""

    TITLE: ClassVar[str] = "Replicas"

    replicas: Annotated[
        str,
        typer.Option(help="Engines that answer: N, or MIN:MAX by load. Ray Serve runs them; needs forerun[ray]."),
    ] = ""
    ray: Annotated[
        str,
        typer.Option(help="Ray cluster of the replicas: auto or HOST:PORT; default: a new one, of this machine alone."),
    ] = ""

    @property
    def settings(self) -> ReplicaSettings | None:
        """How many replicas are to answer, and where; None for one engine in this process."""
        if not self.replicas:
            if self.ray:
                raise InvalidRequest("ray", f"{self.ray} goes with --replicas: say how many there are to be.")
            return None
        settings = ReplicaSettings.of(self.replicas, self.ray)
        require_ray()
        return settings
