"""Compares predictions with passes that this project measured, and with rounds that others published.

Published rounds are predicted with the tokens per round that their source gives, so that only times are compared. If a
source gives none, plain decoding is compared, and the table has the tokens per round that the speed-up would need.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.simulate.predict import DraftShape, Setting
from benchmarks.simulate.roofline import CARDS, Machine, Shape, config_named, drafter_of


def checked_pass(row: Mapping[str, Any]) -> dict[str, Any]:
    """A pass that this project measured, in milliseconds, with the prediction and its relative error."""
    shape = Shape.of(config_named(row["target"]))
    predicted = 1e3 * Machine(CARDS[row["card"]]).pass_s(shape, row["tokens"], 1, row["context"])
    return {**row, "predicted": predicted, "error": predicted / row["ms"] - 1}


def checked_round(row: Mapping[str, Any]) -> dict[str, Any]:
    """A published round with the prediction for its depth.

    If the source gives no tokens per round, the prediction assumes that all draft tokens are accepted.
    """
    config, machine = config_named(row["target"]), Machine(CARDS[row["card"]], row["cards"], row["bits"])
    setting = Setting(machine, Shape.of(config), drafter_of(row["draft"], config), row["alone"], row["context"])
    depth, batch, plain, drafted = row["depth"], row["batch"], row["plain"], row["drafted"]
    tokens, speed_up = row["tokens per round"] or 1 + depth, drafted and drafted / plain
    survival = ((tokens - 1) / depth,) * depth  # at a fixed depth only the sum matters
    predicted = setting.predict(batch, [DraftShape(survival, row["draft tokens"], row["width"])], free=False)
    known = bool(speed_up and row["tokens per round"])
    return {
        **{name: value for name, value in row.items() if name not in ("drafted", "remark")},
        "plain predicted": predicted.plain_tokens_per_s,
        "plain error": predicted.plain_tokens_per_s / plain - 1,
        "speed-up": speed_up,
        "predicted": predicted.speed_up if known else None,
        "error": predicted.speed_up / speed_up - 1 if known else None,
        "tokens needed": speed_up and speed_up * tokens / predicted.speed_up,
        "remark": row["remark"],
    }


def check() -> Mapping[str, Sequence[dict[str, Any]]]:
    """All rows of `measured.json`, compared with predictions."""
    measured = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))
    return {"passes": [*map(checked_pass, measured["passes"])], "rounds": [*map(checked_round, measured["rounds"])]}


def check_text(checked: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Both tables in Markdown, and the medians of the absolute errors."""
    medians = []
    for name, rows, key in (("passes", "passes", "error"), ("plain", "rounds", "plain error"), ("", "rounds", "error")):
        errors = [abs(row[key]) for row in checked[rows] if row[key] is not None]
        medians.append(f"{name or 'speed-ups'} {statistics.median(errors):.0%} (worst {max(errors):.0%})")
    return "\n\n".join((*map(markdown, checked.values()), f"Median absolute errors: {', '.join(medians)}."))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of rows that all have the keys of the first one."""
    names = [name.replace("_", " ") for name in rows[0]]
    return table(names, ([cell(*item) for item in row.items()] for row in rows)).rstrip("\n")


def cell(name: str, value: Any) -> str:
    """The text of a value in the table."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:+.0%}" if "error" in name else f"{value:.0f}" if value >= 100 else f"{value:.3g}"
