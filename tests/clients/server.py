"""A server of this checkout in a process of its own, on a free port of this machine, with keys; and what it serves.

The model is the bundled one, with a chat template that shows tools and a context of its own. The template is no part of
the package, since the bundled model was never trained on conversations. The context is longer than the drafter's, so
that prompts of agents fit and requests go on where the drafter ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
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
CONTEXT = 8192  # tokens; the model was trained on 2048
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUNDLED = ROOT / "src" / "forerun" / "bundled" / "stdlib" / "target"
READY = re.compile(r"at (http://\S+)/v1,")


def chat_model(cache: Path) -> Path:
    """The folder of the model, written anew."""
    folder = cache / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(BUNDLED, folder)
    shutil.copy(HERE / "chat_template.jinja", folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    return folder


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
