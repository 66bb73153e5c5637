"""`forerun prove --server` on real servers of forerun's: it agrees with the library, faults planted or not."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from forerun import cli
from forerun.config import Speculation
from forerun.prove import ProofWorkload, prove
from forerun.prove.chi_square import LEVEL
from kit.servers import drafting, running
from kit.unchecked import unchecked
from prove.mutants import LAW_MUTANTS, TOKEN_MUTANTS, planted

PROMPTS = ["Once upon a time", "Lily had a red ball", "Tom and his dog"]


def ask(url: str, folder: Path, num_texts: int) -> Result:
    """The command's result."""
    file = folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    where = ["--server", url, "--prompts", str(file), "--num-prompts", "3", "-n", "96", "--num-texts", str(num_texts)]
    patient = ["--time-limit", "3000"]  # on a busy machine the default would cut the texts short
    return CliRunner().invoke(cli.app, ["prove", *where, *patient, "--json"], env={"OPENAI_API_KEY": ""})


@pytest.mark.full
def test_the_proof_holds_for_an_exact_server_as_for_the_library(tmp_path: Path) -> None:
    with unchecked(), drafting() as llm:
        report = prove(llm, PROMPTS, ProofWorkload(3, 12, (0.0,), (1,), (Speculation(3),), num_texts=100))
        with running(llm) as server:
            result = ask(server.url, tmp_path, 200)
    assert report.holds
    assert result.exit_code == 0, result.output
    report_object = json.loads(result.stdout)
    assert report_object["holds"] is True
    assert report_object["equality"]["num_drafted"] > 0
    assert report_object["equality"]["differences"] == []


@pytest.mark.short("a-draft-token-accepted-unseen")
@pytest.mark.parametrize("name", list(TOKEN_MUTANTS), ids=lambda name: name.replace(" ", "-"))
def test_a_wrong_token_is_found_through_the_interface(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trees, since two of the faults are in trees only."""
    planted(name, monkeypatch)
    with unchecked(), drafting(speculation=Speculation(3, 2)) as llm, running(llm) as server:
        result = ask(server.url, tmp_path, 100)
    assert result.exit_code == 1, result.output
    report_object = json.loads(result.stdout)
    assert report_object["faulty"] is True
    assert "fault" in {each["meaning"] for each in report_object["equality"]["differences"]}


@pytest.mark.full
def test_a_wrong_distribution_is_found_through_the_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coins that reuse the noise of the draft: at temperature 0 nothing shows, at temperature 1 the law is another.

    The speculating server alone does not fit the exact law, and the counts of twice the texts confirm it.
    """
    LAW_MUTANTS["coins reuse the draft's noise"].plant(monkeypatch)
    with unchecked(), drafting(verification="token") as llm, running(llm) as server:
        result = ask(server.url, tmp_path, 1500)
    assert result.exit_code == 1, result.output
    report_object = json.loads(result.stdout)
    assert report_object["equality"]["differences"] == []
    (law,) = report_object["laws"]
    assert (law["holds"], law["exact"], law["num_texts"]) == (False, False, 2 * 1500)
    assert law["law_p"] < LEVEL <= law["control_p"]
