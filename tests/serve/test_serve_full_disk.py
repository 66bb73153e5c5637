"""Full disks: answers go on although the log, standard output or files kept between starts cannot be written."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from forerun import store, streams
from forerun.control import kept_costs
from forerun.draft.text import suffix_past
from forerun.engine import calibration
from forerun.models import choice
from forerun.serve import records
from forerun.serve.envelope import ACCESS
from forerun.streams import BackgroundStream, unfailing_stderr
from kit.checkpoints import ROOT
from kit.engines import PATIENCE_S
from kit.servers import OK, command, drafting, expected, launched, library_answer, running, until

gives_up = pytest.mark.filterwarnings("ignore:.*past answers are no longer stored there:RuntimeWarning")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="/dev/full and pipes are of POSIX")


@needs_posix
def test_a_log_reader_that_stops_does_not_block_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has not taken is bounded, and what is written once it reads again arrives."""
    monkeypatch.setattr(streams, "PATIENCE_S", 0.05)
    reader, writer = os.pipe()
    stream = BackgroundStream(writer, "utf-8")
    began_s = time.monotonic()
    for _ in range(4 * streams.MOST_PENDING):
        print("x" * 1023, file=stream, flush=True)
    assert time.monotonic() - began_s < 10
    assert stream.pending.full()
    found = bytearray()
    thread = threading.Thread(target=lambda: found.extend(b"".join(iter(lambda: os.read(reader, 1 << 16), b""))))
    thread.start()
    until(stream.pending.empty)
    print("späť", file=stream)
    until(stream.pending.empty)
    stream.close()
    print("too late", file=stream)
    assert not stream.thread.is_alive()
    os.close(writer)
    thread.join(PATIENCE_S)
    os.close(reader)
    assert found.decode().endswith("späť\n")


@needs_posix
def test_shutdown_does_not_wait_for_a_log_reader_that_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.05)
    reader, writer = os.pipe()
    stream = BackgroundStream(writer, "utf-8")
    stream.write("x" * 200_000)
    began_s = time.monotonic()
    stream.close()
    assert time.monotonic() - began_s < 5
    os.close(reader)
    stream.thread.join(PATIENCE_S)
    os.close(writer)


@needs_posix
@pytest.mark.parametrize("what", ["full", "no reader", "closed"])
def test_writing_to_a_broken_stream_raises_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.open("/dev/full", os.O_WRONLY)
    if what == "no reader":
        os.close(number)
        reader, number = os.pipe()
        os.close(reader)
    with open(number, "w", closefd=False) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        with unfailing_stderr():
            if what == "closed":
                os.close(number)
            stream = sys.stderr
            assert isinstance(stream, BackgroundStream)
            for _ in range(100):
                print("text", file=sys.stderr, flush=True)
                until(stream.pending.empty)
        assert sys.stderr is broken
    if what != "closed":
        os.close(number)


def test_streams_in_memory_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with unfailing_stderr():
        assert sys.stderr is before or isinstance(sys.stderr, BackgroundStream)
        print("text", file=sys.stderr)
    assert capsys.readouterr().err == "text\n"


@needs_posix
def test_no_socket_takes_the_place_of_a_closed_stream() -> None:
    """Libraries write to descriptor 2 whatever is behind it."""
    code = "import socket; from forerun.streams import guard_streams; guard_streams(); print(socket.socket().fileno())"
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -c '{code}' <&- 2>&-"], env=env, capture_output=True, check=True
    )
    assert int(run.stdout) > 2


@contextmanager
def serving(redirect: str, *options: str, **env: str) -> Iterator[httpx.Client]:
    """The command in a shell with redirected streams; asserts that it drains properly at the end."""
    line = " ".join(["exec", *command("--access-log", *options), redirect])
    process = launched(["bash", "-c", line], subprocess.DEVNULL, **env)

    def ports() -> list[int]:
        """Where it listens; it cannot be read from its log."""
        assert process.poll() is None, f"it ended with {process.returncode}"
        sockets = psutil.Process(process.pid).net_connections("tcp4")
        return [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]

    try:
        until(ports, pause_s=0.05)
        with httpx.Client(base_url=f"http://127.0.0.1:{ports()[0]}", trust_env=False, timeout=PATIENCE_S) as http:
            until(lambda: http.get("/ready").status_code == 200, pause_s=0.05)
            yield http
            assert http.post("/v1/completions", json=OK).json()["choices"][0]["text"] == expected()
            assert "forerun:generation_tokens_total" in http.get("/metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@needs_posix
@pytest.mark.parametrize(
    "redirect",
    [
        "2>/dev/full",
        *(
            pytest.param(redirect, marks=pytest.mark.full)
            for redirect in (
                "2>&-", ">&-", "<&- >&- 2>&-", ">/dev/full 2>&1", "2> >(exec true)", "> >(exec true) 2>&1",
                "2> >(exec sleep 60)",
            )
        ),
    ],
)  # fmt: skip
def test_a_server_goes_on_with_closed_full_or_unread_streams(redirect: str) -> None:
    with serving(redirect) as http:
        for number in range(30):
            assert http.get(f"/nowhere/{number}/{'x' * 8000}").status_code == 404  # together more than a pipe holds
        assert http.post("/v1/completions", json={**OK, "temprature": 1}).status_code == 400


@needs_posix
@pytest.mark.full
@pytest.mark.parametrize("where", ["full", "read-only", "nowhere"])
def test_a_server_goes_on_without_writable_cache_folders(where: str, tmp_path: Path) -> None:
    """Compiled kernels, measured costs and times of kernels; and past answers, whose disk becomes full later."""
    folder = tmp_path / "disk"
    folder.mkdir()
    home = "/dev/null/home" if where == "nowhere" else str(folder)
    mounted = where != "nowhere" and shutil.which("mount")
    if where != "nowhere" and not (
        mounted
        and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False).returncode == 0
    ):
        pytest.skip("no file system can be mounted here")
    try:
        past = folder / "past.jsonl"
        draft = ["--draft", f"suffix:{past}"] if where == "full" else []
        if where == "full":
            (folder / "fill").write_bytes(bytes(40_000))
        elif mounted:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with serving("2>/dev/full", *draft, HOME=home, XDG_CACHE_HOME=f"{home}/cache") as http:
            with suppress(OSError), (folder / "more").open("wb", buffering=0) as file:
                while where == "full":
                    file.write(bytes(1 << 10))
            for seed in range(5):
                assert http.post("/v1/completions", json={**OK, "seed": seed, "max_tokens": 200}).status_code == 200
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_for_measured_costs_does_not_prevent_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kept_costs, "replace_file", full)
    monkeypatch.setattr(store, "replace_file", full)
    kept_costs.keep("key", {})
    store.keep_measured(choice.times_file, {"a": [1.0]}, "The times of kernels")


