"""What an exact engine must show on the reference pair: acceptance as the two models' overlap makes it.

160 texts of 200 tokens at temperature 1 from the first token. Over all positions the overlap is 0.665; acceptance at
depth 1 is lower, and falls with the depth drafted, because rounds start behind rejections, where drafting is harder.
An engine that shows 0.665 there, or the same at every depth, is not exact.
"""

from functools import cache

import pytest

from forerun.config import EngineOptions, Speculation
from forerun.engine.engine import Engine
from forerun.models.runner import Read, Runner
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from law.fuzz import Bench, run

NUM_TEXTS, NUM_TOKENS, TOLERANCE = 160, 200, 0.01


@cache
def texts(depth: int) -> tuple[list[list[int]], Engine]:
    """All texts, drafted to `depth` under `token` verification."""
    bench = Bench.of()
    requests = bench.requests()
    params = [SamplingParams(seed=i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(NUM_TEXTS)]
    engine = bench.engine(
        bench.model_drafter(16384), 16384, options=EngineOptions(max_num_seqs=32, verification="token")
    )
    speculation = Speculation(depth=depth)
    return run(engine, [requests.sequences(Request.of([1], p, speculation))[0] for p in params]), engine


@pytest.mark.full
@pytest.mark.parametrize(("depth", "expected"), [(1, 0.648), (3, 0.633), (5, 0.623)])
def test_acceptance_at_depth_one(depth: int, expected: float) -> None:
    _, engine = texts(depth)
    assert engine.stats.acceptance_at_depth[0] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.full
def test_overlap_of_the_laws() -> None:
    """Σ min(p, q) over all emitted positions."""
    bench, (written, _) = Bench.of(), texts(1)
    total = sum(overlap(bench, text) for text in written)
    assert total / NUM_TEXTS == pytest.approx(0.665, abs=TOLERANCE)


def overlap(bench: Bench, text: list[int]) -> float:
    """The mean over a text's emitted positions."""

    def law(runner: Runner) -> object:
        logits = runner.read([Read(0, text[:-1], judged=range(len(text) - 1))]).logits
        runner.release([0])
        return logits.double().softmax(1)

    return float(law(bench.runner).minimum(law(bench.reader)).sum(1).mean())  # type: ignore[attr-defined]
