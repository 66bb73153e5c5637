"""A server of this checkout in a process of its own, on a free port of this machine, with keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

KEY = "sk-clients"
NAME = "stdlib-chat"
STARTS_S = 300  # a busy machine may take minutes
ROOT = Path(__file__).resolve().parent.parent.parent
READY = re.compile(r"at (http://\S+)/v1,")


@contextmanager
def running_server(model: Path, options: Sequence[str], cache: Path) -> Iterator[str]:
    """The address of a server of this model; its log is `server.log` in the cache folder."""
    keys, log = cache / "keys.txt", cache / "server.log"
    keys.write_text(f"clients {KEY}\n", "utf-8")
    keys.chmod(0o600)
    command = [sys.executable, "-m", "forerun", "serve", "--model", str(model), "--served-model-name", NAME]
    command += ["--port", "0", "--api-keys", str(keys), "--access-log", *options]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": path})
    try:
        yield address(server, log)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def address(server: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, once it does. Ends the program where it does not start."""
    end_s = time.monotonic() + STARTS_S
    while server.poll() is None and time.monotonic() < end_s:
        if ready := READY.search(log.read_text("utf-8")):
            return ready[1]
        time.sleep(0.1)
    sys.exit(f"the server did not start:\n{log.read_text('utf-8')}")
