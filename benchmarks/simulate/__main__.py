"""Predicts speed-ups and tokens per second on other machines, from datasheets or from costs that an engine saved.

    python -m benchmarks.simulate --target llama-3.1-70b --draft eagle3 model:llama-3.2-1b --card H100 B200 --cards 1 8
    python -m benchmarks.simulate --costs ~/.cache/forerun/times/rounds-….json --batch 1 8
    python -m benchmarks.simulate --check

The time of a pass follows from its bytes and operations and a card's datasheet (`roofline.py`); the engine's controller
chooses the depth from these times. `--acceptance` gives acceptance rates by depth (0.8,0.7; the last one holds for all
greater depths), tokens per round at a depth (4.78@7), or a file of saved costs. `--check` compares predictions with
measured figures.
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
from benchmarks.simulate.predict import Prediction, Setting, chain, saved_controller, saved_prediction, tree
from benchmarks.simulate.roofline import CARDS, Machine, Shape, config_named, drafter_of

from forerun.config import AUTO_DEPTH
from forerun.economy import expected_tokens

TREES = ((4, 4, 8), (6, 4, 16), (8, 8, 32), (8, 8, 64))  # depth, children of a node, draft tokens


def acceptance(text: str) -> Sequence[float]:
    """Acceptance rates by depth, from the value of `--acceptance`. Raises SystemExit for anything else."""
    try:
        if Path(text).is_file():
            return saved_controller(Path(text)).drafters.all[0].evidence.rates()
        tokens, _, depth = text.partition("@")
        if not depth:
            rates = [float(each) for each in text.split(",")]
        else:  # the same rate at every depth
            tokens_by_rate = [expected_tokens([n / 1000] * int(depth), int(depth)) for n in range(1001)]
            rates = [bisect_left(tokens_by_rate, float(tokens)) / 1000]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise SystemExit(f"--acceptance {text}: use rates from 0 to 1 such as 0.8,0.7, or 4.78@7, or a rounds-….json")
    return rates


def computed(options: Options) -> Iterator[dict[str, Any]]:
    """A row for every combination of the options; without numbers if weights and caches do not fit into the memory."""
    rates = acceptance(options.acceptance)
    shapes = [chain(rates, AUTO_DEPTH), *(tree(rates, *shape, options.spread) for shape in TREES if options.trees)]
    axes = (options.target, options.draft, options.draft_cards, options.card, options.cards, options.batch)
    for target, draft, on, card, num_cards, batch in product(*axes):
        config, machine, alone = config_named(target), Machine(CARDS[card], num_cards, options.bits), on == "one"
        setting = Setting(machine, Shape.of(config), drafter_of(draft, config), alone, options.context)
        row = {"cards": f"{num_cards} × {card}", "target": target, "draft": draft + " on one card" * alone}
        nothing = dict.fromkeys(column.name for column in fields(Prediction))
        yield row | {"batch": batch} | (asdict(setting.predict(batch, shapes)) if setting.fits(batch) else nothing)


def positive(text: str) -> int:
    """A positive integer. Raises ValueError for anything else, which the parser reports."""
    if int(text) < 1:
        raise ValueError
    return int(text)


@dataclass(slots=True)
class Options:
    """The options of the command."""

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
    acceptance: str = option("0.75", "acceptance rates, as described above; default: %(default)s")
    spread: float = option(0.5, "how fast the acceptance rates of siblings fall; see `tree` in predict.py")
    context: int = option(2048, "tokens before the round; default: %(default)s", type=positive)
    bits: int = option(16, "bits of a weight", choices=(16, 8))
    trees: bool = option(False, "let the controller choose trees too")
    costs: Path | None = option(None, "a file of costs that an engine saved, instead of a card")
    check: bool = option(False, "compare predictions with measured and published figures")
    output: Path | None = option(None, "a JSON file to write; the tables are written next to it, as .md")


def main() -> int:
    """Print the predictions or the check, and write them to `--output`."""
    options = options_of(Options)
    if options.check:
        content: Mapping[str, Any] = check()
        text = check_text(content)
    else:
        saved = saved_controller(options.costs) if options.costs else None
        content = {"rows": [saved_prediction(saved, n) for n in options.batch] if saved else list(computed(options))}
        text = markdown(content["rows"])
    print(text)
    if options.output:
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
