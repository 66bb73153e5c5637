"""Spec-Bench's questions, as its file has them, and a part of each category where not all are asked.

This file decides which lines count and in which order categories are shown. The file itself is not shipped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CONVERSATION = "multi-turn conversation"  # Spec-Bench's name for all of MT-bench
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
CATEGORIES = (*MT_BENCH, *TASKS)
SOURCE = (
    "It is data/spec_bench/question.jsonl of https://github.com/hemingkx/Spec-Bench (Apache-2.0): download it and give "
    "its path with --questions."
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says, turn by turn."""

    number: int
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """The name under which Spec-Bench reports it."""
        return CONVERSATION if self.category in MT_BENCH else self.category


def read_questions(path: Path, per_category: int | None = None) -> list[Question]:
    """The file's questions in the order of CATEGORIES, or so many of each category, at equal distances in the file.

    Ends the program where there is no such file, or a line of it is no question.
    """
    if not path.is_file():
        raise SystemExit(f"There is no file {path} of Spec-Bench's questions. {SOURCE}")
    lines = path.read_text(encoding="utf-8").splitlines()
    questions = [question_of(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
    by_category = {name: [each for each in questions if each.category == name] for name in CATEGORIES}
    return [each for found in by_category.values() for each in evenly(found, per_category)]


def question_of(line: str, place: str) -> Question:
    """One line."""
    try:
        fields = json.loads(line)
        number, turns = fields.get("question_id", fields.get("id")), tuple(map(str, fields["turns"]))
        question = Question(int(number), fields["category"], turns)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SystemExit(f"{place}: it is no question of Spec-Bench ({error!r}). {SOURCE}") from error
    if question.category not in CATEGORIES or not turns:
        raise SystemExit(f"{place}: the category is {question.category!r}; Spec-Bench has {', '.join(CATEGORIES)}.")
    return question


def evenly(questions: Sequence[Question], count: int | None) -> list[Question]:
    """So many of them, the middles of equal parts; all where there are no more."""
    if count is None or count >= len(questions):
        return list(questions)
    return [questions[(2 * i + 1) * len(questions) // (2 * count)] for i in range(count)]
