"""Chains drafted in one call, step by step, and as trees of width 1 are the same, and leave the same state."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from draft.rounds import Row, committed
from forerun.config import Quantization
from forerun.draft.base import Budget, Draft
from forerun.draft.model.model import ModelDrafter
from forerun.kernels.sampling import find_sampling_kernels
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL
from kit.compiled import require_compiler

VOCAB = 512
FORMATS: list[tuple[str, Quantization | None]] = [
    *(("float32", None), ("bfloat16", None), ("float16", None)),
    *(("bfloat16", "int8"), ("bfloat16", "int4")),
]


class StepByStep(Runner):
    """A runner without the single call for chains."""

    @override
    def draw_chains(self, *arguments: object, **more: object) -> None:
        return None


class AsTrees(Draws):
    """Draws that claim not to be on the host, so that chains are grown as trees."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_host = False


def drafter_of(blueprint: Blueprint, way: str, vocab: int, num_tokens: int = 2048) -> ModelDrafter:
    runner = blueprint.load(num_tokens)
    if way == "step by step":
        runner = StepByStep(runner.decoder, runner.cache)
    return ModelDrafter(runner, vocab)


LAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 2.0, "logit_bias": {7: 3.0}, "min_tokens": 9},
]


def draws_of(way: str, rows: Sequence[Row], laws: Sequence[dict[str, Any]], vocab: int) -> Draws:
    samplings = [
        RowSampling(row.seq_id, SamplingParams(**law), row.seq_id, 0, list(row.text), 1, (2,), [(5, 6), (7, 8, 9)])
        for row, law in zip(rows, laws, strict=True)
    ]
    kind = AsTrees if way == "as trees" else Draws
    return kind(samplings, vocab, num_ids=vocab - 3, kernels=find_sampling_kernels())


def cached(drafter: ModelDrafter, seq_id: int) -> Tensor:
    """Keys and values of the committed text and of all draft tokens after it."""
    cache, tail = drafter.runner.cache, len(drafter.sequences[seq_id].tail)
    start = cache.start(seq_id)
    return torch.stack([cache.keys, cache.values])[:, :, :, start : start + cache.length(seq_id) + tail].clone()


def rounds(
    way: str, blueprint: Blueprint, vocab: int, min_survivals: Sequence[float] = (0.0,)
) -> list[tuple[Draft, list[Tensor], list[dict[tuple[int, int], int]]]]:
    """Random rounds of several sequences: drafts, and the state they left in the cache and the drafter."""
    rng, drafter, found = random.Random(5), drafter_of(blueprint, way, vocab), []
    texts = {seq_id: [rng.randrange(vocab - 3) % VOCAB for _ in range(3 + 7 * seq_id)] for seq_id in range(4)}
    drafter.observe(committed([Row(s, t) for s, t in texts.items()]))
    for _ in range(16):
        rows = [Row(s, list(texts[s])) for s in sorted(rng.sample(sorted(texts), rng.randint(1, 4)))]
        budgets = [Budget(rng.randint(0, 6), min_survival=rng.choice(min_survivals)) for _ in rows]
        laws = [rng.choice(LAWS) for _ in rows]
        draft = drafter.propose(draws_of(way, rows, laws, vocab), budgets)
        drafted = [row.seq_id for row, budget in zip(rows, budgets, strict=True) if budget.depth]
        left = [cached(drafter, s) for s in drafted]
        found.append((draft, left, [dict(drafter.sequences[s].tail) for s in drafted]))
        for i, row in enumerate(rows):
            draft_tokens = [token for token in draft.tree.tokens[i, 1:].tolist() if token >= 0]
            texts[row.seq_id] += [*draft_tokens[: rng.randint(0, len(draft_tokens))], rng.randrange(vocab - 3) % VOCAB]
        starts = [len(row.text) - 1 for row in rows]
        drafter.observe(committed([Row(row.seq_id, texts[row.seq_id]) for row in rows], starts))
    return found


@pytest.mark.short("bfloat16-None-576-free", "bfloat16-int8-512-priced")
@pytest.mark.parametrize("min_survivals", [(0.0,), (0.0, 1e-4, 0.01, 0.1)], ids=["free", "priced"])
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 64])
@pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
def test_all_three_ways_give_the_same_chains_and_state(
    dtype: str, quantize: Quantization | None, vocab: int, min_survivals: tuple[float, ...]
) -> None:
    """Also if the target's vocabulary is padded more than the drafter's; min_survival ends them at the same token."""
    require_compiler()
    blueprint = Blueprint.of(str(SMALL), dtype=dtype, quantize=quantize, kernels="native")
    once, steps, trees = (
        rounds(way, blueprint, vocab, min_survivals) for way in ("at once", "step by step", "as trees")
    )
    for others in (steps, trees):
        for (draft, left, state), (other, other_left, other_state) in zip(once, others, strict=True):
            assert torch.equal(draft.tree.tokens, other.tree.tokens)
            assert torch.equal(draft.tree.parents, other.tree.parents)
            assert all(torch.equal(a, b) for a, b in zip(left, other_left, strict=True))
            assert state == other_state
            if draft.survival is not None and other.survival is not None:
                torch.testing.assert_close(draft.survival, other.survival, rtol=1e-4, atol=1e-6)
    lengths = [int(row.sum()) - 1 for draft, _, _ in once for row in draft.tree.valid]
    assert max(lengths) > 4
    if len(min_survivals) > 1:
        whole = [int(row.sum()) - 1 for draft, _, _ in rounds("at once", blueprint, vocab) for row in draft.tree.valid]
        assert 0 < sum(lengths) < sum(whole)


def test_with_too_little_cache_chains_are_drafted_step_by_step() -> None:
    """With a cache too small for all chains at once, the tokens that fit are those of the steps."""
    require_compiler()
    blueprint = Blueprint.of(str(SMALL), dtype="float32", kernels="native")
    texts = [list(range(40 + i, 100 + i)) for i in range(2)]
    for num_tokens in (128, 192, 256):
        trees = []
        for way in ("at once", "step by step"):
            drafter = drafter_of(blueprint, way, VOCAB, num_tokens)
            rows = [Row(i, text) for i, text in enumerate(texts)]
            drafter.observe(committed(rows))
            trees.append(drafter.propose(draws_of(way, rows, LAWS[1:3], VOCAB), [Budget(9), Budget(9)]).tree)
            drafter.runner.cache.check()
        assert torch.equal(trees[0].tokens, trees[1].tokens)
