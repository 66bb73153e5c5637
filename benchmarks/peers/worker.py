"""A worker, seen from the process that asks it: a process that computes only while it has a question.

Workers that are not asked are stopped by the system (SIGSTOP), so that no engine's idle threads take time from
another's, whatever they do while they wait. Workers stay in the asker's session, each in a process group of its own:
if the asker is killed, the system continues the stopped groups and ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from benchmarks.peers.place import ROOT, StepFailed, tail
from benchmarks.peers.protocol import Answer, Mode

LOG_BYTES = 1 << 16  # of a worker's last words
CLOSE_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a worker; its stderr goes to `log`. Unless it `drafts` it is asked for plain answers alone."""

    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    drafts: bool = True


class Worker:
    """One worker, ready to be asked once made. Raises StepFailed, with its last words, whenever it is found dead."""

    def __init__(self, command: Command) -> None:
        self.log = command.log
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command.arguments,
                cwd=ROOT,
                env=os.environ | dict(command.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.inbox: BinaryIO = self.process.stdin  # type: ignore[assignment]
        self.outbox: BinaryIO = self.process.stdout  # type: ignore[assignment]
        self.versions: dict[str, str] = self.listen()["versions"]
        self.signal(signal.SIGSTOP)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        """One generation. The worker runs from here to its answer, and then is stopped."""
        message = {"mode": str(mode), "prompt_ids": list(prompt_ids), "num_tokens": num_tokens}
        self.signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # it is dead, as listening will find
            self.inbox.write(json.dumps(message).encode() + b"\n")
            self.inbox.flush()
        answer = Answer(**self.listen())
        if len(answer.token_ids) != num_tokens:
            raise StepFailed(f"{mode}: {len(answer.token_ids)} tokens where {num_tokens} were asked for")
        self.signal(signal.SIGSTOP)
        return answer

    def idle_share(self, over_s: float) -> float:
        """The processors' time that it takes while it runs and nobody asks, over the time that passes."""
        self.signal(signal.SIGCONT)
        before_s = cpu_s(self.process.pid)
        time.sleep(over_s)
        spent_s = cpu_s(self.process.pid) - before_s
        self.signal(signal.SIGSTOP)
        return spent_s / over_s

    def listen(self) -> dict[str, Any]:
        """Its next line."""
        line = self.outbox.readline()
        if not line.endswith(b"\n"):
            self.close()
            said = self.log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
            raise StepFailed(f"the worker ended: exit status {self.process.returncode}\n{tail(said)}")
        message: dict[str, Any] = json.loads(line)
        return message

    def signal(self, number: signal.Signals) -> None:
        """Tell the whole group, the worker and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it: by the end of its input, or by force after a while; and with it all that it started."""
        self.signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.inbox.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_LIMIT_S)
        self.signal(signal.SIGKILL)
        self.process.wait()
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
