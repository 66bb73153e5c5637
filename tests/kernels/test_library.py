"""The kernels' library: compiled once, kept where no other user can write, never loaded unchecked, never fatal."""

import logging
import os
import pwd
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from forerun.cli import app
from forerun.errors import UnsupportedModel
from forerun.kernels import build, library
from forerun.kernels.build import NoKernels
from forerun.kernels.sampling import find_sampling_kernels
from forerun.models.backends.native_check import find_kernels
from forerun.models.backends.torch_cpu.backend import TorchExecutor
from forerun.models.choice import cpu_backend
from forerun.models.loading import Blueprint
from forerun.store import cache_folder
from kit.checkpoints import TARGET
from kit.computer import Computer, forget, library_works, restart, script, shared_library, warnings_of

NOBODY = 65534


def test_the_library_is_compiled_once_and_kept_for_its_user_alone(
    computer: Computer, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []
    for _ in range(3):
        assert library.library(lambda what, _: steps.append(what)) is library.library()
        assert library_works()
        restart()
    assert computer.num_compiled == 1
    assert steps == ["compiling kernels, once on this machine"]
    assert sorted(path.suffix for path in computer.cache_folder.iterdir()) == [".lock", ".sha256", ".so"]
    for path in (computer.cache_folder, computer.cache_folder.parent, computer.file(".so"), computer.file(".sha256")):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    assert not warnings_of(caplog)
    assert not list((computer.folder / "tmp").iterdir())


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, Callable[[Computer], object]] = {
    "truncated": lambda c: cut(c.file(".so"), 0.5),
    "empty": lambda c: cut(c.file(".so"), 0),
    "one bit": lambda c: flip(c.file(".so")),
    "another library": lambda c: c.file(".so").write_bytes(b"not a library"),
    "no digest": lambda c: c.file(".sha256").unlink(),
    "empty digest": lambda c: cut(c.file(".sha256"), 0),
    "wrong digest": lambda c: flip(c.file(".sha256")),
    "not a library, with its digest": lambda c: c.store().keep(b"not a library"),
    "others may write": lambda c: c.file(".so").chmod(0o666),
    "others may write the digest": lambda c: c.file(".sha256").chmod(0o620),
    "a link": lambda c: link(c.file(".so")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(computer: Computer, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Were it loaded, a truncated one would kill the process (SIGBUS)."""
    assert library_works()
    restart()
    DAMAGES[damage](computer)
    for _ in range(2):
        assert library_works()
        assert computer.num_compiled == 2
        restart()
    (warning,) = warnings_of(caplog)
    assert f"{computer.file('.so')} is damaged, or another user may write to it" in warning


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file or folder another user's. Only root can; for anyone else `stat` is made to say so."""
    if os.geteuid() == 0:
        os.lchown(path, NOBODY, NOBODY)
        return
    for name in ("stat", "lstat"):
        honest = getattr(Path, name)

        def lying(self: Path, honest: Callable[..., os.stat_result] = honest, **more: bool) -> os.stat_result:
            found = honest(self, **more)
            return os.stat_result((*found[:4], NOBODY, *found[5:])) if self == path else found

        monkeypatch.setattr(Path, name, lying)


@pytest.mark.parametrize("foreign", ["kernels/*.so", "kernels/*.sha256", "kernels", ".", "link to kernels"])
def test_a_planted_library_is_not_run(
    computer: Computer, foreign: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library with a valid digest file, in a shared cache folder, in files or folders that another user owns."""
    assert library_works()
    restart()
    mark = computer.folder / "planted code ran"
    planted = shared_library(
        computer.real_compiler,
        computer.folder / "planted.so",
        f'#include <cstdio>\n__attribute__((constructor)) void run() {{ fopen("{mark}", "w"); }}',
    )
    computer.store().keep(planted.read_bytes())
    if foreign == "link to kernels":
        computer.cache_folder.rename(computer.cache_folder.with_name("elsewhere"))
        computer.cache_folder.symlink_to("elsewhere")
        give_away(computer.cache_folder, monkeypatch)
    else:
        (path,) = computer.cache_folder.parent.glob(foreign) if foreign != "." else (computer.cache_folder.parent,)
        give_away(path, monkeypatch)
    assert library_works()
    assert not mark.exists()
    assert computer.num_compiled == 2
    (warning,) = warnings_of(caplog)
    assert "another user" in warning


def test_a_folder_that_others_may_write_to_is_closed_to_them(computer: Computer) -> None:
    computer.cache_folder.mkdir(parents=True)
    computer.cache_folder.chmod(0o777)
    assert library_works()
    assert stat.S_IMODE(computer.cache_folder.stat().st_mode) == 0o755


def nowhere(name: str) -> Callable[[Computer, pytest.MonkeyPatch], None]:
    """A folder that cannot be made, since a file has its name."""

    def set_up(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
        (computer.folder / "file").touch()
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv(name, str(computer.folder / "file"))

    return set_up


def no_home(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(uid)

    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def refused(name: str) -> Callable[[Computer, pytest.MonkeyPatch], None]:
    """A function of the system that fails in the cache folder, as it does for users who may not."""

    def set_up(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = getattr(os, name)

        def refusing(path: str | Path, *rest: object, **more: object) -> object:
            if str(path).startswith(str(computer.folder / "cache")):
                raise PermissionError(13, "Permission denied", str(path))
            return honest(path, *rest, **more)

        monkeypatch.setattr(os, name, refusing)

    return set_up


def full_disk(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


UNUSABLE = {
    "a file as cache folder": nowhere("XDG_CACHE_HOME"),
    "a file as home": nowhere("HOME"),
    "no home at all": no_home,
    "no folder may be made": refused("mkdir"),
    "nothing may be looked at": refused("stat"),
    "no file may be written": refused("open"),
    "no file may be put in place": refused("replace"),
    "the disk is full": full_disk,
}


@pytest.mark.parametrize("why", [each for each in UNUSABLE if each != "the disk is full"])
@pytest.mark.parametrize("has_platformdirs", [True, False])
def test_without_a_cache_folder_a_folder_for_this_user_takes_its_place(
    computer: Computer,
    why: str,
    has_platformdirs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not has_platformdirs:
        monkeypatch.setitem(sys.modules, "platformdirs", None)
    UNUSABLE[why](computer, monkeypatch)
    for _ in range(3):
        assert library_works()
        assert computer.num_compiled == 1
        restart()
    substitute = computer.folder / "tmp" / f"forerun-{os.geteuid()}"
    (warning,) = warnings_of(caplog)
    assert f"They are in {substitute / 'kernels'} until" in warning
    assert "set XDG_CACHE_HOME to a folder of your own" in warning
    for path in (substitute, *substitute.rglob("*")):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) or path.suffix == ".lock", path
    assert list(computer.folder.joinpath("tmp").iterdir()) == [substitute]
    assert not list(computer.folder.glob("cache/forerun/kernels/*.so"))


def another_users(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    (computer.folder / "tmp" / f"forerun-{os.geteuid()}").mkdir()
    give_away(computer.folder / "tmp" / f"forerun-{os.geteuid()}", monkeypatch)


def others_may_replace(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    (computer.folder / "tmp").chmod(0o777)  # without the sticky bit


def link_of_another_user(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    (computer.folder / "elsewhere").mkdir()
    link = computer.folder / "tmp" / f"forerun-{os.geteuid()}"
    link.symlink_to(computer.folder / "elsewhere")
    give_away(link, monkeypatch)


UNSAFE = {
    "another user's folder": another_users,
    "another user's link": link_of_another_user,
    "others may replace it": others_may_replace,
    "the disk is full": full_disk,
}


@pytest.mark.parametrize("unsafe", UNSAFE)
def test_without_any_safe_folder_each_start_compiles_and_says_so(
    computer: Computer, unsafe: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if unsafe != "the disk is full":
        nowhere("XDG_CACHE_HOME")(computer, monkeypatch)
    UNSAFE[unsafe](computer, monkeypatch)
    assert library_works()
    assert library_works()
    assert computer.num_compiled == 1
    (warning,) = warnings_of(caplog)
    assert "every start compiles them again, which can take a minute or two" in warning
    assert "set XDG_CACHE_HOME to a folder of your own" in warning
    restart()
    assert library_works()
    assert computer.num_compiled == 2
    assert not list(computer.folder.rglob("kernels/*.so"))


def test_a_shared_folder_with_the_sticky_bit_is_accepted(computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere("XDG_CACHE_HOME")(computer, monkeypatch)
    (computer.folder / "tmp").chmod(0o1777)
    for _ in range(2):
        assert library_works()
        restart()
    assert computer.num_compiled == 1


def no_program(folder: Path) -> Path:
    (folder / "text").write_bytes(b"\0 not a program")
    (folder / "text").chmod(0o755)
    return folder / "text"


BROKEN: dict[str, tuple[Callable[[Path], str | Path], str]] = {
    "not executable": (lambda _: "/etc/passwd", "no C++ compiler found (looked for /etc/passwd)"),
    "not there": (lambda _: "no-such-compiler", "no C++ compiler found (looked for no-such-compiler)"),
    "a folder": (lambda folder: folder, "no C++ compiler found"),
    "no program": (no_program, "Exec format error"),
    "fails": (
        lambda folder: script(folder / "false", f"echo compile >> {folder}/calls; echo sorry >&2; exit 1"),
        "sorry",
    ),
    "says it went well": (lambda folder: script(folder / "true", f"echo compile >> {folder}/calls"), "failed"),
    "hangs": (lambda folder: script(folder / "sleeper", f"echo compile >> {folder}/calls; exec sleep 60"), "timed out"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_without_a_compiler_that_works_torch_computes_and_says_so_once(
    computer: Computer, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "VERSION_TIMEOUT_S", 0.3)
    make, message = BROKEN[how]
    monkeypatch.setenv("CXX", str(make(computer.folder)))
    for _ in range(3):
        assert find_kernels("auto", torch.float32) is None
        assert cpu_backend("auto", torch.float32).name.startswith("torch, ")
        assert find_sampling_kernels() is None
    assert isinstance(Blueprint.of(str(TARGET)).load(64).decoder.executor, TorchExecutor)
    (warning,) = warnings_of(caplog)
    for part in ("No compiled kernels: ", message, "install g++", "two to four times as long", "fingerprint"):
        assert part in warning
    assert len(warning) < 500
    assert computer.num_compiled <= 2  # its version, and the one attempt
    with pytest.raises(UnsupportedModel, match=r"'native' is not possible here: .*install g"):
        find_kernels("native", torch.float32)
    assert not list(computer.folder.glob("cache/forerun/kernels/*.so"))


def test_a_full_disk_is_not_taken_for_a_broken_compiler(computer: Computer) -> None:
    text = "cc1plus: fatal error: error writing to /tmp/x.s: No space left on device"
    script(computer.folder / "cxx", f'case "$1" in --version) ;; *) echo "{text}" >&2; exit 1;; esac')
    with pytest.raises(NoKernels, match=r"No space left on device\): free space there, or set TMPDIR") as caught:
        library.library()
    assert "install g++" not in str(caught.value)


def test_a_library_that_cannot_be_loaded_is_not_used(computer: Computer, caplog: pytest.LogCaptureFixture) -> None:
    """Not even from the temporary folder, from which the system may forbid running programs."""
    compiles = (computer.folder / "cxx").read_text()
    script(computer.folder / "cxx", compiles.replace(f"cp {computer.library}", "cp /etc/passwd"))
    with pytest.raises(NoKernels, match=r"cannot be loaded .*: set TMPDIR to a folder where programs may run"):
        library.library()
    assert find_sampling_kernels() is None


def test_with_the_torch_backend_nothing_is_reported(computer: Computer, caplog: pytest.LogCaptureFixture) -> None:
    assert find_kernels("torch", torch.float32) is None
    assert not warnings_of(caplog)
    assert not computer.num_compiled


def test_the_command_answers_without_home_cache_or_compiler(
    computer: Computer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("CXX", "/etc/passwd"), ("HOME", "/dev/null"), ("XDG_CACHE_HOME", "/dev/null")):
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["generate", "-m", str(TARGET), "Once", "-n", "4", "--seed", "1"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout
    assert "computed by       torch, " in done.stderr
    (warning,) = warnings_of(caplog)
    assert "no C++ compiler found (looked for /etc/passwd)" in warning


def test_a_program_without_logging_shows_warnings_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    library.warn_of_torch("there are none here")
    library.logger.info("a detail")
    forget()
    shown = capsys.readouterr().err
    assert "No compiled kernels: there are none here." in shown
    assert "a detail" not in shown


def test_the_cache_folder_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("elsewhere platformdirs knows another folder")
    for present in (True, False):
        if not present:
            monkeypatch.setitem(sys.modules, "platformdirs", None)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert cache_folder("bench") == tmp_path / ".cache" / "forerun" / "bench"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
        assert cache_folder("kernels") == tmp_path / "own" / "forerun" / "kernels"
