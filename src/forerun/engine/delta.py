"""Delta: what a round adds to one sequence, as given to the reader of its answer.

This file decides how a run of accepted tokens becomes tokens, text and log-probabilities of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from forerun.accept.commit import Accepted
from forerun.accept.outcome import RowOutcome
from forerun.annotations import Float
from forerun.device import upload_tensor
from forerun.engine.draft_details import DraftDetails
from forerun.engine.reading import Part
from forerun.engine.sequence import Origin, Sequence
from forerun.kernels.sampling import SamplingKernels
from forerun.sampling.constraint import constrained, packed
from forerun.sampling.logprobs import TokenLogprobs, token_logprobs

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text, where its token came from, and whether that is a special one."""

    text: str
    origin: Origin
    special: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round adds to one sample of a request.

    Text may lag behind tokens: half a character, or what may be the beginning of a stop string, is held back.
    `outcome` counts the round's guesses, and `draft` names them where the request asks for it.
    """

    request_id: int
    sample: int
    seq_id: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    segments: tuple[Segment, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    outcome: RowOutcome | None = None  # what became of the guesses
    draft: DraftDetails | None = None
    error: Exception | None = None  # what ended the request, where it failed; it is raised to the reader

    @classmethod
    def failure(cls, sequence: Sequence, error: Exception) -> Delta:
        """The last delta of a sequence whose request failed."""
        return cls(sequence.request_id, sequence.sample, sequence.id, (), (), (), (), "error", None, error=error)

    @property
    def text(self) -> str:
        """The text that became certain."""
        return "".join(segment.text for segment in self.segments)


def delta_of(
    sequence: Sequence,
    run: Accepted,
    logits: Float[Tensor, "rows vocab"],
    first: int = 0,
    kernels: SamplingKernels | None = None,
    completed_by: int | None = None,
) -> Delta:
    """What an accepted run adds to its sequence, up to the token that ends it; its nodes' logits begin at `first`.

    Where its first `completed_by` tokens complete the text by its grammar, they end it. The sequence is not told yet,
    but for its stop checker, which has seen the run.
    """
    constraint = sequence.constraint
    stop = sequence.stop.push(run.tokens, completed_by)
    tokens = run.tokens[: stop.num_kept]
    origins, num_before = run_origins(run)[: stop.num_kept], len(sequence.origins)
    logprobs: list[TokenLogprobs] = []
    if sequence.params.logprobs is not None:
        own = logits[[first + node for node in run.nodes[: len(tokens)]]]
        if constraint is not None:
            allowed = packed([constraint.after(tuple(tokens[:i])) for i in range(len(tokens))], own.shape[1])
            own = constrained(own, upload_tensor(allowed, own.device))
        logprobs = token_logprobs(own, tokens, sequence.params.logprobs, kernels)

    def origin(ordinal: int) -> Origin:
        return sequence.origins[ordinal] if ordinal < num_before else origins[ordinal - num_before]

    return Delta(
        request_id=sequence.request_id,
        sample=sequence.sample,
        seq_id=sequence.id,
        token_ids=tuple(tokens),
        origins=tuple(origins),
        segments=tuple(Segment(piece.text, origin(piece.ordinal), piece.special) for piece in stop.pieces),
        logprobs=tuple(logprobs),
        finish_reason=stop.finish_reason,
        stop_reason=stop.stop_reason,
        outcome=run.outcome(sequence.id, len(tokens)),
        draft=DraftDetails.of(run, stop.pieces, num_before) if sequence.draft_details else None,
    )


def run_origins(run: Accepted) -> list[Origin]:
    """Accepted guesses, then the token behind them."""
    drafted = Origin.RECOVERED if run.offered > run.length else Origin.BONUS
    return [Origin.DRAFTED] * run.length + [drafted if run.num_drafted else Origin.TARGET]


def score_prompt(
    sequence: Sequence, part: Part, logits: Float[Tensor, "judged vocab"], kernels: SamplingKernels | None = None
) -> None:
    """Record the log-probabilities of the prompt tokens behind a scored chunk."""
    if not part.num_scored:
        return
    first = sequence.num_read + 1
    last = min(first + part.num_scored, sequence.num_prompt)
    wanted = sequence.params.prompt_logprobs
    assert wanted is not None, "only sequences that ask for it score their prompt"
    new = token_logprobs(logits[: last - first], sequence.tokens[first:last], wanted, kernels)
    sequence.prompt_logprobs += new[len(sequence.prompt_logprobs) - first + 1 :]
