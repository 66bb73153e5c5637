"""Sequence: one text being generated; ActiveSequences: all unfinished sequences of an engine.

A sequence is one sample of one request. It turns accepted tokens into text and log-probabilities, and ends at a stop
condition. Its keys and values are in `PagedCache` and its draft state in the drafter, both by the sequence's id.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from forerun.accept.commit import Accepted, Origin
from forerun.accept.delta import Delta, DraftDetails, Segment
from forerun.accept.outcome import LiveGain
from forerun.accept.stop import StopChecker
from forerun.annotations import Float
from forerun.config import Speculation
from forerun.device import upload, upload_tensor
from forerun.kernels.sampling import SamplingKernels
from forerun.sampling.constraint import Constraint, constrained, packed
from forerun.sampling.draws import RowSampling
from forerun.sampling.edits import TextEdits
from forerun.sampling.logprobs import TokenLogprobs, token_logprobs
from forerun.sampling.params import SamplingParams


class Status(Enum):
    """Where a sequence is in its life cycle."""

    WAITING = "waiting"  # not in the batch: new, or preempted
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request. Sequences are compared by identity.

    `tokens` is prompt and output; the last one, the root, has not been read by the target. The first `num_read` tokens
    are in the target's KV cache. `max_length` is the context limit in tokens. Texts of one tenant are never used to
    draft for another.
    """

    id: int
    request_id: int
    sample: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]
    max_length: int
    speculation: Speculation
    stop: StopChecker
    tenant: str | None = ""  # None: its text is never used to draft for other sequences
    bad_words: Seq[Seq[int]] = ()
    constraint: Constraint | None = None  # of the request's grammar
    draft_details: bool = False  # whether its deltas list the draft tokens
    status: Status = Status.WAITING
    num_read: int = 0
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None before prefill starts
    origins: list[Origin] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_preempted: int = 0
    started_s: float | None = None  # when it was first admitted to the batch, by time.perf_counter
    pace: LiveGain = field(default_factory=LiveGain)
    edits: TextEdits | None = None  # logit edits (penalties, bans) at the last call of `sampling`
    row: RowSampling | None = None  # the result of that call, valid while `edits` does not change

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def unread(self) -> list[int]:
        """Tokens before the root that are to be prefilled: initially the prompt's, after preemption all."""
        return self.tokens[self.num_read : -1]

    @property
    def room(self) -> int:
        """Number of tokens that may still be generated."""
        max_tokens = self.params.max_tokens
        room = self.max_length - len(self.tokens)
        return room if max_tokens is None else min(room, max_tokens - self.num_output)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be recorded."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    def extend(self, place: int, tokens: Seq[int], origins: Seq[Origin]) -> None:
        """Set the tokens from index `place` on. It is safe to call this twice."""
        self.tokens[place:] = tokens
        self.origins[place - self.num_prompt :] = origins

    def completed_by(self, tokens: Seq[int]) -> int | None:
        """The number of these tokens after which the grammar is complete; None if it is not, or if there is none."""
        return None if self.constraint is None else self.constraint.completed_by(tokens)

    def delta(
        self,
        run: Accepted,
        logits: Float[Tensor, "rows vocab"],
        first: int = 0,
        kernels: SamplingKernels | None = None,
        completed_by: int | None = None,
    ) -> Delta:
        """The delta of an accepted run, up to the token that ends the text. Updates nothing but the stop checker.

        `first` is the row of `logits` at which those of its tree's nodes start. If `completed_by` is given, the text
        ends after this many tokens because its grammar is complete.
        """
        stop = self.stop.push(run.tokens, completed_by)
        tokens = run.tokens[: stop.num_kept]
        origins, num_before = run.origins[: stop.num_kept], len(self.origins)
        logprobs: list[TokenLogprobs] = []
        if self.params.logprobs is not None and run.ranked:
            nodes = run.nodes[: len(tokens)]
            logprobs = [TokenLogprobs.of(run.ranked[node], self.params.logprobs) for node in nodes]
        elif self.params.logprobs is not None:
            rows = logits[upload([first + node for node in run.nodes[: len(tokens)]], torch.long, logits.device)]
            if self.constraint is not None:
                allowed = packed([self.constraint.after(tuple(tokens[:i])) for i in range(len(tokens))], rows.shape[1])
                rows = constrained(rows, upload_tensor(allowed, rows.device))
            logprobs = token_logprobs(rows, tokens, self.params.logprobs, kernels)
        segments = []
        for piece in stop.pieces:
            held_back = piece.ordinal < num_before
            origin = self.origins[piece.ordinal] if held_back else origins[piece.ordinal - num_before]
            segments.append(Segment(piece.text, origin, piece.special))
        return Delta(
            request_id=self.request_id,
            sample=self.sample,
            seq_id=self.id,
            token_ids=tuple(tokens),
            origins=tuple(origins),
            segments=tuple(segments),
            logprobs=tuple(logprobs),
            finish_reason=stop.finish_reason,
            stop_reason=stop.stop_reason,
            outcome=run.outcome(self.id, len(tokens)),
            draft=DraftDetails.of(run, stop.pieces, num_before) if self.draft_details else None,
        )

    def failure(self, error: Exception) -> Delta:
        """The final delta of a failed request."""
        return Delta(self.request_id, self.sample, self.id, (), (), (), (), "error", None, error=error)

    def score_prompt(
        self, num_scored: int, logits: Float[Tensor, "judged vocab"], kernels: SamplingKernels | None = None
    ) -> None:
        """Record the log-probabilities of prompt tokens, from the first `num_scored` rows of `logits`.

        These are the rows of the chunk that was just read; each predicts the token after it.
        """
        first = self.num_read + 1
        last = min(first + num_scored, self.num_prompt)
        count = self.params.prompt_logprobs
        assert count is not None, "the request does not ask for log-probabilities of its prompt"
        new = token_logprobs(logits[: last - first], self.tokens[first:last], count, kernels)
        self.prompt_logprobs += new[len(self.prompt_logprobs) - first + 1 :]

    def restart(self) -> None:
        """Go back to waiting, to be prefilled again from the first token; all tokens stay."""
        self.status, self.num_read = Status.WAITING, 0
        self.stop = self.stop.restarted(self.tokens[self.num_prompt :])

    def sampling(self) -> RowSampling:
        """The sequence's sampling state for a round's draws."""
        if self.edits is None:
            self.edits = TextEdits.of(self.params, self.tokens, self.num_prompt, self.eos_ids, self.bad_words)
        if self.edits.any:
            self.edits = self.edits.at(self.tokens)
        if self.constraint is not None:
            self.constraint.follow(self.tokens)
        if self.row is None or self.row.edits is not self.edits:
            self.row = RowSampling(
                self.id, self.params, self.seed, self.sample, self.tokens, self.num_prompt, self.eos_ids,
                self.bad_words, self.edits, self.constraint,
            )  # fmt: skip
        return self.row


