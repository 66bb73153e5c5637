"""Runs one class of precision: the workers of all engines answer in turns, and failed modes are reported.

This file decides the order of answers. In a repetition every mode of every engine answers every prompt. Engines
alternate, and each prompt begins with the next entry of the order. Every mode is warmed up before it is measured, and
loads its models then; without a time limit all modes are warmed up first. At least one plain 16-bit answer of an engine
must begin like forerun's, otherwise its export is considered wrong; other answers may differ, since other arithmetic
may decide near ties differently. If a worker dies, the mode that it was running has failed, and the worker is started
again for the other modes.
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
LEAST_EQUAL = 8  # equal leading tokens on the best prompt; with thousands of tokens this is no coincidence
PLAIN = Mode()
IDLE_S = 0.5
Entry = tuple[str, Mode]  # engine, mode


def circle(engines: Sequence[str], modes: Sequence[Mode], plain_only: Container[str] = ()) -> list[Entry]:
    """Every engine with every mode that it has; if there are several engines, neighbours are different engines."""
    return [
        (engine, mode)
        for mode in modes
        for engine in engines
        if (not mode.only_ours or engine == OURS) and (mode == PLAIN or engine not in plain_only)
    ]


@dataclass(slots=True)
class Race:
    """The workers of one class of precision; a context manager that ends them."""

    commands: Mapping[str, Command]
    modes: Sequence[Mode]
    prompts: Sequence[Sequence[int]]
    num_measured: int  # prompts that are measured, the first of `prompts`; all of them are compared in the warm-up
    say: Callable[[str], None]
    failures: list[Failure] = field(default_factory=list)
    left_out: Container[Entry] = ()
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)
    equal: dict[str, list[int]] = field(default_factory=dict)  # equal leading tokens of warm-ups, by prompt
    entries: list[Entry] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    warm: set[Entry] = field(default_factory=set)  # entries that have answered since their worker was started
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Race:
        failed = {(failure.engine, failure.mode) for failure in self.failures}
        self.entries = [(e, mode) for e, mode in self.circle() if not failed & {(e, "all"), (e, str(mode))}]
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def circle(self) -> list[Entry]:
        """Every engine of this race with every mode that it has, without the entries in `left_out`."""
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
        """Run the `missing` repetitions and store each answer at once; False if `until_s` ended this early.

        Unless `check_texts` is None, every mode is warmed up first; if it is true, the answers are compared.
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

                complete = self.repetition(number, num_tokens, begun[number], keep, until_s)
                state.note(kind, self.about | notes | {"memory_left_bytes": available_bytes()})
                if not complete:
                    return False
                state.close(kind, number)
        return True

    @property
    def about(self) -> dict[str, Any]:
        """The facts about a race that are stored next to its answers."""
        return {
            "versions": self.versions,
            "idle_cpu_share": self.idle,
            "equal_in_warm_up": self.equal,
            "failures": [asdict(failed) for failed in self.failures],
        }

    def start_all(self) -> None:
        """Start every worker now rather than at its first answer."""
        for engine in self.commands:
            if any(entry[0] == engine for entry in self.entries):
                self.start(engine)

    def start(self, engine: str) -> None:
        """Start a worker; if it fails to start, all modes of the engine have failed."""
        try:
            self.workers[engine] = Worker(self.commands[engine])
        except StepFailed as failed:
            self.leave(engine, None, str(failed))
            return
        self.stack.callback(self.workers[engine].close)
        self.versions[engine] = self.workers[engine].versions

    def leave(self, engine: str, mode: Mode | None, reason: str) -> None:
        """Record that a mode, or with None all modes of an engine, has failed, and remove it from the entries."""
        name = "all" if mode is None else str(mode)
        self.failures.append(Failure(engine, name, reason))
        self.entries = [entry for entry in self.entries if entry[0] != engine or mode not in (None, entry[1])]
        self.say(f"{engine} {name} FAILED: {reason.splitlines()[0]}")

    def ask(self, engine: str, mode: Mode, prompt: Sequence[int], num_tokens: int) -> Answer | None:
        """One answer, or None if the mode fails; a failed mode is removed. Starts the worker if it does not run."""
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
        """Every mode answers the first prompt, and plain modes all prompts, whose answers are compared if requested."""
        plain: dict[str, list[Sequence[int]]] = {}
        for engine, mode in list(self.entries):
            for prompt in self.prompts if mode == PLAIN else self.prompts[:1]:
                answer = self.warm_up_one(engine, mode, prompt)
                if answer is None:
                    break
                if mode == PLAIN:
                    plain.setdefault(engine, []).append(answer.token_ids)
        for engine, texts in plain.items():
            counts = [equal_tokens(*pair) for pair in zip(texts, plain.get(OURS, texts), strict=False)]
            self.equal[engine] = counts
            if check_texts and max(counts) < LEAST_EQUAL:
                self.leave(engine, None, f"its texts differ from forerun's after {counts} tokens: a wrong export?")
        for engine, worker in self.workers.items():
            self.idle[engine] = worker.idle_share(IDLE_S)

    def warm_up_one(self, engine: str, mode: Mode, prompt: Sequence[int]) -> Answer | None:
        """A short answer that is not measured; the worker loads what the mode needs before it."""
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
        """Let every mode of every engine answer every measured prompt; False if `until_s` ended this early.

        Answers in `begun` exist and are skipped. `num_tokens` are the lengths of answers by prompt. `keep` receives
        each answer. No answer begins after `until_s`, a time of `time.monotonic`, except the first, so that a command
        that is repeated often enough completes the run. A mode that is not warm is warmed up before its answer.
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
