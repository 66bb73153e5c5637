"""The scripts that guard the repository fail where they should, and those that start others start the right ones."""

import datetime
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.demo.material import CHAT_DRAFT, Pair
from kit.checkpoints import ROOT

SCRIPTS = ROOT / "scripts"
PROOFS = """
import pytest, time, pathlib
@pytest.mark.full
@pytest.mark.parametrize("i", range(12))
def test_proof(i):
    assert i != 5 or pathlib.Path("repaired").exists()
def test_short():
    raise AssertionError("not a proof")
"""


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\n" * 450, ""),
        ("x = 1\n" * 451, "long.py: 451 lines, above 450\n"),
        ("class A:\n    @x\n    def f(self):\n" + "        x = 1\n" * 59, ""),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * 60, "long.py:2: f has 61 lines, above 60\n"),
        ("async def f():\n" + "    x = 1\n" * 60, "long.py:1: f has 61 lines, above 60\n"),
    ],
)
def test_size_complains_above_its_limits_and_not_below(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, complaint: str
) -> None:
    (tmp_path / "long.py").write_text(source)
    code = runpy.run_path(str(SCRIPTS / "size"))["main"](tmp_path)
    assert capsys.readouterr().err == complaint
    assert code == (1 if complaint else 0)


def test_size_complains_of_a_package_above_its_budget_and_of_one_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = runpy.run_path(str(SCRIPTS / "size"))
    budget = size["BUDGETS"]["verify"]
    for package in ("verify", "nameless"):
        (tmp_path / package).mkdir()
    for i in range(budget // 10):
        (tmp_path / "verify" / f"{i}.py").write_text("x = 1\n" * 10)
    assert size["main"](tmp_path) == 0
    (tmp_path / "verify" / "more.py").write_text("x = 1\n" * 10)
    (tmp_path / "nameless" / "a.py").write_text("x = 1\n")
    assert size["main"](tmp_path) == 1
    assert capsys.readouterr().err == (
        f"nameless has 1 lines, above 0\nverify has {budget // 10 * 10 + 10} lines, above {budget}\n"
    )


def test_shards_are_a_partition_and_a_week_visits_all_of_them() -> None:
    script = runpy.run_path(str(SCRIPTS / "test-full"))
    shards = [script["parse_shard"](f"{i}/7") for i in range(1, 8)]
    for i in range(500):
        assert sum(shard.holds(f"tests/test_a.py::test_b[{i}]") for shard in shards) == 1
    assert all(any(s.holds(str(i)) for i in range(500)) for s in shards)
    days = [script["shard_of"](datetime.date(2026, 1, 28) + datetime.timedelta(days=i)) for i in range(14)]
    assert {day.index for day in days[:7]} == set(range(1, 8))
    assert all(first.index == then.index for first, then in zip(days, days[7:], strict=False))
    assert all(first.start != then.start for first, then in zip(days, days[7:], strict=False))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository of its own with twelve proofs, of which the sixth fails until `repaired` exists.

    Beside them a folder with hooks of its own, for which pytest puts all its plugins into sets.
    """
    for folder in ("scripts", "src", "tests", "tests/apart"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tests/apart/conftest.py").write_text("def pytest_collection_modifyitems(items): pass\n")
    (tmp_path / "tests/apart/test_short.py").write_text("def test_short(): pass\n")
    shutil.copy(SCRIPTS / "test-full", tmp_path / "scripts")
    (tmp_path / "tests/test_proofs.py").write_text(PROOFS)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["full"]\n')
    return tmp_path


def test_a_linked_worktree_uses_the_environment_of_the_main_checkout_or_says_what_is_missing(tmp_path: Path) -> None:
    main, linked = tmp_path / "main", tmp_path / "linked"
    (main / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "python", main / "scripts")
    author = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (
        ("init", "-q"),
        ("add", "."),
        (*author, "commit", "-qm", "scripts"),
        ("worktree", "add", "-q", str(linked)),
    ):
        subprocess.run(["git", *command], cwd=main, check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without packages
    (tmp_path / "bin/python3").chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def interpreter() -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTHON"))}
        return subprocess.run(
            [linked / "scripts/python"], env=environment | {"PATH": path}, capture_output=True, text=True, check=False
        )

    bare = interpreter()
    assert (bare.returncode, bare.stdout) == (1, "")
    assert bare.stderr.startswith("python3 has no mypy, pytest, ruff, torch, xdist: run `make`")
    assert bare.stderr.count("\n") == 1
    for checkout in (main, linked):  # its own comes first
        (checkout / ".venv/bin").mkdir(parents=True)
        (checkout / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        (checkout / ".venv/bin/python").chmod(0o755)
        own = ".venv/bin/python" if checkout == linked else str(main / ".venv/bin/python")
        assert interpreter().stdout == f"{own}\n"


def prove(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the project's own copy of the script, and keep its output to the summary."""
    command = [sys.executable, "scripts/test-full", *arguments, "--", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_proofs_resume_where_they_failed_or_stopped(project: Path) -> None:
    none = prove(project, "--time-limit", "-1")
    assert "12 of 12 proofs; 0 passed now, 0 before, 0 skipped, 0 failed\n12 left" in none.stdout
    assert none.returncode == 0
    first = prove(project)
    assert "12 of 12 proofs; 11 passed now, 0 before, 0 skipped, 1 failed\n0 left" in first.stdout
    assert first.returncode == 1
    (project / "repaired").touch()
    second = prove(project)
    assert "12 of 12 proofs; 1 passed now, 11 before, 0 skipped, 0 failed\n0 left" in second.stdout
    assert second.returncode == 0
    (project / "src/changed.py").touch()
    third = prove(project, "--shard", "1/1")
    assert "12 passed now, 0 before" in third.stdout


@pytest.mark.full
def test_a_project_without_proofs_is_no_success(project: Path) -> None:
    (project / "tests/test_proofs.py").write_text("def test_short(): pass\n")
    nothing = prove(project)
    assert nothing.returncode == 1
    assert "no test is marked `full`" in nothing.stderr


@pytest.mark.parametrize("shard", ["0/7", "8/7", "1", "a/b", "1/0"])
def test_a_shard_that_does_not_exist_is_refused(shard: str) -> None:
    script = runpy.run_path(str(SCRIPTS / "test-full"))
    with pytest.raises(SystemExit):
        script["options"](["--shard", shard])


def planned(target: str, **variables: str) -> str:
    """What `make` would run for a target in an environment that is not there yet."""
    given = [f"{name}={value}" for name, value in {"VENV": "no-such-venv", **variables}.items()]
    run = subprocess.run(["make", "-n", target, *given], cwd=SCRIPTS.parent, capture_output=True, text=True, check=True)
    return run.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_demo_installs_no_tools_and_the_tests_do() -> None:
    assert "[dev]" not in planned("demo")
    assert "-e .\n" in planned("demo")
    assert "make serve" in planned("demo")
    assert (
        planned("serve").index("-e .\n")
        < planned("serve").index("-e '.[serve,grammar]'")
        < planned("serve").index("scripts/serve")
    )
    for target in ("test", "test-full", "check"):
        assert planned(target).index("-e .\n") < planned(target).index("-e '.[dev]'")


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_torch_comes_from_its_own_index_where_one_is_named() -> None:
    assert "--index-url URL torch" in planned("demo", TORCH_INDEX="URL")
    assert "TORCH_INDEX" not in planned("demo", TORCH_INDEX="URL")
    assert "TORCH_INDEX=https://" in planned("demo")


@pytest.mark.parametrize("fetched", [False, True])
def test_the_served_models_are_those_of_the_demo(tmp_path: Path, fetched: bool) -> None:
    """The command that scripts/serve starts, with the bundled pair as it is in place of the widened one."""
    folder, programs = tmp_path / "scripts", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    shutil.copy(SCRIPTS / "serve", folder)
    file = Path("/models/Chat.Q4_1.gguf") if fetched else None
    plain = (
        "from forerun.demo import material; material.Pair.widened = classmethod(lambda cls, draft: cls(draft=draft)); "
    )
    plain += f"from pathlib import PosixPath; material.cached_file = lambda: {file!r}"
    stubs = {"forerun": 'printf "%s\\n" "$@"', "python": f'exec {sys.executable} -c "{plain}\n$2"'}
    for name, body in stubs.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    path, source = f"{programs}{os.pathsep}{os.environ['PATH']}", str(SCRIPTS.parent / "src")
    env, command = os.environ | {"PATH": path, "PYTHONPATH": source}, ["bash", str(folder / "serve"), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    words = run.stdout.splitlines()[1:]
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert (words[0], options["--port"]) == ("serve", "0")
    chosen = options["--model"], options["--draft"], options["--served-model-name"]
    bundled = Pair().target, "mix[ngram,suffix,model:stdlib-draft]", "stdlib"
    assert chosen == (("/models/Chat.Q4_1.gguf", CHAT_DRAFT, "Chat.Q4_1") if fetched else bundled)
