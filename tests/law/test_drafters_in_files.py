"""Drafters that `--draft python:FILE.py:CLASS` loads change no token, however wrong they are."""

import pytest

from forerun.config import Speculation, Verification
from forerun.llm import LLM
from kit.checkpoints import DATA, TARGET
from kit.unchecked import unchecked
from law.test_conformance_output import BATCHES, MIXED, answers, plain

WRONG, RANDOM = (f"python:{DATA / 'faulty_drafters.py'}:{name}" for name in ("Wrong", "Random"))


@pytest.mark.parametrize("draft", [WRONG, RANDOM, f"mix[ngram,{RANDOM},{WRONG}]"], ids=["wrong", "random", "mix"])
def test_the_output_is_that_of_plain_decoding(draft: str) -> None:
    with unchecked():
        llm = LLM(str(TARGET), draft, dtype="float32")
        for speculation, batch in BATCHES:
            assert answers(llm, MIXED, batch, speculation) == plain(MIXED)[:batch], (speculation, batch)
    assert llm.engine.drafter is not None, "an error has switched it off"
    assert llm.stats.num_drafted > 50
    assert llm.stats.num_accepted < llm.stats.num_drafted / 2


@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_greedy_output_is_that_of_plain_decoding_under_every_rule(verification: Verification) -> None:
    with unchecked():
        llm = LLM(str(TARGET), RANDOM, dtype="float32", verification=verification, speculation=Speculation(4, 2))
        assert answers(llm, (0.0,), 8) == plain((0.0,))
    assert llm.stats.num_drafted > 50
