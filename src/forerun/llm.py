"""LLM: the main class of the library.

This file puts a model, its drafter, the memory plan and the engine together, and decides which thread steps the engine.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from forerun.accept.delta import Delta
from forerun.accept.outcome import Stats
from forerun.annotations import ProgressCallback
from forerun.config import (
    MOST_THREADS,
    EngineOptions,
    KernelChoice,
    Quantization,
    Speculation,
    Verification,
    require_whole,
)
from forerun.control.controller import Controller
from forerun.control.forecast import Forecast, forecast_line, forecasts
from forerun.device import Placement
from forerun.draft.auto import resolved_draft
from forerun.draft.base import MERGED, Drafter
from forerun.draft.plan import DraftContext, DraftPlan, check_drafter
from forerun.drafters import draft_label, plan_drafter
from forerun.ecosystem import REQUEST_WORDS, check_words, drafting_of, memory_of
from forerun.engine.calibration import calibrate
from forerun.engine.driver import EngineDriver
from forerun.engine.engine import Engine
from forerun.engine.memory import pass_sizes, plan_engine
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.machine import Machine
from forerun.models.generation import FILE as GENERATION_FILE
from forerun.models.generation import GenerationDefaults, format_params
from forerun.models.loading import Blueprint
from forerun.models.shards.worker import serve_started_rank
from forerun.models.spec import ModelSpec
from forerun.output import Answers, RequestOutput
from forerun.progress import reporting
from forerun.request import ChatOptions, Conversation, Prompt, Request, SpeculationOption, as_conversations, requests_of
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
NO_DEFAULTS = (None, "none", "vllm")  # of generation_config; the last is vLLM's word for the same


class Uncopyable:
    """An object that owns models or threads: copying or pickling it raises TypeError."""

    def __reduce__(self) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(f"an {kind} can be neither copied nor pickled: create one in each process. Threads share one.")


class LLM(Uncopyable):
    """A target model, its drafter and an engine, for any number of threads at once; see AsyncLLM for event loops.

    `model` is a Hugging Face folder, a hub id, a bundled name, or a ModelSpec; `tokenizer`, `revision`, `dtype`,
    `quantize`, `kernels`, `device`, `one_gemm` and `tensor_parallel_size` are fields of ModelSpec and described there.
    `draft` turns speculation on: a specification such as "ngram" or "model:DIR", or a Drafter. `speculation` is the
    default of requests: True, a depth, False, or a Speculation. `speculative_config` sets both in vLLM's form. Memory
    is planned for contexts of `max_model_len` tokens and batches of `max_num_seqs` sequences, within `memory_bytes` or
    the share `gpu_memory_utilization` of the free memory (four fifths by default); the plan is `llm.plan`. One pass
    prefills at most `chunk_tokens` tokens; "auto", for servers, limits them so that short prompts do not wait for long
    ones. Unless `prefix_cache` is False, common prefixes of a tenant's texts are prefilled once, and cached while the
    plan has free memory; answers have the same bits. `threads` sets torch's thread count for the process. `seed` makes
    the seeds of requests without one repeatable. `generation_config` is the source of default sampling parameters:
    "auto" is the model's generation_config.json, a folder is the file in that folder, and "none" means
    SamplingParams(). Loading shows a bar on a terminal, unless `use_tqdm_on_load` is False or `progress` gets the
    reports instead. Other keywords of vLLM's LLM are accepted with values that mean forerun's own behaviour; any other
    value raises InvalidRequest, and any other keyword UnknownKeyword.
    """

    generation_defaults = GenerationDefaults()  # from the model's generation_config.json, if it is used
    forecasts: Seq[Forecast] = ()  # the speed-ups that were predicted at the start, if they were measured
    name, draft_name = "", ""  # as shown to users: a widened checkpoint is marked as widened

    def __init__(
        self,
        model: str | ModelSpec,
        draft: str | Drafter | None = None,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        dtype: str | torch.dtype = "auto",
        quantize: Quantization | None = None,
        kernels: KernelChoice = "auto",
        device: str | torch.device | Placement | None = None,
        one_gemm: bool = False,
        tensor_parallel_size: int = 1,
        speculation: bool | int | str | Speculation = True,
        verification: Verification = "coupled",
        speculative_config: Mapping[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        chunk_tokens: int | Literal["auto"] = 512,
        prefix_cache: bool = True,
        memory_bytes: int | None = None,
        gpu_memory_utilization: float | int | None = None,
        threads: int | None = None,
        seed: int | None = None,
        generation_config: str | None = "auto",
        progress: ProgressCallback | None = None,
        use_tqdm_on_load: bool = True,
        controller: Controller | None = None,
        **words: object,
    ) -> None:
        check_words(words, LLM)
        spec = spec_of(model, tokenizer, revision, dtype, quantize, kernels, device, one_gemm, tensor_parallel_size)
        serve_started_rank(spec.tensor_parallel_size)
        draft, default = drafting_of(draft, speculation, speculative_config)
        options = EngineOptions(max_num_seqs, chunk_tokens, verification, default, prefix_cache)
        seed = SamplingParams(seed=seed).seed
        apply_limits(threads, max_model_len, memory_bytes)
        with reporting(progress, use_tqdm_on_load) as report:
            target = Blueprint.of(spec, report).for_texts(max_model_len, pass_sizes(options, draft is not None))
            memory_bytes = memory_of(memory_bytes, gpu_memory_utilization, target.placement.device)
            self.tokenizer: Tokenizer = target.tokenizer()
            self.generation_defaults = generation_defaults(generation_config, target.folder)
            draft = resolved_draft(draft, target)
            drafter = draft_plan(draft, DraftContext(target, self.tokenizer, report))
            self.name, self.draft_name, self.max_num_seqs = target.name, draft_label(draft), max_num_seqs
            self.fingerprint, self.format, self.kernels = target.fingerprint(), target.format, target.backend_and_ranks
            self.measured = str(target.choice)
            self.plan = plan_engine(target, drafter, default, max_model_len, max_num_seqs, memory_bytes)
            runner = target.load(self.plan.cache_tokens, report, self.plan.max_model_len)
            granted = {**drafter.remembered_bytes, **self.plan.remembered_bytes, **self.plan.drafter_cache_tokens}
            self.drafter: Drafter | None = drafter.build(granted, report, runner)
            self.requests = self._requests(target, default, seed)
            num_ids, sampling = self.requests.num_ids, target.sampling_kernels()
            engine = Engine(
                runner, self.drafter, options=options, controller=controller, num_ids=num_ids, kernels=sampling
            )
            if controller is None and self.drafter is not None and isinstance(draft, str) and default.auto:
                self._calibrate(engine, f"{self.fingerprint} {draft} {drafter.fingerprint()}", report)
        self.driver, self._stats = EngineDriver(engine), engine.stats
        self._log_start()

    def _requests(self, target: Blueprint, default: Speculation, seed: int | None) -> RequestChecker:
        """The RequestChecker of this model."""
        return RequestChecker(
            tokenizer=self.tokenizer,
            vocab_size=target.config.vocab_size,
            max_length=self.plan.max_model_len,
            eos_ids=target.end_ids(self.tokenizer),
            default=default,
            drafter_names=self.drafter.names if self.drafter else (),
            default_params=self.generation_defaults.params(),
            seed=seed,
        )

    def _calibrate(self, engine: Engine, models: str, report: ProgressCallback) -> None:
        """Measure the times of rounds on this machine for the controller, and predict the gain."""
        key, params = f"{models} {engine.options} {Machine.here()}", self.generation_defaults.params()
        engine.controller = controller = calibrate(engine, self.requests, params, key, report)
        self.forecasts = forecasts(controller.costs, controller.drafters, engine.options.max_num_seqs)

    def _log_start(self) -> None:
        """Log the memory plan, the predicted speed-up, and the default sampling parameters."""
        logger.info("%r, fingerprint %s", self, self.fingerprint)
        for line in self.plan.lines():
            logger.info("%s", line)
        if self.forecasts:
            level = logging.INFO if any(each.depth for each in self.forecasts) else logging.WARNING
            logger.log(level, "%s", forecast_line(self.forecasts))
        if self.generation_defaults.given:
            defaults = format_params(self.generation_defaults.given, "=")
            logger.info("defaults of requests: %s, from the model's generation_config.json", defaults)
        for problem in self.generation_defaults.problems:
            logger.warning("%s", problem)

    def __repr__(self) -> str:
        state = ", closed" if self.driver.closed else ""
        draft = f", draft={self.draft_name!r}" if self.draft_name else ""
        limits = f"max_model_len={self.plan.max_model_len}, max_num_seqs={self.max_num_seqs}"
        return f"LLM({self.name!r}{draft}, format={self.format!r}, kernels={self.kernels!r}, {limits}{state})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the models and their caches. Running and later requests raise EngineClosed."""
        self.drafter = None
        self.driver.close()
        gc.collect()  # the traceback of an earlier error may be in a reference cycle that holds them

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineClosed after `close`."""
        return self.driver.engine

    @property
    def options(self) -> EngineOptions:
        """The engine's options for batching and verification."""
        return self.engine.options

    @property
    def stats(self) -> Stats:
        """Counters since the start."""
        return self._stats

    @property
    def drafter_names(self) -> Seq[str]:
        """The names of the drafters; several for a mix."""
        return self.requests.drafter_names

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of the sampling parameters of requests without any, from `generation_config`."""
        return self.generation_defaults.params()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: SpeculationOption = None,
        tenant: str = "",
        progress: ProgressCallback | None = None,
        use_tqdm: bool = True,
        **words: object,
    ) -> list[RequestOutput]:
        """Answer all prompts, in order, with one set of parameters for all of them or one for each.

        A prompt is text, a list or array of token ids, {"prompt": text} or {"prompt_token_ids": ids}. All prompts are
        checked before any runs. `speculation` overrides the engine's default for these requests. Drafters that learn
        from answers use those of a `tenant` for that tenant only. `progress` is called with the finished fraction;
        without it a bar is shown on a terminal, unless `use_tqdm` is False. Raises InvalidRequest, naming the field.
        """
        check_words(words, LLM.generate, REQUEST_WORDS)
        answers = self.ask(requests_of(prompts, sampling_params, speculation, tenant))
        with reporting(progress, use_tqdm) as report:
            for delta in self.deltas(answers.sequences):
                answers.add(delta)
                report("generating", answers.share_finished)
        return answers.outputs()

    def chat(
        self,
        messages: Conversation | Seq[Conversation],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        speculation: SpeculationOption = None,
        tenant: str = "",
        progress: ProgressCallback | None = None,
        use_tqdm: bool = True,
        **words: object,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, in order; the rest is as in `generate`.

        A conversation is a list of messages such as {"role": "user", "content": text}. The template options are those
        of ChatOptions.
        """
        check_words(words, LLM.chat, REQUEST_WORDS)
        options = ChatOptions(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs or {}
        )
        prompts = [self.chat_prompt(conversation, options) for conversation in as_conversations(messages)]
        return self.generate(
            prompts, sampling_params, speculation=speculation, tenant=tenant, progress=progress, use_tqdm=use_tqdm
        )

    def chat_prompt(self, conversation: Conversation, options: ChatOptions | None = None) -> dict[str, Any]:
        """A conversation as a prompt for `generate` and `stream`: the rendered text and its token ids."""
        text = (options or ChatOptions()).render(self.tokenizer, conversation)
        ids = self.tokenizer.encode_within(text, self.plan.max_model_len, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculation: SpeculationOption = None,
        tenant: str = "",
        progress: ProgressCallback | None = None,
    ) -> Iterator[Delta]:
        """One request's deltas, one per round. Closing the iterator cancels the request.

        Until the first token `progress` is called with the fraction of the prompt that has been prefilled.
        """
        sequences = self.requests.sequences(Request.of(prompt, sampling_params, speculation, tenant))
        return self.deltas(sequences, progress)

    def ask(self, requests: Seq[Request]) -> Answers:
        """Check the requests and make their sequences, with a collector of their answers; nothing runs yet."""
        return Answers([(request, self.requests.sequences(request)) for request in requests], self.fingerprint)

    def deltas(self, sequences: Seq[Sequence], progress: ProgressCallback | None = None) -> Iterator[Delta]:
        """Step the engine until these sequences are finished, and yield their deltas.

        A step advances all running sequences, those of other streams too, whose deltas wait for their readers. Streams
        may be read in any number of threads: one of them steps the engine for all (`engine/driver.py`). Ctrl-C ends the
        stream that the main thread is reading; the others lose no token.
        """

        def idle() -> None:
            if progress is not None and not sequences[0].num_output:
                progress("reading the prompt", sequences[0].num_read / sequences[0].num_prompt)

        return self.driver.follow(sequences, idle)


