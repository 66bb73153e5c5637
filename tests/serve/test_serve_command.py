"""The command: mistakes give one line before anything is loaded, and missing packages are named with the fix."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import InvalidRequest, MissingPackage
from forerun.serve import settings
from forerun.serve.access import ApiKeys, warn_if_readable
from forerun.serve.settings import ServeSettings, require_packages, served_name
from kit.checkpoints import TARGET
from kit.command import refusal

MODEL = str(TARGET)


def message_of(*arguments: str) -> str:
    return refusal("serve", "--model", MODEL, *arguments)


def test_missing_packages_are_named_with_the_command_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing, words in (
        (["no_a"], "no_a, which is not installed"),
        (["no_a", "no_b"], "no_a and no_b, which are not installed"),
        (["no_a", "no_b", "no_c"], "no_a, no_b and no_c, which are not installed"),
    ):
        monkeypatch.setattr(settings, "REQUIRED_PACKAGES", ("json", *missing))
        with pytest.raises(MissingPackage, match=rf"needs {words}: pip install 'forerun\[serve\]'"):
            require_packages()
    assert "pip install 'forerun[serve]'" in message_of()


def test_a_model_is_served_under_its_given_name_and_a_gguf_file_under_its_file_name() -> None:
    for given, name in (
        ("/models/smollm2-135m.Q4_1.gguf", "smollm2-135m.Q4_1"),
        ("big-Q8_0-00001-of-00003.gguf", "big-Q8_0"),
        ("owner/name", "owner/name"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("./folder", "./folder"),
        ("stdlib", "stdlib"),
    ):
        assert served_name(given) == ServeSettings().named(given).served_model_name == name
        assert ServeSettings(served_model_name="mine").named(given).served_model_name == "mine"


def test_mistakes_are_reported_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr("forerun.commands.answering.build_llm", loaded)
    (tmp_path / "empty").write_text("# nobody\n")
    (tmp_path / "long").write_text("a b c\n")
    assert "cannot be read (No such file or directory)" in message_of("--api-keys", str(tmp_path / "none"))
    assert "holds no key" in message_of("--api-keys", str(tmp_path / "empty"))
    assert "line 1, has 3 words" in message_of("--api-keys", str(tmp_path / "long"))
    assert "give both, or neither" in message_of("--tls-key", "k.pem")
    assert "'collector:4318' is not a URL" in message_of("--otlp-traces-endpoint", "collector:4318")
    assert "tls_key: no.pem cannot be read (No such file" in message_of("--tls-key", "no.pem", "--tls-cert", "no.pem")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = message_of("--port", str(taken.getsockname()[1]))
    assert "the server cannot listen on" in in_use
    assert "name another port, or 0 for any free one" in in_use
    wrong_host = message_of("--host", "no such host")
    assert "host: the server cannot listen on no such host:8000" in wrong_host
    assert "name an address of this machine" in wrong_host


@pytest.mark.parametrize("field", ["max_queue", "max_body_bytes", "port", "drain_s", "request_s"])
def test_settings_are_checked(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        ServeSettings(**dict[str, Any]({field: -1.0 if field.endswith("_s") else -1}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", r"cannot be read \(it is not UTF-8\)"),
        (b"a k1\nb k1\n", "line 2, repeats a key: choose another one"),
        ("k\u00fc".encode(), "line 1: a key must be printable ASCII"),
    ],
)
def test_an_invalid_file_of_keys_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        ApiKeys.read(tmp_path / "keys")


@pytest.mark.skipif(os.name != "posix", reason="permissions are of POSIX")
def test_a_file_of_keys_that_other_users_can_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("k1")
    for mode, warned in ((0o600, False), (0o640, True), (0o604, True)):
        (tmp_path / "keys").chmod(mode)
        caplog.clear()
        warn_if_readable(tmp_path / "keys")
        assert ("chmod 600" in caplog.text) == warned


def test_a_byte_order_mark_in_a_file_of_keys_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfa k1\n")
    assert ApiKeys.read(tmp_path / "keys").tenant("Bearer k1") == "a"
