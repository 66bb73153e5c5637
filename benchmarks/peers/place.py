"""Peers, and the place of each: a folder below `build/peers` with its environment, sources, exports and log.

This file decides how environments are made. A completed step leaves a stamp file with a key, and is not repeated for
the same key. A step that fails raises StepFailed with the last lines of its output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers.protocol import Setup
from benchmarks.processes import ROOT, StepFailed, tail

TORCH = "torch==2.13.0"  # this project's version; a plain "torch" may install gigabytes of CUDA


@dataclass(frozen=True, slots=True)
class Place:
    """One peer's folder. `jobs` compilers run at once, at the lowest priority. `isa` limits the instruction set."""

    folder: Path
    jobs: int = 2
    isa: str | None = None

    @property
    def python(self) -> str:
        """The interpreter of the peer's environment."""
        return str(self.folder / "venv" / "bin" / "python")

    def once(self, name: str, key: str, make: Callable[[], None]) -> None:
        """Call `make` unless it has succeeded before for the same `key`."""
        stamp = self.folder / f".{name}.done"
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == key:
            return
        stamp.unlink(missing_ok=True)
        make()
        stamp.write_text(key, encoding="utf-8")

    def install(self, *batches: Sequence[str]) -> None:
        """Create an environment with these requirements, with one pip call per batch, without this project's pins."""

        def make() -> None:
            self.run("environment", [sys.executable, "-m", "venv", "--clear", str(self.folder / "venv")])
            for batch in batches:
                options = ["install", "--quiet", "--disable-pip-version-check"]
                self.run(f"pip install {' '.join(batch)}", [self.python, "-m", "pip", *options, *batch])

        self.folder.mkdir(parents=True, exist_ok=True)
        self.once("venv", repr(batches), make)

    def run(self, step: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Run a command in the repository's root, with its output in the log.

        Raises StepFailed if the command fails or does not exist.
        """
        print(f"  {self.folder.name}: {step}", flush=True)
        log = self.folder / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        surroundings = os.environ | {"PYTHONPATH": str(ROOT)} | dict(env or {})
        with log.open("a+b") as file:
            first = file.seek(0, os.SEEK_END)
            try:
                code = subprocess.run(
                    ["nice", "-n", "19", *command], cwd=ROOT, env=surroundings, stdout=file, stderr=file, check=False
                ).returncode
            except OSError as error:
                raise StepFailed(f"{step}: {error}") from error
            file.seek(first)
            output = file.read().decode(errors="replace")
        if code:
            raise StepFailed(f"{step}: exit status {code}\n{tail(output)}")

    def uninstall(self, *packages: str) -> None:
        """Remove packages that others installed as requirements; this happens once."""
        command = [self.python, "-m", "pip", "uninstall", "--quiet", "--yes", *packages]
        self.once("unused", repr(packages), partial(self.run, f"pip uninstall {' '.join(packages)}", command))


class Peer(ABC):
    """How an engine is prepared and started.

    `formats` has the engine's name of the number format for each class of precision that it supports. An engine without
    `drafts` runs in plain mode only. `module` is its worker; `environment` is added to the benchmark's environment.
    """

    name: str
    formats: Mapping[str, str] = {"16-bit": "bfloat16"}
    drafts = True
    module: str
    environment: Mapping[str, str] = {}

    @abstractmethod
    def make(self, place: Place, setup: Setup) -> None:
        """Install, build and export what is still missing. Raises StepFailed if a step fails."""

    def python(self, place: Place) -> str:
        """The interpreter that runs the worker."""
        return place.python
