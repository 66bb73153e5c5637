"""The page's files: all are packaged, none loads anything from other servers, and every parameter is on the form."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.serve.page_routes import FILES, POLICY
from forerun.serve.schema import SAMPLING
from kit.checkpoints import ROOT
from kit.servers import Running, drafting, running

FOLDER = ROOT / "src" / "forerun" / "serve" / "page"
OWN = [path for path in sorted(FOLDER.iterdir()) if not path.name.startswith("uplot")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("me secret\n")
    keys.chmod(0o600)
    with drafting() as llm, running(llm, api_keys=keys) as found:
        yield found


@pytest.mark.parametrize("path", FILES)
def test_files_are_served_without_a_key_with_their_type_and_a_strict_policy(server: Running, path: str) -> None:
    with server.http() as http:
        answer = http.get(path)
    name, kind = FILES[path]
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].partition(";")[0] == kind
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY


def test_the_settings_of_the_page_need_the_key(server: Running) -> None:
    with server.http() as http:
        assert http.get("/page/settings").status_code == 401
        settings = http.get("/page/settings", headers={"Authorization": "Bearer secret"}).json()
    assert settings["fingerprint"] == server.llm.fingerprint
    assert settings["arms"] == list(server.llm.drafter_names)
    assert settings["chat"] is False
    assert settings["speculation"] == {"depth": 3, "width": 1}


def test_every_file_has_an_address_and_ships() -> None:
    assert {name for name, _ in FILES.values()} | {"uplot.LICENSE"} == {path.name for path in FOLDER.iterdir()}
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["forerun"]
    assert "serve/page/*" in data
    assert (FOLDER / "uplot.min.js").stat().st_size < 60_000


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_files_load_nothing_from_other_servers_and_do_not_build_markup_from_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?:https?:)?//\w+\.\w+", text.replace("http://www.w3.org/2000/svg", ""))
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
        assert way not in text
    assert len(text.splitlines()) <= 400


def test_every_sampling_parameter_is_on_the_form() -> None:
    names = set(re.findall(r'name: "(\w+)"', (FOLDER / "fields.js").read_text(encoding="utf-8")))
    # one answer is shown, and a stream has no log-probabilities of its prompt
    assert {*SAMPLING, "logit_bias"} - {"n", "prompt_logprobs"} <= names
    assert {"depth", "width", "nodes", "drafter"} <= names
