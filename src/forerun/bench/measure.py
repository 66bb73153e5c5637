"""A benchmark from start to end: it loads models for the texts at hand, runs what is left, and reports.

This file decides the order of runs, how finished ones are kept, and for which context length and how many sequences
memory is planned. All sequences of a batch must fit at once, because a batch that waited for room would not have the
size that the report names. Every group is warmed up before its first run, also where an interrupted benchmark goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.annotations import ProgressCallback
from forerun.bench.figures import Bandwidth, BenchReport, GroupFigures, group_figures
from forerun.bench.material import Passage, check_lengths, workload_of
from forerun.bench.plan import CHOSEN, Group, Selection, depth_name
from forerun.bench.run import BenchRun, Stage, run_name
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.llm import LLM
from forerun.machine import Machine, bandwidth_bytes_per_s, disturbs, sources_digest
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.store import Journal, cache_folder
from forerun.streams import show_note

FORM = 3  # of the file
SIGNS = {"benchmark": "forerun_bench", "tuning": "forerun_tune"}  # by which its first line is known


@dataclass(slots=True)
class Measurements:
    """What is measured so far, in memory and on disk; for messages, the `option` that names a `place` for the file."""

    path: Path
    option: str
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    journal: Journal = field(init=False)

    @classmethod
    def open(
        cls, path: Path, about: Mapping[str, Any], what: str, option: str, place: str, fresh: bool = False
    ) -> Measurements:
        """Those of a run like this, with the file ready to go on; `fresh` starts over.

        `about` is everything that decides a measurement. Raises InvalidRequest, with the file as it was, for one that
        holds something else or cannot be used.
        """
        kept, head = cls(path, option, place), {SIGNS[what]: FORM, "about": about}
        with kept.writable():
            kept.journal = Journal.of_run(path, head, what, option, place, fresh)
        for number, entry in enumerate(kept.journal.entries[1:], start=2):
            if not isinstance(entry, dict) or set(entry) != {"of", "value"}:
                raise InvalidRequest(option, f"{path}:{number} is damaged: start over with --fresh")
            kept.values[entry["of"]] = entry["value"]
        return kept

    def holds(self, of: str) -> bool:
        """Whether it need not be measured any more: it is there, and no other program disturbed it."""
        value = self.values.get(of)
        return of in self.values and not (isinstance(value, dict) and disturbs(value.get("num_busy")))

    def add(self, of: str, value: Any) -> Any:
        """A finished measurement, on disk when this returns; in the form that a later run will read."""
        with self.writable():
            self.journal.add({"of": of, "value": value})
        self.values[of] = self.journal.entries[-1]["value"]
        return self.values[of]

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Within it, a system that refuses the file raises InvalidRequest."""
        try:
            yield
        except OSError as error:
            fix = f"name another {self.place} with --{self.option}"
            raise InvalidRequest(self.option, f"{self.path} cannot be used ({error}): {fix}") from error

    @contextmanager
    def continued(self, bar: LoadingBar) -> Iterator[None]:
        """Within it measurements are added; a person is told what is there, and how an interrupted run goes on."""
        if self.values:
            show_note(f"{len(self.values)} measurements are there already ({self.path}); --fresh makes them again.")
        try:
            yield
        except KeyboardInterrupt:
            bar.stop()
            behind = f"behind {len(self.values)} measurements ({self.path})"
            show_note(f"Interrupted. The same command resumes {behind}.")
            raise


@dataclass(frozen=True, slots=True)
class Models:
    """What is measured, as an LLM takes it."""

    target: ModelSpec
    draft: str
    threads: int | None = None


def measure(
    models: Models,
    passages: Mapping[str, Sequence[Passage]],
    selection: Selection,
    path: Path | None,
    fresh: bool,
    bar: LoadingBar,
) -> BenchReport:
    """Run what is not finished yet, and report. Finished runs are in the file `path`, or in the cache folder."""
    stage = set_up(models, passages, selection, bar)
    target = Blueprint.of(models.target)
    what = about(models, stage, selection)
    kept = Measurements.open(path or default_path(what), what, "benchmark", "state", "file", fresh)
    with kept.continued(bar):
        bar("benchmark", 0.0, "memory bandwidth")
        start = bandwidth_bytes_per_s(device=target.placement.device)
        groups = bench(stage, selection, kept, lambda detail, done: bar("benchmark", done, detail))
        bar("benchmark", 1.0, "memory bandwidth")
        bandwidth = Bandwidth(start, bandwidth_bytes_per_s(device=target.placement.device))
    places = {name: [item.place for item in workload.items] for name, workload in stage.workloads.items()}
    return BenchReport(what, bandwidth, target.pass_bytes, places, tuple(groups), target.placement)


