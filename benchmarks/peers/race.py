"""One class of precision: all engines' workers up, everything asked in turns, what fails noted and left behind.

This file decides who is asked when. A repetition asks every mode of every engine for every prompt; engines alternate,
and whoever is first moves on by one from prompt to prompt. Every mode is warmed up before it counts, which is when it
loads: all of them first, unless the run has a limit of time. At least one plain 16-bit text must begin as forerun's
does, or the export is wrong; not all, since near ties may be decided differently in other arithmetic. A dead worker is
started again for the modes that have not failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.machine import bandwidth_bytes_per_s
from benchmarks.peers.protocol import Answer, Mode
from benchmarks.peers.state import Cell, Failure, State
from benchmarks.peers.tables import OURS, equal_tokens
from benchmarks.peers.worker import Command, Worker
from benchmarks.processes import StepFailed

from forerun.bench.plan import rotated
from forerun.machine import available_bytes

WARMUP_TOKENS = 12
LEAST_EQUAL = 8  # leading tokens, on the prompt where they are most: no accident in a vocabulary of thousands
PLAIN = Mode()
IDLE_S = 0.5
Entry = tuple[str, Mode]  # engine, mode


def circle(engines: Sequence[str], modes: Sequence[Mode], plain_only: Container[str] = ()) -> list[Entry]:
    """All engines in all modes that they have; neighbours are different engines where there are several."""
    return [
        (engine, mode)
        for mode in modes
        for engine in engines
        if (not mode.only_ours or engine == OURS) and (mode == PLAIN or engine not in plain_only)
    ]


@dataclass(slots=True)
class Race:
    """The workers of one class. To be used as a context, which ends them."""

    commands: Mapping[str, Command]
    modes: Sequence[Mode]
    prompts: Sequence[Sequence[int]]
    num_measured: int  # prompts, of all that are looked at
    say: Callable[[str], None]
    failures: list[Failure] = field(default_factory=list)
    left_out: Container[Entry] = ()
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    equal: dict[str, list[int]] = field(default_factory=dict)  # leading tokens of warm-ups, by prompt
    entries: list[Entry] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    warm: set[Entry] = field(default_factory=set)  # what has answered since its worker was started
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Race:
        out = {(failed.engine, failed.mode) for failed in self.failures}
        everybody = self.circle()
        self.entries = [(e, mode) for e, mode in everybody if not out & {(e, "all"), (e, str(mode))}]
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def circle(self) -> list[Entry]:
        """All of this race's engines in all modes that they have, but for what is left out."""
        plain_only = [engine for engine, command in self.commands.items() if not command.drafts]
        return [e for e in circle(list(self.commands), self.modes, plain_only) if e not in self.left_out]

    def measure(
        self,
        state: State,
        kind: str,
        missing: Sequence[int],
        num_tokens: Sequence[int],
        threads: int,
        until_s: float | None = None,
        check_texts: bool | None = None,
    ) -> bool:
        """The repetitions that are missing, all kept as they come; False if `until_s` came before the last of them.

        Unless `check_texts` is None, every mode is warmed up first, and texts are compared if it says so.
        """
        begun = {number: state.begun(kind, number) for number in missing}
        before = state.about(kind) if any(begun.values()) else {}
        self.failures += [out for each in before.get("failures", ()) if (out := Failure(**each)) not in self.failures]
        self.versions.update(before.get("versions", {}))
        with self:
            if check_texts is not None:
                self.start_all()
                self.warm_up(check_texts)
            for number in missing:
                notes = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s(threads)}

                def keep(cell: Cell, number: int = number) -> None:
                    state.keep(kind, number, [cell])

                whole = self.repetition(number, num_tokens, begun[number], keep, until_s)
                state.note(kind, self.about | notes | {"memory_left_bytes": available_bytes()})
                if not whole:
                    return False
                state.close(kind, number)
        return True

    @property
    def about(self) -> dict[str, Any]:
        """What to keep of a race beside its times."""
        return {
            "versions": self.versions,
            "idle_cpu_share": self.idle,
            "equal_in_warm_up": self.equal,
            "failures": [asdict(failed) for failed in self.failures],
        }

    def start_all(self) -> None:
        """Start every worker now, and not when it is first asked."""
        for engine in self.commands:
            if any(entry[0] == engine for entry in self.entries):
                self.start(engine)

    def start(self, engine: str) -> None:
        """Start a worker; where it does not come up, the engine leaves the race."""
        try:
            self.workers[engine] = Worker(self.commands[engine])
        except StepFailed as failed:
            self.leave(engine, None, str(failed))
            return
        self.stack.callback(self.workers[engine].close)
        self.versions[engine] = self.workers[engine].versions

    def leave(self, engine: str, mode: Mode | None, reason: str) -> None:
        """An engine, or one of its modes, is out."""
        name = "all" if mode is None else str(mode)
        self.failures.append(Failure(engine, name, reason))
        self.entries = [entry for entry in self.entries if entry[0] != engine or mode not in (None, entry[1])]
        self.say(f"{engine} {name} FAILED: {reason.splitlines()[0]}")

    def ask(self, engine: str, mode: Mode, prompt: Sequence[int], num_tokens: int) -> Answer | None:
        """One answer; None if the mode has failed, which takes it out of the race. Starts the worker if need be."""
        if engine not in self.workers:
            self.start(engine)
        if engine not in self.workers:
            return None
        try:
            return self.workers[engine].ask(mode, prompt, num_tokens)
        except StepFailed as failed:
            self.workers.pop(engine).close()
            self.warm = {entry for entry in self.warm if entry[0] != engine}
            self.leave(engine, mode, str(failed))
        return None

    def warm_up(self, check_texts: bool) -> None:
        """Every mode answers the first prompt, and plain ones all prompts; then what was said is compared if asked."""
        plain: dict[str, list[Sequence[int]]] = {}
        for engine, mode in list(self.entries):
            for prompt in self.prompts if mode == PLAIN else self.prompts[:1]:
                answer = self.warm_up_one(engine, mode, prompt)
                if answer is None:
                    break
                if mode == PLAIN:
                    plain.setdefault(engine, []).append(answer.token_ids)
        for engine, said in plain.items():
            counts = [equal_tokens(*pair) for pair in zip(said, plain.get(OURS, said), strict=False)]
            self.equal[engine] = counts
            if check_texts and max(counts) < LEAST_EQUAL:
                self.leave(engine, None, f"its texts leave forerun's after {counts} tokens: a wrong export?")
        for engine, worker in self.workers.items():
            self.idle[engine] = worker.idle_share(IDLE_S)

    def warm_up_one(self, engine: str, mode: Mode, prompt: Sequence[int]) -> Answer | None:
        """A short answer that counts for nothing, after whatever has to be loaded for it."""
        if (engine, mode) not in self.entries:
            return None
        started_s = time.monotonic()
        answer = self.ask(engine, mode, prompt, WARMUP_TOKENS)
        if answer is not None:
            self.warm.add((engine, mode))
        self.say(f"warm-up {engine} {mode}: {time.monotonic() - started_s:.1f} s")
        return answer

    def repetition(
        self,
        number: int,
        num_tokens: Sequence[int],
        begun: Sequence[Cell] = (),
        keep: Callable[[Cell], None] = lambda cell: None,
        until_s: float | None = None,
    ) -> bool:
        """Every mode of every engine, every prompt that is measured, but for what is `begun`; False if not all is done.

        `num_tokens` are those of the prompts' answers. `keep` is told of each answer. No answer begins after `until_s`
        on the clock of `time.monotonic`, but one does in any case, so that a run that is called again and again ends.
        What is not warm is warmed up before its answer.
        """
        done = {(cell.engine, cell.mode, cell.prompt) for cell in begun}
        num_asked = 0
        order = self.circle()
        for i, prompt in enumerate(self.prompts[: self.num_measured]):
            for engine, mode in rotated(order, number * self.num_measured + i):
                if (engine, mode) not in self.entries or (engine, str(mode), i) in done:
                    continue
                if num_asked and until_s is not None and time.monotonic() > until_s:
                    return False
                num_asked += 1
                if (engine, mode) not in self.warm and self.warm_up_one(engine, mode, self.prompts[0]) is None:
                    continue
                answer = self.ask(engine, mode, prompt, num_tokens[i])
                if answer is not None:
                    keep(Cell(engine, str(mode), i, answer))
                    speed = answer.num_decoded / answer.decode_s if answer.decode_s else 0.0
                    self.say(f"repetition {number + 1}, prompt {i + 1}, {engine} {mode}: {speed:.1f} tokens/s")
        return True
