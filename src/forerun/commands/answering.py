"""Functions that the generating commands share: load the model, describe the run, stream an answer.

Ctrl-C ends an answer after the current round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, cast

import torch
from rich.console import Console

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, Segment
from forerun.accept.outcome import Stats
from forerun.card import AnswerTiming, Painter, Setting, run_card
from forerun.commands.running import Result, patient_interrupt
from forerun.control.forecast import forecast_line
from forerun.llm import LLM
from forerun.models.source import TOKENIZER_FILES, find_folder, find_tokenizer
from forerun.models.spec import ModelSpec
from forerun.options import AnswerOptions, ModelOptions
from forerun.progress import LoadingBar
from forerun.sampling.params import SamplingParams
from forerun.serve.parts import AnswerForm, AnswerPart, AnswerSplitter
from forerun.streams import warnings_held_back
from forerun.text.files import template_of

STATS = (
    *("num_prefix_queries", "num_prefix_hits", "num_rounds", "num_drafted", "num_accepted"),
    *("tokens_per_round", "gain", "acceptance_rate"),
)


def build_llm(
    options: ModelOptions, console: Console, max_num_seqs: int = 1, chunk_tokens: int | Literal["auto"] = 512
) -> LLM:
    """Load the model and its drafter, with a progress bar."""
    with LoadingBar(console) as bar:
        return LLM(**llm_arguments(options, max_num_seqs, chunk_tokens), progress=bar)


def llm_arguments(options: ModelOptions, max_num_seqs: int, chunk_tokens: int | Literal["auto"]) -> dict[str, Any]:
    """The arguments of LLM for these options."""
    return {
        "model": options.spec,
        "draft": options.draft,
        "speculation": options.speculation(),
        "verification": options.verification,
        "max_model_len": options.max_model_len,
        "memory_bytes": options.memory_bytes,
        "max_num_seqs": max_num_seqs,
        "chunk_tokens": chunk_tokens,
        "prefix_cache": options.prefix_cache,
        "threads": options.loading.threads,
        "generation_config": options.generation_config,
    }


def setting_of(llm: LLM, options: ModelOptions, seed: int) -> Setting:
    """The description of the run that cards and JSON show."""
    return Setting(
        model=llm.name or options.model,
        draft=llm.draft_name or options.draft,
        depth=options.speculation().shown_depth,
        verification=options.verification,
        seed=seed,
        format=llm.format,
        kernels=llm.kernels,
        measured=llm.measured,
        num_threads=torch.get_num_threads(),
        fingerprint=llm.fingerprint,
        forecast=forecast_line(llm.forecasts) if llm.forecasts else "",
        defaults=llm.generation_defaults.given,
    )


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def timing(self) -> AnswerTiming:
        """The answer's number of tokens and its times, for the card."""
        return AnswerTiming(len(self.token_ids), self.first_s, self.total_s)


