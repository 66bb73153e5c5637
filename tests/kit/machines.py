"""Two machines for tests: network namespaces joined by a virtual cable; the tests can reach the first one."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kit.servers import launched

FIRST, SECOND = "198.51.100.1", "198.51.100.2"  # reserved for documentation, so no real host has them
OUTSIDE, INSIDE = "203.0.113.1", "203.0.113.2"  # the tests, and the first machine as they see it
CABLE = "cable"
needs_namespaces = pytest.mark.skipif(
    shutil.which("ip") is None or os.geteuid() != 0, reason="network namespaces need root and the command ip"
)


def ip(*words: str) -> None:
    """Run the command `ip` with these arguments."""
    subprocess.run(["ip", *words], check=True)


@dataclass(frozen=True)
class Machine:
    """A network namespace. `folder` is its own, with a short path."""

    name: str
    folder: Path

    def start(self, words: list[str], streams: int = subprocess.DEVNULL, **env: str) -> subprocess.Popen[str]:
        """Start a command in the namespace."""
        return launched(["ip", "netns", "exec", self.name, *words], streams, **env)

    def processes(self) -> list[psutil.Process]:
        """The processes in the namespace."""
        listing = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True).stdout
        processes = []
        for each in listing.split():
            with suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(int(each)))
        return processes

    def kill_all(self) -> None:
        """Kill all processes in the namespace."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def pull_cable(self) -> None:
        """Disconnect the namespace from the other machine."""
        ip("-n", self.name, "link", "set", CABLE, "down")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines; at the end all their processes are killed."""
    with ExitStack() as stack:
        made, outside = [], f"fr{os.getpid()}"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="two", ignore_cleanup_errors=True)))
        for letter in "ab":
            machine = Machine(f"forerun-{os.getpid()}{letter}", folder / letter)
            machine.folder.mkdir()
            ip("netns", "add", machine.name)
            stack.callback(ip, "netns", "delete", machine.name)
            stack.callback(machine.kill_all)
            ip("-n", machine.name, "link", "set", "lo", "up")
            made.append(machine)
        first, second = (["-n", machine.name] for machine in made)
        ip("link", "add", outside, "type", "veth", "peer", "name", "tests", "netns", made[0].name)
        stack.callback(ip, "link", "delete", outside)
        ip(*first, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", made[1].name)
        ends = (([], outside, OUTSIDE), (first, "tests", INSIDE), (first, CABLE, FIRST), (second, CABLE, SECOND))
        for at, link, address in ends:
            ip(*at, "address", "add", f"{address}/24", "dev", link)
            ip(*at, "link", "set", link, "up")
        for at in (first, second):
            ip(*at, "route", "add", "default", "dev", CABLE)  # by which programs find their own address
        yield made[0], made[1]
