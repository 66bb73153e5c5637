"""What tests of several drafters claim: acceptance that a reference gives too, and drafts that change no token."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forerun.config import Speculation, Verification
from forerun.draft.base import Draft
from forerun.draft.model.follower import Follower
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.output import RequestOutput
from forerun.sampling.params import SamplingParams
from kit.texts import STARTS, VOCAB


def tokens_of(results: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """What all samples say."""
    return [sample.token_ids for result in results for sample in result.outputs]


def num_accepted(model: Path, draft: str, depth: int, params: SamplingParams) -> tuple[int, int]:
    """How many guesses of chains of this depth are drafted, and accepted."""
    with LLM(str(model), draft, dtype="float32", speculation=Speculation(depth)) as llm:
        llm.generate(list(STARTS), params)
        return llm.stats.num_drafted, llm.stats.num_accepted


def assert_acceptance(
    model: Path, llm: LLM, depth: int, params: SamplingParams, guesses: Callable[[list[int], Tensor], list[int]]
) -> int:
    """That chains of this depth are accepted as these guesses would be; the number of them that would.

    Guesses are asked for at the places where the engine's rounds begin: with a text up to its root, and the states of
    the drafter's taps behind all of it but the root.
    """
    runner, offered, right = Blueprint.of(str(model), dtype="float32").load(1024), [0] * depth, [0] * depth
    assert llm.drafter is not None
    for seq_id, prompt in enumerate(STARTS):
        (result,) = llm.generate(prompt, params)
        text, root = [*result.prompt_token_ids, *result.outputs[0].token_ids], len(result.prompt_token_ids)
        taps = runner.read([Read(seq_id, text)], taps=llm.drafter.taps).taps
        assert taps is not None
        while root < len(text) - 1:  # the first token of an answer comes with the prompt, and is the first root
            drafted = guesses(text[: root + 1], taps[:root])[: min(depth, len(text) - root - 2)]
            pairs = zip(drafted, text[root + 1 :], strict=False)
            accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for place in range(min(len(drafted), accepted + 1)):
                offered[place] += 1
                right[place] += place < accepted
            root += 1 + accepted
    for counted, expected in ((llm.stats.offered_at_depth, offered), (llm.stats.accepted_at_depth, right)):
        assert [*counted, *[0] * (depth - len(counted))] == expected
    return sum(right)


def accepted_by_shape(
    model: Path,
    draft: str,
    shapes: Mapping[str, Speculation],
    params: SamplingParams,
    verification: Verification = "coupled",
) -> dict[str, int]:
    """How many guesses are accepted in each shape of draft. Each says what plain decoding says, and leaves nothing."""
    plain, counts = tokens_of(LLM(str(model), dtype="float32").generate(list(STARTS), params)), {}
    for name, shape in shapes.items():
        llm = LLM(str(model), draft, dtype="float32", speculation=shape, verification=verification)
        assert tokens_of(llm.generate(list(STARTS), params)) == plain
        counts[name] = llm.stats.num_accepted
        assert llm.stats.num_drafted <= llm.stats.num_rounds * 20
        for state in ("sequences", "outputs", "blocks", "states"):
            assert not getattr(llm.drafter, state, None), state
        if isinstance(llm.drafter, Follower):
            assert llm.drafter.runner.cache.num_rows == 0
            llm.drafter.runner.cache.check()
    return counts


def assert_same(draft: Draft, expected: Draft) -> None:
    """Equal to the bit: guesses, laws, confidence."""
    for name in ("tokens", "parents"):
        assert torch.equal(getattr(draft.tree, name), getattr(expected.tree, name)), name
    assert (draft.survival is None) == (expected.survival is None)
    if draft.survival is not None and expected.survival is not None:
        assert torch.equal(draft.survival, expected.survival)
    assert (draft.tree.q is None) == (expected.tree.q is None)
    if draft.tree.q is not None and expected.tree.q is not None:
        assert torch.equal(draft.tree.q.row, expected.tree.q.row)
        assert torch.equal(draft.tree.q.dense(VOCAB), expected.tree.q.dense(VOCAB))


def assert_empty(llm: LLM) -> None:
    """No text, no keys and values, no index is held for anyone, and nobody waits for a round."""
    engine, runners = llm.engine, [llm.engine.runner]
    held = [engine.sequences, engine.scheduler.running, engine.scheduler.waiting, engine.active.readers]
    held += [engine.active.samples, llm.driver.jobs, llm.driver.seat]
    held += [getattr(engine.drafter, state, None) for state in ("sequences", "texts", "known")]
    assert not any(held)
    assert not engine.has_work
    assert not engine.recovery.unfinished
    if isinstance(engine.drafter, Follower):
        runners.append(engine.drafter.runner)
    for runner in runners:
        assert runner.cache.num_rows == 0
        assert not runner.tails
        runner.cache.check()
