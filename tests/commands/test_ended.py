"""The card of `forerun generate` says why the answer ended; lack of memory ends every command with one line."""

import pytest
import torch
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import TARGET
from kit.command import refusal

STORIES = str(TARGET)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-n", "4"], "at max_tokens, 4"),
        (["-n", "500", "--max-model-len", "24"], "at the context limit, 24 tokens including the prompt"),
        (["-n", "60", "--stop", "."], "at the stop string '.'"),
    ],
)
def test_a_card_says_why_an_answer_ended(options: list[str], reason: str) -> None:
    arguments = ["generate", "--model", STORIES, "-t", "0", *options, "Once upon a time"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert [line.split(maxsplit=1)[1].strip() for line in result.stderr.splitlines() if line.startswith("ended")] == [
        reason
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("Unable to allocate 27.0 MiB"), "Unable to allocate 27.0 MiB"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 byte\nC++ frames"), "memory: 1 byte"),
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
    ],
)
def test_lack_of_memory_is_one_line_that_says_what_to_do(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise error

    monkeypatch.setattr("forerun.commands.answering.build_llm", loaded)
    line = refusal("generate", "--model", STORIES, "hello")
    assert line.startswith("error: not enough memory: choose a smaller model, --quantize or")
    assert line.endswith(f"{told})\n")