def spec_of(model: str | ModelSpec, *load: object) -> ModelSpec:
    """The ModelSpec of a model with these fields, in order; None and default values do not override the model's."""
    changes = {
        field.name: value
        for field, value in zip(fields(ModelSpec)[1:], load, strict=True)
        if value is not None and value != field.default
    }
    return replace(model, **changes) if isinstance(model, ModelSpec) else ModelSpec(model, **changes)  # type: ignore[arg-type]


def generation_defaults(choice: str | None, folder: Path) -> GenerationDefaults:
    """The default sampling parameters that `generation_config` selects."""
    if choice in NO_DEFAULTS:
        return GenerationDefaults()
    if choice == "auto":
        return GenerationDefaults.read(folder)
    if isinstance(choice, str) and os.path.isfile(Path(choice) / GENERATION_FILE):
        return GenerationDefaults.read(Path(choice))
    problem = f"{shown(choice)} must be 'auto' for the model's own, 'none', or a folder with {GENERATION_FILE}."
    raise InvalidRequest("generation_config", problem)


def apply_limits(threads: int | None, max_model_len: int | None, memory_bytes: int | None) -> None:
    """Raise InvalidRequest unless these options are whole numbers in range; then set torch's number of threads."""
    limits = (("threads", threads, 1), ("max_model_len", max_model_len, 2), ("memory_bytes", memory_bytes, 0))
    for name, value, least in limits:
        if value is not None:
            require_whole(name, value, least)
    if threads is not None and threads > MOST_THREADS:
        raise InvalidRequest("threads", f"{shown(threads)} is above {MOST_THREADS}: use the number of cores.")
    if threads is not None:
        torch.set_num_threads(threads)


def draft_plan(draft: str | Drafter | None, context: DraftContext) -> DraftPlan:
    """The DraftPlan of a specification, of a Drafter object, or of no drafter."""
    if isinstance(draft, str):
        return plan_drafter(draft, context)
    if draft is not None:
        check_drafter(draft, context.target.config.layers)
    num_members = len(draft.names) - 1 if draft is not None and MERGED in draft.names else 1
    return DraftPlan({}, lambda _tokens, _progress, _target: draft, num_members=num_members)
