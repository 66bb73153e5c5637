"""The command: makes every peer, runs class after class of precision, prints tables and one line of JSON.

Decides options, which engines meet in which class, and what names a run, so that it can go on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.isa import ISAS, add_isa
from benchmarks.peers.checkpoints import Material
from benchmarks.peers.huggingface import Transformers
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.machine import bandwidth_bytes_per_s, machine, memory_bytes, source_digest
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import Forerun
from benchmarks.peers.place import ROOT, Place, StepFailed
from benchmarks.peers.protocol import MIX, Mode, Setup
from benchmarks.peers.race import Race
from benchmarks.peers.sglang import Sglang
from benchmarks.peers.state import Cell, Failure, State
from benchmarks.peers.tables import OURS, markdown, rows
from benchmarks.peers.vllm_cpu import Vllm
from benchmarks.peers.worker import Command

STOPPED = 3  # the exit status of a run that reached its time limit
PRECISIONS = ("16-bit", "8-bit", "4-bit")


class Engine(Protocol):
    """How an engine comes to be: `formats` are its own words for the classes it takes part in.

    Where it does not draft it is asked for plain answers alone.
    """

    name: str
    formats: Mapping[str, str]
    drafts: bool
    module: str  # run as a worker
    environment: Mapping[str, str]  # of the worker, beside the asker's

    def make(self, place: Place, setup: Setup) -> None:
        """Install, build and export what is not there yet; StepFailed if something cannot be made."""
        ...

    def python(self, place: Place) -> str:
        """The interpreter that runs the worker."""
        ...


ENGINES: Mapping[str, Engine] = {
    e.name: e for e in (Forerun(), Transformers(), LlamaCpp(), OpenVino(), Vllm(), Sglang())
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is; `repeats` may grow from one call to the next. It stops at `until_s` of `time.monotonic`."""

    engines: Sequence[str]
    precisions: Sequence[str]
    depths: Sequence[int]
    repeats: int
    tokens: int
    prompts: int
    threads: int
    jobs: int
    folder: Path
    isa: str | None = None
    until_s: float | None = None

    @property
    def modes(self) -> list[Mode]:
        """Plain, and each drafter to each depth."""
        return [Mode(), *(Mode(drafter, depth) for drafter in ("model", "ngram", MIX) for depth in self.depths)]


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    peers = [name for name in ENGINES if name != OURS]
    parser.add_argument("--peers", default=",".join(peers), help="which peers, of: %(default)s")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="which classes, of: %(default)s")
    parser.add_argument("--depths", default="3,5", help="tokens guessed per round (default %(default)s)")
    parser.add_argument("--repeats", type=int, help="repetitions (default 5)")
    parser.add_argument("--tokens", type=int, help="new tokens per prompt (default 128)")
    parser.add_argument("--prompts", type=int, help="how many prompts, of 3 (default: all)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every engine (default: all cores)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="where everything is kept")
    add_isa(parser)
    parser.add_argument("--time-limit", type=float, metavar="S", help="stop after so many seconds; call again to go on")
    parser.add_argument("--quick", action="store_true", help="1 repetition, 1 prompt, 16 tokens, unless told otherwise")
    given = parser.parse_args(arguments)
    until_s = time.monotonic() + given.time_limit if given.time_limit else None
    chosen, precisions = given.peers.split(","), given.precisions.split(",")
    for name, known in [*((peer, peers) for peer in chosen), *((each, PRECISIONS) for each in precisions)]:
        if name not in known:
            parser.error(f"{name!r} is not known; use {', '.join(known)}")
    return Options(
        engines=[OURS, *chosen],
        precisions=precisions,
        depths=[int(depth) for depth in given.depths.split(",")],
        repeats=given.repeats or (1 if given.quick else 5),
        tokens=given.tokens or (16 if given.quick else 128),
        prompts=given.prompts or (1 if given.quick else 3),
        threads=given.threads,
        jobs=given.jobs,
        folder=given.folder.resolve(),
        isa=given.isa,
        until_s=until_s,
    )


def run_name(options: Options, material: Material) -> str:
    """16 hex digits for all that must be equal for results to be compared: settings, sources, checkpoints, prompts."""
    settings = [options.engines, options.depths, options.tokens, options.prompts, options.threads, options.isa]
    words = json.dumps([*settings, source_digest(), str(material.target), str(material.draft), material.prompts])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def commands(options: Options, material: Material, precision: str) -> tuple[dict[str, Command], list[Failure]]:
    """How to start the class's workers, with everything made that they need; and what could not be made."""
    found, failures = {}, []
    for name in options.engines:
        engine = ENGINES[name]
        if precision not in engine.formats:
            continue
        folder = options.folder / (f"{name}-{options.isa}" if options.isa else name)
        place = Place(folder, options.jobs, options.isa)
        number_format = engine.formats[precision]
        setup = Setup(str(material.target), str(material.draft), number_format, options.threads, str(place.folder))
        command = made(engine, place, setup)
        if isinstance(command, Failure):
            failures.append(command)
        else:
            found[name] = command
    return found, failures


def made(engine: Engine, place: Place, setup: Setup) -> Command | Failure:
    """Everything made that an engine's worker needs, and how to start it; or what could not be made."""
    try:
        engine.make(place, setup)
    except StepFailed as failed:
        print(f"  {engine.name} FAILED: {failed}", flush=True)
        return Failure(engine.name, "all", str(failed))
    environment = {"OMP_NUM_THREADS": str(setup.threads), "PYTHONPATH": str(ROOT)} | dict(engine.environment)
    arguments = [engine.python(place), "-m", engine.module, json.dumps(asdict(setup))]
    return Command(arguments, place.folder / f"worker-{setup.format}.log", environment, engine.drafts)


def measure(options: Options, material: Material, precision: str, state: State) -> bool:
    """All repetitions of a class that are not there yet; False if the time limit came first.

    With a limit, engines start and modes are warmed up when they are first asked, so that a call that goes on with
    a few answers loads no more than it asks.
    """
    missing = sorted(set(range(options.repeats)) - set(state.repetitions(precision)))
    if not missing:
        print(f"{precision}: all {options.repeats} repetitions are there already", flush=True)
        return True
    print(f"{precision}: {len(missing)} of {options.repeats} repetitions to do", flush=True)
    ready, failures = commands(options, material, precision)
    begun = {number: state.begun(precision, number) for number in missing}
    before = state.about(precision) if any(begun.values()) else {}
    failures += [Failure(**each) for each in before.get("failures", ()) if Failure(**each) not in failures]
    with Race(ready, options.modes, material.prompts, options.prompts, tell, failures) as race:
        race.versions.update(before.get("versions", {}))
        if options.until_s is None:
            race.start_all()
            race.warm_up(check_texts=precision == "16-bit")
        for number in missing:
            notes = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s(options.threads)}

            def keep(cell: Cell, number: int = number) -> None:
                state.keep(precision, number, [cell])

            lengths = [options.tokens] * options.prompts
            whole = race.repetition(number, lengths, begun[number], keep, options.until_s)
            notes["memory_left_bytes"] = memory_bytes("MemAvailable")
            state.note(precision, race.about | notes)
            if not whole:
                return False
            state.close(precision, number)
    return True


