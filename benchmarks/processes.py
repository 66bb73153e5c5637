"""Processes of a benchmark that compute only while it is their turn.

At other times a process is stopped (SIGSTOP), so that the idle threads of one engine take no time from another. Each
process is a separate process group in the benchmark's session: its children are stopped and ended with it, and if the
benchmark is killed, the system continues the stopped groups and ends them. This file imports only the standard library,
since it runs in every peer's environment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TAIL_LINES = 12
LOG_BYTES = 1 << 16  # of the end of a process's log
START_LIMIT_S, END_LIMIT_S = 600.0, 30.0


class StepFailed(Exception):
    """A step of a benchmark failed, or a process died; the message ends with the last lines of its output."""


def tail(text: str) -> str:
    """The last non-empty lines."""
    return "\n".join([line.rstrip() for line in text.splitlines() if line.strip()][-TAIL_LINES:])


class AskedProcess:
    """A process whose stderr goes to `log`, and its stdout too unless it `speaks` to the benchmark through pipes.

    Unless it is a separate process group (`apart`), it is stopped with the benchmark. Raises StepFailed if it cannot be
    started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        speaks: bool = False,
        apart: bool = True,
    ) -> None:
        self.log, self.apart = log, apart
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            try:
                self.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | dict(environment),
                    stdin=subprocess.PIPE if speaks else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if speaks else file,
                    stderr=file,
                    process_group=0 if apart else None,
                )
            except OSError as error:
                raise StepFailed(f"{command[0]} cannot be started: {error}") from error

    def last_words(self) -> str:
        """The end of its log."""
        return tail(self.log.read_bytes()[-LOG_BYTES:].decode(errors="replace"))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Context in which the process runs."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, or to its group if it has one."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number) if self.apart else self.process.send_signal(number)

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self.signal(signal.SIGTERM)

    def close(self) -> None:
        """End the process and its children, with SIGKILL after END_LIMIT_S."""
        self.signal(signal.SIGCONT)
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        self.signal(signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class ServerProcess(AskedProcess):
    """A server at `url` that has started when the constructor returns. Raises StepFailed if it does not start."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str], apart: bool = True
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(command, log, environment, apart=apart)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until /health is answered with success, which servers do when their models are loaded."""
        limit_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:  # it does not listen yet, or is still loading (503)
                time.sleep(0.1)
        raise StepFailed(f"it did not start: exit status {self.process.poll()}\n{self.last_words()}")


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Context with a `forerun serve` with these options; its URL."""
    port = free_port()
    command = [sys.executable, "-m", "forerun", "serve", *options, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = ServerProcess(command, port, Path(folder) / "log", {"NO_COLOR": "1"})
        stack.callback(server.close)
        yield server.url
