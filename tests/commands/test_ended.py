"""The card of `forerun generate` says why the answer ended."""

import pytest
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import TARGET

STORIES = str(TARGET)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["-n", "4"], "at max_tokens, 4"),
        (["-n", "500", "--max-model-len", "24"], "at the context limit, 24 tokens including the prompt"),
        (["-n", "60", "--stop", "."], "at the stop string '.'"),
    ],
)
def test_a_card_says_why_an_answer_ended(options: list[str], told: str) -> None:
    arguments = ["generate", "--model", STORIES, "-t", "0", *options, "Once upon a time"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert [line.split(maxsplit=1)[1].strip() for line in result.stderr.splitlines() if line.startswith("ended")] == [
        told
    ]