class Faults:
    """Writes that fail at random: they take all, or a part, or raise an error of the system behind a part."""

    def __init__(self, seed: int, share: float) -> None:
        self.dice, self.share, self.num = random.Random(seed), share, 0

    def at(self, write: Callable[[bytes], int], data: bytes) -> int:
        """Write what is taken of the data."""
        if self.dice.random() >= self.share:
            return write(data)
        self.num += 1
        num_taken = write(data[: self.dice.randrange(len(data))])
        if self.dice.random() < 0.5:
            return num_taken
        number = self.dice.choice([errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EDQUOT])
        raise OSError(number, os.strerror(number))

    def open(self, path: Path, mode: str, buffering: int, opener: Any) -> FileIO:
        """A file with such writes."""
        at = self.at

        class FaultyFile(FileIO):
            @override
            def write(self, data: Any) -> int:
                return at(super().write, data)

        return FaultyFile(str(path), mode, opener=opener)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """The server's log as the command has it."""
    loggers = [logging.getLogger(name) for name in ("forerun", *records.LEVELS, ACCESS, records.REQUESTS)]
    before = [(each.level, each.propagate, each.disabled, list(each.handlers)) for each in loggers]
    records.log_to_stderr("json", access=True)
    try:
        yield
    finally:
        for each, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
            each.setLevel(level)
            each.propagate, each.disabled, each.handlers = propagate, disabled, handlers


@needs_posix
@gives_up
@pytest.mark.parametrize("seed", range(3))
def test_writes_that_fail_at_random_change_no_answer(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the log, of past answers, of measured costs: the answers are those of plain decoding, and the log goes on."""
    faults, log, costs, honest = Faults(seed, 0.5), tmp_path / "log", tmp_path / "costs", os.write

    def write(number: int, data: bytes) -> int:
        return faults.at(partial(honest, number), data) if number == file.fileno() else honest(number, data)

    with log.open("w") as file, monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr(suffix_past, "open", faults.open, raising=False)
        patch.setattr(kept_costs, "kept_file", lambda _: costs)
        patch.setattr(kept_costs, "replace_file", lambda path, data: faults.at(path.write_bytes, data))
        patch.setattr(calibration, "LIMIT_S", 0.05)
        patch.setattr(sys, "stderr", file)
        with (
            unfailing_stderr(),
            logging_to_stderr(),
            drafting(f"suffix:{tmp_path / 'past'}", speculation="auto") as llm,
            running(llm) as server,
        ):
            for each in range(8):
                body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": each, "stream": each % 3 == 0}
                answer = server.post("/v1/completions", **body, return_token_ids=True)
                assert answer.status_code == 200
                alone = library_answer(OK | {"max_tokens": 12, "seed": each}).outputs[0]
                assert token_ids(answer.text) == list(alone.token_ids)
                assert server.post("/v1/nowhere").status_code == 404
                with server.http() as http:
                    assert "forerun:generation_tokens_total" in http.get("/metrics").text
            assert faults.num
            assert llm.engine.drafter is not None, "it is not switched off"
            faults.share = 0.0
            print("written again", file=sys.stderr)  # lines of the last requests may follow it
            until(lambda: "written again" in log.read_text(errors="replace"))


def token_ids(answer: str) -> list[int]:
    """Of an answer, whole or as events."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line not in ("", "data: [DONE]")]
    return [token for event in events for token in json.loads(event)["choices"][0]["token_ids"]]


@gives_up
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 12))
def test_past_answers_before_a_fault_are_there_at_the_next_start(seed: int, count: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path, before, kept = Path(folder) / "past", [], list[Any]()
        past = suffix_past.PastFile(path, "v")
        patch.setattr(suffix_past, "open", Faults(seed, 0.15).open, raising=False)
        for each in range(count):
            past.append(suffix_past.PastAnswer(str(each), "", [each] * each))
            before += [] if past.broken else [each]
        patch.undo()
        suffix_past.PastFile(path, "v").restore(kept.extend)
    assert [int(each.name) for each in kept] == before
    assert past.broken == (len(before) < count)
