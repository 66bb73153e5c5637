"""LLM and AsyncLLM: the offline front doors.

Decides how a model, its drafter, the memory plan and the engine are put together, and how rounds become results.
Knows nothing of the command line or HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from forerun.accept.outcome import Stats
from forerun.config import (
    DEFAULT_DEPTH,
    EngineOptions,
    KernelChoice,
    Quantization,
    Speculation,
    Verification,
    require_whole,
)
from forerun.device import Placement
from forerun.draft.base import MERGED, Drafter
from forerun.draft.build import DraftContext, DraftPlan, plan_drafter
from forerun.draft.label import draft_label
from forerun.engine.controller import Controller
from forerun.engine.delta import Delta
from forerun.engine.engine import Engine
from forerun.engine.memory import plan_engine
from forerun.engine.request import Requests
from forerun.engine.sequence import Origin, Sequence
from forerun.errors import InvalidRequest, UnknownDrafter
from forerun.models.loading import Blueprint, Progress
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from forerun.text import Tokenizer

Prompt = str | Seq[int]
Wish = bool | int | Speculation | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample's answer. `finish_reason` is "stop" (eos, a stop id or string: `stop_reason`) or "length"."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's answer. The same prompt, parameters, `seed` and `fingerprint` give it again, drafted or not."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    seed: int
    fingerprint: str


class LLM:
    """A target model, its drafter and an engine. One thread uses it at a time; see AsyncLLM for many.

    `model` is a Hugging Face folder, a hub id or a bundled name. `draft` turns speculation on: a specification such
    as "ngram" or "model:DIR", or a Drafter. `speculation` is the default of requests: True, a depth, False, or a
    Speculation. `max_model_len` tokens of context and `max_num_seqs` sequences at once are planned for within
    `memory_bytes` (by default part of what is free); the plan is `llm.plan`. `threads` sets torch's thread count, for
    the process.
    `quantize` "int8" holds the weights of target and draft model in 8 bits: another target than the one in 16, and all
    promises hold against it. `kernels` are compiled at first use where there is a C++ compiler ("auto"); "native"
    insists on them, and "torch" does without: the same model, rounded differently. They are for CPUs alone. `device`
    is "cpu" (None too), "cuda", a torch.device, or "auto": a GPU where there is one. `one_gemm` makes matrix products
    on a GPU the same for any number of rows, and tokens the same to the bit; on CPUs they are anyway.
    """

    name, draft_name = "", ""  # as they must be shown: for a widened checkpoint they say so

    def __init__(
        self,
        model: str,
        draft: str | Drafter | None = None,
        *,
        dtype: str = "auto",
        quantize: Quantization | None = None,
        kernels: KernelChoice = "auto",
        speculation: bool | int | Speculation = True,
        verification: Verification = "coupled",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        chunk_tokens: int = 512,
        memory_bytes: int | None = None,
        threads: int | None = None,
        device: str | torch.device | Placement | None = None,
        one_gemm: bool = False,
        progress: Progress | None = None,
        controller: Controller | None = None,
    ) -> None:
        default = Speculation.of(speculation, Speculation(depth=DEFAULT_DEPTH))
        options = EngineOptions(max_num_seqs, chunk_tokens, verification, default)
        limits = (("threads", threads, 1), ("max_model_len", max_model_len, 2), ("memory_bytes", memory_bytes, 0))
        for name, value, least in limits:
            if value is not None:
                require_whole(name, value, least)
        placement = Placement.of(device, one_gemm)
        if threads is not None:
            torch.set_num_threads(threads)
        target = Blueprint.of(str(model), dtype=dtype, quantize=quantize, kernels=kernels, device=placement)
        self.tokenizer: Tokenizer = target.tokenizer()
        drafter = draft_plan(draft, DraftContext(target, self.tokenizer))
        self.name, self.draft_name = target.name, draft_label(draft)
        self.plan = plan_engine(target, drafter, default, max_model_len, max_num_seqs, memory_bytes)
        runner = target.load(self.plan.cache_tokens, progress, self.plan.max_model_len)
        granted = {**drafter.remembered_bytes, **self.plan.remembered_bytes, **self.plan.drafter_cache_tokens}
        self.drafter: Drafter | None = drafter.build(granted, progress, runner)
        self.fingerprint, self.format = target.fingerprint(), target.format
        self.kernels = target.computed_by
        self.requests = Requests(
            tokenizer=self.tokenizer,
            vocab_size=target.config.vocab_size,
            max_length=self.plan.max_model_len,
            eos_ids=target.config.eos_ids,
            default=default,
            arms=self.drafter.arms if self.drafter else (),
        )
        self.engine = Engine(
            runner,
            self.drafter,
            options=options,
            controller=controller,
            num_ids=self.requests.num_ids,
            kernels=target.sampling_kernels(),
        )
        self.inboxes: dict[int, deque[Delta]] = {}  # by sequence: what its reader has not taken yet

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self.engine.stats

    @property
    def arms(self) -> Seq[str]:
        """What drafts here, by name: several of a mix."""
        return self.requests.arms

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        speculation: Wish = None,
        progress: Progress | None = None,
        tenant: str = "",
    ) -> list[RequestOutput]:
        """Answer all prompts, in order: text or token ids, one or many, with one set of parameters or one each.

        All are checked before any runs. `speculation` overrides the engine's default for these requests. Drafters that
        learn from answers let those of one `tenant` draft for that tenant alone.
        """
        batch = as_batch(prompts)
        asked = SamplingParams() if sampling_params is None else sampling_params
        each = asked if isinstance(asked, Seq) else [asked] * len(batch)
        if len(each) != len(batch):
            raise InvalidRequest(
                "sampling_params", f"{len(each)} sets of parameters for {len(batch)} prompts: one or each."
            )
        requests = [self.requests.sequences(p, q, speculation, tenant) for p, q in zip(batch, each, strict=True)]
        answers = {s.id: Answer(s) for request in requests for s in request}
        num_open = len(answers)
        for delta in self.rounds([s for request in requests for s in request]):
            num_open -= answers[delta.seq_id].add(delta)
            if progress is not None:
                progress("generating", 1 - num_open / len(answers))
        return [self.result(request, answers) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        speculation: Wish = None,
        progress: Progress | None = None,
        tenant: str = "",
    ) -> Iterator[Delta]:
        """One request's deltas as rounds give them. Closing the iterator cancels the request.

        `progress` is told how much of the prompt is read, as long as there is nothing else to tell.
        """
        sequences = self.requests.sequences(prompt, sampling_params or SamplingParams(), speculation, tenant)
        return self.rounds(sequences, progress)

    def rounds(self, sequences: Seq[Sequence], progress: Progress | None = None) -> Iterator[Delta]:
        """Step the engine until these sequences are finished, and give what they gain.

        A step moves on all that runs, other streams of this LLM too; what those gain is kept for their own readers.
        """
        inbox: deque[Delta] = deque()
        self.inboxes |= {sequence.id: inbox for sequence in sequences}
        num_open = len(sequences)
        try:
            for sequence in sequences:
                self.engine.submit(sequence)
            while num_open and (inbox or self.engine.has_work):
                if inbox:
                    delta = inbox.popleft()
                    if delta.error is not None:
                        raise delta.error
                    num_open -= delta.finish_reason is not None
                    yield delta
                    continue
                for delta in self.engine.step():
                    self.inboxes[delta.seq_id].append(delta)
                if progress is not None and not sequences[0].num_output:
                    progress("reading the prompt", sequences[0].num_read / sequences[0].num_prompt)
        finally:
            for request_id in {sequence.request_id for sequence in sequences}:
                self.engine.cancel(request_id)
            for sequence in sequences:
                del self.inboxes[sequence.id]

    def result(self, request: Seq[Sequence], answers: dict[int, Answer]) -> RequestOutput:
        """What a finished request answers."""
        first = request[0]
        return RequestOutput(
            prompt_token_ids=tuple(first.tokens[: first.num_prompt]),
            outputs=tuple(answers[s.id].completion() for s in request),
            prompt_logprobs=tuple(first.prompt_logprobs),
            seed=first.seed,
            fingerprint=self.fingerprint,
        )


def draft_plan(draft: str | Drafter | None, context: DraftContext) -> DraftPlan:
    """The plan of a specification, of a drafter that is there already, or of none."""
    if isinstance(draft, str):
        return plan_drafter(draft, context)
    if draft is not None and not isinstance(draft, Drafter):
        raise UnknownDrafter(f"draft: {draft!r} is neither a specification, such as 'ngram', nor a Drafter.")
    num_members = len(draft.arms) - 1 if draft is not None and MERGED in draft.arms else 1
    return DraftPlan(0, {}, lambda _tokens, _progress, _target: draft, num_members=num_members)


class Answer:
    """One sample's deltas, put together."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.text: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last: Delta | None = None

    def add(self, delta: Delta) -> bool:
        """Take a delta; True if it was the last one."""
        self.text.append(delta.text)
        self.logprobs += delta.logprobs
        self.last = delta
        return delta.finish_reason is not None

    def completion(self) -> CompletionOutput:
        """The sample's answer, once it is finished."""
        assert self.last is not None, "a sample without a single round has no answer"
        assert self.last.finish_reason is not None, "an unfinished sample has no answer"
        return CompletionOutput(
            index=self.sequence.sample,
            text="".join(self.text),
            token_ids=tuple(self.sequence.tokens[self.sequence.num_prompt :]),
            origins=tuple(self.sequence.origins),
            logprobs=tuple(self.logprobs),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
        )


def as_batch(prompts: Prompt | Seq[Prompt]) -> Seq[Prompt]:
    """One prompt or many, as many. What is no prompt at all is one that will be refused by name."""
    many = isinstance(prompts, Seq) and not isinstance(prompts, str | bytes)
    if not many or (prompts and all(isinstance(p, int) for p in prompts)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