def require_template(spec: ModelSpec) -> None:
    """Raise ChatTemplateError if a model has no valid chat template. Its weights are not read."""
    if spec.tokenizer:
        folder = find_tokenizer(spec.tokenizer)
    else:
        folder = find_folder(spec.model, spec.revision, TOKENIZER_FILES, "config.json")  # downloads no weights
    template_of(folder).require()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, its sampling parameters, the description of the run, and the console for messages."""

    llm: LLM
    params: SamplingParams
    setting: Setting
    errors: Console

    @classmethod
    def of(cls, model_options: ModelOptions, answer_options: AnswerOptions) -> LoadedModel:
        """Load a model; options override its sampling defaults, and a missing seed is drawn."""
        SamplingParams(**answer_options.sampling())  # raises before anything is loaded
        errors = Console(stderr=True, no_color=answer_options.raw or None)
        llm = build_llm(model_options, errors)
        params = replace(llm.get_default_sampling_params(), **answer_options.sampling())
        seed = params.resolve_seed()
        return cls(llm, replace(params, seed=seed), setting_of(llm, model_options, seed), errors)


def write_answer(
    model_options: ModelOptions, answer_options: AnswerOptions, text: str, result: Result
) -> StreamedAnswer:
    """Load the model, stream its answer to standard output, and show a card or JSON about it."""
    model = LoadedModel.of(model_options, answer_options)
    llm, painter = model.llm, Painter(Console(), answer_options.raw)
    show = (lambda _: None) if result.as_json else lambda segment: painter.write(segment.text, segment.origin)
    with warnings_held_back():
        streamed = answer(model, text, show)
        if not result.as_json:
            painter.end()
    if not result.as_json:
        if not painter.visible:
            model.errors.print()  # the text does not end with a line break
        ending = describe_ending(streamed, model.params, llm.plan.max_model_len)
        if not streamed.text.strip() and streamed.finish_reason == "stop" and llm.tokenizer.template().is_usable:
            ending += ", without any text: this is a chat model; use `forerun chat`"
        card = run_card(
            model.setting, streamed.timing, llm.stats, streamed.origins, llm.plan.lines(), llm.drafter_names, ending
        )
        model.errors.print(card)
    result.write(as_object(streamed, model.setting, llm))
    return streamed


class Reply:
    """Shows an answer of a conversation, with its reasoning set apart; `content` is the answer without reasoning."""

    def __init__(self, form: AnswerForm, painter: Painter) -> None:
        self.form, self.painter = form, painter
        self.splitter = AnswerSplitter(form)
        self.content = ""
        self.thinking = False  # whether the last shown text is reasoning
        self.origin = Origin.TARGET

    def add(self, segment: Segment) -> None:
        """Add a segment and show the parts that are now certain; special tokens are not shown."""
        if segment.special and segment.text not in self.form.special:
            return
        self.origin = segment.origin
        self.show(self.splitter.feed(self.splitter.literals.broken(segment.text, segment.special)))

    def close(self) -> None:
        """Show the remaining parts, once the answer has ended."""
        self.show(self.splitter.close())

    def show(self, parts: Sequence[AnswerPart]) -> None:
        """Write parts, with an empty line after reasoning."""
        for part in parts:
            thought = part.kind == "reasoning"
            self.painter.write("\n\n" * (self.thinking and not thought) + part.text, self.origin, thought=thought)
            self.thinking = thought
            self.content += "" if thought else part.text


def answer(model: LoadedModel, prompt: str | Sequence[int], show: Callable[[Segment], None]) -> StreamedAnswer:
    """Stream one answer to `show`. After Ctrl-C it ends with the finish reason "cancelled"."""
    result, bar = StreamedAnswer(), LoadingBar(model.errors)
    started_s = time.perf_counter()
    deltas = cast(Generator[Delta, None, None], model.llm.stream(prompt, model.params, progress=bar))
    with patient_interrupt() as interrupt, closing(deltas), bar:
        for delta in deltas:
            bar.stop()
            result.total_s = time.perf_counter() - started_s
            result.first_s = result.first_s or result.total_s
            result.token_ids += delta.token_ids
            result.origins += delta.origins
            for segment in delta.segments:
                result.text += segment.text
                show(segment)
            result.finish_reason, result.stop_reason = delta.finish_reason, delta.stop_reason
            if interrupt.is_set() and result.finish_reason is None:
                result.finish_reason = "cancelled"
                break
    return result


def describe_ending(streamed: StreamedAnswer, params: SamplingParams, max_model_len: int) -> str:
    """Why an answer ended, as a phrase for the card."""
    if streamed.finish_reason == "length":
        if params.max_tokens is None or len(streamed.token_ids) < params.max_tokens:
            return f"at the context limit, {max_model_len} tokens including the prompt"
        return f"at max_tokens, {params.max_tokens}"
    if streamed.finish_reason == "stop":
        return (
            f"at the stop string {streamed.stop_reason!r}" if isinstance(streamed.stop_reason, str) else "by the model"
        )
    return streamed.finish_reason or ""


def as_object(streamed: StreamedAnswer, setting: Setting, llm: LLM) -> dict[str, Any]:
    """An answer as JSON: text, tokens with their origins, the description of the run, and statistics."""
    return {
        "text": streamed.text,
        "token_ids": streamed.token_ids,
        "origins": [origin.value for origin in streamed.origins],
        "finish_reason": streamed.finish_reason,
        "stop_reason": streamed.stop_reason,
        **asdict(setting),
        "stats": stats_object(llm.stats, streamed.timing, llm.drafter_names),
        "memory_plan": llm.plan.lines(),
    }


def stats_object(stats: Stats, timing: AnswerTiming, drafters: Sequence[str] = ()) -> dict[str, Any]:
    """The counters and rates of a run as JSON; for a mix, also the counters of each of its `drafters`."""
    by_drafter = {drafters[number]: asdict(counts) for number, counts in sorted(stats.drafters.items())}
    return {
        "num_tokens": timing.num_tokens,
        "first_token_s": timing.first_s,
        "total_s": timing.total_s,
        "tokens_per_s": timing.tokens_per_s,
        **{name: getattr(stats, name) for name in STATS},
        "acceptance_at_depth": list(stats.acceptance_at_depth),
    } | ({"arms": by_drafter} if by_drafter else {})