def tell(text: str) -> None:
    """Progress, as it happens."""
    print(f"  {text}", flush=True)


def report(options: Options, state: State) -> dict[str, Any]:
    """Print the tables; the same, and everything behind them, as an object."""
    classes = {}
    for precision in options.precisions:
        repetitions = {i: cells for i, cells in state.repetitions(precision).items() if i < options.repeats}
        about = state.about(precision)
        table = rows(repetitions)
        failures = [Failure(**failed) for failed in about.get("failures", ())]
        title = f"{precision}: {len(repetitions)} repetitions"
        print("\n" + markdown(title, table, failures))
        cells = {i: [asdict(cell) for cell in found] for i, found in repetitions.items()}
        classes[precision] = about | {"rows": [asdict(row) for row in table], "cells": cells}
    return classes


def main(arguments: Sequence[str]) -> int:
    """1 if something failed, with everything else done; STOPPED if the time limit came first."""
    options = parse(arguments)
    os.environ.update(ISAS[options.isa] if options.isa else {})  # of every worker
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # workers are ended on the way out
    material = Material.make(options.folder / "checkpoints")
    state = State(options.folder / "state.jsonl", run_name(options, material))
    on = machine()
    for precision in options.precisions:
        if not measure(options, material, precision, state):
            print(f"{precision}: the time is over; the same command goes on", flush=True)
            return STOPPED
    classes = report(options, state)
    settings = asdict(options) | {
        "folder": str(options.folder),
        "until_s": None,
        "prompt_tokens": [len(p) for p in material.prompts],
    }
    print(json.dumps({"run": state.run, "machine": on, "settings": settings, "classes": classes}))
    return 1 if any(found.get("failures") for found in classes.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
