"""Computes tables from answers: rates, ratios within repetitions, medians and quartiles, and equal leading tokens.

A mode's rate in a repetition is the number of its decoded tokens over the time of decoding. Its ratio is the rate of
forerun's best mode of the class over its own rate, both in the same repetition.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from textwrap import indent

from benchmarks.markdown import spread_cells, table
from benchmarks.peers.state import Cell, Failure

from forerun.bench.figures import Spread

OURS = "forerun"
NGRAM = 8
INDENT = " " * 4  # of error output, which Markdown then shows as code
Repetitions = Mapping[int, Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one engine in one mode.

    `ratio` is the rate of forerun's best mode over this one; `equal_tokens` and `distinct` have a value per prompt.
    """

    engine: str
    mode: str
    num_repetitions: int
    tokens_per_s: Spread | None
    ratio: Spread | None
    prompt_s: float
    equal_tokens: Sequence[int]
    distinct: Sequence[float]


def rate(cells: Sequence[Cell]) -> float:
    """Decoded tokens per second; 0 if all tokens arrived at once."""
    decode_s = sum(cell.answer.decode_s for cell in cells)
    return sum(cell.answer.num_decoded for cell in cells) / decode_s if decode_s else 0.0


def rates(repetitions: Repetitions) -> dict[tuple[str, str], dict[int, float]]:
    """By engine and mode: the rate in each repetition in which all prompts were answered."""
    num_prompts = 1 + max((cell.prompt for cells in repetitions.values() for cell in cells), default=0)
    by_mode: dict[tuple[str, str], dict[int, float]] = {}
    for repetition, cells in repetitions.items():
        for key in dict.fromkeys((cell.engine, cell.mode) for cell in cells):
            cells_of_mode = [cell for cell in cells if (cell.engine, cell.mode) == key]
            if len(cells_of_mode) == num_prompts:
                by_mode.setdefault(key, {})[repetition] = rate(cells_of_mode)
    return by_mode


def rows(repetitions: Repetitions) -> list[Row]:
    """One row per engine and mode, in the order in which they first appear."""
    by_mode = rates(repetitions)
    ours = {key: each for key, each in by_mode.items() if key[0] == OURS}
    best = max(ours.values(), key=lambda each: statistics.median(each.values()), default={})
    plain = texts(repetitions, (OURS, "plain"))
    return [row(repetitions, key, each, best, plain) for key, each in by_mode.items()]


def row(
    repetitions: Repetitions,
    key: tuple[str, str],
    own: Mapping[int, float],
    best: Mapping[int, float],
    plain: Mapping[int, Sequence[int]],
) -> Row:
    """The row of one engine and mode, compared with the rates of forerun's best mode and the texts of its plain one."""
    ratios = [best[i] / own[i] for i in own if i in best and own[i]]
    answers = texts(repetitions, key)
    times = [c.answer.prompt_s for cells in repetitions.values() for c in cells if (c.engine, c.mode) == key]
    return Row(
        engine=key[0],
        mode=key[1],
        num_repetitions=len(own),
        tokens_per_s=Spread.of(own.values()),
        ratio=Spread.of(ratios),
        prompt_s=statistics.median(times),
        equal_tokens=[equal_tokens(answers[i], plain[i]) for i in answers if i in plain],
        distinct=[distinct_share(text) for text in answers.values()],
    )


def texts(repetitions: Repetitions, key: tuple[str, str]) -> dict[int, Sequence[int]]:
    """The tokens of the last repetition's answers, by prompt."""
    cells = [c for i in sorted(repetitions) for c in repetitions[i] if (c.engine, c.mode) == key]
    return {cell.prompt: cell.answer.token_ids for cell in sorted(cells, key=lambda cell: cell.prompt)}


def equal_tokens(text: Sequence[int], other: Sequence[int]) -> int:
    """The number of leading tokens that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def distinct_share(text: Sequence[int]) -> float:
    """The share of distinct 8-grams: 1 if none is repeated, and for texts of fewer than 8 tokens."""
    ngrams = [tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def markdown(title: str, rows: Sequence[Row], failures: Sequence[Failure]) -> str:
    """The Markdown table of a class; failures have a row each, and their error output is below the table."""
    heads = ("engine", "mode", "tokens/s", "quartiles", "forerun's best / this", "quartiles", "prompt, s")
    failed = [(each.engine, each.mode, "failed: see below", *[""] * 6) for each in failures]
    shown = table((*heads, "equal tokens", "distinct 8-grams"), [*map(cells, rows), *failed])
    reasons = [f"{each.engine}, {each.mode}:\n\n{indent(each.reason, INDENT)}\n" for each in failures]
    return "\n".join([f"### {title}", "", shown, *reasons])


def cells(row: Row) -> list[str]:
    """The texts of one row's cells."""
    equal, distinct = " ".join(map(str, row.equal_tokens)), " ".join(f"{share:.2f}" for share in row.distinct)
    speed, ratio = spread_cells(row.tokens_per_s, ".1f"), spread_cells(row.ratio)
    return [row.engine, row.mode, *speed, *ratio, f"{row.prompt_s:.2f}", equal, distinct]
