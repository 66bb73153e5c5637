"""The same requests decoded plain and with guesses, to be compared to the bit: what proofs of equality share.

Decides how a run is set up and what is told of it. Tokens alone would forgive logits that are not quite the same, as
long as no near tie is among them; log-probabilities show them at once. Which models, prompts and shapes is the
proofs' business.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fuzz import Bench, run

from forerun.accept.outcome import Stats
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Drafter
from forerun.models.runner import Runner
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree

# int8, int4: weights of so many bits, all else in the own format. Each by compiled kernels and by torch's operators.
FORMATS = [f"{numbers}{by}" for by in ("", " by torch") for numbers in ("float32", "bfloat16", "int8", "int4")]
FORMATS += ["float16"]  # torch takes very long for it
FOLDERS = ["compressed, 32, zeros", "compressed, bytes"]  # that are quantised, and stay so
CHAINS = [Speculation(depth=k) for k in range(1, 9)]
STATIC = Speculation(tree=StaticTree([[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 1]]))
TREES = [Speculation(4, 3, 12), Speculation(3, 2, 14), Speculation(2, 4), STATIC]
WISHES = [*CHAINS, *TREES]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how to go on."""

    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, its prompt included, and the log-probabilities of what was said if they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Each request's answer, and what they took."""

    answers: list[Answer]
    stats: Stats
    num_preempted: int


def decode(
    bench: Bench,
    asked: Sequence[Asked],
    wish: Speculation | bool,
    drafter: Drafter | Callable[[Runner], Drafter] | None = None,
    *,
    num_tokens: int = 8192,
    max_num_seqs: int = 8,
    chunk_tokens: int = 512,
) -> Decoded:
    """Answer all requests in an engine of their own, with a cache of `num_tokens`.

    A drafter that reads beside the target is built for the engine's runner.
    """
    requests = bench.requests()
    engine = bench.engine(None, num_tokens, options=EngineOptions(max_num_seqs, chunk_tokens))
    engine.drafter = drafter if drafter is None or isinstance(drafter, Drafter) else drafter(engine.runner)
    sequences = [requests.sequences(Request.of(a.prompt, a.params, wish))[0] for a in asked]
    logprobs: dict[int, list[TokenLogprobs]] = {s.id: [] for s in sequences}
    run(engine, sequences, lambda delta: logprobs[delta.seq_id].extend(delta.logprobs))
    answers = [Answer(s.tokens, logprobs[s.id]) for s in sequences]
    return Decoded(answers, engine.stats, sum(s.num_preempted for s in sequences))


def decode_plain(bench: Bench, asked: Sequence[Asked]) -> list[Answer]:
    """Plain decoding, each request alone in the engine."""
    return decode(bench, asked, False, max_num_seqs=1).answers
