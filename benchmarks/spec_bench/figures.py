"""Computes figures from answers, as Spec-Bench defines them, and prints their tables.

A question's speed is its number of tokens over the time of its turns, prefill included; a category's speed-up is the
mean speed of its questions over that of plain decoding. Absolute times drift, so a question's speed is the median speed
of plain decoding over the repetitions, times the median of its ratios to plain decoding within a repetition. Tokens per
round are those of all rounds without prefill.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.markdown import table
from benchmarks.peers.state import Cell
from benchmarks.peers.tables import OURS, Repetitions, distinct_share
from benchmarks.spec_bench.answers import Turn
from benchmarks.spec_bench.questions import CATEGORIES, CONVERSATION, TASKS

PLAIN = (OURS, "plain")
Key = tuple[str, str]  # engine, mode
Runs = Mapping[int, Sequence[Cell]]  # the answers of one engine and mode to all turns, by repetition
GROUPS = (*CATEGORIES, CONVERSATION)  # the rows of the tables


@dataclass(frozen=True, slots=True)
class Figure:
    """The figures of an engine and mode in one category.

    `speed_up` is the ratio over forerun's plain decoding, prefill included; `decoding` is the same without prefill.
    """

    category: str
    num_questions: int
    tokens_per_s: float
    speed_up: float
    decoding: float
    tokens_per_round: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one mode, with means over Spec-Bench's six tasks and over all thirteen categories.

    `num_different` answers differ from plain decoding in some token. For forerun it must be 0.
    """

    engine: str
    mode: str
    figures: Sequence[Figure]
    speed_up: float
    geometric: float
    decoding: float
    by_category: float
    by_category_geometric: float
    tokens_per_round: float | None
    num_different: int
    num_answers: int


def summaries(turns: Sequence[Turn], repetitions: Repetitions) -> list[Summary]:
    """A summary of each mode that answered all turns of a repetition, in the order in which modes first appear."""
    by_mode = complete(len(turns), repetitions)
    plain = by_mode.get(PLAIN, {})
    return [summary(key, turns, runs, plain) for key, runs in by_mode.items() if set(runs) & set(plain)]


def complete(num_turns: int, repetitions: Repetitions) -> dict[Key, dict[int, list[Cell]]]:
    """The answers to all turns, in their order, by mode and repetition; incomplete repetitions are left out."""
    by_mode: dict[Key, dict[int, list[Cell]]] = {}
    for repetition, cells in repetitions.items():
        for key in dict.fromkeys((cell.engine, cell.mode) for cell in cells):
            by_prompt = {cell.prompt: cell for cell in cells if (cell.engine, cell.mode) == key}
            if all(i in by_prompt for i in range(num_turns)):
                by_mode.setdefault(key, {})[repetition] = [by_prompt[i] for i in range(num_turns)]
    return by_mode


def summary(key: Key, turns: Sequence[Turn], runs: Runs, plain: Runs) -> Summary:
    """The summary of one mode, compared with plain decoding."""
    figures = [each for name in GROUPS if (each := figure(name, turns, runs, plain)) is not None]
    by_name = {each.category: each for each in figures}
    tasks = [by_name[name] for name in (CONVERSATION, *TASKS) if name in by_name]
    categories = [by_name[name] for name in CATEGORIES if name in by_name]
    answers = [(turn, cell) for cells in runs.values() for turn, cell in zip(turns, cells, strict=True)]
    return Summary(
        *key,
        figures,
        speed_up=statistics.fmean(each.speed_up for each in tasks),
        geometric=geometric(each.speed_up for each in tasks),
        decoding=statistics.fmean(each.decoding for each in tasks),
        by_category=statistics.fmean(each.speed_up for each in categories),
        by_category_geometric=geometric(each.speed_up for each in categories),
        tokens_per_round=tokens_per_round(cell for _, cell in answers),
        num_different=sum(list(cell.answer.token_ids) != list(turn.answer_ids) for turn, cell in answers),
        num_answers=len(answers),
    )


