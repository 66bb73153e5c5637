"""A worker process as the benchmark sees it: it answers through pipes, and is stopped except while it answers."""

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
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Command:
    """The command that starts a worker, with its stderr in `log`; a worker without `drafts` runs in plain mode only."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    drafts: bool = True


class Worker(AskedProcess):
    """One worker, which has loaded its library when the constructor returns.

    Raises StepFailed, with the last lines of its log, if the process has ended.
    """

    def __init__(self, command: Command) -> None:
        super().__init__(command.arguments, command.log, command.environment, speaks=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.inbox: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.outbox: BinaryIO = self.process.stdout  # type: ignore[assignment]
        self.versions: dict[str, str] = self.listen()["versions"]
        self.signal(signal.SIGSTOP)

    def ask(self, mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        """Generate one answer. The worker runs until it has answered, and is stopped again."""
        message = {"mode": str(mode), "prompt_ids": list(prompt_ids), "num_tokens": num_tokens}
        with self.awake():
            with suppress(BrokenPipeError):  # the process has ended; `listen` raises StepFailed
                self.inbox.write(json.dumps(message).encode() + b"\n")
                self.inbox.flush()
            answer = Answer(**self.listen())
        if len(answer.token_ids) != num_tokens:
            raise StepFailed(f"mode {mode}: the worker returned {len(answer.token_ids)} tokens instead of {num_tokens}")
        return answer

    def idle_share(self, over_s: float) -> float:
        """The processor time that the worker uses while it runs without a question, over the elapsed time."""
        with self.awake():
            before_s = cpu_s(self.process.pid)
            time.sleep(over_s)
            return (cpu_s(self.process.pid) - before_s) / over_s

    def listen(self) -> dict[str, Any]:
        """Wait for the next message of the worker."""
        line = self.outbox.readline()
        if not line.endswith(b"\n"):
            self.close()
            raise StepFailed(f"the worker ended: exit status {self.process.returncode}\n{self.last_words()}")
        message: dict[str, Any] = json.loads(line)
        return message

    @override
    def ask_to_end(self) -> None:
        """Close the worker's input, after which the worker ends."""
        with suppress(BrokenPipeError):
            self.inbox.close()

    @override
    def close(self) -> None:
        """End the worker and close its output."""
        super().close()
        self.outbox.close()


def cpu_s(group: int) -> float:
    """Seconds of processor time that a process group has used; 0 on systems without /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
