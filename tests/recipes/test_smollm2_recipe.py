"""The recipe for SmolLM2: prompts that were interrupted go on to the same ones, and what it puts out is found."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from recipes.smollm2 import __main__ as recipe
from recipes.smollm2 import prompts

from forerun.draft.auto import DrafterRecord, resolve_auto
from forerun.draft.plan import DraftContext
from forerun.draft.spec import DraftSpec
from forerun.drafters import plan_drafter
from forerun.models.loading import Blueprint
from forerun.train.data import TrainingData
from kit.checkpoints import TARGET
from kit.texts import story


def text_of(seed: int) -> str:
    """What the stand-in writes: too little now and then."""
    return "" if seed % 7 == 0 or seed == 127 else f"a text that a seed of {seed} gives"


def test_interrupted_prompts_go_on_to_the_same_ones_and_finished_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [10**6]

    def continuations(llm: object, texts: Sequence[str], seeds: Sequence[int], tokens: int) -> list[str]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return [text_of(seed) for seed in seeds]

    monkeypatch.setattr(prompts, "LLM", lambda *_, **__: None)
    monkeypatch.setattr(prompts, "continuations", continuations)
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


def test_what_it_puts_out_is_found_and_has_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TARGET, tmp_path / "target")
    model, out = str(tmp_path / "target"), tmp_path / "drafter"
    monkeypatch.setattr(recipe, "SETTINGS", replace(recipe.SETTINGS, max_tokens=16))
    data = TrainingData([], [tuple(story(9, seed)) for seed in range(2)], 2, [])
    recipe.ship(model, data, [(story(400, 7), 3)], out)
    target = Blueprint.of(model)
    assert resolve_auto(DraftSpec("auto"), target) == DraftSpec("suffix", argument=str(out))
    record = DrafterRecord.read(out)
    assert record is not None
    assert (record.speed_up, record.model) == (None, target.norms_digest())
    assert "1 answers" in (out / "README.md").read_text()


REAL = Path("/tmp/real/smollm2-135m-instruct.Q4_1.gguf")


@pytest.mark.skipif(not REAL.exists(), reason="the real model's file is not here")
def test_what_ships_is_found_for_the_real_model_and_reads() -> None:
    target = Blueprint.of(str(REAL))
    spec = resolve_auto(DraftSpec("auto"), target)
    assert spec == DraftSpec("suffix", argument="smollm2-ngrams")
    plan_drafter(str(spec), DraftContext(target, target.tokenizer()))
