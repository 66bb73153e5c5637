"""Speed-ups and tokens per second on machines that are not here: computed, or from costs that an engine kept.

    python -m benchmarks.simulate --target llama-3.1-70b --draft eagle3 model:llama-3.2-1b --card H100 B200 --cards 1 8
    python -m benchmarks.simulate --costs ~/.cache/forerun/times/rounds-….json --batch 1 8
    python -m benchmarks.simulate --check

A pass takes what its bytes and operations take by a card's datasheet (`roofline.py`); the depth is what the engine's
controller chooses by that. `--acceptance` is the chance of a guess to be accepted, by depth (0.8,0.7, the last for all
that follow), tokens per round at a depth (4.78@7), or a file of kept costs. `--check` compares with what was measured.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.options import option, options_of
from benchmarks.simulate.check import check, check_text, markdown
from benchmarks.simulate.predict import Prediction, Setting, chain, kept_controller, kept_prediction, tree
from benchmarks.simulate.roofline import CARDS, Machine, Shape, config_named, drafter_of

from forerun.config import AUTO_DEPTH
from forerun.economy import expected_tokens

TREES = ((4, 4, 8), (6, 4, 16), (8, 8, 32), (8, 8, 64))  # depth, children of a node, guesses


def acceptance(text: str) -> Sequence[float]:
    """a_j by depth, as `--acceptance` spells them. SystemExit for anything else."""
    try:
        if Path(text).is_file():
            return kept_controller(Path(text)).drafters.all[0].evidence.rates()
        tokens, _, depth = text.partition("@")
        if not depth:
            rates = [float(each) for each in text.split(",")]
        else:  # alike at every depth
            tokens_by_rate = [expected_tokens([n / 1000] * int(depth), int(depth)) for n in range(1001)]
            rates = [bisect_left(tokens_by_rate, float(tokens)) / 1000]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise SystemExit(f"--acceptance {text}: use chances from 0 to 1 such as 0.8,0.7, or 4.78@7, or a kept file")
    return rates


def computed(options: Options) -> Iterator[dict[str, Any]]:
    """Every combination of what was asked for; no numbers where weights and caches do not fit."""
    rates = acceptance(options.acceptance)
    guesses = [chain(rates, AUTO_DEPTH), *(tree(rates, *shape, options.spread) for shape in TREES if options.trees)]
    asked = (options.target, options.draft, options.draft_cards, options.card, options.cards, options.batch)
    for target, draft, on, card, num_cards, batch in product(*asked):
        config, machine, alone = config_named(target), Machine(CARDS[card], num_cards, options.bits), on == "one"
        setting = Setting(machine, Shape.of(config), drafter_of(draft, config), alone, options.context)
        row = {"cards": f"{num_cards} × {card}", "target": target, "draft": draft + " on one card" * alone}
        nothing = dict.fromkeys(column.name for column in fields(Prediction))
        yield row | {"batch": batch} | (asdict(setting.predict(batch, guesses)) if setting.fits(batch) else nothing)


def positive(text: str) -> int:
    """A whole number above 0. ValueError for anything else, which the parser reports."""
    if int(text) < 1:
        raise ValueError
    return int(text)


@dataclass(slots=True)
class Options:
    """What is predicted."""

    target: Sequence[str] = option(
        ("llama-3.1-70b",), "models of datasheets.json, or folders with a config.json", nargs="+"
    )
    draft: Sequence[str] = option(("eagle3",), "model:NAME, eagle3, eagle or ngram", nargs="+")
    draft_cards: Sequence[str] = option(
        ("all",), "cards that the drafter uses", nargs="+", choices=("all", "one"), type=str
    )
    card: Sequence[str] = option(("H100",), "kinds of GPUs", nargs="+", choices=CARDS)
    cards: Sequence[int] = option((8,), "GPUs that share the target", nargs="+", type=positive)
    batch: Sequence[int] = option((1, 8, 64), "sequences at once", nargs="+", type=positive)
    acceptance: str = option("0.75", "as above; default: %(default)s")
    spread: float = option(0.5, "exponent of the chance that likelier siblings miss; see predict.py")
    context: int = option(2048, "tokens before the round; default: %(default)s", type=positive)
    bits: int = option(16, "bits of a weight", choices=(16, 8))
    trees: bool = option(False, "trees may be chosen, too")
    costs: Path | None = option(None, "a file of costs that an engine kept, instead of a card")
    check: bool = option(False, "compare predictions with measured and published figures")
    output: Path | None = option(None, "a JSON file to write; the tables are written beside it, as .md")


def main() -> int:
    """Predict and print."""
    options = options_of(Options)
    if options.check:
        content: Mapping[str, Any] = check()
        text = check_text(content)
    else:
        kept = kept_controller(options.costs) if options.costs else None
        content = {"rows": [kept_prediction(kept, n) for n in options.batch] if kept else list(computed(options))}
        text = markdown(content["rows"])
    print(text)
    if options.output:
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
