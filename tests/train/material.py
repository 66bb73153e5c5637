"""Prompts, settings and answers for tests of training, on the stories target."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forerun.config import Speculation
from forerun.heads.student import Student
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from forerun.train.answers import AnswerSource
from forerun.train.data import PromptReader, TrainingData, read_data
from forerun.train.settings import TrainSettings
from kit.checkpoints import SRC, TARGET
from kit.unchecked import unchecked

BEGINNINGS = (
    "Once upon a time",
    "Lily had a red ball",
    "Tom and his dog",
    "One day, a bird",
    "Sam was sad",
    "Mom said",
)
ENDINGS = ("", " who", " and", " in the", " because", " with")


def no_report(*_: object) -> None:
    """A report of progress that does nothing."""


def write_prompts(folder: Path) -> Path:
    """Thirty prompts, a line each."""
    path = folder / "prompts.txt"
    path.write_text("\n".join(a + b for a in BEGINNINGS for b in ENDINGS) + "\n", "utf-8")
    return path


def read_prompts(paths: Sequence[Path], settings: TrainSettings, chat: bool = False) -> TrainingData:
    """What files hold, for the stories target."""
    target = Blueprint.of(str(TARGET))
    return read_data(paths, PromptReader(target.tokenizer(), target.config.max_positions, settings, chat))


def source_of(
    data: TrainingData, settings: TrainSettings, student: Student, target: Path = TARGET, **options: object
) -> AnswerSource:
    """Answers of the target for this student; its LLM is to be closed."""
    llm = LLM(str(target), max_model_len=256, max_num_seqs=8, **options)  # type: ignore[arg-type]
    return AnswerSource(llm, data, settings, student.taps)


def source_for(student: Student, settings: TrainSettings, folder: Path, target: Path = TARGET) -> AnswerSource:
    """Answers to the thirty prompts, which are put into this folder."""
    return source_of(read_prompts([write_prompts(folder)], settings), settings, student, target)


def answers(draft: str | None, model: Path = TARGET) -> tuple[list[tuple[int, ...]], float]:
    """Answers to prompts that are not among the data, and the acceptance rate."""
    params = [SamplingParams(max_tokens=60, seed=i, temperature=float(i % 3 > 0), ignore_eos=True) for i in range(8)]
    llm = LLM(str(model), draft, speculation=Speculation(2), max_model_len=256)
    with unchecked():
        found = llm.generate([f"{name} went to the" for name in ("Lucy", "Tim", "Spot", "Mia") * 2], params)
    stats = llm.stats
    llm.close()
    return [answer.outputs[0].token_ids for answer in found], stats.num_accepted / max(1, stats.num_drafted)


def environment() -> dict[str, str]:
    """The environment of a command in a separate process, on one thread."""
    return os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}


def finish(arguments: Sequence[str]) -> str:
    """Run such a command to its end; returns its standard output."""
    run = subprocess.run(arguments, env=environment(), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout
