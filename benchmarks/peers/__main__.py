"""The command: prepares every peer, runs the classes of precision one by one, prints tables and one line of JSON.

This file decides the options, which engines are compared in which class, and the name of a run, by which an interrupted
run is found and continued.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.isa import ISAS, isa_option
from benchmarks.options import option, options_of
from benchmarks.peers.checkpoints import Material
from benchmarks.peers.huggingface import Transformers
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.machine import machine, source_digest
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import Forerun
from benchmarks.peers.place import Peer, Place
from benchmarks.peers.protocol import MIX, Mode, Setup
from benchmarks.peers.race import Race
from benchmarks.peers.sglang import Sglang
from benchmarks.peers.state import Failure, State
from benchmarks.peers.tables import OURS, markdown, rows
from benchmarks.peers.vllm_cpu import Vllm
from benchmarks.peers.worker import Command
from benchmarks.processes import ROOT, StepFailed

STOPPED = 3  # the exit status of a run that reached its time limit
PRECISIONS = ("16-bit", "8-bit", "4-bit")


ENGINES: Mapping[str, Peer] = {e.name: e for e in (Forerun(), Transformers(), LlamaCpp(), OpenVino(), Vllm(), Sglang())}


class MakingOptions(Protocol):
    """The options that determine how peers are prepared: folder, instruction set, compilers, and threads."""

    threads: int
    jobs: int
    folder: Path
    isa: str | None


@dataclass(slots=True)
class Options:
    """The options of a run; `repeats` may grow from one call to the next."""

    peers: Sequence[str] = option(",".join(name for name in ENGINES if name != OURS), "which peers, of: %(default)s")
    precisions: Sequence[str] = option(",".join(PRECISIONS), "which classes, of: %(default)s")
    depths: Sequence[int] = option("3,5", "draft tokens per round (default %(default)s)")
    repeats: int = option(None, "repetitions (default 5)")
    tokens: int = option(None, "new tokens per prompt (default 128)")
    prompts: int = option(None, "how many prompts, of 3 (default: all)")
    threads: int = option(os.cpu_count(), "threads of every engine (default: all cores)")
    jobs: int = option(2, "compilers at once (default %(default)s)")
    folder: Path = option(ROOT / "build" / "peers", "folder of environments, checkpoints and answers")
    isa: str | None = isa_option()
    time_limit: float | None = option(None, "stop after S seconds; the same command continues", metavar="S")
    quick: bool = option(False, "defaults of 1 repetition, 1 prompt and 16 tokens")

    def __post_init__(self) -> None:
        require_known(self.peers, [name for name in ENGINES if name != OURS])
        require_known(self.precisions, PRECISIONS)
        usual = (1, 16, 1) if self.quick else (5, 128, 3)
        options = self.repeats, self.tokens, self.prompts
        self.repeats, self.tokens, self.prompts = (each or other for each, other in zip(options, usual, strict=True))
        self.folder = self.folder.resolve()

    @property
    def engines(self) -> list[str]:
        """forerun and the peers."""
        return [OURS, *self.peers]

    @property
    def modes(self) -> list[Mode]:
        """Plain decoding, and each drafter at each depth."""
        return [Mode(), *(Mode(drafter, depth) for drafter in ("model", "ngram", MIX) for depth in self.depths)]


def require_known(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError if a name is not among `known`."""
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not known; use {', '.join(known)}")


def run_name(options: Options, material: Material) -> str:
    """16 hex digits that depend on settings, sources, checkpoints and prompts; only equal runs are comparable."""
    settings = [options.engines, options.depths, options.tokens, options.prompts, options.threads, options.isa]
    words = json.dumps([*settings, source_digest(), str(material.target), str(material.draft), material.prompts])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def commands(options: Options, material: Material, precision: str) -> tuple[dict[str, Command], list[Failure]]:
    """Prepare the engines of a class: the commands that start their workers, and the failures."""
    peers = [ENGINES[name] for name in options.engines if precision in ENGINES[name].formats]
    return all_made((peer, *setup_of(options, peer, material, precision)) for peer in peers)


