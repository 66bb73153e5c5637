"""The command: prepares the servers, measures the missing cells, prints the table, and compares it with the goals.

This file decides the options, and the name of a run, by which an interrupted run is found and continued.
"""

from __future__ import annotations

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

from benchmarks.isa import ISAS, isa_option
from benchmarks.options import option, options_of
from benchmarks.peers.__main__ import PRECISIONS, print_progress, require_known, setup_of
from benchmarks.peers.checkpoints import Material
from benchmarks.peers.machine import machine, source_digest
from benchmarks.processes import ROOT, ServerProcess, free_port
from benchmarks.serving.cells import CellFile, Load, cut_prompts
from benchmarks.serving.contenders import ENGINES, OURS, SERVERS, Places, contenders
from benchmarks.serving.race import Grid, ServingRace
from benchmarks.serving.tables import different_answers, markdown, picture, rows, verdict

from forerun.report import json_object
from forerun.traffic.client import require_client

PEERS = tuple(name for name in ENGINES if name != OURS)
CELLS_LEFT = 75  # the exit status if cells are left for another call
MARGIN_TOKENS = 64  # of every request's context, in addition to prompt and answer: room for draft tokens


@dataclass(slots=True)
class Options:
    """The options of a run; `concurrency`, `repeats`, `peers` and `speculation` may grow from one call to the next."""

    peers: Sequence[str] = option(",".join(PEERS), 'which peers, of %(default)s; "" for none')
    concurrency: Sequence[int] = option("1,2,4,8,16,32,64", "requests at once (default %(default)s)")
    speculation: Sequence[str] = option("off,auto", "forerun's modes (default %(default)s)")
    prompt_tokens: int = option(96, "tokens of each prompt (default %(default)s)")
    answer_tokens: int = option(64, "tokens of each answer (default %(default)s)")
    per_client: int = option(2, "requests of each client (default %(default)s)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    precision: str = option(PRECISIONS[0], "class of precision (default %(default)s)", choices=PRECISIONS)
    slots: int = option(64, "maximum requests that each server runs at once (default %(default)s)")
    threads: int = option(os.cpu_count(), "threads of every server (default: all cores)")
    jobs: int = option(2, "compilers at once (default %(default)s)")
    folder: Path = option(ROOT / "build" / "peers", "folder of environments, checkpoints and cells")
    output: Path | None = option(None, "a .json file for all figures")
    picture: Path | None = option(None, "an .svg file for the plot")
    time_limit_s: float = option(
        float("inf"), f"start no cell after this number of seconds; the exit status is {CELLS_LEFT} if cells are left"
    )
    isa: str | None = isa_option()

    def __post_init__(self) -> None:
        require_known(self.peers, PEERS)
        if min([*self.concurrency, self.repeats, self.per_client, self.prompt_tokens, self.answer_tokens - 1]) < 1:
            raise ValueError("numbers must be at least 1, and --answer-tokens at least 2")
        self.folder = self.folder.resolve()

    @property
    def load(self) -> Load:
        """The requests that every server gets."""
        return Load(self.prompt_tokens, self.answer_tokens, self.per_client)

    @property
    def places(self) -> Places:
        """The batch size and context length of every server."""
        return Places(self.slots, self.prompt_tokens + self.answer_tokens + MARGIN_TOKENS)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must be equal in comparable results."""
        numbers = {"precision": self.precision, "threads": self.threads, "isa": self.isa}
        return numbers | {"load": asdict(self.load), "places": asdict(self.places)}


def run_name(options: Options, material: Material) -> str:
    """16 hex digits that depend on settings, sources and checkpoints; only results of equal runs are comparable."""
    sources = source_digest() + source_digest("serving")
    words = json.dumps([options.settings, sources, str(material.target), str(material.draft)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def start(options: Options, material: Material, name: str) -> tuple[ServerProcess, Mapping[str, object]]:
    """Prepare a server's peer if necessary, and start the server, stopped. Raises StepFailed if a step fails.

    Returns the process, and the fields that this server's request bodies need in addition.
    """
    kind = SERVERS[name]
    place, setup = setup_of(options, ENGINES[kind.engine], material, options.precision)
    ENGINES[kind.engine].make(place, setup)
    port = free_port()
    command = kind.command(place, setup, options.places, port)
    log = place.folder / f"serving-{name.replace(' ', '-')}-{setup.format}.log"
    threads = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(ROOT)}
    print_progress(f"starting {name}")
    server = ServerProcess(command, port, log, threads | dict(kind.environment))
    server.signal(signal.SIGSTOP)  # until its first cell
    return server, kind.extra


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 if a server failed or answers differ, CELLS_LEFT at the time limit, otherwise 0."""
    options = options_of(Options, arguments)
    require_client()
    os.environ.update(ISAS[options.isa] if options.isa else {})  # servers inherit it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the race ends its servers
    material = Material.make(options.folder / "checkpoints")
    file = CellFile(options.folder / "serving.jsonl", run_name(options, material))
    grid = Grid(options.concurrency, options.repeats, contenders(options.peers, options.speculation, options.precision))
    on = machine()
    prompts = cut_prompts(options.load.prompt_tokens)
    starter = partial(start, options, material)
    with ServingRace(starter, file, options.load, prompts, print_progress) as race:
        left = race.run(grid, options.time_limit_s)
    wanted = {key for key, _ in grid.cells()}
    cells = {key: cell for key, cell in file.cells().items() if key in wanted}
    table, num_different = rows(cells), different_answers(cells)
    print("\n" + markdown(table, race.failures))
    print("\n".join(verdict(table, num_different)))
    if options.output is not None:
        about = {"run": file.run, "machine": on, "settings": options.settings, "failures": race.failures}
        content = about | {"rows": [asdict(each) for each in table], "cells": [asdict(cell) for cell in cells.values()]}
        options.output.write_text(json.dumps(json_object(**content)), encoding="utf-8")
    if options.picture is not None and table:
        options.picture.write_text(picture(table, f"The widened pair, answers of {options.load.answer_tokens} tokens"))
    if left:
        print(f"\n{left} cells are left; the same command continues")
        return CELLS_LEFT
    return 1 if race.failures or num_different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
