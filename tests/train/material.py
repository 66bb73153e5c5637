"""Prompts, settings and answers for tests of training, on the stories target."""

from collections.abc import Sequence
from pathlib import Path

from forerun.heads.student import Student
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.train.answers import AnswerSource
from forerun.train.data import PromptReader, TrainingData, read_data
from forerun.train.settings import TrainSettings
from kit.checkpoints import TARGET

BEGINNINGS = (
    "Once upon a time",
    "Lily had a red ball",
    "Tom and his dog",
    "One day, a bird",
    "Sam was sad",
    "Mom said",
)
ENDINGS = ("", " who", " and", " in the", " because", " with")


def quiet(*_: object) -> None:
    """A report that nobody hears."""


def write_prompts(folder: Path) -> Path:
    """Thirty prompts, a line each."""
    path = folder / "prompts.txt"
    path.write_text("\n".join(a + b for a in BEGINNINGS for b in ENDINGS) + "\n", "utf-8")
    return path


def read_prompts(paths: Sequence[Path], settings: TrainSettings, chat: bool = False) -> TrainingData:
    """What files hold, for the stories target."""
    target = Blueprint.of(str(TARGET))
    return read_data(paths, PromptReader(target.tokenizer(), target.config.max_positions, settings, chat))


def source_of(data: TrainingData, settings: TrainSettings, student: Student, **options: object) -> AnswerSource:
    """Answers of the stories target for this student; its LLM is to be closed."""
    llm = LLM(str(TARGET), max_model_len=256, max_num_seqs=8, **options)  # type: ignore[arg-type]
    return AnswerSource(llm, data, settings, student.taps)