def setup_of(options: MakingOptions, peer: Peer, material: Material, precision: str) -> tuple[Place, Setup]:
    """The place of a peer, one for each instruction set, and the setup of its worker."""
    place = Place(options.folder / "-".join(filter(None, (peer.name, options.isa))), options.jobs, options.isa)
    number_format, folder = peer.formats[precision], str(place.folder)
    return place, Setup(str(material.target), str(material.draft), number_format, options.threads, folder)


def all_made(wanted: Iterable[tuple[Peer, Place, Setup]]) -> tuple[dict[str, Command], list[Failure]]:
    """Prepare these peers: the commands that start their workers, and the failures."""
    each = {peer.name: made(peer, place, setup) for peer, place, setup in wanted}
    ready = {name: command for name, command in each.items() if isinstance(command, Command)}
    return ready, [failure for failure in each.values() if isinstance(failure, Failure)]


def made(engine: Peer, place: Place, setup: Setup) -> Command | Failure:
    """Install, build and export what an engine's worker needs: the command that starts it, or the failure."""
    try:
        engine.make(place, setup)
    except StepFailed as failed:
        print(f"  {engine.name} FAILED: {failed}", flush=True)
        return Failure(engine.name, "all", str(failed))
    environment = {"OMP_NUM_THREADS": str(setup.threads), "PYTHONPATH": str(ROOT)} | dict(engine.environment)
    arguments = [engine.python(place), "-m", engine.module, json.dumps(asdict(setup))]
    return Command(arguments, place.folder / f"worker-{setup.format}.log", environment, engine.drafts)


def measure(options: Options, material: Material, precision: str, state: State, until_s: float | None) -> bool:
    """Run the missing repetitions of a class; False if the time limit ended this early.

    With a time limit, engines start and modes are warmed up at their first answer, so that a call that adds few answers
    loads only the models that it needs.
    """
    missing = state.missing(precision, options.repeats)
    if not missing:
        print(f"{precision}: all {options.repeats} repetitions are complete already", flush=True)
        return True
    print(f"{precision}: {len(missing)} of {options.repeats} repetitions are missing", flush=True)
    ready, failures = commands(options, material, precision)
    race = Race(ready, options.modes, material.prompts, options.prompts, print_progress, failures)
    lengths, check_texts = [options.tokens] * options.prompts, None if until_s else precision == "16-bit"
    return race.measure(state, precision, missing, lengths, options.threads, until_s, check_texts)


def print_progress(text: str) -> None:
    """Print a line of progress at once."""
    print(f"  {text}", flush=True)


def report(options: Options, state: State) -> dict[str, Any]:
    """Print the tables, and return their rows and the answers behind them as JSON values."""
    classes = {}
    for precision in options.precisions:
        repetitions = {i: cells for i, cells in state.repetitions(precision).items() if i < options.repeats}
        about = state.about(precision)
        table = rows(repetitions)
        failures = [Failure(**failed) for failed in about.get("failures", ())]
        title = f"{precision}: {len(repetitions)} repetitions"
        print("\n" + markdown(title, table, failures))
        cells = {i: [asdict(cell) for cell in answers] for i, answers in repetitions.items()}
        classes[precision] = about | {"rows": [asdict(row) for row in table], "cells": cells}
    return classes


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 if an engine or mode failed, STOPPED if the time limit ended the run, otherwise 0."""
    options = options_of(Options, arguments)
    until_s = time.monotonic() + options.time_limit if options.time_limit else None
    os.environ.update(ISAS[options.isa] if options.isa else {})  # workers inherit it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the race ends its workers
    material = Material.make(options.folder / "checkpoints")
    state = State(options.folder / "state.jsonl", run_name(options, material))
    on = machine()
    for precision in options.precisions:
        if not measure(options, material, precision, state, until_s):
            print(f"{precision}: stopped by --time-limit; the same command continues", flush=True)
            return STOPPED
    classes = report(options, state)
    settings = asdict(options) | {"folder": str(options.folder), "engines": options.engines}
    settings["prompt_tokens"] = [len(prompt) for prompt in material.prompts]
    print(json.dumps({"run": state.run, "machine": on, "settings": settings, "classes": classes}))
    return 1 if any(found.get("failures") for found in classes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
