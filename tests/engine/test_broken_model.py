"""A model that gives NaN for one sequence fails that request by name, and no other request notices."""

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import pytest
import torch

from forerun.errors import ModelError, ModelOutputInvalid
from forerun.llm import LLM
from forerun.models.decoder import States
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from forerun.verify.rules import block_law, token_law, walk
from kit.checkpoints import SMALL, TARGET

NUM_GOOD = 5
BROKEN = {"NaN": math.nan, "nothing": -math.inf}


@cache
def loaded(draft: str | None, verification: str) -> LLM:
    spec = f"model:{SMALL}" if draft == "model" else draft
    return LLM(str(TARGET), spec, dtype="float32", max_model_len=96, verification=cast(Any, verification))


def asked(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "seed": 4, "ignore_eos": True} | changes)


@pytest.mark.short(
    "None-coupled-greedy-NaN", "model-coupled-top_p-nothing", "model-token-plain-NaN", "model-block-greedy-nothing"
)
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("params", [asked(), asked(temperature=0), asked(top_p=0.9)], ids=["plain", "greedy", "top_p"])
@pytest.mark.parametrize(
    ("draft", "verification"), [(None, "coupled"), ("model", "coupled"), ("model", "token"), ("model", "block")]
)
def test_logits_that_are_none_are_an_error_of_the_model(
    draft: str | None, verification: str, params: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, read = loaded(draft, verification), Runner.read
    broken: list[int] = []

    def poisoned(self: Runner, reads: Sequence[Read], *others: Any, **named: Any) -> States:
        states, first = read(self, reads, *others, **named), 0
        for own in reads:
            sequence = llm.engine.sequences.get(own.seq_id)
            late = sequence is not None and sequence.request_id in broken and sequence.num_output >= NUM_GOOD
            if late and self is llm.engine.runner:
                states.logits[first : first + len(own.judged)] = BROKEN[kind]
            first += len(own.judged)
        return states

    honest = llm.generate("The little dog", asked(seed=9))[0].outputs[0].token_ids
    alone = llm.generate("Once upon a time", params)[0].outputs[0].token_ids
    monkeypatch.setattr(Runner, "read", poisoned)
    mate, culprit = llm.stream("The little dog", asked(seed=9)), llm.stream("Once upon a time", params)
    first = next(culprit)
    broken.append(first.request_id)
    said = [*first.token_ids]
    with pytest.raises(ModelOutputInvalid, match="NaN or no number at all: check that its files are whole") as caught:
        said.extend(token for delta in culprit for token in delta.token_ids)
    assert isinstance(caught.value, ModelError)
    assert NUM_GOOD <= len(said) < 20
    if verification == "coupled":
        assert tuple(said) == alone[: len(said)]
    tokens = tuple(token for delta in mate for token in delta.token_ids)
    assert tokens == honest or verification != "coupled"
    assert len(tokens) == 20
    assert not llm.engine.has_work


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draw_from_nothing_says_so(temperature: float) -> None:
    draws = Draws([RowSampling(0, SamplingParams(temperature=temperature), 0, 0, [1], 1)], 3, rejection=True)
    for logits in ([-math.inf] * 3, [0.0, math.nan, 1.0]):
        assert draws.draw(torch.tensor([logits]), draws.roots()).tolist() == [-1]
        assert draws.recover(torch.tensor([logits]), draws.roots()).tolist() == [-1]
        assert draws.probs(torch.tensor([logits]), draws.roots()).isnan().any()


@pytest.mark.parametrize("rule", [token_law, block_law])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_is_drawn_in_silence_behind_a_law_that_is_none(rule: Any, place: int) -> None:
    """Whatever coins are tossed, a chain's walk stops before NaN, or has NaN for the law of the next token."""
    tree = DraftTree.chains(torch.tensor([0]), torch.tensor([[1, 2]]))
    p = torch.full((3, 4), 0.25)
    p[place] = math.nan
    law = rule(tree, p, torch.arange(3)[None])
    for coins in itertools.product((0.0, 0.999999), repeat=3):
        stop = int(walk(tree, law, torch.tensor([coins])).node)
        assert stop <= place
        assert law.after[stop].isnan().any() == (stop == place)
