"""Decodes the same requests plainly and with drafts, for comparison to the bit.

This file decides how a run is set up and what it returns. Equal tokens alone would not show small differences of
logits, unless two are nearly tied; log-probabilities do. The tests choose models, prompts and shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.accept.outcome import Stats
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from law.fuzz import Bench, run

# int8, int4: weights of so many bits. Each format runs by compiled kernels and by torch's operators.
FORMATS = [f"{numbers}{by}" for by in ("", " by torch") for numbers in ("float32", "bfloat16", "int8", "int4")]
FORMATS += ["float16"]  # torch takes very long for it
FOLDERS = ["compressed, 32, zeros", "compressed, bytes"]  # that are quantised, and stay so
CHAINS = [Speculation(depth=k) for k in range(1, 9)]
STATIC = Speculation(tree=StaticTree([[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 1]]))
TREES = [Speculation(4, 3, 12), Speculation(3, 2, 14), Speculation(2, 4), STATIC]
SPECULATIONS = [*CHAINS, *TREES]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: a prompt and its sampling parameters."""

    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A text with its prompt, and the log-probabilities of the generated tokens if requested."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Each request's answer, the engine's counters, and the number of preemptions."""

    answers: list[Answer]
    stats: Stats
    num_preempted: int


def decode(
    bench: Bench,
    asked: Sequence[Asked],
    speculation: Speculation | bool,
    drafter: Drafter | Callable[[Runner], Drafter] | None = None,
    *,
    num_tokens: int = 8192,
    max_num_seqs: int = 8,
    chunk_tokens: int = 512,
) -> Decoded:
    """Answer all requests in an engine of their own, with a cache of `num_tokens`.

    `drafter` may be a function that builds one for the engine's runner.
    """
    requests = bench.requests()
    engine = bench.engine(None, num_tokens, options=EngineOptions(max_num_seqs, chunk_tokens))
    engine.drafter = drafter if drafter is None or isinstance(drafter, Drafter) else drafter(engine.runner)
    sequences = [requests.sequences(Request.of(a.prompt, a.params, speculation))[0] for a in asked]
    logprobs: dict[int, list[TokenLogprobs]] = {s.id: [] for s in sequences}
    run(engine, sequences, lambda delta: logprobs[delta.seq_id].extend(delta.logprobs))
    answers = [Answer(s.tokens, logprobs[s.id]) for s in sequences]
    return Decoded(answers, engine.stats, sum(s.num_preempted for s in sequences))


def decode_plain(bench: Bench, asked: Sequence[Asked]) -> list[Answer]:
    """Plain decoding, each request alone in the engine."""
    return decode(bench, asked, False, max_num_seqs=1).answers
