"""From answers to tables: rates, ratios within repetitions, their medians and quartiles, and how equal the texts are.

This file decides what is compared: a mode's rate in a repetition is all its decoded tokens over all their time; its
ratio is that of forerun's best mode of the class, in the same repetition, to its own.
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
INDENT = " " * 4  # of what is shown as it was printed
Repetitions = Mapping[int, Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Row:
    """One engine in one mode. `ratio` is forerun's best over this; `equal_tokens` and `distinct` are by prompt."""

    engine: str
    mode: str
    num_repetitions: int
    tokens_per_s: Spread | None
    ratio: Spread | None
    prompt_s: float
    equal_tokens: Sequence[int]
    distinct: Sequence[float]


def rate(cells: Sequence[Cell]) -> float:
    """Decoded tokens per second; 0 where all came at once."""
    decode_s = sum(cell.answer.decode_s for cell in cells)
    return sum(cell.answer.num_decoded for cell in cells) / decode_s if decode_s else 0.0


def rates(repetitions: Repetitions) -> dict[tuple[str, str], dict[int, float]]:
    """By engine and mode: the rate in each repetition that has all prompts of it."""
    num_prompts = 1 + max((cell.prompt for cells in repetitions.values() for cell in cells), default=0)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for repetition, cells in repetitions.items():
        for key in dict.fromkeys((cell.engine, cell.mode) for cell in cells):
            own = [cell for cell in cells if (cell.engine, cell.mode) == key]
            if len(own) == num_prompts:
                found.setdefault(key, {})[repetition] = rate(own)
    return found


def rows(repetitions: Repetitions) -> list[Row]:
    """One row per engine and mode, in the order in which they first appear."""
    found = rates(repetitions)
    ours = {key: each for key, each in found.items() if key[0] == OURS}
    best = max(ours.values(), key=lambda each: statistics.median(each.values()), default={})
    plain = texts(repetitions, (OURS, "plain"))
    return [row(repetitions, key, each, best, plain) for key, each in found.items()]


def row(
    repetitions: Repetitions,
    key: tuple[str, str],
    own: Mapping[int, float],
    best: Mapping[int, float],
    plain: Mapping[int, Sequence[int]],
) -> Row:
    """One engine and mode, against the rates of forerun's best mode and the texts of its plain one."""
    ratios = [best[i] / own[i] for i in own if i in best and own[i]]
    said = texts(repetitions, key)
    times = [c.answer.prompt_s for cells in repetitions.values() for c in cells if (c.engine, c.mode) == key]
    return Row(
        engine=key[0],
        mode=key[1],
        num_repetitions=len(own),
        tokens_per_s=Spread.of(own.values()),
        ratio=Spread.of(ratios),
        prompt_s=statistics.median(times),
        equal_tokens=[equal_tokens(said[i], plain[i]) for i in said if i in plain],
        distinct=[distinct_share(text) for text in said.values()],
    )


def texts(repetitions: Repetitions, key: tuple[str, str]) -> dict[int, Sequence[int]]:
    """By prompt: the tokens of the last repetition."""
    cells = [c for i in sorted(repetitions) for c in repetitions[i] if (c.engine, c.mode) == key]
    return {cell.prompt: cell.answer.token_ids for cell in sorted(cells, key=lambda cell: cell.prompt)}


def equal_tokens(text: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def distinct_share(text: Sequence[int]) -> float:
    """Different 8-grams over all 8-grams: 1 where nothing repeats itself, and where the text is shorter."""
    ngrams = [tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def markdown(title: str, rows: Sequence[Row], failures: Sequence[Failure]) -> str:
    """A class as a Markdown table; what failed has rows too, and its last words below."""
    heads = ("engine", "mode", "tokens/s", "quartiles", "forerun's best / this", "quartiles", "prompt, s")
    failed = [(each.engine, each.mode, "failed: see below", *[""] * 6) for each in failures]
    shown = table((*heads, "equal tokens", "distinct 8-grams"), [*map(cells, rows), *failed])
    words = [f"{each.engine}, {each.mode}:\n\n{indent(each.reason, INDENT)}\n" for each in failures]
    return "\n".join([f"### {title}", "", shown, *words])


def cells(row: Row) -> list[str]:
    """The cells of one row."""
    equal, distinct = " ".join(map(str, row.equal_tokens)), " ".join(f"{share:.2f}" for share in row.distinct)
    speed, ratio = spread_cells(row.tokens_per_s, ".1f"), spread_cells(row.ratio)
    return [row.engine, row.mode, *speed, *ratio, f"{row.prompt_s:.2f}", equal, distinct]
