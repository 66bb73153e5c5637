"""Ranks that share a model give the tokens and log-probabilities of a process that has it alone, to the bit.

Two ranks and four, in every number format, for every drafter of the conformance table, chains and trees, greedy and
sampled, in batches that come and go. A rank that is killed costs no answer a token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from drafters import DOCUMENTED, DRAFTERS, settled, spelled
from equality import Answer, Asked, decode, decode_plain
from fuzz import Bench, number_format

from forerun.config import Speculation
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.texts import story

NUM_TOKENS = 8192
WORLDS, FORMATS = (2, 4), ("float32", "bfloat16", "int8", "int4")
SHAPES = [Speculation(depth=4), Speculation(4, 3, 12)]
ASKED = [
    Asked(story(length, seed), SamplingParams(temperature=seed % 3 / 2, seed=seed, max_tokens=24, logprobs=0))
    for seed, length in enumerate((1, 9, 70, 33, 150, 12))
]


@dataclass(slots=True)
class SharedBench(Bench):
    """A target that ranks share. There is one cache, which every engine begins empty."""

    def with_cache(self, runner: Runner, num_tokens: int) -> Runner:
        if runner is not self.runner:
            return Runner.of(runner.decoder, num_tokens, 16)
        runner.clear()
        return runner

    @classmethod
    def over(cls, alone: Bench, world: int, dtype: str) -> "SharedBench":
        target = Blueprint.of(str(TARGET), **number_format(dtype), tensor_parallel_size=world)
        return cls(target, alone.draft, target.load(NUM_TOKENS), alone.reader)


@dataclass(frozen=True)
class Shared:
    """What ranks answer is compared with what one process answers."""

    ranks: SharedBench
    plain: list[Answer]


@pytest.fixture(scope="module", params=[f"{world}-{dtype}" for world in WORLDS for dtype in FORMATS])
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    world, dtype = request.param.split("-")
    alone = Bench.of(dtype=dtype)
    bench = SharedBench.over(alone, int(world), dtype)
    yield Shared(bench, decode_plain(alone, ASKED))
    assert bench.runner.decoder.ranks is not None, "nobody shares it"
    bench.runner.decoder.ranks.stop()


def drafter_of(bench: Bench, name: str, runner: Runner) -> Drafter:
    """A drafter of the table, beside ranks that share the target."""
    if name in DOCUMENTED:
        return DOCUMENTED[name]()
    plan = plan_drafter(spelled(name), DraftContext(bench.target, bench.target.tokenizer()))
    drafter = plan.build(dict.fromkeys(plan.models, NUM_TOKENS), None, runner)
    assert drafter is not None, f"{name} builds no drafter"
    return settled(drafter)


@pytest.mark.short("2-int4", "4-bfloat16")
def test_ranks_say_what_one_process_says(shared: Shared) -> None:
    assert decode(shared.ranks, ASKED, False).answers == shared.plain
    assert decode(shared.ranks, ASKED, False, max_num_seqs=2, chunk_tokens=32).answers == shared.plain


@pytest.mark.short("2-int4-suffix", "2-int4-early-exit:1", "2-int4-eagle", "4-bfloat16-mix-of-3", "4-bfloat16-mtp")
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_keeps_the_bits(shared: Shared, name: str) -> None:
    for shape in SHAPES:
        decoded = decode(shared.ranks, ASKED, shape, lambda runner: drafter_of(shared.ranks, name, runner))
        assert decoded.answers == shared.plain, f"{name}, {shape}"
        assert decoded.stats.num_drafted > 0, f"{name} drafts nothing"
