"""Renderer: renders chat templates in other processes, with limits of time and memory.

This file decides how much time a template may take, and how many idle processes wait for the next conversation.
`text/sandbox.py` is the program that runs in them.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, LifoQueue
from threading import Timer
from typing import Any

from forerun.errors import ChatTemplateError

LIMIT_S = 0.5  # of processor time for any template: 30 times what compiling a long one takes
LIMIT_S_PER_CHARACTER = 1.5e-6  # in addition, per character of the request: four times what one-letter messages take
PATIENCE = 10.0  # limit of elapsed time, as a multiple: for busy machines and systems without limits of processor time
MOST_IDLE = 2
LONGEST_ANSWER = 1 << 27  # bytes: MOST_TEXT characters, each escaped
PROGRAM = "import sys; sys.path += sys.argv[1:]; from forerun.text.sandbox import main; main()"


@cache
def command() -> list[str]:
    """The command that starts the program, with the folders of its imports; site-packages are not searched."""
    origins = [spec.origin for name in ("forerun", "jinja2", "markupsafe") if (spec := find_spec(name)) is not None]
    folders = [str(Path(origin).absolute().parents[1]) for origin in origins if origin is not None]
    return [sys.executable, "-I", "-S", "-c", PROGRAM, *dict.fromkeys(folders)]


class Worker:
    """One process that renders templates, for one thread at a time.

    It ends when its input ends, so it does not outlive this process. Ctrl-C does not reach it, because it is in another
    process group.
    """

    def __init__(self) -> None:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command(), stdin=pipe, stdout=pipe, stderr=null, process_group=0)
        assert self.process.stdin is not None, "it is a pipe"
        assert self.process.stdout is not None, "it is a pipe"
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def ask(self, request: bytes, patience_s: float) -> bytes | None:
        """The answer to a request; None if the process ended without one, or was killed after `patience_s`."""
        timer, start_s = Timer(patience_s, self.process.kill), time.monotonic()
        timer.start()
        try:
            self.requests.write(request)
            self.requests.flush()
            answer = self.answers.readline(LONGEST_ANSWER)
        except OSError:  # the process has ended
            return None
        finally:
            timer.cancel()
            timer.join()
        late = time.monotonic() - start_s >= patience_s  # then it may have been killed after its answer
        return answer if answer.endswith(b"\n") and not late else None

    def end(self) -> None:
        """Kill the process and close its pipes."""
        self.process.kill()
        self.process.communicate()


class Renderer:
    """The processes that render: one for each conversation being rendered, and a few idle ones."""

    def __init__(self) -> None:
        self.idle: LifoQueue[Worker] = LifoQueue(MOST_IDLE)

    def answer(self, template: str, values: Mapping[str, Any] | None) -> tuple[str, str] | None:
        """The result of `Sandbox.answer`; None if it needs too much time or memory.

        Raises ChatTemplateError if no process can be started.
        """
        request = json.dumps([template, values], ensure_ascii=False)
        limit_s = LIMIT_S + LIMIT_S_PER_CHARACTER * len(request)
        worker, answer = self.take(), None
        try:
            answer = worker.ask(f"[{limit_s}, {request}]\n".encode("utf-8", "surrogatepass"), PATIENCE * limit_s)
        finally:
            self.put_back(worker, usable=answer is not None)
        if answer is None:
            return None
        outcome, text = json.loads(answer)
        return outcome, text

    def take(self) -> Worker:
        """An idle process, or a new one."""
        while True:
            try:
                worker = self.idle.get_nowait()
            except Empty:
                break
            if worker.process.poll() is None:
                return worker
            worker.end()
        try:
            return Worker()
        except OSError as error:
            raise ChatTemplateError(
                f"the process that renders chat templates does not start ({error.strerror})"
            ) from error

    def put_back(self, worker: Worker, usable: bool) -> None:
        """Return a process to the idle ones; end it if it is not usable or there are enough."""
        try:
            if not usable:
                raise Full
            self.idle.put_nowait(worker)
        except Full:
            worker.end()

    def close(self) -> None:
        """End the idle processes."""
        while not self.idle.empty():
            self.idle.get_nowait().end()

    def forget(self) -> None:
        """After a fork: close the copies of the pipes and drop the processes, which belong to the parent."""
        for worker in self.idle.queue:  # without its lock, which a thread that this fork lacks may hold
            worker.requests.close()
            worker.answers.close()
            worker.process.returncode = 0
        self.idle = LifoQueue(MOST_IDLE)


RENDERER = Renderer()  # of all models and requests of this process
atexit.register(RENDERER.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RENDERER.forget)
