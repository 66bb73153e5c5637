"""What every test shares: shapes checked at run time, the models in the repository, long proofs set apart.

Must not import forerun: the import hook below has to come first. FORERUN_TYPECHECK=0 switches the hook off.
"""

import gc
import math
import os
import re
import sys
from collections.abc import Generator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

# Before torch: the suite runs in several processes, where spinning at a barrier keeps others from what it waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for models this small, barriers cost more than they win

os.environ.setdefault("FORERUN_DEVICE", "cpu")  # what is promised to the bit is promised there; tests/gpu says cuda

import pytest
import torch
from _pytest.pathlib import import_path
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton, which any test may import: it decides then

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
import shape_checks
from kit.checkpoints import ROOT, SMALL, SRC, TARGET

sys.path.insert(0, str(ROOT))  # for recipes: only `python -m pytest` puts the working directory there
if find_spec("forerun") is None:
    sys.path.insert(0, str(SRC))
if os.environ.get("FORERUN_TYPECHECK", "1") != "0":
    shape_checks.install("forerun")
settings.register_profile("without deadlines", settings(), deadline=None)  # a busy machine stops a process for longer
settings.load_profile("without deadlines")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """While tests are collected, no garbage is looked for: modules and tests stay, and the search takes seconds."""
    gc.disable()
    try:
        import_from_another_folder_on(session.config)
        return (yield)
    finally:
        gc.enable()


def import_from_another_folder_on(config: pytest.Config) -> None:
    """Import all modules of tests, if this process is one of several that collect the entire suite at the same time.

    Each process begins with another folder. So in a fresh clone each compiles a part of the modules, and reads what the
    others have compiled of the rest. What cannot be imported here fails when it is collected.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    folders = sorted(path for path in (ROOT / "tests").iterdir() if path.is_dir())
    first = int(worker["workerid"].removeprefix("gw")) * len(folders) // worker["workercount"]
    for folder in folders[first:] + folders[:first]:
        for path in sorted(folder.glob("test_*.py")):
            with suppress(Exception, pytest.skip.Exception):
                import_path(path, root=config.rootpath, consider_namespace_packages=False)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """Mark `full` those cases of a test that its marker `short` does not name.

    A name is the id of a case, or of several with * for any text. A name that no case has is an error.
    """
    yield
    marker = metafunc.definition.get_closest_marker("short")
    if marker is not None:
        names = {name: re.compile(re.escape(name).replace(r"\*", ".*"), re.DOTALL) for name in marker.args}
        for name, pattern in names.items():
            if not any(pattern.fullmatch(case.id) for case in metafunc._calls):
                raise pytest.Collector.CollectError(
                    f"{metafunc.function.__name__} has no case {name!r}: {[case.id for case in metafunc._calls]}"
                )
        for case in metafunc._calls:
            if not any(pattern.fullmatch(case.id) for pattern in names.values()):
                case.marks.append(pytest.mark.full.mark)
    if leaves_out_full(metafunc.config) and not any("::" in argument for argument in metafunc.config.args):
        leave_out_full_cases(metafunc)


def leave_out_full_cases(metafunc: pytest.Metafunc) -> None:
    """Make no items of cases marked `full`, which are most of all cases; one stands for a test that has no others."""
    all_full = metafunc.definition.get_closest_marker("full") is not None
    short = [] if all_full else [case for case in metafunc._calls if all(mark.name != "full" for mark in case.marks)]
    metafunc._calls = short or metafunc._calls[:1]


def leaves_out_full(config: pytest.Config) -> bool:
    """Whether a run does not ask for tests marked `full`, as it does with `-m full`."""
    return "full" not in config.option.markexpr


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `full` out of every run that does not ask for them with `-m full`."""
    if not leaves_out_full(config):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_runtest_setup() -> None:
    """Shapes are checked in the first calls of every test."""
    shape_checks.next_test()


@pytest.fixture(autouse=True, scope="module")
def garbage_is_looked_for_among_a_modules_own_objects() -> None:
    """What is there before a module's tests stays: among a million of these, each closing of an LLM takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_costs_are_measured_at_starts() -> Generator[None, None, None]:
    """Engines begin without the costs of rounds: to measure them takes longer than most tests, which do not need them.

    A test that does sets another limit.
    """
    from forerun.engine import calibration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "LIMIT_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def no_drafter_raises_unnoticed(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """An error of a drafter changes no answer, so a test would not see it; tests marked `drafter_raises` expect one."""
    from forerun.engine.recovery import Recovery

    errors: list[BaseException] = []
    count = Recovery.count_drafter_error

    def noticed(recovery: Recovery, error: BaseException) -> None:
        errors.append(error)
        count(recovery, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recovery, "count_drafter_error", noticed)
        yield
    if errors and request.node.get_closest_marker("drafter_raises") is None:
        raise AssertionError("the drafter raised an error") from errors[0]


@pytest.fixture(autouse=True, scope="session")
def no_measurement_counts_as_disturbed() -> Generator[None, None, None]:
    """Tests that run side by side disturb each other's measurements, of which only the form is looked at."""
    from forerun import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "DISTURBING", math.inf)
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_is_given_up_or_reported_for_want_of_time() -> Generator[None, None, None]:
    """On a busy machine a command writes lines of progress, and refuses what other processes have not done in time.

    Limits of processor time stay, and a test of one by the clock sets it.
    """
    from forerun import progress
    from forerun.sampling import trial
    from forerun.text import renderer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "STAGE_S", 1e6)
        patch.setattr(trial, "PATIENCE_S", 300.0)
        patch.setattr(renderer, "PATIENCE", 1000.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def folders_of_gguf_files_are_thrown_away(tmp_path_factory: pytest.TempPathFactory) -> Generator[None, None, None]:
    """Folders that stand for GGUF files are made in a cache of this run's, so that `forerun models` lists no tests.

    Everything else in the user's cache, such as compiled kernels, is there by links.
    """
    from forerun.store import cache_folder

    ours, caches = cache_folder("kernels").parent, tmp_path_factory.mktemp("cache")
    (ours / "kernels").mkdir(parents=True, exist_ok=True)
    (ours / "times").mkdir(exist_ok=True)
    (caches / ours.name).mkdir()
    links = {caches / path.name: path for path in ours.parent.iterdir() if path != ours}
    links |= {caches / ours.name / path.name: path for path in ours.iterdir() if path.name != "gguf"}
    for link, path in links.items():
        link.symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(caches))
        yield


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """stories260k: a Llama of 260 k parameters, the target of most tests."""
    return TARGET


@pytest.fixture(scope="session")
def draft_dir() -> Path:
    """stories280k: trained apart from the target on the same tokenizer; 256 positions, the target has 512."""
    return SMALL
