"""LLM: the front door of the library.

The file decides how a model, its drafter, the memory plan and the engine are put together, and who steps the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq

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
from forerun.engine.sequence import Sequence
from forerun.errors import UnknownDrafter
from forerun.models.loading import Blueprint, Progress
from forerun.output import Answers, RequestOutput
from forerun.progress import reporting
from forerun.request import Prompt, Request, Wish, requests_of
from forerun.sampling.params import SamplingParams
from forerun.text import Tokenizer


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
        *,
        speculation: Wish = None,
        tenant: str = "",
        progress: Progress | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts, in order, with one set of parameters for all of them or one for each.

        A prompt is text, a list or array of token ids, {"prompt": text} or {"prompt_token_ids": ids}. All are checked
        before any runs. `speculation` overrides the engine's default for these requests. Drafters that learn from
        answers let those of one `tenant` draft for that tenant alone. `progress` is told how far the work is; without
        it a bar is shown where a person watches, unless `use_tqdm` is False.
        """
        answers = self.ask(requests_of(prompts, sampling_params, speculation, tenant))
        with reporting(progress, use_tqdm) as report:
            for delta in self.rounds(answers.sequences):
                answers.add(delta)
                report("generating", answers.share_finished)
        return answers.outputs()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: Wish = None,
        tenant: str = "",
        progress: Progress | None = None,
    ) -> Iterator[Delta]:
        """One request's deltas as rounds give them. Closing the iterator cancels the request.

        `progress` is told how much of the prompt is read, as long as there is nothing else to tell.
        """
        sequences = self.requests.sequences(Request.of(prompt, sampling_params, speculation, tenant))
        return self.rounds(sequences, progress)

    def ask(self, requests: Seq[Request]) -> Answers:
        """The requests, checked, with places for their answers; nothing runs yet."""
        return Answers([(request, self.requests.sequences(request)) for request in requests], self.fingerprint)

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


def draft_plan(draft: str | Drafter | None, context: DraftContext) -> DraftPlan:
    """The plan of a specification, of a drafter that is there already, or of none."""
    if isinstance(draft, str):
        return plan_drafter(draft, context)
    if draft is not None and not isinstance(draft, Drafter):
        raise UnknownDrafter(f"draft: {draft!r} is neither a specification, such as 'ngram', nor a Drafter.")
    num_members = len(draft.arms) - 1 if draft is not None and MERGED in draft.arms else 1
    return DraftPlan(0, {}, lambda _tokens, _progress, _target: draft, num_members=num_members)
