"""A model that nobody here trained says what its author's own program says."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import LLM, SamplingParams


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_stories260k_prints_its_authors_text(target_dir: Path, draft_dir: Path, draft: str | None) -> None:
    """200 greedy tokens behind the first token, as printed by a program in C."""
    llm = LLM(str(target_dir), f"model:{draft_dir}" if draft == "model" else draft, dtype="float32", speculation=4)
    (result,) = llm.generate([1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 200
    assert result.outputs[0].text.strip() == (target_dir / "expected_greedy_200.txt").read_text().strip()
    assert draft is None or llm.stats.num_accepted > 20
