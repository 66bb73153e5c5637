"""Engines of the stories models, what they are asked, and what plain decoding answers."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from forerun.llm import LLM
from forerun.models.chains import Chains, ChainStart
from forerun.models.decoder import Outputs
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.oracles import seen
from kit.texts import PROMPTS

PATIENCE_S = 300  # only to end a hang: a busy machine may take minutes


@cache
def plain() -> LLM:
    """The model without a drafter: what every answer has to be equal to."""
    return LLM(str(TARGET), dtype="float32")


def asking(seed: int, **others: object) -> SamplingParams:
    """Short answers, greedy and sampled in turn."""
    settings = {"temperature": seed % 3 / 2, "seed": seed, "max_tokens": 12 + seed % 5, "logprobs": 1} | others
    return SamplingParams(**settings)  # type: ignore[arg-type]


@cache
def alone(seed: int) -> dict[str, object]:
    """What plain decoding answers to this seed's prompt, nobody beside it."""
    return dict(seen(plain().generate(PROMPTS[seed % 5], asking(seed), use_tqdm=False)[0]))


class CountingRunner(Runner):
    """Counts its passes, and the tokens it reads."""

    num_passes = num_read = 0

    def read(self, reads: Sequence[Read], *rest: Any, **more: Any) -> Outputs:
        states = super().read(reads, *rest, **more)
        self.num_passes += 1
        self.num_read += sum(len(read.tokens) for read in reads)
        return states

    def draw_chains(self, draws: Draws, starts: Sequence[ChainStart], *rest: Any) -> Chains | None:
        chains = super().draw_chains(draws, starts, *rest)
        self.num_read += sum(chains.num_read.values()) if chains else 0
        return chains
