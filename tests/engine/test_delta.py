"""Accepted runs become deltas: every token, and every piece of text, has its origin."""

import pytest
import torch

from forerun.accept.commit import Accepted, Origin
from forerun.accept.delta import Delta
from forerun.config import Speculation
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
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


def test_the_prompt_is_scored_once_however_often_it_is_read() -> None:
    """In chunks, and again from its first token after a restart."""
    prompt, logits = [1, *range(300, 311)], torch.randn(12, 512, generator=torch.Generator().manual_seed(0))

    def scores(*runs: list[int]) -> list[TokenLogprobs]:
        maker = RequestChecker(STORIES, 512, 99, eos_ids=(2,), default=Speculation())
        (text,) = maker.sequences(Request.of(prompt, SamplingParams(prompt_logprobs=2)))
        for chunks in runs:
            text.restart()
            for size in chunks:
                if text.scores_prompt:
                    text.score_prompt(size, logits[text.num_read : text.num_read + size])
                text.num_read += size
        return text.prompt_logprobs

    whole = scores([12])
    assert [each.token_id for each in whole] == prompt[1:]
    for runs in ([[5, 7]], [[5], [12]], [[4, 4], [3, 9]], [[8], [3, 3], [1, 11]], [[12], [12]]):
        assert scores(*runs) == whole


def test_tokens_of_a_delta_that_was_not_committed_are_forgotten_by_a_restart() -> None:
    """Its round failed. They come again, and with them the text that the stop strings held back."""
    text, fresh = (sequence(SamplingParams(stop=[" upon us"], max_tokens=3)) for _ in range(2))
    logits, runs = torch.zeros(3, 512), [run_of([-1], [0], [407]), run_of([-1, 0], [0, 1], [261, 378])]
    for run in runs:
        text.delta(run, logits)
        text.restart()
        again, expected = commit(text, run, logits), commit(fresh, run, logits)
        assert (again.segments, again.finish_reason) == (expected.segments, expected.finish_reason)
