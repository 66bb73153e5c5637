"""Starting: help, version and mistakes do not wait for torch, public names are there, and Ctrl-C is quiet at once."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

import forerun
from forerun.__main__ import main
from kit.checkpoints import SRC
from kit.command import apart

SLOW = {"torch", "numpy", "tokenizers", "safetensors", "jinja2", "huggingface_hub", "matplotlib"}


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return apart("-W", "error", "-c", code, *arguments)


def test_help_and_mistakes_import_nothing_that_is_slow() -> None:
    """All in one process, which prints each command's status and the slow modules imported by then."""
    quick = [
        (["--version"], 0),
        (["-h"], 0),
        (["bench", "-h"], 0),
        (["generate", "--temprature", "1"], 2),
        (["generate", "-m", "x", "-o", "/no/such/folder/x.json", "hi"], 2),
    ]
    code = f"""
import sys
from forerun.__main__ import main
for arguments, _ in {quick!r}:
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print("ended", end.code or 0, sorted({SLOW!r} & set(sys.modules)), file=sys.stderr)
"""
    endings = [line for line in python(code).stderr.splitlines() if line.startswith("ended")]
    assert endings == [f"ended {status} []" for _, status in quick]


@pytest.mark.parametrize(
    ("environment", "spin_count"), [({}, "4000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_wait_briefly_unless_the_environment_sets_it(
    environment: dict[str, str], spin_count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch finds it when it is imported."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    seen: list[str | None] = []
    monkeypatch.setattr("forerun.cli.main", lambda: seen.append(os.environ.get("GOMP_SPINCOUNT")))
    main()
    assert seen == [spin_count]


def test_public_names_are_imported_when_they_are_used() -> None:
    assert set(forerun.__all__) == {*forerun._HOMES, "__version__"}
    assert set(forerun.__all__) <= set(dir(forerun))
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'LMM'"):
        forerun.LMM  # noqa: B018
    with pytest.raises(ImportError):
        from forerun import NoSuchName  # noqa: F401
    names: dict[str, object] = {}
    exec("from forerun import *", names)
    assert set(forerun.__all__) <= set(names)


def test_the_package_runs_as_a_module() -> None:
    run = apart("-m", "forerun", "--version")
    assert run.stdout == f"forerun {forerun.__version__}\n"


def test_control_c_while_modules_are_imported_is_quiet() -> None:
    """The signal comes in the middle of the import of torch, and again in that of a command's own modules."""
    for module in ("torch", "forerun.commands.answering", "typer"):
        code = f"""
import os, signal, sys
class Trap:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Trap())
from forerun.__main__ import main
main()
"""
        run = python(code, "generate", "-m", "stdlib", "x")
        assert (run.returncode, run.stdout, run.stderr) == (130, "", ""), module


@pytest.mark.full
def test_control_c_before_the_first_round_is_quiet(tmp_path: Path) -> None:
    """While the model is loaded, at any place where Python looks for signals."""
    code = """
import os, signal, sys
from forerun.models import loading
real = loading.Blueprint.load
def load(self, *arguments, **more):
    signal.raise_signal(signal.SIGINT)
    return real(self, *arguments, **more)
loading.Blueprint.load = load
from forerun.__main__ import main
main()
"""
    target = SRC.parent / "tests" / "data" / "stories260k"
    run = python(code, "generate", "-m", str(target), "x")
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
