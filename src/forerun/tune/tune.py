"""A tuning from start to end: it checks everything that needs no model, studies the candidates, and reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun import __version__
from forerun.bench.material import check_lengths
from forerun.bench.measure import Bar
from forerun.control.forecast import without_advice
from forerun.machine import Machine, sources_digest
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.streams import show_note
from forerun.tune.material import Template, TunePrompt, TuneTexts, texts_of
from forerun.tune.notes import Notes
from forerun.tune.report import TuneReport
from forerun.tune.settings import TuneSettings, candidates_of
from forerun.tune.study import study_all, temperatures
from forerun.tune.trial import TimeLimit, Trial

NOTES = "measurements.jsonl"
FREE = ("time_limit_s", "repeats")  # settings that may change between a run and its continuation


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tuned: the target, the candidates as they are spelled, and how conversations become text."""

    spec: ModelSpec
    drafts: Sequence[str]
    template: Template = field(default_factory=Template)
    threads: int | None = None


def tune(
    subject: Subject, prompts: Sequence[TunePrompt], settings: TuneSettings, folder: Path, fresh: bool, bar: Bar
) -> TuneReport:
    """Measure what is not measured yet, and report. Measurements are noted in `folder`.

    Raises before any weights are loaded where a drafter is unknown, a prompt does not fit, or the notes are of another
    tuning.
    """
    if subject.threads is not None:
        torch.set_num_threads(subject.threads)
    deadline_s = None if settings.time_limit_s is None else time.perf_counter() + settings.time_limit_s
    target = Blueprint.of(subject.spec, bar)
    candidates = candidates_of(subject.drafts, target.config.layers)
    tokenizer = target.tokenizer()
    texts = texts_of(prompts, settings.num_prompts, tokenizer, subject.template)
    check_lengths(texts.workload, settings.num_tokens, target.config.max_positions)
    about = about_of(subject, target, texts, settings)
    notes = Notes.open(folder / NOTES, about, fresh)
    if notes.values:
        show_note(f"{len(notes.values)} measurements are there already ({notes.path}); --fresh makes them again.")
    trials = [Trial(target, subject.spec, each, settings, texts, notes, bar) for each in candidates]
    try:
        with without_advice():
            studied = study_all(trials, TimeLimit(deadline_s), bar)
    except KeyboardInterrupt:
        bar.stop()
        show_note(f"Interrupted. The same command goes on behind {len(notes.values)} measurements ({notes.path}).")
        raise
    about = {**about, "settings": asdict(settings)}
    return TuneReport(about, model_options(subject), settings, temperatures(trials[0]), tuple(studied))


def about_of(subject: Subject, target: Blueprint, texts: TuneTexts, settings: TuneSettings) -> dict[str, Any]:
    """Everything that decides a measurement, whichever the candidate."""
    told = subject.template
    chat = {"hash": texts.template, "options": dict(told.options), "thinking": told.thinking}
    return {
        "forerun": __version__,
        "sources": sources_digest(),
        "model": {
            "target": target.name,
            "given_as": subject.spec.model,
            "format": target.format,
            "kernels": target.computed_by,
            "fingerprint": target.fingerprint(),
        },
        "machine": asdict(Machine.here()),
        "prompts": {
            "num_prompts": len(texts.workload.items),
            "digest": texts.workload.digest(),
            "template": chat if texts.template else None,
            "replayed": texts.workload.replayed,
        },
        "settings": {name: value for name, value in asdict(settings).items() if name not in FREE},
    }


def model_options(subject: Subject) -> Mapping[str, Any]:
    """The options of the model that a command would need to run it in the same way, by their names."""
    spec, usual = subject.spec, ModelSpec(subject.spec.model)
    names = ("dtype", "quantize", "kernels", "device", "one_gemm")
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) not in (getattr(usual, name), "cpu")}
    return given | ({} if subject.threads is None else {"threads": subject.threads})
