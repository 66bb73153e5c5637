"""`measure`: loads the models for a benchmark, executes the runs that are not finished, and returns the report.

This file decides the order of runs, how finished ones are stored, and the context length and batch size for which
memory is planned. All sequences of a batch must fit into memory together, or the batch would be smaller than reported.
Every group is warmed up before its first run, also after an interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from forerun import __version__
from forerun.annotations import ProgressCallback
from forerun.bench.figures import Bandwidth, BenchReport, GroupFigures, group_figures
from forerun.bench.material import Passage, check_lengths, workload_of
from forerun.bench.plan import CHOSEN, Group, Selection, depth_name
from forerun.bench.run import BenchRun, BenchSetup, run_name, waves
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.llm import LLM
from forerun.machine import Machine, bandwidth_bytes_per_s, disturbs, sources_digest
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.store import Journal, cache_folder, flat
from forerun.streams import show_note

T = TypeVar("T")
FORMAT_VERSION = 4
HEAD_KEYS = {"benchmark": "forerun_bench", "tuning": "forerun_tune"}  # the key of the format version in the first line


@dataclass(slots=True)
class Measurements:
    """Finished measurements, in memory and in a journal, from which a stopped run continues.

    `option` and `place` (file or folder) are for error messages.
    """

    path: Path
    option: str
    place: str
    values: dict[str, Any] = field(default_factory=dict)
    journal: Journal = field(init=False)

    @classmethod
    def open(
        cls, path: Path, about: Mapping[str, Any], what: str, option: str, place: str, fresh: bool = False
    ) -> Measurements:
        """Open the journal of a run (`what`) with its finished measurements; `fresh` discards them.

        `about` contains everything that affects a measurement, and is in the first line. If the file belongs to another
        run or cannot be used, raises InvalidRequest without changing it.
        """
        kept, key = cls(path, option, place), HEAD_KEYS[what]
        first_line = json.dumps({key: FORMAT_VERSION, "about": about}).encode()
        with kept.writable():
            kept.journal = journal = Journal.read(path)
            head, before = json.loads(first_line), journal.entries[0] if journal.entries else None
            if path.exists() and not first_line.startswith(path.read_bytes()):  # has more than a part of the first line
                if not isinstance(before, dict) or key not in before:
                    raise InvalidRequest(option, f"{path} is not a journal of a {what}: name another {place}.")
                if before != head and not fresh:
                    old, new = flat(before.get("about")), flat(head["about"])
                    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
                    problem = f"{path} is of a {what} with other settings ({', '.join(differing) or 'its form'})"
                    raise InvalidRequest(option, f"{problem}: name another {place}, or start over with --fresh.")
            path.parent.mkdir(parents=True, exist_ok=True)
            journal.keep(0 if fresh else len(journal.entries))
            if not journal.entries:
                journal.add(head)
        for number, entry in enumerate(journal.entries[1:], start=2):
            if not isinstance(entry, dict) or set(entry) != {"of", "value"} or not isinstance(entry["of"], str):
                raise InvalidRequest(option, f"{path}:{number} is damaged: start over with --fresh")
            kept.values[entry["of"]] = entry["value"]
        return kept

    def holds(self, of: str) -> bool:
        """Whether a measurement exists and was not disturbed by other programs."""
        value = self.values.get(of)
        num_busy = value.get("num_busy") if isinstance(value, dict) else None
        return of in self.values and not (isinstance(num_busy, int | float) and disturbs(num_busy))

    def value(self, of: str, parse: Callable[[Any], T]) -> T:
        """A finished measurement, which `parse` reads. If that raises ValueError, raises InvalidRequest."""
        try:
            return parse(self.values[of])
        except ValueError as error:
            entries = enumerate(self.journal.entries, start=1)
            line = max(number for number, entry in entries if entry.get("of") == of)
            fix = "delete this line, so that it is measured again, or start over with --fresh"
            raise InvalidRequest(self.option, f"{self.path}:{line} is damaged ({error}): {fix}") from error

    def add(self, of: str, value: Any) -> None:
        """Store a finished measurement, and hold it as a later run will read it: as decoded from JSON."""
        with self.writable():
            self.journal.add({"of": of, "value": value})
        self.values[of] = self.journal.entries[-1]["value"]

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Context in which an OSError becomes InvalidRequest."""
        try:
            yield
        except OSError as error:
            fix = f"name another {self.place} with --{self.option}"
            raise InvalidRequest(self.option, f"{self.path} cannot be used ({error}): {fix}") from error

    @contextmanager
    def continued(self, bar: LoadingBar) -> Iterator[None]:
        """Context of measuring, with notes about finished measurements and, after Ctrl-C, about how to resume."""
        if self.values:
            show_note(f"{len(self.values)} measurements exist already ({self.path}); --fresh discards them.")
        try:
            yield
        except KeyboardInterrupt:
            bar.stop()
            show_note(f"Interrupted. The same command resumes after {len(self.values)} measurements ({self.path}).")
            raise


