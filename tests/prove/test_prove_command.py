"""`forerun prove` from end to end, on the stories pair: what it prints, and its exit status."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import Result

from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import SMALL, TARGET
from kit.command import assert_progress_only, command, refusal
from prove.mutants import TOKEN_MUTANTS, wrong_token_at

PROMPTS = ["Once upon a time", "Lily had a red ball", "Tom and his dog"]
QUICK = ["--num-prompts", "3", "--max-tokens", "12", "--num-texts", "100"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return file


def run(target: Path, draft: Path, prompts: Path, *more: str) -> Result:
    return command("prove", *line(target, draft, prompts), *QUICK, *more, COLUMNS="160")


def line(target: Path, draft: Path, prompts: Path) -> list[str]:
    return ["--model", str(target), "--draft", f"model:{draft}", "--prompts", str(prompts)]


def test_one_prompt_is_counted_in_the_singular(prompts: Path) -> None:
    assert "× 1 prompt, " in run(TARGET, SMALL, prompts, "--num-prompts", "1", "--max-tokens", "4").stdout


def test_the_proof_holds_for_an_exact_engine(prompts: Path) -> None:
    result = run(TARGET, SMALL, prompts)
    assert result.exit_code == 0, result.output
    assert "12 runs × 3 prompts, 432 tokens: identical" in result.stdout
    assert "block verification  ✓ chain of 4: chi-square" in result.stdout
    assert "degrees of freedom, p = " in result.stdout
    assert "not proven" in result.stdout
    assert "Passed:" in result.stdout
    assert_progress_only(result.stderr)


def test_a_planted_fault_is_found_at_its_place(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position 13 of every text: the new token 13 less the length of the prompt."""
    wrong_token_at(13)(monkeypatch)
    result = run(TARGET, SMALL, prompts, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["holds"] is False
    lengths = [len(Tokenizer.load(TARGET).encode(prompt)) for prompt in PROMPTS]
    differences = report["equality"]["differences"]
    assert len(differences) == 12 * 3
    for d in differences:
        assert d["position"] == 13 - lengths[d["request"]]
        assert d["drafted"]["token_id"] == d["plain"]["token_id"] + 1
        assert d["gap"] > 0
        assert (d["drift_from"], d["explained"]) == (None, False)


@pytest.mark.full
def test_the_card_says_what_kind_of_fault_it_is(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TOKEN_MUTANTS["a stale cache row"](monkeypatch)
    result = run(TARGET, SMALL, prompts)
    assert result.exit_code == 1
    assert re.search(r"✗ 12 runs × 3 prompts, \d+ tokens: \d+ answers differ", result.stdout)
    assert re.search(r"request \d \(seed \d, .* tree of depth 4, width 2\), position \d+ of the answer", result.stdout)
    assert "(wrong cache or positions)" in result.stdout
    assert "✓ logits of two texts" in result.stdout
    assert "FAULT" in result.stdout


def test_mistakes_are_one_line_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n{"promt": "typo"}\n')
    message = refusal("prove", *line(TARGET, SMALL, file))
    assert f"{file}:2: there is no prompt among its fields (promt): add" in message
    file = tmp_path / "long.txt"
    file.write_text("fine\n" + "word " * 600)
    message = refusal("prove", *line(TARGET, SMALL, file))
    assert f"{file}:2: " in message
    assert "use shorter --prompts" in message
