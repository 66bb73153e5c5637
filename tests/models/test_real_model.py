"""A model trained elsewhere gives the text of its author's program."""

import pytest

from forerun import LLM, SamplingParams
from kit.checkpoints import SMALL, TARGET


@pytest.mark.parametrize("draft", [None, "ngram", "model"])
def test_stories260k_gives_the_text_of_its_authors_program(draft: str | None) -> None:
    """200 greedy tokens behind the first token, as printed by a program in C."""
    llm = LLM(str(TARGET), f"model:{SMALL}" if draft == "model" else draft, dtype="float32", speculation=4)
    (result,) = llm.generate([1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 200
    assert result.outputs[0].text.strip() == (TARGET / "expected_greedy_200.txt").read_text().strip()
    assert draft is None or llm.stats.num_accepted > 20
