"""A server's process, which computes only while it is asked.

This file decides how a server is started, stopped by the system while others are asked, and ended with all that it
started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.peers.place import ROOT, StepFailed, tail

START_LIMIT_S = 600.0
END_LIMIT_S = 20.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class ServerProcess:
    """One server at `url`, up and stopped once made. Raises StepFailed, with its last words, where it does not come up.

    Its output goes to `log`. The server is a process group of its own; what it starts is stopped and ended with it.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            try:
                self.process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    process_group=0,
                )
            except OSError as error:
                raise StepFailed(f"{command[0]} cannot be started: {error}") from error
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        self.signal(signal.SIGSTOP)

    def wait(self) -> None:
        """Until it says that it is healthy, which servers do when their models are loaded."""
        limit_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit_s and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:  # it does not listen yet, or is still loading (503)
                time.sleep(0.1)
        raise StepFailed(f"it did not start: exit status {self.process.poll()}\n{self.last_words()}")

    def last_words(self) -> str:
        """The end of its log."""
        return tail(self.log.read_text(encoding="utf-8", errors="replace"))

    @contextmanager
    def awake(self) -> Iterator[str]:
        """The address of the server, which runs for as long as the block does."""
        self.signal(signal.SIGCONT)
        try:
            yield self.url
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """Tell the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End it, by force after a while."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        self.signal(signal.SIGKILL)
        self.process.wait()
