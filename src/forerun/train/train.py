"""`train`: checks a training task, loads the target, trains the student, and returns the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forerun import __version__
from forerun.control.forecast import without_advice
from forerun.draft.auto import RECORD, DrafterRecord
from forerun.errors import InvalidRequest
from forerun.heads.medusa.student import check_free, write_target
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import Student, TargetText
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.projections import count_parameters
from forerun.models.source import find_checkpoint
from forerun.models.spec import ModelSpec
from forerun.store import write_whole
from forerun.streams import show_note
from forerun.train.answers import AnswerCache, AnswerSource, draft_vocabulary
from forerun.train.data import PromptReader, TrainingData, read_data
from forerun.train.held_out import NUM_NODES, TREE, accuracies, judge_held_out, likeliest_tree
from forerun.train.kinds import make_student
from forerun.train.objective import Objective
from forerun.train.report import TrainReport, TunedTarget
from forerun.train.settings import MOST_SEQUENCES, TrainSettings
from forerun.train.speed import costs_of_student, read_costs
from forerun.train.state import TrainFolder, TrainState
from forerun.train.team import Team
from forerun.train.trainer import Trainer

FREE = ("checkpoint_every",)  # settings that may change between a run and its continuation
LARGE_HEAD = 0.1  # share of a pass's computation
FEWER_TOKENS = 6  # suggested draft vocabulary: one in so many of the target's tokens


@dataclass(frozen=True, slots=True)
class TrainTask:
    """A training: kind of student, target, data and output folder; `cache` is a folder for the target's states."""

    kind: str
    spec: ModelSpec
    data: Sequence[Path]
    out: Path
    sizes: StudentSizes = field(default_factory=StudentSizes)
    chat: bool = False
    cache: Path | None = None
    force: bool = False
    threads: int | None = None


def train(task: TrainTask, settings: TrainSettings, report: Callable[..., None]) -> TrainReport | None:
    """Run or resume a training to its end; `report` is called like a LoadingBar.

    Processes of a team (`team.py`) train together; all but the first return None. Unusable data, sizes or folders raise
    a ForerunError before any weights are loaded.
    """
    with Team.joined() as team, team.folder(task.out) as out:
        task = replace(task, out=out, spec=team.placed(task.spec))
        trained = train_together(task, settings, report if team.is_first else lambda *_: None, team)
        return trained if team.is_first else None


def train_together(task: TrainTask, settings: TrainSettings, report: Callable[..., None], team: Team) -> TrainReport:
    """Train as one process of a team."""
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    target, tuned = Blueprint.of(task.spec, report), task.sizes.tune_target if team.is_first else None
    tokenizer = target.tokenizer()
    student = make_student(task.kind, target, task.sizes, settings.seed)
    if settings.first_share and student.at_depth_1() is student:
        raise InvalidRequest("first_share", f"{settings.first_share:g} is no option of {task.kind}: leave it out.")
    if student.may_lack_tokens and task.sizes.draft_vocab is None and team.is_first:
        advise_on_vocabulary(target)
    data = read_data(task.data, PromptReader(tokenizer, target.config.max_positions, settings, task.chat))
    share = team.own_share(settings)
    about = {**about_of(target, student, data, settings), **({"processes": team.size} if team.size > 1 else {})}
    cache = None if task.cache is None else open_cache(task.cache, target, student, data, share, team)
    if tuned is not None:
        check_free(tuned, task.out)
    check_out(task, target)
    folder = TrainFolder(task.out)
    folder.claim(about, task.force)
    is_over = DrafterRecord.read(task.out) is not None  # then the stored costs are used
    costs = read_costs(folder.round_costs) if is_over else None
    with answering_llm(target, data, share, report) as llm:
        source = AnswerSource(llm, data, share, student.taps, cache, team)
        if task.sizes.draft_vocab is not None:
            ids = draft_vocabulary(source, task.sizes.draft_vocab, folder, report)
            student = student.with_vocabulary(torch.tensor(ids))
        if costs is None and team.is_first:
            temperature, deepest = settings.sampling(0).temperature, source.objective.draft_depth(student)
            costs = costs_of_student(llm, target, student, data.held_out, temperature, deepest, report)
        held_out = source.held_out(report) if team.is_first else ()
        state = Trainer(student, source, folder, held_out, costs, report).run()
        if student.most_depth is not None and team.is_first:
            write_tree(task.out, source.objective, student, state, held_out)
    trained = TrainReport(about, state, costs, task.out, student.spec(task.out), data)
    if tuned is not None:
        target, figures = finish_target(task, tuned, target, data, settings, state, report)
        trained = replace(trained, tuned=figures)
    if not is_over:
        if costs is not None and team.is_first:
            write_whole(folder.round_costs, json.dumps(asdict(costs)) + "\n")
        record = trained.record(target, settings.sampling(0).temperature)
        write_whole(task.out / RECORD, record.text())
    return trained