def figure(name: str, turns: Sequence[Turn], runs: Runs, plain: Runs) -> Figure | None:
    """The figures of a category or task; None if it has no question."""
    places: dict[int, list[int]] = {}
    for i, turn in enumerate(turns):
        if name in (turn.category, turn.task):
            places.setdefault(turn.number, []).append(i)
    if not places:
        return None

    def speeds(time_s: Callable[[Cell], float]) -> tuple[float, float]:
        """The mean speed of the questions, and that of plain decoding."""
        pairs = [question_speed(indices, runs, plain, time_s) for indices in places.values()]
        return statistics.fmean(each[0] for each in pairs), statistics.fmean(each[1] for each in pairs)

    speed, plain_speed = speeds(total_s)
    decoded, plain_decoded = speeds(lambda cell: cell.answer.decode_s)
    cells = [cells[i] for cells in runs.values() for indices in places.values() for i in indices]
    ratio = decoded / plain_decoded if plain_decoded else 1.0
    return Figure(name, len(places), speed, speed / plain_speed, ratio, tokens_per_round(cells))


def question_speed(
    places: Sequence[int], runs: Runs, plain: Runs, time_s: Callable[[Cell], float]
) -> tuple[float, float]:
    """Tokens per second of one question, in this mode and with plain decoding; 0 if an answer took no time."""
    both = sorted(set(runs) & set(plain))
    num_tokens = sum(len(plain[both[0]][i].answer.token_ids) for i in places)
    times = {k: sum(time_s(runs[k][i]) for i in places) for k in both}
    plains = {k: sum(time_s(plain[k][i]) for i in places) for k in both}
    if not all(times.values()) or not all(plains.values()):
        return 0.0, 0.0
    plain_speed = num_tokens / statistics.median(plains.values())
    return plain_speed * statistics.median(plains[k] / times[k] for k in both), plain_speed


def total_s(cell: Cell) -> float:
    """The time of an answer, prefill included."""
    return cell.answer.prompt_s + cell.answer.decode_s


def tokens_per_round(cells: Iterable[Cell]) -> float | None:
    """The mean over all answers whose rounds were counted; None if there are none."""
    counted = [cell.answer for cell in cells if cell.answer.num_rounds]
    rounds = sum(answer.num_rounds or 0 for answer in counted)
    return sum(answer.num_decoded for answer in counted) / rounds if rounds else None


def geometric(values: Iterable[float]) -> float:
    """The geometric mean of at least one value; 0 if one of them is 0."""
    numbers = list(values)
    return math.exp(statistics.fmean(map(math.log, numbers))) if all(numbers) else 0.0


def distinct_by_task(turns: Sequence[Turn]) -> dict[str, float]:
    """The share of distinct 8-grams in plain decoding's answers, as the mean over each task's answers."""
    names = dict.fromkeys(turn.task for turn in turns)
    return {n: statistics.fmean(distinct_share(t.answer_ids) for t in turns if t.task == n) for n in names}


def markdown(by_mode: Sequence[Summary], turns: Sequence[Turn]) -> str:
    """The tables: all modes, speed-ups by category, tokens per round by category; and the share of distinct 8-grams."""
    heads = ["engine", "mode", "speed-up, mean of 6 tasks", "geometric mean", "decoding alone"]
    heads += ["mean of 13 categories", "geometric mean", "tokens per round", "answers that differ from plain's"]
    rows = []
    for each in by_mode:
        speeds = (each.speed_up, each.geometric, each.decoding, each.by_category, each.by_category_geometric)
        cells = [each.engine, each.mode, *(f"{speed:.2f}" for speed in speeds), number(each.tokens_per_round)]
        rows.append([*cells, f"{each.num_different} of {each.num_answers}"])
    speed_ups = by_category(by_mode, lambda figure: f"{figure.speed_up:.2f}")
    rounds = by_category(by_mode, lambda figure: number(figure.tokens_per_round))
    shares = ", ".join(f"{name} {share:.2f}" for name, share in distinct_by_task(turns).items())
    parts = [table(heads, rows), "Speed-up over forerun's plain decoding, prefill included:\n", speed_ups]
    return "\n".join([*parts, "Tokens per round:\n", rounds, f"Share of distinct 8-grams in the answers: {shares}.\n"])


def by_category(by_mode: Sequence[Summary], show: Callable[[Figure], str]) -> str:
    """A table with a row for each category and task, and a column for each mode."""
    rows = []
    for figures in zip(*(each.figures for each in by_mode), strict=True):
        name = figures[0].category
        shown = f"**{name}**" if name == CONVERSATION else name
        rows.append([shown, figures[0].num_questions, *map(show, figures)])
    return table(("category", "questions", *(f"{each.engine} {each.mode}" for each in by_mode)), rows)


def number(value: float | None) -> str:
    """The number with two decimals; an empty string for None."""
    return "" if value is None else f"{value:.2f}"
