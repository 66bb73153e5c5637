"""The command: makes every server, runs what is missing of the grid, prints the table, and says what the goals come to.

This file decides options, and what names a run, so that it can go on where it was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.isa import ISAS, add_isa
from benchmarks.peers.__main__ import PRECISIONS
from benchmarks.peers.checkpoints import Material
from benchmarks.peers.machine import machine, source_digest
from benchmarks.peers.place import ROOT, Place
from benchmarks.peers.protocol import Setup
from benchmarks.serving.cells import CellFile, Load, cut_prompts
from benchmarks.serving.contenders import ENGINES, OURS, SERVERS, Places, contenders
from benchmarks.serving.race import Grid, ServingRace
from benchmarks.serving.server import ServerProcess, free_port
from benchmarks.serving.tables import different_answers, markdown, picture, rows, verdict

from forerun.machine import sources_digest
from forerun.prove.proof import jsonable
from forerun.traffic.client import require_client

CELLS_LEFT = 75  # the exit status of a run that is to be continued
MARGIN_TOKENS = 64  # of every request's place, beyond prompt and answer: room for guesses


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is. `concurrencies`, `repeats`, `peers` and `modes` may grow from one call to the next."""

    concurrencies: Sequence[int]
    repeats: int
    load: Load
    peers: Sequence[str]
    modes: Sequence[str]
    precision: str
    places: Places
    threads: int
    jobs: int
    folder: Path
    isa: str | None
    output: Path | None
    picture: Path | None
    time_limit_s: float

    @property
    def settings(self) -> dict[str, Any]:
        """What must be equal for results to be compared."""
        own = {"precision": self.precision, "threads": self.threads, "isa": self.isa}
        return own | {"load": asdict(self.load), "places": asdict(self.places)}


def arguments_parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=str(__doc__).splitlines()[0])
    peers = ",".join(name for name in ENGINES if name != OURS)
    parser.add_argument("--peers", default=peers, help='which peers, of %(default)s; "" for none')
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="requests at once (default %(default)s)")
    parser.add_argument("--speculation", default="off,auto", help="forerun's modes (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=96, help="of each prompt (default %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=64, help="of each answer (default %(default)s)")
    parser.add_argument("--per-client", type=int, default=2, help="requests of each client (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions (default %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="default %(default)s")
    parser.add_argument("--slots", type=int, default=64, help="most requests that each server runs at once")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every server (default: all cores)")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once (default %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "peers", help="where everything is kept")
    parser.add_argument("--output", type=Path, help="a .json file for all figures")
    parser.add_argument("--picture", type=Path, help="an .svg file for the plot")
    limit = f"begin no cell after so many seconds; exit status {CELLS_LEFT} where cells are left"
    parser.add_argument("--time-limit-s", type=float, default=float("inf"), help=limit)
    add_isa(parser)
    return parser


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line."""
    parser = arguments_parser()
    given = parser.parse_args(arguments)
    peers = [name for name in given.peers.split(",") if name]
    for name in peers:
        if name not in ENGINES or name == OURS:
            parser.error(f"{name!r} is not known; use {', '.join(each for each in ENGINES if each != OURS)}")
    try:
        concurrencies = [int(value) for value in given.concurrency.split(",")]
    except ValueError:
        parser.error(f"--concurrency {given.concurrency!r}: write whole numbers, as in 1,4,16")
    if min([*concurrencies, given.repeats, given.per_client, given.prompt_tokens, given.answer_tokens - 1]) < 1:
        parser.error("numbers must be at least 1, and --answer-tokens at least 2")
    return Options(
        concurrencies=concurrencies,
        repeats=given.repeats,
        load=Load(given.prompt_tokens, given.answer_tokens, given.per_client),
        peers=peers,
        modes=given.speculation.split(","),
        precision=given.precision,
        places=Places(given.slots, given.prompt_tokens + given.answer_tokens + MARGIN_TOKENS),
        threads=given.threads,
        jobs=given.jobs,
        folder=given.folder.resolve(),
        isa=given.isa,
        output=given.output,
        picture=given.picture,
        time_limit_s=given.time_limit_s,
    )


def run_name(options: Options, material: Material) -> str:
    """16 hex digits for all that must be equal for results to be compared: settings, sources, checkpoints."""
    sources = source_digest() + sources_digest(ROOT / "benchmarks" / "serving")
    words = json.dumps([options.settings, sources, str(material.target), str(material.draft)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def start(options: Options, material: Material, name: str) -> tuple[ServerProcess, Mapping[str, object]]:
    """Make a server's peer where it is not made yet, and start it. Raises StepFailed where either fails."""
    kind = SERVERS[name]
    engine = ENGINES[kind.engine]
    folder = options.folder / (f"{engine.name}-{options.isa}" if options.isa else engine.name)
    place = Place(folder, options.jobs, options.isa)
    number_format = engine.formats[options.precision]
    setup = Setup(str(material.target), str(material.draft), number_format, options.threads, str(place.folder))
    engine.make(place, setup)
    port = free_port()
    command = kind.command(place, setup, options.places, port)
    log = place.folder / f"serving-{name.replace(' ', '-')}-{number_format}.log"
    threads = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    tell(f"starting {name}")
    return ServerProcess(command, port, log, threads | dict(kind.environment)), kind.extra


def tell(text: str) -> None:
    """Progress, as it happens."""
    print(f"  {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """1 if a server failed or an answer differs, with everything else done; CELLS_LEFT if time ran out."""
    options = parse(arguments)
    require_client()
    os.environ.update(ISAS[options.isa] if options.isa else {})  # of every server
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are ended on the way out
    material = Material.make(options.folder / "checkpoints")
    file = CellFile(options.folder / "serving.jsonl", run_name(options, material))
    grid = Grid(options.concurrencies, options.repeats, contenders(options.peers, options.modes, options.precision))
    on = machine()
    prompts = cut_prompts(options.load.prompt_tokens)
    starter = partial(start, options, material)
    with ServingRace(starter, file, options.load, prompts, tell) as race:
        left = race.run(grid, options.time_limit_s)
    wanted = {key for key, _ in grid.cells()}
    cells = {key: cell for key, cell in file.cells().items() if key in wanted}
    table, num_different = rows(cells), different_answers(cells)
    print("\n" + markdown(table, race.failures))
    print("\n".join(verdict(table, num_different)))
    if options.output is not None:
        about = {"run": file.run, "machine": on, "settings": options.settings, "failures": race.failures}
        found = about | {"rows": [asdict(each) for each in table], "cells": [asdict(cell) for cell in cells.values()]}
        options.output.write_text(json.dumps(jsonable(found)), encoding="utf-8")
    if options.picture is not None and table:
        options.picture.write_text(picture(table, f"The widened pair, answers of {options.load.answer_tokens} tokens"))
    if left:
        print(f"\n{left} cells are left: give the same command again")
        return CELLS_LEFT
    return 1 if race.failures or num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