def check_out(task: TrainTask, target: Blueprint) -> None:
    """Raise InvalidRequest if --draft cannot name the output folder, or if the training reads a checkpoint in it."""
    if '"' in str(task.out):
        raise InvalidRequest("out", f"{task.out} has a double quote, with which --draft cannot name it: leave it out.")
    init = task.sizes.init
    for option, folder in (("model", target.folder), ("init", None if init is None else find_checkpoint(init))):
        if folder is not None and folder.resolve() == task.out.resolve():
            raise InvalidRequest("out", f"{task.out} is the folder of --{option}: name another folder.")


def advise_on_vocabulary(target: Blueprint) -> None:
    """Suggest a draft vocabulary if the target's output matrix is a large part of a pass."""
    c = target.config
    head = c.vocab_size * c.hidden
    share = head / (count_parameters(c) - (0 if c.tied else head))
    if share > LARGE_HEAD:
        show_note(
            f"Every draft token needs the target's output matrix of {c.vocab_size:,} tokens, {share:.0%} of a pass. "
            f"With --draft-vocab {c.vocab_size // FEWER_TOKENS} only frequent tokens are drafted, at less cost."
        )


@contextmanager
def answering_llm(
    target: Blueprint, data: TrainingData, settings: TrainSettings, report: Callable[..., None]
) -> Iterator[LLM]:
    """An LLM that generates the target's answers, closed at the end of the context."""
    rope = target.config.rope  # LongRoPE depends on the maximum length: use a length that selects the usual factors
    usual = rope.original_max_positions + 1 if rope.kind == "longrope" else 0
    llm = LLM(
        target.spec,
        max_model_len=min(target.config.max_positions, max(usual, data.longest + settings.max_tokens + 1)),
        max_num_seqs=max(MOST_SEQUENCES, settings.batch),
        generation_config="none",
        prefix_cache=False,  # all states are recorded
        progress=report,
    )
    try:
        with without_advice():
            yield llm
    finally:
        llm.close()


def finish_target(
    task: TrainTask,
    folder: Path,
    target: Blueprint,
    data: TrainingData,
    settings: TrainSettings,
    state: TrainState,
    report: Callable[..., None],
) -> tuple[Blueprint, TunedTarget]:
    """Write the tuned target; evaluate the drafter and choose its tree with the tuned target's answers."""
    write_target(target, state.best, folder, task.out)
    tuned = Blueprint.of(replace(task.spec, model=str(folder), revision=None), report)
    student = make_student(task.kind, tuned, replace(task.sizes, tune_target=None), settings.seed)
    with answering_llm(tuned, data, settings, report) as llm:
        source = AnswerSource(llm, data, settings, student.taps)
        texts = source.held_out(report)
        write_tree(task.out, source.objective, student, state, texts)
        figures = judge_held_out(source.objective, student, texts, report)
    assert state.best_figures is not None, "the weights are evaluated before the first step"
    return tuned, TunedTarget(folder, state.best_figures["target_rise"], figures)


def write_tree(
    folder: Path, objective: Objective, student: Student, state: TrainState, texts: Sequence[TargetText]
) -> None:
    """Write the static tree that is best for the best weights."""
    student.set_weights(state.best)
    tree = likeliest_tree(accuracies(objective, student, texts), NUM_NODES)
    write_whole(folder / TREE, json.dumps(tree.paths) + "\n")


def about_of(target: Blueprint, student: Student, data: TrainingData, settings: TrainSettings) -> Mapping[str, Any]:
    """Everything that determines the final weights, apart from the machine and its number of threads."""
    return {
        "forerun": __version__,
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "student": student.description,
        "data": {"digest": data.digest, "prompts": len(data.train), "held_out": len(data.held_out)},
        "settings": {name: value for name, value in settings.values.items() if name not in FREE},
    }


def open_cache(
    folder: Path, target: Blueprint, student: Student, data: TrainingData, settings: TrainSettings, team: Team
) -> AnswerCache:
    """Open the cache of this process's answers, for this target, data, and the student's taps."""
    drawn = ("batch", "max_tokens", "temperature", "top_k", "top_p", "seed")
    about = {
        "target": target.fingerprint(),
        "taps": student.taps,
        "data": data.digest,
        **{name: settings.values[name] for name in drawn},
        **({} if settings.passes == 1 else {"group_steps": settings.group_steps}),
        **({} if team.size == 1 else {"share": (team.rank, team.size)}),
    }
    longest = data.longest + settings.max_tokens
    num_states = longest * (len(student.taps) + 1)  # of a text at most, at the taps and the last layer
    num_bytes = settings.num_answers * num_states * target.config.hidden * torch.float32.itemsize
    return AnswerCache.at(folder, about, num_bytes)
