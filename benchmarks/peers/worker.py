"""A worker, seen from the process that asks it: it answers by its pipes, and computes only while it has a question."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.peers.protocol import Answer, Mode
from benchmarks.processes import AskedProcess, StepFailed


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a worker; its stderr goes to `log`. Unless it `drafts` it is asked for plain answers alone."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    drafts: bool = True


class Worker(AskedProcess):
    """One worker, ready to be asked once made. Raises StepFailed, with its last words, whenever it is found dead."""

    def __init__(self, command: Command) -> None:
        super().__init__(command.arguments, command.log, command.environment, speaks=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.inbox: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.outbox: BinaryIO = self.process.stdout  # type: ignore[assignment]
        self.versions: dict[str, str] = self.listen()["versions"]
        self.signal(signal.SIGSTOP)

    def ask(self, mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        """One generation. The worker runs from here to its answer, and then is stopped."""
        message = {"mode": str(mode), "prompt_ids": list(prompt_ids), "num_tokens": num_tokens}
        with self.awake():
            with suppress(BrokenPipeError):  # it is dead, as listening will find
                self.inbox.write(json.dumps(message).encode() + b"\n")
                self.inbox.flush()
            answer = Answer(**self.listen())
        if len(answer.token_ids) != num_tokens:
            raise StepFailed(f"{mode}: {len(answer.token_ids)} tokens where {num_tokens} were asked for")
        return answer

    def idle_share(self, over_s: float) -> float:
        """The processors' time that it takes while it runs and nobody asks, over the time that passes."""
        with self.awake():
            before_s = cpu_s(self.process.pid)
            time.sleep(over_s)
            return (cpu_s(self.process.pid) - before_s) / over_s

    def listen(self) -> dict[str, Any]:
        """Its next line."""
        line = self.outbox.readline()
        if not line.endswith(b"\n"):
            self.close()
            raise StepFailed(f"the worker ended: exit status {self.process.returncode}\n{self.last_words()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask_to_end(self) -> None:
        """End its input, after which it ends by itself."""
        with suppress(BrokenPipeError):
            self.inbox.close()

    def close(self) -> None:
        """End it."""
        super().close()
        self.outbox.close()


def cpu_s(group: int) -> float:
    """Seconds of processor time that a process group has taken; 0 where the system keeps no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
