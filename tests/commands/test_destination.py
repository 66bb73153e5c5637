"""What commands write: checked before any work, whole or not at all; --json has one meaning in all of them."""

import errno
import json
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from forerun import cli
from forerun.commands.answer_file import AnswerFile
from forerun.commands.running import Destination
from forerun.errors import InvalidRequest
from kit.checkpoints import SMALL, TARGET
from kit.command import assert_progress_only, command, refusal

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def test_writing_a_file_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    Destination("output", path).write("text")
    assert path.read_text() == "text"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    path.chmod(0o640)
    Destination("output", path).write(b"more")
    assert path.read_bytes() == b"more"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.json"]


def umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "far" / "real.json")
    Destination("output", tmp_path / "link.json").write("text")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "far" / "real.json").read_text() == "text"


def test_a_device_is_written_to_and_not_replaced() -> None:
    Destination("output", Path("/dev/null")).write("text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(InvalidRequest, match=r"output: /dev/full cannot be written \(No space left on device\)"):
        Destination("output", Path("/dev/full")).write("text")
    assert not Path("/dev/full").is_file()


@pytest.mark.parametrize("call", ["write_bytes", "fsync", "replace"])
def test_a_failure_leaves_the_file_as_it_was(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")
    goal = Destination("output", path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr({"write_bytes": Path}.get(call, os), call, full)
    with pytest.raises(InvalidRequest, match="No space left on device"):
        goal.write("after")
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/a.json", "the folder .*/no does not exist"),
        (".", "is a folder: name a file in it"),
        ("f/a.json", "f does not"),
    ],
)
def test_an_unwritable_destination_is_refused_at_once(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(InvalidRequest, match=f"^output: .*{reason}"):
        Destination("output", tmp_path / name)


def test_a_folder_that_may_not_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(InvalidRequest, match=f"output: the folder {tmp_path} is not writable"):
        Destination("output", tmp_path / "a.json")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"chat", "serve"}))
def test_json_and_output_are_the_same_options_everywhere(name: str) -> None:
    options = {spelling: option for option in COMMANDS[name].params for spelling in option.opts}
    assert options["--json"].is_flag
    assert options["--output"] is options["-o"]
    assert not options["--output"].is_flag
    assert options["--json"].help == {o.name: o for o in COMMANDS["generate"].params}["as_json"].help


@pytest.fixture
def lines(tmp_path: Path) -> dict[str, list[str]]:
    """A short run of the commands."""
    (tmp_path / "prompts.txt").write_text("Once upon a time\nLily had a red ball\n")
    pair = ["--model", str(TARGET), "--draft", f"model:{SMALL}"]
    prompts = ["--prompts", str(tmp_path / "prompts.txt"), "--num-prompts", "2"]
    bench = "-n 4 --repeats 1 --depth 2 -t 0 --threads 1"
    return {
        "generate": [*pair, "--depth", "3", "-n", "6", "Once"],
        "trace": [*pair, "-n", "6", "Once"],
        "prove": [*pair, *prompts, "-n", "4", "--num-texts", "100"],
        "bench": [*pair, *prompts, "--state", str(tmp_path / "runs.jsonl"), *bench.split()],
        "widen": ["-m", str(SMALL), "--parameters", "1M", "--out", str(tmp_path / "wide")],
    }


@pytest.mark.short("generate", "bench")
@pytest.mark.parametrize("name", ["generate", "trace", "prove", "bench", "widen"])
def test_json_prints_one_line_and_output_writes_a_file(
    name: str, lines: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forerun.bench.measure.bandwidth_bytes_per_s", lambda *_, **__: 1e9)

    both = command(name, *lines[name], "--json", "-o", str(tmp_path / "both.json"))
    assert both.exit_code == 0, both.output
    assert both.stdout.count("\n") == 1
    assert_progress_only(both.stderr)
    assert (tmp_path / "both.json").read_text() == both.stdout
    if name == "widen":
        lines[name][-1] += "r"
    shown = command(name, *lines[name], "--output", str(tmp_path / "report.json"))
    assert "{" not in shown.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert named(report) == named(json.loads(both.stdout))


def named(report: Any) -> Any:
    """The names in an object, at all depths."""
    if isinstance(report, dict):
        return {name: named(value) for name, value in report.items()}
    return [named(value) for value in report[:1]] if isinstance(report, list) else None


@pytest.mark.parametrize("name", ["generate", "trace", "prove", "bench", "widen", "demo"])
@pytest.mark.parametrize("option", ["--output", "--svg", "--picture"])
def test_commands_check_their_files_before_any_work(
    name: str, option: str, lines: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that would take time comes after the imports of a command."""
    if option not in {spelling for each in COMMANDS[name].params for spelling in each.opts}:
        pytest.skip("the command has no such option")

    def begun() -> None:
        raise AssertionError("the command has begun")

    monkeypatch.setattr(f"forerun.commands.{name}.importing", begun)
    message = refusal(name, *lines.get(name, []), option, "/no/such/folder/file.png")
    assert message.startswith(f"error: {option[2:]}: the folder /no/such/folder does not exist")


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for path in (tmp_path / ("x" * 300), tmp_path / "a" / "c"):
        for create in (partial(Destination, "output"), AnswerFile.open):
            with pytest.raises(InvalidRequest, match=r"output: .* cannot be used \(.*\): name another file"):
                create(path)


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root every folder may be entered: the system's answer is put in its place."""

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(InvalidRequest, match=r"output: .* cannot be used \(Permission denied\)"):
        Destination("output", tmp_path / "x.json")