def set_up(
    models: Models,
    passages: Mapping[str, Sequence[Passage]],
    selection: Selection,
    progress: ProgressCallback | None = None,
) -> Stage:
    """The texts as tokens, checked, and the models loaded for them."""
    target = Blueprint.of(models.target, progress)
    tokenizer = target.tokenizer()
    workloads = {name: workload_of(name, texts, selection.num_prompts, tokenizer) for name, texts in passages.items()}
    for workload in workloads.values():
        check_lengths(workload, selection.num_tokens, target.config.max_positions)
    deepest = CHOSEN if CHOSEN in selection.depths else max(selection.depths)
    llm = load_for(
        max(selection.batches),
        models.target,
        models.draft,
        "--batch, --depth or --max-tokens",
        speculation=selection.speculation(deepest),
        max_model_len=max(workload.longest(selection.num_tokens) for workload in workloads.values()),
        threads=models.threads,
        progress=progress,
    )
    return Stage(llm, workloads, selection.num_tokens, selection.seed, speculation=selection.speculation)


def load_for(batch: int, target: ModelSpec, draft: str, options: str, **how: Any) -> LLM:
    """An LLM with room for so many sequences at once. Raises NotEnoughMemory, with these options to lower, else.

    It keeps nothing of prompts: they are read again and again, and are to cost the same each time.
    """
    llm = LLM(target, draft, max_num_seqs=batch, prefix_cache=False, **how)
    if llm.plan.num_sequences_speculative < batch:
        room = "; ".join(llm.plan.lines())
        llm.close()
        raise NotEnoughMemory(f"batch {batch} does not fit: lower {options} ({room})")
    return llm


def bench(stage: Stage, selection: Selection, kept: Measurements, report: ProgressCallback) -> list[GroupFigures]:
    """Run what is not kept yet, and say what all runs show."""
    groups = selection.groups({name: workload.replayed for name, workload in stage.workloads.items()})
    turns = selection.turns()
    left = {group: [turn for turn in turns if not kept.holds(run_name(group, turn))] for group in groups}
    in_all, done = sum(weight(stage, group) * len(missing) for group, missing in left.items()), 0
    for group, missing in left.items():
        if missing:
            report(f"{group.name}: warming up", done / in_all)
            stage.warm_up(group, selection.depths)
        for turn in missing:
            report(f"{group.name}, depth {depth_name(turn.depth)}", done / in_all)
            kept.add(run_name(group, turn), asdict(stage.run(group, turn)))
            done += weight(stage, group)
    runs = {group: [BenchRun.from_json(kept.values[run_name(group, turn)]) for turn in turns] for group in groups}
    return [group_figures(group, each, stage.workloads[group.workload].recorded()) for group, each in runs.items()]


def weight(stage: Stage, group: Group) -> int:
    """About how much a run of this group takes: the tokens of one sequence, times the waves."""
    workload = stage.workloads[group.workload]
    num_waves = -(-len(workload.items) // group.batch)
    return num_waves * workload.longest(stage.num_tokens)


def default_path(about: Mapping[str, Any]) -> Path:
    """Where finished runs are kept unless a place is given: in the user's cache folder, by all that decides them.

    Raises InvalidRequest where the user has none.
    """
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return cache_folder("bench") / f"{key}.jsonl"
    except OSError as error:
        raise InvalidRequest("state", f"{error}, or name a file with --state") from error


def draft_fingerprint(target: Blueprint, draft: str, progress: ProgressCallback | None = None) -> str:
    """What tells a drafter's weights apart from others."""
    return plan_drafter(draft, DraftContext(target, target.tokenizer(), progress)).fingerprint()


def surroundings() -> dict[str, Any]:
    """What decides every measurement, whatever the models."""
    return {"forerun": __version__, "sources": sources_digest(), "machine": asdict(Machine.here())}


def about(models: Models, stage: Stage, selection: Selection) -> dict[str, Any]:
    """Everything that decides the result."""
    return {
        **surroundings(),
        "models": {
            "target": stage.llm.name,
            "draft": stage.llm.draft_name,
            "format": stage.llm.format,
            "kernels": stage.llm.kernels,
            "kernels_measured": stage.llm.measured,
            "fingerprint": stage.llm.fingerprint,
            "draft_fingerprint": draft_fingerprint(Blueprint.of(models.target), models.draft),
        },
        "settings": asdict(selection),
        "workloads": {
            name: {"replayed": w.replayed, "num_prompts": len(w.items), "digest": w.digest()}
            for name, w in stage.workloads.items()
        },
    }
