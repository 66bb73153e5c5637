"""Engines of the stories models, sampling parameters of test requests, and answers of plain decoding."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from typing_extensions import override

from forerun.llm import LLM
from forerun.models.chains import Chains, ChainStart
from forerun.models.decoder import Outputs
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.oracles import exact_parts
from kit.texts import PROMPTS

PATIENCE_S = 300  # a limit that ends a hang: a busy machine may take minutes


@cache
def plain() -> LLM:
    """The target without a drafter: its answers are those that drafted answers must equal."""
    return LLM(str(TARGET), dtype="float32")


def params_with(seed: int, **others: object) -> SamplingParams:
    """Parameters of a short answer; by the seed it is greedy or sampled, and of other length."""
    settings: dict[str, Any] = {
        "temperature": seed % 3 / 2,
        "seed": seed,
        "max_tokens": 12 + seed % 5,
        "logprobs": 1,
    } | others
    return SamplingParams(**settings)


@cache
def plain_answer(seed: int) -> dict[str, Any]:
    """The answer of plain decoding to this seed's prompt, alone in the batch."""
    return dict(exact_parts(plain().generate(PROMPTS[seed % 5], params_with(seed), use_tqdm=False)[0]))


class CountingRunner(Runner):
    """Counts its passes, and the tokens it reads."""

    num_passes = num_read = 0

    @override
    def read(self, reads: Sequence[Read], *rest: Any, **more: Any) -> Outputs:
        states = super().read(reads, *rest, **more)
        self.num_passes += 1
        self.num_read += sum(len(read.tokens) for read in reads)
        return states

    @override
    def draw_chains(self, draws: Draws, starts: Sequence[ChainStart], *rest: Any, **more: Any) -> Chains | None:
        chains = super().draw_chains(draws, starts, *rest, **more)
        self.num_read += sum(chains.num_read.values()) if chains else 0
        return chains


def counting(runner: Runner) -> CountingRunner:
    """The runner of a drafter that was built with a CountingRunner."""
    assert isinstance(runner, CountingRunner)
    return runner
