"""Results: the answer to a finished request, and its metrics.

This file joins the deltas of a request's samples, for LLM and AsyncLLM.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, FinishReason
from forerun.accept.outcome import Counts
from forerun.engine.sequence import Sequence
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs


@dataclass(slots=True)
class RequestMetrics(Counts):
    """The metrics of one request, over all of its samples.

    `first_token_s` and `total_s` are the seconds from the request's arrival until the client received the first and the
    last token, including the time in the queue. `num_cached_tokens` tokens of the prompt were found in the prefix
    cache, for the first sample.
    """

    first_token_s: float = math.nan
    total_s: float = 0.0
    num_cached_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all samples over the total time, prefill included."""
        return self.num_emitted / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample's answer. `finish_reason` is "stop" (eos, a stop id or string: `stop_reason`) or "length".

    `logprobs` and their sum, `cumulative_logprob`, are present if requested. Equality ignores the `origins` of tokens,
    since the draft depth depends on measured times.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...] = field(compare=False)
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's answer. The same prompt, parameters, `seed` and `fingerprint` give the same answer, drafted or not.

    `prompt` is None if only token ids were given. Two outputs are equal if prompt tokens and answers are equal;
    `request_id`, the form of the prompt and `metrics` are ignored.
    """

    request_id: str = field(compare=False)
    prompt: str | None = field(compare=False)
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    seed: int
    fingerprint: str
    metrics: RequestMetrics = field(compare=False)
    finished: bool = True


class CollectedSample:
    """One sample's deltas, put together."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.deltas: list[Delta] = []
        self.first_s = self.last_s = 0.0

    def add(self, delta: Delta) -> None:
        """Add a delta, and record its time."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.deltas.append(delta)

    def count_into(self, counts: Counts) -> None:
        """Add the sample's counts of draft tokens."""
        counts.pace.join(self.sequence.pace)
        for delta in self.deltas:
            if delta.outcome is not None:
                counts.count(delta.outcome)

    def completion(self) -> CompletionOutput:
        """The sample's answer, after it is finished."""
        assert self.deltas, "a sample without a delta has no answer"
        last, sequence = self.deltas[-1], self.sequence
        assert last.finish_reason is not None, "an unfinished sample has no answer"
        logprobs = tuple(each for delta in self.deltas for each in delta.logprobs)
        scored = sequence.params.logprobs is not None
        return CompletionOutput(
            index=sequence.sample,
            text="".join(delta.text for delta in self.deltas),
            token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            origins=tuple(sequence.origins),
            logprobs=logprobs,
            cumulative_logprob=math.fsum(each.logprob for each in logprobs) if scored else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )


class Answers:
    """Collects the answers of running requests, in the order of the requests. Times start at its construction."""

    def __init__(self, requests: Seq[tuple[Request, Seq[Sequence]]], fingerprint: str) -> None:
        self.requests = requests
        self.fingerprint = fingerprint
        self.sequences = [sequence for _, samples in requests for sequence in samples]
        self.answers = {sequence.id: CollectedSample(sequence) for sequence in self.sequences}
        self.num_finished = 0
        self.started_s = time.perf_counter()

    @property
    def share_finished(self) -> float:
        """The fraction of samples that are finished."""
        return self.num_finished / len(self.sequences)

    def add(self, delta: Delta) -> None:
        """Add a delta of one of the samples."""
        self.answers[delta.seq_id].add(delta)
        self.num_finished += delta.finish_reason is not None

    def counts(self) -> Counts:
        """The counts of draft tokens of all samples so far."""
        counts = Counts()
        for answer in self.answers.values():
            answer.count_into(counts)
        return counts

    def outputs(self) -> list[RequestOutput]:
        """The results of all requests, after they are finished."""
        return [self.output(request, samples) for request, samples in self.requests]

    def output(self, request: Request, samples: Seq[Sequence]) -> RequestOutput:
        """The result of one request."""
        first, answers = samples[0], [self.answers[sequence.id] for sequence in samples]
        return RequestOutput(
            request_id=str(first.request_id),
            prompt=request.prompt,
            prompt_token_ids=tuple(first.tokens[: first.num_prompt]),
            outputs=tuple(answer.completion() for answer in answers),
            prompt_logprobs=tuple(first.prompt_logprobs),
            seed=first.seed,
            fingerprint=self.fingerprint,
            metrics=self.metrics(answers),
        )

    def metrics(self, answers: Seq[CollectedSample]) -> RequestMetrics:
        """The metrics of a request."""
        metrics = RequestMetrics(
            first_token_s=min(answer.first_s for answer in answers) - self.started_s,
            total_s=max(answer.last_s for answer in answers) - self.started_s,
            num_cached_tokens=answers[0].sequence.num_cached or 0,
        )
        for answer in answers:
            answer.count_into(metrics)
        return metrics
