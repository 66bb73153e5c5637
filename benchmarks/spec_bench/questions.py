"""Reads Spec-Bench's file of questions, or a part of each category.

This file decides which lines are valid and in which order categories are shown. The file of questions is not shipped.
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
    """One question of Spec-Bench: the user's messages, one per turn."""

    number: int
    category: str
    turns: tuple[str, ...]

    @property
    def task(self) -> str:
        """The task under which Spec-Bench reports the question."""
        return CONVERSATION if self.category in MT_BENCH else self.category


def read_questions(path: Path, per_category: int | None = None) -> list[Question]:
    """The file's questions in the order of CATEGORIES, or `per_category` of each, at equal distances in the file.

    Raises SystemExit if the file does not exist, or if a line of it is not a question.
    """
    if not path.is_file():
        raise SystemExit(f"There is no file {path} with Spec-Bench's questions. {SOURCE}")
    lines = path.read_text(encoding="utf-8").splitlines()
    questions = [question_of(line, f"{path}, line {i}") for i, line in enumerate(lines, 1)]
    by_category = {name: [each for each in questions if each.category == name] for name in CATEGORIES}
    return [each for category in by_category.values() for each in evenly(category, per_category)]


def question_of(line: str, place: str) -> Question:
    """The question in a line; `place` names the line in the error."""
    try:
        fields = json.loads(line)
        number, turns = fields.get("question_id", fields.get("id")), tuple(map(str, fields["turns"]))
        question = Question(int(number), fields["category"], turns)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SystemExit(f"{place}: the line is not a question of Spec-Bench ({error!r}). {SOURCE}") from error
    if question.category not in CATEGORIES or not turns:
        raise SystemExit(f"{place}: the category is {question.category!r}; Spec-Bench has {', '.join(CATEGORIES)}.")
    return question


def evenly(questions: Sequence[Question], count: int | None) -> list[Question]:
    """`count` questions, the middles of equal parts; all questions if there are not more, or if `count` is None."""
    if count is None or count >= len(questions):
        return list(questions)
    return [questions[(2 * i + 1) * len(questions) // (2 * count)] for i in range(count)]
