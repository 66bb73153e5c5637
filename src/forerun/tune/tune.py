"""`tune`: checks the arguments, measures the candidates, and returns the report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from forerun.bench.material import Passage, Template, Workload, check_lengths, workload_of
from forerun.bench.measure import Measurements, environment
from forerun.bench.plan import Selection
from forerun.control.forecast import without_advice
from forerun.draft.auto import resolved_draft
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.tune.report import TuneReport
from forerun.tune.study import study_all
from forerun.tune.trial import Trial, candidates_of

FILE = "measurements.jsonl"
FREE = ("repeats",)  # settings that may change between a run and its continuation


@dataclass(frozen=True, slots=True)
class Subject:
    """The target, the specs of the candidates, and the options of the chat template."""

    spec: ModelSpec
    drafts: Sequence[str]
    template: Template = field(default_factory=Template)
    threads: int | None = None


def tune(
    subject: Subject,
    prompts: Sequence[Passage],
    selection: Selection,
    folder: Path,
    fresh: bool,
    bar: LoadingBar,
    time_limit_s: float | None = None,
) -> TuneReport:
    """Measure every candidate at all batch sizes and temperatures of a selection, and return the report.

    Finished measurements are stored in `folder` and not repeated; none starts after the time limit. An unknown drafter,
    a prompt that does not fit, or the folder of another tuning raises a ForerunError before any weights are loaded.
    """
    if subject.threads is not None:
        torch.set_num_threads(subject.threads)
    deadline_s = time.perf_counter() + (math.inf if time_limit_s is None else time_limit_s)
    target = Blueprint.of(subject.spec, bar)
    candidates = candidates_of([str(resolved_draft(each, target)) for each in subject.drafts], target.config.layers)
    workload = workload_of("tune", prompts, selection.num_prompts, target.tokenizer(), subject.template)
    check_lengths(workload, selection.num_tokens, target.config.max_positions)
    settings = {name: value for name, value in asdict(selection).items() if name not in ("depths", "tree")}
    about = about_of(subject, target, workload, settings)
    kept = Measurements.open(folder / FILE, about, "tuning", "out", "folder", fresh)
    trials = [Trial(target, subject.spec, each, selection, workload, kept, bar) for each in candidates]
    with kept.continued(bar), without_advice():
        studied = study_all(trials, deadline_s, bar)
    about = {**about, "settings": settings | {"time_limit_s": time_limit_s}}
    temperatures = (0.0,) if workload.replayed else selection.temperatures
    return TuneReport(about, model_options(subject), selection, temperatures, tuple(studied))


def about_of(subject: Subject, target: Blueprint, workload: Workload, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that affects the measurements of all candidates."""
    template = subject.template
    chat = {"hash": workload.template, "options": dict(template.options), "thinking": template.thinking}
    return {
        **environment(),
        "model": {
            "target": target.name,
            "given_as": subject.spec.model,
            "format": target.format,
            "kernels": target.backend_name,
            "fingerprint": target.fingerprint(),
        },
        "prompts": {
            "num_prompts": len(workload.items),
            "digest": workload.digest(),
            "template": chat if workload.template else None,
            "replayed": workload.replayed,
        },
        "settings": {name: value for name, value in settings.items() if name not in FREE},
    }


def model_options(subject: Subject) -> Mapping[str, Any]:
    """The model's command-line options that differ from the defaults, by name."""
    spec, usual = subject.spec, ModelSpec(subject.spec.model)
    names = ("dtype", "quantize", "kernels", "device", "one_gemm", "tensor_parallel_size")
    changed = {name: getattr(spec, name) for name in names if getattr(spec, name) not in (getattr(usual, name), "cpu")}
    return changed | ({} if subject.threads is None else {"threads": subject.threads})
