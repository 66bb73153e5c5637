"""The recipe for SmolLM2: prompts that were interrupted go on to the same ones, and what it puts out is found."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from recipes.smollm2 import prompts
from recipes.smollm2.__main__ import FILES, ship

from forerun.draft.auto import RECORD, DrafterRecord


def text_of(seed: int) -> str:
    """What the stand-in writes: too little now and then."""
    return "" if seed % 7 == 0 or seed == 127 else f"a text that a seed of {seed} gives"


def test_interrupted_prompts_go_on_to_the_same_ones_and_finished_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [10**6]

    def answered(llm: object, asked: Sequence[str], seeds: Sequence[int], tokens: int) -> list[str]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return [text_of(seed) for seed in seeds]

    monkeypatch.setattr(prompts, "LLM", lambda *_, **__: None)
    monkeypatch.setattr(prompts, "answered", answered)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    prompts.write_prompts("model", 160, whole)
    for turn in range(4):
        left[0] = 2 + turn
        try:
            prompts.write_prompts("model", 160, parts)
        except KeyboardInterrupt:
            continue
    assert parts.read_text() == whole.read_text()
    numbers = [json.loads(line)["number"] for line in whole.read_text().splitlines()]
    assert numbers == sorted(set(numbers))
    assert 100 < len(numbers) < 160
    left[0] = 0
    prompts.write_prompts("model", 160, whole)


def test_what_it_puts_out_has_a_record_without_a_speed_and_a_card(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name in FILES:
        (made / name).write_bytes(b"{}")
    record = DrafterRecord("mtp", "", "0123", 0.5, (0.5,) * 4, (1.5, 1.75, 1.875, 1.9375), 0.7, "4567")
    (made / RECORD).write_text(record.text())
    look = {"step": 640, "seconds": 1800.0, "held_out": {}}
    (made / "train.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n" + json.dumps(look) + "\n")
    ship(made, tmp_path / "out")
    found = DrafterRecord.read(tmp_path / "out")
    assert found is not None
    assert (found.speed_up, found.mixed_with, found.model) == (None, "suffix", "4567")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "640 steps" in card
    assert "| 2 | 0.50 | 1.75 |" in card