@dataclass(frozen=True, slots=True)
class Models:
    """The models to measure, as arguments of LLM."""

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
    """Execute the unfinished runs and return the report. Runs are stored in the file `path`, or in the cache folder."""
    setup = set_up(models, passages, selection, bar)
    target = Blueprint.of(models.target)
    what = about(models, setup, selection)
    kept = Measurements.open(path or default_path(what), what, "benchmark", "state", "file", fresh)
    with kept.continued(bar):
        bar("benchmark", 0.0, "memory bandwidth")
        start = bandwidth_bytes_per_s(device=target.placement.device)
        groups = bench(setup, selection, kept, lambda detail, done: bar("benchmark", done, detail))
        bar("benchmark", 1.0, "memory bandwidth")
        bandwidth = Bandwidth(start, bandwidth_bytes_per_s(device=target.placement.device))
    places = {name: [item.place for item in workload.items] for name, workload in setup.workloads.items()}
    return BenchReport(what, bandwidth, target.pass_bytes, places, tuple(groups), target.placement)


def set_up(
    models: Models,
    passages: Mapping[str, Sequence[Passage]],
    selection: Selection,
    progress: ProgressCallback | None = None,
) -> BenchSetup:
    """Tokenize and check the texts, and load the models for them."""
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
    return BenchSetup(llm, workloads, selection.num_tokens, selection.seed, speculation=selection.speculation)


def load_for(batch: int, target: ModelSpec, draft: str, options: str, **arguments: Any) -> LLM:
    """An LLM for this batch size. Raises NotEnoughMemory, naming the options to lower, if it does not fit.

    The prefix cache is off, since repeated prompts must cost the same each time.
    """
    llm = LLM(target, draft, max_num_seqs=batch, prefix_cache=False, **arguments)
    if llm.plan.num_sequences_speculative < batch:
        plan = "; ".join(llm.plan.lines())
        llm.close()
        raise NotEnoughMemory(f"batch {batch} does not fit into memory ({plan}): lower {options}")
    return llm


def bench(setup: BenchSetup, selection: Selection, kept: Measurements, report: ProgressCallback) -> list[GroupFigures]:
    """Execute the runs that are not stored yet, and return the figures of all runs."""
    groups = selection.groups({name: workload.replayed for name, workload in setup.workloads.items()})
    turns = selection.turns()
    unfinished = {group: [turn for turn in turns if not kept.holds(run_name(group, turn))] for group in groups}
    total, done = sum(weight(setup, group) * len(missing) for group, missing in unfinished.items()), 0
    for group, missing in unfinished.items():
        if missing:
            report(f"{group.name}: warming up", done / total)
            setup.warm_up(group, selection.depths)
        for turn in missing:
            report(f"{group.name}, depth {depth_name(turn.depth)}", done / total)
            kept.add(run_name(group, turn), asdict(setup.run(group, turn)))
            done += weight(setup, group)
    runs: dict[Group, list[BenchRun]] = {}
    for group in groups:
        num_answers = list(waves(len(setup.workloads[group.workload].items), group.batch))[-1].stop
        parse = partial(BenchRun.from_json, num_answers=num_answers)
        runs[group] = [kept.value(run_name(group, turn), partial(parse, turn=turn)) for turn in turns]
    return [group_figures(group, each, setup.workloads[group.workload].recorded()) for group, each in runs.items()]


def weight(setup: BenchSetup, group: Group) -> int:
    """The approximate cost of a run: tokens of one sequence times waves."""
    workload = setup.workloads[group.workload]
    num_waves = -(-len(workload.items) // group.batch)
    return num_waves * workload.longest(setup.num_tokens)


def default_path(about: Mapping[str, Any]) -> Path:
    """The default file of finished runs, in the user's cache folder, named by a hash of `about`.

    Raises InvalidRequest if there is no cache folder.
    """
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return cache_folder("bench") / f"{key}.jsonl"
    except OSError as error:
        raise InvalidRequest("state", f"{error}, or name a file with --state") from error


def draft_fingerprint(target: Blueprint, draft: str, progress: ProgressCallback | None = None) -> str:
    """The fingerprint of a drafter's weights."""
    return plan_drafter(draft, DraftContext(target, target.tokenizer(), progress)).fingerprint()


def environment() -> dict[str, Any]:
    """The versions and the machine, which affect every measurement."""
    return {"forerun": __version__, "sources": sources_digest(), "machine": asdict(Machine.here())}


def about(models: Models, setup: BenchSetup, selection: Selection) -> dict[str, Any]:
    """Everything that affects the measurements."""
    return {
        **environment(),
        "models": {
            "target": setup.llm.name,
            "draft": setup.llm.draft_name,
            "format": setup.llm.format,
            "kernels": setup.llm.kernels,
            "kernels_measured": setup.llm.measured,
            "fingerprint": setup.llm.fingerprint,
            "draft_fingerprint": draft_fingerprint(Blueprint.of(models.target), models.draft),
        },
        "settings": asdict(selection),
        "workloads": {
            name: {"replayed": w.replayed, "num_prompts": len(w.items), "digest": w.digest()}
            for name, w in setup.workloads.items()
        },
    }
