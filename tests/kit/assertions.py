"""Assertions for tests of several drafters: acceptance equal to a reference's, and drafts that change no token."""

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
    """The token ids of all samples."""
    return [sample.token_ids for result in results for sample in result.outputs]


def num_accepted(model: Path, draft: str, depth: int, params: SamplingParams) -> tuple[int, int]:
    """The numbers of drafted and accepted tokens for chains of this depth."""
    with LLM(str(model), draft, dtype="float32", speculation=Speculation(depth)) as llm:
        llm.generate(list(STARTS), params)
        return llm.stats.num_drafted, llm.stats.num_accepted


def assert_acceptance(
    model: Path, llm: LLM, depth: int, params: SamplingParams, reference_draft: Callable[[list[int], Tensor], list[int]]
) -> int:
    """Assert that chains of this depth are accepted as those of `reference_draft` would be; the number accepted.

    `reference_draft` is called where the engine's rounds begin: with a text up to its root, and the states of the
    drafter's taps for all of it but the root.
    """
    runner, offered, right = Blueprint.of(str(model), dtype="float32").load(1024), [0] * depth, [0] * depth
    assert llm.drafter is not None
    for seq_id, prompt in enumerate(STARTS):
        (result,) = llm.generate(prompt, params)
        text, root = [*result.prompt_token_ids, *result.outputs[0].token_ids], len(result.prompt_token_ids)
        taps = runner.read([Read(seq_id, text)], taps=llm.drafter.taps).taps
        assert taps is not None
        while root < len(text) - 1:  # the first token of an answer comes with the prompt, and is the first root
            draft_tokens = reference_draft(text[: root + 1], taps[:root])[: min(depth, len(text) - root - 2)]
            pairs = zip(draft_tokens, text[root + 1 :], strict=False)
            accepted = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            for place in range(min(len(draft_tokens), accepted + 1)):
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
    """The number of accepted tokens for each shape of draft.

    Asserts that the output is that of plain decoding and that the drafter holds no state afterwards.
    """
    plain, counts = tokens_of(LLM(str(model), dtype="float32").generate(list(STARTS), params)), {}
    for name, shape in shapes.items():
        llm = LLM(str(model), draft, dtype="float32", speculation=shape, verification=verification)
        assert tokens_of(llm.generate(list(STARTS), params)) == plain
        counts[name] = llm.stats.num_accepted
        assert llm.stats.num_drafted <= llm.stats.num_rounds * 20
        for state in ("sequences", "outputs", "blocks"):
            assert not getattr(llm.drafter, state, None), state
        if isinstance(llm.drafter, Follower):
            assert not llm.drafter.states.waiting
            assert llm.drafter.runner.cache.num_rows == 0
            llm.drafter.runner.cache.check()
        else:
            assert not getattr(llm.drafter, "states", None)
    return counts


def assert_same(draft: Draft, expected: Draft) -> None:
    """Assert that tokens, parents, survival and laws are equal to the bit."""
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
    """Assert that the engine holds no text, cache row or index of any sequence, and that no job waits for a round."""
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
