"""The table of clients in docs/serving.md is that of the script which tries them, and each has its file."""

import re

from clients.table import CLIENTS
from kit.checkpoints import ROOT

SCRIPTS = ROOT / "tests" / "clients" / "scripts"


def test_the_table_in_the_docs_has_the_versions_that_are_tried() -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| `([^`]+==[^`]+)` \|", page, re.MULTILINE)
    assert rows == [(client.name, f"{client.package}=={client.version}") for client in CLIENTS]


def test_every_client_has_its_file_and_every_file_its_client() -> None:
    assert {client.script for client in CLIENTS} == {path.name for path in SCRIPTS.glob("with_*.py")}
