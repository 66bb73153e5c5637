"""Accepted runs become deltas: every token, and every piece of text, has its origin."""

import pytest
import torch

from forerun.accept.commit import Accepted, Origin
from forerun.accept.delta import Delta
from forerun.config import Speculation
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from forerun.tree import HostTree
from kit.checkpoints import TARGET

STORIES = Tokenizer.load(TARGET)


def sequence(params: SamplingParams, max_length: int = 99) -> Sequence:
    maker = RequestChecker(STORIES, 512, max_length, eos_ids=(2,), default=Speculation())
    (made,) = maker.sequences(Request.of([1, 403], params))
    return made


def commit(text: Sequence, run: Accepted, logits: torch.Tensor) -> Delta:
    """The end of a round: the run's delta, after its tokens were added to the sequence."""
    delta = text.delta(run, logits)
    text.extend(len(text.tokens), delta.token_ids, delta.origins)
    return delta


D, T, R, B = Origin.DRAFTED, Origin.TARGET, Origin.RECOVERED, Origin.BONUS
# tokens, parents of the tree's nodes -> origins of the tokens
RUNS = [
    ([407], [-1], [T]),
    ([407], [-1, 0, 1, 2], [R]),
    ([407, 261], [-1, 0, 1, 2], [D, R]),
    ([407, 261, 378], [-1, 0, 1], [D, D, B]),
    ([407, 261], [-1, 0, 0, 2, 3, 4], [D, B]),  # the path ended early, where a sibling went deeper
]


def run_of(parents: list[int], nodes: list[int], tokens: list[int]) -> Accepted:
    return Accepted(HostTree([1] * len(parents), parents), nodes, tokens)


@pytest.mark.parametrize(("tokens", "parents", "origins"), RUNS)
def test_every_token_has_its_origin(tokens: list[int], parents: list[int], origins: list[Origin]) -> None:
    assert run_of(parents, list(range(len(tokens))), tokens).origins == origins


def test_text_that_was_held_back_has_the_origin_of_its_own_token() -> None:
    """The text is held back as the beginning of a stop string, and released a round later."""
    text = sequence(SamplingParams(stop=[" upon us"]))
    logits = torch.zeros(3, 512)
    first = commit(text, run_of([-1], [0], [407]), logits)  # " upon"
    assert (first.text, first.segments) == ("", ())
    second = commit(text, run_of([-1, 0], [0, 1], [261, 378]), logits)
    assert [segment.origin for segment in second.segments] == [T, D, B]
    assert second.text == STORIES.decode([403, 407, 261, 378], skip_special_tokens=True)[len("Once") :]