OnDelta = Callable[[Delta], None]


@dataclass(slots=True)
class ActiveSequences:
    """The unfinished sequences of one engine, by id and by request, and the callbacks for their deltas.

    This is the only state that survives an interrupted round: the sequences' tokens, and the deltas in `decided`.
    Everything else is recomputed from the tokens. Every method can be repeated after an interrupt, with the same
    result.

    `decided` holds the deltas of the current round, each with the number of tokens before it; None until all of them
    are computed. One assignment sets it and makes the round final; `settle` then applies it.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict)
    samples: dict[int, dict[int, Sequence]] = field(default_factory=dict)  # request id -> sequence id -> sequence
    readers: dict[int, OnDelta] = field(default_factory=dict)
    decided: Seq[tuple[int, Delta]] | None = None

    def add(self, sequence: Sequence, on_delta: OnDelta | None = None) -> None:
        """Add a sequence; `on_delta` is called with each of its deltas."""
        self.sequences[sequence.id] = sequence
        self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
        if on_delta is not None:
            self.readers[sequence.id] = on_delta

    def samples_of(self, request_id: int) -> list[Sequence]:
        """The unfinished sequences of a request; empty for an unknown request."""
        return list(self.samples.get(request_id, {}).values())

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is still here."""
        self.readers.pop(sequence.id, None)
        samples = self.samples.get(sequence.request_id, {})
        samples.pop(sequence.id, None)
        if not samples:
            self.samples.pop(sequence.request_id, None)
        self.sequences.pop(sequence.id, None)

    def settle(self) -> None:
        """Apply `decided`: tokens to sequences, deltas to callbacks. Sequences that were removed are skipped."""
        for place, delta in self.decided or ():
            sequence = self.sequences.get(delta.seq_id)
            if sequence is None:
                continue
            sequence.extend(place, delta.token_ids, delta.origins)
            if (on_delta := self.readers.get(sequence.id)) is not None:
                on_delta(delta)
            if delta.finish_reason is not None:
                sequence.status = Status.FINISHED

    def fail(self, sequence: Sequence, error: Exception) -> Delta:
        """Finish a sequence with an error, which is delivered as its last delta. It stays here until `restart`."""
        delta = sequence.failure(error)
        if (on_delta := self.readers.pop(sequence.id, None)) is not None:
            on_delta(delta)
        sequence.status = Status.FINISHED
        return delta

    def restart(self) -> list[Sequence]:
        """Remove finished sequences and prepare the others to be prefilled again from their first token."""
        for sequence in list(self.sequences.values()):
            if sequence.status is Status.FINISHED:
                self.remove(sequence)
        self.samples.clear()
        for sequence in self.sequences.values():
            self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
            sequence.restart()
        return list(self.sequences.values())
